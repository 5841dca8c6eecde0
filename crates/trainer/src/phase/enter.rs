//! Loads the weights that a phase starts with.

use crate::TrainerError;
use crate::checkpoint::{Checkpoint, Position};
use crate::context::RunContext;
use crate::policies::{CRITIC, PhaseModels};
use crate::progress::RunProgress;

/// Loads the models with which a phase starts. The optimizer is reset, and the reference of a KL
/// penalty gets the weights at the start of the phase. If the run resumes within the phase, only
/// the reference is loaded here.
///
/// # Errors
/// Returns an error if the checkpoint at the end of the previous phase is missing or damaged, or if
/// a model cannot be loaded.
pub(crate) async fn enter_phase(
    run: &RunContext,
    progress: &mut RunProgress,
    phase: usize,
) -> Result<(), TrainerError> {
    let starts_phase = phase as u32 > progress.position.phase;
    if starts_phase {
        progress.position = Position { phase: phase as u32, step: 0, ..progress.position };
    }
    let found = run.checkpoints.find()?.complete;
    let Some(before) = phase_start_checkpoint(&found, phase as u32) else {
        return match phase {
            0 => Ok(()),
            _ => Err(TrainerError::Damaged {
                path: run.run_dir.checkpoints(),
                why: format!(
                    "the checkpoint at the end of phase {}, from which phase {phase} started, is \
                     missing",
                    phase - 1
                ),
            }),
        };
    };
    let phase = &run.recipe.phase[phase];
    let trained = run.recipe.trained_policies_in(phase);
    for (name, policy_learner) in run.policies.trained_among(&trained) {
        let policy_dir = run.policies.policy_dir(&before.dir, name);
        if starts_phase {
            policy_learner.learner.load(&policy_dir, false).await?;
            run.policies.publish(name, progress.versions[name]).await?;
        }
        let PhaseModels { reference, critic, .. } = policy_learner.models(phase);
        if let Some(reference) = reference {
            // When the phase starts, these are the current weights, which were written or verified
            // just before.
            if !starts_phase {
                before
                    .verify_checksums()
                    .map_err(|why| TrainerError::Damaged { path: before.dir.clone(), why })?;
            }
            reference.load(&policy_dir, false).await?;
        }
        // A critic that an earlier phase has trained continues from its weights. A new critic
        // starts with the policy's weights.
        if let Some(critic) = critic.filter(|_| starts_phase) {
            let from = policy_dir.join(CRITIC);
            critic.load(if from.is_dir() { &from } else { &policy_dir }, false).await?;
        }
    }
    Ok(())
}

/// Returns the checkpoint at the end of the phase before `phase`, from which `phase` starts.
/// Returns `None` for the first phase, which starts from the model.
pub(super) fn phase_start_checkpoint(
    checkpoints: &[Checkpoint],
    phase: u32,
) -> Option<&Checkpoint> {
    checkpoints.iter().rfind(|before| before.phase_end && before.position.phase + 1 == phase)
}
