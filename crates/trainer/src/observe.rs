//! Observes a run, and requests its stop.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use levade_tree::Purpose;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::eval_result::EvalResult;
use crate::metrics::Metrics;

/// An event of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A new run starts, or a run resumes from a checkpoint.
    Started {
        /// Checkpoint from which the run resumes. `None` for a new run.
        from: Option<PathBuf>,
        /// Number of steps that were finished before, over all phases.
        done: u32,
        /// Number of steps of all phases.
        steps: u32,
    },
    /// A phase starts, or resumes after some of its steps.
    PhaseStarted {
        /// Index of the phase, from 0.
        phase: usize,
        /// Kind of the phase: `sft`, or the RL algorithm, such as `grpo`.
        kind: String,
        /// Number of steps of the phase that were finished before.
        done: u32,
        /// Number of steps of the phase.
        steps: u32,
    },
    /// An attempt was recorded.
    Attempt {
        /// Purpose of the attempt.
        purpose: Purpose,
        /// Number of attempts of this batch that have been recorded, including this attempt.
        done: usize,
        /// Number of attempts in the batch.
        total: usize,
        /// Number of tokens that the attempt sampled.
        sampled_tokens: usize,
    },
    /// A micro-batch was processed in training.
    MicroBatch {
        /// Number of processed micro-batches of this step.
        done: usize,
        /// Number of micro-batches of the step.
        total: usize,
    },
    /// A training step was finished.
    Step {
        /// Index of the phase, from 0.
        phase: usize,
        /// Kind of the phase: `sft`, or the RL algorithm, such as `grpo`.
        kind: String,
        /// Number of finished steps of the phase, including this one.
        step: u32,
        /// Number of steps of the phase.
        steps: u32,
        /// Metrics of the step.
        metrics: Metrics,
    },
    /// An evaluation was finished, or was loaded from the store when the run resumed.
    Evaluated(Box<EvalResult>),
    /// A checkpoint was written into this directory.
    Checkpoint(PathBuf),
    /// A message for the user.
    Note(String),
}

/// Receiver of a run's events. The trainer calls it from its own task, so
/// [`event`](Observer::event) should return quickly.
pub trait Observer: Send {
    /// Handles an event of the run.
    fn event(&mut self, event: &Event);
}

/// Observer that ignores all events.
impl Observer for () {
    fn event(&mut self, _event: &Event) {}
}

/// Flag that requests a run to stop at the next step boundary, with a checkpoint. All clones share
/// one flag.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<StopState>);

#[derive(Debug, Default)]
struct StopState {
    wanted: AtomicBool,
    changed: Notify,
}

impl StopFlag {
    /// Requests that the run stops at its next safe point.
    pub fn stop(&self) {
        self.0.wanted.store(true, Ordering::SeqCst);
        self.0.changed.notify_waiters();
    }

    /// Returns whether a stop was requested.
    pub fn is_stopped(&self) -> bool {
        self.0.wanted.load(Ordering::SeqCst)
    }

    /// Waits until [`StopFlag::stop`] is called on this flag or a clone.
    pub async fn stopped(&self) {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            // Registers before it reads the flag, so that a request in between is not missed.
            changed.as_mut().enable();
            if self.is_stopped() {
                return;
            }
            changed.await;
        }
    }
}
