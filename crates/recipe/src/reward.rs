//! `[reward]`: what an attempt is worth. Scorers are one, `scorer`, or several, `[[reward.scorers]]`.
//!
//! In a file the keys of one of several scorers and the options of its kind are one table. Typed, they are
//! apart.

use std::collections::BTreeMap;
use std::fmt;

use levade_reward::ScorerKind;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use toml::{Table, Value};

use super::read::{ReadError, one_or_several};

/// `[reward]`: reward = score + shaping, where the score is the sum of what the scorers give, each times its
/// weight. Evaluations count the score alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardKeys {
    /// How the final answer is scored, where there is one scorer for all tasks.
    pub scorer: ScorerKind,
    /// Several scorers, each for all tasks or for some.
    pub scorers: Vec<ScorerKeys>,
    /// The fate of an attempt that a scorer cannot score, where that does not say so itself.
    pub unscored: Unscored,
    /// Longest wait for a scorer: for one that does not answer, and for one that is away while nothing can be
    /// trained without its scores. Then the run stops, and can go on.
    pub outage_seconds: f64,
    /// Added for each call that could not be read, mostly a small negative number.
    pub malformed_call: f64,
    /// Added for each call that could be read but not answered (unknown tool, wrong arguments, failure,
    /// time-out).
    pub failed_call: f64,
    /// Added where the attempt was cut by a limit before its answer.
    pub unfinished: f64,
    /// The reward where something outside the model broke; such an attempt is left out of training where not
    /// given.
    pub broken: Option<f64>,
}

impl Default for RewardKeys {
    fn default() -> Self {
        RewardKeys {
            scorer: ScorerKind::default(),
            scorers: Vec::new(),
            unscored: Unscored::default(),
            outage_seconds: 3600.0,
            malformed_call: 0.0,
            failed_call: 0.0,
            unfinished: 0.0,
            broken: None,
        }
    }
}

impl RewardKeys {
    /// The one scorer for all tasks, with the keys that it has where it is named after its kind.
    pub fn only(&self) -> ScorerKeys {
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
    /// Name in the record and in metrics, where a task chooses it, and in messages.
    pub name: String,
    /// The weight of its score; 0 where it is only recorded.
    #[serde(default = "one")]
    pub weight: f64,
    /// Weights of the other components that it gives, by name; these do not count where not given.
    #[serde(default)]
    pub weights: BTreeMap<String, f64>,
    /// The tasks that it scores: all where not given.
    #[serde(default)]
    pub when: WhenKeys,
    /// The fate of an attempt that it cannot score, where that is not `reward.unscored`.
    #[serde(default)]
    pub unscored: Option<Unscored>,
    /// How it scores.
    #[serde(rename = "$options")]
    pub scorer: ScorerKind,
}

fn one() -> f64 {
    1.0
}

/// `when`: fields of a task, each with the values that it may have. All that are given must hold.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WhenKeys {
    /// Where the task comes from: the name of a file or a generator.
    #[serde(skip_serializing_if = "Values::is_empty")]
    pub source: Values,
    /// The kind of the task.
    #[serde(skip_serializing_if = "Values::is_empty")]
    pub kind: Values,
    /// The field `data_source` of its row, as in verl's files.
    #[serde(skip_serializing_if = "Values::is_empty")]
    pub data_source: Values,
}

impl WhenKeys {
    /// Fields with the values that each may have, those without any left out.
    pub fn fields(&self) -> impl Iterator<Item = (&'static str, &[String])> {
        let all = [("source", &self.source), ("kind", &self.kind), ("data_source", &self.data_source)];
        all.into_iter().filter(|(_, values)| !values.is_empty()).map(|(name, values)| (name, &values.0[..]))
    }
}

/// A text or a list of texts.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[serde(transparent)]
pub struct Values(Vec<String>);

impl Values {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'de> Deserialize<'de> for Values {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a text in quotes, or a list of texts that is not empty";
        one_or_several(deserializer, expected).map(Values)
    }
}

/// `unscored`: the fate of an attempt that a scorer cannot score.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Unscored {
    /// The scorer is asked again a few times; then the attempt counts as broken, and is made again as often
    /// as `agent.retries` says.
    #[default]
    Retry,
    /// The attempt is left out of training.
    Drop,
    /// The attempt is kept in the record, and scored once the scorer is back. The run goes on as far as it
    /// can without the score.
    Park,
    /// The attempt gets this score.
    Value(f64),
}

impl Unscored {
    const NAMES: &[&str] = &["retry", "drop", "park"];
}

impl Serialize for Unscored {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Unscored::Retry => serializer.serialize_str("retry"),
            Unscored::Drop => serializer.serialize_str("drop"),
            Unscored::Park => serializer.serialize_str("park"),
            Unscored::Value(value) => serializer.serialize_f64(*value),
        }
    }
}

impl<'de> Deserialize<'de> for Unscored {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrNumber;
        impl Visitor<'_> for NameOrNumber {
            type Value = Unscored;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"retry\", \"drop\", \"park\" or a number")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Unscored, E> {
                match name {
                    "retry" => Ok(Unscored::Retry),
                    "drop" => Ok(Unscored::Drop),
                    "park" => Ok(Unscored::Park),
                    other => Err(E::unknown_variant(other, Unscored::NAMES)),
                }
            }

            fn visit_f64<E>(self, value: f64) -> Result<Unscored, E> {
                Ok(Unscored::Value(value))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Unscored, E> {
                Ok(Unscored::Value(value as f64))
            }
        }
        deserializer.deserialize_any(NameOrNumber)
    }
}

const REWARD: &str = "reward";
/// The key of the only scorer.
const SCORER: &str = "scorer";
/// The key of several scorers.
const SCORERS: &str = "scorers";

/// Whether the file has several scorers.
fn has_several(reward: &Table) -> bool {
    reward.get(SCORERS).and_then(Value::as_array).is_some_and(|scorers| !scorers.is_empty())
}

/// Checks that a file has one scorer for all tasks, or several.
///
/// # Errors
/// Returns an error if the file has both.
pub(super) fn check_alone(table: &Table) -> Result<(), ReadError> {
    let reward = table.get(REWARD).and_then(Value::as_table);
    if reward.is_some_and(|reward| reward.contains_key(SCORER) && has_several(reward)) {
        let why = "`reward.scorer` is the only scorer where it is given: put it among `[[reward.scorers]]`, or leave these out";
        return Err(ReadError::at([], why));
    }
    Ok(())
}

/// Leaves only those scorers in a table that count.
pub(super) fn leave_used(table: &mut Table) {
    let Some(Value::Table(reward)) = table.get_mut(REWARD) else { return };
    reward.remove(if has_several(reward) { SCORER } else { SCORERS });
}
