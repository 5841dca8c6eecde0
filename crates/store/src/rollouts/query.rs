//! Filters, orders and pages of queries.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::types::{RolloutStatus, TrySelector, WorkerStatus};

/// Logical operator that combines the conditions of a query.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogicalOperator {
    /// All conditions must hold.
    #[default]
    And,
    /// At least one condition must hold. Without conditions, every row matches.
    Or,
}

/// Sort direction. Rows with equal values are sorted by creation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SortOrder {
    /// Ascending: the smallest value comes first.
    #[default]
    Asc,
    /// Descending: the largest value comes first.
    Desc,
}

/// A request for one page of a result, with the order of the rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageRequest {
    /// Maximum number of rows on the page, at least 1. `None` returns all rows.
    pub limit: Option<u64>,
    /// Number of rows to skip before the page.
    pub offset: u64,
    /// Serialized name of the field to sort by. `None` sorts by creation. A row without a value is
    /// sorted as if the value were the latest time, the empty text or 0.
    pub sort_by: Option<String>,
    /// Direction in which the rows are sorted.
    pub order: SortOrder,
}

impl Default for PageRequest {
    /// Selects all rows in the order of their creation.
    fn default() -> Self {
        PageRequest { limit: None, offset: 0, sort_by: None, order: SortOrder::Asc }
    }
}

/// One page of a query's result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page<T> {
    /// Rows of the page.
    pub items: Vec<T>,
    /// Number of matching rows on all pages.
    pub total: u64,
}

/// Conditions on rollouts. An empty list matches no rollout, and `None` sets no condition.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RolloutFilter {
    /// Permitted statuses of the rollout. `None` permits every status.
    pub status_in: Option<Vec<RolloutStatus>>,
    /// Permitted ids of the rollout. `None` permits every id.
    pub id_in: Option<Vec<String>>,
    /// Text that the id of the rollout must contain. `None` sets no condition.
    pub id_contains: Option<String>,
    /// Logical operator that combines the conditions.
    pub logic: LogicalOperator,
}

/// Conditions on workers. An empty list matches no worker, and `None` sets no condition.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct WorkerFilter {
    /// Permitted statuses of the worker. `None` permits every status.
    pub status_in: Option<Vec<WorkerStatus>>,
    /// Text that the id of the worker must contain. `None` sets no condition.
    pub id_contains: Option<String>,
    /// Logical operator that combines the conditions.
    pub logic: LogicalOperator,
}

/// Conditions on resources, all of which must hold.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ResourcesFilter {
    /// Id that the resources must have. `None` sets no condition.
    pub id: Option<String>,
    /// Text that the id of the resources must contain. `None` sets no condition.
    pub id_contains: Option<String>,
    /// Whether to leave out resources that announce a run to runners.
    #[serde(default)]
    pub without_announcements: bool,
}

/// A condition on a text field of a span: equality, or a text that the field contains.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct TextFilter {
    /// Text that the field must equal. `None` sets no condition.
    pub exact: Option<String>,
    /// Text that the field must contain. `None` sets no condition.
    pub contains: Option<String>,
}

/// Conditions on the spans of one rollout.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SpanFilter {
    /// Id of the rollout, which must always match, whatever `logic` is.
    pub rollout_id: String,
    /// Try of the rollout, which must always match, whatever `logic` is. `None` permits every try.
    pub try_name: Option<TrySelector>,
    /// Condition on the id of the span's trace.
    pub trace_id: TextFilter,
    /// Condition on the id of the span.
    pub span_id: TextFilter,
    /// Condition on the id of the parent span.
    pub parent_id: TextFilter,
    /// Condition on the name of the span.
    pub name: TextFilter,
    /// Logical operator that combines the conditions on texts.
    pub logic: LogicalOperator,
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
            logic: LogicalOperator::And,
        }
    }
}

/// A worker's request to lease queued rollouts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// Names of the queues to lease from. Rollouts of all these queues are leased by priority, then
    /// by age.
    pub queues: Vec<String>,
    /// Maximum number of rollouts to lease.
    pub max: usize,
    /// Id of the worker that requests the leases. `None` for an anonymous worker.
    pub worker: Option<String>,
    /// Timeout for the next progress report of a try, in addition to the timeouts in the rollout's
    /// configuration. `None` adds no timeout.
    pub ttl: Option<Duration>,
    /// Maximum wait for the first rollout if the queues are empty. Zero returns at once.
    pub wait: Duration,
    /// Idempotency key, unique to this request. A repeated request with the same key returns the
    /// leases of the first request that are still in progress. If none is in progress, it leases
    /// again. `None` if the request is never repeated.
    #[serde(default)]
    pub key: Option<String>,
}

impl LeaseRequest {
    /// Creates a request for at most `max` rollouts of the default queue, without a wait.
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
