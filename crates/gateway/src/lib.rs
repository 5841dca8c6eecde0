//! Serves the APIs of OpenAI, Anthropic, vLLM and SGLang, and records every token behind them.
//!
//! A *dialect* is the format of one API. It parses a request into a [`Call`], which `levade-call` answers
//! with a transcript of events. From these the dialect writes its response, complete or as a stream.
//! [`serve`] runs all dialects.
//!
//! A call with the key of a [`Session`] belongs to an attempt: its conversation continues with its exact ids
//! (`levade-conversation`), its random stream follows from its prompt, and all of its tokens are in the
//! trajectory when the session closes. Prompts in token ids continue the longest sequence that they repeat. A
//! call without such a key is standalone.
//!
//! # Guarantees
//! - **Tokens are recorded for the right attempt.** Keys authenticate; ids in paths do not. A key of a closed
//!   session gets status 410.
//! - **Sampled tokens are recorded**, also those of a call whose client disconnected or whose deadline
//!   passed.
//! - **A repeated call is sampled once.** If a connection breaks before the end, or the client says that it
//!   repeats a call, an equal request joins the first call. Other equal calls are separate calls.
//! - **The recipe decides** how trained policies are sampled. Overridden options of clients are counted.
//! - **Every wait has a deadline**, which excludes the time in which the sampler's device trains. A waiting
//!   client receives signs of life meanwhile.
//! - **Errors** have the format of the API, and name the field, its value and the way out.
//!
//! Out of scope: sampling (`levade-policy` and its implementations), starting programs (`levade-agent`), and
//! the use of rewards (`levade-trainer`).

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
