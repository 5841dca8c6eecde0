//! Tests of the check against random damage of a real file.

use std::collections::BTreeMap;

use levade_policy::uniform;
use levade_tree::{AttemptSlot, Purpose};
use serde_json::json;

use super::*;
use crate::contract::{attempt, forest, plan, start_of};
use crate::testing::wait;
use crate::{Attempt, AttemptEnd, Sqlite, Status, StepPlan, Store};

const ATTEMPTS: u32 = 60;

fn run() -> RunId {
    RunId("run".into())
}

/// The values of a record, by their keys.
struct Original {
    bytes: Vec<u8>,
    attempts: BTreeMap<AttemptId, Attempt>,
    plans: BTreeMap<(u32, u32), StepPlan>,
    evals: BTreeMap<(u32, u32), serde_json::Value>,
}

/// Writes a record with attempts of all states, plans and evaluations.
fn original(dir: &Path) -> Original {
    let file = dir.join("run.db");
    let store = wait(Sqlite::open(&file, &run())).unwrap();
    let mut attempts = BTreeMap::new();
    for group in 0..ATTEMPTS {
        let slot =
            AttemptSlot { purpose: Purpose::Train, phase: 1, step: group / 8, group, sample: 0 };
        let whole = Attempt {
            id: AttemptId::new(&run(), &slot, 0),
            slot,
            task: json!({ "id": group, "question": "word ".repeat(30 + 40 * (group as usize % 5)) }),
            trajectory: forest(u64::from(group)),
            ..attempt(&run(), group, 0)
        };
        // Half of the attempts are recorded in one write, the other half in parts. Some still run.
        let recorded = match group % 4 {
            0 | 1 => {
                wait(store.record_attempt(&whole)).unwrap();
                whole
            }
            remainder => {
                wait(store.start_attempt(&start_of(&whole))).unwrap();
                wait(store.append_segments(&whole.id, whole.trajectory.segments())).unwrap();
                if remainder == 2 {
                    wait(store.end_attempt(
                        &whole.id,
                        &AttemptEnd { status: Status::Failed, ..whole.end() },
                    ))
                    .unwrap();
                }
                wait(store.attempt(&whole.id)).unwrap().unwrap()
            }
        };
        attempts.insert(recorded.id, recorded);
    }
    let numbers: Vec<(f32, f32)> = (0..40).map(|i| (i as f32, 1.0 / i as f32)).collect();
    let mut plans = BTreeMap::new();
    let mut evals = BTreeMap::new();
    for step in 0..9 {
        let ids: Vec<AttemptId> = attempts.keys().copied().collect();
        let mut one = StepPlan { phase: 1, step, ..plan(&run(), &numbers[1..]) };
        let sequences = one.policies.iter_mut().flat_map(|p| &mut p.updates);
        for (i, sequence) in sequences.flat_map(|update| &mut update.sequences).enumerate() {
            sequence.attempt = ids[i % ids.len()];
        }
        wait(store.record_step(&one)).unwrap();
        plans.insert((1, step), one);
        let result = json!({ "success": step, "notes": "text ".repeat(20) });
        wait(store.record_eval(EvalKey { phase: 1, step }, &result)).unwrap();
        evals.insert((1, step), result);
    }
    drop(store);
    Original { bytes: fs::read(file).unwrap(), attempts, plans, evals }
}

/// Asserts that a report and its rescued file agree with the original, and returns the report.
fn check_against(original: &Original, bytes: &[u8], name: &str) -> Option<CheckReport> {
    let dir = tempfile::tempdir().unwrap();
    let (file, rescued) = (dir.path().join("damaged.db"), dir.path().join("rescued.db"));
    fs::write(&file, bytes).unwrap();
    let report = match check_file(&file, Some(&run()), Some(&rescued)) {
        Ok(report) => report,
        Err(error) => {
            assert!(error.to_string().contains("damaged.db"), "{name}: {error}");
            return None;
        }
    };
    assert_eq!(fs::read(&file).unwrap(), bytes, "{name}: the file was changed");
    let attempts = report.attempts.whole;
    let counts = (attempts, report.plans.whole, report.evaluations.whole);
    let all =
        (original.attempts.len() as u64, original.plans.len() as u64, original.evals.len() as u64);
    if report.is_clean() {
        assert_eq!(counts, all, "{name}: called clean");
    }
    assert_eq!(report.rows_without_checksum, 0, "{name}");
    let store = wait(Sqlite::open_existing(&rescued)).unwrap();
    let mut found = 0;
    for (id, expected) in &original.attempts {
        if let Some(attempt) = wait(store.attempt(id)).unwrap() {
            found += 1;
            // Log-probabilities are random bits, including NaN, which equals nothing.
            assert_eq!(format!("{attempt:?}"), format!("{expected:?}"), "{name}: attempt {id}");
        }
    }
    assert_eq!(found, attempts, "{name}: attempts");
    let mut found = 0;
    for (phase, step) in wait(store.planned_steps()).unwrap() {
        let plan = wait(store.step_plan(phase, step)).unwrap();
        assert_eq!(plan.as_ref(), original.plans.get(&(phase, step)), "{name}: plan {step}");
        found += 1;
    }
    assert_eq!(found, report.plans.whole, "{name}: plans");
    let evals = wait(store.evals()).unwrap();
    assert_eq!(evals.len() as u64, report.evaluations.whole, "{name}: evaluations");
    for (EvalKey { phase, step }, result) in evals {
        assert_eq!(Some(&result), original.evals.get(&(phase, step)), "{name}: evaluation {step}");
    }
    // The rescued file is a whole store.
    let rescued = check_file(&rescued, None, None).unwrap();
    let kinds: Vec<FindingKind> = rescued.findings.iter().map(|finding| finding.kind).collect();
    let only = [FindingKind::PlannedAttempt, FindingKind::Plan];
    assert!(kinds.iter().all(|kind| only.contains(kind)), "{name}: {:?}", rescued.findings);
    Some(report)
}

#[test]
fn check_of_undamaged_file_is_clean() {
    let dir = tempfile::tempdir().unwrap();
    let original = original(dir.path());
    let report = check_against(&original, &original.bytes, "undamaged").unwrap();
    assert!(report.is_clean(), "{:?}", report.findings);
    assert_eq!(report.run.as_deref(), Some("run"));
    assert_eq!(report.attempts, ValueCounts { whole: u64::from(ATTEMPTS), lost: 0 });
}

/// Each case damages bytes of one to three pages: a flip, a run of zeros or of noise, or a page
/// that was written to the wrong place.
#[test]
fn check_survives_random_damage_and_keeps_only_equal_values() {
    let dir = tempfile::tempdir().unwrap();
    let original = original(dir.path());
    let pages = original.bytes.len() / 4096;
    assert!(pages > 40, "{pages}");
    let (mut kept, mut lost, mut unreadable) = (0, 0, 0);
    for case in 0..160 {
        let mut num_samples = 0;
        let mut below = |bound: usize| {
            num_samples += 1;
            (uniform(case, 1, num_samples) * bound as f64) as usize
        };
        let mut bytes = original.bytes.clone();
        for _ in 0..=below(3) {
            let start = below(pages) * 4096;
            let at = start + below(4096);
            match below(4) {
                0 => bytes[at] ^= 1 << below(8),
                1 => bytes[at..(at + 64).min(start + 4096)].fill(0),
                2 => (at..(at + 40).min(start + 4096)).for_each(|i| bytes[i] = below(256) as u8),
                _ => {
                    let other = below(pages) * 4096;
                    let page = original.bytes[other..other + 4096].to_vec();
                    bytes[start..start + 4096].copy_from_slice(&page);
                }
            }
        }
        match check_against(&original, &bytes, &format!("case {case}")) {
            None => unreadable += 1,
            Some(report) => {
                kept += report.attempts.whole;
                lost += u64::from(ATTEMPTS) - report.attempts.whole;
            }
        }
    }
    // Damage of a few pages costs a few attempts, not the record.
    assert!(
        kept > 6 * lost && unreadable <= 4,
        "{kept} kept, {lost} lost, {unreadable} unreadable"
    );
    assert!(lost > 0);
}

#[test]
fn check_restores_destroyed_first_page() {
    let dir = tempfile::tempdir().unwrap();
    let original = original(dir.path());
    let mut bytes = original.bytes.clone();
    bytes[..4096].fill(0x5a);
    let report = check_against(&original, &bytes, "first page").unwrap();
    assert!(report.findings.iter().any(|finding| finding.kind == FindingKind::Header));
    assert_eq!(report.attempts, ValueCounts { whole: u64::from(ATTEMPTS), lost: 0 });
}

#[test]
fn check_keeps_readable_values_of_truncated_file() {
    let dir = tempfile::tempdir().unwrap();
    let original = original(dir.path());
    let bytes = &original.bytes[..original.bytes.len() / 2 / 4096 * 4096];
    let report = check_against(&original, bytes, "truncated").unwrap();
    assert!(!report.is_clean() && report.attempts.lost > 0, "{report:?}");
}

#[test]
fn unreadable_tables_of_plans_and_evaluations_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let original = original(dir.path());
    let connection = rusqlite::Connection::open(dir.path().join("run.db")).unwrap();
    for (table, kind) in [("steps", FindingKind::Plan), ("evals", FindingKind::Evaluation)] {
        let query = "SELECT rootpage FROM sqlite_master WHERE name = ?1";
        let page: i64 = connection.query_row(query, [table], |row| row.get(0)).unwrap();
        let mut bytes = original.bytes.clone();
        let start = (page as usize - 1) * 4096;
        bytes[start..start + 4096].fill(0xff);
        let report = check_against(&original, &bytes, table).unwrap();
        let is_reported = |finding: &Finding| {
            finding.kind == kind && finding.message.contains("an unknown number is lost")
        };
        assert!(report.findings.iter().any(is_reported), "{table}: {report:?}");
    }
}

#[test]
fn check_names_attempt_slot_of_changed_token() {
    let dir = tempfile::tempdir().unwrap();
    let original = original(dir.path());
    let file = dir.path().join("run.db");
    let connection = rusqlite::Connection::open(&file).unwrap();
    let id = "SELECT attempt, id FROM segments WHERE length(tokens) >= 4 LIMIT 1";
    let (attempt, id): (i64, i64) =
        connection.query_row(id, [], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    let update = "UPDATE segments SET tokens = CAST(x'01020304' || substr(tokens, 5) AS BLOB) WHERE \
                  attempt = ?1 AND id = ?2";
    connection.execute(update, [attempt, id]).unwrap();
    drop(connection);
    let report = check_file(&file, None, None).unwrap();
    let [Finding { kind: FindingKind::Attempt, subject, message }, rest @ ..] =
        &report.findings[..]
    else {
        panic!("{:?}", report.findings)
    };
    assert!(rest.iter().all(|finding| finding.kind == FindingKind::PlannedAttempt), "{rest:?}");
    assert!(subject.starts_with("train/1/"), "{subject}");
    assert!(message.contains(&format!("segment {id} has a wrong checksum")), "{message}");
    assert_eq!(report.attempts.whole, original.attempts.len() as u64 - 1);
}

#[test]
fn check_rejects_foreign_file_missing_file_and_existing_target() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("other.db");
    let other = rusqlite::Connection::open(&file).unwrap();
    other.execute_batch("CREATE TABLE t (x); INSERT INTO t VALUES (1)").unwrap();
    drop(other);
    assert_eq!(check_file(&file, Some(&run()), None).unwrap_err().code(), Code::Foreign);
    let missing = dir.path().join("missing.db");
    assert_eq!(check_file(&missing, None, None).unwrap_err().code(), Code::NotFound);
    let error = check_file(&file, None, Some(&file)).unwrap_err().to_string();
    assert!(error.contains("other.db"), "{error}");
}

#[test]
fn schema_4_file_is_checked_and_migrated_without_checksums() {
    let dir = tempfile::tempdir().unwrap();
    let original = original(dir.path());
    let file = dir.path().join("run.db");
    let connection = rusqlite::Connection::open(&file).unwrap();
    for table in ["attempts", "segments", "steps", "planned_paths", "evals"] {
        connection.execute_batch(&format!("ALTER TABLE {table} DROP COLUMN crc")).unwrap();
    }
    connection.pragma_update(None, "user_version", 4).unwrap();
    drop(connection);
    let rescued = dir.path().join("rescued.db");
    let report = check_file(&file, None, Some(&rescued)).unwrap();
    assert!(report.is_clean() && report.rows_without_checksum > 0, "{report:?}");
    assert_eq!(report.attempts.whole, u64::from(ATTEMPTS));
    // The rescued rows have checksums.
    assert_eq!(check_file(&rescued, None, None).unwrap().rows_without_checksum, 0);
    // Opened for writing, the file is migrated, and an attempt that ends gets a checksum.
    let store = wait(Sqlite::open(&file, &run())).unwrap();
    for (id, attempt) in &original.attempts {
        let stored = wait(store.attempt(id)).unwrap();
        assert_eq!(format!("{stored:?}"), format!("{:?}", Some(attempt)));
    }
    let running = original.attempts.values().find(|attempt| attempt.status == Status::Running);
    let end = AttemptEnd { status: Status::Failed, ..running.unwrap().end() };
    wait(store.end_attempt(&running.unwrap().id, &end)).unwrap();
    drop(store);
    let migrated = check_file(&file, None, None).unwrap();
    assert!(migrated.is_clean(), "{:?}", migrated.findings);
    assert_eq!(migrated.rows_without_checksum, report.rows_without_checksum - 1);
}
