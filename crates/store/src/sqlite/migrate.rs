//! Migrates files of earlier builds to the current schema.
//!
//! # Guarantees
//! - **Atomic.** A migration is one transaction, so a file always has exactly one schema.
//! - **Lossless.** No recorded data is lost. Token ids, log-probabilities, versions, advantages and
//!   weights keep their bits.

use std::path::Path;

use levade_policy::MicroBatchPlan;
use levade_tree::{AttemptId, AttemptSlot, DEFAULT, Outcome, Purpose, RunId, SegmentId};
use rusqlite::{Connection, OpenFlags, Transaction, TransactionBehavior, params};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tracing::info;

use super::ledger;
use super::schema::{SCHEMA_VERSION, TABLES, connect, open_error, read_identity};
use crate::StoreError;
use crate::error::Failure;
use crate::record::{
    AppliedKlPenalty, HighEntropy, PerToken, PlannedSequence, PolicyPlan, StepPlan, Update,
};

/// The earliest schema version that this build reads.
const OLDEST_VERSION: i32 = 3;

/// Returns whether this build can read files with the schema version `version`.
pub(super) fn is_known_version(version: i32) -> bool {
    (OLDEST_VERSION..=SCHEMA_VERSION).contains(&version)
}

/// Copies a database into a temporary directory, and opens the copy. The directory is deleted when
/// the returned [`TempDir`] is dropped.
pub(super) fn copy_to_temp_dir(
    from: &Connection,
    file: &Path,
) -> Result<(Connection, TempDir), StoreError> {
    let unwritable =
        |source| StoreError::Unwritable { location: file.display().to_string(), source };
    let dir = TempDir::with_prefix("levade-record-").map_err(unwritable)?;
    let copy_file = dir.path().join("run.db");
    let copied = from.execute("VACUUM INTO ?1", [copy_file.to_string_lossy()]);
    copied.map_err(|source| open_error(file, source))?;
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    Ok((connect(&copy_file, flags).map_err(|source| open_error(file, source))?, dir))
}

/// Migrates a file to the current schema, in one transaction. A file with the current or an unknown
/// schema version is not changed.
pub(super) fn migrate_file(connection: &mut Connection, file: &Path) -> Result<(), StoreError> {
    let (_, version) = read_identity(connection).map_err(|source| open_error(file, source))?;
    if !is_known_version(version) || version == SCHEMA_VERSION {
        return Ok(());
    }
    info!(file = %file.display(), "migrating the store of an earlier build");
    let mut migrate = || -> Result<(), Failure> {
        // Tables are renamed while other tables refer to them. The references are checked at the
        // end.
        connection.pragma_update(None, "foreign_keys", false)?;
        connection.pragma_update(None, "legacy_alter_table", true)?;
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        // Another process may have migrated the file in the meantime.
        let version = read_identity(&transaction)?.1;
        if version < SCHEMA_VERSION {
            if version == OLDEST_VERSION {
                migrate_from_3(&transaction)?;
            }
            add_checksums(&transaction)?;
            create_missing_tables(&transaction)?;
            let broken: i64 = transaction.query_row(
                "SELECT count(*) FROM pragma_foreign_key_check",
                [],
                |row| row.get(0),
            )?;
            if broken > 0 {
                return Err(Failure::Corrupt(format!(
                    "{broken} rows of the migrated store refer to rows that do not exist"
                )));
            }
            transaction.pragma_update(None, "user_version", SCHEMA_VERSION)?;
        }
        transaction.commit()?;
        connection.pragma_update(None, "legacy_alter_table", false)?;
        Ok(())
    };
    migrate().map_err(|failure| {
        failure.into_error(
            &file.display().to_string(),
            "migrate",
            "the store of an earlier build".into(),
        )
    })
}

/// Adds the checksum columns of schema 5 to the tables that lack them. Existing rows get no
/// checksum.
fn add_checksums(transaction: &Transaction<'_>) -> Result<(), Failure> {
    for table in ["attempts", "segments", "steps", "planned_paths", "evals"] {
        let has_column: bool = transaction.query_row(
            "SELECT count(*) > 0 FROM pragma_table_info(?1) WHERE name = 'crc'",
            [table],
            |row| row.get(0),
        )?;
        if !has_column {
            transaction.execute_batch(&format!("ALTER TABLE {table} ADD COLUMN crc INTEGER"))?;
        }
    }
    Ok(())
}

/// Creates the tables of the current schema that do not exist. Their checksum columns permit NULL,
/// because rows from old tables have no checksum.
fn create_missing_tables(transaction: &Transaction<'_>) -> rusqlite::Result<()> {
    let tables = ["TABLE", "INDEX"].iter().fold(TABLES.to_owned(), |text, kind| {
        text.replace(&format!("CREATE {kind} "), &format!("CREATE {kind} IF NOT EXISTS "))
    });
    transaction.execute_batch(&tables.replace("crc INTEGER NOT NULL", "crc INTEGER"))
}

/// Tables whose columns differ between schema 3 and schema 4.
const CHANGED_TABLES: [&str; 3] = ["attempts", "segments", "steps"];

/// Migrates a file from schema 3. In schema 3, attempts had no ids and no tries, segments and plans
/// had no policy, and the numbers of a plan were JSON.
fn migrate_from_3(transaction: &Transaction<'_>) -> Result<(), Failure> {
    for table in CHANGED_TABLES {
        transaction.execute_batch(&format!("ALTER TABLE {table} RENAME TO old_{table}"))?;
    }
    create_missing_tables(transaction)?;
    let run = derive_run_id(transaction)?;
    transaction.execute("INSERT INTO run (id) VALUES (?1)", [&run.0])?;
    migrate_attempts(transaction, &run)?;
    transaction.execute(
        "INSERT INTO segments (attempt, id, parent, after, kind, agent, policy, turn, \
         temperature, filtered, prompt, tokens,
             logprobs, versions)
         SELECT attempt, id, parent, NULL, kind, coalesce(nullif(agent, ''), ?1), ?1, turn, \
         temperature, filtered, prompt, tokens, logprobs, versions
         FROM old_segments",
        [DEFAULT],
    )?;
    migrate_plans(transaction, &run)?;
    for table in CHANGED_TABLES.iter().rev() {
        transaction.execute_batch(&format!("DROP TABLE old_{table}"))?;
    }
    Ok(())
}

/// Derives the id of a run from a hash of its tasks and outcomes, which no other run shares. Runs
/// of schema 3 have no stored id.
fn derive_run_id(transaction: &Transaction<'_>) -> Result<RunId, Failure> {
    let mut hash = Sha256::new();
    let mut statement =
        transaction.prepare("SELECT task, outcome FROM old_attempts ORDER BY id")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        for column in 0..2 {
            hash.update(row.get::<_, String>(column)?);
            hash.update([0xFF]);
        }
    }
    let digits: String = hash.finalize().iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    Ok(RunId(format!("run-{digits}")))
}

fn migrate_attempts(transaction: &Transaction<'_>, run: &RunId) -> Result<(), Failure> {
    let mut insert = transaction.prepare(
        "INSERT INTO attempts (id, name, purpose, phase, step, grp, sample, number, task, \
         outcome, score, reward, earned,
             status, sampled_tokens, tokens)
         SELECT id, ?2, purpose, phase, step, grp, sample, 0, task, ?3, score, reward, earned, \
         status, sampled_tokens, tokens
         FROM old_attempts WHERE id = ?1",
    )?;
    let mut statement = transaction
        .prepare("SELECT id, purpose, phase, step, grp, sample, outcome FROM old_attempts")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let purpose: String = row.get(1)?;
        let slot = AttemptSlot {
            purpose: Purpose::parse(&purpose).ok_or_else(|| {
                Failure::Corrupt(format!("an attempt has the unknown purpose `{purpose}`"))
            })?,
            phase: row.get(2)?,
            step: row.get(3)?,
            group: row.get(4)?,
            sample: row.get(5)?,
        };
        let outcome: String = row.get(6)?;
        let damaged =
            |why| Failure::Corrupt(format!("the outcome of {slot} cannot be read: {why}"));
        let outcome: Value = serde_json::from_str(&outcome).map_err(damaged)?;
        // The outcome of a demonstration contained only the final answer.
        let outcome = match (slot.purpose, outcome.get("final_text").and_then(Value::as_str)) {
            (Purpose::Demonstration, Some(answer)) => Outcome::demonstrated(answer),
            _ => serde_json::from_value(outcome).map_err(damaged)?,
        };
        let outcome = serde_json::to_string(&outcome).map_err(damaged)?;
        let name = AttemptId::new(run, &slot, 0);
        insert.execute(params![row.get::<_, i64>(0)?, name.bytes(), outcome])?;
    }
    Ok(())
}

/// A step plan in the JSON format of schema 3, with one policy.
#[derive(Deserialize)]
struct PlanV3 {
    phase: u32,
    step: u32,
    #[serde(default)]
    #[serde(rename = "places")]
    group_positions: Vec<u64>,
    #[serde(default)]
    kl: Option<AppliedKlPenalty>,
    #[serde(default)]
    high_entropy: Option<HighEntropy>,
    updates: Vec<UpdateV3>,
}

#[derive(Deserialize)]
struct UpdateV3 {
    micro_batches: Vec<Vec<SequenceV3>>,
}

#[derive(Deserialize)]
struct SequenceV3 {
    attempt: AttemptSlot,
    leaf: SegmentId,
    advantage: Vec<(f32, u32)>,
    weight: Vec<(f32, u32)>,
    #[serde(default)]
    returns: Option<Vec<(f32, u32)>>,
    #[serde(default)]
    values: Option<Vec<(f32, u32)>>,
}

impl SequenceV3 {
    fn migrate(self, run: &RunId) -> PlannedSequence {
        PlannedSequence {
            attempt: AttemptId::new(run, &self.attempt, 0),
            leaf: self.leaf,
            advantage: PerToken::from_runs(self.advantage),
            weight: PerToken::from_runs(self.weight),
            returns: self.returns.map(PerToken::from_runs),
            values: self.values.map(PerToken::from_runs),
        }
    }
}

impl UpdateV3 {
    /// Converts an update of schema 3. In that schema, one device trained the policy, and the
    /// critic used the same micro-batches.
    fn migrate(self, run: &RunId) -> Update {
        let sizes = self.micro_batches.iter().map(Vec::len);
        let micro_batch_plan = MicroBatchPlan::from_sizes(sizes);
        let sequences: Vec<PlannedSequence> =
            self.micro_batches.into_iter().flatten().map(|s| s.migrate(run)).collect();
        let has_critic = sequences.iter().any(|sequence| sequence.returns.is_some());
        let critic_plan = has_critic.then(|| micro_batch_plan.clone());
        Update { sequences, micro_batch_plan, critic_plan }
    }
}

fn migrate_plans(transaction: &Transaction<'_>, run: &RunId) -> Result<(), Failure> {
    let mut statement = transaction.prepare("SELECT plan FROM old_steps ORDER BY phase, step")?;
    let mut rows = statement.query([])?;
    // Each step produced the next version of the weights.
    for version in 0.. {
        let Some(row) = rows.next()? else { break };
        let text: String = row.get(0)?;
        let plan: PlanV3 = serde_json::from_str(&text)
            .map_err(|error| Failure::Corrupt(format!("a plan cannot be read: {error}")))?;
        let PlanV3 { phase, step, group_positions, kl, high_entropy, updates } = plan;
        let updates = updates.into_iter().map(|update| update.migrate(run)).collect();
        let policy = PolicyPlan { policy: DEFAULT.into(), version, kl, high_entropy, updates };
        ledger::insert_plan(
            transaction,
            &StepPlan { phase, step, group_positions, policies: vec![policy] },
        )?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "migrate_tests.rs"]
mod tests;
