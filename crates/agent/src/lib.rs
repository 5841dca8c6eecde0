//! Agent loops: make attempts at tasks and record every token.
//!
//! An [`AgentLoop`] makes one attempt from an [`AttemptContext`]. These are the loops and their
//! parts:
//! - [`BuiltInLoop`]: the tool loop between a model and its tools (`levade-tools`)
//! - [`Program`]: a command that calls an endpoint
//! - [`game`]: games of several seats
//! - [`environments`]: third-party environments
//! - [`runner`]: processes on other hosts that make attempts
//! - [`SessionLoop`]: agents that run elsewhere and make the attempts of a run; [`Sessions`]
//!   records agents outside of a run
//! - [`user`]: the simulated user of a conversation
//! - [`HelperAgent`]: an agent that toolboxes call
//!
//! The [`Roster`] of a run contains its agents, each with its limits, its tools and the policies
//! that play it. It determines which policy answers an agent's calls. [`demonstrate()`] converts a
//! worked solution to the form of an attempt.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use levade_agent::{Agent, AgentLoop, AttemptContext, BuiltInLoop, AttemptLimits, Player};
//! use levade_conversation::{Format, Options};
//! use levade_policy::{Simulator, SimulatorConfig};
//! use levade_text::{Message, testing};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! // A policy without a model: samples tokens of the chat's vocabulary.
//! let config = SimulatorConfig { vocabulary: testing::VOCABULARY, ..SimulatorConfig::default() };
//! let format = Arc::new(Format::new(Arc::new(testing::tiny_chat()?), Options::default()));
//! let player = Player::new("tiny", Arc::new(Simulator::new(config)), format, 1024);
//! let limits = AttemptLimits {
//!     max_turns: 2,
//!     max_tokens: 32,
//!     completion_timeout: Duration::from_secs(10),
//!     attempt_timeout: Duration::from_secs(60),
//! };
//! let context = AttemptContext {
//!     messages: vec![Message::user("What is 2 + 3?")],
//!     seed: 7,
//!     ..AttemptContext::new("attempt-1", vec![Agent::new("solver", player, limits)])
//! };
//! let attempt = BuiltInLoop.run(context).await;
//! assert!((1..=32).contains(&attempt.outcome.sampled_tokens));
//! assert_eq!(attempt.trajectory.sampled_tokens(), attempt.outcome.sampled_tokens);
//! assert!(attempt.trajectory.segments().iter().all(|segment| segment.agent == "solver"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Guarantees
//! - **Every token** that a model saw or sampled is in the trajectory, even if a timeout interrupts
//!   the attempt.
//! - **An attempt never fails other attempts**: its errors are in its outcome.
//! - **Every wait has a timeout**, which excludes the time in which the sampler's device trains.
//!
//! Out of scope: calls of models (`levade-call`), scores (`levade-reward`) and training
//! (`levade-trainer`).

mod agent_loop;
mod attempt;
mod cast;
mod context;
mod demonstrate;
pub mod environments;
pub mod game;
mod helper_agent;
mod merge_outcome;
pub mod program;
mod recorded_calls;
mod roster;
pub mod runner;
mod session_queue;
mod sessions;
mod taken_session;
mod talk;
mod teacher;
mod teacher_demonstrations;
#[cfg(test)]
mod testing;
mod tool_loop;
pub mod user;

pub use agent_loop::{AgentLoop, Attempt, AttemptContext};
pub use attempt::BuiltInLoop;
pub use context::{ContextPolicy, SummaryOptions, own_summarizer_name};
pub use demonstrate::{DemonstrationError, demonstrate};
pub use helper_agent::{HelperAgent, PromptBuilder};
pub use levade_call::{Backend, ChatApi, OpeningLimit, Truncation, probe_agent};
pub use levade_gateway::CallPattern;
pub use program::Program;
pub use roster::{
    Agent, AttemptLimits, MixtureScope, MixtureSeats, Player, PolicyPicker, Roster, SamplingMap,
};
pub use session_queue::{SessionLoop, SessionQueue, SessionQueueOptions};
pub use sessions::{SOURCE as SESSION_SOURCE, Sessions, SessionsOptions};
pub use taken_session::TakenSession;
pub use talk::InteractiveConversation;
pub use teacher::{Teacher, parse_row_completions};
pub use tool_loop::LoopObserver;
