//! Help for tests of records: waiting where nothing is async, and comparing runs of which one was killed.

use std::collections::HashMap;
use std::future::Future;
use std::thread;

use levade_tree::{AttemptId, Purpose};

use crate::{AttemptSummary, Status, StepPlan, Store, StoreError};

/// Waits for a future, on a thread of its own: also from within a runtime.
///
/// # Panics
/// Panics where the future does, or no runtime can be made.
pub fn wait<T: Send>(future: impl Future<Output = T> + Send) -> T {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(future)
    };
    thread::scope(|scope| match scope.spawn(run).join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Attempts that count, with the names and numbers that they would have if none had been abandoned on the
/// way: those of as many tries as failed before.
///
/// # Errors
/// When reading fails.
///
/// # Panics
/// Panics where a try that counts has an earlier one that counts, or has none.
pub async fn undisturbed(store: &dyn Store) -> Result<HashMap<AttemptId, (AttemptId, u32)>, StoreError> {
    let mut names = HashMap::new();
    for purpose in [Purpose::Demonstration, Purpose::Train, Purpose::Baseline, Purpose::Eval] {
        for AttemptSummary { id, placement, number, .. } in store.summaries(purpose).await? {
            let mut failed = 0;
            for earlier in 0..number {
                let earlier = store.attempt(&AttemptId::new(store.run(), &placement, earlier)).await?;
                match earlier.map(|attempt| attempt.status) {
                    Some(Status::Superseded) => failed += 1,
                    Some(Status::Abandoned) => {}
                    other => panic!("before try {number} of {placement}: {other:?}"),
                }
            }
            names.insert(id, (AttemptId::new(store.run(), &placement, failed), failed));
        }
    }
    Ok(names)
}

/// A plan, with the names of [`undisturbed`].
///
/// # Panics
/// Panics where it trains on what does not count.
pub fn undisturbed_plan(plan: &StepPlan, names: &HashMap<AttemptId, (AttemptId, u32)>) -> StepPlan {
    let mut plan = plan.clone();
    let updates = plan.policies.iter_mut().flat_map(|of| &mut of.updates);
    for path in updates.flat_map(|update| &mut update.paths) {
        path.attempt = names[&path.attempt].0;
    }
    plan
}
