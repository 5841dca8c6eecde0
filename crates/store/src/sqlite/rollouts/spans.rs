//! Spans, and their sequence numbers.

use std::collections::HashMap;

use rusqlite::{Connection, named_params};

use super::control::{Call, RolloutState, TryState};
use crate::error::Failure;
use crate::rollouts::{NewSpan, SpanOutcome};

/// Adds spans. Returns one outcome for each, and whether the status of a rollout changed.
pub(super) fn add(call: Call<'_>, spans: &[NewSpan]) -> Result<(Vec<SpanOutcome>, bool), Failure> {
    let mut outcomes = Vec::with_capacity(spans.len());
    let mut known: HashMap<(&str, &str), Result<(RolloutState, TryState), SpanOutcome>> = HashMap::new();
    let mut reports: Vec<(&str, &str)> = Vec::new();
    let mut stored = 0;
    for span in spans {
        let name = (span.rollout_id.as_str(), span.try_id.as_str());
        // The number counts as issued even if the span is rejected.
        if let Some(number) = span.number {
            raise_number(call.db, &span.rollout_id, number)?;
        }
        if !known.contains_key(&name) {
            known.insert(name, find(call, span)?);
        }
        let (rollout, of) = match &known[&name] {
            Ok(found) => found,
            Err(outcome) => {
                outcomes.push(outcome.clone());
                continue;
            }
        };
        if exists(call, of, &span.span_id)? {
            outcomes.push(SpanOutcome::Duplicate);
            continue;
        }
        let number = match span.number {
            Some(number) => number,
            None => reserve(call, &span.rollout_id, 1)?,
        };
        insert(call, rollout.seq, of.seq, span, number)?;
        stored += 1;
        if !reports.contains(&name) {
            reports.push(name);
        }
        outcomes.push(SpanOutcome::Stored(number));
    }
    let mut is_changed = false;
    for name in reports {
        // Read again: the spans may report on several tries of one rollout.
        let Some(mut rollout) = RolloutState::find(call, name.0)? else { continue };
        let Some(mut of) = rollout.find_try(call, name.1)? else { continue };
        rollout.report(call, &mut of)?;
        is_changed |= rollout.is_changed;
        rollout.save(call)?;
    }
    if stored > 0 {
        call.db.prepare_cached("UPDATE totals SET spans = spans + ?1")?.execute([stored])?;
    }
    Ok((outcomes, is_changed))
}

fn find(call: Call<'_>, span: &NewSpan) -> Result<Result<(RolloutState, TryState), SpanOutcome>, Failure> {
    let Some(rollout) = RolloutState::find(call, &span.rollout_id)? else {
        return Ok(Err(SpanOutcome::UnknownRollout));
    };
    let of = rollout.find_try(call, &span.try_id)?;
    Ok(of.map(|of| (rollout, of)).ok_or(SpanOutcome::UnknownTry))
}

fn exists(call: Call<'_>, of: &TryState, span_id: &str) -> Result<bool, Failure> {
    let sql = "SELECT EXISTS (SELECT 1 FROM spans WHERE try = ?1 AND span_id = ?2)";
    Ok(call.db.prepare_cached(sql)?.query_row((of.seq, span_id), |row| row.get(0))?)
}

fn insert(call: Call<'_>, rollout: i64, of: i64, span: &NewSpan, number: u64) -> Result<(), Failure> {
    let sql = "INSERT INTO spans (rollout, try, number, trace_id, span_id, parent_id, name, start_time, end_time, body)
               VALUES (:rollout, :try, :number, :trace_id, :span_id, :parent_id, :name, :start_time, :end_time, :body)";
    call.db.prepare_cached(sql)?.execute(named_params! {
        ":rollout": rollout,
        ":try": of,
        ":number": as_column(number),
        ":trace_id": span.trace_id,
        ":span_id": span.span_id,
        ":parent_id": span.parent_id,
        ":name": span.name,
        ":start_time": span.start_time,
        ":end_time": span.end_time,
        ":body": span.body.get(),
    })?;
    Ok(())
}

/// Returns a number as SQLite stores it. Larger numbers than 2⁶³ − 1 do not occur.
fn as_column(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Raises the last number of a rollout to at least `number`.
fn raise_number(db: &Connection, rollout_id: &str, number: u64) -> Result<(), Failure> {
    let sql = "INSERT INTO span_numbers VALUES (?1, ?2)
               ON CONFLICT (rollout) DO UPDATE SET last = max(last, excluded.last) WHERE last < excluded.last";
    db.prepare_cached(sql)?.execute((rollout_id, as_column(number)))?;
    Ok(())
}

/// Reserves `count` consecutive numbers and returns the first.
pub(super) fn reserve(call: Call<'_>, rollout_id: &str, count: u64) -> Result<u64, Failure> {
    let sql = "INSERT INTO span_numbers VALUES (?1, ?2)
               ON CONFLICT (rollout) DO UPDATE SET last = last + excluded.last RETURNING last";
    let last: i64 =
        call.db.prepare_cached(sql)?.query_row((rollout_id, as_column(count)), |row| row.get(0))?;
    Ok(last as u64 + 1 - count)
}
