//! Implements `levade audit`, which traces weights back to attempts, and attempts forward to
//! weights.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Display, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use levade_run::dir::RunDir;
use levade_store::{Attempt, Store, Withdrawal, person_subject};
use levade_tasks::persons;
use levade_trainer::{
    PolicyDescendants, TrainedStep, checkpoints, find_descendants, trained_steps, with_copies,
};
use levade_tree::{AttemptId, AttemptSlot, Kind, Purpose};
use serde_json::{Value, json};

use crate::failure::unusable;
use crate::inspect::describe_credit;
use crate::screen;

/// Trace weights back to the attempts that made them, or attempts forward to the weights they
/// trained
///
/// With --step or --version, lists every step up to these weights with the attempts that it trained
/// on. With --task, --attempt or --person, lists the steps that trained on the attempts, the
/// versions that descend from them, and their checkpoints.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade audit runs/calculator --step 20            what made checkpoint step-000020
  levade audit runs/calculator --version 12 --json
  levade audit runs/calculator --task gsm8k-17      what was trained on a task
  levade audit runs/calculator --person alice       what was trained on a person's data
  levade audit runs/calculator --attempt train/1/3/0/2")]
#[command(group = clap::ArgGroup::new("subject").required(true))]
pub struct Args {
    /// Run directory
    run: PathBuf,

    /// Number of finished steps of the run, as in the name of a checkpoint
    #[arg(long, group = "subject")]
    step: Option<u32>,

    /// Version of the weights: the number of steps that trained the policy
    #[arg(long, group = "subject")]
    version: Option<u64>,

    /// Id of a task, as its attempts record it
    #[arg(long, group = "subject", value_name = "ID")]
    task: Option<String>,

    /// Slot of an attempt, such as train/1/3/0/2, or id of an attempt
    #[arg(long, group = "subject", value_name = "ID")]
    attempt: Option<String>,

    /// Key of a person, as the field `person` of tasks and sessions has it
    #[arg(long, group = "subject", value_name = "KEY")]
    person: Option<String>,

    /// Show only steps that trained this policy
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    crate::create_runtime()?.block_on(audit(args))
}

async fn audit(args: Args) -> anyhow::Result<ExitCode> {
    let run = RunDir::open(&args.run)?;
    let store = run.open_store().await?;
    let mut steps = trained_steps(&*store).await?;
    if let Some(name) = &args.policy
        && steps.iter().all(|step| *name != step.policy)
    {
        let known: BTreeSet<String> = steps.iter().map(|step| step.policy.clone()).collect();
        let known = Vec::from_iter(known).join(", ");
        return Err(unusable(format!(
            "--policy is {name}, but no step trained this policy; the trained policies are {known}"
        )));
    }
    steps.retain(|step| args.policy.as_ref().is_none_or(|name| *name == step.policy));
    let withdrawn: BTreeMap<AttemptId, Withdrawal> =
        store.withdrawals().await?.into_iter().map(|entry| (entry.id, entry)).collect();
    let subject = match (&args.task, &args.attempt, &args.person) {
        (Some(id), _, _) => Some(AuditSubject::Task(id)),
        (_, Some(name), _) => Some(AuditSubject::Attempt(name)),
        (_, _, Some(key)) => Some(AuditSubject::Person(key)),
        (None, None, None) => None,
    };
    let found = match subject {
        None => trace_back_to_attempts(&args, &*store, &steps, &withdrawn).await?,
        Some(subject) => {
            let attempts = select_attempts(&*store, subject).await?;
            trace_forward_to_weights(&args.run, &*store, &steps, &attempts, &withdrawn).await?
        }
    };
    let text = if args.json { format!("{found}\n") } else { format_report(&found) };
    screen::print(&text);
    Ok(ExitCode::SUCCESS)
}

/// Selection of attempts: by task, by attempt, or by person.
#[derive(Debug, Clone, Copy)]
pub enum AuditSubject<'a> {
    /// All attempts at the task with this id.
    Task(&'a str),
    /// All tries of the attempt with this slot, or the try with this id.
    Attempt(&'a str),
    /// All attempts at tasks of the person with this key.
    Person(&'a str),
}

impl AuditSubject<'_> {
    /// Returns whether all attempts at a task belong to the subject.
    pub fn includes_task(&self, task: &Value) -> bool {
        match self {
            AuditSubject::Task(id) => format_task_id(task) == *id,
            AuditSubject::Person(key) => persons(task).iter().any(|person| person == key),
            AuditSubject::Attempt(_) => false,
        }
    }

    /// Returns the subject as tombstones name it. Returns `None` if the attempts of the subject are
    /// not withdrawn together.
    pub fn tombstone_subject(&self) -> Option<String> {
        match self {
            AuditSubject::Task(id) => Some((*id).to_owned()),
            AuditSubject::Person(key) => Some(person_subject(key)),
            AuditSubject::Attempt(_) => None,
        }
    }

    /// Creates the error for a run that has no attempts of the subject.
    pub fn missing_attempts_error(&self) -> anyhow::Error {
        unusable(match self {
            AuditSubject::Task(id) => {
                format!(
                    "the run has no attempt at the task {id:?}; `levade inspect` lists attempts"
                )
            }
            AuditSubject::Attempt(name) => {
                format!("the run has no attempt {name}; `levade inspect` lists attempts")
            }
            AuditSubject::Person(key) => format!(
                "the run has no attempt at a task of the person {key:?}; the key of a person is in \
                 the field `person` of a task's row, which `levade inspect --attempt` shows"
            ),
        })
    }
}

/// Returns the ids of the attempts of a subject. Withdrawn attempts are included, and so are copies
/// that a phase imitates.
///
/// # Errors
/// Returns an error if the store cannot be read or contains no attempts of the subject.
pub async fn select_attempts(
    store: &dyn Store,
    subject: AuditSubject<'_>,
) -> anyhow::Result<BTreeSet<AttemptId>> {
    let mut found = BTreeSet::new();
    if let AuditSubject::Attempt(name) = subject {
        if let Some(slot) = AttemptSlot::parse(name) {
            let tries = store.count_tries(&slot).await?.next;
            found.extend((0..tries).map(|number| AttemptId::new(store.run(), &slot, number)));
        } else {
            let id: AttemptId = name.parse().map_err(|_| {
                unusable(format!(
                    "--attempt {name}: an attempt is named PURPOSE/PHASE/STEP/GROUP/SAMPLE, as in \
                     train/1/3/0/2, or by its id of 32 digits"
                ))
            })?;
            found.extend(store.attempt(&id).await?.map(|attempt| attempt.id));
        }
    }
    if let Some(withdrawn_as) = subject.tombstone_subject() {
        for purpose in Purpose::ALL {
            // Reads attempts only if one can belong to the subject.
            if !store.tasks(purpose).await?.iter().any(|task| subject.includes_task(task)) {
                continue;
            }
            for summary in store.summaries(purpose).await? {
                let attempt = store.attempt(&summary.id).await?;
                found.extend(attempt.filter(|a| subject.includes_task(&a.task)).map(|a| a.id));
            }
        }
        // The attempts are in no list any more, and the tasks of erased ones are gone.
        for Withdrawal { id, task, .. } in store.withdrawals().await? {
            let is_withdrawn_with = task.as_ref() == Some(&withdrawn_as);
            let attempt = if is_withdrawn_with { None } else { store.attempt(&id).await? };
            if is_withdrawn_with || attempt.is_some_and(|a| subject.includes_task(&a.task)) {
                found.insert(id);
            }
        }
    }
    let found = with_copies(store, &found).await?;
    if found.is_empty() { Err(subject.missing_attempts_error()) } else { Ok(found) }
}

/// Converts the id of a task from JSON to text.
pub fn format_task_id(task: &Value) -> String {
    match &task["id"] {
        Value::String(id) => id.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// Returns the steps that led to the weights of the requested step or version, the latest step
/// first.
async fn trace_back_to_attempts(
    args: &Args,
    store: &dyn Store,
    steps: &[TrainedStep],
    withdrawn: &BTreeMap<AttemptId, Withdrawal>,
) -> anyhow::Result<Value> {
    let reached: Vec<&TrainedStep> = steps
        .iter()
        .filter(|step| {
            args.step.is_none_or(|last| step.global_step <= last)
                && args.version.is_none_or(|last| step.version <= last)
        })
        .collect();
    let exists = reached.iter().any(|step| {
        args.step.is_none_or(|last| step.global_step == last)
            && args.version.is_none_or(|last| step.version == last)
    });
    if !exists {
        return Err(unknown_weights_error(args, steps));
    }
    let mut listed = Vec::new();
    for step in reached.into_iter().rev() {
        listed.push(step_to_json(store, step, withdrawn).await?);
    }
    Ok(json!({ "made_by": listed }))
}

/// Creates the error for a requested step or version that is not among `steps`.
fn unknown_weights_error(args: &Args, steps: &[TrainedStep]) -> anyhow::Error {
    if let Some(step) = args.step {
        let known: BTreeSet<u32> = steps.iter().map(|step| step.global_step).collect();
        return unusable(format!(
            "--step {step}: no such step trained a policy; the steps that did are {}",
            format_range(&known)
        ));
    }
    let mut known: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
    for step in steps {
        known.entry(&step.policy).or_default().insert(step.version);
    }
    let known: Vec<String> = known
        .iter()
        .map(|(policy, versions)| format!("{} of {policy}", format_range(versions)))
        .collect();
    unusable(format!(
        "--version {}: no step made it; the versions that steps made are {}",
        args.version.unwrap_or_default(),
        if known.is_empty() { "none".to_owned() } else { known.join(", ") }
    ))
}

/// Formats the smallest and the largest of `numbers`, such as `3 to 7`.
fn format_range<N: Display + Ord>(numbers: &BTreeSet<N>) -> String {
    match (numbers.first(), numbers.last()) {
        (Some(first), Some(last)) if numbers.len() > 1 => format!("{first} to {last}"),
        (Some(only), _) => only.to_string(),
        _ => "none".to_owned(),
    }
}

/// Returns the weights that descend from these attempts, with their checkpoints.
async fn trace_forward_to_weights(
    run: &Path,
    store: &dyn Store,
    steps: &[TrainedStep],
    attempts: &BTreeSet<AttemptId>,
    withdrawn: &BTreeMap<AttemptId, Withdrawal>,
) -> anyhow::Result<Value> {
    let mut policies = Vec::new();
    for PolicyDescendants { policy, steps, first, last } in find_descendants(steps, attempts) {
        let mut listed = Vec::new();
        for step in &steps {
            listed.push(step_to_json(store, step, withdrawn).await?);
        }
        let first_step = steps.first().map_or(0, |step| step.global_step);
        let descends = checkpoints(run)?;
        let descends = descends.iter().filter(|c| c.position.global_step >= first_step);
        let dirs: Vec<String> = descends.map(|c| c.dir.display().to_string()).collect();
        policies.push(json!({
            "policy": policy, "first_version": first, "last_version": last, "checkpoints": dirs,
            "trained_in": listed,
        }));
    }
    Ok(json!({ "attempts": attempts.len(), "policies": policies }))
}

async fn step_to_json(
    store: &dyn Store,
    step: &TrainedStep,
    withdrawn: &BTreeMap<AttemptId, Withdrawal>,
) -> anyhow::Result<Value> {
    let mut attempts = Vec::new();
    for id in &step.attempts {
        if let Some(attempt) = store.attempt(id).await? {
            attempts.push(attempt_to_json(&attempt, withdrawn.get(id)));
        }
    }
    Ok(json!({
        "phase": step.phase, "step": step.step, "global_step": step.global_step,
        "policy": step.policy, "version": step.version, "attempts": attempts,
    }))
}

/// Describes the origin of an attempt in JSON: its task, tokens by kind, sampling versions, tool
/// results and scores.
fn attempt_to_json(attempt: &Attempt, withdrawal: Option<&Withdrawal>) -> Value {
    let segments = attempt.trajectory.segments();
    let tokens = |kind: Kind| -> usize {
        segments.iter().filter(|s| s.kind == kind).map(|s| s.tokens.len()).sum()
    };
    let mut sampled_by: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
    for segment in segments {
        let versions = segment.versions.iter().map(|run| run.version);
        if segment.kind == Kind::Sampled {
            sampled_by.entry(&segment.policy).or_default().extend(versions);
        }
    }
    // Context after the first segment is what tools and other parties returned.
    let returned = segments.iter().filter(|s| s.kind == Kind::Context && s.parent.is_some());
    // Components of several agents or turns can have the same name.
    let scores = attempt.outcome.components.iter().map(|component| {
        let target = component.credit_target.as_ref().map(describe_credit);
        json!({ "name": component.name, "value": component.value, "for": target })
    });
    let scores: Vec<Value> = scores.collect();
    json!({
        "id": attempt.id, "attempt": attempt.slot.name(), "try": attempt.number,
        "status": attempt.status, "task": format_task_id(&attempt.task),
        "source": attempt.task["source"], "persons": persons(&attempt.task),
        "tokens": { "context": tokens(Kind::Context), "sampled": tokens(Kind::Sampled),
            "demonstrated": tokens(Kind::Demonstrated),
            "tool_results": returned.map(|s| s.tokens.len()).sum::<usize>() },
        "sampled_by": sampled_by, "tool_calls": attempt.outcome.calls.total(),
        "tools": attempt.outcome.tool_metrics, "score": attempt.score, "scores": scores,
        "reward": attempt.reward, "withdrawn": withdrawal,
    })
}

fn format_report(found: &Value) -> String {
    let mut text = String::new();
    if let Some(steps) = found["made_by"].as_array() {
        steps.iter().for_each(|step| format_step(&mut text, step));
        return text;
    }
    let policies = found["policies"].as_array().map_or(&[][..], Vec::as_slice);
    let attempts = screen::plural(found["attempts"].as_u64().unwrap_or(0) as u32, "attempt");
    if policies.is_empty() {
        let _ = writeln!(text, "{attempts}, and no step trained on them");
    }
    for policy in policies {
        let name = policy["policy"].as_str().unwrap_or_default();
        let (first, last) = (&policy["first_version"], &policy["last_version"]);
        let _ = writeln!(text, "{attempts}: versions {first} to {last} of policy {name} descend");
        for step in policy["trained_in"].as_array().into_iter().flatten() {
            format_step(&mut text, step);
        }
        for dir in policy["checkpoints"].as_array().into_iter().flatten() {
            let _ = writeln!(text, "checkpoint {}", dir.as_str().unwrap_or_default());
        }
    }
    text
}

fn format_step(text: &mut String, step: &Value) {
    let name = step["policy"].as_str().unwrap_or_default();
    let (global, phase, index, version) =
        (&step["global_step"], &step["phase"], &step["step"], &step["version"]);
    let _ = writeln!(
        text,
        "step {global} (phase {phase}, step {index}) made version {version} of policy {name}"
    );
    for attempt in step["attempts"].as_array().into_iter().flatten() {
        let word = |field: &str| attempt[field].as_str().unwrap_or_default().to_owned();
        let tokens = &attempt["tokens"];
        let persons = attempt["persons"].as_array().map_or(&[][..], Vec::as_slice);
        let persons: Vec<&str> = persons.iter().filter_map(Value::as_str).collect();
        let of = if persons.is_empty() { "" } else { " of " };
        let note = match &attempt["withdrawn"] {
            Value::Null => "",
            withdrawal if withdrawal["erased"] == true => ", withdrawn and erased",
            _ => ", withdrawn",
        };
        let _ = writeln!(
            text,
            "  {} {} task {}{of}{} · {} sampled, {} demonstrated, {} of tool results · score \
             {}{}{note}",
            word("attempt"),
            word("id"),
            word("task"),
            persons.join(" and "),
            tokens["sampled"],
            tokens["demonstrated"],
            tokens["tool_results"],
            attempt["score"],
            format_scores(&attempt["scores"]),
        );
    }
}

/// Formats the scores of each scorer in parentheses. Returns an empty string if there are no
/// scores.
fn format_scores(scores: &Value) -> String {
    let all: Vec<String> = scores
        .as_array()
        .into_iter()
        .flatten()
        .map(|score| {
            let name = score["name"].as_str().unwrap_or_default();
            let target =
                score["for"].as_str().map_or(String::new(), |target| format!(" for {target}"));
            format!("{name} {}{target}", score["value"])
        })
        .collect();
    if all.is_empty() { String::new() } else { format!(" ({})", all.join(", ")) }
}

#[cfg(test)]
mod tests {
    use levade_store::AttemptStart;
    use levade_tree::{Component, CreditTarget, RunId};

    use super::*;

    #[test]
    fn scores_of_several_agents_with_one_name_are_all_listed() {
        let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 0, group: 0, sample: 0 };
        let id = AttemptId::new(&RunId("r".into()), &slot, 0);
        let task = json!({ "id": "t", "row": { "person": ["alice", "bob"] } });
        let mut attempt = Attempt::from_start(&AttemptStart { id, slot, number: 0, task });
        attempt.outcome.components = [("first", 1.0), ("second", -1.0)]
            .map(|(agent, value)| Component {
                credit_target: Some(CreditTarget::Agent(agent.into())),
                ..Component::new("program", value)
            })
            .into();
        let attempts = json!([attempt_to_json(&attempt, None)]);
        let step = json!({
            "global_step": 1, "phase": 0, "step": 0, "version": 1, "policy": "p",
            "attempts": attempts,
        });
        let text = format_report(&json!({ "made_by": [step] }));
        let want = "score null (program 1.0 for first, program -1.0 for second)";
        assert!(text.contains(want), "{text}");
        assert!(text.contains("task t of alice and bob · "), "{text}");
    }

    #[test]
    fn format_range_contains_first_and_last() {
        assert_eq!(format_range(&BTreeSet::from([1, 2, 9])), "1 to 9");
        assert_eq!(format_range(&BTreeSet::from([4])), "4");
        assert_eq!(format_range(&BTreeSet::<u32>::new()), "none");
    }
}
