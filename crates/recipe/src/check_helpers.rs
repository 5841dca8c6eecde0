//! Values of `[[tool]] kind = "agent"` and of `condense`.

use super::RecipeError;
use super::agent::{AgentKeys, AgentKind};
use super::check::Checker;
use super::keys::Recipe;
use super::tools::{ToolKeys, ToolOptions};

/// Agents that a toolbox asks, each with the key that names it.
fn asked(keys: &ToolKeys) -> Vec<(&'static str, &str)> {
    let mut asked = Vec::new();
    if let ToolOptions::Agent(keys) = &keys.options {
        asked.push(("agent", keys.agent.as_str()));
    }
    if let Some(keys) = &keys.condense {
        asked.push(("condense.agent", keys.agent.as_str()));
    }
    asked
}

/// Whether an agent asks another one through its tools, at first or second hand.
fn asks(recipe: &Recipe, keys: &AgentKeys, other: &str, depth: usize) -> bool {
    let tools = keys.tools.iter().filter_map(|name| ToolKeys::find(&recipe.tool, name));
    // Longer than all agents together is a circle, which another check names.
    depth <= recipe.agents.len() + 1
        && tools
            .flat_map(|tool| asked(&tool).into_iter().map(|(_, name)| name.to_owned()).collect::<Vec<_>>())
            .any(|name| {
                name == other
                    || recipe.agent_named(&name).is_some_and(|next| asks(recipe, next, other, depth + 1))
            })
}

impl Checker<'_> {
    /// Agents that toolboxes ask: they are there, are made here by the built-in loop, and never come to ask
    /// themselves.
    pub(super) fn helpers(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let agents = recipe.agents();
        let can = |keys: &AgentKeys| keys.kind == AgentKind::Tools && !recipe.may_be_external(keys);
        let names: Vec<&str> = agents.iter().filter(|(_, keys)| can(keys)).map(|(name, _)| *name).collect();
        for (i, tool) in recipe.tool.iter().enumerate() {
            for (key, name) in asked(tool) {
                let key = format!("tool.{i}.{key}");
                let range =
                    format!("an agent whose policy runs here, of kind \"tools\": {}", names.join(", "));
                self.check(names.contains(&name), &key, format!("\"{name}\""), range)?;
                let circle = recipe.agent_named(name).is_some_and(|keys| asks(recipe, keys, name, 0));
                let range = format!(
                    "an agent that does not ask itself through its tools; [agent.{name}] has those of [agent] where it does \
                     not say `tools = []`"
                );
                self.check(!circle, &key, format!("\"{name}\""), range)?;
            }
        }
        Ok(())
    }
}
