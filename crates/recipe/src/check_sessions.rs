//! Checks tasks that are recorded sessions.

use super::RecipeError;
use super::check::Checker;
use super::check_agents::format_choices;
use super::keys::{Phase, Recipe, TaskSource};
use super::sessions::SessionKeys;

impl Recipe {
    /// Returns whether a source of tasks consists of recorded sessions.
    pub fn has_sessions(&self) -> bool {
        self.tasks.iter().any(|source| matches!(source, TaskSource::Sessions(_)))
    }

    /// Returns the number of sessions that one group takes: the largest group of an RL phase.
    pub fn session_group(&self) -> usize {
        let size = |phase: &Phase| match phase {
            Phase::Rl(keys) => keys.group_size,
            Phase::Sft(_) | Phase::Prompt(_) => 1,
        };
        self.phase.iter().map(size).max().unwrap_or(1)
    }
}

impl Checker<'_> {
    /// Checks that sessions have a directory and an agent, and that no phase samples more attempts
    /// at their tasks than were recorded.
    pub(super) fn sessions(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let agents = recipe.agents();
        for (index, source) in recipe.tasks.iter().enumerate() {
            let TaskSource::Sessions(SessionKeys { path, agent }) = source else { continue };
            let range = "the directory that `levade serve --record` has written";
            self.check(!path.as_os_str().is_empty(), format!("tasks.{index}.path"), "\"\"", range)?;
            let found = agent.is_empty() || agents.iter().any(|(name, _)| *name == agent);
            let range = format_choices(agents.iter().map(|(name, _)| name));
            self.check(found, format!("tasks.{index}.agent"), format!("\"{agent}\""), range)?;
        }
        if !recipe.has_sessions() {
            return Ok(());
        }
        for (phase, keys) in recipe.phase.iter().enumerate() {
            let Phase::Rl(keys) = keys else { continue };
            self.check(
                keys.oversample == 0,
                format!("phase.{phase}.oversample"),
                keys.oversample,
                "0 with tasks of kind \"sessions\", whose attempts are recorded already",
            )?;
            self.check(
                !keys.needs_baseline(),
                format!("phase.{phase}.advantage"),
                "one with greedy attempts",
                "another one with tasks of kind \"sessions\", for which nothing is sampled",
            )?;
        }
        Ok(())
    }
}
