//! Tests of the SQLite file and its threads, including the contract suite.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;

use levade_tree::{Kind, Outcome, SegmentId, Trajectory, VersionRun};
use serde_json::json;

use super::*;
use crate::testing::wait;
use crate::{CreditTarget, Status, StepReward};

crate::store_contract!(sqlite, async || {
    let folder = tempfile::tempdir().unwrap();
    let store = Sqlite::open(&folder.path().join("run.db"), &run()).await.unwrap();
    (folder, Arc::new(store))
});

fn run() -> RunId {
    RunId("test".into())
}

fn open() -> (tempfile::TempDir, Sqlite) {
    let dir = tempfile::tempdir().unwrap();
    let store = wait(Sqlite::open(&dir.path().join("run.db"), &run())).unwrap();
    (dir, store)
}

fn train_slot(group: u32, sample: u32) -> AttemptSlot {
    AttemptSlot { purpose: Purpose::Train, phase: 1, step: 3, group, sample }
}

fn attempt(group: u32, sample: u32) -> Attempt {
    let mut trajectory = Trajectory::new();
    let root = trajectory.push(Segment::context(None, vec![1, 2, u32::MAX], 0)).unwrap();
    let completion = Segment {
        kind: Kind::Sampled,
        logprobs: vec![-0.0, -0.1],
        versions: vec![VersionRun { version: 3, len: 2 }],
        ..Segment::context(Some(root), vec![5, 6], 0)
    };
    trajectory.push(completion).unwrap();
    Attempt {
        id: AttemptId::new(&run(), &train_slot(group, sample), 0),
        slot: train_slot(group, sample),
        number: 0,
        task: json!({"question": "2+2"}),
        outcome: Outcome::demonstrated("4"),
        score: Some(1.0),
        reward: Some(0.95),
        step_rewards: vec![StepReward { credit_target: CreditTarget::Turn(0), reward: -0.05 }],
        status: Status::Completed,
        trajectory,
    }
}

const FIRST: EvalKey = EvalKey { phase: 0, step: 0 };

#[test]
fn open_rejects_store_of_another_run() {
    let (dir, store) = open();
    drop(store);
    let file = dir.path().join("run.db");
    let error = wait(Sqlite::open(&file, &RunId("other".into()))).unwrap_err();
    assert_eq!(error.code(), Code::Foreign);
    assert!(error.to_string().contains("run test, not of run other"), "{error}");
    assert_eq!(wait(Sqlite::open_existing(&file)).unwrap().run(), &run());
}

#[test]
fn foreign_file_is_rejected_and_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("other.db");
    Connection::open(&file).unwrap().execute_batch("CREATE TABLE t (x)").unwrap();
    let before = std::fs::read(&file).unwrap();
    let tries = [
        wait(Sqlite::open(&file, &run())),
        wait(Sqlite::resume(&file, &run())),
        wait(Sqlite::open_existing(&file)),
    ];
    for opened in tries {
        assert!(matches!(opened, Err(StoreError::Foreign { found: 0, .. })));
    }
    assert_eq!(std::fs::read(&file).unwrap(), before);
}

#[test]
fn open_rejects_unknown_schema_version() {
    let (dir, store) = open();
    drop(store);
    let file = dir.path().join("run.db");
    Connection::open(&file).unwrap().pragma_update(None, "user_version", 7).unwrap();
    let error = wait(Sqlite::open(&file, &run())).unwrap_err();
    assert_eq!(error.code(), Code::Version);
    let error = error.to_string();
    assert!(error.contains("schema version 7, but this build reads version 5"), "{error}");
    assert!(error.contains("run.db"), "{error}");
}

#[test]
fn open_rejects_missing_and_non_database_files() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.db");
    std::fs::write(
        &file,
        "not a database, but long enough to look like a header of one\n".repeat(20),
    )
    .unwrap();
    let missing = dir.path().join("missing.db");
    for (opened, code) in [
        (wait(Sqlite::open(&file, &run())), Code::Foreign),
        (wait(Sqlite::open_existing(&missing)), Code::NotFound),
        (wait(Sqlite::resume(&missing, &run())), Code::NotFound),
    ] {
        let error = opened.unwrap_err();
        assert!(matches!(error, StoreError::Open { .. }) && error.is_user_error(), "{error}");
        assert_eq!(error.code(), code, "{error}");
    }
    assert!(!missing.exists());
}

/// Connections of one process stand for processes: SQLite locks files for each connection.
#[test]
fn new_file_can_be_opened_by_several_processes_at_once() {
    for round in 0..20 {
        let dir = tempfile::tempdir().unwrap();
        let [ledger, rollouts] = ["run.db", "rollouts.db"].map(|name| dir.path().join(name));
        let barrier = std::sync::Barrier::new(6);
        std::thread::scope(|scope| {
            for index in 0..6 {
                let (ledger, rollouts, barrier) = (&ledger, &rollouts, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    if index % 2 == 0 {
                        wait(Sqlite::open(ledger, &run()))
                            .map(drop)
                            .unwrap_or_else(|error| panic!("round {round}: {error:?}"));
                    } else {
                        let clock = Arc::new(crate::rollouts::SystemClock::default());
                        wait(super::rollouts::open_rollouts(rollouts.to_str().unwrap(), clock))
                            .map(drop)
                            .unwrap_or_else(|error| panic!("round {round}: {error:?}"));
                    }
                });
            }
        });
    }
}

/// A process that is killed while it creates a store leaves a file without tables. Such a file
/// cannot be read, but a resumed run creates its store in it.
#[test]
fn resume_initializes_file_without_tables() {
    let dir = tempfile::tempdir().unwrap();
    let [nothing, no_tables] = ["nothing.db", "no-tables.db"].map(|name| dir.path().join(name));
    std::fs::write(&nothing, "").unwrap();
    let raw = Connection::open(&no_tables).unwrap();
    raw.pragma_update(None, "journal_mode", "wal").unwrap();
    drop(raw);
    for file in [nothing, no_tables] {
        let error = wait(Sqlite::open_existing(&file)).unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{error}");
        assert!(error.to_string().contains("contains no store"), "{error}");
        let store = wait(Sqlite::resume(&file, &run())).unwrap();
        assert_eq!(store.run(), &run());
        wait(store.record_attempt(&attempt(0, 0))).unwrap();
        drop(store);
        let again = wait(Sqlite::resume(&file, &RunId("another".into()))).unwrap();
        assert_eq!(
            (again.run(), wait(again.summaries(Purpose::Train)).unwrap().len()),
            (&run(), 1)
        );
    }
}

#[test]
fn read_only_store_rejects_writes() {
    let (dir, store) = open();
    let reader = wait(Sqlite::open_existing(&dir.path().join("run.db"))).unwrap();
    let error = wait(reader.record_attempt(&attempt(0, 0))).unwrap_err();
    assert_eq!(error.code(), Code::Forbidden);
    assert!(error.to_string().contains("cannot record attempt train/phase 1"), "{error}");
    assert_eq!(wait(store.summaries(Purpose::Train)).unwrap(), []);
}

#[test]
fn shared_prompts_are_stored_once() {
    let (dir, store) = open();
    let mut other = attempt(1, 0);
    other.trajectory = Trajectory::new();
    let tree = &mut other.trajectory;
    tree.push(Segment::context(None, vec![1, 2], 0)).unwrap();
    // Neither is a prompt: a demonstrated root with equal tokens, and a later segment with equal
    // tokens.
    let completion = tree.push(Segment::demonstrated(None, vec![1, 2], 0)).unwrap();
    tree.push(Segment::context(Some(completion), vec![1, 2, u32::MAX], 0)).unwrap();
    let all = [attempt(0, 0), attempt(0, 1), other];
    wait(store.record_attempts(&all)).unwrap();
    for attempt in &all {
        assert_eq!(wait(store.attempt(&attempt.id)).unwrap().as_ref(), Some(attempt));
    }
    let raw = Connection::open(dir.path().join("run.db")).unwrap();
    for (query, expected) in [
        ("SELECT count(*) FROM prompts", 2),
        ("SELECT count(DISTINCT prompt) FROM segments WHERE attempt < 3", 1),
        ("SELECT count(*) FROM segments WHERE tokens IS NOT NULL", 4),
    ] {
        let count: i64 = raw.query_row(query, [], |row| row.get(0)).unwrap();
        assert_eq!(count, expected, "{query}");
    }
    raw.execute_batch("PRAGMA foreign_keys = off; DELETE FROM prompts").unwrap();
    let error = wait(store.last_try(&train_slot(0, 0))).unwrap_err().to_string();
    assert!(error.contains("segment 0: the prompt is missing"), "{error}");
}

#[test]
fn damaged_rows_are_named_in_errors() {
    let (dir, store) = open();
    wait(store.record_attempt(&attempt(0, 0))).unwrap();
    let raw = Connection::open(dir.path().join("run.db")).unwrap();
    for (sql, part) in [
        (
            "UPDATE segments SET tokens = x'010203' WHERE id = 1",
            "segment 1: a list of numbers is truncated",
        ),
        ("DELETE FROM segments WHERE id = 0", "segment 1"),
        ("UPDATE attempts SET outcome = '{}'", "the outcome cannot be read"),
        ("UPDATE attempts SET status = 'failed', task = '{'", "the task is not JSON"),
    ] {
        raw.execute(sql, []).unwrap();
        let error = wait(store.last_try(&train_slot(0, 0))).unwrap_err();
        assert_eq!(error.code(), Code::Corrupt, "{error}");
        assert!(
            error.to_string().contains("sample 0") && error.to_string().contains(part),
            "{error}"
        );
    }
    raw.execute("UPDATE attempts SET status = 'gone'", []).unwrap();
    let error = wait(store.attempt(&attempt(0, 0).id)).unwrap_err().to_string();
    assert!(error.contains("is damaged"), "{error}");
}

#[test]
fn concurrent_handles_share_one_file() {
    let (dir, first) = open();
    let file = dir.path().join("run.db");
    let second = wait(Sqlite::open(&file, &run())).unwrap();
    let reader = wait(Sqlite::open_existing(&file)).unwrap();
    std::thread::scope(|scope| {
        for (handle, group) in [(&first, 0), (&second, 1)] {
            scope.spawn(move || {
                for sample in 0..20 {
                    wait(handle.record_attempt(&attempt(group, sample))).unwrap();
                }
            });
        }
    });
    assert_eq!(wait(reader.summaries(Purpose::Train)).unwrap().len(), 40);
    // Both handles record the same attempt: the first writes it, the second finds it.
    wait(first.record_attempt(&attempt(2, 0))).unwrap();
    assert_eq!(wait(second.record_attempt(&attempt(2, 0))).unwrap(), WriteOutcome::AlreadyRecorded);
}

/// Starts a job that blocks the writer, in a transaction of its own, until the returned sender is
/// dropped.
fn block_writer(store: &Sqlite) -> mpsc::Sender<()> {
    let (release, release_receiver) = mpsc::channel::<()>();
    let (started_sender, started) = mpsc::channel();
    let release_receiver = std::sync::Mutex::new(release_receiver);
    let (job, _) = QueuedJob::new(move |_: &Connection| {
        let _ = started_sender.send(());
        let _ = release_receiver.lock().unwrap().recv();
        Ok(())
    });
    assert!(store.writer.as_ref().unwrap().send(Box::new(job)));
    // Without this wait, the next job could become part of the same transaction.
    started.recv().unwrap();
    release
}

/// Returns the number of commits in the log: the frames that contain the size of the database after
/// the commit (SQLite file format, section 4.1).
fn writes_commit_together(store: &Sqlite) -> usize {
    let log = std::fs::read(store.file().with_file_name("run.db-wal")).unwrap();
    let word = |at: usize| u32::from_be_bytes(log[at..at + 4].try_into().unwrap());
    let frame = 24 + word(8) as usize;
    let salts = &log[16..24];
    (32..log.len())
        .step_by(frame)
        .take_while(|at| log.get(at + 8..at + 16) == Some(salts))
        .filter(|at| word(at + 4) != 0)
        .count()
}

/// Queued writes share a commit, and a rejected write does not affect the other writes.
#[test]
fn queued_writes_share_one_commit() {
    let (_dir, store) = open();
    wait(store.record_attempt(&attempt(0, 0))).unwrap();
    let before = writes_commit_together(&store);
    let release = block_writer(&store);
    let clash = Attempt { score: None, ..attempt(0, 0) };
    let panicking = |_: &Connection| -> Result<(), Failure> { panic!("on purpose") };
    let endless = Attempt { reward: Some(f64::NAN), ..attempt(2, 0) };
    let [one, two] = [attempt(1, 0), attempt(3, 0)];
    let result = json!(1);
    let results = wait(async {
        let all = async {
            tokio::join!(
                store.record_attempt(&one),
                store.record_attempt(&clash),
                store.write("something", panicking),
                store.record_attempt(&endless),
                store.record_eval(FIRST, &result),
                store.record_attempt(&two),
            )
        };
        // All writes are in the queue before the writer continues.
        let released = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            drop(release);
        };
        tokio::join!(all, released).0
    });
    assert_eq!(results.0.unwrap(), WriteOutcome::Written);
    assert_eq!(results.1.unwrap_err().code(), Code::Conflict);
    let panic = results.2.unwrap_err();
    assert_eq!(panic.code(), Code::Internal);
    assert!(
        panic.to_string().contains("cannot record something in")
            && panic.to_string().contains("on purpose")
    );
    assert_eq!(results.3.unwrap_err().code(), Code::Invalid);
    assert_eq!(results.4.unwrap(), WriteOutcome::Written);
    assert_eq!(results.5.unwrap(), WriteOutcome::Written);
    let written: Vec<u32> =
        wait(store.summaries(Purpose::Train)).unwrap().iter().map(|s| s.slot.group).collect();
    assert_eq!(written, [0, 1, 3]);
    assert_eq!(writes_commit_together(&store) - before, 1);
}

fn limit_pages(store: &Sqlite, max_pages: i64) {
    let limit = move |on: &Connection| {
        Ok(on.pragma_update_and_check(None, "max_page_count", max_pages, |row| {
            row.get::<_, i64>(0)
        })?)
    };
    wait(store.write("a limit", limit)).unwrap();
}

fn first_phase_eval(step: u32) -> EvalKey {
    EvalKey { phase: 0, step }
}

/// The test limits the number of pages, which SQLite reports like a full disk.
#[test]
fn full_disk_rejects_only_oversized_write() {
    let (_dir, store) = open();
    wait(store.record_eval(FIRST, &"kept".into())).unwrap();
    limit_pages(&store, 20);
    let release = block_writer(&store);
    let small = json!("small");
    let large = json!("x".repeat(1 << 20));
    let (first, full, last) = wait(async {
        let all = async {
            tokio::join!(
                store.record_eval(first_phase_eval(1), &small),
                store.record_eval(first_phase_eval(2), &large),
                store.record_eval(first_phase_eval(3), &small)
            )
        };
        let released = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            drop(release);
        };
        tokio::join!(all, released).0
    });
    let error = full.unwrap_err();
    assert_eq!(error.code(), Code::Full, "{error}");
    assert!(error.is_user_error());
    // The other queued writes are recorded.
    assert_eq!((first.unwrap(), last.unwrap()), (WriteOutcome::Written, WriteOutcome::Written));
    let found: Vec<u32> = wait(store.evals()).unwrap().iter().map(|(key, _)| key.step).collect();
    assert_eq!(found, [0, 1, 3]);
    limit_pages(&store, 1 << 20);
    wait(store.record_eval(first_phase_eval(2), &"room".into())).unwrap();
}

#[test]
fn slow_read_does_not_block_writes() {
    let (_dir, store) = open();
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let (job, answer) = QueuedJob::new(move |from: &Connection| {
        let count =
            || from.query_row("SELECT count(*) FROM attempts", [], |row| row.get::<_, i64>(0));
        let before = count()?;
        let _ = released.lock().unwrap().recv();
        Ok::<_, Failure>((before, count()?))
    });
    assert!(store.reader.send(Box::new(job)));
    wait(store.record_attempt(&attempt(0, 0))).unwrap();
    drop(release);
    // The read used one snapshot.
    let (before, after) = wait(answer).unwrap().ok().unwrap();
    assert_eq!(before, after);
    assert_eq!(wait(store.summaries(Purpose::Train)).unwrap().len(), 1);
}

#[test]
fn hanging_writer_returns_deadline_error() {
    let (_dir, mut store) = open();
    store.timeout = Duration::from_millis(30);
    let release = block_writer(&store);
    let error = wait(store.record_attempt(&attempt(0, 0))).unwrap_err();
    assert!(error.is_retryable());
    let text = error.to_string();
    assert!(
        text.contains(
            "timed out after 30ms while waiting to record attempt train/phase 1/step 3/group \
             0/sample 0 in"
        ),
        "{text}"
    );
    assert!(text.contains("run.db"), "{text}");
    drop(release);
    // The write was committed after the timeout, and a retry finds it.
    store.timeout = Duration::from_secs(60);
    assert_eq!(wait(store.record_attempt(&attempt(0, 0))).unwrap(), WriteOutcome::AlreadyRecorded);
}

#[test]
fn drop_waits_for_queued_writes() {
    let (dir, store) = open();
    let release = block_writer(&store);
    let timed_out = wait(async {
        let made = attempt(0, 0);
        tokio::time::timeout(Duration::from_millis(20), store.record_attempt(&made)).await
    });
    assert!(timed_out.is_err());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            drop(release);
        });
        drop(store);
    });
    let file = dir.path().join("run.db");
    // The file is closed: SQLite has deleted the log.
    assert!(!file.with_file_name("run.db-wal").exists());
    let store = wait(Sqlite::open_existing(&file)).unwrap();
    assert_eq!(wait(store.attempt(&attempt(0, 0).id)).unwrap(), Some(attempt(0, 0)));
}

/// The thread of a store never exits before its handles. If it did, calls would return an error.
#[test]
fn exited_writer_thread_returns_error() {
    let (_dir, mut store) = open();
    store.writer = Some(DatabaseThread::start("test", Duration::from_secs(9), |_| ()).unwrap());
    let error = wait(store.record_eval(FIRST, &json!(1))).unwrap_err();
    assert_eq!(error.code(), Code::Internal);
    assert!(error.to_string().contains("the thread of the store has exited"), "{error}");
}

/// The token counts of a growing attempt follow its segments, and a repeated append does not change
/// them.
#[test]
fn append_updates_token_counts() {
    let (dir, store) = open();
    let whole = attempt(0, 0);
    let id = whole.id;
    let number = whole.number;
    let task = whole.task.clone();
    wait(store.start_attempt(&AttemptStart { id, slot: whole.slot, number, task })).unwrap();
    let raw = Connection::open(dir.path().join("run.db")).unwrap();
    let sizes = || -> (i64, i64, String) {
        let query = "SELECT sampled_tokens, tokens, status FROM attempts";
        raw.query_row(query, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).unwrap()
    };
    assert_eq!(sizes(), (0, 0, "running".into()));
    for (segment, expected) in whole.trajectory.segments().iter().zip([(0, 3), (2, 5)]) {
        for _ in 0..2 {
            wait(store.append_segments(&id, std::slice::from_ref(segment))).unwrap();
            assert_eq!(sizes(), (expected.0, expected.1, "running".into()));
        }
    }
    let fork = Segment {
        id: SegmentId(2),
        after: Some(1),
        ..Segment::context(Some(SegmentId(1)), vec![9], 1)
    };
    wait(store.append_segments(&id, &[fork])).unwrap();
    assert_eq!(sizes(), (2, 6, "running".into()));
    wait(store.abandon_running()).unwrap();
    assert_eq!(sizes(), (2, 6, "abandoned".into()));
}

/// Erased text is in no file of the store: neither in a free page nor in the log.
#[test]
fn erased_text_remains_in_no_database_file() {
    let (dir, store) = open();
    let mut secret = attempt(0, 0);
    secret.task = json!({"question": "the-secret-question"});
    secret.outcome = Outcome::demonstrated("the-secret-answer");
    let kept = Attempt { task: json!({"question": "kept-question"}), ..attempt(1, 0) };
    wait(store.record_attempts(&[secret.clone(), kept])).unwrap();
    assert!(any_file_contains(dir.path(), "the-secret-answer"));
    let request =
        WithdrawRequest { attempts: vec![secret.id], erase: true, ..WithdrawRequest::default() };
    wait(store.withdraw(&request)).unwrap();
    for text in ["the-secret-question", "the-secret-answer"] {
        assert!(!any_file_contains(dir.path(), text), "{text}");
    }
    assert!(any_file_contains(dir.path(), "kept-question"));
}

fn any_file_contains(dir: &Path, text: &str) -> bool {
    let files = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    files
        .map(|file| std::fs::read(file).unwrap())
        .any(|bytes| bytes.windows(text.len()).any(|window| window == text.as_bytes()))
}
