//! A run done again from its record: the same batches, the same weights, bit for bit.
//!
//! Nothing is sampled. Every step's plan is in the ledger, with the attempts that it trains on; what was decided by the clock (which
//! group was done first, which tool was too slow) is in them. So this also redoes runs whose sampling ran ahead of training.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use dressage_policy::Learner;
use dressage_store::Store;
use dressage_tree::{AttemptId, Trajectory};

use crate::TrainerError;
use crate::checkpoint::{Checkpoint, Checkpoints, Found};
use crate::folder::file_error;
use crate::learn::{Models, Rules, run_plan};
use crate::observe::{Event, Observer};
use crate::origin::Origin;
use crate::phase::PhaseRun;
use crate::recipe::{Phase, Recipe, RlKeys};
use crate::reference::{copy_weights, empty};

/// The models of a run, with the weights that it began with.
pub struct Replayers {
    /// What is trained.
    pub learner: Arc<dyn Learner>,
    /// For phases with a KL penalty.
    pub reference: Option<Arc<dyn Learner>>,
    /// For phases whose advantage needs a critic.
    pub critic: Option<Arc<dyn Learner>>,
}

/// How a checkpoint compares with what was computed again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compared {
    /// The checkpoint.
    pub checkpoint: PathBuf,
    /// Steps done when it was written.
    pub step: u32,
    /// The first file that differs in any byte; `None` where all are the same.
    pub differs: Option<String>,
}

/// Does the steps of the run in `folder` again and compares the weights with every checkpoint that is still there, calling `compared`
/// for each. Returns how many steps were done.
///
/// # Errors
/// When the record is damaged or does not hold what a step trained on, or a learner fails.
pub async fn replay(
    recipe: &Recipe,
    folder: &Path,
    models: &Replayers,
    observer: &mut dyn Observer,
    compared: &mut dyn FnMut(Compared),
) -> Result<u32, TrainerError> {
    let record = folder.join("run.db");
    if !record.exists() {
        return Err(file_error("open the record of the run", &record, io::ErrorKind::NotFound.into()));
    }
    let store = Store::open_existing(&record)?;
    let (planned, origin) = (store.planned_steps()?, Origin::read(folder)?);
    let models = models.timely(recipe);
    let Found { whole: checkpoints, damaged } = Checkpoints::look(folder.join("checkpoints")).find()?;
    for note in &damaged {
        observer.event(&Event::Note(note));
    }
    let scratch = Scratch::new()?;
    let mut done = 0;
    for (index, phase) in recipe.phase.iter().enumerate() {
        let before = &recipe.phase[..index];
        if !before.is_empty() {
            let trained = before.iter().any(|phase| models.of(phase).critic.is_some());
            models.enter(phase, trained, &scratch.0).await?;
        }
        let steps = PhaseRun::steps(phase);
        for step in 0..steps {
            let Some(plan) = store.step(index as u32, step)? else {
                // A phase ends early where it is good enough.
                if planned.iter().any(|(phase, _)| *phase as usize > index) {
                    break;
                }
                return Ok(done);
            };
            let mut attempts = HashMap::new();
            for path in plan.updates.iter().flat_map(|update| update.micro_batches.iter().flatten()) {
                if let std::collections::hash_map::Entry::Vacant(place) = attempts.entry(path.attempt) {
                    let attempt = store.attempt(&path.attempt)?;
                    place.insert(attempt.ok_or(TrainerError::Unrecorded(path.attempt))?.trajectory);
                }
            }
            let trajectories: HashMap<AttemptId, &Trajectory> =
                attempts.iter().map(|(key, trajectory)| (*key, trajectory)).collect();
            if let (Phase::Rl(keys), Some(reference)) = (phase, models.of(phase).reference)
                && keys.reference_moves(step)
            {
                copy_weights(&*models.learner, reference, &scratch.0).await?;
            }
            let rules = Rules::new((index as u32, phase), step, origin.as_ref(), u64::from(done), recipe);
            run_plan(&plan, &trajectories, models.of(phase), &rules, observer).await?;
            done += 1;
            models.learner.publish(u64::from(done)).await?;
            if let Some(checkpoint) = checkpoints.iter().find(|c| c.position.global_step == done) {
                let differs = models.compare(phase, checkpoint, &scratch.0).await?;
                compared(Compared { checkpoint: checkpoint.path.clone(), step: done, differs });
            }
        }
    }
    Ok(done)
}

impl Replayers {
    /// The same, no call of which takes longer than the recipe allows.
    fn timely(&self, recipe: &Recipe) -> Self {
        let timely = |learner: &Arc<dyn Learner>| recipe.engine.learner(learner.clone());
        Replayers {
            learner: timely(&self.learner),
            reference: self.reference.as_ref().map(timely),
            critic: self.critic.as_ref().map(timely),
        }
    }

    fn of(&self, phase: &Phase) -> Models<'_> {
        let needs = |needs: fn(&RlKeys) -> bool| matches!(phase, Phase::Rl(keys) if needs(keys));
        Models {
            policy: &*self.learner,
            reference: self.reference.as_deref().filter(|_| needs(RlKeys::needs_reference)),
            critic: self.critic.as_deref().filter(|_| needs(RlKeys::needs_critic)),
        }
    }

    /// Begins a phase, as the run did: optimisers start afresh, the reference is what the phase begins with, and so is a critic unless an
    /// earlier phase has trained it (`trained`).
    async fn enter(&self, phase: &Phase, trained: bool, scratch: &Path) -> Result<(), TrainerError> {
        empty(scratch)?;
        self.learner.save(scratch, false).await?;
        self.learner.load(scratch, false).await?;
        let models = self.of(phase);
        if let Some(reference) = models.reference {
            reference.load(scratch, false).await?;
        }
        if let Some(critic) = models.critic {
            if trained {
                empty(scratch)?;
                critic.save(scratch, false).await?;
            }
            critic.load(scratch, false).await?;
        }
        Ok(())
    }

    /// The first file of the weights and moments that differs from the checkpoint's.
    async fn compare(
        &self,
        phase: &Phase,
        checkpoint: &Checkpoint,
        scratch: &Path,
    ) -> Result<Option<String>, TrainerError> {
        let Models { policy, reference, critic } = self.of(phase);
        let models = [
            (Some(policy), checkpoint.path.clone(), true),
            (critic, checkpoint.critic(), true),
            (reference, checkpoint.reference(), false),
        ];
        for (learner, folder, learns) in models {
            let Some(learner) = learner.filter(|_| folder.is_dir()) else { continue };
            empty(scratch)?;
            learner.save(scratch, learns).await?;
            let listed = |source| file_error("list", scratch, source);
            for entry in fs::read_dir(scratch).map_err(listed)? {
                let name = entry.map_err(listed)?.file_name();
                let theirs = folder.join(&name);
                let same = same_bytes(&scratch.join(&name), &theirs)
                    .map_err(|source| file_error("compare with", &theirs, source))?;
                if !same {
                    return Ok(Some(theirs.display().to_string()));
                }
            }
        }
        Ok(None)
    }
}

/// A folder for this process alone, gone with the value.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, TrainerError> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("dressage-replay-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).map_err(|source| file_error("create", &path, source))?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn same_bytes(a: &Path, b: &Path) -> io::Result<bool> {
    let (mut a, mut b) = (File::open(a)?, File::open(b)?);
    if a.metadata()?.len() != b.metadata()?.len() {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let n = a.read(&mut left)?;
        if n == 0 {
            return Ok(true);
        }
        b.read_exact(&mut right[..n])?;
        if left[..n] != right[..n] {
            return Ok(false);
        }
    }
}
