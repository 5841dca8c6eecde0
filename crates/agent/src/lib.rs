//! Agent loops and tools.
//!
//! [`tools`] says what an agent can do besides write, and turns every call, good or bad, into an observation.
//! [`Agent::run`] is the loop: it makes an attempt at a task and records every token; [`demonstrate`] writes
//! down a worked solution in the same form.

mod agent_loop;
mod attempt;
mod context;
mod demonstrate;
pub mod environments;
mod helping;
mod joined;
mod nested;
pub mod program;
mod talk;
mod taught;
mod teacher;
mod tool_loop;
pub mod tools;

pub use agent_loop::{AgentLoop, Attempt, AttemptContext, Pick, Samplers};
pub use attempt::{Agent, AttemptRequest, Limits};
pub use context::{ContextPolicy, Summariser, SummaryOptions, summary_agent};
pub use demonstrate::{DemonstrationError, demonstrate};
pub use helping::{HelperAgent, Opens, Samples};
pub use levade_call::{Truncation, probe_agent};
pub use levade_policy::environment::PASSED;
pub use levade_process::Supervisor as Keeper;
pub use program::{Program, ProgramAgent};
pub use talk::Talk;
pub use teacher::{Teacher, written};
pub use tool_loop::LoopObserver;
