//! Options of a router.

use std::time::Duration;

use super::choice::Choice;

/// Options of a [`Router`](super::Router). Timeouts exclude time in which the process or a replica
/// is paused.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterOptions {
    /// Name of the policy that all replicas sample from. Requests for other policies are rejected.
    /// Empty accepts any policy.
    pub policy: String,
    /// How a replica is selected for a call.
    pub choice: Choice,
    /// Maximum number of calls that run at once. 0 disables the limit.
    pub max_running: usize,
    /// Maximum number of calls that wait to run. Further calls are rejected with
    /// [`Busy`](levade_policy::PolicyError).
    pub max_waiting: usize,
    /// Maximum number of replicas that one call is tried on, so that a request that makes replicas
    /// fail does not take all of them down. At least 1.
    pub tries: usize,
    /// Timeout for a call that waits until a replica serves, if none does.
    pub replica_timeout: Duration,
    /// Timeout for a replica to accept a request.
    pub accept: Duration,
    /// Timeout for a replica to sample any token, for any call, while calls wait for it.
    pub silence: Duration,
    /// Timeout for a replica to answer a status query or to end an aborted call.
    pub response_timeout: Duration,
    /// Timeout for a replica to load weights.
    pub update_timeout: Duration,
    /// Prompt of probes, which sample one token. Must not be empty.
    pub probe: Vec<u32>,
    /// Interval between probes of an idle replica.
    pub probe_every: Duration,
    /// Timeout for a probe.
    pub probe_within: Duration,
    /// Number of consecutive failures after which a replica is quarantined. At least 1.
    pub failures: u32,
    /// Time that a replica stays in quarantine before its first probe. It doubles with each failed
    /// probe.
    pub initial_wait: Duration,
    /// Maximum time between probes of a quarantined replica.
    pub max_wait: Duration,
}

impl Default for RouterOptions {
    fn default() -> Self {
        RouterOptions {
            policy: String::new(),
            choice: Choice::default(),
            max_running: 0,
            max_waiting: 1024,
            tries: 3,
            replica_timeout: Duration::from_secs(60),
            accept: Duration::from_secs(60),
            silence: Duration::from_secs(60),
            response_timeout: Duration::from_secs(10),
            update_timeout: Duration::from_secs(600),
            probe: vec![0],
            probe_every: Duration::from_secs(30),
            probe_within: Duration::from_secs(30),
            failures: 2,
            initial_wait: Duration::from_secs(1),
            max_wait: Duration::from_secs(60),
        }
    }
}
