//! Agent loops: attempts at tasks.
//!
//! [`Agent::run`] is the built-in loop between a model and its tools (`levade-tools`): it makes an attempt at
//! a task (`levade-tasks`) and records every token. [`ProgramAgent`] runs a program in its place, and
//! [`environments`] lists tasks of other packages and scores answers by them. [`HelperAgent`] lets toolboxes
//! ask an agent. [`demonstrate`] records a worked solution in the form of an attempt.

mod agent_loop;
mod attempt;
mod context;
mod demonstrate;
pub mod environments;
mod helping;
mod joined;
pub mod program;
mod talk;
mod taught;
mod teacher;
mod tool_loop;

pub use agent_loop::{AgentLoop, Attempt, AttemptContext, Pick, Samplers};
pub use attempt::{Agent, AttemptRequest, Limits};
pub use context::{ContextPolicy, Summariser, SummaryOptions, summary_agent};
pub use demonstrate::{DemonstrationError, demonstrate};
pub use helping::{HelperAgent, Opens, Samples};
pub use levade_call::{Truncation, probe_agent};
pub use program::{Program, ProgramAgent};
pub use talk::Talk;
pub use teacher::{Teacher, written};
pub use tool_loop::LoopObserver;
