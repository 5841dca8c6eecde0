//! Calls models on behalf of agents: fits the prompt to the context, samples, and records every
//! token.
//!
//! A [`Party`] answers the calls of one agent. It is a sampler of tokens, or a chat API. A [`Cast`]
//! contains the parties of an attempt by the names of their agents, and a [`Recorder`] that records
//! all calls. [`Cast::call`] is the only way to call a model, for agent loops, API endpoints,
//! teachers and judges. It finds the recorded history that the messages continue, fits the prompt
//! to the party's context, samples with the attempt's random streams, and records prompt and
//! completion. A [`Transcript`] contains the events of a call, for any number of readers.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use levade_call::{Backend, Cast, Input, Party, PartyLimits, Recorder, Request, SamplingRule};
//! use levade_conversation::{Format, Options};
//! use levade_policy::{SamplingParams, Simulator, SimulatorConfig};
//! use levade_text::{Message, testing};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! let chat = Arc::new(testing::tiny_chat()?);
//! let config = SimulatorConfig { vocabulary: testing::VOCABULARY, ..SimulatorConfig::default() };
//! let party = Party::new(
//!     "tiny",
//!     Backend::Tokens(Arc::new(Simulator::new(config))),
//!     Some(Arc::new(Format::new(chat, Options::default()))),
//!     PartyLimits { context: 4096, timeout: Duration::from_secs(10) },
//!     SamplingRule::Default(SamplingParams { max_tokens: 8, ..SamplingParams::default() }),
//! );
//! let party = Party { agent: "solver".into(), ..party };
//! let cast = Cast::new([Arc::new(party)], Recorder::standalone(Some(1), Arc::default()));
//!
//! let request = Request::new(Input::Messages(vec![Message::user("What is 2 + 3?")]));
//! let end = cast.call("solver", request).await?.completion().await?;
//! let recorded = cast.recorder().close(Duration::from_secs(1)).await;
//! assert_eq!(recorded.trajectory.sampled_tokens(), end.tokens);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Guarantees
//! - **Sampled tokens are recorded**, including those of a call that is aborted or fails.
//! - **A call is admitted once.** A rejected call changes no random stream. If it is rejected after
//!   its admission, for example because its prompt is too long, it has used one of the attempt's
//!   calls.
//! - **Every wait has a timeout**, which does not count the time in which the sampler's device
//!   trains.
//! - **An error has a kind, the wrong value and a hint** ([`ApiError`]).
//!
//! Out of scope: HTTP and the formats of APIs (`levade-gateway`), tools and agent loops
//! (`levade-agent`).

mod api_error;

mod blocking;
#[cfg(test)]
mod call_tests;
mod cast;
mod chat_api;
mod completion_parser;
mod constraints;
mod external;
mod fit;
mod generate;
#[cfg(test)]
mod generate_tests;
mod metrics;
mod options;
mod party;
mod probes;
mod prompt;
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
pub use options::{BatchMembership, BatchOutcome, CallOptions};
pub use party::{Backend, Party, PartyLimits, SamplingRule, Summarizer, TokenBackend};
pub use probes::probe_agent;
pub use recorder::{
    CallRecord, PromptRecording, Recorder, RecorderOptions, Recording, ToolCallIds,
};
pub use request::{
    Constraint, Input, OpeningLimit, Request, SamplingOptions, ToolChoice, Truncation,
};
pub use transcript::{
    End, EndGuard, Event, Head, MessageTokens, Reader, Token, Transcript, message_parts,
};
