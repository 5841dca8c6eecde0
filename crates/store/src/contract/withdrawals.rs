//! Contract tests of withdrawals.

use levade_tree::{Outcome, Purpose, Trajectory};
use serde_json::{Value, json};

use super::test_data::{attempt, next_try, plan, start_of, train_slot};
use super::{TestStore, assert_rejected};
use crate::{Attempt, Code, EvalKey, Status, TryCounts, WithdrawRequest, Withdrawal};

fn request(attempts: &[&Attempt], erase: bool) -> WithdrawRequest {
    let attempts = attempts.iter().map(|attempt| attempt.id).collect();
    let reason = "consent was withdrawn".to_owned();
    WithdrawRequest { attempts, reason, at: 1_700_000_000, erase, ..WithdrawRequest::default() }
}

fn tombstone(attempt: &Attempt, request: &WithdrawRequest) -> Withdrawal {
    request.tombstone(attempt, &[]).unwrap()
}

pub async fn withdrawn_attempt_leaves_every_list(store: TestStore) {
    let run = store.run().clone();
    let [kept, withdrawn] = [attempt(&run, 0, 0), attempt(&run, 0, 1)];
    store.record_attempts(&[kept.clone(), withdrawn.clone()]).await.unwrap();
    let sent = request(&[&withdrawn], false);
    let expected = tombstone(&withdrawn, &sent);
    assert_eq!((expected.status, expected.erased), (Status::Completed, false));
    assert_eq!(store.withdraw(&sent).await.unwrap(), std::slice::from_ref(&expected));
    assert_eq!(store.withdraw(&sent).await.unwrap(), [], "a repeated request");
    assert_eq!(store.withdrawals().await.unwrap(), [expected]);
    // The record is unchanged, except for its status.
    let status = Status::Withdrawn;
    let stored = store.attempt(&withdrawn.id).await.unwrap();
    assert_eq!(stored, Some(Attempt { status, ..withdrawn.clone() }));
    assert_eq!(store.last_try(&withdrawn.slot).await.unwrap(), None);
    let listed = store.summaries(Purpose::Train).await.unwrap();
    assert_eq!(listed.iter().map(|summary| summary.id).collect::<Vec<_>>(), [kept.id]);
    assert_eq!(store.failures(Purpose::Train).await.unwrap(), []);
    assert_eq!(store.count_tries(&withdrawn.slot).await.unwrap(), TryCounts { next: 1, failed: 1 });
    for write in [
        assert_rejected(store.start_attempt(&start_of(&withdrawn)), Code::Conflict).await,
        assert_rejected(store.end_attempt(&withdrawn.id, &withdrawn.end()), Code::Conflict).await,
        assert_rejected(store.record_attempt(&withdrawn), Code::Conflict).await,
    ] {
        assert!(write.contains(&withdrawn.slot.to_string()) || write.contains("withdrawn"));
    }
    let recorded = Attempt { status, ..attempt(&run, 5, 0) };
    assert_rejected(store.record_attempt(&recorded), Code::Invalid).await;
    let unknown = store.withdraw(&request(&[&kept, &attempt(&run, 9, 9)], true)).await;
    assert_eq!(unknown.unwrap_err().code(), Code::Invalid);
    assert_eq!(store.attempt(&kept.id).await.unwrap(), Some(kept), "all or nothing");
}

pub async fn withdraw_task_includes_every_try(store: TestStore) {
    let run = store.run().clone();
    let task = json!({"id": "t", "question": "2+2"});
    let of =
        |number, status| Attempt { task: task.clone(), status, ..next_try(&run, 3, 0, number) };
    let tries = [of(0, Status::Superseded), of(1, Status::Abandoned), of(2, Status::Completed)];
    let other = attempt(&run, 4, 0);
    store.record_attempts(&tries).await.unwrap();
    store.record_attempt(&other).await.unwrap();
    let running = Attempt { task: task.clone(), ..attempt(&run, 5, 0) };
    store.start_attempt(&start_of(&running)).await.unwrap();
    let request =
        WithdrawRequest { tasks: vec![task], task: Some("t".into()), ..WithdrawRequest::default() };
    let added = store.withdraw(&request).await.unwrap();
    let found: Vec<_> = added.iter().map(|added| (added.slot.group, added.number)).collect();
    assert_eq!(found, [(3, 0), (3, 1), (3, 2), (5, 0)]);
    assert!(added.iter().all(|added| added.task.as_deref() == Some("t")));
    let before: Vec<Status> = added.iter().map(|added| added.status).collect();
    let tried = tries.map(|attempt| attempt.status);
    assert_eq!(before, [tried[0], tried[1], tried[2], Status::Running]);
    assert_eq!(store.summaries(Purpose::Train).await.unwrap().len(), 1);
}

/// Returns the result of an evaluation that quotes an attempt.
fn quote(text: &str) -> Value {
    json!({"uncalled": {"attempt": train_slot(0, 0).name(), "why": text}})
}

pub async fn erasure_removes_texts_and_keeps_plans(store: TestStore) {
    let run = store.run().clone();
    let [erased, kept] = [attempt(&run, 0, 0), attempt(&run, 1, 0)];
    store.record_attempts(&[erased.clone(), kept.clone()]).await.unwrap();
    let planned = plan(&run, &[(0.5, 0.25), (-1.0, 2.0)]);
    store.record_step(&planned).await.unwrap();
    let key = EvalKey { phase: 0, step: 0 };
    store.record_eval(key, &quote("secret")).await.unwrap();
    let first = request(&[&erased], false);
    let second = request(&[&erased], true);
    store.withdraw(&first).await.unwrap();
    // A later erasure adds a tombstone, with the status before the first.
    let expected = tombstone(&erased, &second);
    assert_eq!(store.withdraw(&second).await.unwrap(), std::slice::from_ref(&expected));
    assert_eq!(store.withdraw(&second).await.unwrap(), []);
    assert_eq!(store.withdrawals().await.unwrap(), [tombstone(&erased, &first), expected]);
    let stored = store.attempt(&erased.id).await.unwrap().unwrap();
    let empty = Attempt {
        task: Value::Null,
        outcome: Outcome::initial(),
        trajectory: Trajectory::new(),
        status: Status::Withdrawn,
        ..erased
    };
    assert_eq!(stored, empty);
    assert_eq!(store.attempt(&kept.id).await.unwrap(), Some(kept.clone()));
    assert_eq!(store.step_plan(1, 2).await.unwrap(), Some(planned));
    assert_eq!(store.evals().await.unwrap(), [(key, quote(""))]);
    assert_eq!(store.tasks(Purpose::Train).await.unwrap(), [kept.task]);
}
