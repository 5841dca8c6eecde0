//! The rules of a finished run: each attempt ended once, with the outcome that its runner reported,
//! and was trained once.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use levade_agent::runner::AttemptReport;
use levade_store::rollouts::{PageRequest, Rollout, RolloutFilter, RolloutStatus, Rollouts};
use levade_store::{Attempt, Sqlite, Status, Store};
use levade_trainer::checkpoints;
use levade_tree::{AttemptId, Purpose};

use crate::agents::{LastLine, attempt_of};
use crate::training::{GROUP_SIZE, GROUPS, STEPS};
use crate::world::World;

/// Results of a run that do not depend on faults of the network and of processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Results {
    /// Name of the slot and sampled tokens, by attempt.
    tokens: Vec<(String, Vec<Vec<u32>>)>,
    /// Weights after the last step.
    weights: Vec<u8>,
}

/// Returns the slot and the number of a try, as [`attempt_of`] returns them for its rollout.
fn name_of(attempt: &Attempt) -> (String, u32) {
    (attempt.slot.to_string(), attempt.number)
}

/// Returns the last line of the agent's output in the report that the store accepted.
fn last_line(rollout: &Rollout) -> Option<LastLine> {
    let report = rollout.latest_try.as_ref()?.metadata.as_ref()?;
    match serde_json::from_str(report.get()).ok()? {
        AttemptReport::Program { code: Some(0), stdout, .. } => serde_json::from_str(&stdout).ok(),
        _ => None,
    }
}

/// Checks the record of the finished run in `dir`. `interrupted` contains the trainer processes
/// that did not finish the run. Returns its results, or `None` if the agent failed in a try, so
/// that another random stream followed.
pub async fn check_run(
    world: &World,
    store: &dyn Rollouts,
    dir: &Path,
    interrupted: &BTreeSet<String>,
) -> Option<Results> {
    let record = Sqlite::open_existing(&dir.join("run.db")).await.unwrap();
    let mut counted = BTreeMap::new();
    for summary in record.summaries(Purpose::Train).await.unwrap() {
        let attempt = record.attempt(&summary.id).await.unwrap().unwrap();
        let is_ended = match attempt.status {
            Status::Completed => true,
            Status::Failed => attempt.outcome.error.is_some(),
            _ => false,
        };
        let (slot, number) = name_of(&attempt);
        world.check(is_ended, || {
            format!("try {number} of {slot} counts, but is {:?}", attempt.status)
        });
        let earlier = counted.insert(slot.clone(), attempt);
        world.check(earlier.is_none(), || format!("two tries of {slot} count"));
    }
    let planned = (STEPS * GROUPS * GROUP_SIZE) as usize;
    world.check(counted.len() == planned, || {
        format!("{} attempts count, but {planned} are planned", counted.len())
    });
    let failures = record.failures(Purpose::Train).await.unwrap();
    for failure in failures.iter().filter(|failure| failure.status != Status::Abandoned) {
        let (slot, number) = (&failure.slot, failure.number);
        world.check(failure.error.is_some(), || format!("try {number} of {slot} failed unnamed"));
    }
    check_reports(world, store, &record, interrupted).await;
    check_plans(world, &record, &counted).await;
    let written = checkpoints(dir).unwrap();
    let last = written.iter().max_by_key(|checkpoint| checkpoint.position.global_step);
    let steps = last.map_or(0, |checkpoint| checkpoint.position.global_step);
    world.check(steps == STEPS, || format!("the last checkpoint is of step {steps}"));
    let weights = last.map(|checkpoint| weights_in(&checkpoint.dir)).unwrap_or_default();
    world.check(!weights.is_empty(), || "the last checkpoint has no weights".to_owned());
    let tokens = counted.into_iter().map(|(slot, attempt)| {
        let trajectory = &attempt.trajectory;
        let leaves = trajectory.leaves().into_iter();
        (slot, leaves.map(|leaf| trajectory.sequence_tokens(leaf)).collect())
    });
    let tokens = tokens.collect();
    let has_failed = failures.iter().any(|failure| failure.status != Status::Abandoned);
    (!has_failed).then_some(Results { tokens, weights })
}

/// Returns the weights of a checkpoint.
fn weights_in(dir: &Path) -> Vec<u8> {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            let found = weights_in(&path);
            if !found.is_empty() {
                return found;
            }
        } else if path.file_name().is_some_and(|name| name == "simulator.weights") {
            return std::fs::read(path).unwrap();
        }
    }
    Vec::new()
}

/// Checks that the record contains the outcomes that runners reported, and no other outcomes.
async fn check_reports(
    world: &World,
    store: &dyn Rollouts,
    record: &Sqlite,
    interrupted: &BTreeSet<String>,
) {
    let all = PageRequest { limit: None, ..PageRequest::default() };
    let rollouts = store.query_rollouts(&RolloutFilter::default(), &all).await.unwrap().items;
    let mut by_name: BTreeMap<(String, u32), Rollout> = BTreeMap::new();
    for rollout in rollouts {
        let (slot, number) = attempt_of(&rollout);
        let earlier = by_name.insert((slot.clone(), number), rollout);
        world.check(earlier.is_none(), || format!("try {number} of {slot} has two rollouts"));
    }
    let mut attempts: BTreeMap<(String, u32), Attempt> = BTreeMap::new();
    let counted = record.summaries(Purpose::Train).await.unwrap();
    let failed = record.failures(Purpose::Train).await.unwrap();
    let ids = counted.iter().map(|one| one.id).chain(failed.iter().map(|one| one.id));
    for id in ids {
        let attempt = record.attempt(&id).await.unwrap().unwrap();
        attempts.insert(name_of(&attempt), attempt);
    }
    for (name, attempt) in attempts.iter().filter(|(_, of)| of.status == Status::Completed) {
        let (slot, number) = name;
        let line = by_name.get(name).and_then(last_line);
        let recorded = LastLine {
            reward: attempt.score.unwrap_or(f64::NAN),
            tokens: attempt.trajectory.sampled_tokens() as u64,
            calls: attempt.outcome.turns,
        };
        world.check(line.as_ref() == Some(&recorded), || {
            format!("try {number} of {slot} is recorded as {recorded:?}, and reported as {line:?}")
        });
        let latest = by_name.get(name).and_then(|rollout| rollout.latest_try.as_ref());
        let leases = latest.map_or(0, |latest| latest.number);
        world.check(leases == 1, || format!("try {number} of {slot} counts after {leases} leases"));
    }
    for (name, rollout) in &by_name {
        let Some(line) = last_line(rollout).filter(|_| rollout.status == RolloutStatus::Succeeded)
        else {
            continue;
        };
        let (slot, number) = name;
        let attempt = attempts.get(name);
        let is_interrupted = interrupted.contains(&trainer_of(rollout));
        let is_recorded = attempt.is_some_and(|attempt| {
            let error = attempt.outcome.error.as_deref().unwrap_or_default();
            let is_lost = attempt.status == Status::Abandoned && !error.is_empty();
            // The trainer waited too long for the store.
            let is_given_up = error.contains("runners.wait_seconds");
            attempt.status == Status::Completed || is_lost || is_given_up
        });
        world.check(is_recorded || is_interrupted, || {
            let status = attempt.map(|attempt| attempt.status);
            format!("the reported outcome {line:?} of try {number} of {slot} is lost: {status:?}")
        });
    }
}

/// Returns the trainer process that enqueued a rollout.
fn trainer_of(rollout: &Rollout) -> String {
    let input: serde_json::Value = serde_json::from_str(rollout.input.get()).unwrap();
    let url = input["endpoint"]["base_url"].as_str().unwrap();
    url["http://".len()..].split('/').next().unwrap().to_owned()
}

/// Checks that each step is planned, and that each attempt is trained in at most one step.
async fn check_plans(world: &World, record: &Sqlite, counted: &BTreeMap<String, Attempt>) {
    let ids: BTreeSet<AttemptId> = counted.values().map(|attempt| attempt.id).collect();
    let mut trained = BTreeMap::new();
    for step in 0..STEPS {
        let plan = record.step_plan(0, step).await.unwrap();
        world.check(plan.is_some(), || format!("step {step} has no plan"));
        for sequence in plan.iter().flat_map(|plan| plan.sequences()) {
            let id = sequence.attempt;
            world.check(ids.contains(&id), || {
                format!("step {step} is trained on {id:?}, which does not count")
            });
            let other = *trained.entry(id).or_insert(step);
            world.check(other == step, || format!("{id:?} is trained in steps {other} and {step}"));
        }
    }
}
