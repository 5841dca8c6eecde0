//! The agents of a run by name, and the choice of the agent that performs a task.

use std::collections::BTreeMap;
use std::sync::Arc;

use levade_agent::user::SimulatedUser;
use levade_agent::{
    Agent, AgentLoop, Backend, BuiltInLoop, CallPattern, ChatApi, HelperAgent, OpeningLimit,
    Player, PolicyPicker, Roster, Teacher,
};
use levade_conversation::Format;
use levade_policy::Sampler;
use levade_recipe::{
    AgentKeys, ContextKeys, EvalKeys, PastKeys, PromptTarget, Recipe, SourceKeys, ToolTarget,
};
use levade_tasks::Task;
use levade_text::Chat;
use levade_tools::{ToolSet, Usage, parameter_description, parameter_names, tool_names};
use levade_traces::Chats;
use levade_tree::DEFAULT;

use crate::TrainerError;
use crate::checkpoint::Checkpoint;
use crate::past::{PastVersionPool, PastVersionPools};
use crate::policies::{Policies, Policy};

/// Configuration of one agent that the program passes to the trainer: model backends, tools, loop
/// and simulated user.
#[derive(Clone)]
pub struct AgentSpec {
    /// Name of the agent in the recipe.
    pub name: String,
    /// Backend of each policy that plays the agent, in the order of the recipe.
    pub backends: Vec<ChatBackend>,
    /// Selects the policy that plays the agent in an attempt. `None` if there is only one policy.
    pub pick: Option<PolicyPicker>,
    /// Tools of the agent.
    pub tools: ToolSet,
    /// Pattern of the model calls that are attributed to this agent even if they do not name an
    /// agent. An external program makes such calls.
    pub when: CallPattern,
    /// Simulated user who responds to the agent's messages. `None` if an assistant message without
    /// a tool call ends the attempt.
    pub user: Option<Arc<SimulatedUser>>,
    /// Agent loop that replaces the built-in loop. `None` for the built-in loop.
    pub custom: Option<Arc<dyn AgentLoop>>,
}

/// The interface through which an agent's policy generates completions.
#[derive(Clone)]
pub enum ChatBackend {
    /// A policy that samples tokens. Its [`Chat`] renders messages as tokens, and parses sampled
    /// tokens into messages.
    Policy(Arc<Chat>),
    /// A chat API that takes and returns messages.
    Api(Arc<dyn ChatApi>),
}

impl AgentSpec {
    /// Creates the specification of an agent that uses the built-in loop and one policy.
    pub fn new(name: &str, chat: Arc<Chat>, tools: ToolSet) -> Self {
        AgentSpec {
            name: name.to_owned(),
            backends: vec![ChatBackend::Policy(chat)],
            pick: None,
            tools,
            when: CallPattern::default(),
            user: None,
            custom: None,
        }
    }
}

/// An agent that can perform the tasks of a run, with its recipe keys and the loop that runs it.
#[derive(Clone)]
pub struct NamedAgent {
    /// The agent, with its players and tools.
    pub agent: Agent,
    /// Chat format (template and tool-call syntax) of the agent's first player.
    pub format: Arc<Format>,
    /// Sampler of the agent's first player.
    pub sampler: Arc<dyn Sampler>,
    /// The agent's keys in the recipe: its instructions, sampling parameters and limits.
    pub keys: AgentKeys,
    /// The loop that runs the agent's attempts.
    pub(crate) agent_loop: Arc<dyn AgentLoop>,
}

impl NamedAgent {
    /// Returns the agent's first player: the first policy that plays the agent.
    pub fn player(&self) -> &Player {
        // Every agent has at least one player.
        &self.agent.players[0]
    }

    /// Returns a copy of this agent with the system prompt, tool descriptions and summary
    /// instruction that `keys` contains.
    pub(crate) fn with_prompts_from(&self, keys: &AgentKeys) -> Self {
        let agent = with_tool_texts(&self.agent, keys);
        NamedAgent { agent, keys: keys.clone(), ..self.clone() }
    }

    /// Returns the prompt text that `target` selects: the agent's system prompt, its summary
    /// instruction, or the description of one of its tools or tool parameters.
    ///
    /// # Errors
    /// Returns an error if the agent does not have the tool or the parameter that `target` names.
    /// The error lists the existing names, and mentions `key`, the recipe key that contains
    /// `target`.
    pub(crate) fn prompt_text(
        &self,
        target: &PromptTarget,
        key: &str,
    ) -> Result<String, TrainerError> {
        let ToolTarget { name, parameter } = match (target, &self.keys.context) {
            (PromptTarget::System, _) => return Ok(self.keys.system.clone()),
            (PromptTarget::SummaryInstruction, ContextKeys::Summarize(keys)) => {
                return Ok(keys.instruction.clone());
            }
            // The recipe was checked: such an agent has summaries.
            (PromptTarget::SummaryInstruction, _) => return Ok(String::new()),
            (PromptTarget::Tool(tool), _) => tool,
        };
        let unknown = |what: &str, known: String| TrainerError::Tool {
            name: name.clone(),
            why: format!(
                "`{key}` names {what}, which the agent {} does not have; it has {known}",
                self.agent.name
            ),
        };
        let specs = self.agent.tools.specs(&Task::default());
        let Some(spec) = specs.iter().find(|spec| spec.name == *name) else {
            return Err(unknown("this tool", tool_names(&specs)));
        };
        if parameter.is_empty() {
            return Ok(spec.description.clone());
        }
        parameter_description(spec, parameter)
            .map(str::to_owned)
            .ok_or_else(|| unknown(&format!("its parameter {parameter:?}"), parameter_names(spec)))
    }

    /// Checks that the agent's rendered prompts contain the text that `target` selects.
    ///
    /// # Errors
    /// Returns an error if the text describes a tool or a tool parameter that the rendered prompts
    /// leave out. The error mentions `key`, the recipe key that contains `target`.
    pub(crate) fn check_text_is_rendered(
        &self,
        target: &PromptTarget,
        key: &str,
    ) -> Result<(), TrainerError> {
        let PromptTarget::Tool(ToolTarget { name, .. }) = target else { return Ok(()) };
        let mut keys = self.keys.clone();
        target.set(&mut keys, "Another description.");
        let task = Task { question: "Hi".into(), ..Task::default() };
        let prompt = |named: &NamedAgent| {
            let specs = named.agent.tools.specs(&task);
            named.format.chat().prompt(&named.keys.initial_messages(&task), &specs)
        };
        if prompt(self)? != prompt(&self.with_prompts_from(&keys))? {
            return Ok(());
        }
        let why = format!(
            "`{key}` names the {target}, which prompts of the agent {} leave out; set \
             `agent.tool_prompt = \"full\"` if it is \"compact\", or name another target",
            self.agent.name
        );
        Err(TrainerError::Tool { name: name.clone(), why })
    }

    /// Converts this agent into a helper, which toolboxes of other agents can call.
    fn to_helper_agent(&self, roster: &Arc<Roster>) -> HelperAgent {
        let keys = self.keys.clone();
        HelperAgent {
            agent: self.agent.name.clone(),
            roster: Arc::downgrade(roster),
            build_prompt: Arc::new(move |task| keys.initial_messages(task)),
        }
    }
}

/// Returns a copy of `agent` with the tool descriptions and the summary instruction that `keys`
/// contains. An [`Agent`] does not store its system prompt, which is only in `keys`.
fn with_tool_texts(agent: &Agent, keys: &AgentKeys) -> Agent {
    let with_instruction = |player: &Player| Player {
        context_policy: keys.context_policy(player.context),
        ..player.clone()
    };
    Agent {
        players: agent.players.iter().map(with_instruction).collect(),
        tools: agent.tools.clone().with_descriptions(&keys.tool_descriptions),
        ..agent.clone()
    }
}

/// Registers each agent that a toolbox calls as a helper with that toolbox.
fn register_helpers(agents: &[NamedAgent], roster: &Arc<Roster>) {
    for slot in agents.iter().flat_map(|named| named.agent.tools.helpers()) {
        if let Some(named) = agents.iter().find(|named| named.agent.name == slot.agent()) {
            slot.set(Arc::new(named.to_helper_agent(roster)));
        }
    }
}

/// Maximum number of sampled tokens per attempt, by the agent that the task names.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenLimits {
    /// Limit in tokens for tasks that do not name an agent of the run.
    pub default: usize,
    /// Limit in tokens of each agent, by agent name.
    pub by_agent: BTreeMap<String, usize>,
}

impl TokenLimits {
    /// Returns the maximum number of sampled tokens per attempt at the recorded `task`.
    pub fn max_attempt_tokens(&self, task: &serde_json::Value) -> usize {
        let limit = task["agent"].as_str().and_then(|name| self.by_agent.get(name));
        limit.copied().unwrap_or(self.default)
    }
}

/// The agents of a run. The first agent performs tasks that name no agent.
#[derive(Clone)]
pub struct Agents {
    /// Agents that perform tasks. Agents that an external policy may play are excluded.
    named: Vec<NamedAgent>,
    /// All agents of the run, including those that external policies play, with their limits, tools
    /// and players.
    pub(crate) roster: Arc<Roster>,
    /// Keeps the agents alive that toolboxes call as helpers, because toolboxes have only weak
    /// references to them. No phase improves the prompts of helper agents.
    _helpers: Arc<Roster>,
    /// Teacher that generates completions in place of the trained policies. `None` if the trained
    /// policies generate them.
    pub(crate) teacher: Option<Teacher>,
}

/// The sampler of a policy, with the policy's name in the store and its context size in tokens.
struct PolicySampler {
    policy: String,
    /// Samplers of the policy: one sampler, or one for each slot of a pool of past versions.
    samplers: Vec<Arc<dyn Sampler>>,
    context: usize,
    pool: Option<Arc<PastVersionPool>>,
}

/// Range of one policy's players within the list of an agent's players.
struct PolicyPlayers {
    /// Index of the policy's first player.
    first: usize,
    /// Pool that selects one of the policy's players. `None` if the policy has only one player.
    pool: Option<Arc<PastVersionPool>>,
}

/// Returns the function that picks an agent's player for an attempt. The function picks a policy
/// and, if the policy is a pool of past versions, one of these versions.
fn make_player_picker(
    pick: Option<PolicyPicker>,
    policies: Vec<PolicyPlayers>,
) -> Option<PolicyPicker> {
    if policies.iter().all(|policy| policy.pool.is_none()) {
        return pick;
    }
    Some(Arc::new(move |seed, stream, role| {
        let policy = pick.as_ref().map_or(0, |pick| pick(seed, stream, role));
        // An index without a policy is reported by the caller.
        policies.get(policy).map_or(usize::MAX, |PolicyPlayers { first, pool }| {
            first + pool.as_ref().map_or(0, |pool| pool.pick_slot(seed, stream))
        })
    }))
}

/// Names of verl's built-in agent loops (single-turn, and multi-turn with tools), which data rows
/// in verl's layout contain. The built-in loop of this crate replaces them.
const VERL_LOOPS: [&str; 3] = ["single_turn_agent", "tool_agent", "tool_agent_loop"];

impl Agents {
    /// Creates the agents of `recipe` from their specifications `parts`.
    ///
    /// # Errors
    /// Returns an error if the specification of an agent or one of its policies is missing.
    pub(crate) fn new(
        recipe: &Recipe,
        parts: &[AgentSpec],
        policies: &Policies,
        past: &PastVersionPools,
    ) -> Result<Self, TrainerError> {
        let trained = recipe.trained_policies();
        let is_trained = |keys: &AgentKeys, policy: &String| keys.train && trained.contains(policy);
        let find = |name: &str| {
            let policy = policies.get(name);
            let policy =
                policy.ok_or_else(|| TrainerError::MissingPart(format!("the policy {name}")))?;
            let pool = past.get(name).cloned();
            let samplers = pool.as_ref().map_or(1, |pool| pool.num_slots());
            Ok(PolicySampler {
                policy: name.to_owned(),
                samplers: policies.samplers(name).take(samplers).collect(),
                context: policy.context,
                pool,
            })
        };
        Self::from_policies(recipe, parts, is_trained, find)
    }

    /// Creates the agents of an evaluation outside of a training run. Each agent is played by the
    /// same policies as in training. `checkpoint` is a checkpoint of the run in `run.folder`, and
    /// determines which past versions play. It can be `None` if the recipe has no past versions.
    ///
    /// # Errors
    /// Returns an error if the specification of an agent or one of its policies is missing, or if
    /// past versions cannot be loaded.
    pub async fn for_evaluation(
        recipe: &Recipe,
        parts: &[AgentSpec],
        policies: Vec<Policy>,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<Self, TrainerError> {
        let policies = Policies::new(policies, &recipe.engine);
        let past = PastVersionPools::new(recipe, &policies)?;
        let version = |keys: &PastKeys| {
            (keys.of.clone(), checkpoint.map_or(0, |checkpoint| checkpoint.version(&keys.of)))
        };
        let versions = recipe.past_policies().map(|(_, keys)| version(keys)).collect();
        past.restore(&policies, Some(&versions)).await?;
        Self::new(recipe, parts, &policies, &past)
    }

    /// Creates the agents of `recipe` so that all of them sample from `sampler`, whatever policies
    /// the recipe names. `context` is the context size of that model in tokens.
    pub fn with_sampler(
        recipe: &Recipe,
        parts: &[AgentSpec],
        sampler: &Arc<dyn Sampler>,
        context: usize,
    ) -> Result<Self, TrainerError> {
        let find = |name: &str| {
            let samplers = vec![sampler.clone()];
            Ok(PolicySampler { policy: name.to_owned(), samplers, context, pool: None })
        };
        Self::from_policies(recipe, parts, |_, _| true, find)
    }

    /// Creates the agents of `recipe`. `find` returns the sampler of a policy by name, and
    /// `is_trained` whether a policy is trained when it plays an agent.
    fn from_policies(
        recipe: &Recipe,
        parts: &[AgentSpec],
        is_trained: impl Fn(&AgentKeys, &String) -> bool,
        find: impl Fn(&str) -> Result<PolicySampler, TrainerError>,
    ) -> Result<Self, TrainerError> {
        let make_players = |keys: &AgentKeys, name: &String, chat_backend: &ChatBackend| {
            let (policy, backends, format, context, pool) = match chat_backend {
                ChatBackend::Policy(chat) => {
                    let PolicySampler { policy, samplers, context, pool } = find(name)?;
                    let backends: Vec<_> = samplers.into_iter().map(Backend::Tokens).collect();
                    (policy, backends, Some(keys.format(Arc::clone(chat))), context, pool)
                }
                ChatBackend::Api(api) => {
                    let backends = vec![Backend::Messages(Arc::clone(api))];
                    (name.clone(), backends, None, usize::MAX, None)
                }
            };
            let make_player = |backend| Player {
                is_trained: is_trained(keys, name),
                opening: OpeningLimit {
                    max_tokens: keys.max_opening_tokens(context),
                    truncation: keys.truncation,
                },
                context_policy: keys.context_policy(context),
                policy: policy.clone(),
                backend,
                format: format.clone(),
                context,
            };
            let players: Vec<Player> = backends.into_iter().map(make_player).collect();
            Ok::<_, TrainerError>((players, pool))
        };
        let mut all = Vec::new();
        let mut named = Vec::new();
        for (name, keys) in recipe.agents() {
            let performs_tasks = !recipe.may_be_external(keys);
            let Some(parts) = parts.iter().find(|parts| parts.name == name) else {
                if performs_tasks {
                    return Err(TrainerError::MissingPart(format!("the agent {name}")));
                } else {
                    continue;
                }
            };
            let mut policies = recipe.policy_names(keys);
            if policies.is_empty() {
                policies.push(DEFAULT.to_owned());
            }
            let sampling = keys.sampling.clone();
            let plays_user = recipe.plays_user(name);
            let mut players = Vec::new();
            let mut of_policies = Vec::new();
            for (policy, chat_backend) in policies.iter().zip(&parts.backends) {
                let (made, pool) = make_players(keys, policy, chat_backend)?;
                of_policies.push(PolicyPlayers { first: players.len(), pool });
                players.extend(made.into_iter().map(|player| Player {
                    is_trained: player.is_trained && !plays_user,
                    ..player
                }));
            }
            let agent = Agent {
                name: name.to_owned(),
                players,
                picker: make_player_picker(parts.pick.clone(), of_policies),
                mixture: keys.mixture,
                mixture_seats: keys.mixture_seats,
                limits: keys.limits(),
                samples: Arc::new(move |params| sampling.params(params)),
                tools: parts.tools.clone(),
                user: parts.user.clone(),
                pattern: parts.when.clone(),
            };
            all.push(agent.clone());
            // An agent that an external policy may play performs no tasks.
            if !performs_tasks {
                continue;
            }
            let (sampler, format) = match agent.players.first() {
                Some(Player {
                    backend: Backend::Tokens(sampler), format: Some(format), ..
                }) => (Arc::clone(sampler), Arc::clone(format)),
                _ => {
                    return Err(TrainerError::MissingPart(format!(
                        "a policy of the agent {name} that samples tokens"
                    )));
                }
            };
            named.push(NamedAgent {
                agent,
                format,
                sampler,
                keys: keys.clone(),
                agent_loop: parts.custom.clone().unwrap_or_else(|| Arc::new(BuiltInLoop)),
            });
        }
        let roster = Arc::new(Roster::new(all));
        register_helpers(&named, &roster);
        Ok(Agents { named, _helpers: Arc::clone(&roster), roster, teacher: None })
    }

    /// Returns the agent that performs a task: the named agent, or the first agent if the task
    /// names none.
    ///
    /// # Errors
    /// Returns [`TrainerError::UnknownAgent`] if the task names an agent that the run does not
    /// have.
    pub fn agent_for(&self, task: &Task) -> Result<&NamedAgent, TrainerError> {
        let named = task.agent.as_deref();
        let found = self.named.iter().find(|agent| Some(agent.agent.name.as_str()) == named);
        let wanted =
            named.filter(|name| found.is_none() && !VERL_LOOPS.contains(name) && *name != DEFAULT);
        match (found, wanted) {
            (_, Some(name)) => Err(TrainerError::UnknownAgent {
                task: task.id.clone(),
                name: name.to_owned(),
                known: self
                    .named
                    .iter()
                    .map(|agent| agent.agent.name.clone())
                    .collect::<Vec<_>>()
                    .join(", "),
            }),
            (Some(agent), None) => Ok(agent),
            (None, None) => Ok(self.first()),
        }
    }

    /// Returns the token limits of all agents.
    pub(crate) fn token_limits(&self) -> TokenLimits {
        let named =
            self.named.iter().map(|agent| (agent.agent.name.clone(), agent.keys.max_tokens));
        TokenLimits { default: self.first().keys.max_tokens, by_agent: named.collect() }
    }

    /// Returns the first agent, which performs the tasks that name no agent.
    pub fn first(&self) -> &NamedAgent {
        // There is at least one agent: every recipe has the agent of `[agent]`.
        &self.named[0]
    }

    /// Returns the cumulative use of the agents' toolboxes since the start of this process, by
    /// toolbox name.
    pub(crate) fn toolbox_usage(&self) -> BTreeMap<String, Usage> {
        let mut all: BTreeMap<String, Usage> = BTreeMap::new();
        for (name, used) in self.named.iter().flat_map(|agent| agent.agent.tools.usage()) {
            let sum = all.entry(name.to_owned()).or_default();
            *sum = sum.plus(used);
        }
        all
    }

    /// Returns the chat formats of the agents, one for each policy that plays an agent.
    pub(crate) fn chats(&self) -> Chats {
        let mut chats = Chats::default();
        for agent in self.roster.agents() {
            for player in &agent.players {
                if let Some(format) = &player.format {
                    chats.insert(&agent.name, &player.policy, Arc::clone(format.chat()));
                }
            }
        }
        chats
    }

    /// Returns a copy of these agents in which `teacher` generates the completions in place of the
    /// trained policies.
    ///
    /// # Errors
    /// Returns an error if the loop of an agent does not support a teacher.
    pub(crate) fn with_teacher(
        &self,
        source: &SourceKeys,
        teacher: &Teacher,
    ) -> Result<Self, TrainerError> {
        match self.named.iter().find(|named| !named.agent_loop.can_be_taught(&named.agent)) {
            Some(named) => Err(TrainerError::UnsupportedLoop {
                agent: named.agent.name.clone(),
                teacher: source.to_string(),
            }),
            None => Ok(Agents { teacher: Some(teacher.clone()), ..self.clone() }),
        }
    }

    /// Returns the agent called `name`, among the agents that perform tasks.
    ///
    /// # Errors
    /// Returns an error if there is no such agent.
    pub(crate) fn find_agent(&self, name: &str) -> Result<&NamedAgent, TrainerError> {
        let found = self.named.iter().find(|named| named.agent.name == name);
        found.ok_or_else(|| TrainerError::MissingPart(format!("the agent {name}")))
    }

    /// Returns a copy of these agents in which the text of `agent` that `target` selects is
    /// replaced by `text`.
    pub(crate) fn with_prompt_text(&self, agent: &str, target: &PromptTarget, text: &str) -> Self {
        let Ok(named) = self.find_agent(agent) else { return self.clone() };
        let mut keys = named.keys.clone();
        target.set(&mut keys, text);
        let named = self.named.iter().map(|named| match named.agent.name == agent {
            true => named.with_prompts_from(&keys),
            false => named.clone(),
        });
        let roster = self.roster.agents().iter().map(|known| match known.name == agent {
            true => with_tool_texts(known, &keys),
            false => known.clone(),
        });
        let roster = Arc::new(Roster::new(roster.collect()));
        Agents { named: named.collect(), roster, ..self.clone() }
    }

    /// Returns a copy of these agents with the token limits that apply to evaluations.
    pub(crate) fn with_evaluation_limits(&self, keys: &EvalKeys) -> Self {
        let limited = |named: &NamedAgent| {
            let agent = Agent { limits: keys.limits(named.agent.limits), ..named.agent.clone() };
            NamedAgent { agent, ..named.clone() }
        };
        Agents { named: self.named.iter().map(limited).collect(), ..self.clone() }
    }
}

#[cfg(test)]
#[path = "agents_tests.rs"]
mod tests;
