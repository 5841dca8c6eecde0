//! Options of a router.

use std::time::Duration;

use super::choice::Choice;

/// Options of a [`Router`](super::Router). Timeouts exclude time in which the process or a replica
/// is paused.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterOptions {
    /// Name of the policy that all replicas sample from. Requests that name another policy are
    /// rejected. If empty, requests for any policy are accepted.
    pub policy: String,
    /// Strategy by which a replica is selected for a call.
    pub choice: Choice,
    /// Maximum number of calls that run at the same time. 0 disables the limit.
    pub max_running: usize,
    /// Maximum number of calls that wait to run. Further calls are rejected with
    /// [`Busy`](levade_policy::PolicyError).
    pub max_waiting: usize,
    /// Maximum number of replicas on which one call is tried. Limits the damage of a request that
    /// makes replicas fail. Must be at least 1.
    pub tries: usize,
    /// Maximum time that a call waits for a serving replica if no replica serves.
    pub replica_timeout: Duration,
    /// Maximum time that a replica may take to accept a request.
    pub accept: Duration,
    /// Maximum time in which a replica samples no token for any call although calls wait for
    /// tokens.
    pub silence: Duration,
    /// Maximum time that a replica may take to answer a status query or to end an aborted call.
    pub response_timeout: Duration,
    /// Maximum time that a replica may take to load weights.
    pub update_timeout: Duration,
    /// Prompt of the probes, as token ids. A probe samples one token. Must not be empty.
    pub probe: Vec<u32>,
    /// Interval between probes of a replica that samples nothing.
    pub probe_every: Duration,
    /// Maximum time that a probe may take.
    pub probe_within: Duration,
    /// Number of consecutive failures after which a replica is quarantined. At least 1.
    pub failures: u32,
    /// Time from the start of a replica's quarantine to its first probe. The time to the next probe
    /// doubles with each failed probe.
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
