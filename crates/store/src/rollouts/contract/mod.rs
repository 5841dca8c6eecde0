//! The contract of [`Rollouts`], as tests that run for every backend.
//!
//! [`rollouts_contract!`](crate::rollouts_contract) generates one test per function for a backend.
//! Each test needs an empty store of its own, and a clock that it sets.

#![allow(missing_docs, reason = "the names of tests say what they test")]
#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

mod records;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::value::{RawValue, to_raw_value};

use super::{
    Json, Lease, LeaseEnd, LeaseRequest, ManualClock, NewRollout, NewSpan, PageRequest, Rollout,
    RolloutConfig, RolloutError, RolloutFilter, RolloutStatus, RolloutUpdate, Rollouts,
    SpanOutcome, TrySelector, TryStatus, TryUpdate, WorkerStatus,
};
use crate::WriteOutcome;
pub use records::*;

/// Generates a module `$backend` with the contract tests for a backend. `$open` is an async closure
/// that takes the clock and returns a value to keep alive during the test, and an `Arc` of an empty
/// store.
#[macro_export]
macro_rules! rollouts_contract {
    ($backend:ident, $open:expr) => {
        $crate::rollouts_contract!(
            @each $backend, $open,
            lease_serves_priorities_then_age
            lease_merges_queues_by_age
            repeated_lease_request_returns_leases_in_progress
            waiting_lease_request_returns_leases_of_its_repetition
            enqueue_is_idempotent_by_key
            enqueue_keeps_chosen_ids
            end_lease_is_idempotent_and_rejects_other_ends
            retry_returns_to_old_position
            requeued_update_goes_to_the_end
            earlier_try_is_fenced_after_expiry
            heartbeat_revives_unresponsive_try_before_retry
            late_span_does_not_revive_timed_out_try
            span_revives_unresponsive_try_before_retry
            expiry_respects_max_tries_and_conditions
            released_tries_do_not_count
            backward_clock_expires_nothing
            cancelled_rollout_stays_cancelled
            long_poll_wakes_on_enqueue_and_ends_at_deadline
            wait_for_changes_returns_each_rollout_once_in_order
            wait_until_finished_ignores_unknown_and_returns_at_deadline
            concurrent_leasers_never_share_a_rollout
            filters_combine_by_logic
            pages_count_all_matches_and_reject_unknown_fields
            missing_values_sort_last_for_times_and_first_for_text
            resources_are_append_only_versions
            announcements_are_never_the_latest_resources
            worker_status_follows_status_of_its_try
            span_numbers_are_unique_and_increasing
            spans_report_one_outcome_each
            json_round_trips_to_the_byte
        );
    };
    (@each $backend:ident, $open:expr, $($test:ident)*) => {
        mod $backend {
            #[allow(unused_imports)]
            use super::*;
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    let clock = ::std::sync::Arc::new($crate::rollouts::ManualClock::new(1000.0));
                    let (_kept, store) = ($open)(::std::sync::Arc::clone(&clock)).await;
                    $crate::rollouts::contract::$test(store, clock).await;
                }
            )*
        }
    };
}

type Store = Arc<dyn Rollouts>;

fn raw(text: &str) -> Json {
    RawValue::from_string(text.to_owned()).unwrap()
}

fn new(input: impl serde::Serialize) -> NewRollout {
    NewRollout::new(to_raw_value(&input).unwrap())
}

fn retrying(input: u32, retry_on: &[TryStatus]) -> NewRollout {
    let config = RolloutConfig {
        unresponsive_seconds: Some(10.0),
        max_tries: 2,
        retry_on: retry_on.to_vec(),
        ..RolloutConfig::default()
    };
    NewRollout { config, ..new(input) }
}

async fn lease_one(store: &Store, worker: &str) -> Option<Rollout> {
    store.lease_rollouts(&LeaseRequest::new(1, Some(worker))).await.unwrap().pop()
}

async fn status(store: &Store, id: &str) -> RolloutStatus {
    store.rollout(id).await.unwrap().unwrap().status
}

fn lease_of(rollout: &Rollout) -> Lease {
    rollout.latest_try.as_ref().unwrap().lease()
}

fn span(of: &Rollout, span_id: &str, number: Option<u64>) -> NewSpan {
    NewSpan {
        rollout_id: of.id.clone(),
        try_id: of.latest_try.as_ref().map_or("at-none".to_owned(), |latest| latest.id.clone()),
        number,
        trace_id: "t".to_owned(),
        span_id: span_id.to_owned(),
        parent_id: None,
        name: "call".to_owned(),
        start_time: Some(1.0),
        end_time: None,
        body: raw(r#"{"attributes":{"a":1}}"#),
    }
}

fn inputs(rollouts: &[Rollout]) -> Vec<&str> {
    rollouts.iter().map(|rollout| rollout.input.get()).collect()
}

pub async fn lease_serves_priorities_then_age(store: Store, _: Arc<ManualClock>) {
    let rollouts = [(1, 0), (2, 5), (3, 0), (4, 5), (5, -1)]
        .map(|(input, priority)| NewRollout { priority, ..new(input) });
    store.enqueue(&rollouts).await.unwrap();
    let leased = store.lease_rollouts(&LeaseRequest::new(4, Some("w"))).await.unwrap();
    assert_eq!(inputs(&leased), ["2", "4", "1", "3"]);
    assert!(leased.iter().all(|rollout| rollout.status == RolloutStatus::Preparing));
    assert_eq!(inputs(&store.lease_rollouts(&LeaseRequest::new(4, None)).await.unwrap()), ["5"]);
    assert!(store.lease_rollouts(&LeaseRequest::new(4, None)).await.unwrap().is_empty());
    assert!(store.lease_rollouts(&LeaseRequest::new(0, None)).await.unwrap().is_empty());
}

pub async fn lease_merges_queues_by_age(store: Store, _: Arc<ManualClock>) {
    let rollouts = [(1, "a"), (2, "b"), (3, "c"), (4, "a"), (5, "b")]
        .map(|(input, queue)| NewRollout { queue: queue.to_owned(), ..new(input) });
    store.enqueue(&rollouts).await.unwrap();
    let request =
        LeaseRequest { queues: vec!["b".into(), "a".into()], ..LeaseRequest::new(3, None) };
    assert_eq!(inputs(&store.lease_rollouts(&request).await.unwrap()), ["1", "2", "4"]);
    assert_eq!(inputs(&store.lease_rollouts(&request).await.unwrap()), ["5"]);
}

pub async fn repeated_lease_request_returns_leases_in_progress(
    store: Store,
    clock: Arc<ManualClock>,
) {
    let again = [TryStatus::Unresponsive];
    store.enqueue(&[retrying(1, &again), retrying(2, &again), new(3)]).await.unwrap();
    let [a, b, c] = ["a", "b", "c"]
        .map(|key| LeaseRequest { key: Some(key.to_owned()), ..LeaseRequest::new(2, Some("w")) });
    let first = store.lease_rollouts(&a).await.unwrap();
    assert_eq!(inputs(&first), ["1", "2"]);
    assert_eq!(leases(&store.lease_rollouts(&a).await.unwrap()), leases(&first));
    assert_eq!(inputs(&store.lease_rollouts(&b).await.unwrap()), ["3"]);
    store.end_lease(&lease_of(&first[0]), LeaseEnd::Succeeded, None).await.unwrap();
    assert_eq!(leases(&store.lease_rollouts(&a).await.unwrap()), leases(&first[1..]));
    clock.advance(11.0);
    store.expire_tries().await.unwrap();
    let other = store.lease_rollouts(&c).await.unwrap();
    assert_eq!((inputs(&other), lease_of(&other[0]).number), (vec!["2"], 2));
    assert!(store.lease_rollouts(&a).await.unwrap().is_empty(), "another worker has the lease");
}

fn leases(rollouts: &[Rollout]) -> Vec<Lease> {
    rollouts.iter().map(lease_of).collect()
}

pub async fn waiting_lease_request_returns_leases_of_its_repetition(
    store: Store,
    _: Arc<ManualClock>,
) {
    let request = LeaseRequest { key: Some("a".to_owned()), ..LeaseRequest::new(1, Some("w")) };
    let waiting = LeaseRequest { wait: Duration::from_secs(20), ..request.clone() };
    let first = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.lease_rollouts(&waiting).await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    // One of the two leases the rollout, before or after the other polls.
    store.enqueue(&[new(1)]).await.unwrap();
    let second = store.lease_rollouts(&request).await.unwrap();
    let first = tokio::time::timeout(Duration::from_secs(15), first).await.unwrap().unwrap();
    assert_eq!((inputs(&first), inputs(&second)), (vec!["1"], vec!["1"]));
    assert_eq!(lease_of(&first[0]), lease_of(&second[0]));
}

fn named(input: usize, id: &str) -> NewRollout {
    NewRollout { id: Some(id.to_owned()), ..new(input) }
}

pub async fn enqueue_keeps_chosen_ids(store: Store, _: Arc<ManualClock>) {
    let created =
        store.enqueue(&[named(1, "mine"), named(2, "mine"), named(3, "x")]).await.unwrap();
    let found: Vec<(&str, &str)> =
        created.iter().map(|of| (of.id.as_str(), of.input.get())).collect();
    assert_eq!(found, [("mine", "1"), ("mine", "1"), ("x", "3")]);
    // A rollout that is leased is returned as it is.
    let leased = lease_one(&store, "w").await.unwrap();
    assert_eq!(leased.id, "mine");
    let again = store.enqueue(&[named(9, "mine")]).await.unwrap();
    assert_eq!((again[0].status, again[0].input.get()), (RolloutStatus::Preparing, "1"));
    assert!(matches!(
        store.start_rollout(&named(1, "x"), None).await,
        Err(RolloutError::Conflict { rollout_id, .. }) if rollout_id == "x"
    ));
    assert_eq!(store.statistics().await.unwrap().rollouts, 2);
}

/// Returns a rollout with the key `run/train/1`.
fn keyed(input: usize) -> NewRollout {
    NewRollout { key: Some("run/train/1".to_owned()), ..new(input) }
}

pub async fn enqueue_is_idempotent_by_key(store: Store, _: Arc<ManualClock>) {
    let first = store.enqueue(&[keyed(1), new(2)]).await.unwrap();
    let again = store.enqueue(&[keyed(1)]).await.unwrap();
    assert_eq!(first[0].id, again[0].id);
    let error = store.enqueue(&[new(3), keyed(9)]).await.unwrap_err();
    assert!(
        matches!(&error, RolloutError::Conflict { rollout_id, .. } if *rollout_id == first[0].id),
        "{error}"
    );
    let all =
        store.query_rollouts(&RolloutFilter::default(), &PageRequest::default()).await.unwrap();
    assert_eq!(
        (all.total, inputs(&all.items)),
        (2, vec!["1", "2"]),
        "a rejected call writes nothing"
    );
    assert!(store.start_rollout(&keyed(1), None).await.is_err());
}

pub async fn end_lease_is_idempotent_and_rejects_other_ends(store: Store, _: Arc<ManualClock>) {
    store.enqueue(&[new(1)]).await.unwrap();
    let leased = lease_one(&store, "w").await.unwrap();
    let lease = lease_of(&leased);
    assert_eq!(
        store.end_lease(&lease, LeaseEnd::Succeeded, Some(raw("[1]"))).await.unwrap(),
        WriteOutcome::Written
    );
    assert_eq!(
        store.end_lease(&lease, LeaseEnd::Succeeded, None).await.unwrap(),
        WriteOutcome::AlreadyRecorded
    );
    for end in [LeaseEnd::Failed, LeaseEnd::Released] {
        let error = store.end_lease(&lease, end, None).await.unwrap_err();
        assert!(matches!(error, RolloutError::Lost { .. }), "{error}");
    }
    assert!(store.record_heartbeat(&lease).await.is_err());
    let done = store.rollout(&leased.id).await.unwrap().unwrap();
    assert_eq!((done.status, done.end_time), (RolloutStatus::Succeeded, Some(1000.0)));
    assert_eq!(done.latest_try.unwrap().metadata.unwrap().get(), "[1]");
    let unknown = Lease { rollout_id: "ro-none".to_owned(), number: 1 };
    let error = store.end_lease(&unknown, LeaseEnd::Failed, None).await.unwrap_err();
    assert!(error.to_string().contains("Rollout ro-none not found"), "{error}");
}

pub async fn retry_returns_to_old_position(store: Store, clock: Arc<ManualClock>) {
    let all = [TryStatus::Failed, TryStatus::Unresponsive];
    store.enqueue(&[retrying(1, &all), retrying(2, &all), retrying(3, &all)]).await.unwrap();
    let first = lease_one(&store, "w").await.unwrap();
    let second = lease_one(&store, "w").await.unwrap();
    store.end_lease(&lease_of(&second), LeaseEnd::Failed, None).await.unwrap();
    clock.advance(10.5);
    let expired = store.expire_tries().await.unwrap();
    assert_eq!(expired.len(), 1);
    assert_eq!((&expired[0].rollout_id, expired[0].status), (&first.id, TryStatus::Unresponsive));
    let leased = store.lease_rollouts(&LeaseRequest::new(9, Some("w"))).await.unwrap();
    assert_eq!(inputs(&leased), ["1", "2", "3"]);
    assert_eq!(
        leased.iter().map(|rollout| lease_of(rollout).number).collect::<Vec<_>>(),
        [2, 2, 1]
    );
}

pub async fn requeued_update_goes_to_the_end(store: Store, _: Arc<ManualClock>) {
    store.enqueue(&[new(1), new(2)]).await.unwrap();
    let first = lease_one(&store, "w").await.unwrap();
    let update =
        RolloutUpdate { status: Some(RolloutStatus::Requeuing), ..RolloutUpdate::default() };
    store.update_rollout(&first.id, &update).await.unwrap();
    store.update_rollout(&first.id, &update).await.unwrap();
    assert_eq!(
        inputs(&store.lease_rollouts(&LeaseRequest::new(9, None)).await.unwrap()),
        ["2", "1"]
    );
}

pub async fn earlier_try_is_fenced_after_expiry(store: Store, clock: Arc<ManualClock>) {
    store.enqueue(&[retrying(1, &[TryStatus::Unresponsive])]).await.unwrap();
    let first = lease_one(&store, "a").await.unwrap();
    clock.advance(11.0);
    store.expire_tries().await.unwrap();
    let second = lease_one(&store, "b").await.unwrap();
    assert_eq!((first.id.as_str(), lease_of(&second).number), (second.id.as_str(), 2));
    for lost in [
        store.record_heartbeat(&lease_of(&first)).await.map(drop),
        store.end_lease(&lease_of(&first), LeaseEnd::Succeeded, None).await.map(drop),
    ] {
        assert!(matches!(lost, Err(RolloutError::Lost { .. })));
    }
    // A late span is kept, but reports on its own try only.
    let outcomes = store.add_spans(vec![span(&first, "late", None)]).await.unwrap();
    assert_eq!(outcomes, [SpanOutcome::Stored(1)]);
    assert_eq!(status(&store, &first.id).await, RolloutStatus::Preparing);
    let tries = store.query_tries(&first.id, &PageRequest::default()).await.unwrap().items;
    assert_eq!(tries[1].last_heartbeat_time, None);
    store.end_lease(&lease_of(&second), LeaseEnd::Succeeded, None).await.unwrap();
    assert_eq!(status(&store, &first.id).await, RolloutStatus::Succeeded);
}

pub async fn heartbeat_revives_unresponsive_try_before_retry(
    store: Store,
    clock: Arc<ManualClock>,
) {
    store.enqueue(&[retrying(1, &[TryStatus::Unresponsive])]).await.unwrap();
    let ttl = Some(Duration::from_secs(4));
    let leased = store
        .lease_rollouts(&LeaseRequest { ttl, ..LeaseRequest::new(1, Some("a")) })
        .await
        .unwrap();
    let lease = lease_of(&leased[0]);
    assert_eq!(store.record_heartbeat(&lease).await.unwrap(), Some(1004.0));
    clock.advance(4.0);
    assert!(store.expire_tries().await.unwrap().is_empty(), "the deadline itself is in time");
    clock.advance(0.1);
    assert_eq!(store.expire_tries().await.unwrap().len(), 1);
    assert_eq!(status(&store, &leased[0].id).await, RolloutStatus::Requeuing);
    assert_eq!(store.record_heartbeat(&lease).await.unwrap(), Some(1008.1));
    assert_eq!(status(&store, &leased[0].id).await, RolloutStatus::Running);
    assert!(lease_one(&store, "b").await.is_none(), "the revived rollout is not queued");
}

pub async fn late_span_does_not_revive_timed_out_try(store: Store, clock: Arc<ManualClock>) {
    let mut new = retrying(1, &[TryStatus::Timeout]);
    new.config.timeout_seconds = Some(5.0);
    store.enqueue(&[new]).await.unwrap();
    let leased = lease_one(&store, "a").await.unwrap();
    clock.advance(6.0);
    assert_eq!(store.expire_tries().await.unwrap()[0].status, TryStatus::Timeout);
    store.add_spans(vec![span(&leased, "late", None)]).await.unwrap();
    assert_eq!(status(&store, &leased.id).await, RolloutStatus::Requeuing);
    assert!(store.record_heartbeat(&lease_of(&leased)).await.is_err());
    assert_eq!(lease_of(&lease_one(&store, "b").await.unwrap()).number, 2);
}

pub async fn span_revives_unresponsive_try_before_retry(store: Store, clock: Arc<ManualClock>) {
    store.enqueue(&[retrying(1, &[TryStatus::Unresponsive])]).await.unwrap();
    let leased = lease_one(&store, "a").await.unwrap();
    clock.advance(11.0);
    store.expire_tries().await.unwrap();
    store.add_spans(vec![span(&leased, "late", None)]).await.unwrap();
    let found = store.rollout(&leased.id).await.unwrap().unwrap();
    assert_eq!(
        (found.status, found.latest_try.unwrap().status),
        (RolloutStatus::Running, TryStatus::Running)
    );
    assert!(lease_one(&store, "b").await.is_none());
}

pub async fn expiry_respects_max_tries_and_conditions(store: Store, clock: Arc<ManualClock>) {
    store
        .enqueue(&[retrying(1, &[TryStatus::Unresponsive]), retrying(2, &[TryStatus::Failed])])
        .await
        .unwrap();
    let leased = store.lease_rollouts(&LeaseRequest::new(2, None)).await.unwrap();
    clock.advance(11.0);
    assert_eq!(store.expire_tries().await.unwrap().len(), 2);
    assert!(store.expire_tries().await.unwrap().is_empty());
    assert_eq!(status(&store, &leased[0].id).await, RolloutStatus::Requeuing);
    assert_eq!(status(&store, &leased[1].id).await, RolloutStatus::Failed);
    lease_one(&store, "w").await.unwrap();
    clock.advance(11.0);
    store.expire_tries().await.unwrap();
    let failed = store.rollout(&leased[0].id).await.unwrap().unwrap();
    assert_eq!((failed.status, failed.end_time), (RolloutStatus::Failed, Some(1022.0)));
}

pub async fn released_tries_do_not_count(store: Store, _: Arc<ManualClock>) {
    store.enqueue(&[retrying(1, &[TryStatus::Failed])]).await.unwrap();
    for number in 1..4 {
        let leased = lease_one(&store, "w").await.unwrap();
        assert_eq!(lease_of(&leased).number, number);
        store.end_lease(&lease_of(&leased), LeaseEnd::Released, None).await.unwrap();
        assert_eq!(
            store.end_lease(&lease_of(&leased), LeaseEnd::Released, None).await.unwrap(),
            WriteOutcome::AlreadyRecorded
        );
        assert!(store.record_heartbeat(&lease_of(&leased)).await.is_err());
        assert_eq!(store.worker("w").await.unwrap().unwrap().status, WorkerStatus::Idle);
        store.add_spans(vec![span(&leased, "late", None)]).await.unwrap();
        assert_eq!(status(&store, &leased.id).await, RolloutStatus::Requeuing);
    }
    let fourth = lease_one(&store, "w").await.unwrap();
    store.end_lease(&lease_of(&fourth), LeaseEnd::Failed, None).await.unwrap();
    assert_eq!(
        status(&store, &fourth.id).await,
        RolloutStatus::Requeuing,
        "one of two tries has failed"
    );
    let fifth = lease_one(&store, "w").await.unwrap();
    store.end_lease(&lease_of(&fifth), LeaseEnd::Failed, None).await.unwrap();
    assert_eq!(status(&store, &fifth.id).await, RolloutStatus::Failed);
}

pub async fn backward_clock_expires_nothing(store: Store, clock: Arc<ManualClock>) {
    store.enqueue(&[retrying(1, &[TryStatus::Unresponsive])]).await.unwrap();
    let leased = lease_one(&store, "w").await.unwrap();
    clock.advance(-500.0);
    assert!(store.expire_tries().await.unwrap().is_empty());
    assert_eq!(store.record_heartbeat(&lease_of(&leased)).await.unwrap(), Some(510.0));
    clock.advance(1e9);
    assert_eq!(store.expire_tries().await.unwrap().len(), 1);
    assert!(lease_one(&store, "w").await.is_some());
}

pub async fn cancelled_rollout_stays_cancelled(store: Store, clock: Arc<ManualClock>) {
    let created = store.enqueue(&[retrying(1, &[TryStatus::Failed]), new(2)]).await.unwrap();
    let running = lease_one(&store, "w").await.unwrap();
    let ids = [created[0].id.clone(), created[1].id.clone(), "ro-none".to_owned()];
    assert_eq!(store.cancel_rollouts(&ids).await.unwrap(), 2);
    assert_eq!(store.cancel_rollouts(&ids).await.unwrap(), 0);
    assert!(lease_one(&store, "w").await.is_none());
    let error = store.record_heartbeat(&lease_of(&running)).await.unwrap_err();
    assert!(error.to_string().contains("cancelled"), "{error}");
    clock.advance(100.0);
    assert!(store.expire_tries().await.unwrap().is_empty());
    let update = TryUpdate { status: Some(TryStatus::Running), ..TryUpdate::default() };
    store.update_try(&running.id, &TrySelector::Latest, &update).await.unwrap();
    store.add_spans(vec![span(&running, "late", None)]).await.unwrap();
    let found = store.rollout(&running.id).await.unwrap().unwrap();
    assert_eq!((found.status, found.end_time), (RolloutStatus::Cancelled, Some(1000.0)));
}

pub async fn long_poll_wakes_on_enqueue_and_ends_at_deadline(store: Store, _: Arc<ManualClock>) {
    let request = |wait| LeaseRequest { wait, ..LeaseRequest::new(1, Some("w")) };
    let start = Instant::now();
    assert!(store.lease_rollouts(&request(Duration::from_millis(150))).await.unwrap().is_empty());
    assert!(start.elapsed() >= Duration::from_millis(150));
    let waiting = tokio::spawn({
        let store = Arc::clone(&store);
        let request = request(Duration::from_secs(60));
        async move { store.lease_rollouts(&request).await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let start = Instant::now();
    store.enqueue(&[new(7)]).await.unwrap();
    assert_eq!(inputs(&waiting.await.unwrap()), ["7"]);
    assert!(start.elapsed() < Duration::from_millis(900), "{:?}", start.elapsed());
}

pub async fn wait_for_changes_returns_each_rollout_once_in_order(
    store: Store,
    _: Arc<ManualClock>,
) {
    let created = store.enqueue(&[new(1), new(2), new(3)]).await.unwrap();
    let (all, last) = store.wait_for_changes(0, 10, Duration::ZERO).await.unwrap();
    assert_eq!(inputs(&all), ["1", "2", "3"]);
    assert!(
        store.wait_for_changes(last, 10, Duration::from_millis(20)).await.unwrap().0.is_empty()
    );
    store.cancel_rollouts(&[created[1].id.clone()]).await.unwrap();
    let first = lease_one(&store, "w").await.unwrap();
    store.end_lease(&lease_of(&first), LeaseEnd::Succeeded, None).await.unwrap();
    let (changed, last) = store.wait_for_changes(last, 1, Duration::ZERO).await.unwrap();
    assert_eq!(inputs(&changed), ["2"]);
    let (changed, last) = store.wait_for_changes(last, 10, Duration::ZERO).await.unwrap();
    assert_eq!((inputs(&changed), changed[0].status), (vec!["1"], RolloutStatus::Succeeded));
    let waiting = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.wait_for_changes(last, 10, Duration::from_secs(60)).await.unwrap().0 }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    store.cancel_rollouts(&[created[2].id.clone()]).await.unwrap();
    assert_eq!(inputs(&waiting.await.unwrap()), ["3"]);
}

pub async fn wait_until_finished_ignores_unknown_and_returns_at_deadline(
    store: Store,
    _: Arc<ManualClock>,
) {
    let created = store.enqueue(&[new(1), new(2)]).await.unwrap();
    let ids = vec![created[1].id.clone(), "ro-none".to_owned(), created[0].id.clone()];
    assert!(store.wait_until_finished(&[], Duration::from_secs(60)).await.unwrap().is_empty());
    store.cancel_rollouts(&ids[2..]).await.unwrap();
    assert_eq!(
        inputs(&store.wait_until_finished(&ids, Duration::from_millis(30)).await.unwrap()),
        ["1"]
    );
    let waiting = tokio::spawn({
        let store = Arc::clone(&store);
        let ids = ids.clone();
        async move { store.wait_until_finished(&ids, Duration::MAX).await.unwrap() }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    store.cancel_rollouts(&ids[..1]).await.unwrap();
    assert_eq!(inputs(&waiting.await.unwrap()), ["2", "1"]);
}

pub async fn concurrent_leasers_never_share_a_rollout(store: Store, _: Arc<ManualClock>) {
    const COUNT: usize = 10_000;
    let all: Vec<NewRollout> = (0..COUNT).map(new).collect();
    for part in all.chunks(1000) {
        store.enqueue(part).await.unwrap();
    }
    let leaser = |index: usize| {
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            let mut leased = Vec::new();
            let request = LeaseRequest::new(1 + index * 4, Some(&format!("w{index}")));
            loop {
                let batch = store.lease_rollouts(&request).await.unwrap();
                if batch.is_empty() {
                    return leased;
                }
                for rollout in batch {
                    store.end_lease(&lease_of(&rollout), LeaseEnd::Succeeded, None).await.unwrap();
                    leased.push(rollout.id);
                }
            }
        })
    };
    let leasers: Vec<_> = (0..8).map(leaser).collect();
    let mut seen = HashSet::new();
    for leaser in leasers {
        for id in leaser.await.unwrap() {
            assert!(seen.insert(id.clone()), "{id} was leased twice");
        }
    }
    assert_eq!(seen.len(), COUNT);
    let filter = RolloutFilter {
        status_in: Some(vec![RolloutStatus::Succeeded]),
        ..RolloutFilter::default()
    };
    let page = PageRequest { limit: Some(1), ..PageRequest::default() };
    assert_eq!(store.query_rollouts(&filter, &page).await.unwrap().total, COUNT as u64);
    assert_eq!(store.statistics().await.unwrap().tries, COUNT as u64);
}
