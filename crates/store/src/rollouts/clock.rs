//! The clock of a store, which is the only clock for leases and timeouts.

use std::fmt::Debug;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A source of the current time, which tests can replace.
pub trait Clock: Debug + Send + Sync {
    /// Returns the current time as a Unix timestamp in seconds. It never goes backward.
    fn now(&self) -> f64;
}

/// A clock that reads the system's time once, at its creation, and then adds the elapsed monotonic
/// time. A later change of the system's time therefore neither expires nor extends a lease.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
    start_time: f64,
}

impl Default for SystemClock {
    fn default() -> Self {
        let start_time =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        SystemClock { start: Instant::now(), start_time }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> f64 {
        self.start_time + self.start.elapsed().as_secs_f64()
    }
}

/// A clock for tests, which shows the time that the test sets.
#[derive(Debug)]
pub struct ManualClock(Mutex<f64>);

impl ManualClock {
    /// Creates a clock that shows the Unix timestamp `now`, in seconds.
    pub fn new(now: f64) -> Self {
        ManualClock(Mutex::new(now))
    }

    /// Adds `seconds` to the time that the clock shows. A negative number moves the clock backward,
    /// like a faulty system clock.
    pub fn advance(&self, seconds: f64) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) += seconds;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> f64 {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
