//! Components of an attempt's reward, and the part of the attempt that each is credited to.

use serde::{Deserialize, Serialize};

use crate::SegmentId;

/// The part of an attempt that a reward is credited to. The reward reaches the last sampled token
/// of this part. If the part has no sampled token, the reward reaches the last sampled token before
/// the part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CreditTarget {
    /// A segment of the attempt's trajectory: an action, or the observation after an action.
    Segment(SegmentId),
    /// The model call with this turn number.
    Turn(u32),
    /// The agent with this name, at the end of its part of every sequence.
    Agent(String),
}

/// A component of an attempt's reward, as scorers return it and as it is recorded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Component {
    /// Name of the component. A scorer names its own score [`Component::SCORE`], and chooses the
    /// names of its other components. The recorded name is the name of the scorer; for other
    /// components, a dot and the component's name follow.
    pub name: String,
    /// Value of the component, which must be finite.
    pub value: f64,
    /// Weight of the component in the attempt's score, set by the recipe, never by the scorer.
    /// `None` if the component does not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// The part of the attempt that the component is about. `None` for the complete attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "on")]
    pub credit_target: Option<CreditTarget>,
    /// The part of the final text that was parsed as the answer, if the scorer reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extracted: Option<String>,
}

impl Component {
    /// Name of the component that is a scorer's own score.
    pub const SCORE: &str = "score";

    /// Creates a component of the complete attempt, without weight.
    pub fn new(name: impl Into<String>, value: f64) -> Self {
        Component { name: name.into(), value, weight: None, credit_target: None, extracted: None }
    }

    /// Creates the component for a scorer's score of the complete attempt.
    pub fn score(value: f64) -> Self {
        Component::new(Component::SCORE, value)
    }

    /// Returns the component's contribution to the attempt's score, weight × value. The
    /// contribution is 0 without a weight.
    pub fn weighted_value(&self) -> f64 {
        self.weight.map_or(0.0, |weight| weight * self.value)
    }
}
