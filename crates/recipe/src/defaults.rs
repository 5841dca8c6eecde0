//! Applies defaults of keys that depend on other parts of a recipe.

use levade_policy::Precision;
use levade_rl::correction::{Bound, Correction};

use super::cluster::{CorrectionDefault, LearnerKeys};
use super::keys::{Phase, Recipe};
use super::rl::ProximalPolicy;

impl Recipe {
    /// Returns the importance correction for phases that set none, or `None` if sampler and learner
    /// compute equal log-probabilities or the recipe disables the correction.
    ///
    /// Log-probabilities of inference servers, or of the engine combined with a learner that
    /// computes in bf16, differ numerically from the learner's. Without a correction, the loss
    /// would treat this difference as a change of weights.
    fn default_correction(&self) -> Option<Correction> {
        if let Some(samplers) = &self.cluster.samplers {
            return samplers.servers().correction.correction();
        }
        match &self.cluster.learner {
            Some(LearnerKeys::Torch(keys)) if keys.dtype == Precision::Bf16 => {
                CorrectionDefault::Tis.correction()
            }
            _ => None,
        }
    }

    /// Describes, for the user, how and why phases correct for numerical differences between
    /// sampler and learner. Returns `None` if there is no default correction, or if no phase has a
    /// correction.
    pub fn numerics_note(&self) -> Option<String> {
        self.default_correction()?;
        let mut phases = self.phase.iter().filter_map(|phase| match phase {
            Phase::Rl(keys) => keys.correction(),
            Phase::Sft(_) | Phase::Prompt(_) => None,
        });
        let how = match phases.next()?.bound {
            Bound::Clamp { high, .. } => {
                format!(
                    "the ratio of a token is clamped to at most {high} (truncated importance \
                     sampling)"
                )
            }
            Bound::Mask { low, high } => {
                format!("tokens whose ratio is outside of {low} to {high} are ignored (IcePop)")
            }
        };
        Some(format!(
            "sampler and learner differ in their numerics, so {how}; rollout_corr/log_diff_mean \
             measures the difference; to change this, set `correction` in the phase"
        ))
    }

    /// Sets the default importance correction in RL phases that set neither `proximal`,
    /// `correction` nor `rejection`.
    pub(super) fn apply_defaults(&mut self) {
        let Some(correction) = self.default_correction() else { return };
        for phase in &mut self.phase {
            if let Phase::Rl(keys) = phase
                && keys.proximal == ProximalPolicy::Behavior
                && keys.correction.is_none()
                && keys.rejection.is_empty()
            {
                keys.proximal = ProximalPolicy::Recompute;
                keys.correction = Some(correction);
            }
        }
    }
}

#[cfg(test)]
#[path = "settle_tests.rs"]
mod tests;
