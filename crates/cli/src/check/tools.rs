//! Checks that the toolboxes of agents start, and that their tools can be called.

use std::sync::Arc;
use std::time::Duration;

use levade_policy::SamplingParams;
use levade_recipe::{AgentKeys, Recipe, ToolKeys};
use levade_tasks::Task;
use levade_text::{Chat, ParsedCompletion, ToolCall, ToolSpec};
use levade_tools::{
    Observation, ObservationKind, OpenTools, ToolContext, ToolKind, ToolSet, tool_names,
};
use levade_trainer::Toolboxes;
use serde_json::{Map, Value, json};

use super::report::CheckReport;
use super::{example, programs};

/// Inputs that are needed to open the toolboxes of an agent and to call their tools.
pub struct ToolTrial<'a> {
    pub recipe: &'a Recipe,
    pub toolboxes: &'a Toolboxes,
    pub keys: &'a AgentKeys,
    pub chat: &'a Arc<Chat>,
    pub task: &'a Task,
    /// Whether tools are also called if their calls can have side effects.
    pub call: bool,
}

/// Starts each toolbox of an agent once. Calls the tools without side effects, or all tools if
/// `trial.call` is set. Returns the tool set, which keeps the tool specifications and does not
/// start the toolboxes again. Returns `None` if a toolbox does not work.
pub async fn check_tools(trial: &ToolTrial<'_>, report: &mut CheckReport) -> Option<ToolSet> {
    let ToolTrial { recipe, toolboxes, keys, chat, .. } = trial;
    let mut found = Vec::new();
    let mut all_work = true;
    for name in &keys.tools {
        let Some(tool) = ToolKeys::find(&recipe.tool, name) else { continue };
        let checked = check_toolbox(trial, &tool).await;
        let checked = checked.map_err(|error| with_tool_name(name, trial.task, error));
        let checked = report
            .report_item("tool", checked, |(description, _)| format!("{name}: {description}"));
        match checked {
            Some((_, specs)) => found.push((tool.name().to_owned(), specs)),
            None => all_work = false,
        }
    }
    let made = all_work.then(|| toolboxes.tools_for(keys, Some(chat)))?;
    let set = report.report_failure_of("tools", made)?;
    report.report_failure_of("tools", set.set_known_tools(&found)).map(|()| set)
}

fn with_tool_name(name: &str, task: &Task, error: anyhow::Error) -> anyhow::Error {
    // The default task stands for tasks that cannot be read.
    let hint = if task.id.is_empty() { "\nit was opened without a task" } else { "" };
    crate::failure::unusable(format!("{name}: {}{hint}", crate::failure::format_error(&error)))
}

/// Starts a toolbox, and calls its tools if this is permitted. Returns a description of the
/// outcome, and the specifications of the tools.
async fn check_toolbox(
    trial: &ToolTrial<'_>,
    tool: &ToolKeys,
) -> anyhow::Result<(String, Vec<ToolSpec>)> {
    let ToolTrial { recipe, toolboxes, keys, chat, task, call } = *trial;
    if let ToolKind::Command(keys) = &tool.options
        && let Some(program) = keys.command.first()
    {
        let dir_exists = keys.dir.as_os_str().is_empty() || keys.dir.is_dir();
        anyhow::ensure!(
            dir_exists,
            "there is no directory {}, in which it runs",
            keys.dir.display()
        );
        programs::find_program(program, &keys.dir)?;
    }
    let single_tool_keys = AgentKeys { tools: vec![tool.name().to_owned()], ..keys.clone() };
    let set = toolboxes.tools_for(&single_tool_keys, Some(chat))?;
    let context = ToolContext {
        attempt: "check".to_owned(),
        task: task.clone().selecting_no_tools(),
        seed: recipe.run.seed,
        stream: 0,
        deadline: Duration::from_secs_f64(keys.attempt_seconds),
        params: SamplingParams::default(),
    };
    let mut tools = set.open(&context).await?;
    let specs = tools.specs().to_vec();
    let names = tool_names(&specs);
    let harmless = !tool.options.has_effects();
    let mut description = match (&tool.options, harmless || call) {
        (ToolKind::Agent(keys), _) => format!("calls the agent {}", keys.agent),
        (_, true) => call_tools(&mut tools, &specs, task, harmless).await?,
        (_, false) => {
            "not called, because a call may have side effects (--call calls it)".to_owned()
        }
    };
    tools.close().await?;
    if specs.is_empty() {
        description = "it has no tools".to_owned();
    }
    Ok((format!("{names}; {description}"), specs))
}

/// Calls each tool once, and describes the results. If the tool is not `harmless`, an error result
/// is accepted, because the arguments are generated. A timeout and a failure of the toolbox itself
/// are never accepted.
///
/// # Errors
/// Returns an error if a tool does not work.
async fn call_tools(
    tools: &mut OpenTools,
    specs: &[ToolSpec],
    task: &Task,
    harmless: bool,
) -> anyhow::Result<String> {
    let mut descriptions = Vec::new();
    for spec in specs {
        let arguments = create_call_arguments(spec, task);
        let call =
            ToolCall { id: String::new(), name: spec.name.clone(), arguments: arguments.into() };
        let observations = tools
            .execute_calls(
                &ParsedCompletion { calls: vec![Ok(call)], ..ParsedCompletion::default() },
                true,
            )
            .await;
        for Observation { text, kind, failure, .. } in observations {
            let short: String = text.chars().take(60).collect::<String>().replace('\n', " ");
            let works = kind == ObservationKind::Ok
                || (!harmless && failure.is_none() && kind != ObservationKind::Timeout);
            anyhow::ensure!(works, "a call of {} returned: {text}", spec.name);
            descriptions.push(format!("{} returned {short:?}", spec.name));
        }
    }
    Ok(descriptions.join(", "))
}

/// Returns arguments for a simple call of a tool. They come from the task or from the tool's
/// schema.
fn create_call_arguments(spec: &ToolSpec, task: &Task) -> Map<String, Value> {
    let question = if task.question.is_empty() { "test" } else { &task.question };
    let mut arguments = example::generate_arguments(&spec.parameters, question);
    for (name, value) in [("code", json!("print(6 * 7)")), ("expression", json!("6 * 7"))] {
        if let Some(argument) = arguments.get_mut(name) {
            *argument = value;
        }
    }
    arguments
}
