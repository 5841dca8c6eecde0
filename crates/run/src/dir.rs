//! Run directories from outside: the recipe, the record, the newest checkpoint.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use levade_recipe::Recipe;
use levade_store::{Access, Store};
use levade_trainer::{begun, seconds};

use crate::failure::unusable;

/// File that a run writes first, and no other program would: the resolved recipe beside the record.
pub const RECIPE: &str = "recipe.toml";
/// Default file of the record. Older builds wrote no lock.
pub const RECORD: &str = "run.db";
/// File that every process creates that works on the run.
const LOCK: &str = "lock";
/// Directory of the checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// Policies of a checkpoint beside the first that is trained, which is the checkpoint itself.
pub const POLICIES: &str = "policies";
/// The file that is written last into a checkpoint.
pub const STATE: &str = "trainer.json";

/// A directory that holds a run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunDir {
    root: PathBuf,
}

impl RunDir {
    /// Returns the run in a directory, if the directory holds one.
    pub fn find(path: &Path) -> Option<Self> {
        let is_run =
            path.join(RECIPE).is_file() && [RECORD, LOCK].iter().any(|file| path.join(file).is_file());
        is_run.then(|| RunDir { root: path.to_owned() })
    }

    /// Returns the run in a directory.
    ///
    /// # Errors
    /// Returns an error if the directory holds none.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        Self::find(path).ok_or_else(|| {
            unusable(format!(
                "{} holds no run; give the folder that `levade train` wrote, such as runs/calculator",
                path.display()
            ))
        })
    }

    /// Returns the run to which a checkpoint, or a policy in a checkpoint, belongs.
    pub fn of_checkpoint(path: &Path) -> Option<Self> {
        let path = std::path::absolute(path).ok()?;
        let of_policy =
            path.parent().filter(|parent| parent.file_name().is_some_and(|name| name == POLICIES));
        let path = match of_policy {
            Some(policies) => policies.parent()?,
            None => &path,
        };
        let is_checkpoint =
            path.join(STATE).is_file() && path.parent()?.file_name().is_some_and(|name| name == CHECKPOINTS);
        if is_checkpoint { Self::find(path.parent()?.parent()?) } else { None }
    }

    /// Reads the recipe of the run.
    ///
    /// # Errors
    /// Returns an error if the recipe cannot be read.
    pub fn recipe(&self) -> anyhow::Result<Recipe> {
        Ok(Recipe::load(&self.root.join(RECIPE), &[])?)
    }

    /// Returns when the run started, in seconds since 1970: its chat template prints that as now.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn begun(&self) -> anyhow::Result<u64> {
        begun_or_now(&self.root)
    }

    /// Returns the directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Opens the record of attempts and steps to read it.
    ///
    /// # Errors
    /// Returns an error if the recipe names no location of a record, or if the record cannot be opened.
    pub async fn open_store(&self) -> anyhow::Result<Arc<dyn Store>> {
        let location = Recipe::store_location(&self.root.join(RECIPE))?;
        Ok(location.open(&self.root, Access::Read).await?)
    }

    /// Returns the newest checkpoint. A directory of this name is a complete checkpoint: it gets the name
    /// when it is done.
    pub fn newest_checkpoint(&self) -> Option<PathBuf> {
        let folders = std::fs::read_dir(self.root.join(CHECKPOINTS)).ok()?;
        let steps = folders.flatten().filter_map(|entry| {
            let step: u64 = entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()?;
            entry.path().join(STATE).is_file().then(|| (step, entry.path()))
        });
        steps.max().map(|(_, path)| path)
    }
}

/// Returns when the run in a directory started, in seconds since 1970, or the present time if the directory
/// holds none.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub fn begun_or_now(folder: &Path) -> anyhow::Result<u64> {
    Ok(begun(folder)?.unwrap_or_else(|| seconds(SystemTime::now())))
}
