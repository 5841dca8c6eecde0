//! How much toolboxes were used.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

/// Calls of a toolbox that came to an end, in this process, over all its sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Used {
    /// How many.
    pub calls: u64,
    /// How long they took, added up. Of calls that ran at once each counts.
    pub time: Duration,
    /// How long they waited for their turn before, added up likewise.
    pub waited: Duration,
}

impl Used {
    /// Use of two toolboxes, or of one in two stretches.
    pub fn and(self, other: Used) -> Used {
        Used {
            calls: self.calls + other.calls,
            time: self.time + other.time,
            waited: self.waited + other.waited,
        }
    }

    /// Use since `before`.
    pub fn since(self, before: Used) -> Used {
        Used {
            calls: self.calls.saturating_sub(before.calls),
            time: self.time.saturating_sub(before.time),
            waited: self.waited.saturating_sub(before.waited),
        }
    }
}

/// Use of a toolbox, counted by all its sessions.
#[derive(Debug, Default)]
pub(super) struct Meter(Mutex<Used>);

impl Meter {
    /// Adds a call that took so long, after it had waited.
    pub fn add(&self, time: Duration, waited: Duration) {
        let mut used = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.and(Used { calls: 1, time, waited });
    }

    /// Use so far.
    pub fn read(&self) -> Used {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
