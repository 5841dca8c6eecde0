//! Reports about rollouts and tries: heartbeats, ends, updates and timeouts.

use rusqlite::{named_params, params};

use super::control::{Call, QueuePosition, RolloutState, TryState, reject, sync_worker};
use super::queue::{check_config, retry_text};
use super::rows;
use crate::WriteOutcome;
use crate::error::Failure;
use crate::rollouts::{
    Json, Lease, LeaseEnd, Rollout, RolloutError, RolloutStatus, RolloutUpdate, Try, TryName,
    TryStatus, TryUpdate,
};

/// Creates the failure of a call whose lease no longer counts.
fn lost(lease: &Lease, reason: String) -> Failure {
    let rollout_id = lease.rollout_id.clone();
    reject(RolloutError::Lost { rollout_id, number: lease.number, reason })
}

/// Returns the latest try of a rollout if it is the one that `lease` names and no end of it counts
/// yet.
fn current_try(rollout: &RolloutState, lease: &Lease) -> Result<TryState, Failure> {
    let Some(latest) = rollout.latest.clone().filter(|latest| latest.number == lease.number) else {
        return Err(lost(lease, format!("try {} has started", rollout.tries)));
    };
    if rollout.status == RolloutStatus::Cancelled {
        return Err(lost(lease, "the rollout was cancelled".to_owned()));
    }
    if latest.released {
        return Err(lost(lease, "its worker released it".to_owned()));
    }
    Ok(latest)
}

/// Records that a try is in progress. Returns the time until which the next report must arrive, and
/// whether the status of the rollout changed.
pub(super) fn heartbeat(call: Call<'_>, lease: &Lease) -> Result<(Option<f64>, bool), Failure> {
    let mut rollout = RolloutState::get(call, &lease.rollout_id)?;
    let mut latest = current_try(&rollout, lease)?;
    let is_late =
        latest.status == TryStatus::Unresponsive && rollout.status != RolloutStatus::Requeuing;
    if is_late
        || !matches!(
            latest.status,
            TryStatus::Preparing | TryStatus::Running | TryStatus::Unresponsive
        )
    {
        return Err(lost(lease, format!("the try is {}", latest.status.name())));
    }
    rollout.report(call, &mut latest)?;
    rollout.save(call)?;
    Ok((latest.report_until(&rollout.config), rollout.is_changed))
}

/// Ends a lease.
pub(super) fn finish(
    call: Call<'_>,
    lease: &Lease,
    end: LeaseEnd,
    metadata: Option<&Json>,
) -> Result<WriteOutcome, Failure> {
    let mut rollout = RolloutState::get(call, &lease.rollout_id)?;
    let status = match end {
        LeaseEnd::Succeeded => TryStatus::Succeeded,
        LeaseEnd::Failed => TryStatus::Failed,
        LeaseEnd::Released => TryStatus::Unresponsive,
    };
    let is_end = |of: &TryState| match end {
        LeaseEnd::Released => of.released,
        _ => of.status == status,
    };
    let is_repeated = |of: &TryState| of.number == lease.number && is_end(of);
    if rollout.latest.as_ref().is_some_and(is_repeated) {
        return Ok(WriteOutcome::AlreadyRecorded);
    }
    let mut latest = current_try(&rollout, lease)?;
    let is_open = match latest.status {
        TryStatus::Preparing | TryStatus::Running => true,
        TryStatus::Unresponsive => rollout.status == RolloutStatus::Requeuing,
        _ => false,
    };
    if !is_open {
        return Err(lost(lease, format!("the try is {}", latest.status.name())));
    }
    latest.status = status;
    latest.end_time = Some(call.now);
    if end == LeaseEnd::Released {
        latest.released = true;
        rollout.released += 1;
        rollout.set_status(call, RolloutStatus::Requeuing, QueuePosition::Old)?;
    } else {
        rollout.follow(call, status)?;
    }
    latest.save(call)?;
    if let Some(metadata) = metadata {
        set_metadata(call, &latest, metadata)?;
    }
    sync_worker(call, &rollout.id, &latest, false)?;
    rollout.latest = Some(latest);
    rollout.save(call)?;
    Ok(WriteOutcome::Written)
}

fn set_metadata(call: Call<'_>, of: &TryState, metadata: &Json) -> Result<(), Failure> {
    let sql = "UPDATE tries SET metadata = ?2 WHERE seq = ?1";
    call.db.prepare_cached(sql)?.execute(params![of.seq, metadata.get()])?;
    Ok(())
}

/// Replaces fields of a try. Its rollout follows if the try is the latest one.
pub(super) fn update_try(
    call: Call<'_>,
    rollout_id: &str,
    name: &TryName,
    update: &TryUpdate,
) -> Result<Try, Failure> {
    let mut rollout = RolloutState::get(call, rollout_id)?;
    let no_tries = || reject(RolloutError::NoTries { rollout_id: rollout_id.to_owned() });
    let latest = rollout.latest.clone().ok_or_else(no_tries)?;
    let mut of = match name {
        TryName::Latest => latest.clone(),
        TryName::Id(id) => {
            let unknown = || RolloutError::UnknownTry {
                rollout_id: rollout_id.to_owned(),
                try_id: id.clone(),
            };
            rollout.find_try(call, id)?.ok_or_else(|| reject(unknown()))?
        }
    };
    let mut needs_sync = false;
    if let Some(worker) = &update.worker_id {
        of.worker = Some(worker.clone());
        needs_sync |= !worker.is_empty();
    }
    if let Some(status) = update.status {
        of.status = status;
        if matches!(status, TryStatus::Failed | TryStatus::Succeeded) {
            of.end_time = Some(call.now);
        }
        needs_sync |= of.worker.as_ref().is_some_and(|worker| !worker.is_empty());
    }
    of.heartbeat = update.last_heartbeat_time.or(of.heartbeat);
    of.save(call)?;
    if let Some(metadata) = &update.metadata {
        set_metadata(call, &of, metadata)?;
    }
    if of.seq == latest.seq {
        rollout.latest = Some(of.clone());
        rollout.follow(call, of.status)?;
        rollout.save(call)?;
    }
    if needs_sync {
        sync_worker(call, rollout_id, &of, false)?;
    }
    load_try(call, &of)
}

/// Reads a complete try.
fn load_try(call: Call<'_>, of: &TryState) -> Result<Try, Failure> {
    let sql = format!(
        "SELECT {} FROM tries t JOIN rollouts r ON r.seq = t.rollout WHERE t.seq = ?1",
        rows::TRY
    );
    Ok(call.db.prepare_cached(&sql)?.query_row([of.seq], rows::attempt)?)
}

/// Replaces fields of a rollout.
pub(super) fn update_rollout(
    call: Call<'_>,
    id: &str,
    update: &RolloutUpdate,
) -> Result<Rollout, Failure> {
    let mut rollout = RolloutState::get(call, id)?;
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
        check_config(config)?;
        let sql = "UPDATE rollouts SET timeout = ?2, unresponsive = ?3, max_tries = ?4, retry_on = ?5 WHERE seq = ?1";
        call.db.prepare_cached(sql)?.execute(params![
            rollout.seq,
            config.timeout_seconds,
            config.unresponsive_seconds,
            config.max_tries,
            retry_text(config)
        ])?;
        rollout.config = config.clone();
    }
    rollout.is_changed = true;
    if let Some(status) = update.status {
        rollout.set_status(call, status, QueuePosition::End)?;
    }
    rollout.save(call)?;
    rollout.load(call)
}

/// Returns whether a try has exceeded a timeout.
pub(super) fn has_expired(call: Call<'_>) -> Result<bool, Failure> {
    let sql = "SELECT EXISTS (SELECT 1 FROM rollouts WHERE expires < ?1)";
    Ok(call.db.prepare_cached(sql)?.query_row([call.now], |row| row.get(0))?)
}

/// Ends the tries that exceeded a timeout, and returns them.
pub(super) fn expire(call: Call<'_>) -> Result<Vec<Try>, Failure> {
    let sql = format!(
        "SELECT {} FROM {} WHERE r.expires < ?1 ORDER BY r.expires",
        RolloutState::columns(),
        rows::ROLLOUT_FROM
    );
    let mut query = call.db.prepare_cached(&sql)?;
    let due: Vec<RolloutState> =
        query.query_map([call.now], RolloutState::read)?.collect::<Result<_, _>>()?;
    let mut expired = Vec::new();
    for mut rollout in due {
        let Some(mut latest) = rollout.latest.clone() else { continue };
        if let Some(status) = latest.expired(&rollout.config, call.now) {
            latest.status = status;
            latest.save(call)?;
            rollout.latest = Some(latest.clone());
            rollout.follow(call, status)?;
            sync_worker(call, &rollout.id, &latest, false)?;
            expired.push(load_try(call, &latest)?);
        }
        rollout.save(call)?;
    }
    Ok(expired)
}
