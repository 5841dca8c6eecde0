//! Options for routers over fake servers.

use std::time::Duration;

use crate::router::RouterOptions;

/// Returns options with short intervals and many tries, so that tests need not wait.
pub fn impatient(probe_every: Duration, replica_timeout: Duration) -> RouterOptions {
    RouterOptions {
        probe: vec![1, 2],
        probe_every,
        initial_wait: Duration::from_millis(50),
        max_wait: Duration::from_millis(200),
        replica_timeout,
        update_timeout: Duration::from_secs(20),
        tries: 10,
        ..RouterOptions::default()
    }
}
