//! Writes checkpoints of a run at its position.

use std::path::Path;

use levade_policy::Learner;
use levade_recipe::Phase;

use crate::TrainerError;
use crate::checkpoint::{CheckpointMeta, PolicyContent};
use crate::context::RunContext;
use crate::observe::{Event, Observer};
use crate::policies::PolicyLearner;
use crate::progress::RunProgress;
use crate::reference::reference_to_keep;
use crate::reporter::Reporter;

/// Writes a checkpoint, which becomes the latest checkpoint, and removes the checkpoints that the
/// recipe does not keep.
///
/// # Errors
/// Returns an error if a file cannot be written or a learner fails.
pub(crate) async fn save_checkpoint(
    run: &RunContext,
    progress: &mut RunProgress,
    reporter: &mut Reporter,
    phase_end: bool,
    observer: &mut dyn Observer,
) -> Result<(), TrainerError> {
    let bytes = reporter.sync()?;
    let mut contents = Vec::new();
    for (name, policy_learner) in run.policies.trained() {
        contents.push(PolicyContent {
            subdir: run.policies.policy_dir(Path::new(""), name),
            learner: &*policy_learner.learner,
            critic: critic_in_use(run, progress, name, policy_learner),
            reference: reference_to_keep(run, progress, name, policy_learner),
            write_extra_files: &*policy_learner.extra_files,
        });
    }
    let about = CheckpointMeta {
        position: progress.position,
        versions: progress.versions.clone(),
        prompts: progress.prompts.clone(),
        phase_end,
        metrics_bytes: bytes,
    };
    let written = run.checkpoints.write(&contents, about).await?;
    observer.event(&Event::Checkpoint(written.dir.clone()));
    progress.latest = Some(written);
    run.checkpoints.prune(run.recipe.run.keep as usize)?;
    run.past.prune(&run.checkpoints.find()?.complete)
}

/// Returns the critic of a policy, or `None` if no phase that trains the critic has started.
fn critic_in_use<'a>(
    run: &RunContext,
    progress: &RunProgress,
    name: &str,
    policy_learner: &'a PolicyLearner,
) -> Option<&'a dyn Learner> {
    let mut started_phases = run.recipe.phase.iter().take(progress.position.phase as usize + 1);
    let needs = |phase: &Phase| {
        let trains = run.recipe.trained_policies_in(phase).iter().any(|trained| trained == name);
        trains && matches!(phase, Phase::Rl(keys) if keys.needs_critic())
    };
    policy_learner.critic.as_deref().filter(|_| started_phases.any(needs))
}
