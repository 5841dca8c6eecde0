//! Search as a tool: `[[tool]] kind = "search"`.

use std::path::PathBuf;
use std::time::Duration;

use levade_tools::{Retries, SearchOptions, SearchTool, ToolError};
use serde::{Deserialize, Serialize};

/// `[[tool]] kind = "search"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SearchKeys {
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
}

impl Default for SearchKeys {
    fn default() -> Self {
        SearchKeys { index: None, url: None, key_env: None, top_k: 3, passage_chars: 1000, tries: 3 }
    }
}

/// Longest time of a search, in seconds, all tries together, where the recipe does not say it.
const SECONDS: f64 = 30.0;

impl SearchKeys {
    /// Longest wait for the toolbox, in seconds.
    pub(super) fn wait(seconds: Option<f64>) -> f64 {
        seconds.unwrap_or(SECONDS)
    }

    /// The toolbox, each call of which may take so many seconds.
    ///
    /// # Errors
    /// When there is no such index, its address cannot be used, or its key is missing.
    pub(super) fn toolbox(&self, name: &str, seconds: Option<f64>) -> Result<SearchTool, String> {
        let SearchKeys { top_k, passage_chars, .. } = *self;
        let options = SearchOptions { top_k, passage_chars, parallel: true };
        let longest = Duration::from_secs_f64(Self::wait(seconds));
        let in_words = |error: ToolError| match error {
            ToolError::Open { why, .. } => why,
            other => other.to_string(),
        };
        match (&self.index, &self.url) {
            (Some(index), _) => SearchTool::local(name, index, options).map_err(in_words),
            (None, Some(url)) => {
                let key = self.key_env.as_ref().map(|variable| {
                    let key = std::env::var(variable).ok().filter(|key| !key.is_empty());
                    key.ok_or_else(|| format!("the environment variable {variable} has no key"))
                });
                // What is left of the time goes to the pauses between tries.
                let deadline = longest.mul_f64(0.9 / f64::from(self.tries.max(1)));
                let retries = Retries { tries: self.tries, deadline, ..Retries::default() };
                SearchTool::server(name, url, key.transpose()?, retries, options).map_err(in_words)
            }
            (None, None) => Err("neither `index` nor `url` says where its passages are".into()),
        }
    }
}
