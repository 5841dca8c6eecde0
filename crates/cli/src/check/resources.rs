//! Checks that this machine has enough memory for the engines and enough disk space for
//! checkpoints.

use std::path::Path;

use levade_recipe::Recipe;
use levade_run::policies::PlannedModels;

use super::report::CheckReport;

/// Compares the memory and the disk space that a run needs with the available memory and disk
/// space.
pub fn check_resources(recipe: &Recipe, planned: &PlannedModels, report: &mut CheckReport) {
    let plans = report.report_item("memory", planned.memory(recipe), |plans| {
        plans.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    });
    // A checkpoint contains the weights and two moments. That is at most the optimizer's memory,
    // which holds the gradient in addition to them.
    let each: u64 = plans.iter().flatten().map(|plan| plan.optimizer).sum();
    let run = &recipe.run;
    let kept = if run.checkpoint_every > 0 { run.keep as u64 } else { 0 };
    // One checkpoint of each phase is kept as well, and one is being written.
    let count = kept + recipe.phase.len() as u64 + 1;
    if let (Some(free), true) = (free_disk_space(recipe), each > 0) {
        let needed = each.saturating_mul(count);
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let text = format!(
            "{count} checkpoints of up to {} MiB each, {} MiB free in {}",
            mib(each),
            free >> 20,
            crate::screen::path(&run.folder)
        );
        let way_out = "set run.folder to another disk, lower run.keep, or free disk space";
        if needed <= free {
            report.pass("disk", &text)
        } else {
            report.fail("disk", &format!("{text}\n{way_out}"))
        }
    }
}

/// Returns `path` if it exists, and otherwise its nearest existing ancestor. Returns `None` if
/// there is none.
pub fn find_nearest_existing(path: &Path) -> Option<&Path> {
    path.ancestors().find(|path| path.exists())
}

/// Returns the free disk space at the run directory, in bytes. Returns `None` if the system does
/// not report the space.
fn free_disk_space(recipe: &Recipe) -> Option<u64> {
    let existing_dir = find_nearest_existing(&recipe.run.folder)?;
    #[cfg(unix)]
    {
        let about = rustix::fs::statvfs(existing_dir).ok()?;
        Some(about.f_bavail.saturating_mul(about.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = nearest_existing;
        None
    }
}
