//! Stores rollouts and their tries as rows. [`state`](crate::rollouts::state) defines the
//! transitions between their statuses.

use rusqlite::{Connection, OptionalExtension, Row, named_params, params};

use super::rows;
use crate::error::Failure;
use crate::rollouts::state::{RolloutState, TryState};
use crate::rollouts::{Rollout, RolloutError, WorkerStatus};

/// Context of one call of the rollout store: its transaction and its time.
#[derive(Clone, Copy)]
pub(super) struct CallContext<'a> {
    pub db: &'a Connection,
    pub now: f64,
}

/// Wraps an error of the caller in a failure, from which it is restored later.
pub(super) fn to_failure(error: RolloutError) -> Failure {
    Failure::Backend(error.code(), error.into())
}

/// Columns that [`read_try`] reads from the table of tries, which the query names `t`.
const TRY_COLUMNS: &str = "t.seq, t.id, t.number, t.status, t.worker, t.start_time, t.end_time, t.heartbeat, t.ttl, \
    t.released";

/// Reads a try from the columns that start at `index`. Returns its row id and its state.
fn read_try(row: &Row<'_>, index: usize) -> rusqlite::Result<(i64, TryState)> {
    let state = TryState {
        id: row.get(index + 1)?,
        number: row.get(index + 2)?,
        status: row.get(index + 3)?,
        worker: row.get(index + 4)?,
        start_time: row.get(index + 5)?,
        end_time: row.get(index + 6)?,
        heartbeat: row.get(index + 7)?,
        ttl: row.get(index + 8)?,
        released: row.get(index + 9)?,
    };
    Ok((row.get(index)?, state))
}

/// Writes the changeable fields of the try in row `seq`.
pub(super) fn save_try(call: CallContext<'_>, seq: i64, of: &TryState) -> Result<(), Failure> {
    let sql = "UPDATE tries SET status = ?2, worker = ?3, end_time = ?4, heartbeat = ?5, released = ?6 WHERE seq = ?1";
    call.db.prepare_cached(sql)?.execute(params![
        seq,
        of.status,
        of.worker,
        of.end_time,
        of.heartbeat,
        of.released
    ])?;
    Ok(())
}

/// A stored try of a rollout, with its row id.
#[derive(Debug)]
pub(super) enum StoredTry {
    /// The latest try of the rollout, by its row id. The state of the rollout contains the state of
    /// this try.
    Latest(i64),
    /// An earlier try of the rollout: its row id and its state.
    Earlier(i64, TryState),
}

impl StoredTry {
    /// Returns the row id of the try.
    pub fn seq(&self) -> i64 {
        let (StoredTry::Latest(seq) | StoredTry::Earlier(seq, _)) = self;
        *seq
    }
}

/// A stored rollout with its latest try. Changes are written back with [`save`](Self::save).
#[derive(Debug)]
pub(super) struct StoredRollout {
    pub seq: i64,
    pub enqueued: i64,
    /// Row id of the latest try. 0 if no try has started.
    pub latest_seq: i64,
    pub state: RolloutState,
    /// Time at which the next timeout of the rollout expires, as it is stored. `None` if no timeout
    /// applies.
    expires: Option<f64>,
}

impl StoredRollout {
    /// Reads the rollout with the id `id`. Returns `None` if it does not exist.
    pub fn find(call: CallContext<'_>, id: &str) -> Result<Option<Self>, Failure> {
        let sql = format!("SELECT {} FROM {} WHERE r.id = ?1", Self::columns(), rows::ROLLOUT_FROM);
        Ok(call.db.prepare_cached(&sql)?.query_row([id], Self::read).optional()?)
    }

    /// Reads the rollout with the id `id`.
    ///
    /// # Errors
    /// Returns [`RolloutError::UnknownRollout`] if the rollout does not exist.
    pub fn get(call: CallContext<'_>, id: &str) -> Result<Self, Failure> {
        Self::find(call, id)?
            .ok_or_else(|| to_failure(RolloutError::UnknownRollout { rollout_id: id.to_owned() }))
    }

    /// Returns the columns that [`StoredRollout::read`] reads from the tables
    /// [`rows::ROLLOUT_FROM`].
    pub fn columns() -> String {
        format!(
            "r.seq, r.id, r.status, r.timeout, r.unresponsive, r.max_tries, r.retry_on, r.tries, r.released, r.enqueued, \
             r.end_time, r.expires, {TRY_COLUMNS}"
        )
    }

    pub fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        let started = row.get(7)?;
        let latest = if started == 0 { None } else { Some(read_try(row, 12)?) };
        let (latest_seq, latest) = latest.map_or((0, None), |(seq, of)| (seq, Some(of)));
        let state = RolloutState {
            status: row.get(2)?,
            end_time: row.get(10)?,
            started,
            released: row.get(8)?,
            latest,
            is_changed: false,
            ..RolloutState::new(row.get(1)?, rows::parse_config(row, 3)?)
        };
        let (enqueued, expires) = (row.get(9)?, row.get(11)?);
        Ok(StoredRollout { seq: row.get(0)?, enqueued, latest_seq, state, expires })
    }

    /// Returns the try with the id `id`, or `None` if the rollout has no such try.
    pub fn find_try(&self, call: CallContext<'_>, id: &str) -> Result<Option<StoredTry>, Failure> {
        if self.state.latest.as_ref().is_some_and(|latest| latest.id == id) {
            return Ok(Some(StoredTry::Latest(self.latest_seq)));
        }
        let sql = format!("SELECT {TRY_COLUMNS} FROM tries t WHERE t.rollout = ?1 AND t.id = ?2");
        let mut statement = call.db.prepare_cached(&sql)?;
        let found = statement.query_row(params![self.seq, id], |row| read_try(row, 0));
        Ok(found.optional()?.map(|(seq, of)| StoredTry::Earlier(seq, of)))
    }

    /// Inserts a try, which becomes the latest try. The caller must then call [`save`](Self::save).
    pub fn start_try(
        &mut self,
        call: CallContext<'_>,
        worker: Option<&str>,
        ttl: Option<f64>,
    ) -> Result<(), Failure> {
        let sql = "INSERT INTO tries (rollout, number, id, status, worker, start_time, ttl)
                   VALUES (?1, ?2, 'at-' || lower(hex(randomblob(6))), 'preparing', ?3, ?4, ?5) RETURNING seq, id";
        let mut insert = call.db.prepare_cached(sql)?;
        let number = self.state.started + 1;
        let (seq, id) = insert
            .query_row(params![self.seq, number, worker, call.now, ttl], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })?;
        self.state.start_try(id, worker, ttl, call.now);
        self.latest_seq = seq;
        Ok(())
    }

    /// Writes the latest try and then the rollout.
    pub fn save_latest(&mut self, call: CallContext<'_>) -> Result<(), Failure> {
        if let Some(latest) = &self.state.latest {
            save_try(call, self.latest_seq, latest)?;
        }
        self.save(call)
    }

    /// Writes the changeable fields of the rollout. If anything except the timeout has changed, the
    /// change gets the next sequence number.
    pub fn save(&mut self, call: CallContext<'_>) -> Result<(), Failure> {
        let expires = self.state.expires();
        if self.state.is_changed {
            let change = next_change_number(call)?;
            if self.state.moves_to_end {
                self.enqueued = change;
            }
            let sql = "UPDATE rollouts SET status = :status, queued = :queued, enqueued = :enqueued, end_time = :end_time,
                           tries = :tries, released = :released, expires = :expires, changed = :changed WHERE seq = :seq";
            call.db.prepare_cached(sql)?.execute(named_params! {
                ":seq": self.seq,
                ":status": self.state.status,
                ":queued": self.state.status.is_queued(),
                ":enqueued": self.enqueued,
                ":end_time": self.state.end_time,
                ":tries": self.state.started,
                ":released": self.state.released,
                ":expires": expires,
                ":changed": change,
            })?;
        } else if expires != self.expires {
            let sql = "UPDATE rollouts SET expires = ?2 WHERE seq = ?1";
            call.db.prepare_cached(sql)?.execute(params![self.seq, expires])?;
        }
        self.expires = expires;
        Ok(())
    }

    /// Updates the record of the worker that executes the latest try. `is_lease` is `true` if the
    /// worker has just leased it.
    pub fn sync_latest(&self, call: CallContext<'_>, is_lease: bool) -> Result<(), Failure> {
        match &self.state.latest {
            Some(latest) => sync_worker(call, &self.state.id, latest, is_lease),
            None => Ok(()),
        }
    }

    /// Reads all fields of the rollout.
    pub fn load_rollout(&self, call: CallContext<'_>) -> Result<Rollout, Failure> {
        let sql = format!("SELECT {} FROM {} WHERE r.seq = ?1", rows::ROLLOUT, rows::ROLLOUT_FROM);
        Ok(call.db.prepare_cached(&sql)?.query_row([self.seq], rows::parse_rollout)?)
    }
}

/// Returns the next sequence number of a change. The same number is the position at the end of
/// every queue.
pub(super) fn next_change_number(call: CallContext<'_>) -> Result<i64, Failure> {
    let sql = "SELECT coalesce(max(changed), 0) + 1 FROM rollouts";
    Ok(call.db.prepare_cached(sql)?.query_row([], |row| row.get(0))?)
}

/// Updates the record of a try's worker to match the status of the try. `is_lease` is `true` if the
/// worker has just leased it.
pub(super) fn sync_worker(
    call: CallContext<'_>,
    rollout_id: &str,
    of: &TryState,
    is_lease: bool,
) -> Result<(), Failure> {
    let Some(worker) = of.worker.as_deref().filter(|worker| !worker.is_empty()) else {
        return Ok(());
    };
    let status = of.worker_status();
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
