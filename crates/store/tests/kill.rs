//! A process that records is killed at a random moment: what it reported as recorded is there, whole; nothing else is
//! half there.

#![allow(clippy::unwrap_used)] // clippy sees only what is inside #[test], not the helpers beside it

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use dressage_store::{Attempt, PerToken, PlannedPath, PolicyPlan, Status, StepPlan, Store, Update};
use dressage_tree::{
    AttemptId, Kind, Outcome, Placement, Purpose, RunId, Segment, SegmentId, Trajectory, VersionRun,
};
use serde_json::json;

const FILE: &str = "DRESSAGE_TEST_RECORD";

fn run() -> RunId {
    RunId("killed".into())
}

fn attempt(sample: u32) -> Attempt {
    let tokens: Vec<u32> = (0..2000).map(|i| i * (sample + 1)).collect();
    let mut trajectory = Trajectory::new();
    let root = trajectory.push(Segment::given(None, tokens.clone(), 0)).unwrap();
    let reply = Segment {
        kind: Kind::Sampled,
        logprobs: tokens.iter().map(|&t| -(t as f32).sqrt()).collect(),
        versions: vec![VersionRun { version: u64::from(sample), len: tokens.len() as u32 }],
        ..Segment::given(Some(root), tokens, 0)
    };
    trajectory.push(reply).unwrap();
    let placement = Placement { purpose: Purpose::Train, phase: 0, step: 0, group: 0, sample };
    Attempt {
        id: AttemptId::new(&run(), &placement, 0),
        placement,
        number: 0,
        task: json!({ "sample": sample }),
        outcome: Outcome::begun(),
        score: Some(0.5),
        reward: Some(0.5),
        earned: Vec::new(),
        status: Status::Completed,
        trajectory,
    }
}

fn plan(step: u32) -> StepPlan {
    let path = PlannedPath {
        attempt: attempt(step).id,
        leaf: SegmentId(1),
        advantage: PerToken::same(0.1),
        weight: PerToken::same(0.3),
        returns: None,
        values: None,
    };
    StepPlan {
        phase: 0,
        step,
        places: vec![],
        policies: vec![PolicyPlan {
            updates: vec![Update { micro_batches: vec![vec![path; 50]] }],
            ..PolicyPlan::default()
        }],
    }
}

/// The child: records until it is killed, saying what it has done. Does nothing when run as a test.
#[test]
fn child() {
    let Ok(file) = std::env::var(FILE) else { return };
    let store = Store::open(Path::new(&file), &run()).unwrap();
    for sample in 0.. {
        store.record_attempt(&attempt(sample)).unwrap();
        store.record_step(&plan(sample)).unwrap();
        println!("\nrecorded {sample}");
    }
}

#[test]
fn what_was_recorded_survives_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.db");
    let mut recorded = 0;
    // The same record is killed again and again, each time a little later.
    for round in 0..6 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env(FILE, &file)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut seen = lines
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix("recorded ")?.parse::<u32>().ok());
        for _ in 0..=3 * round {
            recorded = recorded.max(seen.next().unwrap() + 1);
        }
        std::thread::sleep(std::time::Duration::from_micros(700 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        // What it managed to say before it died counts as well.
        recorded = seen.fold(recorded, |most, sample| most.max(sample + 1));

        let store = Store::open(&file, &run()).unwrap();
        for sample in 0..recorded {
            let id = attempt(sample).id;
            assert_eq!(store.attempt(&id).unwrap(), Some(attempt(sample)), "round {round}");
            assert_eq!(store.step(0, sample).unwrap(), Some(plan(sample)), "round {round}");
        }
        // At most one more, which it had no time to report.
        let present = store.summaries(Purpose::Train).unwrap();
        assert!(present.len() as u32 - recorded <= 1, "{} of {recorded}", present.len());
        for summary in present {
            assert_eq!(store.attempt(&summary.id).unwrap(), Some(attempt(summary.placement.sample)));
        }
    }
    assert!(recorded > 10, "{recorded}");
}
