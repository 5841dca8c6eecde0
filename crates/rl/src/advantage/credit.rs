//! Credit assignment within a rollout: returns, temporal differences, turns.

use super::group::{STD_EPSILON, all_equal, mean_and_deviation};
use super::{Rollout, Sequence, SequenceAdvantages};
use crate::RlError;

/// Computes generalized advantage estimates over action tokens (Schulman et al. 2016, equation 16).
/// `after` is the value of the state after the last token: 0 if the sequence ended, or the critic's
/// value if the sequence was truncated (Pardo et al. 2018). In the result, `returns` = advantage +
/// value. `rewards` and `values` must have equal lengths.
pub fn gae(
    rewards: &[f64],
    values: &[f64],
    after: f64,
    gamma: f64,
    lambda: f64,
) -> SequenceAdvantages {
    let mut advantages = vec![0.0; rewards.len()];
    let mut next_value = after;
    let mut later = 0.0;
    for t in (0..rewards.len()).rev() {
        let difference = rewards[t] + gamma * next_value - values[t];
        later = difference + gamma * lambda * later;
        advantages[t] = later;
        next_value = values[t];
    }
    let returns = advantages.iter().zip(values).map(|(a, v)| a + v).collect();
    SequenceAdvantages { advantages, returns }
}

/// Computes the discounted return of each token: Σ γᵏ r over the rewards from the token on.
pub fn returns(rewards: &[f64], gamma: f64) -> Vec<f64> {
    let mut returns = vec![0.0; rewards.len()];
    let mut later = 0.0;
    for t in (0..rewards.len()).rev() {
        later = rewards[t] + gamma * later;
        returns[t] = later;
    }
    returns
}

/// Computes advantages that equal the returns of the tokens. With `one_turn`, a token's return
/// includes no rewards of later turns.
pub fn token_returns(sequence: &Sequence, gamma: f64, one_turn: bool) -> SequenceAdvantages {
    let found = if one_turn {
        sequence.turn_ranges().flat_map(|turn| returns(&sequence.rewards[turn], gamma)).collect()
    } else {
        returns(&sequence.rewards, gamma)
    };
    SequenceAdvantages { advantages: found.clone(), returns: found }
}

/// Computes advantages that equal the returns minus the score of another policy (ReMax).
pub fn returns_minus_rival(rollout: &Rollout) -> Result<Vec<SequenceAdvantages>, RlError> {
    let rival = rollout.rival.ok_or(RlError::NoRival { group: rollout.group })?;
    let returns = rollout.sequences.iter().map(|sequence| returns(&sequence.rewards, 1.0));
    Ok(returns
        .map(|returns| SequenceAdvantages {
            advantages: returns.iter().map(|r| r - rival).collect(),
            returns,
        })
        .collect())
}

/// Computes the discounted return of each turn of a sequence: the sum of rewards from the turn on.
fn turn_returns(sequence: &Sequence, gamma: f64) -> Vec<f64> {
    let rewards: Vec<f64> =
        sequence.turn_ranges().map(|turn| sequence.rewards[turn].iter().sum()).collect();
    returns(&rewards, gamma)
}

/// Computes the advantage of each turn: the return from that turn on, compared with the returns of
/// the group's rollouts that reached the same turn. All tokens of a turn have its advantage.
/// Normalizing rewards turn by turn instead would compare turns with different pasts.
///
/// After the last turn that another rollout reached, a rollout has no baseline of its own. The
/// events before a turn can be part of its baseline, so the rollout keeps the advantage of the last
/// turn that another rollout reached. A rollout without turns has its score as the return from the
/// first turn on.
pub fn turn_advantages(
    rollouts: &[Rollout],
    gamma: f64,
    scale_by_std: bool,
) -> Vec<Vec<SequenceAdvantages>> {
    // For each rollout and sequence, the return from each turn on.
    let all: Vec<Vec<Vec<f64>>> = rollouts
        .iter()
        .map(|r| r.sequences.iter().map(|s| turn_returns(s, gamma)).collect())
        .collect();
    let mut found = super::broadcast_advantages(rollouts, &vec![0.0; rollouts.len()]);
    for group_indices in super::group_rollouts(rollouts) {
        let end =
            |(sequence, returns): (&Sequence, &Vec<f64>)| sequence.turns_before + returns.len();
        let num_turns = group_indices
            .iter()
            .flat_map(|i| rollouts[*i].sequences.iter().zip(&all[*i]).map(end))
            .max();
        // For each rollout of the group, its advantage at the last turn with a comparison.
        let mut latest = vec![0.0; group_indices.len()];
        for turn in 0..num_turns.unwrap_or(0) {
            // Turns are counted from the start of the sequence, even if the first turns belong to
            // another sequence of the rollout.
            let at = |sequence: &Sequence, returns: &[f64]| {
                turn.checked_sub(sequence.turns_before)
                    .and_then(|own| Some((own, *returns.get(own)?)))
            };
            // A rollout with several sequences is one sample: the mean of its returns.
            let here = |i: &usize| -> Option<f64> {
                if turn == 0 && rollouts[*i].sequences.is_empty() {
                    return Some(rollouts[*i].score);
                }
                let sequences = rollouts[*i].sequences.iter().zip(&all[*i]);
                let returns: Vec<f64> = sequences
                    .filter_map(|(sequence, returns)| at(sequence, returns).map(|(_, own)| own))
                    .collect();
                (!returns.is_empty()).then(|| returns.iter().sum::<f64>() / returns.len() as f64)
            };
            let returns: Vec<Option<f64>> = group_indices.iter().map(here).collect();
            let present_returns: Vec<f64> = returns.iter().flatten().copied().collect();
            let (mean, scale) = if all_equal(&present_returns) {
                (present_returns.first().copied().unwrap_or(0.0), 0.0)
            } else {
                let (mean, deviation) = mean_and_deviation(&present_returns);
                (mean, if scale_by_std { 1.0 / (deviation + STD_EPSILON) } else { 1.0 })
            };
            for ((&i, own), latest) in group_indices.iter().zip(returns).zip(&mut latest) {
                let Some(own) = own else { continue };
                let compared = present_returns.len() > 1;
                if compared {
                    *latest = (own - mean) * scale;
                }
                for ((sequence, returns), found) in
                    rollouts[i].sequences.iter().zip(&all[i]).zip(&mut found[i])
                {
                    if let Some((own, mine)) = at(sequence, returns)
                        && let Some(range) = sequence.turn_ranges().nth(own)
                    {
                        found.advantages[range].fill(if compared {
                            (mine - mean) * scale
                        } else {
                            *latest
                        });
                    }
                }
            }
        }
    }
    found
}
