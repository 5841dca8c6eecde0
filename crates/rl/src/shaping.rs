//! Rewards for form: length and effort.

/// DAPO's penalty for replies that come too close to the limit (Yu et al. 2025, equation 13): from 0 at `limit` − `buffer` sampled tokens
/// down to −`factor` at `limit`, and further beyond. Lengths in sampled tokens: what tools return is not the model's doing.
pub fn overlong(tokens: u64, limit: u64, buffer: u64, factor: f64) -> f64 {
    let over = tokens as f64 - (limit as f64 - buffer as f64);
    (-over / buffer as f64 * factor).min(0.0)
}

/// A bonus by rank that sums to 0: `spread` / 2 for the least effort, −`spread` / 2 for the most, equal efforts alike; the other way round
/// where `more_is_better`. As AgentRL does for turns: fewer are better among the right answers, more among the wrong ones.
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
