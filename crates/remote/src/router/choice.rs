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

/// Strategy by which a router selects a replica for a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Choice {
    /// The replicas are selected in rotation.
    RoundRobin,
    /// The replica with the fewest running calls of this router is selected. On a tie, the replicas
    /// are selected in rotation.
    LeastLoaded,
    /// The replica that has cached the longest prefix of the prompt is selected, unless it has many
    /// more calls than another replica.
    Prefix(PrefixOptions),
}

impl Default for Choice {
    fn default() -> Self {
        Choice::Prefix(PrefixOptions::default())
    }
}

impl Choice {
    pub(crate) fn create_selector(&self) -> Box<dyn ReplicaSelector> {
        match self {
            Choice::RoundRobin => Box::new(RoundRobin::default()),
            Choice::LeastLoaded => Box::new(LeastLoaded::default()),
            Choice::Prefix(options) => Box::new(Prefix::new(options.clone())),
        }
    }
}

/// A replica that is able to take a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReplicaCandidate {
    /// Index of the replica in the router.
    pub replica: usize,
    /// Calls of the router that run on the replica.
    pub running: usize,
}

/// Strategy that selects a replica for each call of a router.
pub(crate) trait ReplicaSelector: Send {
    /// Selects the replica for a call with the prompt `prompt`, and returns its index. `candidates`
    /// must not be empty, and must be sorted by index.
    fn choose(&mut self, prompt: &[u32], candidates: &[ReplicaCandidate]) -> usize;

    /// Records a token sequence that `replica` is computing or has computed, and so has in its
    /// prefix cache.
    fn record_tokens(&mut self, _replica: usize, _tokens: &[u32]) {}

    /// Records that `replica` may have lost its prefix cache.
    fn forget_replica(&mut self, _replica: usize) {}
}
