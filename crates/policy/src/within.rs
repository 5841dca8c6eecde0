//! Deadlines for work that waits for a sampler.

use std::future::Future;
use std::time::Duration;

use crate::{Sampler, awake};

/// Awaits `work` for at most `longest` and returns its result, or `None` if it takes longer. The
/// deadline excludes the time in which this process or the sampler was paused, because no tokens are
/// sampled then.
pub async fn within<T>(sampler: &dyn Sampler, longest: Duration, work: impl Future<Output = T>) -> Option<T> {
    // A sampler that does not report its pauses counts as never paused.
    let paused = || async {
        let paused = awake::within(longest, sampler.paused()).await;
        paused.and_then(Result::ok).unwrap_or_default()
    };
    let too_long = async {
        let before = paused().await;
        let (mut ran, mut left) = (Duration::ZERO, longest);
        loop {
            ran += awake::sleep(left).await;
            left = (longest + paused().await.saturating_sub(before)).saturating_sub(ran);
            if left.is_zero() {
                return;
            }
        }
    };
    tokio::select! {
        biased;
        done = work => Some(done),
        () = too_long => None,
    }
}
