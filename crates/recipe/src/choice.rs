//! `policy` of an agent: one policy, or several with the fractions of attempts in which each is
//! used.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::read::one_or_several;

/// One policy of a mixture, `{ name, share }`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyWeight {
    /// Name of the policy.
    pub name: String,
    /// Relative weight, more than 0. Weights of a mixture need not add up to 1.
    #[serde(alias = "share")]
    pub weight: f64,
}

/// Policies of an agent: none if the recipe names none, one by its name, or a mixture.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PolicyChoice(Vec<PolicyWeight>);

impl PolicyChoice {
    /// Returns whether no policy is named.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns all policies, in the order of the recipe.
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
        PolicyWeight { name, weight: 1.0 }
    }
}

impl Serialize for PolicyChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [] => serializer.serialize_str(""),
            [PolicyWeight { name, weight: 1.0 }] => serializer.serialize_str(name),
            fractions => fractions.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for PolicyChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "the name of a policy, or a non-empty list of { name, weight }";
        let mut fractions = one_or_several::<PolicyWeight, D>(deserializer, expected)?;
        if matches!(&fractions[..], [PolicyWeight { name, .. }] if name.is_empty()) {
            fractions.clear();
        }
        Ok(PolicyChoice(fractions))
    }
}
