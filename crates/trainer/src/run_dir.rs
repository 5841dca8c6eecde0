//! The directory of a run: its lock, and the paths in it.
//!
//! One process works on a run at a time. The recipe must equal the recipe of the run's start. Only
//! keys that do not change results (threads, concurrency, checkpoint interval) and keys that make
//! the run longer may differ (see [`Recipe::difference`]).

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use levade_recipe::{Difference, Recipe, RecipeError, RunKeys};
use levade_store::{Store, StoreAccess, StoreError};

use crate::TrainerError;
use crate::files::{file_error, write_atomically};
use crate::superseded::finish_rewind;

pub(crate) const RECIPE: &str = "recipe.toml";
/// Name of the lock file, which is locked by the process that works on the run.
const LOCK: &str = "lock";

/// Whether a run starts or resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartMode {
    /// Start a new run in a directory that contains no run.
    Fresh,
    /// Resume the run from its newest complete checkpoint and its store.
    Resume,
}

/// The directory of a run, locked for exclusive access by this process until the value is dropped.
pub struct LockedRunDir {
    root: PathBuf,
    /// Lock on the directory. The operating system releases the lock when the process exits, even
    /// after a kill.
    _lock: File,
}

/// A new run whose store is not open yet. If the value is dropped before the store is open, the
/// recipe is removed.
struct UnopenedRun<'a> {
    root: &'a Path,
    is_open: bool,
}

impl Drop for UnopenedRun<'_> {
    fn drop(&mut self) {
        if !self.is_open {
            // A recipe that remains is reported by the next start.
            let _ = fs::remove_file(self.root.join(RECIPE));
        }
    }
}

impl LockedRunDir {
    /// Creates and locks the directory of a new run. [`LockedRunDir::write_recipe`] must be called
    /// last: a directory with a recipe counts as the directory of a run.
    ///
    /// # Errors
    /// Returns an error if the directory already contains a run, if another process works on it, or
    /// if it cannot be written.
    pub(crate) fn create(recipe: &Recipe) -> Result<Self, TrainerError> {
        let root = &recipe.run.folder;
        fs::create_dir_all(root).map_err(|source| file_error("create", root, source))?;
        let dir = Self::lock(root)?;
        // Any of these files would be mistaken for this run's own.
        let store_file = recipe.run.store.file(root).filter(|file| file.exists());
        if let Some(store_file) = store_file.as_ref().filter(|file| !file.starts_with(root)) {
            return Err(TrainerError::StoreExists(store_file.clone()));
        }
        let paths = [dir.root.join(RECIPE), dir.checkpoints()];
        if store_file.is_some() || paths.iter().any(|path| path.exists()) {
            return Err(TrainerError::RunDirExists(dir.root));
        }
        Ok(dir)
    }

    /// Locks the directory of an existing run to resume the run. Returns the directory and the
    /// run's recorded recipe.
    ///
    /// # Errors
    /// Returns an error if there is no run, if another process works on the run, or if `recipe`
    /// differs from the recorded recipe in a key that must not change.
    pub(crate) fn resume(recipe: &Recipe) -> Result<(Self, Recipe), TrainerError> {
        Self::reopen(recipe, Recipe::difference)
    }

    /// Locks the directory of an existing run to set the run back to an earlier step. Returns the
    /// directory and the run's recorded recipe.
    ///
    /// # Errors
    /// Returns an error if there is no run, if another process works on the run, or if `recipe`
    /// differs from the recorded recipe in a key that must not change.
    pub(crate) fn resume_from_step(recipe: &Recipe) -> Result<(Self, Recipe), TrainerError> {
        Self::reopen(recipe, Recipe::difference_from_step)
    }

    fn reopen(
        recipe: &Recipe,
        difference: impl Fn(&Recipe, &Recipe) -> Result<Option<Difference>, RecipeError>,
    ) -> Result<(Self, Recipe), TrainerError> {
        let root = &recipe.run.folder;
        let earlier = root.join(RECIPE);
        if !earlier.exists() {
            return Err(TrainerError::NothingToResume(root.clone()));
        }
        let dir = Self::lock(root)?;
        finish_rewind(root)?;
        let earlier = Recipe::load(&earlier, &[])?;
        if let Some(difference) = difference(recipe, &earlier)? {
            return Err(TrainerError::Differs {
                run_dir: dir.root,
                difference: Box::new(difference),
            });
        }
        Ok((dir, earlier))
    }

    /// Checks that a run can start or resume in its directory, before anything is loaded for the
    /// run. Changes after this check are detected when the directory is locked.
    ///
    /// # Errors
    /// Returns an error if the directory of a new run contains a run, if there is no run to resume
    /// or its store was in memory, or if another process works on the run.
    pub fn check(keys: &RunKeys, start: StartMode) -> Result<(), TrainerError> {
        let root = &keys.folder;
        match (start, root.join(RECIPE).exists()) {
            (StartMode::Fresh, true) => return Err(TrainerError::RunDirExists(root.clone())),
            (StartMode::Resume, false) => return Err(TrainerError::NothingToResume(root.clone())),
            (StartMode::Resume, true) if !keys.store.is_durable() => {
                return Err(StoreError::NotDurable { run_dir: root.clone() }.into());
            }
            _ => {}
        }
        if root.join(LOCK).exists() { Self::lock(root).map(drop) } else { Ok(()) }
    }

    /// Opens the run's store for writing. Only the process that has locked the directory may open
    /// the store.
    ///
    /// # Errors
    /// Returns the errors of [`levade_store_client::open`].
    pub(crate) async fn open_store(
        &self,
        keys: &RunKeys,
        start: StartMode,
    ) -> Result<Arc<dyn Store>, StoreError> {
        let id = keys.id();
        let access = match start {
            StartMode::Fresh => StoreAccess::Start(&id),
            StartMode::Resume => StoreAccess::Resume(&id),
        };
        levade_store_client::open(&keys.store, &self.root, access).await
    }

    /// Opens the store of a new run, after the recipe was written. If the store cannot be opened or
    /// this future is dropped, removes the recipe, so that the directory contains no run.
    ///
    /// # Errors
    /// Returns the errors of [`levade_store_client::open`].
    pub(crate) async fn open_new_store(
        &self,
        keys: &RunKeys,
    ) -> Result<Arc<dyn Store>, StoreError> {
        let mut unopened = UnopenedRun { root: &self.root, is_open: false };
        let store = self.open_store(keys, StartMode::Fresh).await?;
        unopened.is_open = true;
        Ok(store)
    }

    /// Writes the resolved recipe into the run directory.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write_recipe(&self, recipe: &Recipe) -> Result<(), TrainerError> {
        write_atomically(&self.root.join(RECIPE), recipe.to_toml()?.as_bytes())
    }

    /// Locks the run directory `root` until the returned value is dropped.
    ///
    /// # Errors
    /// Returns an error if another process works on the run.
    pub fn lock(root: &Path) -> Result<Self, TrainerError> {
        let path = root.join(LOCK);
        let lock = File::create(&path).map_err(|source| file_error("create", &path, source))?;
        match lock.try_lock() {
            Ok(()) => Ok(LockedRunDir { root: root.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(TrainerError::Locked(root.to_owned())),
            Err(TryLockError::Error(source)) => Err(file_error("lock", &path, source)),
        }
    }

    /// Returns the path of the run directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of the run's metrics file, which has one JSON object per line.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// Returns the path of the directory that contains the run's checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }
}
