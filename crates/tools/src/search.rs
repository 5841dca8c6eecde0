//! The search tool: passages of an index on this machine, or of a retrieval server.

use std::collections::BTreeMap;
use std::path::Path;

use async_trait::async_trait;
use levade_search::{Client, Hit, Index, LONGEST_QUERY, Mode, Retries, SearchError, Searcher};
use levade_text::ToolSpec;
use serde_json::{Map, Value, json};

use super::{CallError, Session, ToolContext, ToolError, ToolOutput, Toolbox};

/// Most queries of one call: what they find is all read by the model.
const MOST_QUERIES: usize = 8;
/// Between the passages of two queries.
const BETWEEN: &str = "\n---\n";

/// How passages are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SearchOptions {
    /// Passages for a query.
    pub top_k: usize,
    /// Longest text of a passage, in characters; what is cut off is marked by `…`.
    pub passage_chars: usize,
    /// Whether calls of one turn may run at once.
    pub parallel: bool,
}

/// Searches for passages: argument `query`, a text, or `queries`, several. Passages are shown as
/// `Doc 1 (Title: T)`, a line break and the text, best first, a blank line between them.
///
/// Metrics: `queries`, `passages`, `empty` (queries that found nothing), `failures` (calls that could not be
/// answered), `retries` (tries of a server that failed).
#[derive(Clone)]
pub struct SearchTool {
    name: String,
    place: Place,
    options: SearchOptions,
}

/// Where passages are.
#[derive(Clone)]
enum Place {
    Here(Searcher),
    There(Box<Client>),
}

impl SearchTool {
    /// The tool's name.
    pub const NAME: &'static str = "search";

    /// Searches an index on this machine by BM25.
    ///
    /// # Errors
    /// When the folder is no index, or a damaged one.
    pub fn local(name: &str, folder: &Path, options: SearchOptions) -> Result<Self, ToolError> {
        let opened = Index::open(folder, false);
        let searcher = opened.and_then(|index| Searcher::new(index, Mode::Bm25, None, 0));
        let searcher = searcher.map_err(|error| unopened(name, &error))?;
        Ok(Self::over(name, searcher, options))
    }

    /// Searches what is open already.
    pub fn over(name: &str, searcher: Searcher, options: SearchOptions) -> Self {
        SearchTool { name: name.to_owned(), place: Place::Here(searcher), options }
    }

    /// Asks the `/retrieve` of a server, with a key where it wants one.
    ///
    /// # Errors
    /// When the address cannot be used.
    pub fn server(
        name: &str,
        url: &str,
        key: Option<String>,
        retries: Retries,
        options: SearchOptions,
    ) -> Result<Self, ToolError> {
        let client = Client::new(url, key, retries).map_err(|error| unopened(name, &error))?;
        Ok(SearchTool { name: name.to_owned(), place: Place::There(Box::new(client)), options })
    }

    fn spec() -> ToolSpec {
        let several = "Several searches at once, in place of query.";
        ToolSpec {
            name: Self::NAME.to_owned(),
            description: "Searches a collection of passages and returns those that fit best.".to_owned(),
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

    /// Passages for each query, and how many tries failed before.
    async fn find(&self, queries: &[String]) -> (u32, Result<Vec<Vec<Hit>>, SearchError>) {
        match &self.place {
            Place::Here(searcher) => (0, searcher.search(queries.to_vec(), self.options.top_k).await),
            Place::There(client) => client.retrieve(queries, self.options.top_k).await,
        }
    }

    /// Passages of a query as the model reads them.
    fn show(&self, query: &str, hits: &[Hit]) -> String {
        if hits.is_empty() {
            return format!("No passage was found for {query:?}.");
        }
        let one = |(at, hit): (usize, &Hit)| {
            let title = match hit.passage.title.is_empty() {
                true => String::new(),
                false => format!(" (Title: {})", hit.passage.title),
            };
            format!("Doc {}{title}\n{}", at + 1, cut(&hit.passage.text, self.options.passage_chars))
        };
        hits.iter().enumerate().map(one).collect::<Vec<_>>().join("\n\n")
    }
}

fn unopened(name: &str, error: &SearchError) -> ToolError {
    ToolError::Open { tool: name.to_owned(), why: error.to_string() }
}

/// The beginning of a text.
fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", text[..end].trim_end()),
        None => text.to_owned(),
    }
}

/// The queries that arguments hold.
///
/// # Errors
/// Says what is wrong with them, in words for the model.
fn queries(arguments: &Map<String, Value>) -> Result<Vec<String>, String> {
    if let Some(extra) = arguments.keys().find(|key| !["query", "queries"].contains(&key.as_str())) {
        return Err(format!("{extra:?} is not an argument; \"query\" and \"queries\" are"));
    }
    let text = |name: &str, value: &Value| match value {
        Value::String(text) if text.trim().is_empty() => Err(format!("\"{name}\" is empty")),
        Value::String(text) if text.len() > LONGEST_QUERY => {
            Err(format!("\"{name}\" has {} bytes, but a query has at most {LONGEST_QUERY}", text.len()))
        }
        Value::String(text) => Ok(text.clone()),
        other => Err(format!("\"{name}\" has {other}, but a query is a string")),
    };
    let given = |name: &str| arguments.get(name).filter(|value| !value.is_null());
    let (name, value) = match (given("query"), given("queries")) {
        (Some(query), None) => ("query", query),
        (None, Some(queries)) => ("queries", queries),
        (Some(_), Some(_)) => return Err("give \"query\" or \"queries\", not both".into()),
        (None, None) => return Err("\"query\" is missing".into()),
    };
    // Models write a list under either name.
    let found = match value {
        Value::Array(list) => list.iter().map(|value| text(name, value)).collect::<Result<Vec<_>, _>>()?,
        value => vec![text(name, value)?],
    };
    match found.len() {
        0 => Err(format!("\"{name}\" is empty")),
        1..=MOST_QUERIES => Ok(found),
        many => {
            Err(format!("\"{name}\" has {many} queries, but at most {MOST_QUERIES} are answered at once"))
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
        // It keeps nothing between calls.
        Ok(Box::new(self.clone()))
    }
}

#[async_trait]
impl Session for SearchTool {
    fn specs(&self) -> Vec<ToolSpec> {
        vec![Self::spec()]
    }

    fn parallel(&self, _tool: &str) -> bool {
        self.options.parallel
    }

    async fn call(&self, _tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let queries = match queries(arguments) {
            Ok(queries) => queries,
            Err(why) => return ToolOutput::error(CallError::BadArguments, why),
        };
        let (failed, found) = self.find(&queries).await;
        let mut metrics = BTreeMap::from([("queries".to_owned(), queries.len() as f64)]);
        metrics.insert("retries".to_owned(), f64::from(failed));
        let count = |metrics: &mut BTreeMap<String, f64>, name: &str, value: usize| {
            metrics.insert(name.to_owned(), value as f64);
        };
        count(&mut metrics, "failures", usize::from(found.is_err()));
        let output = match found {
            Ok(found) => {
                count(&mut metrics, "passages", found.iter().map(Vec::len).sum());
                count(&mut metrics, "empty", found.iter().filter(|hits| hits.is_empty()).count());
                let shown = queries.iter().zip(&found).map(|(query, hits)| self.show(query, hits));
                ToolOutput::text(shown.collect::<Vec<_>>().join(BETWEEN))
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

#[cfg(test)]
#[path = "search_tests.rs"]
mod tests;
