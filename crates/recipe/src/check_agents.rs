//! Checks values of policies and agents, and that the names in them exist.

use std::fmt::Display;

use levade_tools::OptionError;

use super::RecipeError;
use super::agent::{AgentKeys, AgentKind, QUESTION};
use super::check::{Checker, is_http};
use super::choice::PolicyWeight;
use super::context::ContextKeys;
use super::keys::{Phase, Recipe};
use super::policy::{ExternalKeys, PastKeys, PolicyKeys, PolicyModel};
use super::read::ReadError;
use super::tools::ToolKeys;

/// Formats the allowed names as a list for the end of an error message.
pub(super) fn format_choices<T: Display>(names: impl IntoIterator<Item = T>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    format!("one of {}", names.join(", "))
}

fn names<'a>(agents: &'a [(&str, &AgentKeys)]) -> impl Iterator<Item = &'a str> {
    agents.iter().map(|(name, _)| *name)
}

impl Checker<'_> {
    /// Checks that the name of an agent, a policy or a user is valid as a directory name and in a
    /// URL. `table` is the recipe table of the name.
    pub(super) fn check_name(&self, table: &str, name: &str) -> Result<(), RecipeError> {
        let ok = !name.is_empty()
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        self.check(ok, format!("{table}.{name}"), "a name", "a name of letters, digits, - and _")
    }

    /// Checks the policies of a recipe. If the recipe has phases, at least one policy must be
    /// trained.
    pub(super) fn check_policies(&self, recipe: &Recipe) -> Result<(), RecipeError> {
        for (name, keys) in &recipe.policy {
            self.check_name("policy", name)?;
            let key = |key: &str| format!("policy.{name}.{key}");
            match keys {
                PolicyKeys::External(keys) => self.check_external_keys(&key, keys)?,
                PolicyKeys::Frozen(PolicyModel { lora: Some(_), .. }) => {
                    self.check(
                        false,
                        key("lora"),
                        "set",
                        "left out: a frozen policy is not trained",
                    )?;
                }
                PolicyKeys::Past(keys) => self.check_past_pool(recipe, &key, keys)?,
                PolicyKeys::Trained(_) | PolicyKeys::Frozen(_) => {}
            }
        }
        let learns = recipe.policies().iter().any(|(_, keys)| keys.is_trained());
        self.check(
            learns || recipe.phase.is_empty(),
            "policy",
            "all frozen",
            "a table with at least one trained policy",
        )
    }

    /// Checks the keys of a pool of past versions.
    fn check_past_pool(
        &self,
        recipe: &Recipe,
        key: &dyn Fn(&str) -> String,
        keys: &PastKeys,
    ) -> Result<(), RecipeError> {
        let trained = recipe.trained_policies();
        self.check(
            trained.contains(&keys.of),
            key("of"),
            format!("\"{}\"", keys.of),
            format!("a trained policy, {}", format_choices(&trained)),
        )?;
        let cluster = &recipe.cluster;
        self.check(
            cluster.learner.is_none() && cluster.samplers.is_none(),
            key("kind"),
            "\"past\"",
            "left out with `cluster.learner` or `cluster.samplers`: past versions run in the \
             embedded engine, next to the policy that they come from",
        )
    }

    /// Checks the keys of an external policy.
    fn check_external_keys(
        &self,
        key: &dyn Fn(&str) -> String,
        keys: &ExternalKeys,
    ) -> Result<(), RecipeError> {
        let range = "an address with http:// or https://";
        let url = &keys.url;
        let is_omitted = url.is_empty() && !keys.base_urls.is_empty();
        self.check(is_omitted || is_http(url), key("url"), format!("\"{url}\""), range)?;
        for (at, url) in keys.base_urls.iter().enumerate() {
            self.check(is_http(url), key(&format!("base_urls.{at}")), format!("\"{url}\""), range)?;
        }
        self.check(!keys.model.is_empty(), key("model"), "\"\"", "the name of the model at `url`")
    }

    /// Checks an agent that an external policy may play. It must be an additional agent, and only a
    /// program or an environment can call it.
    fn check_external_policy(
        &self,
        key: &dyn Fn(&str) -> String,
        table: &str,
        agent: &AgentKeys,
    ) -> Result<(), RecipeError> {
        let policy = || match agent.policy.weights() {
            [_, _, ..] => format!("{}, of which one is external", agent.policy),
            _ => format!("{}, which is external", agent.policy),
        };
        self.check(
            agent.kind.can_be_external(),
            key("policy"),
            policy(),
            "a policy that is not external: the built-in loop sends tokens, and only programs \
             (kind = \"program\"), environments, seats of a game (kind = \"game\") and simulated \
             users can call external APIs",
        )?;
        self.check(
            table.starts_with("agent.") && table != "agent.default",
            key("policy"),
            policy(),
            "a policy that is not external: attempts start with this agent; let its program call \
             an external policy as another agent, [agent.NAME]",
        )
    }

    /// Checks the toolboxes of a recipe. Each toolbox needs a unique name.
    pub(super) fn check_tools(&self, tools: &[ToolKeys]) -> Result<(), RecipeError> {
        for (i, keys) in tools.iter().enumerate() {
            let table = format!("tool.{i}");
            let name = keys.name();
            self.check_name(&table, name)?;
            let first = tools.iter().position(|other| other.name() == name).unwrap_or(i);
            let range =
                format!("different from the name of tool.{first}: agents refer to tools by name");
            self.check(first == i, format!("{table}.name"), format!("\"{name}\""), range)?;
            let key = |key: &str| format!("{table}.{key}");
            match keys.check() {
                Ok(()) => {}
                Err(OptionError::Range { key: option, value, range }) => {
                    self.check(false, key(option), value, range)?;
                }
                Err(OptionError::Other(why)) => {
                    let source = ReadError::at_path(["tool", &i.to_string()], why);
                    return Err(RecipeError::Key { file: self.file().to_owned(), source });
                }
            }
        }
        Ok(())
    }

    /// Checks the policies and agents that a phase names. The phase must train at least one policy
    /// and one agent.
    pub(super) fn check_phase_names(
        &self,
        recipe: &Recipe,
        index: usize,
        phase: &Phase,
    ) -> Result<(), RecipeError> {
        let trained = recipe.trained_policies();
        let Some(policies) = phase.policies() else { return Ok(()) };
        for name in policies {
            let ok = trained.contains(name);
            self.check(
                ok,
                format!("phase.{index}.policies"),
                name,
                format!("a list of trained policies, {}", format_choices(&trained)),
            )?;
        }
        let mut agents = recipe.agents();
        let only = match phase {
            Phase::Rl(keys) => &keys.only.agents[..],
            Phase::Sft(_) | Phase::Prompt(_) => &[],
        };
        for name in only {
            let ok = agents.iter().any(|(agent, _)| agent == name);
            let range = format!(
                "a list of agents, {}",
                format_choices(agents.iter().map(|(agent, _)| agent))
            );
            self.check(ok, format!("phase.{index}.only.agents"), name, range)?;
        }
        // The agents that remain after all filters are trained.
        agents.retain(|(name, keys)| keys.train && !recipe.plays_user(name));
        let range =
            format!("true for at least one agent: otherwise phase {index} would train nothing");
        self.check(!agents.is_empty(), "agent.train", false, range)?;
        let trained = recipe.trained_policies_in(phase);
        let trainable_agents = agents.clone();
        agents.retain(|(_, keys)| {
            recipe.policy_names(keys).iter().any(|policy| trained.contains(policy))
        });
        self.check(
            !agents.is_empty(),
            format!("phase.{index}.policies"),
            trained.join(", "),
            format!(
                "a list with a policy of a trained agent, {}: otherwise this phase would train \
                 nothing",
                format_choices(
                    trainable_agents.iter().flat_map(|(_, keys)| recipe.policy_names(keys))
                )
            ),
        )?;
        let range = format!(
            "a list with an agent that this phase trains, {}",
            format_choices(names(&agents))
        );
        agents.retain(|(name, _)| only.is_empty() || only.iter().any(|only| only == name));
        self.check(!agents.is_empty(), format!("phase.{index}.only.agents"), only.join(", "), range)
    }

    /// Checks the keys that only agents of kind `program` may have, and the keys that such agents
    /// must have.
    fn check_program(
        &self,
        key: &dyn Fn(&str) -> String,
        agent: &AgentKeys,
    ) -> Result<(), RecipeError> {
        let is_program = agent.kind == AgentKind::Program;
        let named = agent.command.first().is_some_and(|program| !program.is_empty());
        self.check(
            named || !is_program,
            key("command"),
            format!("{:?}", agent.command),
            "the program and its arguments, for an agent of kind \"program\"",
        )?;
        self.check(
            is_program || agent.command.is_empty(),
            key("kind"),
            format!("\"{}\"", agent.kind.name()),
            "\"program\" if `command` is set",
        )?;
        let pattern = &agent.matches.system;
        let wrong = regex::Regex::new(pattern).err().map(|error| error.to_string());
        let range = format!("a regular expression; {}", wrong.as_deref().unwrap_or_default());
        self.check(wrong.is_none(), key("match.system"), format!("\"{pattern}\""), range)
    }

    /// Checks the policy weights of an agent with a mixture of policies.
    fn check_mixture(
        &self,
        key: &dyn Fn(&str) -> String,
        agent: &AgentKeys,
    ) -> Result<(), RecipeError> {
        let weights = agent.policy.weights();
        for (at, PolicyWeight { name, weight, .. }) in weights.iter().enumerate() {
            let ok = *weight > 0.0 && weight.is_finite();
            self.check(ok, key(&format!("policy.{at}.weight")), weight, "more than 0 and finite")?;
            let is_repeated = weights[..at].iter().any(|other| other.name == *name);
            let range = "listed once; add up its weights";
            self.check(
                !is_repeated,
                key(&format!("policy.{at}.name")),
                format!("\"{name}\""),
                range,
            )?;
        }
        Ok(())
    }

    /// Checks that the agent that `context.agent` names exists and can write summaries.
    fn check_context(
        &self,
        recipe: &Recipe,
        key: &dyn Fn(&str) -> String,
        agent: &AgentKeys,
    ) -> Result<(), RecipeError> {
        let ContextKeys::Summarize(keys) = &agent.context else { return Ok(()) };
        if keys.agent.is_empty() {
            return Ok(());
        }
        let agents = recipe.agents();
        // The built-in loop calls the policy with tokens.
        let can_summarize =
            |keys: &AgentKeys| agent.kind.can_be_external() || !recipe.may_be_external(keys);
        let allowed: Vec<&str> =
            agents.iter().filter(|(_, keys)| can_summarize(keys)).map(|(name, _)| *name).collect();
        let range =
            format!("left out, or an agent that can write summaries: {}", format_choices(&allowed));
        let found = allowed.contains(&keys.agent.as_str());
        self.check(found, key("context.agent"), format!("\"{}\"", keys.agent), range)
    }

    /// Checks all keys of one agent. `table` is its recipe table.
    pub(super) fn check_agent(
        &self,
        recipe: &Recipe,
        table: &str,
        agent: &AgentKeys,
    ) -> Result<(), RecipeError> {
        let key = |name: &str| format!("{table}.{name}");
        if let Some(name) = table.strip_prefix("agent.") {
            self.check_name("agent", name)?;
        }
        let policies = recipe.policies();
        let range = format_choices(policies.iter().map(|(name, _)| name));
        let policy = recipe.policy_name(agent);
        let agent_policies = recipe.policy_names(agent);
        let known = |name: &String| policies.iter().any(|(known, _)| known == name);
        let unknown = agent_policies.iter().find(|name| !known(name));
        self.check(policy.is_some() && unknown.is_none(), key("policy"), &agent.policy, range)?;
        self.check_mixture(&key, agent)?;
        let plays_user = table.strip_prefix("agent.").is_some_and(|name| recipe.plays_user(name));
        if recipe.may_be_external(agent) && !plays_user {
            self.check_external_policy(&key, table, agent)?;
        }
        let learns =
            policies.iter().any(|(name, keys)| agent_policies.contains(name) && keys.is_trained());
        let sampling = &agent.sampling;
        if let Some(t) = sampling.temperature {
            let ok = t == 0.0 || (0.01..=100.0).contains(&t);
            self.check(ok, key("sampling.temperature"), t, "0, or in 0.01..=100")?;
        }
        self.check(
            sampling.is_plain() || !agent.train || !learns,
            key("sampling"),
            "greedy or filtered",
            format!(
                "plain sampling at a temperature above 0 for an agent that is trained: greedy and \
                 filtered sampling do not follow the log-probabilities that are trained; or set \
                 {table}.train = false"
            ),
        )?;
        self.check(
            agent.prompt.contains(QUESTION),
            key("prompt"),
            format!("\"{}\"", agent.prompt),
            format!("a text that contains {QUESTION}"),
        )?;
        self.check_program(&key, agent)?;
        for name in &agent.tools {
            let ok = ToolKeys::find(&recipe.tool, name).is_some();
            let range =
                format!("a list of tools; {}", ToolKeys::describe_names(&recipe.tool, name));
            self.check(ok, key("tools"), format!("[\"{name}\"]"), range)?;
        }
        if let Some(name) = agent.tool_descriptions.keys().next() {
            self.check(
                !agent.tools.is_empty(),
                key(&format!("tool_descriptions.{name}")),
                "set",
                format!(
                    "left out for an agent without tools; set `{table}.tools`, or \
                     `{table}.tool_descriptions` to {{}}"
                ),
            )?;
        }
        self.check_context(recipe, &key, agent)?;
        self.check(
            0.0 <= agent.min_tool_delay && agent.min_tool_delay <= agent.tool_delay,
            key("min_tool_delay"),
            agent.min_tool_delay,
            format!("in 0..={table}.tool_delay"),
        )
    }
}
