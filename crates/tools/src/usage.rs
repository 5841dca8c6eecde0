//! Usage counters of toolboxes.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

/// Usage of a toolbox: its finished calls in this process, over all sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Number of finished calls.
    pub calls: u64,
    /// Total duration of the calls. Concurrent calls each count in full.
    pub time: Duration,
    /// Total time that calls waited for a permit. Concurrent waits each count in full.
    pub waited: Duration,
}

impl Usage {
    /// Returns the sum of two usages.
    pub fn plus(self, other: Usage) -> Usage {
        Usage {
            calls: self.calls + other.calls,
            time: self.time + other.time,
            waited: self.waited + other.waited,
        }
    }

    /// Returns the difference between this usage and an earlier reading `before`.
    pub fn minus(self, before: Usage) -> Usage {
        Usage {
            calls: self.calls.saturating_sub(before.calls),
            time: self.time.saturating_sub(before.time),
            waited: self.waited.saturating_sub(before.waited),
        }
    }
}

/// Usage counter that all sessions of a toolbox share.
#[derive(Debug, Default)]
pub(super) struct UsageMeter(Mutex<Usage>);

impl UsageMeter {
    /// Adds one call with its duration and the time that it waited for a permit.
    pub fn add(&self, time: Duration, waited: Duration) {
        let mut used = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.plus(Usage { calls: 1, time, waited });
    }

    /// Returns the usage of the toolbox so far.
    pub fn read(&self) -> Usage {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
