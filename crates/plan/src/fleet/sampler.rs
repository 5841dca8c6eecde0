//! A simulated sampler, which generates one token for each running sequence in every pass.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};

use super::Service;

/// A totally ordered `f64`, as key of a heap.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Key(pub f64);

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// One sampler. Times are in seconds since the start of the simulation.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    /// Tokens that a sequence would have sampled if it had run since the start.
    sampled: f64,
    /// Time at which `sampled` was updated.
    since: f64,
    /// Time until which the sampler generates nothing because it computes prompts, trains or loads
    /// new weights.
    blocked_until: f64,
    /// Attempts with a running sequence, ordered by the value of `sampled` at which the sequence
    /// ends.
    running: BinaryHeap<Reverse<(Key, usize)>>,
    /// Attempts that wait until a running sequence ends, with the number of tokens that they
    /// request.
    waiting: VecDeque<(usize, f64)>,
    /// Number of changes to the running sequences. An event scheduled before the last change is
    /// ignored.
    pub changes: u64,
    /// Seconds in which the sampler was neither paused nor had running sequences.
    pub idle: f64,
    /// Unfinished attempts that are assigned to this sampler.
    pub attempts: usize,
}

impl Sampler {
    /// Returns the seconds of one decoding pass.
    fn pass(&self, service: &Service) -> f64 {
        service.batch + service.sequence * self.running.len() as f64
    }

    /// Advances the time to `now`.
    pub(super) fn advance(&mut self, now: f64, service: &Service) {
        let free = now - self.since.max(self.blocked_until);
        if free > 0.0 {
            if self.running.is_empty() {
                self.idle += free
            } else {
                self.sampled += free / self.pass(service).max(f64::MIN_POSITIVE)
            }
        }
        self.since = now;
    }

    /// Pauses the sampler for another `seconds`, after any pause in effect.
    pub(super) fn block(&mut self, now: f64, seconds: f64) {
        self.blocked_until = self.blocked_until.max(now) + seconds;
    }

    /// Starts a completion of `tokens` tokens. It waits if `rows` sequences are running.
    pub(super) fn start(&mut self, attempt: usize, tokens: f64, rows: usize) {
        if self.running.len() < rows {
            self.running.push(Reverse((Key(self.sampled + tokens), attempt)));
        } else {
            self.waiting.push_back((attempt, tokens));
        }
    }

    /// Removes and returns the attempts whose completions have ended. Waiting attempts take over.
    pub(super) fn take_finished(&mut self, rows: usize) -> Vec<usize> {
        let mut ended = Vec::new();
        while let Some(Reverse((Key(end), attempt))) = self.running.peek().copied()
            && end <= self.sampled + 1e-9 * self.sampled.max(1.0)
        {
            self.running.pop();
            ended.push(attempt);
            if let Some((next, tokens)) = self.waiting.pop_front() {
                self.start(next, tokens, rows);
            }
        }
        ended
    }

    /// Returns the time at which the next completion ends if nothing changes, or `None` if no
    /// sequence runs.
    pub(super) fn next(&self, service: &Service) -> Option<f64> {
        let Reverse((Key(end), _)) = self.running.peek()?;
        Some(
            self.since.max(self.blocked_until) + (end - self.sampled).max(0.0) * self.pass(service),
        )
    }
}
