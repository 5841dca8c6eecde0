//! Runs the training loop over phases and steps.
//!
//! A run has three parts: a [`RunContext`], which stays the same, a [`RunProgress`], which each
//! step changes, and a [`Reporter`]. Phases, evaluations and checkpoints receive only the parts
//! that they need. The [`Trainer`] alone determines their order.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use levade_agent::Teacher;
use levade_agent::environments::Environments;
use levade_policy::{crash_point, run_blocking};
use levade_recipe::{Phase, Recipe, RlKeys, RunKeys, TaskSource};
use levade_store::Store;
use levade_tasks::MatchingRule;
use serde_json::json;
use tracing::{Instrument, info, info_span};

use crate::TrainerError;
use crate::agents::{AgentSpec, Agents};
use crate::best::BestCheckpoint;
use crate::checkpoint::{Checkpoint, CheckpointDir, Position, Versions};
use crate::context::RunContext;
use crate::eval_result::EvalResult;
use crate::exit::EarlyExit;
use crate::gain::{ScoreGain, milestone_evals};
use crate::measure::{evaluate_if_due, restore_evals, save_if_best};
use crate::metrics::Metrics;
use crate::observe::{Event, Observer, StopFlag};
use crate::origin::{OfferedTool, RunOrigin, task_matching_rule};
use crate::past::PastVersionPools;
use crate::phase::{PhaseRun, check_phases, enter_phase};
use crate::policies::{Policies, Policy};
use crate::progress::RunProgress;
use crate::prompt_version::PromptVersion;
use crate::reference::restore_references;
use crate::reporter::Reporter;
use crate::rollout::{AttemptMaker, AttemptWarnings};
use crate::rules::Rules;
use crate::run_dir::{LockedRunDir, StartMode};
use crate::save::save_checkpoint;
use crate::scoring::{CustomScorers, Scorers};
use crate::tasks::{Tasks, check_tasks};
use crate::tracer::Tracer;

/// Components that the program provides to a [`Trainer`]: policies, agents, scorers, environments
/// and teachers.
pub struct RunParts {
    /// The policies of the recipe.
    pub policies: Vec<Policy>,
    /// The agents of the recipe.
    pub agents: Vec<AgentSpec>,
    /// Scorers that replace the recipe's scorers of the same names.
    pub scorers: CustomScorers,
    /// The environments of the recipe, which provide its tasks.
    pub environments: Environments,
    /// Start of the run as a Unix timestamp in seconds, which chat templates see as the current
    /// time. For a run to resume, it is the value of [`started_at`](crate::started_at). For a new
    /// run, it is the present.
    pub started_at: u64,
    /// Files from which the model was loaded. A run can be resumed only with the same files.
    pub model_files: Vec<PathBuf>,
    /// External policies that phases imitate, by policy name.
    pub teachers: BTreeMap<String, Teacher>,
}

/// Outcome of a call of [`Trainer::run`].
#[derive(Debug)]
pub enum RunEnd {
    /// All phases have finished.
    Finished(Summary),
    /// The run stopped at a step boundary, because a stop was requested.
    Stopped {
        /// Checkpoint from which the run can resume. `None` if no step was finished yet.
        checkpoint: Option<PathBuf>,
        /// Number of finished steps over all phases.
        done: u32,
        /// Number of steps of all phases.
        steps: u32,
    },
}

/// Results of a run that has finished all phases.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// All evaluations of the run in order, from before training to after the last phase.
    pub evals: Vec<EvalResult>,
    /// Gains in the mean score, one for each phase that was evaluated: from the evaluation before
    /// the phase to its last evaluation.
    pub gains: Vec<ScoreGain>,
    /// Last checkpoint. `None` if the recipe has no phases.
    pub checkpoint: Option<PathBuf>,
    /// Best checkpoint. `None` if fewer than two checkpoints were evaluated, or if the evaluation
    /// before training was the best.
    pub best: Option<BestCheckpoint>,
    /// Number of finished steps over all phases.
    pub steps: u32,
    /// Duration of the run in this process. The time of earlier processes is not included.
    pub elapsed: Duration,
    /// Failures of components around the model during the run, such as failed tool calls.
    pub warnings: AttemptWarnings,
}

/// A training run, which executes phases, steps, evaluations and checkpoints in order.
pub struct Trainer {
    run: RunContext,
    progress: RunProgress,
    reporter: Reporter,
    /// Notes for the user, reported when the run starts.
    notes: Vec<String>,
}

impl Trainer {
    /// Prepares a run: validates its inputs before anything is sampled, and locks the run
    /// directory. To resume a run, also loads the newest complete checkpoint. Cancel safe: if the
    /// future is dropped before the store of a new run is open, the directory contains no recipe.
    ///
    /// # Errors
    /// Returns an error if the recipe, the tasks or the directory do not allow the run. Nothing is
    /// written until all other checks have passed.
    pub async fn new(
        recipe: Recipe,
        parts: RunParts,
        start: StartMode,
    ) -> Result<Self, TrainerError> {
        let RunParts { policies, agents, scorers, environments, started_at, model_files, teachers } =
            parts;
        let policies = Policies::new(policies, &recipe.engine);
        let past = PastVersionPools::new(&recipe, &policies)?;
        let agents = Agents::new(&recipe, &agents, &policies, &past)?;
        let matching = match start {
            StartMode::Fresh => MatchingRule::default(),
            StartMode::Resume => task_matching_rule(&recipe.run.folder)?,
        };
        let tasks = Tasks::load_by(&recipe, &environments, matching).await?;
        let scorers = Scorers::new(&recipe.reward, scorers);
        check_tasks(&recipe, &scorers, &tasks, &agents).await?;
        check_phases(&recipe, &tasks, &agents)?;
        for (i, phase) in recipe.phase.iter().enumerate() {
            if let (Phase::Rl(keys), Some(scorer)) = (phase, scorers.group_scorers().next())
                && keys.needs_baseline()
            {
                return Err(TrainerError::GreedyUnscorable { phase: i, scorer: scorer.to_owned() });
            }
            for name in recipe.trained_policies_in(phase) {
                let policy_learner = policies.policy_learner(&name)?;
                let needs =
                    |needs: fn(&RlKeys) -> bool| matches!(phase, Phase::Rl(keys) if needs(keys));
                if needs(RlKeys::needs_reference) && policy_learner.reference.is_none() {
                    return Err(TrainerError::NoReference(i));
                }
                if needs(RlKeys::needs_critic) && policy_learner.critic.is_none() {
                    return Err(TrainerError::NoCritic(i));
                }
            }
            if let (Phase::Prompt(_), Some(scorer)) = (phase, scorers.group_scorers().next()) {
                return Err(TrainerError::PromptUnscorable { phase: i, scorer: scorer.to_owned() });
            }
            if let (Phase::Sft(_), Some(name)) = (phase, phase.teacher())
                && !teachers.contains_key(name)
                && !recipe.trained_policies().iter().any(|own| own == name)
            {
                return Err(TrainerError::MissingPart(format!("the teacher {name}")));
            }
        }
        let current = {
            let recipe = recipe.clone();
            let tools = OfferedTool::collect(&tasks, &agents)?;
            let listings = tasks.listings.clone();
            run_blocking(move || {
                RunOrigin::collect(&recipe, started_at, &model_files, tools, listings, matching)
            })
        };
        let current =
            current.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
        for source in &recipe.tasks {
            if let TaskSource::Sessions(keys) = source {
                // Imitation needs the tokens of the sessions only.
                current.check_sessions(&keys.path, !recipe.only_imitates_sessions())?;
            }
        }
        let (dir, store, origin, mut notes) = match start {
            StartMode::Fresh => {
                let dir = LockedRunDir::create(&recipe)?;
                current.write(dir.root())?;
                dir.write_recipe(&recipe)?;
                let store = dir.open_new_store(&recipe.run).await?;
                (dir, store, current, Vec::new())
            }
            StartMode::Resume => resume_run(&recipe, current).await?,
        };
        let checkpoints = CheckpointDir::open(dir.checkpoints())?;
        let (latest, damaged) = checkpoints.newest_intact()?;
        notes.extend(damaged);
        let position = latest.as_ref().map(|checkpoint| checkpoint.position).unwrap_or_default();
        let versions: Versions = policies
            .trained()
            .map(|(name, _)| {
                (name.to_owned(), latest.as_ref().map_or(0, |latest| latest.version(name)))
            })
            .collect();
        for (name, policy_learner) in policies.trained() {
            let policy_dir =
                latest.as_ref().map(|checkpoint| policies.policy_dir(&checkpoint.dir, name));
            policy_learner.restore(policy_dir.as_deref()).await?;
            policies.publish(name, versions[name]).await?;
        }
        past.restore(&policies, latest.as_ref().map(|_| &versions)).await?;
        let reporter = Reporter::open(&recipe, &dir, latest.as_ref())?;
        let tracer = Tracer::open(&recipe, dir.root(), started_at, &agents)?;
        let withdrawn = store.withdrawals().await?.into_iter().filter_map(|w| w.task).collect();
        let prompts = latest.as_ref().map(|checkpoint| checkpoint.prompts.clone());
        let prompts = prompts.unwrap_or_default();
        let improved =
            |agents: Agents, PromptVersion { agent, target, text, .. }: &PromptVersion| {
                agents.with_prompt_text(agent, target, text)
            };
        let rollouts = AttemptMaker {
            agents: prompts.iter().fold(agents, improved),
            scorers,
            seed: recipe.run.seed,
            concurrency: recipe.concurrency(),
            store: store.clone(),
            tracer,
            sessions: tasks.records.clone(),
            withdrawn: Arc::new(withdrawn),
        };
        let untrained = recipe.untrained_agents();
        let constant_length = tasks.max_tokens(&rollouts.agents)?;
        let run = RunContext {
            recipe,
            tasks,
            rollouts,
            policies,
            past,
            untrained,
            constant_length,
            teachers,
            store,
            checkpoints,
            origin,
            run_dir: dir,
        };
        let progress = RunProgress { position, versions, prompts, latest, evals: Vec::new() };
        Ok(Trainer { run, progress, reporter, notes })
    }

    /// Returns the locked directory of the run.
    pub fn run_dir(&self) -> &LockedRunDir {
        &self.run.run_dir
    }

    /// Returns the number of steps of each phase.
    fn steps_by_phase(&self) -> Vec<u32> {
        self.run.recipe.phase.iter().map(Phase::steps).collect()
    }

    /// Returns the total number of steps over all phases.
    fn total_steps(&self) -> u32 {
        self.steps_by_phase().into_iter().fold(0, u32::saturating_add)
    }

    /// Trains until all phases are finished, or until `stop` requests a stop.
    ///
    /// # Errors
    /// Returns an error if a failure is not limited to one attempt. The run can be resumed, because
    /// every recorded attempt, and all progress up to the newest checkpoint, is kept.
    pub async fn run(
        &mut self,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<RunEnd, TrainerError> {
        let start = Instant::now();
        let all = self.total_steps();
        info!(folder = %self.run.run_dir.root().display(), done = self.progress.position.global_step, steps = all, "run started");
        let ended = self.run_phases(observer, stop).await;
        // No caller waits any longer for attempts in progress: oversampled attempts, and attempts
        // that a stop request interrupted.
        let abandoned = self.run.store.abandon_running().await;
        let ended = match ended {
            Err(EarlyExit::Failed(error)) => Err(EarlyExit::Failed(error)),
            ended => abandoned.map_err(EarlyExit::from).and(ended),
        };
        info!(
            done = self.progress.position.global_step,
            seconds = start.elapsed().as_secs_f64(),
            "run ended"
        );
        self.reporter.close(ended.is_ok(), observer);
        let tracer = self.run.rollouts.tracer.clone();
        let closed = run_blocking(move || tracer.close());
        if let Ok(Some(loss)) = closed.await {
            observer.event(&Event::Note(loss));
        }
        match ended {
            Ok(()) => Ok(RunEnd::Finished(Summary {
                gains: ScoreGain::between(&milestone_evals(&self.progress.evals), &*self.run.store)
                    .await?,
                evals: self.progress.evals.clone(),
                checkpoint: self.progress.latest.as_ref().map(|checkpoint| checkpoint.dir.clone()),
                best: BestCheckpoint::select(&self.progress.evals, self.run.checkpoints.best_dir()),
                steps: self.progress.position.global_step,
                elapsed: start.elapsed(),
                warnings: self.reporter.warnings.clone(),
            })),
            Err(EarlyExit::Stopped) => {
                // The weights are the weights at the last step boundary: attempts do not change
                // weights, and every step that started has finished.
                if self.progress.latest.as_ref().map_or(0, |c| c.position.global_step)
                    < self.progress.position.global_step
                {
                    observer.event(&Event::Note(format!(
                        "the run has stopped; writing a checkpoint of step {}",
                        self.progress.position.global_step
                    )));
                    self.write_checkpoint(false, observer).await?;
                }
                let checkpoint =
                    self.progress.latest.as_ref().map(|checkpoint| checkpoint.dir.clone());
                Ok(RunEnd::Stopped {
                    checkpoint,
                    done: self.progress.position.global_step,
                    steps: all,
                })
            }
            Err(EarlyExit::Failed(error)) => Err(error),
        }
    }

    async fn run_phases(
        &mut self,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<(), EarlyExit> {
        let steps = self.steps_by_phase();
        for note in self.run.checkpoints.find()?.damaged.iter().chain(&self.notes) {
            observer.event(&Event::Note(note.clone()));
        }
        observer.event(&Event::Started {
            from: self.progress.latest.as_ref().map(|checkpoint| checkpoint.dir.clone()),
            done: self.progress.position.global_step,
            steps: self.total_steps(),
        });
        if self.progress.latest.is_none() {
            self.run.tasks.notes.iter().for_each(|note| observer.event(&Event::Note(note.clone())));
        }
        restore_evals(&self.run, &mut self.progress, observer).await?;
        save_if_best(&self.run, &mut self.progress, &mut self.reporter, observer).await?;
        self.evaluate_if_due(observer, stop).await?;
        for (phase, &phase_steps) in
            steps.iter().enumerate().skip(self.progress.position.phase as usize)
        {
            enter_phase(&self.run, &mut self.progress, phase).await?;
            let keys = self.run.recipe.phase[phase].clone();
            restore_references(&self.run, &self.progress, &keys).await?;
            observer.event(&Event::PhaseStarted {
                phase,
                kind: keys.name().to_owned(),
                done: self.progress.position.step,
                steps: phase_steps,
            });
            let mut current =
                PhaseRun::new(phase, &keys, &self.run, &self.progress, observer, stop).await?;
            while self.progress.position.step < phase_steps
                && !self.has_reached_target(&keys).await?
            {
                if stop.is_stopped() {
                    return Err(EarlyExit::Stopped);
                }
                let step = self.progress.position.step;
                let span = info_span!("step", phase, step);
                let done = current.run_step(&self.run, &self.progress, step, observer, stop);
                let (mut metrics, attempts) = done.instrument(span).await?;
                if let Some(best) = current.best_prompt(&self.run.recipe) {
                    let rollouts = &mut self.run.rollouts;
                    let PromptVersion { agent, target, text, .. } = &best;
                    rollouts.agents = rollouts.agents.with_prompt_text(agent, target, text);
                    self.progress.prompts.set(best);
                }
                let retried =
                    self.reporter.report_warnings(&self.run.rollouts, &attempts, observer).await?;
                metrics.add("training/retried", retried as f64);
                self.reporter.add_handoffs(&self.run.policies, &mut metrics);
                self.finish_step(&keys, phase_steps, metrics, observer).await?;
                self.evaluate_if_due(observer, stop).await?;
            }
            if self.progress.position.step < phase_steps {
                self.end_phase_early(&keys, phase_steps, observer).await?;
            }
        }
        Ok(())
    }

    /// Returns whether the latest evaluation reached the success rate at which the phase stops
    /// early. Returns false if the store contains a further step, because the phase then did not
    /// stop here.
    async fn has_reached_target(&self, keys: &Phase) -> Result<bool, TrainerError> {
        let Position { phase, step, .. } = self.progress.position;
        let here = self
            .progress
            .evals
            .last()
            .filter(|eval| step > 0 && (eval.phase, eval.step) == (phase, step));
        let (Some(eval), Some(until)) = (here, keys.early_stop_success()) else { return Ok(false) };
        Ok(eval.selection_success() >= until
            && self.run.store.step_plan(phase, step).await?.is_none())
    }

    /// Ends a phase before its last step. Writes a checkpoint that marks the end of the phase, from
    /// which the next phase starts.
    async fn end_phase_early(
        &mut self,
        keys: &Phase,
        steps: u32,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainerError> {
        let Position { phase, step, global_step, .. } = self.progress.position;
        observer.event(&Event::Note(format!(
            "phase {phase} ({}) ends after step {step} of {steps}: the success rate on held-out \
             tasks has reached `phase.{phase}.until` = {}",
            keys.name(),
            keys.early_stop_success().unwrap_or_default()
        )));
        let is_written =
            |latest: &Checkpoint| latest.phase_end && latest.position.global_step == global_step;
        if !self.progress.latest.as_ref().is_some_and(is_written) {
            self.write_checkpoint(true, observer).await?;
        }
        Ok(())
    }

    /// Completes a step after the optimizer update: publishes the new weights, records the metrics,
    /// and writes a checkpoint if one is due.
    async fn finish_step(
        &mut self,
        keys: &Phase,
        steps: u32,
        mut metrics: Metrics,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainerError> {
        self.progress.position.step += 1;
        self.progress.position.global_step += 1;
        self.progress.position.evaluated = false;
        let Position { phase, step, global_step, .. } = self.progress.position;
        let trained = self.run.recipe.trained_policies_in(keys);
        for (name, _) in self.run.policies.trained_among(&trained) {
            let version = self.progress.versions.entry(name.to_owned()).or_default();
            *version += 1;
            self.run.policies.publish(name, *version).await?;
            self.run.past.take_due_snapshots(&self.run.policies, name, *version).await?;
        }
        let head = [("phase", json!(phase)), ("kind", json!(keys.name())), ("step", json!(step))];
        let head = head.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        metrics.add("training/global_step", f64::from(global_step));
        self.reporter.report(&metrics.to_json(head), global_step, &metrics, observer)?;
        crash_point("metrics_written");
        info!(phase, kind = keys.name(), step, steps, version = global_step, "completed a step");
        observer.event(&Event::Step {
            phase: phase as usize,
            kind: keys.name().to_owned(),
            step,
            steps,
            metrics,
        });
        let every = self.run.recipe.run.checkpoint_every;
        if step == steps || (every > 0 && global_step.is_multiple_of(every)) {
            self.write_checkpoint(step == steps, observer).await?;
        }
        Ok(())
    }

    async fn write_checkpoint(
        &mut self,
        phase_end: bool,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainerError> {
        save_checkpoint(&self.run, &mut self.progress, &mut self.reporter, phase_end, observer)
            .await
    }

    async fn evaluate_if_due(
        &mut self,
        observer: &mut dyn Observer,
        stop: &StopFlag,
    ) -> Result<(), EarlyExit> {
        evaluate_if_due(&self.run, &mut self.progress, &mut self.reporter, observer, stop).await
    }
}

/// Opens the directory and the store of a run to resume, and applies the phase lengths of the
/// current recipe. Also returns the record of the run's inputs, and notes for the user.
async fn resume_run(
    recipe: &Recipe,
    current: RunOrigin,
) -> Result<(LockedRunDir, Arc<dyn Store>, RunOrigin, Vec<String>), TrainerError> {
    let (dir, earlier) = LockedRunDir::resume(recipe)?;
    let (mut origin, mut notes) = match RunOrigin::read(dir.root())? {
        Some(mut origin) => {
            let notes = origin.check_unchanged(&current, dir.root())?;
            (origin, notes)
        }
        None => {
            let mut origin = current;
            origin.rules = Rules::default();
            (origin, Vec::new())
        }
    };
    let store = dir.open_store(&recipe.run, StartMode::Resume).await?;
    // The directory is locked or the run is leased, so no other process is generating attempts.
    store.abandon_running().await?;
    notes.extend(origin.update_lengths(&earlier, recipe, &*store).await?);
    origin.write(dir.root())?;
    // The remaining differences are permitted ones. Attempts in the store carry the run's original
    // name, so keep it.
    let run = RunKeys { name: earlier.run.name.clone(), ..recipe.run.clone() };
    let present = Recipe { run, ..recipe.clone() };
    if present != earlier {
        dir.write_recipe(&present)?;
    }
    Ok((dir, store, origin, notes))
}
