//! Test helpers: waits for futures in synchronous tests, and compares a killed run with an
//! undisturbed one.

use std::collections::HashMap;
use std::future::Future;
use std::thread;

use levade_tree::{AttemptId, Purpose};

use crate::{AttemptSummary, Status, StepPlan, Store, StoreError};

/// Waits for a future on a new thread. Can also be called from within a runtime.
///
/// # Panics
/// Panics if the future panics or no runtime can be created.
pub fn wait<T: Send>(future: impl Future<Output = T> + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(future)
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Maps each attempt that counts to the id and try number that it would have in a run without
/// abandoned attempts. That number is the number of superseded tries before it.
///
/// # Errors
/// Returns an error if reading fails.
///
/// # Panics
/// Panics if a try before a counting one is missing, or is neither superseded nor abandoned.
pub async fn ids_without_abandoned(
    store: &dyn Store,
) -> Result<HashMap<AttemptId, (AttemptId, u32)>, StoreError> {
    let mut names = HashMap::new();
    for purpose in Purpose::ALL {
        for AttemptSummary { id, slot, number, .. } in store.summaries(purpose).await? {
            let mut failed = 0;
            for earlier in 0..number {
                let earlier = store.attempt(&AttemptId::new(store.run(), &slot, earlier)).await?;
                match earlier.map(|attempt| attempt.status) {
                    Some(Status::Superseded) => failed += 1,
                    Some(Status::Abandoned) => {}
                    other => panic!("before try {number} of {slot}: {other:?}"),
                }
            }
            names.insert(id, (AttemptId::new(store.run(), &slot, failed), failed));
        }
    }
    Ok(names)
}

/// Returns a copy of a plan with the attempt ids of [`ids_without_abandoned`].
///
/// # Panics
/// Panics if the plan trains on an attempt that is not in `names`.
pub fn plan_without_abandoned(
    plan: &StepPlan,
    names: &HashMap<AttemptId, (AttemptId, u32)>,
) -> StepPlan {
    let mut plan = plan.clone();
    let updates = plan.policies.iter_mut().flat_map(|policy_plan| &mut policy_plan.updates);
    for sequence in updates.flat_map(|update| &mut update.sequences) {
        sequence.attempt = names[&sequence.attempt].0;
    }
    plan
}
