//! Selects a replica for a call: round-robin, the least loaded, or by default the one that has
//! cached the longest prefix of the prompt.

mod least_loaded;
mod prefix;
mod prefix_index;
mod round_robin;

use least_loaded::LeastLoaded;
use prefix::Prefix;
pub use prefix::PrefixOptions;
use round_robin::RoundRobin;

/// How a router selects among the replicas that may take a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Choice {
    /// Each replica in turn.
    RoundRobin,
    /// The replica with the fewest running calls of this router; ties in turn.
    LeastLoaded,
    /// The replica that has cached the longest prefix of the prompt, unless it has many more calls
    /// than another.
    Prefix(PrefixOptions),
}

impl Default for Choice {
    fn default() -> Self {
        Choice::Prefix(PrefixOptions::default())
    }
}

impl Choice {
    pub(crate) fn make(&self) -> Box<dyn ReplicaSelector> {
        match self {
            Choice::RoundRobin => Box::new(RoundRobin::default()),
            Choice::LeastLoaded => Box::new(LeastLoaded::default()),
            Choice::Prefix(options) => Box::new(Prefix::new(options.clone())),
        }
    }
}

/// A replica that may take a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Index of the replica.
    pub replica: usize,
    /// Calls of the router that run on the replica.
    pub running: usize,
}

/// A selection strategy.
pub(crate) trait ReplicaSelector: Send {
    /// Returns the index of the replica that takes a call with this prompt. `candidates` must not
    /// be empty, and must be sorted by index.
    fn choose(&mut self, prompt: &[u32], candidates: &[Candidate]) -> usize;

    /// Records a token sequence that `replica` computes or has computed.
    fn record_tokens(&mut self, _replica: usize, _tokens: &[u32]) {}

    /// Records that `replica` may have lost its cache.
    fn forget_replica(&mut self, _replica: usize) {}
}
