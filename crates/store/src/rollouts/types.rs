//! Data of rollouts: what is enqueued, leased, reported and read back.
//!
//! [`Rollout`], [`Try`], [`Worker`] and [`Resources`] are serialized as in Agent Lightning's
//! protocol, which calls a try an attempt. Times are Unix timestamps in seconds, read from the
//! store's [`Clock`](super::Clock).

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

/// Raw JSON text that the store keeps and never interprets.
pub type Json = Box<RawValue>;

/// Deserializes a field that is present. The JSON `null` is then a value; a missing field is
/// `None`.
fn deserialize_present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Name of the queue that is used if no queue is specified.
pub const DEFAULT_QUEUE: &str = "default";

/// Generates an enum with a snake-case name for each variant, which is also its serialized form.
macro_rules! names {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$doc])* $variant),* }

        impl $name {
            /// Serialized names of all variants, in the order of their declaration.
            pub const NAMES: &'static [&'static str] = &[$($text),*];

            /// Returns the serialized name of the variant.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $text),* }
            }

            /// Returns the variant with the serialized name `name`, or `None` if the name is
            /// unknown.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($text => Some($name::$variant),)* _ => None }
            }
        }
    };
}

names! {
    /// State of a rollout in the store.
    RolloutStatus {
        /// The rollout is queued and waits for its first try.
        Queuing = "queuing",
        /// A worker has leased the rollout and has not reported yet.
        Preparing = "preparing",
        /// A try of the rollout is running.
        Running = "running",
        /// The last try failed, and no further try follows.
        Failed = "failed",
        /// The last try succeeded.
        Succeeded = "succeeded",
        /// The rollout was cancelled. A report of a try cannot change this status.
        Cancelled = "cancelled",
        /// The rollout is queued again and waits for another try.
        Requeuing = "requeuing",
    }
}

impl RolloutStatus {
    /// Returns whether the rollout is queued for a try.
    pub fn is_queued(self) -> bool {
        matches!(self, RolloutStatus::Queuing | RolloutStatus::Requeuing)
    }

    /// Returns whether the rollout has ended: failed, succeeded or cancelled.
    pub fn is_finished(self) -> bool {
        matches!(self, RolloutStatus::Failed | RolloutStatus::Succeeded | RolloutStatus::Cancelled)
    }

    /// Returns whether a try is in progress, so that timeouts apply.
    pub fn is_active(self) -> bool {
        matches!(self, RolloutStatus::Preparing | RolloutStatus::Running)
    }
}

names! {
    /// State of a try of a rollout.
    TryStatus {
        /// A worker has leased the try and has not reported yet.
        Preparing = "preparing",
        /// The worker has reported progress: a span, a heartbeat or an update.
        Running = "running",
        /// The worker reported that the try failed.
        Failed = "failed",
        /// The worker reported that the try succeeded.
        Succeeded = "succeeded",
        /// No progress report arrived in time. A late report revives the try if no later try has
        /// started.
        Unresponsive = "unresponsive",
        /// The try has exceeded its timeout. A late report does not revive it.
        Timeout = "timeout",
    }
}

names! {
    /// State of a worker that executes rollouts.
    WorkerStatus {
        /// The worker has no try in progress.
        Idle = "idle",
        /// The worker executes a try.
        Busy = "busy",
        /// The worker has never leased a rollout, or its last try got no progress report in time.
        Unknown = "unknown",
    }
}

/// Timeouts and retry policy of a rollout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RolloutConfig {
    /// Timeout for a try, in seconds since its start. `None` disables it.
    pub timeout_seconds: Option<f64>,
    /// Timeout for the next progress report of a try, in seconds. `None` disables it.
    pub unresponsive_seconds: Option<f64>,
    /// Maximum number of tries, at least 1. Tries that a worker released do not count.
    #[serde(rename = "max_attempts")]
    pub max_tries: u32,
    /// Statuses of a try after which the rollout is queued again.
    #[serde(rename = "retry_condition")]
    pub retry_on: Vec<TryStatus>,
}

impl Default for RolloutConfig {
    fn default() -> Self {
        RolloutConfig {
            timeout_seconds: None,
            unresponsive_seconds: None,
            max_tries: 1,
            retry_on: Vec::new(),
        }
    }
}

/// A rollout to create: its task, queue and configuration.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NewRollout {
    /// Id that the caller chooses. If a rollout with this id exists, that rollout is returned,
    /// whatever its input, and no rollout is created. `None` generates an id.
    pub id: Option<String>,
    /// Idempotency key. If a rollout with the same key exists, that rollout is returned, and no
    /// rollout is created. `None` always creates a rollout.
    pub key: Option<String>,
    /// Name of the queue to append to.
    pub queue: String,
    /// Priority within the queue. Rollouts with a higher priority are leased first.
    pub priority: i32,
    /// Task of the rollout, as JSON.
    pub input: Json,
    /// Purpose of the rollout, such as `train`, `val` or `test`. `None` if unspecified.
    pub mode: Option<String>,
    /// Id of the resources that the rollout uses. `None` selects the latest resources at this
    /// moment.
    pub resources_id: Option<String>,
    /// Timeouts and retry policy of the rollout.
    pub config: RolloutConfig,
    /// Metadata that the caller attaches. `None` is stored as an empty object.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "deserialize_present"
    )]
    pub metadata: Option<Json>,
}

impl NewRollout {
    /// Creates a rollout for the default queue from its task, without retries and timeouts.
    pub fn new(input: Json) -> Self {
        NewRollout {
            id: None,
            key: None,
            queue: DEFAULT_QUEUE.to_owned(),
            priority: 0,
            input,
            mode: None,
            resources_id: None,
            config: RolloutConfig::default(),
            metadata: None,
        }
    }
}

/// A stored rollout, with its latest try if it has one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rollout {
    /// Id of the rollout, unique in the store.
    #[serde(rename = "rollout_id")]
    pub id: String,
    /// Task of the rollout, as JSON.
    pub input: Json,
    /// Time at which the rollout was created, as a Unix timestamp in seconds.
    pub start_time: f64,
    /// Time at which the rollout ended, as a Unix timestamp in seconds. `None` if it has not ended.
    pub end_time: Option<f64>,
    /// Purpose of the rollout, such as `train`, `val` or `test`. `None` if unspecified.
    pub mode: Option<String>,
    /// Id of the resources that the rollout uses.
    pub resources_id: Option<String>,
    /// Status of the rollout.
    pub status: RolloutStatus,
    /// Timeouts and retry policy of the rollout.
    pub config: RolloutConfig,
    /// Metadata that the creator of the rollout attached.
    pub metadata: Option<Json>,
    /// Name of the queue that the rollout belongs to.
    pub queue: String,
    /// Priority within the queue. Rollouts with a higher priority are leased first.
    pub priority: i32,
    /// Idempotency key under which the rollout was created.
    #[serde(rename = "idempotency_key", default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Sequence number of the last change, for
    /// [`Rollouts::wait_for_changes`](super::Rollouts::wait_for_changes).
    pub changed: u64,
    /// Latest try of the rollout. If there is none, the field is absent in the serialized form, not
    /// null.
    #[serde(rename = "attempt", default, skip_serializing_if = "Option::is_none")]
    pub latest_try: Option<Try>,
}

impl Rollout {
    /// Returns the rollout with `latest_try` set to `None`.
    #[must_use]
    pub fn without_try(mut self) -> Self {
        self.latest_try = None;
        self
    }
}

/// One execution of a rollout by a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Try {
    /// Id of the rollout.
    pub rollout_id: String,
    /// Id of the try, unique within the rollout.
    #[serde(rename = "attempt_id")]
    pub id: String,
    /// Number of the try within its rollout, from 1. The number is the fencing token: only the try
    /// with the highest number can finish the rollout.
    #[serde(rename = "sequence_id")]
    pub number: u32,
    /// Time at which the try was leased, as a Unix timestamp in seconds.
    pub start_time: f64,
    /// Time at which the worker reported success or failure, or returned the lease, as a Unix
    /// timestamp in seconds. `None` if it has not.
    pub end_time: Option<f64>,
    /// Status of the try.
    pub status: TryStatus,
    /// Id of the worker that executes the try. `None` for an anonymous worker.
    pub worker_id: Option<String>,
    /// Time of the worker's last progress report, as a Unix timestamp in seconds. `None` if there
    /// is none.
    pub last_heartbeat_time: Option<f64>,
    /// Metadata that the worker attached to the try.
    pub metadata: Option<Json>,
}

impl Try {
    /// Returns the lease that identifies this try in reports of its worker.
    pub fn lease(&self) -> Lease {
        Lease { rollout_id: self.rollout_id.clone(), number: self.number }
    }
}

/// A lease: identifies a try in reports of its worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lease {
    /// Id of the rollout.
    pub rollout_id: String,
    /// Number of the try within its rollout.
    pub number: u32,
}

/// The result with which a worker ends a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseEnd {
    /// The try succeeded, and so did its rollout.
    Succeeded,
    /// The try failed. The rollout is queued again if its configuration permits another try.
    Failed,
    /// The worker returns the lease without a result, for example because it shuts down. The
    /// rollout is queued again at its old position, and the try does not count toward the maximum.
    Released,
}

/// Fields of a rollout to replace. `None` leaves a field unchanged; an inner `None` removes its
/// value.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RolloutUpdate {
    /// New task of the rollout, as JSON.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "deserialize_present"
    )]
    pub input: Option<Json>,
    /// New purpose of the rollout.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "deserialize_present"
    )]
    pub mode: Option<Option<String>>,
    /// New id of the resources that the rollout uses.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "deserialize_present"
    )]
    pub resources_id: Option<Option<String>>,
    /// New status of the rollout. Every transition is permitted.
    pub status: Option<RolloutStatus>,
    /// New timeouts and retry policy.
    pub config: Option<RolloutConfig>,
    /// New metadata of the rollout.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "deserialize_present"
    )]
    pub metadata: Option<Option<Json>>,
}

/// Selects a try of a rollout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrySelector {
    /// The try with the highest number of the rollout.
    Latest,
    /// The try with this id.
    Id(String),
}

/// Fields of a try to replace. `None` leaves a field unchanged.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct TryUpdate {
    /// New status of the try. If the try is the latest one, it also determines the rollout's
    /// status.
    pub status: Option<TryStatus>,
    /// Id of the new worker of the try.
    pub worker_id: Option<String>,
    /// New time of the worker's last progress report, as a Unix timestamp in seconds.
    pub last_heartbeat_time: Option<f64>,
    /// New metadata of the try.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "deserialize_present"
    )]
    pub metadata: Option<Json>,
}

/// A worker that executes rollouts, as its leases and heartbeats describe it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Worker {
    /// Id that the worker chose.
    #[serde(rename = "worker_id")]
    pub id: String,
    /// Status of the worker.
    pub status: WorkerStatus,
    /// Statistics of the worker's last heartbeat that contained any. `None` if no heartbeat did.
    pub heartbeat_stats: Option<Json>,
    /// Time of the worker's last heartbeat, as a Unix timestamp in seconds. `None` if there is
    /// none.
    pub last_heartbeat_time: Option<f64>,
    /// Unix timestamp of the worker's last lease, or of its last request for a lease. `None` if
    /// there is none.
    pub last_dequeue_time: Option<f64>,
    /// Unix timestamp at which the worker last became busy. `None` if it never was.
    pub last_busy_time: Option<f64>,
    /// Unix timestamp at which the worker last became idle. `None` if it never was.
    pub last_idle_time: Option<f64>,
    /// Id of the rollout that the worker executes. `None` if the worker is not busy.
    pub current_rollout_id: Option<String>,
    /// Id of the try that the worker executes. `None` if the worker is not busy.
    #[serde(rename = "current_attempt_id")]
    pub current_try_id: Option<String>,
}

/// First key of the resources by which a run announces itself to runners. Such resources are found
/// by their id, and are never the latest resources.
pub const ANNOUNCEMENT_KEY: &str = "levade_runner_protocol";

/// A version of named resources, such as prompts or the address of a model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Resources {
    /// Id of the resources, chosen by the caller or generated.
    #[serde(rename = "resources_id")]
    pub id: String,
    /// Time at which the first version was added, as a Unix timestamp in seconds.
    pub create_time: f64,
    /// Time at which this version was added, as a Unix timestamp in seconds.
    pub update_time: f64,
    /// Number of the version, from 1.
    pub version: u64,
    /// Value of the resources, as JSON.
    #[serde(rename = "resources")]
    pub value: Json,
}

/// A trace span to add to the store.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NewSpan {
    /// Id of the rollout that the span belongs to.
    pub rollout_id: String,
    /// Id of the try that the span belongs to.
    pub try_id: String,
    /// Sequence number of the span within the rollout. `None` lets the store assign the next one.
    pub number: Option<u64>,
    /// Id of the trace that the span belongs to.
    pub trace_id: String,
    /// Id of the span, unique within the try.
    pub span_id: String,
    /// Id of the parent span. `None` for a root span.
    pub parent_id: Option<String>,
    /// Name of the span.
    pub name: String,
    /// Start of the span by the client's clock, as a Unix timestamp in seconds. `None` if unknown.
    pub start_time: Option<f64>,
    /// End of the span by the client's clock, as a Unix timestamp in seconds. `None` if unknown.
    pub end_time: Option<f64>,
    /// The complete span as a JSON object, without the fields `rollout_id`, `attempt_id` and
    /// `sequence_id`.
    pub body: Json,
}

/// A stored trace span of a try.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Span {
    /// Id of the rollout that the span belongs to.
    pub rollout_id: String,
    /// Id of the try that the span belongs to.
    pub try_id: String,
    /// Sequence number of the span within the rollout.
    pub number: u64,
    /// The remaining fields of the span as a JSON object, as in [`NewSpan::body`].
    pub body: Json,
}

/// Result of adding one span to the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpanOutcome {
    /// The span is stored under this sequence number.
    Stored(u64),
    /// A span with this id is already stored for the try; the new one is dropped.
    Duplicate,
    /// The span is dropped, because its rollout does not exist.
    UnknownRollout,
    /// The span is dropped, because its rollout has no such try.
    UnknownTry,
}

/// Numbers of stored rollouts, tries, spans, resources and workers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutStatistics {
    /// Number of stored rollouts.
    #[serde(rename = "total_rollouts")]
    pub rollouts: u64,
    /// Number of stored tries.
    #[serde(rename = "total_attempts")]
    pub tries: u64,
    /// Number of stored spans.
    #[serde(rename = "total_spans")]
    pub spans: u64,
    /// Number of resources. Several versions of the same resources count once.
    #[serde(rename = "total_resources")]
    pub resources: u64,
    /// Number of known workers.
    #[serde(rename = "total_workers")]
    pub workers: u64,
    /// Number of rollouts that are queued for a try.
    pub queued_rollouts: u64,
    /// Number of rollouts that have a try in progress.
    pub active_rollouts: u64,
}
