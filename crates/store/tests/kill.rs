//! Kills a writing process at a random moment. All data that it reported as recorded must be
//! complete, and no other write may be stored in part.

#![allow(clippy::unwrap_used)] // clippy exempts #[test] functions, but not their helpers

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use levade_policy::MicroBatchPlan;
use levade_store::{
    Attempt, AttemptStart, PerToken, PlannedSequence, PolicyPlan, Sqlite, Status, StepPlan, Store,
    Update,
};
use levade_tree::{
    AttemptId, AttemptSlot, Kind, Outcome, Purpose, RunId, Segment, SegmentId, Trajectory,
    VersionRun,
};
use serde_json::json;
use tokio::task::JoinSet;

const FILE: &str = "LEVADE_TEST_RECORD";

fn run() -> RunId {
    RunId("killed".into())
}

fn attempt(sample: u32) -> Attempt {
    let tokens: Vec<u32> = (0..2000).map(|i| i * (sample + 1)).collect();
    let mut trajectory = Trajectory::new();
    let root = trajectory.push(Segment::context(None, tokens.clone(), 0)).unwrap();
    let completion = Segment {
        kind: Kind::Sampled,
        logprobs: tokens.iter().map(|&t| -(t as f32).sqrt()).collect(),
        versions: vec![VersionRun { version: u64::from(sample), len: tokens.len() as u32 }],
        ..Segment::context(Some(root), tokens, 0)
    };
    trajectory.push(completion).unwrap();
    let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 0, group: 0, sample };
    Attempt {
        id: AttemptId::new(&run(), &slot, 0),
        slot,
        number: 0,
        task: json!({ "sample": sample }),
        outcome: Outcome::initial(),
        score: Some(0.5),
        reward: Some(0.5),
        step_rewards: Vec::new(),
        status: Status::Completed,
        trajectory,
    }
}

fn plan(step: u32) -> StepPlan {
    let path = PlannedSequence {
        attempt: attempt(step).id,
        leaf: SegmentId(1),
        advantage: PerToken::uniform(0.1),
        weight: PerToken::uniform(0.3),
        returns: None,
        values: None,
    };
    StepPlan {
        phase: 0,
        step,
        group_positions: vec![],
        policies: vec![PolicyPlan {
            updates: vec![Update {
                sequences: vec![path; 50],
                micro_batch_plan: MicroBatchPlan::from_sizes([50]),
                critic_plan: None,
            }],
            ..PolicyPlan::default()
        }],
    }
}

/// Number of concurrent writers. With several, writes share commits.
const WRITERS: u32 = 4;

/// Writes an attempt: in one call if `sample` is even, and segment by segment if it is odd.
async fn write(store: &dyn Store, sample: u32) {
    let whole = attempt(sample);
    if sample.is_multiple_of(2) {
        store.record_attempt(&whole).await.unwrap();
        return;
    }
    let Attempt { id, slot, number, task, .. } = whole.clone();
    store.start_attempt(&AttemptStart { id, slot, number, task }).await.unwrap();
    for segment in whole.trajectory.segments() {
        store.append_segments(&id, std::slice::from_ref(segment)).await.unwrap();
    }
    store.end_attempt(&id, &whole.end()).await.unwrap();
}

/// The child process: writes until it is killed, and prints each completed write. Returns at once
/// when run as a normal test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_process_records_attempts_until_killed() {
    let Ok(file) = std::env::var(FILE) else { return };
    let store: Arc<dyn Store> = Arc::new(Sqlite::open(Path::new(&file), &run()).await.unwrap());
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let store = store.clone();
        writers.spawn(async move {
            for sample in (writer..).step_by(WRITERS as usize) {
                write(&*store, sample).await;
                store.record_step(&plan(sample)).await.unwrap();
                println!("\nrecorded {sample}");
            }
        });
    }
    writers.join_all().await;
}

#[tokio::test]
async fn recorded_data_survives_process_kill() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.db");
    let mut recorded = BTreeSet::new();
    // The writer of one file is killed repeatedly, each time a little later.
    for round in 0..6 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_process_records_attempts_until_killed", "--nocapture"])
            .env(FILE, &file)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut seen = lines
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix("recorded ")?.parse::<u32>().ok());
        for _ in 0..=3 * round {
            recorded.insert(seen.next().unwrap());
        }
        std::thread::sleep(std::time::Duration::from_micros(700 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        // Output that the child wrote before it was killed counts, too.
        recorded.extend(seen);

        let store = Sqlite::open(&file, &run()).await.unwrap();
        for &sample in &recorded {
            let id = attempt(sample).id;
            assert_eq!(store.attempt(&id).await.unwrap(), Some(attempt(sample)), "round {round}");
            assert_eq!(
                store.step_plan(0, sample).await.unwrap(),
                Some(plan(sample)),
                "round {round}"
            );
        }
        // Each writer may have completed at most one more attempt without reporting it.
        let present = store.summaries(Purpose::Train).await.unwrap();
        assert!(
            present.len() - recorded.len() <= WRITERS as usize,
            "{} of {recorded:?}",
            present.len()
        );
        for summary in present {
            let whole = attempt(summary.slot.sample);
            assert_eq!(store.attempt(&summary.id).await.unwrap(), Some(whole));
        }
        // An attempt in progress has the appended segments, each of them complete.
        for sample in 0..recorded.last().unwrap() + WRITERS {
            let whole = attempt(sample);
            let Some(found) = store.attempt(&whole.id).await.unwrap() else { continue };
            let found = found.trajectory.segments();
            let whole = whole.trajectory.segments();
            assert_eq!(found, &whole[..found.len()], "round {round}");
        }
        // The next child repeats all writes from the start and finds the recorded data.
    }
    assert!(recorded.len() > 10, "{recorded:?}");
}
