//! Credit assignment within a rollout: returns, temporal differences, turns.

use super::group::{STD_EPSILON, all_equal, mean_and_deviation};
use super::{Path, PathAdvantages, Rollout};
use crate::RlError;

/// Computes generalized advantage estimates over action tokens (Schulman et al. 2016, equation 16).
/// `after` is the value of the state after the last token: 0 if the path ended, a critic's value if it
/// was truncated (Pardo et al. 2018). The resulting `returns` are advantage + value. `rewards` and
/// `values` must have equal lengths.
pub fn gae(rewards: &[f64], values: &[f64], after: f64, gamma: f64, lambda: f64) -> PathAdvantages {
    let mut advantages = vec![0.0; rewards.len()];
    let (mut next_value, mut later) = (after, 0.0);
    for t in (0..rewards.len()).rev() {
        let difference = rewards[t] + gamma * next_value - values[t];
        later = difference + gamma * lambda * later;
        advantages[t] = later;
        next_value = values[t];
    }
    let returns = advantages.iter().zip(values).map(|(a, v)| a + v).collect();
    PathAdvantages { advantages, returns }
}

/// Computes Σ γᵏ r over the rewards from each token on.
pub fn returns(rewards: &[f64], gamma: f64) -> Vec<f64> {
    let mut returns = vec![0.0; rewards.len()];
    let mut later = 0.0;
    for t in (0..rewards.len()).rev() {
        later = rewards[t] + gamma * later;
        returns[t] = later;
    }
    returns
}

/// Uses returns as advantages. With `one_turn`, the returns of each turn include no later turn.
pub fn token_returns(path: &Path, gamma: f64, one_turn: bool) -> PathAdvantages {
    let found = if one_turn {
        path.turn_ranges().flat_map(|turn| returns(&path.rewards[turn], gamma)).collect()
    } else {
        returns(&path.rewards, gamma)
    };
    PathAdvantages { advantages: found.clone(), returns: found }
}

/// Computes the returns minus the score of the other policy.
pub fn less_rival(rollout: &Rollout) -> Result<Vec<PathAdvantages>, RlError> {
    let rival = rollout.rival.ok_or(RlError::NoRival { group: rollout.group })?;
    let path = |path: &Path| {
        let returns = returns(&path.rewards, 1.0);
        PathAdvantages { advantages: returns.iter().map(|r| r - rival).collect(), returns }
    };
    Ok(rollout.paths.iter().map(path).collect())
}

/// Computes the advantage of each turn: the return from that turn on, compared with the returns of the
/// group's rollouts that reached the same turn. All tokens of a turn have its advantage. Normalizing
/// rewards turn by turn instead would compare turns with different pasts.
///
/// After the last turn that another rollout reached, a rollout has no baseline of its own. The events
/// before a turn can be part of its baseline, so the rollout keeps the advantage of the last turn that
/// another rollout reached. A rollout without turns has its score as the return from the first turn on.
pub fn by_turns(rollouts: &[Rollout], gamma: f64, scale_by_std: bool) -> Vec<Vec<PathAdvantages>> {
    // For each rollout and path, the return from each turn on.
    let turn_returns = |path: &Path| -> Vec<f64> {
        let rewards: Vec<f64> = path.turn_ranges().map(|turn| path.rewards[turn].iter().sum()).collect();
        returns(&rewards, gamma)
    };
    let all: Vec<Vec<Vec<f64>>> =
        rollouts.iter().map(|r| r.paths.iter().map(turn_returns).collect()).collect();
    let nothing = |path: &Path| PathAdvantages { advantages: vec![0.0; path.len()], returns: Vec::new() };
    let mut found: Vec<Vec<PathAdvantages>> =
        rollouts.iter().map(|r| r.paths.iter().map(nothing).collect()).collect();
    for members in super::groups(rollouts) {
        let end = |(path, returns): (&Path, &Vec<f64>)| path.turns_before + returns.len();
        let longest = members.iter().flat_map(|i| rollouts[*i].paths.iter().zip(&all[*i]).map(end)).max();
        // For each rollout of the group, its advantage at the last turn with a comparison.
        let mut latest = vec![0.0; members.len()];
        for turn in 0..longest.unwrap_or(0) {
            // Turns are counted from the start of the sequence, even if the first turns belong to another
            // path of the rollout.
            let at = |path: &Path, returns: &[f64]| {
                turn.checked_sub(path.turns_before).and_then(|own| Some((own, *returns.get(own)?)))
            };
            // A rollout with several paths is one sample: the mean of its returns.
            let here = |i: &usize| -> Option<f64> {
                if turn == 0 && rollouts[*i].paths.is_empty() {
                    return Some(rollouts[*i].score);
                }
                let paths = rollouts[*i].paths.iter().zip(&all[*i]);
                let returns: Vec<f64> =
                    paths.filter_map(|(path, returns)| at(path, returns).map(|(_, own)| own)).collect();
                (!returns.is_empty()).then(|| returns.iter().sum::<f64>() / returns.len() as f64)
            };
            let returns: Vec<Option<f64>> = members.iter().map(here).collect();
            let present_returns: Vec<f64> = returns.iter().flatten().copied().collect();
            let (mean, scale) = if all_equal(&present_returns) {
                (present_returns.first().copied().unwrap_or(0.0), 0.0)
            } else {
                let (mean, deviation) = mean_and_deviation(&present_returns);
                (mean, if scale_by_std { 1.0 / (deviation + STD_EPSILON) } else { 1.0 })
            };
            for ((&i, own), latest) in members.iter().zip(returns).zip(&mut latest) {
                let Some(own) = own else { continue };
                let compared = present_returns.len() > 1;
                if compared {
                    *latest = (own - mean) * scale;
                }
                for ((path, returns), found) in rollouts[i].paths.iter().zip(&all[i]).zip(&mut found[i]) {
                    if let Some((own, mine)) = at(path, returns)
                        && let Some(range) = path.turn_ranges().nth(own)
                    {
                        found.advantages[range].fill(if compared { (mine - mean) * scale } else { *latest });
                    }
                }
            }
        }
    }
    found
}
