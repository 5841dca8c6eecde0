//! Implements `levade check`, which finds in seconds what would fail in a run of a recipe.
//!
//! The command trains nothing and leaves no files. It opens models without loading them, starts
//! tools, calls those without side effects, and calls each scorer once. An agent program is started
//! once, against a scripted completion.

mod example;
mod measure;
mod parties;
mod programs;
mod report;
mod resources;
mod scripted;
mod tools;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use levade_agent::environments::Environments;
use levade_policy::{Sampler, Simulator, SimulatorConfig};
use levade_recipe::{Override, Recipe};
use levade_run::dir::RECIPE;
use levade_run::policies::PlannedModels;
use levade_run::{external, model, scorers};
use levade_tasks::Task;
use levade_text::Chat;
use levade_trainer::{
    AgentSpec, Agents, DryRunScore, Scorers, Tasks, Toolboxes, chat_options, check_phases,
    check_tasks, dry_run,
};
use levade_tree::Component;

use crate::{host, recipe};
use report::CheckReport;

/// Find what would fail in a run of a recipe, without training
///
/// Prints one line for each item that the run needs: the recipe itself, its tasks, models, tools,
/// scorers, memory and disk. A model that is not on this machine is fetched, as in training. Tools
/// without side effects (calculator, sandbox, search) are called once, and the other tools are
/// started only. An agent program is started once, for one task, until it has called the model,
/// which returns a scripted completion. A game is started for one match without a move, and a
/// simulated user in Python until its first message. The exit code is 2 if an item would fail.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade check recipes/calculator
  levade check recipes/calculator --measure
  levade check my/recipe.toml --call --set engine.memory_mb=4000")]
pub struct Args {
    /// A TOML file, or a directory that contains recipe.toml
    recipe: PathBuf,

    /// Override a key of the recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,

    /// Call all tools, including those with side effects, once each, with arguments generated from
    /// their schemas
    #[arg(long)]
    call: bool,

    /// Do not start agent programs, games and simulated users; only check that agent programs
    /// exist
    #[arg(long)]
    no_start: bool,

    /// Estimate the time of a step: load the models and run a step of one group in a temporary
    /// directory
    #[arg(long)]
    measure: bool,
}

pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let mut report = CheckReport::default();
    let loaded = recipe::load(&args.recipe, &args.overrides);
    if let Some(recipe) = report.report_item("recipe", loaded, describe_recipe) {
        crate::create_runtime()?.block_on(check_recipe(args, &recipe, &mut report))?;
    }
    Ok(report.print_failure_count())
}

fn describe_recipe(recipe: &Recipe) -> String {
    let steps: Vec<String> = recipe.phase.iter().map(|phase| phase.name().to_owned()).collect();
    let agents: Vec<&str> = recipe.agents().into_iter().map(|(name, _)| name).collect();
    let phases = if steps.is_empty() { "no phases".to_owned() } else { steps.join(", ") };
    format!("{}: {phases}; agents {}", recipe.run.name, agents.join(", "))
}

async fn check_recipe(
    args: &Args,
    recipe: &Recipe,
    report: &mut CheckReport,
) -> anyhow::Result<()> {
    check_run_dir(recipe, report);
    let host = host::create_host()?;
    let environments = Environments::new(recipe.environments(), host.supervisor());
    let tasks = Tasks::load(recipe, &environments).await;
    let tasks = report.report_item("tasks", tasks, |tasks| {
        let num_tasks: usize = tasks.eval.iter().map(|slice| slice.tasks.len()).sum();
        format!("{} to train on, {num_tasks} to evaluate on", tasks.train_len())
    });
    for note in tasks.iter().flat_map(|tasks| &tasks.notes) {
        report.note("tasks", note);
    }
    let first = tasks.as_ref().and_then(find_first_task);
    // Programs, games and users may need the row of a task.
    let has_task = first.is_some();
    let first = first.unwrap_or_default();
    report.report_failure_of("policies", external::create_external_apis(recipe));
    let planned = report.report_failure_of("model", PlannedModels::open(recipe, &host));
    let chats = planned.as_ref().map(|planned| open_chats(recipe, planned, report));
    let start = chats.as_deref().filter(|_| !args.no_start && has_task);
    programs::check_programs(recipe, planned.as_ref(), start, &first, report).await;
    if let Some(tasks) = tasks.as_ref().filter(|_| has_task && !args.no_start) {
        parties::check_game(recipe, &host, planned.as_ref(), &first, report).await;
        parties::check_users(recipe, &host, tasks, report).await;
    }
    let toolboxes = Toolboxes::new(&recipe.tool, host.supervisor().clone());
    let mut parts = Vec::new();
    for (name, chat) in chats.unwrap_or_default() {
        let Some(keys) = recipe.agent_named(&name) else { continue };
        let toolboxes = &toolboxes;
        let task = &first;
        let call = args.call;
        let trial = tools::ToolTrial { recipe, toolboxes, keys, chat: &chat, task, call };
        if let Some(tools) = tools::check_tools(&trial, report).await {
            parts.push(AgentSpec::new(&name, chat, tools));
        }
    }
    for note in scorers::safety_warnings(&recipe.reward) {
        report.note("scorer", note);
    }
    let made = scorers::custom_scorers(&recipe.reward, &environments, &host);
    let scorers =
        report.report_failure_of("scorers", made).map(|made| Scorers::new(&recipe.reward, made));
    if let (Some(scorers), Some(tasks)) = (&scorers, &tasks) {
        check_scorers(scorers, tasks, report).await;
        let needed =
            recipe.agents().iter().filter(|(_, keys)| !recipe.may_be_external(keys)).count();
        if let Some(planned) = planned.as_ref().filter(|_| parts.len() == needed) {
            check_prompts(recipe, planned, &parts, scorers, tasks, report).await;
        }
    }
    if let Some(planned) = &planned {
        resources::check_resources(recipe, planned, report);
    }
    if args.measure && !report.has_failures() {
        measure::check_step_time(recipe, environments, &host, report).await;
    }
    Ok(())
}

/// Returns the first training task. If there is no training task, returns the first held-out task.
fn find_first_task(tasks: &Tasks) -> Option<Task> {
    let held_out = || tasks.eval.iter().find_map(|slice| slice.tasks.first().cloned());
    tasks.train(0).or_else(held_out)
}

/// Checks whether the run directory can be written and contains no run yet.
fn check_run_dir(recipe: &Recipe, report: &mut CheckReport) {
    let dir = &recipe.run.folder;
    if dir.join(RECIPE).exists() {
        let shown = crate::screen::path(dir);
        report.note(
            "folder",
            &format!(
                "{shown} contains a run: resume it with `train --resume`, or set another --run"
            ),
        );
        return;
    }
    let existing_dir = resources::find_nearest_existing(dir).unwrap_or(Path::new("/"));
    let written = tempfile::tempfile_in(existing_dir).map_err(|error| {
        anyhow::anyhow!(
            "the directory {} cannot be written: {error}; set run.folder to another directory",
            existing_dir.display()
        )
    });
    report.report_item("folder", written, |_| crate::screen::path(dir));
}

/// Opens the chat formats of all agents whose policy is sampled in this process, and reports the
/// models.
fn open_chats(
    recipe: &Recipe,
    planned: &PlannedModels,
    report: &mut CheckReport,
) -> Vec<(String, Arc<Chat>)> {
    for (source, what) in planned.describe_models() {
        report.pass("model", &format!("{source}: {what}"));
    }
    let mut chats = Vec::new();
    for (name, keys) in recipe.agents() {
        let Some(policy) = recipe.policy_name(keys).filter(|_| !recipe.may_be_external(keys))
        else {
            continue;
        };
        let Some(files) = planned.policy_files(&policy) else { continue };
        if let Some(chat) =
            report.report_failure_of("chat", model::chat(files, chat_options(keys, None)))
        {
            chats.push((name.to_owned(), Arc::new(chat)));
        }
    }
    chats
}

/// Calls every scorer once. The scored attempt is artificial: its completion is the expected answer
/// of its task.
async fn check_scorers(scorers: &Scorers, tasks: &Tasks, report: &mut CheckReport) {
    for DryRunScore { scorer, result: gave } in dry_run(scorers, tasks).await {
        match gave {
            None => report.note(
                "scorer",
                &format!("{scorer}: not called, because it scores no task without a real attempt"),
            ),
            Some(Err(error)) => report.fail("scorer", &format!("{scorer}: {error}")),
            Some(Ok(components)) => {
                let part = |part: &Component| format!("{} {}", part.name, part.value);
                let is_nothing = components.first().is_none_or(|score| score.value <= 0.0);
                let components = components.iter().map(part).collect::<Vec<_>>().join(", ");
                match is_nothing {
                    false => report
                        .pass("scorer", &format!("returned {components} for an expected answer")),
                    // The scorer may look for the answer in a tag or in a code block.
                    true => report.note(
                        "scorer",
                        &format!(
                            "returned {components} for a completion that is only the expected \
                             answer: fine if the scorer looks for more than that"
                        ),
                    ),
                }
            }
        }
    }
}

/// Checks all tasks as training does: whether their prompts fit the context, whether they can be
/// scored, and whether each phase has the tasks that it trains on.
async fn check_prompts(
    recipe: &Recipe,
    planned: &PlannedModels,
    parts: &[AgentSpec],
    scorers: &Scorers,
    tasks: &Tasks,
    report: &mut CheckReport,
) {
    let context = planned.context();
    // The checks sample no tokens, so the sampler is a stand-in.
    let sampler: Arc<dyn Sampler> = Arc::new(Simulator::new(SimulatorConfig::default()));
    let Some(agents) =
        report.report_failure_of("agents", Agents::with_sampler(recipe, parts, &sampler, context))
    else {
        return;
    };
    let looked = check_tasks(recipe, scorers, tasks, &agents).await;
    let fit =
        report.report_item("prompts", looked, |()| format!("fit the context of {context} tokens"));
    if fit.is_some() {
        report.report_failure_of("phases", check_phases(recipe, tasks, &agents));
    }
}
