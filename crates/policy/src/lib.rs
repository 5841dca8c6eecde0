//! The traits through which everything above talks to a model, and their types.
//!
//! A [`Sampler`] draws tokens; a [`Learner`] turns batches into weight updates. They are shaped like verbs of
//! a service so that the embedded engine, a vLLM server and a group of FSDP workers all fit behind them. A
//! [`SampleStream`] yields tokens with their behaviour log-probability and weight version as they are drawn.
//!
//! An [`Embedder`] turns texts into vectors, for search.
//!
//! *Behaviour log-probability*: log-softmax(logits / temperature) over the full vocabulary; at temperature 0
//! (greedy, for evaluation) it is taken at temperature 1.
//!
//! [`Timely`] gives every call of either a deadline. [`Simulator`] implements both over one small table, for
//! tests of everything above; [`crash_point`] marks the places at which such tests kill the process.
//!
//! A [`Grammar`] holds a reply to a form. Samplers know no text, so they are given [`Grammars`] over their
//! vocabulary, and ask the [`Constraint`] of each reply which tokens may come next.
//!
//! Deadlines go by the time in which the process [runs](awake), here and in every room above. Libraries that
//! panic over damaged files are called through [`caught()`].
//!
//! Not here: prompts as text (`levade-text`), and any model.

mod adjust;
mod adopt;
pub mod awake;
mod calls;
mod caught;
mod constrain;
mod crash;
mod cut;
mod device;
mod embedder;
pub mod environment;
mod error;
mod grammar;
mod learner;
mod lora;
mod numbers;
mod precision;
mod random;
mod sampler;
mod simulator;
mod terms;
mod timely;
mod weights;
mod within;

pub use adopt::adopt_all;
pub use calls::CallStreams;
pub use caught::caught;
pub use constrain::constrain;
pub use crash::{CRASH_AT, crash_point};
pub use cut::{Cut, MicroBatch, Uncut};
pub use device::Timing;
pub use embedder::{Embedder, TextIds, TextRole};
pub use error::PolicyError;
pub use grammar::{Allowed, Constraint, Grammar, Grammars, TokenSet};
pub use learner::{ForwardBackward, Learner, OptimParams, OptimReport, Predictions, TrainRequest, Trained};
pub use lora::LoraOptions;
pub use precision::Precision;
pub use random::uniform;
pub use sampler::{
    Completion, DeviceStats, FinishReason, Load, SampleEvent, SampleRequest, SampleStream, Sampler,
    SamplingParams, TokenBytes, TopLogprobs,
};
pub use simulator::{Simulator, SimulatorConfig};
pub use terms::{LossRow, LossTerm, LossTerms};
pub use timely::Timely;
pub use weights::{Content, Manifest, Place, SavedFile, WeightsAt, WeightsRef, checksum};
pub use within::within;
