//! Parts of what an attempt is worth, and whom or what each is about.

use serde::{Deserialize, Serialize};

use crate::SegmentId;

/// The earner of a part of a reward. Whatever it is, the part reaches the sampled token that was the last
/// before it was earned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Earner {
    /// A segment: an action itself, or what was observed after one.
    Segment(SegmentId),
    /// A model call.
    Turn(u32),
    /// An agent, at the end of its part of every path.
    Agent(String),
}

/// A part of what an attempt is worth, as a scorer gives it and as it is recorded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Component {
    /// Name. A scorer calls its own score [`Component::SCORE`], and what it tells besides as it likes;
    /// recorded are the name of the scorer and, after a dot, that of anything but its own score.
    pub name: String,
    /// Value, finite.
    pub value: f64,
    /// Weight in the score of the attempt, which the recipe says and no scorer; `None` where it does not
    /// count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// The part of the attempt that it is about; `None` for all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on: Option<Earner>,
    /// The part of the final text that was taken for the answer, where the scorer says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extracted: Option<String>,
}

impl Component {
    /// The name by which a scorer calls its own score.
    pub const SCORE: &str = "score";

    /// Something that a scorer says of an attempt as a whole.
    pub fn new(name: impl Into<String>, value: f64) -> Self {
        Component { name: name.into(), value, weight: None, on: None, extracted: None }
    }

    /// The score that a scorer gives an attempt as a whole.
    pub fn score(value: f64) -> Self {
        Component::new(Component::SCORE, value)
    }

    /// Share in the score of the attempt.
    pub fn share(&self) -> f64 {
        self.weight.map_or(0.0, |weight| weight * self.value)
    }
}
