//! Plans runs: computes memory and time before anything is started.
//!
//! A plan needs the shape of the model ([`Shape`], from its `config.json`), not the weights. [`Learner`] has
//! the memory of each process of a PyTorch learner by purpose; [`time::Work`] the time of a step, from the
//! peaks of a [`Device`] and the fractions of them that are usual; [`fleet::Fleet`] simulates a run on many
//! devices: staleness, idle times, and the part that limits it.
//!
//! # Example
//! Memory of a process of 8 that train a model together.
//! ```
//! use levade_plan::{Learner, Shape, memory};
//!
//! let shape = Shape::read(
//!     r#"{"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
//!         "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": true}"#,
//! )?;
//! assert_eq!(shape.parameters(), 596_042_752);
//! let learner = Learner {
//!     processes: 8, tensor: 1, context: 1, pipeline: 1, compute: 2, recompute: true, head_rows: 512,
//!     tokens: 8192, lora: None, reference: false, critic: false, on_gpu: true,
//! };
//! let plan = learner.plan(&shape);
//! // More than its eighth of the weights and of the optimizer's state, in f32.
//! assert!(memory::total(&plan) > 16 * shape.parameters() / 8, "{plan:?}");
//! # Ok::<(), String>(())
//! ```
//!
//! Out of scope: the memory of the embedded engine, which the engine itself plans
//! ([`Planned`](levade_run::policies::Planned)), and printing (the binary).

pub mod devices;
pub mod fleet;
pub mod memory;
pub mod shape;
pub mod time;

pub use devices::Device;
pub use memory::Learner;
pub use shape::Shape;
