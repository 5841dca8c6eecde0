//! Filters, orders and pages of queries.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::types::{RolloutStatus, TryName, WorkerStatus};

/// How the conditions of a query are combined.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Logic {
    /// All conditions must hold.
    #[default]
    And,
    /// At least one condition must hold. Without conditions, every row matches.
    Or,
}

/// Direction of an order. Rows with equal values are in the order of their creation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Ascending: the smallest value is first.
    #[default]
    Asc,
    /// Descending: the largest value is first.
    Desc,
}

/// Part of a result, and its order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRequest {
    /// Maximum number of rows, at least 1. `None` returns all.
    pub limit: Option<u64>,
    /// Number of rows to skip.
    pub offset: u64,
    /// Serialized name of the field to sort by. `None` sorts by creation. Rows without a value sort
    /// as the latest time, the empty text or 0.
    pub sort_by: Option<String>,
    /// Direction of the order.
    pub order: Order,
}

impl Default for PageRequest {
    /// Selects all rows in the order of their creation.
    fn default() -> Self {
        PageRequest { limit: None, offset: 0, sort_by: None, order: Order::Asc }
    }
}

/// Part of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page<T> {
    /// Rows of the page.
    pub items: Vec<T>,
    /// Number of rows that match, on all pages.
    pub total: u64,
}

/// Filter of rollouts. An empty list matches no rollout; `None` sets no condition.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RolloutFilter {
    /// Permitted statuses of the rollout.
    pub status_in: Option<Vec<RolloutStatus>>,
    /// Permitted ids of the rollout.
    pub id_in: Option<Vec<String>>,
    /// Text that the id contains.
    pub id_contains: Option<String>,
    /// How the conditions are combined.
    pub logic: Logic,
}

/// Filter of workers. An empty list matches no worker; `None` sets no condition.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct WorkerFilter {
    /// Permitted statuses of the worker.
    pub status_in: Option<Vec<WorkerStatus>>,
    /// Text that the id contains.
    pub id_contains: Option<String>,
    /// How the conditions are combined.
    pub logic: Logic,
}

/// Filter of resources. All conditions must hold.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ResourcesFilter {
    /// Required id. `None` sets no condition.
    pub id: Option<String>,
    /// Text that the id contains.
    pub id_contains: Option<String>,
    /// Whether resources that announce a run to runners do not match.
    #[serde(default)]
    pub without_announcements: bool,
}

/// A condition on a text: its value, and a text that it contains.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct TextFilter {
    /// Required value. `None` sets no condition.
    pub exact: Option<String>,
    /// Text that the value contains.
    pub contains: Option<String>,
}

/// Conditions on the spans of one rollout.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SpanFilter {
    /// Id of the rollout, which always must match.
    pub rollout_id: String,
    /// Try, which always must match if it is set.
    pub try_name: Option<TryName>,
    /// Condition on the id of the trace.
    pub trace_id: TextFilter,
    /// Condition on the id of the span.
    pub span_id: TextFilter,
    /// Condition on the id of the parent.
    pub parent_id: TextFilter,
    /// Condition on the name.
    pub name: TextFilter,
    /// How the conditions on texts are combined.
    pub logic: Logic,
}

impl SpanFilter {
    /// Selects all spans of a rollout.
    pub fn new(rollout_id: impl Into<String>) -> Self {
        let any = TextFilter::default;
        SpanFilter {
            rollout_id: rollout_id.into(),
            try_name: None,
            trace_id: any(),
            span_id: any(),
            parent_id: any(),
            name: any(),
            logic: Logic::And,
        }
    }
}

/// Request to lease rollouts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// Queues to lease from. The order of leases is by priority, then by age, across all of them.
    pub queues: Vec<String>,
    /// Maximum number of leases.
    pub max: usize,
    /// Id of the worker.
    pub worker: Option<String>,
    /// Timeout for the next report of a try, in addition to the timeouts of the rollout's
    /// configuration. `None` adds no timeout.
    pub ttl: Option<Duration>,
    /// Maximum wait for a first rollout. Zero returns at once.
    pub wait: Duration,
    /// Idempotency key, unique to this request. A repeated request with the same key returns the
    /// leases of the first request that are still in progress. If none is in progress, it leases
    /// again. `None` if the request is never repeated.
    #[serde(default)]
    pub key: Option<String>,
}

impl LeaseRequest {
    /// Requests at most `max` rollouts of the default queue, without a wait.
    pub fn new(max: usize, worker: Option<&str>) -> Self {
        LeaseRequest {
            queues: vec![super::DEFAULT_QUEUE.to_owned()],
            max,
            worker: worker.map(str::to_owned),
            ttl: None,
            wait: Duration::ZERO,
            key: None,
        }
    }
}
