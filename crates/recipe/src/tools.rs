//! Toolboxes: `[[tool]]`, and the names by which agents have them.
//!
//! In a file the keys that every toolbox has and the options of its kind are one table. Typed, they are
//! apart.

use std::path::Path;
use std::sync::Arc;

use levade_agent::Keeper;
use levade_tools::{Calculator, CallLimits, CodeTool, CommandTool, PythonTools, SearchTool, Side, Toolbox};
use serde::{Deserialize, Serialize};

use super::MOST_SECONDS;
use super::code::SandboxKeys;
use super::helpers::{AgentToolKeys, CondenseKeys};
use super::own_tools::{CommandKeys, PythonKeys};
use super::read::nearest;
use super::retrieval::SearchKeys;
use super::services::{HttpKeys, McpKeys, McpapiKeys};

/// `[[tool]]`: what every toolbox has, and the options of its kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolKeys {
    /// The name by which agents have it; that of its kind where empty.
    #[serde(default)]
    pub name: String,
    /// Longest wait for it to open, answer or close, in seconds; that of the agent where not given.
    #[serde(default)]
    pub seconds: Option<f64>,
    /// Whether calls of one turn run at once, where its kind allows it.
    #[serde(default = "yes")]
    pub parallel: bool,
    /// Most tokens of an answer that the model reads; all where not given.
    #[serde(default)]
    pub max_tokens: Option<usize>,
    /// Most characters of an answer that the model reads; all where not given.
    #[serde(default)]
    pub max_characters: Option<usize>,
    /// The side of a longer answer that is left out.
    #[serde(default)]
    pub truncate: Side,
    /// Most calls that begin in a second; any number where not given.
    #[serde(default)]
    pub calls_per_second: Option<f64>,
    /// Most calls that run at once, of all attempts together; any number where not given.
    #[serde(default)]
    pub at_once: Option<usize>,
    /// The agent that condenses its long answers; they are read as they are where not given.
    #[serde(default)]
    pub condense: Option<CondenseKeys>,
    /// The fate of an attempt in which it does not work.
    #[serde(default)]
    pub outage: Outage,
    /// The options of its kind.
    #[serde(rename = "$options")]
    pub options: ToolOptions,
}

/// `outage`: the fate of an attempt in which a toolbox does not work, because its server died or hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outage {
    /// The model reads that the call failed, and goes on.
    #[default]
    Observe,
    /// The attempt breaks, and is made again as often as `agent.retries` says.
    Retry,
}

/// `[[tool]]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolOptions {
    /// Another agent.
    Agent(AgentToolKeys),
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

/// `[[tool]] kind = "calculator"`
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CalculatorKeys {}

/// Longest wait for a server that has to start, in seconds.
const SERVER_SECONDS: f64 = 60.0;

fn yes() -> bool {
    true
}

impl ToolOptions {
    /// The name of its kind.
    pub fn kind(&self) -> &'static str {
        match self {
            ToolOptions::Agent(_) => "agent",
            ToolOptions::Calculator(_) => Calculator::NAME,
            ToolOptions::Python(_) => "python",
            ToolOptions::Command(_) => "command",
            ToolOptions::Sandbox(_) => CodeTool::NAME,
            ToolOptions::Search(_) => SearchTool::NAME,
            ToolOptions::Mcp(_) => "mcp",
            ToolOptions::Http(_) => "http",
            ToolOptions::Mcpapi(_) => "mcpapi",
        }
    }

    /// Checks what can be known before anything is started, keys in the environment left out: whoever only
    /// looks at a run needs none.
    fn check(&self) -> Result<(), String> {
        match self {
            ToolOptions::Agent(_)
            | ToolOptions::Calculator(_)
            | ToolOptions::Sandbox(_)
            | ToolOptions::Search(_) => Ok(()),
            ToolOptions::Python(keys) => keys.options().map(drop),
            ToolOptions::Command(keys) => CommandTool::new("", keys.options()?, Keeper::default()).map(drop),
            ToolOptions::Mcp(keys) => keys.check(),
            ToolOptions::Http(keys) => keys.check(),
            ToolOptions::Mcpapi(keys) => keys.check(),
        }
    }

    /// The toolbox itself, by this name, each call of which may take so many seconds. A process that it
    /// starts is under `keeper`.
    ///
    /// # Errors
    /// Says which options do not go together, or which key is not set.
    fn toolbox(
        &self,
        name: String,
        seconds: Option<f64>,
        keeper: &Keeper,
    ) -> Result<Arc<dyn Toolbox>, String> {
        Ok(match self {
            ToolOptions::Agent(keys) => Arc::new(keys.toolbox(name, seconds)),
            ToolOptions::Calculator(CalculatorKeys {}) => Arc::new(Calculator { name, parallel: true }),
            ToolOptions::Python(keys) => Arc::new(PythonTools::new(name, keys.options()?, keeper.clone())),
            ToolOptions::Command(keys) => Arc::new(CommandTool::new(name, keys.options()?, keeper.clone())?),
            ToolOptions::Sandbox(keys) => Arc::new(CodeTool::new(name, keys.with_key(seconds)?)),
            ToolOptions::Search(keys) => Arc::new(keys.toolbox(&name, seconds)?),
            ToolOptions::Mcp(keys) => {
                Arc::new(keys.toolbox(name, seconds.unwrap_or(SERVER_SECONDS), keeper)?)
            }
            ToolOptions::Http(keys) => Arc::new(keys.toolbox(name)?),
            ToolOptions::Mcpapi(keys) => Arc::new(keys.toolbox(name)?),
        })
    }
}

impl From<ToolOptions> for ToolKeys {
    /// One of this kind, by the name of that, with nothing else given.
    fn from(options: ToolOptions) -> Self {
        ToolKeys {
            name: String::new(),
            seconds: None,
            parallel: yes(),
            max_tokens: None,
            max_characters: None,
            truncate: Side::default(),
            calls_per_second: None,
            at_once: None,
            condense: None,
            outage: Outage::default(),
            options,
        }
    }
}

/// Kinds that agents may name although no `[[tool]]` does: all their options have defaults.
const PLAIN: [&str; 2] = [Calculator::NAME, CodeTool::NAME];

impl ToolKeys {
    /// The tool of this name, or else the kind of this name.
    pub fn find(tools: &[ToolKeys], name: &str) -> Option<Self> {
        let plain = || match name {
            Calculator::NAME => Some(ToolOptions::Calculator(CalculatorKeys::default()).into()),
            CodeTool::NAME => Some(ToolOptions::Sandbox(SandboxKeys::default()).into()),
            _ => None,
        };
        tools.iter().find(|keys| keys.name() == name).cloned().or_else(plain)
    }

    /// The names that agents may use, as an error ends with them, and the one that is most like `wrong`.
    pub fn known(tools: &[ToolKeys], wrong: &str) -> String {
        let mut known: Vec<&str> = tools.iter().map(ToolKeys::name).collect();
        known.extend(PLAIN.iter().filter(|kind| !tools.iter().any(|keys| keys.name() == **kind)));
        let meant = nearest(wrong, &known);
        let meant = meant.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
        format!("there is {}{meant}", known.join(", "))
    }

    /// The name by which agents have it.
    pub fn name(&self) -> &str {
        if self.name.is_empty() { self.options.kind() } else { &self.name }
    }

    /// Folder of the index that it searches in this process.
    pub fn index(&self) -> Option<&Path> {
        match &self.options {
            ToolOptions::Search(keys) => keys.index.as_deref(),
            _ => None,
        }
    }

    /// Longest wait for it to open, answer or close, in seconds, where it is not that of agents.
    pub fn wait(&self) -> Option<f64> {
        match &self.options {
            ToolOptions::Sandbox(_) => Some(SandboxKeys::wait(self.seconds)),
            ToolOptions::Search(_) => Some(SearchKeys::wait(self.seconds)),
            // It has a deadline of its own, at which it hands over what it has.
            ToolOptions::Agent(_) => Some(MOST_SECONDS),
            // A server has to start.
            ToolOptions::Mcp(_) => self.seconds.or(Some(SERVER_SECONDS)),
            _ => self.seconds,
        }
    }

    /// How often it may be called.
    pub fn limits(&self) -> CallLimits {
        CallLimits { at_once: self.at_once, per_second: self.calls_per_second, in_turn: !self.parallel }
    }

    /// Checks what can be known before anything is started.
    ///
    /// # Errors
    /// Says which options do not go together.
    pub(super) fn check(&self) -> Result<(), String> {
        let is_named =
            matches!(self.options, ToolOptions::Agent(_) | ToolOptions::Command(_) | ToolOptions::Http(_));
        if self.name.is_empty() && is_named {
            return Err("it needs a `name`: that by which the model calls it".into());
        }
        self.options.check()
    }

    /// The toolbox, without what all have: limits, and how much is read of its answers. A process that it
    /// starts is under `keeper`. Nothing is started yet.
    ///
    /// # Errors
    /// Says which options do not go together.
    pub fn toolbox(&self, keeper: &Keeper) -> Result<Arc<dyn Toolbox>, String> {
        self.options.toolbox(self.name().to_owned(), self.seconds, keeper)
    }
}
