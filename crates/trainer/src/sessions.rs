//! Recorded sessions as tasks: attempts of training that are copied from a record of `levade serve
//! --record` instead of being sampled.
//!
//! Sessions with the same task id form groups of the recipe's group size. The row of such a task
//! contains the ids of its sessions in the field `taken_from`, and the record in the field
//! `record`. The attempt with sample index `n` copies the `n`th session and gets the person of that
//! session. It is a training attempt or, if a phase imitates sessions, a demonstration. A record is
//! always divided into the same groups, unless sessions are added to it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use levade_agent::{SESSION_SOURCE, TakenSession};
use levade_recipe::{Recipe, SessionKeys};
use levade_store::{Status, Store, StoreAccess};
use levade_tasks::{PERSON, Task};
use levade_tree::{AttemptId, AttemptSlot, Purpose};
use serde_json::{Map, Value, json};

use crate::TrainerError;
use crate::run_dir::RECIPE;

/// Field in the row of a session task that contains the ids of the sessions to copy.
const TAKEN: &str = "taken_from";
/// Field in the row of a session task that contains the directory of the recorded sessions.
const RECORD: &str = "record";

/// Field in the row of a session task that contains the people of the sessions. It is absent if no
/// session has a person.
const PERSONS: &str = "taken_persons";

/// Stores of recorded sessions, from which a run copies attempts.
#[derive(Debug, Clone, Default)]
pub struct SessionRecords {
    /// Stores of the recorded sessions, by directory.
    stores: Arc<BTreeMap<String, Arc<dyn Store>>>,
    /// Whether sessions are also copied as demonstrations.
    copies_demonstrations: bool,
}

/// The recorded sessions of one directory, converted to tasks.
pub(crate) struct ListedSessions {
    pub tasks: Vec<Task>,
    /// Notes for the user.
    pub notes: Vec<String>,
    pub store: Arc<dyn Store>,
}

impl SessionRecords {
    pub(crate) fn new(records: impl IntoIterator<Item = (PathBuf, Arc<dyn Store>)>) -> Self {
        let named = records.into_iter().map(|(path, store)| (path.display().to_string(), store));
        SessionRecords { stores: Arc::new(named.collect()), copies_demonstrations: false }
    }

    /// Returns these records for a phase that imitates sessions: demonstrations are then also
    /// copied.
    pub(crate) fn with_demonstrations(&self) -> Self {
        SessionRecords { copies_demonstrations: true, ..self.clone() }
    }

    /// Returns the agent loop that copies the recorded session for an attempt, or `None` if the
    /// attempt is sampled.
    pub(crate) fn session_to_copy(&self, slot: &AttemptSlot, task: &Task) -> Option<TakenSession> {
        let is_copied = match slot.purpose {
            Purpose::Train => true,
            Purpose::Demonstration => self.copies_demonstrations,
            _ => false,
        };
        if !is_copied {
            return None;
        }
        let ids = task.row.get(TAKEN)?.as_array()?;
        let id = ids.get(slot.sample as usize)?.as_str()?.parse().ok()?;
        let store = self.stores.get(task.row.get(RECORD)?.as_str()?)?;
        Some(TakenSession { store: Arc::clone(store), id })
    }
}

/// Returns the task of the attempt in `slot`. If the task stands for several recorded sessions, the
/// result names only the person of the attempt's own session, so that an attempt does not name the
/// people of other sessions.
pub(crate) fn task_of_session(slot: &AttemptSlot, task: &Task) -> Task {
    let mut own = task.clone();
    if let Some(persons) = task.row.get(PERSONS).and_then(Value::as_array) {
        let person = persons.get(slot.sample as usize).or(persons.first());
        let mut row: Map<String, Value> = (*task.row).clone();
        row.insert(PERSON.to_owned(), person.cloned().unwrap_or_default());
        row.remove(PERSONS);
        own.row = row.into();
    }
    own
}

/// Returns the number of recorded sessions that attempts at a task copy, or 0 if the attempts are
/// sampled.
pub(crate) fn num_sessions(task: &Task) -> u32 {
    let ids = task.row.get(TAKEN).and_then(Value::as_array);
    ids.map_or(0, |ids| u32::try_from(ids.len()).unwrap_or(u32::MAX))
}

/// Reads the recorded sessions of a directory as tasks, in groups of `group_size` sessions with the
/// same task id.
///
/// # Errors
/// Returns an error if the directory contains no recorded sessions, or if they cannot be read.
pub(crate) async fn list_sessions(
    keys: &SessionKeys,
    group_size: usize,
) -> Result<ListedSessions, TrainerError> {
    let store = open_record(&keys.path).await?;
    let mut by_task: BTreeMap<String, Vec<(AttemptId, Value)>> = BTreeMap::new();
    let mut unusable = 0;
    for summary in store.summaries(Purpose::Session).await? {
        if summary.status != Status::Completed || summary.sampled_tokens == 0 {
            unusable += 1;
            continue;
        }
        let id = summary.id;
        let session = store.attempt(&id).await?.ok_or(TrainerError::Unrecorded(id))?;
        let name = session.task["id"].as_str().unwrap_or_default().to_owned();
        by_task.entry(name).or_default().push((id, session.task));
    }
    let record = keys.path.display().to_string();
    let mut tasks = Vec::new();
    let mut left = 0;
    for sessions in by_task.into_values() {
        let groups = sessions.chunks_exact(group_size.max(1));
        left += groups.remainder().len();
        for group in groups {
            let [(_, task), ..] = group else { continue };
            let task: Task = serde_json::from_value(task.clone()).map_err(|error| {
                let why = format!("the task of a session cannot be read: {error}");
                TrainerError::Damaged { path: store.location().into(), why }
            })?;
            let mut row: Map<String, Value> = (*task.row).clone();
            let ids: Vec<String> = group.iter().map(|(id, _)| id.to_string()).collect();
            row.insert(TAKEN.to_owned(), json!(ids));
            row.insert(RECORD.to_owned(), json!(record));
            let persons: Vec<Value> =
                group.iter().map(|(_, task)| task["row"][PERSON].clone()).collect();
            if !persons.iter().all(Value::is_null) {
                row.insert(PERSONS.to_owned(), persons.into());
            }
            let agent = Some(&keys.agent).filter(|name| !name.is_empty()).cloned();
            let source = SESSION_SOURCE.to_owned();
            tasks.push(Task { row: row.into(), agent, source, ..task });
        }
    }
    let mut notes = Vec::new();
    for (count, why) in [
        (unusable, "failed, or sampled no token".to_owned()),
        (left, format!("are fewer than the {group_size} of a group at the same task")),
    ] {
        if count > 0 {
            notes.push(format!("{record}: {count} sessions are left out, because they {why}"));
        }
    }
    Ok(ListedSessions { tasks, notes, store })
}

/// Opens the store of recorded sessions in `dir` for reading.
async fn open_record(dir: &Path) -> Result<Arc<dyn Store>, TrainerError> {
    let recipe = dir.join(RECIPE);
    if !recipe.exists() {
        return Err(TrainerError::NoSessions(dir.to_owned()));
    }
    let location = Recipe::store_location(&recipe)?;
    Ok(levade_store_client::open(&location, dir, StoreAccess::Read).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempt_names_only_the_person_of_its_own_session() {
        let row = json!({ "person": "alice", "taken_persons": ["alice", null, ["bob", "eve"]] });
        let task = Task { row: row.as_object().unwrap().clone().into(), ..Task::default() };
        let purpose = Purpose::Train;
        let slot = |sample| AttemptSlot { purpose, phase: 0, step: 0, group: 0, sample };
        let persons = |sample| task_of_session(&slot(sample), &task).persons();
        assert_eq!(persons(0), ["alice"]);
        assert!(persons(1).is_empty());
        assert_eq!(persons(2), ["bob", "eve"]);
        let text = json!(task_of_session(&slot(2), &task)).to_string();
        assert!(!text.contains("alice"), "{text}");
        // A task without sessions stays as it is.
        let row = json!({ "person": "alice" }).as_object().unwrap().clone();
        let plain = Task { row: row.into(), ..Task::default() };
        assert_eq!(task_of_session(&slot(1), &plain), plain);
    }
}
