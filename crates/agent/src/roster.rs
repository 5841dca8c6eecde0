//! Roster of a run: its agents, and the policies that play them.

use std::sync::Arc;
use std::time::Duration;

use levade_call::{Backend, OpeningLimit, Truncation};
use levade_conversation::Format;
use levade_gateway::When;
use levade_policy::{Sampler, SamplingParams, awake, within};
use levade_tools::ToolSet;

use crate::context::ContextPolicy;

/// Selects one of the policies of a mixture, by its index, from the seed and the stream of an attempt.
pub type Pick = Arc<dyn Fn(u64, u64) -> usize + Send + Sync>;

/// Changes the sampling parameters of a phase into those of an agent.
pub type Samples = Arc<dyn Fn(SamplingParams) -> SamplingParams + Send + Sync>;

/// Limits of an attempt: those of the agent that its task names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of turns, at least 1.
    pub turns: u32,
    /// Maximum number of sampled tokens over all turns, at least 1.
    pub tokens: usize,
    /// Timeout of one completion, without the time in which the sampler's device trains.
    pub reply: Duration,
    /// Timeout of the attempt, counted in the same way.
    pub attempt: Duration,
}

/// A policy that plays an agent.
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
    /// Whether its completions in this role are trained. The recipe then decides how they are sampled,
    /// whatever a program requests.
    pub is_trained: bool,
    /// Limit of the first prompt in the tool loop.
    pub opening: OpeningLimit,
    /// Maximum number of prompt tokens, and what happens to longer prompts.
    pub context_policy: ContextPolicy,
}

/// An agent of a run.
#[derive(Clone)]
pub struct Agent {
    /// Name in the recipe, which its segments have.
    pub name: String,
    /// The policies that play it, at least one.
    pub players: Vec<Player>,
    /// Selects the player of an attempt. `None` if there is one player.
    pub pick: Option<Pick>,
    /// Limits of attempts of this agent. Its completions have at most `limits.tokens` tokens in every
    /// attempt.
    pub limits: Limits,
    /// How its completions are sampled in training.
    pub samples: Samples,
    /// Tools in the tool loop.
    pub tools: ToolSet,
    /// Calls of a program that are attributed to this agent although they do not name it.
    pub when: When,
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

    /// Returns the agent with this name.
    pub fn find(&self, name: &str) -> Option<&Agent> {
        self.0.iter().find(|agent| agent.name == name)
    }
}

impl Agent {
    /// Creates an agent that one policy plays, without tools.
    pub fn new(name: &str, player: Player, limits: Limits) -> Self {
        Agent {
            name: name.to_owned(),
            players: vec![player],
            pick: None,
            limits,
            samples: Arc::new(|params| params),
            tools: ToolSet::default(),
            when: When::default(),
        }
    }
}

impl Player {
    /// Creates the player of a trained policy, whose prompts only `context` limits.
    pub fn new(policy: &str, sampler: Arc<dyn Sampler>, format: Arc<Format>, context: usize) -> Self {
        Player {
            policy: policy.to_owned(),
            backend: Backend::Tokens(sampler),
            format: Some(format),
            context,
            is_trained: true,
            opening: OpeningLimit { max_tokens: usize::MAX, truncation: Truncation::Refuse },
            context_policy: ContextPolicy::NONE,
        }
    }

    /// Waits for `future` on the clock of the player's policy: time in which its device trains does not
    /// count. Returns `None` after `timeout`.
    pub(crate) async fn within<T>(&self, timeout: Duration, future: impl Future<Output = T>) -> Option<T> {
        match &self.backend {
            Backend::Tokens(sampler) => within(&**sampler, timeout, future).await,
            Backend::Messages(_) => awake::within(timeout, future).await,
        }
    }
}
