//! The loop over phases and steps.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use levade_agent::Teacher;
use levade_agent::environments::Environments;
use levade_agent::tasks::Matching;
use levade_policy::{Learner, crash_point};
use levade_recipe::{Phase, Recipe, RlKeys, RunKeys};
use levade_store::{Attempt, Sqlite, Store};
use serde_json::json;
use tracing::{Instrument, info, info_span};

use crate::TrainerError;
use crate::agents::{AgentParts, Agents};
use crate::batch::Targets;
use crate::best::Best;
use crate::checkpoint::{About, Checkpoint, Checkpoints, Content, Position, Versions};
use crate::eval_result::EvalResult;
use crate::folder::RunFolder;
use crate::gain::{Gain, milestones};
use crate::metrics::{Metrics, MetricsFile};
use crate::observe::{Event, Observer, StopFlag};
use crate::origin::{Offered, Origin, matching};
use crate::phase::{PhaseRun, check_phases};
use crate::policies::{CRITIC, Learns, Models, Policies, Policy};
use crate::rollout::{Rollouts, Troubles};
use crate::scoring::{CustomScorers, Scorers};
use crate::sink::{self, Sink};
use crate::tasks::{Tasks, check_tasks};

/// Parts that a trainer works with.
pub struct Parts {
    /// The policies of the recipe.
    pub policies: Vec<Policy>,
    /// Agents of the recipe.
    pub agents: Vec<AgentParts>,
    /// Scorers in place of those that the recipe has of these names.
    pub scorers: CustomScorers,
    /// The environments of the recipe, in which tasks are found.
    pub environments: Environments,
    /// The moment that chats take for now, in seconds since 1970: that at which the run
    /// [began](crate::begun), or this one for a run that begins.
    pub begun: u64,
    /// Files that the model was read from. A run goes on with none but these.
    pub model_files: Vec<PathBuf>,
    /// Policies of others that phases imitate, by name.
    pub teachers: BTreeMap<String, Teacher>,
}

/// Whether a run begins or goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// In a folder that holds no run.
    Fresh,
    /// From the newest whole checkpoint and the record.
    Resume,
}

/// How a run ended.
#[derive(Debug)]
pub enum Ended {
    /// All phases are done.
    Finished(Summary),
    /// Was asked to stop, and did, at a step boundary.
    Stopped {
        /// Where it goes on from; `None` where no step was done yet.
        checkpoint: Option<PathBuf>,
        /// Steps done.
        done: u32,
        /// Steps of the whole recipe.
        steps: u32,
    },
}

/// A run that is done.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// All evaluations, in order: the first is before training, the last after it.
    pub evals: Vec<EvalResult>,
    /// Gains of each phase.
    pub gains: Vec<Gain>,
    /// The last checkpoint; `None` for a recipe without phases.
    pub checkpoint: Option<PathBuf>,
    /// The best checkpoint; `None` where there was no choice.
    pub best: Option<Best>,
    /// Steps done over all phases.
    pub steps: u32,
    /// How long it took, without what earlier processes of the run did.
    pub elapsed: Duration,
    /// Troubles around the model meanwhile.
    pub troubles: Troubles,
}

/// A run.
pub struct Trainer {
    pub(crate) recipe: Recipe,
    pub(crate) tasks: Tasks,
    pub(crate) rollouts: Rollouts,
    pub(crate) policies: Policies,
    /// How many steps have trained each policy.
    pub(crate) versions: Versions,
    /// Names of the agents whose replies are no targets.
    pub(crate) untrained: Vec<String>,
    /// Policies of others that phases imitate.
    pub(crate) teachers: BTreeMap<String, Teacher>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) checkpoints: Checkpoints,
    pub(crate) metrics: MetricsFile,
    pub(crate) latest: Option<Checkpoint>,
    /// Notes for its user at the beginning.
    notes: Vec<String>,
    pub(crate) origin: Origin,
    pub(crate) position: Position,
    pub(crate) evals: Vec<EvalResult>,
    troubles: Troubles,
    /// For how long shared devices had been handed over when the last step was done.
    turned: Duration,
    sinks: Vec<Box<dyn Sink>>,
    folder: RunFolder,
}

/// Leaves the loop early.
pub(crate) enum Leave {
    Stopped,
    Failed(TrainerError),
}

impl<E: Into<TrainerError>> From<E> for Leave {
    fn from(error: E) -> Self {
        Leave::Failed(error.into())
    }
}

impl Trainer {
    /// Prepares a run: checks what can be checked before anything is sampled, takes the folder, and where it
    /// goes on, loads the newest whole checkpoint.
    ///
    /// # Errors
    /// When the recipe, the tasks or the folder do not allow it. Nothing is written before everything else is
    /// checked.
    pub async fn new(recipe: Recipe, parts: Parts, start: Start) -> Result<Self, TrainerError> {
        let Parts { policies, agents, scorers, environments, begun, model_files, teachers } = parts;
        let policies = Policies::new(policies, &recipe.engine);
        let agents = Agents::new(&recipe, &agents, &policies)?;
        let matching = match start {
            Start::Fresh => Matching::default(),
            Start::Resume => matching(&recipe.run.folder)?,
        };
        let tasks = Tasks::load_by(&recipe, &environments, matching).await?;
        let scorers = Scorers::new(&recipe.reward, scorers);
        check_tasks(&recipe, &scorers, &tasks, &agents).await?;
        check_phases(&recipe, &tasks, &agents)?;
        for (i, phase) in recipe.phase.iter().enumerate() {
            if let (Phase::Rl(keys), Some(scorer)) = (phase, scorers.by_group().next())
                && keys.needs_baseline()
            {
                return Err(TrainerError::NotCompared { phase: i, scorer: scorer.to_owned() });
            }
            for name in recipe.trained_in(phase) {
                let learns = policies.learns(&name)?;
                let needs = |needs: fn(&RlKeys) -> bool| matches!(phase, Phase::Rl(keys) if needs(keys));
                if needs(RlKeys::needs_reference) && learns.reference.is_none() {
                    return Err(TrainerError::NoReference(i));
                }
                if needs(RlKeys::needs_critic) && learns.critic.is_none() {
                    return Err(TrainerError::NoCritic(i));
                }
            }
            if let Some(name) = phase.teacher().filter(|name| !teachers.contains_key(*name)) {
                return Err(TrainerError::NoPart(format!("the teacher {name}")));
            }
        }
        let now = {
            let (recipe, tools) = (recipe.clone(), Offered::all(&tasks, &agents)?);
            let listings = tasks.listings.clone();
            tokio::task::spawn_blocking(move || {
                Origin::now(&recipe, begun, &model_files, tools, listings, matching)
            })
        };
        let now = now.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
        let (folder, store, origin, mut notes) = match start {
            Start::Fresh => {
                let folder = RunFolder::create(&recipe)?;
                now.write(folder.root())?;
                folder.write_recipe(&recipe)?;
                let store = Sqlite::open(&folder.record(), &recipe.run.id()).await?;
                (folder, store, now, Vec::new())
            }
            Start::Resume => go_on(&recipe, now).await?,
        };
        let store: Arc<dyn Store> = Arc::new(store);
        let checkpoints = Checkpoints::open(folder.checkpoints())?;
        let (latest, damaged) = checkpoints.newest()?;
        notes.extend(damaged);
        let position = latest.as_ref().map(|checkpoint| checkpoint.position).unwrap_or_default();
        let versions: Versions = policies
            .trained()
            .map(|(name, _)| (name.to_owned(), latest.as_ref().map_or(0, |latest| latest.version(name))))
            .collect();
        for (name, learns) in policies.trained() {
            let place = latest.as_ref().map(|checkpoint| policies.place(&checkpoint.path, name));
            learns.recall(place.as_deref()).await?;
            policies.publish(name, versions[name]).await?;
        }
        let metrics = MetricsFile::open(
            &folder.metrics(),
            latest.as_ref().map_or(0, |checkpoint| checkpoint.metrics_bytes),
        )?;
        let sinks = sink::open(&recipe, folder.root(), position.global_step)?;
        let rollouts = Rollouts {
            agents,
            samplers: policies.samplers(),
            scorers,
            seed: recipe.run.seed,
            concurrency: recipe.concurrency(),
            store: store.clone(),
        };
        Ok(Trainer {
            untrained: recipe.untrained_agents(),
            recipe,
            tasks,
            rollouts,
            policies,
            versions,
            store,
            checkpoints,
            metrics,
            latest,
            notes,
            origin,
            position,
            evals: Vec::new(),
            troubles: Troubles::default(),
            turned: Duration::ZERO,
            teachers,
            sinks,
            folder,
        })
    }

    /// The folder of the run.
    pub fn folder(&self) -> &RunFolder {
        &self.folder
    }

    /// How many steps each phase has.
    fn steps(&self) -> Vec<u32> {
        self.recipe.phase.iter().map(Phase::steps).collect()
    }

    /// How many steps all phases have.
    fn all_steps(&self) -> u32 {
        self.steps().into_iter().fold(0, u32::saturating_add)
    }

    /// Trains until all phases are done or `stop` asks to stop.
    ///
    /// # Errors
    /// When something breaks that is not one attempt's own. What was done up to the newest checkpoint, and
    /// every attempt, is kept: the run can be resumed.
    pub async fn run(&mut self, observer: &mut dyn Observer, stop: &StopFlag) -> Result<Ended, TrainerError> {
        let start = Instant::now();
        let all = self.all_steps();
        info!(folder = %self.folder.root().display(), done = self.position.global_step, steps = all, "run begins");
        let ended = self.train(observer, stop).await;
        // Nobody waits any more for what is still under way: spare attempts, and what a request to stop has
        // cut short.
        let abandoned = self.store.abandon_running().await;
        let ended = match ended {
            Err(Leave::Failed(error)) => Err(Leave::Failed(error)),
            ended => abandoned.map_err(Leave::from).and(ended),
        };
        info!(done = self.position.global_step, seconds = start.elapsed().as_secs_f64(), "run ends");
        for sink in &mut self.sinks {
            if let Err(why) = sink.close(ended.is_ok()) {
                observer.event(&Event::Note(&format!("{}: {why}", sink.name())));
            }
        }
        match ended {
            Ok(()) => Ok(Ended::Finished(Summary {
                gains: Gain::between(&milestones(&self.evals), &*self.store).await?,
                evals: self.evals.clone(),
                checkpoint: self.latest.as_ref().map(|checkpoint| checkpoint.path.clone()),
                best: Best::of(&self.evals, self.checkpoints.best()),
                steps: self.position.global_step,
                elapsed: start.elapsed(),
                troubles: self.troubles.clone(),
            })),
            Err(Leave::Stopped) => {
                // The weights are those of the last step boundary: attempts change nothing, and steps are
                // finished.
                if self.latest.as_ref().map_or(0, |c| c.position.global_step) < self.position.global_step {
                    self.checkpoint(false, observer).await?;
                }
                let checkpoint = self.latest.as_ref().map(|checkpoint| checkpoint.path.clone());
                Ok(Ended::Stopped { checkpoint, done: self.position.global_step, steps: all })
            }
            Err(Leave::Failed(error)) => Err(error),
        }
    }

    async fn train(&mut self, observer: &mut dyn Observer, stop: &StopFlag) -> Result<(), Leave> {
        let steps = self.steps();
        for note in self.checkpoints.find()?.damaged.iter().chain(&self.notes) {
            observer.event(&Event::Note(note));
        }
        observer.event(&Event::Started {
            from: self.latest.as_ref().map(|checkpoint| checkpoint.path.as_path()),
            done: self.position.global_step,
            steps: self.all_steps(),
        });
        if self.latest.is_none() {
            self.tasks.notes.iter().for_each(|note| observer.event(&Event::Note(note)));
        }
        self.recall_evals(observer).await?;
        self.keep_the_best(observer).await?;
        self.evaluate_if_due(observer, stop).await?;
        for (phase, &of_phase) in steps.iter().enumerate().skip(self.position.phase as usize) {
            self.enter(phase).await?;
            let keys = self.recipe.phase[phase].clone();
            self.recall_references(&keys).await?;
            observer.event(&Event::PhaseStarted {
                phase,
                kind: keys.name(),
                done: self.position.step,
                steps: of_phase,
            });
            let mut run = PhaseRun::new(phase, &keys, self, observer, stop).await?;
            while self.position.step < of_phase && !self.is_good_enough(&keys).await? {
                if stop.is_stopped() {
                    return Err(Leave::Stopped);
                }
                let step = self.position.step;
                let span = info_span!("step", phase, step);
                let (mut metrics, attempts) = run.step(self, step, observer, stop).instrument(span).await?;
                let retried = self.note_troubles(&attempts, observer).await?;
                metrics.add("training/retried", retried as f64);
                self.add_turns(&mut metrics);
                self.finish_step(&keys, of_phase, metrics, observer).await?;
                self.evaluate_if_due(observer, stop).await?;
            }
            if self.position.step < of_phase {
                self.end_early(&keys, of_phase, observer).await?;
            }
        }
        Ok(())
    }

    /// Adds for how long devices that learner and samplers share were handed over since the step before.
    fn add_turns(&mut self, metrics: &mut Metrics) {
        let of_each = self.policies.trained().filter_map(|(_, learns)| learns.learner.handed_over());
        if let Some(now) = of_each.reduce(|a, b| a + b) {
            metrics.add("timing_s/turns", now.saturating_sub(self.turned).as_secs_f64());
            self.turned = now;
        }
    }

    /// Whether the evaluation at hand reached the success at which a phase ends. Where the record has a
    /// further step, it did not end there.
    async fn is_good_enough(&self, keys: &Phase) -> Result<bool, TrainerError> {
        let Position { phase, step, .. } = self.position;
        let here = self.evals.last().filter(|eval| step > 0 && (eval.phase, eval.step) == (phase, step));
        let (Some(eval), Some(until)) = (here, keys.until()) else { return Ok(false) };
        Ok(eval.chosen_success() >= until && self.store.step(phase, step).await?.is_none())
    }

    /// Ends a phase before its last step: the next one begins from a checkpoint that says so.
    async fn end_early(
        &mut self,
        keys: &Phase,
        steps: u32,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainerError> {
        let Position { phase, step, global_step, .. } = self.position;
        observer.event(&Event::Note(&format!(
            "phase {phase} ({}) ends after step {step} of {steps}: the success on held-out tasks has reached `phase.{phase}.until` = {}",
            keys.name(),
            keys.until().unwrap_or_default()
        )));
        let is_written = |latest: &Checkpoint| latest.phase_end && latest.position.global_step == global_step;
        if !self.latest.as_ref().is_some_and(is_written) {
            self.checkpoint(true, observer).await?;
        }
        Ok(())
    }

    /// Begins a phase, unless the run is in the middle of it: the optimiser starts afresh, and a penalty is
    /// measured from the weights that the phase begins with.
    async fn enter(&mut self, phase: usize) -> Result<(), TrainerError> {
        let begins = phase as u32 > self.position.phase;
        if begins {
            self.position = Position { phase: phase as u32, step: 0, ..self.position };
        }
        // The checkpoint at the end of the phase before; there is none before the first, which begins from
        // the model.
        let found = self.checkpoints.find()?.whole;
        let before = found
            .iter()
            .rfind(|checkpoint| checkpoint.phase_end && checkpoint.position.phase + 1 == phase as u32);
        let Some(before) = before else {
            return match phase {
                0 => Ok(()),
                _ => Err(TrainerError::Damaged {
                    path: self.folder.checkpoints(),
                    why: format!(
                        "the checkpoint at the end of phase {} is gone, from which phase {phase} began",
                        phase - 1
                    ),
                }),
            };
        };
        let phase = &self.recipe.phase[phase];
        let trained = self.recipe.trained_in(phase);
        for (name, learns) in self.policies.among(&trained) {
            let place = self.policies.place(&before.path, name);
            if begins {
                learns.learner.load(&place, false).await?;
                self.policies.publish(name, self.versions[name]).await?;
            }
            let Models { reference, critic, .. } = learns.models(phase);
            if let Some(reference) = reference {
                // Where the phase begins, these are the weights at hand, which were written or checked just
                // before.
                if !begins {
                    before
                        .verify()
                        .map_err(|why| TrainerError::Damaged { path: before.path.clone(), why })?;
                }
                reference.load(&place, false).await?;
            }
            // A critic that an earlier phase has trained goes on from there; one that is new begins as the
            // policy does.
            if let Some(critic) = critic.filter(|_| begins) {
                let from = place.join(CRITIC);
                critic.load(if from.is_dir() { &from } else { &place }, false).await?;
            }
        }
        Ok(())
    }

    /// Everything that follows the optimiser: the new weights are published, the step is written down, a
    /// checkpoint made.
    async fn finish_step(
        &mut self,
        keys: &Phase,
        steps: u32,
        mut metrics: Metrics,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainerError> {
        self.position.step += 1;
        self.position.global_step += 1;
        self.position.evaluated = false;
        let Position { phase, step, global_step, .. } = self.position;
        let trained = self.recipe.trained_in(keys);
        for (name, _) in self.policies.among(&trained) {
            let version = self.versions.entry(name.to_owned()).or_default();
            *version += 1;
            self.policies.publish(name, *version).await?;
        }
        let head = json!({"phase": phase, "kind": keys.name(), "step": step});
        metrics.add("training/global_step", f64::from(global_step));
        if let serde_json::Value::Object(head) = head {
            self.metrics.append(&metrics.to_json(head))?;
        }
        self.tell_sinks(&metrics, observer);
        crash_point("metrics_written");
        info!(phase, kind = keys.name(), step, steps, version = global_step, "step done");
        observer.event(&Event::Step {
            phase: phase as usize,
            kind: keys.name(),
            step,
            steps,
            metrics: &metrics,
        });
        let every = self.recipe.run.checkpoint_every;
        if step == steps || (every > 0 && global_step.is_multiple_of(every)) {
            self.checkpoint(step == steps, observer).await?;
        }
        Ok(())
    }

    /// Keeps what went wrong around the model, and says it the first time. Returns how many tries came to
    /// nothing before these attempts.
    pub(crate) async fn note_troubles(
        &mut self,
        attempts: &[Attempt],
        observer: &mut dyn Observer,
    ) -> Result<usize, TrainerError> {
        let earlier = self.rollouts.earlier_tries(attempts).await?;
        for trouble in [self.troubles.add(&earlier), self.troubles.add(attempts)].concat() {
            observer.event(&Event::Note(&trouble));
        }
        Ok(earlier.len())
    }

    /// Passes metrics on. A sink that fails is dropped.
    pub(crate) fn tell_sinks(&mut self, metrics: &Metrics, observer: &mut dyn Observer) {
        let step = self.position.global_step;
        self.sinks.retain_mut(|sink| match sink.log(step, metrics) {
            Ok(()) => true,
            Err(why) => {
                let note = format!("{} takes no more metrics: {why}", sink.name());
                observer.event(&Event::Note(&note));
                false
            }
        });
    }

    /// Version of the weights of a policy that samplers draw from.
    pub(crate) fn version(&self, policy: &str) -> u64 {
        self.versions.get(policy).copied().unwrap_or_default()
    }

    /// Tokens that a policy learns from.
    pub(crate) fn targets<'a>(&'a self, policy: &'a str) -> Targets<'a> {
        Targets { policy, untrained: &self.untrained }
    }

    /// Steps of a phase that are done, for one that is under way or to come.
    pub(crate) fn steps_done(&self, phase: u32) -> u32 {
        if self.position.phase == phase { self.position.step } else { 0 }
    }

    /// The critic of a policy, once a phase has begun that trains it.
    fn critic_in_use<'a>(&self, name: &str, learns: &'a Learns) -> Option<&'a dyn Learner> {
        let mut begun = self.recipe.phase.iter().take(self.position.phase as usize + 1);
        let needs = |phase: &Phase| {
            let trains = self.recipe.trained_in(phase).iter().any(|trained| trained == name);
            trains && matches!(phase, Phase::Rl(keys) if keys.needs_critic())
        };
        learns.critic.as_deref().filter(|_| begun.any(needs))
    }

    pub(crate) async fn checkpoint(
        &mut self,
        phase_end: bool,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainerError> {
        let bytes = self.metrics.sync()?;
        let mut contents = Vec::new();
        for (name, learns) in self.policies.trained() {
            contents.push(Content {
                place: self.policies.place(Path::new(""), name),
                learner: &*learns.learner,
                critic: self.critic_in_use(name, learns),
                reference: self.reference_to_keep(name, learns),
                companions: &*learns.companions,
            });
        }
        let about = About {
            position: self.position,
            versions: self.versions.clone(),
            phase_end,
            metrics_bytes: bytes,
        };
        let written = self.checkpoints.write(&contents, about).await?;
        observer.event(&Event::Checkpoint(&written.path));
        self.latest = Some(written);
        self.checkpoints.prune(self.recipe.run.keep as usize)
    }
}

/// Opens a run to go on with, and gives its phases the lengths that the recipe says now. Also what its user
/// should know.
async fn go_on(
    recipe: &Recipe,
    now: Origin,
) -> Result<(RunFolder, Sqlite, Origin, Vec<String>), TrainerError> {
    let (folder, earlier) = RunFolder::resume(recipe)?;
    let (mut origin, mut notes) = match Origin::read(folder.root())? {
        Some(mut origin) => {
            let notes = origin.goes_on_with(&now, folder.root())?;
            (origin, notes)
        }
        None => (now, Vec::new()),
    };
    let store = match folder.record() {
        file if file.exists() => Sqlite::resume(&file, &recipe.run.id()).await?,
        // Killed before it had one.
        file => Sqlite::open(&file, &recipe.run.id()).await?,
    };
    // The folder is locked: no other process makes attempts.
    store.abandon_running().await?;
    notes.extend(origin.lengthen(&earlier, recipe, &store).await?);
    origin.write(folder.root())?;
    // Whatever differs may differ. The attempts of the record bear the name that the run began with.
    let run = RunKeys { name: earlier.run.name.clone(), ..recipe.run.clone() };
    let present = Recipe { run, ..recipe.clone() };
    if present != earlier {
        folder.write_recipe(&present)?;
    }
    Ok((folder, store, origin, notes))
}
