//! Conversions between rows and the types of the trait.

use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ValueRef};
use rusqlite::{Row, ToSql};
use serde_json::value::RawValue;

use crate::rollouts::{
    ANNOUNCEMENT_KEY, Json, Resources, Rollout, RolloutConfig, RolloutStatus, Span, Try, TryStatus,
    Worker, WorkerStatus,
};

/// Columns that [`parse_rollout`] reads: `r` is the rollout, and `t` its latest try.
pub(super) const ROLLOUT: &str = "r.id, r.input, r.start_time, r.end_time, r.mode, r.resources_id, r.status, r.timeout, \
    r.unresponsive, r.max_tries, r.retry_on, r.metadata, r.queue, r.priority, r.key, r.changed, t.id, r.id, t.number, \
    t.start_time, t.end_time, t.status, t.worker, t.heartbeat, t.metadata";

/// Tables that contain the columns [`ROLLOUT`].
pub(super) const ROLLOUT_FROM: &str =
    "rollouts r LEFT JOIN tries t ON t.rollout = r.seq AND t.number = r.tries";

/// Columns that [`parse_try`] reads.
pub(super) const TRY: &str =
    "t.id, r.id, t.number, t.start_time, t.end_time, t.status, t.worker, t.heartbeat, t.metadata";

/// Columns that [`parse_worker`] reads.
pub(super) const WORKER: &str =
    "id, status, stats, heartbeat, dequeue, busy, idle, current_rollout, current_try";

/// Columns that [`parse_resources`] reads.
pub(super) const RESOURCES: &str = "id, create_time, update_time, version, value";

/// Returns the SQL condition that is true for resources that do not announce a run to runners.
pub(super) fn no_announcement_condition() -> String {
    let start = format!("{{\"{ANNOUNCEMENT_KEY}\"");
    format!("substr(value, 1, {}) <> '{start}'", start.len())
}

/// Columns that [`parse_span`] reads.
pub(super) const SPAN: &str = "r.id, t.id, s.number, s.body";

/// Reads and writes a status by its name.
macro_rules! by_name {
    ($($status:ident),*) => {$(
        impl FromSql for $status {
            fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
                $status::from_name(value.as_str()?).ok_or(FromSqlError::InvalidType)
            }
        }
        impl ToSql for $status {
            fn to_sql(&self) -> rusqlite::Result<rusqlite::types::ToSqlOutput<'_>> {
                self.name().to_sql()
            }
        }
    )*};
}

by_name!(RolloutStatus, TryStatus, WorkerStatus);

/// A column that contains JSON text.
pub(super) struct JsonColumn(pub Json);

impl FromSql for JsonColumn {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let text = value.as_str()?.to_owned();
        RawValue::from_string(text)
            .map(JsonColumn)
            .map_err(|error| FromSqlError::Other(error.into()))
    }
}

fn read_json(row: &Row<'_>, index: usize) -> rusqlite::Result<Option<Json>> {
    Ok(row.get::<_, Option<JsonColumn>>(index)?.map(|column| column.0))
}

/// Reads the configuration of a rollout from the four columns that start at `index`.
pub(super) fn parse_config(row: &Row<'_>, index: usize) -> rusqlite::Result<RolloutConfig> {
    let retry_on = row.get_ref(index + 3)?.as_str()?;
    let retry_on =
        serde_json::from_str(retry_on).map_err(|error| FromSqlError::Other(error.into()))?;
    Ok(RolloutConfig {
        timeout_seconds: row.get(index)?,
        unresponsive_seconds: row.get(index + 1)?,
        max_tries: row.get(index + 2)?,
        retry_on,
    })
}

/// Reads a rollout from the columns [`ROLLOUT`].
pub(super) fn parse_rollout(row: &Row<'_>) -> rusqlite::Result<Rollout> {
    let has_try = row.get_ref(16)? != ValueRef::Null;
    Ok(Rollout {
        id: row.get(0)?,
        input: row.get::<_, JsonColumn>(1)?.0,
        start_time: row.get(2)?,
        end_time: row.get(3)?,
        mode: row.get(4)?,
        resources_id: row.get(5)?,
        status: row.get(6)?,
        config: parse_config(row, 7)?,
        metadata: read_json(row, 11)?,
        queue: row.get(12)?,
        priority: row.get(13)?,
        key: row.get(14)?,
        changed: row.get::<_, i64>(15)? as u64,
        latest_try: has_try.then(|| parse_try_at(row, 16)).transpose()?,
    })
}

/// Reads a try from the columns [`TRY`].
pub(super) fn parse_try(row: &Row<'_>) -> rusqlite::Result<Try> {
    parse_try_at(row, 0)
}

fn parse_try_at(row: &Row<'_>, index: usize) -> rusqlite::Result<Try> {
    Ok(Try {
        id: row.get(index)?,
        rollout_id: row.get(index + 1)?,
        number: row.get(index + 2)?,
        start_time: row.get(index + 3)?,
        end_time: row.get(index + 4)?,
        status: row.get(index + 5)?,
        worker_id: row.get(index + 6)?,
        last_heartbeat_time: row.get(index + 7)?,
        metadata: read_json(row, index + 8)?,
    })
}

/// Reads a worker from the columns [`WORKER`].
pub(super) fn parse_worker(row: &Row<'_>) -> rusqlite::Result<Worker> {
    Ok(Worker {
        id: row.get(0)?,
        status: row.get(1)?,
        heartbeat_stats: read_json(row, 2)?,
        last_heartbeat_time: row.get(3)?,
        last_dequeue_time: row.get(4)?,
        last_busy_time: row.get(5)?,
        last_idle_time: row.get(6)?,
        current_rollout_id: row.get(7)?,
        current_try_id: row.get(8)?,
    })
}

/// Reads resources from the columns [`RESOURCES`].
pub(super) fn parse_resources(row: &Row<'_>) -> rusqlite::Result<Resources> {
    Ok(Resources {
        id: row.get(0)?,
        create_time: row.get(1)?,
        update_time: row.get(2)?,
        version: row.get::<_, i64>(3)? as u64,
        value: row.get::<_, JsonColumn>(4)?.0,
    })
}

/// Reads a span from the columns [`SPAN`].
pub(super) fn parse_span(row: &Row<'_>) -> rusqlite::Result<Span> {
    Ok(Span {
        rollout_id: row.get(0)?,
        try_id: row.get(1)?,
        number: row.get::<_, i64>(2)? as u64,
        body: row.get::<_, JsonColumn>(3)?.0,
    })
}
