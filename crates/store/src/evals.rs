//! Results of evaluations.

use rusqlite::{OptionalExtension, params};

use crate::schema::Failure;
use crate::{EvalKey, Recorded, Store, StoreError};

impl Store {
    /// Records the result of an evaluation.
    ///
    /// # Errors
    /// When another result is recorded under the key, or writing fails.
    pub fn record_eval(&self, key: EvalKey, result: &serde_json::Value) -> Result<Recorded, StoreError> {
        self.writing(&key, |transaction| {
            let text = result.to_string();
            let stored: Option<String> = transaction
                .prepare_cached("SELECT result FROM evals WHERE phase = ?1 AND step = ?2")?
                .query_row([key.phase, key.step], |row| row.get(0))
                .optional()?;
            match stored {
                Some(stored) if stored == text => Ok(Recorded::Before),
                Some(_) => Err(Failure::Conflict(key.to_string(), "result")),
                None => {
                    transaction
                        .prepare_cached("INSERT INTO evals (phase, step, result) VALUES (?1, ?2, ?3)")?
                        .execute(params![key.phase, key.step, text])?;
                    Ok(Recorded::Now)
                }
            }
        })
    }

    /// All results, by phase and step.
    ///
    /// # Errors
    /// When reading fails or what is stored is damaged.
    pub fn evals(&self) -> Result<Vec<(EvalKey, serde_json::Value)>, StoreError> {
        self.reading(&"evaluations", |transaction| {
            let mut statement =
                transaction.prepare_cached("SELECT phase, step, result FROM evals ORDER BY phase, step")?;
            let mut rows = statement.query([])?;
            let mut results = Vec::new();
            while let Some(row) = rows.next()? {
                let key = EvalKey { phase: row.get(0)?, step: row.get(1)? };
                let text: String = row.get(2)?;
                let result = serde_json::from_str(&text)
                    .map_err(|e| Failure::Damaged(format!("the result of {key} is not JSON: {e}")))?;
                results.push((key, result));
            }
            Ok(results)
        })
    }
}

#[cfg(test)]
mod tests {
    use dressage_tree::RunId;
    use serde_json::json;

    use super::*;

    #[test]
    fn results_are_kept_in_order_and_never_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().join("run.db"), &RunId("test".into())).unwrap();
        let (before, after) = (EvalKey { phase: 0, step: 0 }, EvalKey { phase: 1, step: 40 });
        store.record_eval(after, &json!({"mean": 0.925})).unwrap();
        store.record_eval(before, &json!({"mean": 0.1})).unwrap();
        assert_eq!(store.record_eval(before, &json!({"mean": 0.1})).unwrap(), Recorded::Before);
        let error = store.record_eval(before, &json!({"mean": 0.2})).unwrap_err().to_string();
        assert!(error.contains("evaluation phase 0/step 0"), "{error}");
        assert_eq!(store.evals().unwrap(), [(before, json!({"mean": 0.1})), (after, json!({"mean": 0.925}))]);
    }
}
