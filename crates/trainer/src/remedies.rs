//! Parts of error messages that describe what the user can do.

use std::io;

use levade_recipe::Difference;

/// Describes how a run can continue with another reward.
pub(crate) fn way_back(difference: &Difference) -> &'static str {
    match difference.key.split('.').next() {
        Some("reward") => "name the step from which the new reward applies with --from, ",
        _ => "",
    }
}

/// Describes the steps at which checkpoints exist.
pub(crate) fn listed_steps(kept: &[u32]) -> String {
    let steps: Vec<String> = kept.iter().map(u32::to_string).collect();
    if steps.is_empty() {
        return "it has none; start a new run in another directory with --run".into();
    }
    format!("it has those at {}; name one of them, or a later step, with --from", steps.join(", "))
}

/// Describes how a run can continue after a file could not be written.
pub(crate) fn way_out(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free space and continue with --resume: earlier checkpoints are intact"
        }
        _ => "",
    }
}
