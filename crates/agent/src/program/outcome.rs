//! Creates attempts from the end of a program and the calls that were recorded.

use std::collections::BTreeMap;

use levade_call::{CallRecord, Recording};
use levade_conversation::{Fork, Origin};
use levade_gateway::Reward;
use levade_policy::FinishReason;
use levade_process::{RunOutput, Tail, explaining_lines};
use levade_tree::{Finish, Outcome};
use serde_json::{Value, json};

use super::Program;
use crate::recorded_calls::to_context_truncation;
use crate::{Attempt, AttemptLimits};

/// Key of the program's entry in an attempt's scorer input.
const SCORER_INPUT_KEY: &str = "program";

/// Creates the attempt that a program has made, from the program's output and its recorded calls.
pub(super) fn create_attempt(
    program: &Program,
    limits: &AttemptLimits,
    ended: Result<RunOutput, String>,
    (recorded, rewards): (Recording, Vec<Reward>),
) -> Attempt {
    let mut outcome = create_recorded_outcome(&recorded);
    let calls = agent_turns(&recorded);
    let name = program.command.first().map_or("", String::as_str);
    let mut printed = None;
    match ended {
        Err(why) => set_failed(&mut outcome, name, why),
        Ok(RunOutput { code, stdout, stderr }) => {
            printed = stdout.last_line();
            match code {
                Some(0) => outcome.finish = Finish::Answered,
                None => {
                    outcome.finish = Finish::Deadline;
                    let attempt_timeout = limits.attempt_timeout;
                    outcome.add_warning(
                        name,
                        format!("was not done within {attempt_timeout:?}, and was stopped"),
                    );
                }
                Some(code) => match find_rejection_finish(&recorded, limits, &calls) {
                    Some(finish) => outcome.finish = finish,
                    None => {
                        let last = stderr
                            .last_line()
                            .unwrap_or_else(|| "nothing on standard error".into());
                        set_failed(
                            &mut outcome,
                            name,
                            format!("ended with {code}: {}", shorten_text(&last)),
                        );
                    }
                },
            }
            if recorded.calls.is_empty() && outcome.error.is_none() {
                set_failed(
                    &mut outcome,
                    name,
                    explain_missing_calls(&recorded.rejected, &stdout, &stderr),
                );
            }
            if outcome.finish.is_complete() {
                let last_text = || find_last_content(&recorded);
                outcome.final_text =
                    parse_answer(printed.as_deref()).or_else(last_text).unwrap_or_default();
            }
        }
    }
    add_scorer_input(&mut outcome, name, &recorded, &rewards, printed);
    Attempt::new(recorded.trajectory, outcome)
}

/// Returns the recorded calls that are turns of the agent. Calls that write summaries are left out.
pub(crate) fn agent_turns(recorded: &Recording) -> Vec<&CallRecord> {
    recorded.calls.iter().filter(|call| !call.summary).collect()
}

/// Creates an outcome with the measurements of recorded calls. The caller sets the finish of the
/// outcome.
pub(crate) fn create_recorded_outcome(recorded: &Recording) -> Outcome {
    let mut outcome = Outcome::initial();
    let calls = agent_turns(recorded);
    outcome.turns = calls.iter().filter(|call| call.turn.is_some()).count() as u32;
    outcome.context_truncations = recorded.calls.iter().filter_map(to_context_truncation).collect();
    let own = calls.iter().filter(|call| !call.external);
    outcome.sampled_tokens = own.map(|call| call.tokens).sum();
    outcome.drift.clone_from(&recorded.drift);
    outcome.timings = recorded.timings();
    if let Some(error) = &recorded.comparison_error {
        outcome.add_warning("chat template", error.as_str());
    }
    // A program executes the tool calls of a completion before it requests the next one.
    let requested = calls.split_last().map_or(&[][..], |(_, earlier)| earlier);
    outcome.calls.ok = requested.iter().map(|call| call.calls as u32).sum();
    outcome
}

/// Returns the content of the last recorded completion that has any, or `None` if none has content.
pub(crate) fn find_last_content(recorded: &Recording) -> Option<String> {
    let last = agent_turns(recorded).into_iter().rfind(|call| !call.content.is_empty());
    last.map(|call| call.content.clone())
}

/// Adds recorded calls and rewards to the scorer input of an outcome. `printed` is the last line of
/// a program's output. `source` names the agent in warnings.
pub(crate) fn add_scorer_input(
    outcome: &mut Outcome,
    source: &str,
    recorded: &Recording,
    rewards: &[Reward],
    printed: Option<String>,
) {
    for call in recorded.calls.iter().filter_map(|call| Some((call, call.error.as_ref()?))) {
        outcome.add_warning(format!("call of {}", call.0.agent), call.1.clone());
    }
    let rewards: Vec<Value> =
        rewards.iter().filter_map(|reward| serde_json::to_value(reward).ok()).collect();
    let mut scorer_input = json!({
        "calls": recorded.calls.iter().map(call_to_json).collect::<Vec<_>>(),
        "rewards": rewards,
        "last_line": printed,
        "overridden": recorded.overridden,
        "refused": recorded.rejected,
        "forks": recorded.counts,
    });
    // External calls are recorded as messages, because their token ids have no meaning here.
    if let (false, Ok(external)) =
        (recorded.external.is_empty(), serde_json::to_value(&recorded.external))
    {
        match levade_tools::depth_error(&external) {
            Some(why) => outcome.add_warning(
                source,
                format!("messages of external models are not recorded: {why}"),
            ),
            None => scorer_input["external"] = external,
        }
    }
    outcome.scorer_inputs.insert(SCORER_INPUT_KEY.into(), scorer_input);
}

/// Explains why a program without answered model calls makes no attempt, and quotes the last lines
/// of the program's output. Many programs report a wrong configuration and exit with 0.
fn explain_missing_calls(rejected: &BTreeMap<String, u32>, stdout: &Tail, stderr: &Tail) -> String {
    let why = if rejected.is_empty() {
        "never called the model; the program must use OPENAI_BASE_URL or ANTHROPIC_BASE_URL, \
             and the key"
            .into()
    } else {
        format!("had all its calls rejected, by reason: {rejected:?}")
    };
    let streams = [("standard error", stderr), ("standard output", stdout)];
    let written: Vec<String> = streams
        .into_iter()
        .map(|(name, tail)| (name, explaining_lines(&tail.text())))
        .filter(|(_, lines)| !lines.is_empty())
        .map(|(name, lines)| format!("its {name} ends with\n{}", lines.join("\n")))
        .collect();
    if written.is_empty() {
        format!("{why}; the program wrote no output")
    } else {
        format!("{why}; {}", written.join("\n"))
    }
}

/// Returns the entry of a model call in the scorer input: its agent, its model, the origin of its
/// prompt, and its end.
fn call_to_json(call: &CallRecord) -> Value {
    let origin = match call.origin {
        None if call.external => "in messages".to_owned(),
        None => "in ids".to_owned(),
        Some(Origin::Started) if call.probe => {
            "began: a probe without tools, not trained (to train such calls, give them an agent \
             with match)"
                .to_owned()
        }
        Some(Origin::Started) => "began".to_owned(),
        Some(Origin::Continued) => "continued".to_owned(),
        Some(Origin::Forked(Fork { at, reason })) => {
            format!("forked at message {at}: {}", reason.description())
        }
    };
    json!({
        "agent": call.agent,
        "model": call.model,
        "turn": call.turn,
        "history": origin,
        "prompt_tokens": call.prompt,
        "tokens": call.tokens,
        "finish": call.finish,
        "fault": call.error,
    })
}

fn set_failed(outcome: &mut Outcome, source: &str, why: String) {
    outcome.add_warning(source, why.clone());
    outcome.error = Some(format!("{source} {why}"));
    outcome.finish = Finish::Failed;
}

/// Returns the finish of an attempt whose agent failed after the gateway had rejected a call
/// because of a limit. Most agents fail after such a rejection, but the recipe's limit is a regular
/// end of an attempt. Returns `None` if no limit rejected a call. `calls` are the agent's calls
/// without summaries.
pub(crate) fn find_rejection_finish(
    recorded: &Recording,
    limits: &AttemptLimits,
    calls: &[&CallRecord],
) -> Option<Finish> {
    let is_rejected = |kind: &str| recorded.rejected.contains_key(kind);
    if is_rejected("limit") {
        return Some(find_limit_finish(limits, calls));
    }
    is_rejected("too_long").then_some(Finish::Context)
}

/// Returns the finish for the limit that made the gateway reject calls of a program.
fn find_limit_finish(limits: &AttemptLimits, calls: &[&CallRecord]) -> Finish {
    let last_finish = calls.last().map(|call| call.finish);
    if matches!(last_finish, Some(FinishReason::Length)) || calls.len() < limits.max_turns as usize
    {
        Finish::MaxTokens
    } else {
        Finish::MaxTurns
    }
}

/// Parses the final answer from the last line that a program printed: the field `answer` of a JSON
/// object, or the line itself. A JSON object with a reward but without an answer contains no final
/// answer.
fn parse_answer(line: Option<&str>) -> Option<String> {
    let line = line?;
    match serde_json::from_str::<Value>(line) {
        Ok(Value::Object(map))
            if ["answer", "attempt", "reward"].iter().any(|key| map.contains_key(*key)) =>
        {
            match map.get("answer")? {
                Value::String(text) => Some(text.clone()),
                other => Some(other.to_string()),
            }
        }
        _ => Some(line.to_owned()),
    }
}

fn shorten_text(text: &str) -> String {
    const MAX_EXCERPT_CHARS: usize = 300;
    match text.char_indices().nth(MAX_EXCERPT_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use levade_gateway::{Gateway, GatewayOptions};

    use super::*;
    use crate::testing::call_record;

    const LIMITS: AttemptLimits = AttemptLimits {
        max_turns: 8,
        max_tokens: 100,
        completion_timeout: Duration::from_secs(60),
        attempt_timeout: Duration::from_secs(60),
    };

    fn program() -> Program {
        Program {
            command: vec!["solve".into()],
            dir: PathBuf::new(),
            passes: Vec::new(),
            supervisor: Default::default(),
            gateway: Gateway::new(Vec::new(), GatewayOptions::default()),
            address: String::new(),
            rewards: false,
            has_seats: false,
            workers: None,
        }
    }

    fn call(turn: u32, summary: bool, content: &str) -> CallRecord {
        CallRecord { content: content.into(), ..call_record(turn, summary) }
    }

    #[test]
    fn summaries_do_not_count_as_turns() {
        let ended = RunOutput { code: Some(0), stdout: Tail::default(), stderr: Tail::default() };
        let calls = vec![call(0, false, "4?"), call(1, true, "so far: 4?"), call(2, false, "5")];
        let recorded = Recording { calls, ..Recording::default() };
        let outcome =
            create_attempt(&program(), &LIMITS, Ok(ended), (recorded, Vec::new())).outcome;
        assert_eq!((outcome.finish, outcome.error.as_deref()), (Finish::Answered, None));
        assert_eq!((outcome.turns, outcome.sampled_tokens, outcome.calls.ok), (2, 14, 1));
        assert_eq!(outcome.final_text, "5");
    }

    #[test]
    fn attempt_without_calls_fails_with_first_reason() {
        for (code, why) in
            [(0, "solve never called the model"), (3, "solve ended with 3: no such task")]
        {
            let stderr = Tail::from("no such task");
            let ended = RunOutput { code: Some(code), stdout: Tail::default(), stderr };
            let outcome =
                create_attempt(&program(), &LIMITS, Ok(ended), (Recording::default(), Vec::new()))
                    .outcome;
            let error = outcome.error.unwrap();
            assert!(outcome.finish == Finish::Failed && error.starts_with(why), "{error}");
        }
    }

    #[test]
    fn silent_program_is_quoted_in_error() {
        let none = BTreeMap::new();
        let rejected = BTreeMap::from([("not_found".to_owned(), 2)]);
        let tail = |text: &str| Tail::from(text);
        let why =
            explain_missing_calls(&none, &tail("a\n\nb\nc\nd\n"), &tail("set ONE key, not two\n"));
        assert!(why.starts_with("never called the model"), "{why}");
        let printed = "; its standard error ends with\n  set ONE key, not two\n\
                       its standard output ends with\n  a\n  b\n  c\n  d";
        assert!(why.ends_with(printed), "{why}");
        let why = explain_missing_calls(&rejected, &tail(""), &tail(" \n"));
        assert!(
            why.contains("not_found") && why.ends_with("; the program wrote no output"),
            "{why}"
        );
    }

    #[test]
    fn answer_is_parsed_from_last_line() {
        for (line, want) in [
            (None, None),
            (Some("72"), Some("72")),
            (Some("The answer is 72."), Some("The answer is 72.")),
            (Some(r#"{"answer": "72", "reward": 1}"#), Some("72")),
            (Some(r#"{"answer": 72}"#), Some("72")),
            (Some(r#"{"reward": 1}"#), None),
            (Some(r#"{"x": 1}"#), Some(r#"{"x": 1}"#)),
        ] {
            assert_eq!(parse_answer(line).as_deref(), want, "{line:?}");
        }
    }
}
