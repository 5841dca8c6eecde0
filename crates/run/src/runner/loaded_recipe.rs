//! Recipe of a run on the host of a runner: its agents, with their tools and programs.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use levade_agent::environments::{EnvironmentLoop, Environments};
use levade_agent::runner::RunnerAgent;
use levade_process::Supervisor;
use levade_recipe::{AgentKeys, AgentKind, Recipe};
use levade_trainer::Toolboxes;

use crate::failure::unusable;
use crate::programs::runner_program;

/// Recipe of a run, loaded by a runner, with the agents that the runner can execute.
pub(super) struct LoadedRecipe {
    recipe: Recipe,
    toolboxes: Toolboxes,
    environments: Environments,
    supervisor: Supervisor,
    /// Agents that have been set up.
    agents: std::sync::Mutex<BTreeMap<String, RunnerAgent>>,
}

impl LoadedRecipe {
    /// Parses the recipe `text` of the run `name`. The directory `dir` contains the files that the
    /// recipe names.
    ///
    /// # Errors
    /// Returns an error if the recipe is invalid, for example because it was written by another
    /// version.
    pub fn new(
        text: &str,
        name: &str,
        dir: &Path,
        supervisor: &Supervisor,
    ) -> anyhow::Result<Self> {
        let recipe = Recipe::from_other_host(text, Path::new(name), dir)?;
        Ok(LoadedRecipe {
            toolboxes: Toolboxes::new(&recipe.tool, supervisor.clone()),
            environments: Environments::new(recipe.environments(), supervisor),
            supervisor: supervisor.clone(),
            agents: std::sync::Mutex::default(),
            recipe,
        })
    }

    /// Returns the agent with this name. The agent is set up when it is first requested.
    ///
    /// # Errors
    /// Returns an error if there is no such agent, or if this host lacks one of the agent's files.
    pub fn agent(&self, name: &str) -> anyhow::Result<RunnerAgent> {
        let mut agents = self.agents.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(agent) = agents.get(name) {
            return Ok(agent.clone());
        }
        let all = self.recipe.agents();
        let found = all.into_iter().find(|(known, _)| *known == name);
        let (_, keys) = found.with_context(|| format!("the recipe has no agent {name:?}"))?;
        let agent = self.create_agent(keys)?;
        agents.insert(name.to_owned(), agent.clone());
        Ok(agent)
    }

    fn create_agent(&self, keys: &AgentKeys) -> anyhow::Result<RunnerAgent> {
        let program = || runner_program(keys, &self.supervisor);
        Ok(match keys.kind {
            AgentKind::Tools => RunnerAgent::Tools(self.toolboxes.tools_for(keys, None)?),
            AgentKind::Program if !keys.folder.is_dir() => {
                return Err(unusable(format!(
                    "the directory {} of the program is missing on this host; start the runner \
                     with --dir, the directory that has the recipe's files",
                    keys.folder.display()
                )));
            }
            AgentKind::Program => RunnerAgent::Program(program()),
            AgentKind::Game => {
                return Err(unusable(
                    "the agent plays a game, but runners cannot execute games; remove `runners` \
                     from the recipe",
                ));
            }
            AgentKind::Session => {
                return Err(unusable(
                    "the agent has the kind `session`, whose sessions start at the gateway of the \
                     trainer; runners cannot execute it",
                ));
            }
            AgentKind::Environment => {
                let environments = self.environments.clone();
                RunnerAgent::Environment(EnvironmentLoop { program: program(), environments })
            }
        })
    }
}
