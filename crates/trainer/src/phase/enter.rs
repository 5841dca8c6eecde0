//! Loads the weights that a phase starts with.

use crate::TrainerError;
use crate::checkpoint::Position;
use crate::context::RunContext;
use crate::policies::{CRITIC, Models};
use crate::progress::RunProgress;

/// Starts a phase, unless the run is in the middle of it: the optimizer is reset, and a KL penalty
/// is measured from the weights that the phase starts with.
///
/// # Errors
/// Returns an error if the checkpoint at the end of the previous phase is missing or damaged, or if
/// a model cannot be loaded.
pub(crate) async fn enter(
    run: &RunContext,
    progress: &mut RunProgress,
    phase: usize,
) -> Result<(), TrainerError> {
    let begins = phase as u32 > progress.position.phase;
    if begins {
        progress.position = Position { phase: phase as u32, step: 0, ..progress.position };
    }
    // The checkpoint at the end of the previous phase. The first phase has none: it starts from the
    // model.
    let found = run.checkpoints.find()?.whole;
    let before = found
        .iter()
        .rfind(|checkpoint| checkpoint.phase_end && checkpoint.position.phase + 1 == phase as u32);
    let Some(before) = before else {
        return match phase {
            0 => Ok(()),
            _ => Err(TrainerError::Damaged {
                path: run.folder.checkpoints(),
                why: format!(
                    "the checkpoint at the end of phase {} is gone, from which phase {phase} began",
                    phase - 1
                ),
            }),
        };
    };
    let phase = &run.recipe.phase[phase];
    let trained = run.recipe.trained_policies_in(phase);
    for (name, learns) in run.policies.among(&trained) {
        let place = run.policies.place(&before.path, name);
        if begins {
            learns.learner.load(&place, false).await?;
            run.policies.publish(name, progress.versions[name]).await?;
        }
        let Models { reference, critic, .. } = learns.models(phase);
        if let Some(reference) = reference {
            // When the phase starts, these are the current weights, which were written or verified
            // just before.
            if !begins {
                before.verify().map_err(|why| TrainerError::Damaged { path: before.path.clone(), why })?;
            }
            reference.load(&place, false).await?;
        }
        // A critic that an earlier phase has trained continues from its weights. A new critic
        // starts with the policy's weights.
        if let Some(critic) = critic.filter(|_| begins) {
            let from = place.join(CRITIC);
            critic.load(if from.is_dir() { &from } else { &place }, false).await?;
        }
    }
    Ok(())
}
