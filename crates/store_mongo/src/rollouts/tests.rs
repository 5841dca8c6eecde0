use levade_store::rollouts::{LeaseRequest, ManualClock};
use serde_json::value::RawValue;

use super::*;
use crate::tests::{TestDatabase, server};

/// Opens the rollouts of a test, with a clock that the test sets.
async fn open(of: &TestDatabase, clock: Arc<ManualClock>) -> MongoRollouts {
    let connection = Connection::open(&of.url, &of.name).await.unwrap();
    MongoRollouts::on_connection(connection, clock).await.unwrap()
}

/// Generates the tests of the contract, each in a database of its own.
macro_rules! contract {
    ($($test:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let Some(url) = server() else { return };
                let of = TestDatabase::new(url);
                let clock = Arc::new(ManualClock::new(1000.0));
                let store = Arc::new(open(&of, Arc::clone(&clock)).await);
                levade_store::rollouts::contract::$test(store, clock).await;
                of.drop_all().await;
            }
        )*
    };
}

contract!(
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

fn new(input: &str) -> NewRollout {
    NewRollout::new(RawValue::from_string(input.to_owned()).unwrap())
}

#[tokio::test]
async fn late_change_gets_number_above_last_announced_number() {
    let Some(url) = server() else { return };
    let of = TestDatabase::new(url);
    let store = open(&of, Arc::new(ManualClock::new(1000.0))).await;
    let created = store.enqueue(&[new("1"), new("2")]).await.unwrap();
    // A reader has read up to 7 while a writer with the number 3 had not written yet.
    let announce = doc! { "$set": { "read": 7_i64 } };
    store.collection("counters").update_one(doc! { "_id": "changes" }, announce).await.unwrap();
    store.cancel_rollouts(&[created[0].id.clone()]).await.unwrap();
    let (changed, last) = store.wait_for_changes(7, 10, Duration::ZERO).await.unwrap();
    assert_eq!((changed.len(), changed[0].id.as_str(), last), (1, created[0].id.as_str(), 8));
    of.drop_all().await;
}

#[tokio::test]
async fn two_processes_lease_from_one_queue_and_wake_each_other() {
    let Some(url) = server() else { return };
    let of = TestDatabase::new(url);
    let clock = Arc::new(ManualClock::new(1000.0));
    let [first, second] = [open(&of, Arc::clone(&clock)).await, open(&of, clock).await];
    let wait = Duration::from_secs(60);
    let waiting = tokio::spawn(async move {
        second
            .lease_rollouts(&LeaseRequest { wait, ..LeaseRequest::new(1, Some("w")) })
            .await
            .unwrap()
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    first.enqueue(&[new("7")]).await.unwrap();
    assert_eq!(waiting.await.unwrap()[0].input.get(), "7");
    assert!(first.lease_rollouts(&LeaseRequest::new(1, None)).await.unwrap().is_empty());
    of.drop_all().await;
}

#[tokio::test]
async fn reopened_rollouts_keep_their_indexes_and_reject_other_formats() {
    let Some(url) = server() else { return };
    let of = TestDatabase::new(url);
    drop(open(&of, Arc::new(ManualClock::new(1000.0))).await);
    let store = open(&of, Arc::new(ManualClock::new(1000.0))).await;
    for IndexDefinition { collection, name, .. } in list_index_definitions() {
        let names = store.collection(collection).list_index_names().await.unwrap();
        assert!(names.iter().any(|found| found == name), "{name}: {names:?}");
    }
    let later = doc! { "$set": { "format": 2 } };
    store.collection("store").update_one(doc! { "_id": "rollouts" }, later).await.unwrap();
    let connection = Connection::open(&of.url, &of.name).await.unwrap();
    let clock = Arc::new(ManualClock::new(1000.0));
    let error = MongoRollouts::on_connection(connection, clock).await.unwrap_err();
    assert!(matches!(error, StoreError::Version { found: 2, .. }), "{error}");
    of.drop_all().await;
}
