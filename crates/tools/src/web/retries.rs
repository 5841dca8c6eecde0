//! When a service that was busy is asked again.

use std::time::Duration;

use hyper::header::{HeaderMap, RETRY_AFTER};

/// Wait before the first repetition; it grows by half each time.
pub const FIRST_WAIT: Duration = Duration::from_secs(1);

/// Longest wait before a repetition: a service that asks for more has said no.
pub const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Returns how long a service asks to be left alone.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_a_number_of_seconds() {
        let of = |value: &str| retry_after(&HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]));
        assert_eq!((of("2"), of(" 0.5 ")), (Some(Duration::from_secs(2)), Some(Duration::from_millis(500))));
        // A date is left to the caller's own wait.
        for value in ["Sat, 28 Nov 2026 12:00:00 GMT", "-1", "soon"] {
            assert_eq!(of(value), None, "{value}");
        }
        assert_eq!(retry_after(&HeaderMap::new()), None);
    }
}
