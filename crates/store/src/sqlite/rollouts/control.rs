//! The state machine of a rollout and its latest try.

use rusqlite::{Connection, OptionalExtension, Row, named_params, params};

use super::rows;
use crate::error::Failure;
use crate::rollouts::{
    Rollout, RolloutConfig, RolloutError, RolloutStatus, TryStatus, WorkerStatus,
};

/// One call: its transaction and its time.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub db: &'a Connection,
    pub now: f64,
}

/// Converts an error of the caller to a failure of the operation.
pub(super) fn reject(error: RolloutError) -> Failure {
    Failure::Backend(error.code(), error.into())
}

/// The fields of a try that the state machine reads and writes.
#[derive(Debug, Clone)]
pub(super) struct TryState {
    pub seq: i64,
    pub id: String,
    pub number: u32,
    pub status: TryStatus,
    pub worker: Option<String>,
    pub start_time: f64,
    pub end_time: Option<f64>,
    pub heartbeat: Option<f64>,
    pub ttl: Option<f64>,
    pub released: bool,
}

impl TryState {
    /// Columns of [`TryState::read`]. `t` is the try.
    const COLUMNS: &'static str = "t.seq, t.id, t.number, t.status, t.worker, t.start_time, t.end_time, t.heartbeat, t.ttl, \
         t.released";

    fn read(row: &Row<'_>, index: usize) -> rusqlite::Result<Self> {
        Ok(TryState {
            seq: row.get(index)?,
            id: row.get(index + 1)?,
            number: row.get(index + 2)?,
            status: row.get(index + 3)?,
            worker: row.get(index + 4)?,
            start_time: row.get(index + 5)?,
            end_time: row.get(index + 6)?,
            heartbeat: row.get(index + 7)?,
            ttl: row.get(index + 8)?,
            released: row.get(index + 9)?,
        })
    }

    /// Returns the time at which the try becomes unresponsive if no report arrives.
    pub fn report_until(&self, config: &RolloutConfig) -> Option<f64> {
        let least = |a: Option<f64>, b: Option<f64>| a.into_iter().chain(b).reduce(f64::min);
        let seconds = least(config.unresponsive_seconds, self.ttl)?;
        Some(self.heartbeat.unwrap_or(self.start_time) + seconds)
    }

    /// Returns the time at which the try times out.
    fn timeout_at(&self, config: &RolloutConfig) -> Option<f64> {
        Some(self.start_time + config.timeout_seconds?)
    }

    /// Returns the status that the try has after its timeouts, if one has passed at `now`.
    pub fn expired(&self, config: &RolloutConfig, now: f64) -> Option<TryStatus> {
        let is_past = |at: Option<f64>| at.is_some_and(|at| now > at);
        if is_past(self.timeout_at(config)) {
            Some(TryStatus::Timeout)
        } else {
            is_past(self.report_until(config)).then_some(TryStatus::Unresponsive)
        }
    }

    /// Writes the fields that change.
    pub fn save(&self, call: Call<'_>) -> Result<(), Failure> {
        let sql = "UPDATE tries SET status = ?2, worker = ?3, end_time = ?4, heartbeat = ?5, released = ?6 WHERE seq = ?1";
        call.db.prepare_cached(sql)?.execute(params![
            self.seq,
            self.status,
            self.worker,
            self.end_time,
            self.heartbeat,
            self.released
        ])?;
        Ok(())
    }
}

/// The fields of a rollout that the state machine reads and writes.
#[derive(Debug, Clone)]
pub(super) struct RolloutState {
    pub seq: i64,
    pub id: String,
    pub status: RolloutStatus,
    pub config: RolloutConfig,
    pub tries: u32,
    pub released: u32,
    pub enqueued: i64,
    pub end_time: Option<f64>,
    pub latest: Option<TryState>,
    /// Time until which timeouts were last computed.
    expires: Option<f64>,
    /// Whether a change must be announced.
    pub is_changed: bool,
}

/// Position in the queue of a rollout that is queued again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueuePosition {
    /// The position that the rollout had.
    Old,
    /// The end of the queue.
    End,
}

impl RolloutState {
    /// Returns the state of a rollout, or `None` if it does not exist.
    pub fn find(call: Call<'_>, id: &str) -> Result<Option<Self>, Failure> {
        let sql = format!("SELECT {} FROM {} WHERE r.id = ?1", Self::columns(), rows::ROLLOUT_FROM);
        Ok(call.db.prepare_cached(&sql)?.query_row([id], Self::read).optional()?)
    }

    /// Returns the state of a rollout.
    ///
    /// # Errors
    /// Returns [`RolloutError::UnknownRollout`] if the rollout does not exist.
    pub fn get(call: Call<'_>, id: &str) -> Result<Self, Failure> {
        let unknown = || reject(RolloutError::UnknownRollout { rollout_id: id.to_owned() });
        Self::find(call, id)?.ok_or_else(unknown)
    }

    /// Columns of [`RolloutState::read`], from [`rows::ROLLOUT_FROM`].
    pub fn columns() -> String {
        format!(
            "r.seq, r.id, r.status, r.timeout, r.unresponsive, r.max_tries, r.retry_on, r.tries, r.released, r.enqueued, \
             r.end_time, r.expires, {}",
            TryState::COLUMNS
        )
    }

    pub fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        let tries = row.get(7)?;
        Ok(RolloutState {
            seq: row.get(0)?,
            id: row.get(1)?,
            status: row.get(2)?,
            config: rows::config(row, 3)?,
            tries,
            released: row.get(8)?,
            enqueued: row.get(9)?,
            end_time: row.get(10)?,
            expires: row.get(11)?,
            latest: if tries == 0 { None } else { Some(TryState::read(row, 12)?) },
            is_changed: false,
        })
    }

    /// Returns the try with this id, or `None` if there is none.
    pub fn find_try(&self, call: Call<'_>, id: &str) -> Result<Option<TryState>, Failure> {
        if let Some(latest) = self.latest.as_ref().filter(|latest| latest.id == id) {
            return Ok(Some(latest.clone()));
        }
        let sql =
            format!("SELECT {} FROM tries t WHERE t.rollout = ?1 AND t.id = ?2", TryState::COLUMNS);
        let read = |row: &Row<'_>| TryState::read(row, 0);
        Ok(call.db.prepare_cached(&sql)?.query_row(params![self.seq, id], read).optional()?)
    }

    /// Sets the status, with what follows from it: the end, and the place in the queue.
    pub fn set_status(
        &mut self,
        call: Call<'_>,
        status: RolloutStatus,
        position: QueuePosition,
    ) -> Result<(), Failure> {
        if status.is_queued() && !self.status.is_queued() && position == QueuePosition::End {
            self.enqueued = next_change(call)?;
        }
        self.end_time = status.is_finished().then_some(call.now);
        self.status = status;
        self.is_changed = true;
        Ok(())
    }

    /// Sets the status that follows from the status of the latest try. A cancelled rollout keeps
    /// its own.
    pub fn follow(&mut self, call: Call<'_>, status: TryStatus) -> Result<(), Failure> {
        let next = match status {
            TryStatus::Preparing => RolloutStatus::Preparing,
            TryStatus::Running => RolloutStatus::Running,
            TryStatus::Succeeded => RolloutStatus::Succeeded,
            TryStatus::Failed | TryStatus::Timeout | TryStatus::Unresponsive => {
                let has_tries = self.tries.saturating_sub(self.released) < self.config.max_tries;
                if has_tries && self.config.retry_on.contains(&status) {
                    RolloutStatus::Requeuing
                } else {
                    RolloutStatus::Failed
                }
            }
        };
        if self.status == RolloutStatus::Cancelled || self.status == next {
            return Ok(());
        }
        self.set_status(call, next, QueuePosition::Old)
    }

    /// Starts a try, which becomes the latest one.
    pub fn start_try(
        &mut self,
        call: Call<'_>,
        worker: Option<&str>,
        ttl: Option<f64>,
    ) -> Result<(), Failure> {
        let number = self.tries + 1;
        let sql = "INSERT INTO tries (rollout, number, id, status, worker, start_time, ttl)
                   VALUES (?1, ?2, 'at-' || lower(hex(randomblob(6))), 'preparing', ?3, ?4, ?5) RETURNING seq, id";
        let mut insert = call.db.prepare_cached(sql)?;
        let (seq, id) = insert
            .query_row(params![self.seq, number, worker, call.now, ttl], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })?;
        self.tries = number;
        self.latest = Some(TryState {
            seq,
            id,
            number,
            status: TryStatus::Preparing,
            worker: worker.map(str::to_owned),
            start_time: call.now,
            end_time: None,
            heartbeat: None,
            ttl,
            released: false,
        });
        self.set_status(call, RolloutStatus::Preparing, QueuePosition::Old)
    }

    /// Records a report of a try: the time, and that a preparing or unresponsive try runs. The
    /// rollout follows if the try is the latest one. A try that timed out, ended or was released is
    /// not revived.
    pub fn report(&mut self, call: Call<'_>, of: &mut TryState) -> Result<(), Failure> {
        of.heartbeat = Some(call.now);
        let is_revived = of.status == TryStatus::Unresponsive && !of.released;
        if is_revived || of.status == TryStatus::Preparing {
            of.status = TryStatus::Running;
        }
        of.save(call)?;
        if self.latest.as_ref().is_some_and(|latest| latest.seq == of.seq) {
            self.latest = Some(of.clone());
            let follows = match self.status {
                RolloutStatus::Preparing => of.status == TryStatus::Running,
                RolloutStatus::Requeuing => is_revived,
                _ => false,
            };
            if follows {
                self.set_status(call, RolloutStatus::Running, QueuePosition::Old)?;
            }
        }
        Ok(())
    }

    /// Writes the fields that change. A change of more than the timeout gets a sequence number.
    pub fn save(&mut self, call: Call<'_>) -> Result<(), Failure> {
        let latest = self.latest.as_ref().filter(|_| self.status.is_active());
        let ends = latest
            .map(|latest| [latest.timeout_at(&self.config), latest.report_until(&self.config)]);
        let expires = ends.into_iter().flatten().flatten().reduce(f64::min);
        if self.is_changed {
            let sql = "UPDATE rollouts SET status = :status, queued = :queued, enqueued = :enqueued, end_time = :end_time,
                           tries = :tries, released = :released, expires = :expires, changed = :changed WHERE seq = :seq";
            call.db.prepare_cached(sql)?.execute(named_params! {
                ":seq": self.seq,
                ":status": self.status,
                ":queued": self.status.is_queued(),
                ":enqueued": self.enqueued,
                ":end_time": self.end_time,
                ":tries": self.tries,
                ":released": self.released,
                ":expires": expires,
                ":changed": next_change(call)?,
            })?;
        } else if expires != self.expires {
            let sql = "UPDATE rollouts SET expires = ?2 WHERE seq = ?1";
            call.db.prepare_cached(sql)?.execute(params![self.seq, expires])?;
        }
        self.expires = expires;
        Ok(())
    }

    /// Reads the complete rollout.
    pub fn load(&self, call: Call<'_>) -> Result<Rollout, Failure> {
        let sql = format!("SELECT {} FROM {} WHERE r.seq = ?1", rows::ROLLOUT, rows::ROLLOUT_FROM);
        Ok(call.db.prepare_cached(&sql)?.query_row([self.seq], rows::rollout)?)
    }
}

/// Returns the next sequence number of changes, which is also the end of every queue.
pub(super) fn next_change(call: Call<'_>) -> Result<i64, Failure> {
    let sql = "SELECT coalesce(max(changed), 0) + 1 FROM rollouts";
    Ok(call.db.prepare_cached(sql)?.query_row([], |row| row.get(0))?)
}

/// Brings the worker of a try up to date with the status of the try. `is_lease` states that the
/// worker has just leased it.
pub(super) fn sync_worker(
    call: Call<'_>,
    rollout_id: &str,
    of: &TryState,
    is_lease: bool,
) -> Result<(), Failure> {
    let Some(worker) = of.worker.as_deref().filter(|worker| !worker.is_empty()) else {
        return Ok(());
    };
    let status = match of.status {
        TryStatus::Succeeded | TryStatus::Failed => WorkerStatus::Idle,
        TryStatus::Timeout | TryStatus::Unresponsive if of.released => WorkerStatus::Idle,
        TryStatus::Timeout | TryStatus::Unresponsive => WorkerStatus::Unknown,
        TryStatus::Preparing | TryStatus::Running => WorkerStatus::Busy,
    };
    let is_busy = status == WorkerStatus::Busy;
    let sql = "INSERT INTO workers (id, status, dequeue, busy, idle, current_rollout, current_try)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
               ON CONFLICT (id) DO UPDATE SET status = excluded.status, dequeue = coalesce(excluded.dequeue, dequeue),
                   busy = coalesce(excluded.busy, busy), idle = coalesce(excluded.idle, idle),
                   current_rollout = excluded.current_rollout, current_try = excluded.current_try";
    call.db.prepare_cached(sql)?.execute(params![
        worker,
        status,
        is_lease.then_some(call.now),
        is_busy.then_some(call.now),
        (!is_busy).then_some(call.now),
        is_busy.then_some(rollout_id),
        is_busy.then_some(&of.id),
    ])?;
    Ok(())
}
