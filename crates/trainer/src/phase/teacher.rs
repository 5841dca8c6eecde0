//! Demonstrations by an external policy, by the trained policy itself, or from completions in the
//! rows of tasks. Attempts with a good score are kept.
//!
//! Such attempts are made, scored and recorded like all other attempts, so a resumed run does not
//! repeat them.

use levade_agent::{Teacher, row_completions};
use levade_policy::SamplingParams;
use levade_recipe::{SftKeys, SourceKeys};
use levade_store::{Attempt, Status};
use levade_tasks::Task;
use levade_tree::{AttemptSlot, Purpose};

use super::imitate::has_one_opening;
use crate::TrainerError;
use crate::observe::{Observer, StopFlag};
use crate::random::order;
use crate::rollout::AttemptMaker;
use crate::tasks::Tasks;

/// Returns the attempts that a phase imitates, with their tasks: makes attempts at training tasks
/// in a seeded order, until enough of them reach the minimum score. Without a teacher, the policies
/// of the agents make them. Returns `None` if stopped; attempts recorded until then stay.
///
/// # Errors
/// Returns [`TrainerError::TooFewLessons`] if too few attempts reach the score, and an error if
/// attempts cannot be made.
pub(super) async fn demonstrations(
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
        rollouts.agents = rollouts.agents.taught(source, teacher)?;
    }
    let mut remaining = demonstration_tasks(phase, source, rollouts.seed, tasks).zip(0..);
    let wanted = keys.demonstrations;
    let max_tried = source.max_tasks(keys.demonstrations);
    let mut found = Vec::with_capacity(wanted);
    let mut tried = 0;
    while found.len() < wanted && tried < max_tried {
        let next = (wanted - found.len()).min(max_tried - tried);
        let slot_of = |group| AttemptSlot {
            purpose: Purpose::Demonstration,
            phase,
            step: 0,
            group,
            sample: 0,
        };
        let batch: Vec<_> =
            remaining.by_ref().take(next).map(|(task, group)| (slot_of(group), task)).collect();
        if batch.is_empty() {
            break;
        }
        tried += batch.len();
        let made = rollouts.run(&batch, &SamplingParams::default(), observer, stop).await?;
        let Some(made) = made else { return Ok(None) };
        let with_task = made.into_iter().zip(batch.into_iter().map(|(_, task)| task));
        found.extend(with_task.filter(|(attempt, _)| {
            is_good(attempt, source.min_score)
                && (keys.system.is_none() || has_one_opening(&attempt.trajectory))
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

/// Returns the training tasks in a seeded order. If the source is a field, returns only the tasks
/// whose rows have it.
fn demonstration_tasks<'t>(
    phase: u32,
    source: &'t SourceKeys,
    seed: u64,
    tasks: &'t Tasks,
) -> impl Iterator<Item = Task> + 't {
    let order = order(seed, "demonstrations", &[phase], tasks.train_len());
    let tasks = order.into_iter().filter_map(|at| tasks.train(at as usize));
    let can_be =
        |task: &Task| source.field.as_ref().is_none_or(|field| task.row.contains_key(field));
    tasks.filter(can_be)
}

/// Checks for problems that would stop the phase later: completions that cannot be parsed, or too
/// few of them.
///
/// # Errors
/// Returns an error if there is such a problem. An external policy is not called.
pub(super) fn check(
    phase: usize,
    source: &SourceKeys,
    wanted: usize,
    seed: u64,
    tasks: &Tasks,
) -> Result<(), TrainerError> {
    let Some(field) = &source.field else { return Ok(()) };
    let mut found = 0;
    for task in
        demonstration_tasks(phase as u32, source, seed, tasks).take(source.max_tasks(wanted))
    {
        row_completions(&task, field)
            .map_err(|why| TrainerError::WrittenCompletion { task: task.id, why })?;
        found += 1;
    }
    if found < wanted {
        return Err(TrainerError::TooFewDemonstrations { phase, wanted, found });
    }
    Ok(())
}

/// Returns whether an attempt can be imitated: complete, with sampled tokens, and with at least the
/// score `min_score`.
fn is_good(attempt: &Attempt, min_score: f64) -> bool {
    attempt.status == Status::Completed
        && attempt.outcome.finish.is_complete()
        && attempt.outcome.sampled_tokens > 0
        && attempt.score.is_some_and(|score| score >= min_score)
}
