//! Reports about rollouts and tries: heartbeats, ends, updates and timeouts.

use rusqlite::{named_params, params};

use super::control::{CallContext, StoredRollout, StoredTry, save_try, sync_worker, to_failure};
use super::queue::retry_statuses_json;
use super::rows;
use crate::WriteOutcome;
use crate::error::Failure;
use crate::rollouts::state::{QueuePosition, check_config};
use crate::rollouts::{
    Json, Lease, LeaseEnd, Rollout, RolloutError, RolloutUpdate, Try, TrySelector, TryUpdate,
};

/// Records a heartbeat of a worker for the try of `lease`. Returns the time until which the next
/// progress report must arrive (`None` without a timeout), and whether the status of the rollout
/// changed.
pub(super) fn record_heartbeat(
    call: CallContext<'_>,
    lease: &Lease,
) -> Result<(Option<f64>, bool), Failure> {
    let mut rollout = StoredRollout::get(call, &lease.rollout_id)?;
    let until = rollout.state.record_heartbeat(lease, call.now).map_err(to_failure)?;
    rollout.save_latest(call)?;
    Ok((until, rollout.state.is_changed))
}

/// Ends a lease, and with it the try. If `metadata` is set, it replaces the metadata of the try.
pub(super) fn end_lease(
    call: CallContext<'_>,
    lease: &Lease,
    end: LeaseEnd,
    metadata: Option<&Json>,
) -> Result<WriteOutcome, Failure> {
    let mut rollout = StoredRollout::get(call, &lease.rollout_id)?;
    let outcome = rollout.state.end_lease(lease, end, call.now).map_err(to_failure)?;
    if outcome == WriteOutcome::Written {
        rollout.save_latest(call)?;
        if let Some(metadata) = metadata {
            set_metadata(call, rollout.latest_seq, metadata)?;
        }
        rollout.sync_latest(call, false)?;
    }
    Ok(outcome)
}

fn set_metadata(call: CallContext<'_>, seq: i64, metadata: &Json) -> Result<(), Failure> {
    let sql = "UPDATE tries SET metadata = ?2 WHERE seq = ?1";
    call.db.prepare_cached(sql)?.execute(params![seq, metadata.get()])?;
    Ok(())
}

/// Replaces fields of a try. If the try is the latest one, the status of its rollout is updated to
/// match.
pub(super) fn update_try(
    call: CallContext<'_>,
    rollout_id: &str,
    name: &TrySelector,
    update: &TryUpdate,
) -> Result<Try, Failure> {
    let mut rollout = StoredRollout::get(call, rollout_id)?;
    let rollout_id = rollout_id.to_owned();
    if rollout.state.latest.is_none() {
        return Err(to_failure(RolloutError::NoTries { rollout_id }));
    }
    let of = match name {
        TrySelector::Latest => StoredTry::Latest(rollout.latest_seq),
        TrySelector::Id(id) => rollout.find_try(call, id)?.ok_or_else(|| {
            to_failure(RolloutError::UnknownTry { rollout_id, try_id: id.clone() })
        })?,
    };
    let seq = of.seq();
    match of {
        StoredTry::Latest(_) => {
            let needs_sync = rollout.state.update_latest(update, call.now);
            rollout.save_latest(call)?;
            if needs_sync {
                rollout.sync_latest(call, false)?;
            }
        }
        StoredTry::Earlier(_, mut of) => {
            let needs_sync = of.update(update, call.now);
            save_try(call, seq, &of)?;
            if needs_sync {
                sync_worker(call, &rollout.state.id, &of, false)?;
            }
        }
    }
    if let Some(metadata) = &update.metadata {
        set_metadata(call, seq, metadata)?;
    }
    load_try(call, seq)
}

/// Reads all fields of the try in row `seq`.
fn load_try(call: CallContext<'_>, seq: i64) -> Result<Try, Failure> {
    let sql = format!(
        "SELECT {} FROM tries t JOIN rollouts r ON r.seq = t.rollout WHERE t.seq = ?1",
        rows::TRY
    );
    Ok(call.db.prepare_cached(&sql)?.query_row([seq], rows::parse_try)?)
}

/// Replaces fields of the rollout with the id `id`.
pub(super) fn update_rollout(
    call: CallContext<'_>,
    id: &str,
    update: &RolloutUpdate,
) -> Result<Rollout, Failure> {
    let mut rollout = StoredRollout::get(call, id)?;
    let sql =
        "UPDATE rollouts SET input = coalesce(:input, input), mode = iif(:set_mode, :mode, mode),
                   resources_id = iif(:set_resources, :resources, resources_id),
                   metadata = iif(:set_metadata, :metadata, metadata) WHERE seq = :seq";
    call.db.prepare_cached(sql)?.execute(named_params! {
        ":seq": rollout.seq,
        ":input": update.input.as_ref().map(|input| input.get()),
        ":set_mode": update.mode.is_some(),
        ":mode": update.mode.as_ref().and_then(Option::as_ref),
        ":set_resources": update.resources_id.is_some(),
        ":resources": update.resources_id.as_ref().and_then(Option::as_ref),
        ":set_metadata": update.metadata.is_some(),
        ":metadata": update.metadata.as_ref().and_then(Option::as_ref).map(|metadata| metadata.get()),
    })?;
    if let Some(config) = &update.config {
        check_config(config).map_err(to_failure)?;
        let sql = "UPDATE rollouts SET timeout = ?2, unresponsive = ?3, max_tries = ?4, retry_on = ?5 WHERE seq = ?1";
        call.db.prepare_cached(sql)?.execute(params![
            rollout.seq,
            config.timeout_seconds,
            config.unresponsive_seconds,
            config.max_tries,
            retry_statuses_json(config)
        ])?;
        rollout.state.config = config.clone();
    }
    rollout.state.is_changed = true;
    if let Some(status) = update.status {
        rollout.state.set_status(status, QueuePosition::End, call.now);
    }
    rollout.save(call)?;
    rollout.load_rollout(call)
}

/// Returns whether any try has exceeded a timeout.
pub(super) fn has_expired(call: CallContext<'_>) -> Result<bool, Failure> {
    let sql = "SELECT EXISTS (SELECT 1 FROM rollouts WHERE expires < ?1)";
    Ok(call.db.prepare_cached(sql)?.query_row([call.now], |row| row.get(0))?)
}

/// Ends all tries that exceeded a timeout, and returns them.
pub(super) fn expire_tries(call: CallContext<'_>) -> Result<Vec<Try>, Failure> {
    let sql = format!(
        "SELECT {} FROM {} WHERE r.expires < ?1 ORDER BY r.expires",
        StoredRollout::columns(),
        rows::ROLLOUT_FROM
    );
    let mut query = call.db.prepare_cached(&sql)?;
    let due: Vec<StoredRollout> =
        query.query_map([call.now], StoredRollout::read)?.collect::<Result<_, _>>()?;
    let mut expired = Vec::new();
    for mut rollout in due {
        if rollout.state.expire_latest_try(call.now) {
            rollout.save_latest(call)?;
            rollout.sync_latest(call, false)?;
            expired.push(load_try(call, rollout.latest_seq)?);
        } else {
            rollout.save(call)?;
        }
    }
    Ok(expired)
}
