//! Data that a trainer and its runners exchange, as JSON in the rollouts of a store.

use levade_policy::SamplingParams;
use levade_tasks::Task;
use levade_text::Message;
use levade_tools::ToolDescriptions;
use levade_tree::{Outcome, TimeInterval};
use serde::{Deserialize, Serialize};

use crate::Limits;
use crate::program::SessionEndpoint;

/// Returns the queue of a run's evaluation attempts. Its other attempts are in `queue`, so that
/// runners can lease only some of them.
pub fn evaluation_queue(queue: &str) -> String {
    format!("{queue}/evaluation")
}

/// Input of a rollout: an attempt, with everything that a runner needs to make it. It contains the
/// keys of the attempt's session.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct LeasedAttempt {
    /// Id of the resources with the recipe of the run.
    pub resources_id: String,
    /// Version of these resources.
    pub recipe_version: u64,
    /// Name of the attempt for tools and logs, unique to this try.
    pub name: String,
    /// Task of the attempt.
    pub task: Task,
    /// Messages that open the conversation.
    pub messages: Vec<Message>,
    /// Name of the attempt's own agent.
    pub agent: String,
    /// Texts of its tools that replace those of the toolboxes.
    #[serde(default, skip_serializing_if = "ToolDescriptions::is_empty")]
    pub tool_descriptions: ToolDescriptions,
    /// Seed of the run.
    pub seed: u64,
    /// Random stream of the attempt.
    pub stream: u64,
    /// Whether the attempt belongs to an evaluation.
    pub is_evaluation: bool,
    /// Sampling parameters of the attempt's own agent, for its tools. The gateway applies them to
    /// model calls.
    pub params: SamplingParams,
    /// Limits of the attempt.
    pub limits: Limits,
    /// Endpoint for model calls.
    pub endpoint: SessionEndpoint,
}

/// Result of a rollout, which a runner reports as the metadata of the try.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttemptReport {
    /// The tool loop has ended.
    Tools {
        /// Outcome of the loop, without the measurements of model calls.
        outcome: Box<Outcome>,
        /// Times of the tool calls. An outcome is serialized without them.
        #[serde(default)]
        tool_times: Vec<ToolTime>,
    },
    /// A program or an environment has ended.
    Program {
        /// Exit code of the program. `None` if the program exceeded its timeout and was stopped.
        code: Option<i32>,
        /// End of the standard output.
        stdout: String,
        /// End of the standard error.
        stderr: String,
    },
    /// The attempt could not be made: the program or its worker could not be started, or the
    /// runner lacks a file.
    Failed {
        /// Reason.
        why: String,
    },
}

/// Time interval of a tool call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolTime {
    /// Index of the completion that contains the call, in the loop.
    pub turn: u32,
    /// Index of the call in the completion.
    pub index: u32,
    /// Name of the result's category.
    pub result: String,
    /// Start and duration, by the clock of the runner.
    pub interval: TimeInterval,
}

/// Statistics of a runner, as in its heartbeats.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerStats {
    /// Queues that the runner leases from.
    pub queues: Vec<String>,
    /// Maximum number of concurrent attempts.
    pub slots: usize,
    /// Number of attempts in progress.
    pub running: usize,
}
