//! Local retrieval: search indices of passages on disk, and an HTTP service for them.
//!
//! [`build()`] builds an index from a JSONL file: an inverted index for BM25 and, if it is passed a
//! model, the embedding vectors of the passages. [`Index::open`] opens an index. A [`Searcher`]
//! runs queries from async code: by BM25, by vectors, or by both with reciprocal-rank fusion.
//! [`router`] serves a searcher over HTTP with the request and response formats of Search-R1's
//! `/retrieve` and Agent-R1's `/search`. A [`Client`] calls a `/retrieve` server.
//!
//! # Example
//! ```
//! use levade_search::{Analyzer, Index, Mode, Searcher, build};
//!
//! # let dir = std::env::temp_dir().join(format!("levade-search-{}", std::process::id()));
//! # std::fs::create_dir_all(&dir)?;
//! let corpus = dir.join("corpus.jsonl");
//! std::fs::write(
//!     &corpus,
//!     r#"{"id": "1", "title": "Levade", "text": "A horse raises its forehand."}
//!        {"id": "2", "title": "Piaffe", "text": "A trot on the spot."}"#,
//! )?;
//! build(&corpus, &dir.join("index"), Analyzer::English, None, &mut |_progress| {})?;
//!
//! let index = Index::open(&dir.join("index"), true)?;
//! let searcher = Searcher::new(index, Mode::Bm25, None, 1)?;
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! let hits = searcher.search(vec!["which horses raise the forehand?".into()], 1).await?;
//! assert_eq!(hits[0][0].passage.title, "Levade");
//! # Ok::<(), levade_search::SearchError>(())
//! # })?;
//! # std::fs::remove_dir_all(dir)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Guarantees
//! - **An index is complete or does not open.** [`Index::open`] rejects an index if its schema is
//!   not supported, or if its files have changed since they were written. Files are compared by
//!   size, and also by checksum if the index is small or the caller requests it.
//! - **Results depend only on the index and the query.** Passages with equal scores are in the
//!   order of the corpus, and vector search is exact, not approximate.
//!
//! Out of scope: embedding models (`levade-engine`), and the search tool that an agent calls.

mod build;
mod client;
mod corpus;
mod error;
mod fuse;
mod http;
mod index;
mod kernel;
mod lexical;
mod manifest;
mod passage;
mod searcher;
#[cfg(test)]
mod testing;
mod vectors;
mod words;

pub use build::{DenseModel, Progress, build};
pub use client::{Client, Retries};
pub use corpus::Corpus;
pub use error::SearchError;
pub use http::{HttpOptions, router, serve};
pub use index::Index;
pub use lexical::Analyzer;
pub use manifest::{Dense, Manifest, SCHEMA};
pub use passage::{Hit, Passage};
pub use searcher::{MAX_QUERIES, MAX_QUERY_BYTES, MAX_RESULTS, Mode, Searcher};
pub use vectors::{VectorWriter, Vectors};
