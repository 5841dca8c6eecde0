use levade_store::rollouts::ManualClock;

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
    enqueue_is_idempotent_by_key
    finish_is_idempotent_and_rejects_other_ends
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
    changes_returns_each_rollout_once_in_order
    wait_finished_ignores_unknown_and_returns_at_deadline
    concurrent_leasers_never_share_a_rollout
    filters_combine_by_logic
    pages_count_all_matches_and_reject_unknown_fields
    missing_values_sort_last_for_times_and_first_for_text
    resources_are_append_only_versions
    workers_follow_their_tries
    span_numbers_are_unique_and_increasing
    spans_report_one_outcome_each
    json_round_trips_to_the_byte
);
