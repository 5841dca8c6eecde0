//! Recipes by path, with what the command line changes in them.

use std::path::{Path, PathBuf};

use levade_recipe::{Override, Recipe};
use levade_run::dir::{RECIPE, RunDir};

use crate::failure::unusable;

/// Reads a recipe: a TOML file, or a folder that holds `recipe.toml`.
///
/// # Errors
/// Names the file and the key.
pub fn load(path: &Path, overrides: &[Override]) -> anyhow::Result<Recipe> {
    Ok(Recipe::load(&file(path)?, overrides)?)
}

/// Reads the recipe of a run that begins or goes on, to be in the folder `run` where it is given. The recipe
/// of a run means this run: one that was copied or moved names the folder that it began in.
///
/// # Errors
/// Errors of [`load`], and when there is no working directory.
pub fn load_run(path: &Path, overrides: &[Override], run: Option<&Path>) -> anyhow::Result<Recipe> {
    let mut recipe = load(path, overrides)?;
    let inside = path.file_name().is_some_and(|name| name == RECIPE).then(|| path.parent()).flatten();
    let found = || RunDir::find(path).or_else(|| RunDir::find(inside?)).map(|run| run.root().to_owned());
    let here = if sets(overrides, "run", "folder") { None } else { found() };
    if let Some(folder) = run.map(Path::to_owned).or(here) {
        // The folder of a file that is named without one is empty.
        recipe.run.folder = std::path::absolute(Path::new(".").join(folder))?;
    }
    Ok(recipe)
}

/// Whether one of the overrides sets a key of a table.
pub fn sets(overrides: &[Override], table: &str, key: &str) -> bool {
    let names = |change: &Override| match change.path.as_slice() {
        [whole] => whole == table,
        [outer, inner, ..] => outer == table && inner == key,
        [] => false,
    };
    overrides.iter().any(names)
}

fn file(path: &Path) -> anyhow::Result<PathBuf> {
    if !path.exists() {
        return Err(unusable(format!(
            "{} does not exist; give a recipe's TOML file, or a folder that holds recipe.toml",
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
    Err(unusable(format!("{} holds no recipe.toml; give the TOML file itself", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_was_moved_is_where_it_lies() {
        let root = tempfile::tempdir().unwrap();
        let moved = root.path().join("moved");
        std::fs::create_dir(&moved).unwrap();
        let text = "[run]\nname = 'x'\nfolder = '/where/it/began'\n[model]\nsource = 'm'\n\
                    [[tasks]]\nkind = 'arithmetic'\n";
        std::fs::write(moved.join(RECIPE), text).unwrap();
        let folder = |path: &Path, overrides: &[&str], run: Option<&Path>| {
            let overrides: Vec<Override> = overrides.iter().map(|text| text.parse().unwrap()).collect();
            load_run(path, &overrides, run).unwrap().run.folder
        };
        assert_eq!(folder(&moved, &[], None), Path::new("/where/it/began"), "no run is there yet");
        std::fs::write(moved.join("run.db"), "").unwrap();
        assert_eq!(folder(&moved, &[], None), moved);
        assert_eq!(folder(&moved.join(RECIPE), &[], None), moved);
        assert_eq!(folder(&moved, &["run.seed=2"], None), moved);
        assert_eq!(folder(&moved, &["run.folder=/other"], None), Path::new("/other"));
        assert_eq!(folder(&moved, &[], Some(Path::new("/given"))), Path::new("/given"));
    }

    #[test]
    fn overrides_of_a_key_are_found() {
        let sets = |change: &str| super::sets(&[change.parse().unwrap()], "model", "source");
        assert!(sets("model.source=x") && sets("model={source='x'}"));
        assert!(!sets("model.context=9") && !sets("policy.a.source=x"));
    }
}
