//! Tracks the progress of a run.

use crate::checkpoint::{Checkpoint, Position, Versions};
use crate::eval_result::EvalResult;
use crate::prompt_version::ImprovedPrompts;

/// The part of a run's state that changes between steps: position, weight versions, improved
/// prompts, latest checkpoint and evaluations.
pub(crate) struct RunProgress {
    /// Current phase and step of the run.
    pub position: Position,
    /// Number of steps that have trained each policy, by name.
    pub versions: Versions,
    /// Prompt texts that phases have improved so far.
    pub prompts: ImprovedPrompts,
    /// Newest checkpoint. `None` before the first checkpoint.
    pub latest: Option<Checkpoint>,
    /// Evaluations in order, including those of earlier processes of the run.
    pub evals: Vec<EvalResult>,
}

impl RunProgress {
    /// Returns the weight version of `policy` that the samplers currently use.
    pub fn version(&self, policy: &str) -> u64 {
        self.versions.get(policy).copied().unwrap_or_default()
    }

    /// Returns the number of finished steps of `phase`, which is the current phase or a later one.
    /// A later phase has 0.
    pub fn steps_done(&self, phase: u32) -> u32 {
        if self.position.phase == phase { self.position.step } else { 0 }
    }
}
