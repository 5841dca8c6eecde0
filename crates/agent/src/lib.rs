//! Agent loops, tools and tasks.
//!
//! [`tasks`] says what is asked and where it comes from; [`tools`] says what an agent can do besides write,
//! and turns every call, good or bad, into an observation. [`BuiltInLoop`] is the loop between the two: it
//! makes an attempt at a task and records every token; [`demonstrate`] writes down a worked solution in the
//! same form.

mod agent_loop;
mod attempt;
mod context;
mod demonstrate;
pub mod environments;
mod helping;
mod joined;
mod nested;
pub mod program;
mod roster;
mod talk;
pub mod tasks;
mod taught;
mod teacher;
#[cfg(test)]
mod testing;
mod tool_loop;
pub mod tools;

pub use agent_loop::{AgentLoop, Attempt, AttemptContext};
pub use attempt::BuiltInLoop;
pub use context::{ContextPolicy, SummaryOptions, summary_agent};
pub use demonstrate::{DemonstrationError, demonstrate};
pub use helping::{HelperAgent, Opens};
pub use levade_call::{Backend, ChatApi, OpeningLimit, Truncation, probe_agent};
pub use levade_gateway::When;
pub use levade_policy::environment::PASSED;
pub use levade_process::Supervisor as Keeper;
pub use program::Program;
pub use roster::{Agent, Limits, Pick, Player, Roster, Samples};
pub use talk::Talk;
pub use teacher::{Teacher, written};
pub use tool_loop::LoopObserver;
