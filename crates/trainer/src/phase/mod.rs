//! Runs the steps of a phase: selects what each step trains on, and trains on it.

mod describe;
mod diversity;
mod enter;
mod imitate;
mod prompt;
mod rl;
mod sft;
mod teacher;

use std::collections::{HashMap, HashSet};

use levade_recipe::{Phase, Recipe, SftKeys};
use levade_store::{Attempt, Store};
use levade_tree::{AttemptId, RunId, Trajectory};

use crate::TrainerError;
use crate::agents::Agents;
use crate::context::RunContext;
use crate::exit::EarlyExit;
use crate::metrics::Metrics;
use crate::observe::{Observer, StopFlag};
use crate::progress::RunProgress;
use crate::prompt_version::PromptVersion;
use crate::tasks::{TaskOrder, Tasks};

pub(crate) use enter::enter_phase;
pub use imitate::with_copies;
use prompt::PromptPhase;
use rl::RlPhase;
pub(crate) use rl::group_positions;
use sft::SftPhase;

/// A phase that the run currently executes, by kind.
pub(crate) enum PhaseRun {
    Sft(Box<SftPhase>),
    Rl(Box<RlPhase>),
    Prompt(Box<PromptPhase>),
}

/// Checks that no phase will fail for lack of input: training tasks must exist, demonstrations must
/// suffice, and curricula must fit the tasks.
///
/// # Errors
/// Returns the error of the first phase that would fail.
pub fn check_phases(recipe: &Recipe, tasks: &Tasks, agents: &Agents) -> Result<(), TrainerError> {
    if tasks.train_len() == 0 && !recipe.phase.is_empty() {
        return Err(TrainerError::NothingToTrainOn(describe_missing_tasks(recipe, tasks)));
    }
    let mut phases = recipe.phase.iter().enumerate();
    phases.try_for_each(|(index, phase)| PhaseRun::check_phase(index, phase, recipe, tasks, agents))
}

/// Describes why there are no training tasks, and what the user can do.
fn describe_missing_tasks(recipe: &Recipe, tasks: &Tasks) -> String {
    if !recipe.has_sessions() {
        return "every task is held out, so there is nothing to train on: hold out fewer tasks, or \
                add a source whose questions no other source holds out"
            .into();
    }
    let size = recipe.session_group();
    let reason = match tasks.notes.join("; ") {
        reason if reason.is_empty() => "none is recorded".into(),
        reason => reason,
    };
    format!(
        "the sessions form no group of {size}, so there is nothing to train on: {reason}; record \
         more sessions at the same task, or set `group_size` of the phase to at most their number"
    )
}

impl PhaseRun {
    fn check_phase(
        index: usize,
        phase: &Phase,
        recipe: &Recipe,
        tasks: &Tasks,
        agents: &Agents,
    ) -> Result<(), TrainerError> {
        match phase {
            // An external policy is not called before the phase.
            Phase::Sft(SftKeys { source: Some(source), demonstrations, .. }) => {
                teacher::check_source(index, source, *demonstrations, recipe.run.seed, tasks)
            }
            Phase::Sft(keys) => {
                // The name of the run does not matter here, because nothing is recorded.
                let run = RunId(String::new());
                sft::solution_demonstrations(index, keys, recipe, tasks, agents, &run).map(|_| ())
            }
            Phase::Rl(keys) => {
                let curriculum = keys.curriculum.as_ref();
                TaskOrder::of_phase(recipe.run.seed, index as u32, tasks, curriculum).map(|_| ())
            }
            Phase::Prompt(keys) => {
                prompt::check_prompt_phase(index, keys, recipe.run.seed, tasks, agents)
            }
        }
    }

    /// Starts the phase with this index, or resumes it at the step in `progress`.
    pub async fn new(
        index: usize,
        phase: &Phase,
        run: &RunContext,
        progress: &RunProgress,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<Self, EarlyExit> {
        let phase = phase.clone();
        let number = index as u32;
        Ok(match phase.clone() {
            Phase::Sft(keys) => PhaseRun::Sft(Box::new(
                SftPhase::new(phase, number, keys, run, observer, stop).await?,
            )),
            Phase::Rl(keys) => {
                PhaseRun::Rl(Box::new(RlPhase::new(phase, number, *keys, run, progress).await?))
            }
            Phase::Prompt(keys) => {
                let done = progress.steps_done(number);
                PhaseRun::Prompt(Box::new(PromptPhase::new(number, keys, run, done, stop).await?))
            }
        })
    }

    /// Runs a step up to its last optimizer step. Returns the metrics of the step and the attempts
    /// that were made for it.
    pub async fn run_step(
        &mut self,
        run: &RunContext,
        progress: &RunProgress,
        step: u32,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<(Metrics, Vec<Attempt>), EarlyExit> {
        match self {
            PhaseRun::Sft(phase) => {
                Ok((phase.run_step(run, progress, step, observer).await?, Vec::new()))
            }
            PhaseRun::Rl(phase) => phase.run_step(run, progress, step, observer, stop).await,
            PhaseRun::Prompt(phase) => phase.run_step(run, step, stop).await,
        }
    }

    /// Returns the best prompt that the phase has found so far. Returns `None` if the phase changes
    /// no prompt of an agent, or has not found a prompt yet.
    pub fn best_prompt(&self, recipe: &Recipe) -> Option<PromptVersion> {
        match self {
            PhaseRun::Rl(_) => None,
            PhaseRun::Sft(phase) => phase.improved_prompt(recipe),
            PhaseRun::Prompt(phase) => phase.best_version(),
        }
    }
}

/// Checks that none of the attempts that a step needs was withdrawn.
///
/// # Errors
/// Returns [`TrainerError::Withdrawn`] if one of the attempts `ids` was withdrawn.
async fn check_not_withdrawn(
    store: &dyn Store,
    ids: impl Iterator<Item = AttemptId>,
) -> Result<(), TrainerError> {
    let ids: HashSet<AttemptId> = ids.collect();
    let withdrawn = store.withdrawals().await?.into_iter().find(|it| ids.contains(&it.id));
    withdrawn.map_or(Ok(()), |withdrawn| Err(TrainerError::Withdrawn(withdrawn.slot)))
}

fn trajectories_by_id(attempts: &[Attempt]) -> HashMap<AttemptId, &Trajectory> {
    attempts.iter().map(|attempt| (attempt.id, &attempt.trajectory)).collect()
}
