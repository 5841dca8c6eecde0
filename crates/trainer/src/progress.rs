//! Tracks how far a run has come.

use crate::checkpoint::{Checkpoint, Position, Versions};
use crate::eval_result::EvalResult;

/// The state of a run between two steps: position, versions of the weights, checkpoint, evaluations.
pub(crate) struct RunProgress {
    /// Phase and step that the run has come to.
    pub position: Position,
    /// Number of steps that have trained each policy, by name.
    pub versions: Versions,
    /// The newest checkpoint; `None` before the first one.
    pub latest: Option<Checkpoint>,
    /// Evaluations in order, those of earlier processes of the run included.
    pub evals: Vec<EvalResult>,
}

impl RunProgress {
    /// Returns the version of the weights of a policy that samplers use.
    pub fn version(&self, policy: &str) -> u64 {
        self.versions.get(policy).copied().unwrap_or_default()
    }

    /// Returns the number of completed steps of a phase that is current or still to come.
    pub fn steps_done(&self, phase: u32) -> u32 {
        if self.position.phase == phase { self.position.step } else { 0 }
    }
}
