//! Repeats a run from its store: the same batches and the same weights, bit for bit.
//!
//! Nothing is sampled. The store has every step's plan and the attempts that the step trains on,
//! which include the outcome of all decisions by the clock (which group completed first, which tool
//! timed out). Runs that sample ahead of training can also be replayed.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use levade_recipe::{Phase, Recipe};
use levade_store::{Status, StepPlan, Store, StoreAccess};
use levade_tree::{AttemptId, Trajectory};

use crate::TrainerError;
use crate::batch::Targets;
use crate::checkpoint::{Checkpoint, CheckpointDir, FoundCheckpoints};
use crate::files::{create_empty_dir, file_error};
use crate::learn::{MicroBatchProgress, UpdateSettings, run_plan};
use crate::observe::{Event, Observer};
use crate::origin::RunOrigin;
use crate::policies::{CRITIC, ExtraFiles, PhaseModels, Policies, Policy, REFERENCE};
use crate::reference::copy_weights;
use crate::terms::{PolicyTerms, RecordingLearner};

/// Result of comparing a checkpoint with the weights of a replayed run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplayComparison {
    /// Directory of the checkpoint.
    pub checkpoint: PathBuf,
    /// Number of finished steps at the checkpoint.
    pub step: u32,
    /// Path of the first file that differs in any byte. `None` if all files are identical.
    pub differs: Option<String>,
}

/// Replays the recorded steps of the run in `dir`, and compares the weights with every checkpoint
/// that still exists. Calls `compared` with the result of each comparison. `policies` must have the
/// initial weights of the run. Returns the number of replayed steps.
///
/// # Errors
/// Returns an error if the store is damaged, if the store lacks an attempt that a step trained on,
/// or if a learner fails.
pub async fn replay(
    recipe: &Recipe,
    dir: &Path,
    policies: Vec<Policy>,
    observer: &mut dyn Observer,
    compared: &mut dyn FnMut(ReplayComparison),
) -> Result<u32, TrainerError> {
    let replay_run = ReplayRun::open(recipe, dir, policies).await?;
    let planned = replay_run.store.planned_steps().await?;
    let FoundCheckpoints { complete: checkpoints, damaged } =
        CheckpointDir::open_read_only(dir.join("checkpoints")).find()?;
    for note in damaged {
        observer.event(&Event::Note(note));
    }
    let mut done = 0;
    for (index, phase) in recipe.phase.iter().enumerate() {
        replay_run.enter_phase(index).await?;
        for step in 0..phase.steps() {
            let Some(plan) = replay_run.store.step_plan(index as u32, step).await? else {
                // A phase ends early if it reached its target success rate.
                if planned.iter().any(|(phase, _)| *phase as usize > index) {
                    break;
                }
                return Ok(done);
            };
            replay_run.replay_step(&plan, None, observer).await?;
            done += 1;
            if let Some(checkpoint) = checkpoints.iter().find(|c| c.position.global_step == done) {
                let differs = replay_run.compare_checkpoint(index, &checkpoint.dir).await?;
                compared(ReplayComparison {
                    checkpoint: checkpoint.dir.clone(),
                    step: done,
                    differs,
                });
            }
        }
    }
    Ok(done)
}

/// Computes the loss terms of the recorded step `step` of phase `phase`. Replays the run up to this
/// step, from the newest usable checkpoint of the phase or from the start of the run.
///
/// # Errors
/// Returns an error if the step is not recorded, if a learner fails, or if a learner does not
/// report loss terms.
pub async fn terms(
    recipe: &Recipe,
    dir: &Path,
    policies: Vec<Policy>,
    (phase, step): (u32, u32),
    observer: &mut dyn Observer,
) -> Result<Vec<PolicyTerms>, TrainerError> {
    let replay_run = ReplayRun::open(recipe, dir, policies).await?;
    let keys = recipe.phase.get(phase as usize).ok_or(TrainerError::NoStep { phase, step })?;
    let FoundCheckpoints { complete: checkpoints, .. } =
        CheckpointDir::open_read_only(dir.join("checkpoints")).find()?;
    let before = |at: &&Checkpoint| at.position.phase == phase && at.position.step <= step;
    // A reference that has not been updated has the weights at the start of the phase. Checkpoints
    // within the phase do not contain it.
    let usable = checkpoints.iter().filter(before).filter(|at| match keys {
        Phase::Rl(keys) => !keys.needs_reference() || keys.has_separate_reference(at.position.step),
        Phase::Sft(_) | Phase::Prompt(_) => true,
    });
    let newest = usable.max_by_key(|at| at.position.step);
    let start = match newest {
        Some(checkpoint) => {
            replay_run.restore_models(phase as usize, &checkpoint.dir).await?;
            (phase, checkpoint.position.step)
        }
        None => (0, 0),
    };
    for index in start.0..=phase {
        let from_checkpoint = newest.is_some();
        if !from_checkpoint {
            replay_run.enter_phase(index as usize).await?;
        }
        let first = if from_checkpoint { start.1 } else { 0 };
        for at in first..recipe.phase[index as usize].steps() {
            let Some(plan) = replay_run.store.step_plan(index, at).await? else { break };
            if (index, at) == (phase, step) {
                let mut found = Vec::new();
                replay_run.replay_step(&plan, Some(&mut found), observer).await?;
                return Ok(found);
            }
            replay_run.replay_step(&plan, None, observer).await?;
        }
    }
    Err(TrainerError::NoStep { phase, step })
}

/// A recorded run whose steps are replayed.
struct ReplayRun<'a> {
    recipe: &'a Recipe,
    store: Arc<dyn Store>,
    origin: Option<RunOrigin>,
    policies: Policies,
    untrained: Vec<String>,
    scratch: ScratchDir,
}

impl<'a> ReplayRun<'a> {
    async fn open(
        recipe: &'a Recipe,
        dir: &Path,
        policies: Vec<Policy>,
    ) -> Result<Self, TrainerError> {
        let store = levade_store_client::open(&recipe.run.store, dir, StoreAccess::Read).await?;
        let origin = RunOrigin::read(dir)?;
        let policies = Policies::new(policies, &recipe.engine);
        for (_, policy_learner) in policies.trained() {
            policy_learner.restore(None).await?;
        }
        let untrained = recipe.untrained_agents();
        let scratch = ScratchDir::new(recipe, dir)?;
        Ok(ReplayRun { recipe, store, origin, policies, untrained, scratch })
    }

    /// Initializes the models for the phase with this index, as the run did at the start of the
    /// phase.
    async fn enter_phase(&self, index: usize) -> Result<(), TrainerError> {
        let before = &self.recipe.phase[..index];
        let phase = &self.recipe.phase[index];
        let trained = self.recipe.trained_policies_in(phase);
        for (name, policy_learner) in
            self.policies.trained_among(&trained).filter(|_| !before.is_empty())
        {
            let has_critic = |phase: &Phase| {
                self.recipe.trained_policies_in(phase).iter().any(|trained| trained == name)
                    && policy_learner.models(phase).critic.is_some()
            };
            initialize_models(
                policy_learner.models(phase),
                before.iter().any(has_critic),
                &self.scratch.0,
            )
            .await?;
        }
        Ok(())
    }

    /// Loads the models of the phase with this index from a checkpoint within the phase.
    async fn restore_models(&self, index: usize, checkpoint: &Path) -> Result<(), TrainerError> {
        let phase = &self.recipe.phase[index];
        for (name, policy_learner) in
            self.policies.trained_among(&self.recipe.trained_policies_in(phase))
        {
            let policy_dir = self.policies.policy_dir(checkpoint, name);
            let models = policy_learner.models(phase);
            models.policy.load(&policy_dir, true).await?;
            if let Some(critic) = models.critic {
                critic.load(&policy_dir.join(CRITIC), true).await?;
            }
            if let Some(reference) = models.reference {
                reference.load(&policy_dir.join(REFERENCE), false).await?;
            }
        }
        Ok(())
    }

    /// Replays a recorded step. If `terms` is set, appends the loss terms of the step's policies.
    async fn replay_step(
        &self,
        plan: &StepPlan,
        mut terms: Option<&mut Vec<PolicyTerms>>,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainerError> {
        let phase = &self.recipe.phase[plan.phase as usize];
        let mut attempts = HashMap::new();
        for planned_sequence in plan.sequences() {
            if let std::collections::hash_map::Entry::Vacant(policy_dir) =
                attempts.entry(planned_sequence.attempt)
            {
                let attempt = self.store.attempt(&planned_sequence.attempt).await?;
                let attempt = attempt.ok_or(TrainerError::Unrecorded(planned_sequence.attempt))?;
                if attempt.status == Status::Withdrawn {
                    return Err(TrainerError::Withdrawn(attempt.slot));
                }
                policy_dir.insert(attempt.trajectory);
            }
        }
        let trajectories: HashMap<AttemptId, &Trajectory> =
            attempts.iter().map(|(key, trajectory)| (*key, trajectory)).collect();
        let mut progress = MicroBatchProgress::new(plan);
        for policy in &plan.policies {
            let name = policy.policy.as_str();
            let policy_learner = self.policies.policy_learner(name)?;
            let models = policy_learner.models(phase);
            if let (Phase::Rl(keys), Some(reference)) = (phase, models.reference)
                && keys.updates_reference(plan.step)
            {
                copy_weights(models.policy, reference, &self.scratch.0).await?;
            }
            let origin = self.origin.as_ref();
            let requires_acting = origin.is_some_and(|origin| origin.rules.requires_acting);
            let targets = Targets { policy: name, untrained: &self.untrained, requires_acting };
            let at = (plan.phase, phase);
            let settings =
                UpdateSettings::new(at, plan.step, origin, targets, policy.version, self.recipe);
            match &mut terms {
                None => {
                    run_plan(policy, &trajectories, models, &settings, &mut progress, observer)
                        .await?;
                }
                Some(terms) => {
                    let recorder = RecordingLearner::new(models.policy);
                    let models = PhaseModels { policy: &recorder, ..models };
                    run_plan(policy, &trajectories, models, &settings, &mut progress, observer)
                        .await?;
                    terms.push(recorder.into_terms(policy));
                }
            }
            policy_learner.learner.publish(policy.version + 1).await?;
        }
        Ok(())
    }

    /// Compares the current weights with a checkpoint, and returns the path of the first file that
    /// differs.
    async fn compare_checkpoint(
        &self,
        index: usize,
        checkpoint: &Path,
    ) -> Result<Option<String>, TrainerError> {
        let phase = &self.recipe.phase[index];
        let trained = self.recipe.trained_policies_in(phase);
        let mut differs = None;
        for (name, policy_learner) in self.policies.trained() {
            // For a policy that the phase does not train, only the weights are comparable.
            let trains = trained.iter().any(|trained| trained == name);
            let policy_dir = self.policies.policy_dir(checkpoint, name);
            let models = policy_learner.models(phase);
            let found = compare_policy(
                models,
                &policy_learner.extra_files,
                trains,
                &policy_dir,
                &self.scratch.0,
            )
            .await?;
            differs = differs.or(found);
        }
        Ok(differs)
    }
}

/// Initializes the models of one policy for a phase, as the run did at the start of the phase. The
/// optimizers are reset, and the reference gets the policy's weights. The critic also gets the
/// policy's weights, unless an earlier phase has trained the critic (`trained`).
async fn initialize_models(
    models: PhaseModels<'_>,
    trained: bool,
    scratch: &Path,
) -> Result<(), TrainerError> {
    let PhaseModels { policy, reference, critic } = models;
    create_empty_dir(scratch)?;
    policy.save(scratch, false).await?;
    policy.load(scratch, false).await?;
    if let Some(reference) = reference {
        reference.load(scratch, false).await?;
    }
    if let Some(critic) = critic {
        if trained {
            create_empty_dir(scratch)?;
            critic.save(scratch, false).await?;
        }
        critic.load(scratch, false).await?;
    }
    Ok(())
}

/// Compares the models of one policy with its files at `policy_dir` in a checkpoint, and returns
/// the path of the first file that differs. If `trains` is false, the phase does not train the
/// policy, so its optimizer moments are not compared.
///
/// `extra_files` must write the same further files as in the checkpoint: a learner in another
/// process saves the tokenizer in its own format, which the checkpoint has replaced.
async fn compare_policy(
    models: PhaseModels<'_>,
    extra_files: &ExtraFiles,
    trains: bool,
    policy_dir: &Path,
    scratch: &Path,
) -> Result<Option<String>, TrainerError> {
    let PhaseModels { policy, reference, critic } = models;
    let models = [
        (Some(policy), policy_dir.to_owned(), trains),
        (critic, policy_dir.join(CRITIC), trains),
        (reference, policy_dir.join(REFERENCE), false),
    ];
    for (learner, dir, with_training_state) in models {
        let Some(learner) = learner.filter(|_| dir.is_dir()) else { continue };
        create_empty_dir(scratch)?;
        learner.save(scratch, with_training_state).await?;
        if dir == policy_dir {
            extra_files(scratch)
                .map_err(|source| file_error("write the tokenizer into", scratch, source))?;
        }
        let listed = |source| file_error("list", scratch, source);
        for entry in fs::read_dir(scratch).map_err(listed)? {
            let name = entry.map_err(listed)?.file_name();
            let recorded_file = dir.join(&name);
            let same = has_same_bytes(&scratch.join(&name), &recorded_file)
                .map_err(|source| file_error("compare with", &recorded_file, source))?;
            if !same {
                return Ok(Some(recorded_file.display().to_string()));
            }
        }
    }
    Ok(None)
}

/// A temporary directory, which is removed when the value is dropped.
struct ScratchDir(PathBuf);

impl ScratchDir {
    /// Creates the directory within the run directory `run` if a remote learner may only access
    /// files there, otherwise in the system's temporary directory.
    fn new(recipe: &Recipe, run: &Path) -> Result<Self, TrainerError> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = match recipe.cluster.learner {
            Some(_) => {
                std::path::absolute(run).map_err(|source| file_error("find", run, source))?
            }
            None => std::env::temp_dir(),
        };
        let path = path.join(format!("levade-replay-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).map_err(|source| file_error("create", &path, source))?;
        Ok(ScratchDir(path))
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn has_same_bytes(a: &Path, b: &Path) -> io::Result<bool> {
    let mut a = File::open(a)?;
    let mut b = File::open(b)?;
    if a.metadata()?.len() != b.metadata()?.len() {
        return Ok(false);
    }
    let mut a_buffer = vec![0; 1 << 20];
    let mut b_buffer = vec![0; 1 << 20];
    loop {
        let n = a.read(&mut a_buffer)?;
        if n == 0 {
            return Ok(true);
        }
        b.read_exact(&mut b_buffer[..n])?;
        if a_buffer[..n] != b_buffer[..n] {
            return Ok(false);
        }
    }
}
