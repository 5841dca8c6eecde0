//! Creation, leases and cancellation of rollouts.

use rusqlite::{OptionalExtension, named_params, params, params_from_iter};

use super::control::{CallContext, StoredRollout, next_change_number, to_failure};
use super::rows;
use crate::error::Failure;
use crate::rollouts::state::{QueuePosition, check_config};
use crate::rollouts::{
    LeaseRequest, NewRollout, Rollout, RolloutConfig, RolloutError, RolloutStatus,
};

/// Time in seconds for which the leases of a request are kept for a repetition of the request. It
/// must exceed the time in which a client repeats a request after a lost response.
const REPEAT_SECONDS: f64 = 3600.0;

/// Appends rollouts to their queues. For an id or a key that is already known, returns the existing
/// rollout.
pub(super) fn enqueue_rollouts(
    call: CallContext<'_>,
    new: &[NewRollout],
) -> Result<Vec<Rollout>, Failure> {
    let latest = read_latest_resources_id(call)?;
    new.iter().map(|new| Ok(create_rollout(call, new, latest.as_deref())?.0)).collect()
}

/// Creates a rollout and starts its first try.
pub(super) fn start_rollout(
    call: CallContext<'_>,
    new: &NewRollout,
    worker: Option<&str>,
) -> Result<Rollout, Failure> {
    let latest = read_latest_resources_id(call)?;
    let (rollout, is_new) = create_rollout(call, new, latest.as_deref())?;
    if !is_new {
        let key = new.key.clone().or_else(|| new.id.clone()).unwrap_or_default();
        return Err(to_failure(RolloutError::Conflict { key, rollout_id: rollout.id }));
    }
    start_try(call, &rollout.id, worker)
}

/// Starts another try of the rollout with the id `id`.
pub(super) fn start_try(
    call: CallContext<'_>,
    id: &str,
    worker: Option<&str>,
) -> Result<Rollout, Failure> {
    let mut rollout = StoredRollout::get(call, id)?;
    rollout.start_try(call, worker, None)?;
    rollout.save(call)?;
    rollout.sync_latest(call, false)?;
    rollout.load_rollout(call)
}

fn read_latest_resources_id(call: CallContext<'_>) -> Result<Option<String>, Failure> {
    let no_announcement = rows::no_announcement_condition();
    let sql = format!("SELECT id FROM resources WHERE {no_announcement} ORDER BY seq DESC LIMIT 1");
    Ok(call.db.prepare_cached(&sql)?.query_row([], |row| row.get(0)).optional()?)
}

/// Appends a rollout to its queue. Returns the new rollout and `true`, or the existing rollout with
/// the same id or key and `false`.
fn create_rollout(
    call: CallContext<'_>,
    new: &NewRollout,
    latest_resources: Option<&str>,
) -> Result<(Rollout, bool), Failure> {
    check_config(&new.config).map_err(to_failure)?;
    let find = |column: &str, value: &str| {
        let sql =
            format!("SELECT {} FROM {} WHERE r.{column} = ?1", rows::ROLLOUT, rows::ROLLOUT_FROM);
        call.db.prepare_cached(&sql)?.query_row([value], rows::parse_rollout).optional()
    };
    if let Some(id) = &new.id
        && let Some(known) = find("id", id)?
    {
        return Ok((known, false));
    }
    if let Some(key) = &new.key
        && let Some(known) = find("key", key)?
    {
        return if known.input.get() == new.input.get() {
            Ok((known, false))
        } else {
            Err(to_failure(RolloutError::Conflict { key: key.clone(), rollout_id: known.id }))
        };
    }
    let change = next_change_number(call)?;
    let resources_id = new.resources_id.as_deref().or(latest_resources);
    let metadata = new.metadata.as_ref().map_or("{}", |metadata| metadata.get());
    let sql = "INSERT INTO rollouts (id, key, queue, priority, enqueued, queued, status, input, mode, resources_id, timeout,
                   unresponsive, max_tries, retry_on, metadata, start_time, changed)
               VALUES (coalesce(:id, 'ro-' || lower(hex(randomblob(8)))), :key, :queue, :priority, :change, 1, :status, :input, :mode,
                   :resources, :timeout, :unresponsive, :max_tries, :retry_on, :metadata, :now, :change) RETURNING id";
    let id: String = call.db.prepare_cached(sql)?.query_row(
        named_params! {
            ":id": new.id,
            ":key": new.key,
            ":queue": new.queue,
            ":priority": new.priority,
            ":change": change,
            ":status": RolloutStatus::Queuing,
            ":input": new.input.get(),
            ":mode": new.mode,
            ":resources": resources_id,
            ":timeout": new.config.timeout_seconds,
            ":unresponsive": new.config.unresponsive_seconds,
            ":max_tries": new.config.max_tries,
            ":retry_on": retry_statuses_json(&new.config),
            ":metadata": metadata,
            ":now": call.now,
        },
        |row| row.get(0),
    )?;
    let rollout = Rollout {
        id,
        input: new.input.clone(),
        start_time: call.now,
        end_time: None,
        mode: new.mode.clone(),
        resources_id: resources_id.map(str::to_owned),
        status: RolloutStatus::Queuing,
        config: new.config.clone(),
        metadata: serde_json::value::RawValue::from_string(metadata.to_owned()).ok(),
        queue: new.queue.clone(),
        priority: new.priority,
        key: new.key.clone(),
        changed: change as u64,
        latest_try: None,
    };
    Ok((rollout, true))
}

/// Returns the statuses after which a rollout is queued again, as a JSON array.
pub(super) fn retry_statuses_json(config: &RolloutConfig) -> String {
    let names = config.retry_on.iter().map(|status| format!("\"{}\"", status.name()));
    format!("[{}]", names.collect::<Vec<_>>().join(","))
}

/// Leases at most [`LeaseRequest::max`] rollouts, the oldest first within a priority. If a request
/// is repeated, returns the leases that it made before.
pub(super) fn lease_rollouts(
    call: CallContext<'_>,
    request: &LeaseRequest,
) -> Result<Vec<Rollout>, Failure> {
    if let Some(key) = &request.key {
        let leased = find_repeated_leases(call, key)?;
        if !leased.is_empty() {
            return Ok(leased);
        }
    }
    // A queue is read along its index; several queues are merged here.
    let mut found: Vec<(i32, i64, StoredRollout)> = Vec::new();
    let sql = format!(
        "SELECT {}, r.priority FROM {} WHERE r.queued = 1 AND r.queue = ?1 ORDER BY r.priority DESC, r.enqueued LIMIT ?2",
        StoredRollout::columns(),
        rows::ROLLOUT_FROM
    );
    let mut oldest = call.db.prepare_cached(&sql)?;
    for queue in &request.queues {
        let rows = oldest.query_map((queue, request.max as i64), |row| {
            let found = StoredRollout::read(row)?;
            Ok((row.get("priority")?, found.enqueued, found))
        })?;
        for row in rows {
            found.push(row?);
        }
    }
    found.sort_by_key(|(priority, enqueued, _)| (-i64::from(*priority), *enqueued));
    found.truncate(request.max);
    let worker = request.worker.as_deref();
    let ttl = request.ttl.map(|ttl| ttl.as_secs_f64());
    let mut leased = Vec::new();
    for (.., mut rollout) in found {
        rollout.start_try(call, worker, ttl)?;
        rollout.save(call)?;
        leased.push(rollout);
    }
    if let Some(key) = request.key.as_ref().filter(|_| !leased.is_empty()) {
        remember_leases(call, key, &leased)?;
    }
    match (leased.last(), worker) {
        // A worker is associated with one try: the last one.
        (Some(last), Some(_)) => last.sync_latest(call, true)?,
        (None, Some(worker)) => mark_worker_idle(call, worker)?,
        _ => {}
    }
    leased.iter().map(|rollout| rollout.load_rollout(call)).collect()
}

/// Returns the rollouts that an earlier request with the same key leased and that are still in
/// progress.
fn find_repeated_leases(call: CallContext<'_>, key: &str) -> Result<Vec<Rollout>, Failure> {
    let sql = format!(
        "SELECT {} FROM lease_requests l CROSS JOIN {} WHERE l.key = ?1 AND r.seq = l.rollout
             AND r.tries = l.number AND r.status IN ('preparing', 'running') ORDER BY l.seq",
        rows::ROLLOUT,
        rows::ROLLOUT_FROM
    );
    let mut leased = call.db.prepare_cached(&sql)?;
    let leased = leased.query_map([key], rows::parse_rollout)?;
    Ok(leased.collect::<Result<_, _>>()?)
}

/// Stores the leases of a request under its key, and deletes the leases of expired requests.
fn remember_leases(
    call: CallContext<'_>,
    key: &str,
    leased: &[StoredRollout],
) -> Result<(), Failure> {
    let sql = "DELETE FROM lease_requests WHERE time < ?1";
    call.db.prepare_cached(sql)?.execute([call.now - REPEAT_SECONDS])?;
    let sql = "INSERT INTO lease_requests (key, rollout, number, time) VALUES (?1, ?2, ?3, ?4)";
    let mut insert = call.db.prepare_cached(sql)?;
    for rollout in leased {
        insert.execute(params![key, rollout.seq, rollout.state.started, call.now])?;
    }
    Ok(())
}

/// Returns whether a rollout waits in one of the queues, or an earlier copy of the request has
/// leased a rollout. A repeated request can arrive while the first one still waits.
pub(super) fn can_lease(call: CallContext<'_>, request: &LeaseRequest) -> Result<bool, Failure> {
    let marks = vec!["?"; request.queues.len()].join(", ");
    let sql = format!(
        "SELECT EXISTS (SELECT 1 FROM rollouts WHERE queued = 1 AND queue IN ({marks}))
             OR EXISTS (SELECT 1 FROM lease_requests WHERE key = ?)"
    );
    let values = request.queues.iter().map(Some).chain([request.key.as_ref()]);
    Ok(call.db.prepare_cached(&sql)?.query_row(params_from_iter(values), |row| row.get(0))?)
}

/// Records that a worker requested a lease and found no rollout.
fn mark_worker_idle(call: CallContext<'_>, worker: &str) -> Result<(), Failure> {
    let sql = "INSERT INTO workers (id, status, dequeue, idle) VALUES (?1, 'idle', ?2, ?2)
               ON CONFLICT (id) DO UPDATE SET dequeue = ?2, idle = CASE status WHEN 'idle' THEN idle ELSE ?2 END,
                   status = 'idle', current_rollout = NULL, current_try = NULL";
    call.db.prepare_cached(sql)?.execute((worker, call.now))?;
    Ok(())
}

/// Cancels the rollouts in `ids` that have not ended, and returns the number of cancelled rollouts.
pub(super) fn cancel_rollouts(call: CallContext<'_>, ids: &[String]) -> Result<u64, Failure> {
    let mut cancelled = 0;
    for id in ids {
        if let Some(mut rollout) = StoredRollout::find(call, id)?
            && !rollout.state.status.is_finished()
        {
            rollout.state.set_status(RolloutStatus::Cancelled, QueuePosition::Old, call.now);
            rollout.save(call)?;
            cancelled += 1;
        }
    }
    Ok(cancelled)
}
