//! A simulated sampler, which generates one token for each running sequence in every pass.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};

use super::ServiceTimes;

/// A totally ordered `f64`, which serves as the key of a heap.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct HeapKey(pub f64);

impl Eq for HeapKey {}

impl PartialOrd for HeapKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for HeapKey {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// A simulated sampler. All times are in seconds since the start of the simulation.
#[derive(Debug, Default)]
pub(super) struct SimulatedSampler {
    /// Number of tokens that a sequence would have sampled if it had run since the start.
    sampled: f64,
    /// Time up to which `sampled` is computed, in seconds since the start of the simulation.
    since: f64,
    /// Time until which the sampler generates no tokens, because it computes prompts, trains or
    /// loads new weights.
    paused_until: f64,
    /// Attempts whose sequences run. The key is the value of `sampled` at which the sequence ends.
    running: BinaryHeap<Reverse<(HeapKey, usize)>>,
    /// Attempts that wait until a running sequence ends, with the number of tokens that they
    /// request.
    waiting: VecDeque<(usize, f64)>,
    /// Number of changes to the running sequences so far. An event that was scheduled before the
    /// last change is ignored.
    pub changes: u64,
    /// Total time in which the sampler was not paused but had no running sequence, in seconds.
    pub idle: f64,
    /// Number of unfinished attempts that are assigned to this sampler.
    pub attempts: usize,
}

impl SimulatedSampler {
    /// Returns the duration of one decoding pass with the running sequences, in seconds.
    fn pass_seconds(&self, service: &ServiceTimes) -> f64 {
        service.batch + service.sequence * self.running.len() as f64
    }

    /// Advances the sampler to the time `now`: running sequences sample tokens, or idle time
    /// passes.
    pub(super) fn advance(&mut self, now: f64, service: &ServiceTimes) {
        let free = now - self.since.max(self.paused_until);
        if free > 0.0 {
            if self.running.is_empty() {
                self.idle += free
            } else {
                self.sampled += free / self.pass_seconds(service).max(f64::MIN_POSITIVE)
            }
        }
        self.since = now;
    }

    /// Pauses the sampler for `seconds`, starting at the end of a pause that is in effect.
    pub(super) fn pause(&mut self, now: f64, seconds: f64) {
        self.paused_until = self.paused_until.max(now) + seconds;
    }

    /// Starts a completion of `tokens` tokens for an attempt. The completion waits if `rows`
    /// sequences are already running.
    pub(super) fn start_completion(&mut self, attempt: usize, tokens: f64, rows: usize) {
        if self.running.len() < rows {
            self.running.push(Reverse((HeapKey(self.sampled + tokens), attempt)));
        } else {
            self.waiting.push_back((attempt, tokens));
        }
    }

    /// Removes and returns the attempts whose completions have ended. Waiting attempts take their
    /// places, up to `rows` running sequences.
    pub(super) fn take_finished(&mut self, rows: usize) -> Vec<usize> {
        let mut ended = Vec::new();
        while let Some(Reverse((HeapKey(end), attempt))) = self.running.peek().copied()
            && end <= self.sampled + 1e-9 * self.sampled.max(1.0)
        {
            self.running.pop();
            ended.push(attempt);
            if let Some((next, tokens)) = self.waiting.pop_front() {
                self.start_completion(next, tokens, rows);
            }
        }
        ended
    }

    /// Returns the time at which the next completion ends if the running sequences do not change.
    /// Returns `None` if no sequence is running.
    pub(super) fn next_completion_time(&self, service: &ServiceTimes) -> Option<f64> {
        let Reverse((HeapKey(end), _)) = self.running.peek()?;
        Some(
            self.since.max(self.paused_until)
                + (end - self.sampled).max(0.0) * self.pass_seconds(service),
        )
    }
}
