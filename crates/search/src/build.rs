//! Builds an index atomically: either the complete index exists, or none that opens.
//!
//! All files are written into a directory next to the index, `.NAME.building`, with the manifest
//! last. Then that directory is renamed to the index. If the process is killed in between, it
//! leaves a directory that is not an index. The next build of an index of this name clears that
//! directory.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_policy::{Embedder, PolicyError, TextRole, crash_point, process_time};
use tokio::runtime::Handle;

use crate::corpus::Corpus;
use crate::index::LEXICAL;
use crate::lexical::{LexicalWriter, to_search_error};
use crate::manifest::{Dense, FileEntry, MANIFEST, Manifest, SCHEMA, checksum};
use crate::vectors::VectorWriter;
use crate::{Analyzer, Passage, SearchError};

/// Number of passages that are embedded in one batch.
const BATCH: usize = 256;
/// Timeout for embedding one batch of passages.
const BATCH_TIMEOUT: Duration = Duration::from_secs(600);
/// Name of the file that is locked while an index is built.
const LOCK: &str = ".lock";

/// Progress of building an index, for display to the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Description of the current stage, such as `indexing` or `writing the index`.
    pub stage: &'a str,
    /// Number of bytes of the corpus that have been read.
    pub done: u64,
    /// Size of the corpus, in bytes.
    pub total: u64,
    /// Number of passages that have been indexed.
    pub passages: u64,
}

/// Embedding model that computes the vectors of a new index.
pub struct DenseModel<'a> {
    /// Source of the model, from which a server loads it again to embed queries.
    pub source: String,
    /// Text that `embedder` prepends to queries. `None` if it uses the model's own prefix.
    pub query_prefix: Option<String>,
    /// Text that `embedder` prepends to passages. `None` if it uses the model's own prefix.
    pub passage_prefix: Option<String>,
    /// The loaded embedding model.
    pub embedder: &'a dyn Embedder,
    /// Tokio runtime on which the build waits for `embedder`.
    pub runtime: Handle,
}

/// Builds the index of the corpus file `corpus` in the directory `dir`, which must be absent or
/// empty. Blocks the calling thread.
///
/// # Errors
/// Returns an error if a row of the corpus is invalid, `dir` is not empty or cannot be replaced,
/// another process is building the same index, the model fails, or a file cannot be written. If the
/// index cannot be completed, its files are removed.
pub fn build(
    corpus: &Path,
    dir: &Path,
    analyzer: Analyzer,
    dense: Option<DenseModel<'_>>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Manifest, SearchError> {
    let is_taken = match dir.exists() {
        true => std::fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_some()),
        // A dangling symbolic link.
        false => dir.is_symlink(),
    };
    if is_taken {
        return Err(SearchError::Exists(dir.to_owned()));
    }
    // Resolve a symbolic link, so that the index replaces the empty directory and not the link.
    let dir = &dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let mut corpus = Corpus::open(corpus)?;
    let build_dir = BuildDir::create(dir)?;
    let built = write_index(&mut corpus, &build_dir.location, analyzer, dense, progress);
    let manifest = match built {
        Ok(manifest) => manifest,
        Err(error) => {
            build_dir.remove();
            return Err(error);
        }
    };
    build_dir.publish(dir)?;
    Ok(manifest)
}

/// Temporary directory of an index that is being built. This process has locked it.
struct BuildDir {
    location: PathBuf,
    _lock: File,
}

impl BuildDir {
    fn create(dir: &Path) -> Result<Self, SearchError> {
        let name = dir.file_name().ok_or_else(|| SearchError::Exists(dir.to_owned()))?;
        let location = dir.with_file_name(format!(".{}.building", name.to_string_lossy()));
        std::fs::create_dir_all(&location).map_err(SearchError::io_error("create", &location))?;
        let path = location.join(LOCK);
        let lock = File::create(&path).map_err(SearchError::io_error("create", &path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(SearchError::Locked(dir.to_owned())),
            Err(TryLockError::Error(error)) => {
                return Err(SearchError::io_error("lock", &path)(error));
            }
        }
        // Remove the files of an earlier process that was killed.
        for entry in
            std::fs::read_dir(&location).map_err(SearchError::io_error("list", &location))?
        {
            let path = entry.map_err(SearchError::io_error("list", &location))?.path();
            if path.is_dir() {
                std::fs::remove_dir_all(&path).map_err(SearchError::io_error("remove", &path))?;
            } else if !path.ends_with(LOCK) {
                std::fs::remove_file(&path).map_err(SearchError::io_error("remove", &path))?;
            }
        }
        let build_dir = BuildDir { location, _lock: lock };
        match check_replaceable(dir) {
            Ok(()) => Ok(build_dir),
            Err(cause) => {
                build_dir.remove();
                Err(SearchError::Stays { path: dir.to_owned(), cause })
            }
        }
    }

    /// Renames the temporary directory to the index directory `dir`, and flushes the parent
    /// directory.
    fn publish(self, dir: &Path) -> Result<(), SearchError> {
        let lock = self.location.join(LOCK);
        std::fs::remove_file(&lock).map_err(SearchError::io_error("remove", &lock))?;
        crash_point("search_rename");
        std::fs::rename(&self.location, dir)
            .map_err(SearchError::io_error("rename", &self.location))?;
        let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
        flush_to_disk(parent.unwrap_or(Path::new(".")))
    }

    fn remove(self) {
        // Only the original error is reported. Files that cannot be removed now are removed by the
        // next build.
        let _ = std::fs::remove_dir_all(&self.location);
    }
}

/// Tests that an existing empty directory can be replaced by another directory, by replacing it
/// with an empty one. A directory that cannot be replaced, such as a mount point, then causes an
/// error before hours of work.
fn check_replaceable(dir: &Path) -> std::io::Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let other = dir.with_file_name(format!(".{name}.empty"));
    std::fs::create_dir_all(&other)?;
    std::fs::rename(&other, dir).inspect_err(|_| {
        // Only the error of the rename is reported.
        let _ = std::fs::remove_dir(&other);
    })
}

/// Flushes a file, or the entries of a directory, to the disk.
fn flush_to_disk(path: &Path) -> Result<(), SearchError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(SearchError::io_error("flush", path))
}

/// Embeds passages in batches, and writes their vectors to the index.
struct DenseWriter<'a> {
    model: DenseModel<'a>,
    writer: VectorWriter,
    waiting: Vec<String>,
}

impl<'a> DenseWriter<'a> {
    fn create(location: &Path, model: DenseModel<'a>) -> Result<Self, SearchError> {
        let writer = VectorWriter::create(location, model.embedder.dimensions())?;
        Ok(DenseWriter { model, writer, waiting: Vec::with_capacity(BATCH) })
    }

    fn add(&mut self, passage: &Passage) -> Result<(), SearchError> {
        self.waiting.push(passage.contents());
        if self.waiting.len() == BATCH { self.embed_batch() } else { Ok(()) }
    }

    fn embed_batch(&mut self) -> Result<(), SearchError> {
        let texts = std::mem::take(&mut self.waiting);
        let work = self.model.embedder.embed(&texts, TextRole::Passage);
        let vectors = self.model.runtime.block_on(process_time::with_timeout(BATCH_TIMEOUT, work));
        let late = || {
            PolicyError::Deadline(BATCH_TIMEOUT, format!("the vectors of {} texts", texts.len()))
        };
        vectors
            .unwrap_or_else(|| Err(late()))?
            .iter()
            .try_for_each(|vector| self.writer.add(vector))
    }

    fn finish(mut self) -> Result<Dense, SearchError> {
        if !self.waiting.is_empty() {
            self.embed_batch()?;
        }
        let dimensions = self.model.embedder.dimensions();
        let residual = self.writer.finish()?;
        let fingerprint = self.model.embedder.fingerprint().to_owned();
        let DenseModel { source: model, query_prefix, passage_prefix, .. } = self.model;
        Ok(Dense { model, fingerprint, query_prefix, passage_prefix, dimensions, residual })
    }
}

/// Writes all files of an index to the directory `location`. The manifest is written last.
fn write_index(
    corpus: &mut Corpus,
    location: &Path,
    analyzer: Analyzer,
    dense: Option<DenseModel<'_>>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Manifest, SearchError> {
    let lexical_dir = location.join(LEXICAL);
    std::fs::create_dir(&lexical_dir).map_err(SearchError::io_error("create", &lexical_dir))?;
    let to_error = to_search_error(&lexical_dir);
    let mut lexical = LexicalWriter::create(&lexical_dir, analyzer)?;
    let stage = if dense.is_some() { "indexing and embedding" } else { "indexing" };
    let mut dense = dense.map(|model| DenseWriter::create(location, model)).transpose()?;
    let mut passages = 0;
    while let Some(passage) = corpus.next().transpose()? {
        lexical.add(&passage).map_err(&to_error)?;
        if let Some(dense) = &mut dense {
            dense.add(&passage)?;
        }
        passages += 1;
        if passages % BATCH as u64 == 0 {
            crash_point("search_indexing");
            let (done, total) = corpus.progress();
            progress(Progress { stage, done, total, passages });
        }
    }
    if passages == 0 {
        return Err(SearchError::Empty(corpus.path().to_owned()));
    }
    let (done, total) = corpus.progress();
    progress(Progress { stage: "writing the index", done, total, passages });
    lexical.finish().map_err(&to_error)?;
    let dense = dense.map(DenseWriter::finish).transpose()?;
    crash_point("search_files");
    let manifest =
        Manifest { schema: SCHEMA, passages, analyzer, dense, files: list_files(location)? };
    let path = location.join(MANIFEST);
    let text = serde_json::to_vec_pretty(&manifest)
        .map_err(|error| SearchError::Internal(error.to_string()))?;
    std::fs::write(&path, text).map_err(SearchError::io_error("write", &path))?;
    [path.as_path(), &lexical_dir, location].into_iter().try_for_each(flush_to_disk)?;
    Ok(manifest)
}

/// Flushes all files of an index to the disk, and returns their manifest entries, sorted by name.
fn list_files(location: &Path) -> Result<Vec<FileEntry>, SearchError> {
    let mut found = Vec::new();
    for (dir, prefix) in
        [(location.to_owned(), String::new()), (location.join(LEXICAL), format!("{LEXICAL}/"))]
    {
        for entry in std::fs::read_dir(&dir).map_err(SearchError::io_error("list", &dir))? {
            let path = entry.map_err(SearchError::io_error("list", &dir))?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            // Lock files belong to the writing process, not to the index.
            if path.is_dir() || name.ends_with(".lock") {
                continue;
            }
            flush_to_disk(&path)?;
            let bytes =
                std::fs::metadata(&path).map_err(SearchError::io_error("read", &path))?.len();
            let name = format!("{prefix}{name}");
            found.push(FileEntry { name, bytes, crc32c: checksum(&path)? });
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

#[cfg(test)]
#[path = "build_tests.rs"]
mod tests;
