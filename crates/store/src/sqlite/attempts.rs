//! Stores attempts: their start, their end, complete attempts, and queries over them.

use std::str::FromStr;

use levade_tree::{AttemptId, AttemptSlot, Kind, Purpose, RunId, Segment};
use rusqlite::{Connection, OptionalExtension, Row, named_params, params};

use super::segments;
use crate::checks;
use crate::error::Failure;
use crate::{
    Attempt, AttemptEnd, AttemptStart, AttemptSummary, FailedAttempt, Status, TryCounts,
    WriteOutcome,
};

/// Returns the key that names an attempt in error messages.
pub(super) fn attempt_key(id: &AttemptId) -> String {
    format!("attempt {id}")
}

/// Records the start of an attempt. If the attempt is already recorded, checks that it can be
/// continued.
pub(super) fn start_attempt(
    to: &Connection,
    run: &RunId,
    start: &AttemptStart,
) -> Result<WriteOutcome, Failure> {
    checks::check_attempt_id(run, &start.id, &start.slot, start.number)?;
    match read_attempt_head(to, &start.id)? {
        Some((_, stored)) => checks::check_restart(&stored, start),
        None => insert_attempt(to, &Attempt::from_start(start)).map(|_| WriteOutcome::Written),
    }
}

/// Appends segments to a running attempt.
pub(super) fn append_segments(
    to: &Connection,
    id: &AttemptId,
    given: &[Segment],
) -> Result<WriteOutcome, Failure> {
    let (row, head) = read_attempt_head(to, id)?.ok_or(Failure::Unknown)?;
    let len = segments::count_segments(to, row)?;
    let stored = |id| segments::read_segment(to, row, id);
    let new = checks::select_new_segments(&head, len, given, stored, |id| {
        segments::count_segment_tokens(to, row, id)
    })?;
    if new.is_empty() {
        return Ok(WriteOutcome::AlreadyRecorded);
    }
    segments::insert_segments(to, row, &new)?;
    to.prepare_cached(
        "UPDATE attempts SET sampled_tokens = sampled_tokens + ?2, tokens = tokens + ?3 WHERE id \
         = ?1",
    )?
    .execute(params![row, count_sampled_tokens(&new), count_tokens(&new)])?;
    Ok(WriteOutcome::Written)
}

/// Records the end of an attempt whose status is running or unscored.
pub(super) fn end_attempt(
    to: &Connection,
    id: &AttemptId,
    end: &AttemptEnd,
) -> Result<WriteOutcome, Failure> {
    checks::check_end_values(end)?;
    let (row, head) = read_attempt_head(to, id)?.ok_or(Failure::Unknown)?;
    if checks::check_end(&head, end)? == WriteOutcome::AlreadyRecorded {
        return Ok(WriteOutcome::AlreadyRecorded);
    }
    to.prepare_cached(
        "UPDATE attempts SET outcome = :outcome, score = :score, reward = :reward, earned = \
         :earned, status = :status,
             crc = checksum(name, purpose, phase, step, grp, sample, number, task, :outcome, \
         :score, :reward, :earned)
         WHERE id = :row",
    )?
    .execute(named_params! {
        ":outcome": to_json_text(&end.outcome)?,
        ":score": end.score,
        ":reward": end.reward,
        ":earned": to_json_text(&end.step_rewards)?,
        ":status": end.status.name(),
        ":row": row,
    })?;
    Ok(WriteOutcome::Written)
}

/// Marks all running attempts as abandoned and returns their number.
pub(super) fn abandon_running(to: &Connection) -> Result<u64, Failure> {
    let abandon = "UPDATE attempts SET status = 'abandoned' WHERE status = 'running'";
    Ok(to.prepare_cached(abandon)?.execute([])? as u64)
}

/// Records complete attempts with their segments. An attempt that is already recorded must be
/// equal.
pub(super) fn record_attempts(
    to: &Connection,
    run: &RunId,
    attempts: &[Attempt],
) -> Result<WriteOutcome, Failure> {
    let mut recorded = WriteOutcome::AlreadyRecorded;
    for attempt in attempts {
        checks::check_attempt(run, attempt)?;
        match read_attempt(to, &attempt.id)? {
            None => {
                let row = insert_attempt(to, attempt)?;
                segments::insert_segments(to, row, attempt.trajectory.segments())?;
                recorded = WriteOutcome::Written;
            }
            Some(stored) => {
                if let Some(field) = checks::find_attempt_difference(&stored, attempt) {
                    return Err(Failure::Conflict(attempt.slot.to_string(), field));
                }
            }
        }
    }
    Ok(recorded)
}

/// Inserts an attempt without its segments and returns its row id.
pub(super) fn insert_attempt(to: &Connection, attempt: &Attempt) -> Result<i64, Failure> {
    let AttemptSlot { purpose, phase, step, group, sample } = &attempt.slot;
    let segments = attempt.trajectory.segments();
    to.prepare_cached(
        "INSERT INTO attempts (name, purpose, phase, step, grp, sample, number, task, outcome, \
         score, reward, earned,
             status, sampled_tokens, tokens, crc)
         VALUES (:name, :purpose, :phase, :step, :group, :sample, :number, :task, :outcome, \
         :score, :reward, :earned,
             :status, :sampled_tokens, :tokens,
             checksum(:name, :purpose, :phase, :step, :group, :sample, :number, :task, :outcome, \
         :score, :reward, :earned))",
    )?
    .execute(named_params! {
        ":name": attempt.id.bytes(),
        ":purpose": purpose.name(),
        ":phase": phase,
        ":step": step,
        ":group": group,
        ":sample": sample,
        ":number": attempt.number,
        ":task": attempt.task.to_string(),
        ":outcome": to_json_text(&attempt.outcome)?,
        ":score": attempt.score,
        ":reward": attempt.reward,
        ":earned": to_json_text(&attempt.step_rewards)?,
        ":status": attempt.status.name(),
        ":sampled_tokens": count_sampled_tokens(segments),
        ":tokens": count_tokens(segments),
    })?;
    Ok(to.last_insert_rowid())
}

fn to_json_text(value: &impl serde::Serialize) -> Result<String, Failure> {
    serde_json::to_string(value).map_err(|error| Failure::Unstorable(error.to_string()))
}

fn count_sampled_tokens(segments: &[Segment]) -> i64 {
    count_tokens(segments.iter().filter(|segment| segment.kind == Kind::Sampled))
}

fn count_tokens<'a>(segments: impl IntoIterator<Item = &'a Segment>) -> i64 {
    segments.into_iter().map(|segment| segment.tokens.len() as i64).sum()
}

/// Returns the attempt with the id `name`, or `None` if it is not recorded.
pub(super) fn read_attempt(
    from: &Connection,
    name: &AttemptId,
) -> Result<Option<Attempt>, Failure> {
    let Some((row, head)) = read_attempt_head(from, name)? else { return Ok(None) };
    Ok(Some(Attempt { trajectory: segments::read_trajectory(from, row)?, ..head }))
}

/// The query for the columns that [`parse_attempt_head`] reads, and for the checksum.
macro_rules! select {
    ($condition:literal) => {
        concat!(
            "SELECT id, task, outcome, score, reward, status, earned, purpose, phase, step, grp, \
             sample, number, name,
                 crc IS NULL OR crc IS checksum(name, purpose, phase, step, grp, sample, number, \
             task, outcome, score, reward, earned),
                 sampled_tokens, tokens
             FROM attempts WHERE ",
            $condition
        )
    };
}

/// Returns the attempt with the id `name` without its segments, and its row id. Returns `None` if
/// the attempt is not recorded.
pub(super) fn read_attempt_head(
    from: &Connection,
    name: &AttemptId,
) -> Result<Option<(i64, Attempt)>, Failure> {
    let mut statement = from.prepare_cached(select!("name = ?1"))?;
    let mut rows = statement.query([name.bytes()])?;
    rows.next()?.map(|row| Ok((row.get(0)?, parse_attempt_head(row)?))).transpose()
}

/// Returns the attempt in the row `id`, after verifying its checksums and counts. Reads no index,
/// because an index can be damaged. Returns `None` if there is no such row.
pub(super) fn read_attempt_row(
    from: &Connection,
    run: &RunId,
    id: i64,
) -> Result<Option<Attempt>, Failure> {
    let mut statement = from.prepare_cached(select!("id = ?1"))?;
    let mut rows = statement.query([id])?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let head = parse_attempt_head(row)?;
    let is_intact: bool = row.get(14)?;
    checks::check_attempt_id(run, &head.id, &head.slot, head.number)
        .map_err(|_| Failure::Corrupt("the attempt's id does not match its slot".into()))?;
    if !is_intact {
        return Err(Failure::Corrupt("the attempt's row has a wrong checksum".into()));
    }
    segments::verify_checksums(from, id)?;
    let trajectory = segments::read_trajectory(from, id)?;
    let counts: [i64; 2] = [row.get(15)?, row.get(16)?];
    if counts != [count_sampled_tokens(trajectory.segments()), count_tokens(trajectory.segments())]
    {
        return Err(Failure::Corrupt("segments of the attempt are missing".into()));
    }
    Ok(Some(Attempt { trajectory, ..head }))
}

/// Returns the attempt slot of the row `id` as text, with the index of the try if it is above 0.
/// Returns `None` if the row cannot be read or the id of the attempt is not derived from `run`.
/// Does not check the segments.
pub(super) fn read_slot_name(from: &Connection, run: &RunId, id: i64) -> Option<String> {
    let mut statement = from
        .prepare_cached(
            "SELECT name, purpose, phase, step, grp, sample, number FROM attempts WHERE id = ?1",
        )
        .ok()?;
    let found = statement.query_row([id], |row| {
        let numbers: [u32; 5] = [row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?, row.get(6)?];
        Ok((row.get(0)?, row.get::<_, String>(1)?, numbers))
    });
    let (name, purpose, [phase, step, group, sample, number]) = found.ok()?;
    let slot = AttemptSlot { purpose: Purpose::parse(&purpose)?, phase, step, group, sample };
    checks::check_attempt_id(run, &AttemptId::from_bytes(name), &slot, number).ok()?;
    Some(if number > 0 { format!("{} try {number}", slot.name()) } else { slot.name() })
}

fn parse_attempt_head(row: &Row<'_>) -> Result<Attempt, Failure> {
    let [task, outcome, step_rewards, purpose]: [String; 4] =
        [row.get(1)?, row.get(2)?, row.get(6)?, row.get(7)?];
    let purpose = Purpose::parse(&purpose)
        .ok_or_else(|| Failure::Corrupt(format!("the purpose is unknown: `{purpose}`")))?;
    let phase = row.get(8)?;
    let step = row.get(9)?;
    let group = row.get(10)?;
    let sample = row.get(11)?;
    let start = AttemptStart {
        id: AttemptId::from_bytes(row.get(13)?),
        slot: AttemptSlot { purpose, phase, step, group, sample },
        number: row.get(12)?,
        task: serde_json::Value::from_str(&task)
            .map_err(|e| Failure::Corrupt(format!("the task is not JSON: {e}")))?,
    };
    Ok(Attempt {
        outcome: serde_json::from_str(&outcome)
            .map_err(|e| Failure::Corrupt(format!("the outcome cannot be read: {e}")))?,
        score: row.get(3)?,
        reward: row.get(4)?,
        step_rewards: serde_json::from_str(&step_rewards)
            .map_err(|e| Failure::Corrupt(format!("the step rewards cannot be read: {e}")))?,
        status: parse_status(row, 5)?,
        ..Attempt::from_start(&start)
    })
}

/// Returns the try that counts in an attempt slot: the last try that is completed, unscored or
/// failed.
pub(super) fn read_last_try(
    from: &Connection,
    slot: &AttemptSlot,
) -> Result<Option<Attempt>, Failure> {
    let AttemptSlot { purpose, phase, step, group, sample } = slot;
    let name = from
        .prepare_cached(
            "SELECT name FROM attempts WHERE purpose = ?1 AND phase = ?2 AND step = ?3 AND grp = \
             ?4 AND sample = ?5
                 AND status IN ('completed', 'unscored', 'failed') ORDER BY number DESC LIMIT 1",
        )?
        .query_row(params![purpose.name(), phase, step, group, sample], |row| row.get(0))
        .optional()?;
    name.map_or(Ok(None), |name| read_attempt(from, &AttemptId::from_bytes(name)))
}

/// Returns the counts of the tries in an attempt slot.
pub(super) fn count_tries(from: &Connection, slot: &AttemptSlot) -> Result<TryCounts, Failure> {
    let AttemptSlot { purpose, phase, step, group, sample } = slot;
    let count =
        "SELECT coalesce(max(number) + 1, 0), count(*) FILTER (WHERE status IN ('superseded', \
         'withdrawn')) FROM attempts
         WHERE purpose = ?1 AND phase = ?2 AND step = ?3 AND grp = ?4 AND sample = ?5";
    let key = params![purpose.name(), phase, step, group, sample];
    let tries = from
        .prepare_cached(count)?
        .query_row(key, |row| Ok(TryCounts { next: row.get(0)?, failed: row.get(1)? }))?;
    Ok(tries)
}

/// Returns the distinct tasks of all attempts that were started for `purpose`.
pub(super) fn read_tasks(
    from: &Connection,
    purpose: Purpose,
) -> Result<Vec<serde_json::Value>, Failure> {
    let mut statement = from.prepare_cached(
        "SELECT DISTINCT task FROM attempts WHERE purpose = ?1 AND task <> 'null' ORDER BY 1",
    )?;
    let mut rows = statement.query([purpose.name()])?;
    let mut tasks = Vec::new();
    while let Some(row) = rows.next()? {
        let text: String = row.get(0)?;
        let task = serde_json::from_str(&text);
        tasks.push(task.map_err(|e| Failure::Corrupt(format!("a task is not JSON: {e}")))?);
    }
    Ok(tasks)
}

/// Returns summaries of the attempts for `purpose`: for each attempt slot, the try that counts.
pub(super) fn read_summaries(
    from: &Connection,
    purpose: Purpose,
) -> Result<Vec<AttemptSummary>, Failure> {
    let mut statement = from.prepare_cached(
        "SELECT phase, step, grp, sample, score, reward, status, sampled_tokens, tokens, name, \
         max(number)
         FROM attempts WHERE purpose = ?1 AND status IN ('completed', 'unscored', 'failed')
         GROUP BY phase, step, grp, sample ORDER BY phase, step, grp, sample",
    )?;
    let mut rows = statement.query([purpose.name()])?;
    let mut summaries = Vec::new();
    while let Some(row) = rows.next()? {
        let phase = row.get(0)?;
        let step = row.get(1)?;
        let group = row.get(2)?;
        let sample = row.get(3)?;
        summaries.push(AttemptSummary {
            id: AttemptId::from_bytes(row.get(9)?),
            slot: AttemptSlot { purpose, phase, step, group, sample },
            number: row.get(10)?,
            score: row.get(4)?,
            reward: row.get(5)?,
            status: parse_status(row, 6)?,
            sampled_tokens: row.get::<_, i64>(7)? as u64,
            tokens: row.get::<_, i64>(8)? as u64,
        });
    }
    Ok(summaries)
}

/// Returns the attempts for `purpose` that broke, with their errors.
pub(super) fn read_failures(
    from: &Connection,
    purpose: Purpose,
) -> Result<Vec<FailedAttempt>, Failure> {
    let mut statement = from.prepare_cached(
        "SELECT phase, step, grp, sample, number, name, status, json_extract(outcome, '$.error') \
         AS error
         FROM attempts WHERE purpose = ?1
             AND (status IN ('failed', 'superseded') OR (status = 'abandoned' AND error IS NOT \
             NULL))
         ORDER BY phase, step, grp, sample, number",
    )?;
    let mut rows = statement.query([purpose.name()])?;
    let mut failures = Vec::new();
    while let Some(row) = rows.next()? {
        let phase = row.get(0)?;
        let step = row.get(1)?;
        let group = row.get(2)?;
        let sample = row.get(3)?;
        failures.push(FailedAttempt {
            id: AttemptId::from_bytes(row.get(5)?),
            slot: AttemptSlot { purpose, phase, step, group, sample },
            number: row.get(4)?,
            status: parse_status(row, 6)?,
            error: row.get(7)?,
        });
    }
    Ok(failures)
}

pub(super) fn parse_status(row: &Row<'_>, column: usize) -> Result<Status, Failure> {
    let name: String = row.get(column)?;
    Status::parse(&name).ok_or_else(|| Failure::Corrupt(format!("unknown status `{name}`")))
}
