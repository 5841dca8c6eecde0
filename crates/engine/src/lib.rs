//! Samples from transformers and trains them on the CPU of this machine.
//!
//! [`Engine::start`] loads a model and runs it on its own thread. The handle is both a
//! [`Sampler`](levade_policy::Sampler) and a [`Learner`](levade_policy::Learner) over the same
//! weights in the same memory. One thread serves several policies: the base weights and
//! [adapters](Adapter) over them. Each handle belongs to one policy. An [`Encoder`] embeds texts as
//! vectors. Together with its tokenizer, as [`TextEncoder`], it is an
//! [`Embedder`](levade_policy::Embedder).
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use levade_engine::testing::{Compute, random_weights, tiny_config};
//! use levade_engine::{Engine, EngineOptions};
//! use levade_policy::{Learner, SampleRequest, Sampler, SamplingParams};
//! use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! // Random weights; `Engine::start` reads those of a model.
//! let compute = Compute::new(2);
//! let weights = random_weights(&compute, &tiny_config(), 1);
//! let options = EngineOptions { kv_memory_mb: 16, ..EngineOptions::default() };
//! let engine = Engine::start_with(compute, weights, &options, None)?;
//!
//! let request = SampleRequest {
//!     prompt: vec![5, 6, 7],
//!     params: SamplingParams { max_tokens: 4, ..SamplingParams::default() },
//!     ..SampleRequest::default()
//! };
//! let completion = engine.sample(request).await?.collect(Duration::from_secs(60)).await?;
//!
//! // The training forward pass computes the same log-probabilities, bit for bit.
//! let tokens = [&[5, 6, 7], &completion.tokens[..]].concat();
//! let target =
//!     |index| SequenceTarget { index, temperature: 1.0, term: Term::default() };
//! let targets = (3..tokens.len() as u32).map(target).collect();
//! let batch = TreeBatch::merge(&[SequenceInput { tokens: tokens.into(), targets }])?;
//! assert_eq!(engine.logprobs(Arc::new(batch)).await?, completion.logprobs);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Guarantees
//! - **Batch invariance.** Each output element is computed by the same operations in the same
//!   order, regardless of the rest of the batch, the prefill chunks, the packing of sequences,
//!   shared prefixes and the number of threads. For one [`SumOrder`] of sums, the instruction set
//!   makes no difference either. So the log-probability recorded at sampling equals, bit for bit,
//!   the log-probability that the training forward pass computes for that token under the same
//!   weights.
//! - **Trees.** A token that several sequences share goes through the model once. Loss and gradient
//!   equal those of training every sequence separately, up to rounding.
//! - **Determinism.** A sampled token is a function of seed, stream and position. A gradient has
//!   the same bits on any number of threads, which a bit-exact resume needs.
//! - **Memory** is planned before the start ([`MemoryPlan`]), and the engine stays within the plan.
//!
//! Modules from the bottom up: `simd` (instruction sets), `gemm` (matmul), `ops` (other operations
//! of a transformer, and how to add one), `transformer` (forward pass), `head` and `learning`
//! (loss, backward pass, optimizer), `cache` and `scheduler` (sampling), `engine` and `service`
//! (the handle and its thread). All are private; the feature `testing` exposes some of them to
//! tests and examples.
//!
//! A run records its [`Fingerprint`] in `engine.json`: kernel revision, precision, order of sums
//! and instruction set. If one of the first three differs, a resumed or replayed run computes
//! different bits and prints a note.
//!
//! Out of scope: text (`levade-text`), files (`levade-model`) and the definition of losses
//! (`levade-rl`).

mod activations;
mod adapter;
mod backward;
mod buffer;
mod cache;
mod checkpoint;
mod compute;
mod encoder;
mod engine;
mod gemm;
mod head;
mod layout;
mod learning;
mod limits;
mod memory;
mod ops;
mod optimizer;
mod options;
mod packing;
mod parameters;
mod pool;
mod precision;
mod radix;
#[cfg(test)]
mod reference;
mod row_sampling;
mod scheduler;
mod scratch;
mod sequence;
mod service;
mod simd;
mod tensors;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod token_sampling;
mod transformer;
mod transposed;
mod value;
mod value_head;
mod weights;

pub use adapter::Adapter;
pub use encoder::{Encoder, TextEncoder};
pub use engine::{Engine, Fingerprint};
pub use layout::attention_shape;
pub use limits::available_memory;
pub use memory::{MemoryPlan, MemoryPurpose};
pub use ops::kv::AttentionShape;
pub use options::{EngineOptions, PlannedAdapter};
pub use precision::{Precision, SumOrder};
pub use simd::Isa;

use compute::Compute;

/// Error that prevents an engine from starting.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The model's files cannot be read or are not supported.
    #[error(transparent)]
    Model(#[from] levade_model::ModelError),
    /// An option is out of range or contradicts the model.
    #[error("{0}")]
    Options(String),
    /// The planned memory exceeds the free memory.
    #[error(
        "the engine would take {plan}, but only {} MiB are free; {}, or free memory",
        available >> 20,
        plan.advice_text()
    )]
    Memory {
        /// Memory that the engine would need, by purpose.
        plan: MemoryPlan,
        /// Free memory in bytes, or the limit that the options set if it is lower.
        available: u64,
    },
}
