//! Contract tests about tries: selects the try that counts, and lists the tries that broke.

use levade_tree::{Outcome, Purpose};

use super::test_data::{attempt, next_try, start_of, train_slot};
use super::{TestStore, append_incrementally, assert_rejected};
use crate::{Attempt, AttemptEnd, Code, FailedAttempt, Status, TryCounts, WriteOutcome};

pub async fn abandoned_attempts_never_count(store: TestStore) {
    let run = store.run().clone();
    let [lost, ended] = [attempt(&run, 0, 0), attempt(&run, 0, 1)];
    store.start_attempt(&start_of(&lost)).await.unwrap();
    store.append_segments(&lost.id, &lost.trajectory.segments()[..1]).await.unwrap();
    store.record_attempt(&ended).await.unwrap();
    assert_eq!(store.abandon_running().await.unwrap(), 1);
    assert_eq!(store.abandon_running().await.unwrap(), 0);
    let stored = store.attempt(&lost.id).await.unwrap().unwrap();
    assert_eq!((stored.status, stored.trajectory.segments().len()), (Status::Abandoned, 1));
    assert_eq!(store.last_try(&lost.slot).await.unwrap(), None);
    let summaries = store.summaries(Purpose::Train).await.unwrap();
    assert_eq!(summaries.iter().map(|summary| summary.id).collect::<Vec<_>>(), [ended.id]);
    // If the process is still running after all, its writes return an error.
    for write in [
        assert_rejected(store.start_attempt(&start_of(&lost)), Code::Conflict).await,
        assert_rejected(
            store.append_segments(&lost.id, lost.trajectory.segments()),
            Code::Conflict,
        )
        .await,
        assert_rejected(store.end_attempt(&lost.id, &lost.end()), Code::Conflict).await,
    ] {
        assert!(
            write.contains("is abandoned and accepts no more writes; start another try"),
            "{write}"
        );
    }
    // The next try is another attempt, and no earlier try counts as failed.
    assert_eq!(store.count_tries(&lost.slot).await.unwrap(), TryCounts { next: 1, failed: 0 });
    let next = next_try(&run, 0, 0, 1);
    append_incrementally(&store, &next).await.unwrap();
    assert_eq!(store.last_try(&lost.slot).await.unwrap(), Some(next));
}

pub async fn abandoned_end_preserves_outcome_and_random_stream(store: TestStore) {
    let outcome = Outcome { error: Some("the server is gone".into()), ..Outcome::initial() };
    let broken = Attempt {
        status: Status::Abandoned,
        outcome,
        score: None,
        reward: None,
        step_rewards: Vec::new(),
        ..attempt(store.run(), 0, 0)
    };
    store.start_attempt(&start_of(&broken)).await.unwrap();
    store.append_segments(&broken.id, broken.trajectory.segments()).await.unwrap();
    for expected in [WriteOutcome::Written, WriteOutcome::AlreadyRecorded] {
        assert_eq!(store.end_attempt(&broken.id, &broken.end()).await.unwrap(), expected);
    }
    let other = AttemptEnd { outcome: Outcome::initial(), ..broken.end() };
    assert_rejected(store.end_attempt(&broken.id, &other), Code::Conflict).await;
    assert_eq!(store.attempt(&broken.id).await.unwrap(), Some(broken.clone()));
    assert_eq!(store.last_try(&broken.slot).await.unwrap(), None);
    assert_eq!(store.count_tries(&broken.slot).await.unwrap(), TryCounts { next: 1, failed: 0 });
}

pub async fn failures_returns_broken_attempts_in_order(store: TestStore) {
    let run = store.run().clone();
    let of = |group, number, status, error: Option<&str>| {
        let outcome = Outcome { error: error.map(str::to_owned), ..Outcome::initial() };
        Attempt { status, outcome, ..next_try(&run, group, 0, number) }
    };
    let attempts = [
        of(1, 0, Status::Superseded, None),
        of(1, 1, Status::Failed, Some("late")),
        of(0, 0, Status::Completed, None),
        of(0, 1, Status::Abandoned, Some("gone")),
        // The process of this attempt was killed.
        of(0, 2, Status::Abandoned, None),
        of(2, 0, Status::Unscored, None),
    ];
    store.record_attempts(&attempts).await.unwrap();
    let expected: Vec<FailedAttempt> =
        [3, 0, 1].map(|i: usize| FailedAttempt::from(&attempts[i])).into();
    assert_eq!(store.failures(Purpose::Train).await.unwrap(), expected);
    assert_eq!(store.failures(Purpose::Eval).await.unwrap(), []);
}

pub async fn last_try_returns_last_counting_try(store: TestStore) {
    let run = store.run().clone();
    let failed =
        Attempt { status: Status::Superseded, score: None, reward: None, ..attempt(&run, 0, 0) };
    store.record_attempt(&failed).await.unwrap();
    assert_eq!(store.last_try(&train_slot(0, 0)).await.unwrap(), None);
    assert_eq!(store.summaries(Purpose::Train).await.unwrap(), []);
    assert_eq!(
        store.count_tries(&train_slot(0, 0)).await.unwrap(),
        TryCounts { next: 1, failed: 1 }
    );
    assert_eq!(store.count_tries(&train_slot(0, 1)).await.unwrap(), TryCounts::default());
    let broken = Attempt { status: Status::Failed, ..next_try(&run, 0, 0, 2) };
    let tries = [broken.clone(), next_try(&run, 0, 0, 1), attempt(&run, 0, 1)];
    store.record_attempts(&tries).await.unwrap();
    assert_eq!(store.last_try(&train_slot(0, 0)).await.unwrap(), Some(broken.clone()));
    assert_eq!(store.attempt(&failed.id).await.unwrap(), Some(failed));
    assert_eq!(
        store.count_tries(&train_slot(0, 0)).await.unwrap(),
        TryCounts { next: 3, failed: 1 }
    );
    let summaries = store.summaries(Purpose::Train).await.unwrap();
    let found: Vec<_> = summaries.iter().map(|s| (s.slot.sample, s.number, s.id)).collect();
    assert_eq!(found, [(0, 2, broken.id), (1, 0, tries[2].id)]);
    // A later superseded try does not replace the try that counts.
    let later = Attempt { status: Status::Superseded, ..next_try(&run, 0, 0, 3) };
    store.record_attempt(&later).await.unwrap();
    assert_eq!(store.last_try(&train_slot(0, 0)).await.unwrap(), Some(broken));
    assert_eq!(
        store.count_tries(&train_slot(0, 0)).await.unwrap(),
        TryCounts { next: 4, failed: 2 }
    );
}
