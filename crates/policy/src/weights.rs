//! Weights on their way from a learner to samplers and into checkpoints: what was saved, and what was
//! published.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::PolicyError;

/// Files that hold saved weights, each with size and checksum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The folder they are in.
    pub place: Place,
    /// Content of the weights.
    pub content: Content,
    /// The files, by name.
    pub files: Vec<SavedFile>,
}

/// A folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// On a disk that this process reads.
    Local(PathBuf),
    /// On a learner's own machine.
    Remote {
        /// The name of the machine, as samplers reach it.
        machine: String,
        /// The folder there.
        folder: String,
    },
}

/// The kind of weights that files hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// All weights of a model.
    Whole,
    /// An adapter in PEFT's layout.
    Adapter {
        /// The model that it is over.
        base: String,
    },
}

/// A file of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFile {
    /// Path from the folder.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Checksum of the contents.
    pub crc32c: u32,
}

impl SavedFile {
    /// Reads a file of a folder.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(folder: &Path, name: &str) -> io::Result<Self> {
        let (bytes, crc32c) = checksum(File::open(folder.join(name))?)?;
        Ok(SavedFile { name: name.to_owned(), bytes, crc32c })
    }
}

impl Manifest {
    /// The manifest of files that were just written into a folder on this machine.
    ///
    /// # Errors
    /// When one of them cannot be read: which, and why.
    pub fn of(folder: &Path, content: Content, names: &[String]) -> Result<Self, PolicyError> {
        let read = |name: &String| {
            let file = folder.join(name);
            let failed = |e| PolicyError::Storage(format!("cannot read {}: {e}", file.display()));
            SavedFile::read(folder, name).map_err(failed)
        };
        let mut files = names.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Manifest { place: Place::Local(folder.to_owned()), content, files })
    }

    /// Reads every file, compares size and checksum, and gives the folder: before anything is replaced by
    /// what is in it.
    ///
    /// # Errors
    /// [`PolicyError::NotAdopted`] when the folder is on another machine, or a file is missing or is not as
    /// it was written: which.
    pub fn verify(&self) -> Result<&Path, PolicyError> {
        let refused = |why: String| Err(PolicyError::NotAdopted(why));
        let folder = match &self.place {
            Place::Local(folder) => folder,
            Place::Remote { machine, folder } => {
                return refused(format!(
                    "they are in {folder} on {machine}; let the learner write to a folder that this machine \
                     reads, too"
                ));
            }
        };
        if self.files.is_empty() {
            return refused(format!("the manifest of {} lists no files", folder.display()));
        }
        for SavedFile { name, bytes, crc32c } in &self.files {
            if !Path::new(name).components().all(|part| matches!(part, Component::Normal(_))) {
                return refused(format!("{name:?} is no file within {}", folder.display()));
            }
            let path = folder.join(name);
            match SavedFile::read(folder, name) {
                Err(error) => return refused(format!("cannot read {}: {error}", path.display())),
                Ok(found) if found.bytes != *bytes => {
                    return refused(format!(
                        "{} has {} bytes instead of {bytes}",
                        path.display(),
                        found.bytes
                    ));
                }
                Ok(found) if found.crc32c != *crc32c => {
                    let found = found.crc32c;
                    return refused(format!(
                        "{} has the checksum {found:08x} instead of {crc32c:08x}",
                        path.display()
                    ));
                }
                Ok(_) => {}
            }
        }
        Ok(folder)
    }
}

/// Bytes and CRC-32C of a file.
///
/// # Errors
/// When it cannot be read.
pub fn checksum(mut file: File) -> io::Result<(u64, u32)> {
    let (mut bytes, mut sum) = (0, 0);
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

/// Weights of a version that a learner has published.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightsRef {
    /// Their version.
    pub version: u64,
    /// Where samplers get them.
    pub at: WeightsAt,
}

/// Where published weights are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightsAt {
    /// In the memory that the learner shares with its samplers, which draw from them already.
    Memory,
    /// In files: any sampler that reaches them can adopt them, at any time.
    Manifest(Manifest),
    /// On the learner's ranks: it sends them to all samplers of a group in one joint operation.
    Collective {
        /// The name of the group that they have joined.
        group: String,
    },
}

impl WeightsRef {
    /// Checks that a sampler which shares its memory with the learner draws from these weights, where it
    /// draws from `version`.
    ///
    /// # Errors
    /// When it draws from others, or these are not in memory.
    pub fn check_shared(&self, version: u64) -> Result<(), PolicyError> {
        match &self.at {
            WeightsAt::Memory if version == self.version => Ok(()),
            WeightsAt::Memory => Err(PolicyError::NotAdopted(format!(
                "version {} was published, and the sampler samples with version {version}; is it one of this learner's?",
                self.version
            ))),
            WeightsAt::Manifest(_) | WeightsAt::Collective { .. } => Err(PolicyError::NotAdopted(
                "the sampler has the memory of its own learner, and takes no weights from elsewhere".into(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_lists_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("b"), "123456789").unwrap();
        std::fs::write(folder.path().join("a"), "").unwrap();
        std::fs::write(folder.path().join("of others"), "x").unwrap();
        let content = Content::Adapter { base: "m".into() };
        let manifest = Manifest::of(folder.path(), content, &["b".into(), "a".into()]).unwrap();
        // The check value of CRC-32C (RFC 3720).
        let files: Vec<(&str, u64, u32)> =
            manifest.files.iter().map(|file| (file.name.as_str(), file.bytes, file.crc32c)).collect();
        assert_eq!(files, [("a", 0, 0), ("b", 9, 0xe306_9283)]);
        let text =
            serde_json::to_string(&WeightsRef { version: 2, at: WeightsAt::Manifest(manifest) }).unwrap();
        assert_eq!(serde_json::to_string(&serde_json::from_str::<WeightsRef>(&text).unwrap()).unwrap(), text);
        let missing = Manifest::of(folder.path(), Content::Whole, &["c".into()]).unwrap_err();
        assert!(missing.to_string().contains("cannot read"), "{missing}");
    }

    #[test]
    fn files_that_are_not_as_they_were_written_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let write = |text: &str| std::fs::write(folder.path().join("a"), text).unwrap();
        write("abc");
        let manifest = Manifest::of(folder.path(), Content::Whole, &["a".into()]).unwrap();
        assert_eq!(manifest.verify(), Ok(folder.path()));
        let why = |manifest: &Manifest| manifest.verify().unwrap_err().to_string();
        write("abd");
        assert!(why(&manifest).contains("has the checksum"));
        write("ab");
        assert!(why(&manifest).contains("has 2 bytes instead of 3"));
        std::fs::remove_file(folder.path().join("a")).unwrap();
        assert!(why(&manifest).contains("cannot read"));
        let outside = SavedFile { name: "../a".into(), bytes: 0, crc32c: 0 };
        assert!(why(&Manifest { files: vec![outside], ..manifest.clone() }).contains("is no file within"));
        assert!(why(&Manifest { files: Vec::new(), ..manifest.clone() }).contains("lists no files"));
        let place = Place::Remote { machine: "east".into(), folder: "/w".into() };
        assert!(why(&Manifest { place, ..manifest }).contains("in /w on east"));
    }
}
