//! Implements `levade runner`, which makes the attempts of runs on any machine.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use levade_run::runner::{AttemptFilter, RunnerOptions, run};
use levade_run::runners::open_store;
use levade_run::{Event, Host};

use crate::failure::{INTERRUPTED, unusable};
use crate::host;
use crate::screen::Style;
use crate::stop::StopRequests;

/// Make attempts of runs whose recipes have the table `runners`, on this machine
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade runner --store rollouts.db                         next to a trainer on this machine
  levade runner --store http://store:4747 --slots 16        on any machine, with LEVADE_STORE_KEY
  levade runner --store http://store:4747 --queue run/sums --dir ~/sums

The first SIGTERM or Ctrl-C lets attempts in progress end, the second returns them.")]
pub struct Args {
    /// Store of the run's attempts, as in its recipe: runners.store
    #[arg(long, value_name = "URL|PATH")]
    store: String,

    /// Queue of one run, such as run/NAME [default: the queues of all runs in the store]
    #[arg(long)]
    queue: Option<String>,

    /// Make only the attempts of training, or only those of evaluations
    #[arg(long, value_enum)]
    only: Option<AttemptRestriction>,

    /// Maximum number of concurrent attempts
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    slots: u16,

    /// Name of the runner, unique in the store [default: the host name and the process id]
    #[arg(long)]
    name: Option<String>,

    /// Directory with the files that the recipe names: tools, programs, environments
    #[arg(long, default_value = ".")]
    dir: PathBuf,

    /// Exit after the attempts that the first leases return
    #[arg(long)]
    once: bool,

    /// Timeout for the store to respond, and for a run to start
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    wait_seconds: u32,

    /// Time that attempts in progress have after a request to stop, in seconds; other runners
    /// repeat attempts that exceed this time
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    drain_seconds: u32,
}

/// Kind of attempts to which a runner is restricted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum AttemptRestriction {
    Train,
    Evaluation,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let dir = std::path::absolute(&args.dir)?;
    if !dir.is_dir() {
        let dir = args.dir.display();
        return Err(unusable(format!("--dir {dir} is no directory; name an existing one")));
    }
    crate::create_runtime()?.block_on(async {
        let wait = Duration::from_secs(args.wait_seconds.into());
        let store = open_store(&args.store, wait).await?;
        // Until then a signal ends the process, because there is nothing to drain.
        let signals = StopRequests::listen()?;
        let name = args.name.unwrap_or_else(default_runner_name);
        let style = Style::stderr();
        let what = args.queue.as_deref().unwrap_or("all runs");
        eprintln!("{} {what} at {} as {name}", style.dim("making attempts of"), store.location());
        let host = Host::new(host::create_supervisor()?, move |event| {
            if let Event::Note(text) = event {
                eprintln!("{text}");
            }
        });
        let options = RunnerOptions {
            store,
            queue: args.queue,
            filter: match args.only {
                None => AttemptFilter::All,
                Some(AttemptRestriction::Train) => AttemptFilter::Training,
                Some(AttemptRestriction::Evaluation) => AttemptFilter::Evaluation,
            },
            slots: args.slots.into(),
            name,
            once: args.once,
            dir,
            wait,
            drain: Duration::from_secs(args.drain_seconds.into()),
        };
        let once = options.once;
        run(options, host, signals.into_stream()).await.context("the runner has stopped")?;
        Ok(if once { ExitCode::SUCCESS } else { ExitCode::from(INTERRUPTED) })
    })
}

/// Returns the default name of a runner, which is unique among the runners of a store.
fn default_runner_name() -> String {
    #[cfg(unix)]
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let host = "runner";
    format!("{host}-{}", std::process::id())
}
