//! An index on disk that is searched.

use std::path::{Path, PathBuf};

use crate::lexical::Lexical;
use crate::manifest::Manifest;
use crate::vectors::Vectors;
use crate::{Hit, SearchError};

/// Folder of the inverted index within that of the index.
pub(crate) const LEXICAL: &str = "bm25";
/// Indices up to this size are compared with their checksums whenever they are opened; that takes a second.
const ALWAYS_CHECKED: u64 = 1 << 30;

/// An index that is open. Any number of threads may search it at once.
pub struct Index {
    folder: PathBuf,
    manifest: Manifest,
    lexical: Lexical,
    vectors: Option<Vectors>,
}

impl Index {
    /// Opens an index. The sizes of its files are compared with the manifest; so are the checksums of a small
    /// index, and with `verify` of any.
    ///
    /// # Errors
    /// When the folder is no index, or one of another schema, or damaged.
    pub fn open(folder: &Path, verify: bool) -> Result<Self, SearchError> {
        let manifest = Manifest::read(folder)?;
        manifest.check(folder, verify || manifest.bytes() <= ALWAYS_CHECKED)?;
        let (analyzer, divides) = (manifest.analyzer, manifest.divides());
        let lexical = Lexical::open(&folder.join(LEXICAL), analyzer, divides, manifest.passages)?;
        let vectors = manifest
            .dense
            .as_ref()
            .map(|dense| Vectors::open(folder, manifest.passages, dense.dimensions, dense.residual));
        let vectors = vectors.transpose()?;
        Ok(Index { folder: folder.to_owned(), manifest, lexical, vectors })
    }

    /// Manifest of the index.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where it lies.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Rows and BM25 scores of the `count` best passages for each query, on up to `threads` threads.
    ///
    /// # Errors
    /// When the index is damaged.
    pub fn bm25(
        &self,
        queries: &[String],
        count: usize,
        threads: usize,
    ) -> Result<Vec<Vec<(u32, f32)>>, SearchError> {
        let one = |query: &String| self.lexical.search(query, count);
        let share = queries.len().div_ceil(threads.max(1)).max(1);
        if share >= queries.len() {
            return queries.iter().map(one).collect();
        }
        std::thread::scope(|scope| {
            let part = |part| scope.spawn(move || Vec::from_iter(<[String]>::iter(part).map(one)));
            let parts: Vec<_> = queries.chunks(share).map(part).collect();
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

    /// Rows and cosines of the `count` best passages for the vector of each query, on up to `threads`
    /// threads.
    ///
    /// # Errors
    /// When the index has no vectors, or those of another model.
    pub fn dense(
        &self,
        queries: &[Vec<f32>],
        count: usize,
        threads: usize,
    ) -> Result<Vec<Vec<(u32, f32)>>, SearchError> {
        let none = || {
            SearchError::NoVectors(format!(
                "{} has no vectors, so it is searched by bm25 alone; build it again with --dense MODEL",
                self.folder.display()
            ))
        };
        self.vectors.as_ref().ok_or_else(none)?.search(queries, count, threads)
    }

    /// The passages of rows that were found.
    ///
    /// # Errors
    /// When the index is damaged.
    pub fn hits(&self, rows: &[(u32, f32)]) -> Result<Vec<Hit>, SearchError> {
        let hit = |(row, score): &(u32, f32)| Ok(Hit { passage: self.lexical.passage(*row)?, score: *score });
        rows.iter().map(hit).collect()
    }
}
