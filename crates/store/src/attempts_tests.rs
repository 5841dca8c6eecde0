//! Tests of attempts in the record.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use dressage_tree::Outcome;

use crate::{Earned, Earner};

fn place(group: u32, sample: u32) -> Placement {
    Placement { purpose: Purpose::Train, phase: 1, step: 3, group, sample }
}

fn segment(kind: Kind, tokens: &[u32]) -> Segment {
    let sampled = if kind == Kind::Sampled { tokens.len() } else { 0 };
    Segment {
        kind,
        logprobs: (0..sampled).map(|i| -0.1 * i as f32).collect(),
        versions: if sampled > 0 {
            vec![VersionRun { version: u64::MAX - 1, len: sampled as u32 }]
        } else {
            Vec::new()
        },
        ..Segment::given(None, tokens.to_vec(), 0)
    }
}

fn attempt(group: u32, sample: u32) -> Attempt {
    let mut trajectory = Trajectory::new();
    let root = trajectory.push(segment(Kind::Given, &[1, 2, u32::MAX])).unwrap();
    let reply = Segment { parent: Some(root), temperature: 0.7, ..segment(Kind::Sampled, &[5, 6]) };
    trajectory.push(reply).unwrap();
    Attempt {
        id: AttemptId::new(&run(), &place(group, sample), 0),
        placement: place(group, sample),
        number: 0,
        task: json!({"question": "2+2", "answer": 4}),
        outcome: Outcome { turns: 1, ..Outcome::demonstrated("4") },
        score: Some(1.0),
        reward: Some(0.95),
        earned: vec![Earned { by: Earner::Turn(0), reward: -0.05 }],
        status: Status::Completed,
        trajectory,
    }
}

fn run() -> RunId {
    RunId("test".into())
}

fn open() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&folder.path().join("run.db"), &run()).unwrap();
    (folder, store)
}

#[test]
fn an_attempt_that_waited_for_its_score_gets_one_and_keeps_its_tokens() {
    let (_folder, store) = open();
    let done = attempt(0, 0);
    let waits =
        Attempt { status: Status::Unscored, score: None, reward: None, earned: Vec::new(), ..done.clone() };
    store.record_attempt(&waits).unwrap();
    assert_eq!(store.last_try(&done.placement).unwrap().as_ref(), Some(&waits));
    assert_eq!(store.summaries(Purpose::Train).unwrap()[0].status, Status::Unscored);
    let other = Attempt { trajectory: Trajectory::new(), ..done.clone() };
    assert!(matches!(store.record_attempt(&other), Err(StoreError::Conflict { field: "trajectory", .. })));
    assert_eq!(store.record_attempt(&done).unwrap(), Recorded::Now);
    assert_eq!(store.attempt(&done.id).unwrap().as_ref(), Some(&done));
    assert_eq!(store.record_attempt(&done).unwrap(), Recorded::Before);
    // It does not wait again, and has no other score.
    for other in [waits, Attempt { score: Some(0.5), ..done.clone() }] {
        assert!(matches!(store.record_attempt(&other), Err(StoreError::Conflict { .. })));
    }
}

#[test]
fn recording_twice_is_a_no_op_and_something_else_a_conflict() {
    let (_folder, store) = open();
    let first = attempt(0, 0);
    assert_eq!(store.record_attempt(&first).unwrap(), Recorded::Now);
    assert_eq!(store.record_attempt(&first).unwrap(), Recorded::Before);
    let other = Attempt { reward: Some(0.0), ..first.clone() };
    let error = store.record_attempt(&other).unwrap_err();
    assert!(matches!(error, StoreError::Conflict { field: "reward", .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("attempt train/phase 1/step 3/group 0/sample 0"), "{text}");
    assert!(text.contains("run.db"), "{text}");
    let mut longer = first.clone();
    longer.trajectory.push(segment(Kind::Given, &[1])).unwrap();
    assert!(matches!(store.record_attempt(&longer), Err(StoreError::Conflict { field: "trajectory", .. })));
    assert_eq!(store.attempt(&first.id).unwrap(), Some(first));
    assert_eq!(store.last_try(&place(9, 9)).unwrap(), None);
}

#[test]
fn what_attempts_begin_with_is_kept_once() {
    let (folder, store) = open();
    let mut other = attempt(1, 0);
    other.trajectory = Trajectory::new();
    other.trajectory.push(segment(Kind::Given, &[1, 2])).unwrap();
    // Not a prompt: a reply like it, and the same tokens further down.
    let reply = other.trajectory.push(segment(Kind::Sampled, &[1, 2])).unwrap();
    other
        .trajectory
        .push(Segment { parent: Some(reply), ..segment(Kind::Given, &[1, 2, u32::MAX]) })
        .unwrap();
    let all = [attempt(0, 0), attempt(0, 1), other];
    store.record_attempts(&all).unwrap();
    for attempt in &all {
        assert_eq!(store.attempt(&attempt.id).unwrap().as_ref(), Some(attempt));
    }
    let raw = rusqlite::Connection::open(folder.path().join("run.db")).unwrap();
    let count = |query: &str| raw.query_row(query, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(count("SELECT count(*) FROM prompts"), 2);
    assert_eq!(count("SELECT count(DISTINCT prompt) FROM segments WHERE attempt < 3"), 1);
    assert_eq!(count("SELECT count(*) FROM segments WHERE tokens IS NOT NULL"), 4);
    raw.execute_batch("PRAGMA foreign_keys = off; DELETE FROM prompts").unwrap();
    let error = store.last_try(&place(0, 0)).unwrap_err().to_string();
    assert!(error.contains("segment 0: its prompt is missing"), "{error}");
}

#[test]
fn many_are_recorded_all_or_none() {
    let (_folder, store) = open();
    store.record_attempt(&attempt(1, 0)).unwrap();
    let clash = Attempt { score: None, ..attempt(1, 0) };
    let error = store.record_attempts(&[attempt(0, 0), clash]).unwrap_err();
    assert!(error.to_string().contains("group 1/sample 0"), "{error}");
    assert_eq!(store.last_try(&place(0, 0)).unwrap(), None);
    store.record_attempts(&[attempt(0, 0), attempt(1, 0), attempt(0, 1)]).unwrap();
    let places: Vec<_> = store.summaries(Purpose::Train).unwrap().iter().map(|s| s.placement).collect();
    assert_eq!(places, [place(0, 0), place(0, 1), place(1, 0)]);
    let summary = &store.summaries(Purpose::Train).unwrap()[0];
    assert_eq!((summary.sampled_tokens, summary.tokens), (2, 5));
}

#[test]
fn the_last_of_several_tries_counts() {
    let (_folder, store) = open();
    let failed = Attempt { status: Status::Superseded, score: None, reward: None, ..attempt(0, 0) };
    let again =
        |number| Attempt { id: AttemptId::new(&run(), &place(0, 0), number), number, ..attempt(0, 0) };
    store.record_attempt(&failed).unwrap();
    assert_eq!(store.last_try(&place(0, 0)).unwrap(), None);
    assert_eq!(store.summaries(Purpose::Train).unwrap(), []);
    assert_eq!((store.tries(&place(0, 0)).unwrap(), store.tries(&place(0, 1)).unwrap()), (1, 0));
    store.record_attempts(&[again(2), again(1), attempt(0, 1)]).unwrap();
    assert_eq!(store.last_try(&place(0, 0)).unwrap(), Some(again(2)));
    assert_eq!(store.attempt(&failed.id).unwrap(), Some(failed));
    let summaries = store.summaries(Purpose::Train).unwrap();
    let found: Vec<_> = summaries.iter().map(|s| (s.placement.sample, s.number, s.id)).collect();
    assert_eq!(found, [(0, 2, again(2).id), (1, 0, attempt(0, 1).id)]);
    let misnamed = Attempt { number: 3, ..again(2) };
    let error = store.record_attempt(&misnamed).unwrap_err().to_string();
    assert!(error.contains("is not the name of its try 3 in run test"), "{error}");
}

#[test]
fn two_handles_see_each_other() {
    let (folder, first) = open();
    let second = Store::open(&folder.path().join("run.db"), &run()).unwrap();
    let reader = Store::open_existing(&folder.path().join("run.db")).unwrap();
    std::thread::scope(|scope| {
        for (handle, group) in [(&first, 0), (&second, 1)] {
            scope.spawn(move || {
                for sample in 0..20 {
                    handle.record_attempt(&attempt(group, sample)).unwrap();
                }
            });
        }
    });
    assert_eq!(reader.summaries(Purpose::Train).unwrap().len(), 40);
    // Both may record the same attempt: one does, the other finds it.
    first.record_attempt(&attempt(2, 0)).unwrap();
    assert_eq!(second.record_attempt(&attempt(2, 0)).unwrap(), Recorded::Before);
}

#[test]
fn numbers_that_are_not_finite_are_refused() {
    let (_folder, store) = open();
    let bad = Attempt { reward: Some(f64::NAN), ..attempt(0, 0) };
    let error = store.record_attempt(&bad).unwrap_err().to_string();
    assert!(error.contains("its reward is NaN"), "{error}");
    assert_eq!(store.attempt(&bad.id).unwrap(), None);
}

#[test]
fn damage_is_named() {
    let (folder, store) = open();
    store.record_attempt(&attempt(0, 0)).unwrap();
    let raw = rusqlite::Connection::open(folder.path().join("run.db")).unwrap();
    raw.execute("UPDATE segments SET tokens = x'010203' WHERE id = 1", []).unwrap();
    let error = store.last_try(&place(0, 0)).unwrap_err().to_string();
    assert!(error.contains("sample 0") && error.contains("segment 1"), "{error}");
    raw.execute("DELETE FROM segments WHERE id = 0", []).unwrap();
    assert!(matches!(store.last_try(&place(0, 0)), Err(StoreError::Damaged { .. })));
}

fn any_segment() -> impl Strategy<Value = Segment> {
    let numbers = prop::collection::vec((any::<u32>(), any::<u32>(), any::<u64>()), 0..6);
    (0..3u8, numbers, 0.0f32..9.0, any::<bool>(), ".{0,4}", any::<u32>(), any::<prop::sample::Index>())
        .prop_map(|(kind, rows, temperature, filtered, agent, turn, parent)| {
            let kind = [Kind::Given, Kind::Sampled, Kind::Demonstrated][kind as usize];
            let sampled = kind == Kind::Sampled;
            Segment {
                kind,
                // The parent's place is drawn relative to how many segments precede; see below.
                parent: Some(SegmentId(parent.index(1 << 16) as u32)),
                logprobs: rows.iter().filter(|_| sampled).map(|r| f32::from_bits(r.1)).collect(),
                versions: rows
                    .iter()
                    .filter(|_| sampled)
                    .map(|r| VersionRun { version: r.2, len: 1 })
                    .collect(),
                temperature,
                filtered,
                agent,
                turn,
                ..Segment::given(None, rows.iter().map(|r| r.0).collect(), 0)
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever is recorded is read back to the bit, also by a handle opened later.
    #[test]
    fn round_trip(
        segments in prop::collection::vec(any_segment(), 0..6),
        score in prop::option::of(prop::num::f64::NORMAL),
        reward in prop::option::of(prop::num::f64::NORMAL),
        number in prop::num::f64::NORMAL,
        text in ".*",
        failed in any::<bool>(),
        part in prop::num::f64::NORMAL,
    ) {
        let mut trajectory = Trajectory::new();
        for mut segment in segments {
            let before = trajectory.segments().len() as u32;
            segment.parent = segment.parent.map(|p| p.0 % (before + 1)).filter(|&p| p < before).map(SegmentId);
            trajectory.push(segment).unwrap();
        }
        let written = Attempt {
            id: AttemptId::new(&run(), &place(0, 0), 0),
            placement: place(0, 0),
            number: 0,
            task: json!({"text": text, "number": number}),
            outcome: Outcome { error: Some(text.clone()), ..Outcome::demonstrated(text.clone()) },
            score,
            reward,
            earned: vec![
                Earned { by: Earner::Segment(SegmentId(1)), reward: part },
                Earned { by: Earner::Agent(text.clone()), reward: -part },
            ],
            status: if failed { Status::Failed } else { Status::Completed },
            trajectory,
        };
        let (folder, store) = open();
        store.record_attempt(&written).unwrap();
        drop(store);
        let store = Store::open(&folder.path().join("run.db"), &run()).unwrap();
        let read = store.attempt(&written.id).unwrap().unwrap();
        prop_assert_eq!(difference(&read, &written), None);
        prop_assert_eq!(read.trajectory.segments().len(), written.trajectory.segments().len());
        prop_assert_eq!(store.record_attempt(&written).unwrap(), Recorded::Before);
    }
}
