//! Evaluates at the positions that the recipe sets, records the results, and marks the best
//! checkpoint.

use levade_store::EvalKey;
use serde_json::json;
use tracing::info;

use crate::TrainerError;
use crate::best::find_best_eval;
use crate::checkpoint::Position;
use crate::context::RunContext;
use crate::eval_result::EvalResult;
use crate::evaluate::evaluate;
use crate::exit::EarlyExit;
use crate::observe::{Event, Observer, StopFlag};
use crate::progress::RunProgress;
use crate::reporter::Reporter;
use crate::save::save_checkpoint;

/// Returns whether the best evaluation so far was made with the current weights.
async fn has_best_weights(run: &RunContext, progress: &RunProgress) -> Result<bool, TrainerError> {
    let Some(best) = find_best_eval(&progress.evals) else { return Ok(false) };
    let best = EvalKey { phase: best.phase, step: best.step };
    let planned = run.store.planned_steps().await?;
    let planned = planned.iter().filter(|(phase, _)| *phase == best.phase).count();
    Ok(is_eval_of_position(best, progress.position, planned as u32))
}

/// Returns whether an evaluation was made with the weights at `position`. The start of a phase has
/// the same weights as the end of the previous phase. `planned` is the number of planned steps in
/// the phase of the evaluation. An ended phase has finished all of its planned steps. A prompt
/// phase plans no steps.
fn is_eval_of_position(eval: EvalKey, position: Position, planned: u32) -> bool {
    let Position { phase, step, .. } = position;
    (eval.phase, eval.step) == (phase, step)
        || (step == 0 && eval.phase + 1 == phase && eval.step == planned)
}

/// If the mean score of the current weights is the highest so far, saves the weights in a
/// checkpoint and marks it as the best.
///
/// # Errors
/// Returns an error if the store cannot be read or a checkpoint cannot be written.
pub(crate) async fn save_if_best(
    run: &RunContext,
    progress: &mut RunProgress,
    reporter: &mut Reporter,
    observer: &mut dyn Observer,
) -> Result<(), TrainerError> {
    let here = progress.position.global_step;
    if here == 0 || !has_best_weights(run, progress).await? {
        return Ok(());
    }
    if progress.latest.as_ref().is_none_or(|latest| latest.position.global_step != here) {
        save_checkpoint(run, progress, reporter, false, observer).await?;
    }
    match &progress.latest {
        Some(latest) => run.checkpoints.mark_best(latest),
        None => Ok(()),
    }
}

/// Loads the evaluations before the current position, which an earlier process of the run recorded.
///
/// # Errors
/// Returns an error if the store cannot be read.
pub(crate) async fn restore_evals(
    run: &RunContext,
    progress: &mut RunProgress,
    observer: &mut dyn Observer,
) -> Result<(), TrainerError> {
    let Position { phase, step, evaluated, .. } = progress.position;
    let here = EvalKey { phase, step };
    for (key, result) in run.store.evals().await? {
        if key < here || (key == here && evaluated) {
            let result = parse_eval(run.store.location(), key, result)?;
            observer.event(&Event::Evaluated(Box::new(result.clone())));
            progress.evals.push(result);
        }
    }
    Ok(())
}

/// Returns the label of the evaluation that is due at `position`, or `None` if no evaluation is due
/// there.
fn due_eval_label(run: &RunContext, position: Position) -> Option<String> {
    let Position { phase, step, evaluated, .. } = position;
    let eval = &run.recipe.eval;
    if evaluated || run.tasks.eval.is_empty() {
        return None;
    }
    let Some(keys) = run.recipe.phase.get(phase as usize) else {
        return Some("without training".to_owned());
    };
    let steps = keys.steps();
    // Phases of the same kind are distinguished by their index.
    let same = run.recipe.phase.iter().filter(|other| other.name() == keys.name()).count();
    let name =
        if same > 1 { format!("{} (phase {phase})", keys.name()) } else { keys.name().to_owned() };
    match step {
        0 if phase == 0 => eval.before.then(|| "before training".to_owned()),
        _ if step == steps => Some(format!("after {name}")),
        _ if step > 0 && eval.every > 0 && step.is_multiple_of(eval.every) => {
            Some(format!("{name}, step {step}"))
        }
        _ => None,
    }
}

/// Evaluates the policies if the recipe sets an evaluation at the current position, and keeps the
/// best weights.
///
/// # Errors
/// Returns [`EarlyExit::Stopped`] if a stop was requested, and an error if the evaluation cannot be
/// made, recorded or reported.
pub(crate) async fn evaluate_if_due(
    run: &RunContext,
    progress: &mut RunProgress,
    reporter: &mut Reporter,
    observer: &mut dyn Observer,
    stop: &StopFlag,
) -> Result<(), EarlyExit> {
    let position = progress.position;
    let Some(label) = due_eval_label(run, position) else { return Ok(()) };
    let key = EvalKey { phase: position.phase, step: position.step };
    let recorded = run.store.evals().await?.into_iter().find(|(recorded, _)| *recorded == key);
    let result = match recorded {
        // The label may differ: after a phase became longer, this is no longer its last evaluation.
        Some((_, result)) => EvalResult { label, ..parse_eval(run.store.location(), key, result)? },
        None => {
            let slices = &run.tasks.eval;
            let keys = &run.recipe.eval;
            let result = evaluate(&run.rollouts, slices, keys, key, &label, observer, stop).await?;
            let (result, attempts) = result.ok_or(EarlyExit::Stopped)?;
            reporter.report_warnings(&run.rollouts, &attempts, observer).await?;
            run.store.record_eval(key, &json!(result)).await?;
            result
        }
    };
    let step = position.global_step;
    reporter.report(&result.to_json(step), step, &result.metrics(step), observer)?;
    progress.position.evaluated = true;
    info!(%key, "evaluated");
    observer.event(&Event::Evaluated(Box::new(result.clone())));
    progress.evals.push(result);
    Ok(save_if_best(run, progress, reporter, observer).await?)
}

fn parse_eval(
    index: &str,
    key: EvalKey,
    result: serde_json::Value,
) -> Result<EvalResult, TrainerError> {
    serde_json::from_value(result).map_err(|error| TrainerError::Damaged {
        path: index.into(),
        why: format!("{key}: {error}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_eval_of_position_compares_weights_across_phases() {
        let at = |phase, step| Position { phase, step, ..Position::default() };
        for (eval, position, planned, expected) in [
            ((0, 4), at(0, 4), 4, true),
            ((0, 3), at(0, 4), 4, false),
            // A prompt phase before the evaluation plans no steps.
            ((1, 2), at(1, 2), 2, true),
            ((0, 2), at(1, 2), 0, false),
            // The next phase starts with the last weights of the phase before.
            ((0, 4), at(1, 0), 4, true),
            ((0, 4), at(1, 0), 5, false),
            ((0, 4), at(1, 1), 4, false),
            ((0, 4), at(2, 0), 4, false),
        ] {
            let eval = EvalKey { phase: eval.0, step: eval.1 };
            assert_eq!(
                is_eval_of_position(eval, position, planned),
                expected,
                "{eval:?} {position:?}"
            );
        }
    }
}
