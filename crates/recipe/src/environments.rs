//! Checks task sources that are environments: recipe and environment must agree on which of them
//! runs the attempts.

use levade_agent::environments::CommonOptions;
use levade_tree::DEFAULT;

use super::RecipeError;
use super::agent::AgentKind;
use super::check::Checker;
use super::check_agents::format_choices;
use super::keys::Recipe;

impl Checker<'_> {
    /// Checks the keys of environments. Their names must be unique, and their agents must have a
    /// kind that environments support.
    pub(super) fn check_environments(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let mut names: Vec<String> = Vec::new();
        for (i, source) in recipe.tasks.iter().enumerate() {
            let Some(options) = source.environment() else { continue };
            let key = |name: &str| format!("tasks.{i}.{name}");
            if let Some((name, value, range)) = options.find_range_error() {
                self.check(false, key(name), value, range)?;
            }
            let CommonOptions { name, agent, .. } = options.common_options();
            let range =
                "a name that no other environment has: it identifies the environment's tasks";
            self.check(
                !names.iter().any(|taken| taken == name),
                key("name"),
                format!("{name:?}"),
                range,
            )?;
            names.push(name.to_owned());
            let wanted = if agent.is_empty() { DEFAULT } else { agent };
            let agents = recipe.agents();
            let found = agents.iter().find(|(name, _)| *name == wanted);
            let Some((_, keys)) = found else {
                let range =
                    format!("left out, or {}", format_choices(agents.iter().map(|(name, _)| name)));
                return self.check(false, key("agent"), format!("{agent:?}"), range);
            };
            let table = if wanted == DEFAULT { "agent".into() } else { format!("agent.{wanted}") };
            let leads = options.leads_attempts();
            let range = if leads {
                format!("\"environment\" for the tasks of {name}, which runs its attempts itself")
            } else {
                format!(
                    "another kind for the tasks of {name}, which scores answers and runs no \
                         attempts"
                )
            };
            let fits = (keys.kind == AgentKind::Environment) == leads;
            self.check(fits, format!("{table}.kind"), format!("\"{}\"", keys.kind.name()), range)?;
        }
        Ok(())
    }
}
