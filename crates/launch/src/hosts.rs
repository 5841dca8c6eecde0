//! Starts and ends processes on this machine, and on machines that it reaches by ssh.
//!
//! The processes of each machine (its *part*) run under a supervisor there. This process holds the
//! supervisor's standard input, over ssh if it is another machine. When the input ends, because of
//! a request, a kill or a broken connection, the supervisor ends the part with all processes that
//! the part has started.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use levade_process::{Child, Launch, Supervisor};
use levade_run::child;
use levade_run::cluster_learner::torchrun::HEAD;
use levade_run::display::plural;
use levade_run::{Host, unusable};

use crate::follow::{GrowingLog, Watcher, stop_request};
use crate::job::Job;
use crate::shell::quoted;
use crate::{INTERRUPTED, LaunchOutcome, POLL_INTERVAL, STABLE};

/// Options of the ssh launcher.
#[derive(Debug, Clone)]
pub struct SshOptions {
    /// Names of the machines, as ssh accepts them. The first machine trains.
    pub hosts: Vec<String>,
    /// Additional arguments of ssh, such as `-p` or `-F`.
    pub args: Vec<String>,
}

/// Machines of a run, each with the supervisor of its part.
pub struct Hosts {
    machines: Vec<(String, Supervisor)>,
    head: String,
    script: String,
}

/// Delay before the first restart of a failed part. The delay triples after each consecutive
/// failure.
const RESTART_DELAY: Duration = Duration::from_secs(2);
/// Maximum delay before a failed part is restarted.
const MAX_RESTART_DELAY: Duration = Duration::from_secs(300);
/// Timeout for the first machine to stop after a request. This machine continues to a point at
/// which the run can be resumed, and writes a checkpoint.
const STOP_TIMEOUT: Duration = Duration::from_secs(300);
/// Timeout for the other machines to end after the first machine has ended.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// Creates the parts of all machines, which all run on this machine.
///
/// # Errors
/// Returns an error if several parts would use the same GPUs.
pub fn on_this_machine(job: &Job) -> anyhow::Result<Hosts> {
    if job.nodes > 1 && job.gpus > 0 {
        return Err(unusable(format!(
            "--on local starts the parts of {} machines (`cluster.learner.nodes`) on this \
             machine, where all of them would use the same GPUs; set `nodes` to 1, and set \
             `processes` and `gpus` to the number of GPUs of this machine",
            job.nodes
        )));
    }
    let supervisor = Supervisor(vec![job.binary.display().to_string(), "keep".into()]);
    let machines = (0..job.nodes)
        .map(|node| (format!("part {node} on this machine"), supervisor.clone()))
        .collect();
    let script = job.script_path().display().to_string();
    Ok(Hosts { machines, head: "127.0.0.1".into(), script })
}

/// Creates the parts of machines on which ssh starts the processes.
///
/// # Errors
/// Returns an error if the number of machines differs from the number in the recipe, or if a
/// machine's name is malformed.
pub fn over_ssh(job: &Job, options: &SshOptions) -> anyhow::Result<Hosts> {
    let SshOptions { hosts, args: ssh_args } = options;
    if hosts.len() != job.nodes as usize {
        return Err(unusable(format!(
            "the recipe requires {} (`cluster.learner.nodes`), but --host names {}; name the same \
             number",
            plural(job.nodes, "machine"),
            hosts.len()
        )));
    }
    if let Some(host) = hosts.iter().find(|host| {
        host.is_empty()
            || host.starts_with('-')
            || host.contains(|c: char| c.is_whitespace() || c.is_control())
    }) {
        return Err(unusable(format!(
            "--host {host:?} is not a machine name; pass options of ssh with --ssh-arg"
        )));
    }
    let head = resolve_host_name(&hosts[0], ssh_args)
        .unwrap_or_else(|| parse_address(&hosts[0]).to_owned());
    let script = job.script_path().display().to_string();
    Ok(Hosts {
        machines: hosts
            .iter()
            .map(|host| {
                // BatchMode prevents password prompts, and ServerAliveInterval detects unreachable
                // machines. If an option is given twice, ssh uses the first one, so `ssh_args` take
                // precedence.
                let ours = ["BatchMode=yes", "ConnectTimeout=30", "ServerAliveInterval=15"];
                let mut words: Vec<String> = vec!["ssh".into()];
                words.extend(ssh_args.iter().cloned());
                words
                    .extend(ours.iter().flat_map(|option| ["-o".to_owned(), (*option).to_owned()]));
                words.push(host.clone());
                let keep =
                    format!("env {HEAD}={} {} keep", quoted(&head), quoted(&job.binary.display()));
                words.push(keep);
                (host.clone(), Supervisor(words))
            })
            .collect(),
        head,
        script,
    })
}

/// Returns the host name to which ssh's configuration on this machine resolves `host`. Other
/// machines may not know the aliases in this configuration. No connection is opened. Returns `None`
/// if ssh does not report the name.
fn resolve_host_name(host: &str, ssh_args: &[String]) -> Option<String> {
    let mut command = std::process::Command::new("ssh");
    let requested = command
        .args(ssh_args)
        .args(["-G", host])
        .stdin(std::process::Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(requested.stdout).ok().filter(|_| requested.status.success())?;
    let address = text.lines().find_map(|line| line.strip_prefix("hostname "))?.trim();
    (!address.is_empty()).then(|| address.to_owned())
}

/// Extracts the address of a machine from a name in the formats of ssh: `USER@HOST`, or
/// `ssh://USER@HOST:PORT`.
fn parse_address(host: &str) -> &str {
    let uri = host.strip_prefix("ssh://");
    let address = uri.unwrap_or(host).rsplit('@').next().unwrap_or_default();
    let Some(inner) = uri.and(Some(address.trim_end_matches('/'))) else { return address };
    match inner.strip_prefix('[').and_then(|inner| inner.split_once(']')) {
        Some((inner, _)) => inner,
        None => inner.split_once(':').map_or(inner, |(inner, _)| inner),
    }
}

/// Returns the exit code of a run that ends because a machine's part failed with the exit code
/// `ended`. Code 2, which means an error that the user must correct, is preserved.
fn failed_run_code(ended: i32) -> u8 {
    if ended == 2 { 2 } else { 1 }
}

/// State of one machine's part of a run.
enum MachinePart {
    /// The part is running, after `failures` consecutive failures.
    Up { process: Box<Child>, since: Instant, failures: u32 },
    /// The part is waiting for its next start.
    Down { until: Instant, failures: u32 },
    /// The part has finished successfully.
    Done,
}

/// Requests the first machine to stop at a point at which the run can be resumed. The other
/// machines stop after the first machine.
async fn request_stop(parts: &mut [MachinePart], host: &Host) {
    host.note(
        "stop requested: the run stops at the next point from which it can be resumed (repeat to \
         stop immediately)",
    );
    if let Some(MachinePart::Up { process, .. }) = parts.first_mut() {
        process.request_end().await;
    }
}

/// Returns the exit code of the first machine after a request to stop. Returns `None` if the
/// machine is still running.
fn stopped_exit_code(parts: &mut [MachinePart]) -> Option<u8> {
    match parts.first_mut() {
        Some(MachinePart::Up { process, .. }) => {
            let code = process.try_wait()?;
            Some(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(INTERRUPTED))
        }
        _ => Some(INTERRUPTED),
    }
}

impl Hosts {
    /// Returns the shell commands that start the parts of all machines.
    pub fn commands(&self) -> Vec<String> {
        self.machines
            .iter()
            .enumerate()
            .map(|(node, (_, Supervisor(words)))| {
                let words: Vec<String> = words.iter().map(quoted).collect();
                format!("{}  # then: sh {} {node}", words.join(" "), quoted(&self.script))
            })
            .collect()
    }

    async fn start_part(&self, job: &Job, node: u32, failures: u32) -> anyhow::Result<MachinePart> {
        let (name, supervisor) = &self.machines[node as usize];
        let log = job.log(node);
        let file =
            child::open_log(&log).with_context(|| format!("cannot write {}", log.display()))?;
        // Both ssh and local processes may need any of these variables.
        let mut environment: Vec<(String, String)> = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        environment.retain(|(name, _)| name != HEAD);
        environment.push((HEAD.into(), self.head.clone()));
        let command = ["sh".to_owned(), self.script.clone(), node.to_string()];
        let launch =
            Launch { dir: job.root.clone(), variables: environment, ..Launch::new(command) };
        let process = supervisor.serve(&launch, file).await;
        let process = process.map_err(|why| anyhow::anyhow!("cannot start {name}: {why}"))?;
        Ok(MachinePart::Up { process: Box::new(process), since: Instant::now(), failures })
    }

    /// Starts the part of every machine, and restarts failed parts until the part of the first
    /// machine has ended.
    pub async fn run(self, job: &Job, watcher: Watcher) -> anyhow::Result<LaunchOutcome> {
        let Watcher { host, log, mut stops } = watcher;
        let mut log = GrowingLog::new(&job.log(0), log);
        let mut parts: Vec<MachinePart> = Vec::new();
        for node in 0..job.nodes {
            parts.push(self.start_part(job, node, 0).await?);
        }
        let mut requested: Option<Instant> = None;
        let (code, ending) = loop {
            tokio::select! {
                () = stop_request(&mut stops) => match requested {
                    None => {
                        requested = Some(Instant::now());
                        request_stop(&mut parts, &host).await;
                    }
                    Some(_) => break (INTERRUPTED, Duration::ZERO),
                },
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
            log.copy_new_text();
            match requested {
                Some(since) if since.elapsed() > STOP_TIMEOUT => {
                    break (INTERRUPTED, Duration::ZERO);
                }
                Some(_) => {
                    if let Some(code) = stopped_exit_code(&mut parts) {
                        break (code, END_TIMEOUT);
                    }
                }
                None => {
                    if let Some(code) = self.check_parts(job, &mut parts, &host).await? {
                        break (code, if code == 0 { END_TIMEOUT } else { Duration::ZERO });
                    }
                }
            }
        };
        log.copy_new_text();
        let ended_at = Instant::now();
        // The first machine tells the remaining ones to stop. Those that it did not reach are
        // terminated.
        for part in parts.iter_mut().skip(1) {
            let remaining = ending.saturating_sub(ended_at.elapsed());
            if let MachinePart::Up { process, .. } = part {
                let _ = tokio::time::timeout(remaining, process.describe_end()).await;
            }
        }
        for part in parts {
            if let MachinePart::Up { mut process, .. } = part {
                process.stop().await;
            }
        }
        Ok(LaunchOutcome::Code(code))
    }

    /// Checks the parts of all machines, and restarts failed parts. Returns the exit code of the
    /// run, or `None` if the run is not over.
    async fn check_parts(
        &self,
        job: &Job,
        parts: &mut [MachinePart],
        host: &Host,
    ) -> anyhow::Result<Option<u8>> {
        for node in 0..job.nodes {
            let part = &mut parts[node as usize];
            let (ended, lived, failures) = match part {
                MachinePart::Up { process, since, failures } => match process.try_wait() {
                    Some(ended) => (ended.unwrap_or(255), since.elapsed(), *failures),
                    None => continue,
                },
                MachinePart::Down { until, failures } => {
                    if Instant::now() > *until {
                        *part = self.start_part(job, node, *failures).await?;
                    }
                    continue;
                }
                MachinePart::Done => continue,
            };
            match (node, ended) {
                // The run succeeded or needs a correction by the user.
                (0, 0 | 2) => return Ok(Some(ended as u8)),
                (0, code) if code == i32::from(INTERRUPTED) => return Ok(Some(INTERRUPTED)),
                (_, 0) => *part = MachinePart::Done,
                _ => {
                    let failures = if lived > STABLE { 1 } else { failures + 1 };
                    let (name, _) = &self.machines[node as usize];
                    if failures > job.restarts || (node > 0 && ended == 2) {
                        host.note(format!(
                            "{name} ended with exit code {ended}, {failures} times in a row (log: \
                             {})",
                            job.log(node).display()
                        ));
                        return Ok(Some(failed_run_code(ended)));
                    }
                    // An unreachable machine may return within a minute.
                    let wait = RESTART_DELAY
                        .saturating_mul(3u32.saturating_pow(failures - 1))
                        .min(MAX_RESTART_DELAY);
                    host.note(format!(
                        "{name} ended with exit code {ended}; restarting in {wait:?} ({failures} \
                         of {})",
                        job.restarts
                    ));
                    let until = Instant::now() + wait;
                    *part = MachinePart::Down { until, failures };
                    if node == 0 {
                        // Finished parts may have taken the failure of the first machine for the
                        // end of the run.
                        for other in
                            parts.iter_mut().filter(|other| matches!(other, MachinePart::Done))
                        {
                            *other = MachinePart::Down { until, failures: 0 };
                        }
                    }
                }
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(nodes: u32) -> Job {
        Job { nodes, ..Job::named("x", "/runs/my run".into(), "/opt/levade".into()).unwrap() }
    }

    #[test]
    fn ssh_commands_run_supervisors_on_machines() {
        let options = SshOptions {
            hosts: vec!["me@east".into(), "west".into()],
            args: vec!["-p2222".into()],
        };
        let hosts = over_ssh(&job(2), &options).unwrap();
        assert_eq!(hosts.head, "east");
        assert_eq!(
            hosts.commands()[1],
            "ssh -p2222 -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 west \
             'env LEVADE_HEAD=east /opt/levade keep'  # then: sh '/runs/my run/launch/node.sh' 1"
        );
        let why = |nodes, hosts: &[&str]| {
            let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
            match over_ssh(&job(nodes), &SshOptions { hosts, args: Vec::new() }) {
                Err(error) => error.to_string(),
                Ok(_) => panic!("{nodes} machines are taken"),
            }
        };
        let error = why(3, &["east", "west"]);
        assert!(
            error.contains("requires 3 machines (`cluster.learner.nodes`), but --host names 2"),
            "{error}"
        );
        for odd in ["-oProxyCommand=true", "", "a b", "a\nb"] {
            let error = why(1, &[odd]);
            assert!(
                error.contains("is not a machine name") && error.contains("--ssh-arg"),
                "{error}"
            );
        }
    }

    #[test]
    fn resolve_host_name_returns_address_of_ssh_alias() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config");
        std::fs::write(&file, "Host gpu-box\n  HostName 10.0.0.7\n").unwrap();
        let args = ["-F".to_owned(), file.display().to_string()];
        let has_ssh = std::process::Command::new("ssh").arg("-V").output().is_ok();
        assert_eq!(resolve_host_name("me@gpu-box", &args), has_ssh.then(|| "10.0.0.7".to_owned()));
    }

    #[test]
    fn parse_address_extracts_host_from_ssh_names() {
        for (host, address) in [
            ("east", "east"),
            ("me@east", "east"),
            ("fe80::1", "fe80::1"),
            ("ssh://me@east:2222", "east"),
            ("ssh://east/", "east"),
            ("ssh://me@[fe80::1]:2222", "fe80::1"),
        ] {
            assert_eq!(parse_address(host), address, "{host}");
        }
    }

    #[test]
    fn failed_run_code_preserves_user_errors() {
        assert_eq!([2, 1, 137].map(failed_run_code), [2, 1, 1]);
    }

    #[test]
    fn local_rejects_parts_that_share_gpus() {
        let error = match on_this_machine(&Job { gpus: 1, ..job(2) }) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("it is taken"),
        };
        assert!(error.contains("all of them would use the same GPUs"), "{error}");
        assert!(
            on_this_machine(&Job { gpus: 1, ..job(1) }).is_ok() && on_this_machine(&job(2)).is_ok()
        );
    }
}
