//! The write-ahead ledger: what each step trains on, written before it runs.

use dressage_tree::{AttemptId, SegmentId};
use rusqlite::{OptionalExtension, Transaction, params};
use serde::{Deserialize, Serialize};

use crate::record::{ChargedKl, HighEntropy, Update};
use crate::schema::Failure;
use crate::{PerToken, PlannedPath, Recorded, StepPlan, Store, StoreError};

/// The part of a plan that is stored as JSON: all but its paths.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    places: Vec<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kl: Option<ChargedKl>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    high_entropy: Option<HighEntropy>,
    updates: Vec<HeadOfUpdate>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeadOfUpdate {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    policy: String,
    micro_batches: usize,
}

impl Store {
    /// Records what a step will train on. To be called before it runs.
    ///
    /// # Errors
    /// When another plan is recorded for the step, a number in it is not finite, or writing fails.
    pub fn record_step(&self, plan: &StepPlan) -> Result<Recorded, StoreError> {
        let key = name(plan.phase, plan.step);
        self.writing(&key, |transaction| {
            check(plan)?;
            match read(transaction, plan.phase, plan.step)? {
                Some(stored) if is_same(&stored, plan) => Ok(Recorded::Before),
                Some(_) => Err(Failure::Conflict(key.clone(), "plan")),
                None => write(transaction, plan).map(|()| Recorded::Now),
            }
        })
    }

    /// What a step trains on, if that has been decided.
    ///
    /// # Errors
    /// When reading fails or what is stored is damaged.
    pub fn step(&self, phase: u32, step: u32) -> Result<Option<StepPlan>, StoreError> {
        self.reading(&name(phase, step), |transaction| read(transaction, phase, step))
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

/// Finds numbers that cannot be stored.
fn check(plan: &StepPlan) -> Result<(), Failure> {
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
                finite(number, &format!("attempt {} has {what}", path.attempt))?;
            }
        }
    }
    for threshold in plan.high_entropy.iter().flat_map(|high| &high.thresholds) {
        finite(*threshold as f32, "there is a threshold of entropy of")?;
    }
    Ok(())
}

/// Whether two plans are the same to the bit.
fn is_same(a: &StepPlan, b: &StepPlan) -> bool {
    let bytes = |path: &PlannedPath| {
        let optional = |numbers: &Option<PerToken>| numbers.as_ref().map(PerToken::to_bytes);
        let critic = (optional(&path.returns), optional(&path.values));
        (path.advantage.to_bytes(), path.weight.to_bytes(), critic)
    };
    let paths = |plan: &StepPlan| -> Vec<_> {
        let paths = plan.updates.iter().flat_map(|update| update.micro_batches.iter().flatten());
        paths.map(bytes).collect()
    };
    a == b && paths(a) == paths(b)
}

/// Writes a plan that is not there yet.
pub(crate) fn write(transaction: &Transaction<'_>, plan: &StepPlan) -> Result<(), Failure> {
    let StepPlan { phase, step, places, kl, high_entropy, updates } = plan;
    let head = Head {
        places: places.clone(),
        kl: *kl,
        high_entropy: high_entropy.clone(),
        updates: updates
            .iter()
            .map(|update| HeadOfUpdate {
                policy: update.policy.clone(),
                micro_batches: update.micro_batches.len(),
            })
            .collect(),
    };
    let head = serde_json::to_string(&head).map_err(|error| Failure::Unstorable(error.to_string()))?;
    transaction
        .prepare_cached("INSERT INTO steps (phase, step, plan) VALUES (?1, ?2, ?3)")?
        .execute(params![phase, step, head])?;
    let mut insert = transaction.prepare_cached(
        "INSERT INTO planned_paths (phase, step, place, upd, micro_batch, attempt, leaf, advantage, weight, returns, vals)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
    )?;
    let mut place = 0u32;
    for (update, of_update) in updates.iter().enumerate() {
        for (micro_batch, paths) in of_update.micro_batches.iter().enumerate() {
            for path in paths {
                insert.execute(params![
                    phase,
                    step,
                    place,
                    update as i64,
                    micro_batch as i64,
                    path.attempt.bytes(),
                    path.leaf.0,
                    path.advantage.to_bytes(),
                    path.weight.to_bytes(),
                    path.returns.as_ref().map(PerToken::to_bytes),
                    path.values.as_ref().map(PerToken::to_bytes),
                ])?;
                place += 1;
            }
        }
    }
    Ok(())
}

fn read(transaction: &Transaction<'_>, phase: u32, step: u32) -> Result<Option<StepPlan>, Failure> {
    let text: Option<String> = transaction
        .prepare_cached("SELECT plan FROM steps WHERE phase = ?1 AND step = ?2")?
        .query_row([phase, step], |row| row.get(0))
        .optional()?;
    let Some(text) = text else { return Ok(None) };
    let head: Head = serde_json::from_str(&text).map_err(|error| Failure::Damaged(error.to_string()))?;
    let Head { places, kl, high_entropy, updates } = head;
    let empty = |head: HeadOfUpdate| Update {
        policy: head.policy,
        micro_batches: vec![Vec::new(); head.micro_batches],
    };
    let mut updates: Vec<Update> = updates.into_iter().map(empty).collect();
    let mut statement = transaction.prepare_cached(
        "SELECT upd, micro_batch, attempt, leaf, advantage, weight, returns, vals FROM planned_paths
         WHERE phase = ?1 AND step = ?2 ORDER BY place",
    )?;
    let mut rows = statement.query([phase, step])?;
    while let Some(row) = rows.next()? {
        let numbers = |bytes: Vec<u8>| {
            PerToken::from_bytes(&bytes)
                .ok_or_else(|| Failure::Damaged("a list of numbers is cut off".into()))
        };
        let optional = |bytes: Option<Vec<u8>>| bytes.map(numbers).transpose();
        let (update, micro_batch): (u32, u32) = (row.get(0)?, row.get(1)?);
        let paths = updates
            .get_mut(update as usize)
            .and_then(|update| update.micro_batches.get_mut(micro_batch as usize))
            .ok_or_else(|| {
                Failure::Damaged(format!("it has no micro-batch {micro_batch} of update {update}"))
            })?;
        paths.push(PlannedPath {
            attempt: AttemptId::from_bytes(row.get(2)?),
            leaf: SegmentId(row.get(3)?),
            advantage: numbers(row.get(4)?)?,
            weight: numbers(row.get(5)?)?,
            returns: optional(row.get(6)?)?,
            values: optional(row.get(7)?)?,
        });
    }
    Ok(Some(StepPlan { phase, step, places, kl, high_entropy, updates }))
}

fn name(phase: u32, step: u32) -> String {
    format!("plan of phase {phase}/step {step}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use dressage_tree::{Placement, Purpose, RunId};

    fn run() -> RunId {
        RunId("test".into())
    }

    fn path(group: u32, advantage: f32, weight: f32) -> PlannedPath {
        let placement = Placement { purpose: Purpose::Train, phase: 1, step: 2, group, sample: 0 };
        let attempt = AttemptId::new(&run(), &placement, 0);
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
            updates: vec![Update { policy: "b".into(), micro_batches: vec![Vec::new(), paths] }],
        }
    }

    #[test]
    fn a_plan_is_written_once() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(&folder.path().join("run.db"), &run()).unwrap();
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
            let store = Store::open(&folder.path().join("run.db"), &run()).unwrap();
            let written = plan(&numbers);
            store.record_step(&written).unwrap();
            let read = store.step(1, 2).unwrap().unwrap();
            let bits = |plan: &StepPlan| -> Vec<u32> {
                let numbers = |p: &PlannedPath| -> Vec<f32> { p.advantage.distinct().chain(p.weight.iter().take(3)).collect() };
                plan.updates[0].micro_batches[1].iter().flat_map(numbers).map(f32::to_bits).collect()
            };
            prop_assert_eq!(bits(&read), bits(&written));
        }
    }
}
