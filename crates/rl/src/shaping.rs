//! Rewards for form: length and effort.

/// DAPO's penalty for replies that come too close to the limit (Yu et al. 2025, equation 13): from 0 at
/// `limit` − `buffer` sampled tokens down to −`factor` at `limit`, and further beyond. Lengths in sampled
/// tokens: what tools return is not the model's doing.
pub fn overlong(tokens: u64, limit: u64, buffer: u64, factor: f64) -> f64 {
    let over = tokens as f64 - (limit as f64 - buffer as f64);
    (-over / buffer as f64 * factor).min(0.0)
}

/// A bonus by rank that sums to 0: `spread` / 2 for the least effort, −`spread` / 2 for the most, equal
/// efforts alike; the other way round where `more_is_better`. As AgentRL does for turns: fewer are better
/// among the right answers, more among the wrong ones.
pub fn rank_bonus(efforts: &[f64], spread: f64, more_is_better: bool) -> Vec<f64> {
    let n = efforts.len();
    if n < 2 {
        return vec![0.0; n];
    }
    let rank = |effort: f64| {
        let below = efforts.iter().filter(|e| **e < effort).count() as f64;
        let equal = efforts.iter().filter(|e| **e == effort).count() as f64;
        below + (equal - 1.0) / 2.0
    };
    let sign = if more_is_better { -1.0 } else { 1.0 };
    efforts.iter().map(|e| sign * spread * (0.5 - rank(*e) / (n as f64 - 1.0))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A limit of 20 with a buffer of 4: nothing up to 16, then a half of the factor for every two tokens.
    #[test]
    fn replies_near_the_limit_cost() {
        let found = [10, 16, 18, 20, 22].map(|tokens| overlong(tokens, 20, 4, 2.0));
        assert_eq!(found, [0.0, 0.0, -1.0, -2.0, -3.0]);
    }

    #[test]
    fn bonuses_go_by_rank() {
        assert_eq!(rank_bonus(&[2.0, 1.0], 1.0, false), [-0.5, 0.5]);
        assert_eq!(rank_bonus(&[2.0, 1.0], 1.0, true), [0.5, -0.5]);
        // Ranks of 3, 1/2, 1/2 and 2 of 3.
        let found = rank_bonus(&[9.0, 1.0, 1.0, 4.0], 6.0, false);
        let near = found.iter().zip([-3.0, 2.0, 2.0, -1.0]).all(|(f, w)| (f - w).abs() < 1e-12);
        assert!(near && found.len() == 4, "{found:?}");
        assert_eq!((rank_bonus(&[5.0], 1.0, false), rank_bonus(&[], 1.0, true)), (vec![0.0], vec![]));
    }
}
