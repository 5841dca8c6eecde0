//! Documents of attempts, which contain everything except the tokens.

use std::str::FromStr;

use levade_store::backend::Failure;
use levade_store::{Attempt, AttemptStart, AttemptSummary, End, FailedAttempt, Status};
use levade_tree::{AttemptId, AttemptSlot, Purpose, Segment, Trajectory};
use mongodb::bson::{Bson, DateTime, Document, doc};

use crate::connection::Result;
use crate::{fields, json};

/// Statuses of a try that can be the one that counts in its slot.
pub(crate) const COUNTING: [&str; 3] = ["completed", "unscored", "failed"];

/// An attempt without its segments, with the number of segments and the id of the last one.
#[derive(Debug)]
pub(crate) struct Head {
    pub attempt: Attempt,
    pub len: u32,
    pub last: Option<String>,
}

/// Returns the filter for an attempt slot.
pub(crate) fn slot_filter(slot: &AttemptSlot) -> Document {
    let AttemptSlot { purpose, phase, step, group, sample } = *slot;
    let [phase, step, group, sample] = [phase, step, group, sample].map(i64::from);
    doc! { "purpose": purpose.name(), "phase": phase, "step": step, "group": group, "sample": sample }
}

/// Creates the document of an attempt whose last segment has the id `last`.
pub(crate) fn document(attempt: &Attempt, last: Option<&str>) -> Result<Document> {
    let mut document = doc! { "_id": attempt.id.to_string() };
    document.extend(slot_filter(&attempt.slot));
    document.insert("number", i64::from(attempt.number));
    json::put(&mut document, "task", &attempt.task.to_string());
    let segments = attempt.trajectory.segments();
    let (sampled, tokens) = token_counts(segments);
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

/// Returns the fields of an attempt's document that are set when the attempt ends.
pub(crate) fn end_fields(end: &End) -> Result<Document> {
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
        document.extend(json::fields_of(name, Some(&text)));
    }
    document.insert("ended", end.status.is_end().then(DateTime::now));
    Ok(document)
}

/// Returns the number of sampled tokens, and of all tokens.
pub(crate) fn token_counts(segments: &[Segment]) -> (i64, i64) {
    let sampled = segments.iter().filter(|segment| segment.kind == levade_tree::Kind::Sampled);
    let sampled_tokens = sampled.map(|segment| segment.tokens.len() as i64).sum();
    let tokens = segments.iter().map(|segment| segment.tokens.len() as i64).sum();
    (sampled_tokens, tokens)
}

fn corrupt(what: &str, error: impl std::fmt::Display) -> Failure {
    Failure::Corrupt(format!("the {what} cannot be read: {error}"))
}

fn id(of: &Document) -> Result<AttemptId> {
    let text = fields::text(of, "_id")?;
    Ok(AttemptId::from_str(&text).map_err(|error| corrupt("id", error))?)
}

fn slot(of: &Document) -> Result<AttemptSlot> {
    let name = fields::text(of, "purpose")?;
    let purpose = Purpose::parse(&name).ok_or_else(|| corrupt("purpose", format!("`{name}`")))?;
    Ok(AttemptSlot {
        purpose,
        phase: fields::integer(of, "phase")?,
        step: fields::integer(of, "step")?,
        group: fields::integer(of, "group")?,
        sample: fields::integer(of, "sample")?,
    })
}

fn status(of: &Document) -> Result<Status> {
    let name = fields::text(of, "status")?;
    Ok(Status::parse(&name).ok_or_else(|| corrupt("status", format!("`{name}`")))?)
}

/// Returns the JSON text of a field. A missing field is an error.
pub(crate) fn json_text(of: &Document, name: &str) -> Result<String> {
    Ok(json::get(of, name)?.ok_or_else(|| corrupt(name, "the field is missing"))?)
}

/// Parses the document of an attempt, which does not contain the segments.
pub(crate) fn head(of: &Document) -> Result<Head> {
    let start = AttemptStart {
        id: id(of)?,
        slot: slot(of)?,
        number: fields::integer(of, "number")?,
        task: serde_json::from_str(&json_text(of, "task")?)
            .map_err(|error| corrupt("task", error))?,
    };
    let outcome = serde_json::from_str(&json_text(of, "outcome")?);
    let step_rewards = serde_json::from_str(&json_text(of, "step_rewards")?);
    let attempt = Attempt {
        outcome: outcome.map_err(|error| corrupt("outcome", error))?,
        score: fields::optional_number(of, "score")?,
        reward: fields::optional_number(of, "reward")?,
        step_rewards: step_rewards.map_err(|error| corrupt("step rewards", error))?,
        status: status(of)?,
        trajectory: Trajectory::new(),
        ..Attempt::from_start(&start)
    };
    let (len, last) = (fields::integer(of, "segments")?, fields::optional_text(of, "last")?);
    Ok(Head { attempt, len, last })
}

/// Returns the projection to the fields of a summary or a failed attempt.
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

/// Returns the sort order of attempts: by slot, then by try.
pub(crate) fn slot_order() -> Document {
    doc! { "phase": 1, "step": 1, "group": 1, "sample": 1, "number": 1 }
}

/// Parses a summary from the document of an attempt.
pub(crate) fn summary(of: &Document) -> Result<AttemptSummary> {
    Ok(AttemptSummary {
        id: id(of)?,
        slot: slot(of)?,
        number: fields::integer(of, "number")?,
        score: fields::optional_number(of, "score")?,
        reward: fields::optional_number(of, "reward")?,
        status: status(of)?,
        sampled_tokens: fields::integer(of, "sampled_tokens")?,
        tokens: fields::integer(of, "tokens")?,
    })
}

/// Parses a failed attempt from its document.
pub(crate) fn failure(of: &Document) -> Result<FailedAttempt> {
    Ok(FailedAttempt {
        id: id(of)?,
        slot: slot(of)?,
        number: fields::integer(of, "number")?,
        status: status(of)?,
        error: fields::optional_text(of, "error")?,
    })
}
