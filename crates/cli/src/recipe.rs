//! Loads recipes by path, with the overrides of the command line.

use std::path::{Path, PathBuf};

use levade_recipe::{Override, Recipe};
use levade_run::dir::{RECIPE, RunDir};

use crate::failure::unusable;
use crate::new::example;

/// Reads a recipe from a TOML file, or from a directory that contains `recipe.toml`.
///
/// # Errors
/// Returns an error that names the file and the key if the recipe cannot be read or is invalid.
pub fn load(path: &Path, overrides: &[Override]) -> anyhow::Result<Recipe> {
    Ok(Recipe::load(&recipe_file(path)?, overrides)?)
}

/// Reads a recipe whose table `[reward]` is applied to a run. The other tables are ignored, so the
/// file can contain only `[reward]`.
///
/// # Errors
/// Returns the errors of [`load`].
pub fn load_reward(path: &Path, run: &RunDir, overrides: &[Override]) -> anyhow::Result<Recipe> {
    Ok(Recipe::load_reward(&recipe_file(path)?, &run.root().join(RECIPE), overrides)?)
}

/// Reads the recipe of a run that starts or resumes, and sets its run directory to `run` if it is
/// `Some`.
///
/// Otherwise, a recipe in a run directory gets that directory, unless an override sets
/// `run.folder`: the recipe of a copied or moved run names the directory in which the run started.
///
/// # Errors
/// Returns the errors of [`load`], and an error if there is no working directory.
pub fn load_run(path: &Path, overrides: &[Override], run: Option<&Path>) -> anyhow::Result<Recipe> {
    let mut recipe = load(path, overrides)?;
    let inside =
        path.file_name().is_some_and(|name| name == RECIPE).then(|| path.parent()).flatten();
    let found =
        || RunDir::find(path).or_else(|| RunDir::find(inside?)).map(|run| run.root().to_owned());
    let here = if sets_key(overrides, "run", "folder") { None } else { found() };
    if let Some(dir) = run.map(Path::to_owned).or(here) {
        // The parent of a bare file name is the empty path.
        recipe.run.folder = std::path::absolute(Path::new(".").join(dir))?;
    }
    Ok(recipe)
}

/// Returns whether an override sets a key of a table.
pub fn sets_key(overrides: &[Override], table: &str, key: &str) -> bool {
    overrides.iter().any(|change| match change.path.as_slice() {
        [table_key] => table_key == table,
        [outer, inner, ..] => outer == table && inner == key,
        [] => false,
    })
}

fn recipe_file(path: &Path) -> anyhow::Result<PathBuf> {
    if !path.exists() {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .filter(|name| example::example_exists(name));
        let hint = name.map_or(String::new(), |name| {
            format!("; `levade new example {name}` writes the example")
        });
        return Err(unusable(format!(
            "{} does not exist; give a recipe's TOML file, or a directory that contains \
             recipe.toml{hint}",
            path.display()
        )));
    }
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    let inside = path.join("recipe.toml");
    if inside.is_file() {
        return Ok(inside);
    }
    let hint = match RunDir::find_for_checkpoint(path) {
        Some(run) => format!(
            "the directory is a checkpoint: give its run, {}; `levade eval` measures it with \
             --model {}",
            run.root().display(),
            path.display()
        ),
        None => "give the TOML file itself".to_owned(),
    };
    Err(unusable(format!("{} contains no recipe.toml; {hint}", path.display())))
}

#[cfg(test)]
mod tests {
    use levade_run::dir::STATE;

    use super::*;

    #[test]
    fn load_run_prefers_current_location_of_moved_run() {
        let root = tempfile::tempdir().unwrap();
        let moved = root.path().join("moved");
        std::fs::create_dir(&moved).unwrap();
        let text = "[run]\nname = 'x'\nfolder = '/where/it/began'\n[model]\nsource = 'm'\n\
                    [[tasks]]\nkind = 'arithmetic'\n";
        std::fs::write(moved.join(RECIPE), text).unwrap();
        let dir = |path: &Path, overrides: &[&str], run: Option<&Path>| {
            let overrides: Vec<Override> =
                overrides.iter().map(|text| text.parse().unwrap()).collect();
            load_run(path, &overrides, run).unwrap().run.folder
        };
        assert_eq!(dir(&moved, &[], None), Path::new("/where/it/began"), "no run is there yet");
        std::fs::write(moved.join("run.db"), "").unwrap();
        assert_eq!(dir(&moved, &[], None), moved);
        assert_eq!(dir(&moved.join(RECIPE), &[], None), moved);
        assert_eq!(dir(&moved, &["run.seed=2"], None), moved);
        assert_eq!(dir(&moved, &["run.folder=/other"], None), Path::new("/other"));
        assert_eq!(dir(&moved, &[], Some(Path::new("/given"))), Path::new("/given"));
    }

    #[test]
    fn checkpoint_instead_of_recipe_is_explained() {
        let run = tempfile::tempdir().unwrap();
        let checkpoint = run.path().join("checkpoints/step-000001");
        std::fs::create_dir_all(&checkpoint).unwrap();
        let error = load(&checkpoint, &[]).unwrap_err().to_string();
        assert!(error.ends_with("give the TOML file itself"), "{error}");
        for file in [run.path().join(RECIPE), run.path().join("run.db"), checkpoint.join(STATE)] {
            std::fs::write(file, "").unwrap();
        }
        let error = load(&checkpoint, &[]).unwrap_err().to_string();
        assert!(error.contains("is a checkpoint") && error.contains("--model"), "{error}");
    }

    #[test]
    fn sets_key_matches_keys_and_tables() {
        let sets = |change: &str| super::sets_key(&[change.parse().unwrap()], "model", "source");
        assert!(sets("model.source=x") && sets("model={source='x'}"));
        assert!(!sets("model.context=9") && !sets("policy.a.source=x"));
    }
}
