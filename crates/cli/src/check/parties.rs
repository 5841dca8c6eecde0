//! Checks that the rules of a game and simulated users in Python start.

use std::collections::BTreeSet;

use levade_agent::game::GameOptions;
use levade_agent::user::UserSpeaker;
use levade_game::Seat;
use levade_policy::SamplingParams;
use levade_recipe::Recipe;
use levade_run::policies::PlannedModels;
use levade_run::{Host, model, programs};
use levade_tasks::Task;
use levade_tools::ToolContext;
use levade_trainer::{Tasks, chat_options};
use levade_tree::DEFAULT;
use serde_json::json;

use super::report::CheckReport;
use crate::failure::unusable;

/// Key in `game.agents` of the agent that plays all seats without an entry.
const OTHER: &str = "other";

/// Starts a match of the recipe's game at a task, and drops the match before its first move. Checks
/// whether the system prompts of the policies fit their contexts.
pub async fn check_game(
    recipe: &Recipe,
    host: &Host,
    planned: Option<&PlannedModels>,
    task: &Task,
    report: &mut CheckReport,
) {
    let Some(Some(game)) = report.report_failure_of("game", programs::game_loop(recipe, host))
    else {
        return;
    };
    let started = game.dry_start(task).await.map_err(unusable);
    let name = &recipe.game.name;
    let Some(seats) = report.report_item("game", started, |seats| {
        let agent = |seat| game.options.find_agent_name(seat).unwrap_or_default();
        let played: Vec<String> =
            seats.iter().map(|seat| format!("{} is {}", seat.name, agent(seat))).collect();
        format!("{name}: {}", played.join(", "))
    }) else {
        return;
    };
    // The seats of a program's game may depend on the seed, so an unknown name is no fault.
    let known: BTreeSet<&str> = seats
        .iter()
        .flat_map(|seat| [&*seat.name, &*seat.role, &*seat.side])
        .chain([OTHER])
        .collect();
    for unknown in recipe.game.agents.keys().filter(|key| !known.contains(key.as_str())) {
        let known: Vec<&str> = known.iter().copied().collect();
        report.note(
            "game",
            &format!(
                "`game.agents.{unknown}` is no seat, role or side of the first match, which has {}",
                known.join(", ")
            ),
        );
    }
    if let Some(planned) = planned {
        report.report_failure_of("game", check_seats(recipe, planned, &game.options, &seats));
    }
}

/// Checks whether the fixed messages of each policy in each seat fit the policy's context. The
/// messages include the policy's own `system` and `format`.
///
/// # Errors
/// Returns an error that names the seat and the policy whose messages do not fit.
fn check_seats(
    recipe: &Recipe,
    planned: &PlannedModels,
    options: &GameOptions,
    seats: &[Seat],
) -> anyhow::Result<()> {
    for seat in seats {
        let agent = options.find_agent_name(seat).map_err(unusable)?;
        let Some(keys) = recipe.agent_named(agent) else { continue };
        for policy in recipe.policy_names(keys) {
            let weights = recipe.weight_source(&policy);
            // The context of an external policy is not known.
            let found = planned.policy_files(weights).zip(planned.policy_context(weights));
            let Some((files, context)) = found else { continue };
            let chat = model::chat(files, chat_options(keys, None))?;
            let messages = options.fixed_messages(agent, &policy, seat);
            let tokens = chat.prompt(&messages, &[])?.len();
            if tokens >= context {
                return Err(unusable(format!(
                    "the prompt of the policy {policy} in the seat {} of the agent {agent} has \
                     {tokens} tokens before the first event, but the context is {context}: shorten \
                     `system` or `format` of the policy or the agent, or raise `model.context`",
                    seat.name
                )));
            }
        }
    }
    Ok(())
}

/// Opens each simulated user in Python once, at the first task whose agent talks to this user. A
/// user that opens conversations writes its first message. A user that a model plays is not called,
/// but the task must contain the user's instruction.
pub async fn check_users(recipe: &Recipe, host: &Host, tasks: &Tasks, report: &mut CheckReport) {
    let names: BTreeSet<&str> =
        recipe.agents().into_iter().map(|(_, keys)| keys.user.as_str()).collect();
    for name in names {
        let Some(user) = programs::simulated_user(recipe, name, host) else { continue };
        let talks = |task: &Task| {
            let agent = recipe.agent_named(task.agent.as_deref().unwrap_or(DEFAULT));
            agent.is_some_and(|keys| keys.user == name)
        };
        let Some(task) = tasks.all().find(talks) else {
            report.note("user", &format!("{name}: not started, because no task has its agent"));
            continue;
        };
        let users = match &user.speaker {
            UserSpeaker::Python(users) => users,
            UserSpeaker::Agent(keys) => {
                let found = keys.find_instruction(&task);
                let found = found.map_err(|why| {
                    unusable(format!("{name}: {why}; set user.{name}.instruction to the field"))
                });
                report.report_item("user", found, |_| format!("{name}: played by {}", keys.agent));
                continue;
            }
        };
        let context = ToolContext {
            attempt: "check".to_owned(),
            task,
            seed: recipe.run.seed,
            stream: 0,
            deadline: user.timeout,
            params: SamplingParams::default(),
        };
        let opening = async {
            let opened = users.open(&context, user.opens).await?;
            if !user.opens {
                return Ok::<_, String>("started".to_owned());
            }
            let text = opened.respond_to(json!([])).await?.text.unwrap_or_default();
            if text.is_empty() {
                return Err("the user wrote no first message; set opens = false".to_owned());
            }
            let start: String = text.chars().take(60).collect::<String>().replace('\n', " ");
            Ok(format!("its first message is {start:?}"))
        };
        let late = |_| Err(format!("the user was not ready within {:?}", user.timeout));
        let opened = tokio::time::timeout(user.timeout, opening).await.unwrap_or_else(late);
        let opened = opened.map_err(|why: String| unusable(format!("{name}: {why}")));
        report.report_item("user", opened, |what| format!("{name}: {what}"));
    }
}
