//! Tools that an agent can call.
//!
//! A [`Toolbox`] provides one or several tools. It is built into this program ([`Calculator`],
//! [`CodeTool`], [`SearchTool`]), or it is a program or Python file of the user ([`CommandTool`],
//! [`PythonTools`]), a service ([`HttpEndpoint`], [`AgentDockNode`], [`Mcp`]), or another agent
//! ([`SubAgent`]).
//!
//! Each attempt opens a [`Session`] of each toolbox. The session executes calls, returns input for
//! scorers, and is always closed, even if the attempt is cancelled. A [`ToolSet`] holds the
//! toolboxes of an agent; [`ToolSet::open`] opens all of them as one [`OpenTools`].
//!
//! # Guarantees
//! - **Names** of tools are unique in a set. The prompts of all attempts at one task list the same
//!   tools, even if a toolbox offers different ones later. If the tools of a toolbox change during
//!   an attempt, the observation of the turn announces the change: new tools can be called from
//!   then on, and a call of a removed tool returns an observation with the reason.
//! - **Order.** Calls of one turn run concurrently if their toolboxes allow it. Their observations
//!   are in the order of the calls.
//! - **Timeouts.** Opening, calling, collecting scorer input and closing each have a timeout. It
//!   excludes the wait for a permit.
//! - **Model errors are observations.** A call that is malformed, names an unknown tool, has
//!   invalid arguments, fails or times out becomes an [`Observation`] that the model reads, and
//!   increments a counter in [`CallCounts`](levade_tree::CallCounts).
//!
//! # Example
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use levade_tasks::{Task, calculation};
//! use levade_text::ParsedCompletion;
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
//! let calls = vec![Ok(calculation("6 * 7"))];
//! let turn = ParsedCompletion { calls, ..ParsedCompletion::default() };
//! let observations = open.execute_calls(&turn, true).await;
//! assert_eq!(observations[0].text, "42");
//! open.close().await?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Out of scope: parsing calls from text (`levade-text`), and the loop that alternates between
//! sampling and tool calls (`levade-agent`). That loop also implements [`Helper`], the agents that
//! toolboxes call.

mod arguments;
mod calculator;
mod call_limits;
mod command;
mod delay;
mod descriptions;
mod helper;
mod lease;
mod mcp;
mod middleware;
mod nested;
mod observation;
mod output;
mod permit;
mod python;
mod result_summary;
mod sandbox;
mod search;
mod set;
mod sub_agent;
#[cfg(test)]
mod testing;
mod tool_list;
mod truncation;
mod usage;
mod web;

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
pub use call_limits::{CallLimits, LimitedToolbox};
pub use command::{CommandKeys, CommandTool};
pub use delay::DelayedToolbox;
pub use descriptions::{
    ToolDescriptions, ToolTexts, parameter_description, parameter_names, tool_names,
};
pub use helper::{HelpRequest, Helper, HelperSlot};
pub use mcp::{Mcp, McpKeys};
pub use nested::depth_error;
pub use observation::{COMMON_METRICS, Observation, ObservationKind};
pub use output::{Branch, CallError, ToolOutput};
pub use permit::Permit;
pub use python::{
    PythonKeys, PythonTools, PythonUser, PythonUserKeys, PythonUserResponse, PythonUsers,
};
pub use result_summary::{SummarizedToolbox, SummaryKeys};
pub use sandbox::{CodeTool, SandboxKeys};
pub use search::{SearchKeys, SearchTool};
pub use set::{OpenTools, ToolSet};
pub use sub_agent::{SubAgent, SubAgentKeys};
pub use truncation::{OmittedPart, ResultTruncation, TruncatingToolbox};
pub use usage::Usage;
pub use web::{AgentDockNode, HttpEndpoint, HttpKeys, McpapiKeys};

/// Configuration of a toolbox in a recipe: its kind with the options of this kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolKind {
    /// Toolbox that calls another agent of the run.
    Agent(SubAgentKeys),
    /// Toolbox that evaluates arithmetic expressions.
    Calculator(CalculatorKeys),
    /// Toolbox of functions and classes in a Python file.
    Python(PythonKeys),
    /// Toolbox that runs a program for each call.
    Command(CommandKeys),
    /// Toolbox that runs Python code that the model writes.
    Sandbox(SandboxKeys),
    /// Toolbox that searches an index or a retrieval server for passages.
    Search(SearchKeys),
    /// Toolbox of the tools of a server of the Model Context Protocol.
    Mcp(McpKeys),
    /// Toolbox that sends requests to one HTTP endpoint.
    Http(HttpKeys),
    /// Toolbox of the tools of a node of AgentDock.
    Mcpapi(McpapiKeys),
}

impl ToolKind {
    /// Returns the kinds of toolboxes that an agent can list without a `[[tool]]` table, because
    /// all their options have defaults.
    pub fn default_kinds() -> [ToolKind; 2] {
        [ToolKind::Calculator(CalculatorKeys::default()), ToolKind::Sandbox(SandboxKeys::default())]
    }

    /// Returns the name of the toolbox kind in a recipe.
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

/// Options of one kind of toolbox: the keys of its `[[tool]]` table, without the keys that all
/// toolboxes have. The parameter `seconds` of the methods is a common key, or `None` if the recipe
/// does not set it.
pub trait ToolOptions {
    /// Returns whether the recipe must name the toolbox, because the model calls the tool by the
    /// toolbox's name.
    fn needs_name(&self) -> bool {
        false
    }

    /// Returns whether a call of the tool can have effects outside the attempt. `levade check`
    /// calls only tools without such effects.
    fn has_effects(&self) -> bool {
        true
    }

    /// Returns the timeout for opening a session, for a call and for closing, in seconds. `None`
    /// means the agent's timeout.
    fn timeout(&self, seconds: Option<f64>) -> Option<f64> {
        seconds
    }

    /// Checks the options without starting anything. Does not check API keys in the environment,
    /// because a program that only inspects a run does not need them.
    ///
    /// # Errors
    /// Returns an error that names the key if its value is out of range, and an error if options
    /// conflict.
    fn check(&self, _seconds: Option<f64>) -> Result<(), OptionError> {
        Ok(())
    }

    /// Creates the toolbox `name` without starting anything. Processes that the toolbox starts
    /// later run under `supervisor`.
    ///
    /// # Errors
    /// Returns an error if options conflict or an environment variable that must hold an API key is
    /// not set.
    fn toolbox(
        &self,
        name: String,
        seconds: Option<f64>,
        supervisor: &Supervisor,
    ) -> Result<Arc<dyn Toolbox>, String>;
}

/// Error in the options of a toolbox.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// The value of a key is out of range.
    #[error("`{key}` is {value}, but must be {range}")]
    Range {
        /// Name of the key in the recipe.
        key: &'static str,
        /// Value of the key in the recipe, as text.
        value: String,
        /// Description of the permitted values, such as `in 1..=100`.
        range: String,
    },
    /// Options conflict or are invalid. The text is the reason.
    #[error("{0}")]
    Other(String),
}

impl OptionError {
    /// Returns an error with the `key`, its `value` and the permitted `range`, unless `ok` is true.
    fn ensure(
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

/// Maximum duration that a recipe can set, in seconds. It fits into a `Duration`.
const MAX_SECONDS: f64 = 1e9;

/// Returns the API key that the environment variable `variable` holds, or `None` if `variable` is
/// `None`.
///
/// # Errors
/// Returns an error if the variable is not set or is empty.
fn read_key(variable: Option<&str>) -> Result<Option<String>, String> {
    variable
        .map(|variable| {
            let key = std::env::var(variable).ok().filter(|key| !key.is_empty());
            key.ok_or_else(|| {
                format!(
                    "the environment variable {variable}, which must hold a key, is unset or empty"
                )
            })
        })
        .transpose()
}

/// Part of an attempt's data that toolboxes use.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolContext {
    /// Name of the attempt, unique for each try.
    pub attempt: String,
    /// Task of the attempt, with all fields of its dataset row.
    pub task: Task,
    /// Seed of the run.
    pub seed: u64,
    /// Random-number stream of the attempt, unique in the run. A toolbox derives all its random
    /// numbers from `seed` and `stream`.
    pub stream: u64,
    /// Maximum duration of the attempt, from opening to closing. External resources for the session
    /// can be released afterwards.
    pub deadline: Duration,
    /// Sampling parameters of the attempt, which the agents that a toolbox calls use as well.
    pub params: SamplingParams,
}

/// Provider of tools: a single tool, or a server with several tools.
#[async_trait]
pub trait Toolbox: Send + Sync {
    /// Returns the name of the toolbox, unique among the toolboxes of an agent.
    fn name(&self) -> &str;

    /// Returns the tools of every session, or `None` if they are known only after opening a
    /// session.
    fn specs(&self) -> Option<Vec<ToolSpec>> {
        None
    }

    /// Returns the slots for the agents that sessions of this toolbox call. Each slot must be
    /// filled before its agent is called.
    fn helpers(&self) -> Vec<HelperSlot> {
        Vec::new()
    }

    /// Starts the resources that sessions need, and waits until sessions can be opened. The caller
    /// sets no timeout: the toolbox itself limits the time for the start.
    ///
    /// # Errors
    /// Returns an error if a resource cannot be started. Then no attempt can start.
    async fn check_ready(&self) -> Result<(), ToolError> {
        Ok(())
    }

    /// Waits until another session may be opened. The caller keeps the permit until that session is
    /// closed.
    async fn admit_session(&self) -> Permit {
        Permit::default()
    }

    /// Opens a session of the toolbox for an attempt.
    ///
    /// # Errors
    /// Returns an error if the tool cannot be reached or started. The attempt then does not start.
    async fn open(&self, attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError>;

    /// Describes the state of an opening of a session that timed out, as a suffix for the error.
    /// The text is empty if nothing is known.
    fn timeout_detail(&self) -> String {
        String::new()
    }
}

/// Session of a toolbox, which one attempt uses.
#[async_trait]
pub trait Session: Send + Sync {
    /// Returns the current tools of the session, each with a name, a description and a JSON schema
    /// of its arguments. Names are unique.
    fn specs(&self) -> Vec<ToolSpec>;

    /// Returns whether calls of `tool` can run concurrently with other calls. If not, a call starts
    /// only after all earlier calls of the turn have finished, and no other call runs at the same
    /// time.
    fn can_run_parallel(&self, _tool: &str) -> bool {
        false
    }

    /// Returns whether a call of `tool` has an effect even if the model does not read the result,
    /// such as a move in a game. Calls of other tools are skipped in the last turn of an attempt.
    fn has_effect(&self, _tool: &str) -> bool {
        false
    }

    /// Returns text that the session appends to the last message of the prompt, such as the initial
    /// state of a game.
    fn opening(&self) -> Option<String> {
        None
    }

    /// Returns the timeout for a call if the session itself ends stalled calls earlier than the
    /// timeout of the tool set. The longer of the two timeouts applies. `None` means the timeout of
    /// the tool set.
    fn max_call_timeout(&self) -> Option<Duration> {
        None
    }

    /// Waits until a call of `tool` can start, for instance until a queue slot is free or a process
    /// has restarted. This wait does not count toward the call's timeout. The returned permit is
    /// held until the call has ended.
    async fn admit(&self, _tool: &str) -> Permit {
        Permit::default()
    }

    /// Executes one call of a tool of this session. The future of a call that times out is dropped
    /// at an await point. The session must then execute the next call, or return an error that
    /// gives the reason.
    async fn call(&self, tool: &str, arguments: &Map<String, Value>) -> ToolOutput;

    /// Describes the state of a call that timed out, as a suffix for the observation. The text is
    /// empty if nothing is known.
    fn timeout_detail(&self) -> String {
        String::new()
    }

    /// Post-processes the tool result of a call. Post-processing has no timeout of its own; it is
    /// cancelled when the attempt ends.
    async fn post_process(
        &self,
        _tool: &str,
        _arguments: &Map<String, Value>,
        output: ToolOutput,
    ) -> ToolOutput {
        output
    }

    /// Returns what the session knows about the attempt, as input for scorers. The method is called
    /// once, after the last call.
    ///
    /// # Errors
    /// Returns an error if the input cannot be collected.
    async fn scorer_input(&mut self) -> Result<Map<String, Value>, ToolError> {
        Ok(Map::new())
    }

    /// Closes the session and releases its resources. The method is called exactly once, after all
    /// other methods.
    ///
    /// # Errors
    /// Returns an error if a resource cannot be released.
    async fn close(&mut self) -> Result<(), ToolError> {
        Ok(())
    }
}

/// Error of a toolbox or of a set of toolboxes. A failed tool call is not an error but an
/// observation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// Two toolboxes of a set, or two tools of a toolbox, have the same name.
    #[error("two {of} are named {name:?}, but names must be unique; rename one")]
    SameName {
        /// Plural noun for the items that share the name, such as `tools`.
        of: String,
        /// Name that two items share.
        name: String,
    },
    /// A task selects a tool that its agent does not have.
    #[error(
        "the task {task} selects the tool {name:?} (extra_info.tool_selection), which its agent \
         does not have; it has {known}"
    )]
    UnknownSelection {
        /// Id of the task.
        task: String,
        /// Name of the selected tool.
        name: String,
        /// Comma-separated names of the agent's tools.
        known: String,
    },
    /// The recipe replaces the description of a tool or a parameter that the agent does not have.
    #[error(
        "`tool_descriptions` of the agent describes {described}, which does not exist; correct the \
         name, or set `tool_descriptions` to {{}}; there is {known}"
    )]
    UnknownDescription {
        /// Text that names the tool or the parameter that does not exist.
        described: String,
        /// Comma-separated names of the tools or parameters that exist.
        known: String,
    },
    /// A session could not be opened.
    #[error("tool {tool:?} could not be opened: {why}")]
    Open {
        /// Name of the toolbox.
        tool: String,
        /// Reason why the session could not be opened.
        why: String,
    },
    /// A session did not return its input for scorers.
    #[error("tool {tool:?} returned no scorer input: {why}")]
    ScorerInput {
        /// Name of the toolbox.
        tool: String,
        /// Reason why the scorer input is missing.
        why: String,
    },
    /// A session could not be closed.
    #[error("tool {tool:?} could not be closed: {why}")]
    Close {
        /// Name of the toolbox.
        tool: String,
        /// Reason why the session could not be closed.
        why: String,
    },
}
