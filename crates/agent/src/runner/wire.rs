//! Data that a trainer and its runners exchange, as JSON in the rollouts of a store.

use levade_policy::SamplingParams;
use levade_tasks::Task;
use levade_text::Message;
use levade_tools::ToolDescriptions;
use levade_tree::{Outcome, TimeInterval};
use serde::{Deserialize, Serialize};

use crate::AttemptLimits;
use crate::program::SessionEndpoint;

/// Returns the name of the queue of a run's evaluation attempts. The training attempts of the run
/// are in `queue`, so runners can lease attempts of only one kind.
pub fn evaluation_queue_name(queue: &str) -> String {
    format!("{queue}/evaluation")
}

/// Input of a rollout: an attempt, with everything that a runner needs to make the attempt. The
/// input contains the keys of the attempt's session.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct LeasedAttempt {
    /// Id of the stored resources that contain the recipe of the run.
    pub resources_id: String,
    /// Version of the stored resources that contain the recipe.
    pub recipe_version: u64,
    /// Name of the attempt for tools and logs, unique to this try.
    pub name: String,
    /// Task of the attempt.
    pub task: Task,
    /// Messages that open the conversation of the attempt.
    pub messages: Vec<Message>,
    /// Name of the attempt's own agent.
    pub agent: String,
    /// Descriptions of the agent's tools, which replace the descriptions of the toolboxes.
    #[serde(default, skip_serializing_if = "ToolDescriptions::is_empty")]
    pub tool_descriptions: ToolDescriptions,
    /// Seed of the run.
    pub seed: u64,
    /// Random stream of the attempt.
    pub stream: u64,
    /// Whether the attempt belongs to an evaluation.
    pub is_evaluation: bool,
    /// Sampling parameters of the attempt's own agent, which its tools read. The gateway applies
    /// the same parameters to model calls.
    pub params: SamplingParams,
    /// Limits of the attempt: turns, tokens and timeouts.
    pub limits: AttemptLimits,
    /// Endpoint for the model calls of the attempt.
    pub endpoint: SessionEndpoint,
}

/// Result of a rollout, which a runner reports as the metadata of the try.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttemptReport {
    /// The tool loop of the attempt has ended.
    Tools {
        /// Outcome of the tool loop, without the measurements of model calls.
        outcome: Box<Outcome>,
        /// Times of the tool calls. They are separate because a serialized outcome does not contain
        /// times.
        #[serde(default)]
        tool_times: Vec<ToolTime>,
    },
    /// The program or the environment that makes the attempt has ended.
    Program {
        /// Exit code of the program. `None` if the program exceeded its timeout and was stopped.
        code: Option<i32>,
        /// Last part of the standard output of the program.
        stdout: String,
        /// Last part of the standard error of the program.
        stderr: String,
    },
    /// The attempt could not be made: the program or its worker could not be started, or the
    /// runner lacks a file.
    Failed {
        /// Reason why the attempt could not be made.
        why: String,
    },
}

/// Time interval of a tool call on a runner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolTime {
    /// Index of the completion that contains the tool call, counted from 0 in the tool loop.
    pub turn: u32,
    /// Index of the tool call in its completion, from 0.
    pub index: u32,
    /// Name of the category of the tool result.
    pub result: String,
    /// Start and duration of the tool call, by the clock of the runner.
    pub interval: TimeInterval,
}

/// Statistics of a runner, which its heartbeats contain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerStats {
    /// Names of the queues that the runner leases from.
    pub queues: Vec<String>,
    /// Maximum number of concurrent attempts of the runner.
    pub slots: usize,
    /// Number of attempts that the runner is making now.
    pub running: usize,
}
