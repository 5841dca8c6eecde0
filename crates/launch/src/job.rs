//! A launched run, and the files that every launcher needs.

use std::path::PathBuf;

use levade_recipe::{LearnerKeys, Recipe};
use levade_run::dir::RECIPE;
use levade_run::gpus::GpuAllocation;
use levade_run::unusable;

use crate::shell::quoted;

/// Job to launch: the files of a run, and the machines that the run needs.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Name of the job, which all launchers accept. The name consists of lower-case letters, digits
    /// and hyphens.
    pub name: String,
    /// Path of the run directory.
    pub root: PathBuf,
    /// Directory in the run directory for the launcher's files and the machines' logs.
    pub dir: PathBuf,
    /// Path of the binary `levade` on the machines.
    pub binary: PathBuf,
    /// Number of machines that the run needs.
    pub nodes: u32,
    /// Number of CPU cores that the learner uses on each machine.
    pub processors: u32,
    /// Number of GPUs that the run uses on each machine.
    pub gpus: u32,
    /// Maximum number of consecutive restarts of a machine's failed processes.
    pub restarts: u32,
}

impl Job {
    /// Creates the job that executes a recipe.
    ///
    /// # Errors
    /// Returns an error if a path is not UTF-8 or contains a line break, because a script cannot
    /// contain such a path.
    pub fn new(recipe: &Recipe, binary: PathBuf, restarts: u32) -> anyhow::Result<Self> {
        let root = std::path::absolute(&recipe.run.folder)?;
        let (nodes, processes, threads) = match &recipe.cluster.learner {
            Some(LearnerKeys::Torch(keys)) if keys.start => {
                (keys.nodes, keys.processes_per_node(), keys.threads)
            }
            Some(LearnerKeys::Torch(_)) | None => (1, 1, recipe.engine.threads.max(1) as u32),
        };
        let processors = processes.saturating_mul(threads).max(1);
        // All machines of a job get as many GPUs as the first one, which also runs the servers.
        let gpus = GpuAllocation::of(recipe).total();
        Ok(Job { nodes, processors, gpus, restarts, ..Job::named(&recipe.run.name, root, binary)? })
    }

    /// Creates a job that uses one CPU core of one machine.
    pub(crate) fn named(name: &str, root: PathBuf, binary: PathBuf) -> anyhow::Result<Self> {
        for path in [&root, &binary] {
            if path.to_str().is_none_or(|path| path.contains('\n')) {
                return Err(unusable(format!(
                    "{} cannot be written into a script: it is not UTF-8, or it contains a line \
                     break; rename it",
                    path.display()
                )));
            }
        }
        let name: String = name
            .chars()
            .map(|c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
            .take(40)
            .collect();
        let name = format!("levade-{}", name.trim_matches('-'));
        let name = name.trim_end_matches('-').to_owned();
        let dir = root.join("launch");
        Ok(Job { name, root, dir, binary, nodes: 1, processors: 1, gpus: 0, restarts: 3 })
    }

    /// Returns the path of the script that each machine runs. The argument of the script is the
    /// machine's number.
    pub fn script_path(&self) -> PathBuf {
        self.dir.join("node.sh")
    }

    /// Returns the path of the log of the machine `node`.
    pub fn log(&self, node: u32) -> PathBuf {
        self.dir.join(format!("node-{node}.log"))
    }

    /// Renders the recipe and the script of the machines, as paths and texts.
    pub(crate) fn render_files(&self, recipe: &Recipe) -> anyhow::Result<Vec<(PathBuf, String)>> {
        let file = self.dir.join(RECIPE);
        let binary = quoted(&self.binary.display());
        let root = quoted(&self.root.display());
        let script = format!(
            "#!/bin/sh\n\
             # One machine of the run {}: machine 0 trains, the others take part in its learner.\n\
             set -eu\n\
             if [ \"$1\" != 0 ]; then\n    \
                 exec {binary} cluster join {root} --node \"$1\"\n\
             fi\n\
             # An existing run is resumed: it was stopped, killed or preempted.\n\
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
        Ok(vec![(file, recipe.to_toml()?), (self.script_path(), script)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_name_has_only_lower_case_letters_digits_and_hyphens() {
        assert_eq!(to_job_name("Calculator 2_x"), "levade-calculator-2-x");
        assert_eq!(to_job_name("-é-"), "levade");
        assert!(Job::named("x", "/a\nb".into(), "/b".into()).is_err());
    }

    fn to_job_name(name: &str) -> String {
        Job::named(name, "/r".into(), "/b".into()).unwrap().name
    }
}
