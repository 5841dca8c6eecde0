//! Implements `levade train`, which runs a recipe and writes a trained model.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use levade_recipe::{Override, Recipe};
use levade_run::Event;
use levade_run::dir::RECIPE;
use levade_run::source::pin_models;
use levade_trainer::{
    LockedRunDir, Observer, RewindResult, RunEnd, StartMode, StopFlag, Summary, milestone_evals,
    rewind,
};

use crate::failure::{INTERRUPTED, unusable};
use crate::host::{self, SetupPrinter};
use crate::screen::{self, Style, quoted};
use crate::stop::StopRequests;
use crate::watch::Watch;
use crate::{recipe, supervise, table};

/// Train a model with a recipe
///
/// Writes everything to one directory: the resolved recipe, every sampled token, metrics and
/// checkpoints. Ctrl-C or SIGTERM stops the run at the next safe point; a second one stops it at
/// once. With --resume, a run that was stopped or killed continues, and ends with the same weights
/// as an uninterrupted run. With --from, it goes back to an earlier step, from which another reward
/// may apply.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade train recipes/calculator
  levade train recipes/calculator --set run.seed=2 --run runs/second
  levade train recipes/calculator --set engine.threads=4 --set phase.1.steps=20
  levade train recipes/calculator --store http://127.0.0.1:4747
  levade train recipes/calculator --resume
  levade train runs/calculator --resume --from 40 --set reward.scorer.tolerance=exact")]
pub struct Args {
    /// A TOML file, or a directory that contains recipe.toml (such as a run directory)
    recipe: PathBuf,

    /// Override a key of the recipe; list items by index, as in phase.1.steps=20; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,

    /// Resume the run in the run directory, from its newest checkpoint and its recorded attempts
    #[arg(long)]
    resume: bool,

    /// Go back to the checkpoint after STEP finished steps, or to the newest checkpoint before; the
    /// later steps are moved to another directory and repeated
    #[arg(long, value_name = "STEP", requires = "resume")]
    from: Option<u32>,

    /// Restart the run if its process fails, up to N times in a row, from its newest checkpoint and
    /// its recorded attempts
    #[arg(long, value_name = "N", default_value_t = 0)]
    restarts: u32,

    /// Run directory, instead of the recipe's run.folder (by default runs/NAME in the working
    /// directory)
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,

    /// Store of the run, instead of the recipe's run.store: the URL of a store server, such as
    /// http://127.0.0.1:4747 or http://127.0.0.1:4747/NAME, mongodb://HOST:PORT/PREFIX, sqlite:PATH
    /// or memory:
    #[arg(long, value_name = "URL")]
    store: Option<String>,
}

pub fn main(mut args: Args) -> anyhow::Result<ExitCode> {
    if let Some(store) = args.store.take() {
        args.overrides.push(format!("run.store={store}").parse()?);
    }
    let mut recipe = recipe::load_run(&args.recipe, &args.overrides, args.run.as_deref())?;
    let start = if args.resume { StartMode::Resume } else { StartMode::Fresh };
    LockedRunDir::check(&recipe.run, start)?;
    if let Some(step) = args.from {
        pin_models(&mut recipe)?;
        rewind_run(&recipe, step)?;
    }
    if args.restarts > 0 {
        if !recipe.run.store.is_durable() {
            let store = &recipe.run.store;
            return Err(unusable(format!(
                "--restarts {} needs a store that outlives the process, but `run.store` is \
                 \"{store}\"; leave out one of them",
                args.restarts
            )));
        }
        // The run can be resumed once the first process has written its recipe to the run
        // directory.
        return supervise::run_supervised(args.restarts, || {
            recipe.run.folder.join(RECIPE).exists()
        });
    }
    crate::create_runtime()?.block_on(train(args, recipe, start))
}

/// Resets the run to its newest checkpoint with at most `step` finished steps.
fn rewind_run(recipe: &Recipe, step: u32) -> anyhow::Result<()> {
    let RewindResult { step: found, superseded_steps, superseded } =
        crate::create_runtime()?.block_on(rewind(recipe, step))?;
    let nearest = if found == step {
        String::new()
    } else {
        format!(" (the newest checkpoint at or before step {step})")
    };
    eprintln!(
        "{} went back to step {found}{nearest}; the run with the {} after it is kept in {}",
        Style::stderr().dim("note:"),
        screen::plural(superseded_steps, "step"),
        screen::path(&superseded)
    );
    Ok(())
}

async fn train(args: Args, recipe: Recipe, start: StartMode) -> anyhow::Result<ExitCode> {
    let dim = |text| Style::stderr().dim(text);
    let dir = recipe.run.folder.clone();
    eprintln!("{} {}", dim("run   "), screen::path(&dir));
    if let Some(note) = recipe.numerics_note() {
        eprintln!("{} {note}", dim("note:"));
    }
    let mut run = levade_run::launch(recipe, start, host::create_supervisor()?)?;
    let interrupts = tokio::spawn(stop_on_signal(StopRequests::listen()?, run.stop_flag()));
    let mut watch = Watch::new(run.clock());
    let mut setup = SetupPrinter::default();
    let mut before_start = false;
    while let Some(event) = run.next().await {
        match &event {
            Event::Training(event) => watch.event(event),
            Event::StoppedBeforeStart => before_start = true,
            event => {
                watch.clear();
                setup.print_event(event);
            }
        }
    }
    watch.clear();
    let ended = run.end().await;
    interrupts.abort();
    let after = match ended? {
        Some(RunEnd::Finished(summary)) => {
            print_summary(&summary, &dir);
            return Ok(ExitCode::SUCCESS);
        }
        Some(RunEnd::Stopped { done, steps, .. }) => format!("after step {done} of {steps}"),
        None if before_start && !dir.join(RECIPE).exists() => {
            eprintln!("stopped before the run started; repeat the command to start it");
            return Ok(ExitCode::from(INTERRUPTED));
        }
        None if before_start => "before the first step".into(),
        None => "together with its learner".into(),
    };
    eprintln!("stopped {after}; resume with\n  {}", resume_command(&args));
    Ok(ExitCode::from(INTERRUPTED))
}

/// Waits for requests to stop. The first request stops the run at the next safe point, and the
/// second request ends the process.
async fn stop_on_signal(requests: StopRequests, stop: StopFlag) {
    requests
        .wait_for_second(|| {
            stop.stop();
            eprintln!(
                "\nstopping at the next safe point; Ctrl-C again stops at once (--resume \
                 continues from the last checkpoint)"
            );
        })
        .await;
    std::process::exit(INTERRUPTED.into());
}

/// Returns the command that resumes a run, quoted for a shell.
fn resume_command(args: &Args) -> String {
    let mut parts =
        vec![screen::program_name(), "train".into(), quoted(&args.recipe.to_string_lossy())];
    for change in &args.overrides {
        parts.push("--set".into());
        parts.push(quoted(&format!("{}={}", change.key(), change.value)));
    }
    if let Some(dir) = &args.run {
        parts.extend(["--run".into(), quoted(&dir.to_string_lossy())]);
    }
    parts.push("--resume".into());
    parts.join(" ")
}

fn print_summary(summary: &Summary, dir: &Path) {
    let style = Style::stdout();
    let evals = milestone_evals(&summary.evals);
    screen::print_line(&format!(
        "\n{}\n{}",
        table::format_table(&evals, style),
        table::format_gains(&summary.gains)
    ));
    for (source, times, first) in summary.warnings.iter() {
        let times = screen::plural(times as u32, "time");
        screen::print_line(&format!(
            "{} {source} failed {times}, first: {first}",
            style.dim("warning")
        ));
    }
    let steps = screen::plural(summary.steps, "step");
    let dir = screen::path(dir);
    screen::print_line(&format!("{steps}, {} in this process", screen::clock(summary.elapsed)));
    screen::print_line(&format!("run    {dir}"));
    if let Some(best) = &summary.best {
        screen::print_line(&format!(
            "best   {} ({})",
            screen::path(&best.checkpoint),
            table::format_best(best)
        ));
    }
    if let Some(checkpoint) = &summary.checkpoint {
        let program = screen::program_name();
        let dir = quoted(&dir);
        screen::print_line(&format!("model  {}", screen::path(checkpoint)));
        screen::print_line(&format!("\ntalk to it   {program} chat {dir}"));
        screen::print_line(&format!("look inside  {program} inspect {dir} --worst"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resume_command_is_quoted_for_a_shell() {
        let args = Args {
            recipe: "my recipes/a".into(),
            overrides: ["run.seed=2", "agent.system=it's"].map(|text| text.parse().unwrap()).into(),
            resume: false,
            from: Some(40),
            restarts: 0,
            run: Some("runs/b".into()),
            store: None,
        };
        let command = resume_command(&args);
        let tail = command.split_once(" train ").unwrap().1;
        assert_eq!(
            tail,
            r#"'my recipes/a' --set run.seed=2 --set 'agent.system="it'\''s"' --run runs/b --resume"#
        );
    }
}
