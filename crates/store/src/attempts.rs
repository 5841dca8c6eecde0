//! Attempts and their segments.

use std::str::FromStr;

use dressage_tree::{AttemptId, Kind, Placement, Purpose, RunId, Segment, SegmentId, Trajectory, VersionRun};
use rusqlite::{OptionalExtension, Row, Transaction, named_params, params};
use sha2::{Digest, Sha256};

use crate::schema::Failure;
use crate::{Attempt, AttemptSummary, Recorded, Status, Store, StoreError};

impl Store {
    /// Records an attempt with all its segments.
    ///
    /// # Errors
    /// When another attempt is recorded under the name, the name is not that of its place, a number is not finite, or
    /// writing fails.
    pub fn record_attempt(&self, attempt: &Attempt) -> Result<Recorded, StoreError> {
        self.writing(&attempt.placement, |transaction| record(transaction, self.run(), attempt))
    }

    /// Records many attempts in one transaction: all or none.
    ///
    /// # Errors
    /// As for one.
    pub fn record_attempts(&self, attempts: &[Attempt]) -> Result<(), StoreError> {
        self.writing(&format_args!("{} attempts", attempts.len()), |transaction| {
            for attempt in attempts {
                record(transaction, self.run(), attempt)?;
            }
            Ok(())
        })
    }

    /// The attempt of this name.
    ///
    /// # Errors
    /// When reading fails or what is stored is damaged.
    pub fn attempt(&self, id: &AttemptId) -> Result<Option<Attempt>, StoreError> {
        self.reading(&format_args!("attempt {id}"), |transaction| read(transaction, id))
    }

    /// How many tries were recorded at a place in the run.
    ///
    /// # Errors
    /// When reading fails.
    pub fn tries(&self, placement: &Placement) -> Result<u32, StoreError> {
        self.reading(placement, |transaction| {
            let Placement { purpose, phase, step, group, sample } = placement;
            let count = "SELECT coalesce(max(number) + 1, 0) FROM attempts
                 WHERE purpose = ?1 AND phase = ?2 AND step = ?3 AND grp = ?4 AND sample = ?5";
            let key = params![purpose.name(), phase, step, group, sample];
            Ok(transaction.prepare_cached(count)?.query_row(key, |row| row.get(0))?)
        })
    }

    /// The try that counts at a place in the run: the last that no other one superseded.
    ///
    /// # Errors
    /// When reading fails or what is stored is damaged.
    pub fn last_try(&self, placement: &Placement) -> Result<Option<Attempt>, StoreError> {
        self.reading(placement, |transaction| {
            let Placement { purpose, phase, step, group, sample } = placement;
            let name = transaction
                .prepare_cached(
                    "SELECT name FROM attempts WHERE purpose = ?1 AND phase = ?2 AND step = ?3 AND grp = ?4 AND sample = ?5
                         AND status <> 'superseded' ORDER BY number DESC LIMIT 1",
                )?
                .query_row(params![purpose.name(), phase, step, group, sample], |row| row.get(0))
                .optional()?;
            name.map(|name| read(transaction, &AttemptId::from_bytes(name)))
                .transpose()
                .map(Option::flatten)
        })
    }

    /// The tasks of all attempts made for `purpose`, each once.
    ///
    /// # Errors
    /// When reading fails or what is stored is damaged.
    pub fn tasks(&self, purpose: Purpose) -> Result<Vec<serde_json::Value>, StoreError> {
        self.reading(&format_args!("tasks for {}", purpose.name()), |transaction| {
            let mut statement =
                transaction.prepare_cached("SELECT DISTINCT task FROM attempts WHERE purpose = ?1")?;
            let mut rows = statement.query([purpose.name()])?;
            let mut tasks = Vec::new();
            while let Some(row) = rows.next()? {
                let text: String = row.get(0)?;
                let task = serde_json::from_str(&text);
                tasks.push(task.map_err(|e| Failure::Damaged(format!("a task is not JSON: {e}")))?);
            }
            Ok(tasks)
        })
    }

    /// Names, numbers and sizes of the tries that count made for `purpose`, by phase, step, group and sample.
    ///
    /// # Errors
    /// When reading fails or what is stored is damaged.
    pub fn summaries(&self, purpose: Purpose) -> Result<Vec<AttemptSummary>, StoreError> {
        self.reading(&format_args!("attempts for {}", purpose.name()), |transaction| {
            let mut statement = transaction.prepare_cached(
                "SELECT phase, step, grp, sample, score, reward, status, sampled_tokens, tokens, name, max(number)
                 FROM attempts WHERE purpose = ?1 AND status <> 'superseded' GROUP BY phase, step, grp, sample ORDER BY phase, step, grp, sample",
            )?;
            let mut rows = statement.query([purpose.name()])?;
            let mut summaries = Vec::new();
            while let Some(row) = rows.next()? {
                summaries.push(AttemptSummary {
                    id: AttemptId::from_bytes(row.get(9)?),
                    placement: Placement {
                        purpose,
                        phase: row.get(0)?,
                        step: row.get(1)?,
                        group: row.get(2)?,
                        sample: row.get(3)?,
                    },
                    number: row.get(10)?,
                    score: row.get(4)?,
                    reward: row.get(5)?,
                    status: status(row, 6)?,
                    sampled_tokens: row.get::<_, i64>(7)? as u64,
                    tokens: row.get::<_, i64>(8)? as u64,
                });
            }
            Ok(summaries)
        })
    }
}

fn record(transaction: &Transaction<'_>, run: &RunId, attempt: &Attempt) -> Result<Recorded, Failure> {
    let Attempt { id, placement, number, .. } = attempt;
    if *id != AttemptId::new(run, placement, *number) {
        return Err(Failure::Unstorable(format!("{id} is not the name of its try {number} in run {run}")));
    }
    let numbers = [("score", attempt.score), ("reward", attempt.reward)];
    let earned = attempt.earned.iter().map(|earned| ("part of a reward", Some(earned.reward)));
    for (name, value) in numbers.into_iter().chain(earned) {
        if let Some(value) = value
            && !value.is_finite()
        {
            return Err(Failure::Unstorable(format!("its {name} is {value}; it must be finite")));
        }
    }
    if let Some(stored) = read(transaction, id)? {
        if stored.status == Status::Unscored && attempt.status != Status::Unscored {
            return score(transaction, stored, attempt);
        }
        return match difference(&stored, attempt) {
            None => Ok(Recorded::Before),
            Some(field) => Err(Failure::Conflict(placement.to_string(), field)),
        };
    }
    let Placement { purpose, phase, step, group, sample } = placement;
    let segments = attempt.trajectory.segments();
    let outcome = serde_json::to_string(&attempt.outcome).map_err(|e| Failure::Unstorable(e.to_string()))?;
    transaction
        .prepare_cached(
            "INSERT INTO attempts (name, purpose, phase, step, grp, sample, number, task, outcome, score, reward, earned,
                 status, sampled_tokens, tokens)
             VALUES (:name, :purpose, :phase, :step, :group, :sample, :number, :task, :outcome, :score, :reward, :earned,
                 :status, :sampled_tokens, :tokens)",
        )?
        .execute(named_params! {
            ":name": id.bytes(),
            ":purpose": purpose.name(),
            ":phase": phase,
            ":step": step,
            ":group": group,
            ":sample": sample,
            ":number": number,
            ":task": attempt.task.to_string(),
            ":outcome": outcome,
            ":score": attempt.score,
            ":reward": attempt.reward,
            ":earned": serde_json::json!(attempt.earned).to_string(),
            ":status": attempt.status.name(),
            ":sampled_tokens": attempt.trajectory.sampled_tokens() as i64,
            ":tokens": segments.iter().map(|s| s.tokens.len()).sum::<usize>() as i64,
        })?;
    let id = transaction.last_insert_rowid();
    let mut statement = transaction.prepare_cached(
        "INSERT INTO segments (attempt, id, parent, after, kind, agent, policy, turn, temperature, filtered, prompt,
             tokens, logprobs, versions)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)",
    )?;
    for segment in segments {
        if !segment.temperature.is_finite() {
            let what = format!("segment {} has temperature {}", segment.id.0, segment.temperature);
            return Err(Failure::Unstorable(what));
        }
        let versions: Vec<u8> = segment
            .versions
            .iter()
            .flat_map(|run| run.version.to_le_bytes().into_iter().chain(run.len.to_le_bytes()))
            .collect();
        let tokens: Vec<u8> = segment.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        // All attempts at a task begin alike.
        let (prompt, tokens) = match (segment.kind, segment.parent) {
            (Kind::Given, None) => (Some(record_prompt(transaction, &tokens)?), None),
            _ => (None, Some(tokens)),
        };
        statement.execute(params![
            id,
            segment.id.0,
            segment.parent.map(|parent| parent.0),
            segment.after,
            kind_name(segment.kind),
            segment.agent,
            segment.policy,
            segment.turn,
            f64::from(segment.temperature),
            segment.filtered,
            prompt,
            tokens,
            segment.logprobs.iter().flat_map(|logprob| logprob.to_le_bytes()).collect::<Vec<u8>>(),
            versions,
        ])?;
    }
    Ok(Recorded::Now)
}

/// Ends an attempt that waited for its score.
fn score(transaction: &Transaction<'_>, stored: Attempt, attempt: &Attempt) -> Result<Recorded, Failure> {
    let Attempt { outcome, score, reward, earned, status, .. } = attempt.clone();
    let ended = Attempt { outcome, score, reward, earned, status, ..stored };
    if let Some(field) = difference(&ended, attempt) {
        return Err(Failure::Conflict(attempt.placement.to_string(), field));
    }
    let outcome = serde_json::to_string(&ended.outcome).map_err(|e| Failure::Unstorable(e.to_string()))?;
    let end =
        "UPDATE attempts SET outcome = ?2, score = ?3, reward = ?4, earned = ?5, status = ?6 WHERE name = ?1";
    let earned = serde_json::json!(ended.earned).to_string();
    transaction.prepare_cached(end)?.execute(params![
        attempt.id.bytes(),
        outcome,
        ended.score,
        ended.reward,
        earned,
        status.name()
    ])?;
    Ok(Recorded::Now)
}

/// The row of a prompt, which is written once however many attempts begin with it.
fn record_prompt(transaction: &Transaction<'_>, tokens: &[u8]) -> Result<i64, Failure> {
    let digest = Sha256::digest(tokens);
    let find = "SELECT id FROM prompts WHERE digest = ?1";
    let found = transaction.prepare_cached(find)?.query_row([&digest[..]], |row| row.get(0)).optional()?;
    match found {
        Some(id) => Ok(id),
        None => {
            let insert = "INSERT INTO prompts (digest, tokens) VALUES (?1, ?2)";
            Ok(transaction.prepare_cached(insert)?.insert(params![&digest[..], tokens])?)
        }
    }
}

fn read(transaction: &Transaction<'_>, name: &AttemptId) -> Result<Option<Attempt>, Failure> {
    let found = transaction
        .prepare_cached(
            "SELECT id, task, outcome, score, reward, status, earned, purpose, phase, step, grp, sample, number
             FROM attempts WHERE name = ?1",
        )?
        .query_row([name.bytes()], |row| {
            let purpose: String = row.get(7)?;
            let place = (row.get(8)?, row.get(9)?, row.get(10)?, row.get(11)?, row.get(12)?);
            let texts: [String; 4] = [row.get(1)?, row.get(2)?, row.get(5)?, row.get(6)?];
            Ok((row.get::<_, i64>(0)?, texts, (row.get(3)?, row.get(4)?), purpose, place))
        })
        .optional()?;
    let Some((id, [task, outcome, status, earned], (score, reward), purpose, place)) = found else {
        return Ok(None);
    };
    let damaged = |what: &str, why: String| Failure::Damaged(format!("its {what} {why}"));
    let (phase, step, group, sample, number) = place;
    let purpose = Purpose::parse(&purpose).ok_or_else(|| damaged("purpose", format!("is `{purpose}`")))?;
    Ok(Some(Attempt {
        id: *name,
        placement: Placement { purpose, phase, step, group, sample },
        number,
        task: serde_json::Value::from_str(&task).map_err(|e| damaged("task", format!("is not JSON: {e}")))?,
        outcome: serde_json::from_str(&outcome)
            .map_err(|e| damaged("outcome", format!("cannot be read: {e}")))?,
        score,
        reward,
        earned: serde_json::from_str(&earned).map_err(|e| {
            Failure::Damaged(format!("the parts of its reward are not what they should be: {e}"))
        })?,
        status: Status::parse(&status).ok_or_else(|| damaged("status", format!("is `{status}`")))?,
        trajectory: trajectory(transaction, id)?,
    }))
}

fn trajectory(transaction: &Transaction<'_>, attempt: i64) -> Result<Trajectory, Failure> {
    let mut statement = transaction.prepare_cached(
        "SELECT s.id, parent, kind, agent, turn, temperature, filtered, coalesce(s.tokens, p.tokens), logprobs, versions,
             after, policy
         FROM segments s LEFT JOIN prompts p ON p.id = s.prompt WHERE attempt = ?1 ORDER BY s.id",
    )?;
    let mut rows = statement.query([attempt])?;
    let mut trajectory = Trajectory::new();
    while let Some(row) = rows.next()? {
        let id: u32 = row.get(0)?;
        let kind: String = row.get(2)?;
        let tokens: Option<Vec<u8>> = row.get(7)?;
        let logprobs: Vec<u8> = row.get(8)?;
        let versions: Vec<u8> = row.get(9)?;
        let damaged = |what: &str| Failure::Damaged(format!("segment {id}: {what}"));
        let tokens = tokens.ok_or_else(|| damaged("its prompt is missing"))?;
        if !tokens.len().is_multiple_of(4)
            || !logprobs.len().is_multiple_of(4)
            || !versions.len().is_multiple_of(12)
        {
            return Err(damaged("a list of numbers is cut off"));
        }
        let segment = Segment {
            id: SegmentId(id),
            parent: row.get::<_, Option<u32>>(1)?.map(SegmentId),
            kind: parse_kind(&kind).ok_or_else(|| damaged(&format!("its kind is `{kind}`")))?,
            tokens: words(&tokens).map(u32::from_le_bytes).collect(),
            logprobs: words(&logprobs).map(f32::from_le_bytes).collect(),
            temperature: row.get::<_, f64>(5)? as f32,
            filtered: row.get(6)?,
            versions: versions
                .chunks_exact(12)
                .map(|run| VersionRun { version: long(&run[..8]), len: long(&run[8..]) as u32 })
                .collect(),
            after: row.get(10)?,
            agent: row.get(3)?,
            policy: row.get(11)?,
            turn: row.get(4)?,
        };
        let place = trajectory.push(segment).map_err(|e| damaged(&e.to_string()))?;
        if place.0 != id {
            return Err(damaged(&format!("segment {} is missing", place.0)));
        }
    }
    Ok(trajectory)
}

/// The first field in which two attempts differ. Log-probabilities are compared by their bits, so that a NaN equals itself.
fn difference(a: &Attempt, b: &Attempt) -> Option<&'static str> {
    if a.task != b.task {
        return Some("task");
    }
    if a.outcome != b.outcome || a.status != b.status {
        return Some("outcome");
    }
    if a.score != b.score {
        return Some("score");
    }
    if a.reward != b.reward || a.earned != b.earned {
        return Some("reward");
    }
    let (a, b) = (a.trajectory.segments(), b.trajectory.segments());
    let same = a.len() == b.len()
        && a.iter().zip(b).all(|(x, y)| {
            x.parent == y.parent
                && x.after == y.after
                && x.kind == y.kind
                && x.tokens == y.tokens
                && x.logprobs.iter().map(|v| v.to_bits()).eq(y.logprobs.iter().map(|v| v.to_bits()))
                && x.temperature == y.temperature
                && x.filtered == y.filtered
                && x.versions == y.versions
                && x.agent == y.agent
                && x.policy == y.policy
                && x.turn == y.turn
        });
    (!same).then_some("trajectory")
}

fn status(row: &Row<'_>, column: usize) -> Result<Status, Failure> {
    let name: String = row.get(column)?;
    Status::parse(&name).ok_or_else(|| Failure::Damaged(format!("a status is `{name}`")))
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> + '_ {
    bytes.as_chunks::<4>().0.iter().copied()
}

/// A little-endian integer of up to 8 bytes.
fn long(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Given => "given",
        Kind::Sampled => "sampled",
        Kind::Demonstrated => "demonstrated",
    }
}

fn parse_kind(name: &str) -> Option<Kind> {
    [Kind::Given, Kind::Sampled, Kind::Demonstrated].into_iter().find(|&kind| kind_name(kind) == name)
}

#[cfg(test)]
#[path = "attempts_tests.rs"]
mod tests;
