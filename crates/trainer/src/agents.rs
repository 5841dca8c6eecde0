//! The agents of a run by name, and which of them does a task.

use std::collections::BTreeMap;
use std::sync::Arc;

use dressage_agent::tasks::Task;
use dressage_agent::tools::{ToolSet, Used};
use dressage_agent::{Agent, AgentLoop, Limits};
use dressage_policy::{Sampler, SamplingParams};
use dressage_text::Chat;
use dressage_tree::DEFAULT;

use crate::TrainerError;
use crate::policies::Policies;
use crate::recipe::{AgentKeys, EvalKeys, Recipe};

/// Parts that an agent of a recipe works with.
#[derive(Clone)]
pub struct AgentParts {
    /// Name in the recipe.
    pub name: String,
    /// Turns messages into tokens of its policy and back.
    pub chat: Arc<Chat>,
    /// Tools of the agent.
    pub tools: ToolSet,
    /// A loop in place of the built-in one.
    pub custom: Option<Arc<dyn AgentLoop>>,
}

/// An agent of a run.
#[derive(Clone)]
pub struct NamedAgent {
    /// The built-in loop, with its name, model and tools.
    pub built_in: Agent,
    /// Longest sequence of its policy, in tokens.
    pub context: usize,
    /// How it is told what to do, and how it is sampled.
    pub keys: AgentKeys,
    /// A loop in place of the built-in one.
    pub custom: Option<Arc<dyn AgentLoop>>,
}

impl NamedAgent {
    /// Whatever makes its attempts.
    pub(crate) fn runs(&self) -> Arc<dyn AgentLoop> {
        self.custom.clone().unwrap_or_else(|| Arc::new(self.built_in.clone()))
    }

    /// How its replies are sampled in a phase that says `params`.
    pub(crate) fn params(&self, params: SamplingParams, trains: bool) -> SamplingParams {
        if trains { self.keys.sampling.params(params) } else { params }
    }

    fn limited(&self, limits: impl Fn(Limits) -> Limits) -> Self {
        let built_in = Agent { limits: limits(self.built_in.limits), ..self.built_in.clone() };
        NamedAgent { built_in, ..self.clone() }
    }
}

/// The agents of a run; the first does what no other is asked to.
#[derive(Clone)]
pub struct Agents(Vec<NamedAgent>);

/// Names that rows in verl's layout have for its own loops, of one turn and with tools: the built-in loop
/// does both.
const OF_VERL: [&str; 3] = ["single_turn_agent", "tool_agent", "tool_agent_loop"];

impl Agents {
    /// The agents of a recipe.
    ///
    /// # Errors
    /// When one is missing among the parts, or its policy is.
    pub(crate) fn new(
        recipe: &Recipe,
        parts: &[AgentParts],
        policies: &Policies,
    ) -> Result<Self, TrainerError> {
        let find = |keys: &AgentKeys| {
            let name = recipe.policy_of(keys).unwrap_or_default();
            let policy = policies.get(&name);
            let policy = policy.ok_or_else(|| TrainerError::NoPart(format!("the policy {name}")))?;
            Ok((name, policy.sampler.clone(), policy.context))
        };
        Self::with(recipe, parts, find)
    }

    /// The agents of a recipe, which all ask one model with this context, whatever their policies.
    ///
    /// # Errors
    /// When one is missing among the parts.
    pub fn over(
        recipe: &Recipe,
        parts: &[AgentParts],
        sampler: &Arc<dyn Sampler>,
        context: usize,
    ) -> Result<Self, TrainerError> {
        Self::with(recipe, parts, |_| Ok((DEFAULT.to_owned(), sampler.clone(), context)))
    }

    /// Agents with the policies that `find` gives: name, sampler and context.
    fn with(
        recipe: &Recipe,
        parts: &[AgentParts],
        find: impl Fn(&AgentKeys) -> Result<(String, Arc<dyn Sampler>, usize), TrainerError>,
    ) -> Result<Self, TrainerError> {
        let agent = |(name, keys): (&str, &AgentKeys)| {
            let parts = parts.iter().find(|parts| parts.name == name);
            let parts = parts.ok_or_else(|| TrainerError::NoPart(format!("the agent {name}")))?;
            let (policy, sampler, context) = find(keys)?;
            let built_in = Agent {
                name: name.to_owned(),
                policy,
                sampler,
                format: keys.format(parts.chat.clone()),
                tools: parts.tools.clone(),
                limits: keys.limits(context),
            };
            Ok(NamedAgent { built_in, context, keys: keys.clone(), custom: parts.custom.clone() })
        };
        // No attempt is of an agent whose policy others serve.
        let own = recipe.agents().into_iter().filter(|(_, keys)| recipe.external_of(keys).is_none());
        own.map(agent).collect::<Result<Vec<_>, TrainerError>>().map(Agents)
    }

    /// The agent that does a task: the one that it names, or else the first.
    ///
    /// # Errors
    /// When the task names none of the run.
    pub fn of(&self, task: &Task) -> Result<&NamedAgent, TrainerError> {
        let named = task.agent.as_deref();
        let found = self.0.iter().find(|agent| Some(agent.built_in.name.as_str()) == named);
        let wanted = named.filter(|name| found.is_none() && !OF_VERL.contains(name) && *name != DEFAULT);
        match (found, wanted) {
            (_, Some(name)) => Err(TrainerError::UnknownAgent {
                task: task.id.clone(),
                name: name.to_owned(),
                known: self.0.iter().map(|agent| agent.built_in.name.clone()).collect::<Vec<_>>().join(", "),
            }),
            (Some(agent), None) => Ok(agent),
            (None, None) => Ok(self.first()),
        }
    }

    /// The agent that does what no other is asked to.
    pub fn first(&self) -> &NamedAgent {
        // There is one: a recipe has at least that of `[agent]`.
        &self.0[0]
    }

    /// How much the toolboxes of all agents were used in this process so far, by their names.
    pub(crate) fn used(&self) -> BTreeMap<String, Used> {
        let mut all: BTreeMap<String, Used> = BTreeMap::new();
        for (name, used) in self.0.iter().flat_map(|agent| agent.built_in.tools.used()) {
            let sum = all.entry(name.to_owned()).or_default();
            *sum = sum.and(used);
        }
        all
    }

    /// Puts these agents under the limits of an evaluation.
    pub(crate) fn evaluated(&self, keys: &EvalKeys) -> Self {
        Agents(self.0.iter().map(|agent| agent.limited(|limits| keys.limits(limits))).collect())
    }
}
