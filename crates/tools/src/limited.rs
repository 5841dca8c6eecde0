//! A toolbox with limits on concurrency and call rate.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};

use super::wrapped::{MiddlewareToolbox, ToolMiddleware};
use super::{Permit, Toolbox};

/// Limits on the calls of a toolbox, over all its sessions. Calls wait for a permit before their
/// timeouts start.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CallLimits {
    /// Maximum number of concurrent calls. `None` means no limit.
    pub at_once: Option<usize>,
    /// Maximum number of calls that start per second, evenly spaced. It must be finite and positive.
    /// `None` means no limit.
    pub per_second: Option<f64>,
    /// Whether calls of one turn run one after another, even if the toolbox allows concurrency.
    pub in_turn: bool,
}

/// A toolbox whose calls obey [`CallLimits`].
pub type Limited = MiddlewareToolbox<Gate>;

/// Semaphore and rate limiter that calls wait for.
pub struct Gate {
    permits: Option<Arc<Semaphore>>,
    /// Interval between two call starts, and the earliest time of the next start.
    pace: Option<(Duration, Mutex<Instant>)>,
    in_turn: bool,
}

impl Gate {
    /// Waits for a semaphore permit, and then for the time at which the call can start.
    async fn pass(&self) -> Permit {
        let mut permit = Permit::default();
        if let Some(permits) = &self.permits
            // The semaphore is never closed, so a permit is always granted in the end.
            && let Ok(place) = Arc::clone(permits).acquire_owned().await
        {
            permit.hold(place);
        }
        if let Some((interval, next)) = &self.pace {
            let start_at = {
                let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
                let start_at = Instant::now().max(*next);
                *next = start_at + *interval;
                start_at
            };
            sleep_until(start_at).await;
        }
        permit
    }
}

impl Limited {
    /// Wraps `toolbox` so that all its sessions together obey `limits`.
    pub fn new(toolbox: Arc<dyn Toolbox>, limits: CallLimits) -> Self {
        let permits = limits.at_once.map(|most| Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS))));
        let pace =
            limits.per_second.map(|most| (Duration::from_secs_f64(1.0 / most), Mutex::new(Instant::now())));
        MiddlewareToolbox::around(toolbox, Gate { permits, pace, in_turn: limits.in_turn })
    }
}

#[async_trait]
impl ToolMiddleware for Gate {
    fn allows_parallel(&self) -> bool {
        !self.in_turn
    }

    async fn admit(&self, permit: Permit) -> Permit {
        permit.and(self.pass().await)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ToolSet;
    use crate::testing::{Log, Logged, call, context, reply};

    fn limited(limits: CallLimits) -> (ToolSet, Log) {
        let log = Log::default();
        let toolbox = Logged { parallel: true, ..Logged::new("a", &log) };
        let limited = Limited::new(Arc::new(toolbox), limits);
        (ToolSet::new(vec![Arc::new(limited)], Duration::from_secs(2)).unwrap(), log)
    }

    fn slow(count: usize) -> levade_text::ParsedCompletion {
        let calls: Vec<_> = (0..count).map(|_| call("a", serde_json::json!({ "millis": 1000 }))).collect();
        reply(&calls)
    }

    #[tokio::test(start_paused = true)]
    async fn concurrency_limit_spans_sessions_and_excludes_wait() {
        let (set, log) = limited(CallLimits { at_once: Some(2), ..CallLimits::default() });
        let mut sessions = [set.open(&context("x")).await.unwrap(), set.open(&context("y")).await.unwrap()];
        let start = Instant::now();
        let [x, y] = &mut sessions;
        let four = slow(4);
        let (first, second) = tokio::join!(x.answer(&four, true), y.answer(&four, true));
        // Eight calls of 1 s each, two at once. The last one waits longer than its timeout of 2 s.
        assert_eq!(start.elapsed().as_secs(), 4);
        for observation in first.iter().chain(&second) {
            assert_eq!(observation.text, "done 0");
        }
        let mut running = 0i32;
        for line in log.lock().unwrap().iter() {
            running += i32::from(line.starts_with("call")) - i32::from(line.starts_with("answer"));
            assert!(running <= 2, "{line}");
        }
        let (_, used) = set.used().next().unwrap();
        assert_eq!((used.calls, used.time.as_secs()), (8, 8));
        assert_eq!(used.waited.as_secs(), 2 * (1 + 2 + 3));
    }

    #[tokio::test(start_paused = true)]
    async fn rate_limited_calls_start_evenly_spaced() {
        let (set, _) = limited(CallLimits { per_second: Some(4.0), ..CallLimits::default() });
        let mut session = set.open(&context("x")).await.unwrap();
        let start = Instant::now();
        session.answer(&slow(9), true).await;
        assert_eq!(start.elapsed().as_millis(), 8 * 250 + 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn timed_out_call_releases_permit() {
        let (set, _) = limited(CallLimits { at_once: Some(1), ..CallLimits::default() });
        let (mut x, mut y) = (set.open(&context("x")).await.unwrap(), set.open(&context("y")).await.unwrap());
        let hangs = reply(&[call("a", serde_json::json!({ "hang": true }))]);
        let (cancelled, finished) = tokio::join!(x.answer(&hangs, true), async {
            tokio::task::yield_now().await;
            y.answer(&slow(1), true).await
        });
        assert_eq!(cancelled[0].text, "Error: a did not answer within 2s");
        assert_eq!(finished[0].text, "done 0");
    }

    #[tokio::test(start_paused = true)]
    async fn permit_wait_is_limited_by_attempt_deadline() {
        let (set, _) = limited(CallLimits { per_second: Some(0.01), ..CallLimits::default() });
        let mut session = set.open(&context("x")).await.unwrap();
        let observations = session.answer(&slow(2), true).await;
        assert_eq!(observations[0].text, "done 0");
        assert_eq!(observations[1].text, "Error: a was not called: its turn did not come within 60s");
    }
}
