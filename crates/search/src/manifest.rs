//! The manifest of an index: what it holds, by which rules, and the size and checksum of each of its files.
//! It is the last file that is written, so a folder without one is no index.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Analyzer, SearchError};

/// Schema of what is written. From 2 on, characters that are written without spaces are a term each.
pub const SCHEMA: u64 = 2;
/// The earliest schema that is read.
const FIRST: u64 = 1;
/// Name of the file.
pub const MANIFEST: &str = "search.json";

/// An index, described.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Schema of the folder.
    pub schema: u64,
    /// Number of passages.
    pub passages: u64,
    /// How texts become terms.
    pub analyzer: Analyzer,
    /// Vectors of the passages, where it has them.
    pub dense: Option<Dense>,
    /// All other files.
    pub files: Vec<FileEntry>,
}

/// Vectors of an index, described.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Dense {
    /// Source of the model that embedded the passages, which must embed the queries, too.
    pub model: String,
    /// Fingerprint of its weights and tokenizer.
    pub fingerprint: String,
    /// Text put before queries, where its user chose another one than the model's.
    pub query_prefix: Option<String>,
    /// Text put before passages, likewise.
    pub passage_prefix: Option<String>,
    /// Numbers of a vector.
    pub dimensions: usize,
    /// Largest distance of a vector from its 8-bit form.
    pub residual: f32,
}

/// A file of an index.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Path within the folder, with `/` between its parts.
    pub name: String,
    /// Length.
    pub bytes: u64,
    /// Checksum (CRC-32C).
    pub crc32c: u32,
}

impl Manifest {
    /// Reads the manifest of an index.
    ///
    /// # Errors
    /// When there is none, it cannot be read, or it is of another schema.
    pub fn read(folder: &Path) -> Result<Self, SearchError> {
        let path = folder.join(MANIFEST);
        let none = |why: &str| SearchError::NotAnIndex { path: folder.to_owned(), why: why.into() };
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(_) if !folder.exists() => return Err(none("does not exist")),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(none("is no index: it has no search.json"));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => {
                return Err(none("is no index, but a file"));
            }
            Err(error) => return Err(SearchError::io("read", &path)(error)),
        };
        #[derive(Deserialize)]
        struct OfAnySchema {
            schema: u64,
        }
        let damaged = |error: serde_json::Error| SearchError::damaged(&path, error.to_string());
        let OfAnySchema { schema } = serde_json::from_slice(&text).map_err(damaged)?;
        if !(FIRST..=SCHEMA).contains(&schema) {
            return Err(SearchError::Schema { path: folder.to_owned(), found: schema, wanted: SCHEMA });
        }
        serde_json::from_slice(&text).map_err(damaged)
    }

    /// Compares files with what the manifest says of them: their sizes, and with `whole` their bytes.
    ///
    /// # Errors
    /// Names the first file that is missing or another one.
    pub fn check(&self, folder: &Path, whole: bool) -> Result<(), SearchError> {
        for entry in &self.files {
            let path = inside(folder, &entry.name)?;
            let bytes = match std::fs::metadata(&path) {
                Ok(facts) => facts.len(),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    return Err(SearchError::damaged(&path, "it is missing"));
                }
                Err(error) => return Err(SearchError::io("read", &path)(error)),
            };
            if bytes != entry.bytes {
                let why = format!("it has {bytes} bytes, and had {} when it was written", entry.bytes);
                return Err(SearchError::damaged(&path, why));
            }
            if whole && checksum(&path)? != entry.crc32c {
                return Err(SearchError::damaged(&path, "its checksum is not the one it was written with"));
            }
        }
        Ok(())
    }

    /// Whether characters that are written without spaces are a term each.
    pub fn divides(&self) -> bool {
        self.schema > 1
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|entry| entry.bytes).sum()
    }
}

/// The place of a file of an index. Names never lead out of its folder.
fn inside(folder: &Path, name: &str) -> Result<PathBuf, SearchError> {
    let plain = |part: std::path::Component| matches!(part, std::path::Component::Normal(_));
    if name.is_empty() || !Path::new(name).components().all(plain) {
        let why = format!("it names the file {name:?}, which is not within the folder");
        return Err(SearchError::damaged(&folder.join(MANIFEST), why));
    }
    Ok(folder.join(name))
}

/// CRC-32C of a file.
///
/// # Errors
/// When it cannot be read.
pub fn checksum(path: &Path) -> Result<u32, SearchError> {
    let mut file = File::open(path).map_err(SearchError::io("open", path))?;
    let (mut sum, mut buffer) = (0, vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer).map_err(SearchError::io("read", path))? {
            0 => return Ok(sum),
            read => sum = crc32c::crc32c_append(sum, &buffer[..read]),
        }
    }
}
