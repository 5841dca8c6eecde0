//! Checks a directory of weights before a server hears of it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use levade_model::{AdapterConfig, ModelError, ModelFiles, SafetensorsFile};
use levade_policy::{Content, Manifest, PolicyError, WeightsLocation};
use serde::{Deserialize, Serialize};

/// Name of the file with the learner's log-probabilities of a probe prompt, against which a server
/// is checked.
pub const PROBE: &str = "probe.json";

/// A probe prompt and the learner's log-probabilities for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ProbeFile {
    /// Token ids of the prompt.
    pub tokens: Vec<u32>,
    /// Log-probability of each token except the first, at temperature 1.
    pub logprobs: Vec<f32>,
}

/// A weight directory that has passed all checks.
#[derive(Debug, Clone)]
pub(super) struct WeightDir {
    pub path: PathBuf,
    pub probe: Option<ProbeFile>,
    /// Checksum over all files of the directory.
    pub sum: u32,
}

impl WeightDir {
    /// Checks the weight files that a manifest lists: their sizes and checksums, and that the
    /// weights are complete and have the shapes of the model's configuration. `vocabulary` is the
    /// number of tokens in the vocabulary.
    ///
    /// # Errors
    /// Returns [`PolicyError::WeightsNotLoaded`] with the file and the problem if a check fails.
    pub fn check(
        manifest: &Manifest,
        vocabulary: usize,
        adapters: bool,
    ) -> Result<Self, PolicyError> {
        let path = manifest.verify()?;
        let path = std::path::absolute(path)
            .map_err(|e| PolicyError::WeightsNotLoaded(format!("{}: {e}", path.display())))?;
        let sums = manifest.files.iter().map(|file| file.crc32c);
        let sum = sums.fold(0, |sum, one| crc32c::crc32c_append(sum, &one.to_le_bytes()));
        let is_adapter = matches!(manifest.content, Content::Adapter { .. });
        if is_adapter != adapters {
            let (has, wants) = if is_adapter {
                ("an adapter", "complete weights")
            } else {
                ("complete weights", "adapters")
            };
            return Err(PolicyError::WeightsNotLoaded(format!(
                "{} contains {has}, but the server expects {wants}",
                path.display()
            )));
        }
        let weights: Vec<&str> = manifest
            .files
            .iter()
            .map(|file| &*file.name)
            .filter(|name| name.ends_with(".safetensors"))
            .collect();
        if weights.is_empty() {
            return Err(PolicyError::WeightsNotLoaded(format!(
                "{} contains no .safetensors file",
                path.display()
            )));
        }
        for name in weights {
            SafetensorsFile::open(&path.join(name)).map_err(not_loaded_error)?;
        }
        if is_adapter {
            AdapterConfig::open(&path).map_err(not_loaded_error)?;
        } else {
            check_model(&path, vocabulary)?;
        }
        let probe = read_probe(&path.join(PROBE))?;
        Ok(WeightDir { path, probe, sum })
    }
}

fn not_loaded_error(error: ModelError) -> PolicyError {
    PolicyError::WeightsNotLoaded(error.to_string())
}

/// Cache of the checks of weight directories, shared by servers that load the same weights. Each
/// directory is read once, as long as its files do not change.
#[derive(Debug, Clone, Default)]
pub struct DirChecks(Arc<Mutex<CheckCache>>);

/// Result of the last check, and the number of checks.
#[derive(Debug, Default)]
struct CheckCache {
    last: Option<(DirCheckKey, Vec<FileStamp>, WeightDir)>,
    /// Number of weight directories that were read.
    count: usize,
}

/// Parameters of a check: the manifest, the required vocabulary size, and whether the weights must
/// be a LoRA adapter.
type DirCheckKey = (Manifest, usize, bool);

/// State of a file that changes with each write: its inode, its size, and the time of its last
/// change (seconds and nanoseconds).
type FileStamp = (u64, u64, i64, i64);

fn read_stamps(manifest: &Manifest) -> Option<Vec<FileStamp>> {
    use std::os::unix::fs::MetadataExt;
    let WeightsLocation::Local(dir) = &manifest.location else { return None };
    manifest
        .files
        .iter()
        .map(|file| {
            let found = std::fs::metadata(dir.join(&file.name)).ok()?;
            Some((found.ino(), found.len(), found.ctime(), found.ctime_nsec()))
        })
        .collect()
}

impl DirChecks {
    /// Checks a weight directory as [`WeightDir::check`] does, unless it has already been checked.
    /// Concurrent callers wait for the check in progress.
    pub(super) fn check(
        &self,
        manifest: &Manifest,
        vocabulary: usize,
        adapters: bool,
    ) -> Result<WeightDir, PolicyError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let question = (manifest.clone(), vocabulary, adapters);
        let now = read_stamps(manifest);
        if let (Some((last_question, then, dir)), Some(now)) = (&known.last, &now)
            && *last_question == question
            && then == now
        {
            return Ok(dir.clone());
        }
        let dir = WeightDir::check(manifest, vocabulary, adapters)?;
        known.count += 1;
        known.last = now.map(|now| (question, now, dir.clone()));
        Ok(dir)
    }

    /// Returns the number of weight directories that were read and passed all checks.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).count
    }
}

/// Checks the tensor shapes and the configuration of a complete model. Models of families that
/// Levade does not implement are not checked here, but by the server.
fn check_model(path: &Path, vocabulary: usize) -> Result<(), PolicyError> {
    match ModelFiles::open(path) {
        Ok(files) if files.config.vocabulary != vocabulary => {
            Err(PolicyError::WeightsNotLoaded(format!(
                "{} has a vocabulary of {} tokens, but the policy's model has {vocabulary}",
                path.display(),
                files.config.vocabulary
            )))
        }
        Ok(_) | Err(ModelError::Unsupported { .. }) => Ok(()),
        Err(error) => Err(PolicyError::WeightsNotLoaded(error.to_string())),
    }
}

fn read_probe(file: &Path) -> Result<Option<ProbeFile>, PolicyError> {
    if !file.exists() {
        return Ok(None);
    }
    let bytes = std::fs::read(file).map_err(|error| damaged_error(file, error.to_string()))?;
    let probe: ProbeFile =
        serde_json::from_slice(&bytes).map_err(|error| damaged_error(file, error.to_string()))?;
    if probe.tokens.len() == probe.logprobs.len() + 1 {
        Ok(Some(probe))
    } else {
        Err(damaged_error(
            file,
            "the number of log-probabilities must be one less than the number of tokens".into(),
        ))
    }
}

fn damaged_error(file: &Path, why: String) -> PolicyError {
    PolicyError::WeightsNotLoaded(format!("{}: {why}", file.display()))
}
