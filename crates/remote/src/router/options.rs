//! Settings of a router.

use std::time::Duration;

use super::choice::Choice;

/// Settings of a [`Router`](super::Router). Times do not count while the process, or a member, stands still.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterOptions {
    /// Name of the policy that all members draw from; requests for another are refused. Empty for any.
    pub policy: String,
    /// How a member is chosen.
    pub choice: Choice,
    /// Most calls that run at once; 0 for any number.
    pub most_running: usize,
    /// Most calls that wait until fewer run; more are refused with [`Busy`](levade_policy::PolicyError).
    pub most_waiting: usize,
    /// Most members that one call is tried on: a request that makes members fail is not to take all down.
    pub tries: usize,
    /// How long a call waits for a member to serve again, where none does.
    pub patience: Duration,
    /// How long a member may take to accept a request,
    pub accept: Duration,
    /// how long it may draw nothing for anybody while calls wait for it,
    pub silence: Duration,
    /// how long it may take to answer a question about itself, or to end a call,
    pub answer: Duration,
    /// and how long to adopt weights.
    pub adopt: Duration,
    /// Prompt of probes, which ask for one token.
    pub probe: Vec<u32>,
    /// How long a member that has nothing to do is left alone between two probes,
    pub probe_every: Duration,
    /// and how long it may take to answer one.
    pub probe_within: Duration,
    /// Failures in a row after which a member is quarantined.
    pub failures: u32,
    /// How long a member stays in quarantine before its first probe; doubled with each that fails,
    pub first_wait: Duration,
    /// up to this.
    pub longest_wait: Duration,
}

impl Default for RouterOptions {
    fn default() -> Self {
        RouterOptions {
            policy: String::new(),
            choice: Choice::default(),
            most_running: 0,
            most_waiting: 1024,
            tries: 3,
            patience: Duration::from_secs(60),
            accept: Duration::from_secs(60),
            silence: Duration::from_secs(60),
            answer: Duration::from_secs(10),
            adopt: Duration::from_secs(600),
            probe: vec![0],
            probe_every: Duration::from_secs(30),
            probe_within: Duration::from_secs(30),
            failures: 2,
            first_wait: Duration::from_secs(1),
            longest_wait: Duration::from_secs(60),
        }
    }
}
