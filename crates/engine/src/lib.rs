//! The embedded engine: kernels, transformer, sampling and training on this machine.
//!
//! [`Engine::start`] loads a model and runs it on a thread of its own; the handle is both a
//! [`Sampler`](dressage_policy::Sampler) and a [`Learner`](dressage_policy::Learner) over the same weights in the same memory.
//!
//! Guarantees:
//! - **Batch invariance.** An element of an output is computed by the same operations in the same order whatever else is
//!   in the batch, however prompts are chunked, paths packed or prefixes shared, on any number of threads and, under one
//!   [`Order`](precision::Order) of sums, with any instruction set. So the log-probability recorded at sampling equals, to the bit, what the training forward computes for
//!   that token under the same weights.
//! - **Trees.** A token that several paths share goes through the model once; loss and gradient are those of training every
//!   path separately, up to rounding.
//! - **Determinism.** A draw is a function of seed, stream and position; a gradient is the same bits on any number of threads.
//!
//! From the bottom up: [`simd`] (instruction sets), [`product`] (matrix products), `ops` (everything else that a
//! transformer computes), [`transformer`] (forward), `head` and [`learning`] (loss, backward, optimiser), [`cache`] and
//! `scheduler` (sampling), `engine` and `service` (the handle and its thread). What is public besides the handle is there for examples
//! and tests. Not here: text, files (`dressage-model`) and what a loss is (`dressage-rl`).

mod activations;
pub mod adapter;
mod backward;
pub mod buffer;
pub mod cache;
mod checkpoint;
mod choose;
mod engine;
mod head;
mod layout;
pub mod learning;
mod limits;
mod memory;
mod ops;
mod optimiser;
pub mod packing;
mod parameters;
mod pool;
pub mod precision;
pub mod product;
mod radix;
#[cfg(test)]
mod reference;
mod scheduler;
mod sequence;
mod service;
pub mod simd;
mod tensors;
pub mod testing;
pub mod transformer;
mod turned;
pub mod value;
pub mod weights;

pub use adapter::Adapter;
pub use engine::{Engine, EngineOptions, Fingerprint, PlannedAdapter};
pub use limits::available_memory;
pub use memory::{MemoryPlan, Purpose};
pub use ops::kv::Blocks;
pub use precision::{Kernel, Precision};
pub use simd::Isa;

/// Where the engine computes: its threads and instruction set.
pub struct Compute {
    /// The one pool of threads.
    pub(crate) pool: pool::Pool,
    /// The vector instructions in use, which the processor has.
    pub(crate) isa: Isa,
    /// What operands of products are rounded to.
    pub(crate) precision: Precision,
}

impl Compute {
    /// `threads` threads with the best instructions there are, in f32.
    pub fn new(threads: usize) -> Self {
        Self::with(threads, Isa::detect(), Precision::F32)
    }

    /// `threads` threads with the instructions named.
    ///
    /// # Panics
    /// When the processor does not have them ([`Isa::available`]).
    pub fn with(threads: usize, isa: Isa, precision: Precision) -> Self {
        // All calls of functions compiled for an instruction set rest on this.
        assert!(Isa::available().contains(&isa), "this processor does not run {isa:?}");
        Compute { pool: pool::Pool::new(threads), isa, precision }
    }

    /// What operands of products are rounded to.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// What inner loops of products are chosen by.
    pub fn kernel(&self) -> Kernel {
        Kernel { isa: self.isa, precision: self.precision }
    }
}

/// Why an engine could not be started.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The model's files.
    #[error(transparent)]
    Model(#[from] dressage_model::ModelError),
    /// An option out of range, or one that contradicts the model.
    #[error("{0}")]
    Options(String),
    /// Memory that is not there.
    #[error(
        "this would take {plan}, but only {} MiB are free; {}, or free memory",
        available >> 20,
        plan.ways_out()
    )]
    Memory {
        /// What would be needed.
        plan: MemoryPlan,
        /// Bytes that are free.
        available: u64,
    },
}
