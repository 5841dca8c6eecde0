//! Traits through which other crates sample from models and train them.
//!
//! A [`Sampler`] samples tokens; a [`Learner`] turns batches into weight updates. Their methods are
//! shaped like those of a service, so that the embedded engine, a vLLM server and a group of FSDP
//! workers all fit behind them. A [`SampleStream`] yields tokens with their behavior
//! log-probability and weight version. An [`Embedder`] turns texts into vectors for search.
//!
//! *Behavior log-probability*: log-softmax(logits / temperature) over the full vocabulary; at
//! temperature 0 (greedy, for evaluation) it is taken at temperature 1.
//!
//! A [`Grammar`] constrains the format of a completion. Samplers know no text: they get
//! [`Grammars`] over their vocabulary, and query the [`Constraint`] of each completion for the
//! tokens that may come next.
//!
//! # Example
//! ```
//! use std::time::Duration;
//!
//! use levade_policy::{
//!     Learner, SampleRequest, Sampler, SamplingParams, Simulator, SimulatorConfig,
//! };
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! let policy = Simulator::new(SimulatorConfig::default());
//! let request = SampleRequest {
//!     seed: 1,
//!     stream: 7,
//!     prompt: vec![1, 2, 3],
//!     params: SamplingParams { max_tokens: 8, ..SamplingParams::default() },
//!     ..SampleRequest::default()
//! };
//! let first = policy.sample(request.clone()).await?.collect(Duration::from_secs(10)).await?;
//! assert_eq!((first.tokens.len(), first.logprobs.len()), (8, 8));
//!
//! // Tokens are functions of weights, seed, stream and position.
//! let second = policy.sample(request.clone()).await?.collect(Duration::from_secs(10)).await?;
//! assert_eq!(first, second);
//!
//! // A request can require weights of a version, which the learner publishes.
//! policy.publish(1).await?;
//! let request = SampleRequest { min_version: 1, ..request };
//! let third = policy.sample(request).await?.collect(Duration::from_secs(10)).await?;
//! assert_eq!(third.tokens, first.tokens);
//! # Ok::<(), levade_policy::PolicyError>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Guarantees
//! - **Deadlines.** [`TimeoutPolicy`] gives every call of either trait a deadline. A device that
//!   hangs ends the run with an error that names the pending operation, and a supervisor can
//!   restart the run. Deadlines count only the time in which the process [runs](process_time), here
//!   and in every crate above.
//! - **Errors** are serializable with a code. [`PolicyError::is_transient`] returns whether the
//!   same call may succeed later.
//!
//! For tests of other crates, [`Simulator`] implements both traits over one small table,
//! [`crash_point`] marks the points at which tests kill the process, and [`block_in_caller`] makes
//! simulations repeatable. [`catch_panic`] converts panics of library calls on damaged files to
//! errors, and [`environment`] selects the environment variables that child processes get.
//!
//! Out of scope: prompts as text (`levade-text`), and every real model.

mod adjust;
mod blocking;
mod calls;
mod constrain;
mod crash;
mod device;
mod embedder;
pub mod environment;
mod error;
mod grammar;
mod interval_timer;
mod learner;
mod lora;
mod micro_batch_plan;
mod numbers;
mod panics;
mod precision;
pub mod process_time;
mod random;
mod random_hex;
mod sampler;
mod sampler_timeout;
mod simulator;
mod terms;
mod timeout_policy;
mod weight_update;
mod weights;

pub use blocking::{block_in_caller, is_blocking_in_caller, run_blocking};
pub use calls::CallStreams;
pub use constrain::constrain;
pub use crash::{CRASH_AT, crash_point};
pub use device::Timing;
pub use embedder::{Embedder, TextIds, TextRole};
pub use error::PolicyError;
pub use grammar::{AllowedTokens, Constraint, Grammar, Grammars, TokenSet};
pub use interval_timer::IntervalTimer;
pub use learner::{
    ForwardBackward, Learner, OptimParams, OptimReport, Predictions, TrainReport, TrainRequest,
};
pub use lora::LoraOptions;
pub use micro_batch_plan::{MicroBatch, MicroBatchPlan, UpdateSequences};
pub use panics::catch_panic;
pub use precision::Precision;
pub use random::uniform;
pub use random_hex::random_hex;
pub use sampler::{
    Completion, DeviceStats, FinishReason, Load, SampleEvent, SampleRequest, SampleStream, Sampler,
    SamplingParams, TokenBytes, TopLogprobs,
};
pub use sampler_timeout::with_sampler_timeout;
pub use simulator::{Simulator, SimulatorConfig};
pub use terms::{LossRow, LossTerm, LossTerms};
pub use timeout_policy::TimeoutPolicy;
pub use weight_update::update_sampler_weights;
pub use weights::{Content, Manifest, SavedFile, WeightsAt, WeightsLocation, WeightsRef, checksum};
