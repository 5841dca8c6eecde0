//! Time in which this process ran: deadlines and their waits, by a clock that stands still while the process
//! does.
//!
//! A process that is stopped (SIGSTOP, Ctrl-Z, a frozen container, a debugger, a laptop that sleeps) has done
//! nothing meanwhile, so no time has passed for what it waits for. Such a pause shows as a wait that takes
//! far longer than it was meant to: so waits here are cut into short ones, and of each no more counts than it
//! may take on a busy machine.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use tokio::time::Instant;

/// How long a wait is at most before the clock is looked at again.
const LOOK: Duration = Duration::from_secs(1);

/// The most that counts between two looks: a busy machine may be late, but not for longer.
const MOST: Duration = Duration::from_secs(2);

/// Time since it was started in which the process ran, as far as somebody looks at least once a second.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch {
    looked: Instant,
    ran: Duration,
    paused: Duration,
}

impl Stopwatch {
    /// Starts now.
    pub fn start() -> Self {
        Stopwatch { looked: Instant::now(), ran: Duration::ZERO, paused: Duration::ZERO }
    }

    /// The time in which the process ran.
    pub fn elapsed(&mut self) -> Duration {
        let now = Instant::now();
        let since = now - self.looked;
        self.looked = now;
        let counts = if since > MOST { LOOK } else { since };
        self.ran += counts;
        self.paused += since - counts;
        self.ran
    }

    /// The time in which it was stopped, as far as it is known.
    pub fn paused(&self) -> Duration {
        self.paused
    }
}

/// A clock that shows for how long the process has run; clones show the same.
#[derive(Debug, Clone)]
pub struct Clock {
    started: Instant,
    /// Milliseconds of pauses.
    paused: Arc<AtomicU64>,
}

impl Default for Clock {
    fn default() -> Self {
        Clock { started: Instant::now(), paused: Arc::default() }
    }
}

impl Clock {
    /// For how long the process has run since the clock was made.
    pub fn now(&self) -> Duration {
        self.started.elapsed().saturating_sub(Duration::from_millis(self.paused.load(Ordering::Relaxed)))
    }

    /// Notices pauses while this is awaited, which has no end, and calls `noticed` for each.
    pub async fn keep(self, mut noticed: impl FnMut(Duration)) {
        let mut watch = Stopwatch::start();
        loop {
            tokio::time::sleep(LOOK).await;
            let before = watch.paused();
            watch.elapsed();
            let pause = watch.paused() - before;
            if !pause.is_zero() {
                self.paused.fetch_add(pause.as_millis() as u64, Ordering::Relaxed);
                noticed(pause);
            }
        }
    }
}

/// Waits until the process has run for this long. Returns for how long it has.
pub async fn sleep(time: Duration) -> Duration {
    let mut watch = Stopwatch::start();
    loop {
        let left = time.saturating_sub(watch.elapsed());
        if left.is_zero() {
            return watch.elapsed();
        }
        tokio::time::sleep(left.min(LOOK)).await;
    }
}

/// Does something, for as long as the process has not run for longer than `limit`; `None` where it takes
/// longer.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = work => Some(done),
        _ = sleep(limit) => None,
    }
}

/// Receives from a channel, blocking the thread, for as long as the process has not run for longer than
/// `limit`.
///
/// # Errors
/// When it takes longer, or nobody sends any more.
pub fn receive<T>(from: &Receiver<T>, limit: Duration) -> Result<T, RecvTimeoutError> {
    let mut watch = Stopwatch::start();
    loop {
        let left = limit.saturating_sub(watch.elapsed());
        match from.recv_timeout(left.min(LOOK)) {
            Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
            ended => return ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_is_waited_for() {
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
    async fn a_deadline_is_kept_to() {
        for millis in [1, 999, 1000, 1001, 59_000] {
            let limit = Duration::from_millis(millis);
            let start = Instant::now();
            assert_eq!(within(limit, std::future::pending::<()>()).await, None);
            assert_eq!(start.elapsed(), limit);
            assert_eq!(within(limit, tokio::time::sleep(limit - Duration::from_millis(1))).await, Some(()));
        }
        assert_eq!(within(Duration::ZERO, async { 7 }).await, Some(7));
    }

    #[tokio::test(start_paused = true)]
    async fn a_gap_is_a_pause() {
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
