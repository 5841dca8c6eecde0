//! `policy` of an agent: one policy, or several with the fractions of attempts in which each is
//! used.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::read::deserialize_one_or_several;

/// One policy of a mixture of policies, with its weight: `{ name, weight }`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyWeight {
    /// Name of the policy.
    pub name: String,
    /// Relative weight of the policy in the mixture, more than 0. The weights of a mixture need not
    /// add up to 1.
    #[serde(alias = "share")]
    pub weight: f64,
    /// System prompt of the policy in a game, which replaces the agent's system prompt. If empty,
    /// the agent's system prompt is used.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub system: String,
    /// Text about the output format for the policy in a game, which replaces `game.format`. If
    /// empty, `game.format` is used.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub format: String,
}

impl PolicyWeight {
    /// Returns whether the policy has a separate system prompt or format text.
    pub fn has_prompts(&self) -> bool {
        !self.system.is_empty() || !self.format.is_empty()
    }
}

/// The policies that play an agent: an empty list if the recipe names no policy, one policy, or a
/// mixture of several.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PolicyChoice(Vec<PolicyWeight>);

impl PolicyChoice {
    /// Returns whether the recipe names no policy for the agent.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns all policies with their weights, in the order of the recipe.
    pub fn weights(&self) -> &[PolicyWeight] {
        &self.0
    }
}

impl fmt::Display for PolicyChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> =
            self.0.iter().map(|fraction| format!("\"{}\"", fraction.name)).collect();
        match &names[..] {
            [] => f.write_str("\"\""),
            names => f.write_str(&names.join(", ")),
        }
    }
}

impl From<String> for PolicyWeight {
    fn from(name: String) -> Self {
        PolicyWeight { name, weight: 1.0, system: String::new(), format: String::new() }
    }
}

impl Serialize for PolicyChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [] => serializer.serialize_str(""),
            [only] if only.weight == 1.0 && !only.has_prompts() => {
                serializer.serialize_str(&only.name)
            }
            fractions => fractions.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for PolicyChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "the name of a policy, or a non-empty list of { name, weight }";
        let mut fractions = deserialize_one_or_several::<PolicyWeight, D>(deserializer, expected)?;
        if matches!(&fractions[..], [PolicyWeight { name, .. }] if name.is_empty()) {
            fractions.clear();
        }
        Ok(PolicyChoice(fractions))
    }
}
