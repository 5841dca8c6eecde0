//! Tests of histories as templates render them: drift, forks that follow the template, truncated
//! prompts.

use levade_text::testing::{
    ALWAYS_THINKS, NUMBERED, STRICT, THOUGHTFUL, sampled, thoughtful, tiny_chat,
};
use levade_text::{Chat, ChatOptions};

use super::tests::fork_origin;
use super::*;
use crate::testing::{Talk, chat};
use crate::{Options, Reason};

fn drift_turns(drift: &[levade_tree::Drift]) -> Vec<(u32, bool)> {
    drift.iter().map(|drift| (drift.turn, drift.forked)).collect()
}

/// Records these completions in order. Each is followed by a question, or by a result if it has a
/// call.
fn conversation(
    chat: levade_text::Chat,
    options: Options,
    completions: &[&str],
) -> (Talk, Vec<Message>) {
    let mut talk = Talk::new(chat, options);
    let mut messages = vec![Message::user("1+1?")];
    for completion in completions {
        talk.prepare_and_record(&messages, completion);
        messages.push(Message::assistant(*completion));
        messages.push(if completion.contains("add") {
            Message::tool("2")
        } else {
            Message::user("2+2?")
        });
    }
    (talk, messages)
}

#[test]
fn drift_counts_at_every_later_turn() {
    let (mut talk, messages) = conversation(
        always_thinking_chat(),
        Options::default(),
        &["two", "hm</think>four", "so</think>4"],
    );
    assert_eq!(drift_turns(&talk.conversation.drift()), [(1, false), (2, false)]);
    // The first completion never closes its reasoning, so the reasoning is rendered, but not the
    // tag that opened it.
    let drift = talk.prepare(&messages).drift.unwrap();
    assert_eq!((drift.turn, drift.recorded.starts_with("<think>")), (3, true));
    assert_eq!(drift_turns(&talk.conversation.finish()), [(1, false), (2, false)]);
    assert_eq!(
        conversation(tiny_chat().unwrap(), Options::default(), &["a ", " b"])
            .0
            .conversation
            .finish(),
        []
    );

    let strict = Options { strict: true, ..Options::default() };
    let (talk, messages) = conversation(always_thinking_chat(), strict, &["hm</think>four"]);
    let request =
        Request { agent: "", policy: "", format: &talk.format, messages: &messages, tools: &[] };
    let error = talk.conversation.prepare(&request).unwrap_err();
    let ConversationError::Drift { turn: 1, recorded, .. } = &error else { panic!("{error}") };
    assert!(
        recorded.starts_with("<think>") && error.to_string().contains("history = \"template\"")
    );
}

fn always_thinking_chat() -> Chat {
    chat(ALWAYS_THINKS, ChatOptions::default())
}

#[test]
fn drift_has_turn_of_recording() {
    let always = chat(ALWAYS_THINKS, ChatOptions::default());
    let (mut talk, messages) = conversation(always, Options::default(), &["hm</think>four"]);
    let fork_messages = [&messages[..2], &[Message::user("3+3?")]].concat();
    // Both are prepared as if they were turn 1.
    let first = talk.prepare(&messages);
    let second = talk.prepare(&fork_messages);
    talk.record(first, "so</think>4");
    talk.record(second, "so</think>6");
    assert_eq!(drift_turns(&talk.conversation.drift()), [(1, false), (2, false)]);
}

#[test]
fn late_drift_is_counted_by_finish() {
    // The reasoning of the first completion is kept until the second question.
    let thinks = "<think>\nhm\n</think>\n\nadd";
    let completions = [thinks, "add", "add", "four", "add", "five", "six"];
    let (mut talk, messages) =
        conversation(thoughtful(true).unwrap(), Options::default(), &completions);
    assert!(talk.format.can_abridge());
    assert_eq!(talk.conversation.drift(), []);
    let full: Vec<(u32, bool)> = (4..7).map(|turn| (turn, false)).collect();
    assert_eq!(drift_turns(&talk.conversation.finish()), full);
    assert_eq!(drift_turns(&talk.conversation.finish()), full);
    assert!(talk.conversation.drift()[0].recorded.starts_with("<think>\nhm"));
    // From then on the drift is known.
    assert_eq!(drift_turns(&[talk.prepare(&messages).drift.unwrap()]), [(7, false)]);

    // A fork that ends earlier is unchanged. A fork that was first seen to drift near a completion
    // drifted earlier.
    let (mut talk, messages) =
        conversation(thoughtful(true).unwrap(), Options::default(), &completions[..3]);
    let mut fork = messages[..4].to_vec();
    fork.push(Message::user("No?"));
    talk.prepare_and_record(&fork, "<think>\nso\n</think>\n\nNo.");
    fork.extend([Message::assistant("<think>\nso\n</think>\n\nNo."), Message::user("Sure?")]);
    talk.prepare_and_record(&fork, "Yes");
    assert_eq!(drift_turns(&talk.conversation.drift()), [(4, false)]);
    assert_eq!(drift_turns(&talk.conversation.finish()), [(3, false), (4, false)]);
}

#[test]
fn context_dependent_templates_see_complete_history() {
    let (mut talk, messages) =
        conversation(chat(NUMBERED, ChatOptions::default()), Options::default(), &["a", "b"]);
    assert!(!talk.format.can_abridge());
    let text = talk.text(&talk.prepare(&messages).prompt);
    assert!(
        text.ends_with(
            "<|im_end|><|im_start|>user 5 of 5\n2+2?<|im_end|><|im_start|>assistant 6\n"
        ),
        "{text}"
    );
    assert_eq!(drift_turns(&talk.conversation.finish()), [(1, false)]);
}

#[test]
fn template_history_forks_at_drift() {
    let options = Options { history: History::Template, ..Options::default() };
    let (mut talk, messages) =
        conversation(always_thinking_chat(), options, &["hm</think>four", "so</think>4"]);
    let prepared = talk.prepare(&messages);
    assert_eq!(prepared.origin, fork_origin(0, Reason::Reprinted));
    assert_eq!(prepared.prompt, talk.format.chat().prompt(&messages, &[]).unwrap());
    assert_eq!(drift_turns(&talk.conversation.finish()), [(1, true)]);
    // The same request again yields the same branch.
    let first = talk.record(prepared.clone(), "x");
    let second = talk.record(talk.prepare(&messages), "y");
    let parent = |completion: &RecordedCompletion| {
        talk.conversation.trajectory().segments()[completion.segment.0 as usize].parent
    };
    assert_eq!(parent(&first), parent(&second));
    assert_eq!(
        talk.conversation.trajectory().sequence_tokens(parent(&first).unwrap()),
        prepared.prompt
    );
    // After a template that rejects the past, only the new messages are appended. In strict mode
    // that is an error.
    let (talk, messages) = conversation(strict_chat(), options, &["<think>two"]);
    let prepared = talk.prepare(&messages);
    assert_eq!(
        (prepared.origin, drift_turns(&[prepared.drift.unwrap()])),
        (Origin::Continued, vec![(1, false)])
    );
    let (talk, messages) =
        conversation(strict_chat(), Options { strict: true, ..options }, &["<think>two"]);
    let request =
        Request { agent: "", policy: "", format: &talk.format, messages: &messages, tools: &[] };
    assert!(talk.conversation.prepare(&request).unwrap_err().to_string().contains("not liked"));
    // With THOUGHTFUL, drift of the complete conversation is found at every turn.
    let completions = ["<think>\nhm\n</think>\n\nadd", "add", "four"];
    let (talk, messages) =
        conversation(chat(THOUGHTFUL, ChatOptions::default()), options, &completions);
    assert_eq!(talk.conversation.drift(), []);
    assert_eq!(talk.prepare(&messages).origin, fork_origin(0, Reason::Reprinted));
}

fn strict_chat() -> Chat {
    chat(STRICT, ChatOptions::default())
}

#[test]
fn shortened_prompt_continues_without_drift_check() {
    let mut talk = Talk::new(chat(ALWAYS_THINKS, ChatOptions::default()), Options::default());
    let requested = [Message::user("a long question")];
    let mut prepared = talk.prepare(&requested);
    let short = prepared.prompt[..9].to_vec();
    prepared.shorten(short.clone());
    let completion = talk.record(prepared, "hm</think>two");
    let messages = [requested.to_vec(), vec![completion.message(), Message::user("And?")]].concat();
    let (mut prepared, next) = talk.prepare_and_record(&messages, "hm</think>three");
    assert!(prepared.prompt.starts_with(&short) && prepared.drift.is_none());
    assert!(
        talk.text(&prepared.prompt).starts_with("<|im_start|>user\na lhm</think>two<|im_end|>")
    );
    let more = [messages, vec![next.message(), Message::user("And?")]].concat();
    assert_eq!(talk.prepare_and_record(&more, "x").0.drift, None);
    assert_eq!(talk.conversation.finish(), []);
    // A prompt that continues a completion is not shortened.
    let full = prepared.prompt.clone();
    prepared.shorten(short);
    assert_eq!(prepared.prompt, full);
    assert_eq!(sampled(talk.format.chat(), "x").len(), 2);
}
