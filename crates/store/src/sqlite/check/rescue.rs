//! Writes whole values to a new file.

use std::path::{Path, PathBuf};

use levade_tree::RunId;
use rusqlite::Connection;

use super::super::{attempts, evals, ledger, opening, segments, withdrawals};
use crate::error::Failure;
use crate::{Attempt, EvalKey, StepPlan, StoreError, Withdrawal};

/// Number of values that are committed in one transaction.
const BATCH: u32 = 256;

/// A new file that receives the intact values of a damaged file.
pub(super) struct RescueFile {
    path: PathBuf,
    connection: Connection,
    /// Number of values in the open transaction that are not committed yet.
    pending: u32,
}

impl RescueFile {
    /// Creates an empty store of the run `run` at `path`.
    pub fn create(path: &Path, run: &RunId) -> Result<Self, StoreError> {
        let (connection, _) = opening::open_for_writing(path, run)?;
        Ok(RescueFile { path: path.to_owned(), connection, pending: 0 })
    }

    /// Adds an attempt with its segments, whatever its status.
    pub fn add_attempt(&mut self, attempt: &Attempt) -> Result<(), StoreError> {
        self.write_value(attempts::attempt_key(&attempt.id), |to| {
            let row = attempts::insert_attempt(to, attempt)?;
            segments::insert_segments(to, row, attempt.trajectory.segments())
        })
    }

    /// Adds a step plan with its sequences.
    pub fn add_plan(&mut self, plan: &StepPlan) -> Result<(), StoreError> {
        self.write_value(ledger::plan_key(plan.phase, plan.step), |to| {
            ledger::insert_plan(to, plan)
        })
    }

    /// Adds the result of an evaluation, given as JSON text.
    pub fn add_eval(&mut self, key: EvalKey, text: &str) -> Result<(), StoreError> {
        self.write_value(key.to_string(), |to| evals::record_eval(to, key, text).map(drop))
    }

    /// Adds the tombstone of an attempt. The attempt must have been added before.
    pub fn add_withdrawal(&mut self, tombstone: &Withdrawal) -> Result<(), StoreError> {
        self.write_value(attempts::attempt_key(&tombstone.id), |to| {
            let query = "SELECT id FROM attempts WHERE name = ?1";
            let row = to.query_row(query, [tombstone.id.bytes()], |row| row.get(0))?;
            withdrawals::insert_tombstone(to, row, tombstone)
        })
    }

    /// Commits all pending values and returns the path of the file.
    pub fn finish(mut self) -> Result<PathBuf, StoreError> {
        self.commit().map_err(|failure| self.to_store_error(failure, "the last values".into()))?;
        Ok(self.path)
    }

    fn write_value(
        &mut self,
        key: String,
        work: impl FnOnce(&Connection) -> Result<(), Failure>,
    ) -> Result<(), StoreError> {
        self.try_write_value(work).map_err(|failure| self.to_store_error(failure, key))
    }

    fn try_write_value(
        &mut self,
        work: impl FnOnce(&Connection) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if self.pending == 0 {
            self.connection.execute_batch("BEGIN IMMEDIATE")?;
        }
        self.pending += 1;
        work(&self.connection)?;
        if self.pending >= BATCH { self.commit() } else { Ok(()) }
    }

    fn commit(&mut self) -> Result<(), Failure> {
        if self.pending > 0 {
            self.connection.execute_batch("COMMIT")?;
            self.pending = 0;
        }
        Ok(())
    }

    fn to_store_error(&self, failure: Failure, key: String) -> StoreError {
        failure.into_error(&self.path.display().to_string(), "rescue", key)
    }
}
