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
