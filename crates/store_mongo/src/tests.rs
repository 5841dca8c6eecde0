//! Tests against a server, whose URL the environment variable `LEVADE_MONGODB_URL` has.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use levade_store::{
    Attempt, AttemptStart, Code, MongoUrl, Status, Store, StoreAccess, StoreError, WriteOutcome,
};
use levade_tree::{
    AttemptId, AttemptSlot, Kind, Outcome, Purpose, RunId, Segment, SegmentId, Trajectory,
    VersionRun,
};
use mongodb::bson::spec::BinarySubtype;
use mongodb::bson::{Bson, doc};
use serde_json::json;

use crate::MongoStore;
use crate::connection::{Connection, collect_documents};
use crate::segments::SegmentCollections;

/// Name of the variable with the URL of a server.
const URL: &str = "LEVADE_MONGODB_URL";

/// Returns the URL of the server, or `None` if the tests must be skipped.
pub(crate) fn server() -> Option<MongoUrl> {
    let url = std::env::var(URL).ok().filter(|url| !url.is_empty());
    if url.is_none() {
        println!("skipped: set {URL} to the URL of a server to run the tests of MongoDB");
    }
    url.map(|url| url.parse().unwrap())
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
    MongoStore::open_database(&of.url, &of.name, owner, StoreAccess::Start(&run)).await
}

/// Opens the ledger of a test to continue it.
async fn resume(of: &TestDatabase, owner: &str) -> Result<MongoStore, StoreError> {
    let new = RunId("new".to_owned());
    MongoStore::open_database(&of.url, &of.name, owner, StoreAccess::Resume(&new)).await
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

/// Creates a segment that continues `parent`. Sampled tokens have log-probabilities.
fn segment(index: u32, kind: Kind, tokens: &[u32]) -> Segment {
    let sampled = if kind == Kind::Sampled { tokens.len() } else { 0 };
    Segment {
        id: SegmentId(index),
        kind,
        logprobs: (0..sampled).map(|i| -0.5 * i as f32).collect(),
        versions: (0..sampled.min(1))
            .map(|_| VersionRun { version: 3, len: sampled as u32 })
            .collect(),
        ..Segment::context(index.checked_sub(1).map(SegmentId), tokens.to_vec(), index)
    }
}

/// Creates a completed attempt with a prompt and a completion.
fn attempt(run: &RunId, sample: u32) -> Attempt {
    let slot = AttemptSlot { purpose: Purpose::Train, phase: 1, step: 3, group: 0, sample };
    let mut trajectory = Trajectory::new();
    trajectory.push(segment(0, Kind::Context, &[1, 2, 3])).unwrap();
    trajectory.push(segment(1, Kind::Sampled, &[4, 5])).unwrap();
    let start = AttemptStart {
        id: AttemptId::new(run, &slot, 0),
        slot,
        number: 0,
        task: json!({"question": "2+2", "answer": 4}),
    };
    Attempt {
        outcome: Outcome { turns: 1, ..Outcome::demonstrated("4") },
        score: Some(1.0),
        reward: Some(0.95),
        status: Status::Completed,
        trajectory,
        ..Attempt::from_start(&start)
    }
}

fn start_of(attempt: &Attempt) -> AttemptStart {
    let Attempt { id, slot, number, task, .. } = attempt.clone();
    AttemptStart { id, slot, number, task }
}

#[tokio::test]
async fn second_trainer_is_rejected_until_the_lease_ends_and_then_fences_the_first() {
    let Some(url) = server() else { return };
    let of = TestDatabase::new(url);
    let first = open(&of, "host-a:/runs/x", "test").await.unwrap();
    let started = attempt(first.run(), 0);
    first.start_attempt(&start_of(&started)).await.unwrap();
    let error = resume(&of, "host-b:/runs/x").await.unwrap_err();
    assert!(matches!(error, StoreError::Leased { .. }), "{error}");
    assert!(error.to_string().contains("host-a:/runs/x"), "{error}");
    let connection = Connection::open(&of.url, &of.name).await.unwrap();
    let expire = doc! { "$set": { "until": 1.0 } };
    connection.collection("run").update_one(doc! { "_id": "run" }, expire).await.unwrap();
    let second = resume(&of, "host-b:/runs/x").await.unwrap();
    assert_eq!(second.abandon_running().await.unwrap(), 1);
    for error in [
        first.start_attempt(&start_of(&attempt(first.run(), 1))).await.unwrap_err(),
        first.append_segments(&started.id, started.trajectory.segments()).await.unwrap_err(),
        first.end_attempt(&started.id, &started.end()).await.unwrap_err(),
        first.record_attempt(&attempt(first.run(), 2)).await.unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::Fenced { .. }), "{error}");
        assert!(error.to_string().contains("host-b:/runs/x"), "{error}");
    }
    second.record_attempt(&attempt(second.run(), 1)).await.unwrap();
    let error = open(&of, "host-b:/runs/x", "test").await.unwrap_err();
    assert!(matches!(error, StoreError::NotEmpty { .. }), "{error}");
    // The same directory on the same host: its earlier process has exited.
    drop(second);
    resume(&of, "host-b:/runs/x").await.unwrap();
    of.drop_all().await;
}

#[tokio::test]
async fn open_distinguishes_missing_own_and_other_runs() {
    let Some(url) = server() else { return };
    let of = TestDatabase::new(url);
    let read = || MongoStore::open_database(&of.url, &of.name, "a", StoreAccess::Read);
    let error = read().await.unwrap_err();
    assert!(error.is_user_error() && error.code() == Code::NotFound, "{error}");
    drop(open(&of, "a", "test").await.unwrap());
    let error = open(&of, "a", "other").await.unwrap_err();
    assert!(matches!(error, StoreError::OtherRun { .. }), "{error}");
    let other = RunId("other".to_owned());
    let resumed =
        MongoStore::open_database(&of.url, &of.name, "a", StoreAccess::Resume(&other)).await;
    assert_eq!(resumed.unwrap().run().0, "test");
    let reader = read().await.unwrap();
    let error = reader.record_attempt(&attempt(reader.run(), 0)).await.unwrap_err();
    assert!(matches!(error, StoreError::ReadOnly { .. }), "{error}");
    of.drop_all().await;
}

#[tokio::test]
async fn documents_of_a_killed_append_are_never_read() {
    let Some(url) = server() else { return };
    let of = TestDatabase::new(url);
    let store = open(&of, "a", "test").await.unwrap();
    let complete = attempt(store.run(), 0);
    let segments = complete.trajectory.segments();
    store.start_attempt(&start_of(&complete)).await.unwrap();
    store.append_segments(&complete.id, &segments[..1]).await.unwrap();
    // A process was killed after it had written a segment, and before it changed the attempt.
    let connection = Connection::open(&of.url, &of.name).await.unwrap();
    let lost = [segment(1, Kind::Sampled, &[8, 9, 10]), segment(2, Kind::Context, &[11])];
    for previous in [None, Some("0123456789abcdef".to_owned())] {
        SegmentCollections::new(&connection).write(&complete.id, previous, &lost).await.unwrap();
    }
    let read = store.attempt(&complete.id).await.unwrap().unwrap();
    assert_eq!(read.trajectory.segments(), &segments[..1]);
    for outcome in [WriteOutcome::Written, WriteOutcome::AlreadyRecorded] {
        assert_eq!(store.append_segments(&complete.id, segments).await.unwrap(), outcome);
    }
    store.end_attempt(&complete.id, &complete.end()).await.unwrap();
    assert_eq!(store.attempt(&complete.id).await.unwrap().unwrap(), complete);
    assert_eq!(store.record_attempt(&complete).await.unwrap(), WriteOutcome::AlreadyRecorded);
    of.drop_all().await;
}

#[tokio::test]
async fn long_segments_are_stored_in_chunks() {
    let Some(url) = server() else { return };
    let of = TestDatabase::new(url);
    let connection = Connection::open(&of.url, &of.name).await.unwrap();
    let segments = SegmentCollections { connection: &connection, chunk_bytes: 100 };
    let tokens: Vec<u32> = (0..1000).collect();
    let mut written = Trajectory::new();
    for (index, kind) in [Kind::Context, Kind::Sampled, Kind::Context].into_iter().enumerate() {
        written.push(segment(index as u32, kind, &tokens[..1000 - 400 * index])).unwrap();
    }
    let id = attempt(&RunId("test".to_owned()), 0).id;
    let last = segments.write(&id, None, written.segments()).await.unwrap();
    assert_eq!(segments.read_trajectory(&id, 3, last.as_deref()).await.unwrap(), written);
    let chunks = connection.collection("chunks");
    // 4000 bytes of the prompt, 600 × 8 and one run of versions, 200 × 4.
    assert_eq!(chunks.count_documents(doc! {}).await.unwrap(), 40 + 49 + 8);
    chunks.delete_one(doc! { "index": 3 }).await.unwrap();
    assert!(segments.read_trajectory(&id, 3, last.as_deref()).await.is_err());
    of.drop_all().await;
}

#[tokio::test]
async fn only_per_token_values_are_stored_as_binary() {
    let Some(url) = server() else { return };
    let of = TestDatabase::new(url);
    let store = open(&of, "a", "test").await.unwrap();
    let complete = attempt(store.run(), 0);
    store.record_attempt(&complete).await.unwrap();
    let connection = Connection::open(&of.url, &of.name).await.unwrap();
    let found =
        doc! { "task.answer": 4, "outcome.final_text": "4", "score": 1.0, "status": "completed" };
    let found = connection.collection("attempts").find_one(found).await.unwrap().unwrap();
    assert_eq!(found.get_str("_id").unwrap(), complete.id.to_string());
    let filter = doc! { "attempt": complete.id.to_string(), "kind": "sampled" };
    let sampled = connection.collection("segments").find_one(filter).await.unwrap().unwrap();
    let binary = sampled.iter().filter(|(_, value)| matches!(value, Bson::Binary(_)));
    let names: Vec<&str> = binary.map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["tokens", "logprobs", "versions"]);
    let tokens = Bson::from(mongodb::bson::Binary {
        subtype: BinarySubtype::Generic,
        bytes: vec![4, 0, 0, 0, 5, 0, 0, 0],
    });
    assert_eq!(sampled.get("tokens"), Some(&tokens));
    of.drop_all().await;
}

#[tokio::test]
async fn stored_size_of_long_attempt_is_proportional_to_tokens() {
    let Some(url) = server() else { return };
    let of = TestDatabase::new(url);
    let store = open(&of, "a", "test").await.unwrap();
    let mut sizes = Vec::new();
    for (sample, turns) in [(0, 50_u32), (1, 100), (2, 200)] {
        let started = attempt(store.run(), sample);
        store.start_attempt(&start_of(&started)).await.unwrap();
        for turn in 0..turns {
            let tokens: Vec<u32> = (turn..turn + 300).collect();
            let of_turn = [
                segment(2 * turn, Kind::Context, &tokens),
                segment(2 * turn + 1, Kind::Sampled, &tokens[..150]),
            ];
            store.append_segments(&started.id, &of_turn).await.unwrap();
        }
        store.end_attempt(&started.id, &started.end()).await.unwrap();
        sizes.push((turns * 450, stored_bytes(&of, &started.id.to_string()).await));
    }
    for (tokens, bytes) in &sizes {
        println!(
            "{tokens} tokens: {bytes} bytes, {:.2} per token",
            *bytes as f64 / f64::from(*tokens)
        );
    }
    // 4 bytes per token, 4 more per sampled one, and a part of the fields of each segment.
    let per_token: Vec<f64> =
        sizes.iter().map(|(tokens, bytes)| *bytes as f64 / f64::from(*tokens)).collect();
    assert!(per_token[1] < 8.0 && (per_token[2] / per_token[1] - 1.0).abs() < 0.05);
    of.drop_all().await;
}

/// Returns the size of the documents of an attempt, as BSON.
async fn stored_bytes(of: &TestDatabase, attempt: &str) -> usize {
    let connection = Connection::open(&of.url, &of.name).await.unwrap();
    let mut documents = Vec::new();
    for (collection, filter) in
        [("segments", doc! { "attempt": attempt }), ("attempts", doc! { "_id": attempt })]
    {
        let found = connection.collection(collection).find(filter).await.unwrap();
        documents.extend(collect_documents(found).await.unwrap());
    }
    documents.iter().map(|document| mongodb::bson::serialize_to_vec(document).unwrap().len()).sum()
}

#[tokio::test]
async fn unreachable_server_is_reported_after_the_timeout_without_the_password() {
    let url = "mongodb://u:secret@127.0.0.1:1/x?serverSelectionTimeoutMS=300&directConnection=true";
    let url: MongoUrl = url.parse().unwrap();
    let error = MongoStore::open_database(&url, "d", "a", StoreAccess::Read).await.unwrap_err();
    assert!(matches!(error, StoreError::Deadline { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("mongodb://127.0.0.1:1/d") && text.contains("300ms"), "{text}");
    assert!(text.contains("no MongoDB server responded") && !text.contains("secret"), "{text}");
}
