//! Withdrawals: tombstones of attempts that must not be used any longer.
//!
//! A withdrawal never replaces a record. It adds a [`Withdrawal`] for each attempt and gives the
//! attempt the status [`Withdrawn`](crate::Status::Withdrawn), so that no query for attempts that
//! count returns it. If the withdrawal erases, the task, the outcome and all segments of the
//! attempt are removed, and so are quotes of the attempt in evaluations. The attempt's id, slot,
//! status, score and reward stay, and so do the step plans that contain the attempt.

use std::collections::HashSet;

use levade_tree::{AttemptId, AttemptSlot, Outcome, Trajectory};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Failure;
use crate::{Attempt, Status};

/// Returns the subject of a withdrawal of all attempts at tasks of the person with the key `key`.
/// The tombstones keep the key, so that no further attempt at tasks of this person is made, even if
/// the recorded tasks are erased.
pub fn person_subject(key: &str) -> String {
    format!("person {key}")
}

/// A request to withdraw attempts from a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WithdrawRequest {
    /// Ids of attempts to withdraw.
    pub attempts: Vec<AttemptId>,
    /// Tasks as JSON. All attempts at a task that equals one of them are withdrawn, whatever their
    /// status.
    pub tasks: Vec<Value>,
    /// Subject under which `tasks` are recorded as withdrawn: the id of a task, or
    /// [`person_subject`]. `None` if only attempts are withdrawn.
    pub task: Option<String>,
    /// Reason that the user gave. It can be empty.
    pub reason: String,
    /// Time of the request as a Unix timestamp in seconds.
    pub at: u64,
    /// Whether the attempts' texts and tokens are erased.
    pub erase: bool,
}

impl WithdrawRequest {
    /// Returns whether the request selects `attempt`, by its id or by its task.
    pub fn selects(&self, attempt: &Attempt) -> bool {
        self.attempts.contains(&attempt.id) || self.tasks.contains(&attempt.task)
    }

    /// Returns the tombstone that this request adds for an attempt, or `None` if the tombstones
    /// `earlier` of the attempt already contain its information. An attempt gets another tombstone
    /// in two cases: it is erased after it was withdrawn, or it is withdrawn with another subject,
    /// so that no further attempt is made at the tasks of that subject.
    pub fn tombstone(&self, attempt: &Attempt, earlier: &[Withdrawal]) -> Option<Withdrawal> {
        let was_erased = earlier.iter().any(|earlier| earlier.erased);
        let has_subject =
            earlier.iter().any(|earlier| self.task.is_none() || earlier.task == self.task);
        if has_subject && (was_erased || !self.erase) {
            return None;
        }
        Some(Withdrawal {
            id: attempt.id,
            slot: attempt.slot,
            number: attempt.number,
            status: earlier.first().map_or(attempt.status, |earlier| earlier.status),
            task: self.task.clone(),
            reason: self.reason.clone(),
            at: self.at,
            erased: self.erase || was_erased,
        })
    }
}

/// The tombstone of a withdrawn attempt: what was withdrawn, when and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Withdrawal {
    /// Id of the withdrawn attempt.
    pub id: AttemptId,
    /// Attempt slot: position of the attempt in the run.
    pub slot: AttemptSlot,
    /// Index of the try in its attempt slot, from 0.
    pub number: u32,
    /// Status that the attempt had before it was withdrawn.
    pub status: Status,
    /// Subject if all attempts at a task or of a person were withdrawn together: the id of the
    /// task, or [`person_subject`] of the person. `None` if single attempts were withdrawn.
    pub task: Option<String>,
    /// Reason that the user gave. It can be empty.
    pub reason: String,
    /// Time of the withdrawal as a Unix timestamp in seconds.
    pub at: u64,
    /// Whether the attempt's texts and tokens were erased.
    pub erased: bool,
}

/// Creates the error for a requested attempt that is not recorded.
pub(crate) fn unknown_attempt_error(id: &AttemptId) -> Failure {
    Failure::Unstorable(format!("attempt {id} is not recorded"))
}

/// Erases the task, the outcome and the tokens of an attempt.
pub(crate) fn erase_attempt(attempt: &mut Attempt) {
    attempt.task = Value::Null;
    attempt.outcome = Outcome::initial();
    attempt.trajectory = Trajectory::new();
}

/// Erases quotes of attempts from a JSON document, and returns whether the document has changed.
/// `names` are the names of the attempts' slots. In every object whose field `attempt` is one of
/// these names, all other strings become empty.
pub fn erase_quotes(document: &mut Value, names: &HashSet<String>) -> bool {
    let mut changed = false;
    match document {
        Value::Object(fields) => {
            let quotes = fields.get("attempt").and_then(Value::as_str);
            let quotes = quotes.is_some_and(|name| names.contains(name));
            for (key, value) in fields.iter_mut() {
                match value {
                    Value::String(text) if quotes && key != "attempt" && !text.is_empty() => {
                        text.clear();
                        changed = true;
                    }
                    value => changed |= erase_quotes(value, names),
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                changed |= erase_quotes(item, names);
            }
        }
        _ => {}
    }
    changed
}

#[cfg(test)]
mod tests {
    use levade_tree::{Purpose, RunId};
    use serde_json::json;

    use super::*;
    use crate::AttemptStart;

    fn request(task: Option<&str>, erase: bool) -> WithdrawRequest {
        let task = task.map(str::to_owned);
        WithdrawRequest { task, erase, ..WithdrawRequest::default() }
    }

    fn quote(attempt: &str, completion: &str) -> serde_json::Value {
        json!({"attempt": attempt, "completion": completion, "n": 1})
    }

    #[test]
    fn withdrawal_with_another_subject_adds_a_tombstone() {
        let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 0, group: 0, sample: 0 };
        let id = AttemptId::new(&RunId("r".into()), &slot, 0);
        let attempt = Attempt::from_start(&AttemptStart { id, slot, number: 0, task: json!({}) });
        let erased = request(Some("t"), true).tombstone(&attempt, &[]).unwrap();
        let earlier = [erased];
        for (task, erase) in [(None, false), (None, true), (Some("t"), true)] {
            assert_eq!(request(task, erase).tombstone(&attempt, &earlier), None, "{task:?}");
        }
        let added = request(Some("person alice"), false).tombstone(&attempt, &earlier).unwrap();
        assert_eq!((added.task.as_deref(), added.erased), (Some("person alice"), true));
        let withdrawn = [request(None, false).tombstone(&attempt, &[]).unwrap()];
        assert!(request(Some("t"), false).tombstone(&attempt, &withdrawn).is_some());
        assert!(request(None, true).tombstone(&attempt, &withdrawn).is_some());
    }

    #[test]
    fn erase_quotes_clears_only_named_attempts() {
        let names = HashSet::from(["eval/0/0/1/0".to_owned()]);
        let mut document =
            json!({"a": [quote("eval/0/0/1/0", "secret"), quote("eval/0/0/2/0", "kept")]});
        assert!(erase_quotes(&mut document, &names));
        let erased = json!({"a": [quote("eval/0/0/1/0", ""), quote("eval/0/0/2/0", "kept")]});
        assert_eq!(document, erased);
        assert!(!erase_quotes(&mut document, &names), "nothing is left to erase");
    }
}
