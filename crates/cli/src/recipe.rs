//! Recipes by path, with what the command line changes in them.

use std::path::{Path, PathBuf};

use dressage_trainer::recipe::{Override, Recipe};

use crate::failure::unusable;

/// Reads a recipe: a TOML file, or a folder that holds `recipe.toml`.
///
/// # Errors
/// Names the file and the key.
pub fn load(path: &Path, overrides: &[Override]) -> anyhow::Result<Recipe> {
    Ok(Recipe::load(&file(path)?, overrides)?)
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
