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

/// Part of a machine in the learner of a run.
#[derive(Debug, Clone)]
pub struct Part {
    /// Run directory. It need not exist yet.
    pub run: PathBuf,
    /// Index of the machine, from 1. Machine 0 trains.
    pub node: u32,
    /// Timeout for the first start of the learner.
    pub wait: Duration,
}

/// Reason for which a machine has left a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinOutcome {
    /// The run has ended.
    Finished,
    /// Another process has taken over this part.
    Replaced,
    /// This process has received a request to stop.
    Stopped,
}

/// Interval between checks of the run's files.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Time for which this machine's processes continue after a request to stop. The run receives the
/// same request, and may need the processes to reach a point at which it can stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(100);

/// Next action of this process: to follow an order, or to exit.
enum JoinAction {
    Follow(LaunchOrder),
    Exit(JoinOutcome),
}

/// Files through which the run sends orders to its machines.
struct OrderFiles {
    dir: PathBuf,
    /// End time of an earlier run in this directory, if this run resumes it. Until the run starts
    /// again, its files contain no order for this process.
    before: Option<SystemTime>,
    /// Index of this machine.
    node: u32,
    /// Name of this process among the processes that have had this machine's part.
    name: String,
}

impl OrderFiles {
    /// Opens the run in the directory `root`, and takes the part of machine `node` for this
    /// process.
    fn claim(root: &Path, node: u32) -> io::Result<Self> {
        let dir = root.join(SUBDIR);
        let name = random_hex(32);
        order::claim_role(&dir, node, &name)?;
        Ok(OrderFiles { before: order::finished_at(&dir), dir, node, name })
    }

    /// Returns whether another process has taken this machine's part: a launcher has started a
    /// second process, because it has lost track of this one.
    fn is_taken(&self) -> bool {
        order::is_role_claimed(&self.dir, self.node, &self.name)
    }

    fn is_over(&self) -> bool {
        order::finished_at(&self.dir).is_some_and(|at| Some(at) != self.before)
    }

    /// Returns the newest order, if any.
    fn order(&self) -> io::Result<Option<LaunchOrder>> {
        let is_old = self.before.is_some() && order::finished_at(&self.dir) == self.before;
        if is_old { Ok(None) } else { LaunchOrder::read(&self.dir) }
    }
}

/// Waits until the run starts its learner, runs this machine's processes of it, and restarts them
/// whenever the run restarts its learner, until the run ends. Each item of `stops` is a request to
/// stop: after the first, the processes continue until the run has stopped; the second ends them at
/// once.
///
/// # Errors
/// Returns an error if the run does not start its learner in time, if its group has no such
/// machine, or if the processes cannot be started.
pub async fn join(
    part: &Part,
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
                () = superseded(&files, &order) => {}
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
            return Ok(if files.is_over() { JoinOutcome::Finished } else { JoinOutcome::Stopped });
        }
        last = Some(order);
    }
}

/// Waits for an order that differs from the last one, or for a reason to leave.
async fn next_action(
    files: &OrderFiles,
    last: Option<&LaunchOrder>,
    part: &Part,
) -> anyhow::Result<JoinAction> {
    let timeout = match last {
        Some(order) => Duration::from_secs_f64(order.start_timeout_seconds),
        None => part.wait,
    };
    let mut watch = Stopwatch::start();
    loop {
        if files.is_over() {
            return Ok(JoinAction::Exit(JoinOutcome::Finished));
        }
        if files.is_taken() {
            return Ok(JoinAction::Exit(JoinOutcome::Replaced));
        }
        if let Some(order) = files.order()?.filter(|order| last.is_none_or(|last| *last != *order))
        {
            if part.node >= order.nodes {
                return Err(unusable(format!(
                    "--node {} is out of range: the group has {} machines, numbered from 0",
                    part.node, order.nodes
                )));
            }
            return Ok(JoinAction::Follow(order));
        }
        if watch.elapsed() > timeout {
            anyhow::bail!(
                "waited {timeout:?} for the run to start its learner (in {}); check that `levade \
                 train` is running with the same directory",
                files.dir.display()
            );
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Waits until there is another order, the run has ended, or another process has taken this
/// machine's part.
async fn superseded(files: &OrderFiles, order: &LaunchOrder) {
    loop {
        sleep(POLL_INTERVAL).await;
        let newest = files.order().ok().flatten();
        if files.is_over() || files.is_taken() || newest.is_some_and(|newest| newest != *order) {
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
        assert!(!files.is_over() && files.order().unwrap().is_none());
        order::remove_old_files(&dir).unwrap();
        assert!(!files.is_over() && files.order().unwrap().is_none());
        order("second").write(&dir).unwrap();
        assert_eq!(files.order().unwrap().unwrap().start, "second");
        std::thread::sleep(Duration::from_millis(20));
        order::mark_finished(&dir).unwrap();
        assert!(files.is_over());
    }

    #[test]
    fn resumed_run_without_work_ends_again() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join(SUBDIR);
        std::fs::create_dir_all(&dir).unwrap();
        order::mark_finished(&dir).unwrap();
        let files = OrderFiles::claim(root.path(), 1).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        order::mark_finished(&dir).unwrap();
        assert!(files.is_over());
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
