//! Local retrieval: indices of passages on disk, and their HTTP service.
//!
//! [`build()`] turns a JSONL file into an index: BM25 over an inverted index, and vectors of the passages if
//! it gets a model. [`Index::open`] opens an index; a [`Searcher`] answers queries from async code by BM25,
//! by vectors, or by both with their ranks fused. [`router`] serves it over HTTP in the forms of Search-R1's
//! `/retrieve` and Agent-R1's `/search`; a [`Client`] calls such a server.
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
//!     r#"{"id": "1", "title": "Levade", "text": "A horse raises its forehand and bends its haunches."}
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
//! - **An index is complete or does not open.** It is rejected if its schema differs or its files are not
//!   those that were written.
//! - **Results are a function of index and query.** Equal scores have the order of the corpus, and vectors
//!   are compared exactly, not approximately.
//!
//! Out of scope: models that embed (`levade-engine`), and the tool that an agent searches with.

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
pub use searcher::{LONGEST_QUERY, MOST_QUERIES, MOST_RESULTS, Mode, Searcher};
pub use vectors::{VectorWriter, Vectors};
