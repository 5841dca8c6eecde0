//! The state machine of a rollout and its tries, without storage.
//!
//! In one atomic step, a backend reads a [`RolloutState`], applies one report or command to it, and
//! writes it back. The state contains only the latest try, because a report of an earlier try
//! cannot change the rollout. Such a report changes only the [`TryState`] of the earlier try. Times
//! are Unix timestamps in seconds, from the store's [`Clock`](super::Clock).

use super::{
    Lease, LeaseEnd, Result, RolloutConfig, RolloutError, RolloutStatus, TryStatus, TryUpdate,
    WorkerStatus,
};
use crate::WriteOutcome;

/// The fields of a try that the state machine reads and writes.
#[derive(Debug, Clone, PartialEq)]
pub struct TryState {
    /// Id of the try, unique within the rollout.
    pub id: String,
    /// Number of the try within its rollout, from 1.
    pub number: u32,
    /// Status of the try.
    pub status: TryStatus,
    /// Id of the worker that executes the try. `None` for an anonymous worker.
    pub worker: Option<String>,
    /// Time at which the try was leased.
    pub start_time: f64,
    /// Time at which the worker reported success or failure, or returned the lease. `None` if the
    /// worker has not.
    pub end_time: Option<f64>,
    /// Time of the worker's last progress report. `None` if there is none yet.
    pub heartbeat: Option<f64>,
    /// Timeout that the lease sets for the next progress report, in seconds. `None` if the lease
    /// sets no timeout.
    pub ttl: Option<f64>,
    /// Whether the worker returned the lease without a result.
    pub released: bool,
}

impl TryState {
    /// Returns the time at which the try becomes unresponsive if no progress report arrives.
    /// Returns `None` if there is no such timeout.
    pub fn report_deadline(&self, config: &RolloutConfig) -> Option<f64> {
        let seconds = config.unresponsive_seconds.into_iter().chain(self.ttl).reduce(f64::min)?;
        Some(self.heartbeat.unwrap_or(self.start_time) + seconds)
    }

    /// Returns the time at which the try exceeds its timeout, or `None` if it has no timeout.
    fn timeout_deadline(&self, config: &RolloutConfig) -> Option<f64> {
        Some(self.start_time + config.timeout_seconds?)
    }

    /// Returns the status that a try gets because a timeout has passed, or `None` if no timeout has
    /// passed.
    fn status_after_timeout(&self, config: &RolloutConfig, now: f64) -> Option<TryStatus> {
        if self.timeout_deadline(config).is_some_and(|at| now > at) {
            Some(TryStatus::Timeout)
        } else {
            let is_late = self.report_deadline(config).is_some_and(|at| now > at);
            is_late.then_some(TryStatus::Unresponsive)
        }
    }

    /// Returns the status of the try's worker, which follows from the status of the try.
    pub fn worker_status(&self) -> WorkerStatus {
        match self.status {
            TryStatus::Succeeded | TryStatus::Failed => WorkerStatus::Idle,
            TryStatus::Timeout | TryStatus::Unresponsive if self.released => WorkerStatus::Idle,
            TryStatus::Timeout | TryStatus::Unresponsive => WorkerStatus::Unknown,
            TryStatus::Preparing | TryStatus::Running => WorkerStatus::Busy,
        }
    }

    /// Records a progress report at the time `now`. A preparing or unresponsive try becomes
    /// running. A try that timed out, ended or was released is not revived. Returns whether the
    /// report revived an unresponsive try.
    pub fn report(&mut self, now: f64) -> bool {
        self.heartbeat = Some(now);
        let is_revived = self.status == TryStatus::Unresponsive && !self.released;
        if is_revived || self.status == TryStatus::Preparing {
            self.status = TryStatus::Running;
        }
        is_revived
    }

    /// Replaces fields of the try. Returns whether the record of the try's worker must be updated
    /// as well.
    pub fn update(&mut self, update: &TryUpdate, now: f64) -> bool {
        if let Some(worker) = &update.worker_id {
            self.worker = Some(worker.clone());
        }
        if let Some(status) = update.status {
            self.status = status;
            if matches!(status, TryStatus::Failed | TryStatus::Succeeded) {
                self.end_time = Some(now);
            }
        }
        self.heartbeat = update.last_heartbeat_time.or(self.heartbeat);
        let has_worker = self.worker.as_ref().is_some_and(|worker| !worker.is_empty());
        has_worker && (update.worker_id.is_some() || update.status.is_some())
    }
}

/// Position in the queue that a rollout gets when it is queued again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuePosition {
    /// The position that the rollout had before it was leased.
    Old,
    /// The end of the queue.
    End,
}

/// The fields of a rollout that the state machine reads and writes.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutState {
    /// Id of the rollout, unique in the store.
    pub id: String,
    /// Status of the rollout.
    pub status: RolloutStatus,
    /// Timeouts and retries of the rollout.
    pub config: RolloutConfig,
    /// Time at which the rollout ended, or `None` if it has not ended.
    pub end_time: Option<f64>,
    /// Number of tries that have started, which is also the number of the latest try.
    pub started: u32,
    /// Number of tries that workers released. These tries do not count toward the maximum.
    pub released: u32,
    /// Try with the highest number, or `None` if no try has started.
    pub latest: Option<TryState>,
    /// Whether a change must be announced to callers that wait for changes. The backend clears the
    /// flag when it reads the state.
    pub is_changed: bool,
    /// Whether the rollout moves to the end of its queue. The backend clears the flag when it reads
    /// the state.
    pub moves_to_end: bool,
}

impl RolloutState {
    /// Creates the state of a rollout that waits for its first try.
    pub fn new(id: String, config: RolloutConfig) -> Self {
        RolloutState {
            id,
            status: RolloutStatus::Queuing,
            config,
            end_time: None,
            started: 0,
            released: 0,
            latest: None,
            is_changed: true,
            moves_to_end: false,
        }
    }

    /// Returns the time at which the next timeout of the latest try expires, or `None` if it has no
    /// timeout.
    pub fn expires(&self) -> Option<f64> {
        let latest = self.latest.as_ref().filter(|_| self.status.is_active())?;
        let ends = [latest.timeout_deadline(&self.config), latest.report_deadline(&self.config)];
        ends.into_iter().flatten().reduce(f64::min)
    }

    /// Sets the status of the rollout, its end time if the status is final, and its position in the
    /// queue if it is queued again.
    pub fn set_status(&mut self, status: RolloutStatus, position: QueuePosition, now: f64) {
        let is_queued_again = status.is_queued() && !self.status.is_queued();
        self.moves_to_end |= is_queued_again && position == QueuePosition::End;
        self.end_time = status.is_finished().then_some(now);
        self.status = status;
        self.is_changed = true;
    }

    /// Updates the status of the rollout to match the status of the latest try. A cancelled rollout
    /// stays cancelled.
    fn follow_latest_try(&mut self, now: f64) {
        let Some(status) = self.latest.as_ref().map(|latest| latest.status) else { return };
        let next = match status {
            TryStatus::Preparing => RolloutStatus::Preparing,
            TryStatus::Running => RolloutStatus::Running,
            TryStatus::Succeeded => RolloutStatus::Succeeded,
            TryStatus::Failed | TryStatus::Timeout | TryStatus::Unresponsive => {
                let has_tries = self.started.saturating_sub(self.released) < self.config.max_tries;
                if has_tries && self.config.retry_on.contains(&status) {
                    RolloutStatus::Requeuing
                } else {
                    RolloutStatus::Failed
                }
            }
        };
        if self.status != RolloutStatus::Cancelled && self.status != next {
            self.set_status(next, QueuePosition::Old, now);
        }
    }

    /// Starts a try with the id `id`, which becomes the latest try. Returns the try that was the
    /// latest before.
    pub fn start_try(
        &mut self,
        id: String,
        worker: Option<&str>,
        ttl: Option<f64>,
        now: f64,
    ) -> Option<TryState> {
        self.started += 1;
        let earlier = self.latest.replace(TryState {
            id,
            number: self.started,
            status: TryStatus::Preparing,
            worker: worker.map(str::to_owned),
            start_time: now,
            end_time: None,
            heartbeat: None,
            ttl,
            released: false,
        });
        self.set_status(RolloutStatus::Preparing, QueuePosition::Old, now);
        earlier
    }

    /// Records a progress report of the latest try ([`TryState::report`]), and updates the status
    /// of the rollout accordingly.
    pub fn report(&mut self, now: f64) {
        let Some(latest) = &mut self.latest else { return };
        let is_revived = latest.report(now);
        let follows = match self.status {
            RolloutStatus::Preparing => latest.status == TryStatus::Running,
            RolloutStatus::Requeuing => is_revived,
            _ => false,
        };
        if follows {
            self.set_status(RolloutStatus::Running, QueuePosition::Old, now);
        }
    }

    /// Returns the latest try if `lease` belongs to it and its worker can still report on it.
    fn find_open_try(&mut self, lease: &Lease) -> Result<&mut TryState> {
        let latest = self.latest.as_mut().filter(|latest| latest.number == lease.number);
        let Some(latest) = latest else {
            return Err(lost_lease_error(lease, format!("try {} has started", self.started)));
        };
        if self.status == RolloutStatus::Cancelled {
            return Err(lost_lease_error(lease, "the rollout was cancelled".to_owned()));
        }
        if latest.released {
            return Err(lost_lease_error(lease, "the worker has released the try".to_owned()));
        }
        let is_open = match latest.status {
            TryStatus::Preparing | TryStatus::Running => true,
            TryStatus::Unresponsive => self.status == RolloutStatus::Requeuing,
            _ => false,
        };
        if is_open {
            Ok(latest)
        } else {
            Err(lost_lease_error(lease, format!("the try is {}", latest.status.name())))
        }
    }

    /// Records a heartbeat of the try of `lease`. Returns the time until which the next progress
    /// report must arrive, or `None` if there is no such timeout.
    ///
    /// # Errors
    /// Returns [`RolloutError::Lost`] if the lease is no longer valid.
    pub fn record_heartbeat(&mut self, lease: &Lease, now: f64) -> Result<Option<f64>> {
        self.find_open_try(lease)?;
        self.report(now);
        Ok(self.latest.as_ref().and_then(|latest| latest.report_deadline(&self.config)))
    }

    /// Ends the lease of the latest try with the result `end`.
    ///
    /// # Errors
    /// Returns [`RolloutError::Lost`] if the lease is no longer valid.
    pub fn end_lease(&mut self, lease: &Lease, end: LeaseEnd, now: f64) -> Result<WriteOutcome> {
        let status = match end {
            LeaseEnd::Succeeded => TryStatus::Succeeded,
            LeaseEnd::Failed => TryStatus::Failed,
            LeaseEnd::Released => TryStatus::Unresponsive,
        };
        let has_end = self.latest.as_ref().is_some_and(|latest| {
            latest.number == lease.number
                && match end {
                    LeaseEnd::Released => latest.released,
                    _ => latest.status == status,
                }
        });
        if has_end {
            return Ok(WriteOutcome::AlreadyRecorded);
        }
        let latest = self.find_open_try(lease)?;
        latest.status = status;
        latest.end_time = Some(now);
        if end == LeaseEnd::Released {
            latest.released = true;
            self.released += 1;
            self.set_status(RolloutStatus::Requeuing, QueuePosition::Old, now);
        } else {
            self.follow_latest_try(now);
        }
        Ok(WriteOutcome::Written)
    }

    /// Replaces fields of the latest try ([`TryState::update`]), and updates the status of the
    /// rollout accordingly. Returns whether the record of the try's worker must be updated as well.
    pub fn update_latest(&mut self, update: &TryUpdate, now: f64) -> bool {
        let Some(latest) = &mut self.latest else { return false };
        let needs_sync = latest.update(update, now);
        self.follow_latest_try(now);
        needs_sync
    }

    /// Ends the latest try if it exceeded a timeout at the time `now`. Returns whether it did.
    pub fn expire_latest_try(&mut self, now: f64) -> bool {
        if !self.status.is_active() {
            return false;
        }
        let Some(latest) = &mut self.latest else { return false };
        let Some(status) = latest.status_after_timeout(&self.config, now) else { return false };
        latest.status = status;
        self.follow_latest_try(now);
        true
    }
}

/// Creates the error for a call with a lease that is no longer valid.
fn lost_lease_error(lease: &Lease, reason: String) -> RolloutError {
    RolloutError::Lost { rollout_id: lease.rollout_id.clone(), number: lease.number, reason }
}

/// Checks that the configuration of a rollout permits at least one try.
///
/// # Errors
/// Returns [`RolloutError::Invalid`] if the maximum number of tries is 0.
pub fn check_config(config: &RolloutConfig) -> Result<()> {
    if config.max_tries == 0 {
        let text = "max_attempts is 0; it must be at least 1".to_owned();
        return Err(RolloutError::Invalid(text));
    }
    Ok(())
}
