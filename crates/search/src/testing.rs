//! Builds small indices for tests.

#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use levade_policy::{Embedder, PolicyError, TextRole};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::{Analyzer, DenseModel, Index, Passage, SearchError, build};

/// Creates a passage.
pub fn passage(id: &str, title: &str, text: &str) -> Passage {
    Passage { id: id.into(), title: title.into(), text: text.into() }
}

/// Writes passages to a corpus file, one JSON object per line.
pub fn write_corpus(path: &Path, passages: &[Passage]) {
    let lines: Vec<String> =
        passages.iter().map(|passage| serde_json::to_string(passage).unwrap()).collect();
    std::fs::write(path, lines.join("\n")).unwrap();
}

/// A temporary directory with a corpus and its index. Dropping it removes both.
pub struct TestIndex {
    _dir: TempDir,
    pub index: PathBuf,
}

/// Builds an index of `passages`, with vectors of [`Letters`] if `dense` is true.
pub fn try_make(
    passages: &[Passage],
    analyzer: Analyzer,
    dense: bool,
) -> Result<TestIndex, SearchError> {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("corpus.jsonl");
    let index = dir.path().join("index");
    write_corpus(&corpus, passages);
    let runtime = Runtime::new().unwrap();
    let model = dense.then(|| DenseModel {
        source: "letters".into(),
        query_prefix: None,
        passage_prefix: None,
        embedder: &Letters,
        runtime: runtime.handle().clone(),
    });
    build(&corpus, &index, analyzer, model, &mut |_| {})?;
    Ok(TestIndex { _dir: dir, index })
}

/// Builds an English index with [`try_make`], and opens it.
pub fn make(passages: &[Passage], dense: bool) -> (TestIndex, Index) {
    let made = try_make(passages, Analyzer::English, dense).unwrap();
    let index = Index::open(&made.index, true).unwrap();
    (made, index)
}

/// An embedding model whose vectors are normalized counts of the letters a to z.
pub struct Letters;

#[async_trait]
impl Embedder for Letters {
    fn dimensions(&self) -> usize {
        26
    }

    fn fingerprint(&self) -> &str {
        "letters"
    }

    async fn embed(&self, texts: &[String], _: TextRole) -> Result<Vec<Vec<f32>>, PolicyError> {
        Ok(texts
            .iter()
            .map(|text| {
                let mut counts = [0f32; 26];
                for byte in text.bytes().filter(u8::is_ascii_alphabetic) {
                    counts[usize::from(byte.to_ascii_lowercase() - b'a')] += 1.0;
                }
                let norm = counts.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-9);
                counts.iter().map(|x| x / norm).collect()
            })
            .collect())
    }
}

/// Returns [`Letters`] as a shared embedder.
pub fn letters() -> Arc<dyn Embedder> {
    Arc::new(Letters)
}
