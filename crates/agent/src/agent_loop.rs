//! Interface of agent loops, which make attempts at tasks.

use std::sync::Arc;

use async_trait::async_trait;
use levade_policy::SamplingParams;
use levade_tasks::Task;
use levade_text::Message;
use levade_tree::{Outcome, Trajectory};

use crate::roster::{Agent, AttemptLimits, Roster};
use crate::teacher::Teacher;

/// Input of one attempt: the task, the opening messages, the agents and the limits.
#[derive(Clone)]
pub struct AttemptContext {
    /// Name of the attempt for tools and logs, unique to this try.
    pub name: String,
    /// Task at which the attempt is made.
    pub task: Task,
    /// Messages that open the conversation: instructions and task, in the layout of the recipe.
    pub messages: Vec<Message>,
    /// Seed of the run.
    pub seed: u64,
    /// Random stream of the attempt, unique in the run.
    pub stream: u64,
    /// Random stream of the attempt's group. All attempts at one task in one step share this
    /// stream.
    pub group_stream: u64,
    /// Whether the attempt belongs to an evaluation. In an evaluation, a trained policy plays the
    /// attempt's own agent if the agent's mixture has a trained policy.
    pub is_evaluation: bool,
    /// Sampling parameters of the training phase or the evaluation, for trained policies. The
    /// maximum number of tokens comes from the agent's limits.
    pub params: SamplingParams,
    /// Whether agents modify `params` by their own sampling rules, as in training.
    pub has_own_sampling: bool,
    /// Name of the attempt's own agent: the agent that the task names.
    pub agent: String,
    /// Agents of the run.
    pub roster: Arc<Roster>,
    /// Limits of the attempt: turns, tokens and timeouts.
    pub limits: AttemptLimits,
    /// Teacher that generates completions instead of the trained policies. The completions become
    /// demonstrations. `None` if the policies act.
    pub teacher: Option<Teacher>,
}

/// Result of an attempt: its tokens and its outcome.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// All tokens of prompts and completions, sampled or demonstrated.
    pub trajectory: Trajectory,
    /// End of the attempt, its errors and its measurements.
    pub outcome: Outcome,
    /// Whether the process that made the attempt was lost. A lost attempt counts neither as made
    /// nor as failed, and is repeated with the same random stream.
    pub is_lost: bool,
}

impl Attempt {
    /// Creates an attempt that ended with `outcome`.
    pub fn new(trajectory: Trajectory, outcome: Outcome) -> Self {
        Attempt { trajectory, outcome, is_lost: false }
    }

    /// Creates an attempt whose process was lost after `trajectory`.
    pub fn lost(trajectory: Trajectory, why: impl Into<String>) -> Self {
        Attempt { trajectory, is_lost: true, ..Attempt::failed("runners", why) }
    }

    /// Creates an attempt without tokens that failed with the message `why` of the component
    /// `source`.
    pub fn failed(source: &str, why: impl Into<String>) -> Self {
        let why = why.into();
        let mut outcome = Outcome { error: Some(why.clone()), ..Outcome::initial() };
        outcome.add_warning(source, why);
        Attempt::new(Trajectory::new(), outcome)
    }
}

/// Agent loop: makes attempts at tasks.
///
/// Every token that a model saw or sampled is in the trajectory of the attempt, exactly as it was.
/// Each segment names the agent that acted and the policy that answered.
#[async_trait]
pub trait AgentLoop: Send + Sync {
    /// Makes one attempt. A failure becomes the error of the attempt's outcome, which also keeps
    /// everything that was recorded before. The failure never affects other attempts.
    async fn run(&self, context: AttemptContext) -> Attempt;

    /// Returns whether a teacher can generate the completions of trained policies in attempts of
    /// `agent`.
    fn can_be_taught(&self, agent: &Agent) -> bool {
        let _ = agent;
        false
    }
}
