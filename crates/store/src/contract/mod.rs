//! The contract of [`Store`], as tests that run for every backend.
//!
//! [`store_contract!`](crate::store_contract) generates one test per function for a backend. Each
//! test needs an empty store of its own.

#![allow(missing_docs, reason = "the names of tests say what they test")]
#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

mod plans;
pub(crate) mod test_data;
mod tries;
mod withdrawals;

use std::sync::Arc;

use levade_policy::{MicroBatchPlan, uniform};
use levade_tree::{AttemptId, AttemptSlot, Component, Kind, Outcome, Purpose, Segment, SegmentId};
use serde_json::json;

use crate::{
    AppliedKlPenalty, Attempt, AttemptEnd, Code, CreditTarget, EvalKey, HighEntropy, PolicyPlan,
    Status, StepPlan, StepReward, Store, StoreError, TryCounts, WriteOutcome,
};
pub use plans::*;
pub(crate) use test_data::{attempt, forest, plan, start_of};
use test_data::{segment, train_slot};
pub use tries::*;
pub use withdrawals::*;

/// Generates a module `$backend` with the contract tests for a backend. `$open` is an async closure
/// that returns a value to keep alive during the test, such as a temporary directory, and an `Arc`
/// of an empty store.
#[macro_export]
macro_rules! store_contract {
    ($backend:ident, $open:expr) => {
        $crate::store_contract!(
            @each $backend, $open,
            record_attempt_is_idempotent_and_rejects_changes
            record_attempts_is_atomic
            incremental_writes_equal_single_write
            incremental_writes_are_idempotent
            append_rejects_conflicting_and_invalid_segments
            ended_attempt_rejects_further_writes
            abandoned_attempts_never_count
            abandoned_end_preserves_outcome_and_random_stream
            failures_returns_broken_attempts_in_order
            last_try_returns_last_counting_try
            writes_reject_mismatched_attempt_ids
            non_finite_numbers_are_rejected
            scores_and_rewards_round_trip_exactly
            unscored_attempt_ends_once_with_score
            random_forests_round_trip_exactly
            summaries_are_sorted_by_slot
            tasks_returns_distinct_tasks
            record_step_is_idempotent_and_rejects_changes
            plan_numbers_round_trip_exactly
            evaluations_are_sorted_and_never_replaced
            concurrent_writers_get_consistent_results
            unknown_keys_return_nothing
            withdrawn_attempt_leaves_every_list
            withdraw_task_includes_every_try
            erasure_removes_texts_and_keeps_plans
        );
    };
    (@each $backend:ident, $open:expr, $($test:ident)*) => {
        mod $backend {
            #[allow(unused_imports)]
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    let (_keep, store) = ($open)().await;
                    $crate::contract::$test(store).await;
                }
            )*
        }
    };
}

/// The store under test.
type TestStore = Arc<dyn Store>;

/// Asserts that a write is rejected with `code`, and returns the message of the error.
async fn assert_rejected(
    write: impl Future<Output = Result<WriteOutcome, StoreError>>,
    code: Code,
) -> String {
    match write.await {
        Ok(recorded) => panic!("not refused: {recorded:?}"),
        Err(error) => {
            assert_eq!(error.code(), code, "{error}");
            assert!(!error.is_retryable(), "{error}");
            error.to_string()
        }
    }
}

/// Writes an attempt in three calls: its start, its segments and its end.
async fn append_incrementally(store: &TestStore, attempt: &Attempt) -> Result<(), StoreError> {
    store.start_attempt(&start_of(attempt)).await?;
    store.append_segments(&attempt.id, attempt.trajectory.segments()).await?;
    store.end_attempt(&attempt.id, &attempt.end()).await.map(|_| ())
}

pub async fn record_attempt_is_idempotent_and_rejects_changes(store: TestStore) {
    let first = attempt(store.run(), 0, 0);
    assert_eq!(store.record_attempt(&first).await.unwrap(), WriteOutcome::Written);
    assert_eq!(store.record_attempt(&first).await.unwrap(), WriteOutcome::AlreadyRecorded);
    let mut longer = first.clone();
    longer.trajectory.push(segment(Kind::Context, &[1])).unwrap();
    let of_segment =
        StepReward { credit_target: CreditTarget::Segment(SegmentId(0)), reward: -0.05 };
    let other_attempts = [
        ("task", Attempt { task: json!("another"), ..first.clone() }),
        ("outcome", Attempt { outcome: Outcome::initial(), ..first.clone() }),
        ("outcome", Attempt { status: Status::Failed, ..first.clone() }),
        ("score", Attempt { score: None, ..first.clone() }),
        ("reward", Attempt { reward: Some(0.0), ..first.clone() }),
        ("reward", Attempt { step_rewards: vec![of_segment], ..first.clone() }),
        ("trajectory", longer),
    ];
    for (field, other) in other_attempts {
        let text = assert_rejected(store.record_attempt(&other), Code::Conflict).await;
        assert!(text.contains("attempt train/phase 1/step 3/group 0/sample 0"), "{text}");
        assert!(text.contains(&format!("with another {field}")), "{text}");
        assert!(text.contains(store.location()), "{text}");
    }
    assert_eq!(store.attempt(&first.id).await.unwrap(), Some(first));
}

pub async fn record_attempts_is_atomic(store: TestStore) {
    let run = store.run().clone();
    let made = |group, sample| attempt(&run, group, sample);
    store.record_attempt(&made(1, 0)).await.unwrap();
    let clash = Attempt { score: None, ..made(1, 0) };
    let text = assert_rejected(store.record_attempts(&[made(0, 0), clash]), Code::Conflict).await;
    assert!(text.contains("group 1/sample 0"), "{text}");
    assert_eq!(store.last_try(&train_slot(0, 0)).await.unwrap(), None);
    let twins = [made(2, 0), Attempt { reward: None, ..made(2, 0) }];
    assert_rejected(store.record_attempts(&twins), Code::Conflict).await;
    assert_eq!(store.attempt(&twins[0].id).await.unwrap(), None);
    let all = [made(0, 0), made(1, 0), made(0, 1)];
    assert_eq!(store.record_attempts(&all).await.unwrap(), WriteOutcome::Written);
    assert_eq!(store.record_attempts(&all).await.unwrap(), WriteOutcome::AlreadyRecorded);
    assert_eq!(store.record_attempts(&[]).await.unwrap(), WriteOutcome::AlreadyRecorded);
    for attempt in &all {
        assert_eq!(store.attempt(&attempt.id).await.unwrap().as_ref(), Some(attempt));
    }
}

pub async fn incremental_writes_equal_single_write(store: TestStore) {
    let complete = attempt(store.run(), 0, 0);
    let [root, completion] = complete.trajectory.segments() else { panic!("it has two segments") };
    assert_eq!(store.start_attempt(&start_of(&complete)).await.unwrap(), WriteOutcome::Written);
    let started_attempt = store.attempt(&complete.id).await.unwrap().unwrap();
    assert_eq!(started_attempt, Attempt::from_start(&start_of(&complete)));
    assert_eq!(started_attempt.status, Status::Running);
    assert_eq!(
        store.append_segments(&complete.id, std::slice::from_ref(root)).await.unwrap(),
        WriteOutcome::Written
    );
    assert_eq!(
        store.append_segments(&complete.id, std::slice::from_ref(completion)).await.unwrap(),
        WriteOutcome::Written
    );
    let grown = store.attempt(&complete.id).await.unwrap().unwrap();
    assert_eq!((grown.status, &grown.trajectory), (Status::Running, &complete.trajectory));
    // The attempt does not count before it has ended.
    assert_eq!(store.last_try(&complete.slot).await.unwrap(), None);
    assert_eq!(store.summaries(Purpose::Train).await.unwrap(), []);
    assert_eq!(store.count_tries(&complete.slot).await.unwrap(), TryCounts { next: 1, failed: 0 });
    assert_eq!(
        store.end_attempt(&complete.id, &complete.end()).await.unwrap(),
        WriteOutcome::Written
    );
    assert_eq!(store.last_try(&complete.slot).await.unwrap().as_ref(), Some(&complete));
    assert_eq!(store.record_attempt(&complete).await.unwrap(), WriteOutcome::AlreadyRecorded);
    let [summary] = &store.summaries(Purpose::Train).await.unwrap()[..] else {
        panic!("there is one")
    };
    assert_eq!((summary.id, summary.sampled_tokens, summary.tokens), (complete.id, 2, 5));
    assert_eq!((summary.score, summary.reward), (complete.score, complete.reward));
}

pub async fn incremental_writes_are_idempotent(store: TestStore) {
    let complete = attempt(store.run(), 0, 0);
    let start = start_of(&complete);
    let segments = complete.trajectory.segments();
    for expected in [WriteOutcome::Written, WriteOutcome::AlreadyRecorded] {
        assert_eq!(store.start_attempt(&start).await.unwrap(), expected);
    }
    assert_eq!(
        store.append_segments(&complete.id, &[]).await.unwrap(),
        WriteOutcome::AlreadyRecorded
    );
    assert_eq!(
        store.append_segments(&complete.id, &segments[..1]).await.unwrap(),
        WriteOutcome::Written
    );
    // The first of these segments is already recorded.
    for expected in [WriteOutcome::Written, WriteOutcome::AlreadyRecorded] {
        assert_eq!(store.append_segments(&complete.id, segments).await.unwrap(), expected);
    }
    for expected in [WriteOutcome::Written, WriteOutcome::AlreadyRecorded] {
        assert_eq!(store.end_attempt(&complete.id, &complete.end()).await.unwrap(), expected);
    }
    // A client may repeat an earlier call after the end, for example because its response was lost.
    assert_eq!(store.start_attempt(&start).await.unwrap(), WriteOutcome::AlreadyRecorded);
    assert_eq!(
        store.append_segments(&complete.id, segments).await.unwrap(),
        WriteOutcome::AlreadyRecorded
    );
    assert_eq!(store.attempt(&complete.id).await.unwrap(), Some(complete));
}

pub async fn append_rejects_conflicting_and_invalid_segments(store: TestStore) {
    let complete = attempt(store.run(), 0, 0);
    let segments = complete.trajectory.segments();
    assert_rejected(store.append_segments(&complete.id, segments), Code::NotFound).await;
    store.start_attempt(&start_of(&complete)).await.unwrap();
    let other = crate::AttemptStart { task: json!("another"), ..start_of(&complete) };
    let text = assert_rejected(store.start_attempt(&other), Code::Conflict).await;
    assert!(text.contains("another task"), "{text}");
    store.append_segments(&complete.id, segments).await.unwrap();
    let third =
        Segment { id: SegmentId(2), parent: Some(SegmentId(1)), ..segment(Kind::Context, &[9]) };
    let changed = Segment { tokens: vec![1, 2, 3], ..segments[0].clone() };
    let text = assert_rejected(
        store.append_segments(&complete.id, &[third.clone(), changed]),
        Code::Conflict,
    )
    .await;
    assert!(text.contains("sample 0") && text.contains("another segment"), "{text}");
    let bad = [
        (
            Segment { id: SegmentId(3), ..third.clone() },
            "segment 3 would leave a gap; the next segment must have the id 2",
        ),
        (Segment { parent: Some(SegmentId(2)), ..third.clone() }, "segment 2 names parent 2"),
        (Segment { after: Some(3), ..third.clone() }, "after 3 tokens"),
        (Segment { logprobs: vec![-1.0], ..third.clone() }, "1 tokens but 1 log-probabilities"),
        (Segment { temperature: f32::NAN, ..third.clone() }, "temperature NaN"),
    ];
    for (bad, why) in bad {
        let text =
            assert_rejected(store.append_segments(&complete.id, &[bad]), Code::Invalid).await;
        assert!(text.contains(why), "{text}");
    }
    // The rejected writes have left no data. A fork at the end of its parent is stored as a plain
    // continuation.
    let at_end = Segment { after: Some(2), ..third.clone() };
    for expected in [WriteOutcome::Written, WriteOutcome::AlreadyRecorded] {
        assert_eq!(
            store.append_segments(&complete.id, std::slice::from_ref(&at_end)).await.unwrap(),
            expected
        );
    }
    let stored = store.attempt(&complete.id).await.unwrap().unwrap();
    assert_eq!(stored.trajectory.segments()[2], third);
    assert_eq!(stored.trajectory.segments().len(), 3);
}

pub async fn ended_attempt_rejects_further_writes(store: TestStore) {
    let complete = attempt(store.run(), 0, 0);
    assert_rejected(store.end_attempt(&complete.id, &complete.end()), Code::NotFound).await;
    store.start_attempt(&start_of(&complete)).await.unwrap();
    let running = AttemptEnd { status: Status::Running, ..complete.end() };
    let text = assert_rejected(store.end_attempt(&complete.id, &running), Code::Invalid).await;
    assert!(text.contains("an attempt cannot end with the status running"), "{text}");
    append_incrementally(&store, &complete).await.unwrap();
    let more = Segment { id: SegmentId(2), ..segment(Kind::Context, &[9]) };
    let text = assert_rejected(store.append_segments(&complete.id, &[more]), Code::Conflict).await;
    assert!(text.contains("is completed and accepts no more writes"), "{text}");
    let other_attempts = [
        ("outcome", AttemptEnd { outcome: Outcome::initial(), ..complete.end() }),
        ("outcome", AttemptEnd { status: Status::Superseded, ..complete.end() }),
        ("score", AttemptEnd { score: Some(0.5), ..complete.end() }),
        ("reward", AttemptEnd { reward: None, ..complete.end() }),
        ("reward", AttemptEnd { step_rewards: Vec::new(), ..complete.end() }),
    ];
    for (field, other) in other_attempts {
        let text = assert_rejected(store.end_attempt(&complete.id, &other), Code::Conflict).await;
        assert!(text.contains(&format!("another {field}")), "{text}");
    }
    assert_eq!(store.attempt(&complete.id).await.unwrap(), Some(complete));
}

pub async fn writes_reject_mismatched_attempt_ids(store: TestStore) {
    let made = attempt(store.run(), 0, 0);
    let misnamed = Attempt { number: 3, ..made.clone() };
    let run = store.run().clone();
    for write in [
        assert_rejected(store.record_attempt(&misnamed), Code::Invalid).await,
        assert_rejected(store.start_attempt(&start_of(&misnamed)), Code::Invalid).await,
    ] {
        assert!(
            write.contains(&format!("does not match try 3 of its attempt slot in run {run}")),
            "{write}"
        );
    }
    assert_eq!(store.attempt(&made.id).await.unwrap(), None);
}

pub async fn non_finite_numbers_are_rejected(store: TestStore) {
    let made = attempt(store.run(), 0, 0);
    let endless = StepReward { credit_target: CreditTarget::Turn(0), reward: f64::NEG_INFINITY };
    let bad = [
        ("the score of the attempt is inf", Attempt { score: Some(f64::INFINITY), ..made.clone() }),
        ("the reward of the attempt is NaN", Attempt { reward: Some(f64::NAN), ..made.clone() }),
        (
            "the step reward of the attempt is -inf",
            Attempt { step_rewards: vec![endless], ..made.clone() },
        ),
    ];
    for (why, bad) in &bad {
        let text = assert_rejected(store.record_attempt(bad), Code::Invalid).await;
        assert!(text.contains(why), "{text}");
    }
    assert_eq!(store.attempt(&made.id).await.unwrap(), None);
    store.start_attempt(&start_of(&made)).await.unwrap();
    for (why, bad) in &bad {
        let text = assert_rejected(store.end_attempt(&made.id, &bad.end()), Code::Invalid).await;
        assert!(text.contains(why), "{text}");
    }
    assert_eq!(store.attempt(&made.id).await.unwrap().unwrap().status, Status::Running);
    // −0 reads back as 0.
    let zero = AttemptEnd { reward: Some(-0.0), ..made.end() };
    store.end_attempt(&made.id, &zero).await.unwrap();
    let reward = store.attempt(&made.id).await.unwrap().unwrap().reward;
    assert_eq!(reward.map(f64::to_bits), Some(0));
}

pub async fn scores_and_rewards_round_trip_exactly(store: TestStore) {
    let run = store.run().clone();
    for sample in 0..64 {
        let random = |n| (uniform(7, u64::from(sample), n) - 0.5) * 3.0;
        let mut made = attempt(&run, 0, sample);
        (made.score, made.reward) = (Some(random(0)), Some(random(1)));
        made.step_rewards =
            vec![StepReward { credit_target: CreditTarget::Turn(0), reward: random(2) }];
        let part = Component {
            weight: Some(random(3)),
            credit_target: Some(CreditTarget::Turn(1)),
            ..Component::score(random(4))
        };
        made.outcome.components = vec![part, Component::new("length", random(5))];
        append_incrementally(&store, &made).await.unwrap();
        // No number is NaN or −0 here, so equal numbers have equal bits.
        assert_eq!(store.attempt(&made.id).await.unwrap().as_ref(), Some(&made));
        assert_eq!(
            store.end_attempt(&made.id, &made.end()).await.unwrap(),
            WriteOutcome::AlreadyRecorded
        );
    }
}

pub async fn unscored_attempt_ends_once_with_score(store: TestStore) {
    let run = store.run().clone();
    for (sample, status) in
        [Status::Completed, Status::Failed, Status::Superseded].into_iter().enumerate()
    {
        let scored = Attempt { status, ..attempt(&run, 0, sample as u32) };
        let waits = Attempt {
            status: Status::Unscored,
            outcome: Outcome { extracted: Some("4".into()), ..scored.outcome.clone() },
            score: None,
            reward: None,
            step_rewards: Vec::new(),
            ..scored.clone()
        };
        append_incrementally(&store, &waits).await.unwrap();
        assert_eq!(store.last_try(&waits.slot).await.unwrap().as_ref(), Some(&waits));
        let summaries = store.summaries(Purpose::Train).await.unwrap();
        let summary = summaries.iter().find(|summary| summary.id == waits.id).unwrap();
        assert_eq!((summary.status, summary.score, summary.tokens), (Status::Unscored, None, 5));
        // An unscored attempt is not abandoned when its process exits, and accepts no more tokens.
        assert_eq!(store.abandon_running().await.unwrap(), 0);
        let next = Segment { id: SegmentId(2), ..segment(Kind::Context, &[9]) };
        assert_rejected(store.append_segments(&waits.id, &[next]), Code::Conflict).await;
        assert_eq!(
            store.end_attempt(&waits.id, &waits.end()).await.unwrap(),
            WriteOutcome::AlreadyRecorded
        );
        assert_rejected(
            store
                .end_attempt(&waits.id, &AttemptEnd { outcome: Outcome::initial(), ..waits.end() }),
            Code::Conflict,
        )
        .await;
        for expected in [WriteOutcome::Written, WriteOutcome::AlreadyRecorded] {
            assert_eq!(store.end_attempt(&scored.id, &scored.end()).await.unwrap(), expected);
        }
        assert_eq!(store.attempt(&scored.id).await.unwrap().as_ref(), Some(&scored));
        assert_eq!(
            store.count_tries(&scored.slot).await.unwrap().failed,
            u32::from(!status.can_count())
        );
        // After its score, the attempt cannot become unscored again or get another score.
        assert_rejected(store.end_attempt(&waits.id, &waits.end()), Code::Conflict).await;
        assert_rejected(
            store.end_attempt(&waits.id, &AttemptEnd { score: Some(0.5), ..scored.end() }),
            Code::Conflict,
        )
        .await;
    }
}

pub async fn random_forests_round_trip_exactly(store: TestStore) {
    let run = store.run().clone();
    for seed in 0..48 {
        let [complete, grown] = [0, 1].map(|sample| {
            let trajectory = forest(seed);
            Attempt { trajectory, ..attempt(&run, seed as u32, sample) }
        });
        store.record_attempt(&complete).await.unwrap();
        store.start_attempt(&start_of(&grown)).await.unwrap();
        let segments = grown.trajectory.segments();
        let mut from = 0;
        while from < segments.len() {
            // Appends a few segments at a time, some of them twice.
            let to =
                (from + 1 + (uniform(seed, 1, from as u64) * 3.0) as usize).min(segments.len());
            let again = (uniform(seed, 2, from as u64) * (from + 1) as f64) as usize;
            store.append_segments(&grown.id, &segments[again..to]).await.unwrap();
            from = to;
        }
        store.end_attempt(&grown.id, &grown.end()).await.unwrap();
        for written in [complete, grown] {
            let read = store.attempt(&written.id).await.unwrap().unwrap();
            assert_eq!(logprob_bits(&read), logprob_bits(&written), "seed {seed}");
            // The remaining fields are compared as text, because a NaN does not equal itself.
            assert_eq!(format!("{read:?}"), format!("{written:?}"), "seed {seed}");
            assert_eq!(
                store.record_attempt(&written).await.unwrap(),
                WriteOutcome::AlreadyRecorded
            );
        }
    }
    for pair in store.summaries(Purpose::Train).await.unwrap().chunks(2) {
        assert_eq!(pair[0].sampled_tokens, pair[1].sampled_tokens);
        assert_eq!(pair[0].tokens, pair[1].tokens);
    }
}

fn logprob_bits(attempt: &Attempt) -> Vec<u32> {
    let segments = attempt.trajectory.segments();
    segments.iter().flat_map(|s| s.logprobs.iter().map(|p| p.to_bits())).collect()
}

pub async fn summaries_are_sorted_by_slot(store: TestStore) {
    let run = store.run().clone();
    let mut slots = [(1, 3, 10), (0, 5, 0), (1, 3, 2), (1, 2, 9), (0, 4, 1)]
        .map(|(phase, step, group)| AttemptSlot { phase, step, group, ..train_slot(0, 0) });
    let eval = AttemptSlot { purpose: Purpose::Eval, phase: 0, step: 0, ..train_slot(0, 0) };
    for slot in slots.into_iter().chain([eval]) {
        let id = AttemptId::new(&run, &slot, 0);
        let recorded = Attempt { id, slot, ..attempt(&run, 0, 0) };
        store.record_attempt(&recorded).await.unwrap();
    }
    slots.sort();
    for (purpose, expected) in
        [(Purpose::Train, &slots[..]), (Purpose::Eval, &[eval]), (Purpose::Baseline, &[])]
    {
        let all = store.summaries(purpose).await.unwrap();
        let found: Vec<AttemptSlot> = all.into_iter().map(|summary| summary.slot).collect();
        assert_eq!(found, expected, "{purpose:?}");
    }
}

pub async fn tasks_returns_distinct_tasks(store: TestStore) {
    let run = store.run().clone();
    for (sample, task) in
        [json!({"q": 1}), json!({"q": 2}), json!({"q": 1})].into_iter().enumerate()
    {
        let recorded_attempt = Attempt { task, ..attempt(&run, 0, sample as u32) };
        store.record_attempt(&recorded_attempt).await.unwrap();
    }
    let started_attempt = Attempt { task: json!({"q": 3}), ..attempt(&run, 1, 0) };
    store.start_attempt(&start_of(&started_attempt)).await.unwrap();
    let tasks = store.tasks(Purpose::Train).await.unwrap();
    assert_eq!(tasks, [json!({"q": 1}), json!({"q": 2}), json!({"q": 3})]);
    assert_eq!(store.tasks(Purpose::Eval).await.unwrap(), Vec::<serde_json::Value>::new());
}

pub async fn evaluations_are_sorted_and_never_replaced(store: TestStore) {
    let before = EvalKey { phase: 0, step: 0 };
    let after = EvalKey { phase: 1, step: 40 };
    assert_eq!(
        store.record_eval(after, &json!({"mean": 0.925})).await.unwrap(),
        WriteOutcome::Written
    );
    store.record_eval(before, &json!({"mean": 0.1})).await.unwrap();
    assert_eq!(
        store.record_eval(before, &json!({"mean": 0.1})).await.unwrap(),
        WriteOutcome::AlreadyRecorded
    );
    let text =
        assert_rejected(store.record_eval(before, &json!({"mean": 0.2})), Code::Conflict).await;
    assert!(text.contains("evaluation phase 0/step 0"), "{text}");
    let all = [(before, json!({"mean": 0.1})), (after, json!({"mean": 0.925}))];
    assert_eq!(store.evals().await.unwrap(), all);
}

/// Concurrent writers: of different writes to one key, one is committed and the remaining ones are
/// rejected. Of equal writes, one is new. A rejected write does not affect other writes.
pub async fn concurrent_writers_get_consistent_results(store: TestStore) {
    const WRITERS: u32 = 12;
    const GROUPS: u32 = 16;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let store = store.clone();
        writers.spawn(async move {
            let run = store.run().clone();
            let mut won = Vec::new();
            for group in 0..GROUPS {
                // Three kinds of slots: one in which each writer records a different attempt, one
                // in which all record the same, and one per writer.
                let contested =
                    Attempt { reward: Some(f64::from(writer)), ..attempt(&run, group, 0) };
                match store.record_attempt(&contested).await {
                    Ok(recorded) => {
                        assert_eq!(recorded, WriteOutcome::Written);
                        won.push(contested);
                    }
                    Err(error) => assert_eq!(error.code(), Code::Conflict, "{error}"),
                }
                append_incrementally(&store, &attempt(&run, group, 1)).await.unwrap();
                append_incrementally(&store, &attempt(&run, group, 2 + writer)).await.unwrap();
            }
            won
        });
    }
    let mut won: Vec<Attempt> = Vec::new();
    while let Some(of_writer) = writers.join_next().await {
        won.extend(of_writer.unwrap());
    }
    assert_eq!(won.len(), GROUPS as usize, "each place has one winner");
    for attempt in won {
        assert_eq!(store.last_try(&attempt.slot).await.unwrap(), Some(attempt));
    }
    let all = store.summaries(Purpose::Train).await.unwrap();
    assert_eq!(all.len() as u32, GROUPS * (2 + WRITERS));
    assert!(all.iter().all(|summary| (summary.sampled_tokens, summary.tokens) == (2, 5)));
}

pub async fn unknown_keys_return_nothing(store: TestStore) {
    let made = attempt(store.run(), 7, 7);
    assert_eq!(store.attempt(&made.id).await.unwrap(), None);
    assert_eq!(store.last_try(&made.slot).await.unwrap(), None);
    assert_eq!(store.count_tries(&made.slot).await.unwrap(), TryCounts::default());
    assert_eq!(store.step_plan(0, 0).await.unwrap(), None);
    assert_eq!(store.planned_steps().await.unwrap(), []);
    assert_eq!(store.evals().await.unwrap(), []);
    assert_eq!(store.abandon_running().await.unwrap(), 0);
    let text = assert_rejected(
        store.append_segments(&made.id, made.trajectory.segments()),
        Code::NotFound,
    )
    .await;
    assert!(text.contains(&made.id.to_string()) && text.contains("start it first"), "{text}");
}
