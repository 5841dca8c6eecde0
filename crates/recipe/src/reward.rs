//! `[reward]`: the reward of an attempt. A recipe has one `scorer`, or several
//! `[[reward.scorers]]`.
//!
//! In a file, the keys of a scorer in a list and the options of its kind are in one table. The
//! types keep them separate.

use std::collections::BTreeMap;
use std::fmt;

use levade_reward::ScorerKind;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use toml::{Table, Value};

use super::read::{ReadError, deserialize_one_or_several};

/// `[reward]`: reward = score + shaping. The score is the weighted sum of the scorers' scores.
/// Evaluations use only the score.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardKeys {
    /// Scorer of all tasks. It is unused if `scorers` is set.
    pub scorer: ScorerKind,
    /// List of several scorers, each for all tasks or for some tasks. Empty if `scorer` scores all
    /// tasks.
    pub scorers: Vec<ScorerKeys>,
    /// Name of the agent whose part of a game's rewards is the score and reward of an attempt, in
    /// metrics, evaluations and filters. It is the mean over the agent's seats. If empty, the score
    /// is the sum over all agents, which is constant in a zero-sum game.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub of: String,
    /// What happens to an attempt that a scorer cannot score. A scorer in `scorers` can override
    /// it.
    pub unscored: UnscoredEffect,
    /// Timeout in seconds for a scorer that does not respond, or that is unavailable while training
    /// needs its scores. After the timeout, the run stops and can be resumed.
    #[serde(alias = "outage_seconds")]
    pub timeout_seconds: f64,
    /// Reward for each tool call that could not be parsed, usually a small negative number.
    pub malformed_call: f64,
    /// Reward for each tool call that was parsed but failed: unknown tool, wrong arguments,
    /// failure, or timeout.
    pub failed_call: f64,
    /// Reward for an attempt that a limit ended before its final answer.
    pub unfinished: f64,
    /// Reward for an attempt that failed for a reason outside the model. `None` leaves such an
    /// attempt out of training.
    pub broken: Option<f64>,
}

impl Default for RewardKeys {
    fn default() -> Self {
        RewardKeys {
            scorer: ScorerKind::default(),
            scorers: Vec::new(),
            of: String::new(),
            unscored: UnscoredEffect::default(),
            timeout_seconds: 3600.0,
            malformed_call: 0.0,
            failed_call: 0.0,
            unfinished: 0.0,
            broken: None,
        }
    }
}

impl RewardKeys {
    /// Returns the scorer of all tasks as an entry for `scorers`, named after its kind.
    pub fn single_scorer(&self) -> ScorerKeys {
        ScorerKeys {
            name: self.scorer.name().to_owned(),
            weight: default_weight(),
            weights: BTreeMap::new(),
            when: WhenKeys::default(),
            unscored: None,
            scorer: self.scorer.clone(),
        }
    }
}

/// `[[reward.scorers]]`: one of several scorers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScorerKeys {
    /// Name of the scorer in the store, in metrics and in messages. A task can select the scorer by
    /// this name.
    pub name: String,
    /// Weight of the scorer's score in the total score. If 0, the score is only recorded.
    #[serde(default = "default_weight")]
    pub weight: f64,
    /// Weights of the scorer's additional components, by component name. A component without a
    /// weight does not count.
    #[serde(default)]
    pub weights: BTreeMap<String, f64>,
    /// Conditions under which the scorer applies to an attempt. By default, it applies to all
    /// attempts.
    #[serde(default)]
    pub when: WhenKeys,
    /// What happens to an attempt that the scorer cannot score. `None` applies `reward.unscored`.
    #[serde(default)]
    pub unscored: Option<UnscoredEffect>,
    /// Kind and options of the scorer.
    #[serde(rename = "$options")]
    pub scorer: ScorerKind,
}

fn default_weight() -> f64 {
    1.0
}

/// `when`: conditions on the task and on the moment of training. All conditions that are set must
/// hold. A range contains its start (`from_…`) but not its end (`until_…`).
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WhenKeys {
    /// Allowed sources of the task: names of files or generators. No condition if empty.
    #[serde(skip_serializing_if = "Values::is_empty")]
    pub source: Values,
    /// Allowed kinds of the task. No condition if empty.
    #[serde(skip_serializing_if = "Values::is_empty")]
    pub kind: Values,
    /// Allowed values of the field `data_source` in the task's row, as in verl's files. No
    /// condition if empty.
    #[serde(skip_serializing_if = "Values::is_empty")]
    pub data_source: Values,
    /// Allowed values of other fields in the task's row, by field name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub row: BTreeMap<String, Values>,
    /// Index of the first phase in which the scorer applies, from 0. `None` for no lower bound.
    pub from_phase: Option<u32>,
    /// Index of the first phase in which the scorer no longer applies. `None` for no upper bound.
    pub until_phase: Option<u32>,
    /// Index of the first step of a phase in which the scorer applies, from 0. `None` for no lower
    /// bound.
    pub from_step: Option<u32>,
    /// Index of the first step of a phase in which the scorer no longer applies. `None` for no
    /// upper bound.
    pub until_step: Option<u32>,
    /// Minimum success rate at the task, in 0..=1, that a curriculum had measured when the attempt
    /// was started. `None` for no lower bound.
    pub from_success: Option<f64>,
    /// Upper bound of the success rate at the task, which is excluded: at this rate and above, the
    /// scorer does not apply. `None` for no upper bound.
    pub until_success: Option<f64>,
}

impl WhenKeys {
    /// Returns whether the scorer applies in every phase and step, and at every success rate.
    pub fn is_constant(&self) -> bool {
        let steps = [self.from_phase, self.until_phase, self.from_step, self.until_step];
        steps.iter().all(Option::is_none) && !self.depends_on_success()
    }

    /// Returns whether a condition refers to the measured success rate at a task.
    pub fn depends_on_success(&self) -> bool {
        self.from_success.is_some() || self.until_success.is_some()
    }

    /// Returns whether the scorer applies to an attempt that was started in step `step` of phase
    /// `phase`, at a task with the measured success rate `success`.
    pub fn includes(&self, phase: u32, step: u32, success: f64) -> bool {
        is_within(self.from_phase, self.until_phase, phase)
            && is_within(self.from_step, self.until_step, step)
            && is_within(self.from_success, self.until_success, success)
    }

    /// Returns the names of the task fields that have a condition, each with its allowed values.
    pub fn fields(&self) -> impl Iterator<Item = (&'static str, &[String])> {
        let all =
            [("source", &self.source), ("kind", &self.kind), ("data_source", &self.data_source)];
        all.into_iter()
            .filter(|(_, values)| !values.is_empty())
            .map(|(name, values)| (name, &values.0[..]))
    }
}

fn is_within<T: PartialOrd>(from: Option<T>, until: Option<T>, value: T) -> bool {
    from.is_none_or(|from| value >= from) && until.is_none_or(|until| value < until)
}

/// A list of strings, which a recipe can also contain as a single string.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[serde(transparent)]
pub struct Values(Vec<String>);

impl Values {
    /// Returns whether `value` is one of the strings in the list.
    pub fn contains(&self, value: &str) -> bool {
        self.0.iter().any(|allowed| allowed == value)
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'de> Deserialize<'de> for Values {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a string in quotes, or a non-empty list of strings";
        deserialize_one_or_several(deserializer, expected).map(Values)
    }
}

/// `unscored`: what happens to an attempt that a scorer cannot score.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum UnscoredEffect {
    /// The scoring request is retried a few times. Then the attempt counts as failed, and is
    /// retried up to `agent.retries` times.
    #[default]
    Retry,
    /// The attempt is excluded from training.
    Drop,
    /// The attempt stays in the store, and is scored when the scorer is available again. Meanwhile,
    /// the run continues until it needs the score.
    Defer,
    /// The attempt gets this number as its score.
    Value(f64),
}

impl UnscoredEffect {
    const NAMES: &[&str] = &["retry", "drop", "defer"];
}

impl Serialize for UnscoredEffect {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            UnscoredEffect::Retry => serializer.serialize_str("retry"),
            UnscoredEffect::Drop => serializer.serialize_str("drop"),
            UnscoredEffect::Defer => serializer.serialize_str("defer"),
            UnscoredEffect::Value(value) => serializer.serialize_f64(*value),
        }
    }
}

impl<'de> Deserialize<'de> for UnscoredEffect {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrNumber;
        impl Visitor<'_> for NameOrNumber {
            type Value = UnscoredEffect;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"retry\", \"drop\", \"defer\" or a number")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<UnscoredEffect, E> {
                match name {
                    "retry" => Ok(UnscoredEffect::Retry),
                    "drop" => Ok(UnscoredEffect::Drop),
                    "defer" | "park" => Ok(UnscoredEffect::Defer),
                    other => Err(E::unknown_variant(other, UnscoredEffect::NAMES)),
                }
            }

            fn visit_f64<E>(self, value: f64) -> Result<UnscoredEffect, E> {
                Ok(UnscoredEffect::Value(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<UnscoredEffect, E> {
                Ok(UnscoredEffect::Value(value as f64))
            }
        }
        deserializer.deserialize_any(NameOrNumber)
    }
}

const REWARD: &str = "reward";
/// Recipe key of the scorer for all tasks.
const SCORER: &str = "scorer";
/// Recipe key of the list of several scorers.
const SCORERS: &str = "scorers";

/// Returns whether the table `[reward]` lists several scorers.
fn has_scorer_list(reward: &Table) -> bool {
    reward.get(SCORERS).and_then(Value::as_array).is_some_and(|scorers| !scorers.is_empty())
}

/// Checks that a recipe file sets either one scorer for all tasks or a list of scorers.
///
/// # Errors
/// Returns an error if the file sets both.
pub(super) fn check_scorer_keys(table: &Table) -> Result<(), ReadError> {
    let reward = table.get(REWARD).and_then(Value::as_table);
    if reward.is_some_and(|reward| reward.contains_key(SCORER) && has_scorer_list(reward)) {
        let why = "`reward.scorer` and `[[reward.scorers]]` exclude each other; move the scorer to \
                   `[[reward.scorers]]`, or remove that list";
        return Err(ReadError::at_path([], why));
    }
    Ok(())
}

/// Removes the recipe key that is not in effect from `[reward]`: `scorer` or `scorers`.
pub(super) fn remove_unused_scorer_key(table: &mut Table) {
    let Some(Value::Table(reward)) = table.get_mut(REWARD) else { return };
    reward.remove(if has_scorer_list(reward) { SCORER } else { SCORERS });
}
