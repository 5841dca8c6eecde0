//! `levade cluster join`: a further machine of a learner's group.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use levade_policy::awake::{Stopwatch, sleep};
use levade_run::cluster_learner::order::{self, Order};
use levade_run::cluster_learner::{FOLDER, torchrun};

use crate::failure::{INTERRUPTED, unusable};
use crate::host;
use crate::screen::{self, Style};
use crate::stop::Requests;

/// Take part in the learner of a run, as another machine than the one that trains
///
/// Waits for the run to start its learner (`cluster.learner.nodes` more than 1), runs this machine's
/// processes of it, starts them again whenever the run does, and ends with the run. The folder of the run
/// must be on a file system that both machines reach under the same path.
#[derive(clap::Args)]
pub struct Args {
    /// The folder of the run, which need not be there yet
    run: PathBuf,

    /// Number of this machine, from 1; 0 is the one that trains
    #[arg(long, value_name = "N")]
    node: u32,

    /// Longest wait for the run to start its learner for the first time, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    wait: u32,
}

/// How often files are looked at.
const LOOK: Duration = Duration::from_millis(500);

/// How long this machine's processes go on once it is told to stop: so long the run, which is told as well,
/// may need them to come to a point where it can stop.
const STOPPING: Duration = Duration::from_secs(100);

/// The next thing to do.
enum Next {
    Follow(Order),
    Over,
    Leave,
}

/// Files through which the run speaks.
struct Run {
    folder: PathBuf,
    /// When it was over before, in a folder that is about to be gone on with: until the run begins anew,
    /// nothing there is meant for this process.
    before: Option<SystemTime>,
    /// Number of this machine.
    node: u32,
    /// Name of this process among those that have had this machine's part.
    name: String,
}

impl Run {
    /// The run in a folder, in which this process takes the part of a machine.
    fn of(root: &Path, node: u32) -> io::Result<Self> {
        let (folder, name) = (root.join(FOLDER), torchrun::random()?);
        order::take(&folder, node, &name)?;
        Ok(Run { before: order::over(&folder), folder, node, name })
    }

    /// Whether another process has this machine's part now: a launcher has started one, because it has lost
    /// this one out of its sight.
    fn is_taken(&self) -> bool {
        order::is_taken(&self.folder, self.node, &self.name)
    }

    fn is_over(&self) -> bool {
        order::over(&self.folder).is_some_and(|at| Some(at) != self.before)
    }

    /// The newest order, if any.
    fn order(&self) -> io::Result<Option<Order>> {
        let is_old = self.before.is_some() && order::over(&self.folder) == self.before;
        if is_old { Ok(None) } else { Order::read(&self.folder) }
    }
}

pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    if args.node == 0 {
        return Err(unusable("--node 0 is the machine that trains (`levade train`); others count from 1"));
    }
    crate::runtime()?.block_on(join(args))
}

async fn join(args: &Args) -> anyhow::Result<ExitCode> {
    let root = std::path::absolute(&args.run)?;
    let run = Run::of(&root, args.node).with_context(|| format!("cannot write into {}", root.display()))?;
    let log = torchrun::log_of(&root, args.node);
    let mut stop = Requests::listen()?;
    let mut last: Option<Order> = None;
    loop {
        let next = tokio::select! {
            next = next(&run, last.as_ref(), args) => next?,
            _ = stop.next() => return Ok(ExitCode::from(INTERRUPTED)),
        };
        let order = match next {
            Next::Over => return Ok(ExitCode::SUCCESS),
            Next::Leave => {
                eprintln!("another process has taken the part of machine {}; this one ends", args.node);
                return Ok(ExitCode::SUCCESS);
            }
            Next::Follow(order) => order,
        };
        let say = |what: &str| {
            let dim = Style::stderr().dim("node  ");
            eprintln!("{dim} {} of start {}: {what}", args.node, order.start);
        };
        say(&format!("its processes start (log: {})", screen::path(&log)));
        let mut environment = order.whole_environment();
        // Only the first machine serves, but each asks for a token.
        environment.push((torchrun::TOKEN.into(), format!("{}-of-no-use-here", order.start)));
        let supervisor = host::supervisor()?;
        let mut kept = torchrun::serve(&order, args.node, &root, (environment, &log), &supervisor).await?;
        let mut stopping = false;
        loop {
            tokio::select! {
                how = kept.ended() => {
                    say(&format!("they ended: {how}"));
                    order::leave(&run.folder, &order.start, args.node, &how)?;
                }
                () = superseded(&run, &order) => {}
                _ = sleep(STOPPING), if stopping => {}
                () = stop.wish() => if !stopping {
                    stopping = true;
                    say("told to stop: they go on until the run stops; once more to stop at once");
                    continue;
                },
            }
            break;
        }
        kept.stop().await;
        if stopping {
            return Ok(if run.is_over() { ExitCode::SUCCESS } else { ExitCode::from(INTERRUPTED) });
        }
        last = Some(order);
    }
}

/// Waits for another order than the last one.
async fn next(run: &Run, last: Option<&Order>, args: &Args) -> anyhow::Result<Next> {
    let longest = match last {
        Some(order) => Duration::from_secs_f64(order.patience),
        None => Duration::from_secs(args.wait.into()),
    };
    let mut watch = Stopwatch::start();
    loop {
        if run.is_over() {
            return Ok(Next::Over);
        }
        if run.is_taken() {
            return Ok(Next::Leave);
        }
        if let Some(order) = run.order()?.filter(|order| last.is_none_or(|last| *last != *order)) {
            if args.node >= order.nodes {
                return Err(unusable(format!(
                    "--node {} takes part in a group of {} machines; number them from 0",
                    args.node, order.nodes
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
        sleep(LOOK).await;
    }
}

/// Waits until there is another order, the run is over, or this machine's part is another's.
async fn superseded(run: &Run, order: &Order) {
    loop {
        sleep(LOOK).await;
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
    fn an_earlier_end_of_the_run_is_not_the_end_of_this_one() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(FOLDER);
        std::fs::create_dir_all(&folder).unwrap();
        order("first").write(&folder).unwrap();
        order::end(&folder).unwrap();
        // Of a run that stopped, and now begins again: neither its end nor its order counts.
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
    fn a_run_that_has_nothing_left_to_do_is_over_again() {
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
    fn the_process_that_came_last_has_the_part_of_a_machine() {
        let root = tempfile::tempdir().unwrap();
        let (first, other) = (Run::of(root.path(), 1).unwrap(), Run::of(root.path(), 2).unwrap());
        assert!(!first.is_taken());
        let second = Run::of(root.path(), 1).unwrap();
        assert!(first.is_taken() && !second.is_taken() && !other.is_taken());
    }
}
