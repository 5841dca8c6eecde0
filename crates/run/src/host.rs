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

/// Timeout for responses in flight to complete when a gateway stops.
const GATEWAY_STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Event of a run or of its start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// A model is being downloaded.
    Fetching {
        /// Current stage of the download.
        stage: String,
        /// Number of bytes that have been downloaded.
        done: u64,
        /// Total number of bytes of the download. `None` if the number is not known.
        total: Option<u64>,
    },
    /// The download of the model is complete.
    Fetched,
    /// A part of the run is set up.
    Setup {
        /// Kind of the part: `model`, `memory`, `learner`, `sampler`, or `note`.
        part: String,
        /// Description of the part, for the user.
        text: String,
    },
    /// A note for the user.
    Note(String),
    /// An event of the training loop.
    Training(levade_trainer::Event),
    /// All phases of the run have finished.
    Finished {
        /// Total number of finished steps, over all phases.
        steps: u32,
        /// Last checkpoint of the run.
        checkpoint: Option<PathBuf>,
    },
    /// The run was stopped at the user's request.
    Stopped {
        /// Number of finished steps, over all phases.
        done: u32,
        /// Total number of steps that the recipe specifies, over all phases.
        steps: u32,
        /// Checkpoint from which the run can be resumed.
        checkpoint: Option<PathBuf>,
    },
    /// The user requested a stop, but the run's external learner exited before the run stopped. The
    /// newest checkpoint is kept.
    StoppedWithLearner,
    /// The user requested a stop while the run was starting. This process has trained nothing.
    StoppedBeforeStart,
    /// The run ended with an error.
    Failed {
        /// Message of the error that ended the run.
        error: String,
    },
}

impl Event {
    /// Returns whether the event only reports progress, so that a later event replaces it.
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

/// Host of a run: the supervisor of the run's child processes, and the receiver of its events. The
/// default host has no supervising program and discards events.
#[derive(Clone)]
pub struct Host {
    supervisor: Supervisor,
    receive: Arc<dyn Fn(Event) + Send + Sync>,
    /// Gateways that are serving calls.
    gateways: Arc<Mutex<Vec<ServedGateway>>>,
}

/// Gateway that serves model calls in a separate task.
pub(crate) struct ServedGateway {
    /// URL at which programs reach the gateway.
    pub address: String,
    /// Closes the listener when it is sent to.
    pub stop: oneshot::Sender<()>,
    /// Task that serves the calls. It ends when the responses in flight are complete.
    pub served: JoinHandle<()>,
}

impl Host {
    /// Creates a host. The task of the run calls `receive` for each event. `receive` must return
    /// without waiting.
    pub fn new(supervisor: Supervisor, receive: impl Fn(Event) + Send + Sync + 'static) -> Self {
        Host { supervisor, receive: Arc::new(receive), gateways: Arc::default() }
    }

    /// Adds a gateway to those that [`stop_gateways`](Self::stop_gateways) stops.
    pub(crate) fn add_gateway(&self, gateway: ServedGateway) {
        self.gateways.lock().unwrap_or_else(PoisonError::into_inner).push(gateway);
    }

    /// Stops the gateways and completes their responses in flight. Afterwards, other processes can
    /// listen at the gateways' addresses.
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

    /// Sends the event that a part of the run has been set up.
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
