//! Local retrieval: indices of passages on disk, and their HTTP service.
//!
//! [`build`] turns a JSONL file into an index: BM25 over an inverted index, and vectors of the passages where
//! a model is given. [`Index::open`] opens one; a [`Searcher`] answers queries from async code by BM25, by
//! vectors, or by both with their ranks fused. [`router`] serves it over HTTP in the forms of Search-R1's
//! `/retrieve` and Agent-R1's `/search`; a [`Client`] asks such a server.
//!
//! Guarantees: an index is whole or does not open; it is refused where its schema is another one or its files
//! are not those that were written. Results are a function of index and query: equal scores are in the order
//! of the corpus, and vectors are compared exactly, not approximately.
//!
//! Not here: models that embed (`levade-engine`), and the tool that an agent searches with
//! (`levade-agent`).

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
