//! Agent loops: attempts at tasks.
//!
//! [`BuiltInLoop`] is the loop between a model and its tools (`levade-tools`): it makes an attempt at a task
//! (`levade-tasks`) and records every token. [`Program`] runs a program in its place, and [`environments`]
//! lists tasks of other packages and scores answers by them. A [`Roster`] has the agents of a run and the
//! policies that play them; [`HelperAgent`] lets toolboxes ask an agent. [`demonstrate`] records a worked
//! solution in the form of an attempt.

mod agent_loop;
mod attempt;
mod context;
mod demonstrate;
pub mod environments;
mod helping;
mod joined;
pub mod program;
mod roster;
mod talk;
mod taught;
mod teacher;
#[cfg(test)]
mod testing;
mod tool_loop;

pub use agent_loop::{AgentLoop, Attempt, AttemptContext};
pub use attempt::BuiltInLoop;
pub use context::{ContextPolicy, SummaryOptions, summary_agent};
pub use demonstrate::{DemonstrationError, demonstrate};
pub use helping::{HelperAgent, Opens};
pub use levade_call::{Backend, ChatApi, OpeningLimit, Truncation, probe_agent};
pub use levade_gateway::When;
pub use levade_process::Supervisor as Keeper;
pub use program::Program;
pub use roster::{Agent, Limits, Pick, Player, Roster, Samples};
pub use talk::Talk;
pub use teacher::{Teacher, written};
pub use tool_loop::LoopObserver;
