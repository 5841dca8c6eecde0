//! `levade train`: a run, from a recipe to a model.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use levade_agent::environments::Environments;
use levade_policy::PolicyError;
use levade_policy::awake::Clock;
use levade_process::Supervisor;
use levade_recipe::{LearnerKeys, Override, Recipe};
use levade_trainer::{Ended, Parts, RunFolder, Start, StopFlag, Summary, Trainer, TrainerError, milestones};

use crate::child;
use crate::cluster_learner::{self, order};
use crate::failure::{INTERRUPTED, unusable};
use crate::policies::{self, Started};
use crate::run::{RECIPE, Run};
use crate::screen::{self, Style, quoted};
use crate::stop::Requests;
use crate::watch::Watch;
use crate::{numerics, recipe, run, scorers, supervise, table};

/// Train a model by a recipe
///
/// Everything goes into one folder: the resolved recipe, every token that was sampled, metrics, checkpoints.
/// Ctrl-C stops at the next safe point, and so does SIGTERM; a second one stops at once. A run that was
/// stopped or killed goes on with --resume, and ends with the same weights as if it had not been.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade train recipes/calculator
  levade train recipes/calculator --set run.seed=2 --run runs/second
  levade train recipes/calculator --set engine.threads=4 --set phase.1.steps=20
  levade train recipes/calculator --resume")]
pub struct Args {
    /// A TOML file, or a folder that holds recipe.toml (a run folder does)
    recipe: PathBuf,

    /// Change a key of the recipe; items of lists by number, as in phase.1.steps=20. Can be given many times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,

    /// Go on with the run in the folder, from its newest checkpoint and its record
    #[arg(long)]
    resume: bool,

    /// Start the run again when its process dies, up to N times in a row, from its newest checkpoint and its
    /// record
    #[arg(long, value_name = "N", default_value_t = 0)]
    restarts: u32,

    /// Where to write, in place of the recipe's run.folder (by default runs/NAME in the working directory)
    #[arg(long, value_name = "FOLDER")]
    run: Option<PathBuf>,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let recipe = recipe::load_run(&args.recipe, &args.overrides, args.run.as_deref())?;
    let start = if args.resume { Start::Resume } else { Start::Fresh };
    RunFolder::check(&recipe.run, start)?;
    if args.restarts > 0 {
        if !recipe.run.store.is_durable() {
            let store = &recipe.run.store;
            return Err(unusable(format!(
                "--restarts {} needs a record that outlives a process, and `run.store` is \"{store}\"; leave out one of them",
                args.restarts
            )));
        }
        // With something in the folder there is something to go on from, once the first process has begun.
        return supervise::run(args.restarts, || recipe.run.folder.join(RECIPE).exists());
    }
    crate::runtime()?.block_on(train(args, recipe))
}

async fn train(args: Args, recipe: Recipe) -> anyhow::Result<ExitCode> {
    let dim = |text| Style::stderr().dim(text);
    let folder = recipe.run.folder.clone();
    eprintln!("{} {}", dim("run   "), screen::path(&folder));
    if let Some(note) = recipe.numerics_note() {
        eprintln!("{} {note}", dim("note:"));
    }
    let stop = StopFlag::default();
    let interrupts = tokio::spawn(interrupted(Requests::listen()?, stop.clone()));
    let clock = Clock::default();
    let pauses = tokio::spawn(clock.clone().keep(move |pause| {
        eprintln!(
            "{} the process stood still for {}; no deadline has run meanwhile",
            dim("note:"),
            screen::clock(pause)
        );
    }));
    let elsewhere = recipe.cluster.learner.is_some();
    let mut again = Again::new(&recipe);
    let mut start = if args.resume { Start::Resume } else { Start::Fresh };
    let ended = loop {
        match once(&recipe, start, &clock, &stop).await {
            // Whoever stops a job often tells all of its processes at once.
            Err(error) if elsewhere && stop.is_stopped() && is_lost(&error) => break Ok(None),
            Err(error) if again.may(&error, &folder) => start = Start::Resume,
            ended => break ended.map(Some),
        }
    };
    interrupts.abort();
    pauses.abort();
    let ended = ended?;
    // Whoever takes part on other machines may go home.
    order::end(&folder.join(cluster_learner::FOLDER))?;
    let after = match ended {
        Some(Ended::Finished(summary)) => {
            finished(&summary, &folder);
            return Ok(ExitCode::SUCCESS);
        }
        Some(Ended::Stopped { done, steps, .. }) => format!("after step {done} of {steps}"),
        None => "together with its learner".into(),
    };
    eprintln!("stopped {after}; go on with\n  {}", to_go_on(&args));
    Ok(ExitCode::from(INTERRUPTED))
}

/// Whether a learner elsewhere has ended or hangs.
fn is_lost(error: &anyhow::Error) -> bool {
    let of_policy = match error.downcast_ref::<TrainerError>() {
        Some(TrainerError::Policy(error)) => Some(error),
        _ => error.downcast_ref::<PolicyError>(),
    };
    matches!(of_policy, Some(PolicyError::Stopped(_) | PolicyError::Deadline(..)))
}

/// The first request asks the run to stop, the second one ends the process.
async fn interrupted(requests: Requests, stop: StopFlag) {
    requests
        .two(|| {
            stop.stop();
            eprintln!(
                "\nstopping at the next safe point; Ctrl-C again stops at once (--resume continues from the last checkpoint)"
            );
        })
        .await;
    std::process::exit(INTERRUPTED.into());
}

/// Trains from the beginning or the newest checkpoint, until all is done, it is asked to stop, or something
/// breaks.
async fn once(recipe: &Recipe, start: Start, clock: &Clock, stop: &StopFlag) -> anyhow::Result<Ended> {
    let folder = &recipe.run.folder;
    // A learner that is started would take the place of the one that another process has there.
    RunFolder::check(&recipe.run, start)?;
    let begun = run::begun_or_now(folder)?;
    let mut children = Vec::new();
    let ended = async {
        let environments = Environments::new(recipe.environments(), &Supervisor::this()?);
        let Started { policies, agents, fingerprint, model_files, teachers } =
            policies::start(recipe, begun, &environments, &mut children).await?;
        let scorers = scorers::asking(&recipe.reward, &environments)?;
        let parts = Parts { policies, agents, scorers, environments, begun, model_files, teachers };
        let mut trainer = Trainer::new(recipe.clone(), parts, start).await?;
        numerics::compare(folder, &fingerprint);
        numerics::record(folder, &fingerprint)?;
        let mut watch = Watch::new(clock.clone());
        let ended = trainer.run(&mut watch, stop).await;
        watch.clear();
        Ok(ended?)
    };
    let ended = ended.await;
    // Nobody holds the processes of a learner and of servers any more; what comes next needs the memory that
    // they have.
    let left = child::all_gone(children, LEAVING).await;
    if !left.is_empty() {
        let note = Style::stderr().dim("note:");
        let left = left.join(", ");
        eprintln!(
            "{note} waited {LEAVING:?} for {left} to be gone; whoever is started now may miss its memory"
        );
    }
    ended
}

/// Longest wait for the processes of a learner and of servers to be gone.
const LEAVING: Duration = Duration::from_secs(30);

/// Whether a run goes on after its learner elsewhere has died: so many times in a row, where nothing is
/// written in between that it goes on from.
struct Again {
    most: u32,
    /// Whether the run has a record to continue from.
    is_durable: bool,
    died: u32,
    newest: Option<PathBuf>,
}

impl Again {
    fn new(recipe: &Recipe) -> Self {
        let most = recipe.cluster.learner.as_ref().map_or(0, |LearnerKeys::Torch(keys)| keys.restarts);
        Again { most, is_durable: recipe.run.store.is_durable(), died: 0, newest: None }
    }

    /// Whether the run in a folder may go on after this error; says so.
    fn may(&mut self, error: &anyhow::Error, folder: &Path) -> bool {
        let found = Run::find(folder).filter(|_| self.is_durable && is_lost(error));
        let Some(run) = found else { return false };
        let newest = run.newest_checkpoint();
        if newest != self.newest {
            (self.newest, self.died) = (newest, 0);
        }
        self.died += 1;
        if self.died > self.most {
            return false;
        }
        let note = Style::stderr().dim("note:");
        let from = match &self.newest {
            Some(checkpoint) => screen::path(checkpoint),
            None => "the beginning".into(),
        };
        eprintln!("{note} {error}\n{note} going on from {from} ({} of {} in a row)", self.died, self.most);
        true
    }
}

/// The command that goes on with a run.
fn to_go_on(args: &Args) -> String {
    let mut words = vec![program(), "train".into(), quoted(&args.recipe.to_string_lossy())];
    for change in &args.overrides {
        words.push("--set".into());
        words.push(quoted(&format!("{}={}", change.key(), change.value)));
    }
    if let Some(folder) = &args.run {
        words.extend(["--run".into(), quoted(&folder.to_string_lossy())]);
    }
    words.push("--resume".into());
    words.join(" ")
}

/// How this program was called.
fn program() -> String {
    std::env::args_os().next().map_or_else(|| "levade".into(), |name| quoted(&name.to_string_lossy()))
}

fn finished(summary: &Summary, folder: &Path) {
    let style = Style::stdout();
    let evals = milestones(&summary.evals);
    screen::say(&format!("\n{}\n{}", table::table(&evals, style), table::gains(&summary.gains)));
    for (place, times, first) in summary.troubles.iter() {
        let times = screen::plural(times as u32, "time");
        screen::say(&format!("{} {place} went wrong {times}, first: {first}", style.dim("trouble")));
    }
    let steps = screen::plural(summary.steps, "step");
    let folder = screen::path(folder);
    screen::say(&format!("{steps}, {} in this process", screen::clock(summary.elapsed)));
    screen::say(&format!("run    {folder}"));
    if let Some(best) = &summary.best {
        screen::say(&format!("best   {} ({})", screen::path(&best.checkpoint), table::best(best)));
    }
    if let Some(checkpoint) = &summary.checkpoint {
        let (program, folder) = (program(), quoted(&folder));
        screen::say(&format!("model  {}", screen::path(checkpoint)));
        screen::say(&format!("\ntalk to it   {program} chat {folder}"));
        screen::say(&format!("look inside  {program} inspect {folder} --worst"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_to_go_on_can_be_pasted() {
        let args = Args {
            recipe: "my recipes/a".into(),
            overrides: ["run.seed=2", "agent.system=it's"].map(|text| text.parse().unwrap()).into(),
            resume: false,
            restarts: 0,
            run: Some("runs/b".into()),
        };
        let command = to_go_on(&args);
        let tail = command.split_once(" train ").unwrap().1;
        assert_eq!(
            tail,
            r#"'my recipes/a' --set run.seed=2 --set 'agent.system="it'\''s"' --run runs/b --resume"#
        );
    }
}
