//! Checks that agent programs exist, start, and call the model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use levade_agent::program::DryRunResult;
use levade_agent::{Agent, AttemptContext, AttemptLimits, Player};
use levade_policy::{Sampler, SamplingParams};
use levade_recipe::{AgentKeys, AgentKind, Recipe};
use levade_run::policies::PlannedModels;
use levade_run::programs::{self, ProgramGateway};
use levade_tasks::Task;
use levade_text::Chat;

use super::report::CheckReport;
use super::scripted::ScriptedSampler;
use crate::failure::unusable;
use crate::host;

/// Timeout for the first model call of a program.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Time that a program has to exit by itself after its first answered model call. Afterwards, the
/// program is stopped.
const END_GRACE: Duration = Duration::from_secs(3);

/// Finds the programs of all agents. If `chats` is `Some`, also starts each program once.
pub async fn check_programs(
    recipe: &Recipe,
    planned: Option<&PlannedModels>,
    chats: Option<&[(String, Arc<Chat>)]>,
    task: &Task,
    report: &mut CheckReport,
) {
    for (name, keys) in recipe.agents() {
        let Some(program) = keys.command.first().filter(|_| keys.kind == AgentKind::Program) else {
            continue;
        };
        let Some(path) = report.report_failure_of("program", find_program(program, &keys.folder))
        else {
            continue;
        };
        let path = path.display();
        let (Some(planned), Some(chats)) = (planned, chats) else {
            report.pass("program", &format!("{name}: {path}"));
            continue;
        };
        if !chats.iter().any(|(agent_name, _)| agent_name == name) {
            report.pass(
                "program",
                &format!("{name}: {path}; not started, because its policy is external"),
            );
            continue;
        }
        match dry_run_program(recipe, planned, chats, (name, keys), task).await {
            Err(error) => {
                report.fail("program", &format!("{name}: {}", crate::failure::format_error(&error)))
            }
            Ok(rehearsal) => match judge_dry_run(&rehearsal) {
                ProgramVerdict::Working(text) => {
                    report.pass("program", &format!("{name}: {path}; {text}"))
                }
                ProgramVerdict::Unclear(text) => {
                    report.note("program", &format!("{name}: {path}; {text}"))
                }
                ProgramVerdict::Broken(text) => {
                    report.fail("program", &format!("{name}: {path} {text}"))
                }
            },
        }
    }
}

/// Finds the file of a program. A path is relative to `dir`, and a name is searched on the PATH.
///
/// # Errors
/// Returns an error if the file does not exist.
pub fn find_program(program: &str, dir: &Path) -> anyhow::Result<PathBuf> {
    let found = if program.contains('/') {
        Some(dir.join(program)).filter(|path| path.is_file())
    } else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).map(|dir| dir.join(program)).find(|path| path.is_file())
    };
    let missing =
        || format!("there is no program {program:?}, neither in {} nor on the PATH", dir.display());
    found.ok_or_else(|| unusable(missing()))
}

/// Verdict on a program after its dry run, with a text for the report.
enum ProgramVerdict {
    Working(String),
    Unclear(String),
    Broken(String),
}

fn judge_dry_run(rehearsal: &DryRunResult) -> ProgramVerdict {
    let DryRunResult { answered_calls: answered, rejected, code, printed } = rehearsal;
    let printed = match printed.as_str() {
        "" => "it printed nothing".to_owned(),
        text => format!("it printed:\n{text}"),
    };
    match (answered, code) {
        (1.., None | Some(0)) => ProgramVerdict::Working("it called the model".into()),
        // The program may be unable to continue after the scripted completion.
        (1.., Some(code)) => ProgramVerdict::Unclear(format!(
            "it called the model, and ended with code {code} after a scripted completion; {printed}"
        )),
        (0, _) if !rejected.is_empty() => ProgramVerdict::Unclear(format!(
            "all its calls failed; rejected: {}; {printed}",
            rejected.join(", ")
        )),
        (0, None) => ProgramVerdict::Unclear(format!(
            "it has not called the model within {START_TIMEOUT:?}; {printed}"
        )),
        (0, Some(0)) => ProgramVerdict::Broken(format!(
            "ended without calling the model: it must use OPENAI_BASE_URL or ANTHROPIC_BASE_URL, \
             and the key; {printed}"
        )),
        (0, Some(code)) => {
            let way_out =
                if printed.contains("ModuleNotFoundError") || printed.contains("Cannot find") {
                    "\ninstall the missing module where this program runs"
                } else {
                    ""
                };
            ProgramVerdict::Broken(format!(
                "ended with code {code} before it called the model; {printed}{way_out}"
            ))
        }
    }
}

/// Starts the program of an agent for a task, and answers each model call of the program with a
/// scripted completion.
async fn dry_run_program(
    recipe: &Recipe,
    planned: &PlannedModels,
    chats: &[(String, Arc<Chat>)],
    (name, keys): (&str, &AgentKeys),
    task: &Task,
) -> anyhow::Result<DryRunResult> {
    let context = planned.context();
    let mut agents = Vec::new();
    let mut samplers = BTreeMap::<String, Arc<dyn Sampler>>::new();
    let first = Arc::new(tokio::sync::Notify::new());
    for (other, keys) in recipe.agents() {
        let Some((_, chat)) = chats.iter().find(|(agent_name, _)| agent_name == other) else {
            continue;
        };
        let Some(policy) = recipe.policy_name(keys) else { continue };
        let scripted =
            || Arc::new(ScriptedSampler::new(chat, Arc::clone(&first))) as Arc<dyn Sampler>;
        let sampler = samplers.entry(policy.clone()).or_insert_with(scripted);
        let format = keys.format(Arc::clone(chat));
        let player = Player {
            context_policy: keys.context_policy(context),
            ..Player::new(&policy, Arc::clone(sampler), format, context)
        };
        let when = programs::create_call_pattern(other, keys)?;
        let agent = Agent { pattern: when, ..Agent::new(other, player, keys.limits()) };
        // The first agent must be that of the program.
        agents.insert(if other == name { 0 } else { agents.len() }, agent);
    }
    let limits = keys.limits();
    let limits =
        AttemptLimits { attempt_timeout: limits.attempt_timeout.min(START_TIMEOUT), ..limits };
    let program =
        ProgramGateway::start(host::create_supervisor()?, None).await?.program(keys, true);
    let context = AttemptContext {
        task: task.clone(),
        messages: keys.initial_messages(task),
        seed: recipe.run.seed,
        params: SamplingParams { max_tokens: context, ..SamplingParams::default() },
        limits,
        ..AttemptContext::new("check", agents)
    };
    let enough = async {
        first.notified().await;
        tokio::time::sleep(END_GRACE).await;
    };
    program.dry_run(context, enough).await.map_err(unusable)
}
