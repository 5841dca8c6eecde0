//! The gateway: endpoints that agents and people already speak to, behind which every token is recorded.
//!
//! [`serve`] answers in the shapes of OpenAI's and Anthropic's APIs, and in those in which vLLM and
//! SGLang take token ids. A dialect parses a request into a [`Call`], which `levade-call` answers with a
//! transcript of events. From these the dialect writes its response, complete or as a stream.
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

mod anthropic;
mod call;
mod gateway;
mod http;
mod info;
mod key;
mod metrics;
mod openai;
mod parameters;
mod parts;
mod responses;
mod rewards;
mod route;
mod session;
mod sglang;
mod tokens;
mod vllm;

#[cfg(test)]
mod batch_tests;
#[cfg(test)]
mod constraints_tests;
#[cfg(test)]
mod fit_tests;
#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod generate_tests;
#[cfg(test)]
mod probes_tests;
#[cfg(test)]
mod record_tests;
#[cfg(test)]
mod relay_tests;
#[cfg(test)]
mod scripted;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod told_tests;
#[cfg(test)]
mod training_tests;

pub use call::Call;
pub use gateway::{Caller, Gateway, Model, Options};
pub use http::serve;
pub use route::{Route, When};
pub use session::{Reward, Session, SessionOptions};
