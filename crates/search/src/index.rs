//! Opens an index on disk and ranks its passages.

use std::path::{Path, PathBuf};

use crate::lexical::LexicalIndex;
use crate::manifest::Manifest;
use crate::vectors::Vectors;
use crate::{Hit, SearchError};

/// Name of the subdirectory that contains the inverted index.
pub(crate) const LEXICAL: &str = "bm25";
/// Maximum size, in bytes, of an index whose checksums are verified whenever it is opened. The
/// verification of such an index takes about a second.
const ALWAYS_CHECKED: u64 = 1 << 30;

/// An open index. Any number of threads can search it concurrently.
pub struct Index {
    dir: PathBuf,
    manifest: Manifest,
    lexical: LexicalIndex,
    vectors: Option<Vectors>,
}

impl Index {
    /// Opens the index in `dir`, and compares the sizes of its files with the manifest. Also
    /// compares their checksums if `verify` is true or the index has at most 1 GiB.
    ///
    /// # Errors
    /// Returns an error if `dir` is not an index, its schema is not supported, or a file is
    /// damaged.
    pub fn open(dir: &Path, verify: bool) -> Result<Self, SearchError> {
        let manifest = Manifest::read(dir)?;
        manifest.check(dir, verify || manifest.bytes() <= ALWAYS_CHECKED)?;
        let analyzer = manifest.analyzer;
        let divides = manifest.splits_characters();
        let lexical = LexicalIndex::open(&dir.join(LEXICAL), analyzer, divides, manifest.passages)?;
        let vectors = manifest
            .dense
            .as_ref()
            .map(|dense| Vectors::open(dir, manifest.passages, dense.dimensions, dense.residual));
        let vectors = vectors.transpose()?;
        Ok(Index { dir: dir.to_owned(), manifest, lexical, vectors })
    }

    /// Returns the manifest of the index.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the directory of the index.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the rows and BM25 scores of the `count` best passages for each query, the best
    /// first. Uses at most `threads` threads.
    ///
    /// # Errors
    /// Returns an error if the index is damaged.
    pub fn bm25(
        &self,
        queries: &[String],
        count: usize,
        threads: usize,
    ) -> Result<Vec<Vec<(u32, f32)>>, SearchError> {
        let search_query = |query: &String| self.lexical.search(query, count);
        let fraction = queries.len().div_ceil(threads.max(1)).max(1);
        if fraction >= queries.len() {
            return queries.iter().map(search_query).collect();
        }
        std::thread::scope(|scope| {
            let parts: Vec<_> = queries
                .chunks(fraction)
                .map(|part| {
                    scope.spawn(move || Vec::from_iter(<[String]>::iter(part).map(search_query)))
                })
                .collect();
            let mut all = Vec::with_capacity(queries.len());
            for part in parts {
                let part = part
                    .join()
                    .map_err(|_| SearchError::Internal("a thread of the search panicked".into()))?;
                all.extend(part);
            }
            all.into_iter().collect()
        })
    }

    /// Returns the rows and inner products of the `count` best passages for each query vector, the
    /// best first. If the model normalizes its vectors, the inner product is the cosine similarity.
    /// Uses at most `threads` threads.
    ///
    /// # Errors
    /// Returns an error if the index has no vectors, or vectors of another number of dimensions.
    pub fn dense(
        &self,
        queries: &[Vec<f32>],
        count: usize,
        threads: usize,
    ) -> Result<Vec<Vec<(u32, f32)>>, SearchError> {
        self.vectors.as_ref().ok_or_else(|| {
            SearchError::NoVectors(format!(
                "{} has no vectors, so it supports only bm25 search; build it again with --dense \
                 MODEL",
                self.dir.display()
            ))
        })?.search(queries, count, threads)
    }

    /// Loads the passages of `rows`, which are results of [`Index::bm25`] or [`Index::dense`].
    ///
    /// # Errors
    /// Returns an error if the index is damaged.
    pub fn hits(&self, rows: &[(u32, f32)]) -> Result<Vec<Hit>, SearchError> {
        rows.iter()
            .map(|(row, score)| {
                Ok(Hit { passage: self.lexical.read_passage(*row)?, score: *score })
            })
            .collect()
    }
}
