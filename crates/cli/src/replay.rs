//! `levade replay`: a run again, from its record.

use std::path::PathBuf;
use std::process::ExitCode;

use levade_agent::environments::Environments;
use levade_policy::awake::Clock;
use levade_run::dir::RunDir;
use levade_run::numerics;
use levade_run::policies::{self, Started};
use levade_trainer::{Compared, RunFolder, replay};

use crate::host;
use crate::screen::{self, Style};
use crate::watch::Watch;

/// Do a run again from its record, and compare the weights with its checkpoints
///
/// Nothing is sampled: every step is trained on the very tokens that the run trained on. The weights come out
/// the same, bit for bit, on any number of threads; what differs shows that something else did.
#[derive(clap::Args)]
#[command(after_help = "Example:
  levade replay runs/calculator

Exit code: 0 where every checkpoint is the same, 1 where one differs, or none is there to compare with.")]
pub struct Args {
    /// The folder of a run
    run: PathBuf,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    crate::runtime()?.block_on(again(args))
}

async fn again(args: Args) -> anyhow::Result<ExitCode> {
    let run = RunDir::open(&args.run)?;
    let (mut recipe, begun) = (run.recipe()?, run.begun()?);
    // Where it lies now.
    recipe.run.folder = std::path::absolute(&args.run)?;
    // A group of learners writes into the folder of the run, and one that the run has under way is not to be
    // taken over.
    let _held = match &recipe.cluster.learner {
        Some(_) => Some(RunFolder::lock(&recipe.run.folder)?),
        None => None,
    };
    // Nothing is sampled: what was is in the record.
    let mut trained = recipe.clone();
    trained.cluster.samplers = None;
    trained.cluster.placement = levade_recipe::Placement::Apart;
    let host = host::host()?;
    let Started { policies, fingerprint, .. } =
        policies::start(&trained, begun, &Environments::default(), &host, &mut Vec::new()).await?;
    numerics::compare(&args.run, &fingerprint, &host);
    let (mut same, mut differ) = (0u32, 0u32);
    let mut watch = Watch::new(Clock::default());
    let style = Style::stdout();
    let mut compared = |Compared { checkpoint, step, differs }: Compared| match differs {
        None => {
            same += 1;
            screen::say(&format!("step {step:>5}  {} {}", style.green("same"), screen::path(&checkpoint)));
        }
        Some(file) => {
            differ += 1;
            screen::say(&format!("step {step:>5}  {} {file}", style.red("differs")));
        }
    };
    let steps = replay(&recipe, &args.run, policies, &mut watch, &mut compared).await?;
    watch.clear();
    let steps = screen::plural(steps, "step");
    if same + differ == 0 {
        anyhow::bail!(
            "{steps} done again, but nothing was compared: the run has no whole checkpoint of them"
        );
    }
    screen::say(&format!(
        "{steps} done again; {same} of {} checkpoints the same, bit for bit",
        same + differ
    ));
    Ok(if differ == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
