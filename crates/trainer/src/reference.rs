//! The reference that a divergence is measured from, where it moves: after every so many steps of a phase it
//! becomes what the policy is then.
//!
//! Which weights it has is a function of the step. A checkpoint between two moves holds them, since those
//! that they equal may be gone; at a move they are the policy's own.

use std::fs;
use std::path::Path;

use levade_policy::Learner;

use crate::TrainerError;
use crate::folder::file_error;
use crate::policies::{Learns, REFERENCE};
use crate::recipe::{Phase, RlKeys};
use crate::trainer::Trainer;

impl RlKeys {
    /// How many steps of the phase were done when the reference was taken that a step is measured from; 0 for
    /// where the phase began.
    pub(crate) fn reference_taken(&self, step: u32) -> u32 {
        let every = self.kl.map_or(0, |kl| kl.reference_every);
        step.checked_rem(every).map_or(0, |since| step - since)
    }

    /// Whether the reference moves before a step.
    pub(crate) fn reference_moves(&self, step: u32) -> bool {
        step > 0 && self.reference_taken(step) == step
    }

    /// Whether the weights of the reference are neither those that the phase began with nor the policy's,
    /// after so many steps.
    fn reference_is_its_own(&self, done: u32) -> bool {
        (1..done).contains(&self.reference_taken(done))
    }
}

/// Makes an empty folder of what may be there already.
pub(crate) fn empty(folder: &Path) -> Result<(), TrainerError> {
    let clear = || if folder.exists() { fs::remove_dir_all(folder) } else { Ok(()) };
    clear().and_then(|()| fs::create_dir_all(folder)).map_err(|source| file_error("empty", folder, source))
}

/// Gives one model the weights of another, through a folder that is gone afterwards.
pub(crate) async fn copy_weights(
    from: &dyn Learner,
    to: &dyn Learner,
    through: &Path,
) -> Result<(), TrainerError> {
    empty(through)?;
    from.save(through, false).await?;
    to.load(through, false).await?;
    fs::remove_dir_all(through).map_err(|source| file_error("remove", through, source))
}

impl Trainer {
    /// The reference of a policy, where the next checkpoint must hold it.
    pub(crate) fn reference_to_keep<'a>(&self, name: &str, learns: &'a Learns) -> Option<&'a dyn Learner> {
        let phase = self.recipe.phase.get(self.position.phase as usize)?;
        let Phase::Rl(keys) = phase else { return None };
        let trains = self.recipe.trained_in(phase).iter().any(|trained| trained == name);
        learns.reference.as_deref().filter(|_| trains && keys.reference_is_its_own(self.position.step))
    }

    /// Gives references the weights that they had when the phase was left in the middle.
    pub(crate) async fn recall_references(&self, phase: &Phase) -> Result<(), TrainerError> {
        let Phase::Rl(keys) = phase else { return Ok(()) };
        let Some(latest) = self.latest.as_ref().filter(|_| keys.reference_is_its_own(self.position.step))
        else {
            return Ok(());
        };
        for (name, learns) in self.policies.among(&self.recipe.trained_in(phase)) {
            if let Some(reference) = &learns.reference {
                reference.load(&self.policies.place(&latest.path, name).join(REFERENCE), false).await?;
            }
        }
        Ok(())
    }

    /// Moves references to the weights of their policies, if they are to move before `step`.
    pub(crate) async fn move_references(&self, phase: &Phase, step: u32) -> Result<(), TrainerError> {
        let Phase::Rl(keys) = phase else { return Ok(()) };
        for (_, Learns { learner, reference, .. }) in self.policies.among(&self.recipe.trained_in(phase)) {
            if let Some(reference) = reference.as_deref().filter(|_| keys.reference_moves(step)) {
                copy_weights(&**learner, reference, &self.checkpoints.scratch()).await?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_moves_every_so_many_steps() {
        let keys = |every: u32| -> RlKeys {
            let text = format!(
                "steps = 9\ngroups = 1\ngroup_size = 2\nlearning_rate = 1.0\n\
                 kl = {{ estimator = 'k3', coefficient = 0.1, reference_every = {every} }}"
            );
            toml::from_str(&text).unwrap()
        };
        let moving = keys(3);
        let taken: Vec<u32> = (0..8).map(|step| moving.reference_taken(step)).collect();
        assert_eq!(taken, [0, 0, 0, 3, 3, 3, 6, 6]);
        let moves: Vec<u32> = (0..8).filter(|step| moving.reference_moves(*step)).collect();
        assert_eq!(moves, [3, 6]);
        let kept: Vec<u32> = (0..8).filter(|done| moving.reference_is_its_own(*done)).collect();
        assert_eq!(kept, [4, 5, 7]);
        let fixed = keys(0);
        assert!((0..8).all(|step| fixed.reference_taken(step) == 0 && !fixed.reference_moves(step)));
        assert!(!fixed.reference_is_its_own(7));
    }
}
