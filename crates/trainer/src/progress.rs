//! Tracks the progress of a run.

use crate::checkpoint::{Checkpoint, Position, Versions};
use crate::eval_result::EvalResult;
use crate::prompt_version::Prompts;

/// The state of a run between two steps: position, weight versions, checkpoint, evaluations.
pub(crate) struct RunProgress {
    /// Current phase and step of the run.
    pub position: Position,
    /// Number of steps that have trained each policy, by name.
    pub versions: Versions,
    /// Texts that phases have improved.
    pub prompts: Prompts,
    /// Newest checkpoint. `None` before the first checkpoint.
    pub latest: Option<Checkpoint>,
    /// Evaluations in order, including those of earlier processes of the run.
    pub evals: Vec<EvalResult>,
}

impl RunProgress {
    /// Returns the weight version of a policy that samplers use.
    pub fn version(&self, policy: &str) -> u64 {
        self.versions.get(policy).copied().unwrap_or_default()
    }

    /// Returns the number of finished steps of the current phase, or 0 for a later one.
    pub fn steps_done(&self, phase: u32) -> u32 {
        if self.position.phase == phase { self.position.step } else { 0 }
    }
}
