//! Traces weights back to the attempts that made them, and attempts forward to the weights that
//! they trained.
//!
//! A step plan names the attempts that a step trains on and the version of each policy before the
//! step. So the plans of a run are the complete ancestry of its weights: version v + 1 of a policy
//! comes from version v and from the attempts of one plan.

use std::collections::{BTreeMap, BTreeSet};

use levade_store::Store;
use levade_tree::AttemptId;
use serde::Serialize;

use crate::TrainerError;

/// A training step of one policy, with the attempts that it trained on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TrainedStep {
    /// Index of the phase, from 0.
    pub phase: u32,
    /// Index of the step within the phase, from 0.
    pub step: u32,
    /// Number of finished steps of the run after this step, over all phases: the number in the name
    /// of a checkpoint.
    pub global_step: u32,
    /// Name of the policy that the step trained.
    pub policy: String,
    /// Weight version of the policy after this step.
    pub version: u64,
    /// Attempts that the step trained on, in the order of their first sequence.
    pub attempts: Vec<AttemptId>,
}

/// Returns all training steps that the store contains, one entry per trained policy, in the order
/// of the run.
///
/// # Errors
/// Returns an error if the store cannot be read.
pub async fn trained_steps(store: &dyn Store) -> Result<Vec<TrainedStep>, TrainerError> {
    let mut found = Vec::new();
    for ((phase, step), global_step) in store.planned_steps().await?.into_iter().zip(1..) {
        let no_step = TrainerError::NoStep { phase, step };
        let plan = store.step_plan(phase, step).await?.ok_or(no_step)?;
        for policy in &plan.policies {
            let mut seen = BTreeSet::new();
            let attempts = policy.sequences().map(|sequence| sequence.attempt);
            found.push(TrainedStep {
                phase,
                step,
                global_step,
                policy: policy.policy.clone(),
                version: policy.version + 1,
                attempts: attempts.filter(|attempt| seen.insert(*attempt)).collect(),
            });
        }
    }
    Ok(found)
}

/// The weight versions of one policy that were trained, directly or indirectly, on given attempts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PolicyDescendants {
    /// Name of the policy.
    pub policy: String,
    /// Steps that trained the policy on at least one of the attempts.
    pub steps: Vec<TrainedStep>,
    /// First weight version that was trained on one of the attempts. All later versions descend
    /// from this version.
    pub first: u64,
    /// Last weight version of the policy in the run.
    pub last: u64,
}

/// Returns the weight versions that descend from `attempts`, one entry for each policy. The steps
/// of an entry list only attempts among `attempts`.
///
/// A policy descends from an attempt if a step trained the policy on the attempt. It does not
/// descend from an attempt that served only as context while another policy was trained.
pub fn find_descendants(
    trained: &[TrainedStep],
    attempts: &BTreeSet<AttemptId>,
) -> Vec<PolicyDescendants> {
    let mut found: BTreeMap<&str, PolicyDescendants> = BTreeMap::new();
    for step in trained {
        let direct: Vec<AttemptId> =
            step.attempts.iter().filter(|id| attempts.contains(id)).copied().collect();
        if direct.is_empty() && !found.contains_key(step.policy.as_str()) {
            continue;
        }
        let entry = found.entry(&step.policy).or_insert_with(|| PolicyDescendants {
            policy: step.policy.clone(),
            steps: Vec::new(),
            first: step.version,
            last: step.version,
        });
        entry.last = step.version;
        if !direct.is_empty() {
            entry.steps.push(TrainedStep { attempts: direct, ..step.clone() });
        }
    }
    found.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(policy: &str, version: u64, attempts: &[u8]) -> TrainedStep {
        let attempts = attempts.iter().map(|id| AttemptId::from_bytes([*id; 16])).collect();
        let step = version as u32 - 1;
        let policy = policy.to_owned();
        TrainedStep { phase: 0, step, global_step: step + 1, policy, version, attempts }
    }

    #[test]
    fn descendants_include_later_versions_of_trained_policies_only() {
        let trained = [
            step("a", 1, &[1]),
            step("b", 1, &[1]),
            step("a", 2, &[2, 3]),
            step("b", 2, &[4]),
            step("a", 3, &[4]),
            step("a", 4, &[2]),
        ];
        let targets = BTreeSet::from([AttemptId::from_bytes([2; 16])]);
        let expected = PolicyDescendants {
            policy: "a".into(),
            steps: vec![step("a", 2, &[2]), step("a", 4, &[2])],
            first: 2,
            last: 4,
        };
        assert_eq!(find_descendants(&trained, &targets), [expected]);
        assert_eq!(find_descendants(&trained, &BTreeSet::new()), []);
    }
}
