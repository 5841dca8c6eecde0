use super::*;
use crate::rollouts::ManualClock;
use crate::rollouts_contract;

rollouts_contract!(in_memory, async |clock: Arc<ManualClock>| {
    ((), open_rollouts("memory:", clock).await.unwrap())
});

rollouts_contract!(in_a_file, async |clock: Arc<ManualClock>| {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rollouts.db").display().to_string();
    let store = open_rollouts(&file, clock).await.unwrap();
    (dir, store)
});
