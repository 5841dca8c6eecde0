//! `[[tool]]`: toolboxes, and the names by which agents refer to them.
//!
//! In a file, the keys of every toolbox and the options of its kind are in one table. The types
//! keep them separate.

use std::path::Path;

use levade_tools::{CallLimits, OmittedPart, OptionError, SummaryKeys, ToolKind};
use serde::{Deserialize, Serialize};

use super::read::nearest_name;

/// `[[tool]]`: a toolbox that agents can use, with the keys of all kinds and the options of its
/// kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolKeys {
    /// Name by which agents refer to the toolbox. If empty, it is the name of the toolbox's kind.
    #[serde(default)]
    pub name: String,
    /// Timeout for opening, calling or closing the toolbox, in seconds. `None` uses the agent's
    /// timeout.
    #[serde(default)]
    pub seconds: Option<f64>,
    /// Whether several calls of one turn run concurrently, if the kind of toolbox supports it.
    #[serde(default = "default_parallel")]
    pub parallel: bool,
    /// Maximum number of tokens of a tool result that the model sees. `None` for no limit.
    #[serde(default)]
    pub max_tokens: Option<usize>,
    /// Maximum number of characters of a tool result that the model sees. `None` for no limit.
    #[serde(default)]
    pub max_characters: Option<usize>,
    /// At which side a tool result that exceeds the limit is truncated.
    #[serde(default)]
    pub truncate: OmittedPart,
    /// Maximum number of calls that start per second, in 0.00001..=1e6. `None` for no limit.
    #[serde(default)]
    pub calls_per_second: Option<f64>,
    /// Maximum number of concurrent calls over all attempts. `None` for no limit.
    #[serde(default)]
    pub at_once: Option<usize>,
    /// Maximum number of attempts that can have the toolbox open at the same time. Further attempts
    /// wait. `None` for no limit.
    #[serde(default)]
    pub leases: Option<usize>,
    /// Settings of the agent that summarizes long tool results. `None` passes results on unchanged.
    #[serde(default)]
    #[serde(alias = "condense")]
    pub summarize: Option<SummaryKeys>,
    /// What happens to an attempt if the toolbox fails.
    #[serde(default)]
    #[serde(alias = "outage")]
    pub on_failure: ToolFailureEffect,
    /// Kind of the toolbox, with its options.
    #[serde(rename = "$options")]
    pub options: ToolKind,
}

/// `on_failure`: what happens to an attempt if a toolbox fails because its server has exited or
/// does not respond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolFailureEffect {
    /// The model reads that the call failed, and the attempt continues.
    #[default]
    Observe,
    /// The attempt fails, and is retried up to `agent.retries` times.
    Retry,
}

fn default_parallel() -> bool {
    true
}

impl From<ToolKind> for ToolKeys {
    /// Creates the keys of a toolbox of this kind, with the kind's name and default values.
    fn from(options: ToolKind) -> Self {
        ToolKeys {
            name: String::new(),
            seconds: None,
            parallel: default_parallel(),
            max_tokens: None,
            max_characters: None,
            truncate: OmittedPart::default(),
            calls_per_second: None,
            at_once: None,
            leases: None,
            summarize: None,
            on_failure: ToolFailureEffect::default(),
            options,
        }
    }
}

impl ToolKeys {
    /// Returns the toolbox called `name`. If there is none, returns a toolbox of the kind called
    /// `name`, if that kind needs no options.
    pub fn find(tools: &[ToolKeys], name: &str) -> Option<Self> {
        tools.iter().find(|keys| keys.name() == name).cloned().or_else(|| {
            ToolKind::default_kinds()
                .into_iter()
                .find(|kind| kind.name() == name)
                .map(ToolKeys::from)
        })
    }

    /// Describes the toolbox names that agents can use, for the end of an error message, with the
    /// name that is most similar to `wrong`.
    pub fn describe_names(tools: &[ToolKeys], wrong: &str) -> String {
        let mut known: Vec<&str> = tools.iter().map(ToolKeys::name).collect();
        let plain = ToolKind::default_kinds().into_iter().map(|kind| kind.name());
        known.extend(plain.filter(|kind| !tools.iter().any(|keys| keys.name() == *kind)));
        let meant = nearest_name(wrong, &known);
        let meant = meant.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
        format!("the tools are {}{meant}", known.join(", "))
    }

    /// Returns the name by which agents refer to the toolbox.
    pub fn name(&self) -> &str {
        if self.name.is_empty() { self.options.name() } else { &self.name }
    }

    /// Returns the directory of the search index that the toolbox searches in this process, or
    /// `None` if it searches none.
    pub fn index_dir(&self) -> Option<&Path> {
        match &self.options {
            ToolKind::Search(keys) => keys.index.as_deref(),
            _ => None,
        }
    }

    /// Returns the limits on the concurrency and the rate of the toolbox's calls.
    pub fn limits(&self) -> CallLimits {
        CallLimits {
            max_sessions: self.leases,
            max_concurrent: self.at_once,
            per_second: self.calls_per_second,
            is_sequential: !self.parallel,
        }
    }

    /// Checks the options that can be checked before a tool is started.
    ///
    /// # Errors
    /// Returns an error if options contradict each other, or if an option is out of range.
    pub(super) fn check(&self) -> Result<(), OptionError> {
        if self.name.is_empty() && self.options.needs_name() {
            return Err("a tool of this kind needs a `name`, by which the model calls it"
                .to_owned()
                .into());
        }
        self.options.check(self.seconds)
    }
}
