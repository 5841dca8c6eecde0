//! Evaluations in the course of a run: when one is due, its record, and the checkpoint that it chooses.

use levade_store::EvalKey;
use serde_json::json;
use tracing::info;

use crate::TrainerError;
use crate::best::best_of;
use crate::checkpoint::Position;
use crate::eval_result::EvalResult;
use crate::evaluate::evaluate;
use crate::observe::{Event, Observer, StopFlag};
use crate::trainer::{Leave, Trainer};

impl Trainer {
    /// Steps of the run that were done before the best evaluation.
    async fn best_step(&self) -> Result<Option<u32>, TrainerError> {
        let Some(best) = best_of(&self.evals) else { return Ok(None) };
        // Phases can end before their last step; what is planned of one that is over was done.
        let before =
            self.store.planned_steps().await?.iter().filter(|(phase, _)| *phase < best.phase).count();
        Ok(Some(before as u32 + best.step))
    }

    /// Sees to it that the weights with the highest mean score so far are kept, and marked, if those are the
    /// ones at hand.
    pub(crate) async fn keep_the_best(&mut self, observer: &mut dyn Observer) -> Result<(), TrainerError> {
        let here = self.position.global_step;
        if here == 0 || self.best_step().await? != Some(here) {
            return Ok(());
        }
        if self.latest.as_ref().is_none_or(|latest| latest.position.global_step != here) {
            self.checkpoint(false, observer).await?;
        }
        match &self.latest {
            Some(latest) => self.checkpoints.mark_best(latest),
            None => Ok(()),
        }
    }

    /// Evaluations that an earlier process of the run made before the position it goes on from.
    pub(crate) async fn recall_evals(&mut self, observer: &mut dyn Observer) -> Result<(), TrainerError> {
        let Position { phase, step, evaluated, .. } = self.position;
        let here = EvalKey { phase, step };
        for (key, result) in self.store.evals().await? {
            if key < here || (key == here && evaluated) {
                let result = parse_eval(self.store.place(), key, result)?;
                observer.event(&Event::Evaluated(&result));
                self.evals.push(result);
            }
        }
        Ok(())
    }

    /// Whether the recipe wants an evaluation at the position, and what it is called.
    fn due(&self) -> Option<String> {
        let Position { phase, step, evaluated, .. } = self.position;
        let eval = &self.recipe.eval;
        if evaluated || self.tasks.eval.is_empty() {
            return None;
        }
        let Some(keys) = self.recipe.phase.get(phase as usize) else {
            return Some("without training".to_owned());
        };
        let steps = keys.steps();
        // Phases of one kind are told apart by their number.
        let same = self.recipe.phase.iter().filter(|other| other.name() == keys.name()).count();
        let name = if same > 1 { format!("{} (phase {phase})", keys.name()) } else { keys.name().to_owned() };
        match step {
            0 if phase == 0 => eval.before.then(|| "before training".to_owned()),
            _ if step == steps => Some(format!("after {name}")),
            _ if step > 0 && eval.every > 0 && step.is_multiple_of(eval.every) => {
                Some(format!("{name}, step {step}"))
            }
            _ => None,
        }
    }

    pub(crate) async fn evaluate_if_due(
        &mut self,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<(), Leave> {
        let Some(label) = self.due() else { return Ok(()) };
        let key = EvalKey { phase: self.position.phase, step: self.position.step };
        let recorded = self.store.evals().await?.into_iter().find(|(recorded, _)| *recorded == key);
        let result = match recorded {
            // Where a phase has become longer, it is not the last of it any more.
            Some((_, result)) => EvalResult { label, ..parse_eval(self.store.place(), key, result)? },
            None => {
                let result = evaluate(
                    &self.rollouts,
                    &self.tasks.eval,
                    &self.recipe.eval,
                    key,
                    &label,
                    observer,
                    stop,
                )
                .await?;
                let (result, attempts) = result.ok_or(Leave::Stopped)?;
                self.note_troubles(&attempts, observer).await?;
                self.store.record_eval(key, &json!(result)).await?;
                result
            }
        };
        self.metrics.append(&result.to_json(self.position.global_step))?;
        self.tell_sinks(&result.metrics(self.position.global_step), observer);
        self.position.evaluated = true;
        info!(%key, "evaluated");
        observer.event(&Event::Evaluated(&result));
        self.evals.push(result);
        Ok(self.keep_the_best(observer).await?)
    }
}

fn parse_eval(place: &str, key: EvalKey, result: serde_json::Value) -> Result<EvalResult, TrainerError> {
    serde_json::from_value(result)
        .map_err(|error| TrainerError::Damaged { path: place.into(), why: format!("{key}: {error}") })
}
