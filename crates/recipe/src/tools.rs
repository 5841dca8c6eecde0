//! Toolboxes: `[[tool]]`, and the names by which agents have them.
//!
//! In a file the keys that every toolbox has and the options of its kind are one table. Typed, they are
//! apart.

use std::path::Path;

use levade_tools::{CallLimits, CondenseKeys, OptionError, Side, ToolKind};
use serde::{Deserialize, Serialize};

use super::read::nearest;

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
    pub options: ToolKind,
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

fn yes() -> bool {
    true
}

impl From<ToolKind> for ToolKeys {
    /// One of this kind, by the name of that, with nothing else given.
    fn from(options: ToolKind) -> Self {
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

impl ToolKeys {
    /// The tool of this name, or else the kind of this name.
    pub fn find(tools: &[ToolKeys], name: &str) -> Option<Self> {
        let plain = || ToolKind::plain().into_iter().find(|kind| kind.name() == name).map(ToolKeys::from);
        tools.iter().find(|keys| keys.name() == name).cloned().or_else(plain)
    }

    /// The names that agents may use, as an error ends with them, and the one that is most like `wrong`.
    pub fn known(tools: &[ToolKeys], wrong: &str) -> String {
        let mut known: Vec<&str> = tools.iter().map(ToolKeys::name).collect();
        let plain = ToolKind::plain().into_iter().map(|kind| kind.name());
        known.extend(plain.filter(|kind| !tools.iter().any(|keys| keys.name() == *kind)));
        let meant = nearest(wrong, &known);
        let meant = meant.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
        format!("there is {}{meant}", known.join(", "))
    }

    /// The name by which agents have it.
    pub fn name(&self) -> &str {
        if self.name.is_empty() { self.options.name() } else { &self.name }
    }

    /// Folder of the index that it searches in this process.
    pub fn index(&self) -> Option<&Path> {
        match &self.options {
            ToolKind::Search(keys) => keys.index.as_deref(),
            _ => None,
        }
    }

    /// How often it may be called.
    pub fn limits(&self) -> CallLimits {
        CallLimits { at_once: self.at_once, per_second: self.calls_per_second, in_turn: !self.parallel }
    }

    /// Checks what can be known before anything is started.
    ///
    /// # Errors
    /// Says which options do not go together, or which one is out of range.
    pub(super) fn check(&self) -> Result<(), OptionError> {
        if self.name.is_empty() && self.options.needs_name() {
            return Err("it needs a `name`: that by which the model calls it".to_owned().into());
        }
        self.options.check(self.seconds)
    }
}
