//! Watching a run, and asking it to stop.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use levade_tree::Purpose;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

use crate::eval_result::EvalResult;
use crate::metrics::Metrics;

/// Events of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The run begins, or goes on from a checkpoint.
    Started {
        /// The checkpoint, where there is one.
        from: Option<PathBuf>,
        /// Steps done before, over all phases.
        done: u32,
        /// Steps of the whole recipe.
        steps: u32,
    },
    /// A phase begins, or goes on.
    PhaseStarted {
        /// Which, from 0.
        phase: usize,
        /// Kind of the event.
        kind: String,
        /// Steps of the phase done before.
        done: u32,
        /// Steps of the phase.
        steps: u32,
    },
    /// An attempt is recorded.
    Attempt {
        /// Purpose of the attempt.
        purpose: Purpose,
        /// How many of this batch of attempts are recorded.
        done: usize,
        /// How many there are in the batch.
        total: usize,
        /// How many tokens it sampled.
        sampled_tokens: usize,
    },
    /// A micro-batch went through the model.
    MicroBatch {
        /// How many of this step have.
        done: usize,
        /// How many there are in the step.
        total: usize,
    },
    /// A step is done.
    Step {
        /// Which phase, from 0.
        phase: usize,
        /// Kind of the event.
        kind: String,
        /// Steps of the phase done, with this one.
        step: u32,
        /// Steps of the phase.
        steps: u32,
        /// Measures of the step.
        metrics: Metrics,
    },
    /// An evaluation is done, or was done before the run was resumed.
    Evaluated(Box<EvalResult>),
    /// A checkpoint is written.
    Checkpoint(PathBuf),
    /// Something the user should know.
    Note(String),
}

/// Watches a run. Called from the trainer's own task: it should return at once.
pub trait Observer: Send {
    /// Something happened.
    fn event(&mut self, event: &Event);
}

/// Watches nothing.
impl Observer for () {
    fn event(&mut self, _event: &Event) {}
}

/// Asks a run to stop: at the next step boundary, with a checkpoint. Clones share the request.
#[derive(Debug, Clone, Default)]
pub struct StopFlag(Arc<Stop>);

#[derive(Debug, Default)]
struct Stop {
    wanted: AtomicBool,
    changed: Notify,
}

impl StopFlag {
    /// Asks.
    pub fn stop(&self) {
        self.0.wanted.store(true, Ordering::SeqCst);
        self.0.changed.notify_waiters();
    }

    /// Whether it was asked.
    pub fn is_stopped(&self) -> bool {
        self.0.wanted.load(Ordering::SeqCst)
    }

    /// Waits until it is asked.
    pub async fn stopped(&self) {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            // Registered before the flag is read, so that a request in between is not missed.
            changed.as_mut().enable();
            if self.is_stopped() {
                return;
            }
            changed.await;
        }
    }
}
