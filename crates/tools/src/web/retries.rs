//! Timing of retries of a busy service.

use std::time::Duration;

use hyper::header::{HeaderMap, RETRY_AFTER};

/// Wait before the first retry of a request. Each further wait is 1.5 times as long.
pub const INITIAL_RETRY_WAIT: Duration = Duration::from_secs(1);

/// Maximum wait before a retry of a request. A longer `Retry-After` counts as a failure.
pub const MAX_RETRY_WAIT: Duration = Duration::from_secs(30);

/// Parses the `Retry-After` header. Returns `None` if it is missing or is not a number of seconds.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_accepts_only_seconds() {
        assert_eq!(
            (retry_after_text("2"), retry_after_text(" 0.5 ")),
            (Some(Duration::from_secs(2)), Some(Duration::from_millis(500)))
        );
        // For a date, the caller uses its own wait.
        for value in ["Sat, 28 Nov 2026 12:00:00 GMT", "-1", "soon"] {
            assert_eq!(retry_after_text(value), None, "{value}");
        }
        assert_eq!(retry_after(&HeaderMap::new()), None);
    }

    fn retry_after_text(value: &str) -> Option<Duration> {
        retry_after(&HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]))
    }
}
