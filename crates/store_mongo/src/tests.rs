//! Tests against a server, whose URL the environment variable `LEVADE_MONGODB_URL` has.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use levade_store::backend::Failure;
use levade_store::{Access, Attempt, AttemptStart, Code, End, Status, Store, StoreError};
use levade_tree::{
    AttemptId, AttemptSlot, Kind, Outcome, Purpose, RunId, Segment, SegmentId, Trajectory,
};
use mongodb::bson::doc;
use serde_json::json;

use crate::connection::Connection;
use crate::segments::Segments;
use crate::{MongoStore, MongoUrl};

/// Name of the variable with the URL of a server.
const URL: &str = "LEVADE_MONGODB_URL";

/// Returns the URL of the server, or `None` if the tests must be skipped.
pub(crate) fn server() -> Option<MongoUrl> {
    let url = std::env::var(URL).ok().filter(|url| !url.is_empty());
    if url.is_none() {
        println!("skipped: set {URL} to the URL of a server to run the tests of MongoDB");
    }
    url.map(|url| MongoUrl::parse(&url).unwrap())
}

/// A database of one test, dropped by [`TestDatabase::drop_all`].
pub(crate) struct TestDatabase {
    pub url: MongoUrl,
    pub name: String,
}

impl TestDatabase {
    /// Names a database that no other test uses.
    pub fn new(url: MongoUrl) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("levade_test_{}_{count}", std::process::id());
        TestDatabase { url, name }
    }

    /// Drops the database.
    pub async fn drop_all(&self) {
        let connection = Connection::open(&self.url, &self.name).await.unwrap();
        connection.database.drop().await.unwrap();
    }
}

/// Generates the tests of a contract, each in a database of its own.
macro_rules! contract {
    ($($test:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let Some(url) = server() else { return };
                let of = TestDatabase::new(url);
                let store = open(&of, "a", "test").await.unwrap();
                levade_store::contract::$test(Arc::new(store)).await;
                of.drop_all().await;
            }
        )*
    };
}

/// Opens the ledger of a test for the trainer `owner`.
async fn open(of: &TestDatabase, owner: &str, run: &str) -> Result<MongoStore, StoreError> {
    let run = RunId(run.to_owned());
    MongoStore::open_database(&of.url, &of.name, owner, Access::Start(&run)).await
}

mod ledger {
    use super::*;

    contract!(
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
    );
}
