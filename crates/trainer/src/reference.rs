//! The reference that a divergence is measured from, where it moves: after every so many steps of a phase it
//! becomes what the policy is then.
//!
//! Which weights it has is a function of the step. A checkpoint between two moves holds them, since those
//! that they equal may be gone; at a move they are the policy's own.

use std::fs;
use std::path::Path;

use levade_policy::Learner;
use levade_recipe::Phase;

use crate::TrainerError;
use crate::files::file_error;
use crate::policies::{Learns, REFERENCE};
use crate::trainer::Trainer;

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
