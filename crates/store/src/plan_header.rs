//! The part of a step plan that is stored and sent as JSON: everything except its sequences.

use levade_policy::MicroBatchPlan;
use serde::{Deserialize, Serialize};

use crate::record::{AppliedKlPenalty, HighEntropy, PolicyPlan, Update};
use crate::{PlannedSequence, StepPlan};

/// A step plan without its sequences.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepHeader {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "places")]
    group_positions: Vec<u64>,
    policies: Vec<PolicyHeader>,
}

#[derive(Debug, Serialize, Deserialize)]
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

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UpdateHeader {
    #[serde(rename = "cut")]
    micro_batch_plan: MicroBatchPlan,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    critic: Option<MicroBatchPlan>,
}

impl From<&StepPlan> for StepHeader {
    fn from(plan: &StepPlan) -> Self {
        let update_plan = |update: &Update| UpdateHeader {
            micro_batch_plan: update.micro_batch_plan.clone(),
            critic: update.critic_plan.clone(),
        };
        let policy_header = |plan: &PolicyPlan| PolicyHeader {
            policy: plan.policy.clone(),
            version: plan.version,
            kl: plan.kl,
            high_entropy: plan.high_entropy.clone(),
            updates: plan.updates.iter().map(update_plan).collect(),
        };
        StepHeader {
            group_positions: plan.group_positions.clone(),
            policies: plan.policies.iter().map(policy_header).collect(),
        }
    }
}

impl StepHeader {
    /// Returns the plan of a step, without sequences.
    pub fn into_plan(self, phase: u32, step: u32) -> StepPlan {
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
        let policies = self.policies.into_iter().map(policy_plan).collect();
        StepPlan { phase, step, group_positions: self.group_positions, policies }
    }
}

/// Iterates over the sequences of a plan in order, each after the indices of its policy and update.
pub fn indexed_sequences(plan: &StepPlan) -> impl Iterator<Item = (u32, u32, &PlannedSequence)> {
    plan.policies.iter().enumerate().flat_map(|(policy, plan)| {
        plan.updates.iter().enumerate().flat_map(move |(update, update_plan)| {
            let indexed = move |sequence| (policy as u32, update as u32, sequence);
            update_plan.sequences.iter().map(indexed)
        })
    })
}

/// Adds a sequence to an update of a plan.
///
/// # Errors
/// Returns a message if the plan has no such update.
pub fn push_sequence(
    plan: &mut StepPlan,
    (policy, update): (u32, u32),
    sequence: PlannedSequence,
) -> Result<(), String> {
    let updates = plan.policies.get_mut(policy as usize).map(|plan| &mut plan.updates);
    updates
        .and_then(|updates| updates.get_mut(update as usize))
        .ok_or_else(|| format!("the plan has no update {update} of policy {policy}"))?
        .sequences
        .push(sequence);
    Ok(())
}
