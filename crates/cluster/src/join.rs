//! Runs the learner processes of a machine other than the one that trains.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use levade_policy::process_time::{Stopwatch, sleep};
use levade_policy::random_hex;
use levade_run::cluster_learner::order::{self, LaunchOrder};
use levade_run::cluster_learner::{SUBDIR, torchrun};
use levade_run::{Host, display, unusable};
use tokio::sync::mpsc::UnboundedReceiver;

/// The part of one machine in the learner of a run.
#[derive(Debug, Clone)]
pub struct MachinePart {
    /// Directory of the run. It need not exist yet.
    pub run: PathBuf,
    /// Index of the machine, from 1. Machine 0 runs `levade train`.
    pub node: u32,
    /// Maximum wait until the run starts its learner for the first time.
    pub wait: Duration,
}

/// Reason why a machine has left a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinOutcome {
    /// The run has ended.
    Finished,
    /// Another process has taken over this machine's part in the run.
    Replaced,
    /// This process has received a request to stop.
    Stopped,
}

/// Interval between checks of the files through which the run sends orders.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Time for which this machine's learner processes continue after a request to stop. The run
/// receives the same request, and may need the processes to reach a point at which it can stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(100);

/// Next action of this process: to start the learner processes that an order describes, or to exit.
enum JoinAction {
    Follow(LaunchOrder),
    Exit(JoinOutcome),
}

/// Files through which the run sends launch orders to its machines.
struct OrderFiles {
    dir: PathBuf,
    /// Time at which an earlier run in this directory ended, if this run resumes it. Until the run
    /// starts again, its files contain no order for this process.
    before: Option<SystemTime>,
    /// Index of this machine in the run.
    node: u32,
    /// Random name of this process, which distinguishes it from other processes with the same
    /// machine index.
    name: String,
}

impl OrderFiles {
    /// Claims the part of machine `node` in the run in the directory `root` for this process.
    fn claim(root: &Path, node: u32) -> io::Result<Self> {
        let dir = root.join(SUBDIR);
        let name = random_hex(32);
        order::claim_role(&dir, node, &name)?;
        Ok(OrderFiles { before: order::finished_at(&dir), dir, node, name })
    }

    /// Returns whether another process has claimed this machine's part. A launcher starts a second
    /// process if it loses track of the first one.
    fn is_taken(&self) -> bool {
        order::is_role_claimed(&self.dir, self.node, &self.name)
    }

    fn has_run_ended(&self) -> bool {
        order::finished_at(&self.dir).is_some_and(|at| Some(at) != self.before)
    }

    /// Returns the newest launch order of the run, or `None` if there is no order yet.
    fn newest_order(&self) -> io::Result<Option<LaunchOrder>> {
        let is_old = self.before.is_some() && order::finished_at(&self.dir) == self.before;
        if is_old { Ok(None) } else { LaunchOrder::read(&self.dir) }
    }
}

/// Runs this machine's learner processes until the run ends. They start when the run starts its
/// learner, and restart whenever the run restarts its learner.
///
/// Each item of `stops` is a request to stop. After the first request, the processes continue until
/// the run has stopped. The second request ends them immediately.
///
/// # Errors
/// Returns an error if the run does not start its learner in time, if the learner has no machine
/// with this index, or if the processes cannot be started.
pub async fn join(
    part: &MachinePart,
    host: &Host,
    mut stops: UnboundedReceiver<()>,
) -> anyhow::Result<JoinOutcome> {
    if part.node == 0 {
        return Err(unusable(
            "--node 0 is the machine that trains (`levade train`); number the other machines from \
             1",
        ));
    }
    let root = std::path::absolute(&part.run)?;
    let files = OrderFiles::claim(&root, part.node)
        .with_context(|| format!("cannot write into {}", root.display()))?;
    let log = torchrun::node_log_path(&root, part.node);
    let mut last: Option<LaunchOrder> = None;
    loop {
        let action = tokio::select! {
            action = next_action(&files, last.as_ref(), part) => action?,
            Some(()) = stops.recv() => return Ok(JoinOutcome::Stopped),
        };
        let order = match action {
            JoinAction::Exit(outcome) => return Ok(outcome),
            JoinAction::Follow(order) => order,
        };
        let report = |text: &str| {
            host.setup("node", format!("{} of start {}: {text}", part.node, order.start));
        };
        report(&format!("starting processes (log: {})", display::path(&log)));
        let mut environment = order.full_environment();
        // Only the first machine serves requests, but every process requires a token.
        environment.push((torchrun::TOKEN.into(), format!("{}-of-no-use-here", order.start)));
        let environment = (environment, log.as_path());
        let mut processes =
            torchrun::serve(&order, part.node, &root, environment, host.supervisor()).await?;
        let mut stopping = false;
        loop {
            tokio::select! {
                how = processes.describe_end() => {
                    report(&format!("processes ended: {how}"));
                    order::report_exit(&files.dir, &order.start, part.node, &how)?;
                }
                () = wait_until_superseded(&files, &order) => {}
                _ = sleep(STOP_TIMEOUT), if stopping => {}
                Some(()) = stops.recv() => if !stopping {
                    stopping = true;
                    report("stop requested: the processes continue until the run stops (repeat to \
                            stop immediately)");
                    continue;
                },
            }
            break;
        }
        processes.stop().await;
        if stopping {
            return Ok(if files.has_run_ended() {
                JoinOutcome::Finished
            } else {
                JoinOutcome::Stopped
            });
        }
        last = Some(order);
    }
}

/// Waits for a launch order that differs from `last`, or for a reason to leave the run.
async fn next_action(
    files: &OrderFiles,
    last: Option<&LaunchOrder>,
    part: &MachinePart,
) -> anyhow::Result<JoinAction> {
    let timeout = match last {
        Some(order) => Duration::from_secs_f64(order.start_timeout_seconds),
        None => part.wait,
    };
    let mut watch = Stopwatch::start();
    loop {
        if files.has_run_ended() {
            return Ok(JoinAction::Exit(JoinOutcome::Finished));
        }
        if files.is_taken() {
            return Ok(JoinAction::Exit(JoinOutcome::Replaced));
        }
        if let Some(order) =
            files.newest_order()?.filter(|order| last.is_none_or(|last| *last != *order))
        {
            if part.node >= order.nodes {
                return Err(unusable(format!(
                    "--node is {}, but must be less than {}, the number of the learner's machines",
                    part.node, order.nodes
                )));
            }
            return Ok(JoinAction::Follow(order));
        }
        if watch.elapsed() > timeout {
            anyhow::bail!(
                "the run did not start its learner within {timeout:?} (in {}); check that `levade \
                 train` is running with the same directory",
                files.dir.display()
            );
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Waits until the newest order differs from `order`, the run has ended, or another process has
/// claimed this machine's part.
async fn wait_until_superseded(files: &OrderFiles, order: &LaunchOrder) {
    loop {
        sleep(POLL_INTERVAL).await;
        let newest = files.newest_order().ok().flatten();
        if files.has_run_ended()
            || files.is_taken()
            || newest.is_some_and(|newest| newest != *order)
        {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(start: &str) -> LaunchOrder {
        let command = vec!["true".into()];
        let variables = Vec::new();
        let environment = Vec::new();
        LaunchOrder {
            start: start.into(),
            command,
            variables,
            environment,
            nodes: 2,
            start_timeout_seconds: 1.0,
        }
    }

    #[test]
    fn earlier_end_of_run_is_ignored() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(SUBDIR);
        std::fs::create_dir_all(&dir).unwrap();
        order("first").write(&dir).unwrap();
        order::mark_finished(&dir).unwrap();
        // These files belong to a run that stopped and now resumes: neither its end nor its order
        // counts.
        let files = OrderFiles::claim(root.path(), 1).unwrap();
        assert!(!files.has_run_ended() && files.newest_order().unwrap().is_none());
        order::remove_old_files(&dir).unwrap();
        assert!(!files.has_run_ended() && files.newest_order().unwrap().is_none());
        order("second").write(&dir).unwrap();
        assert_eq!(files.newest_order().unwrap().unwrap().start, "second");
        std::thread::sleep(Duration::from_millis(20));
        order::mark_finished(&dir).unwrap();
        assert!(files.has_run_ended());
    }

    #[test]
    fn second_end_is_detected_after_resume_without_work() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(SUBDIR);
        std::fs::create_dir_all(&dir).unwrap();
        order::mark_finished(&dir).unwrap();
        let files = OrderFiles::claim(root.path(), 1).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        order::mark_finished(&dir).unwrap();
        assert!(files.has_run_ended());
    }

    #[test]
    fn latest_process_takes_part_of_machine() {
        let root = tempfile::tempdir().unwrap();
        let first = OrderFiles::claim(root.path(), 1).unwrap();
        let other = OrderFiles::claim(root.path(), 2).unwrap();
        assert!(!first.is_taken());
        let second = OrderFiles::claim(root.path(), 1).unwrap();
        assert!(first.is_taken() && !second.is_taken() && !other.is_taken());
    }
}
