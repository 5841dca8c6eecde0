//! Decides whether a recipe can continue the run of another recipe, and declares the keys that may
//! differ.

use std::fmt;

use toml::{Table, Value};

use super::read::KIND;

/// Recipe keys that may change when a run resumes. They determine how the run proceeds, and affect
/// results only if a timeout expires.
const FREE_KEYS: [&str; 18] = [
    "run.name",
    "run.folder",
    "run.checkpoint_every",
    "run.keep",
    "engine.threads",
    "engine.concurrency",
    "engine.memory_mb",
    "engine.kv_memory_mb",
    "engine.call_seconds",
    "cluster.placement",
    "metrics.tensorboard",
    "metrics.mlflow",
    "metrics.wandb",
    "agent.completion_seconds",
    "agent.attempt_seconds",
    "reward.timeout_seconds",
    "reward.unscored",
    // The interval of evaluations does not affect training.
    "eval.every",
];

/// Keys of `[cluster.learner]` that may change when a run resumes.
const FREE_LEARNER_KEYS: [&str; 10] = [
    "url",
    "token_env",
    "start",
    "python",
    "gpus",
    "environment",
    "start_seconds",
    "call_seconds",
    "silent_seconds",
    "restarts",
];

/// Keys of `[cluster.samplers]` that may change when a run resumes.
const FREE_SAMPLERS_KEYS: [&str; 15] = [
    "urls",
    "urls_file",
    "key_env",
    "start",
    "count",
    "gpus",
    "python",
    "args",
    "environment",
    "weights",
    "tolerance",
    "start_seconds",
    "update_seconds",
    "silent_seconds",
    "response_seconds",
];

/// Keys of `[[tool]]` that may change when a run resumes.
const FREE_TOOL_KEYS: [&str; 7] = [
    "seconds",
    "calls_per_second",
    "at_once",
    "leases",
    "workers",
    "worker_calls",
    "start_seconds",
];

/// Returns whether the recipe key `key` may change when a run resumes.
fn may_change_on_resume(key: &str) -> bool {
    let is_free_entry = match key.split('.').collect::<Vec<_>>()[..] {
        // Names of environment variables.
        ["cluster", "learner", "environment", _] => true,
        // Where attempts are made.
        ["runners" | "sessions", ..] => true,
        ["reward", "scorers", _, "unscored"] => true,
        ["cluster", "learner", learner_key] => FREE_LEARNER_KEYS.contains(&learner_key),
        ["cluster", "samplers", samplers_key, ..] => FREE_SAMPLERS_KEYS.contains(&samplers_key),
        ["tool", _, tool_key] => FREE_TOOL_KEYS.contains(&tool_key),
        // Interpreter, directory and concurrency of an environment's worker.
        ["tasks", _, "worker", _] => true,
        ["metrics", "traces", ..] => true,
        ["agent", _, agent_key] => FREE_KEYS.contains(&format!("agent.{agent_key}").as_str()),
        _ => false,
    };
    is_free_entry || FREE_KEYS.contains(&key)
}

/// Returns whether a difference between recipes only changes the length of training, which a
/// resumed run accepts. Such differences are more steps of a phase, another success rate for early
/// stopping, and an additional phase at the end.
fn extends_training(
    Difference { key, before, now }: &Difference,
    is_sft: impl Fn(usize) -> bool,
) -> bool {
    let more =
        || before.as_ref().and_then(Value::as_integer) < now.as_ref().and_then(Value::as_integer);
    match key.split('.').collect::<Vec<_>>()[..] {
        ["phase", _, "steps"] => more(),
        // In an RL phase, this key is the number of passes over the attempts of a step.
        ["phase", phase, "epochs"] => phase.parse().is_ok_and(is_sft) && more(),
        ["phase", _, "until"] => true,
        ["phase", _] => before.is_none(),
        _ => false,
    }
}

/// A recipe key whose value differs between two recipes.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// Path of the recipe key, such as `run.seed`.
    pub key: String,
    /// Value in the earlier recipe. `None` if the key is not set there.
    pub before: Option<Value>,
    /// Value in the later recipe. `None` if the key is not set there.
    pub now: Option<Value>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show =
            |value: &Option<Value>| value.as_ref().map_or("not set".to_owned(), Value::to_string);
        write!(f, "`{}` is {} now and was {}", self.key, show(&self.now), show(&self.before))
    }
}

/// Returns whether a recipe key may change when a run goes back to an earlier step. Only the reward
/// and the store may change, because later attempts are scored again and recorded in another store.
fn may_change_on_rewind(key: &str) -> bool {
    key == "reward" || key.starts_with("reward.") || key == "run.store"
}

/// Returns the first difference that prevents a run of the recipe `before` from resuming with the
/// recipe `now`, in the key order of `before`.
pub(super) fn difference(before: &Table, now: &Table) -> Option<Difference> {
    first_difference(before, now, |_| false)
}

/// Returns the first difference that prevents a run of the recipe `before` from resuming at an
/// earlier step with the recipe `now`.
pub(super) fn difference_from_step(before: &Table, now: &Table) -> Option<Difference> {
    first_difference(before, now, may_change_on_rewind)
}

fn first_difference(
    before: &Table,
    now: &Table,
    is_allowed: impl Fn(&str) -> bool,
) -> Option<Difference> {
    let phases = before.get("phase").and_then(Value::as_array);
    let is_sft = |phase: usize| {
        let kind = phases.and_then(|phases| phases.get(phase)?.get(KIND)?.as_str());
        kind == Some("sft")
    };
    let mut found = Vec::new();
    collect_differences(
        String::new(),
        Some(&Value::Table(before.clone())),
        Some(&Value::Table(now.clone())),
        &mut found,
    );
    found.into_iter().find(|one| {
        !may_change_on_resume(&one.key) && !is_allowed(&one.key) && !extends_training(one, is_sft)
    })
}

/// Collects every recipe key below `key` whose value differs.
fn collect_differences(
    key: String,
    before: Option<&Value>,
    now: Option<&Value>,
    found: &mut Vec<Difference>,
) {
    if before == now {
        return;
    }
    let inner = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match (before, now) {
        (Some(Value::Table(before)), Some(Value::Table(now))) => {
            let added = now.keys().filter(|name| !before.contains_key(*name));
            for name in before.keys().chain(added) {
                collect_differences(inner(name), before.get(name), now.get(name), found);
            }
        }
        (Some(Value::Array(before)), Some(Value::Array(now))) => {
            for i in 0..before.len().max(now.len()) {
                collect_differences(inner(&i.to_string()), before.get(i), now.get(i), found);
            }
        }
        _ => found.push(Difference { key, before: before.cloned(), now: now.cloned() }),
    }
}
