//! Reward shaping by length and by effort.

/// Returns DAPO's penalty for completions near the length limit (Yu et al. 2025, equation 13): 0 up
/// to `limit` − `buffer` sampled tokens, then linear to −`factor` at `limit` and beyond. `tokens`
/// counts sampled tokens only, because the model does not control the length of tool results.
pub fn overlong_penalty(tokens: u64, limit: u64, buffer: u64, factor: f64) -> f64 {
    let over = tokens as f64 - (limit as f64 - buffer as f64);
    (-over / buffer as f64 * factor).min(0.0)
}

/// Returns bonuses by rank of effort that sum to 0: `spread` / 2 for the smallest effort, −`spread`
/// / 2 for the largest, equal bonuses for equal efforts. The signs are inverted if
/// `more_is_better`. AgentRL uses these bonuses for turns: fewer turns are better for correct
/// answers, more turns for wrong answers.
pub fn rank_bonuses(efforts: &[f64], spread: f64, more_is_better: bool) -> Vec<f64> {
    let n = efforts.len();
    if n < 2 {
        return vec![0.0; n];
    }
    let sign = if more_is_better { -1.0 } else { 1.0 };
    efforts
        .iter()
        .map(|e| sign * spread * (0.5 - fractional_rank(*e, efforts) / (n as f64 - 1.0)))
        .collect()
}

/// Returns the rank of `effort` among `efforts`, from 0. Equal efforts have the mean of their
/// ranks.
fn fractional_rank(effort: f64, efforts: &[f64]) -> f64 {
    let below = efforts.iter().filter(|e| **e < effort).count() as f64;
    let equal = efforts.iter().filter(|e| **e == effort).count() as f64;
    below + (equal - 1.0) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a limit of 20 and a buffer of 4, the penalty is 0 up to 16, then grows by half of the
    /// factor for every two tokens.
    #[test]
    fn overlong_penalty_grows_near_limit() {
        let found = [10, 16, 18, 20, 22].map(|tokens| overlong_penalty(tokens, 20, 4, 2.0));
        assert_eq!(found, [0.0, 0.0, -1.0, -2.0, -3.0]);
    }

    #[test]
    fn rank_bonus_follows_rank() {
        assert_eq!(rank_bonuses(&[2.0, 1.0], 1.0, false), [-0.5, 0.5]);
        assert_eq!(rank_bonuses(&[2.0, 1.0], 1.0, true), [0.5, -0.5]);
        // Ranks of 3, 1/2, 1/2 and 2, divided by 3.
        let found = rank_bonuses(&[9.0, 1.0, 1.0, 4.0], 6.0, false);
        let near = found.iter().zip([-3.0, 2.0, 2.0, -1.0]).all(|(f, w)| (f - w).abs() < 1e-12);
        assert!(near && found.len() == 4, "{found:?}");
        assert_eq!(
            (rank_bonuses(&[5.0], 1.0, false), rank_bonuses(&[], 1.0, true)),
            (vec![0.0], vec![])
        );
    }
}
