//! Attempts that runners make: processes on any host, which lease attempts from a store of
//! rollouts.
//!
//! The trainer's side is [`RunnerLoop`], an agent loop. It opens the attempt's session at the
//! gateway of the trainer, enqueues one rollout with the session's address and key, and waits for
//! the report of the runner. The runner's side is [`RunnerAgent`], which executes the agent loop of
//! a [`LeasedAttempt`] and returns an [`AttemptReport`]. All model calls go to the gateway, which
//! records every token; a report contains only the end of the loop.
//!
//! # Guarantees
//! - **A lost lease ends the try.** If a runner does not report in time, the attempt ends as
//!   [lost](crate::Attempt::is_lost), its session is closed, and late calls get status 410.
//! - **A cancelled attempt** cancels its rollout. The runner learns this from its next heartbeat.
//! - **Every wait has a timeout**: for a runner, for the store, and for the end of the attempt.
//!
//! Out of scope: leases and heartbeats of the runner's process, which `levade-run` implements.

mod agent_loop;
mod execute;
mod merge;
mod queue;
mod wire;

pub use agent_loop::{LeasedLoop, RunnerLoop};
pub use execute::RunnerAgent;
pub use queue::{RunnerQueue, RunnerQueueOptions};
pub use wire::{AttemptReport, LeasedAttempt, WorkerStats, evaluation_queue_name};

#[cfg(test)]
mod tests;
