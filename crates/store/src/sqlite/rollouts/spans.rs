//! Spans, and their sequence numbers.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use rusqlite::{CachedStatement, OptionalExtension, params};

use super::control::{CallContext, StoredRollout, StoredTry, save_try};
use crate::error::Failure;
use crate::rollouts::{NewSpan, SpanOutcome};

/// Maximum sequence number of a span. A larger number is replaced by this one.
const MAX_NUMBER: u64 = i64::MAX as u64;

/// Stores spans. Returns one outcome for each span, and whether the status of a rollout changed.
pub(super) fn add_spans(
    call: CallContext<'_>,
    spans: &[NewSpan],
) -> Result<(Vec<SpanOutcome>, bool), Failure> {
    let mut outcomes = Vec::with_capacity(spans.len());
    let mut known: HashMap<(&str, &str), Found> = HashMap::new();
    let mut reports: Vec<(&str, &str)> = Vec::new();
    let mut stored = 0;
    let mut numbers = SpanNumbers::default();
    let mut statement = prepare_insert(call)?;
    for span in spans {
        let name = (span.rollout_id.as_str(), span.try_id.as_str());
        let last = numbers.last_number(call, &span.rollout_id)?;
        // The number counts as issued even if the span is rejected.
        let number = span.number.unwrap_or(last.saturating_add(1)).min(MAX_NUMBER);
        if span.number.is_some() {
            *last = number.max(*last);
        }
        let found = match known.entry(name) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(find_try(call, span)?),
        };
        let (rollout, of) = match found {
            Ok(found) => found,
            Err(outcome) => {
                outcomes.push(outcome.clone());
                continue;
            }
        };
        if !insert_span(&mut statement, (rollout.seq, of.seq()), span, number)? {
            outcomes.push(SpanOutcome::Duplicate);
            continue;
        }
        *last = number.max(*last);
        stored += 1;
        if !reports.contains(&name) {
            reports.push(name);
        }
        outcomes.push(SpanOutcome::Stored(number));
    }
    numbers.save(call)?;
    let mut is_changed = false;
    let mut saved: HashSet<&str> = HashSet::new();
    for name in reports {
        let Some(Ok((mut rollout, mut of))) = known.remove(&name) else { continue };
        if !saved.insert(name.0) {
            // The report of another try has changed the rollout since it was read.
            let Some(read) = StoredRollout::find(call, name.0)? else { continue };
            let Some(read_try) = read.find_try(call, name.1)? else { continue };
            (rollout, of) = (read, read_try);
        }
        match of {
            StoredTry::Latest(_) => {
                rollout.state.report(call.now);
                rollout.save_latest(call)?;
                is_changed |= rollout.state.is_changed;
            }
            StoredTry::Earlier(seq, mut of) => {
                of.report(call.now);
                save_try(call, seq, &of)?;
            }
        }
    }
    if stored > 0 {
        call.db.prepare_cached("UPDATE totals SET spans = spans + ?1")?.execute([stored])?;
    }
    Ok((outcomes, is_changed))
}

/// A try with its rollout, or the outcome of a span whose rollout or try is unknown.
type Found = Result<(StoredRollout, StoredTry), SpanOutcome>;

fn find_try(call: CallContext<'_>, span: &NewSpan) -> Result<Found, Failure> {
    let Some(rollout) = StoredRollout::find(call, &span.rollout_id)? else {
        return Ok(Err(SpanOutcome::UnknownRollout));
    };
    let of = rollout.find_try(call, &span.try_id)?;
    Ok(of.map(|of| (rollout, of)).ok_or(SpanOutcome::UnknownTry))
}

/// Prepares the SQL statement of [`insert_span`]. It is prepared once for a batch, because a
/// look-up in the statement cache takes a noticeable part of an insertion.
fn prepare_insert(call: CallContext<'_>) -> Result<CachedStatement<'_>, Failure> {
    let sql = "INSERT INTO spans (rollout, try, number, trace_id, span_id, parent_id, name, start_time, end_time, body)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10) ON CONFLICT (try, span_id) DO NOTHING";
    Ok(call.db.prepare_cached(sql)?)
}

/// Inserts a span. Returns `false` if the try already has a span with the same id.
fn insert_span(
    statement: &mut CachedStatement<'_>,
    (rollout, of): (i64, i64),
    span: &NewSpan,
    number: u64,
) -> Result<bool, Failure> {
    let inserted = statement.execute(params![
        rollout,
        of,
        to_column(number),
        span.trace_id,
        span.span_id,
        span.parent_id,
        span.name,
        span.start_time,
        span.end_time,
        span.body.get(),
    ])?;
    Ok(inserted > 0)
}

/// Converts a sequence number to the integer type of SQLite.
fn to_column(number: u64) -> i64 {
    number.min(MAX_NUMBER) as i64
}

/// The last sequence numbers of spans by rollout. A batch of spans reads each number once and
/// writes it once.
#[derive(Default)]
struct SpanNumbers<'a>(HashMap<&'a str, (u64, u64)>);

impl<'a> SpanNumbers<'a> {
    /// Returns the last sequence number that is stored or reserved for a rollout.
    fn last_number(
        &mut self,
        call: CallContext<'_>,
        rollout_id: &'a str,
    ) -> Result<&mut u64, Failure> {
        if !self.0.contains_key(rollout_id) {
            let sql = "SELECT last FROM span_numbers WHERE rollout = ?1";
            let mut last = call.db.prepare_cached(sql)?;
            let last = last.query_row([rollout_id], |row| row.get::<_, i64>(0)).optional()?;
            let last = last.unwrap_or(0) as u64;
            self.0.insert(rollout_id, (last, last));
        }
        Ok(&mut self.0.entry(rollout_id).or_default().1)
    }

    /// Writes the sequence numbers that have changed.
    fn save(self, call: CallContext<'_>) -> Result<(), Failure> {
        let sql = "INSERT INTO span_numbers VALUES (?1, ?2) ON CONFLICT (rollout) DO UPDATE SET last = excluded.last";
        for (rollout_id, (_, last)) in
            self.0.into_iter().filter(|(_, (before, last))| last > before)
        {
            call.db.prepare_cached(sql)?.execute((rollout_id, to_column(last)))?;
        }
        Ok(())
    }
}

/// Reserves `count` consecutive sequence numbers of a rollout, and returns the first number.
pub(super) fn reserve_numbers(
    call: CallContext<'_>,
    rollout_id: &str,
    count: u64,
) -> Result<u64, Failure> {
    let sql = "INSERT INTO span_numbers VALUES (?1, ?2)
               ON CONFLICT (rollout) DO UPDATE SET last = last + excluded.last RETURNING last";
    let last: i64 =
        call.db.prepare_cached(sql)?.query_row((rollout_id, to_column(count)), |row| row.get(0))?;
    Ok(last as u64 + 1 - count)
}
