//! Tests of completions that clients rewrite: without their text, with other arguments, with text
//! appended.

use levade_text::testing::tiny_chat;
use levade_text::{ChatOptions, ToolCall};
use levade_tree::Kind;
use serde_json::json;

use super::tests::fork_origin;
use super::*;
use crate::testing::{ROUNDS, Talk, chat, completion, tool};
use crate::{CompletionMatching, Options, Reason};

const CALL: &str = "Let me see.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": \"12 * 3\"}}\n</tool_call>";

fn talk(completions: CompletionMatching) -> Talk {
    let options = Options {
        call_ids: CallIds::Unique,
        completion_matching: completions,
        ..Options::default()
    };
    let mut talk = Talk::new(tiny_chat().unwrap(), options);
    talk.tools = vec![tool("add")];
    talk
}

fn result(call: &ToolCall) -> Message {
    Message { tool_call_id: Some(call.id.clone()), ..Message::tool("36") }
}

type Change = fn(&mut Message);

/// Changes after which a completion with a call counts as the same, and the reason of the fork
/// without lenience.
const REWRITTEN: [(Change, Reason); 6] = [
    (|m| m.content = "".into(), Reason::TextLost),
    (|m| m.content = " \n".into(), Reason::TextLost),
    (
        |m| drop(m.tool_calls[0].arguments.insert("request".into(), json!("add"))),
        Reason::CallsEdited,
    ),
    (|m| drop(m.tool_calls[0].arguments.insert("a".into(), json!("12*3"))), Reason::CallsEdited),
    (
        |m| {
            m.content = "".into();
            m.tool_calls[0].arguments.insert("b".into(), json!(null));
        },
        Reason::CallsEdited,
    ),
    (
        |m| {
            m.reasoning_content = Some("Never thought.".into());
            m.content = "".into();
        },
        Reason::TextLost,
    ),
];

#[test]
fn rewritten_completion_is_continued_and_counted() {
    for (change, reason) in REWRITTEN {
        for completions in [CompletionMatching::Lenient, CompletionMatching::Strict] {
            let mut talk = talk(completions);
            let mut messages = vec![Message::user("12*3?")];
            let (_, completion) = talk.prepare_and_record(&messages, CALL);
            let mut sent = completion.message();
            change(&mut sent);
            messages.extend([sent, result(&completion.message().tool_calls[0])]);
            let (prepared, second) = talk.prepare_and_record(&messages, "36.");
            if completions == CompletionMatching::Strict {
                assert_eq!(prepared.origin, fork_origin(1, reason));
                continue;
            }
            assert_eq!(
                (prepared.origin, prepared.repeated.altered),
                (Origin::Continued, 1),
                "{reason:?}"
            );
            // The tokens are those that were sampled.
            assert!(
                prepared.prompt.starts_with(
                    &talk.conversation.trajectory().sequence_tokens(completion.segment)
                )
            );
            assert_eq!(talk.conversation.counts().altered, 1);
            // Later prompts repeat both completions.
            messages.extend([second.message(), Message::user("Sure?")]);
            let prepared = talk.prepare(&messages);
            assert_eq!(
                (prepared.origin, prepared.repeated.up_to_completion),
                (Origin::Continued, 4)
            );
            assert_eq!(talk.conversation.finish(), []);
        }
    }
}

#[test]
fn edited_completion_with_call_ids_forks() {
    let edits: [(Change, Reason); 7] = [
        (|m| m.content = "Let us see.".into(), Reason::CompletionEdited),
        (|m| m.content = "Let me".into(), Reason::CompletionEdited),
        (
            |m| drop(m.tool_calls[0].arguments.insert("a".into(), json!("12 * 4"))),
            Reason::CallsEdited,
        ),
        (|m| drop(m.tool_calls[0].arguments.remove("a")), Reason::CallsEdited),
        (|m| m.tool_calls[0].name = "sub".into(), Reason::CallsEdited),
        (
            |m| {
                m.content = "".into();
                m.tool_calls[0].arguments.insert("a".into(), json!("13 * 3"));
            },
            Reason::CallsEdited,
        ),
        (
            |m| {
                m.tool_calls[0].arguments.insert("b".into(), json!(1));
                m.tool_calls[0].id = "another".into();
            },
            Reason::CallsEdited,
        ),
    ];
    for (edit, reason) in edits {
        let mut talk = talk(CompletionMatching::Lenient);
        let mut messages = vec![Message::user("12*3?")];
        let (_, completion) = talk.prepare_and_record(&messages, CALL);
        let mut sent = completion.message();
        edit(&mut sent);
        messages.extend([sent, result(&completion.message().tool_calls[0])]);
        let prepared = talk.prepare(&messages);
        assert_eq!(
            (prepared.origin, prepared.repeated.up_to_completion),
            (fork_origin(1, reason), 0)
        );
    }
}

#[test]
fn rewritten_call_continues_only_its_own_history() {
    let mut talk = talk(CompletionMatching::Lenient);
    let first = vec![Message::user("12*3?")];
    let second = vec![Message::user("12 * 3?")];
    let (_, completion) = talk.prepare_and_record(&first, CALL);
    talk.prepare_and_record(&second, CALL);
    let mut sent = completion.message();
    sent.content = "".into();
    let messages = [second, vec![sent, result(&completion.message().tool_calls[0])]].concat();
    // The id belongs to the other conversation's completion.
    let origin = talk.prepare(&messages).origin;
    assert!(matches!(origin, Origin::Forked(Fork { at: 1, .. })), "{origin:?}");
}

#[test]
fn appended_text_becomes_context_after_sampled_tokens() {
    for template in ["chatml", ROUNDS] {
        for (recorded_completion, ends, sent) in [
            ("x = 1\n", true, "x = 1\n</code>\nCalling tools:"),
            ("x = 1\n", true, "x = 1</code>"),
            ("<think>Hm.</think>x = 1", true, "x = 1</code>"),
            ("x = 1\n</code>", false, "x = 1\n</code>\nCalling tools:"),
            ("x = 1", true, "x = 1 <|im_end|> y"),
        ] {
            let options = Options { call_ids: CallIds::Unique, ..Options::default() };
            let mut talk = Talk::new(chat(template, ChatOptions::default()), options);
            let question = Message::user("1?");
            let prepared = talk.prepare(std::slice::from_ref(&question));
            let mut tokens = talk.format.chat().tokenizer().encode(recorded_completion);
            tokens.extend(talk.format.chat().stop_ids().first().filter(|_| ends));
            let start = prepared.prompt.clone();
            let params = SamplingParams::default();
            let first =
                talk.conversation.record(prepared, completion(tokens.clone()), &params).unwrap();
            let mut messages =
                vec![question.clone(), Message::assistant(sent), Message::user("2?")];
            let (prepared, second) = talk.prepare_and_record(&messages, "y = 2");
            assert_eq!(
                (prepared.origin, prepared.repeated.extended),
                (Origin::Continued, true),
                "{recorded_completion:?}"
            );
            assert_eq!(prepared.drift, None, "{recorded_completion:?} {sent:?}");
            // All sampled tokens without the end of the turn, then the appended text.
            let kept = &tokens[..tokens.len() - usize::from(ends)];
            assert!(prepared.prompt.starts_with(&[&start, kept].concat()));
            let text = talk.text(&prepared.prompt);
            let sent_end = sent.trim_start_matches("x = 1").trim_start();
            assert!(text.contains(&format!("{sent_end}<|im_end|>")), "{text:?}");
            // Tags in the appended text are text.
            let ends = prepared
                .prompt
                .iter()
                .filter(|id| talk.format.chat().stop_ids().contains(id))
                .count();
            assert_eq!(ends, 3, "{text:?}");
            assert_eq!(talk.conversation.counts().extended, 1);
            // The conversation continues below the extended completion, and so does the next turn.
            messages.extend([second.message(), Message::user("3?")]);
            let (prepared, third) = talk.prepare_and_record(&messages, "z = 3");
            assert_eq!(
                (prepared.origin, prepared.repeated.up_to_completion),
                (Origin::Continued, 4)
            );
            assert!(
                prepared
                    .prompt
                    .starts_with(&talk.conversation.trajectory().sequence_tokens(second.segment))
            );
            messages.extend([third.message(), Message::user("4?")]);
            assert_eq!(talk.prepare(&messages).origin, Origin::Continued);
            assert_eq!(talk.conversation.finish(), [], "{recorded_completion:?}");
            // Each completion was sampled once.
            let segments = talk.conversation.trajectory().segments();
            let sampled = segments.iter().filter(|segment| segment.kind == Kind::Sampled).count();
            assert_eq!(
                (sampled, segments[first.segment.0 as usize].tokens.len()),
                (3, tokens.len())
            );
        }
    }
}

#[test]
fn extended_completion_with_other_reasoning_forks() {
    for (reasoning, origin) in
        [("Hm", Origin::Continued), ("No.", fork_origin(1, Reason::ReasoningEdited))]
    {
        let mut talk = talk(CompletionMatching::Lenient);
        let question = Message::user("1?");
        talk.prepare_and_record(std::slice::from_ref(&question), "<think>Hm.</think>x = 1");
        let reasoning = Some(reasoning.to_owned());
        let sent = Message { reasoning_content: reasoning, ..Message::assistant("x = 1</code>") };
        let found = talk.prepare(&[question, sent, Message::user("2?")]);
        match origin {
            Origin::Continued => assert_eq!((found.origin, found.repeated.unsaid), (origin, 1)),
            _ => assert!(matches!(found.origin, Origin::Forked(Fork { at: 1, .. })), "{found:?}"),
        }
    }
}

#[test]
fn extended_completion_is_separate_from_original() {
    let mut talk = talk(CompletionMatching::Lenient);
    let question = Message::user("1?");
    talk.prepare_and_record(std::slice::from_ref(&question), "x = 1");
    let next = Message::user("2?");
    let with = |text: &str| vec![question.clone(), Message::assistant(text), next.clone()];
    let (_, plain) = talk.prepare_and_record(&with("x = 1"), "plain");
    let (prepared, one) = talk.prepare_and_record(&with("x = 1</a>"), "one");
    assert_eq!(
        prepared.origin,
        fork_origin(2, Reason::Shortened),
        "it leaves what follows the reply itself"
    );
    let (_, two) = talk.prepare_and_record(&with("x = 1</b>"), "two");
    for (sent, completion) in [("x = 1", &plain), ("x = 1</a>", &one), ("x = 1</b>", &two)] {
        let messages = [with(sent), vec![completion.message(), Message::user("3?")]].concat();
        let prepared = talk.prepare(&messages);
        assert_eq!(
            (prepared.origin, prepared.repeated.up_to_completion),
            (Origin::Continued, 4),
            "{sent}"
        );
        assert!(
            prepared
                .prompt
                .starts_with(&talk.conversation.trajectory().sequence_tokens(completion.segment))
        );
        // The completion after an extension is not that after another extension.
        let messages =
            [with("x = 1</c>"), vec![completion.message(), Message::user("3?")]].concat();
        assert_eq!(talk.prepare(&messages).repeated.up_to_completion, 2, "{sent}");
    }
    // The end of a request is the end of the extended completion.
    let prepared = talk.prepare(&with("x = 1</a>")[..2]);
    assert!(prepared.repeated.extended && prepared.repeated.up_to_completion == 2);
}

#[test]
fn appended_text_forks_in_strict_mode() {
    let mut talk = talk(CompletionMatching::Strict);
    talk.prepare_and_record(&[Message::user("1?")], "x = 1");
    let messages = [Message::user("1?"), Message::assistant("x = 1</code>"), Message::user("2?")];
    assert_eq!(talk.prepare(&messages).origin, fork_origin(1, Reason::CompletionEdited));
}

#[test]
fn different_text_does_not_extend_completion() {
    for (completion, sent) in
        [("x = 1", "x = 2</code>"), ("x = 1", "(no content)"), ("x = 1", "x =")]
    {
        let mut talk = talk(CompletionMatching::Lenient);
        talk.prepare_and_record(&[Message::user("1?")], completion);
        let messages = [Message::user("1?"), Message::assistant(sent), Message::user("2?")];
        let prepared = talk.prepare(&messages);
        assert_eq!(
            (prepared.origin, prepared.repeated.up_to_completion),
            (fork_origin(1, Reason::CompletionEdited), 0)
        );
    }
}

#[test]
fn completion_matches_as_client_received() {
    let mut talk = talk(CompletionMatching::Strict);
    let question = Message::user("Count.");
    let (_, completion) = talk.prepare_and_record(std::slice::from_ref(&question), "1, 2, 3, 4,");
    for received in ["1, 2, 3, ", "1, 2, 3, 4"] {
        let messages = [question.clone(), Message::assistant(received), Message::user("Go on.")];
        assert_eq!(talk.prepare(&messages).origin, fork_origin(1, Reason::CompletionEdited));
        talk.conversation.note_received(completion.segment, &messages[1]);
        let prepared = talk.prepare(&messages);
        assert_eq!((prepared.origin, prepared.repeated.trimmed), (Origin::Continued, 0));
        assert!(
            prepared
                .prompt
                .starts_with(&talk.conversation.trajectory().sequence_tokens(completion.segment))
        );
    }
    // The white space before a stop string is missing.
    let messages = [question.clone(), Message::assistant("1, 2, 3,4"), Message::user("Go on.")];
    assert_eq!(talk.prepare(&messages).origin, fork_origin(1, Reason::CompletionEdited));
    // The first of two calls only.
    let two = [CALL, CALL].concat();
    let (_, completion) = talk.prepare_and_record(&[Message::user("12*3?")], &two);
    let mut first = completion.message();
    first.tool_calls.truncate(1);
    talk.conversation.note_received(completion.segment, &first);
    let messages = [Message::user("12*3?"), first.clone(), result(&first.tool_calls[0])];
    assert_eq!(talk.prepare(&messages).origin, Origin::Continued);
}

#[test]
fn reasoning_in_separate_message_continues() {
    for parts in [
        vec![reasoning_message("Hm."), Message::assistant("See.")],
        vec![Message::assistant("<think>Hm.</think>"), Message::assistant("See.")],
        vec![reasoning_message("H"), reasoning_message("m."), Message::assistant("See.")],
    ] {
        let mut talk = talk(CompletionMatching::Strict);
        let question = Message::user("1?");
        talk.prepare_and_record(std::slice::from_ref(&question), "<think>Hm.</think>See.");
        let messages = [vec![question], parts, vec![Message::user("2?")]].concat();
        let (prepared, second) = talk.prepare_and_record(&messages, "y = 2");
        assert_eq!(
            (prepared.origin, prepared.repeated.unsaid),
            (Origin::Continued, 0),
            "{messages:?}"
        );
        let messages = [messages, vec![second.message(), Message::user("3?")]].concat();
        assert_eq!(talk.prepare(&messages).origin, Origin::Continued);
    }
    // Two texts are two completions.
    let mut talk = talk(CompletionMatching::Strict);
    talk.prepare_and_record(&[Message::user("1?")], "See.");
    let messages = [
        Message::user("1?"),
        Message::assistant("S"),
        Message::assistant("ee."),
        Message::user("2?"),
    ];
    assert_eq!(talk.prepare(&messages).origin, fork_origin(1, Reason::CompletionEdited));
}

fn reasoning_message(reasoning: &str) -> Message {
    Message { reasoning_content: Some(reasoning.into()), ..Message::assistant("") }
}

#[test]
fn results_between_calls_continue_completion() {
    let mut talk = talk(CompletionMatching::Strict);
    let two = [CALL, CALL.strip_prefix("Let me see.").unwrap()].concat();
    let question = Message::user("12*3?");
    let (_, completion) = talk.prepare_and_record(std::slice::from_ref(&question), &two);
    let full = completion.message();
    let [one, two] = &full.tool_calls[..] else { panic!("{full:?}") };
    let separated = vec![
        question,
        Message::calls(full.content.as_str(), vec![one.clone()]),
        result(one),
        Message::calls("", vec![two.clone()]),
        result(two),
    ];
    let (prepared, second) = talk.prepare_and_record(&separated, "36.");
    assert_eq!(prepared.origin, Origin::Continued);
    // The prompt is the same as with both results after the calls.
    let together = [separated[0].clone(), full.clone(), result(one), result(two)];
    assert_eq!(talk.prepare(&together).prompt, prepared.prompt);
    let next = [separated.clone(), vec![second.message(), Message::user("Sure?")]].concat();
    let prepared = talk.prepare(&next);
    assert_eq!((prepared.origin, prepared.repeated.up_to_completion), (Origin::Continued, 5));
    // A changed value in one of the calls makes another completion, and so does a missing call.
    let mut edited = separated.clone();
    edited[3].tool_calls[0].arguments.insert("a".into(), json!("13 * 3"));
    assert_eq!(talk.prepare(&edited).origin, fork_origin(1, Reason::CallsEdited));
    assert_eq!(talk.prepare(&separated[..3]).origin, fork_origin(1, Reason::CallsEdited));
}
