//! Stores tombstones of attempts, and erases withdrawn attempts.
//!
//! Deleted rows leave their bytes in free parts of the file and in the log. So an erasure deletes
//! with `secure_delete`, which overwrites them with zeros, and [`remove_free_pages`] then rewrites
//! the file and empties the log.

use std::collections::HashSet;
use std::path::Path;

use levade_tree::{AttemptId, Outcome};
use rusqlite::{Connection, params};

use super::attempts;
use super::schema::{EXISTING_FILE_FLAGS, connect};
use crate::error::{Code, Failure};
use crate::withdrawal::unknown_attempt_error;
use crate::{Status, WithdrawRequest, Withdrawal, erase_quotes};

/// Adds the tombstones that a request demands, and returns them. If the request erases, also erases
/// the texts and tokens of the attempts.
pub(super) fn record_withdrawals(
    to: &Connection,
    request: &WithdrawRequest,
) -> Result<Vec<Withdrawal>, Failure> {
    if request.erase {
        to.pragma_update(None, "secure_delete", true)?;
    }
    let mut names: Vec<AttemptId> = request.attempts.clone();
    let mut at_task = to.prepare_cached("SELECT name FROM attempts WHERE task = ?1")?;
    for task in &request.tasks {
        let found = at_task.query_map([task.to_string()], |row| row.get(0))?;
        for name in found {
            names.push(AttemptId::from_bytes(name?));
        }
    }
    let earlier = read_tombstones(to)?;
    let mut added: Vec<Withdrawal> = Vec::new();
    let mut seen = HashSet::new();
    for name in names.into_iter().filter(|name| seen.insert(*name)) {
        let (row, attempt) =
            attempts::read_attempt_head(to, &name)?.ok_or_else(|| unknown_attempt_error(&name))?;
        let of_attempt: Vec<Withdrawal> =
            earlier.iter().filter(|earlier| earlier.id == name).cloned().collect();
        let Some(tombstone) = request.tombstone(&attempt, &of_attempt) else { continue };
        insert_tombstone(to, row, &tombstone)?;
        to.prepare_cached("UPDATE attempts SET status = ?2 WHERE id = ?1")?
            .execute(params![row, Status::Withdrawn.name()])?;
        if request.erase {
            erase_attempt(to, row)?;
        }
        added.push(tombstone);
    }
    if request.erase {
        let unused = "DELETE FROM prompts WHERE id NOT IN (SELECT prompt FROM segments WHERE prompt IS NOT \
             NULL)";
        to.execute(unused, [])?;
        erase_quotes_in_evals(to, &added.iter().map(|tombstone| tombstone.slot.name()).collect())?;
    }
    added.sort_by_key(|tombstone| (tombstone.slot, tombstone.number));
    Ok(added)
}

/// Adds a tombstone of the attempt whose row id is `row`.
pub(super) fn insert_tombstone(
    to: &Connection,
    row: i64,
    tombstone: &Withdrawal,
) -> Result<(), Failure> {
    let Withdrawal { status, task, reason, at, erased, .. } = tombstone;
    to.prepare_cached(
        "INSERT INTO withdrawals (attempt, status, task, reason, at, erased) VALUES (?1, ?2, ?3, \
         ?4, ?5, ?6)",
    )?
    .execute(params![row, status.name(), task, reason, *at as i64, erased])?;
    Ok(())
}

/// Erases the texts and tokens of the attempt whose row id is `row`.
fn erase_attempt(to: &Connection, row: i64) -> Result<(), Failure> {
    let outcome = serde_json::to_string(&Outcome::initial())
        .map_err(|error| Failure::Unstorable(error.to_string()))?;
    to.prepare_cached(
        "UPDATE attempts SET task = 'null', outcome = ?2, sampled_tokens = 0, tokens = 0,
             crc = checksum(name, purpose, phase, step, grp, sample, number, 'null', ?2, score, \
         reward, earned)
         WHERE id = ?1",
    )?
    .execute(params![row, outcome])?;
    to.prepare_cached("DELETE FROM segments WHERE attempt = ?1")?.execute([row])?;
    Ok(())
}

/// Erases quotes of attempts from the results of evaluations. `names` are the names of the
/// attempts' slots.
fn erase_quotes_in_evals(to: &Connection, names: &HashSet<String>) -> Result<(), Failure> {
    for (key, mut result) in super::evals::read_all_evals(to)? {
        if erase_quotes(&mut result, names) {
            to.prepare_cached(
                "UPDATE evals SET result = ?3, crc = checksum(phase, step, ?3) WHERE phase = ?1 AND \
                 step = ?2",
            )?
            .execute(params![key.phase, key.step, result.to_string()])?;
        }
    }
    Ok(())
}

/// Returns all tombstones in the order in which they were added.
pub(super) fn read_tombstones(from: &Connection) -> Result<Vec<Withdrawal>, Failure> {
    let mut statement = from.prepare_cached(
        "SELECT name, w.status, w.task, reason, at, erased FROM withdrawals w JOIN attempts a ON \
         a.id = w.attempt ORDER BY w.id",
    )?;
    let mut rows = statement.query([])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        let id = AttemptId::from_bytes(row.get(0)?);
        let status = attempts::parse_status(row, 1)?;
        let (_, attempt) =
            attempts::read_attempt_head(from, &id)?.ok_or_else(|| unknown_attempt_error(&id))?;
        found.push(Withdrawal {
            id,
            slot: attempt.slot,
            number: attempt.number,
            status,
            task: row.get(2)?,
            reason: row.get(3)?,
            at: row.get::<_, i64>(4)? as u64,
            erased: row.get(5)?,
        });
    }
    Ok(found)
}

/// Rewrites a database file without its free pages, and truncates its write-ahead log.
pub(super) fn remove_free_pages(file: &Path) -> Result<(), Failure> {
    let connection = connect(file, EXISTING_FILE_FLAGS)?;
    connection.pragma_update(None, "secure_delete", true)?;
    connection.execute_batch("VACUUM")?;
    let busy: bool =
        connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0))?;
    if busy {
        let why = "another process reads the file; erase again once it has ended";
        return Err(Failure::Backend(Code::Unavailable, why.into()));
    }
    Ok(())
}
