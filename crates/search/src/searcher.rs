//! Searches an index from async code, with the embedding model and a limit on concurrent requests.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use levade_policy::{Embedder, PolicyError, TextRole, process_time};
use tokio::sync::Semaphore;

use crate::fuse::fuse_rankings;
use crate::{Hit, Index, SearchError};

/// Maximum number of queries in a request: 2.5 times the queries of a Search-R1 step (512 prompts
/// with 5 attempts each).
pub const MAX_QUERIES: usize = 6_400;
/// Maximum number of passages that a request can ask for per query.
pub const MAX_RESULTS: usize = 1_000;
/// Maximum length of a query, in bytes. Every term of a query is looked up, so longer queries are
/// rejected.
pub const MAX_QUERY_BYTES: usize = 64 << 10;
/// Maximum total size of the passages in one response, in bytes. A response is held in memory
/// completely, first as passages and then as JSON.
const MAX_BYTES: usize = 256 << 20;
/// Minimum length of the two ranked lists that a hybrid search fuses.
const MIN_FUSED_LENGTH: usize = 100;
/// Maximum time for which a request waits for a permit to search.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout for embedding the queries of a request.
const EMBEDDING_TIMEOUT: Duration = Duration::from_secs(120);

/// Method of ranking passages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Ranks by BM25, from the terms of query and passage.
    Bm25,
    /// Ranks by dense retrieval, from embedding vectors.
    Dense,
    /// Ranks by BM25 and by dense retrieval, combined by reciprocal-rank fusion.
    Hybrid,
}

impl Mode {
    /// Returns the name of the mode: `bm25`, `dense` or `hybrid`.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Bm25 => "bm25",
            Mode::Dense => "dense",
            Mode::Hybrid => "hybrid",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Mode::Bm25, Mode::Dense, Mode::Hybrid];
        let found = all.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| format!("{text:?} must be one of bm25, dense and hybrid"))
    }
}

/// A handle to an index that is searched in one [`Mode`]. Clones share the index and the limit on
/// concurrent searches.
#[derive(Clone)]
pub struct Searcher(Arc<SearcherInner>);

struct SearcherInner {
    index: Index,
    mode: Mode,
    embedder: Option<Arc<dyn Embedder>>,
    threads: usize,
    permits: Arc<Semaphore>,
}

impl Searcher {
    /// Creates a searcher over `index`. At most `threads` requests are searched at the same time,
    /// each on at most `threads` threads; 0 selects the number of cores. Dense and hybrid modes
    /// require the `embedder` that embedded the passages.
    ///
    /// # Errors
    /// In dense and hybrid mode, returns [`SearchError::NoVectors`] if the index has no vectors, or
    /// if `embedder` is missing or a different model.
    pub fn new(
        index: Index,
        mode: Mode,
        embedder: Option<Arc<dyn Embedder>>,
        threads: usize,
    ) -> Result<Self, SearchError> {
        if mode != Mode::Bm25 {
            let dir = index.dir().display();
            let Some(dense) = &index.manifest().dense else {
                return Err(SearchError::NoVectors(format!(
                    "{dir} has no vectors, so it supports only bm25 search; build it again with \
                     --dense MODEL"
                )));
            };
            let Some(embedder) = &embedder else {
                return Err(SearchError::NoVectors(format!(
                    "a {mode} search needs the model {:?} that embedded the passages of {dir}",
                    dense.model
                )));
            };
            if embedder.fingerprint() != dense.fingerprint {
                return Err(SearchError::NoVectors(format!(
                    "the selected model is not the model that embedded the passages of {dir}, \
                     {:?}; select that model, or build the index again",
                    dense.model
                )));
            }
        }
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = if threads == 0 { cores() } else { threads };
        let permits = Arc::new(Semaphore::new(threads));
        Ok(Searcher(Arc::new(SearcherInner { index, mode, embedder, threads, permits })))
    }

    /// Returns the index that is searched.
    pub fn index(&self) -> &Index {
        &self.0.index
    }

    /// Returns the mode by which passages are ranked.
    pub fn mode(&self) -> Mode {
        self.0.mode
    }

    /// Returns the `count` best passages for each query, the best first.
    ///
    /// # Errors
    /// Returns [`SearchError::Query`] if more than [`MAX_QUERIES`] queries or [`MAX_RESULTS`]
    /// passages are requested, `count` is 0, a query is longer than [`MAX_QUERY_BYTES`] bytes, or
    /// the passages found exceed 256 MiB. Returns [`SearchError::Busy`] if no permit becomes
    /// available within a minute. Returns another error if the model fails or the index is damaged.
    pub async fn search(
        &self,
        queries: Vec<String>,
        count: usize,
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        check_limits(&queries, count)?;
        if queries.is_empty() {
            return Ok(Vec::new());
        }
        let inner = &self.0;
        let vectors = match (inner.mode, &inner.embedder) {
            (Mode::Dense | Mode::Hybrid, Some(embedder)) => {
                embed_queries(embedder.as_ref(), &queries).await?
            }
            _ => Vec::new(),
        };
        let permit =
            process_time::with_timeout(QUEUE_TIMEOUT, Arc::clone(&inner.permits).acquire_owned())
                .await;
        let Some(Ok(permit)) = permit else { return Err(SearchError::Busy(QUEUE_TIMEOUT)) };
        let inner = Arc::clone(inner);
        let found = tokio::task::spawn_blocking(move || {
            // Held until the search ends, even if the caller has been cancelled.
            let _permit = permit;
            inner.find_passages(&queries, &vectors, count)
        })
        .await;
        found.map_err(|error| SearchError::Internal(error.to_string()))?
    }
}

/// Checks that the number of queries, the number of passages and the lengths of the queries are
/// within the limits.
fn check_limits(queries: &[String], count: usize) -> Result<(), SearchError> {
    if queries.len() > MAX_QUERIES {
        let found = queries.len();
        return Err(SearchError::Query(format!(
            "the request has {found} queries, but at most {MAX_QUERIES} are permitted; split it \
             into several requests"
        )));
    }
    if !(1..=MAX_RESULTS).contains(&count) {
        return Err(SearchError::Query(format!(
            "the request is for {count} passages, but the number must be from 1 to {MAX_RESULTS}"
        )));
    }
    let too_long = queries.iter().position(|query| query.len() > MAX_QUERY_BYTES);
    match too_long {
        Some(at) => Err(SearchError::Query(format!(
            "query {at} has {} bytes, but queries have at most {MAX_QUERY_BYTES}",
            queries[at].len()
        ))),
        None => Ok(()),
    }
}

async fn embed_queries(
    embedder: &dyn Embedder,
    queries: &[String],
) -> Result<Vec<Vec<f32>>, SearchError> {
    let vectors =
        process_time::with_timeout(EMBEDDING_TIMEOUT, embedder.embed(queries, TextRole::Query))
            .await;
    let late = || {
        let task_text = format!("the vectors of {} queries", queries.len());
        PolicyError::Deadline(EMBEDDING_TIMEOUT, task_text)
    };
    Ok(vectors.unwrap_or_else(|| Err(late()))?)
}

impl SearcherInner {
    /// Finds the `count` best passages for each query. Blocks the calling thread.
    fn find_passages(
        &self,
        queries: &[String],
        vectors: &[Vec<f32>],
        count: usize,
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        let rows = match self.mode {
            Mode::Bm25 => self.index.bm25(queries, count, self.threads)?,
            Mode::Dense => self.index.dense(vectors, count, self.threads)?,
            Mode::Hybrid => {
                let depth = count.max(MIN_FUSED_LENGTH);
                let lexical = self.index.bm25(queries, depth, self.threads)?;
                let dense = self.index.dense(vectors, depth, self.threads)?;
                lexical
                    .iter()
                    .zip(&dense)
                    .map(|(lexical_rows, other)| fuse_rankings(&[lexical_rows, other], count))
                    .collect()
            }
        };
        load_hits(&self.index, &rows, MAX_BYTES)
    }
}

/// Loads the passages of the rows that a search found.
///
/// # Errors
/// Returns an error if the passages have more than `max_bytes` bytes in total, or the index is
/// damaged.
fn load_hits(
    index: &Index,
    rows: &[Vec<(u32, f32)>],
    max_bytes: usize,
) -> Result<Vec<Vec<Hit>>, SearchError> {
    let mut bytes = 0;
    let mut found = Vec::with_capacity(rows.len());
    for rows in rows {
        let hits = index.hits(rows)?;
        bytes += hits
            .iter()
            .map(|hit| hit.passage.id.len() + hit.passage.title.len() + hit.passage.text.len())
            .sum::<usize>();
        if bytes > max_bytes {
            return Err(SearchError::Query(format!(
                "the passages found have more than {max_bytes} bytes; request fewer passages, or \
                 split the request"
            )));
        }
        found.push(hits);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{make, passage};

    #[test]
    fn passages_above_size_limit_are_rejected() {
        let (_made, index) = make(&[passage("a", "T", "12345"), passage("b", "", "12345")], false);
        let rows = [vec![(0, 1.0), (1, 0.5)], vec![(0, 1.0)]];
        assert_eq!(load_hits(&index, &rows, 20).unwrap().iter().map(Vec::len).sum::<usize>(), 3);
        let error = load_hits(&index, &rows, 19).unwrap_err().to_string();
        assert!(error.contains("more than 19 bytes"), "{error}");
    }
}
