//! Schedule of a moving KL reference: after every `kl.reference_every` steps of a phase, the
//! reference takes the current weights of the policy.

use super::rl::RlKeys;

impl RlKeys {
    /// Returns after how many completed steps of the phase the KL reference took the weights that
    /// it has in step `step`. 0 is the start of the phase.
    pub fn reference_step(&self, step: u32) -> u32 {
        let every = self.kl.map_or(0, |kl| kl.reference_every);
        step.checked_rem(every).map_or(0, |since| step - since)
    }

    /// Returns whether the KL reference takes the current weights before step `step`.
    pub fn updates_reference(&self, step: u32) -> bool {
        step > 0 && self.reference_step(step) == step
    }

    /// Returns whether the weights of the KL reference after `done` steps must be stored
    /// separately, because they are neither the policy's weights at the start of the phase nor its
    /// current weights.
    pub fn has_separate_reference(&self, done: u32) -> bool {
        (1..done).contains(&self.reference_step(done))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_moves_at_configured_interval() {
        let keys = |every: u32| -> RlKeys {
            let text = format!(
                "steps = 9\ngroups = 1\ngroup_size = 2\nlearning_rate = 1.0\n\
                 kl = {{ estimator = 'k3', coefficient = 0.1, reference_every = {every} }}"
            );
            toml::from_str(&text).unwrap()
        };
        let moving = keys(3);
        let taken: Vec<u32> = (0..8).map(|step| moving.reference_step(step)).collect();
        assert_eq!(taken, [0, 0, 0, 3, 3, 3, 6, 6]);
        let moves: Vec<u32> = (0..8).filter(|step| moving.updates_reference(*step)).collect();
        assert_eq!(moves, [3, 6]);
        let kept: Vec<u32> = (0..8).filter(|done| moving.has_separate_reference(*done)).collect();
        assert_eq!(kept, [4, 5, 7]);
        let fixed = keys(0);
        assert!(
            (0..8).all(|step| fixed.reference_step(step) == 0 && !fixed.updates_reference(step))
        );
        assert!(!fixed.has_separate_reference(7));
    }
}
