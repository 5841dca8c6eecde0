//! The write-ahead ledger: stores the plan of each training step before the step runs.

use levade_tree::{AttemptId, SegmentId};
use rusqlite::{Connection, OptionalExtension, params};

use crate::checks;
use crate::error::Failure;
use crate::plan_header::{StepPlanHeader, indexed_sequences, push_sequence};
use crate::{PerToken, PlannedSequence, StepPlan, WriteOutcome};

/// Records a step plan. If an equal plan is recorded already, does nothing. A different recorded
/// plan is a conflict.
pub(super) fn record_plan(to: &Connection, plan: &StepPlan) -> Result<WriteOutcome, Failure> {
    checks::check_plan(plan)?;
    match read_plan(to, plan.phase, plan.step)? {
        Some(stored) if checks::are_plans_equal(&stored, plan) => Ok(WriteOutcome::AlreadyRecorded),
        Some(_) => Err(Failure::Conflict(plan_key(plan.phase, plan.step), "plan")),
        None => insert_plan(to, plan).map(|()| WriteOutcome::Written),
    }
}

/// Returns the keys (phase, step) of all recorded plans, in ascending order.
pub(super) fn read_planned_steps(from: &Connection) -> Result<Vec<(u32, u32)>, Failure> {
    let mut statement =
        from.prepare_cached("SELECT phase, step FROM steps ORDER BY phase, step")?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Inserts the plan of a step that has no recorded plan.
pub(super) fn insert_plan(transaction: &Connection, plan: &StepPlan) -> Result<(), Failure> {
    let StepPlan { phase, step, .. } = plan;
    let head = serde_json::to_string(&StepPlanHeader::from(plan))
        .map_err(|error| Failure::Unstorable(error.to_string()))?;
    transaction
        .prepare_cached(
            "INSERT INTO steps (phase, step, plan, crc) VALUES (?1, ?2, ?3, checksum(?1, ?2, ?3))",
        )?
        .execute(params![phase, step, head])?;
    let mut insert = transaction.prepare_cached(
        "INSERT INTO planned_paths (phase, step, place, policy, upd, attempt, leaf, advantage, \
         weight, returns, vals, crc)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11,
             checksum(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11))",
    )?;
    for (index, (policy, update, sequence)) in indexed_sequences(plan).enumerate() {
        insert.execute(params![
            phase,
            step,
            index as u32,
            policy,
            update,
            sequence.attempt.bytes(),
            sequence.leaf.0,
            sequence.advantage.to_bytes(),
            sequence.weight.to_bytes(),
            sequence.returns.as_ref().map(PerToken::to_bytes),
            sequence.values.as_ref().map(PerToken::to_bytes),
        ])?;
    }
    Ok(())
}

/// Returns the recorded plan of a step, or `None` if no plan is recorded. Does not verify
/// checksums.
pub(super) fn read_plan(
    transaction: &Connection,
    phase: u32,
    step: u32,
) -> Result<Option<StepPlan>, Failure> {
    let text: Option<String> = transaction
        .prepare_cached("SELECT plan FROM steps WHERE phase = ?1 AND step = ?2")?
        .query_row([phase, step], |row| row.get(0))
        .optional()?;
    let Some(text) = text else { return Ok(None) };
    let head: StepPlanHeader =
        serde_json::from_str(&text).map_err(|error| Failure::Corrupt(error.to_string()))?;
    let mut plan = head.into_plan(phase, step);
    let mut statement = transaction.prepare_cached(
        "SELECT policy, upd, attempt, leaf, advantage, weight, returns, vals FROM planned_paths
         WHERE phase = ?1 AND step = ?2 ORDER BY place",
    )?;
    let mut rows = statement.query([phase, step])?;
    while let Some(row) = rows.next()? {
        let returns: Option<Vec<u8>> = row.get(6)?;
        let values: Option<Vec<u8>> = row.get(7)?;
        let sequence = PlannedSequence {
            attempt: AttemptId::from_bytes(row.get(2)?),
            leaf: SegmentId(row.get(3)?),
            advantage: parse_per_token(row.get(4)?)?,
            weight: parse_per_token(row.get(5)?)?,
            returns: returns.map(parse_per_token).transpose()?,
            values: values.map(parse_per_token).transpose()?,
        };
        let update = (row.get(0)?, row.get(1)?);
        push_sequence(&mut plan, update, sequence).map_err(Failure::Corrupt)?;
    }
    Ok(Some(plan))
}

fn parse_per_token(bytes: Vec<u8>) -> Result<PerToken, Failure> {
    PerToken::from_bytes(&bytes)
        .ok_or_else(|| Failure::Corrupt("a list of numbers is truncated".into()))
}

/// Returns the recorded plan of a step, after verifying its checksums and its number of sequences.
pub(super) fn read_verified_plan(
    from: &Connection,
    phase: u32,
    step: u32,
) -> Result<Option<StepPlan>, Failure> {
    let queries = [
        "SELECT count(*) FROM steps WHERE phase = ?1 AND step = ?2
             AND crc IS NOT NULL AND crc IS NOT checksum(phase, step, plan)",
        "SELECT count(*) FROM planned_paths WHERE phase = ?1 AND step = ?2
             AND crc IS NOT NULL AND crc IS NOT checksum(phase, step, place, policy, upd, \
         attempt, leaf, advantage, weight, returns, vals)",
    ];
    for query in queries {
        let count: i64 = from.prepare_cached(query)?.query_row([phase, step], |row| row.get(0))?;
        if count > 0 {
            return Err(Failure::Corrupt(format!(
                "{count} rows of the step plan have wrong checksums"
            )));
        }
    }
    let plan = read_plan(from, phase, step)?;
    if let Some(plan) = &plan {
        checks::check_plan(plan)
            .map_err(|_| Failure::Corrupt("sequences of the step plan are missing".to_owned()))?;
    }
    Ok(plan)
}

/// Returns the key that names a step plan in error messages.
pub(super) fn plan_key(phase: u32, step: u32) -> String {
    format!("plan of phase {phase}/step {step}")
}
