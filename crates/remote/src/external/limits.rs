//! Rate limits, and jitter.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Rate limit as a token bucket. It refills at a steady rate, up to the amount of one minute. A
/// caller can take more than the bucket contains, and then waits until the bucket has refilled to
/// 0.
#[derive(Debug)]
pub(crate) struct RateLimit {
    /// Capacity of the bucket, and the amount by which it refills per minute.
    per_minute: f64,
    /// Amount in the bucket at an instant. Below 0 if a caller has taken more than the bucket
    /// contained.
    level: Mutex<(f64, Instant)>,
}

impl RateLimit {
    /// Creates a full bucket. Returns `None` if `per_minute` is 0, which disables the rate limit.
    pub fn new(per_minute: u64) -> Option<Self> {
        let level = Mutex::new((per_minute as f64, Instant::now()));
        (per_minute > 0).then_some(RateLimit { per_minute: per_minute as f64, level })
    }

    /// Takes an amount from the bucket. Returns the duration that the caller must wait until the
    /// amount is available.
    pub fn take(&self, amount: f64) -> Duration {
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let flowed = (now - level.1).as_secs_f64() * self.per_minute / 60.0;
        let contents = (level.0 + flowed).min(self.per_minute) - amount;
        *level = (contents, now);
        Duration::from_secs_f64((-contents).max(0.0) * 60.0 / self.per_minute)
    }

    /// Returns an unused amount to the bucket. A negative amount takes more from the bucket.
    pub fn give_back(&self, amount: f64) {
        self.take(-amount);
    }
}

/// Shortens `wait` at random by up to a half, so that clients rejected at the same time do not
/// return at the same time.
pub(crate) fn add_jitter(wait: Duration) -> Duration {
    // Seeds of hash maps are the only available random numbers that differ between processes.
    let random = RandomState::new().hash_one(0u8) as f64 / u64::MAX as f64;
    wait.mul_f64(1.0 - random / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn bucket_allows_burst_then_steady_rate() {
        let bucket = RateLimit::new(60).unwrap();
        assert_eq!(bucket.take(60.0), Duration::ZERO);
        assert_eq!([bucket.take(1.0), bucket.take(1.0)], [1, 2].map(Duration::from_secs));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(bucket.take(120.0), Duration::from_secs(120), "more than it holds");
        bucket.give_back(119.0);
        assert_eq!(bucket.take(0.0), Duration::from_secs(1));
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert_eq!((bucket.take(60.0), bucket.take(1.0)), (Duration::ZERO, Duration::from_secs(1)));
        assert!(RateLimit::new(0).is_none());
    }

    #[test]
    fn jittered_wait_is_uniform_over_upper_half() {
        let waits: Vec<f64> =
            (0..1000).map(|_| add_jitter(Duration::from_secs(2)).as_secs_f64()).collect();
        assert!(waits.iter().all(|wait| (1.0..=2.0).contains(wait)));
        let mean = waits.iter().sum::<f64>() / 1000.0;
        assert!((mean - 1.5).abs() < 0.1, "{mean}");
    }
}
