//! Building an index: all of it, or nothing that opens.
//!
//! Files are written into a folder beside the index, `.NAME.building`, the manifest last; then that folder
//! gets the index's name. A process that dies on the way leaves a folder that is no index, and that the next
//! one of the same name removes.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_policy::{Embedder, PolicyError, TextRole, awake, crash_point};
use tokio::runtime::Handle;

use crate::corpus::Corpus;
use crate::index::LEXICAL;
use crate::lexical::{LexicalWriter, fault};
use crate::manifest::{Dense, FileEntry, MANIFEST, Manifest, SCHEMA, checksum};
use crate::vectors::VectorWriter;
use crate::{Analyzer, Passage, SearchError};

/// Passages that are embedded together.
const BATCH: usize = 256;
/// Longest wait for a batch of vectors.
const LONGEST_BATCH: Duration = Duration::from_secs(600);
/// File that the process at work holds.
const LOCK: &str = ".lock";

/// How far the building of an index has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Work at hand, for people.
    pub stage: &'a str,
    /// Bytes of the corpus that were read.
    pub done: u64,
    /// Bytes of the corpus.
    pub total: u64,
    /// Passages so far.
    pub passages: u64,
}

/// Model whose vectors an index gets.
pub struct DenseModel<'a> {
    /// Source of the model, by which queries will find it.
    pub source: String,
    /// Text that its user puts before queries, which the model then does, where it is not the model's own.
    pub query_prefix: Option<String>,
    /// Text put before passages, likewise.
    pub passage_prefix: Option<String>,
    /// The model.
    pub embedder: &'a dyn Embedder,
    /// Runtime that waits for it.
    pub runtime: Handle,
}

/// Builds the index of a corpus in a folder that is not there yet, or empty. Blocks the thread.
///
/// # Errors
/// When a row of the corpus cannot be used, the folder holds something, another process builds it, the model
/// fails, or the disk is full. Nothing is left of an index that could not be completed.
pub fn build(
    corpus: &Path,
    folder: &Path,
    analyzer: Analyzer,
    dense: Option<DenseModel<'_>>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Manifest, SearchError> {
    let is_taken = match folder.exists() {
        true => std::fs::read_dir(folder).map_or(true, |mut entries| entries.next().is_some()),
        // A link that leads nowhere.
        false => folder.is_symlink(),
    };
    if is_taken {
        return Err(SearchError::Exists(folder.to_owned()));
    }
    // Where a link leads: the index takes the place of an empty folder, not of the link.
    let folder = &folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let mut corpus = Corpus::open(corpus)?;
    let site = Site::begin(folder)?;
    let built = write(&mut corpus, &site.place, analyzer, dense, progress);
    let manifest = match built {
        Ok(manifest) => manifest,
        Err(error) => {
            site.clear();
            return Err(error);
        }
    };
    site.end(folder)?;
    Ok(manifest)
}

/// The folder of an index that is being built, held by this process.
struct Site {
    place: PathBuf,
    _lock: File,
}

impl Site {
    fn begin(folder: &Path) -> Result<Self, SearchError> {
        let name = folder.file_name().ok_or_else(|| SearchError::Exists(folder.to_owned()))?;
        let place = folder.with_file_name(format!(".{}.building", name.to_string_lossy()));
        std::fs::create_dir_all(&place).map_err(SearchError::io("create", &place))?;
        let path = place.join(LOCK);
        let lock = File::create(&path).map_err(SearchError::io("create", &path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(SearchError::Locked(folder.to_owned())),
            Err(TryLockError::Error(error)) => return Err(SearchError::io("lock", &path)(error)),
        }
        // Left by a process that is gone.
        for entry in std::fs::read_dir(&place).map_err(SearchError::io("list", &place))? {
            let path = entry.map_err(SearchError::io("list", &place))?.path();
            if path.is_dir() {
                std::fs::remove_dir_all(&path).map_err(SearchError::io("remove", &path))?;
            } else if !path.ends_with(LOCK) {
                std::fs::remove_file(&path).map_err(SearchError::io("remove", &path))?;
            }
        }
        let site = Site { place, _lock: lock };
        match give_way(folder) {
            Ok(()) => Ok(site),
            Err(cause) => {
                site.clear();
                Err(SearchError::Stays { path: folder.to_owned(), cause })
            }
        }
    }

    /// Gives the folder the name of the index.
    fn end(self, folder: &Path) -> Result<(), SearchError> {
        let lock = self.place.join(LOCK);
        std::fs::remove_file(&lock).map_err(SearchError::io("remove", &lock))?;
        crash_point("search_rename");
        std::fs::rename(&self.place, folder).map_err(SearchError::io("rename", &self.place))?;
        let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty());
        flush(parent.unwrap_or(Path::new(".")))
    }

    fn clear(self) {
        // The fault that led here is the one to report; what is left is removed at the next try.
        let _ = std::fs::remove_dir_all(&self.place);
    }
}

/// Puts another empty folder in the place of one that is there, as the index will be: a folder that cannot
/// give way, such as one where something is mounted, is found out before hours of work.
fn give_way(folder: &Path) -> std::io::Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let other = folder.with_file_name(format!(".{name}.empty"));
    std::fs::create_dir_all(&other)?;
    std::fs::rename(&other, folder).inspect_err(|_| {
        // The error is the one to report.
        let _ = std::fs::remove_dir(&other);
    })
}

/// Flushes a file or the entries of a folder to the disk.
fn flush(path: &Path) -> Result<(), SearchError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(SearchError::io("flush", path))
}

/// Vectors of an index that is being built.
struct DenseWriter<'a> {
    model: DenseModel<'a>,
    writer: VectorWriter,
    waiting: Vec<String>,
}

impl<'a> DenseWriter<'a> {
    fn create(place: &Path, model: DenseModel<'a>) -> Result<Self, SearchError> {
        let writer = VectorWriter::create(place, model.embedder.dimensions())?;
        Ok(DenseWriter { model, writer, waiting: Vec::with_capacity(BATCH) })
    }

    fn add(&mut self, passage: &Passage) -> Result<(), SearchError> {
        self.waiting.push(passage.contents());
        if self.waiting.len() == BATCH { self.embed() } else { Ok(()) }
    }

    fn embed(&mut self) -> Result<(), SearchError> {
        let texts = std::mem::take(&mut self.waiting);
        let work = self.model.embedder.embed(&texts, TextRole::Passage);
        let vectors = self.model.runtime.block_on(awake::within(LONGEST_BATCH, work));
        let late = || PolicyError::Deadline(LONGEST_BATCH, format!("the vectors of {} texts", texts.len()));
        vectors.unwrap_or_else(|| Err(late()))?.iter().try_for_each(|vector| self.writer.add(vector))
    }

    fn finish(mut self) -> Result<Dense, SearchError> {
        if !self.waiting.is_empty() {
            self.embed()?;
        }
        let (dimensions, residual) = (self.model.embedder.dimensions(), self.writer.finish()?);
        let fingerprint = self.model.embedder.fingerprint().to_owned();
        let DenseModel { source: model, query_prefix, passage_prefix, .. } = self.model;
        Ok(Dense { model, fingerprint, query_prefix, passage_prefix, dimensions, residual })
    }
}

/// Writes all files of an index.
fn write(
    corpus: &mut Corpus,
    place: &Path,
    analyzer: Analyzer,
    dense: Option<DenseModel<'_>>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Manifest, SearchError> {
    let lexical_place = place.join(LEXICAL);
    std::fs::create_dir(&lexical_place).map_err(SearchError::io("create", &lexical_place))?;
    let fault = fault(&lexical_place);
    let mut lexical = LexicalWriter::create(&lexical_place, analyzer)?;
    let stage = if dense.is_some() { "indexing and embedding" } else { "indexing" };
    let mut dense = dense.map(|model| DenseWriter::create(place, model)).transpose()?;
    let mut passages = 0;
    while let Some(passage) = corpus.next().transpose()? {
        lexical.add(&passage).map_err(&fault)?;
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
    lexical.finish().map_err(&fault)?;
    let dense = dense.map(DenseWriter::finish).transpose()?;
    crash_point("search_files");
    let manifest = Manifest { schema: SCHEMA, passages, analyzer, dense, files: files(place)? };
    let path = place.join(MANIFEST);
    let text =
        serde_json::to_vec_pretty(&manifest).map_err(|error| SearchError::Internal(error.to_string()))?;
    std::fs::write(&path, text).map_err(SearchError::io("write", &path))?;
    [path.as_path(), &lexical_place, place].into_iter().try_for_each(flush)?;
    Ok(manifest)
}

/// Flushes and describes all files of an index, in the order of their names.
fn files(place: &Path) -> Result<Vec<FileEntry>, SearchError> {
    let mut found = Vec::new();
    for (folder, prefix) in [(place.to_owned(), String::new()), (place.join(LEXICAL), format!("{LEXICAL}/"))]
    {
        for entry in std::fs::read_dir(&folder).map_err(SearchError::io("list", &folder))? {
            let path = entry.map_err(SearchError::io("list", &folder))?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            // Locks are of whoever writes.
            if path.is_dir() || name.ends_with(".lock") {
                continue;
            }
            flush(&path)?;
            let bytes = std::fs::metadata(&path).map_err(SearchError::io("read", &path))?.len();
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
