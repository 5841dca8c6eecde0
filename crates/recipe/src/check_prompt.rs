//! Checks prompt phases: `[[phase]] kind = "prompt"`.

use levade_tree::DEFAULT;

use super::RecipeError;
use super::agent::{AgentKeys, AgentKind};
use super::bounds::MAX_ATTEMPTS;
use super::check::Checker;
use super::check_agents::format_choices;
use super::context::ContextKeys;
use super::keys::Recipe;
use super::policy::PolicyKeys;
use super::prompt::{PromptKeys, PromptTarget};

impl Checker<'_> {
    /// Checks the editor, the agent and the target of a prompt phase, and that the attempts of a
    /// step fit into memory.
    pub(super) fn check_prompt(
        &self,
        recipe: &Recipe,
        phase: usize,
        keys: &PromptKeys,
    ) -> Result<(), RecipeError> {
        let key = |key: &str| format!("phase.{phase}.{key}");
        let agents = recipe.agents();
        let external = |name: &&String| matches!(recipe.policy[*name], PolicyKeys::External(_));
        let mut editors: Vec<String> = recipe.policy.keys().filter(external).cloned().collect();
        editors.extend(agents.iter().flat_map(|(_, keys)| recipe.policy_names(keys)));
        editors.retain(|name| recipe.weight_source(name) == name);
        editors.sort();
        editors.dedup();
        let range = format!("an external policy, or one that an agent uses: {}", {
            format_choices(&editors)
        });
        self.check(editors.contains(&keys.editor), key("editor"), &keys.editor, range)?;

        let name = if keys.agent.is_empty() { DEFAULT } else { &keys.agent };
        let can_improve =
            |keys: &AgentKeys| keys.kind == AgentKind::Tools && !recipe.may_be_external(keys);
        let known: Vec<&str> =
            agents.iter().filter(|(_, keys)| can_improve(keys)).map(|(name, _)| *name).collect();
        let range = format!(
            "an agent of kind \"tools\" whose policy is not external, {}",
            format_choices(&known)
        );
        self.check(known.contains(&name), key("agent"), name, range)?;
        self.check(
            !recipe.is_called_by_tools(name),
            key("agent"),
            name,
            "an agent that no tool calls: the prompts of such agents cannot be improved yet",
        )?;
        if let Some(agent) = recipe.agent_named(name) {
            self.check_prompt_target(&key("target"), name, agent, &keys.target)?;
        }
        for (i, text) in keys.candidates.iter().enumerate() {
            let value = match text.trim().is_empty() {
                true => "empty".to_owned(),
                false => format!("{} characters long", text.chars().count()),
            };
            let max = keys.target.max_chars();
            let range =
                format!("a text of 1 to {max} characters, which can be the {}", keys.target);
            let is_possible = keys.target.rejection_reason(text).is_none();
            self.check(is_possible, key(&format!("candidates.{i}")), value, range)?;
        }
        let prompts = keys.num_new_prompts().saturating_add(keys.candidates.len() + 1);
        let tasks = keys.gradient_tasks.saturating_mul(2).saturating_add(keys.selection_tasks);
        let attempts = prompts.saturating_mul(tasks.saturating_add(2));
        let range = format!(
            "so small that a step has at most {MAX_ATTEMPTS} attempts: prompts × \
             (2 × gradient_tasks + selection_tasks + 2)"
        );
        self.check(attempts <= MAX_ATTEMPTS, key("selection_tasks"), keys.selection_tasks, range)
    }

    /// Checks that the agent `name` can have the text that a prompt phase improves. Which tools
    /// exist is known only after the toolboxes have started.
    fn check_prompt_target(
        &self,
        key: &str,
        name: &str,
        agent: &AgentKeys,
        target: &PromptTarget,
    ) -> Result<(), RecipeError> {
        match target {
            PromptTarget::System => Ok(()),
            PromptTarget::SummaryInstruction => self.check(
                matches!(agent.context, ContextKeys::Summarize(_)),
                key,
                "\"summary_instruction\"",
                format!(
                    "a text that the agent {name} has: its `context` is not \"summarize\"; set \
                     `agent.context = \"summarize\"`, or name another target"
                ),
            ),
            PromptTarget::Tool(tool) => self.check(
                !tool.name.is_empty() && !agent.tools.is_empty(),
                format!("{key}.name"),
                format!("{:?}", tool.name),
                match agent.tools.is_empty() {
                    true => format!(
                        "a tool of the agent {name}, which has none; set `agent.tools`, or name \
                         another target"
                    ),
                    false => format!("the name of a tool of the agent {name}"),
                },
            ),
        }
    }
}
