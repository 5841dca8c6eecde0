//! The process that a run is part of, and the events that it receives.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use levade_policy::process_time::with_timeout;
use levade_process::Supervisor;
use levade_trainer::Observer;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Timeout for the responses in flight of a gateway that stops.
const GATEWAY_STOP_TIMEOUT: Duration = Duration::from_secs(5);

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
    /// Gateways that run.
    gateways: Arc<Mutex<Vec<ServedGateway>>>,
}

/// A gateway that serves calls in a task.
pub(crate) struct ServedGateway {
    /// URL at which programs call the gateway.
    pub address: String,
    /// Closes the listener when it is sent to.
    pub stop: oneshot::Sender<()>,
    /// The task, which ends when the responses in flight are complete.
    pub served: JoinHandle<()>,
}

impl Host {
    /// Creates a host. `receive` is called for each event, from the task of the run, and must
    /// return immediately.
    pub fn new(supervisor: Supervisor, receive: impl Fn(Event) + Send + Sync + 'static) -> Self {
        Host { supervisor, receive: Arc::new(receive), gateways: Arc::default() }
    }

    /// Adds a gateway that [`stop_gateways`](Self::stop_gateways) stops.
    pub(crate) fn add_gateway(&self, gateway: ServedGateway) {
        self.gateways.lock().unwrap_or_else(PoisonError::into_inner).push(gateway);
    }

    /// Stops the gateways, so that others can listen at their addresses, and completes their
    /// responses in flight.
    pub(crate) async fn stop_gateways(&self) {
        let gateways =
            std::mem::take(&mut *self.gateways.lock().unwrap_or_else(PoisonError::into_inner));
        for ServedGateway { address, stop, mut served } in gateways {
            // Sending fails if the gateway has ended.
            let _ = stop.send(());
            if with_timeout(GATEWAY_STOP_TIMEOUT, &mut served).await.is_none() {
                self.note(format!(
                    "waited {GATEWAY_STOP_TIMEOUT:?} for the responses in flight of the gateway at \
                     {address}; the run no longer needs them"
                ));
                served.abort();
            }
        }
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
