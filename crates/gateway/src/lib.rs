//! The gateway: endpoints that agents and people already speak to, behind which every token is recorded.
//!
//! [`Gateway::router`] answers in the shapes of OpenAI's and Anthropic's APIs, and in those in which vLLM and
//! SGLang take token ids. A call comes in one dialect and is read into a [`Call`]; what comes of it is
//! written into a transcript of events, from which the dialect writes its answer, as a whole or as a stream.
//!
//! A call that bears the key of a [`Session`] belongs to an attempt: its conversation is recognised and goes
//! on with its exact ids (`levade-conversation`), its stream of random numbers is that of its prompt, and
//! when the session is closed all of its tokens are in a trajectory. Any other call stands for itself.
//!
//! Guarantees:
//! - **Nothing is recorded for the wrong attempt.** Keys authenticate, ids in paths do not; a closed
//!   session's key is told that it is over.
//! - **What was drawn is recorded**, also of a call whose client went away or whose deadline passed.
//! - **A call is drawn once.** A client that repeats a call whose connection broke before its end, or that
//!   says it repeats one, joins the first; equal calls at once are calls of their own.
//! - **Every wait has a deadline**, which does not count the time in which the sampler's device trains; a
//!   client that waits gets a sign of life meanwhile.
//! - **Errors** are in the shape of the API that was called, and name the field, its value and the way out.
//!
//! Not here: sampling (`levade-policy` and what implements it), starting programs (`levade-agent`), and
//! what a reward is worth (`levade-trainer`).

mod answering;
mod anthropic;
mod batch;
mod blocking;
mod call;
mod context;
mod exchange;
mod external;
mod fault;
mod forms;
#[cfg(test)]
mod fuzz_tests;
mod gateway;
mod http;
mod info;
mod key;
mod metrics;
mod model;
mod openai;
mod parameters;
mod parts;
mod places;
mod probes;
mod prompt;
mod reading;
#[cfg(test)]
mod record_tests;
mod relay;
mod responses;
mod rewards;
mod route;
#[cfg(test)]
mod scripted;
mod session;
mod sglang;
#[cfg(test)]
mod testing;
mod tokens;
#[cfg(test)]
mod told_tests;
#[cfg(test)]
mod training_tests;
mod transcript;
mod vllm;

pub use answering::Caller;
pub use call::{Call, Constraint, Input, Sampling, ToolChoice};
pub use external::{Answer, ExternalCall, Query, Responder, Said};
pub use fault::{Fault, Kind};
pub use gateway::{Gateway, Options};
pub use http::serve;
pub use model::{Backend, Model, TokenModel};
pub use probes::probe_agent;
pub use route::{Route, RouteContext, Summary, When};
pub use session::{Called, Recorded, Reward, Session, SessionLimits, SessionOptions};
pub use transcript::{End, Event, Head, Reader, Token, Transcript};
