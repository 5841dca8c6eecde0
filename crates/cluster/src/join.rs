//! Runs the learner processes of a machine other than the one that trains.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use levade_policy::awake::{Stopwatch, sleep};
use levade_run::cluster_learner::order::{self, Order};
use levade_run::cluster_learner::{FOLDER, torchrun};
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
pub enum Left {
    /// The run has ended.
    Over,
    /// Another process has taken over this part.
    Replaced,
    /// This process has received a request to stop.
    Stopped,
}

/// Interval between checks of the run's files.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Time for which this machine's processes continue after a request to stop. The run receives the same
/// request, and may need the processes to reach a point at which it can stop.
const STOPPING: Duration = Duration::from_secs(100);

/// Next action of this process.
enum Next {
    Follow(Order),
    Leave(Left),
}

/// Files through which the run sends orders to its machines.
struct Run {
    folder: PathBuf,
    /// End time of an earlier run in this directory, if this run resumes it. Until the run starts
    /// again, its files contain no order for this process.
    before: Option<SystemTime>,
    /// Index of this machine.
    node: u32,
    /// Name of this process among the processes that have had this machine's part.
    name: String,
}

impl Run {
    /// Opens the run in the directory `root`, and takes the part of machine `node` for this process.
    fn of(root: &Path, node: u32) -> io::Result<Self> {
        let (folder, name) = (root.join(FOLDER), torchrun::random()?);
        order::take(&folder, node, &name)?;
        Ok(Run { before: order::over(&folder), folder, node, name })
    }

    /// Returns whether another process has taken this machine's part: a launcher has started a second
    /// process, because it has lost track of this one.
    fn is_taken(&self) -> bool {
        order::is_taken(&self.folder, self.node, &self.name)
    }

    fn is_over(&self) -> bool {
        order::over(&self.folder).is_some_and(|at| Some(at) != self.before)
    }

    /// Returns the newest order, if any.
    fn order(&self) -> io::Result<Option<Order>> {
        let is_old = self.before.is_some() && order::over(&self.folder) == self.before;
        if is_old { Ok(None) } else { Order::read(&self.folder) }
    }
}

/// Waits until the run starts its learner, runs this machine's processes of it, and restarts them
/// whenever the run restarts its learner, until the run ends. Each item of `stops` is a request to
/// stop: after the first, the processes continue until the run has stopped; the second ends them at
/// once.
///
/// # Errors
/// Returns an error if the run does not start its learner in time, if its group has no such machine, or
/// if the processes cannot be started.
pub async fn join(part: &Part, host: &Host, mut stops: UnboundedReceiver<()>) -> anyhow::Result<Left> {
    if part.node == 0 {
        return Err(unusable("--node 0 is the machine that trains (`levade train`); others count from 1"));
    }
    let root = std::path::absolute(&part.run)?;
    let run = Run::of(&root, part.node).with_context(|| format!("cannot write into {}", root.display()))?;
    let log = torchrun::log_of(&root, part.node);
    let mut last: Option<Order> = None;
    loop {
        let next = tokio::select! {
            next = next(&run, last.as_ref(), part) => next?,
            Some(()) = stops.recv() => return Ok(Left::Stopped),
        };
        let order = match next {
            Next::Leave(left) => return Ok(left),
            Next::Follow(order) => order,
        };
        let say = |text: &str| {
            host.setup("node", format!("{} of start {}: {text}", part.node, order.start));
        };
        say(&format!("its processes start (log: {})", display::path(&log)));
        let mut environment = order.whole_environment();
        // Only the first machine serves requests, but every process requires a token.
        environment.push((torchrun::TOKEN.into(), format!("{}-of-no-use-here", order.start)));
        let environment = (environment, log.as_path());
        let mut processes = torchrun::serve(&order, part.node, &root, environment, host.supervisor()).await?;
        let mut stopping = false;
        loop {
            tokio::select! {
                how = processes.ended() => {
                    say(&format!("they ended: {how}"));
                    order::leave(&run.folder, &order.start, part.node, &how)?;
                }
                () = superseded(&run, &order) => {}
                _ = sleep(STOPPING), if stopping => {}
                Some(()) = stops.recv() => if !stopping {
                    stopping = true;
                    say("told to stop: they go on until the run stops; once more to stop at once");
                    continue;
                },
            }
            break;
        }
        processes.stop().await;
        if stopping {
            return Ok(if run.is_over() { Left::Over } else { Left::Stopped });
        }
        last = Some(order);
    }
}

/// Waits for an order that differs from the last one, or for a reason to leave.
async fn next(run: &Run, last: Option<&Order>, part: &Part) -> anyhow::Result<Next> {
    let longest = match last {
        Some(order) => Duration::from_secs_f64(order.patience),
        None => part.wait,
    };
    let mut watch = Stopwatch::start();
    loop {
        if run.is_over() {
            return Ok(Next::Leave(Left::Over));
        }
        if run.is_taken() {
            return Ok(Next::Leave(Left::Replaced));
        }
        if let Some(order) = run.order()?.filter(|order| last.is_none_or(|last| *last != *order)) {
            if part.node >= order.nodes {
                return Err(unusable(format!(
                    "--node {} takes part in a group of {} machines; number them from 0",
                    part.node, order.nodes
                )));
            }
            return Ok(Next::Follow(order));
        }
        if watch.elapsed() > longest {
            anyhow::bail!(
                "waited {longest:?} for the run to start its learner (in {}); is `levade train` running, with this \
                 very folder?",
                run.folder.display()
            );
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Waits until there is another order, the run has ended, or another process has taken this machine's
/// part.
async fn superseded(run: &Run, order: &Order) {
    loop {
        sleep(POLL_INTERVAL).await;
        let newest = run.order().ok().flatten();
        if run.is_over() || run.is_taken() || newest.is_some_and(|newest| newest != *order) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(start: &str) -> Order {
        let (command, variables, environment) = (vec!["true".into()], Vec::new(), Vec::new());
        Order { start: start.into(), command, variables, environment, nodes: 2, patience: 1.0 }
    }

    #[test]
    fn earlier_end_of_run_is_ignored() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(FOLDER);
        std::fs::create_dir_all(&folder).unwrap();
        order("first").write(&folder).unwrap();
        order::end(&folder).unwrap();
        // These files belong to a run that stopped and now resumes: neither its end nor its order
        // counts.
        let run = Run::of(root.path(), 1).unwrap();
        assert!(!run.is_over() && run.order().unwrap().is_none());
        order::clear(&folder).unwrap();
        assert!(!run.is_over() && run.order().unwrap().is_none());
        order("second").write(&folder).unwrap();
        assert_eq!(run.order().unwrap().unwrap().start, "second");
        std::thread::sleep(Duration::from_millis(20));
        order::end(&folder).unwrap();
        assert!(run.is_over());
    }

    #[test]
    fn resumed_run_without_work_ends_again() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(FOLDER);
        std::fs::create_dir_all(&folder).unwrap();
        order::end(&folder).unwrap();
        let run = Run::of(root.path(), 1).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        order::end(&folder).unwrap();
        assert!(run.is_over());
    }

    #[test]
    fn latest_process_takes_part_of_machine() {
        let root = tempfile::tempdir().unwrap();
        let (first, other) = (Run::of(root.path(), 1).unwrap(), Run::of(root.path(), 2).unwrap());
        assert!(!first.is_taken());
        let second = Run::of(root.path(), 1).unwrap();
        assert!(first.is_taken() && !second.is_taken() && !other.is_taken());
    }
}
