//! Deadlines and waits that count only the time in which this process ran.
//!
//! A process that is stopped (SIGSTOP, Ctrl-Z, a frozen container, a debugger, a laptop that
//! sleeps) makes no progress, so a pause must not count toward its deadlines. A pause shows as a
//! wait that takes far longer than requested. Waits are therefore divided into short ones, and each
//! of these counts at most as long as it may take on a busy machine.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use tokio::time::Instant;

/// Maximum interval between two readings of the clock. An interval with a pause counts as this
/// long.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum interval between two readings that counts in full, because a busy machine may be this
/// late. A longer interval contains a pause.
const MAX_INTERVAL: Duration = Duration::from_secs(2);

/// Stopwatch that measures the time in which the process ran. It is accurate if
/// [`elapsed`](Stopwatch::elapsed) is called at least once a second.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch {
    last_read: Instant,
    ran: Duration,
    paused: Duration,
}

impl Stopwatch {
    /// Starts a stopwatch now.
    pub fn start() -> Self {
        Stopwatch { last_read: Instant::now(), ran: Duration::ZERO, paused: Duration::ZERO }
    }

    /// Reads the clock and returns the time in which the process ran.
    pub fn elapsed(&mut self) -> Duration {
        let now = Instant::now();
        let since = now - self.last_read;
        self.last_read = now;
        let counts = if since > MAX_INTERVAL { POLL_INTERVAL } else { since };
        self.ran += counts;
        self.paused += since - counts;
        self.ran
    }

    /// Returns how long the process was stopped since the start, as of the last call of
    /// [`elapsed`](Self::elapsed).
    pub fn paused(&self) -> Duration {
        self.paused
    }
}

/// Clock that measures the time in which the process ran. Its clones share the pauses found by
/// [`track_pauses`](Clock::track_pauses).
#[derive(Debug, Clone)]
pub struct Clock {
    started: Instant,
    /// Total duration of pauses in milliseconds.
    paused: Arc<AtomicU64>,
}

impl Default for Clock {
    fn default() -> Self {
        Clock { started: Instant::now(), paused: Arc::default() }
    }
}

impl Clock {
    /// Returns how long the process has run since the clock was created.
    pub fn elapsed(&self) -> Duration {
        self.started
            .elapsed()
            .saturating_sub(Duration::from_millis(self.paused.load(Ordering::Relaxed)))
    }

    /// Detects pauses of the process, subtracts them from the clock, and calls `on_pause` with the
    /// duration of each pause. The future never finishes.
    pub async fn track_pauses(self, mut on_pause: impl FnMut(Duration)) {
        let mut watch = Stopwatch::start();
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let before = watch.paused();
            watch.elapsed();
            let pause = watch.paused() - before;
            if !pause.is_zero() {
                self.paused.fetch_add(pause.as_millis() as u64, Ordering::Relaxed);
                on_pause(pause);
            }
        }
    }
}

/// Waits until the process has run for `time`. Returns how long it has run.
pub async fn sleep(time: Duration) -> Duration {
    let mut watch = Stopwatch::start();
    loop {
        let remaining = time.saturating_sub(watch.elapsed());
        if remaining.is_zero() {
            return watch.elapsed();
        }
        tokio::time::sleep(remaining.min(POLL_INTERVAL)).await;
    }
}

/// Awaits `work` and returns its result, or `None` if the process has run for `limit` before it
/// finishes.
pub async fn with_timeout<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = work => Some(done),
        _ = sleep(limit) => None,
    }
}

/// Receives a value from a channel. Blocks the thread until a value arrives or the process has run
/// for `limit`.
///
/// # Errors
/// Returns [`RecvTimeoutError::Timeout`] if nothing arrives within `limit`, and
/// [`RecvTimeoutError::Disconnected`] if all senders have been dropped.
pub fn receive<T>(from: &Receiver<T>, limit: Duration) -> Result<T, RecvTimeoutError> {
    let mut watch = Stopwatch::start();
    loop {
        let remaining = limit.saturating_sub(watch.elapsed());
        match from.recv_timeout(remaining.min(POLL_INTERVAL)) {
            Err(RecvTimeoutError::Timeout) if !remaining.is_zero() => {}
            ended => return ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receive_times_out_and_reports_disconnection() {
        let (send, receive_from) = std::sync::mpsc::channel();
        let limit = Duration::from_millis(1200);
        let start = std::time::Instant::now();
        assert_eq!(receive::<u8>(&receive_from, limit), Err(RecvTimeoutError::Timeout));
        assert!(start.elapsed() >= limit);
        send.send(7).unwrap();
        assert_eq!(receive(&receive_from, limit), Ok(7));
        drop(send);
        assert_eq!(receive(&receive_from, limit), Err(RecvTimeoutError::Disconnected));
    }

    #[tokio::test(start_paused = true)]
    async fn with_timeout_returns_none_at_the_limit() {
        for millis in [1, 999, 1000, 1001, 59_000] {
            let limit = Duration::from_millis(millis);
            let start = Instant::now();
            assert_eq!(with_timeout(limit, std::future::pending::<()>()).await, None);
            assert_eq!(start.elapsed(), limit);
            assert_eq!(
                with_timeout(limit, tokio::time::sleep(limit - Duration::from_millis(1))).await,
                Some(())
            );
        }
        assert_eq!(with_timeout(Duration::ZERO, async { 7 }).await, Some(7));
    }

    #[tokio::test(start_paused = true)]
    async fn stopwatch_counts_long_gaps_as_pauses() {
        let mut watch = Stopwatch::start();
        for (gap, ran, paused) in
            [(1000, 1000, 0), (1900, 2900, 0), (3_600_000, 3900, 3_599_000), (10, 3910, 3_599_000)]
        {
            tokio::time::advance(Duration::from_millis(gap)).await;
            assert_eq!(watch.elapsed(), Duration::from_millis(ran));
            assert_eq!(watch.paused(), Duration::from_millis(paused));
        }
    }
}
