//! Implements `levade tools`, which lists the tools of a recipe's agents and calls a single one.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use levade_policy::SamplingParams;
use levade_process::Supervisor;
use levade_recipe::Override;
use levade_run::model;
use levade_tasks::Task;
use levade_text::{ParsedCompletion, ToolCall};
use levade_tools::{ObservationKind, OpenTools, ToolContext};
use levade_trainer::{Toolboxes, chat_options};
use serde_json::{Map, Value};

use crate::failure::unusable;
use crate::screen::{self, Style};
use crate::{host, recipe};

/// List the tools that a recipe's agents have, or call one
///
/// Toolboxes are opened as for an attempt, so a toolbox that cannot start is reported here. The
/// tool result is printed as the model reads it. The exit code is 1 if the result is an error.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade tools recipes/calculator
  levade tools recipes/calculator --call calculator --arguments '{\"expression\": \"6 * 7\"}'")]
pub struct Args {
    /// A TOML file, or a directory that contains recipe.toml
    recipe: PathBuf,

    /// Agent that has the tools [default: the recipe's first agent]
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,

    /// Call the tool with this name
    #[arg(long, value_name = "TOOL")]
    call: Option<String>,

    /// Arguments of the call, as a JSON object
    #[arg(long, value_name = "JSON", default_value = "{}", requires = "call")]
    arguments: String,

    /// Row of a task, as a JSON object, for tools that need its fields
    #[arg(long, value_name = "JSON", default_value = "{}")]
    row: String,

    /// Override a key of the recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,
}

pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let arguments = parse_object("--arguments", &args.arguments)?;
    let row = parse_object("--row", &args.row)?;
    crate::create_runtime()?.block_on(show_tools(args, arguments, row))
}

/// Parses the value of the command-line option `option` as a JSON object.
fn parse_object(option: &str, text: &str) -> anyhow::Result<Map<String, Value>> {
    serde_json::from_str(text)
        .map_err(|error| unusable(format!("{option} {text:?} is not a JSON object: {error}")))
}

async fn show_tools(
    args: &Args,
    arguments: Map<String, Value>,
    row: Map<String, Value>,
) -> anyhow::Result<ExitCode> {
    let recipe = recipe::load(&args.recipe, &args.overrides)?;
    let agents = recipe.agents();
    let found = args
        .agent
        .as_ref()
        .map_or(agents.first(), |name| agents.iter().find(|(agent, _)| *agent == name.as_str()))
        .copied();
    let (_, keys) = found.ok_or_else(|| {
        let names: Vec<&str> = agents.iter().map(|(name, _)| &**name).collect();
        let wanted = args.agent.as_deref().unwrap_or_default();
        unusable(format!("the recipe has no agent {wanted:?}; it has {}", names.join(", ")))
    })?;
    let found =
        model::open(&recipe.model.source, recipe.model.base.as_deref(), &host::create_host()?)?;
    let chat = Arc::new(model::chat(&found.files, chat_options(keys, None))?);
    let tools = Toolboxes::new(&recipe.tool, Supervisor::from_current_exe()?)
        .tools_for(keys, Some(&chat))?;
    let started_at = Instant::now();
    let context = ToolContext {
        attempt: "tools".to_owned(),
        task: Task { row: row.into(), ..Task::default() },
        seed: recipe.run.seed,
        stream: 0,
        deadline: Duration::MAX,
        params: SamplingParams::default(),
    };
    let mut tools = tools.open(&context).await?;
    let style = Style::stderr();
    eprintln!("{} {} in {:.2?}", style.dim("opened"), tools.specs().len(), started_at.elapsed());
    let code = match &args.call {
        None => {
            for spec in tools.specs() {
                screen::print_line(
                    &serde_json::to_string(spec).context("a tool cannot be written as JSON")?,
                );
            }
            ExitCode::SUCCESS
        }
        Some(name) => call_tool(&mut tools, name, arguments).await,
    };
    tools.close().await?;
    Ok(code)
}

/// Calls a tool and prints its result. Returns exit code 1 if the result is an error.
async fn call_tool(tools: &mut OpenTools, name: &str, arguments: Map<String, Value>) -> ExitCode {
    let call = ToolCall { id: String::new(), name: name.to_owned(), arguments: arguments.into() };
    let started_at = Instant::now();
    let observations = tools
        .execute_calls(
            &ParsedCompletion { calls: vec![Ok(call)], ..ParsedCompletion::default() },
            true,
        )
        .await;
    let style = Style::stderr();
    for observation in &observations {
        eprintln!("{} {:?} in {:.2?}", style.dim("result"), observation.kind, started_at.elapsed());
        screen::print_line(&observation.text);
    }
    let is_ok = observations.iter().all(|observation| observation.kind == ObservationKind::Ok);
    if is_ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
