//! Demonstrations by an external policy, by the trained policy itself, from completions in the rows
//! of tasks, or from recorded sessions. Attempts with a good score are kept.
//!
//! Such attempts are made (sessions: copied), scored and recorded like all other attempts, so a
//! resumed run does not repeat them.

use levade_agent::{Teacher, parse_row_completions};
use levade_policy::SamplingParams;
use levade_recipe::{SftKeys, SourceKeys};
use levade_store::{Attempt, Status};
use levade_tasks::Task;
use levade_tree::{AttemptSlot, Purpose};

use super::imitate::has_replaceable_opening;
use crate::TrainerError;
use crate::observe::{Observer, StopFlag};
use crate::random::shuffled_indices;
use crate::rollout::AttemptMaker;
use crate::sessions::num_sessions;
use crate::tasks::Tasks;

/// Makes attempts at training tasks, in a seeded order, until enough of them reach the minimum
/// score of a demonstration. Returns these attempts with their tasks. The teacher acts in the
/// attempts; without a teacher, the policies of the agents act. Returns `None` if the run is
/// stopped. Attempts that were recorded until then remain recorded.
///
/// # Errors
/// Returns [`TrainerError::TooFewLessons`] if too few attempts reach the score, and an error if
/// attempts cannot be made.
pub(super) async fn make_demonstrations(
    phase: u32,
    (keys, source): (&SftKeys, &SourceKeys),
    teacher: Option<&Teacher>,
    tasks: &Tasks,
    rollouts: &AttemptMaker,
    observer: &mut dyn Observer,
    stop: &StopFlag,
) -> Result<Option<Vec<(Attempt, Task)>>, TrainerError> {
    let mut rollouts = rollouts.clone();
    if let Some(teacher) = teacher {
        rollouts.agents = rollouts.agents.with_teacher(source, teacher)?;
    }
    if source.sessions {
        rollouts.sessions = rollouts.sessions.with_demonstrations();
    }
    let mut remaining = demonstration_slots(phase, source, rollouts.seed, tasks);
    let wanted = keys.demonstrations;
    let max_tried = source.max_tasks(keys.demonstrations);
    let mut found = Vec::with_capacity(wanted);
    let mut tried = 0;
    while found.len() < wanted && tried < max_tried {
        let next = (wanted - found.len()).min(max_tried - tried);
        let batch: Vec<_> = remaining.by_ref().take(next).collect();
        if batch.is_empty() {
            break;
        }
        tried += batch.len();
        let made = rollouts.run(&batch, &SamplingParams::default(), observer, stop).await?;
        let Some(made) = made else { return Ok(None) };
        let with_task = made.into_iter().zip(batch.into_iter().map(|(_, task)| task));
        found.extend(with_task.filter(|(attempt, _)| {
            can_imitate(attempt, source.min_score)
                && (keys.system.is_none() || has_replaceable_opening(&attempt.trajectory))
        }));
    }
    if found.len() < wanted {
        let teacher = source.to_string();
        let min_score = source.min_score;
        let found = found.len();
        return Err(TrainerError::TooFewLessons {
            phase,
            teacher,
            min_score,
            found,
            tried,
            wanted,
        });
    }
    Ok(Some(found))
}

/// Returns the slots in which demonstrations can be made, with their tasks. A task has one slot or,
/// if the phase imitates sessions, one slot for each of its sessions.
fn demonstration_slots<'t>(
    phase: u32,
    source: &'t SourceKeys,
    seed: u64,
    tasks: &'t Tasks,
) -> impl Iterator<Item = (AttemptSlot, Task)> + 't {
    let numbered = demonstration_tasks(phase, source, seed, tasks).zip(0..);
    numbered.flat_map(move |(task, group)| {
        let num_samples = if source.sessions { num_sessions(&task) } else { 1 };
        let purpose = Purpose::Demonstration;
        (0..num_samples).map(move |sample| {
            (AttemptSlot { purpose, phase, step: 0, group, sample }, task.clone())
        })
    })
}

/// Returns the training tasks in a seeded order. If demonstrations come from a field of the rows or
/// from sessions, returns only the tasks that have the field or a session.
fn demonstration_tasks<'t>(
    phase: u32,
    source: &'t SourceKeys,
    seed: u64,
    tasks: &'t Tasks,
) -> impl Iterator<Item = Task> + 't {
    let order = shuffled_indices(seed, "demonstrations", &[phase], tasks.train_len());
    let tasks = order.into_iter().filter_map(|at| tasks.train(at as usize));
    let can_be = |task: &Task| match &source.field {
        Some(field) => task.row.contains_key(field),
        None => !source.sessions || num_sessions(task) > 0,
    };
    tasks.filter(can_be)
}

/// Checks that a phase will find enough sessions, or enough completions in the rows of its tasks,
/// and that the completions can be parsed. Demonstrations of an external policy are not checked,
/// because the policy is not called.
///
/// # Errors
/// Returns an error if there are too few demonstrations, or if a completion cannot be parsed.
pub(super) fn check_source(
    phase: usize,
    source: &SourceKeys,
    wanted: usize,
    seed: u64,
    tasks: &Tasks,
) -> Result<(), TrainerError> {
    let check_count = |found: usize| {
        let too_few = TrainerError::TooFewDemonstrations { phase, wanted, found };
        if found < wanted { Err(too_few) } else { Ok(()) }
    };
    if source.sessions {
        let slots = demonstration_slots(phase as u32, source, seed, tasks);
        return check_count(slots.take(wanted).count());
    }
    let Some(field) = &source.field else { return Ok(()) };
    let mut found = 0;
    for task in
        demonstration_tasks(phase as u32, source, seed, tasks).take(source.max_tasks(wanted))
    {
        parse_row_completions(&task, field)
            .map_err(|why| TrainerError::WrittenCompletion { task: task.id, why })?;
        found += 1;
    }
    check_count(found)
}

/// Returns whether an attempt can be imitated: it is complete, has sampled tokens, and has a score
/// of at least `min_score`.
fn can_imitate(attempt: &Attempt, min_score: f64) -> bool {
    attempt.status == Status::Completed
        && attempt.outcome.finish.is_complete()
        && attempt.outcome.sampled_tokens > 0
        && attempt.score.is_some_and(|score| score >= min_score)
}
