//! The directory of a run: its lock, and the paths in it.
//!
//! One process works on a run at a time. The recipe must be the one that the run started with, except for
//! keys that do not change results (threads, concurrency, how often to save) or that make the run longer
//! (`levade_recipe`'s `compare`).

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

use levade_recipe::Recipe;

use crate::TrainerError;
use crate::files::{file_error, write_whole};

pub(crate) const RECIPE: &str = "recipe.toml";
/// Locked by the process that works on the run.
const LOCK: &str = "lock";

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
        if [folder.root.join(RECIPE), folder.record(), folder.checkpoints()].iter().any(|path| path.exists())
        {
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

    /// Looks whether nobody works on the run in a folder, before anything is started for one. Whoever starts
    /// in between is found when the folder is taken.
    ///
    /// # Errors
    /// When another process works on it.
    pub fn check_free(root: &Path) -> Result<(), TrainerError> {
        if root.join(LOCK).exists() { Self::lock(root).map(drop) } else { Ok(()) }
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

    /// The record of attempts and steps.
    pub fn record(&self) -> PathBuf {
        self.root.join("run.db")
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
