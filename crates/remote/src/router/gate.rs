//! Admission control: limits how many calls run and wait, and rejects further calls with a retry
//! hint.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use levade_policy::PolicyError;
use levade_policy::process_time::with_timeout;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

/// Maximum time after which a rejected caller is advised to retry, in seconds.
const MAX_RETRY_AFTER_SECONDS: f64 = 60.0;
/// Weight of the newest call in the moving average of call durations, between 0 and 1.
const SMOOTHING: f64 = 0.1;

/// First-in, first-out gate that limits the number of running calls and of waiting calls.
#[derive(Debug)]
pub(crate) struct AdmissionGate {
    max_running: usize,
    max_waiting: usize,
    state: Mutex<GateState>,
    /// Notified when a running call ends.
    ended: Notify,
}

#[derive(Debug, Default)]
struct GateState {
    running: usize,
    waiting: VecDeque<oneshot::Sender<RunPermit>>,
    is_paused: bool,
    is_closed: bool,
    /// Moving average of call durations, in seconds. 0 until the first call has ended.
    mean: f64,
}

/// Position of a call in the queue. It yields the permit to run.
#[derive(Debug)]
pub(crate) struct QueueTicket(oneshot::Receiver<RunPermit>);

impl QueueTicket {
    /// Returns the permit to run if it has already been granted, without waiting.
    pub fn try_take(&mut self) -> Option<RunPermit> {
        self.0.try_recv().ok()
    }

    /// Waits until the permit to run is granted.
    ///
    /// # Errors
    /// Returns [`PolicyError::Stopped`] if the gate has been dropped.
    pub async fn wait_for_permit(self) -> Result<RunPermit, PolicyError> {
        self.0.await.map_err(|_| PolicyError::Stopped("the router".into()))
    }
}

/// Permit of a call to run, released on drop.
#[derive(Debug)]
pub(crate) struct RunPermit {
    gate: Arc<AdmissionGate>,
    /// Time at which the call started. `None` if the caller had already left when the permit was
    /// granted.
    since: Option<Instant>,
}

impl Drop for RunPermit {
    fn drop(&mut self) {
        let mut state = self.gate.lock_state();
        state.running -= 1;
        if let Some(took) = self.since.map(|since| since.elapsed().as_secs_f64()) {
            state.mean =
                if state.mean == 0.0 { took } else { state.mean + SMOOTHING * (took - state.mean) };
        }
        self.gate.grant_permits(state);
        self.gate.ended.notify_waiters();
    }
}

impl AdmissionGate {
    /// Creates a gate for at most `max_running` running calls (0 for no limit) and `max_waiting`
    /// waiting calls.
    pub fn new(max_running: usize, max_waiting: usize) -> Arc<Self> {
        let max_running = if max_running == 0 { usize::MAX } else { max_running };
        Arc::new(AdmissionGate {
            max_running,
            max_waiting,
            state: Mutex::default(),
            ended: Notify::new(),
        })
    }

    fn lock_state(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a call to the queue.
    ///
    /// # Errors
    /// Returns [`PolicyError::Busy`] if too many calls already wait, or if the gate is drained.
    pub fn join_queue(self: &Arc<Self>) -> Result<QueueTicket, PolicyError> {
        let mut state = self.lock_state();
        // Remove waiting calls whose callers have gone.
        state.waiting.retain(|waits| !waits.is_closed());
        let running = state.running;
        let waiting = state.waiting.len();
        let must_wait = state.is_paused || running >= self.max_running;
        if state.is_closed || must_wait && waiting >= self.max_waiting {
            let why = if state.is_closed { "the router is draining: " } else { "" };
            let ahead = (waiting + 1) as f64 / self.max_running.min(running.max(1)) as f64;
            return Err(PolicyError::Busy {
                what: format!("{why}{running} requests are running and {waiting} are waiting"),
                retry_after: (ahead * state.mean).ceil().clamp(1.0, MAX_RETRY_AFTER_SECONDS) as u64,
            });
        }
        let (permit, ticket) = oneshot::channel();
        state.waiting.push_back(permit);
        self.grant_permits(state);
        Ok(QueueTicket(ticket))
    }

    /// Grants permits to waiting calls, up to the maximum number of running calls.
    fn grant_permits(self: &Arc<Self>, mut state: MutexGuard<'_, GateState>) {
        // Remove waiting calls whose callers have gone.
        state.waiting.retain(|waits| !waits.is_closed());
        let mut unclaimed = Vec::new();
        while !state.is_paused && state.running < self.max_running {
            let Some(waits) = state.waiting.pop_front() else { break };
            state.running += 1;
            let permit = RunPermit { gate: self.clone(), since: Some(Instant::now()) };
            unclaimed.extend(waits.send(permit).err());
        }
        drop(state);
        // Outside the lock, because dropping a permit acquires it.
        unclaimed.iter_mut().for_each(|permit| permit.since = None);
    }

    /// Returns the numbers of running and of waiting calls.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.lock_state();
        (state.running, state.waiting.iter().filter(|waits| !waits.is_closed()).count())
    }

    /// Stops granting permits. New calls wait.
    pub fn pause(&self) {
        self.lock_state().is_paused = true;
    }

    /// Admits new calls and grants permits again.
    pub fn resume(self: &Arc<Self>) {
        let mut state = self.lock_state();
        (state.is_paused, state.is_closed) = (false, false);
        self.grant_permits(state);
    }

    /// Rejects new calls, and waits until all admitted calls have ended.
    ///
    /// # Errors
    /// Returns [`PolicyError::Deadline`] with the number of remaining calls if they have not ended
    /// within `timeout`.
    pub async fn drain(self: &Arc<Self>, timeout: Duration) -> Result<(), PolicyError> {
        self.resume();
        self.lock_state().is_closed = true;
        let empty = async {
            loop {
                let ended = self.ended.notified();
                let mut ended = std::pin::pin!(ended);
                ended.as_mut().enable();
                if self.counts() == (0, 0) {
                    return;
                }
                ended.await;
            }
        };
        with_timeout(timeout, empty).await.ok_or_else(|| {
            let (running, waiting) = self.counts();
            PolicyError::Deadline(
                timeout,
                format!("{running} running and {waiting} waiting calls to end"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn full_gate_queues_then_rejects_with_hint() {
        let gate = AdmissionGate::new(1, 2);
        let first = gate.join_queue().unwrap().try_take().unwrap();
        let mut second = gate.join_queue().unwrap();
        let mut third = gate.join_queue().unwrap();
        assert!(second.try_take().is_none());
        tokio::time::advance(Duration::from_secs(4)).await;
        let busy = gate.join_queue().unwrap_err();
        assert_eq!(
            busy.to_string(),
            "1 requests are running and 2 are waiting; try again in 1 s",
            "no call has ended yet"
        );
        drop(first);
        assert!(third.try_take().is_none());
        let second = second.try_take().unwrap();
        let _fourth = gate.join_queue().unwrap();
        let busy = gate.join_queue().unwrap_err();
        assert_eq!(
            busy,
            PolicyError::Busy {
                what: "1 requests are running and 2 are waiting".into(),
                retry_after: 12
            }
        );
        drop(second);
        third.try_take().unwrap();
    }

    #[tokio::test]
    async fn dropped_ticket_frees_its_slot() {
        let gate = AdmissionGate::new(1, 1);
        let mut first = gate.join_queue().unwrap();
        drop(gate.join_queue().unwrap());
        let second = gate.join_queue().unwrap();
        let permit = first.try_take().unwrap();
        drop(permit);
        assert_eq!(gate.counts(), (1, 0), "the turn waits to be taken");
        drop(second);
        assert_eq!(gate.counts(), (0, 0), "a turn that nobody took is free again");
    }

    #[tokio::test(start_paused = true)]
    async fn paused_gate_queues_and_drained_gate_rejects() {
        let gate = AdmissionGate::new(0, 8);
        let first = gate.join_queue().unwrap().try_take().unwrap();
        gate.pause();
        let mut second = gate.join_queue().unwrap();
        assert!(second.try_take().is_none());
        let error = gate.drain(Duration::from_secs(5)).await.unwrap_err().to_string();
        assert_eq!(error, "waited 5s for 2 running and 0 waiting calls to end");
        assert!(
            gate.join_queue()
                .unwrap_err()
                .to_string()
                .starts_with("the router is draining: 2 requests")
        );
        let draining = tokio::spawn({
            let gate = gate.clone();
            async move { gate.drain(Duration::from_secs(5)).await }
        });
        tokio::task::yield_now().await;
        drop((first, second.try_take().unwrap()));
        draining.await.unwrap().unwrap();
        gate.resume();
        gate.join_queue().unwrap().try_take().unwrap();
    }
}
