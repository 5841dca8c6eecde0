//! Routers over servers of tests.

use std::time::Duration;

use crate::router::RouterOptions;

/// A router that tries and probes often, so that tests need not wait for it.
pub fn impatient(probe_every: Duration, patience: Duration) -> RouterOptions {
    RouterOptions {
        probe: vec![1, 2],
        probe_every,
        first_wait: Duration::from_millis(50),
        longest_wait: Duration::from_millis(200),
        patience,
        adopt: Duration::from_secs(20),
        tries: 10,
        ..RouterOptions::default()
    }
}
