//! Data of rollouts: what is enqueued, leased, reported and read back.
//!
//! [`Rollout`], [`Try`], [`Worker`] and [`Resources`] are serialized as in Agent Lightning's
//! protocol, which calls a try an attempt. Times are Unix timestamps in seconds, read from the
//! store's [`Clock`](super::Clock).

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

/// JSON that the store keeps as text and never interprets.
pub type Json = Box<RawValue>;

/// Reads a field that is present. Null is a value then: the JSON `null`, or an inner `None`.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Name of the queue that is used if none is given.
pub const DEFAULT_QUEUE: &str = "default";

/// Generates an enum with a snake-case name for each variant, which is also its serialized form.
macro_rules! names {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$doc])* $variant),* }

        impl $name {
            /// Names of all variants, in the order of their declaration.
            pub const NAMES: &'static [&'static str] = &[$($text),*];

            /// Returns the name, as in the serialized form.
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
    /// State of a rollout.
    RolloutStatus {
        /// The rollout waits for its first try.
        Queuing = "queuing",
        /// A try was leased and has not reported yet.
        Preparing = "preparing",
        /// A try of the rollout is running.
        Running = "running",
        /// The last try failed, and no other follows.
        Failed = "failed",
        /// The last try has succeeded.
        Succeeded = "succeeded",
        /// The rollout was cancelled. A report of a try cannot change this status.
        Cancelled = "cancelled",
        /// The rollout waits for another try.
        Requeuing = "requeuing",
    }
}

impl RolloutStatus {
    /// Returns whether the rollout waits for a try.
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
    /// State of a try.
    TryStatus {
        /// The try was leased and has not reported yet.
        Preparing = "preparing",
        /// The worker has reported: a span, a heartbeat or an update.
        Running = "running",
        /// The worker reported a failure.
        Failed = "failed",
        /// The worker has reported success.
        Succeeded = "succeeded",
        /// No report arrived in time. A late report revives the try if no later try has started.
        Unresponsive = "unresponsive",
        /// The try has exceeded its timeout. A late report does not revive it.
        Timeout = "timeout",
    }
}

names! {
    /// State of a worker.
    WorkerStatus {
        /// The worker has no try.
        Idle = "idle",
        /// The worker executes a try.
        Busy = "busy",
        /// The worker has never leased, or its last try got no report in time.
        Unknown = "unknown",
    }
}

/// Timeouts and retries of a rollout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RolloutConfig {
    /// Timeout for a try, in seconds since its start. `None` disables it.
    pub timeout_seconds: Option<f64>,
    /// Timeout for the next report of a try, in seconds. `None` disables it.
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

/// A rollout to enqueue or to start.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NewRollout {
    /// Id, chosen by the caller. A second rollout with the same id is not created; the first one is
    /// returned, whatever its input. `None` generates an id.
    pub id: Option<String>,
    /// Idempotency key. If a rollout with the same key exists, that rollout is returned, and no
    /// rollout is created.
    pub key: Option<String>,
    /// Name of the queue.
    pub queue: String,
    /// Priority within the queue. Higher ones are leased first.
    pub priority: i32,
    /// Task of the rollout.
    pub input: Json,
    /// Purpose, such as `train`, `val` or `test`.
    pub mode: Option<String>,
    /// Id of the resources. `None` selects the latest resources at this moment.
    pub resources_id: Option<String>,
    /// Timeouts and retries of the rollout.
    pub config: RolloutConfig,
    /// Metadata of the caller. `None` is stored as an empty object.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub metadata: Option<Json>,
}

impl NewRollout {
    /// Creates a rollout of the default queue from its task.
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

/// A rollout, with its latest try if it has one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rollout {
    /// Id, unique in the store.
    #[serde(rename = "rollout_id")]
    pub id: String,
    /// Task of the rollout.
    pub input: Json,
    /// Unix timestamp of the creation.
    pub start_time: f64,
    /// Time of the end, or `None` if the rollout has not ended.
    pub end_time: Option<f64>,
    /// Purpose, such as `train`, `val` or `test`.
    pub mode: Option<String>,
    /// Id of the resources that the rollout uses.
    pub resources_id: Option<String>,
    /// Status of the rollout.
    pub status: RolloutStatus,
    /// Timeouts and retries of the rollout.
    pub config: RolloutConfig,
    /// Metadata of the caller.
    pub metadata: Option<Json>,
    /// Name of the queue.
    pub queue: String,
    /// Priority within the queue.
    pub priority: i32,
    /// Idempotency key under which the rollout was created.
    #[serde(rename = "idempotency_key", default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Sequence number of the last change, for [`Rollouts::changes`](super::Rollouts::changes).
    pub changed: u64,
    /// Latest try. If there is none, the field is absent in the serialized form, not null.
    #[serde(rename = "attempt", default, skip_serializing_if = "Option::is_none")]
    pub latest_try: Option<Try>,
}

impl Rollout {
    /// Returns the rollout without its latest try.
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
    /// Id, unique within the rollout.
    #[serde(rename = "attempt_id")]
    pub id: String,
    /// Number of the try, from 1. It is the fence: only the highest number of a rollout can finish
    /// it.
    #[serde(rename = "sequence_id")]
    pub number: u32,
    /// Time at which the try was leased.
    pub start_time: f64,
    /// Time at which the worker reported success or failure.
    pub end_time: Option<f64>,
    /// Status of the try.
    pub status: TryStatus,
    /// Id of the worker that executes the try.
    pub worker_id: Option<String>,
    /// Time of the last report.
    pub last_heartbeat_time: Option<f64>,
    /// Metadata of the worker.
    pub metadata: Option<Json>,
}

impl Try {
    /// Returns the lease that this try is.
    pub fn lease(&self) -> Lease {
        Lease { rollout_id: self.rollout_id.clone(), number: self.number }
    }
}

/// Identifies a try in reports of its worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lease {
    /// Id of the rollout.
    pub rollout_id: String,
    /// Number of the try.
    pub number: u32,
}

/// How a worker ends a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseEnd {
    /// The try succeeded, and with it the rollout.
    Succeeded,
    /// The try has failed. The rollout is queued again if its configuration permits another try.
    Failed,
    /// The worker returns the lease, for example because it shuts down. The rollout is queued again
    /// at its old position, and the try does not count toward the maximum.
    Released,
}

/// Fields of a rollout to replace. `None` leaves a field unchanged; an inner `None` removes its
/// value.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RolloutUpdate {
    /// New task of the rollout.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub input: Option<Json>,
    /// New purpose of the rollout.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub mode: Option<Option<String>>,
    /// New id of the resources.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub resources_id: Option<Option<String>>,
    /// New status of the rollout. Every transition is permitted.
    pub status: Option<RolloutStatus>,
    /// New timeouts and retries.
    pub config: Option<RolloutConfig>,
    /// New metadata of the rollout.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub metadata: Option<Option<Json>>,
}

/// Selects a try of a rollout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TryName {
    /// The try with the highest number.
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
    /// New worker of the try.
    pub worker_id: Option<String>,
    /// New time of the last report.
    pub last_heartbeat_time: Option<f64>,
    /// New metadata of the try.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub metadata: Option<Json>,
}

/// A worker, as its leases and heartbeats describe it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Worker {
    /// Id, chosen by the worker.
    #[serde(rename = "worker_id")]
    pub id: String,
    /// Status of the worker.
    pub status: WorkerStatus,
    /// Statistics of the worker's last heartbeat.
    pub heartbeat_stats: Option<Json>,
    /// Time of the worker's last heartbeat.
    pub last_heartbeat_time: Option<f64>,
    /// Unix timestamp of the last lease, or of the last request for a lease.
    pub last_dequeue_time: Option<f64>,
    /// Time at which the worker last became busy.
    pub last_busy_time: Option<f64>,
    /// Time at which the worker last became idle.
    pub last_idle_time: Option<f64>,
    /// Id of the rollout in progress.
    pub current_rollout_id: Option<String>,
    /// Id of the try in progress.
    #[serde(rename = "current_attempt_id")]
    pub current_try_id: Option<String>,
}

/// First key of the resources by which a run announces itself to runners. Such resources are found
/// by their id, and are never the latest resources.
pub const ANNOUNCEMENT_KEY: &str = "levade_runner_protocol";

/// A version of named resources, such as prompts or the address of a model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Resources {
    /// Id, chosen by the caller or generated.
    #[serde(rename = "resources_id")]
    pub id: String,
    /// Time of the first version.
    pub create_time: f64,
    /// Time of this version.
    pub update_time: f64,
    /// Number of the version, from 1.
    pub version: u64,
    /// Value of the resources.
    #[serde(rename = "resources")]
    pub value: Json,
}

/// A span of a trace to add.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NewSpan {
    /// Id of the rollout.
    pub rollout_id: String,
    /// Id of the try.
    pub try_id: String,
    /// Sequence number within the rollout. `None` lets the store assign the next one.
    pub number: Option<u64>,
    /// Id of the trace that the span belongs to.
    pub trace_id: String,
    /// Id of the span, unique within the try.
    pub span_id: String,
    /// Id of the parent span.
    pub parent_id: Option<String>,
    /// Name of the span.
    pub name: String,
    /// Start of the span, from the client's clock.
    pub start_time: Option<f64>,
    /// End of the span, from the client's clock.
    pub end_time: Option<f64>,
    /// The complete span as a JSON object, without the fields `rollout_id`, `attempt_id` and
    /// `sequence_id`.
    pub body: Json,
}

/// A stored span of a try.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Span {
    /// Id of the rollout.
    pub rollout_id: String,
    /// Id of the try.
    pub try_id: String,
    /// Sequence number within the rollout.
    pub number: u64,
    /// The other fields, as in [`NewSpan::body`].
    pub body: Json,
}

/// Result of adding one span.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpanOutcome {
    /// The span is stored under this sequence number.
    Stored(u64),
    /// A span with this id is already stored for the try; the new one is dropped.
    Duplicate,
    /// The rollout does not exist.
    UnknownRollout,
    /// The rollout has no such try.
    UnknownTry,
}

/// Number of stored rows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Number of stored rollouts.
    #[serde(rename = "total_rollouts")]
    pub rollouts: u64,
    /// Number of stored tries.
    #[serde(rename = "total_attempts")]
    pub tries: u64,
    /// Number of stored spans.
    #[serde(rename = "total_spans")]
    pub spans: u64,
    /// Number of resources, without their earlier versions.
    #[serde(rename = "total_resources")]
    pub resources: u64,
    /// Number of known workers.
    #[serde(rename = "total_workers")]
    pub workers: u64,
    /// Number of rollouts that wait for a try.
    pub queued_rollouts: u64,
    /// Number of rollouts whose try is in progress.
    pub active_rollouts: u64,
}
