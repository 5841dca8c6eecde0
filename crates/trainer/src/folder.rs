//! The folder of a run: what lies where, and files that are whole or not there.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use levade_recipe::Recipe;

use crate::TrainerError;
use crate::origin::Origin;

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
    /// Starts a run in a folder that holds none.
    ///
    /// # Errors
    /// When it holds one, another process works on it, or it cannot be written.
    pub(crate) fn create(recipe: &Recipe, origin: &Origin) -> Result<Self, TrainerError> {
        let root = &recipe.run.folder;
        fs::create_dir_all(root).map_err(|source| file_error("create", root, source))?;
        let folder = Self::lock(root)?;
        // Any of them would be taken for this run's own.
        if [folder.root.join(RECIPE), folder.record(), folder.checkpoints()].iter().any(|path| path.exists())
        {
            return Err(TrainerError::FolderTaken(folder.root));
        }
        // The recipe last: with it the folder holds a run.
        origin.write(&folder.root)?;
        folder.write_recipe(recipe)?;
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

/// An error of a file, with what was being done.
pub(crate) fn file_error(action: &'static str, path: &Path, source: io::Error) -> TrainerError {
    TrainerError::File { action, path: path.to_owned(), source }
}

/// Writes a file that is either whole or not there, also after a power cut.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), TrainerError> {
    let half = path.with_extension("half");
    let write = || {
        let mut file = File::create(&half)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&half, path)
    };
    write().map_err(|source| file_error("write", path, source))?;
    match path.parent() {
        Some(parent) => sync_folder(parent),
        None => Ok(()),
    }
}

/// Flushes the names in a folder to the disk.
pub(crate) fn sync_folder(path: &Path) -> Result<(), TrainerError> {
    // Elsewhere a folder cannot be opened, and renames are flushed with the file system's own log.
    if cfg!(unix) {
        File::open(path)
            .and_then(|folder| folder.sync_all())
            .map_err(|source| file_error("flush", path, source))?;
    }
    Ok(())
}
