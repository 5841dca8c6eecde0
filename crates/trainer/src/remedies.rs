//! Parts of error messages that describe what the user can do.

use std::io;

use levade_recipe::Difference;

/// Returns the part of an error message that explains how a run can continue with another reward.
/// Empty if `difference` does not concern the reward.
pub(crate) fn reward_change_remedy(difference: &Difference) -> &'static str {
    match difference.key.split('.').next() {
        Some("reward") => "name the step from which the new reward applies with --from, ",
        _ => "",
    }
}

/// Describes why a run of `num_steps` steps with checkpoints at the steps `kept` cannot go back to
/// `step`.
pub(crate) fn explain_no_checkpoint(step: u32, num_steps: u32, kept: &[u32]) -> String {
    if step > num_steps {
        return format!(
            "has {num_steps} steps, so it cannot go back to step {step}; name an earlier step with \
             --from, or continue the run without --from"
        );
    }
    format!("has no checkpoint at step {step} or before; {}", list_checkpoint_steps(kept))
}

/// Lists the steps at which checkpoints exist, with advice on what to do.
fn list_checkpoint_steps(kept: &[u32]) -> String {
    let steps: Vec<String> = kept.iter().map(u32::to_string).collect();
    if steps.is_empty() {
        return "it has none; start a new run in another directory with --run".into();
    }
    format!("it has those at {}; name one of them, or a later step, with --from", steps.join(", "))
}

/// Returns the part of an error message that explains how to continue after a file could not be
/// written. Empty if the disk is not full.
pub(crate) fn full_disk_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free space and continue with --resume: earlier checkpoints are intact"
        }
        _ => "",
    }
}
