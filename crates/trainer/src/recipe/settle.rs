//! Defaults of keys that follow from other parts of a recipe.

use super::keys::{Phase, Recipe};
use super::rl::Proximal;

impl Recipe {
    /// Gives phases that name no correction the default one, where servers sample. Log-probabilities that
    /// they report differ in bits from those that the learner computes, which ratios to the policy that drew
    /// a token would take for a change of weights.
    pub(super) fn settle(&mut self) {
        let Some(samplers) = &self.cluster.samplers else { return };
        let Some(correction) = samplers.servers().correction.correction() else { return };
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
