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

use super::read::{ReadError, one_or_several};

/// `[reward]`: reward = score + shaping. The score is the weighted sum of the scorers' scores.
/// Evaluations use only the score.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardKeys {
    /// Scorer of the final answer, if one scorer is used for all tasks.
    pub scorer: ScorerKind,
    /// Several scorers, each for all tasks or for some.
    pub scorers: Vec<ScorerKeys>,
    /// Name of the agent whose part of a game's rewards is the score and reward of an attempt, in
    /// metrics, evaluations and filters: the mean over the seats of the agent. If empty, the score
    /// is the sum over all agents, which is constant in a zero-sum game.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub of: String,
    /// Effect on an attempt that a scorer cannot score. A scorer in `scorers` can set its own.
    pub unscored: UnscoredEffect,
    /// Timeout for a scorer, in seconds: for one that does not respond, and for one that is
    /// unavailable while training needs its scores. After it, the run stops and can be resumed.
    #[serde(alias = "outage_seconds")]
    pub timeout_seconds: f64,
    /// Reward added for each call that could not be parsed, usually a small negative number.
    pub malformed_call: f64,
    /// Reward added for each call that was parsed but failed (unknown tool, wrong arguments,
    /// failure, timeout).
    pub failed_call: f64,
    /// Reward added if a limit ended the attempt before its answer.
    pub unfinished: f64,
    /// Reward if something outside the model broke. By default, such an attempt is left out of
    /// training.
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
    /// Returns the single scorer for all tasks as an entry of a list, named after its kind.
    pub fn single_scorer(&self) -> ScorerKeys {
        ScorerKeys {
            name: self.scorer.name().to_owned(),
            weight: one(),
            weights: BTreeMap::new(),
            when: WhenKeys::default(),
            unscored: None,
            scorer: self.scorer.clone(),
        }
    }
}

/// `[[reward.scorers]]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScorerKeys {
    /// Name in the store, in metrics and in messages, and by which a task selects the scorer.
    pub name: String,
    /// Weight of the score; 0 only records it.
    #[serde(default = "one")]
    pub weight: f64,
    /// Weights of the scorer's additional components, by name. Components without a weight do not
    /// count.
    #[serde(default)]
    pub weights: BTreeMap<String, f64>,
    /// Tasks that the scorer scores; all by default.
    #[serde(default)]
    pub when: WhenKeys,
    /// Effect on an attempt that the scorer cannot score; by default `reward.unscored`.
    #[serde(default)]
    pub unscored: Option<UnscoredEffect>,
    /// Kind and options of the scorer.
    #[serde(rename = "$options")]
    pub scorer: ScorerKind,
}

fn one() -> f64 {
    1.0
}

/// `when`: fields of a task, each with its allowed values, and a part of the training. All
/// conditions that are set must hold. A range contains its start (`from_…`), and not its end
/// (`until_…`).
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WhenKeys {
    /// Source of the task: the name of a file or a generator.
    #[serde(skip_serializing_if = "Values::is_empty")]
    pub source: Values,
    /// Kind of the task.
    #[serde(skip_serializing_if = "Values::is_empty")]
    pub kind: Values,
    /// Field `data_source` of the task's row, as in verl's files.
    #[serde(skip_serializing_if = "Values::is_empty")]
    pub data_source: Values,
    /// Other fields of the task's row, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub row: BTreeMap<String, Values>,
    /// Index of a phase, from 0.
    pub from_phase: Option<u32>,
    /// Index of a phase.
    pub until_phase: Option<u32>,
    /// Index of a step of a phase, from 0.
    pub from_step: Option<u32>,
    /// Index of a step of a phase.
    pub until_step: Option<u32>,
    /// Success at the task that a curriculum had measured when the attempt was started, in 0..=1.
    pub from_success: Option<f64>,
    /// Success at the task.
    pub until_success: Option<f64>,
}

impl WhenKeys {
    /// Returns whether the scorer applies at every moment of the training.
    pub fn is_constant(&self) -> bool {
        let steps = [self.from_phase, self.until_phase, self.from_step, self.until_step];
        steps.iter().all(Option::is_none) && !self.depends_on_success()
    }

    /// Returns whether a condition refers to the measured success at a task.
    pub fn depends_on_success(&self) -> bool {
        self.from_success.is_some() || self.until_success.is_some()
    }

    /// Returns whether the scorer applies to an attempt that was started in this step of this phase
    /// at a task of this measured success.
    pub fn includes(&self, phase: u32, step: u32, success: f64) -> bool {
        is_within(self.from_phase, self.until_phase, phase)
            && is_within(self.from_step, self.until_step, step)
            && is_within(self.from_success, self.until_success, success)
    }

    /// Returns the fields that have a condition, each with its allowed values.
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

/// A string or a list of strings.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[serde(transparent)]
pub struct Values(Vec<String>);

impl Values {
    /// Returns whether `value` is one of the strings.
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
        one_or_several(deserializer, expected).map(Values)
    }
}

/// `unscored`: effect on an attempt that a scorer cannot score.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum UnscoredEffect {
    /// The request is retried a few times. Then the attempt counts as broken, and is retried up to
    /// `agent.retries` times.
    #[default]
    Retry,
    /// The attempt is excluded from training.
    Drop,
    /// The attempt stays in the store and is scored when the scorer is available again. Meanwhile
    /// the run continues as far as it can without the score.
    Defer,
    /// The attempt gets this score.
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
/// Key of a single scorer.
const SCORER: &str = "scorer";
/// Key of a list of scorers.
const SCORERS: &str = "scorers";

/// Returns whether the file lists several scorers.
fn has_several(reward: &Table) -> bool {
    reward.get(SCORERS).and_then(Value::as_array).is_some_and(|scorers| !scorers.is_empty())
}

/// Checks that a file has either one scorer for all tasks or a list of scorers.
///
/// # Errors
/// Returns an error if the file has both.
pub(super) fn check_standalone(table: &Table) -> Result<(), ReadError> {
    let reward = table.get(REWARD).and_then(Value::as_table);
    if reward.is_some_and(|reward| reward.contains_key(SCORER) && has_several(reward)) {
        let why = "`reward.scorer` and `[[reward.scorers]]` exclude each other; move the scorer to \
                   `[[reward.scorers]]`, or remove that list";
        return Err(ReadError::at_path([], why));
    }
    Ok(())
}

/// Removes the key of the scorers that are not used, `scorer` or `scorers`.
pub(super) fn remove_unused(table: &mut Table) {
    let Some(Value::Table(reward)) = table.get_mut(REWARD) else { return };
    reward.remove(if has_several(reward) { SCORER } else { SCORERS });
}
