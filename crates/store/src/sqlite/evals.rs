//! Stores the results of evaluations.

use rusqlite::{Connection, OptionalExtension, params};

use crate::error::Failure;
use crate::{EvalKey, WriteOutcome};

/// Records the result of an evaluation, given as JSON text.
pub(super) fn record_eval(
    to: &Connection,
    key: EvalKey,
    text: &str,
) -> Result<WriteOutcome, Failure> {
    let stored: Option<String> = to
        .prepare_cached("SELECT result FROM evals WHERE phase = ?1 AND step = ?2")?
        .query_row([key.phase, key.step], |row| row.get(0))
        .optional()?;
    match stored {
        Some(stored) if stored == text => Ok(WriteOutcome::AlreadyRecorded),
        Some(_) => Err(Failure::Conflict(key.to_string(), "result")),
        None => {
            to.prepare_cached(
                "INSERT INTO evals (phase, step, result, crc) VALUES (?1, ?2, ?3, checksum(?1, \
                 ?2, ?3))",
            )?
            .execute(params![key.phase, key.step, text])?;
            Ok(WriteOutcome::Written)
        }
    }
}

/// Returns the result of an evaluation as JSON text, after verifying its checksum. Returns `None`
/// if no result is recorded under `key`.
pub(super) fn read_verified_eval(
    from: &Connection,
    key: EvalKey,
) -> Result<Option<String>, Failure> {
    let found: Option<(String, bool)> = from
        .prepare_cached(
            "SELECT result, crc IS NULL OR crc IS checksum(phase, step, result) FROM evals
             WHERE phase = ?1 AND step = ?2",
        )?
        .query_row([key.phase, key.step], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let Some((text, is_intact)) = found else { return Ok(None) };
    let is_json = serde_json::from_str::<serde_json::Value>(&text).is_ok();
    if is_intact && is_json {
        return Ok(Some(text));
    }
    Err(Failure::Corrupt("the evaluation's row has a wrong checksum".into()))
}

/// Returns the results of all evaluations, sorted by phase and step.
pub(super) fn read_all_evals(
    from: &Connection,
) -> Result<Vec<(EvalKey, serde_json::Value)>, Failure> {
    let mut statement =
        from.prepare_cached("SELECT phase, step, result FROM evals ORDER BY phase, step")?;
    let mut rows = statement.query([])?;
    let mut results = Vec::new();
    while let Some(row) = rows.next()? {
        let key = EvalKey { phase: row.get(0)?, step: row.get(1)? };
        let text: String = row.get(2)?;
        let result = serde_json::from_str(&text)
            .map_err(|e| Failure::Corrupt(format!("the result of {key} is not JSON: {e}")))?;
        results.push((key, result));
    }
    Ok(results)
}
