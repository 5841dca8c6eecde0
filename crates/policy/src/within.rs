//! Deadlines of what waits for a sampler.

use std::future::Future;
use std::time::Duration;

use crate::{Sampler, awake};

/// Does something for at most `longest`, without the time in which this process or the sampler stood still:
/// nothing is drawn meanwhile, and that is nobody's fault. `None` where it takes longer.
pub async fn within<T>(sampler: &dyn Sampler, longest: Duration, work: impl Future<Output = T>) -> Option<T> {
    // A sampler that does not say has not paused.
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
