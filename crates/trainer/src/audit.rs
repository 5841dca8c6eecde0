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

/// A step that trained a policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TrainedStep {
    /// Index of the phase, from 0.
    pub phase: u32,
    /// Index of the step within the phase, from 0.
    pub step: u32,
    /// Number of finished steps of the run after this step: the number in the name of a checkpoint.
    pub global_step: u32,
    /// Name of the policy.
    pub policy: String,
    /// Version of the policy after this step.
    pub version: u64,
    /// Attempts that the step trained on, in the order of their first sequence.
    pub attempts: Vec<AttemptId>,
}

/// Returns every step that trained a policy, in the order of the run.
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

/// The weights of a policy that descend from an attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Descendant {
    /// Name of the policy.
    pub policy: String,
    /// Steps that trained the policy on at least one of the attempts.
    pub steps: Vec<TrainedStep>,
    /// First version that descends from the attempts. All later versions descend from it.
    pub first: u64,
    /// Last version of the run.
    pub last: u64,
}

/// Returns the weights that descend from `attempts`, one entry for each policy. The steps of an
/// entry list only attempts of `attempts`.
///
/// A policy descends from the attempts if a step trained the policy on one of them. If the samples
/// of a policy were only context in the training of another policy, the other policy does not
/// descend from them.
pub fn descendants(trained: &[TrainedStep], attempts: &BTreeSet<AttemptId>) -> Vec<Descendant> {
    let mut found: BTreeMap<&str, Descendant> = BTreeMap::new();
    for step in trained {
        let direct: Vec<AttemptId> =
            step.attempts.iter().filter(|id| attempts.contains(id)).copied().collect();
        if direct.is_empty() && !found.contains_key(step.policy.as_str()) {
            continue;
        }
        let entry = found.entry(&step.policy).or_insert_with(|| Descendant {
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
        let expected = Descendant {
            policy: "a".into(),
            steps: vec![step("a", 2, &[2]), step("a", 4, &[2])],
            first: 2,
            last: 4,
        };
        assert_eq!(descendants(&trained, &targets), [expected]);
        assert_eq!(descendants(&trained, &BTreeSet::new()), []);
    }
}
