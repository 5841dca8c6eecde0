//! Checks a file for damage, and saves what is not damaged.
//!
//! Each attempt, step plan and evaluation is read by its key, without the indexes and independently
//! of the others, so that a damaged page costs only the values that it contains. A value is *whole*
//! if SQLite can read it, its checksums and counts are right, and it passes the checks of a write.
//! Every other value is reported as a [`Finding`], with its key and the reason.
//!
//! # Guarantees
//! - **The file is not changed.** It is opened for reading only, or copied.
//! - **Whole means equal**: a whole value equals what was recorded, except with the probability of
//!   a collision of CRC-32C, 2⁻³². Rows that a build without checksums wrote are whole if they can
//!   be read; their number is reported.
//! - **Nothing is invented**: a rescued file contains only whole values.

mod damaged_file;
mod rescue;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use levade_tree::{AttemptId, RunId};
use rusqlite::limits::Limit;
use rusqlite::{Connection, OptionalExtension};
use serde::Serialize;

use super::schema::{open_error, read_run_id};
use super::{attempts, evals, ledger, withdrawals};
use crate::error::{Code, Failure};
use crate::{EvalKey, StoreError};
use damaged_file::OpenedStore;
use rescue::RescueFile;

/// Maximum number of messages that SQLite's `integrity_check` returns.
const MAX_SQLITE_MESSAGES: u32 = 100;

/// Maximum number of keys that are skipped in search of the next readable row of a table.
const MAX_SKIPPED_KEYS: u32 = 10_000;

/// Advice that is appended to findings about a damaged run id.
const RUN_HINT: &str = "If the directory of the run is checked instead of the file, the id is \
                        taken from the recipe.";

/// Result of checking the SQLite file of a run for damage.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckReport {
    /// Path of the checked file.
    pub location: String,
    /// Id of the run. `None` if the id cannot be determined.
    pub run: Option<String>,
    /// Numbers of intact and lost attempts.
    pub attempts: ValueCounts,
    /// Numbers of intact and lost step plans.
    pub plans: ValueCounts,
    /// Numbers of intact and lost evaluations.
    pub evaluations: ValueCounts,
    /// Number of rows without a checksum, because an earlier build wrote them.
    pub rows_without_checksum: u64,
    /// All problems that were found. Empty if the file is not damaged.
    pub findings: Vec<Finding>,
    /// Path of the new file with the rescued values. `None` if no rescue was requested or possible.
    pub rescued: Option<PathBuf>,
}

/// Numbers of intact and lost values of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct ValueCounts {
    /// Number of intact values.
    pub whole: u64,
    /// Number of values known to be lost. Values that have left no trace in the file are not
    /// counted.
    pub lost: u64,
}

/// A problem that the check of a file found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Kind of the problem.
    pub kind: FindingKind,
    /// Key of the affected value, such as `train/1/3/0/2` for an attempt.
    pub subject: String,
    /// Sentence that describes the problem to the user.
    pub message: String,
}

/// Kind of a problem that the check of a file found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// SQLite found a broken structure. If no value is lost, only an index or free space is
    /// affected.
    Structure,
    /// The header of the file does not match the contents of the file.
    Header,
    /// The id of the run is damaged.
    Run,
    /// An attempt is missing or damaged, and is lost.
    Attempt,
    /// A step plan is missing or damaged, and is lost.
    Plan,
    /// A step plan is intact, but trains on attempts that are lost.
    PlannedAttempt,
    /// An evaluation is missing or damaged, and is lost.
    Evaluation,
    /// The tombstones of withdrawn attempts, which contain the reasons, are missing or damaged.
    Withdrawal,
}

impl CheckReport {
    /// Returns whether the check found no problem.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }

    fn add_finding(
        &mut self,
        kind: FindingKind,
        subject: impl Into<String>,
        message: impl Into<String>,
    ) {
        self.findings.push(Finding { kind, subject: subject.into(), message: message.into() });
    }
}

/// Checks the SQLite file of a run for damage. `expected` is the id of the run if it is known; it
/// replaces a damaged id in the file. If `rescue_to` is set, writes all intact values to a new file
/// at that path.
///
/// Blocks the calling thread. Another process can write the file at the same time; the check sees
/// one snapshot.
///
/// # Errors
/// - Returns [`StoreError::Open`] if the file does not exist or nothing in it can be read, or if
///   `rescue_to` exists.
/// - Returns [`StoreError::Foreign`] or [`StoreError::Version`] if the file is not a store of this
///   or an earlier build.
/// - Returns another error if the rescued file cannot be written.
pub fn check_file(
    file: &Path,
    expected: Option<&RunId>,
    rescue_to: Option<&Path>,
) -> Result<CheckReport, StoreError> {
    if let Some(path) = rescue_to.filter(|path| path.exists()) {
        let source = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
        return Err(StoreError::Open {
            location: path.display().to_string(),
            code: Code::Forbidden,
            source: source.into(),
        });
    }
    let mut report = CheckReport {
        location: file.display().to_string(),
        run: None,
        attempts: ValueCounts::default(),
        plans: ValueCounts::default(),
        evaluations: ValueCounts::default(),
        rows_without_checksum: 0,
        findings: Vec::new(),
        rescued: None,
    };
    let OpenedStore { connection, is_restored, .. } =
        &damaged_file::open_damaged_file(file, expected)?;
    if *is_restored {
        report.add_finding(
            FindingKind::Header,
            "the header",
            "The header of the file does not fit its contents: the file is truncated, or its first \
             page is damaged. The header was repaired in a copy.",
        );
    }
    let bytes = fs::metadata(file).map_or(0, |metadata| metadata.len());
    // A damaged length must not make SQLite allocate more than the file can contain.
    let limit = i32::try_from(bytes).unwrap_or(i32::MAX).max(1 << 20);
    let opened = connection
        .set_limit(Limit::SQLITE_LIMIT_LENGTH, limit)
        .and_then(|_| connection.execute_batch("BEGIN"));
    opened.map_err(|source| open_error(file, source))?;
    check_structure(connection, &mut report);
    let last_row = last_attempt_row(connection, bytes);
    let run = determine_run_id(connection, file, expected, last_row, &mut report);
    let mut rescue = match (&run, rescue_to) {
        (Some(run), Some(path)) => Some(RescueFile::create(path, run)?),
        _ => None,
    };
    if let Some(run) = &run {
        let whole = check_attempts(connection, run, last_row, &mut report, &mut rescue)?;
        check_plans(connection, &whole, &mut report, &mut rescue)?;
        check_evals(connection, &mut report, &mut rescue)?;
        check_withdrawals(connection, &whole, &mut report, &mut rescue)?;
        report.rows_without_checksum = count_without_checksum(connection);
    }
    report.run = run.map(|run| run.0);
    if let Some(rescue) = rescue {
        report.rescued = Some(rescue.finish()?);
    }
    Ok(report)
}

/// Runs SQLite's `integrity_check` and adds its messages to `report`.
fn check_structure(connection: &Connection, report: &mut CheckReport) {
    let query = format!("PRAGMA integrity_check({MAX_SQLITE_MESSAGES})");
    let mut messages = Vec::new();
    if let Err(error) = read_lines(connection, &query, &mut messages) {
        messages.push(error.to_string());
    }
    for message in messages.iter().filter(|message| *message != "ok") {
        report.add_finding(
            FindingKind::Structure,
            "the file",
            format!("SQLite reports a broken structure: {message}."),
        );
    }
}

/// Appends the lines of all texts that `query` returns to `lines`. After an error, `lines` contains
/// the lines that were read before it.
fn read_lines(
    connection: &Connection,
    query: &str,
    lines: &mut Vec<String>,
) -> rusqlite::Result<()> {
    let mut statement = connection.prepare(query)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let text: String = row.get(0)?;
        lines.extend(text.lines().map(str::to_owned));
    }
    Ok(())
}

/// Returns an upper bound of the row ids of attempts in a file with `bytes` bytes.
fn last_attempt_row(connection: &Connection, bytes: u64) -> i64 {
    let queries = ["SELECT max(id) FROM attempts", "SELECT max(attempt) FROM segments"];
    let found = queries.map(|query| {
        connection
            .query_row(query, [], |row| row.get::<_, Option<i64>>(0))
            .ok()
            .map(Option::unwrap_or_default)
    });
    // No attempt has less than 64 bytes.
    let max = i64::try_from(bytes / 64).unwrap_or(i64::MAX);
    match found {
        [Some(attempt), Some(segment)] => attempt.max(segment).min(max),
        _ => max,
    }
}

/// Determines the id of the run. If the stored id and `expected` differ, returns the id from which
/// the ids of the attempts are derived. If no attempt is readable, returns `expected`.
fn determine_run_id(
    connection: &Connection,
    file: &Path,
    expected: Option<&RunId>,
    last_row: i64,
    report: &mut CheckReport,
) -> Option<RunId> {
    let stored = read_run_id(connection, file).ok();
    let known: Vec<RunId> = [stored.as_ref(), expected].into_iter().flatten().cloned().collect();
    let named =
        known.into_iter().find(|run| damaged_file::matches_attempt_ids(connection, run, last_row));
    let is_named = named.is_some();
    let run = named.or_else(|| expected.cloned()).or_else(|| stored.clone());
    if run.is_none() || run != stored {
        let id = run.as_ref().map_or("the correct id is unknown".to_owned(), |run| {
            format!("the correct id is {run}")
        });
        let message = format!("The id of the run is damaged: {id}. {RUN_HINT}");
        report.add_finding(FindingKind::Run, "the run", message);
    } else if !is_named && last_row > 0 && expected.is_none() {
        let message = format!(
            "The id of the run does not match the ids of its first attempts, which are derived \
             from it. {RUN_HINT}"
        );
        report.add_finding(FindingKind::Run, "the run", message);
    }
    run
}

/// Checks all attempts, adds the intact ones to `rescue`, and returns the ids of the intact
/// attempts.
fn check_attempts(
    connection: &Connection,
    run: &RunId,
    last_row: i64,
    report: &mut CheckReport,
    rescue: &mut Option<RescueFile>,
) -> Result<HashSet<AttemptId>, StoreError> {
    let mut whole = HashSet::new();
    // Rows with the same reason, about which nothing else is known, are reported as one finding.
    let mut unknown: Option<(i64, i64, String)> = None;
    for row in 1..=last_row {
        let reason = match attempts::read_attempt_row(connection, run, row) {
            Ok(Some(attempt)) => {
                if whole.insert(attempt.id) {
                    report.attempts.whole += 1;
                    if let Some(rescue) = rescue {
                        rescue.add_attempt(&attempt)?;
                    }
                }
                continue;
            }
            Ok(None) => "the row is missing".to_owned(),
            Err(failure) => describe_failure(failure),
        };
        report.attempts.lost += 1;
        if let Some(slot) = attempts::read_slot_name(connection, run, row) {
            let message = format!("Attempt {slot} is lost: {reason}.");
            report.add_finding(FindingKind::Attempt, slot, message);
            continue;
        }
        match &mut unknown {
            Some((_, last, same)) if *last == row - 1 && *same == reason => *last = row,
            _ => {
                report_lost_rows(unknown.take(), report);
                unknown = Some((row, row, reason));
            }
        }
    }
    report_lost_rows(unknown, report);
    Ok(whole)
}

/// Reports lost attempts of which only the row numbers are known. `rows` contains the first row,
/// the last row and the reason.
fn report_lost_rows(rows: Option<(i64, i64, String)>, report: &mut CheckReport) {
    let Some((first, last, reason)) = rows else { return };
    let (subject, attempts) = if first == last {
        (format!("row {first}"), format!("The attempt in row {first} is lost"))
    } else {
        let rows = format!("rows {first} to {last}");
        (rows.clone(), format!("The attempts in {rows} are lost"))
    };
    report.add_finding(FindingKind::Attempt, subject, format!("{attempts}: {reason}."));
}

/// Checks all step plans, and adds the intact ones to `rescue`. `whole` contains the ids of the
/// intact attempts.
fn check_plans(
    connection: &Connection,
    whole: &HashSet<AttemptId>,
    report: &mut CheckReport,
    rescue: &mut Option<RescueFile>,
) -> Result<(), StoreError> {
    let mut keys = read_keys(connection, "steps", (FindingKind::Plan, "step plans"), report);
    let sequences = (FindingKind::Plan, "sequences of step plans");
    keys.extend(read_keys(connection, "planned_paths", sequences, report));
    keys.sort_unstable();
    keys.dedup();
    // A phase must have a plan for each step from 0 on. The keys are sorted, so the last key of a
    // phase is that of its last step.
    let last_steps: std::collections::BTreeMap<u32, u32> = keys.iter().copied().collect();
    let all = last_steps.into_iter().flat_map(|(phase, last)| {
        let last = if last < MAX_SKIPPED_KEYS { last } else { 0 };
        (0..=last).map(move |step| (phase, step))
    });
    let mut all: Vec<(u32, u32)> = all.chain(keys.iter().copied()).collect();
    all.sort_unstable();
    all.dedup();
    for (phase, step) in all {
        let key = ledger::plan_key(phase, step);
        let reason = match ledger::read_verified_plan(connection, phase, step) {
            Ok(Some(plan)) => {
                report.plans.whole += 1;
                let ids = plan.sequences().map(|sequence| sequence.attempt);
                let lost: HashSet<AttemptId> = ids.filter(|id| !whole.contains(id)).collect();
                if let Some(first) = lost.iter().min() {
                    let message = format!(
                        "The {key} trains on {} attempts that are lost, such as {first}, so the \
                         step can be neither replayed nor audited. Resume from a checkpoint after \
                         this step.",
                        lost.len()
                    );
                    report.add_finding(FindingKind::PlannedAttempt, key, message);
                }
                if let Some(rescue) = rescue {
                    rescue.add_plan(&plan)?;
                }
                continue;
            }
            Ok(None) => "the row is missing".to_owned(),
            Err(failure) => describe_failure(failure),
        };
        report.plans.lost += 1;
        let message = format!("The {key} is lost: {reason}.");
        report.add_finding(FindingKind::Plan, key, message);
    }
    Ok(())
}

/// Checks all evaluations, and adds the intact ones to `rescue`.
fn check_evals(
    connection: &Connection,
    report: &mut CheckReport,
    rescue: &mut Option<RescueFile>,
) -> Result<(), StoreError> {
    let evaluations = (FindingKind::Evaluation, "evaluations");
    for (phase, step) in read_keys(connection, "evals", evaluations, report) {
        let key = EvalKey { phase, step };
        match evals::read_verified_eval(connection, key) {
            Ok(Some(text)) => {
                report.evaluations.whole += 1;
                if let Some(rescue) = rescue {
                    rescue.add_eval(key, &text)?;
                }
            }
            Ok(None) => {}
            Err(failure) => {
                report.evaluations.lost += 1;
                let message = format!("The {key} is lost: {}.", describe_failure(failure));
                report.add_finding(FindingKind::Evaluation, key.to_string(), message);
            }
        }
    }
    Ok(())
}

/// Checks that the tombstones of withdrawn attempts are readable, and adds the tombstones of intact
/// attempts to `rescue`.
fn check_withdrawals(
    connection: &Connection,
    whole: &HashSet<AttemptId>,
    report: &mut CheckReport,
    rescue: &mut Option<RescueFile>,
) -> Result<(), StoreError> {
    match withdrawals::read_tombstones(connection) {
        Ok(tombstones) => {
            let mut kept = tombstones.iter().filter(|tombstone| whole.contains(&tombstone.id));
            if let Some(rescue) = rescue {
                kept.try_for_each(|tombstone| rescue.add_withdrawal(tombstone))
            } else {
                Ok(())
            }
        }
        Err(failure) => {
            let message = format!(
                "The tombstones of withdrawn attempts are lost, with the reasons for the \
                 withdrawals: {}. The attempts are still marked as \
                 withdrawn.",
                describe_failure(failure)
            );
            report.add_finding(FindingKind::Withdrawal, "withdrawals", message);
            Ok(())
        }
    }
}

/// Returns the keys (phase, step) of all readable rows of `table`, in order. After an unreadable
/// row, the following keys are tried. Keys outside the range of `u32` are omitted. If no further
/// row is readable, adds a finding of kind `kind`: an unknown number of `values` is lost.
fn read_keys(
    connection: &Connection,
    table: &str,
    (kind, values): (FindingKind, &str),
    report: &mut CheckReport,
) -> Vec<(u32, u32)> {
    let query = format!(
        "SELECT phase, step FROM {table} WHERE (phase, step) > (?1, ?2) ORDER BY phase, step LIMIT 1"
    );
    let mut keys = Vec::new();
    let mut after: (i64, i64) = (-1, 0);
    let mut skipped = 0;
    while skipped < MAX_SKIPPED_KEYS {
        let next = connection
            .query_row(&query, [after.0, after.1], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional();
        match next {
            Ok(None) => break,
            Ok(Some(key)) if key > after => {
                if let (Ok(phase), Ok(step)) = (u32::try_from(key.0), u32::try_from(key.1)) {
                    keys.push((phase, step));
                }
                after = key;
            }
            // The order of the rows is damaged, too.
            Ok(Some(_)) | Err(_) => {
                after = (after.0.max(0), after.1 + 1);
                skipped += 1;
            }
        }
    }
    if skipped == MAX_SKIPPED_KEYS {
        let found = keys.len();
        report.add_finding(
            kind,
            values,
            format!(
                "The table of the {values} is damaged: {found} {values} were found, and an \
                 unknown number is lost."
            ),
        );
    }
    keys
}

/// Returns the number of readable rows that have no checksum.
fn count_without_checksum(connection: &Connection) -> u64 {
    let tables = ["attempts", "segments", "steps", "planned_paths", "evals"];
    let counts = tables.into_iter().filter_map(|table| {
        let query = format!("SELECT count(*) FROM {table} WHERE crc IS NULL");
        connection.query_row(&query, [], |row| row.get::<_, i64>(0)).ok()
    });
    counts.map(|count| count as u64).sum()
}

fn describe_failure(failure: Failure) -> String {
    match failure {
        Failure::Corrupt(what) | Failure::Unstorable(what) => what,
        Failure::Backend(_, cause) => cause.to_string(),
        Failure::Unknown | Failure::Conflict(..) | Failure::Ended(_) => {
            "the value is damaged".into()
        }
    }
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
