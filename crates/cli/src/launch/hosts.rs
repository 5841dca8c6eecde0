//! Machines whose processes this one starts and ends itself: its own, and those that it reaches by ssh.
//!
//! Each machine's part runs under a keeper there. This process holds the keeper's line, over ssh where it is
//! another machine: when the line ends, by a request, a kill or a broken connection, the keeper ends the part
//! with all that it has started.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use dressage_agent::{Keeper, KeptProcess};

use super::files::Job;
use super::{Ended, Follow, LOOK, Plan};
use crate::child;
use crate::cluster_learner::torchrun::HEAD;
use crate::failure::{INTERRUPTED, unusable};
use crate::screen::{Style, quoted};
use crate::stop::Requests;

/// Machines of `--on ssh`
#[derive(clap::Args)]
pub struct Options {
    /// A machine for --on ssh, as ssh knows it; the first one trains. Can be given many times
    #[arg(long = "host", value_name = "HOST")]
    hosts: Vec<String>,

    /// A further argument of ssh, such as -p or -F. Can be given many times
    #[arg(long = "ssh-arg", value_name = "ARG", allow_hyphen_values = true)]
    ssh_args: Vec<String>,
}

/// Machines, each with the keeper of its part.
pub struct Hosts {
    machines: Vec<(String, Keeper)>,
    head: String,
    script: String,
}

/// How long other machines may take once the first has ended.
const ENDING: Duration = Duration::from_secs(60);
/// A part that lived for so long has done something: the count of restarts begins anew.
const FRESH: Duration = Duration::from_secs(600);

/// All on this machine.
pub fn local(job: &Job) -> anyhow::Result<Plan> {
    let keeper = Keeper(vec![job.binary.display().to_string(), "keep".into()]);
    let machines = (0..job.nodes).map(|node| (format!("part {node} here"), keeper.clone())).collect();
    let script = job.script().display().to_string();
    Ok(Plan::Hosts(Hosts { machines, head: "127.0.0.1".into(), script }))
}

/// Machines that are reached by ssh.
///
/// # Errors
/// When there are not as many as the recipe asks for.
pub fn ssh(job: &Job, options: &Options) -> anyhow::Result<Plan> {
    let Options { hosts, ssh_args } = options;
    if hosts.len() != job.nodes as usize {
        return Err(unusable(format!(
            "the recipe asks for {} machines (`cluster.learner.nodes`), and --host names {}; name as many",
            job.nodes,
            hosts.len()
        )));
    }
    let head = hosts[0].rsplit('@').next().unwrap_or_default().to_owned();
    let machine = |host: &String| {
        // A password cannot be asked for; a machine that is gone is noticed.
        let mut words: Vec<String> =
            ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"].map(str::to_owned).into();
        words.extend(ssh_args.iter().cloned());
        words.push(host.clone());
        let keep = format!("env {HEAD}={} {} keep", quoted(&head), quoted(&job.binary.display()));
        words.push(keep);
        (host.clone(), Keeper(words))
    };
    let script = job.script().display().to_string();
    Ok(Plan::Hosts(Hosts { machines: hosts.iter().map(machine).collect(), head, script }))
}

/// A machine's part under way.
struct Part {
    process: KeptProcess,
    since: Instant,
    died: u32,
}

impl Hosts {
    /// Commands as they are run.
    pub fn commands(&self) -> Vec<String> {
        let command = |(node, (_, Keeper(words))): (usize, &(String, Keeper))| {
            let words: Vec<String> = words.iter().map(quoted).collect();
            format!("{}  # then: sh {} {node}", words.join(" "), quoted(&self.script))
        };
        self.machines.iter().enumerate().map(command).collect()
    }

    async fn start(&self, job: &Job, node: u32, died: u32) -> anyhow::Result<Part> {
        let (name, keeper) = &self.machines[node as usize];
        let log = job.log(node);
        let file = child::log(&log).with_context(|| format!("cannot write {}", log.display()))?;
        // Both ssh and what is started here may need any of it.
        let text =
            |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
        let mut environment: Vec<(String, String)> = std::env::vars_os().filter_map(text).collect();
        environment.retain(|(name, _)| name != HEAD);
        environment.push((HEAD.into(), self.head.clone()));
        let command = ["sh".to_owned(), self.script.clone(), node.to_string()];
        let process = keeper.serve(&command, &job.root, environment, file).await;
        let process = process.map_err(|why| anyhow::anyhow!("{name} cannot be started: {why}"))?;
        Ok(Part { process, since: Instant::now(), died })
    }

    /// Starts every machine's part, and each again that dies, until the first has ended.
    pub async fn run(self, job: &Job, restarts: u32) -> anyhow::Result<Ended> {
        let mut stop = Requests::listen()?;
        let mut shown = Follow::new(&job.log(0));
        let mut parts: Vec<Option<Part>> = Vec::new();
        for node in 0..job.nodes {
            parts.push(Some(self.start(job, node, 0).await?));
        }
        let code = loop {
            tokio::select! {
                _ = stop.next() => break INTERRUPTED,
                () = tokio::time::sleep(LOOK) => {}
            }
            shown.show();
            if let Some(code) = self.look(job, &mut parts, restarts).await? {
                break code;
            }
        };
        shown.show();
        let over = Instant::now();
        // They have been told by the first; where that could not tell, they are ended.
        for part in parts.iter_mut().skip(1).flatten() {
            let left = if code == 0 { ENDING.saturating_sub(over.elapsed()) } else { Duration::ZERO };
            let _ = tokio::time::timeout(left, part.process.ended()).await;
        }
        for part in parts.into_iter().flatten() {
            part.process.stop().await;
        }
        Ok(Ended::Code(code))
    }

    /// Looks at every part. Gives the exit code of the first machine's, once it has ended for good.
    async fn look(&self, job: &Job, parts: &mut [Option<Part>], restarts: u32) -> anyhow::Result<Option<u8>> {
        for node in 0..job.nodes {
            let Some(part) = &mut parts[node as usize] else { continue };
            let Some(ended) = part.process.has_ended() else { continue };
            let ended = ended.unwrap_or(255);
            match (node, ended) {
                // Done, the user's to mend, or asked to stop.
                (0, 0 | 2) => return Ok(Some(ended as u8)),
                (0, code) if code == i32::from(INTERRUPTED) => return Ok(Some(INTERRUPTED)),
                (_, 0) => parts[node as usize] = None,
                _ => {
                    let died = if part.since.elapsed() > FRESH { 1 } else { part.died + 1 };
                    let (name, _) = &self.machines[node as usize];
                    let note = Style::stderr().dim("note:");
                    let log = job.log(node);
                    if died > restarts || (node > 0 && ended == 2) {
                        eprintln!(
                            "{note} {name} ended with exit code {ended}, {died} times in a row (log: {})",
                            log.display()
                        );
                        return Ok(Some(1));
                    }
                    eprintln!(
                        "{note} {name} ended with exit code {ended}; started again ({died} of {restarts})"
                    );
                    parts[node as usize] = Some(self.start(job, node, died).await?);
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
        Job { nodes, ..Job::new("x", "/runs/my run".into(), "/opt/dressage".into()).unwrap() }
    }

    #[test]
    fn machines_are_reached_by_their_keepers() {
        let options =
            Options { hosts: vec!["me@east".into(), "west".into()], ssh_args: vec!["-p2222".into()] };
        let Plan::Hosts(hosts) = ssh(&job(2), &options).unwrap() else { panic!() };
        assert_eq!(hosts.head, "east");
        assert_eq!(
            hosts.commands()[1],
            "ssh -o BatchMode=yes -o ServerAliveInterval=15 -p2222 west 'env DRESSAGE_HEAD=east /opt/dressage keep'  \
             # then: sh '/runs/my run/launch/node.sh' 1"
        );
        let error = match ssh(&job(3), &options) {
            Err(error) => error.to_string(),
            Ok(_) => panic!(),
        };
        assert!(
            error.contains("asks for 3 machines (`cluster.learner.nodes`), and --host names 2"),
            "{error}"
        );
    }
}
