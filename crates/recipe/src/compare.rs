//! Whether a recipe may continue the run of another: the keys in which it may differ are declared here.

use std::fmt;

use toml::{Table, Value};

use super::read::KIND;

/// Keys that a run may go on with another value of: they change how it goes, and what comes out only where a
/// deadline passes.
const FREE: [&str; 17] = [
    "run.name",
    "run.folder",
    "run.checkpoint_every",
    "run.keep",
    "engine.threads",
    "engine.concurrency",
    "engine.memory_mb",
    "engine.call_seconds",
    "cluster.placement",
    "metrics.tensorboard",
    "metrics.mlflow",
    "metrics.wandb",
    "agent.reply_seconds",
    "agent.attempt_seconds",
    "reward.outage_seconds",
    "reward.unscored",
    // What is sampled for evaluations changes nothing of what is trained.
    "eval.every",
];

/// Such keys of a learner elsewhere.
const FREE_OF_LEARNERS: [&str; 10] = [
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

/// Such keys of samplers elsewhere.
const FREE_OF_SAMPLERS: [&str; 15] = [
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
    "adopt_seconds",
    "silent_seconds",
    "answer_seconds",
];

/// Such keys of a toolbox.
const FREE_OF_TOOLS: [&str; 6] =
    ["seconds", "calls_per_second", "at_once", "workers", "worker_calls", "start_seconds"];

/// Whether a key is among those, of whatever agent or scorer.
fn is_free(key: &str) -> bool {
    let of_one_of_several = match key.split('.').collect::<Vec<_>>()[..] {
        // Names of variables.
        ["cluster", "learner", "environment", _] => true,
        ["reward", "scorers", _, "unscored"] => true,
        ["cluster", "learner", of_learner] => FREE_OF_LEARNERS.contains(&of_learner),
        ["cluster", "samplers", of_samplers, ..] => FREE_OF_SAMPLERS.contains(&of_samplers),
        ["tool", _, of_tool] => FREE_OF_TOOLS.contains(&of_tool),
        // Where an environment runs, and how much of it at once.
        ["tasks", _, "worker", _] => true,
        ["agent", _, of_agent] => FREE.contains(&format!("agent.{of_agent}").as_str()),
        _ => false,
    };
    of_one_of_several || FREE.contains(&key)
}

/// Whether a run may go on with a difference that changes how long it trains: more steps of a phase, another
/// success at which it ends, a phase more at the end.
fn lengthens(Difference { key, before, now }: &Difference, is_sft: impl Fn(usize) -> bool) -> bool {
    let more = || before.as_ref().and_then(Value::as_integer) < now.as_ref().and_then(Value::as_integer);
    match key.split('.').collect::<Vec<_>>()[..] {
        ["phase", _, "steps"] => more(),
        // Of a phase of reinforcement it says how often the attempts of a step are gone through.
        ["phase", phase, "epochs"] => phase.parse().is_ok_and(is_sft) && more(),
        ["phase", _, "until"] => true,
        ["phase", _] => before.is_none(),
        _ => false,
    }
}

/// A key in which two recipes differ.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The key.
    pub key: String,
    /// Value in the earlier one.
    pub before: Option<Value>,
    /// Value in the later one.
    pub now: Option<Value>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |value: &Option<Value>| value.as_ref().map_or("not set".to_owned(), Value::to_string);
        write!(f, "`{}` is {} now and was {}", self.key, show(&self.now), show(&self.before))
    }
}

/// The first difference that matters, in the order of the keys of the earlier recipe.
pub(super) fn difference(before: &Table, now: &Table) -> Option<Difference> {
    let phases = before.get("phase").and_then(Value::as_array);
    let is_sft = |phase: usize| {
        let kind = phases.and_then(|phases| phases.get(phase)?.get(KIND)?.as_str());
        kind == Some("sft")
    };
    let mut found = Vec::new();
    collect(String::new(), Some(&Value::Table(before.clone())), Some(&Value::Table(now.clone())), &mut found);
    found.into_iter().find(|one| !is_free(&one.key) && !lengthens(one, is_sft))
}

/// Every key in which two values differ.
fn collect(key: String, before: Option<&Value>, now: Option<&Value>, found: &mut Vec<Difference>) {
    if before == now {
        return;
    }
    let inner = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match (before, now) {
        (Some(Value::Table(before)), Some(Value::Table(now))) => {
            let added = now.keys().filter(|name| !before.contains_key(*name));
            for name in before.keys().chain(added) {
                collect(inner(name), before.get(name), now.get(name), found);
            }
        }
        (Some(Value::Array(before)), Some(Value::Array(now))) => {
            for i in 0..before.len().max(now.len()) {
                collect(inner(&i.to_string()), before.get(i), now.get(i), found);
            }
        }
        _ => found.push(Difference { key, before: before.cloned(), now: now.cloned() }),
    }
}
