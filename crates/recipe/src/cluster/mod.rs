//! `[cluster]`: parts of a run that are elsewhere.

mod learner;
mod samplers;

use serde::{Deserialize, Serialize};

pub use learner::{LearnerKeys, TorchKeys};
pub use samplers::{CorrectionDefault, InFlightKey, SamplersKeys, ServersKeys, WeightsKey};

/// `[cluster]`
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterKeys {
    /// Whether learner and samplers have devices of their own, or the same ones by turns.
    pub placement: Placement,
    /// The learner, in place of the embedded engine.
    pub learner: Option<LearnerKeys>,
    /// Who samples, in place of the embedded engine.
    pub samplers: Option<SamplersKeys>,
}

/// Devices of the learner and of the samplers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Devices of their own.
    #[default]
    Apart,
    /// Devices that both have by turns: servers sleep while the learner works, and the learner lies in the
    /// host's memory while servers sample.
    Shared,
}

impl ClusterKeys {
    /// Whether everything is here.
    pub(super) fn is_empty(&self) -> bool {
        *self == ClusterKeys::default()
    }

    /// Whether one engine samples and trains, so that what a token was drawn with is to the bit what training
    /// computes for it.
    pub fn is_one_engine(&self) -> bool {
        self.is_empty()
    }
}
