//! The embedded engine: kernels, transformer, sampling and training on this machine.
//!
//! [`Engine::start`] loads a model and runs it on a thread of its own; the handle is both a
//! [`Sampler`](levade_policy::Sampler) and a [`Learner`](levade_policy::Learner) over the same weights in
//! the same memory.
//!
//! Guarantees:
//! - **Batch invariance.** An element of an output is computed by the same operations in the same order
//!   whatever else is in the batch, however prompts are chunked, paths packed or prefixes shared, on any
//!   number of threads and, under one [`Order`] of sums, with any instruction set. So the log-probability
//!   recorded at sampling equals, to the bit, what the training forward computes for that token under the
//!   same weights.
//! - **Trees.** A token that several paths share goes through the model once; loss and gradient are those of
//!   training every path separately, up to rounding.
//! - **Determinism.** A draw is a function of seed, stream and position; a gradient is the same bits on any
//!   number of threads.
//!
//! An [`Encoder`] runs models that turn texts into vectors; with their tokenizer, as [`TextEncoder`], it is
//! an [`Embedder`](levade_policy::Embedder).
//!
//! From the bottom up: `simd` (instruction sets), `product` (matrix products), `ops` (everything else that a
//! transformer computes), `transformer` (forward), `head` and `learning` (loss, backward, optimiser), `cache`
//! and `scheduler` (sampling), `engine` and `service` (the handle and its thread). None of these can be seen
//! from outside, but for what the feature `testing` shows to tests and examples. Not here: text, files
//! (`levade-model`) and what a loss is (`levade-rl`).

mod activations;
mod adapter;
mod backward;
mod buffer;
mod cache;
mod checkpoint;
mod choose;
mod compute;
mod draw;
mod encoder;
mod engine;
mod head;
mod layout;
mod learning;
mod limits;
mod memory;
mod ops;
mod optimiser;
mod options;
mod packing;
mod parameters;
mod pool;
mod precision;
mod product;
mod radix;
#[cfg(test)]
mod reference;
mod scheduler;
mod scratch;
mod sequence;
mod service;
mod simd;
mod tensors;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod transformer;
mod turned;
mod value;
mod value_head;
mod weights;

pub use adapter::Adapter;
pub use encoder::{Encoder, TextEncoder};
pub use engine::{Engine, Fingerprint};
pub use layout::attention_shape;
pub use limits::available_memory;
pub use memory::{MemoryPlan, Purpose};
pub use ops::kv::Shape;
pub use options::{EngineOptions, PlannedAdapter};
pub use precision::{Order, Precision};
pub use simd::Isa;

use compute::Compute;

/// Why an engine could not be started.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The model's files.
    #[error(transparent)]
    Model(#[from] levade_model::ModelError),
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
        /// Memory that would be needed.
        plan: MemoryPlan,
        /// Bytes that are free.
        available: u64,
    },
}
