//! Defaults of keys that follow from other parts of a recipe.

use levade_policy::Precision;
use levade_rl::correction::{Bound, Correction};

use super::cluster::{CorrectionDefault, LearnerKeys};
use super::keys::{Phase, Recipe};
use super::rl::Proximal;

impl Recipe {
    /// The correction of phases that name none. Log-probabilities that servers report, and those of the
    /// engine beside a learner that computes in bf16, differ from the learner's by more than ratios to the
    /// policy that drew a token should see: they would take that for a change of weights.
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

    /// Says what corrects for the numerics of a sampler that is not the learner, and why; `None` where
    /// nothing does.
    pub fn numerics_note(&self) -> Option<String> {
        self.default_correction()?;
        let mut phases = self.phase.iter().filter_map(|phase| match phase {
            Phase::Rl(keys) => keys.correction(),
            Phase::Sft(_) => None,
        });
        let how = match phases.next()?.bound {
            Bound::Clamp { high, .. } => {
                format!("a token weighs at most {high} of its ratio (truncated importance sampling)")
            }
            Bound::Mask { low, high } => {
                format!("tokens whose ratio is outside of {low} to {high} count nothing (IcePop)")
            }
        };
        Some(format!(
            "sampler and learner differ in their numerics, so {how}; rollout_corr/log_diff_mean says by how much, \
             `correction` of a phase is another choice"
        ))
    }

    /// Gives phases that name no correction the default one.
    pub(super) fn settle(&mut self) {
        let Some(correction) = self.default_correction() else { return };
        for phase in &mut self.phase {
            if let Phase::Rl(keys) = phase
                && keys.proximal == Proximal::Behaviour
                && keys.correction.is_none()
                && keys.rejection.is_empty()
            {
                keys.proximal = Proximal::Recompute;
                keys.correction = Some(correction);
            }
        }
    }
}

#[cfg(test)]
#[path = "settle_tests.rs"]
mod tests;
