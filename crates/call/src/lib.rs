//! Calls of models: who answers an agent, how the prompt is fitted, sampled and recorded.
//!
//! A [`Party`] answers the calls of one agent: a sampler of tokens, or a chat API. A [`Cast`] has the parties of an
//! attempt by the names of their agents, and a [`Recorder`] that records all their calls. [`Cast::call`] is the one
//! way to ask a model, for agent loops, API endpoints, teachers and judges: it finds the recorded history that the
//! messages continue, fits the prompt into the party's context, samples with the attempt's random streams, and
//! records prompt and completion. A [`Transcript`] has the events of the call, for any number of readers.
//!
//! # Guarantees
//! - **Sampled tokens are recorded**, also those of a call that is aborted or that fails.
//! - **A call is admitted once.** A rejected call changes no random stream and no limit.
//! - **Every wait has a timeout**, which does not count the time in which the sampler's device trains.
//! - **An error has a kind, the wrong value and a way out** ([`ApiError`]).
//!
//! Out of scope: HTTP and the formats of APIs (`levade-gateway`), tools and agent loops (`levade-agent`).

mod api_error;

mod blocking;
mod cast;
mod chat_api;
mod completion_parser;
mod constraints;
mod external;
mod fit;
mod generate;
mod metrics;
mod options;
mod party;
mod probes;
mod recorder;
mod relay;
mod request;
mod transcript;

pub use api_error::{ApiError, ErrorKind};
pub use blocking::blocking;
pub use cast::{Cast, call};
pub use chat_api::{ChatApi, ChatCompletion, ChatDelta, ChatQuery};
pub use completion_parser::before_stop;
pub use external::ExternalCall;
pub use metrics::{CallMetrics, Histogram};
pub use options::{Batch, BatchOutcome, CallOptions};
pub use party::{Backend, Party, PartyLimits, SamplingRule, Summarizer, TokenBackend};
pub use probes::probe_agent;
pub use recorder::{CallRecord, PromptRecording, Recorded, Recorder, RecorderOptions, ToolCallIds};
pub use request::{Constraint, Input, OpeningLimit, Request, SamplingOptions, ToolChoice, Truncation};
pub use transcript::{End, Ending, Event, Head, MessageTokens, Reader, Token, Transcript, parts_of};
