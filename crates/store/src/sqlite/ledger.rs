//! The write-ahead ledger: stores the plan of each training step before the step runs.

use levade_policy::MicroBatchPlan;
use levade_tree::{AttemptId, SegmentId};
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize};

use crate::checks;
use crate::error::Failure;
use crate::record::{AppliedKlPenalty, HighEntropy, PolicyPlan, Update};
use crate::{PerToken, PlannedSequence, StepPlan, WriteOutcome};

/// The part of a step plan that is stored as JSON: everything except its sequences.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StepHeader {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "places")]
    group_positions: Vec<u64>,
    policies: Vec<PolicyHeader>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyHeader {
    policy: String,
    version: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kl: Option<AppliedKlPenalty>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    high_entropy: Option<HighEntropy>,
    updates: Vec<UpdateHeader>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UpdateHeader {
    #[serde(rename = "cut")]
    micro_batch_plan: MicroBatchPlan,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    critic: Option<MicroBatchPlan>,
}

/// Records a plan unless an equal one is recorded. A different recorded plan is a conflict.
pub(super) fn record(to: &Connection, plan: &StepPlan) -> Result<WriteOutcome, Failure> {
    checks::check_plan(plan)?;
    match read(to, plan.phase, plan.step)? {
        Some(stored) if checks::same_plan(&stored, plan) => Ok(WriteOutcome::AlreadyRecorded),
        Some(_) => Err(Failure::Conflict(key(plan.phase, plan.step), "plan")),
        None => write(to, plan).map(|()| WriteOutcome::Written),
    }
}

/// Returns (phase, step) of all plans, in ascending order.
pub(super) fn planned_steps(from: &Connection) -> Result<Vec<(u32, u32)>, Failure> {
    let mut statement =
        from.prepare_cached("SELECT phase, step FROM steps ORDER BY phase, step")?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Inserts a plan that is not recorded yet.
pub(super) fn write(transaction: &Connection, plan: &StepPlan) -> Result<(), Failure> {
    let StepPlan { phase, step, group_positions, policies } = plan;
    let update_plan = |Update { micro_batch_plan, critic_plan: critic, .. }: &Update| {
        UpdateHeader { micro_batch_plan: micro_batch_plan.clone(), critic: critic.clone() }
    };
    let policy_header = |plan: &PolicyPlan| PolicyHeader {
        policy: plan.policy.clone(),
        version: plan.version,
        kl: plan.kl,
        high_entropy: plan.high_entropy.clone(),
        updates: plan.updates.iter().map(update_plan).collect(),
    };
    let head = StepHeader {
        group_positions: group_positions.clone(),
        policies: policies.iter().map(policy_header).collect(),
    };
    let head =
        serde_json::to_string(&head).map_err(|error| Failure::Unstorable(error.to_string()))?;
    transaction
        .prepare_cached("INSERT INTO steps (phase, step, plan) VALUES (?1, ?2, ?3)")?
        .execute(params![phase, step, head])?;
    let mut insert = transaction.prepare_cached(
        "INSERT INTO planned_paths (phase, step, place, policy, upd, attempt, leaf, advantage, \
         weight, returns, vals)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
    )?;
    let mut index = 0u32;
    let updates = policies.iter().enumerate().flat_map(|(policy, plan)| {
        plan.updates.iter().enumerate().map(move |(i, update)| (policy, i, update))
    });
    for (policy, update, update_plan) in updates {
        for sequence in &update_plan.sequences {
            insert.execute(params![
                phase,
                step,
                index,
                policy as i64,
                update as i64,
                sequence.attempt.bytes(),
                sequence.leaf.0,
                sequence.advantage.to_bytes(),
                sequence.weight.to_bytes(),
                sequence.returns.as_ref().map(PerToken::to_bytes),
                sequence.values.as_ref().map(PerToken::to_bytes),
            ])?;
            index += 1;
        }
    }
    Ok(())
}

/// Returns the plan of a step, or `None` if none is recorded.
pub(super) fn read(
    transaction: &Connection,
    phase: u32,
    step: u32,
) -> Result<Option<StepPlan>, Failure> {
    let text: Option<String> = transaction
        .prepare_cached("SELECT plan FROM steps WHERE phase = ?1 AND step = ?2")?
        .query_row([phase, step], |row| row.get(0))
        .optional()?;
    let Some(text) = text else { return Ok(None) };
    let head: StepHeader =
        serde_json::from_str(&text).map_err(|error| Failure::Corrupt(error.to_string()))?;
    let StepHeader { group_positions, policies } = head;
    let empty = |UpdateHeader { micro_batch_plan, critic }| Update {
        sequences: Vec::new(),
        micro_batch_plan,
        critic_plan: critic,
    };
    let policy_plan = |head: PolicyHeader| PolicyPlan {
        policy: head.policy,
        version: head.version,
        kl: head.kl,
        high_entropy: head.high_entropy,
        updates: head.updates.into_iter().map(empty).collect(),
    };
    let mut policies: Vec<PolicyPlan> = policies.into_iter().map(policy_plan).collect();
    let mut statement = transaction.prepare_cached(
        "SELECT policy, upd, attempt, leaf, advantage, weight, returns, vals FROM planned_paths
         WHERE phase = ?1 AND step = ?2 ORDER BY place",
    )?;
    let mut rows = statement.query([phase, step])?;
    while let Some(row) = rows.next()? {
        let numbers = |bytes: Vec<u8>| {
            PerToken::from_bytes(&bytes)
                .ok_or_else(|| Failure::Corrupt("a list of numbers is truncated".into()))
        };
        let optional = |bytes: Option<Vec<u8>>| bytes.map(numbers).transpose();
        let [policy, update]: [u32; 2] = [row.get(0)?, row.get(1)?];
        let update_plan = policies
            .get_mut(policy as usize)
            .and_then(|plan| plan.updates.get_mut(update as usize))
            .ok_or_else(|| {
                Failure::Corrupt(format!("the plan has no update {update} of policy {policy}"))
            })?;
        update_plan.sequences.push(PlannedSequence {
            attempt: AttemptId::from_bytes(row.get(2)?),
            leaf: SegmentId(row.get(3)?),
            advantage: numbers(row.get(4)?)?,
            weight: numbers(row.get(5)?)?,
            returns: optional(row.get(6)?)?,
            values: optional(row.get(7)?)?,
        });
    }
    Ok(Some(StepPlan { phase, step, group_positions, policies }))
}

/// Returns the name of a plan for errors.
pub(super) fn key(phase: u32, step: u32) -> String {
    format!("plan of phase {phase}/step {step}")
}
