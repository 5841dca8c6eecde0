//! Deadlines for work that waits for a sampler.

use std::future::Future;
use std::time::Duration;

use crate::{Sampler, process_time};

/// Awaits `work` for at most `timeout` and returns its result, or `None` if it takes longer. The
/// deadline excludes the time in which this process or the sampler was paused, because no tokens
/// are sampled then.
pub async fn with_sampler_timeout<T>(
    sampler: &dyn Sampler,
    timeout: Duration,
    work: impl Future<Output = T>,
) -> Option<T> {
    let expiry = async {
        let before = paused(sampler, timeout).await;
        let mut ran = Duration::ZERO;
        let mut remaining = timeout;
        loop {
            ran += process_time::sleep(remaining).await;
            remaining = (timeout + paused(sampler, timeout).await.saturating_sub(before))
                .saturating_sub(ran);
            if remaining.is_zero() {
                return;
            }
        }
    };
    tokio::select! {
        biased;
        done = work => Some(done),
        () = expiry => None,
    }
}

/// Returns how long a sampler was paused. A sampler that does not report its pauses counts as never
/// paused.
async fn paused(sampler: &dyn Sampler, timeout: Duration) -> Duration {
    let paused = process_time::with_timeout(timeout, sampler.paused()).await;
    paused.and_then(Result::ok).unwrap_or_default()
}
