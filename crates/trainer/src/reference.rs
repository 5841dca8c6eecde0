//! Updates the reference of a KL penalty: at a fixed interval of steps within a phase, the
//! reference gets the policy's weights.
//!
//! The weights of the reference are a function of the step. A checkpoint between two updates
//! contains them, because the policy's weights at the last update may no longer exist. At an update
//! they equal the policy's weights.

use std::fs;
use std::path::Path;

use levade_policy::Learner;
use levade_recipe::Phase;

use crate::TrainerError;
use crate::context::RunContext;
use crate::files::{create_empty_dir, file_error};
use crate::policies::{PolicyLearner, REFERENCE};
use crate::progress::RunProgress;

/// Copies the weights of one model to another through the temporary directory `through`, which is
/// removed afterwards.
pub(crate) async fn copy_weights(
    from: &dyn Learner,
    to: &dyn Learner,
    through: &Path,
) -> Result<(), TrainerError> {
    create_empty_dir(through)?;
    from.save(through, false).await?;
    to.load(through, false).await?;
    fs::remove_dir_all(through).map_err(|source| file_error("remove", through, source))
}

/// Returns the reference model of a policy if the next checkpoint must contain it, otherwise
/// `None`.
pub(crate) fn reference_to_keep<'a>(
    run: &RunContext,
    progress: &RunProgress,
    name: &str,
    policy_learner: &'a PolicyLearner,
) -> Option<&'a dyn Learner> {
    let phase = run.recipe.phase.get(progress.position.phase as usize)?;
    let Phase::Rl(keys) = phase else { return None };
    let trains = run.recipe.trained_policies_in(phase).iter().any(|trained| trained == name);
    policy_learner
        .reference
        .as_deref()
        .filter(|_| trains && keys.has_separate_reference(progress.position.step))
}

/// Loads the reference models of a phase that is resumed, with the weights that they had when the
/// run was interrupted.
///
/// # Errors
/// Returns an error if a reference cannot be loaded.
pub(crate) async fn restore_references(
    run: &RunContext,
    progress: &RunProgress,
    phase: &Phase,
) -> Result<(), TrainerError> {
    let Phase::Rl(keys) = phase else { return Ok(()) };
    let Some(latest) =
        progress.latest.as_ref().filter(|_| keys.has_separate_reference(progress.position.step))
    else {
        return Ok(());
    };
    for (name, policy_learner) in run.policies.trained_among(&run.recipe.trained_policies_in(phase))
    {
        if let Some(reference) = &policy_learner.reference {
            reference
                .load(&run.policies.policy_dir(&latest.dir, name).join(REFERENCE), false)
                .await?;
        }
    }
    Ok(())
}

/// Copies the current weights of the phase's policies into their reference models, if the
/// references must be updated before `step`.
///
/// # Errors
/// Returns an error if weights cannot be saved or loaded.
pub(crate) async fn update_references(
    run: &RunContext,
    phase: &Phase,
    step: u32,
) -> Result<(), TrainerError> {
    let Phase::Rl(keys) = phase else { return Ok(()) };
    for (_, PolicyLearner { learner, reference, .. }) in
        run.policies.trained_among(&run.recipe.trained_policies_in(phase))
    {
        if let Some(reference) = reference.as_deref().filter(|_| keys.updates_reference(step)) {
            copy_weights(&**learner, reference, &run.checkpoints.scratch_dir()).await?;
        }
    }
    Ok(())
}
