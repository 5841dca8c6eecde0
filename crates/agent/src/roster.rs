//! Roster of a run: its agents and the policies that play them.

use std::sync::Arc;
use std::time::Duration;

use levade_call::{Backend, OpeningLimit, Truncation};
use levade_conversation::Format;
use levade_gateway::CallPattern;
use levade_policy::{Sampler, SamplingParams, process_time, with_sampler_timeout};
use levade_tools::ToolSet;
use serde::{Deserialize, Serialize};

use crate::context::ContextPolicy;
use crate::user::SimulatedUser;

/// Function that picks a policy of an agent's mixture. The arguments are the seed of the run, the
/// random stream of an attempt, and the recorded name of the agent. Returns the index of the
/// policy.
pub type PolicyPicker = Arc<dyn Fn(u64, u64, &str) -> usize + Send + Sync>;

/// Scope of one random pick of a policy from a mixture.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixtureScope {
    /// A policy is picked for each attempt.
    #[default]
    Attempt,
    /// A policy is picked for each group, and plays all attempts of the group.
    Group,
}

/// Seats of a game that share one random pick of a policy from a mixture.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixtureSeats {
    /// A policy is picked for each seat of the agent.
    #[default]
    Each,
    /// One policy is picked for all seats of the agent.
    Together,
}

/// Function that converts the sampling parameters of a phase into the sampling parameters of an
/// agent.
pub type SamplingMap = Arc<dyn Fn(SamplingParams) -> SamplingParams + Send + Sync>;

/// Limits of an attempt. The agent that the task names determines them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptLimits {
    /// Maximum number of turns, at least 1.
    pub max_turns: u32,
    /// Maximum number of sampled tokens of the attempt over all turns, at least 1.
    pub max_tokens: usize,
    /// Timeout of one completion. Time in which the sampler's device trains does not count.
    pub completion_timeout: Duration,
    /// Timeout of the attempt. Time in which the sampler's device trains does not count.
    pub attempt_timeout: Duration,
}

/// Player of an agent: the policy that generates the agent's completions, with its format and
/// limits.
#[derive(Clone)]
pub struct Player {
    /// Name of the policy.
    pub policy: String,
    /// Backend that generates the completions: a sampler of tokens, or a chat API.
    pub backend: Backend,
    /// Chat format of the conversations. Always `Some` for [`Backend::Tokens`].
    pub format: Option<Arc<Format>>,
    /// Maximum number of tokens of prompt and completion together. `usize::MAX` for a chat API.
    pub context: usize,
    /// Whether the completions of this player are trained. The recipe then determines the sampling
    /// parameters, and the parameters that a program requests are ignored.
    pub is_trained: bool,
    /// Limit for the opening prompt of a conversation in the tool loop.
    pub opening: OpeningLimit,
    /// Maximum number of prompt tokens, and what happens to longer prompts.
    pub context_policy: ContextPolicy,
}

/// Agent of a run, with the policies that play it, its limits and its tools.
#[derive(Clone)]
pub struct Agent {
    /// Name of the agent in the recipe and in recorded segments.
    pub name: String,
    /// Policies that play the agent, at least one.
    pub players: Vec<Player>,
    /// Function that picks the player of the agent for an attempt. `None` if the agent has only one
    /// player.
    pub picker: Option<PolicyPicker>,
    /// Scope of one random pick of the player.
    pub mixture: MixtureScope,
    /// Seats that share one random pick of the player.
    pub mixture_seats: MixtureSeats,
    /// Limits of attempts of this agent. In every attempt, a completion of this agent has at most
    /// `limits.max_tokens` tokens.
    pub limits: AttemptLimits,
    /// Function that returns the sampling parameters of the agent's completions in training.
    pub samples: SamplingMap,
    /// Tools that the agent can call in the tool loop.
    pub tools: ToolSet,
    /// Simulated user who answers the agent in the tool loop. If `None`, a completion without a
    /// tool call ends the attempt.
    pub user: Option<Arc<SimulatedUser>>,
    /// Pattern that attributes a program's calls to this agent if the calls do not name an agent.
    pub pattern: CallPattern,
}

/// All agents of a run.
#[derive(Clone, Default)]
pub struct Roster(Vec<Agent>);

impl Roster {
    /// Creates a roster of `agents`.
    pub fn new(agents: Vec<Agent>) -> Self {
        Roster(agents)
    }

    /// Returns the agents in the order of the recipe.
    pub fn agents(&self) -> &[Agent] {
        &self.0
    }

    /// Returns the agent with this name, or `None` if the run has no such agent.
    pub fn find(&self, name: &str) -> Option<&Agent> {
        self.0.iter().find(|agent| agent.name == name)
    }
}

impl Agent {
    /// Creates an agent without tools that one policy plays.
    pub fn new(name: &str, player: Player, limits: AttemptLimits) -> Self {
        Agent {
            name: name.to_owned(),
            players: vec![player],
            picker: None,
            mixture: MixtureScope::default(),
            mixture_seats: MixtureSeats::default(),
            limits,
            samples: Arc::new(|params| params),
            tools: ToolSet::default(),
            user: None,
            pattern: CallPattern::default(),
        }
    }
}

impl Player {
    /// Creates the player of a trained policy. Only `context` limits the length of its prompts.
    pub fn new(
        policy: &str,
        sampler: Arc<dyn Sampler>,
        format: Arc<Format>,
        context: usize,
    ) -> Self {
        Player {
            policy: policy.to_owned(),
            backend: Backend::Tokens(sampler),
            format: Some(format),
            context,
            is_trained: true,
            opening: OpeningLimit { max_tokens: usize::MAX, truncation: Truncation::Reject },
            context_policy: ContextPolicy::UNLIMITED,
        }
    }

    /// Waits for `future`, for at most `timeout`. The clock of the player's policy measures the
    /// timeout, so time in which the policy's device trains does not count. Returns `None` if the
    /// timeout expires.
    pub(crate) async fn wait_within<T>(
        &self,
        timeout: Duration,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        match &self.backend {
            Backend::Tokens(sampler) => with_sampler_timeout(&**sampler, timeout, future).await,
            Backend::Messages(_) => process_time::with_timeout(timeout, future).await,
        }
    }
}
