//! Writes of resources and workers.

use rusqlite::{OptionalExtension, params};

use super::control::CallContext;
use super::rows;
use crate::error::Failure;
use crate::rollouts::{Json, Resources, Worker};

/// Adds a version of the resources with the id `id`. If `id` is `None`, an id is generated.
pub(super) fn put_resources(
    call: CallContext<'_>,
    id: Option<&str>,
    value: &Json,
) -> Result<Resources, Failure> {
    let generated;
    let id = match id {
        Some(id) => id,
        None => {
            generated = new_resources_id(call)?;
            &generated
        }
    };
    let sql = "UPDATE resources SET latest = 0 WHERE id = ?1 AND latest = 1 RETURNING version, first, create_time";
    let mut previous = call.db.prepare_cached(sql)?;
    let previous = previous
        .query_row([id], |row| {
            Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?, row.get::<_, f64>(2)?))
        })
        .optional()?;
    let (version, first, create_time) = match previous {
        Some((version, first, create_time)) => (version + 1, Some(first), create_time),
        None => (1, None, call.now),
    };
    let sql = "INSERT INTO resources (id, version, first, latest, create_time, update_time, value)
               VALUES (?1, ?2, coalesce(?3, (SELECT coalesce(max(seq), 0) + 1 FROM resources)), 1, ?4, ?5, ?6)";
    let mut insert = call.db.prepare_cached(sql)?;
    insert.execute(params![id, version, first, create_time, call.now, value.get()])?;
    Ok(Resources {
        id: id.to_owned(),
        create_time,
        update_time: call.now,
        version: version as u64,
        value: value.clone(),
    })
}

/// Generates an unused id for resources. Clients expect `rs-` and 12 digits.
fn new_resources_id(call: CallContext<'_>) -> Result<String, Failure> {
    loop {
        let sql = "SELECT 'rs-' || lower(hex(randomblob(6)))";
        let id: String = call.db.prepare_cached(sql)?.query_row([], |row| row.get(0))?;
        let sql = "SELECT EXISTS (SELECT 1 FROM resources WHERE id = ?1)";
        if !call.db.prepare_cached(sql)?.query_row([&id], |row| row.get::<_, bool>(0))? {
            return Ok(id);
        }
    }
}

/// Records a heartbeat of a worker. If `stats` is `None`, the previous statistics are kept.
pub(super) fn record_worker_heartbeat(
    call: CallContext<'_>,
    id: &str,
    stats: Option<&Json>,
) -> Result<Worker, Failure> {
    let sql = format!(
        "INSERT INTO workers (id, stats, heartbeat) VALUES (?1, ?2, ?3)
         ON CONFLICT (id) DO UPDATE SET stats = coalesce(excluded.stats, stats), heartbeat = excluded.heartbeat
         RETURNING {}",
        rows::WORKER
    );
    let stats = stats.map(|stats| stats.get());
    Ok(call.db.prepare_cached(&sql)?.query_row(params![id, stats, call.now], rows::parse_worker)?)
}
