//! Chooses a member for a call: each in turn, the least loaded, or by default the one that has computed the
//! longest beginning of the prompt.

mod least_loaded;
mod prefix;
mod prefix_index;
mod round_robin;

use least_loaded::LeastLoaded;
use prefix::Prefix;
pub use prefix::PrefixOptions;
use round_robin::RoundRobin;

/// How a router chooses among members that may take a call.
#[derive(Debug, Clone, PartialEq)]
pub enum Choice {
    /// Each in turn.
    RoundRobin,
    /// The one that runs the fewest of the router's calls; of equal ones, each in turn.
    LeastLoaded,
    /// The one that has computed most of the prompt, unless it is much more loaded than another.
    Prefix(PrefixOptions),
}

impl Default for Choice {
    fn default() -> Self {
        Choice::Prefix(PrefixOptions::default())
    }
}

impl Choice {
    pub(crate) fn make(&self) -> Box<dyn Choose> {
        match self {
            Choice::RoundRobin => Box::new(RoundRobin::default()),
            Choice::LeastLoaded => Box::new(LeastLoaded::default()),
            Choice::Prefix(options) => Box::new(Prefix::new(options.clone())),
        }
    }
}

/// A member that may take a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// Number of the member.
    pub member: usize,
    /// Calls of the router that run there.
    pub running: usize,
}

/// A way to choose.
pub(crate) trait Choose: Send {
    /// Number of the member that takes a call with this prompt. There is at least one candidate, and they are
    /// in the order of their numbers.
    fn choose(&mut self, prompt: &[u32], candidates: &[Candidate]) -> usize;

    /// Takes note of a path that `member` computes or has computed.
    fn computes(&mut self, _member: usize, _path: &[u32]) {}

    /// Takes note that `member` may have lost all that it had computed.
    fn forgets(&mut self, _member: usize) {}
}
