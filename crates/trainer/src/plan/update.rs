//! Converts the rollouts of an update into weighted sequences.

use std::collections::HashMap;

use levade_recipe::{TrainFilterKeys, Unit};
use levade_rl::{Normalizer, RolloutTokens};
use levade_store::{PerToken, PlannedSequence};

use super::{GroupSequences, RolloutDraft};
use crate::batch::{AttemptSequences, Targets};

/// How an update averages its loss over tokens and rollouts.
#[derive(Clone, Copy)]
pub(super) struct LossAveraging<'a> {
    pub normalizer: Normalizer,
    /// Unit that the loss normalizer counts as one rollout: an attempt or a sample.
    pub unit: Unit,
    pub only: &'a TrainFilterKeys,
}

/// Plans one optimizer step: computes the token weights of the groups' sequences. Sequences without
/// advantage are left out unless they have another source of gradient (`train_all`), but they still
/// count in the denominators. Rollouts that are not trained do not count.
pub(super) fn plan_update(
    groups: &[Vec<RolloutDraft>],
    targets: Targets<'_>,
    LossAveraging { normalizer, unit, only }: LossAveraging<'_>,
    train_all: bool,
) -> Vec<GroupSequences> {
    let mut numbers: HashMap<(usize, &str), u64> = HashMap::new();
    let mut counts = Vec::new();
    for (group, rollouts) in groups.iter().enumerate() {
        for rollout in rollouts {
            for name in rollout.unit_names(unit) {
                let next = numbers.len() as u64;
                let group = *numbers.entry((group, name)).or_insert(next);
                counts.push(RolloutTokens {
                    group,
                    tokens: rollout.count_trained_tokens(only, name),
                });
            }
        }
    }
    let mut weights = normalizer.weights(&counts).into_iter();
    let mut group_sequences = Vec::with_capacity(groups.len());
    for rollouts in groups {
        let mut group = Vec::new();
        for rollout in rollouts {
            let units: Vec<(&str, f32)> = rollout
                .unit_names(unit)
                .into_iter()
                .zip(&mut weights)
                .map(|(name, weight)| (name, weight as f32))
                .collect();
            let factor = |agent: &str| {
                let own = units.iter().find(|(name, _)| name.is_empty() || *name == agent);
                own.map_or(0.0, |(_, weight)| *weight)
            };
            let mut sequences = None;
            for draft in rollout.sequences.iter().filter(|_| rollout.trained) {
                let uninformative =
                    !train_all && draft.advantages.run_values().all(|advantage| advantage == 0.0);
                if uninformative || draft.turn_weights.iter().all(|turn_weight| *turn_weight == 0.0)
                {
                    continue;
                }
                let planned = PlannedSequence {
                    attempt: rollout.id,
                    leaf: draft.sequence.leaf,
                    advantage: draft.advantages.clone(),
                    weight: PerToken::new(draft.scaled_token_weights(factor)),
                    returns: draft.returns.clone(),
                    values: draft
                        .returns
                        .is_some()
                        .then(|| PerToken::new(draft.signals.values.iter().copied())),
                };
                let sequences = sequences
                    .get_or_insert_with(|| AttemptSequences::from_trajectory(rollout.trajectory));
                let input = sequences.build_input(&planned, targets, 0);
                group.push((planned, input));
            }
        }
        group_sequences.push(group);
    }
    group_sequences
}
