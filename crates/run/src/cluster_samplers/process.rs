//! Servers that a run starts. Each runs under a supervisor, so that it exits with the run, and is
//! restarted if it exits unexpectedly.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use levade_policy::Precision;
use levade_policy::environment::child_environment;
use levade_process::{Launch, Supervisor};
use levade_recipe::SamplersKeys;
use levade_remote::GroupBackend;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::{Requirements, dtype_name};
use crate::failure::unusable;
use crate::{child, display, gpus};

/// Name under which started servers serve the model.
const SERVED: &str = "levade";
/// Uptime after which a server counts as started successfully. If the server exits later, its
/// arguments are not the reason.
const STABLE_TIME: Duration = Duration::from_secs(5 * 60);
/// Maximum delay before the restart of a server that exits repeatedly.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Number of bytes at the end of a log that are searched for the reason why a server exited.
const END_OF_LOG: u64 = 64 << 10;
/// Maximum number of log lines that an error shows.
const LINES: usize = 8;

/// Specification of a server that the run starts.
#[derive(Debug, Clone)]
pub(super) struct ServerSpec {
    /// Name of the server in messages to the user.
    pub name: String,
    /// URL at which the server is reached.
    pub url: String,
    /// Log file for the server's output.
    pub log: PathBuf,
    launch: Launch,
}

impl ServerSpec {
    /// Creates the specification of server `number`, counted from 0. The server loads the model in
    /// the directory `model`. If `backend` is set, the server receives weights over this backend.
    /// If devices are colocated, the server supports sleep mode.
    ///
    /// # Errors
    /// Returns an error if no port is free, if there are too few GPUs, or if the run directory
    /// cannot be written.
    pub fn new(
        samplers: &SamplersKeys,
        wants: &Requirements<'_>,
        folder: &Path,
        model: &Path,
        number: usize,
        precision: Precision,
        backend: Option<GroupBackend>,
    ) -> anyhow::Result<Self> {
        let keys = samplers.servers();
        let sleeps = wants.colocation.is_some();
        let port = child::find_free_port(Ipv4Addr::LOCALHOST).map_err(|error| {
            unusable(format!("no port of this machine is free for a sampler: {error}"))
        })?;
        let kind = match samplers {
            SamplersKeys::Vllm(_) => "vllm",
            SamplersKeys::Sglang(_) => "sglang",
        };
        let name = format!("{kind}-{number}");
        let text = |value: &dyn std::fmt::Display| value.to_string();
        let model = model.display().to_string();
        let context = wants.context.to_string();
        let has = |flag: &str| keys.args.iter().any(|arg| arg.split('=').next() == Some(flag));
        let mut command = vec![keys.python.display().to_string(), "-m".into()];
        let mut add = |words: &[&str]| command.extend(words.iter().map(|word| (*word).to_owned()));
        match samplers {
            SamplersKeys::Vllm(_) => {
                add(&[
                    "vllm.entrypoints.openai.api_server",
                    "--model",
                    &model,
                    "--served-model-name",
                    SERVED,
                ]);
                add(&[
                    "--max-model-len",
                    &context,
                    "--logprobs-mode",
                    "processed_logprobs",
                    "--enable-scale-out",
                ]);
                add(&["--enable-prefix-caching"]);
                if let Some(backend) = backend.filter(|_| !has("--weight-transfer-config")) {
                    let config = serde_json::json!({ "backend": backend.name() }).to_string();
                    add(&["--weight-transfer-config", &config]);
                }
                if sleeps && !has("--enable-sleep-mode") {
                    add(&["--enable-sleep-mode"]);
                }
                if keys.gpus > 1 {
                    add(&["--tensor-parallel-size", &text(&keys.gpus)]);
                }
                if let Some(lora) = wants.lora {
                    // Two, because the new adapter is loaded before the old one is unloaded.
                    add(&[
                        "--enable-lora",
                        "--max-loras",
                        "2",
                        "--max-lora-rank",
                        &text(&lora.rank.max(8)),
                    ]);
                }
            }
            SamplersKeys::Sglang(_) => {
                add(&[
                    "sglang.launch_server",
                    "--model-path",
                    &model,
                    "--context-length",
                    &context,
                ]);
                if sleeps && !has("--enable-memory-saver") {
                    add(&["--enable-memory-saver"]);
                }
                if keys.gpus > 1 {
                    add(&["--tp-size", &text(&keys.gpus)]);
                }
                if let Some(lora) = wants.lora {
                    add(&[
                        "--enable-lora",
                        "--max-lora-rank",
                        &text(&lora.rank),
                        "--lora-target-modules",
                        "all",
                    ]);
                }
            }
        }
        add(&["--host", "127.0.0.1", "--port", &text(&port)]);
        if !has("--dtype") {
            add(&["--dtype", dtype_name(precision)]);
        }
        command.extend(keys.args.iter().cloned());
        let mut environment = child_environment(&gpus::with_visible(&keys.environment));
        let fixed = [
            ("VLLM_SERVER_DEV_MODE", "1"),
            ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("DO_NOT_TRACK", "1"),
            ("HF_HUB_OFFLINE", "1"),
        ];
        environment.extend(fixed.map(|(name, value)| (name.to_owned(), value.to_owned())));
        if keys.gpus > 0 {
            let mine = wants.gpus.server_gpus(number as u32, gpus::visible().as_deref())?;
            environment.push((gpus::VISIBLE[0].into(), mine));
        }
        let logs = folder.join("logs");
        std::fs::create_dir_all(&logs)?;
        Ok(ServerSpec {
            url: format!("http://127.0.0.1:{port}"),
            log: logs.join(format!("{name}.log")),
            name,
            launch: Launch {
                dir: folder.to_owned(),
                variables: environment,
                ..Launch::new(command)
            },
        })
    }
}

/// Supervised server process. The server is stopped when this value is dropped.
pub(super) struct ServerProcess {
    running: watch::Receiver<bool>,
    start_error: Arc<Mutex<Option<String>>>,
    _guard: oneshot::Sender<()>,
}

impl ServerProcess {
    /// Starts a server, and restarts the server whenever it exits. If devices are colocated, the
    /// server starts only while `may` is true. The returned task ends when the server has exited
    /// and is not restarted.
    pub fn start(
        spec: ServerSpec,
        supervisor: Supervisor,
        may: Option<watch::Receiver<bool>>,
    ) -> (Self, JoinHandle<()>) {
        let start_error = Arc::<Mutex<Option<String>>>::default();
        let (running, watched) = watch::channel(false);
        let (guard, dropped) = oneshot::channel();
        let exit_task = tokio::spawn(keep_running(
            spec,
            supervisor,
            Arc::clone(&start_error),
            may,
            running,
            dropped,
        ));
        (ServerProcess { running: watched, start_error, _guard: guard }, exit_task)
    }

    /// Returns a receiver whose value is whether the server's process is running.
    pub fn running(&self) -> watch::Receiver<bool> {
        self.running.clone()
    }

    /// Returns the reason why the server exited soon after its start, or `None` if it did not.
    pub fn start_error(&self) -> Option<String> {
        self.start_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Waits until the server is permitted to start, and marks the server as running. Checks `may`
/// again after marking: if the devices are taken away at the same moment, either this function or
/// the other side notices. Returns `false` if the server can never start, because the sender of
/// `may` was dropped.
async fn wait_for_permission(
    may: &mut Option<watch::Receiver<bool>>,
    running: &watch::Sender<bool>,
) -> bool {
    loop {
        if let Some(may) = may
            && may.wait_for(|may| *may).await.is_err()
        {
            return false;
        }
        running.send_replace(true);
        if may.as_ref().is_none_or(|may| *may.borrow()) {
            return true;
        }
        running.send_replace(false);
    }
}

/// Runs a server and restarts it until `dropped` completes. Returns when the server has exited.
async fn keep_running(
    spec: ServerSpec,
    supervisor: Supervisor,
    start_error: Arc<Mutex<Option<String>>>,
    mut may: Option<watch::Receiver<bool>>,
    running: watch::Sender<bool>,
    mut dropped: oneshot::Receiver<()>,
) {
    let mut wait = Duration::from_secs(1);
    loop {
        tokio::select! {
            biased;
            _ = &mut dropped => return,
            starts = wait_for_permission(&mut may, &running) => if !starts { return },
        }
        let start = Instant::now();
        let started = match child::open_log(&spec.log) {
            Ok(log) => supervisor.serve(&spec.launch, log).await,
            Err(error) => Err(format!("cannot write {}: {error}", spec.log.display())),
        };
        let why = match started {
            Ok(mut process) => {
                info!(server = spec.name, url = spec.url, "started a sampler");
                let ended = tokio::select! {
                    ended = process.describe_end() => Some(ended),
                    _ = &mut dropped => None,
                };
                let Some(ended) = ended else { return process.stop().await };
                ended
            }
            Err(why) => why,
        };
        running.send_replace(false);
        if start.elapsed() >= STABLE_TIME {
            wait = Duration::from_secs(1);
        } else {
            let log = display::path(&spec.log);
            let reason = read_last_lines(&spec.log);
            let text = format!(
                "the sampler {} ended ({why}); the end of its log, {log}:\n{reason}",
                spec.name
            );
            start_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(text);
        }
        warn!(server = spec.name, why, "a sampler has exited and is restarted");
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            _ = &mut dropped => return,
        }
        wait = (wait * 2).min(MAX_WAIT);
    }
}

/// Returns the last [`LINES`] lines of a log that are not blank, indented.
fn read_last_lines(log: &Path) -> String {
    let text = child::read_log_end(log, END_OF_LOG);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LINES)..].iter().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn server_starts_only_while_devices_are_handed_over() {
        let (permit, may) = watch::channel(false);
        let (running, watched) = watch::channel(false);
        let start =
            tokio::spawn(async move { wait_for_permission(&mut Some(may), &running).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!start.is_finished() && !*watched.borrow());
        permit.send_replace(true);
        assert!(tokio::time::timeout(MAX_WAIT, start).await.unwrap().unwrap());
        // The sender is dropped, so the server never starts again.
        let (permit, may) = watch::channel(false);
        drop(permit);
        assert!(!wait_for_permission(&mut Some(may), &watch::channel(false).0).await);
        assert!(
            wait_for_permission(&mut None, &watch::channel(false).0).await,
            "without turns it always may"
        );
    }

    #[tokio::test]
    async fn dropped_server_task_ends_after_supervisor_exits() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("gone");
        // Replaces the supervisor by a program that exits slowly.
        let slow = format!("read order; cat; sleep 0.5; echo > '{}'", mark.display());
        let supervisor = Supervisor(vec!["sh".into(), "-c".into(), slow]);
        let spec = ServerSpec {
            name: "vllm-0".into(),
            url: "http://127.0.0.1:1".into(),
            log: folder.path().join("log"),
            launch: Launch { dir: folder.path().to_owned(), ..Launch::new(["true"]) },
        };
        let (process, exit_task) = ServerProcess::start(spec, supervisor, None);
        process.running().wait_for(|running| *running).await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(!exit_task.is_finished() && process.start_error().is_none());
        drop(process);
        tokio::time::timeout(Duration::from_secs(8), exit_task).await.unwrap().unwrap();
        assert!(mark.exists(), "it was waited for");
    }
}
