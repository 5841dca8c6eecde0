//! The write-ahead ledger: what each step trains on, written before it runs.

use rusqlite::{OptionalExtension, params};

use crate::schema::Failure;
use crate::{PerToken, Recorded, StepPlan, Store, StoreError};

impl Store {
    /// Records what a step will train on. To be called before it runs.
    ///
    /// # Errors
    /// When another plan is recorded for the step, a number in it is not finite, or writing fails.
    pub fn record_step(&self, plan: &StepPlan) -> Result<Recorded, StoreError> {
        let key = name(plan.phase, plan.step);
        self.writing(&key, |transaction| {
            let finite = |value: f32, what: &str| {
                if value.is_finite() {
                    Ok(())
                } else {
                    Err(Failure::Unstorable(format!("{what} {value}; it must be finite")))
                }
            };
            for path in plan.updates.iter().flat_map(|update| update.micro_batches.iter().flatten()) {
                let numbers = [
                    ("advantage", Some(&path.advantage)),
                    ("weight", Some(&path.weight)),
                    ("return", path.returns.as_ref()),
                    ("value", path.values.as_ref()),
                ];
                for (what, numbers) in numbers {
                    for number in numbers.into_iter().flat_map(PerToken::distinct) {
                        finite(number, &format!("{} has {what}", path.attempt))?;
                    }
                }
            }
            for threshold in plan.high_entropy.iter().flat_map(|high| &high.thresholds) {
                finite(*threshold as f32, "there is a threshold of entropy of")?;
            }
            let text = serde_json::to_string(plan).map_err(|e| Failure::Unstorable(e.to_string()))?;
            let stored: Option<String> = transaction
                .prepare_cached("SELECT plan FROM steps WHERE phase = ?1 AND step = ?2")?
                .query_row([plan.phase, plan.step], |row| row.get(0))
                .optional()?;
            match stored {
                Some(stored) if stored == text => Ok(Recorded::Before),
                Some(_) => Err(Failure::Conflict(key.clone(), "plan")),
                None => {
                    transaction
                        .prepare_cached("INSERT INTO steps (phase, step, plan) VALUES (?1, ?2, ?3)")?
                        .execute(params![plan.phase, plan.step, text])?;
                    Ok(Recorded::Now)
                }
            }
        })
    }

    /// What a step trains on, if that has been decided.
    ///
    /// # Errors
    /// When reading fails or what is stored is damaged.
    pub fn step(&self, phase: u32, step: u32) -> Result<Option<StepPlan>, StoreError> {
        self.reading(&name(phase, step), |transaction| {
            let text: Option<String> = transaction
                .prepare_cached("SELECT plan FROM steps WHERE phase = ?1 AND step = ?2")?
                .query_row([phase, step], |row| row.get(0))
                .optional()?;
            text.map(|text| serde_json::from_str(&text).map_err(|e| Failure::Damaged(e.to_string())))
                .transpose()
        })
    }

    /// (phase, step) of all planned steps, in order.
    ///
    /// # Errors
    /// When reading fails.
    pub fn planned_steps(&self) -> Result<Vec<(u32, u32)>, StoreError> {
        self.reading(&"the ledger", |transaction| {
            let mut statement =
                transaction.prepare_cached("SELECT phase, step FROM steps ORDER BY phase, step")?;
            let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }
}

fn name(phase: u32, step: u32) -> String {
    format!("plan of phase {phase}/step {step}")
}

#[cfg(test)]
mod tests {
    use dressage_tree::SegmentId;
    use proptest::prelude::*;

    use super::*;
    use crate::{AttemptKey, PlannedPath, Purpose, Update};

    fn path(group: u32, advantage: f32, weight: f32) -> PlannedPath {
        let attempt = AttemptKey { purpose: Purpose::Train, phase: 1, step: 2, group, sample: 0 };
        let [advantage, weight] = [PerToken::same(advantage), PerToken::new([weight, weight, 0.5])];
        PlannedPath { attempt, leaf: SegmentId(4), advantage, weight, returns: None, values: None }
    }

    fn plan(numbers: &[(f32, f32)]) -> StepPlan {
        let paths = numbers.iter().enumerate().map(|(i, &(a, w))| path(i as u32, a, w)).collect();
        StepPlan {
            phase: 1,
            step: 2,
            places: vec![7, 9],
            kl: None,
            high_entropy: None,
            updates: vec![Update { micro_batches: vec![paths] }],
        }
    }

    #[test]
    fn a_plan_is_written_once() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().join("run.db")).unwrap();
        assert_eq!(store.step(1, 2).unwrap(), None);
        let first = plan(&[(0.5, 0.25)]);
        assert_eq!(store.record_step(&first).unwrap(), Recorded::Now);
        assert_eq!(store.record_step(&first).unwrap(), Recorded::Before);
        let error = store.record_step(&plan(&[(0.5, 0.5)])).unwrap_err().to_string();
        assert!(error.contains("plan of phase 1/step 2 is already recorded"), "{error}");
        assert!(matches!(store.record_step(&plan(&[(f32::NAN, 1.0)])), Err(StoreError::Unstorable { .. })));
        assert_eq!(store.planned_steps().unwrap(), [(1, 2)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Advantages and weights come back to the bit.
        #[test]
        fn round_trip(numbers in prop::collection::vec(
            (prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL | prop::num::f32::ZERO, prop::num::f32::NORMAL), 0..20,
        )) {
            let folder = tempfile::tempdir().unwrap();
            let store = Store::open(&folder.path().join("run.db")).unwrap();
            let written = plan(&numbers);
            store.record_step(&written).unwrap();
            let read = store.step(1, 2).unwrap().unwrap();
            let bits = |plan: &StepPlan| -> Vec<u32> {
                let numbers = |p: &PlannedPath| -> Vec<f32> { p.advantage.distinct().chain(p.weight.iter().take(3)).collect() };
                plan.updates[0].micro_batches[0].iter().flat_map(numbers).map(f32::to_bits).collect()
            };
            prop_assert_eq!(bits(&read), bits(&written));
        }
    }
}
