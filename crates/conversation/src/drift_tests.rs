//! Tests of drift with templates that treat the past in all the ways that published ones do.

use std::sync::Arc;

use levade_text::ChatOptions;
use levade_text::testing::{
    ALWAYS_THINKS, NUMBERED, STRICT, header_chat, sampled, thoughtful, tiny_chat,
};

use super::*;
use crate::format::CompletionRound;
use crate::testing::chat;
use crate::{Format, Options};

/// Returns the drift of a conversation with one completion. The search near the completion must
/// find the same.
fn after(chat: Chat, completion: &str, new: &[Message]) -> Option<(String, String)> {
    let history = [Message::user("1+1?")];
    let ids = sampled(&chat, completion);
    let prompt = chat.prompt(&history, &[]).unwrap();
    let context = chat.continuation(&history, &ids, new, &[]).unwrap();
    let sequence = [prompt, ids.clone(), context.clone()].concat();
    let format = Format::new(Arc::new(chat), Options::default());
    let past = history.map(Arc::new);
    let round = CompletionRound {
        past: &past,
        completion: &ids,
        text: completion,
        rest: "",
        new,
        tools: &[],
    };
    let drift = format.full_drift(&sequence, round);
    if format.can_abridge() {
        let near = format.nearby_drift(round, &context);
        assert_eq!(texts_of(&near), texts_of(&drift));
    }
    drift.map(|drift| {
        assert_ne!(drift.prompt.unwrap(), sequence);
        (drift.recorded, drift.printed)
    })
}

fn texts_of(drift: &Option<Drift>) -> Option<(String, String)> {
    drift.clone().map(|drift| (drift.recorded, drift.printed))
}

#[test]
fn empty_reasoning_of_prompt_is_drift() {
    let (recorded, printed) =
        after(thoughtful(false).unwrap(), "<tool_call>…", &[Message::tool("2")]).unwrap();
    assert!(recorded.starts_with("<think>\n\n</think>\n\n<tool_call>…"), "{recorded}");
    assert!(printed.starts_with("<tool_call>…<|im_end|>"), "{printed}");
}

#[test]
fn written_or_parsed_completion_is_not_drift() {
    // Renders reasoning only from its own field.
    const FIELD: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
        {%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
        {{- m.content.split('</think>')[0] + '<|im_end|>' }}
    {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
    // Renders a space before a completion. The generation prompt leaves this space to the model.
    const SPACED: &str =
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}
    {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}";
    let user = [Message::user("2+2?")];
    let after = |template, completion: &str| {
        after(chat(template, ChatOptions::default()), completion, &user)
    };
    assert_eq!(after(FIELD, "<think>hm</think>two"), None);
    assert_eq!(after(FIELD, "two"), None);
    assert!(after(FIELD, "<think> hm </think>two").is_some());
    assert_eq!(after(SPACED, " two"), None);
    assert!(after(SPACED, "two").is_some());
}

#[test]
fn dropped_or_changed_reasoning_is_drift() {
    let tool = [Message::tool("2")];
    let user = [Message::user("2+2?")];
    assert!(!drifts("two", &tool) && !drifts("two", &user));
    assert!(!drifts("<think>\nhm\n</think>\n\ntwo", &tool));
    assert!(drifts("<think>\nhm\n</think>\n\ntwo", &user));
    assert!(drifts("<think>\n\n</think>\n\ntwo", &tool));
    let chat = || chat(ALWAYS_THINKS, ChatOptions::default());
    assert_eq!(after(chat(), "hm</think>two", &user).unwrap().0[..10], *"<think>\nhm");
    // White space was trimmed, and rounds were numbered.
    assert!(after(self::chat(NUMBERED, ChatOptions::default()), "two", &user).is_some());
    assert!(
        after(header_chat().unwrap(), " two", &user).is_some()
            && after(header_chat().unwrap(), "two", &user).is_none()
    );
    assert_eq!(after(tiny_chat().unwrap(), " <think>two\n", &tool), None);
}

fn drifts(completion: &str, new: &[Message]) -> bool {
    after(thoughtful(true).unwrap(), completion, new).is_some()
}

#[test]
fn rejecting_template_is_drift_without_prompt() {
    let chat = chat(STRICT, ChatOptions::default());
    let question = Message::user("1+1?");
    let completion = Message::assistant("<think>");
    let drift = Drift::find(&chat, &[], &[question.clone(), completion, question], &[]).unwrap();
    assert!(drift.prompt.is_none() && drift.printed.contains("not liked"), "{drift:?}");
    assert_eq!(drift.to_record(3, false).turn, 3);
}

#[test]
fn drift_shows_excerpt_at_difference() {
    let chat = tiny_chat().unwrap();
    let shown = |recorded: &str, message: &str| {
        let messages = [Message::user(message)];
        let drift = Drift::find(&chat, &chat.tokenizer().encode_template(recorded), &messages, &[])
            .unwrap();
        (drift.recorded, drift.printed)
    };
    let long = "x".repeat(100);
    let (recorded, printed) = shown(&format!("<|im_start|>user\n{long}a"), &format!("{long}b"));
    // The line is too long to be shown from its start.
    assert_eq!((recorded.as_str(), &printed[..2]), ("a", "b<"));
    let (recorded, printed) = shown(&format!("<|im_start|>user\nab{long}"), "abc");
    assert_eq!(recorded, format!("ab{}…", "x".repeat(58)));
    assert!(printed.starts_with("abc<|im_end|>"), "{printed}");
    // One text is a prefix of the other.
    assert_eq!(shown("<|im_start|>user\n", "a").0, "");
}
