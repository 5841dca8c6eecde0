//! The manifest of an index: its schema, analyzer and model, and the size and checksum of each
//! file.
//!
//! The manifest is the last file to be written, so a directory without a manifest is not an index.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Analyzer, SearchError};

/// Schema version of new indices. Since schema 2, each Han or Hiragana character is a separate
/// term.
pub const SCHEMA: u64 = 2;
/// Oldest schema version that can be read.
const MIN_SCHEMA: u64 = 1;
/// File name of an index's manifest.
pub const MANIFEST: &str = "search.json";

/// Description of an index and its files, which is stored as `search.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Schema version of the index.
    pub schema: u64,
    /// Number of passages in the index.
    pub passages: u64,
    /// Analyzer that splits passages and queries into terms.
    pub analyzer: Analyzer,
    /// Description of the passage vectors. `None` if the index has no vectors.
    pub dense: Option<Dense>,
    /// Entries of all index files except the manifest itself.
    pub files: Vec<FileEntry>,
}

/// Description of the passage vectors of an index.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Dense {
    /// Source of the model that embedded the passages. Queries must be embedded by the same model.
    pub model: String,
    /// Fingerprint of the model's weights and tokenizer.
    pub fingerprint: String,
    /// Text to prepend to queries. `None` if the model's own prefix is used.
    pub query_prefix: Option<String>,
    /// Text that was prepended to passages. `None` if the model's own prefix was used.
    pub passage_prefix: Option<String>,
    /// Number of dimensions of each vector.
    pub dimensions: usize,
    /// Maximum Euclidean distance between a vector and its 8-bit quantization.
    pub residual: f32,
}

/// A file of an index, with its size and checksum as the manifest records them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Path relative to the index directory, with `/` as separator.
    pub name: String,
    /// Size of the file, in bytes.
    pub bytes: u64,
    /// CRC-32C checksum of the file.
    pub crc32c: u32,
}

impl Manifest {
    /// Reads the manifest of the index in `dir`.
    ///
    /// # Errors
    /// Returns [`SearchError::NotAnIndex`] if there is no manifest, [`SearchError::Schema`] if its
    /// schema is not supported, and another error if the manifest cannot be read or parsed.
    pub fn read(dir: &Path) -> Result<Self, SearchError> {
        let path = dir.join(MANIFEST);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(_) if !dir.exists() => {
                return Err(not_an_index_error(dir, "the directory does not exist"));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(not_an_index_error(
                    dir,
                    "the directory is not an index, because it has no search.json",
                ));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => {
                return Err(not_an_index_error(
                    dir,
                    "the path is a file, not the directory of an index",
                ));
            }
            Err(error) => return Err(SearchError::io_error("read", &path)(error)),
        };
        #[derive(Deserialize)]
        struct SchemaVersion {
            schema: u64,
        }
        let damaged =
            |error: serde_json::Error| SearchError::damaged_error(&path, error.to_string());
        let SchemaVersion { schema } = serde_json::from_slice(&text).map_err(damaged)?;
        if !(MIN_SCHEMA..=SCHEMA).contains(&schema) {
            return Err(SearchError::Schema {
                path: dir.to_owned(),
                found: schema,
                wanted: SCHEMA,
            });
        }
        serde_json::from_slice(&text).map_err(damaged)
    }

    /// Compares the sizes of the files in `dir` with the manifest. If `with_checksums` is true,
    /// also compares their checksums.
    ///
    /// # Errors
    /// Returns an error that names the first file that is missing, unreadable or different.
    pub fn check(&self, dir: &Path, with_checksums: bool) -> Result<(), SearchError> {
        for entry in &self.files {
            let path = resolve_file(dir, &entry.name)?;
            let bytes = match std::fs::metadata(&path) {
                Ok(facts) => facts.len(),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    return Err(SearchError::damaged_error(&path, "the file is missing"));
                }
                Err(error) => return Err(SearchError::io_error("read", &path)(error)),
            };
            if bytes != entry.bytes {
                let why =
                    format!("it has {bytes} bytes, but had {} when it was written", entry.bytes);
                return Err(SearchError::damaged_error(&path, why));
            }
            if with_checksums && checksum(&path)? != entry.crc32c {
                return Err(SearchError::damaged_error(
                    &path,
                    "the checksum of the file differs from the checksum in the manifest",
                ));
            }
        }
        Ok(())
    }

    /// Returns whether each Han or Hiragana character is a separate term, as since schema 2.
    pub fn splits_characters(&self) -> bool {
        self.schema > 1
    }

    /// Returns the total size of all index files, in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|entry| entry.bytes).sum()
    }
}

fn not_an_index_error(dir: &Path, why: &str) -> SearchError {
    SearchError::NotAnIndex { path: dir.to_owned(), why: why.into() }
}

/// Returns the path of an index file. Returns an error if `name` leads out of the index directory.
fn resolve_file(dir: &Path, name: &str) -> Result<PathBuf, SearchError> {
    if name.is_empty()
        || !Path::new(name).components().all(|part| matches!(part, std::path::Component::Normal(_)))
    {
        let why =
            format!("the manifest names the file {name:?}, which is not within the directory");
        return Err(SearchError::damaged_error(&dir.join(MANIFEST), why));
    }
    Ok(dir.join(name))
}

/// Computes the CRC-32C checksum of a file.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn checksum(path: &Path) -> Result<u32, SearchError> {
    let mut file = File::open(path).map_err(SearchError::io_error("open", path))?;
    let mut sum = 0;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(SearchError::io_error("read", path))? {
            0 => return Ok(sum),
            read => sum = crc32c::crc32c_append(sum, &buffer[..read]),
        }
    }
}
