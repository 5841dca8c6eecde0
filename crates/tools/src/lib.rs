//! Tools: what an agent can do besides write.
//!
//! A [`Toolbox`] is a source of tools, one or many: a part of this program ([`Calculator`], [`CodeTool`],
//! [`SearchTool`]), a program or Python file of the user's ([`CommandTool`], [`PythonTools`]), a service
//! ([`Endpoint`], [`Node`], [`Mcp`]), or another agent ([`SubAgent`]). A toolbox is opened once an attempt;
//! the [`Session`] answers calls, hands over what scorers may use, and is always closed, also when the
//! attempt is cancelled. A [`ToolSet`] is the toolboxes of an agent; [`ToolSet::open`] opens them all as one
//! [`OpenTools`].
//!
//! # Guarantees
//! - **Names** of tools are unique in a set. The prompts of all attempts at one task list the same tools,
//!   whatever a toolbox offers later. If the tools of a toolbox change within an attempt, the observation of
//!   the turn reports it: a new tool can be called from then on, and a removed one answers with an
//!   observation.
//! - **Order.** Calls of one turn run at once if their toolboxes allow it, and are answered in the order in
//!   which they were written.
//! - **Deadlines.** Every opening, call, handing over and closing has a deadline. Waiting for a permit is no
//!   part of it.
//! - **No errors of the model.** A call that cannot be read, names no tool, has wrong arguments, fails or
//!   takes too long becomes an [`Observation`] that the model sees, and a counter in
//!   [`CallCounts`](levade_tree::CallCounts).
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use levade_tasks::{Task, calculation};
//! use levade_text::Parsed;
//! use levade_tools::{Calculator, ToolContext, ToolSet};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! let set = ToolSet::new(vec![Arc::new(Calculator::default())], Duration::from_secs(10))?;
//! let attempt = ToolContext {
//!     attempt: "attempt-1".into(),
//!     task: Task::default(),
//!     seed: 0,
//!     stream: 0,
//!     deadline: Duration::from_secs(60),
//!     params: Default::default(),
//! };
//! let mut open = set.open(&attempt).await?;
//! let turn = Parsed { calls: vec![Ok(calculation("6 * 7"))], ..Parsed::default() };
//! let observations = open.answer(&turn, true).await;
//! assert_eq!(observations[0].text, "42");
//! open.close().await?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Out of scope: reading calls from text (`levade-text`), and the loop that alternates sampling and calling
//! (`levade-agent`), which also implements [`Helper`], the agents that toolboxes ask.

mod arguments;
mod calculator;
mod command;
mod condensed;
mod cut;
mod delayed;
mod helper;
mod limited;
mod mcp;
mod nested;
mod observation;
mod offer;
mod output;
mod permit;
mod python;
mod sandbox;
mod search;
mod set;
mod sub_agent;
#[cfg(test)]
mod testing;
mod used;
mod web;
mod wrapped;

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::SamplingParams;
use levade_process::Supervisor;
use levade_text::ToolSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use levade_tasks::Task;

pub use calculator::{Calculator, CalculatorKeys};
pub use command::{CommandKeys, CommandTool};
pub use condensed::{CondenseKeys, Condensed};
pub use cut::{Cut, Shortened, Side};
pub use delayed::Delayed;
pub use helper::{HelpRequest, Helper, HelperSlot};
pub use limited::{CallLimits, Limited};
pub use mcp::{Mcp, McpKeys};
pub use nested::too_deep;
pub use observation::{COUNTED, Observation, ObservationKind};
pub use output::{Branch, CallError, ToolOutput};
pub use permit::Permit;
pub use python::{PythonKeys, PythonTools};
pub use sandbox::{CodeTool, SandboxKeys};
pub use search::{SearchKeys, SearchTool};
pub use set::{OpenTools, ToolSet};
pub use sub_agent::{SubAgent, SubAgentKeys};
pub use used::Used;
pub use web::{Endpoint, HttpKeys, McpapiKeys, Node};

/// A toolbox as a recipe specifies it: its kind with its options.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolKind {
    /// Another agent.
    Agent(SubAgentKeys),
    /// Evaluates arithmetic expressions.
    Calculator(CalculatorKeys),
    /// Functions and classes of a Python file.
    Python(PythonKeys),
    /// A program.
    Command(CommandKeys),
    /// Runs Python code that the model writes.
    Sandbox(SandboxKeys),
    /// Searches for passages.
    Search(SearchKeys),
    /// A server of the Model Context Protocol.
    Mcp(McpKeys),
    /// An endpoint of a service.
    Http(HttpKeys),
    /// A node of AgentDock.
    Mcpapi(McpapiKeys),
}

impl ToolKind {
    /// Returns the kinds that agents may name without a table `[[tool]]`: all their options have defaults.
    pub fn plain() -> [ToolKind; 2] {
        [ToolKind::Calculator(CalculatorKeys::default()), ToolKind::Sandbox(SandboxKeys::default())]
    }

    /// Returns the name of the kind in a recipe.
    pub fn name(&self) -> &'static str {
        self.parts().0
    }

    fn parts(&self) -> (&'static str, &(dyn ToolOptions + 'static)) {
        match self {
            ToolKind::Agent(keys) => ("agent", keys),
            ToolKind::Calculator(keys) => (Calculator::NAME, keys),
            ToolKind::Python(keys) => ("python", keys),
            ToolKind::Command(keys) => ("command", keys),
            ToolKind::Sandbox(keys) => (CodeTool::NAME, keys),
            ToolKind::Search(keys) => (SearchTool::NAME, keys),
            ToolKind::Mcp(keys) => ("mcp", keys),
            ToolKind::Http(keys) => ("http", keys),
            ToolKind::Mcpapi(keys) => ("mcpapi", keys),
        }
    }
}

impl Deref for ToolKind {
    type Target = dyn ToolOptions;

    fn deref(&self) -> &Self::Target {
        self.parts().1
    }
}

/// Options of a kind of toolbox: the keys that its table `[[tool]]` has in a recipe, besides those that every
/// toolbox has. `seconds` is such a key of every toolbox, if it is given.
pub trait ToolOptions {
    /// Whether the recipe must give the toolbox a name, because the model calls the tool by it.
    fn needs_name(&self) -> bool {
        false
    }

    /// Whether a call may change something outside of the attempt. `levade check` calls the tools of other
    /// toolboxes.
    fn has_effects(&self) -> bool {
        true
    }

    /// Returns the timeout of opening, a call and closing, in seconds; `None` for the agent's own.
    fn timeout(&self, seconds: Option<f64>) -> Option<f64> {
        seconds
    }

    /// Checks what can be known before anything is started. Keys in the environment are left out: a program
    /// that only looks at a run needs none.
    ///
    /// # Errors
    /// Names the key whose value is out of range, or says which options do not go together.
    fn check(&self, _seconds: Option<f64>) -> Result<(), OptionError> {
        Ok(())
    }

    /// Creates the toolbox `name`. Nothing is started yet; processes that it starts run under `supervisor`.
    ///
    /// # Errors
    /// Says which options do not go together, or which key is not set in the environment.
    fn toolbox(
        &self,
        name: String,
        seconds: Option<f64>,
        supervisor: &Supervisor,
    ) -> Result<Arc<dyn Toolbox>, String>;
}

/// Options of a toolbox that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// A value is out of range.
    #[error("`{key}` is {value}, but must be {range}")]
    Range {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// Values that it may have.
        range: String,
    },
    /// Options do not go together.
    #[error("{0}")]
    Other(String),
}

impl OptionError {
    /// Returns an error that names the key unless `ok`.
    fn unless(
        ok: bool,
        key: &'static str,
        value: impl ToString,
        range: impl Into<String>,
    ) -> Result<(), Self> {
        let error = || OptionError::Range { key, value: value.to_string(), range: range.into() };
        if ok { Ok(()) } else { Err(error()) }
    }
}

impl From<String> for OptionError {
    fn from(why: String) -> Self {
        OptionError::Other(why)
    }
}

/// The longest time that a recipe may name, in seconds, which a duration can hold.
const MAX_SECONDS: f64 = 1e9;

/// Returns the value of the environment variable that holds a key, or `None` if no variable is named.
///
/// # Errors
/// Returns an error if the variable is not set or empty.
fn key_of(variable: Option<&str>) -> Result<Option<String>, String> {
    let key = |variable: &str| {
        let key = std::env::var(variable).ok().filter(|key| !key.is_empty());
        key.ok_or_else(|| format!("the environment variable {variable} has no key"))
    };
    variable.map(key).transpose()
}

/// An attempt, as toolboxes know it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolContext {
    /// The attempt's name, unique to this try.
    pub attempt: String,
    /// The task, with all fields of its row.
    pub task: Task,
    /// Seed of the run.
    pub seed: u64,
    /// The attempt's own stream of random numbers, unique in the run: whatever a toolbox draws, it draws from
    /// both.
    pub stream: u64,
    /// Longest time from the opening to the closing. What is held elsewhere for a session need not be held
    /// for longer.
    pub deadline: Duration,
    /// How replies of the attempt are sampled; agents that are asked by toolboxes go by it.
    pub params: SamplingParams,
}

/// A source of tools: one tool, or a server with many.
#[async_trait]
pub trait Toolbox: Send + Sync {
    /// Name, unique among the toolboxes of an agent.
    fn name(&self) -> &str;

    /// The tools of every session, where they are known before one is opened.
    fn specs(&self) -> Option<Vec<ToolSpec>> {
        None
    }

    /// Agents of the run that its sessions ask, which have to be put in before one is asked.
    fn helpers(&self) -> Vec<HelperSlot> {
        Vec::new()
    }

    /// Waits until sessions can be opened, and starts what they need. Unlike opening and calling it has no
    /// deadline from outside: whoever starts something knows for how long that may take.
    ///
    /// # Errors
    /// When what the toolbox stands for cannot be started. No attempt can begin then.
    async fn ready(&self) -> Result<(), ToolError> {
        Ok(())
    }

    /// Starts a session for an attempt.
    ///
    /// # Errors
    /// When what the toolbox stands for cannot be reached or started. The attempt then does not begin.
    async fn open(&self, attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError>;

    /// Returns what happened until an opening was given up at its deadline, to append to the error; empty if
    /// nothing is known.
    fn late(&self) -> String {
        String::new()
    }
}

/// A toolbox in use by one attempt.
#[async_trait]
pub trait Session: Send + Sync {
    /// The tools that it has now: name, what it does, and a JSON schema of the arguments of each. Names are
    /// unique.
    fn specs(&self) -> Vec<ToolSpec>;

    /// Whether calls of this tool may run beside other calls. If not, it is called after all earlier calls of
    /// the turn were answered, and alone.
    fn parallel(&self, _tool: &str) -> bool {
        false
    }

    /// Whether a call of this tool counts though nobody reads the answer, as a move in a game does. Others
    /// are not made in the last turn that an attempt has.
    fn acts(&self, _tool: &str) -> bool {
        false
    }

    /// Text that the session adds to the last message of the prompt, such as the state that it starts from.
    fn opening(&self) -> Option<String> {
        None
    }

    /// Longest time of a call, if the session itself ends calls earlier that do not go on; the deadline of
    /// the set if `None`.
    fn longest_call(&self) -> Option<Duration> {
        None
    }

    /// Waits until a call of this tool can begin: for a place among others, or for something to start again.
    /// The wait is not part of the call's deadline. What it gives is held until the call has ended.
    async fn admit(&self, _tool: &str) -> Permit {
        Permit::default()
    }

    /// Answers one call of a tool that it has. A call past its deadline is dropped at an await point; the
    /// session must then answer the next one or say why it cannot.
    async fn call(&self, tool: &str, arguments: &Map<String, Value>) -> ToolOutput;

    /// Returns what happened until a call was given up at its deadline, to append to the observation; empty
    /// if nothing is known.
    fn late(&self) -> String {
        String::new()
    }

    /// Works on the answer of a call, which has no deadline any more: it ends with the attempt.
    async fn after(&self, _tool: &str, _arguments: &Map<String, Value>, output: ToolOutput) -> ToolOutput {
        output
    }

    /// Hands over what it knows of the attempt and scorers may use. Called once, after the last call.
    ///
    /// # Errors
    /// When it cannot say.
    async fn evidence(&mut self) -> Result<Map<String, Value>, ToolError> {
        Ok(Map::new())
    }

    /// Ends the session and frees what it holds. Called exactly once, last.
    ///
    /// # Errors
    /// When something could not be freed.
    async fn close(&mut self) -> Result<(), ToolError> {
        Ok(())
    }
}

/// Errors of toolboxes themselves.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// Two toolboxes of one set have the same name, or two tools of one toolbox.
    #[error("two {of} are named {name:?}: calls could not tell them apart, so give one another name")]
    SameName {
        /// Kind of thing of which there are two.
        of: String,
        /// The name.
        name: String,
    },
    /// A task selects a tool that its agent does not have.
    #[error(
        "the task {task} selects the tool {name:?} (extra_info.tool_selection), which its agent does not have; it has {known}"
    )]
    Selected {
        /// The task.
        task: String,
        /// The tool.
        name: String,
        /// Tools that it has.
        known: String,
    },
    /// A session could not be started.
    #[error("tool {tool:?} could not be opened: {why}")]
    Open {
        /// The toolbox.
        tool: String,
        /// Cause.
        why: String,
    },
    /// A session did not say what it knows.
    #[error("tool {tool:?} gave no evidence: {why}")]
    Evidence {
        /// The toolbox.
        tool: String,
        /// Cause.
        why: String,
    },
    /// A session could not be ended.
    #[error("tool {tool:?} could not be closed: {why}")]
    Close {
        /// The toolbox.
        tool: String,
        /// Cause.
        why: String,
    },
}
