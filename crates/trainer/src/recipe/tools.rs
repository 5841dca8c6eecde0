//! Toolboxes: `[[tool]]`, and the names by which agents have them.

use std::path::PathBuf;
use std::sync::Arc;

use dressage_agent::tools::{Calculator, CodeOptions, CodeTool, Demand, Toolbox};
use serde::{Deserialize, Serialize};

use super::read::nearest;

/// `[[tool]]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolKeys {
    /// Evaluates arithmetic expressions.
    Calculator(CalculatorKeys),
    /// Runs Python code that the model writes.
    Sandbox(SandboxKeys),
}

/// `[[tool]] kind = "calculator"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CalculatorKeys {
    /// The name by which agents have it; that of its kind where empty.
    pub name: String,
    /// Longest wait for it to open, answer or close, in seconds; that of the agent where not given.
    pub seconds: Option<f64>,
    /// Whether calls of one turn run at once.
    pub parallel: bool,
}

impl Default for CalculatorKeys {
    fn default() -> Self {
        CalculatorKeys { name: String::new(), seconds: None, parallel: true }
    }
}

/// `[[tool]] kind = "sandbox"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxKeys {
    /// The name by which agents have it; that of its kind where empty.
    pub name: String,
    /// Longest time of a call's code, in seconds. The call may wait for a place besides.
    pub seconds: f64,
    /// Whether variables live from call to call of an attempt.
    pub persistent: bool,
    /// Most memory of a call's processes, in MiB.
    pub memory_mb: u64,
    /// Bytes of output that the model reads of a call: the beginning and the end.
    pub output_bytes: usize,
    /// Protection without which nothing runs.
    pub protection: Demand,
    /// The interpreter: a name, a file, or the folder of a virtual environment.
    pub python: PathBuf,
    /// Modules that are loaded before any code runs.
    pub preload: Vec<String>,
    /// Most calls that run at once; 0 for one on each core.
    pub concurrency: usize,
    /// Most attempts that have it open.
    pub sessions: usize,
    /// A service of SandboxFusion's API, in place of this machine.
    pub url: Option<String>,
    /// Environment variable with the key of that service.
    pub key_env: Option<String>,
}

impl Default for SandboxKeys {
    fn default() -> Self {
        let CodeOptions { sandbox, limits, .. } = CodeOptions::default();
        SandboxKeys {
            name: String::new(),
            seconds: limits.seconds,
            persistent: true,
            memory_mb: limits.memory_mb,
            output_bytes: 4096,
            protection: sandbox.protection,
            python: sandbox.python,
            preload: sandbox.preload,
            concurrency: 0,
            sessions: sandbox.sessions,
            url: None,
            key_env: None,
        }
    }
}

/// Time that a call may take beyond its code's, in seconds: for other calls to make room, and for the start.
const BESIDES: f64 = 120.0;

impl SandboxKeys {
    /// The toolbox's options.
    pub fn options(&self) -> CodeOptions {
        let mut options =
            CodeOptions { persistent: self.persistent, url: self.url.clone(), ..CodeOptions::default() };
        options.key = self.key_env.as_ref().and_then(|name| std::env::var(name).ok());
        options.limits.seconds = self.seconds;
        options.limits.memory_mb = self.memory_mb;
        options.limits.output_bytes = self.output_bytes;
        options.sandbox.protection = self.protection;
        options.sandbox.python = self.python.clone();
        options.sandbox.preload = self.preload.clone();
        options.sandbox.sessions = self.sessions;
        if self.concurrency > 0 {
            options.sandbox.concurrency = self.concurrency;
        }
        options
    }
}

/// Kinds that agents may name although no `[[tool]]` does: all their options have defaults.
const PLAIN: [&str; 2] = [Calculator::NAME, CodeTool::NAME];

impl ToolKeys {
    /// The tool of this name, or else the kind of this name.
    pub fn find(tools: &[ToolKeys], name: &str) -> Option<Self> {
        let plain = || match name {
            Calculator::NAME => Some(ToolKeys::Calculator(CalculatorKeys::default())),
            CodeTool::NAME => Some(ToolKeys::Sandbox(SandboxKeys::default())),
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
        match self {
            ToolKeys::Calculator(keys) if keys.name.is_empty() => Calculator::NAME,
            ToolKeys::Calculator(keys) => &keys.name,
            ToolKeys::Sandbox(keys) if keys.name.is_empty() => CodeTool::NAME,
            ToolKeys::Sandbox(keys) => &keys.name,
        }
    }

    /// The longest wait for it, in seconds, where it has one of its own.
    pub fn seconds(&self) -> Option<f64> {
        match self {
            ToolKeys::Calculator(keys) => keys.seconds,
            ToolKeys::Sandbox(keys) => Some(keys.seconds + BESIDES),
        }
    }

    /// The toolbox itself.
    pub fn toolbox(&self) -> Arc<dyn Toolbox> {
        let name = self.name().to_owned();
        match self {
            ToolKeys::Calculator(keys) => Arc::new(Calculator { name, parallel: keys.parallel }),
            ToolKeys::Sandbox(keys) => Arc::new(CodeTool::new(name, keys.options())),
        }
    }
}
