//! An attempt with tool calls for tests, and its chat format.

use std::sync::Arc;

use levade_store::{Attempt, AttemptStart, Status};
use levade_text::testing::{sampled, tiny_chat};
use levade_text::{Chat, Message};
use levade_tree::{
    AttemptId, AttemptSlot, Component, DEFAULT, Kind, Outcome, Purpose, Segment, SegmentId,
    TimeInterval, TimedPart, VersionRun,
};
use serde_json::json;

use crate::Chats;

/// Start of the test run, in seconds.
pub(crate) const STARTED_AT: u64 = 1_700_000_000;

/// Returns an interval that starts some seconds after the run.
pub(crate) fn seconds(after: u64, duration: u64) -> TimeInterval {
    TimeInterval { start: (STARTED_AT + after) * 1_000_000_000, duration: duration * 1_000_000_000 }
}

pub(crate) fn chats() -> (Arc<Chat>, Chats) {
    let chat = Arc::new(tiny_chat().unwrap());
    let mut chats = Chats::default();
    chats.insert(DEFAULT, DEFAULT, Arc::clone(&chat));
    (chat, chats)
}

/// Creates a sampled segment with version 3, which takes over at its second token from version 2.
pub(crate) fn completion(parent: SegmentId, tokens: Vec<u32>, turn: u32) -> Segment {
    let versions = vec![
        VersionRun { version: 2, len: 1 },
        VersionRun { version: 3, len: tokens.len() as u32 - 1 },
    ];
    Segment {
        kind: Kind::Sampled,
        logprobs: vec![-0.5; tokens.len()],
        versions,
        ..Segment::context(Some(parent), tokens, turn)
    }
}

/// Returns an attempt that calls two tools at once and answers with their results.
pub(crate) fn attempt(chat: &Chat) -> Attempt {
    let question = [Message::user("What is 2 + 3?")];
    let slot = AttemptSlot { purpose: Purpose::Train, phase: 1, step: 7, group: 2, sample: 4 };
    let mut attempt = Attempt::from_start(&AttemptStart {
        id: AttemptId::from_bytes([9; 16]),
        slot,
        number: 1,
        task: json!({"id": "sum", "question": "What is 2 + 3?"}),
    });
    let call = |a: u32| {
        format!("<tool_call>{{\"name\": \"add\", \"arguments\": {{\"a\": {a}}}}}</tool_call>")
    };
    let first = sampled(chat, &format!("Let me add.{}{}", call(2), call(3)));
    let results = [Message::tool("5"), Message::tool("Error: 3 is taken")];
    let following = chat.continuation(&question, &first, &results, &[]).unwrap();
    let trajectory = &mut attempt.trajectory;
    let prompt = chat.prompt(&question, &[]).unwrap();
    let root = trajectory.push(Segment::context(None, prompt, 0)).unwrap();
    let call = trajectory.push(completion(root, first, 0)).unwrap();
    let results = trajectory.push(Segment::context(Some(call), following, 1)).unwrap();
    trajectory.push(completion(results, sampled(chat, "It is 5."), 1)).unwrap();
    attempt.outcome = Outcome {
        components: vec![Component { weight: Some(1.0), ..Component::new("right", 1.0) }],
        turns: 2,
        ..Outcome::demonstrated("It is 5.")
    };
    let timings = &mut attempt.outcome.timings;
    timings.add(TimedPart::Call { turn: 0 }, seconds(10, 2));
    let tool = TimedPart::Tool { turn: 0, index: 1, result: "failed".into() };
    timings.add(tool, seconds(13, 1));
    timings.add(TimedPart::Call { turn: 1 }, seconds(15, 1));
    timings.add(TimedPart::Attempt, seconds(9, 8));
    timings.add(TimedPart::Scoring, seconds(18, 2));
    (attempt.score, attempt.reward) = (Some(1.0), Some(0.75));
    attempt.status = Status::Completed;
    attempt
}
