//! Implements `levade replay`, which repeats the training of a run from its recorded attempts.

use std::path::PathBuf;
use std::process::ExitCode;

use levade_agent::environments::Environments;
use levade_policy::process_time::Clock;
use levade_run::dir::RunDir;
use levade_run::numerics;
use levade_run::policies::{self, StartedPolicies};
use levade_trainer::{LockedRunDir, ReplayComparison, replay};

use crate::host;
use crate::screen::{self, Style};
use crate::watch::Watch;

/// Repeat the training of a run, and compare the weights with the run's checkpoints
///
/// Samples nothing: every step trains on the recorded tokens. The resulting weights are equal bit
/// for bit, on any number of threads. A difference shows that something else has changed.
#[derive(clap::Args)]
#[command(after_help = "Example:
  levade replay runs/calculator

Exit code: 0 if every checkpoint is the same, 1 if one differs or there is none to compare with.")]
pub struct Args {
    /// Run directory
    run: PathBuf,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    crate::create_runtime()?.block_on(replay_run(args))
}

async fn replay_run(args: Args) -> anyhow::Result<ExitCode> {
    let run = RunDir::open(&args.run)?;
    let mut recipe = run.recipe()?;
    let started_at = run.started()?;
    // The run may have been moved since its recipe was written.
    recipe.run.folder = std::path::absolute(&args.run)?;
    // A remote learner writes to the run directory. The lock prevents a replay from taking over the
    // learner of a run in progress.
    let _guard = match &recipe.cluster.learner {
        Some(_) => Some(LockedRunDir::lock(&recipe.run.folder)?),
        None => None,
    };
    // Replaying needs no samplers, because the store contains the sampled tokens.
    let mut trained = recipe.clone();
    trained.cluster.samplers = None;
    trained.cluster.placement = levade_recipe::Placement::Disaggregated;
    let host = host::create_host()?;
    let StartedPolicies { policies, fingerprint, .. } =
        policies::start(&trained, started_at, &Environments::default(), &host, &mut Vec::new())
            .await?;
    numerics::compare(&args.run, &fingerprint, &host);
    let mut same = 0u32;
    let mut differ = 0u32;
    let mut watch = Watch::new(Clock::default());
    let style = Style::stdout();
    let mut compared =
        |ReplayComparison { checkpoint, step, differs }: ReplayComparison| match differs {
            None => {
                same += 1;
                screen::print_line(&format!(
                    "step {step:>5}  {} {}",
                    style.green("same"),
                    screen::path(&checkpoint)
                ));
            }
            Some(file) => {
                differ += 1;
                screen::print_line(&format!("step {step:>5}  {} {file}", style.red("differs")));
            }
        };
    let steps = replay(&recipe, &args.run, policies, &mut watch, &mut compared).await?;
    watch.clear();
    let steps = screen::plural(steps, "step");
    if same + differ == 0 {
        anyhow::bail!(
            "{steps} replayed, but nothing was compared: the run has no complete checkpoint of \
             these steps"
        );
    }
    screen::print_line(&format!(
        "{steps} replayed; {same} of {} checkpoints the same, bit for bit",
        same + differ
    ));
    Ok(if differ == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
