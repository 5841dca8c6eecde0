//! Estimates the memory and time of a run before it starts.
//!
//! An estimate needs the shape of the model ([`Shape`], from its `config.json`), but not the
//! weights. [`Learner`] computes the memory of each process of a PyTorch learner, by purpose.
//! [`time::Workload`] computes the time of a step from the peak rates of a [`Device`] and the
//! fractions of them that are usually reached. [`fleet::Fleet`] simulates a run on many devices and
//! reports its staleness, its idle times and its bottleneck.
//!
//! # Example
//! The memory of one of 8 processes that train a model together:
//! ```
//! use levade_plan::{Learner, Shape, memory};
//!
//! let shape = Shape::parse(
//!     r#"{"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
//!         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
//!         "vocab_size": 151936, "tie_word_embeddings": true}"#,
//! )?;
//! assert_eq!(shape.parameters(), 596_042_752);
//! let learner = Learner {
//!     processes: 8, tensor: 1, context: 1, pipeline: 1, compute: 2, recompute: true,
//!     head_rows: 512, tokens: 8192, lora: None, reference: false, critic: false, on_gpu: true,
//! };
//! let plan = learner.plan_memory(&shape);
//! // More than an eighth of the weights, gradients and optimizer moments, in f32.
//! assert!(memory::total_bytes(&plan) > 16 * shape.parameters() / 8, "{plan:?}");
//! # Ok::<(), String>(())
//! ```
//!
//! Out of scope: the memory of the embedded engine, which the engine itself plans
//! ([`PlannedModels`](levade_run::policies::PlannedModels)), and printing, which the binary does.

pub mod devices;
pub mod fleet;
pub mod memory;
pub mod shape;
pub mod time;

pub use devices::Device;
pub use memory::Learner;
pub use shape::Shape;
