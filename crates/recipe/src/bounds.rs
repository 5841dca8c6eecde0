//! Ranges of single values, each declared once, in a table.
//!
//! Constraints between several values are in the modules `check…`. Parameters of `levade_rl`,
//! scorers and environments are checked by their own types.

use std::ops::{Bound, RangeBounds};

use toml::{Table, Value};

use super::patterns::visit_matches;
use super::{MAX_SECONDS, read};

/// Range of the allowed values of a recipe key.
type Range = (Bound<f64>, Bound<f64>);

const fn at_least(low: f64) -> Range {
    (Bound::Included(low), Bound::Unbounded)
}

const fn at_most(high: f64) -> Range {
    (Bound::Unbounded, Bound::Included(high))
}

const fn closed_range(low: f64, high: f64) -> Range {
    (Bound::Included(low), Bound::Included(high))
}

const COUNT: Range = at_least(1.0);
const NOT_NEGATIVE: Range = at_least(0.0);
const POSITIVE: Range = (Bound::Excluded(0.0), Bound::Unbounded);
const FINITE: Range = (Bound::Unbounded, Bound::Unbounded);
const SECONDS: Range = (Bound::Excluded(0.0), Bound::Included(MAX_SECONDS));
/// Range of a recipe key that is a fraction in 0..=1, except 0.
const FRACTION: Range = (Bound::Excluded(0.0), Bound::Included(1.0));
/// Range of a recipe key that is a fraction in 0..=1, except 1.
const DECAY: Range = (Bound::Included(0.0), Bound::Excluded(1.0));

/// Maximum number of attempts in a step (including attempts that run ahead), of attempts in an
/// evaluation, and of demonstrations. Lists of this size fit into memory, and their sums cannot
/// overflow.
pub(super) const MAX_ATTEMPTS: usize = 1 << 24;
/// Maximum number of training tasks of a generator. The order of all tasks is kept in memory.
const MAX_GENERATED: f64 = (1 << 28) as f64;
/// Maximum number of nodes of a learner, and of its processes per node.
const MAX_RANKS: f64 = 16384.0;

/// Every recipe key with a range, and a text that follows the range in error messages: the scope of
/// the value, or the reason for the range. Keys of agents apply to `[agent]` and to every
/// `[agent.NAME]`.
const BOUNDS: &[(&str, Range, &str)] = &[
    ("run.keep", COUNT, ""),
    ("model.context", at_least(2.0), ""),
    ("policy.*.context", at_least(2.0), ""),
    ("policy.*.concurrency", COUNT, ""),
    ("policy.*.seconds", SECONDS, ""),
    ("policy.*:past.every", COUNT, ""),
    ("policy.*:past.keep", COUNT, ""),
    ("policy.*:past.keep", at_most(64.0), ", because all of them are in memory"),
    ("engine.micro_batch_tokens", COUNT, ""),
    ("engine.call_seconds", SECONDS, ""),
    ("cluster.learner.nodes", COUNT, ""),
    ("cluster.learner.nodes", at_most(MAX_RANKS), ""),
    ("cluster.learner.processes", at_most(MAX_RANKS), ""),
    ("cluster.learner.gpus", at_most(MAX_RANKS), ""),
    ("cluster.learner.threads", COUNT, ""),
    ("cluster.learner.tp", COUNT, ""),
    ("cluster.learner.cp", COUNT, ""),
    ("cluster.learner.ep", COUNT, ""),
    ("cluster.learner.pp", COUNT, ""),
    ("cluster.learner.start_seconds", SECONDS, ""),
    ("cluster.learner.call_seconds", SECONDS, ""),
    ("cluster.learner.silent_seconds", SECONDS, ""),
    ("cluster.samplers.count", COUNT, ""),
    ("cluster.samplers.count", at_most(1024.0), ", because this machine starts all of them"),
    ("cluster.samplers.tolerance", POSITIVE, ""),
    ("cluster.samplers.start_seconds", SECONDS, ""),
    ("cluster.samplers.update_seconds", SECONDS, ""),
    ("cluster.samplers.silent_seconds", SECONDS, ""),
    ("cluster.samplers.response_seconds", SECONDS, ""),
    ("runners.lease_seconds", SECONDS, ""),
    ("runners.wait_seconds", SECONDS, ""),
    ("sessions.wait_seconds", SECONDS, ""),
    ("sessions.silence_seconds", SECONDS, ""),
    ("tasks.*:arithmetic.train", COUNT, ""),
    ("tasks.*:arithmetic.train", at_most(MAX_GENERATED), ""),
    ("tasks.*:seeds.train", COUNT, ""),
    ("tasks.*:seeds.train", at_most(MAX_GENERATED), ""),
    ("tasks.*:file.repeat", COUNT, ""),
    ("tasks.*:file.limit", COUNT, ""),
    ("tool.*.seconds", SECONDS, ""),
    ("tool.*.max_tokens", COUNT, ""),
    ("tool.*.max_characters", COUNT, ""),
    ("tool.*.at_once", COUNT, ""),
    ("tool.*.leases", COUNT, ""),
    // From about one call per day to more than any toolbox can serve.
    ("tool.*.calls_per_second", closed_range(0.00001, 1e6), ""),
    ("tool.*.summarize.above", COUNT, ""),
    ("tool.*:search.top_k", closed_range(1.0, 1000.0), ""),
    ("tool.*:search.passage_chars", COUNT, ""),
    ("tool.*:search.tries", closed_range(1.0, 100.0), ""),
    ("agent.worker_attempts", COUNT, ""),
    ("agent.sampling.top_p", FRACTION, ""),
    ("agent.sampling.min_p", closed_range(0.0, 1.0), ""),
    ("agent.context.keep", COUNT, ""),
    ("agent.context.tokens", COUNT, ""),
    ("agent.max_turns", COUNT, ""),
    ("agent.max_tokens", COUNT, ""),
    ("agent.tool_seconds", SECONDS, ""),
    ("agent.tool_delay", closed_range(0.0, MAX_SECONDS), ""),
    ("agent.completion_seconds", SECONDS, ""),
    ("agent.attempt_seconds", SECONDS, ""),
    ("user.*.max_turns", COUNT, ""),
    ("user.*.seconds", SECONDS, ""),
    ("game.workers", COUNT, ""),
    ("game.seconds", SECONDS, ""),
    ("game.illegal", FINITE, ""),
    ("game.default", FINITE, ""),
    ("reward.malformed_call", FINITE, ""),
    ("reward.failed_call", FINITE, ""),
    ("reward.unfinished", FINITE, ""),
    ("reward.broken", FINITE, ""),
    ("reward.unscored", FINITE, ""),
    ("reward.timeout_seconds", SECONDS, ""),
    ("reward.scorers.*.weight", FINITE, ""),
    ("reward.scorers.*.weights.*", FINITE, ""),
    ("reward.scorers.*.unscored", FINITE, ""),
    ("eval.tasks", at_most(MAX_ATTEMPTS as f64), ""),
    ("eval.unseen_wordings", at_most(MAX_ATTEMPTS as f64), ""),
    ("eval.samples", COUNT, ""),
    ("eval.select", DECAY, ": a fraction of the tasks"),
    ("phase.*.learning_rate", POSITIVE, ""),
    ("phase.*.until", FRACTION, ""),
    ("phase.*.epochs", COUNT, ""),
    ("phase.*.optimizer.min_lr_ratio", closed_range(0.0, 1.0), ""),
    ("phase.*.optimizer.beta1", DECAY, ""),
    ("phase.*.optimizer.beta2", DECAY, ""),
    ("phase.*.optimizer.epsilon", POSITIVE, ""),
    ("phase.*.optimizer.weight_decay", NOT_NEGATIVE, ""),
    ("phase.*.optimizer.max_grad_norm", NOT_NEGATIVE, ""),
    ("phase.*.demonstrations", COUNT, ""),
    ("phase.*.demonstrations", at_most(MAX_ATTEMPTS as f64), ""),
    ("phase.*.batch", COUNT, ""),
    ("phase.*.source.min_score", FINITE, ""),
    ("phase.*.source.tasks", at_most(MAX_ATTEMPTS as f64), ""),
    ("phase.*.steps", COUNT, ""),
    ("phase.*.beam_width", COUNT, ""),
    ("phase.*.branch_factor", COUNT, ""),
    ("phase.*.gradient_tasks", COUNT, ""),
    ("phase.*.selection_tasks", COUNT, ""),
    ("phase.*.max_tokens", COUNT, ""),
    ("phase.*.groups", COUNT, ""),
    (
        "phase.*.temperature",
        closed_range(0.01, 100.0),
        ": greedy attempts are identical, and cannot be trained on",
    ),
    ("phase.*.high_entropy_fraction", FRACTION, ""),
    ("phase.*.kl.coefficient", POSITIVE, ""),
    ("phase.*.kl.adaptive.target", POSITIVE, ""),
    ("phase.*.overlong.factor", NOT_NEGATIVE, ""),
    ("phase.*.curriculum.gate", closed_range(0.0, 1.0), ""),
    ("phase.*.curriculum.back", closed_range(0.0, 1.0), ""),
    ("phase.*.curriculum.retest", closed_range(0.0, 1.0), ""),
    ("phase.*.curriculum.memory", DECAY, ""),
    ("phase.*.experience.attempts", COUNT, ""),
    ("phase.*.experience.max_characters", COUNT, ""),
    ("phase.*.only.reward_from", FINITE, ": all rewards are finite"),
    ("phase.*.only.reward_to", FINITE, ": all rewards are finite"),
    ("phase.*.critic.learning_rate", POSITIVE, ""),
    ("phase.*.critic.clip", NOT_NEGATIVE, ""),
    ("phase.*.critic.optimizer.min_lr_ratio", closed_range(0.0, 1.0), ""),
    ("phase.*.critic.optimizer.beta1", DECAY, ""),
    ("phase.*.critic.optimizer.beta2", DECAY, ""),
    ("phase.*.critic.optimizer.epsilon", POSITIVE, ""),
    ("phase.*.critic.optimizer.weight_decay", NOT_NEGATIVE, ""),
    ("phase.*.critic.optimizer.max_grad_norm", NOT_NEGATIVE, ""),
];

/// A recipe value outside its allowed range, in parts of an error message.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct OutOfRange {
    pub key: String,
    pub value: String,
    pub range: String,
}

/// Returns the first value of a recipe that is outside its range, in the order of [`BOUNDS`].
/// `recipe` must contain the named agents in a separate table.
pub(super) fn first_out_of_range(recipe: &mut Table) -> Option<OutOfRange> {
    let mut found = None;
    for (key, range, why) in BOUNDS {
        let named_pattern =
            key.strip_prefix("agent.").map(|key| format!("{}.*.{key}", read::AGENTS));
        for pattern in [Some((*key).to_owned()), named_pattern].into_iter().flatten() {
            visit_matches(recipe, &pattern, &mut |key, value| {
                if found.is_none() && !is_within(range, value) {
                    found = Some(OutOfRange {
                        key: key.replacen(read::AGENTS, "agent", 1),
                        value: format_value(value),
                        range: format!("{}{why}", describe_range(range, value)),
                    });
                }
            });
        }
    }
    found
}

/// Returns whether a value is within a range. A value that is not a number counts as within.
fn is_within(range: &Range, value: &Value) -> bool {
    match value {
        Value::Integer(value) => range.contains(&(*value as f64)),
        Value::Float(value) => value.is_finite() && range.contains(value),
        _ => true,
    }
}

fn format_value(value: &Value) -> String {
    match value {
        Value::Float(value) => value.to_string(),
        other => other.to_string(),
    }
}

/// Formats a number in its shorter notation, such as 1e9 or 16777216.
fn format_number(number: f64) -> String {
    let plain = number.to_string();
    let short = format!("{number:e}");
    if short.len() + 2 < plain.len() { short } else { plain }
}

/// Describes a range for the end of an error message, such as `in 0..=1`.
fn describe_range(range: &Range, value: &Value) -> String {
    let finite = if value.is_float() { "finite and " } else { "" };
    match range {
        (Bound::Included(low), Bound::Included(high)) => {
            format!("in {}..={}", format_number(*low), format_number(*high))
        }
        (Bound::Excluded(low), Bound::Included(high)) => {
            let [low, high] = [*low, *high].map(format_number);
            format!("in {low}..={high}, not {low}")
        }
        (Bound::Included(low), Bound::Excluded(high)) => {
            format!("at least {} and less than {}", format_number(*low), format_number(*high))
        }
        (Bound::Included(low), _) => format!("{finite}at least {}", format_number(*low)),
        (Bound::Excluded(low), _) => format!("{finite}more than {}", format_number(*low)),
        (_, Bound::Included(high) | Bound::Excluded(high)) => {
            format!("{finite}at most {}", format_number(*high))
        }
        (Bound::Unbounded, Bound::Unbounded) => "a finite number".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Override, Recipe};
    use super::*;

    /// Recipes that contain every key with a range.
    const RECIPES: [&str; 5] = [
        include_str!("testing/every_range.toml"),
        include_str!("testing/cluster.toml"),
        include_str!("testing/game.toml"),
        include_str!("testing/prompt.toml"),
        include_str!("testing/sessions.toml"),
    ];

    fn load(text: &str, change: Option<&str>) -> Result<Recipe, String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("recipe.toml");
        std::fs::write(&file, text).unwrap();
        let overrides: Vec<Override> =
            change.into_iter().map(|text| text.parse().unwrap()).collect();
        Recipe::load(&file, &overrides).map_err(|error| error.to_string())
    }

    /// Returns the nearest values outside the ends of a range, and the nearest values inside.
    /// Floats are in single precision, which some keys have.
    fn values_around(range: &Range, is_float: bool) -> (Vec<Value>, Vec<Value>) {
        let step = |end: f64, up: bool| match (is_float, up) {
            (true, true) => Value::Float((end as f32).next_up().to_string().parse().unwrap()),
            (true, false) => Value::Float((end as f32).next_down().to_string().parse().unwrap()),
            (false, _) => Value::Integer(end as i64 + if up { 1 } else { -1 }),
        };
        let at = |end: f64| if is_float { Value::Float(end) } else { Value::Integer(end as i64) };
        let mut outside = Vec::new();
        let mut inside = Vec::new();
        for (end, up) in [(range.0, false), (range.1, true)] {
            match end {
                Bound::Included(end) => {
                    outside.push(step(end, up));
                    inside.push(at(end));
                }
                Bound::Excluded(end) => {
                    outside.push(at(end));
                    inside.push(step(end, !up));
                }
                Bound::Unbounded if is_float => {
                    let infinite = if up { f64::INFINITY } else { f64::NEG_INFINITY };
                    outside.extend([Value::Float(infinite), Value::Float(f64::NAN)]);
                    inside.push(Value::Float(if up { 1e30 } else { -1e30 }));
                }
                Bound::Unbounded => {}
            }
        }
        // A value next to one end can be beyond the other end.
        inside.retain(|value| is_within(range, value));
        (outside, inside)
    }

    #[test]
    fn bounds_separate_adjacent_values() {
        let mut tables = RECIPES.map(|text| load(text, None).unwrap().to_table().unwrap());
        for bound @ (pattern, range, why) in BOUNDS {
            let mut keys = Vec::new();
            for (text, table) in RECIPES.iter().zip(&mut tables) {
                visit_matches(table, pattern, &mut |key, value| {
                    if value.is_integer() || value.is_float() {
                        keys.push((*text, key.to_owned(), value.is_float()));
                    }
                });
            }
            let (text, key, is_float) =
                keys.first().unwrap_or_else(|| panic!("no recipe has {pattern}"));
            let (outside, inside) = values_around(range, *is_float);
            assert!(!outside.is_empty() && !inside.is_empty(), "{bound:?}");
            for value in outside {
                let error = load(text, Some(&format!("{key}={value}"))).unwrap_err();
                let range = format!("{}{why}", describe_range(range, &value));
                let want = format!("`{key}` is {}, but must be {range}", format_value(&value));
                assert!(error.contains(&want), "{key}={value}\n  gave: {error}\n  want: {want}");
            }
            for value in inside {
                let change = format!("{key}={value}");
                // Another check may reject the value, but this range must accept it.
                let error = load(text, Some(&change)).err().unwrap_or_default();
                let range = format!("but must be {}{why}", describe_range(range, &value));
                assert!(
                    !(error.contains(&format!("`{key}` is")) && error.contains(&range)),
                    "{change}: {error}"
                );
            }
        }
    }
}
