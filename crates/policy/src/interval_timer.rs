//! Measures intervals in wall-clock time.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use levade_tree::TimeInterval;

/// Timer of an interval. The clock of the machine dates the start; a clock that never goes backward
/// measures the duration.
#[derive(Debug, Clone, Copy)]
pub struct IntervalTimer {
    start: SystemTime,
    since: Instant,
}

impl IntervalTimer {
    /// Starts a timer now.
    pub fn start() -> Self {
        IntervalTimer { start: SystemTime::now(), since: Instant::now() }
    }

    /// Returns the time since the start of the timer.
    pub fn elapsed(&self) -> Duration {
        self.since.elapsed()
    }

    /// Returns the interval from the start until now.
    pub fn interval(&self) -> TimeInterval {
        let start = self.start.duration_since(UNIX_EPOCH).unwrap_or_default();
        TimeInterval { start: nanoseconds(start), duration: nanoseconds(self.elapsed()) }
    }
}

/// Returns a duration in nanoseconds. The maximum, 2⁶⁴ ns, is 584 years.
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
