//! A job, and the files that every launcher needs of it.

use std::path::PathBuf;

use levade_recipe::Recipe;
use levade_run::dir::RECIPE;

use crate::failure::unusable;
use crate::screen::quoted;

/// A run on one machine or several.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Name that launchers take: lower-case letters, digits and hyphens.
    pub name: String,
    /// The folder of the run.
    pub root: PathBuf,
    /// The folder in it that the launcher reads and logs to.
    pub folder: PathBuf,
    /// The program.
    pub binary: PathBuf,
    /// Machines.
    pub nodes: u32,
    /// Processors that the learner takes on each.
    pub processors: u32,
    /// GPUs on each.
    pub gpus: u32,
    /// Times in a row that a machine whose part has died is started again.
    pub restarts: u32,
}

impl Job {
    /// A job on one processor of one machine.
    ///
    /// # Errors
    /// When a path is no UTF-8.
    pub fn new(name: &str, root: PathBuf, binary: PathBuf) -> anyhow::Result<Self> {
        for path in [&root, &binary] {
            if path.to_str().is_none_or(|path| path.contains('\n')) {
                return Err(unusable(format!(
                    "{} cannot be written into a script: it is no UTF-8, or has a line break; rename it",
                    path.display()
                )));
            }
        }
        let fits = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
        let name: String = name.chars().map(fits).take(40).collect();
        let name = format!("levade-{}", name.trim_matches('-'));
        let name = name.trim_end_matches('-').to_owned();
        let folder = root.join("launch");
        Ok(Job { name, root, folder, binary, nodes: 1, processors: 1, gpus: 0, restarts: 3 })
    }

    /// Script that every machine runs, with its number.
    pub fn script(&self) -> PathBuf {
        self.folder.join("node.sh")
    }

    /// Where a machine's part prints to.
    pub fn log(&self, node: u32) -> PathBuf {
        self.folder.join(format!("node-{node}.log"))
    }

    /// The recipe and the script.
    ///
    /// # Errors
    /// When the recipe cannot be written down.
    pub fn files(&self, recipe: &Recipe) -> anyhow::Result<Vec<(PathBuf, String)>> {
        let file = self.folder.join(RECIPE);
        let (binary, root) = (quoted(&self.binary.display()), quoted(&self.root.display()));
        let script = format!(
            "#!/bin/sh\n\
             # One machine of the run {}: number 0 trains, the others take part in its learner.\n\
             set -eu\n\
             if [ \"$1\" != 0 ]; then\n    \
                 exec {binary} cluster join {root} --node \"$1\"\n\
             fi\n\
             # A run that is there is gone on with: it was stopped, killed, or put off by the scheduler.\n\
             if [ -f {root}/recipe.toml ]; then\n    \
                 exec {binary} train {} --resume\n\
             fi\n\
             exec {binary} train {}\n",
            self.name,
            quoted(&file.display()),
            quoted(&file.display())
        );
        let mut recipe = recipe.clone();
        recipe.run.folder = self.root.clone();
        Ok(vec![(file, recipe.to_toml()?), (self.script(), script)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_launchers_take() {
        let name = |name: &str| Job::new(name, "/r".into(), "/b".into()).unwrap().name;
        assert_eq!(name("Calculator 2_x"), "levade-calculator-2-x");
        assert_eq!(name("-é-"), "levade");
        assert!(Job::new("x", "/a\nb".into(), "/b".into()).is_err());
    }

    #[test]
    fn words_are_read_as_they_are() {
        assert_eq!(quoted(&"/runs/a-1"), "/runs/a-1");
        assert_eq!(quoted(&"it's a $HOME"), r"'it'\''s a $HOME'");
    }
}
