//! Goes back to an earlier step of a run, so that the run repeats the later steps, for example with
//! another reward.
//!
//! Nothing is erased. A new directory gets the checkpoints up to that step, and a new store with
//! the attempts, plans and evaluations before it. Then the two directories are exchanged, in one
//! operation of the file system, and the former directory is renamed to `NAME.superseded-1`, where
//! every command for runs still works on it. The run then resumes like any other run.
//!
//! # Guarantees
//! - **The run is either the old one or the new one**, whenever the process is killed: a directory
//!   that is incomplete is never at the path of the run. A later start completes a pending rename.
//! - **The same bits.** The store has the same run id, and contains nothing of the later steps, so
//!   the run continues like one that was trained up to this step and then resumed.
//! - **A withdrawn task or person stays withdrawn.** Their attempts of later steps are copied with
//!   their tombstones, and the run rejects another attempt at the tasks.
//!
//! Evaluations are copied only if the reward stays the same, because scores of different scorers
//! cannot be compared. Out of scope: later steps that were sent to MLflow; the run continues there
//! as a new one.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use levade_policy::crash_point;
use levade_recipe::{Phase, Recipe, RunKeys};
use levade_store::{
    Attempt, AttemptSlot, Purpose, Status, Store, StoreAccess, WithdrawRequest, Withdrawal,
};
use levade_traces::TimesFile;
use levade_tree::AttemptId;

use crate::TrainerError;
use crate::checkpoint::{Checkpoint, Position, checkpoints};
use crate::files::{file_error, sync_dir};
use crate::origin::RunOrigin;
use crate::past;
use crate::phase::group_positions;
use crate::run_dir::LockedRunDir;
use crate::superseded::{RewindRecord, finish_rewind, partial_dir, superseded_dir, sync_parent};

/// Files that are copied into the rewound run directory if they exist. The metrics after the
/// checkpoint are removed when the run resumes. The file `mlflow.json` is not copied, because the
/// MLflow server already has the later steps.
const COPIED: [&str; 5] =
    ["engine.json", "learner.json", "metrics.jsonl", "events.jsonl", TimesFile::NAME];
/// Maximum number of tokens per write to the new store. A single attempt can have more.
const MAX_WRITE_TOKENS: usize = 1 << 20;

/// Result of setting a run back to an earlier step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewindResult {
    /// Number of finished steps at the checkpoint from which the run continues.
    pub step: u32,
    /// Number of finished steps that were discarded from the run.
    pub superseded_steps: u32,
    /// Directory that contains the former run with the discarded steps.
    pub superseded: PathBuf,
}

/// Sets the run in the directory of `recipe` back to the newest checkpoint with at most `step`
/// finished steps. The run can then be resumed with `recipe`.
///
/// # Errors
/// Returns an error in the following cases, in which the run stays unchanged:
///
/// - The directory contains no run, or another process works on the run.
/// - No checkpoint has at most `step` finished steps, or the run has fewer than `step` steps.
/// - The recipe differs from the run's recipe in a key that must not change.
/// - The store is outside the directory, and `run.store` names no other store.
/// - A file cannot be written.
pub async fn rewind(recipe: &Recipe, step: u32) -> Result<RewindResult, TrainerError> {
    let root = &recipe.run.folder;
    // A symbolic link to the directory must not be exchanged instead of the directory.
    let root = fs::canonicalize(root).map_err(|source| file_error("open", root, source))?;
    let old =
        Recipe { run: RunKeys { folder: root.clone(), ..recipe.run.clone() }, ..recipe.clone() };
    let (dir, earlier) = LockedRunDir::resume_from_step(&old)?;
    let all = checkpoints(dir.root())?;
    let mut num_steps = all.last().map_or(0, |last| last.position.global_step);
    if step > num_steps {
        // Steps after the last checkpoint are in the store.
        let store = &earlier.run.store;
        let store = levade_store_client::open(store, dir.root(), StoreAccess::Read).await?;
        num_steps = num_steps.max(store.planned_steps().await?.len() as u32);
    }
    let index = all
        .iter()
        .rposition(|c| c.position.global_step <= step && c.verify_checksums().is_ok())
        .filter(|_| step <= num_steps);
    let Some(index) = index else {
        let kept = all.iter().map(|c| c.position.global_step).collect();
        let run_dir = dir.root().to_owned();
        return Err(TrainerError::NoCheckpoint { step, num_steps, kept, run_dir });
    };
    let kept = &all[..=index];
    let position = all[index].position;
    let store_changes = recipe.run.store != earlier.run.store;
    let is_inside =
        |keys: &RunKeys| keys.store.file(&root).is_some_and(|file| file.starts_with(&root));
    if !store_changes && !is_inside(&earlier.run) {
        let location = earlier.run.store.to_string();
        return Err(TrainerError::StoreOutside { location, run_dir: root });
    }
    let partial = partial_dir(&root)?;
    if partial.exists() {
        fs::remove_dir_all(&partial).map_err(|source| file_error("remove", &partial, source))?;
    }
    let superseded = superseded_dir(&root)?;
    // The run applies other permitted differences when it resumes.
    let reward = recipe.reward.clone();
    let run = RunKeys { store: recipe.run.store.clone(), ..earlier.run.clone() };
    let next = Recipe { reward, run, ..earlier.clone() };
    let built = RewoundRunBuilder { old: &dir, earlier: &earlier, next: &next, kept, position }
        .build(&partial, &superseded, if is_inside(&recipe.run) { &partial } else { &root })
        .await;
    let lock = match built {
        Ok(lock) => lock,
        Err(error) => {
            let _ = fs::remove_dir_all(&partial);
            return Err(error);
        }
    };
    crash_point("rewind_built");
    exchange_dirs(&partial, &root)?;
    sync_parent(&root)?;
    crash_point("rewind_exchanged");
    finish_rewind(&root)?;
    drop(lock);
    let step = position.global_step;
    let newest = all.last().map_or(step, |last| last.position.global_step);
    Ok(RewindResult { step, superseded_steps: newest - step, superseded })
}

/// Builds the directory of a run that goes back to a checkpoint.
struct RewoundRunBuilder<'a> {
    old: &'a LockedRunDir,
    /// Recipe with which the run was last started or resumed.
    earlier: &'a Recipe,
    /// Recipe with which the run continues from the checkpoint.
    next: &'a Recipe,
    /// Checkpoints up to the checkpoint from which the run continues, oldest first.
    kept: &'a [Checkpoint],
    /// Position of the last checkpoint in `kept`.
    position: Position,
}

impl RewoundRunBuilder<'_> {
    /// Writes the new run directory `dir`, with its recipe last, and returns it locked. A relative
    /// location of the new store is resolved against `store_dir`.
    async fn build(
        &self,
        dir: &Path,
        superseded: &Path,
        store_dir: &Path,
    ) -> Result<LockedRunDir, TrainerError> {
        fs::create_dir(dir).map_err(|source| file_error("create", dir, source))?;
        let lock = LockedRunDir::lock(dir)?;
        let old = self.old.root();
        for name in COPIED {
            copy_if_exists(&old.join(name), &dir.join(name))?;
        }
        // These files are never changed once they are written.
        link_dir(&old.join("tensorboard"), &dir.join("tensorboard"))?;
        link_dir(&old.join(past::DIR), &dir.join(past::DIR))?;
        for checkpoint in self.kept {
            let name = checkpoint.dir.file_name().unwrap_or_default();
            link_dir(&checkpoint.dir, &lock.checkpoints().join(name))?;
        }
        sync_dir(&lock.checkpoints())?;
        let Position { phase, step, global_step, .. } = self.position;
        if let Some(mut origin) = RunOrigin::read(old)? {
            origin.forget_steps_from(phase, step);
            origin.write(dir)?;
        }
        self.copy_store(store_dir).await?;
        let superseded = superseded.file_name().unwrap_or_default().to_string_lossy().into_owned();
        RewindRecord::new(global_step, superseded).write(dir)?;
        lock.write_recipe(self.next)?;
        Ok(lock)
    }

    /// Copies the attempts, step plans, evaluations and withdrawals on which the checkpoint depends
    /// into a new store.
    async fn copy_store(&self, store_dir: &Path) -> Result<(), TrainerError> {
        let location = &self.earlier.run.store;
        let from = levade_store_client::open(location, self.old.root(), StoreAccess::Read).await?;
        // Ids of attempts are derived from the id of the run, which is the id in the old store.
        let access = StoreAccess::Start(from.run());
        let to = levade_store_client::open(&self.next.run.store, store_dir, access).await?;
        let is_new = to.planned_steps().await?.is_empty() && to.evals().await?.is_empty();
        if !is_new {
            let location = self.next.run.store.to_string();
            return Err(TrainerError::StoreInUse { location });
        }
        let Position { phase, step, .. } = self.position;
        let mut taken: HashSet<(u32, u64)> = HashSet::new();
        let mut plans = Vec::new();
        for at in from.planned_steps().await?.into_iter().filter(|at| *at < (phase, step)) {
            let Some(plan) = from.step_plan(at.0, at.1).await? else { continue };
            if let Some(Phase::Rl(keys)) = self.earlier.phase.get(at.0 as usize) {
                taken.extend(group_positions(&plan, keys).into_iter().map(|p| (at.0, p)));
            }
            plans.push(plan);
        }
        let same_reward = self.earlier.reward == self.next.reward;
        let selection = KeptAttempts { taken, phase, step, recipe: self.earlier, same_reward };
        let withdrawals: Vec<Withdrawal> = from
            .withdrawals()
            .await?
            .into_iter()
            // The subject of a withdrawal also forbids further attempts, so its tombstones stay.
            .filter(|it| selection.contains(&it.slot) || it.task.is_some())
            .collect();
        self.copy_attempts(&*from, &*to, &selection, &withdrawals).await?;
        for plan in &plans {
            to.record_step(plan).await?;
        }
        for (key, result) in from.evals().await? {
            if same_reward && (key.phase, key.step) <= (phase, step) {
                to.record_eval(key, &result).await?;
            }
        }
        for Withdrawal { id, task, reason, at, erased, .. } in withdrawals {
            let attempts = vec![id];
            let request =
                WithdrawRequest { attempts, tasks: Vec::new(), task, reason, at, erase: erased };
            to.withdraw(&request).await?;
        }
        Ok(())
    }

    async fn copy_attempts(
        &self,
        from: &dyn Store,
        to: &dyn Store,
        selection: &KeptAttempts<'_>,
        withdrawals: &[Withdrawal],
    ) -> Result<(), TrainerError> {
        let mut ids: Vec<AttemptId> = withdrawals.iter().map(|withdrawal| withdrawal.id).collect();
        for purpose in Purpose::ALL {
            let counted = from.summaries(purpose).await?.into_iter().map(|s| (s.id, s.slot));
            let failed = from.failures(purpose).await?.into_iter().map(|f| (f.id, f.slot));
            let selected = counted.chain(failed).filter(|(_, slot)| selection.contains(slot));
            ids.extend(selected.map(|(id, _)| id));
        }
        let mut seen = HashSet::new();
        ids.retain(|id| seen.insert(*id));
        let mut batch: Vec<Attempt> = Vec::new();
        let mut tokens = 0;
        for id in ids {
            let mut attempt = from.attempt(&id).await?.ok_or(TrainerError::Unrecorded(id))?;
            if attempt.status == Status::Withdrawn {
                // The copy is withdrawn after it is recorded.
                let before = withdrawals.iter().find(|withdrawal| withdrawal.id == id);
                attempt.status = before.map_or(Status::Abandoned, |withdrawal| withdrawal.status);
            }
            tokens += attempt.trajectory.segments().iter().map(|s| s.tokens.len()).sum::<usize>();
            batch.push(attempt);
            if tokens >= MAX_WRITE_TOKENS {
                to.record_attempts(&std::mem::take(&mut batch)).await?;
                tokens = 0;
            }
        }
        to.record_attempts(&batch).await?;
        Ok(())
    }
}

/// The attempts that a run keeps when it goes back to an earlier step.
struct KeptAttempts<'a> {
    /// Phase of every group that a kept step took, and the group's position in the task order of
    /// the phase.
    taken: HashSet<(u32, u64)>,
    phase: u32,
    step: u32,
    recipe: &'a Recipe,
    same_reward: bool,
}

impl KeptAttempts<'_> {
    fn contains(&self, slot: &AttemptSlot) -> bool {
        let AttemptSlot { purpose, phase, step, group, .. } = *slot;
        match purpose {
            Purpose::Eval => self.same_reward && (phase, step) <= (self.phase, self.step),
            Purpose::Train | Purpose::Baseline if phase == self.phase => {
                // A step takes groups that were started for another step if attempts run ahead.
                let groups = match self.recipe.phase.get(phase as usize) {
                    Some(Phase::Rl(keys)) => keys.groups as u64,
                    _ => return step < self.step,
                };
                self.taken.contains(&(phase, u64::from(step) * groups + u64::from(group)))
            }
            // Sessions belong to no step.
            Purpose::Session => true,
            // All demonstrations of a phase are made before its first step. The step of their slots
            // separates originals from copies.
            Purpose::Demonstration => (phase, 0) < (self.phase, self.step),
            _ => (phase, step) < (self.phase, self.step),
        }
    }
}

/// Exchanges two directories atomically.
#[cfg(any(target_os = "linux", target_os = "macos"))]
fn exchange_dirs(new: &Path, root: &Path) -> Result<(), TrainerError> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, new, CWD, root, RenameFlags::EXCHANGE).map_err(|error| {
        let _ = fs::remove_dir_all(new);
        TrainerError::ExchangeUnsupported { run_dir: root.to_owned(), source: error.into() }
    })
}

/// Returns [`TrainerError::ExchangeUnsupported`]: this operating system cannot exchange directories
/// atomically.
#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn exchange_dirs(new: &Path, root: &Path) -> Result<(), TrainerError> {
    let _ = fs::remove_dir_all(new);
    let source = ErrorKind::Unsupported.into();
    Err(TrainerError::ExchangeUnsupported { run_dir: root.to_owned(), source })
}

fn copy_if_exists(from: &Path, to: &Path) -> Result<(), TrainerError> {
    match fs::copy(from, to).and_then(|_| File::open(to)?.sync_all()) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        copied => copied.map_err(|source| file_error("copy", from, source)),
    }
}

/// Creates the directory `to` with hard links to all files in `from`, or with copies if the file
/// system has no hard links. Does nothing if `from` does not exist.
fn link_dir(from: &Path, to: &Path) -> Result<(), TrainerError> {
    let entries = match fs::read_dir(from) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|source| file_error("list", from, source))?,
    };
    fs::create_dir_all(to).map_err(|source| file_error("create", to, source))?;
    for entry in entries {
        let entry = entry.map_err(|source| file_error("list", from, source))?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            link_dir(&path, &target)?;
        } else if fs::hard_link(&path, &target).is_err() {
            copy_if_exists(&path, &target)?;
        }
    }
    sync_dir(to)
}
