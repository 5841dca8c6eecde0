//! `policy` of an agent: one policy, or several with the shares of attempts in which each plays it.

use std::fmt;

use serde::de::{self, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A policy among several, `{ name, share }`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// The policy, by name.
    pub name: String,
    /// Weight, which need not add up to 1 with the others.
    pub share: f64,
}

/// Policies of an agent: none where the recipe names none, one by its name, or a mixture.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PolicyChoice(Vec<Share>);

impl PolicyChoice {
    /// Whether none is named.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them, in their order.
    pub fn shares(&self) -> &[Share] {
        &self.0
    }
}

impl fmt::Display for PolicyChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.0.iter().map(|share| format!("\"{}\"", share.name)).collect();
        match &names[..] {
            [] => f.write_str("\"\""),
            names => f.write_str(&names.join(", ")),
        }
    }
}

impl From<&str> for PolicyChoice {
    fn from(name: &str) -> Self {
        match name {
            "" => PolicyChoice::default(),
            name => PolicyChoice(vec![Share { name: name.to_owned(), share: 1.0 }]),
        }
    }
}

impl Serialize for PolicyChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0[..] {
            [] => serializer.serialize_str(""),
            [Share { name, share: 1.0 }] => serializer.serialize_str(name),
            shares => shares.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for PolicyChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrSeveral;
        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = PolicyChoice;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a policy, or a list of { name, share } that is not empty")
            }

            fn visit_str<E>(self, text: &str) -> Result<PolicyChoice, E> {
                Ok(text.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<PolicyChoice, A::Error> {
                let mut shares = Vec::new();
                while let Some(share) = items.next_element()? {
                    shares.push(share);
                }
                if shares.is_empty() {
                    return Err(de::Error::invalid_value(Unexpected::Seq, &self));
                }
                Ok(PolicyChoice(shares))
            }
        }
        deserializer.deserialize_any(OneOrSeveral)
    }
}
