//! Access to run directories from outside of a run: the recipe, the store, and the newest
//! checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use levade_recipe::{PromptTarget, Recipe};
use levade_store::{Store, StoreAccess};
use levade_trainer::{PromptVersion, improved_prompts, seconds, started_at};

use crate::failure::unusable;

/// Name of the file with the resolved recipe, which a run writes first. Together with a store or a
/// lock file, this file identifies a run directory.
pub const RECIPE: &str = "recipe.toml";
/// Default name of the store's file in a run directory. A directory from an older build has this
/// file but no lock file.
pub const STORE_FILE: &str = "run.db";
/// Name of the lock file, which every process that works on the run creates.
const LOCK: &str = "lock";
/// Name of the directory of the checkpoints in a run directory.
pub const CHECKPOINTS: &str = "checkpoints";
/// Name of the directory in a checkpoint that contains the trained policies except the first. The
/// first policy is in the checkpoint itself.
pub const POLICIES: &str = "policies";
/// Name of the file that is written last into a checkpoint, and therefore shows that the checkpoint
/// is complete.
pub const STATE: &str = "trainer.json";

/// Directory that contains a run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunDir {
    root: PathBuf,
}

impl RunDir {
    /// Returns the run in the directory `path`. Returns `None` if the directory contains no run.
    pub fn find(path: &Path) -> Option<Self> {
        let is_run = path.join(RECIPE).is_file()
            && [STORE_FILE, LOCK].iter().any(|file| path.join(file).is_file());
        is_run.then(|| RunDir { root: path.to_owned() })
    }

    /// Opens the run in the directory `path`.
    ///
    /// # Errors
    /// Returns an error if the directory contains no run.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        Self::find(path).ok_or_else(|| {
            unusable(format!(
                "{} holds no run; specify the directory that `levade train` wrote, such as \
                 runs/calculator",
                path.display()
            ))
        })
    }

    /// Finds the run that a checkpoint, or a policy in a checkpoint, belongs to. Returns `None` if
    /// there is no such run.
    pub fn find_for_checkpoint(path: &Path) -> Option<Self> {
        let path = find_checkpoint_dir(path)?;
        let is_checkpoint = path.join(STATE).is_file()
            && path.parent()?.file_name().is_some_and(|name| name == CHECKPOINTS);
        if is_checkpoint { Self::find(path.parent()?.parent()?) } else { None }
    }

    /// Reads the recipe of the run.
    ///
    /// # Errors
    /// Returns an error if the recipe cannot be read.
    pub fn recipe(&self) -> anyhow::Result<Recipe> {
        Ok(Recipe::load(&self.root.join(RECIPE), &[])?)
    }

    /// Returns the start time of the run as a Unix timestamp in seconds. Chat templates see it as
    /// the current time.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be read.
    pub fn started(&self) -> anyhow::Result<u64> {
        start_time_or_now(&self.root)
    }

    /// Returns the path of the run directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Opens the store of attempts and steps for reading.
    ///
    /// # Errors
    /// Returns an error if the recipe names no location of a store, or if the store cannot be
    /// opened.
    pub async fn open_store(&self) -> anyhow::Result<Arc<dyn Store>> {
        let location = Recipe::store_location(&self.root.join(RECIPE))?;
        Ok(levade_store_client::open(&location, &self.root, StoreAccess::Read).await?)
    }

    /// Returns the checkpoints of the run by their numbers of finished steps. A directory gets the
    /// name of a checkpoint only when the checkpoint is complete.
    pub fn checkpoints(&self) -> BTreeMap<u64, PathBuf> {
        let entries = std::fs::read_dir(self.root.join(CHECKPOINTS)).into_iter().flatten();
        let found = entries.flatten().filter_map(|entry| {
            let step: u64 = entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()?;
            entry.path().join(STATE).is_file().then(|| (step, entry.path()))
        });
        found.collect()
    }

    /// Returns the newest checkpoint of the run. Returns `None` if there is no checkpoint.
    pub fn newest_checkpoint(&self) -> Option<PathBuf> {
        self.checkpoints().pop_last().map(|(_, path)| path)
    }
}

/// Returns the directory of the checkpoint whose policy is in `path`: the parent of the directory
/// of policies, or `path` itself. Returns `None` if the absolute path of `path` is unknown.
pub fn find_checkpoint_dir(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    let policies = path.parent().filter(|parent| parent.ends_with(POLICIES));
    Some(policies.map_or(Some(path.as_path()), Path::parent)?.to_owned())
}

/// Returns the directory of a trained policy's model in a checkpoint. `trained` contains the names
/// of the run's trained policies, in order.
pub fn policy_dir(checkpoint: &Path, trained: &[String], name: &str) -> PathBuf {
    match trained.first() {
        Some(first) if first != name => checkpoint.join(POLICIES).join(name),
        _ => checkpoint.to_owned(),
    }
}

/// Replaces the texts of a run's recipe with the improved texts of a checkpoint, which the run's
/// phases had found when they wrote the checkpoint. A text for which `is_set` returns true stays,
/// because the user set it. Does nothing if `model` is not a model in a checkpoint.
///
/// # Errors
/// Returns an error if the file with the improved texts cannot be read.
pub fn use_improved_prompts(
    recipe: &mut Recipe,
    model: &Path,
    is_set: impl Fn(&PromptTarget) -> bool,
) -> anyhow::Result<()> {
    let Some(checkpoint) = find_checkpoint_dir(model).filter(|dir| dir.join(STATE).is_file())
    else {
        return Ok(());
    };
    let prompts = improved_prompts(&checkpoint)
        .map_err(|why| unusable(format!("{}: {why}", checkpoint.display())))?;
    for PromptVersion { agent, target, text, .. } in prompts.iter() {
        if !is_set(target) {
            recipe.set_text(agent, target, text);
        }
    }
    Ok(())
}

/// Returns the start time of the run in a directory, as a Unix timestamp in seconds. If the
/// directory contains no run, returns the current time.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub fn start_time_or_now(dir: &Path) -> anyhow::Result<u64> {
    Ok(started_at(dir)?.unwrap_or_else(|| seconds(SystemTime::now())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A checkpoint of a build that improved system prompts only, and one of this build.
    #[test]
    fn improved_texts_of_checkpoint_replace_those_of_recipe_unless_set() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(RECIPE);
        let text = "run = { name = 'x' }\nmodel = { source = './model' }\n\
                    tasks = [{ kind = 'arithmetic' }]\n\
                    [agent]\nsystem = 'Old.'\ncontext = 'summarize'\ntools = ['calculator']\n";
        std::fs::write(&file, text).unwrap();
        let recipe = Recipe::load(&file, &[]).unwrap();
        let improved = |prompts: &str, is_set: fn(&PromptTarget) -> bool| {
            let state = format!(
                r#"{{"schema": 2, "position": {{"phase": 0, "step": 1, "global_step": 1,
                    "evaluated": true}}, "prompts": {prompts}, "phase_end": true,
                    "metrics_bytes": 0, "files": []}}"#
            );
            std::fs::write(dir.path().join(STATE), state).unwrap();
            let mut recipe = recipe.clone();
            use_improved_prompts(&mut recipe, dir.path(), is_set).unwrap();
            recipe.agent
        };
        let older = improved(r#"{"default": {"version": 2, "text": "New."}}"#, |_| false);
        assert_eq!(older.system, "New.");
        assert_eq!(older.context, recipe.agent.context);

        let versions = r#"[
            {"agent": "default", "target": "system", "version": 1, "text": "New."},
            {"agent": "default", "target": "summary_instruction", "version": 1, "text": "Sum up."},
            {"agent": "default", "target": {"tool": {"name": "calculator"}}, "version": 3,
             "text": "Computes."}]"#;
        let now = improved(versions, |target| *target == PromptTarget::System);
        assert_eq!(now.system, "Old.", "the user sets it");
        assert_eq!(now.context_policy(1000).summary.instruction, "Sum up.");
        assert_eq!(now.tool_descriptions["calculator"].description.as_deref(), Some("Computes."));
    }
}
