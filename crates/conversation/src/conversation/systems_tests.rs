//! Tests of system messages that a template does not render at their position, and of past calls
//! with unreadable arguments.

use levade_text::testing::{FIRST_SYSTEM_ONLY, STRICT_TURNS, tiny_chat};
use levade_text::{ChatOptions, LateSystem, Role};
use serde_json::json;

use super::tests::fork_origin;
use super::*;
use crate::testing::{Talk, chat, tool};
use crate::{History, Options, Reason};

fn developer_message(content: &str) -> Message {
    Message { role: Role::Developer, ..Message::system(content) }
}

/// Records completions of a conversation that grows by these messages after each completion. Every
/// prompt but the first must continue the recorded one.
fn assert_continues(talk: &mut Talk, first: &[Message], rounds: &[Vec<Message>]) {
    let mut messages = first.to_vec();
    let (prepared, mut completion) = talk.prepare_and_record(&messages, "r");
    assert_eq!(prepared.origin, Origin::Started);
    for round in rounds {
        messages.push(completion.message());
        messages.extend(round.iter().cloned());
        let sequence = talk.conversation.trajectory().sequence_tokens(completion.segment);
        let (prepared, next) = talk.prepare_and_record(&messages, "r");
        assert_eq!(prepared.origin, Origin::Continued, "{round:?}");
        assert!(prepared.prompt.starts_with(&sequence), "{round:?}");
        completion = next;
    }
    assert_eq!(talk.conversation.finish(), []);
}

#[test]
fn shifted_system_messages_continue() {
    for template in [FIRST_SYSTEM_ONLY, STRICT_TURNS, "chatml"] {
        for history in [History::Append, History::Template] {
            let talk = || {
                Talk::new(
                    chat(template, ChatOptions::default()),
                    Options { history, ..Options::default() },
                )
            };
            // Instructions and a developer message before each request.
            let mut codex = talk();
            assert_continues(
                &mut codex,
                &[Message::system("i"), developer_message("d"), user_q()],
                &[vec![user_q()], vec![user_q()]],
            );
            // System messages in between, including the last message.
            let mut claude = talk();
            assert_continues(
                &mut claude,
                &[Message::system("i"), user_q()],
                &[
                    vec![Message::system("a"), user_q()],
                    vec![user_q(), developer_message("b")],
                    vec![user_q()],
                ],
            );
            let mut bare = talk();
            assert_continues(
                &mut bare,
                &[user_q(), Message::system("late")],
                &[
                    vec![Message::system("a")],
                    vec![Message::system("b"), Message::system("c"), user_q()],
                ],
            );
            let counts = [codex, claude, bare].map(|talk| {
                let counts = talk.conversation.counts();
                (counts.joined_systems, counts.moved_systems)
            });
            let want = if template == "chatml" { [(0, 0); 3] } else { [(1, 0), (0, 2), (0, 4)] };
            assert_eq!(counts, want, "{template}");
        }
    }
}

fn user_q() -> Message {
    Message::user("q")
}

#[test]
fn results_with_late_instructions_continue() {
    let mut talk = Talk::new(chat(FIRST_SYSTEM_ONLY, ChatOptions::default()), Options::default());
    talk.tools = vec![tool("add")];
    let mut messages = vec![Message::system("i"), Message::system("j"), Message::user("q")];
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let (_, completion) = talk.prepare_and_record(&messages, call);
    messages.extend([completion.message(), Message::tool("1"), Message::system("mind the time")]);
    let (prepared, _) = talk.prepare_and_record(&messages, "done");
    assert_eq!(prepared.origin, Origin::Continued);
    assert!(talk.text(&prepared.prompt).contains("user\nmind the time<|im_end|>"));
}

#[test]
fn merged_late_instructions_fork_at_first_message() {
    let options = ChatOptions { late_system: LateSystem::Merge, ..ChatOptions::default() };
    let mut talk = Talk::new(chat(FIRST_SYSTEM_ONLY, options), Options::default());
    let mut messages = vec![Message::system("a"), Message::user("q")];
    let (_, completion) = talk.prepare_and_record(&messages, "r");
    messages.extend([completion.message(), Message::system("b"), Message::user("p")]);
    let (prepared, completion) = talk.prepare_and_record(&messages, "r");
    assert_eq!(prepared.origin, fork_origin(0, Reason::System));
    assert!(talk.text(&prepared.prompt).starts_with("<|im_start|>system\na\n\nb<|im_end|>"));
    // After the first merge, later prompts are merged in the same way.
    messages.extend([completion.message(), Message::user("p")]);
    assert_eq!(talk.prepare_and_record(&messages, "r").0.origin, Origin::Continued);
}

#[test]
fn unreadable_call_arguments_fork_as_truncated_calls() {
    let mut talk = Talk::new(tiny_chat().unwrap(), Options::default());
    talk.tools = vec![tool("add")];
    let requested = Message::user("q");
    let (_, completion) = talk.prepare_and_record(
        std::slice::from_ref(&requested),
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>",
    );
    for sent in ["{\"a\": ", "null", "[]", "7", "\"{}\"", "{} and more"] {
        let mut truncation = completion.message();
        truncation.tool_calls[0].arguments = json!(sent).into();
        let messages =
            [requested.clone(), truncation, Message::tool("no JSON"), Message::user("go on")];
        let prepared = talk.prepare(&messages);
        assert_eq!(prepared.origin, fork_origin(1, Reason::CallsTruncated), "{sent}");
        let shown = format!("\"name\": \"add\", \"arguments\": {sent}}}");
        assert!(talk.text(&prepared.prompt).contains(&shown), "{}", talk.text(&prepared.prompt));
    }
    // The same history continues from there.
    let mut truncation = completion.message();
    truncation.tool_calls[0].arguments = json!("{\"a\": ").into();
    let mut messages = vec![requested.clone(), truncation, Message::tool("no JSON")];
    let (_, next) = talk.prepare_and_record(&messages, "r");
    messages.extend([next.message(), Message::user("and?")]);
    assert_eq!(talk.prepare_and_record(&messages, "r").0.origin, Origin::Continued);
    let unread = [requested, completion.message(), Message::tool("2")];
    assert_eq!(talk.prepare_and_record(&unread, "r").0.origin, Origin::Continued);
}
