//! Room on this machine: memory for the engines, disk for checkpoints.

use std::path::Path;

use levade_recipe::Recipe;
use levade_run::policies::Planned;

use super::report::Report;

/// Compares what a run will take with what there is.
pub fn check(recipe: &Recipe, planned: &Planned, report: &mut Report) {
    let plans = report.item("memory", planned.memory(recipe), |plans| {
        plans.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    });
    // Weights and two moments: no more than the gradient and these, which are in memory.
    let each: u64 = plans.iter().flatten().map(|plan| plan.optimiser).sum();
    let run = &recipe.run;
    let kept = if run.checkpoint_every > 0 { run.keep as u64 } else { 0 };
    // One of each phase, and one that is being written.
    let count = kept + recipe.phase.len() as u64 + 1;
    if let (Some(free), true) = (free(recipe), each > 0) {
        let (needed, mib) = (each.saturating_mul(count), |bytes: u64| bytes.div_ceil(1 << 20));
        let text = format!(
            "{count} checkpoints of up to {} MiB each, {} MiB free in {}",
            mib(each),
            free >> 20,
            crate::screen::path(&run.folder)
        );
        let way_out = "set run.folder elsewhere, lower run.keep, or free some";
        match needed <= free {
            true => report.fine("disk", &text),
            false => report.fault("disk", &format!("{text}\n{way_out}")),
        }
    }
}

/// The nearest folder above a path that is there.
pub fn there(path: &Path) -> Option<&Path> {
    path.ancestors().find(|path| path.exists())
}

/// Bytes that may be written where the run will be; `None` where the system does not say.
fn free(recipe: &Recipe) -> Option<u64> {
    let there = self::there(&recipe.run.folder)?;
    #[cfg(unix)]
    {
        let about = rustix::fs::statvfs(there).ok()?;
        Some(about.f_bavail.saturating_mul(about.f_frsize))
    }
    #[cfg(not(unix))]
    {
        let _ = there;
        None
    }
}
