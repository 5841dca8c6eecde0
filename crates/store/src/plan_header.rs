//! The part of a step plan that is stored and sent as JSON: everything except its sequences.

use levade_policy::MicroBatchPlan;
use serde::{Deserialize, Serialize};

use crate::record::{AppliedKlPenalty, HighEntropy, PolicyPlan, Update};
use crate::{PlannedSequence, StepPlan};

/// The part of a step plan that is serialized as JSON: everything except its sequences.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepPlanHeader {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "places")]
    group_positions: Vec<u64>,
    policies: Vec<PolicyPlanHeader>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyPlanHeader {
    policy: String,
    version: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kl: Option<AppliedKlPenalty>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    high_entropy: Option<HighEntropy>,
    updates: Vec<UpdatePlanHeader>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UpdatePlanHeader {
    #[serde(rename = "cut")]
    micro_batch_plan: MicroBatchPlan,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    critic: Option<MicroBatchPlan>,
}

impl From<&StepPlan> for StepPlanHeader {
    fn from(plan: &StepPlan) -> Self {
        StepPlanHeader {
            group_positions: plan.group_positions.clone(),
            policies: plan.policies.iter().map(PolicyPlanHeader::from).collect(),
        }
    }
}

impl From<&PolicyPlan> for PolicyPlanHeader {
    fn from(plan: &PolicyPlan) -> Self {
        PolicyPlanHeader {
            policy: plan.policy.clone(),
            version: plan.version,
            kl: plan.kl,
            high_entropy: plan.high_entropy.clone(),
            updates: plan.updates.iter().map(UpdatePlanHeader::from).collect(),
        }
    }
}

impl From<&Update> for UpdatePlanHeader {
    fn from(update: &Update) -> Self {
        UpdatePlanHeader {
            micro_batch_plan: update.micro_batch_plan.clone(),
            critic: update.critic_plan.clone(),
        }
    }
}

impl StepPlanHeader {
    /// Creates the plan of step `step` of phase `phase` from this header. The updates have no
    /// sequences yet.
    pub fn into_plan(self, phase: u32, step: u32) -> StepPlan {
        let policies = self.policies.into_iter().map(PolicyPlanHeader::into_plan).collect();
        StepPlan { phase, step, group_positions: self.group_positions, policies }
    }
}

impl PolicyPlanHeader {
    fn into_plan(self) -> PolicyPlan {
        PolicyPlan {
            policy: self.policy,
            version: self.version,
            kl: self.kl,
            high_entropy: self.high_entropy,
            updates: self.updates.into_iter().map(UpdatePlanHeader::into_update).collect(),
        }
    }
}

impl UpdatePlanHeader {
    fn into_update(self) -> Update {
        Update {
            sequences: Vec::new(),
            micro_batch_plan: self.micro_batch_plan,
            critic_plan: self.critic,
        }
    }
}

/// Iterates over the sequences of a step plan in order, each with the index of its policy and the
/// index of its update.
pub fn indexed_sequences(plan: &StepPlan) -> impl Iterator<Item = (u32, u32, &PlannedSequence)> {
    plan.policies.iter().enumerate().flat_map(|(policy, plan)| {
        plan.updates.iter().enumerate().flat_map(move |(update, update_plan)| {
            let sequences = update_plan.sequences.iter();
            sequences.map(move |sequence| (policy as u32, update as u32, sequence))
        })
    })
}

/// Appends a sequence to update `update` of policy `policy` in a step plan.
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
