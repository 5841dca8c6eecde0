//! `dressage cluster join`: a further machine of a learner's group.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use dressage_policy::awake::{Stopwatch, sleep};

use crate::cluster_learner::order::{self, Order};
use crate::cluster_learner::{FOLDER, torchrun};
use crate::failure::{INTERRUPTED, unusable};
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

/// The next thing to do.
enum Next {
    Follow(Order),
    Over,
}

pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    if args.node == 0 {
        return Err(unusable("--node 0 is the machine that trains (`dressage train`); others count from 1"));
    }
    crate::runtime()?.block_on(join(args))
}

async fn join(args: &Args) -> anyhow::Result<ExitCode> {
    let root = std::path::absolute(&args.run)?;
    let folder = root.join(FOLDER);
    let log = torchrun::log_of(&root, args.node);
    let mut stop = Requests::listen()?;
    let mut last: Option<Order> = None;
    // Of an earlier run in this folder, which is about to go on.
    let was_over = order::is_over(&folder);
    loop {
        let next = tokio::select! {
            next = next(&folder, last.as_ref(), was_over, args) => next?,
            _ = stop.next() => return Ok(ExitCode::from(INTERRUPTED)),
        };
        let order = match next {
            Next::Over => return Ok(ExitCode::SUCCESS),
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
        let mut kept = torchrun::serve(&order, args.node, &root, environment, &log).await?;
        let stopped = tokio::select! {
            how = kept.ended() => {
                say(&format!("they ended: {how}"));
                order::leave(&folder, &order.start, args.node, &how)?;
                false
            }
            () = superseded(&folder, &order) => false,
            _ = stop.next() => true,
        };
        kept.stop().await;
        if stopped {
            return Ok(ExitCode::from(INTERRUPTED));
        }
        last = Some(order);
    }
}

/// Waits for another order than the last one.
async fn next(folder: &Path, last: Option<&Order>, was_over: bool, args: &Args) -> anyhow::Result<Next> {
    let longest = match last {
        Some(order) => Duration::from_secs_f64(order.patience),
        None => Duration::from_secs(args.wait.into()),
    };
    let mut watch = Stopwatch::start();
    loop {
        if order::is_over(folder) && (last.is_some() || !was_over) {
            return Ok(Next::Over);
        }
        if let Some(order) = Order::read(folder)?.filter(|order| last.is_none_or(|last| *last != *order)) {
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
                "waited {longest:?} for the run to start its learner (in {}); is `dressage train` running, with this \
                 very folder?",
                folder.display()
            );
        }
        sleep(LOOK).await;
    }
}

/// Waits until there is another order, or the run is over.
async fn superseded(folder: &Path, order: &Order) {
    loop {
        sleep(LOOK).await;
        let newest = Order::read(folder).ok().flatten();
        if order::is_over(folder) || newest.is_some_and(|newest| newest != *order) {
            return;
        }
    }
}
