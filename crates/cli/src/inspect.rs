//! Implements `levade inspect`, which shows the recorded attempts of a run, down to single tokens.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use levade_call::ExternalCall;
use levade_model::TokenizerSource;
use levade_run::dir::RunDir;
use levade_run::model;
use levade_store::{Attempt, CreditTarget, PerToken, PlannedSequence, StepReward, Store};
use levade_text::Tokenizer;
use levade_tree::{Component, ContextTruncation, Drift, Kind, Purpose, Segment, SegmentId};

use crate::failure::unusable;
use crate::recorded::find_attempt;
use crate::screen::{self, Style};
use crate::{host, terms};
use list::{
    format_attempts, format_failures, format_steps, no_attempts_message, select_attempts,
    select_best_or_worst, select_failures,
};

mod alarms;
mod colors;
mod dot;
mod draw;
mod graph;
mod history;
mod list;
mod rules;
mod svg;

/// Show the steps of a run, an attempt as text or as a graph, or what is wrong with the run
///
/// Lists the steps if no selector is set. Sampled tokens are alternately green and cyan, and
/// context tokens are dim. If the output is not a terminal, each sampled token is in brackets.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade inspect runs/calculator                        the steps
  levade inspect runs/calculator --step 3               the attempts of step 3 (of the last phase)
  levade inspect runs/calculator --best --step 3        the attempt with the largest reward
  levade inspect runs/calculator --attempt train/1/3/0/2 --logprobs
  levade inspect runs/calculator --attempt train/1/3/0/2 --terms --token 41
  levade inspect runs/calculator --eval --phase 0       the attempts of evaluations
  levade inspect runs/calculator --failed               the attempts that failed, and why
  levade inspect runs/calculator --worst --graph svg > attempt.svg
  levade inspect runs/calculator --alarms               what is wrong with the run

An attempt is named PURPOSE/PHASE/STEP/GROUP/SAMPLE, as the lists print it, all counted from 0.")]
pub struct Args {
    /// Run directory
    run: PathBuf,

    /// Index of the phase, from 0 [default: the last phase that has attempts]
    #[arg(long)]
    phase: Option<u32>,

    /// Show only attempts that were started for this step of the phase, from 0; for evaluations,
    /// the number of steps completed before. With --terms: the step that trained on the attempt
    /// [default: the first such step]
    #[arg(long)]
    step: Option<u32>,

    /// Select attempts of evaluations instead of training
    #[arg(long, conflicts_with = "demonstrations")]
    eval: bool,

    /// Select demonstrations instead of sampled attempts of training
    #[arg(long)]
    demonstrations: bool,

    /// Select the attempts of phases that improve a prompt, with their critiques and rewrites
    #[arg(long, conflicts_with_all = ["eval", "demonstrations"])]
    prompts: bool,

    /// Select the sessions of agents that ran elsewhere
    #[arg(long, conflicts_with_all = ["eval", "demonstrations", "prompts", "phase", "step"])]
    sessions: bool,

    /// Show this attempt, by its slot or its id
    #[arg(long, value_name = "ID", conflicts_with_all = ["phase", "eval", "demonstrations", "prompts"])]
    attempt: Option<String>,

    /// Show the attempt with the largest reward
    #[arg(long, conflicts_with_all = ["attempt", "worst"])]
    best: bool,

    /// Show the attempt with the smallest reward
    #[arg(long, conflicts_with = "attempt")]
    worst: bool,

    /// List the failed attempts with their errors, instead of the steps
    #[arg(long, conflicts_with_all = ["attempt", "best", "worst"])]
    failed: bool,

    /// Show the log-probability of every sampled token
    #[arg(long)]
    logprobs: bool,

    /// Show the loss of each trained token of the attempt: the formula, its values, and its term in
    /// the loss of the step. Replays the step from the nearest checkpoint, without changing the run
    #[arg(long, requires = "attempt")]
    terms: bool,

    /// Show only the token at this index of each sequence, from 0
    #[arg(long, value_name = "INDEX", requires = "terms")]
    token: Option<u32>,

    /// Draw the attempt as a graph of its model calls and tool calls: as SVG, or for Graphviz
    #[arg(long, value_name = "FORMAT", conflicts_with_all = ["terms", "logprobs", "failed"])]
    graph: Option<graph::Format>,

    /// Report the problems of the last phase of the run (or of --phase), since which step, and what
    /// to do
    #[arg(long, conflicts_with_all = ["attempt", "step", "eval", "demonstrations", "prompts", "sessions", "best", "worst", "failed", "graph"])]
    alarms: bool,

    /// Print the terms as JSON, one line per token, or the alarms as one object
    #[arg(long)]
    json: bool,
}

impl Args {
    fn selected_purpose(&self) -> Purpose {
        match self {
            Args { eval: true, .. } => Purpose::Eval,
            Args { demonstrations: true, .. } => Purpose::Demonstration,
            Args { prompts: true, .. } => Purpose::Prompt,
            Args { sessions: true, .. } => Purpose::Session,
            _ => Purpose::Train,
        }
    }
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    crate::create_runtime()?.block_on(inspect(args))
}

async fn inspect(args: Args) -> anyhow::Result<ExitCode> {
    if args.attempt.is_some() && args.step.is_some() && !args.terms {
        return Err(unusable(
            "--attempt with --step requires --terms; add --terms, or leave out --step".to_owned(),
        ));
    }
    if args.json && !args.terms && !args.alarms {
        return Err(unusable("--json requires --terms or --alarms"));
    }
    if args.graph.is_some() && args.attempt.is_none() && !args.best && !args.worst {
        return Err(unusable("--graph requires an attempt: --attempt ID, --best or --worst"));
    }
    let run = RunDir::open(&args.run)?;
    let store = run.open_store().await?;
    if args.alarms {
        screen::print(&alarms::format_phase_alarms(&run, &*store, args.phase, args.json).await?);
        return Ok(ExitCode::SUCCESS);
    }
    let found = match &args.attempt {
        Some(name) => Some(find_attempt(&*store, name).await?.ok_or_else(|| {
            let run = args.run.display();
            unusable(format!("the run has no {name}; `levade inspect {run}` lists what it has"))
        })?),
        None if args.failed => {
            let failures = select_failures(&args, &*store).await?;
            if failures.is_empty() {
                return Err(unusable(no_attempts_message(&args, "failed attempts")));
            }
            screen::print(&format_failures(&failures));
            None
        }
        None => {
            let summaries = select_attempts(&args, &*store).await?;
            if summaries.is_empty() {
                let failures = select_failures(&args, &*store).await?;
                if failures.is_empty() {
                    return Err(unusable(no_attempts_message(&args, "attempts")));
                }
                screen::print(&format_failures(&failures));
                return Ok(ExitCode::SUCCESS);
            }
            if args.best || args.worst {
                store.attempt(&select_best_or_worst(&summaries, args.best)?).await?
            } else {
                let lists_attempts = args.step.is_some() || args.sessions;
                let format_list = if lists_attempts { format_attempts } else { format_steps };
                let list = format_list(&summaries);
                screen::print(&list);
                None
            }
        }
    };
    if let Some(attempt) = found {
        if let Some(format) = args.graph {
            screen::print(&draw::draw_attempt(&run, &*store, &attempt, format).await?);
            return Ok(ExitCode::SUCCESS);
        }
        let tokenizer = open_tokenizer(&run)?;
        if args.terms {
            let Some((step, _)) = find_planned_sequence(&*store, &attempt, args.step).await? else {
                let subject = args
                    .step
                    .map_or("no step has".to_owned(), |step| format!("step {step} has not"));
                return Err(unusable(format!("{subject} trained on {}", attempt.slot)));
            };
            let selected = (args.token, args.json);
            screen::print(
                &terms::format_terms(&args.run, &attempt, step, &tokenizer, selected).await?,
            );
            return Ok(ExitCode::SUCCESS);
        }
        let planned = match attempt.slot.purpose {
            Purpose::Train => find_planned_sequence(&*store, &attempt, None).await?,
            _ => None,
        };
        screen::print(&format_attempt(
            &attempt,
            planned.as_ref(),
            &tokenizer,
            args.logprobs,
            Style::stdout(),
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Finds the first sequence of an attempt that the step `only` trained on, and returns it with the
/// step. If `only` is `None`, takes the first step of the attempt's phase that trained on the
/// attempt. This step can differ from the step for which the attempt was started.
async fn find_planned_sequence(
    store: &dyn Store,
    attempt: &Attempt,
    only: Option<u32>,
) -> anyhow::Result<Option<(u32, PlannedSequence)>> {
    let phase = attempt.slot.phase;
    let steps = store.planned_steps().await?.into_iter().filter(|(of, _)| *of == phase);
    for (_, step) in steps.filter(|(_, step)| only.is_none_or(|only| only == *step)) {
        let plan = store.step_plan(phase, step).await?;
        let mut sequences = plan.iter().flat_map(|plan| plan.sequences());
        if let Some(sequence) = sequences.find(|sequence| sequence.attempt == attempt.id) {
            return Ok(Some((step, sequence.clone())));
        }
    }
    Ok(None)
}

/// Opens the tokenizer of a run, from its newest checkpoint, or from its model if there is no
/// checkpoint yet.
fn open_tokenizer(run: &RunDir) -> anyhow::Result<Tokenizer> {
    let saved = run.newest_checkpoint().map(|checkpoint| checkpoint.join("tokenizer.json"));
    let source = match saved.filter(|file| file.is_file()) {
        Some(file) => TokenizerSource::Json(std::fs::read(file)?),
        // Before the first checkpoint, only the model has a tokenizer.
        None => {
            let levade_recipe::ModelKeys { source, base, .. } = run.recipe()?.model;
            let files = model::open(&source, base.as_deref(), &host::create_host()?)?.files;
            files.tokenizer.ok_or_else(|| unusable(format!("{source} has no tokenizer")))?
        }
    };
    Ok(Tokenizer::new(&source)?)
}

/// Formats an attempt for the terminal: its score and reward, its advantage in the step and
/// sequence `planned`, its task and outcome, and its tokens.
fn format_attempt(
    attempt: &Attempt,
    planned: Option<&(u32, PlannedSequence)>,
    tokenizer: &Tokenizer,
    logprobs: bool,
    style: Style,
) -> String {
    let mut text = String::new();
    let number = |value: Option<f64>| value.map_or("none".into(), |v| format!("{v}"));
    let _ = writeln!(text, "{}", style.bold(&attempt.slot.name()));
    let tries =
        if attempt.number > 0 { format!(", try {}", attempt.number) } else { String::new() };
    // An attempt that does not count is selected by its id only, so its status is shown.
    let status = if attempt.status.can_count() {
        String::new()
    } else {
        format!(", {}", attempt.status.name())
    };
    let _ = writeln!(text, "id         {}{tries}{status}", attempt.id);
    let _ = writeln!(
        text,
        "score      {}{}",
        number(attempt.score),
        format_components(&attempt.outcome.components)
    );
    let parts = attempt.step_rewards.iter().map(|StepReward { credit_target: by, reward }| {
        format!("{reward} by {}", describe_credit(by))
    });
    let parts = parts.collect::<Vec<_>>().join(", ");
    let parts = if parts.is_empty() { parts } else { format!(", of it {parts}") };
    let _ = writeln!(text, "reward     {}{parts}", number(attempt.reward));
    match planned {
        Some((step, sequence)) => {
            let _ = writeln!(
                text,
                "advantage  {} in step {step} (weight of a token in the loss: {})",
                format_range(&sequence.advantage),
                format_range(&sequence.weight)
            );
        }
        None if attempt.slot.purpose == Purpose::Train => {
            let _ = writeln!(text, "advantage  none: no step trained on it");
        }
        None => {}
    }
    for (name, value) in [("task", &attempt.task), ("outcome", &serde_json::json!(attempt.outcome))]
    {
        let _ = writeln!(text, "{name:10} {}", format_fields(value));
    }
    for Drift { turn, recorded, printed, forked } in &attempt.outcome.drift {
        let name = if *forked { "fork" } else { "drift" };
        let _ = writeln!(
            text,
            "{name:10} before turn {turn} the template renders {printed:?}, but the recorded text \
             is {recorded:?}"
        );
    }
    for ContextTruncation { turn, agent, message: why } in &attempt.outcome.context_truncations {
        let _ = writeln!(text, "{:10} turn {turn} of {agent}: {why}", "truncated");
    }
    if let Some(program) = attempt.outcome.scorer_inputs.get("program") {
        text += &format_calls(&program["calls"]);
        text += &format_moved_systems(&program["forks"]);
        text += &format_external_calls(&program["external"]);
    }
    for segment in attempt.trajectory.segments() {
        let trains = attempt.slot.purpose == Purpose::Train;
        let _ = writeln!(text, "\n{}", style.bold(&format_segment_heading(segment, trains)));
        let _ = writeln!(text, "{}", format_tokens(segment, tokenizer, style));
        if logprobs && segment.kind == Kind::Sampled {
            for (token, logprob) in segment.tokens.iter().zip(&segment.logprobs) {
                let _ = writeln!(
                    text,
                    "  {logprob:>10.5}  {:>7}  {:?}",
                    token,
                    tokenizer.token_text(*token)
                );
            }
        }
    }
    text
}

/// Formats the model calls of an agent program, one line per call.
pub fn format_calls(calls: &serde_json::Value) -> String {
    let mut text = String::new();
    for call in calls.as_array().into_iter().flatten() {
        let word = |name: &str| call[name].as_str().unwrap_or_default().to_owned();
        let number = |name: &str| call[name].as_u64().unwrap_or_default();
        let turn = call["turn"].as_u64().map_or("–".to_owned(), |turn| turn.to_string());
        let error = call["fault"].as_str().map_or(String::new(), |error| format!(" · {error}"));
        let _ = writeln!(
            text,
            "call {turn:5} {} of {} · {} · {} + {} tokens · {}{error}",
            word("agent"),
            word("model"),
            word("history"),
            number("prompt_tokens"),
            number("tokens"),
            word("finish"),
        );
    }
    text
}

/// Formats a line with the number of system messages that the chat template does not render at
/// their original positions. Returns an empty string if there are no such messages.
fn format_moved_systems(counts: &serde_json::Value) -> String {
    let [joined, moved] =
        ["joined_systems", "moved_systems"].map(|name| counts[name].as_u64().unwrap_or_default());
    match joined + moved {
        0 => String::new(),
        _ => format!(
            "{:10} the chat template does not render all system messages at their positions: \
             {joined} joined with the first, {moved} later ones in a user message or merged\n",
            "systems"
        ),
    }
}

/// Formats the model calls that external policies answered: the new messages of each call, and its
/// completion.
fn format_external_calls(recorded: &serde_json::Value) -> String {
    let Ok(calls) = serde_json::from_value::<Vec<ExternalCall>>(recorded.clone()) else {
        return String::new();
    };
    let mut text = String::new();
    for (at, call) in calls.iter().enumerate() {
        let after = match call.after {
            Some(after) => format!(", after {} messages of call {after}", call.shared_messages),
            None => String::new(),
        };
        let _ = writeln!(text, "\nexternal {at} {} of {}{after}", call.agent, call.policy);
        for message in call.messages.iter().chain([&call.message]) {
            let calls: Vec<String> =
                message.tool_calls.iter().map(|call| call.name.clone()).collect();
            let calls =
                if calls.is_empty() { String::new() } else { format!(" → {}", calls.join(", ")) };
            let _ =
                writeln!(text, "  {}: {}{calls}", message.role.as_str(), message.content.as_str());
        }
        if let Some(error) = &call.error {
            let _ = writeln!(text, "  {error}");
        }
    }
    text
}

/// Fields of a task or an outcome that are not shown, or that have lines of their own.
const SEPARATE_FIELDS: [&str; 4] = ["demonstration", "drift", "cuts", "components"];

/// Formats the components of a score, each with its weight if it has one. Returns an empty string
/// if the only component is the score itself.
fn format_components(components: &[Component]) -> String {
    if matches!(components, [] | [Component { weight: Some(1.0), credit_target: None, .. }]) {
        return String::new();
    }
    let one = |Component { name, value, weight, credit_target: on, .. }: &Component| {
        let weight = weight.map_or(String::new(), |weight| format!(" × {weight}"));
        let on = on.as_ref().map_or(String::new(), |on| format!(" for {}", describe_credit(on)));
        format!("{name} {value}{weight}{on}")
    };
    format!(", of {}", components.iter().map(one).collect::<Vec<_>>().join(", "))
}

/// Describes the part of an attempt that gets the credit of a score or a reward.
pub fn describe_credit(by: &CreditTarget) -> String {
    match by {
        CreditTarget::Segment(SegmentId(segment)) => format!("segment {segment}"),
        CreditTarget::Turn(turn) => format!("turn {turn}"),
        CreditTarget::Agent(agent) => agent.clone(),
    }
}

/// Formats the values of all tokens: as one number if they are equal, and otherwise as their
/// minimum and maximum.
fn format_range(numbers: &PerToken) -> String {
    let low = numbers.run_values().fold(f32::INFINITY, f32::min);
    let high = numbers.run_values().fold(f32::NEG_INFINITY, f32::max);
    let shown =
        |x: f32| if x != 0.0 && x.abs() < 1e-2 { format!("{x:.3e}") } else { format!("{x}") };
    if low == high { shown(low) } else { format!("{} to {}", shown(low), shown(high)) }
}

/// Formats the fields of a JSON object on one line. Fields that are null or have lines of their own
/// are left out.
fn format_fields(value: &serde_json::Value) -> String {
    let Some(object) = value.as_object() else { return value.to_string() };
    let shown = object
        .iter()
        .filter(|(name, value)| !value.is_null() && !SEPARATE_FIELDS.contains(&name.as_str()));
    shown.map(|(name, value)| format!("{name}: {value}")).collect::<Vec<_>>().join(" · ")
}

/// Formats the origin of a segment. If the segment is masked and `trains` is true, which means that
/// the attempt is for training, the reason for the mask is added.
fn format_segment_heading(segment: &Segment, trains: bool) -> String {
    let kind = match segment.kind {
        Kind::Context => "context",
        Kind::Sampled => "sampled",
        Kind::Demonstrated => "demonstrated",
    };
    let mut heading = format!("{kind}, turn {}, {} tokens", segment.turn, segment.tokens.len());
    if segment.kind == Kind::Sampled {
        let versions: Vec<String> =
            segment.versions.iter().map(|run| run.version.to_string()).collect();
        let total: f64 = segment.logprobs.iter().map(|&p| f64::from(p)).sum();
        let mean = total / segment.logprobs.len().max(1) as f64;
        let _ = write!(
            heading,
            ", temperature {}, weights {}, log p {mean:.4} on average",
            segment.temperature,
            versions.join(" then ")
        );
    }
    if let Some(why) = segment.mask_reason().filter(|_| trains) {
        let _ = write!(heading, ", masked: {why}");
    }
    format!("── {heading}")
}

/// Formats the tokens of a segment as text. Colors or brackets mark their origin.
fn format_tokens(segment: &Segment, tokenizer: &Tokenizer, style: Style) -> String {
    if segment.kind == Kind::Context {
        let text = tokenizer.decode_with_special(&segment.tokens);
        // Each line is styled separately, because some terminals reset the color at the end of a
        // line.
        return text.split('\n').map(|line| style.dim(line)).collect::<Vec<_>>().join("\n");
    }
    segment
        .tokens
        .iter()
        .enumerate()
        .map(|(i, &token)| {
            let text = tokenizer.token_text(token);
            match (style.is_on(), i % 2) {
                (false, _) => format!("[{}]", text.replace('\n', "\\n")),
                (true, 0) => style.green(&text),
                (true, _) => style.cyan(&text),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use levade_store::Status;
    use levade_text::testing::{IM_END, tiny_tokenizer};
    use levade_tree::{AttemptId, AttemptSlot, Outcome, Trajectory, VersionRun};

    use super::*;

    #[test]
    fn components_show_weights_and_targets() {
        let correctness = Component { weight: Some(0.75), ..Component::new("right", 1.0) };
        let step = Component {
            weight: Some(0.5),
            credit_target: Some(CreditTarget::Turn(0)),
            ..Component::new("judge.step", -0.5)
        };
        let all = [correctness.clone(), step, Component::new("judge.length", 9.0)];
        assert_eq!(
            format_components(&all),
            ", of right 1 × 0.75, judge.step -0.5 × 0.5 for turn 0, judge.length 9"
        );
        // A single component with weight 1 is the score and is not repeated.
        assert_eq!(format_components(&[Component { weight: Some(1.0), ..correctness }]), "");
    }

    #[test]
    fn shown_attempt_marks_tokens_by_origin() {
        let tokenizer = tiny_tokenizer().unwrap();
        let mut trajectory = Trajectory::new();
        let root = trajectory
            .push(Segment::context(None, vec![u32::from(b'a'), u32::from(b'b')], 0))
            .unwrap();
        let sampled = Segment {
            kind: Kind::Sampled,
            logprobs: vec![-0.5, -1.5],
            versions: vec![VersionRun { version: 7, len: 2 }],
            ..Segment::context(Some(root), vec![u32::from(b'c'), IM_END], 0)
        };
        let sampled = trajectory
            .push(sampled.clone())
            .map(|id| Segment { parent: Some(id), ..sampled })
            .unwrap();
        trajectory.push(Segment { temperature: 0.0, ..sampled }).unwrap();
        let attempt = Attempt {
            id: AttemptId::from_bytes([1; 16]),
            slot: AttemptSlot { purpose: Purpose::Train, phase: 0, step: 0, group: 0, sample: 0 },
            number: 1,
            task: serde_json::json!({"id": "t", "template": null}),
            outcome: Outcome {
                context_truncations: vec![ContextTruncation {
                    turn: 1,
                    agent: "default".into(),
                    message: "it was long".into(),
                }],
                drift: vec![Drift {
                    turn: 1,
                    recorded: "<think>".into(),
                    printed: "4".into(),
                    forked: true,
                }],
                ..Outcome::demonstrated("4")
            },
            score: Some(1.0),
            reward: Some(0.5),
            step_rewards: vec![StepReward { credit_target: CreditTarget::Turn(0), reward: -0.5 }],
            status: Status::Completed,
            trajectory,
        };
        let text = format_attempt(&attempt, None, &tokenizer, true, Style::default());
        let abandoned = Attempt { status: Status::Abandoned, ..attempt.clone() };
        let abandoned = format_attempt(&abandoned, None, &tokenizer, true, Style::default());
        assert!(abandoned.contains("01, try 1, abandoned\n"), "{abandoned}");
        for part in [
            "train/0/0/0/0\nid         01010101010101010101010101010101, try 1\n",
            "score      1\n",
            "reward     0.5, of it -0.5 by turn 0\n",
            "advantage  none",
            "task       id: \"t\"\n",
            "outcome    final_text: \"4\" · finish: \"answered\"",
            "\nfork       before turn 1 the template renders \"4\", but the recorded text is \
             \"<think>\"\n\
             truncated  turn 1 of default: it was long\n",
            "── context, turn 0, 2 tokens\nab\n",
            "── sampled, turn 0, 2 tokens, temperature 1, weights 7, log p -1.0000 on average\n\
             [c][<|im_end|>]\n",
            "── sampled, turn 0, 2 tokens, temperature 0, weights 7, log p -1.0000 on average, \
             masked: decoded greedily\n",
            "    -0.50000       99  \"c\"\n",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
    }
}
