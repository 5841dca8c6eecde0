//! Toolboxes: `[[tool]]`, and the names by which agents have them.

use std::sync::Arc;

use dressage_agent::Keeper;
use dressage_agent::tools::{Calculator, Toolbox};
use serde::{Deserialize, Serialize};

use super::read::nearest;

/// `[[tool]]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolKeys {
    /// Evaluates arithmetic expressions.
    Calculator(CalculatorKeys),
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

/// Kinds that agents may name although no `[[tool]]` does: all their options have defaults.
const PLAIN: [&str; 1] = [Calculator::NAME];

impl ToolKeys {
    /// The tool of this name, or else the kind of this name.
    pub fn find(tools: &[ToolKeys], name: &str) -> Option<Self> {
        let plain = || match name {
            Calculator::NAME => Some(ToolKeys::Calculator(CalculatorKeys::default())),
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
        }
    }

    /// The longest wait for it, in seconds, where it has one of its own.
    pub fn seconds(&self) -> Option<f64> {
        match self {
            ToolKeys::Calculator(keys) => keys.seconds,
        }
    }

    /// The toolbox itself. A process that it starts is under `keeper`.
    pub fn toolbox(&self, _keeper: &Keeper) -> Arc<dyn Toolbox> {
        let name = self.name().to_owned();
        match self {
            ToolKeys::Calculator(keys) => Arc::new(Calculator { name, parallel: keys.parallel }),
        }
    }
}
