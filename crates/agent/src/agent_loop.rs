//! Interface of agent loops, which make attempts at tasks.

use std::sync::Arc;

use async_trait::async_trait;
use levade_policy::SamplingParams;
use levade_tasks::Task;
use levade_text::Message;
use levade_tree::{Outcome, Trajectory};

use crate::roster::{Agent, Limits, Roster};
use crate::teacher::Teacher;

/// Input of one attempt.
#[derive(Clone)]
pub struct AttemptContext {
    /// Name for tools and logs, unique to this try.
    pub name: String,
    /// Task of the attempt.
    pub task: Task,
    /// Messages that open the conversation: instructions and task, in the layout of the recipe.
    pub messages: Vec<Message>,
    /// Seed of the run.
    pub seed: u64,
    /// Random stream of the attempt, unique in the run.
    pub stream: u64,
    /// Random stream of the attempt's group, the same for all attempts at the task in one step.
    pub group_stream: u64,
    /// Whether the attempt belongs to an evaluation. If the mixture of the attempt's own agent has
    /// a trained policy, such a policy then plays the agent.
    pub is_evaluation: bool,
    /// Sampling parameters of the phase or the evaluation, for trained policies. The agent's limits
    /// set the maximum number of tokens.
    pub params: SamplingParams,
    /// Whether agents modify `params` by their own sampling rules, as they do in training.
    pub has_own_sampling: bool,
    /// Name of the attempt's own agent.
    pub agent: String,
    /// Agents of the run.
    pub roster: Arc<Roster>,
    /// Limits of the attempt.
    pub limits: Limits,
    /// Teacher that generates completions instead of the trained policies. The completions become
    /// demonstrations. `None` if the policies act.
    pub teacher: Option<Teacher>,
}

/// Attempt that a loop has made.
#[derive(Debug, Clone, PartialEq)]
pub struct Attempt {
    /// All tokens of prompts and completions, sampled or demonstrated.
    pub trajectory: Trajectory,
    /// End of the attempt, its errors and its measurements.
    pub outcome: Outcome,
    /// Whether the process that made the attempt was lost. The attempt then counts neither as made
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

    /// Creates an attempt without tokens that failed in `source`.
    pub fn failed(source: &str, why: impl Into<String>) -> Self {
        let why = why.into();
        let mut outcome = Outcome { error: Some(why.clone()), ..Outcome::initial() };
        outcome.add_warning(source, why);
        Attempt::new(Trajectory::new(), outcome)
    }
}

/// Agent loop, which makes attempts.
///
/// Every token that a model saw or sampled is in the trajectory of the attempt, exactly as it was.
/// Each segment names the agent that acted and the policy that answered.
#[async_trait]
pub trait AgentLoop: Send + Sync {
    /// Makes one attempt. If it fails, the error is in its outcome, together with everything that
    /// was recorded before. It never fails other attempts.
    async fn run(&self, context: AttemptContext) -> Attempt;

    /// Returns whether a teacher can generate the completions of trained policies in attempts of
    /// `agent`.
    fn can_be_taught(&self, agent: &Agent) -> bool {
        let _ = agent;
        false
    }
}
