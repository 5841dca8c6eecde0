//! A toolbox with limits on sessions, concurrency and call rate.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until};

use super::middleware::{MiddlewareToolbox, ToolMiddleware};
use super::{Permit, Toolbox};

/// Limits on the sessions and calls of a toolbox, over all its sessions. Sessions and calls wait
/// for a permit before their timeouts start.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct CallLimits {
    /// Maximum number of open sessions. `None` means no limit.
    pub max_sessions: Option<usize>,
    /// Maximum number of concurrent calls. `None` means no limit.
    pub max_concurrent: Option<usize>,
    /// Maximum number of calls that start per second, evenly spaced. It must be finite and
    /// positive. `None` means no limit.
    pub per_second: Option<f64>,
    /// Whether calls of one turn run one after another, even if the toolbox allows concurrency.
    pub is_sequential: bool,
}

/// Toolbox whose sessions and calls obey [`CallLimits`].
pub type LimitedToolbox = MiddlewareToolbox<CallGate>;

/// Semaphores and rate limiter for which sessions and calls wait.
pub struct CallGate {
    sessions: Option<Arc<Semaphore>>,
    permits: Option<Arc<Semaphore>>,
    /// Interval between the starts of two calls, and the earliest time of the next start. `None`
    /// means no limit on the rate.
    pace: Option<(Duration, Mutex<Instant>)>,
    is_sequential: bool,
}

impl CallGate {
    /// Waits for a semaphore permit, and then until the rate limit permits the call to start.
    async fn acquire_permit(&self) -> Permit {
        let permit = acquire_semaphore(self.permits.as_ref()).await;
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

/// Waits for a permit of a semaphore. Returns at once if `semaphore` is `None`.
async fn acquire_semaphore(semaphore: Option<&Arc<Semaphore>>) -> Permit {
    let mut permit = Permit::default();
    if let Some(semaphore) = semaphore
        // The semaphore is never closed, so a permit is always granted in the end.
        && let Ok(acquired) = Arc::clone(semaphore).acquire_owned().await
    {
        permit.add(acquired);
    }
    permit
}

impl LimitedToolbox {
    /// Wraps `toolbox` so that all its sessions together obey `limits`.
    pub fn new(toolbox: Arc<dyn Toolbox>, limits: CallLimits) -> Self {
        let semaphore = |limit: usize| Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS)));
        let sessions = limits.max_sessions.map(semaphore);
        let permits = limits.max_concurrent.map(semaphore);
        let pace = limits
            .per_second
            .map(|limit| (Duration::from_secs_f64(1.0 / limit), Mutex::new(Instant::now())));
        MiddlewareToolbox::with_middleware(
            toolbox,
            CallGate { sessions, permits, pace, is_sequential: limits.is_sequential },
        )
    }
}

#[async_trait]
impl ToolMiddleware for CallGate {
    fn allows_parallel(&self) -> bool {
        !self.is_sequential
    }

    async fn admit_session(&self, permit: Permit) -> Permit {
        permit.merge(acquire_semaphore(self.sessions.as_ref()).await)
    }

    async fn admit(&self, permit: Permit) -> Permit {
        permit.merge(self.acquire_permit().await)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ToolSet;
    use crate::testing::{Log, LoggedToolbox, call, context, parsed_calls};

    fn limited_set(limits: CallLimits) -> (ToolSet, Log) {
        let log = Log::default();
        let toolbox = LoggedToolbox { parallel: true, ..LoggedToolbox::new("a", &log) };
        let limited = LimitedToolbox::new(Arc::new(toolbox), limits);
        (ToolSet::new(vec![Arc::new(limited)], Duration::from_secs(2)).unwrap(), log)
    }

    fn slow_calls(count: usize) -> levade_text::ParsedCompletion {
        let calls: Vec<_> =
            (0..count).map(|_| call("a", serde_json::json!({ "millis": 1000 }))).collect();
        parsed_calls(&calls)
    }

    #[tokio::test(start_paused = true)]
    async fn concurrency_limit_spans_sessions_and_excludes_wait() {
        let (set, log) =
            limited_set(CallLimits { max_concurrent: Some(2), ..CallLimits::default() });
        let mut sessions =
            [set.open(&context("x")).await.unwrap(), set.open(&context("y")).await.unwrap()];
        let start = Instant::now();
        let [x, y] = &mut sessions;
        let four = slow_calls(4);
        let (first, second) =
            tokio::join!(x.execute_calls(&four, true), y.execute_calls(&four, true));
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
        let (_, used) = set.usage().next().unwrap();
        assert_eq!((used.calls, used.time.as_secs()), (8, 8));
        assert_eq!(used.waited.as_secs(), 2 * (1 + 2 + 3));
    }

    #[tokio::test(start_paused = true)]
    async fn rate_limited_calls_start_evenly_spaced() {
        let (set, _) = limited_set(CallLimits { per_second: Some(4.0), ..CallLimits::default() });
        let mut session = set.open(&context("x")).await.unwrap();
        let start = Instant::now();
        session.execute_calls(&slow_calls(9), true).await;
        assert_eq!(start.elapsed().as_millis(), 8 * 250 + 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn timed_out_call_releases_permit() {
        let (set, _) = limited_set(CallLimits { max_concurrent: Some(1), ..CallLimits::default() });
        let mut x = set.open(&context("x")).await.unwrap();
        let mut y = set.open(&context("y")).await.unwrap();
        let hangs = parsed_calls(&[call("a", serde_json::json!({ "hang": true }))]);
        let (cancelled, finished) = tokio::join!(x.execute_calls(&hangs, true), async {
            tokio::task::yield_now().await;
            y.execute_calls(&slow_calls(1), true).await
        });
        assert_eq!(cancelled[0].text, "Error: a did not answer within 2s");
        assert_eq!(finished[0].text, "done 0");
    }

    #[tokio::test(start_paused = true)]
    async fn permit_wait_is_limited_by_attempt_deadline() {
        let (set, _) = limited_set(CallLimits { per_second: Some(0.01), ..CallLimits::default() });
        let mut session = set.open(&context("x")).await.unwrap();
        let observations = session.execute_calls(&slow_calls(2), true).await;
        assert_eq!(observations[0].text, "done 0");
        assert_eq!(
            observations[1].text,
            "Error: a was not called: its turn did not come within 60s"
        );
    }
}
