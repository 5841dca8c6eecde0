//! References to weights: manifests of saved files, and the location of published versions.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::PolicyError;

/// List of the files that hold saved weights, each with size and checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Directory that contains the files.
    #[serde(rename = "place")]
    pub location: WeightsLocation,
    /// Kind of weights that the files hold.
    pub content: Content,
    /// Saved files, sorted by name.
    pub files: Vec<SavedFile>,
}

/// Location of a directory with weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightsLocation {
    /// A directory on a disk that this process can read.
    Local(PathBuf),
    /// A directory on a learner's own machine, which is not this machine.
    Remote {
        /// Name under which samplers reach the machine.
        machine: String,
        /// Path of the directory on the learner's machine.
        #[serde(rename = "folder")]
        dir: String,
    },
}

/// Kind of weights that a manifest's files hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// The files hold all weights of a model.
    #[serde(rename = "whole")]
    Full,
    /// The files hold an adapter in PEFT's layout.
    Adapter {
        /// Name of the base model of the adapter.
        base: String,
    },
}

/// Saved file of a manifest, with size and checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFile {
    /// Path of the file relative to the manifest's directory.
    pub name: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// CRC-32C of the file's contents.
    pub crc32c: u32,
}

impl SavedFile {
    /// Reads a file and computes its size and checksum.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn read(dir: &Path, name: &str) -> io::Result<Self> {
        let (bytes, crc32c) = checksum(File::open(dir.join(name))?)?;
        Ok(SavedFile { name: name.to_owned(), bytes, crc32c })
    }
}

impl Manifest {
    /// Creates the manifest of files that have just been written into the local directory `dir`.
    ///
    /// # Errors
    /// Returns [`PolicyError::Storage`] with the name and the reason if a file cannot be read.
    pub fn from_files(dir: &Path, content: Content, names: &[String]) -> Result<Self, PolicyError> {
        let mut files = names
            .iter()
            .map(|name| {
                let file = dir.join(name);
                SavedFile::read(dir, name).map_err(|e| {
                    PolicyError::Storage(format!("cannot read {}: {e}", file.display()))
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Manifest { location: WeightsLocation::Local(dir.to_owned()), content, files })
    }

    /// Checks size and checksum of every file and returns the directory. Callers must verify before
    /// they replace any weights.
    ///
    /// # Errors
    /// Returns [`PolicyError::WeightsNotLoaded`] with the reason if the directory is on another
    /// machine, no files are listed, or a file is missing, damaged or outside the directory.
    pub fn verify(&self) -> Result<&Path, PolicyError> {
        let dir = match &self.location {
            WeightsLocation::Local(dir) => dir,
            WeightsLocation::Remote { machine, dir } => {
                return Err(PolicyError::WeightsNotLoaded(format!(
                    "the weights are in {dir} on {machine}; let the learner write to a directory \
                     that this machine can also read"
                )));
            }
        };
        if self.files.is_empty() {
            return Err(PolicyError::WeightsNotLoaded(format!(
                "the manifest of the weights in {} lists no files",
                dir.display()
            )));
        }
        for SavedFile { name, bytes, crc32c } in &self.files {
            if !Path::new(name).components().all(|part| matches!(part, Component::Normal(_))) {
                return Err(PolicyError::WeightsNotLoaded(format!(
                    "the manifest lists {name:?}, which is not a file in {}",
                    dir.display()
                )));
            }
            let path = dir.join(name);
            match SavedFile::read(dir, name) {
                Err(error) => {
                    return Err(PolicyError::WeightsNotLoaded(format!(
                        "cannot read {}: {error}",
                        path.display()
                    )));
                }
                Ok(found) if found.bytes != *bytes => {
                    return Err(PolicyError::WeightsNotLoaded(format!(
                        "the file {} has {} bytes instead of {bytes}",
                        path.display(),
                        found.bytes
                    )));
                }
                Ok(found) if found.crc32c != *crc32c => {
                    let found = found.crc32c;
                    return Err(PolicyError::WeightsNotLoaded(format!(
                        "the file {} has the checksum {found:08x} instead of {crc32c:08x}",
                        path.display()
                    )));
                }
                Ok(_) => {}
            }
        }
        Ok(dir)
    }
}

/// Returns the size in bytes and the CRC-32C of a file.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn checksum(mut file: File) -> io::Result<(u64, u32)> {
    let mut bytes = 0;
    let mut sum = 0;
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok((bytes, sum));
        }
        bytes += n as u64;
        sum = crc32c::crc32c_append(sum, &buffer[..n]);
    }
}

/// Reference to a version of the weights that a learner has published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightsRef {
    /// Version of the weights.
    pub version: u64,
    /// Location from which samplers load the weights.
    pub at: WeightsAt,
}

/// Location of published weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightsAt {
    /// In memory that the learner shares with its samplers, which already use the weights.
    Memory,
    /// In files. Any sampler that can read the files can load the weights at any time.
    Manifest(Manifest),
    /// On the learner's ranks, which broadcast the weights to all samplers of a process group in
    /// one collective operation.
    Collective {
        /// Name of the process group that the samplers have joined.
        group: String,
    },
}

impl WeightsRef {
    /// Checks that a sampler that shares memory with the learner, and whose weights have version
    /// `version`, has these weights.
    ///
    /// # Errors
    /// Returns [`PolicyError::WeightsNotLoaded`] if the sampler has another version, or if these
    /// weights are not in memory.
    pub fn check_shared(&self, version: u64) -> Result<(), PolicyError> {
        match &self.at {
            WeightsAt::Memory if version == self.version => Ok(()),
            WeightsAt::Memory => Err(PolicyError::WeightsNotLoaded(format!(
                "version {} was published, but the sampler has version {version}; does the sampler \
                 belong to this learner?",
                self.version
            ))),
            WeightsAt::Manifest(_) | WeightsAt::Collective { .. } => {
                Err(PolicyError::WeightsNotLoaded(
                    "the sampler shares the memory of its learner, so it cannot load weights from \
                 another source"
                        .into(),
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifest_lists_size_and_checksum_of_files() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("b"), "123456789").unwrap();
        std::fs::write(dir.path().join("a"), "").unwrap();
        std::fs::write(dir.path().join("of others"), "x").unwrap();
        let content = Content::Adapter { base: "m".into() };
        let manifest =
            Manifest::from_files(dir.path(), content, &["b".into(), "a".into()]).unwrap();
        // The check value of CRC-32C (RFC 3720).
        let files: Vec<(&str, u64, u32)> = manifest
            .files
            .iter()
            .map(|file| (file.name.as_str(), file.bytes, file.crc32c))
            .collect();
        assert_eq!(files, [("a", 0, 0), ("b", 9, 0xe306_9283)]);
        let text =
            serde_json::to_string(&WeightsRef { version: 2, at: WeightsAt::Manifest(manifest) })
                .unwrap();
        assert_eq!(
            serde_json::to_string(&serde_json::from_str::<WeightsRef>(&text).unwrap()).unwrap(),
            text
        );
        let missing = Manifest::from_files(dir.path(), Content::Full, &["c".into()]).unwrap_err();
        assert!(missing.to_string().contains("cannot read"), "{missing}");
    }

    #[test]
    fn verify_reports_missing_or_damaged_files() {
        let dir = tempfile::tempdir().unwrap();
        let write = |text: &str| std::fs::write(dir.path().join("a"), text).unwrap();
        write("abc");
        let manifest = Manifest::from_files(dir.path(), Content::Full, &["a".into()]).unwrap();
        assert_eq!(manifest.verify(), Ok(dir.path()));
        write("abd");
        assert!(verify_error(&manifest).contains("has the checksum"));
        write("ab");
        assert!(verify_error(&manifest).contains("has 2 bytes instead of 3"));
        std::fs::remove_file(dir.path().join("a")).unwrap();
        assert!(verify_error(&manifest).contains("cannot read"));
        let outside = SavedFile { name: "../a".into(), bytes: 0, crc32c: 0 };
        assert!(
            verify_error(&Manifest { files: vec![outside], ..manifest.clone() })
                .contains("is not a file in")
        );
        assert!(
            verify_error(&Manifest { files: Vec::new(), ..manifest.clone() })
                .contains("lists no files")
        );
        let location = WeightsLocation::Remote { machine: "east".into(), dir: "/w".into() };
        assert!(verify_error(&Manifest { location, ..manifest }).contains("in /w on east"));
    }

    fn verify_error(manifest: &Manifest) -> String {
        manifest.verify().unwrap_err().to_string()
    }
}
