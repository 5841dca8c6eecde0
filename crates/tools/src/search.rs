//! The search tool, which returns passages from a local index or from a retrieval server.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_process::Supervisor;
use levade_search::{Client, Hit, Index, MAX_QUERY_BYTES, Mode, Retries, SearchError, Searcher};
use levade_text::ToolSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    CallError, OptionError, Session, ToolContext, ToolError, ToolOptions, ToolOutput, Toolbox,
    read_key,
};

/// Maximum number of queries in one call. The number is limited because the model reads the
/// passages of all queries.
const MAX_QUERIES: usize = 8;
/// Text between the passages of two queries in a tool result.
const QUERY_SEPARATOR: &str = "\n---\n";

/// Options of `[[tool]] kind = "search"`, which finds passages in a local index or on a retrieval
/// server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SearchKeys {
    /// Directory of a local index, which is searched in this process with BM25. `None` if `url` is
    /// set.
    pub index: Option<PathBuf>,
    /// URL of a retrieval server, including its path, such as `http://host:8000/retrieve`. `None`
    /// if `index` is set.
    pub url: Option<String>,
    /// Name of the environment variable with the API key of the retrieval server. `None` sends no
    /// key.
    pub key_env: Option<String>,
    /// Number of passages to return for each query, in 1..=1000.
    pub top_k: usize,
    /// Maximum length of a passage, in characters. `…` marks a truncated passage.
    pub passage_chars: usize,
    /// Maximum number of requests for one search if the server fails or does not respond, in
    /// 1..=100.
    pub tries: u32,
}

impl Default for SearchKeys {
    fn default() -> Self {
        SearchKeys {
            index: None,
            url: None,
            key_env: None,
            top_k: 3,
            passage_chars: 1000,
            tries: 3,
        }
    }
}

/// Default timeout for a search in seconds, including all retries.
const DEFAULT_TIMEOUT_SECONDS: f64 = 30.0;

impl ToolOptions for SearchKeys {
    fn has_effects(&self) -> bool {
        false
    }

    fn timeout(&self, seconds: Option<f64>) -> Option<f64> {
        Some(seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS))
    }

    fn check(&self, _seconds: Option<f64>) -> Result<(), OptionError> {
        let location = if self.index.is_some() {
            "set in addition to `url`"
        } else {
            "not set, and neither is `url`"
        };
        let range = "the directory of an index, unless `url` is the address of a retrieval server";
        OptionError::ensure(self.index.is_some() != self.url.is_some(), "index", location, range)?;
        let range = "left out with `index`, because it holds the key of the server at `url`";
        let variable = self.key_env.as_deref().unwrap_or_default();
        OptionError::ensure(
            self.key_env.is_none() || self.url.is_some(),
            "key_env",
            variable,
            range,
        )?;
        OptionError::ensure((1..=1000).contains(&self.top_k), "top_k", self.top_k, "in 1..=1000")?;
        OptionError::ensure(
            self.passage_chars >= 1,
            "passage_chars",
            self.passage_chars,
            "at least 1",
        )?;
        OptionError::ensure((1..=100).contains(&self.tries), "tries", self.tries, "in 1..=100")
    }

    fn toolbox(
        &self,
        name: String,
        seconds: Option<f64>,
        _: &Supervisor,
    ) -> Result<Arc<dyn Toolbox>, String> {
        let call_limit = Duration::from_secs_f64(seconds.unwrap_or(DEFAULT_TIMEOUT_SECONDS));
        // The remaining tenth of the time is for the pauses between requests.
        let deadline = call_limit.mul_f64(0.9 / f64::from(self.tries.max(1)));
        let retries = Retries { tries: self.tries, deadline, ..Retries::default() };
        Ok(Arc::new(SearchTool::new(name, self.clone(), retries)?))
    }
}

/// Tool that searches for passages.
///
/// The argument is `query`, a string, or `queries`, a list of strings. Each passage is shown as
/// `Doc 1 (Title: T)`, a line break and the text. The best passage is first, and a blank line
/// separates passages.
///
/// Metrics: `queries`, `passages`, `empty` (queries without passages), `failures` (failed calls),
/// `retries` (failed requests to a server).
#[derive(Clone)]
pub struct SearchTool {
    name: String,
    location: PassageLocation,
    keys: SearchKeys,
}

/// Location of the passages to search.
#[derive(Clone)]
enum PassageLocation {
    Here(Searcher),
    Remote(Box<Client>),
}

impl SearchTool {
    /// Name by which the model calls the tool.
    pub const NAME: &'static str = "search";

    /// Creates a tool that searches the index in `keys`, or the server if `keys` sets no index.
    /// Failed requests to a server are retried according to `retries`.
    ///
    /// # Errors
    /// Returns an error if the index does not exist, the URL is invalid, the API key is missing, or
    /// `keys` sets neither an index nor a URL.
    pub fn new(
        name: impl Into<String>,
        keys: SearchKeys,
        retries: Retries,
    ) -> Result<Self, String> {
        let location = match (&keys.index, &keys.url) {
            (Some(index), _) => {
                let searcher = Index::open(index, false)
                    .and_then(|index| Searcher::new(index, Mode::Bm25, None, 0));
                PassageLocation::Here(searcher.map_err(|error| error.to_string())?)
            }
            (None, Some(url)) => {
                let client = Client::new(url, read_key(keys.key_env.as_deref())?, retries);
                PassageLocation::Remote(Box::new(client.map_err(|error| error.to_string())?))
            }
            (None, None) => {
                return Err("neither `index` nor `url` is set; set one of them".into());
            }
        };
        Ok(SearchTool { name: name.into(), location, keys })
    }

    fn spec() -> ToolSpec {
        let several = "Several searches at once, in place of query.";
        ToolSpec {
            name: Self::NAME.to_owned(),
            description: "Searches a collection of passages and returns those that fit best."
                .to_owned(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "query": { "type": "string", "description": "What to look for." },
                    "queries": { "type": "array", "items": { "type": "string" }, "description": several },
                },
                "additionalProperties": false,
            }),
        }
    }

    /// Searches for passages. Returns the number of failed requests, and the passages for each
    /// query.
    async fn search_passages(
        &self,
        queries: &[String],
    ) -> (u32, Result<Vec<Vec<Hit>>, SearchError>) {
        match &self.location {
            PassageLocation::Here(searcher) => {
                (0, searcher.search(queries.to_vec(), self.keys.top_k).await)
            }
            PassageLocation::Remote(client) => client.retrieve(queries, self.keys.top_k).await,
        }
    }

    /// Formats the passages of a query for the model.
    fn format_passages(&self, query: &str, hits: &[Hit]) -> String {
        if hits.is_empty() {
            return format!("No passage was found for {query:?}.");
        }
        hits.iter()
            .enumerate()
            .map(|(at, hit)| {
                let title = if hit.passage.title.is_empty() {
                    String::new()
                } else {
                    format!(" (Title: {})", hit.passage.title)
                };
                format!(
                    "Doc {}{title}\n{}",
                    at + 1,
                    truncate_passage(&hit.passage.text, self.keys.passage_chars)
                )
            })
            .collect::<Vec<_>>()
            .join("\n\n")
    }
}

/// Truncates a passage to at most `max_characters` characters.
fn truncate_passage(text: &str, max_characters: usize) -> String {
    match text.char_indices().nth(max_characters) {
        Some((end, _)) => format!("{}…", text[..end].trim_end()),
        None => text.to_owned(),
    }
}

/// Returns the queries in the arguments of a tool call.
///
/// # Errors
/// Returns a message for the model if an argument is invalid.
fn parse_queries(arguments: &Map<String, Value>) -> Result<Vec<String>, String> {
    if let Some(extra) = arguments.keys().find(|key| !["query", "queries"].contains(&key.as_str()))
    {
        return Err(format!(
            "{extra:?} is not an argument of this tool; its arguments are \"query\" and \
             \"queries\""
        ));
    }
    let argument = |name: &str| arguments.get(name).filter(|value| !value.is_null());
    let (name, value) = match (argument("query"), argument("queries")) {
        (Some(query), None) => ("query", query),
        (None, Some(queries)) => ("queries", queries),
        (Some(_), Some(_)) => {
            return Err("both \"query\" and \"queries\" are set; set only one of them".into());
        }
        (None, None) => return Err("\"query\" is missing".into()),
    };
    // Models pass a list under either name.
    let found = match value {
        Value::Array(list) => {
            list.iter().map(|value| query_text(name, value)).collect::<Result<Vec<_>, _>>()?
        }
        value => vec![query_text(name, value)?],
    };
    match found.len() {
        0 => Err(format!("\"{name}\" is empty")),
        1..=MAX_QUERIES => Ok(found),
        count => Err(format!(
            "the argument \"{name}\" has {count} queries, but at most {MAX_QUERIES} are allowed"
        )),
    }
}

fn query_text(name: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) if text.trim().is_empty() => Err(format!("\"{name}\" is empty")),
        Value::String(text) if text.len() > MAX_QUERY_BYTES => Err(format!(
            "a query in \"{name}\" has {} bytes, but may have at most {MAX_QUERY_BYTES}",
            text.len()
        )),
        Value::String(text) => Ok(text.clone()),
        other => {
            Err(format!("the argument \"{name}\" contains {other}, but a query must be a string"))
        }
    }
}

#[async_trait]
impl Toolbox for SearchTool {
    fn name(&self) -> &str {
        &self.name
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        Some(vec![Self::spec()])
    }

    async fn open(&self, _attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        // The tool keeps no state between calls.
        Ok(Box::new(self.clone()))
    }
}

#[async_trait]
impl Session for SearchTool {
    fn specs(&self) -> Vec<ToolSpec> {
        vec![Self::spec()]
    }

    fn can_run_parallel(&self, _tool: &str) -> bool {
        true
    }

    async fn call(&self, _tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let queries = match parse_queries(arguments) {
            Ok(queries) => queries,
            Err(why) => return ToolOutput::error(CallError::BadArguments, why),
        };
        let (failed, found) = self.search_passages(&queries).await;
        let mut metrics = BTreeMap::from([("queries".to_owned(), queries.len() as f64)]);
        metrics.insert("retries".to_owned(), f64::from(failed));
        set_metric(&mut metrics, "failures", usize::from(found.is_err()));
        let output = match found {
            Ok(found) => {
                set_metric(&mut metrics, "passages", found.iter().map(Vec::len).sum());
                set_metric(
                    &mut metrics,
                    "empty",
                    found.iter().filter(|hits| hits.is_empty()).count(),
                );
                let shown = queries
                    .iter()
                    .zip(&found)
                    .map(|(query, hits)| self.format_passages(query, hits));
                ToolOutput::text(shown.collect::<Vec<_>>().join(QUERY_SEPARATOR))
            }
            Err(error) => {
                let kind = match error {
                    SearchError::Query(_) => CallError::BadArguments,
                    _ => CallError::Unavailable,
                };
                ToolOutput::error(kind, format!("the search failed: {error}"))
            }
        };
        ToolOutput { metrics, ..output }
    }
}

fn set_metric(metrics: &mut BTreeMap<String, f64>, name: &str, value: usize) {
    metrics.insert(name.to_owned(), value as f64);
}

#[cfg(test)]
#[path = "search_tests.rs"]
mod tests;
