//! The write-ahead ledger: what each step trains on, written before it runs.

use dressage_tree::{AttemptId, SegmentId};
use rusqlite::{OptionalExtension, Transaction, params};
use serde::{Deserialize, Serialize};

use crate::record::{ChargedKl, HighEntropy, PolicyPlan, Update};
use crate::schema::Failure;
use crate::{PerToken, PlannedPath, Recorded, StepPlan, Store, StoreError};

/// The part of a plan that is stored as JSON: all but its paths.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    places: Vec<u64>,
    policies: Vec<HeadOfPolicy>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeadOfPolicy {
    policy: String,
    version: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kl: Option<ChargedKl>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    high_entropy: Option<HighEntropy>,
    /// How many micro-batches each of its updates has.
    updates: Vec<usize>,
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
    for path in plan.paths() {
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
    let high_entropy = plan.policies.iter().filter_map(|policy| policy.high_entropy.as_ref());
    for threshold in high_entropy.flat_map(|high| &high.thresholds) {
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
    let paths = |plan: &StepPlan| -> Vec<_> { plan.paths().map(bytes).collect() };
    a == b && paths(a) == paths(b)
}

/// Writes a plan that is not there yet.
pub(crate) fn write(transaction: &Transaction<'_>, plan: &StepPlan) -> Result<(), Failure> {
    let StepPlan { phase, step, places, policies } = plan;
    let of_policy = |plan: &PolicyPlan| HeadOfPolicy {
        policy: plan.policy.clone(),
        version: plan.version,
        kl: plan.kl,
        high_entropy: plan.high_entropy.clone(),
        updates: plan.updates.iter().map(|update| update.micro_batches.len()).collect(),
    };
    let head = Head { places: places.clone(), policies: policies.iter().map(of_policy).collect() };
    let head = serde_json::to_string(&head).map_err(|error| Failure::Unstorable(error.to_string()))?;
    transaction
        .prepare_cached("INSERT INTO steps (phase, step, plan) VALUES (?1, ?2, ?3)")?
        .execute(params![phase, step, head])?;
    let mut insert = transaction.prepare_cached(
        "INSERT INTO planned_paths (phase, step, place, policy, upd, micro_batch, attempt, leaf, advantage, weight, returns,
             vals)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
    )?;
    let mut place = 0u32;
    let updates = policies.iter().enumerate().flat_map(|(policy, plan)| {
        plan.updates.iter().enumerate().map(move |(i, update)| (policy, i, update))
    });
    for (policy, update, of_update) in updates {
        for (micro_batch, paths) in of_update.micro_batches.iter().enumerate() {
            for path in paths {
                insert.execute(params![
                    phase,
                    step,
                    place,
                    policy as i64,
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
    let Head { places, policies } = head;
    let empty = |micro_batches: usize| Update { micro_batches: vec![Vec::new(); micro_batches] };
    let of_policy = |head: HeadOfPolicy| PolicyPlan {
        policy: head.policy,
        version: head.version,
        kl: head.kl,
        high_entropy: head.high_entropy,
        updates: head.updates.into_iter().map(empty).collect(),
    };
    let mut policies: Vec<PolicyPlan> = policies.into_iter().map(of_policy).collect();
    let mut statement = transaction.prepare_cached(
        "SELECT policy, upd, micro_batch, attempt, leaf, advantage, weight, returns, vals FROM planned_paths
         WHERE phase = ?1 AND step = ?2 ORDER BY place",
    )?;
    let mut rows = statement.query([phase, step])?;
    while let Some(row) = rows.next()? {
        let numbers = |bytes: Vec<u8>| {
            PerToken::from_bytes(&bytes)
                .ok_or_else(|| Failure::Damaged("a list of numbers is cut off".into()))
        };
        let optional = |bytes: Option<Vec<u8>>| bytes.map(numbers).transpose();
        let [policy, update, micro_batch]: [u32; 3] = [row.get(0)?, row.get(1)?, row.get(2)?];
        let paths = policies
            .get_mut(policy as usize)
            .and_then(|plan| plan.updates.get_mut(update as usize))
            .and_then(|update| update.micro_batches.get_mut(micro_batch as usize))
            .ok_or_else(|| {
                let place = format!("micro-batch {micro_batch} of update {update} of policy {policy}");
                Failure::Damaged(format!("it has no {place}"))
            })?;
        paths.push(PlannedPath {
            attempt: AttemptId::from_bytes(row.get(3)?),
            leaf: SegmentId(row.get(4)?),
            advantage: numbers(row.get(5)?)?,
            weight: numbers(row.get(6)?)?,
            returns: optional(row.get(7)?)?,
            values: optional(row.get(8)?)?,
        });
    }
    Ok(Some(StepPlan { phase, step, places, policies }))
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

    fn of_policy(policy: &str, paths: &[PlannedPath]) -> PolicyPlan {
        let updates = vec![Update::default(), Update { micro_batches: vec![Vec::new(), paths.to_vec()] }];
        PolicyPlan { policy: policy.into(), version: 9, updates, ..PolicyPlan::default() }
    }

    fn plan(numbers: &[(f32, f32)]) -> StepPlan {
        let paths: Vec<PlannedPath> =
            numbers.iter().enumerate().map(|(i, &(a, w))| path(i as u32, a, w)).collect();
        StepPlan {
            phase: 1,
            step: 2,
            places: vec![7, 9],
            policies: ["a", "b"].map(|policy| of_policy(policy, &paths)).into(),
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
                plan.paths().flat_map(numbers).map(f32::to_bits).collect()
            };
            prop_assert_eq!(&read, &written);
            prop_assert_eq!(bits(&read), bits(&written));
        }
    }
}
