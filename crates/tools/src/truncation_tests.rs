use proptest::prelude::*;

use super::*;
use crate::CallError;

fn chat() -> Arc<Chat> {
    Arc::new(levade_text::testing::tiny_chat().unwrap())
}

fn by_characters(max: usize, side: OmittedPart) -> ResultTruncation {
    ResultTruncation { characters: Some(max), tokens: None, side }
}

#[test]
fn truncate_counts_omitted_characters_on_each_side() {
    let line = "[… 4 characters are left out here …]";
    assert_eq!(truncated(4, OmittedPart::Right), Some(format!("äbcd\n{line}")));
    assert_eq!(truncated(4, OmittedPart::Left), Some(format!("{line}\nefgh")));
    assert_eq!(truncated(4, OmittedPart::Middle), Some(format!("äb\n{line}\ngh")));
    assert_eq!(truncated(8, OmittedPart::Middle), None);
    assert_eq!(
        truncated(0, OmittedPart::Middle),
        Some("[… 8 characters are left out here …]".into())
    );
    assert_eq!(
        by_characters(3, OmittedPart::Right)
            .truncate("ab\ncd")
            .unwrap()
            .lines()
            .nth(1)
            .unwrap()
            .chars()
            .next(),
        Some('[')
    );
}

fn truncated(max: usize, side: OmittedPart) -> Option<String> {
    by_characters(max, side).truncate("äbcdefgh")
}

#[test]
fn truncation_token_limit_uses_model_tokenizer() {
    let chat = chat();
    let text = "The answer is 42 and more, naïve 😀 words come here.\n".repeat(40);
    for side in [OmittedPart::Left, OmittedPart::Right, OmittedPart::Middle] {
        let truncation =
            ResultTruncation { characters: None, tokens: Some((50, Arc::clone(&chat))), side };
        let shortened = truncation.truncate(&text).unwrap();
        let (before, rest) = shortened.split_once("[… ").unwrap();
        let after = rest.split_once("…]").unwrap().1;
        let kept = chat.tokenizer().encode(before.trim_end_matches('\n')).len()
            + chat.tokenizer().encode(after.trim_start_matches('\n')).len();
        assert!((44..=52).contains(&kept), "{side:?}: {kept}");
        assert!(
            text.starts_with(before.trim_end()) && text.ends_with(after.trim_start()),
            "{shortened}"
        );
    }
    let all = chat.tokenizer().encode(&text).len();
    let truncation = |max| ResultTruncation {
        characters: None,
        tokens: Some((max, Arc::clone(&chat))),
        side: OmittedPart::Right,
    };
    assert_eq!(truncation(all).truncate(&text), None);
    assert!(truncation(all - 1).truncate(&text).is_some());
}

#[test]
fn tighter_of_two_truncation_limits_applies() {
    let text = "word ".repeat(1000);
    assert_eq!(
        both_limits(10).truncate(&text),
        by_characters(10, OmittedPart::Right).truncate(&text)
    );
    assert_eq!(
        both_limits(4000).truncate(&text),
        ResultTruncation { characters: None, ..both_limits(0) }.truncate(&text)
    );
}

fn both_limits(characters: usize) -> ResultTruncation {
    ResultTruncation {
        characters: Some(characters),
        tokens: Some((20, chat())),
        side: OmittedPart::Right,
    }
}

#[test]
fn truncate_output_truncates_errors_and_keeps_other_parts() {
    let image = Value::from_iter([("type".to_owned(), Value::from("image_url"))]);
    let Value::Object(image) = image else { panic!() };
    let output = ToolOutput {
        parts: vec![
            ContentPart::Text("abc".into()),
            ContentPart::Other(image.clone()),
            ContentPart::Text("defghi".into()),
        ],
        reward: Some(1.0),
        ..ToolOutput::error(CallError::Failed, "")
    };
    let of = by_characters(4, OmittedPart::Middle).truncate_output(output.clone());
    let text = ContentPart::Text("ab\n[… 5 characters are left out here …]\nhi".into());
    assert_eq!(of, ToolOutput { parts: vec![text, ContentPart::Other(image)], ..output.clone() });
    assert_eq!(by_characters(9, OmittedPart::Middle).truncate_output(output.clone()), output);
}

proptest! {
    #[test]
    fn truncate_keeps_any_text_valid_and_within_limits(
        text in "\\PC{0,200}", max_characters in 0usize..60, tokens in 0usize..30, side in 0..3,
    ) {
        let side = [OmittedPart::Left, OmittedPart::Right, OmittedPart::Middle][side as usize];
        let truncation = ResultTruncation { characters: Some(max_characters), tokens: Some((tokens, chat())), side };
        match truncation.truncate(&text) {
            None => prop_assert!(text.chars().count() <= max_characters),
            Some(shortened) => {
                let marker = shortened.split_once("[… ").map(|(before, rest)| (before, rest.split_once(" …]").unwrap()));
                let (before, (note, after)) = marker.unwrap();
                let omitted: usize = note.split(' ').next().unwrap().parse().unwrap();
                let kept = text.chars().count() - omitted;
                let breaks = before.ends_with('\n') as usize + after.starts_with('\n') as usize;
                let there = before.chars().count() + after.chars().count();
                prop_assert!(kept <= max_characters && kept <= there && there <= kept + breaks);
            }
        }
    }
}
