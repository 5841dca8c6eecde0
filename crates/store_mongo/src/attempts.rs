//! Documents of attempts, which contain everything except the tokens.

use std::str::FromStr;

use levade_store::backend::Failure;
use levade_store::{Attempt, AttemptEnd, AttemptStart, AttemptSummary, FailedAttempt, Status};
use levade_tree::{AttemptId, AttemptSlot, Purpose, Segment, Trajectory};
use mongodb::bson::{Bson, DateTime, Document, doc};

use crate::connection::Result;
use crate::{fields, json};

/// Stored names of the statuses with which a try can be the one that counts in its attempt slot.
pub(crate) const COUNTING: [&str; 3] = ["completed", "unscored", "failed"];

/// A stored attempt without its segments, with the number of its segments and the id of its last
/// segment.
#[derive(Debug)]
pub(crate) struct AttemptHead {
    pub attempt: Attempt,
    pub len: u32,
    pub last: Option<String>,
}

/// Returns the MongoDB filter for all tries in an attempt slot.
pub(crate) fn slot_filter(slot: &AttemptSlot) -> Document {
    let AttemptSlot { purpose, phase, step, group, sample } = *slot;
    let [phase, step, group, sample] = [phase, step, group, sample].map(i64::from);
    doc! { "purpose": purpose.name(), "phase": phase, "step": step, "group": group, "sample": sample }
}

/// Creates the MongoDB document of an attempt whose last segment has the id `last`.
pub(crate) fn to_document(attempt: &Attempt, last: Option<&str>) -> Result<Document> {
    let mut document = doc! { "_id": attempt.id.to_string() };
    document.extend(slot_filter(&attempt.slot));
    document.insert("number", i64::from(attempt.number));
    json::write_json(&mut document, "task", &attempt.task.to_string());
    let segments = attempt.trajectory.segments();
    let (sampled, tokens) = count_tokens(segments);
    document.extend(doc! {
        "segments": segments.len() as i64,
        "last": last,
        "sampled_tokens": sampled,
        "tokens": tokens,
        "started": DateTime::now(),
    });
    document.extend(end_fields(&attempt.end())?);
    Ok(document)
}

/// Returns the document fields that are set when an attempt ends.
pub(crate) fn end_fields(end: &AttemptEnd) -> Result<Document> {
    // −0 is stored as 0, as in the other backends.
    let [score, reward] = [end.score, end.reward].map(|number| number.map(|number| number + 0.0));
    let mut document = doc! {
        "status": end.status.name(),
        "score": score,
        "reward": reward,
        "error": end.outcome.error.as_deref(),
    };
    for (name, text) in [
        ("outcome", serde_json::to_string(&end.outcome)),
        ("step_rewards", serde_json::to_string(&end.step_rewards)),
    ] {
        let text = text.map_err(|error| Failure::Unstorable(error.to_string()))?;
        document.extend(json::to_fields(name, Some(&text)));
    }
    document.insert("ended", end.status.is_end().then(DateTime::now));
    Ok(document)
}

/// Returns the number of sampled tokens and the number of all tokens in `segments`.
pub(crate) fn count_tokens(segments: &[Segment]) -> (i64, i64) {
    let sampled = segments.iter().filter(|segment| segment.kind == levade_tree::Kind::Sampled);
    let sampled_tokens = sampled.map(|segment| segment.tokens.len() as i64).sum();
    let tokens = segments.iter().map(|segment| segment.tokens.len() as i64).sum();
    (sampled_tokens, tokens)
}

fn corrupt_field(what: &str, error: impl std::fmt::Display) -> Failure {
    Failure::Corrupt(format!("the {what} cannot be read: {error}"))
}

fn parse_id(of: &Document) -> Result<AttemptId> {
    let text = fields::read_text(of, "_id")?;
    Ok(AttemptId::from_str(&text).map_err(|error| corrupt_field("id", error))?)
}

fn parse_slot(of: &Document) -> Result<AttemptSlot> {
    let name = fields::read_text(of, "purpose")?;
    let purpose =
        Purpose::parse(&name).ok_or_else(|| corrupt_field("purpose", format!("`{name}`")))?;
    Ok(AttemptSlot {
        purpose,
        phase: fields::read_integer(of, "phase")?,
        step: fields::read_integer(of, "step")?,
        group: fields::read_integer(of, "group")?,
        sample: fields::read_integer(of, "sample")?,
    })
}

fn parse_status(of: &Document) -> Result<Status> {
    let name = fields::read_text(of, "status")?;
    Ok(Status::parse(&name).ok_or_else(|| corrupt_field("status", format!("`{name}`")))?)
}

/// Returns the JSON text in the field `name` of a document. A missing field is an error.
pub(crate) fn json_text(of: &Document, name: &str) -> Result<String> {
    Ok(json::read_json(of, name)?.ok_or_else(|| corrupt_field(name, "the field is missing"))?)
}

/// Parses the document of an attempt. The segments are stored in other documents.
pub(crate) fn parse_head(of: &Document) -> Result<AttemptHead> {
    let start = AttemptStart {
        id: parse_id(of)?,
        slot: parse_slot(of)?,
        number: fields::read_integer(of, "number")?,
        task: serde_json::from_str(&json_text(of, "task")?)
            .map_err(|error| corrupt_field("task", error))?,
    };
    let outcome = serde_json::from_str(&json_text(of, "outcome")?);
    let step_rewards = serde_json::from_str(&json_text(of, "step_rewards")?);
    let attempt = Attempt {
        outcome: outcome.map_err(|error| corrupt_field("outcome", error))?,
        score: fields::read_optional_number(of, "score")?,
        reward: fields::read_optional_number(of, "reward")?,
        step_rewards: step_rewards.map_err(|error| corrupt_field("step rewards", error))?,
        status: parse_status(of)?,
        trajectory: Trajectory::new(),
        ..Attempt::from_start(&start)
    };
    let (len, last) =
        (fields::read_integer(of, "segments")?, fields::read_optional_text(of, "last")?);
    Ok(AttemptHead { attempt, len, last })
}

/// Returns the projection to the fields that a summary or a failed attempt needs.
pub(crate) fn summary_fields() -> Document {
    let names = [
        "purpose",
        "phase",
        "step",
        "group",
        "sample",
        "number",
        "score",
        "reward",
        "status",
        "sampled_tokens",
        "tokens",
        "error",
    ];
    names.into_iter().map(|name| (name.to_owned(), Bson::Int32(1))).collect()
}

/// Returns the sort order of attempts: by attempt slot, then by index of the try.
pub(crate) fn slot_order() -> Document {
    doc! { "phase": 1, "step": 1, "group": 1, "sample": 1, "number": 1 }
}

/// Parses a summary from the document of an attempt.
pub(crate) fn parse_summary(of: &Document) -> Result<AttemptSummary> {
    Ok(AttemptSummary {
        id: parse_id(of)?,
        slot: parse_slot(of)?,
        number: fields::read_integer(of, "number")?,
        score: fields::read_optional_number(of, "score")?,
        reward: fields::read_optional_number(of, "reward")?,
        status: parse_status(of)?,
        sampled_tokens: fields::read_integer(of, "sampled_tokens")?,
        tokens: fields::read_integer(of, "tokens")?,
    })
}

/// Parses the document of a failed attempt.
pub(crate) fn parse_failure(of: &Document) -> Result<FailedAttempt> {
    Ok(FailedAttempt {
        id: parse_id(of)?,
        slot: parse_slot(of)?,
        number: fields::read_integer(of, "number")?,
        status: parse_status(of)?,
        error: fields::read_optional_text(of, "error")?,
    })
}
