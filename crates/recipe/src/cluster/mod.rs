//! `[cluster]`: samplers and learners outside the embedded engine.

mod learner;
mod samplers;

use serde::{Deserialize, Serialize};

pub use learner::{LearnerKeys, TorchKeys};
pub use samplers::{CorrectionDefault, InFlightKey, SamplersKeys, ServersKeys, WeightsKey};

/// `[cluster]`: learner and samplers outside of the embedded engine.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterKeys {
    /// Whether learner and samplers have separate devices or share devices.
    pub placement: Placement,
    /// External learner, which replaces the embedded engine in training. `None` for the engine.
    pub learner: Option<LearnerKeys>,
    /// External samplers, which replace the embedded engine in sampling. `None` for the engine.
    pub samplers: Option<SamplersKeys>,
}

/// How devices are assigned to the learner and the samplers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Learner and samplers have separate devices (disaggregated).
    #[default]
    #[serde(alias = "apart")]
    Disaggregated,
    /// Learner and samplers alternate on the same devices (colocated). Servers sleep while the
    /// learner trains, and the learner is offloaded to host memory while servers sample.
    #[serde(alias = "shared")]
    Colocated,
}

impl ClusterKeys {
    /// Returns whether the embedded engine both samples and trains.
    pub(super) fn is_empty(&self) -> bool {
        *self == ClusterKeys::default()
    }

    /// Returns whether one engine both samples and trains. If so, the log-probabilities recorded in
    /// sampling are bitwise equal to those that training computes.
    pub fn is_one_engine(&self) -> bool {
        self.is_empty()
    }
}
