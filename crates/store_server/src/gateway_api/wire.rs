//! A rollout in the format of Agent Lightning 1.0, and the fields that only this format has.

use axum::http::StatusCode;
use levade_store::rollouts::{Json, Rollout, RolloutStatus, RolloutUpdate, Rollouts};
use serde::{Deserialize, Serialize};
use serde_json::value::to_raw_value;
use serde_json::{Map, Value, json};

use crate::response::ApiError;

/// Metadata key under which the store keeps the rollout fields that only this protocol has.
const EXTRA: &str = "agentlightning.v1";

/// Default timeout of a rollout, in seconds.
const DEFAULT_TIMEOUT: f64 = 3600.0;

/// Attempt id of a rollout if its controller names no attempt.
const DEFAULT_ATTEMPT: &str = "0";

/// State of a rollout in the protocol of Agent Lightning 1.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum GatewayState {
    Queuing,
    Running,
    Succeeded,
    Failed,
}

impl GatewayState {
    /// Returns the protocol state that corresponds to the status of a stored rollout.
    pub fn from_status(status: RolloutStatus) -> Self {
        match status {
            RolloutStatus::Queuing | RolloutStatus::Requeuing => GatewayState::Queuing,
            RolloutStatus::Preparing | RolloutStatus::Running => GatewayState::Running,
            RolloutStatus::Succeeded => GatewayState::Succeeded,
            RolloutStatus::Failed | RolloutStatus::Cancelled => GatewayState::Failed,
        }
    }

    /// Returns the statuses of stored rollouts that correspond to this state. A single status is
    /// returned twice.
    pub fn matching_statuses(self) -> [RolloutStatus; 2] {
        match self {
            GatewayState::Queuing => [RolloutStatus::Queuing, RolloutStatus::Requeuing],
            GatewayState::Running => [RolloutStatus::Preparing, RolloutStatus::Running],
            GatewayState::Succeeded => [RolloutStatus::Succeeded; 2],
            GatewayState::Failed => [RolloutStatus::Failed, RolloutStatus::Cancelled],
        }
    }

    /// Returns whether a controller may report the state `next` for a rollout in this state.
    pub fn permits_transition_to(self, next: GatewayState) -> bool {
        match self {
            GatewayState::Queuing => matches!(next, GatewayState::Running | GatewayState::Failed),
            GatewayState::Running => matches!(next, GatewayState::Succeeded | GatewayState::Failed),
            GatewayState::Succeeded | GatewayState::Failed => false,
        }
    }
}

/// Fields of a rollout that only this protocol has. Clients of other protocols see these fields in
/// the metadata.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct GatewayFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub k8s: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub k8s_job_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_attempt_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_message: Option<String>,
    /// Number of status reports that the controller has sent.
    pub reports: u64,
    /// Unix timestamp of the controller's last status report. `None` if the controller has not
    /// reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reported_at: Option<f64>,
    /// Whether an event, and not a report of the controller, started the try. The controller's
    /// report of the start is then still to come.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_started_by_event: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_deleted: bool,
}

/// A stored rollout whose metadata is split into the client's own fields and the fields of this
/// protocol.
#[derive(Debug)]
pub(super) struct GatewayRollout {
    pub rollout: Rollout,
    pub metadata: Map<String, Value>,
    pub extra: GatewayFields,
}

impl GatewayRollout {
    pub fn new(rollout: Rollout) -> Self {
        let metadata = rollout.metadata.as_ref().map(|metadata| metadata.get());
        let mut metadata: Map<String, Value> =
            metadata.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let extra = metadata.remove(EXTRA).and_then(|extra| serde_json::from_value(extra).ok());
        GatewayRollout { rollout, metadata, extra: extra.unwrap_or_default() }
    }

    /// Merges the client's metadata with the fields of this protocol, as the store keeps them.
    pub fn stored_metadata(metadata: &Map<String, Value>, extra: &GatewayFields) -> Option<Json> {
        let mut metadata = metadata.clone();
        metadata.insert(EXTRA.to_owned(), json!(extra));
        to_raw_value(&metadata).ok()
    }

    pub fn state(&self) -> GatewayState {
        GatewayState::from_status(self.rollout.status)
    }

    /// Returns the id of the attempt to which the rollout's events belong.
    pub fn attempt_id(&self) -> &str {
        self.extra.last_attempt_id.as_deref().unwrap_or(DEFAULT_ATTEMPT)
    }

    pub fn is_train(&self) -> bool {
        !matches!(self.rollout.mode.as_deref(), Some("val" | "test"))
    }

    /// Returns the id of the rollout's task in its data set. Empty if the task has no id.
    pub fn data_id(&self) -> String {
        let input: Value = serde_json::from_str(self.rollout.input.get()).unwrap_or_default();
        let id = ["data_id", "instance_id"].iter().find_map(|name| match &input[*name] {
            Value::Null => None,
            Value::String(text) if text.is_empty() => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        });
        id.unwrap_or_default()
    }

    /// Serializes the rollout in the JSON format of Agent Lightning 1.0.
    pub fn to_json(&self) -> Value {
        let Rollout { id, input, start_time, end_time, config, latest_try, .. } = &self.rollout;
        let tried = latest_try.iter().flat_map(|of| [Some(of.start_time), of.last_heartbeat_time]);
        let updated = tried.chain([*end_time, self.extra.reported_at]).flatten();
        let timeout = config.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT).ceil() as u64;
        json!({
            "rollout_id": id,
            "input": input,
            "is_train": self.is_train(),
            "config": {
                "timeout_seconds": timeout, "local": self.extra.local, "k8s": self.extra.k8s,
            },
            "metadata": self.metadata,
            "status": {
                "state": self.state(),
                "k8s_job_name": self.extra.k8s_job_name,
                "last_attempt_id": self.extra.last_attempt_id,
                "error_message": self.extra.error_message,
                "version": 1 + self.extra.reports,
                "created_at": start_time,
                "updated_at": updated.fold(*start_time, f64::max),
            },
        })
    }
}

/// Returns the rollout with the id `id`.
///
/// # Errors
/// Returns an error with status 404 if the rollout does not exist or was deleted.
pub(super) async fn find_rollout(
    store: &dyn Rollouts,
    id: &str,
) -> Result<GatewayRollout, ApiError> {
    let rollout =
        store.rollout(id).await?.map(GatewayRollout::new).filter(|of| !of.extra.is_deleted);
    let text = || format!("Rollout not found: {id}");
    rollout.ok_or_else(|| ApiError::new(StatusCode::NOT_FOUND, text()))
}

/// Stores the client's metadata and the fields of this protocol for the rollout with the id `id`.
pub(super) async fn save_metadata(
    store: &dyn Rollouts,
    id: &str,
    metadata: &Map<String, Value>,
    extra: &GatewayFields,
) -> Result<(), ApiError> {
    let metadata = Some(GatewayRollout::stored_metadata(metadata, extra));
    let update = RolloutUpdate { metadata, ..RolloutUpdate::default() };
    store.update_rollout(id, &update).await?;
    Ok(())
}
