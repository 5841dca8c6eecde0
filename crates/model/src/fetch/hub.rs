//! Downloads models from the Hugging Face hub, or from a server with the same API.
//!
//! A revision is resolved to a commit once, and all its files come from that commit. An interrupted
//! download is resumed where it stopped, also in a later run. Weights are checked against the
//! SHA-256 that the hub publishes, smaller files against their size. The files are stored in the
//! cache of `huggingface_hub` ([`super::cache`]), where Python finds them. A completion marker for
//! the revision is written last.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tracing::{debug, info};
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

use super::cache::{
    ADAPTER, CacheLayout, HubSettings, INDEX, SINGLE, find_missing, read_shard_names,
};
use super::{Progress, Report, WITHOUT_NETWORK, acquire_lock, sha256};
use crate::{AdapterConfig, ModelError};

/// Files that are downloaded in addition to the weights if the model has them.
const COMPANIONS: [&str; 9] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    // Files of encoders.
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
];
/// Maximum number of consecutive failed requests. After a request that received bytes of a file,
/// the count restarts at 1.
const ATTEMPTS: u32 = 5;

/// Client of the Hugging Face hub.
pub(super) struct HubClient {
    settings: HubSettings,
    agent: Agent,
    /// Wait before the first retry. The wait doubles with each further failure in a row.
    pause: Duration,
}

/// Response of the hub about a revision of a model.
#[derive(Deserialize)]
struct RemoteRevision {
    sha: String,
    #[serde(default)]
    siblings: Vec<RemoteFile>,
}

#[derive(Deserialize, Clone)]
struct RemoteFile {
    #[serde(rename = "rfilename")]
    name: String,
    size: Option<u64>,
    lfs: Option<LfsPointer>,
}

#[derive(Deserialize, Clone)]
struct LfsPointer {
    sha256: Option<String>,
    size: Option<u64>,
}

impl RemoteFile {
    fn size(&self) -> Option<u64> {
        self.lfs.as_ref().and_then(|lfs| lfs.size).or(self.size)
    }
}

/// Completion marker of a revision, which is stored as a JSON file in `.levade`.
#[derive(Serialize, Deserialize)]
struct CompleteMarker {
    commit: String,
    /// Names of the revision's files, with their sizes in bytes.
    files: Vec<(String, u64)>,
}

impl HubClient {
    /// Creates a client with the server, token and cache directory that environment variables set;
    /// see [`super::cache`].
    pub(super) fn from_env() -> Result<Self, ModelError> {
        let settings = HubSettings::read(|name| std::env::var(name).ok())?;
        Ok(Self::new(settings, Duration::from_secs(1)))
    }

    fn new(settings: HubSettings, pause: Duration) -> Self {
        let config = Agent::config_builder()
            .timeout_resolve(Some(Duration::from_secs(20)))
            .timeout_connect(Some(Duration::from_secs(20)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .timeout_per_write(Some(Duration::from_secs(60)))
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .http_status_as_error(false)
            .user_agent(concat!("levade/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { settings, agent: config.into(), pause }
    }

    /// Returns the directory with a model's files, and downloads missing files.
    ///
    /// A complete model in the cache is used without checking the hub for a newer commit, because a
    /// resumed run must find the weights with which it started. `before` is the directory in which
    /// earlier versions of Levade stored models.
    pub(super) fn fetch(
        &self,
        id: &str,
        revision: &str,
        before: &Path,
        progress: Report,
    ) -> Result<PathBuf, ModelError> {
        let cached = CacheLayout::new(&self.settings.cache, id);
        let marks = cached.0.join(".levade");
        let mark = marks.join(format!("{}.json", marker_name(revision)));
        // The directory of markers before the project was called Levade.
        let older = cached.0.join(".dressage").join(format!("{}.json", marker_name(revision)));
        let earlier = before.join("hub").join(id.replace('/', "--"));
        let find_complete = || {
            let earlier = find_complete(
                |commit| earlier.join(commit),
                &earlier.join(format!("{}.json", marker_name(revision))),
            );
            [&mark, &older]
                .into_iter()
                .find_map(|mark| find_complete(|commit| cached.snapshot_dir(commit), mark))
                .or(earlier)
        };
        if let Some(snapshot) = find_complete() {
            return Ok(snapshot);
        }
        // Downloads by Python have no marker. Their files are complete, but some may be missing.
        let found = cached.find_snapshot(revision).filter(|_| !mark.exists());
        let missing = found.as_deref().map(find_missing).transpose()?.flatten();
        let usable = found.clone().filter(|_| missing.is_none());
        if let Some(snapshot) = &usable
            && (self.settings.offline.is_some()
                || ["tokenizer.json", AdapterConfig::FILE]
                    .iter()
                    .any(|name| snapshot.join(name).is_file()))
        {
            return Ok(snapshot.clone());
        }
        if let Some(variable) = self.settings.offline {
            let what = match missing {
                Some(name) => {
                    format!("the cache has only a part of {id} at {revision}: {name} is missing")
                }
                None => format!("the cache does not have {id} at {revision}"),
            };
            return Err(ModelError::Missing {
                path: self.settings.cache.clone(),
                what,
                way_out: format!(
                    "{variable} is set, which disables downloads: unset it, or fetch the model on \
                     a machine with network access\n\
                     {WITHOUT_NETWORK}"
                ),
            });
        }
        let _lock = acquire_lock(&marks, "HF_HUB_CACHE", progress)?;
        // Another process may have completed the download before it released the lock.
        if let Some(snapshot) = find_complete() {
            return Ok(snapshot);
        }
        let remote = match self.fetch_revision(id, revision, progress) {
            Ok(remote) => remote,
            Err(error) => {
                let Some(snapshot) = usable else { return Err(error) };
                let stage = format!(
                    "{} cannot be reached: using the files in {}",
                    self.settings.endpoint,
                    snapshot.display()
                );
                progress(Progress { stage: &stage, done: 0, total: None });
                return Ok(snapshot);
            }
        };
        let snapshot = cached.snapshot_dir(&remote.sha);
        std::fs::create_dir_all(&snapshot).map_err(ModelError::io_error("create", &snapshot))?;
        let mut files = Vec::new();
        for file in self.list_weight_files(id, &remote, &snapshot, progress)? {
            self.download(id, &remote.sha, &file, &snapshot, progress)?;
            let path = snapshot.join(&file.name);
            let size = path.metadata().map_err(ModelError::io_error("read", &path))?.len();
            files.push((file.name, size));
        }
        if let Some(reference) = cached.reference_path(revision).filter(|_| revision != remote.sha)
        {
            let dir = reference.parent().unwrap_or(&reference);
            std::fs::create_dir_all(dir).map_err(ModelError::io_error("create", dir))?;
            std::fs::write(&reference, &remote.sha)
                .map_err(ModelError::write_error(&reference, 40))?;
        }
        let complete = CompleteMarker { commit: remote.sha, files };
        let mark_part = mark.with_extension("part");
        let contents = serde_json::to_value(&complete).unwrap_or_default();
        crate::write_json(&mark_part, &contents)?;
        std::fs::rename(&mark_part, &mark).map_err(ModelError::io_error("rename", &mark_part))?;
        Ok(snapshot)
    }

    /// Creates the error for a failed download of `what`.
    fn fetch_error(&self, what: &str, why: impl ToString, way_out: &str) -> ModelError {
        ModelError::Fetch {
            what: format!("{what} from {}", self.settings.endpoint),
            why: why.to_string(),
            way_out: way_out.to_string(),
        }
    }

    /// Creates the error for a failure that may be temporary, such as a broken connection.
    fn unreachable_error(&self, what: &str, why: impl ToString) -> ModelError {
        self.fetch_error(
            what,
            why,
            &format!(
                "check the network (HF_ENDPOINT selects another hub) and try again: partial \
                 downloads are kept\n\
                 {WITHOUT_NETWORK}"
            ),
        )
    }

    /// Sends one request for the bytes from `from` on. Only a missing response is an error.
    fn get(&self, url: &str, from: u64) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.settings.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if from > 0 {
            request = request.header("Range", format!("bytes={from}-"));
        }
        request.call()
    }

    /// Creates the error for an HTTP status that is permanent or persisted through all retries.
    fn status_error(&self, what: &str, status: StatusCode) -> ModelError {
        match status.as_u16() {
            401 | 403 => self.fetch_error(
                what,
                format!("the hub denies access (status {status})"),
                "the name may be misspelled; for a private or gated model, accept its terms on the \
                 hub, and set HF_TOKEN or log in with `hf auth login`",
            ),
            404 => self.fetch_error(
                what,
                "the hub has no such model or file (status 404)",
                "check the name and the revision",
            ),
            _ => self.unreachable_error(what, format!("the hub responds with status {status}")),
        }
    }

    /// Requests the commit and the list of files of a revision from the hub.
    fn fetch_revision(
        &self,
        id: &str,
        revision: &str,
        progress: Report,
    ) -> Result<RemoteRevision, ModelError> {
        let url = format!(
            "{}/api/models/{id}/revision/{}?blobs=true",
            self.settings.endpoint,
            percent_encode(revision)
        );
        // A misspelled directory name looks like a model on the hub.
        let stage = format!("no local directory {id}: looking it up at {}", self.settings.endpoint);
        progress(Progress { stage: &stage, done: 0, total: None });
        let mut failures = 0;
        let mut response = loop {
            match self.get(&url, 0) {
                Ok(response) if response.status().is_success() => break response,
                Ok(response) if !is_temporary(response.status()) || failures + 1 == ATTEMPTS => {
                    return Err(self.status_error(id, response.status()));
                }
                // Only one retry if the server cannot be reached: there may be no network.
                Err(error) if failures > 0 => return Err(self.unreachable_error(id, error)),
                Ok(_) | Err(_) => failures += 1,
            }
            self.wait_before_retry(failures);
        };
        let body = response.body_mut().with_config().limit(64 << 20).read_to_vec();
        let body = body.map_err(|error| self.unreachable_error(id, error))?;
        let remote: RemoteRevision = serde_json::from_slice(&body).map_err(|error| {
            self.unreachable_error(id, format!("the hub's list of files cannot be parsed: {error}"))
        })?;
        // The commit becomes a directory name.
        if remote.sha.is_empty() || !remote.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(self.unreachable_error(
                id,
                format!("the hub's commit {:?} is not a hash", remote.sha),
            ));
        }
        Ok(remote)
    }

    fn wait_before_retry(&self, failures: u32) {
        std::thread::sleep(self.pause * (1 << failures.saturating_sub(1).min(4)));
    }

    /// Returns the files of a model to download: weights and [`COMPANIONS`]. If the weights are in
    /// shards, downloads the index that lists the shards.
    ///
    /// # Errors
    /// Returns an error if the model has no `config.json` or no safetensors weights, or if a shard
    /// is missing.
    fn list_weight_files(
        &self,
        id: &str,
        remote: &RemoteRevision,
        snapshot: &Path,
        progress: Report,
    ) -> Result<Vec<RemoteFile>, ModelError> {
        let find = |name: &str| remote.siblings.iter().find(|file| file.name == name);
        let mut files: Vec<RemoteFile> =
            COMPANIONS.iter().filter_map(|name| find(name)).cloned().collect();
        if let Some(config) =
            find(AdapterConfig::FILE).filter(|_| find(SINGLE).is_none() && find(INDEX).is_none())
        {
            let Some(weights) = find(ADAPTER) else {
                let way_out =
                    "load the adapter with PEFT and save it again, which writes safetensors";
                return Err(self.fetch_error(
                    id,
                    format!("the model is an adapter without {ADAPTER}"),
                    way_out,
                ));
            };
            files.extend([config.clone(), weights.clone()]);
            return Ok(files);
        }
        if find("config.json").is_none() {
            return Err(self.fetch_error(
                id,
                "the model has no config.json",
                "choose a model in Hugging Face layout",
            ));
        }
        if let Some(single) = find(SINGLE) {
            files.push(single.clone());
            return Ok(files);
        }
        let Some(index) = find(INDEX) else {
            let ggufs: Vec<&str> = remote
                .siblings
                .iter()
                .map(|file| file.name.as_str())
                .filter(|name| name.ends_with(".gguf"))
                .collect();
            return Err(self.fetch_error(
                id,
                "the model has no safetensors weights",
                &match ggufs.first() {
                    Some(first) => {
                        format!(
                            "the model has GGUF files: download one (such as {first}) and give \
                             its path"
                        )
                    }
                    None => "choose a model with model.safetensors".into(),
                },
            ));
        };
        self.download(id, &remote.sha, index, snapshot, progress)?;
        files.push(index.clone());
        let path = snapshot.join(INDEX);
        let shards = read_shard_names(&path)?;
        for shard in shards {
            match find(&shard) {
                Some(file) if !shard.contains(['/', '\\']) => files.push(file.clone()),
                _ => {
                    let what = format!(
                        "the index names the shard {shard:?}, which the model does not have"
                    );
                    return Err(ModelError::damaged(&path, what));
                }
            }
        }
        Ok(files)
    }

    /// Downloads one file into `snapshot`, unless the snapshot already contains the file with the
    /// right size. Resumes a partial download, and retries failures that may be temporary.
    ///
    /// # Errors
    /// Returns [`ModelError::Checksum`] if the SHA-256 is wrong, and an error if the file cannot be
    /// downloaded or stored.
    fn download(
        &self,
        id: &str,
        commit: &str,
        file: &RemoteFile,
        snapshot: &Path,
        progress: Report,
    ) -> Result<(), ModelError> {
        let target = snapshot.join(&file.name);
        if let Some(parent) = target.parent() {
            std::fs::create_dir_all(parent).map_err(ModelError::io_error("create", parent))?;
        }
        if target.is_file() {
            if file.size().is_none_or(|size| size == file_length(&target)) {
                return Ok(());
            }
            std::fs::remove_file(&target).map_err(ModelError::io_error("remove", &target))?;
        }
        let partial = snapshot.join(format!("{}.partial", file.name));
        let url = format!("{}/{id}/resolve/{commit}/{}", self.settings.endpoint, file.name);
        let what = format!("{id}/{}", file.name);
        let mut failures = 0;
        info!(file = %what, bytes = file.size(), there = file_length(&partial), "downloading");
        loop {
            let before = file_length(&partial);
            match self.continue_download(&url, file, &partial, progress) {
                Ok(()) => break,
                Err(DownloadError::Permanent(error)) => return Err(error),
                Err(DownloadError::Rejected(status)) if !is_temporary(status) => {
                    return Err(self.status_error(&what, status));
                }
                Err(DownloadError::Rejected(status)) if failures + 1 == ATTEMPTS => {
                    return Err(self.status_error(&what, status));
                }
                Err(DownloadError::Truncated(why)) if failures + 1 == ATTEMPTS => {
                    return Err(self.unreachable_error(&what, why));
                }
                Err(DownloadError::Truncated(_) | DownloadError::Rejected(_)) => {}
            }
            failures = if file_length(&partial) > before { 1 } else { failures + 1 };
            let there = file_length(&partial);
            debug!(file = %what, there, failures, "download interrupted, resuming");
            self.wait_before_retry(failures);
        }
        if let Some(expected) = file.lfs.as_ref().and_then(|lfs| lfs.sha256.as_ref()) {
            let found = sha256(&partial, progress)?;
            if !found.eq_ignore_ascii_case(expected) {
                std::fs::remove_file(&partial).map_err(ModelError::io_error("remove", &partial))?;
                return Err(ModelError::Checksum {
                    path: target,
                    expected: expected.clone(),
                    found,
                });
            }
        }
        std::fs::rename(&partial, &target).map_err(ModelError::io_error("rename", &partial))
    }

    /// Sends one request for the missing bytes of a file and appends them to `partial`. If the
    /// server ignores the range, the file is downloaded from its start.
    fn continue_download(
        &self,
        url: &str,
        file: &RemoteFile,
        partial: &Path,
        progress: Report,
    ) -> Result<(), DownloadError> {
        let mut done = file_length(partial);
        let total = file.size();
        if done > 0 && total == Some(done) {
            return Ok(());
        }
        if total.is_some_and(|total| done > total) {
            done = 0;
        }
        let mut response =
            self.get(url, done).map_err(|error| DownloadError::Truncated(error.to_string()))?;
        let status = response.status();
        if status == StatusCode::RANGE_NOT_SATISFIABLE {
            // The partial file is not a prefix of the file: discard it and start over.
            std::fs::remove_file(partial).map_err(|error| {
                DownloadError::Permanent(ModelError::io_error("remove", partial)(error))
            })?;
            return Err(DownloadError::Truncated("the hub cannot resume the download".into()));
        }
        if !status.is_success() {
            return Err(DownloadError::Rejected(status));
        }
        let continues = status == StatusCode::PARTIAL_CONTENT
            && response
                .headers()
                .get("Content-Range")
                .and_then(|range| range.to_str().ok())
                .is_some_and(|range| range.starts_with(&format!("bytes {done}-")));
        if status == StatusCode::PARTIAL_CONTENT && !continues {
            return Err(DownloadError::Truncated(
                "the hub sent a range of the file that was not requested".into(),
            ));
        }
        if !continues {
            done = 0;
        }
        let opened = OpenOptions::new()
            .create(true)
            .write(true)
            .append(continues)
            .truncate(!continues)
            .open(partial);
        let mut out = opened.map_err(|error| {
            DownloadError::Permanent(ModelError::io_error("open", partial)(error))
        })?;
        let stage = format!("downloading {}", file.name);
        copy_body(response.body_mut(), &mut out, partial, total, |added| {
            done += added;
            progress(Progress { stage: &stage, done, total });
        })?;
        match total {
            Some(total) if done < total => Err(DownloadError::Truncated(format!(
                "the response ends after {done} of {total} bytes"
            ))),
            Some(total) if done > total => {
                let _ = std::fs::remove_file(partial);
                Err(DownloadError::Truncated(format!(
                    "the response exceeds the file's size of {total} bytes"
                )))
            }
            _ => Ok(()),
        }
    }
}

/// Reason why a request did not complete the download of a file.
enum DownloadError {
    /// The connection failed or the body was incomplete. A retry may succeed.
    Truncated(String),
    /// The server responded with an error status.
    Rejected(StatusCode),
    /// An error that a retry cannot resolve, such as a full disk.
    Permanent(ModelError),
}

/// Copies the body to a file and flushes it to disk. `added` gets the size of each chunk in bytes.
fn copy_body(
    body: &mut Body,
    out: &mut File,
    path: &Path,
    total: Option<u64>,
    mut added: impl FnMut(u64),
) -> Result<(), DownloadError> {
    let writing =
        |error| DownloadError::Permanent(ModelError::write_error(path, total.unwrap_or(0))(error));
    let mut reader = body.as_reader();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return out.sync_all().map_err(writing),
            Ok(read) => {
                out.write_all(&buffer[..read]).map_err(writing)?;
                added(read as u64);
            }
            Err(error) => return Err(DownloadError::Truncated(error.to_string())),
        }
    }
}

/// Returns whether an HTTP error status may be temporary, so that a retry may succeed.
fn is_temporary(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429)
}

/// Returns the size of a file in bytes, or 0 if it does not exist.
fn file_length(path: &Path) -> u64 {
    path.metadata().map_or(0, |facts| facts.len())
}

/// Returns the snapshot that the completion marker `mark` describes, if all its files have the
/// recorded sizes.
fn find_complete(snapshot_dir: impl Fn(&str) -> PathBuf, mark: &Path) -> Option<PathBuf> {
    let complete: CompleteMarker = serde_json::from_slice(&std::fs::read(mark).ok()?).ok()?;
    let snapshot = snapshot_dir(&complete.commit);
    let is_complete =
        complete.files.iter().all(|(name, size)| file_length(&snapshot.join(name)) == *size);
    is_complete.then_some(snapshot)
}

/// Percent-encodes a revision for use in a URL.
fn percent_encode(text: &str) -> String {
    text.bytes()
        .map(|byte| {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

/// Returns the name of a revision's completion marker file, without extension.
fn marker_name(revision: &str) -> String {
    format!("revision-{}", percent_encode(revision).replace('%', "+"))
}

#[cfg(test)]
mod tests;
