//! Whether a recipe may continue the run of another.

use std::fmt;

use toml::{Table, Value};

/// Keys that a run may go on with another value of: they change how it goes, and what comes out only where a deadline passes.
const FREE: [&str; 13] = [
    "run.name",
    "run.folder",
    "run.checkpoint_every",
    "run.keep",
    "engine.threads",
    "engine.concurrency",
    "engine.memory_mb",
    "engine.call_seconds",
    "metrics.tensorboard",
    "metrics.mlflow",
    "metrics.wandb",
    "agent.reply_seconds",
    "agent.attempt_seconds",
];

/// A key in which two recipes differ.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The key.
    pub key: String,
    /// Its value in the earlier one.
    pub before: Option<Value>,
    /// Its value in the later one.
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
    let (before, now) = (Value::Table(before.clone()), Value::Table(now.clone()));
    within(String::new(), Some(&before), Some(&now))
}

fn within(key: String, before: Option<&Value>, now: Option<&Value>) -> Option<Difference> {
    if before == now || FREE.contains(&key.as_str()) {
        return None;
    }
    let inner = |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match (before, now) {
        (Some(Value::Table(before)), Some(Value::Table(now))) => {
            let added = now.keys().filter(|name| !before.contains_key(*name));
            before.keys().chain(added).find_map(|name| within(inner(name), before.get(name), now.get(name)))
        }
        (Some(Value::Array(before)), Some(Value::Array(now))) => (0..before.len().max(now.len()))
            .find_map(|i| within(inner(&i.to_string()), before.get(i), now.get(i))),
        _ => Some(Difference { key, before: before.cloned(), now: now.cloned() }),
    }
}
