//! Serves the APIs of OpenAI, Anthropic, vLLM and SGLang, and records every token behind them.
//!
//! A *dialect* is the format of one API. It parses a request into a [`Call`]. `levade-call`
//! executes the call and records its events in a transcript, from which the dialect writes its
//! response: one document or a stream. [`serve`] serves all dialects.
//!
//! A call with the key of a [`Session`] belongs to an attempt. Its conversation continues with the
//! exact token ids that were recorded (`levade-conversation`), its random stream follows from its
//! prompt, and all of its tokens are in the trajectory when the session closes. A prompt of token
//! ids continues the longest recorded sequence that it repeats. A call without such a key is
//! standalone.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use levade_call::{Backend, Party, PartyLimits, SamplingRule};
//! use levade_conversation::{Format, Options as History};
//! use levade_gateway::{CallPattern, Gateway, GatewayOptions, Route, SessionOptions, serve};
//! use levade_policy::{SamplingParams, Simulator, SimulatorConfig};
//! use levade_text::testing;
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//! use tokio::net::{TcpListener, TcpStream};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! let config = SimulatorConfig { vocabulary: testing::VOCABULARY, ..SimulatorConfig::default() };
//! let party = Party::new(
//!     "tiny",
//!     Backend::Tokens(Arc::new(Simulator::new(config))),
//!     Some(Arc::new(Format::new(Arc::new(testing::tiny_chat()?), History::default()))),
//!     PartyLimits { context: 1024, timeout: Duration::from_secs(10) },
//!     SamplingRule::Default(SamplingParams { max_tokens: 8, ..SamplingParams::default() }),
//! );
//! let gateway = Gateway::new(Vec::new(), GatewayOptions::default());
//! // The endpoint of one attempt, which has its own key.
//! let session = gateway.open_session(SessionOptions {
//!     rollout: "task-1".into(),
//!     attempt: "attempt-1".into(),
//!     routes: vec![Route { party: Arc::new(party), pattern: CallPattern::default() }],
//!     recorder: gateway.new_recorder("attempt-1", (1, 2), (100, 1000)),
//!     rewards: false,
//! });
//! let listener = TcpListener::bind("127.0.0.1:0").await?;
//! let address = listener.local_addr()?;
//! let server = gateway.clone();
//! tokio::spawn(async move { serve(&server, listener, std::future::pending()).await });
//!
//! // A client of OpenAI's API.
//! let body = r#"{"model": "tiny", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}"#;
//! let head = format!(
//!     "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\
//!      authorization: Bearer {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
//!     session.key(),
//!     body.len(),
//! );
//! let mut client = TcpStream::connect(address).await?;
//! client.write_all(head.as_bytes()).await?;
//! client.write_all(body.as_bytes()).await?;
//! let mut response = String::new();
//! client.read_to_string(&mut response).await?;
//! assert!(response.starts_with("HTTP/1.1 200 OK"));
//!
//! // The tokens of the call are recorded.
//! let recorded = session.close(Duration::from_secs(10)).await.0;
//! let tokens = recorded.trajectory.sampled_tokens();
//! assert!(response.contains(&format!("\"completion_tokens\":{tokens}")));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Guarantees
//! - **Tokens are recorded for the right attempt.** Keys authenticate; ids in paths do not. A
//!   request with the key of a closed session gets status 410.
//! - **Sampled tokens are recorded**, even if the client disconnects or the deadline of the call
//!   passes.
//! - **A repeated call is sampled once.** If a connection breaks before the end, or the client
//!   marks a request as a retry, an equal request joins the first call. Other equal requests are
//!   separate calls.
//! - **The recipe decides** how trained policies are sampled. Overridden options of clients are
//!   counted.
//! - **Every wait has a deadline**, which excludes the time in which the sampler's device trains. A
//!   waiting client receives keep-alive messages.
//! - **Errors** have the format of the API, and name the field, its value and a remedy.
//!
//! Agents that run elsewhere join by sessions that they start themselves, if the gateway has a
//! [`SessionHost`], which records them or makes them attempts of a run.
//!
//! Out of scope: sampling (`levade-policy` and its implementations), starting programs
//! (`levade-agent`), and the use of rewards (`levade-trainer`).

mod anthropic;
mod call;
mod client_sessions;
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
mod session_host;
mod sglang;
mod tokens;
mod tool_types;
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
mod sent_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod training_tests;

pub use call::Call;
pub use gateway::{Caller, Gateway, GatewayOptions, Model};
pub use http::{build_router, serve};
pub use route::{CallPattern, Route};
pub use session::{Reward, Session, SessionOptions};
pub use session_host::{EndRequest, EndedSession, HostedSession, SessionHost, StartRequest};
