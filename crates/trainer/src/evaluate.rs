//! Evaluates a policy on held-out tasks, by the score without reward shaping: with greedy sampling,
//! or with several attempts per task.

use levade_recipe::EvalKeys;
use levade_store::{Attempt, EvalKey};
use levade_tasks::Task;
use levade_tree::{AttemptSlot, Kind, Purpose};

use crate::TrainerError;
use crate::eval_result::{EvalResult, TaskSliceResult, UncalledTools};
use crate::observe::{Observer, StopFlag};
use crate::rollout::AttemptMaker;
use crate::tasks::EvalSlice;

/// Evaluates the published policy on the tasks of `slices`. Returns the result and the attempts, in
/// the order of the tasks. Returns `None` if the run is stopped.
///
/// # Errors
/// Returns an error if there are no tasks, if the store cannot be written, or if every attempt
/// failed.
pub async fn evaluate(
    rollouts: &AttemptMaker,
    slices: &[EvalSlice],
    keys: &EvalKeys,
    key: EvalKey,
    label: &str,
    observer: &mut dyn Observer,
    stop: &StopFlag,
) -> Result<Option<(EvalResult, Vec<Attempt>)>, TrainerError> {
    let tasks = slices.iter().flat_map(|slice| &slice.tasks);
    let wanted: Vec<_> = tasks
        .enumerate()
        .flat_map(|(group, task)| {
            let EvalKey { phase, step } = key;
            let group = group as u32;
            let slot_of =
                move |sample| AttemptSlot { purpose: Purpose::Eval, phase, step, group, sample };
            (0..keys.samples).map(move |sample| (slot_of(sample), task.clone()))
        })
        .collect();
    let rollouts =
        AttemptMaker { agents: rollouts.agents.with_evaluation_limits(keys), ..rollouts.clone() };
    let attempts = rollouts.run(&wanted, &keys.params(), observer, stop).await?;
    let Some(attempts) = attempts else { return Ok(None) };
    let samples = keys.samples as usize;

    let mut rest = attempts.iter();
    let mut results = Vec::with_capacity(slices.len());
    let mut counted: Vec<&Attempt> = Vec::new();
    for slice in slices {
        let slice_attempts: Vec<&Attempt> =
            rest.by_ref().take(slice.tasks.len() * samples).collect();
        let result = TaskSliceResult::new(
            &slice.name,
            slice.excluded_from_overall,
            &slice_attempts,
            samples,
        )?;
        results.push(TaskSliceResult { selects: slice.selects, ..result });
        if !slice.excluded_from_overall {
            counted.extend(slice_attempts);
        }
    }
    let overall = TaskSliceResult::new("overall", false, &counted, samples)?;
    let phase = key.phase;
    let step = key.step;
    let label = label.to_owned();
    let uncalled = if overall.used_tool == 0.0 {
        find_completion_without_call(&rollouts, &wanted, &attempts)?
    } else {
        None
    };
    Ok(Some((EvalResult { phase, step, label, overall, slices: results, uncalled }, attempts)))
}

/// Finds the first completion of the first attempt that sampled a token and whose agent has tools.
/// Explains why the completion called no tool. Returns `None` if there is no such attempt.
fn find_completion_without_call(
    rollouts: &AttemptMaker,
    wanted: &[(AttemptSlot, Task)],
    attempts: &[Attempt],
) -> Result<Option<UncalledTools>, TrainerError> {
    let has_tools =
        |task: &Task| rollouts.agents.agent_for(task).is_ok_and(|a| !a.agent.tools.is_empty());
    let sampled = attempts
        .iter()
        .zip(wanted)
        .find(|(a, (_, task))| a.trajectory.sampled_tokens() > 0 && has_tools(task));
    let Some((attempt, (_, task))) = sampled else { return Ok(None) };
    let agent = rollouts.agents.agent_for(task)?;
    let chat = agent.format.chat();
    let tools = agent.agent.tools.specs(task);
    let first =
        attempt.trajectory.segments().iter().filter(|s| s.kind == Kind::Sampled && s.turn == 0);
    let tokens: Vec<u32> = first.flat_map(|segment| segment.tokens.iter().copied()).collect();
    let completion = chat.decode_completion(&tokens);
    let in_reasoning = chat.opened_reasoning(&agent.keys.initial_messages(task), &tools)?.is_some();
    let mut why = chat.why_no_call(&completion, in_reasoning, &tools);
    if tokens.last().is_none_or(|last| !chat.stop_ids().contains(last)) {
        why.push_str("; the completion was truncated at a limit");
    }
    Ok(Some(UncalledTools { attempt: attempt.slot.name(), completion, reason: why }))
}
