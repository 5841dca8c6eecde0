//! Processes of `levade_torch` under torchrun. They exit with the run, even if this process is
//! killed.

use std::fmt::Display;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use levade_policy::environment::read_variable;
use levade_policy::process_time::{Stopwatch, sleep};
use levade_policy::{LoraOptions, random_hex};
use levade_process::{Child, Launch, Supervisor};
use levade_recipe::{Recipe, TorchKeys};
use levade_remote::Processes;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use super::order::{self, LaunchOrder};
use super::{Requirements, SUBDIR};
use crate::{child, gpus};

/// Name of the file into which rank 0 writes the address on which it listens.
const PORT: &str = "port";
/// Environment variable from which rank 0 reads the token that requests must have.
pub const TOKEN: &str = "LEVADE_LEARNER_TOKEN";
/// Interval at which files of the learner are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Number of bytes at the end of a log that are searched for the reason why processes exited.
const END_OF_LOG: u64 = 16 << 10;
/// Environment variable with the host name or address by which other nodes reach this node.
pub const HEAD: &str = "LEVADE_HEAD";

/// Group of learner processes that are running and accept connections.
pub struct Group {
    /// URL at which rank 0 accepts requests.
    pub url: String,
    /// Token that requests to the learner must have.
    pub token: String,
    /// Handle that stops the processes when it is dropped.
    pub processes: Processes,
    /// Task that ends when the processes have exited.
    pub exit_task: JoinHandle<()>,
}

/// Starts the learner's processes on this node, and writes the order that starts them on the other
/// nodes.
///
/// # Errors
/// Returns an error if the processes cannot be started, exit early, or do not listen before the
/// start timeout.
pub async fn start(
    keys: &TorchKeys,
    recipe: &Recipe,
    root: &Path,
    model: &Path,
    wants: &Requirements<'_>,
    supervisor: &Supervisor,
) -> anyhow::Result<Group> {
    let dir = root.join(SUBDIR);
    order::remove_old_files(&dir)
        .with_context(|| format!("cannot write into {}", dir.display()))?;
    let port = dir.join(PORT);
    let _ = fs::remove_file(&port);
    let configured_head = read_variable(HEAD).map(|head| head.to_string_lossy().into_owned());
    let head = match (configured_head, keys.nodes) {
        (Some(head), _) => head,
        (None, 1) => "127.0.0.1".into(),
        (None, _) => rustix::system::uname().nodename().to_string_lossy().into_owned(),
    };
    let order = LaunchOrder {
        start: random_hex(6),
        command: launch_command(
            keys,
            recipe,
            root,
            model,
            wants,
            (&head, child::find_free_port(Ipv4Addr::UNSPECIFIED)?),
        ),
        variables: launch_variables(keys),
        // Pass these by name, because each node has its own GPUs.
        environment: gpus::with_visible(&keys.environment),
        nodes: keys.nodes,
        start_timeout_seconds: keys.start_seconds,
    };
    let log = node_log_path(root, 0);
    let token = random_hex(32);
    let mut environment = order.full_environment();
    environment.push((TOKEN.into(), token.clone()));
    let mut kept = serve(&order, 0, root, (environment, &log), supervisor).await?;
    order.write(&dir)?;
    let url = wait_for_address(&mut kept, &port, &log, keys.start_timeout()).await?;
    let (send, ended) = watch::channel(None);
    let (guard, dropped) = oneshot::channel::<()>();
    let exit_task = tokio::spawn(async move {
        let how = tokio::select! {
            how = kept.describe_end() => {
                Some(format!("the processes ended: {how}; {}", failure_reason(&log)))
            },
            how = wait_for_node_exit(&dir, &order) => Some(format!("the processes ended {how}")),
            _ = dropped => None,
        };
        kept.stop().await;
        if let Some(how) = how {
            send.send_replace(Some(how));
        }
    });
    Ok(Group { url, token, processes: Processes { ended, guard: Box::new(guard) }, exit_task })
}

/// Starts the learner's processes on a node. Their output is appended to the log.
///
/// # Errors
/// Returns an error if the processes cannot be started, or if the log cannot be written.
pub async fn serve(
    order: &LaunchOrder,
    node: u32,
    root: &Path,
    (environment, log): (Vec<(String, String)>, &Path),
    supervisor: &Supervisor,
) -> anyhow::Result<Child> {
    let file = child::open_log(log).with_context(|| format!("cannot write {}", log.display()))?;
    let launch = Launch {
        dir: root.to_owned(),
        variables: environment,
        ..Launch::new(order.node_command(node))
    };
    let kept = supervisor.serve(&launch, file).await;
    kept.map_err(|why| anyhow::anyhow!("the processes of the learner cannot be started: {why}"))
}

/// Returns the command that each node runs to start the learner's processes.
fn launch_command(
    keys: &TorchKeys,
    recipe: &Recipe,
    root: &Path,
    model: &Path,
    wants: &Requirements<'_>,
    (head, master): (&str, u16),
) -> Vec<String> {
    let mut words: Vec<String> = vec![keys.python.display().to_string()];
    let mut add =
        |flag: &str, value: &dyn Display| words.extend([flag.to_owned(), value.to_string()]);
    add("-m", &"torch.distributed.run");
    add("--nnodes", &keys.nodes);
    add("--nproc-per-node", &keys.processes_per_node());
    add("--node-rank", &LaunchOrder::node());
    add("--master-addr", &head);
    add("--master-port", &master);
    // The run restarts the whole learner from a checkpoint, so torchrun must not restart it.
    add("--max-restarts", &0);
    add("-m", &"levade_torch");
    add("--model", &model.display());
    add("--run-root", &root.display());
    add("--token-env", &TOKEN);
    add("--port-file", &root.join(SUBDIR).join(PORT).display());
    add("--device", if keys.gpus > 0 { &"cuda" } else { &"cpu" });
    add("--dtype", &keys.dtype);
    // Samplers receive the weights in the precision that they compute with.
    add("--export-dtype", &recipe.engine.precision);
    add("--threads", &keys.threads.max(1));
    // Ranks that wait for a failed rank report this themselves before the call times out.
    add("--collective-seconds", &(0.8 * keys.call_seconds));
    for (flag, size) in [("--tp", keys.tp), ("--cp", keys.cp), ("--ep", keys.ep), ("--pp", keys.pp)]
    {
        add(flag, &size);
    }
    for (flag, needed) in [("--reference", wants.reference), ("--critic", wants.critic)] {
        if needed {
            add(flag, &model.display());
        }
    }
    if let Some(LoraOptions { rank, alpha, targets, .. }) = wants.lora {
        add("--lora-rank", rank);
        add("--lora-alpha", alpha);
        add("--lora-targets", &targets.join(","));
        add("--lora-seed", &recipe.run.seed);
    }
    words.extend(keys.args.iter().cloned());
    words
}

fn launch_variables(keys: &TorchKeys) -> Vec<(String, String)> {
    let threads = keys.threads.max(1).to_string();
    // Unbuffered, so that the log can be followed.
    vec![("OMP_NUM_THREADS".into(), threads), ("PYTHONUNBUFFERED".into(), "1".into())]
}

/// Waits until rank 0 reports the address on which it listens. Returns the URL of rank 0.
async fn wait_for_address(
    kept: &mut Child,
    port: &Path,
    log: &Path,
    timeout: Duration,
) -> anyhow::Result<String> {
    let mut watch = Stopwatch::start();
    loop {
        let found =
            fs::read_to_string(port).ok().filter(|text| text.trim().parse::<SocketAddr>().is_ok());
        if let Some(address) = found {
            return Ok(format!("http://{}", address.trim()));
        }
        tokio::select! {
            how = kept.describe_end() => anyhow::bail!(
                "the processes of the learner exited before they accepted connections: {how}\n{}",
                failure_reason(log)
            ),
            _ = sleep(POLL_INTERVAL) => {}
        }
        if watch.elapsed() > timeout {
            anyhow::bail!(
                "the processes of the learner did not accept connections within {timeout:?}\n{}\n\
                 raise `cluster.learner.start_seconds` if the machine is only slow",
                failure_reason(log)
            );
        }
    }
}

/// Waits until the processes of another node exit. Returns a description of how they exited.
async fn wait_for_node_exit(dir: &Path, order: &LaunchOrder) -> String {
    loop {
        if let Some(how) = order::find_exited_node(dir, order) {
            return how;
        }
        sleep(5 * POLL_INTERVAL).await;
    }
}

/// Finds the line of a log that most likely contains the reason for an exit. Returns the line with
/// the path of the log.
pub fn failure_reason(log: &Path) -> String {
    let end = child::read_log_end(log, END_OF_LOG);
    let lines = || end.lines().map(str::trim).filter(|line| !line.is_empty());
    // Neither torchrun's summary nor the status lines of a healthy rank contain the reason.
    let passing =
        ["ChildFailedError", "SignalException", "levade_torch: listens", "levade_torch: ready"];
    let is_reason = |line: &&str| {
        let starts = ["levade_torch:", "error:"].iter().any(|start| line.starts_with(start));
        let raised = line.split([':', ' ']).next().is_some_and(|word| word.ends_with("Error"));
        (starts || raised || line.contains(": No module named "))
            && !passing.iter().any(|passing| line.contains(passing))
    };
    let line = lines().rfind(is_reason).or_else(|| lines().next_back());
    match line {
        Some(line) if line.ends_with("No module named levade_torch") => format!(
            "{line}; run `levade cluster setup` to create an environment that contains the \
             package, or `pip install python/levade_torch` to install it in an existing \
             environment (log: {})",
            log.display()
        ),
        Some(line) => format!("{line} (log: {})", log.display()),
        None => format!("nothing was printed (log: {})", log.display()),
    }
}

/// Returns the path of the log of a node's processes. The machine that runs the trainer is node 0.
pub fn node_log_path(root: &Path, node: u32) -> PathBuf {
    root.join(SUBDIR).join(format!("node-{node}.log"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_reason_is_found_in_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        assert!(failure_reason(&log).starts_with("nothing was printed"));
        const END: &str = "levade_torch: listens on 127.0.0.1:1\n  File x\n\
                           ValueError: no such model\n\n\
            torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n\
            levade_torch FAILED\n  exitcode  : 1 (pid: 7)\n=====\n";
        fs::write(&log, END).unwrap();
        assert!(failure_reason(&log).starts_with("ValueError: no such model (log: "));
        fs::write(&log, "hello\nKilled\n\n").unwrap();
        assert!(failure_reason(&log).starts_with("Killed (log: "));
        fs::write(
            &log,
            "envs/bin/python: No module named levade_torch\nTraceback:\n  f()\n=====\n",
        )
        .unwrap();
        let words = failure_reason(&log);
        assert!(words.starts_with("envs/bin/python: No module named levade_torch; "), "{words}");
        assert!(words.contains("levade cluster setup"), "{words}");
    }
}
