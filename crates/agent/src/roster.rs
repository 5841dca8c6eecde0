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

/// Function that returns the index of a policy in a mixture, from the seed, the stream of an
/// attempt, and the recorded name of the agent.
pub type PolicyPicker = Arc<dyn Fn(u64, u64, &str) -> usize + Send + Sync>;

/// Scope in which a policy of a mixture is selected once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixtureScope {
    /// Each attempt has a separate selection.
    #[default]
    Attempt,
    /// All attempts of a group together.
    Group,
}

/// Seats of a game for which a policy of a mixture is selected once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixtureSeats {
    /// Each seat of the agent independently.
    #[default]
    Each,
    /// All seats of the agent together.
    Together,
}

/// Function that converts the sampling parameters of a phase into those of an agent.
pub type SamplingMap = Arc<dyn Fn(SamplingParams) -> SamplingParams + Send + Sync>;

/// Limits of an attempt. They come from the agent that the task names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Maximum number of turns, at least 1.
    pub max_turns: u32,
    /// Maximum number of sampled tokens over all turns, at least 1.
    pub max_tokens: usize,
    /// Timeout of one completion, excluding the time in which the sampler's device trains.
    pub completion_timeout: Duration,
    /// Timeout of the attempt, which excludes the same time.
    pub attempt_timeout: Duration,
}

/// Policy that plays an agent.
#[derive(Clone)]
pub struct Player {
    /// Name of the policy.
    pub policy: String,
    /// Source of the completions.
    pub backend: Backend,
    /// Chat format of the conversations. Always present for [`Backend::Tokens`].
    pub format: Option<Arc<Format>>,
    /// Maximum number of tokens of prompt and completion together. `usize::MAX` for a chat API.
    pub context: usize,
    /// Whether the completions of this player are trained. If so, the recipe determines the
    /// sampling parameters, regardless of what a program requests.
    pub is_trained: bool,
    /// Limit of the first prompt in the tool loop.
    pub opening: OpeningLimit,
    /// Maximum number of prompt tokens, and what happens to longer prompts.
    pub context_policy: ContextPolicy,
}

/// Agent of a run.
#[derive(Clone)]
pub struct Agent {
    /// Name of the agent in the recipe and in recorded segments.
    pub name: String,
    /// Policies that play the agent, at least one.
    pub players: Vec<Player>,
    /// Selects the player of an attempt. `None` if there is only one player.
    pub picker: Option<PolicyPicker>,
    /// Scope in which the player is selected once.
    pub mixture: MixtureScope,
    /// Seats for which the player is selected once.
    pub mixture_seats: MixtureSeats,
    /// Limits of attempts of this agent. Its completions have at most `limits.tokens` tokens in
    /// every attempt.
    pub limits: Limits,
    /// Sampling parameters of its completions in training.
    pub samples: SamplingMap,
    /// Tools in the tool loop.
    pub tools: ToolSet,
    /// User who answers the agent in the tool loop. `None` if a reply without a tool call ends the
    /// attempt.
    pub user: Option<Arc<SimulatedUser>>,
    /// Rule by which calls of a program are attributed to this agent although they do not name it.
    pub pattern: CallPattern,
}

/// Agents of a run.
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

    /// Returns the agent with this name, if any.
    pub fn find(&self, name: &str) -> Option<&Agent> {
        self.0.iter().find(|agent| agent.name == name)
    }
}

impl Agent {
    /// Creates an agent without tools that one policy plays.
    pub fn new(name: &str, player: Player, limits: Limits) -> Self {
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
    /// Creates the player of a trained policy whose prompts are limited only by `context`.
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

    /// Waits for `future`, for at most `timeout` on the clock of the player's policy, which
    /// excludes the time in which the policy's device trains. Returns `None` if `timeout` expires.
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
