//! Toolboxes: `[[tool]]`, and the names by which agents have them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dressage_agent::tools::{Calculator, Retries, SearchOptions, SearchTool, ToolError, Toolbox};
use serde::{Deserialize, Serialize};

use super::read::nearest;

/// `[[tool]]`, by `kind`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolKeys {
    /// Evaluates arithmetic expressions.
    Calculator(CalculatorKeys),
    /// Searches for passages.
    Search(SearchKeys),
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

/// `[[tool]] kind = "search"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SearchKeys {
    /// The name by which agents have it; that of its kind where empty.
    pub name: String,
    /// Folder of an index, which is searched in this process by BM25; none where `url` is given.
    pub index: Option<PathBuf>,
    /// Address of a retrieval server, its path included: `http://host:8000/retrieve`.
    pub url: Option<String>,
    /// Environment variable with the key of that server; none is sent where this is not given.
    pub key_env: Option<String>,
    /// Passages for a query.
    pub top_k: usize,
    /// Longest text of a passage, in characters.
    pub passage_chars: usize,
    /// Tries of a server that fails or does not answer.
    pub tries: u32,
    /// Longest wait for it to open, answer or close, in seconds, all tries together; that of the agent where
    /// not given.
    pub seconds: Option<f64>,
    /// Whether calls of one turn run at once.
    pub parallel: bool,
}

impl Default for SearchKeys {
    fn default() -> Self {
        SearchKeys {
            name: String::new(),
            index: None,
            url: None,
            key_env: None,
            top_k: 3,
            passage_chars: 1000,
            tries: 3,
            seconds: None,
            parallel: true,
        }
    }
}

impl SearchKeys {
    /// The toolbox, each of whose calls may take `longest`.
    fn toolbox(&self, name: &str, longest: Duration) -> Result<SearchTool, ToolError> {
        let SearchKeys { top_k, passage_chars, parallel, .. } = *self;
        let options = SearchOptions { top_k, passage_chars, parallel };
        let unopened = |why: String| ToolError::Open { tool: name.to_owned(), why };
        match (&self.index, &self.url) {
            (Some(index), _) => SearchTool::local(name, index, options),
            (None, Some(url)) => {
                let key = self.key_env.as_ref().map(|variable| {
                    let key = std::env::var(variable).ok().filter(|key| !key.is_empty());
                    key.ok_or_else(|| unopened(format!("the environment variable {variable} has no key")))
                });
                // What is left of the time goes to the pauses between tries.
                let deadline = longest.mul_f64(0.9 / f64::from(self.tries.max(1)));
                let retries = Retries { tries: self.tries, deadline, ..Retries::default() };
                SearchTool::server(name, url, key.transpose()?, retries, options)
            }
            (None, None) => Err(unopened("neither `index` nor `url` says where its passages are".into())),
        }
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
            ToolKeys::Search(keys) if keys.name.is_empty() => SearchTool::NAME,
            ToolKeys::Search(keys) => &keys.name,
        }
    }

    /// The longest wait for it, in seconds, where it has one of its own.
    pub fn seconds(&self) -> Option<f64> {
        match self {
            ToolKeys::Calculator(keys) => keys.seconds,
            ToolKeys::Search(keys) => keys.seconds,
        }
    }

    /// Folder of the index that it searches in this process.
    pub fn index(&self) -> Option<&Path> {
        match self {
            ToolKeys::Search(keys) => keys.index.as_deref(),
            ToolKeys::Calculator(_) => None,
        }
    }

    /// The toolbox itself, each of whose verbs may take `longest`.
    ///
    /// # Errors
    /// When there is no such index, its address cannot be used, or its key is missing.
    pub fn toolbox(&self, longest: Duration) -> Result<Arc<dyn Toolbox>, ToolError> {
        let name = self.name().to_owned();
        Ok(match self {
            ToolKeys::Calculator(keys) => Arc::new(Calculator { name, parallel: keys.parallel }),
            ToolKeys::Search(keys) => Arc::new(keys.toolbox(&name, longest)?),
        })
    }
}
