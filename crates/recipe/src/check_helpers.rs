//! Checks agents that toolboxes call: `[[tool]] kind = "agent"` and `summarize`.

use levade_tools::ToolKind;

use super::RecipeError;
use super::agent::{AgentKeys, AgentKind};
use super::check::Checker;
use super::keys::Recipe;
use super::tools::ToolKeys;

/// Returns the agents that a toolbox calls, each with the toolbox key that names the agent.
fn called_agents(keys: &ToolKeys) -> Vec<(&'static str, &str)> {
    let mut agents = Vec::new();
    if let ToolKind::Agent(keys) = &keys.options {
        agents.push(("agent", keys.agent.as_str()));
    }
    if let Some(keys) = &keys.summarize {
        agents.push(("summarize.agent", keys.agent.as_str()));
    }
    agents
}

/// Returns whether an agent calls the agent `other` through its tools, directly or indirectly.
/// `depth` is the number of calls so far.
fn calls_agent(recipe: &Recipe, keys: &AgentKeys, other: &str, depth: usize) -> bool {
    let tools = keys.tools.iter().filter_map(|name| ToolKeys::find(&recipe.tool, name));
    // A chain longer than the number of agents contains a cycle, which another check reports.
    depth <= recipe.agents.len() + 1
        && tools
            .flat_map(|tool| {
                called_agents(&tool)
                    .into_iter()
                    .map(|(_, name)| name.to_owned())
                    .collect::<Vec<_>>()
            })
            .any(|name| {
                name == other
                    || recipe
                        .agent_named(&name)
                        .is_some_and(|next| calls_agent(recipe, next, other, depth + 1))
            })
}

impl Recipe {
    /// Returns whether a toolbox of the recipe calls the agent called `agent`.
    pub(super) fn is_called_by_tools(&self, agent: &str) -> bool {
        self.tool.iter().flat_map(called_agents).any(|(_, name)| name == agent)
    }
}

impl Checker<'_> {
    /// Checks the helper agents that toolboxes call: each must exist, run in the built-in loop, and
    /// never call itself through its tools.
    pub(super) fn check_helpers(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let agents = recipe.agents();
        let is_callable =
            |keys: &AgentKeys| keys.kind == AgentKind::Tools && !recipe.may_be_external(keys);
        let names: Vec<&str> =
            agents.iter().filter(|(_, keys)| is_callable(keys)).map(|(name, _)| *name).collect();
        for (i, tool) in recipe.tool.iter().enumerate() {
            for (key, name) in called_agents(tool) {
                let key = format!("tool.{i}.{key}");
                let range = format!(
                    "an agent whose policy is not external, of kind \"tools\": {}",
                    names.join(", ")
                );
                self.check(names.contains(&name), &key, format!("\"{name}\""), range)?;
                let has_cycle =
                    recipe.agent_named(name).is_some_and(|keys| calls_agent(recipe, keys, name, 0));
                let range = format!(
                    "an agent that does not call itself through its tools; [agent.{name}] inherits \
                     the tools of [agent] unless it sets `tools`, for example `tools = []`"
                );
                self.check(!has_cycle, &key, format!("\"{name}\""), range)?;
            }
        }
        self.check_helper_leases(recipe)
    }

    /// Checks that no agent waits for a lease of a toolbox while the agent that called it holds
    /// one. Otherwise, all leases could be held in this way, and none would be returned.
    fn check_helper_leases(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        let leased = |keys: &AgentKeys| {
            recipe.tool.iter().position(|tool| {
                tool.leases.is_some() && keys.tools.iter().any(|name| name == tool.name())
            })
        };
        let agents = recipe.agents();
        for (name, keys) in &agents {
            let Some(kept) = leased(keys) else { continue };
            for (called, called_keys) in &agents {
                let Some(awaited) = leased(called_keys) else { continue };
                let range = format!(
                    "left out, because the agent {name} keeps a lease of {} while it calls the \
                     agent {called}; take the toolbox from one of them ([agent.{called}] inherits \
                     the tools of [agent] unless it sets `tools`)",
                    recipe.tool[kept].name()
                );
                self.check(
                    !calls_agent(recipe, keys, called, 0),
                    format!("tool.{awaited}.leases"),
                    recipe.tool[awaited].leases.unwrap_or_default(),
                    range,
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use levade_tools::ToolKind;

    use super::super::{Recipe, RecipeError, ToolFailureEffect};

    fn load(rest: &str) -> Result<Recipe, RecipeError> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        let head =
            "run = { name = 'x' }\nmodel = { source = './m' }\n[[tasks]]\nkind = 'arithmetic'\n";
        std::fs::write(&file, format!("{head}{rest}")).unwrap();
        Recipe::load(&file, &[])
    }

    const CLERK: &str =
        "[[tool]]\nkind = 'agent'\nname = 'ask'\nagent = 'clerk'\ndescription = 'Sums.'\n";

    #[test]
    fn helper_agents_load_and_round_trip() {
        let recipe = load(&format!(
            "[agent]\ntools = ['ask', 'calculator']\n[agent.clerk]\ntools = ['calculator']\n{CLERK}\
             [[tool]]\nkind = 'calculator'\noutage = 'retry'\n\
             condense = {{ agent = 'clerk', above = 5 }}\n"
        ));
        // The clerk would be called for the results of its own calculator.
        let error = recipe.unwrap_err().to_string();
        assert!(error.contains("`tool.0.agent` is \"clerk\""), "{error}");
        assert!(error.contains("does not call itself"), "{error}");
        let recipe = load(&format!(
            "[agent]\ntools = ['ask', 'calculator']\n[agent.clerk]\ntools = []\n{CLERK}\
             [[tool]]\nkind = 'calculator'\noutage = 'retry'\n\
             condense = {{ agent = 'clerk', above = 5 }}\n"
        ))
        .unwrap();
        let [agent_tool, calculator] = &recipe.tool[..] else { panic!("{:?}", recipe.tool) };
        assert!(matches!(&agent_tool.options, ToolKind::Agent(keys) if keys.agent == "clerk"));
        let condense = calculator.summarize.as_ref().unwrap();
        assert_eq!(
            (condense.agent.as_str(), condense.above, calculator.on_failure),
            ("clerk", 5, ToolFailureEffect::Retry)
        );
        let text = recipe.to_toml().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        std::fs::write(&file, &text).unwrap();
        assert_eq!(Recipe::load(&file, &[]).unwrap().tool, recipe.tool, "{text}");
    }

    /// The clerk waits for a lease while its caller keeps one: the same one, or another one.
    #[test]
    fn leases_of_agent_and_its_helper_are_rejected() {
        let recipe = |own: &str, clerk: &str| {
            load(&format!(
                "[agent]\ntools = ['ask', {own}]\n[agent.clerk]\ntools = [{clerk}]\n{CLERK}\
                 [[tool]]\nkind = 'calculator'\nname = 'a'\nleases = 2\n\
                 [[tool]]\nkind = 'calculator'\nname = 'b'\nleases = 3\n"
            ))
        };
        for (own, clerk, wrong) in [
            ("'a'", "'a'", "`tool.1.leases` is 2, but must be left out"),
            ("'a'", "'b', 'calculator'", "`tool.2.leases` is 3, but must be left out"),
        ] {
            let error = recipe(own, clerk).unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("the agent clerk"), "{error}");
        }
        for (own, clerk) in [("'a', 'b'", "'calculator'"), ("'calculator'", "'a', 'b'")] {
            recipe(own, clerk).unwrap();
        }
    }

    #[test]
    fn unsuitable_helper_agents_are_rejected() {
        let own = load(&format!("[agent]\ntools = ['ask']\n[agent.clerk]\nsystem = 'x'\n{CLERK}"))
            .unwrap_err();
        assert!(own.to_string().contains("[agent.clerk] inherits the tools of [agent]"), "{own}");
        let unknown_agent =
            load(&format!("[agent]\ntools = ['ask']\n{CLERK}")).unwrap_err().to_string();
        assert!(
            unknown_agent.contains("`tool.0.agent` is \"clerk\"")
                && unknown_agent.contains("default"),
            "{unknown_agent}"
        );
        let program = load(&format!(
            "[agent]\ntools = ['ask']\n[agent.clerk]\nkind = 'program'\ncommand = ['x']\n\
             tools = []\n{CLERK}"
        ));
        assert!(program.unwrap_err().to_string().contains("of kind \"tools\": default"));
        let unnamed =
            load("[[tool]]\nkind = 'agent'\nagent = 'default'\ndescription = 'x'\n").unwrap_err();
        assert!(unnamed.to_string().contains("needs a `name`"), "{unnamed}");
    }
}
