//! Tests of single changes that clients make to a history, and of the resulting prompts and
//! completions.

use std::sync::LazyLock;

use levade_policy::FinishReason;
use levade_text::ChatOptions;
use levade_text::testing::{ALWAYS_THINKS, IM_END, tiny_chat};
use levade_tree::{Kind, Segment};
use serde_json::{Value, json};

use super::*;
use crate::testing::{Talk, chat, completion, tool};
use crate::{Options, Reason};

#[path = "forks_tests.rs"]
mod forks;

const CALLS: &str = "Let me see.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 2, \"a\": 1.50}}\n</tool_call>\n\
     <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 3, \"b\": 4.0}}\n</tool_call>";

/// A change that a client makes to a history.
type Change = Box<dyn Fn(&mut Vec<Message>)>;

pub(super) fn options() -> Options {
    Options { call_ids: CallIds::Unique, ..Options::default() }
}

fn talk() -> Talk {
    static FORMAT: LazyLock<Arc<Format>> =
        LazyLock::new(|| Arc::new(Format::new(Arc::new(tiny_chat().unwrap()), options())));
    let mut talk = Talk::with(Arc::clone(&FORMAT));
    talk.tools = vec![tool("add")];
    talk
}

pub(super) fn fork_origin(at: usize, reason: Reason) -> Origin {
    Origin::Forked(Fork { at, reason })
}

fn opening() -> Vec<Message> {
    vec![Message::system("Use tools."), Message::user("1.5+2, 3+4?")]
}

fn results(completion: &RecordedCompletion) -> Vec<Message> {
    let calls = completion.message().tool_calls;
    calls
        .into_iter()
        .map(|call| Message { tool_call_id: Some(call.id), ..Message::tool("3.5") })
        .collect()
}

/// A conversation with reasoning, two calls and an answer, as its client would send it back.
fn record_conversation(talk: &mut Talk) -> (Vec<Message>, RecordedCompletion, RecordedCompletion) {
    let mut messages = opening();
    let (_, first) = talk.prepare_and_record(&messages, &format!("<think>two sums</think>{CALLS}"));
    messages.push(first.message());
    messages.extend(results(&first));
    let (prepared, second) =
        talk.prepare_and_record(&messages, "\n The answers are **3.5** and 7. ");
    assert_eq!((prepared.origin, prepared.repeated.up_to_completion), (Origin::Continued, 3));
    messages.push(second.message());
    messages.push(Message::user("Thanks. 5+6?"));
    (messages, first, second)
}

fn read(json: Value) -> Message {
    serde_json::from_value(json).unwrap()
}

#[test]
fn completion_is_parsed_and_continued() {
    let mut talk = talk();
    let (messages, first, second) = record_conversation(&mut talk);
    assert_eq!(
        (first.reasoning.as_str(), first.parsed.content.as_str()),
        ("two sums", "Let me see.")
    );
    let ids = |completion: &RecordedCompletion| -> Vec<String> {
        completion.message().tool_calls.into_iter().map(|call| call.id).collect()
    };
    assert_eq!(
        (ids(&first), first.turn, second.turn),
        (vec!["call_0_0".into(), "call_0_1".into()], 0, 1)
    );
    let prepared = talk.prepare(&messages);
    assert_eq!((prepared.origin, prepared.drift.clone()), (Origin::Continued, None));
    assert_eq!(
        prepared.repeated,
        RepeatedHistory {
            messages: 6,
            up_to_completion: 6,
            unsaid: 1,
            ..RepeatedHistory::default()
        }
    );
    // The tokens are those that were sampled, including reasoning, followed by the new ones.
    let path = talk.conversation.trajectory().sequence_tokens(second.segment);
    let text = talk.text(&prepared.prompt);
    assert!(prepared.prompt.starts_with(&path));
    assert!(text.contains(&format!(
        "assistant\n<think>two sums</think>{CALLS}<|im_end|>\n<|im_start|>tool\n3.5"
    )));
    assert!(text.ends_with(
        "assistant\n\n The answers are **3.5** and 7. <|im_end|>\n<|im_start|>user\n\
         Thanks. 5+6?<|im_end|>\n\
         <|im_start|>assistant\n"
    ));
    let segments: Vec<_> =
        talk.conversation.trajectory().segments().iter().map(|s| (s.kind, s.turn)).collect();
    assert_eq!(
        segments,
        [(Kind::Context, 0), (Kind::Sampled, 0), (Kind::Context, 1), (Kind::Sampled, 1)]
    );
    assert_eq!(
        *talk.conversation.counts(),
        Counts { started: 1, continued: 1, ..Counts::default() }
    );
}

#[test]
fn appended_conversation_keeps_trees_and_gets_later_turns() {
    let (mut talk, mut other) = (talk(), talk());
    let (_, _, second) = record_conversation(&mut talk);
    let (messages, ..) = record_conversation(&mut other);
    let (_, third) = other.prepare_and_record(&messages, "11");
    let theirs = other.conversation.trajectory().clone();
    let path = talk.conversation.trajectory().sequence_tokens(second.segment);
    assert_eq!(talk.conversation.append_trajectory(&theirs).unwrap(), 2);
    let all = talk.conversation.trajectory();
    let shape = |s: &Segment| (s.parent.map(|parent| parent.0), s.turn, s.kind);
    let moved =
        theirs.segments().iter().map(|s| (s.parent.map(|parent| parent.0 + 4), s.turn + 2, s.kind));
    assert_eq!(
        all.segments()[4..].iter().map(shape).collect::<Vec<_>>(),
        moved.collect::<Vec<_>>()
    );
    assert_eq!(all.sequence_tokens(second.segment), path);
    let moved = SegmentId(third.segment.0 + 4);
    assert_eq!(all.sequence_tokens(moved), theirs.sequence_tokens(third.segment));
    assert_eq!(talk.conversation.next_turn(), 5);
}

#[test]
fn reformatted_history_is_continued() {
    let mut talk = talk();
    let (messages, first, _) = record_conversation(&mut talk);
    let want = talk.prepare(&messages).prompt;
    let edits: Vec<(&str, u32, Change)> = vec![
        (
            "Python's spacing, another order",
            0,
            Box::new(move |m| {
                m[2] = read(
                    json!({"role": "assistant", "content": "Let me see.", "refusal": null, "name": "calc",
                "tool_calls": add_calls("{\"a\": 1.5, \"b\": 2}", "{\"b\": 4, \"a\": 3}")}),
                );
            }),
        ),
        (
            "compact, escaped",
            0,
            Box::new(move |m| {
                m[2] =
                    read(json!({"role": "assistant", "content": "Let me see.", "annotations": [],
                "tool_calls": add_calls("{\"a\":1.5,\"\\u0062\":2}", "{\"a\":3.0,\"b\":4}")}));
            }),
        ),
        (
            "other ids",
            0,
            Box::new(|m| {
                for call in &mut m[2].tool_calls {
                    call.id = format!("other-{}", call.id);
                }
                (m[3].tool_call_id, m[4].tool_call_id) = (None, Some("other".into()));
            }),
        ),
        (
            "trimmed",
            1,
            Box::new(|m| {
                m[5].content = "\nThe answers are **3.5** and 7. ".into();
            }),
        ),
        ("as it was written", 0, Box::new(move |m| m[2] = first.raw_message())),
        (
            "with the thought in tags",
            0,
            Box::new(|m| {
                m[2].content = "<think>\ntwo sums\n</think>\n\nLet me see.".into();
            }),
        ),
        (
            "with a part of the thought in tags",
            0,
            Box::new(|m| {
                m[2].content = "<think>sums</think>Let me see.".into();
            }),
        ),
    ];
    for (name, trimmed, edit) in edits {
        let mut messages = messages.clone();
        edit(&mut messages);
        let prepared = talk.prepare(&messages);
        assert_eq!(prepared.origin, Origin::Continued, "{name}");
        assert_eq!(
            (prepared.repeated.up_to_completion, prepared.repeated.trimmed),
            (6, trimmed),
            "{name}"
        );
        assert!(prepared.prompt == want, "{name}");
    }
    let unsaid = |messages: &[Message]| talk.prepare(messages).repeated.unsaid;
    let mut full = messages.clone();
    full[2].content = "<think>two sums</think>Let me see.".into();
    assert_eq!((unsaid(&messages), unsaid(&full)), (1, 0));
    full[2].content = "<think>sums</think>Let me see.".into();
    assert_eq!(unsaid(&full), 1);
    // In a field of its own, as inference servers return it.
    let mut fork_messages = messages.clone();
    for (reasoning, unsaid_count) in [("\ntwo sums ", 0), ("sums", 1)] {
        fork_messages[2].reasoning_content = Some(reasoning.into());
        assert_eq!(
            (talk.prepare(&fork_messages).origin, unsaid(&fork_messages)),
            (Origin::Continued, unsaid_count)
        );
    }
}

fn add_calls(first: &str, second: &str) -> Value {
    json!([{"id": "call_0_0", "type": "function", "index": 0, "function": {"name": "add", "arguments": first}},
               {"id": "call_0_1", "type": "function", "index": 1, "function": {"name": "add", "arguments": second}}])
}

#[test]
fn split_completion_is_continued() {
    let mut talk = talk();
    let (messages, ..) = record_conversation(&mut talk);
    let want = talk.prepare(&messages).prompt;
    let calls = messages[2].tool_calls.iter().map(|call| Message::calls("", vec![call.clone()]));
    let text = Message::assistant(messages[2].content.clone());
    let by_call = [vec![text.clone()], calls.collect()].concat();
    let by_kind = vec![text, Message::calls("", messages[2].tool_calls.clone())];
    for parts in [by_kind, by_call] {
        let sent = [&messages[..2], &parts, &messages[3..]].concat();
        let prepared = talk.prepare(&sent);
        assert_eq!(
            (prepared.origin, prepared.repeated.up_to_completion),
            (Origin::Continued, 5 + parts.len())
        );
        assert!(prepared.prompt == want);
        // If one part has another text, the parts are not merged.
        let mut other = sent;
        other[2].content = "Let us see.".into();
        assert_eq!(talk.prepare(&other).origin, fork_origin(2, Reason::CallsAsText));
    }
}

#[test]
fn missing_reasoning_is_counted_only_if_sampled() {
    for (reasoning, unsaid) in [("", 0), ("<think>two sums</think>", 1)] {
        let mut talk = talk();
        let (_, completion) = talk.prepare_and_record(&opening(), &format!("{reasoning}{CALLS}"));
        let repeated = |message: Message| {
            let messages = [opening(), vec![message], results(&completion)].concat();
            talk.prepare(&messages).repeated
        };
        let completion_end = 3;
        let want = RepeatedHistory {
            messages: completion_end,
            up_to_completion: completion_end,
            unsaid,
            ..RepeatedHistory::default()
        };
        assert_eq!(repeated(completion.message()), want);
        assert_eq!(repeated(completion.raw_message()), RepeatedHistory { unsaid: 0, ..want });
    }
}

#[test]
fn counts_classify_prompts_by_origin() {
    let mut talk = talk();
    let (mut messages, ..) = record_conversation(&mut talk);
    talk.prepare_and_record(&messages, "As it was.");
    messages[5].content = "\nThe answers are **3.5** and 7. ".into();
    talk.prepare_and_record(&messages, "With white space.");
    messages[5].content = "No answers.".into();
    talk.prepare_and_record(&messages, "Another past.");
    let counts = talk.conversation.counts().clone();
    let forked = [(Reason::Repeated, 1), (Reason::CompletionEdited, 1)].into();
    assert_eq!(
        counts,
        Counts { started: 1, continued: 2, forked, trimmed: 1, ..Counts::default() }
    );
    let full = talk.conversation.trajectory().clone();
    assert_eq!(full.segments().len(), 9);
    assert!(talk.conversation.into_trajectory() == full);
}

#[test]
fn agents_and_policies_do_not_share_history() {
    let mut talk = talk();
    (talk.agent, talk.policy) = ("solver", "small");
    let (messages, ..) = record_conversation(&mut talk);
    let segments = talk.conversation.trajectory().segments().len();
    for (agent, policy) in [("critic", "small"), ("solver", "large")] {
        (talk.agent, talk.policy) = (agent, policy);
        let prepared = talk.prepare(&messages);
        assert_eq!((prepared.origin, prepared.repeated.messages), (Origin::Started, 0));
        talk.record(prepared, "11");
    }
    let all = talk.conversation.trajectory().segments();
    assert!(
        all[..segments].iter().all(|s| agent_and_policy(s) == ("solver".into(), "small".into()))
    );
    let rest: Vec<_> = all[segments..].iter().map(agent_and_policy).collect();
    let critic = pair("critic", "small");
    let large = pair("solver", "large");
    assert_eq!(rest, [critic.clone(), critic, large.clone(), large]);
    assert!(all[segments].parent.is_none() && all[segments + 2].parent.is_none());
    // An agent with an earlier, different conversation shares no history either.
    (talk.agent, talk.policy) = ("judge", "small");
    talk.prepare_and_record(&[Message::user("Fair?")], "Yes.");
    assert_eq!(talk.prepare(&messages[..2]).origin, Origin::Started);
}

fn agent_and_policy(s: &Segment) -> (String, String) {
    (s.agent.clone(), s.policy.clone())
}

fn pair(a: &str, p: &str) -> (String, String) {
    (a.to_owned(), p.to_owned())
}

#[test]
fn repeated_prompt_has_sibling_completions() {
    let mut talk = talk();
    let requested = opening();
    // Prepared in parallel, and recorded in the other order.
    let one = talk.prepare(&requested);
    let two = talk.prepare(&requested);
    let never = talk.prepare(&requested);
    assert!(one.prompt == two.prompt && two.prompt == never.prompt);
    drop(never);
    assert_eq!(talk.conversation.trajectory().segments(), []);
    let second = talk.record(two, "3.5 and 7");
    let first = talk.record(one, "3.5 and 7");
    let third = talk.prepare_and_record(&requested, "5 and 7").1;
    let parents: Vec<_> = talk
        .conversation
        .trajectory()
        .segments()
        .iter()
        .map(|segment| segment.parent.map(|p| p.0))
        .collect();
    assert_eq!(parents, [None, Some(0), Some(0), Some(0)]);
    let turns = [second.turn, first.turn, third.turn];
    assert_eq!(turns, [0, 1, 2]);
    // Of two equal completions the latest is continued, unless a request has already continued the
    // other one.
    let follow = |completion: &RecordedCompletion, text: &str| {
        [requested.clone(), vec![completion.message(), Message::user(text)]].concat()
    };
    let starts = |talk: &Talk, messages: &[Message]| {
        let prompt = talk.prepare(messages).prompt;
        [&first, &second, &third].map(|completion| {
            prompt.starts_with(&talk.conversation.trajectory().sequence_tokens(completion.segment))
        })
    };
    assert_eq!(starts(&talk, &follow(&third, "Sure?")), [false, false, true]);
    let (_, yes) = talk.prepare_and_record(&follow(&second, "Sure?"), "Yes");
    let context = talk.conversation.trajectory().segments()[yes.segment.0 as usize].parent.unwrap();
    assert_eq!(
        talk.conversation.trajectory().segments()[context.0 as usize].parent,
        Some(first.segment)
    );
}

#[test]
fn call_ids_distinguish_equal_completions() {
    let mut talk = talk();
    let requested = opening();
    let completions = [CALLS; 3].map(|text| talk.prepare_and_record(&requested, text).1);
    for completion in &completions {
        let messages =
            [requested.clone(), vec![completion.message()], results(completion)].concat();
        let kept = talk.prepare_and_record(&messages, "ok").1;
        let trajectory = talk.conversation.trajectory();
        let path: Vec<SegmentId> =
            trajectory.sequence(kept.segment).iter().map(|part| part.segment.id).collect();
        assert_eq!(path[1], completion.segment);
    }
    // If ids are numbered within each completion, they distinguish nothing.
    let mut talk = Talk::new(tiny_chat().unwrap(), Options::default());
    let ids = |completion: &RecordedCompletion| completion.message().tool_calls[1].id.clone();
    assert_eq!(
        [0, 1].map(|_| ids(&talk.prepare_and_record(&requested, CALLS).1)),
        ["call_1", "call_1"]
    );
    let (_, thinks) =
        talk.prepare_and_record(&requested, &format!("<think>two sums</think>{CALLS}"));
    let edited =
        Message { content: "<think>two summs</think>Let me see.".into(), ..thinks.message() };
    let prepared = talk.prepare(&[requested, vec![edited], results(&thinks)].concat());
    assert_eq!(prepared.origin, fork_origin(2, Reason::ReasoningEdited));
}

#[test]
fn truncated_completions_can_continue_or_retry() {
    let mut talk = talk();
    let requested = opening();
    let params = SamplingParams { temperature: 0.7, top_k: 5, ..SamplingParams::default() };
    let truncation = talk.format.chat().tokenizer().encode("Let me <tool_call>\n{\"na");
    let truncated_completion =
        Completion { finish: FinishReason::Length, ..completion(truncation) };
    let recorded_completion =
        talk.conversation.record(talk.prepare(&requested), truncated_completion, &params).unwrap();
    assert_eq!(
        (recorded_completion.finish, recorded_completion.message().tool_calls.len()),
        (FinishReason::Length, 0)
    );
    let segment = &talk.conversation.trajectory().segments()[1];
    assert_eq!(
        (segment.temperature, segment.filtered, segment.versions[0].version),
        (0.7, true, 3)
    );
    for message in [recorded_completion.raw_message(), recorded_completion.message()] {
        let prepared =
            talk.prepare(&[requested.clone(), vec![message, Message::user("Go on.")]].concat());
        assert_eq!(prepared.origin, Origin::Continued);
        let text = talk.text(&prepared.prompt);
        assert!(text.contains("{\"na<|im_end|>\n<|im_start|>user\nGo on."), "{text}");
    }
    let second = talk.prepare_and_record(&requested, "3.5 and 7").0;
    assert_eq!(second.origin, fork_origin(2, Reason::Repeated));

    // A completion that is rejected leaves nothing in the store.
    let before = talk.conversation.trajectory().clone();
    let short = Completion { logprobs: vec![], ..completion(vec![65, IM_END]) };
    let prepared = talk.prepare(&[Message::user("new")]);
    let error = talk.conversation.record(prepared.clone(), short, &params).unwrap_err();
    assert!(
        matches!(error, TreeError::Length { tokens: 2, found: 0, what: "log-probabilities", .. }),
        "{error}"
    );
    let unversioned = Completion { versions: vec![], ..completion(vec![65]) };
    let error = talk.conversation.record(prepared, unversioned, &params).unwrap_err();
    assert!(matches!(error, TreeError::Length { found: 0, what: "token versions", .. }), "{error}");
    assert_eq!(*talk.conversation.trajectory(), before);
}

#[test]
fn prompt_can_be_recorded_before_completion() {
    let mut talk = talk();
    let mut prepared = talk.prepare(&opening());
    talk.conversation.add_context(&mut prepared).unwrap();
    talk.conversation.add_context(&mut prepared).unwrap();
    assert_eq!(talk.conversation.trajectory().segments().len(), 1);
    let completion = talk.record(prepared, "ok");
    let segments = talk.conversation.trajectory().segments();
    assert_eq!((segments.len(), segments[1].turn, completion.turn), (2, 0, 0));
    assert_eq!(talk.conversation.counts().started, 1);
}

#[test]
fn reasoning_opened_by_prompt_is_parsed() {
    let mut talk = Talk::new(chat(ALWAYS_THINKS, ChatOptions::default()), options());
    let requested = [Message::user("2+3?")];
    let (prepared, completion) = talk.prepare_and_record(&requested, "add them</think>5");
    assert!(prepared.in_reasoning);
    assert_eq!(
        (completion.reasoning.as_str(), completion.message()),
        ("add them", Message::assistant("5"))
    );
    let next = [requested.to_vec(), vec![completion.message(), Message::tool("x")]].concat();
    let (prepared, unclosed) = talk.prepare_and_record(&next, "<think>hm");
    assert!(!prepared.in_reasoning);
    assert_eq!((unclosed.reasoning.as_str(), unclosed.message()), ("hm", Message::assistant("")));
}

#[test]
fn fork_reasons_have_distinct_descriptions() {
    let all = [
        "asked_again",
        "branched",
        "system",
        "tools",
        "edited",
        "shortened",
        "reply_edited",
        "calls_edited",
        "thought_edited",
        "text_lost",
        "calls_as_text",
        "merged",
        "reordered",
        "unrecorded",
        "reprinted",
    ];
    let descriptions: std::collections::BTreeSet<_> = all
        .iter()
        .map(|name| serde_json::from_value::<Reason>(json!(name)).unwrap().description())
        .collect();
    assert_eq!(descriptions.len(), all.len());
}
