//! A simulated sampler, whose sequences draw a token each in every pass.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};

use super::Service;

/// A number by which something is kept in order.
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

/// One sampler. Times are in seconds since the beginning.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    /// Tokens that a sequence which ran all the time would have drawn.
    drawn: f64,
    /// The moment that `drawn` is of.
    since: f64,
    /// Until when it draws nothing, since it computes prompts, or learns, or reads new weights.
    held: f64,
    /// Sequences that run, by what `drawn` is when they end, with their attempts.
    running: BinaryHeap<Reverse<(Key, usize)>>,
    /// Attempts that wait for a place, with the tokens that they ask for.
    waiting: VecDeque<(usize, f64)>,
    /// Changes of what runs: an event that was made before the last is of no account.
    pub changes: u64,
    /// Seconds without anything to do.
    pub idle: f64,
    /// Attempts that are asked here.
    pub attempts: usize,
}

impl Sampler {
    /// Seconds of a pass.
    fn pass(&self, service: &Service) -> f64 {
        service.batch + service.sequence * self.running.len() as f64
    }

    /// Lets time pass.
    pub(super) fn advance(&mut self, now: f64, service: &Service) {
        let free = now - self.since.max(self.held);
        if free > 0.0 {
            match self.running.is_empty() {
                true => self.idle += free,
                false => self.drawn += free / self.pass(service).max(f64::MIN_POSITIVE),
            }
        }
        self.since = now;
    }

    /// Draws nothing for so long.
    pub(super) fn hold(&mut self, now: f64, seconds: f64) {
        self.held = self.held.max(now) + seconds;
    }

    /// Begins a reply of so many tokens, or lets it wait for a place.
    pub(super) fn begin(&mut self, attempt: usize, tokens: f64, rows: usize) {
        if self.running.len() < rows {
            self.running.push(Reverse((Key(self.drawn + tokens), attempt)));
        } else {
            self.waiting.push_back((attempt, tokens));
        }
    }

    /// Attempts whose replies are done by now; others take their places.
    pub(super) fn ended(&mut self, rows: usize) -> Vec<usize> {
        let mut ended = Vec::new();
        while let Some(Reverse((Key(end), attempt))) = self.running.peek().copied()
            && end <= self.drawn + 1e-9 * self.drawn.max(1.0)
        {
            self.running.pop();
            ended.push(attempt);
            if let Some((next, tokens)) = self.waiting.pop_front() {
                self.begin(next, tokens, rows);
            }
        }
        ended
    }

    /// When the next reply is done, if nothing changes.
    pub(super) fn next(&self, service: &Service) -> Option<f64> {
        let Reverse((Key(end), _)) = self.running.peek()?;
        Some(self.since.max(self.held) + (end - self.drawn).max(0.0) * self.pass(service))
    }
}
