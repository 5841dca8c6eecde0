//! The process that a run is part of, and the events that it receives.

use std::path::PathBuf;
use std::sync::Arc;

use levade_process::Supervisor;
use levade_trainer::Observer;
use serde::{Deserialize, Serialize};

/// An event of a run or of its start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A model is being fetched.
    Fetching {
        /// Current stage of fetching.
        stage: String,
        /// Number of bytes that have been fetched.
        done: u64,
        /// Bytes in total, if known.
        total: Option<u64>,
    },
    /// The model has been fetched.
    Fetched,
    /// A part of the run is set up.
    Setup {
        /// The kind of part: `model`, `memory`, `learner`, `sampler`, or `note`.
        part: String,
        /// Description of the part.
        text: String,
    },
    /// A note for the user.
    Note(String),
    /// An event of the training loop.
    Training(levade_trainer::Event),
    /// All phases have finished.
    Finished {
        /// Steps over all phases.
        steps: u32,
        /// Last checkpoint of the run.
        checkpoint: Option<PathBuf>,
    },
    /// The run was stopped on request.
    Stopped {
        /// Steps done over all phases.
        done: u32,
        /// Steps of the recipe.
        steps: u32,
        /// Checkpoint from which the run can be resumed.
        checkpoint: Option<PathBuf>,
    },
    /// The run was asked to stop, and its external learner ended before it. The newest checkpoint
    /// is kept.
    StoppedWithLearner,
    /// The run was asked to stop while it was starting, and has trained nothing in this process.
    StoppedBeforeStart,
    /// The run ended with an error.
    Failed {
        /// Message of the error.
        error: String,
    },
}

impl Event {
    /// Returns whether the event reports only progress, so that a later event replaces it.
    pub fn is_progress(&self) -> bool {
        use levade_trainer::Event as Training;
        matches!(
            self,
            Event::Fetching { .. }
                | Event::Fetched
                | Event::Training(Training::Attempt { .. } | Training::MicroBatch { .. })
        )
    }
}

/// The process that a run is part of: the supervisor of its child processes, and the receiver of
/// its events. The default has no supervising program and discards events.
#[derive(Clone)]
pub struct Host {
    supervisor: Supervisor,
    receive: Arc<dyn Fn(Event) + Send + Sync>,
}

impl Host {
    /// Creates a host. `receive` is called for each event, from the task of the run, and must
    /// return immediately.
    pub fn new(supervisor: Supervisor, receive: impl Fn(Event) + Send + Sync + 'static) -> Self {
        Host { supervisor, receive: Arc::new(receive) }
    }

    /// Returns the supervisor of child processes.
    pub fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

    /// Sends an event to the receiver.
    pub fn send(&self, event: Event) {
        (self.receive)(event);
    }

    /// Sends a note for the user.
    pub fn note(&self, text: impl Into<String>) {
        self.send(Event::Note(text.into()));
    }

    /// Reports that a part of the run has been set up.
    pub fn setup(&self, part: &str, text: impl Into<String>) {
        self.send(Event::Setup { part: part.to_owned(), text: text.into() });
    }
}

impl Default for Host {
    fn default() -> Self {
        Host::new(Supervisor::default(), drop)
    }
}

/// Forwards the events of the training loop.
impl Observer for Host {
    fn event(&mut self, event: &levade_trainer::Event) {
        self.send(Event::Training(event.clone()));
    }
}
