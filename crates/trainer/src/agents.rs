//! The agents of a run by name, and which of them does a task.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use levade_agent::{
    Agent, AgentLoop, Attempt, AttemptContext, HelperAgent, Limits, Pick, Summariser, Teacher,
};
use levade_policy::{Sampler, SamplingParams};
use levade_recipe::{AgentKeys, EvalKeys, Recipe, SourceKeys};
use levade_tasks::Task;
use levade_text::Chat;
use levade_tools::{ToolSet, Used};
use levade_tree::DEFAULT;

use crate::TrainerError;
use crate::policies::Policies;

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
    /// Where several policies play it: which.
    pub mixture: Option<MixtureParts>,
}

/// Which of several policies plays an agent.
#[derive(Clone)]
pub struct MixtureParts {
    /// For each policy after the first, in the order of the recipe: turns messages into its tokens and back.
    pub chats: Vec<Arc<Chat>>,
    /// The place of the policy that plays it, by seed and stream of the attempt.
    pub pick: Pick,
}

/// Several loops, of which one makes an attempt.
struct Mixed {
    /// The agent that they play.
    agent: String,
    /// Each loop with the policy that plays the agent in it.
    loops: Vec<(String, Arc<dyn AgentLoop>)>,
    /// Whether each of these policies learns.
    trained: Vec<bool>,
    pick: Pick,
}

#[async_trait]
impl AgentLoop for Mixed {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let place = context.pick(&self.pick, &self.trained);
        match self.loops.get(place) {
            Some((policy, picked)) => {
                let mut made = picked.run(context).await;
                made.outcome.cast.insert(self.agent.clone(), policy.clone());
                made
            }
            None => Attempt::broken("policies", format!("there is no policy {place} in the mixture")),
        }
    }

    fn taught(&self, teacher: &Teacher) -> Option<Arc<dyn AgentLoop>> {
        let taught =
            |(policy, one): &(String, Arc<dyn AgentLoop>)| Some((policy.clone(), one.taught(teacher)?));
        let loops = self.loops.iter().map(taught).collect::<Option<_>>()?;
        let (agent, trained, pick) = (self.agent.clone(), self.trained.clone(), Arc::clone(&self.pick));
        Some(Arc::new(Mixed { agent, loops, trained, pick }))
    }
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
    /// Further policies that play this agent, and which of all plays it.
    mixture: Option<(Vec<Agent>, Pick)>,
    /// Whether each of the policies that play it learns.
    trained: Vec<bool>,
}

impl NamedAgent {
    /// Whatever makes its attempts.
    pub(crate) fn runs(&self) -> Arc<dyn AgentLoop> {
        if let Some(custom) = &self.custom {
            return Arc::clone(custom);
        }
        let Some((others, pick)) = &self.mixture else { return Arc::new(self.built_in.clone()) };
        let all = std::iter::once(&self.built_in).chain(others);
        let played = |agent: &Agent| (agent.policy.clone(), Arc::new(agent.clone()) as Arc<dyn AgentLoop>);
        let loops = all.map(played).collect();
        let (agent, trained) = (self.built_in.name.clone(), self.trained.clone());
        Arc::new(Mixed { agent, loops, trained, pick: Arc::clone(pick) })
    }

    /// How its replies are sampled in a phase that says `params`.
    pub(crate) fn params(&self, params: SamplingParams, trains: bool) -> SamplingParams {
        if trains { self.keys.sampling.params(params) } else { params }
    }

    /// The agent as toolboxes of others ask it.
    fn helper(&self) -> HelperAgent {
        let (mut agents, mut pick) = (vec![self.built_in.clone()], None);
        if let Some((others, of)) = &self.mixture {
            agents.extend(others.iter().cloned());
            pick = Some(Arc::clone(of));
        }
        let (keys, sampling) = (self.keys.clone(), self.keys.sampling.clone());
        HelperAgent {
            agents,
            pick,
            opens: Arc::new(move |task| keys.opening(task)),
            samples: Arc::new(move |params| sampling.params(params)),
        }
    }

    fn limited(&self, limits: impl Fn(Limits) -> Limits) -> Self {
        let limited = |agent: &Agent| Agent { limits: limits(agent.limits), ..agent.clone() };
        let mixture = self.mixture.as_ref();
        let mixture = mixture.map(|(others, pick)| (others.iter().map(limited).collect(), Arc::clone(pick)));
        NamedAgent { built_in: limited(&self.built_in), mixture, ..self.clone() }
    }
}

/// Lets agents ask those that they name for their summaries.
fn with_summarisers(mut agents: Vec<NamedAgent>) -> Vec<NamedAgent> {
    let summariser = |agent: &NamedAgent| {
        let Agent { name, policy, sampler, format, .. } = agent.built_in.clone();
        Summariser { agent: name, policy, sampler, format }
    };
    let all: Vec<Summariser> = agents.iter().map(summariser).collect();
    for agent in &mut agents {
        let others = agent.mixture.iter_mut().flat_map(|(others, _)| others);
        for one in std::iter::once(&mut agent.built_in).chain(others) {
            let named = &one.context.summary.agent;
            one.summariser = all.iter().find(|other| other.agent == *named).cloned();
        }
    }
    agents
}

/// Puts agents in the places at which toolboxes ask them.
fn put_helpers(agents: &[NamedAgent]) {
    for slot in agents.iter().flat_map(|agent| agent.built_in.tools.helpers()) {
        if let Some(named) = agents.iter().find(|agent| agent.built_in.name == slot.agent()) {
            slot.set(Arc::new(named.helper()));
        }
    }
}

/// Maximum number of sampled tokens of an attempt, by the agent that its task names.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenLimits {
    /// The limit of tasks that name no agent of the run.
    pub first: usize,
    /// Limits of the agents, by name.
    pub named: BTreeMap<String, usize>,
}

impl TokenLimits {
    /// Returns the limit of attempts at a recorded task.
    pub fn of(&self, task: &serde_json::Value) -> usize {
        let named = task["agent"].as_str().and_then(|name| self.named.get(name));
        named.copied().unwrap_or(self.first)
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
        let find = |name: &str| {
            let policy = policies.get(name);
            let policy = policy.ok_or_else(|| TrainerError::NoPart(format!("the policy {name}")))?;
            Ok((name.to_owned(), policy.sampler.clone(), policy.context))
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
        find: impl Fn(&str) -> Result<(String, Arc<dyn Sampler>, usize), TrainerError>,
    ) -> Result<Self, TrainerError> {
        let agent = |(name, keys): (&str, &AgentKeys)| {
            let parts = parts.iter().find(|parts| parts.name == name);
            let parts = parts.ok_or_else(|| TrainerError::NoPart(format!("the agent {name}")))?;
            let played = |policy: &str, chat: &Arc<Chat>| {
                let (policy, sampler, context) = find(policy)?;
                let agent = Agent {
                    name: name.to_owned(),
                    policy,
                    sampler,
                    // A loop of its own has a format of its own.
                    format: match parts.custom {
                        Some(_) => keys.unprobed_format(Arc::clone(chat)),
                        None => keys.format(Arc::clone(chat)),
                    },
                    tools: parts.tools.clone(),
                    limits: keys.limits(context),
                    context: keys.context_policy(context),
                    summariser: None,
                    teacher: None,
                };
                Ok::<_, TrainerError>((agent, context))
            };
            let policies = recipe.policies_of(keys);
            let first = policies.first().map_or(DEFAULT, String::as_str);
            let (built_in, context) = played(first, &parts.chat)?;
            let mixture = match &parts.mixture {
                // A program mixes for itself.
                Some(MixtureParts { chats, pick }) if parts.custom.is_none() => {
                    let others = policies.iter().skip(1).zip(chats);
                    let others = others.map(|(policy, chat)| played(policy, chat).map(|(agent, _)| agent));
                    Some((others.collect::<Result<_, _>>()?, Arc::clone(pick)))
                }
                _ => None,
            };
            let (keys, custom) = (keys.clone(), parts.custom.clone());
            let learning = recipe.trained();
            let trained = policies.iter().map(|policy| learning.contains(policy)).collect();
            Ok(NamedAgent { built_in, context, keys, custom, mixture, trained })
        };
        // No attempt is of an agent whose policy others serve.
        let own = recipe.agents().into_iter().filter(|(_, keys)| !recipe.may_be_external(keys));
        let agents = own.map(agent).collect::<Result<Vec<_>, TrainerError>>()?;
        let agents = with_summarisers(agents);
        put_helpers(&agents);
        Ok(Agents(agents))
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

    /// Returns the limits of tokens of all agents.
    pub(crate) fn token_limits(&self) -> TokenLimits {
        let named = self.0.iter().map(|agent| (agent.built_in.name.clone(), agent.keys.max_tokens));
        TokenLimits { first: self.first().keys.max_tokens, named: named.collect() }
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

    /// These agents with a teacher in the place of their policies.
    ///
    /// # Errors
    /// When one has a loop that a teacher cannot act in.
    pub(crate) fn taught(&self, source: &SourceKeys, teacher: &Teacher) -> Result<Self, TrainerError> {
        let taught = |agent: &NamedAgent| {
            let custom = agent.runs().taught(teacher).ok_or_else(|| TrainerError::NotTaught {
                agent: agent.built_in.name.clone(),
                teacher: source.to_string(),
            })?;
            Ok(NamedAgent { custom: Some(custom), ..agent.clone() })
        };
        self.0.iter().map(taught).collect::<Result<_, _>>().map(Agents)
    }

    /// Puts these agents under the limits of an evaluation.
    pub(crate) fn evaluated(&self, keys: &EvalKeys) -> Self {
        Agents(self.0.iter().map(|agent| agent.limited(|limits| keys.limits(limits))).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use levade_policy::Simulator;

    use super::*;

    #[test]
    fn agents_have_the_parts_of_their_names() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("recipe.toml");
        let recipe = "run = { name = 'x' }\nmodel = { source = './model' }\ntasks = [{ kind = 'arithmetic' }]\n\
                      [agent]\nmax_turns = 1\n[agent.writer]\nmax_turns = 2\n";
        std::fs::write(&file, recipe).unwrap();
        let recipe = Recipe::load(&file, &[]).unwrap();
        let parts = ["default", "writer"].map(|name| AgentParts {
            name: name.into(),
            chat: Arc::new(levade_text::testing::tiny_chat().unwrap()),
            tools: ToolSet::new(Vec::new(), Duration::ZERO).unwrap(),
            custom: None,
            mixture: None,
        });
        let sampler: Arc<dyn Sampler> = Arc::new(Simulator::new(Default::default()));
        let agents = Agents::over(&recipe, &parts, &sampler, 2000).unwrap();
        for (agent, parts) in agents.0.iter().zip(&parts) {
            assert_eq!(agent.built_in.name, parts.name);
            assert!(Arc::ptr_eq(agent.built_in.format.chat(), &parts.chat), "{}", parts.name);
        }
        let missing = Agents::over(&recipe, &parts[..1], &sampler, 2000).map(|_| ()).unwrap_err();
        assert!(missing.to_string().contains("the agent writer"), "{missing}");
    }
}
