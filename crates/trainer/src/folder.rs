//! The directory of a run: its lock, and the paths in it.
//!
//! One process works on a run at a time. The recipe must be the one that the run started with, except for
//! keys that do not change results (threads, concurrency, how often to save) or that make the run longer
//! (`levade_recipe`'s `compare`).

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use levade_recipe::{Recipe, RunKeys};
use levade_store::{Access, Store, StoreError};

use crate::TrainerError;
use crate::files::{file_error, write_whole};

pub(crate) const RECIPE: &str = "recipe.toml";
/// Locked by the process that works on the run.
const LOCK: &str = "lock";

/// Whether a run begins or goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// In a folder that holds no run.
    Fresh,
    /// From the newest whole checkpoint and the record.
    Resume,
}

/// The folder of a run, held by this process alone while this value lives.
pub struct RunFolder {
    root: PathBuf,
    /// Lock on the folder, freed when the process ends, however it ends.
    _lock: File,
}

impl RunFolder {
    /// Takes a folder that holds no run. With [`RunFolder::write_recipe`], which comes last, it holds one.
    ///
    /// # Errors
    /// Returns an error if the folder holds a run, another process works on it, or it cannot be written.
    pub(crate) fn create(recipe: &Recipe) -> Result<Self, TrainerError> {
        let root = &recipe.run.folder;
        fs::create_dir_all(root).map_err(|source| file_error("create", root, source))?;
        let folder = Self::lock(root)?;
        // Any of them would be taken for this run's own.
        let record = recipe.run.store.file(root).filter(|file| file.exists());
        if let Some(record) = record.as_ref().filter(|file| !file.starts_with(root)) {
            return Err(TrainerError::RecordTaken(record.clone()));
        }
        let paths = [folder.root.join(RECIPE), folder.checkpoints()];
        if record.is_some() || paths.iter().any(|path| path.exists()) {
            return Err(TrainerError::FolderTaken(folder.root));
        }
        Ok(folder)
    }

    /// Opens a run to continue it. Also the recipe that it was made by so far.
    ///
    /// # Errors
    /// When there is none, another process works on it, or the recipe differs in something that matters.
    pub(crate) fn resume(recipe: &Recipe) -> Result<(Self, Recipe), TrainerError> {
        let root = &recipe.run.folder;
        let earlier = root.join(RECIPE);
        if !earlier.exists() {
            return Err(TrainerError::NothingToResume(root.clone()));
        }
        let folder = Self::lock(root)?;
        let earlier = Recipe::load(&earlier, &[])?;
        if let Some(difference) = recipe.difference(&earlier)? {
            return Err(TrainerError::Differs { folder: folder.root, difference: Box::new(difference) });
        }
        Ok((folder, earlier))
    }

    /// Checks that a run can start in its folder or continue there, before anything is loaded for it. What
    /// changes after that is found when the folder is taken.
    ///
    /// # Errors
    /// Returns an error if a new run's folder holds a run, if there is none to continue or its record was in
    /// memory, or if another process works on it.
    pub fn check(keys: &RunKeys, start: Start) -> Result<(), TrainerError> {
        let root = &keys.folder;
        match (start, root.join(RECIPE).exists()) {
            (Start::Fresh, true) => return Err(TrainerError::FolderTaken(root.clone())),
            (Start::Resume, false) => return Err(TrainerError::NothingToResume(root.clone())),
            (Start::Resume, true) if !keys.store.is_durable() => {
                return Err(StoreError::NotKept { run_dir: root.clone() }.into());
            }
            _ => {}
        }
        if root.join(LOCK).exists() { Self::lock(root).map(drop) } else { Ok(()) }
    }

    /// Opens the record of the run to write it, which only the process can do that holds the folder.
    ///
    /// # Errors
    /// Errors of [`Location::open`](levade_store::Location::open).
    pub(crate) async fn open_store(
        &self,
        keys: &RunKeys,
        start: Start,
    ) -> Result<Arc<dyn Store>, StoreError> {
        let id = keys.id();
        let access = match start {
            Start::Fresh => Access::Start(&id),
            Start::Resume => Access::Resume(&id),
        };
        keys.store.open(&self.root, access).await
    }

    /// Writes the resolved recipe down.
    pub(crate) fn write_recipe(&self, recipe: &Recipe) -> Result<(), TrainerError> {
        write_whole(&self.root.join(RECIPE), recipe.to_toml()?.as_bytes())
    }

    /// The folder of a run, which no other process works on until this is dropped.
    ///
    /// # Errors
    /// When another process works on it.
    pub fn lock(root: &Path) -> Result<Self, TrainerError> {
        let path = root.join(LOCK);
        let lock = File::create(&path).map_err(|source| file_error("create", &path, source))?;
        match lock.try_lock() {
            Ok(()) => Ok(RunFolder { root: root.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(TrainerError::Locked(root.to_owned())),
            Err(TryLockError::Error(source)) => Err(file_error("lock", &path, source)),
        }
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The metrics, one object a line.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// The checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }
}
