//! Formulas of policy losses for one token, in f64: value, derivative with respect to log p, and
//! whether a bound removed the derivative.
//!
//! Symbols: x = log p − log p_old, ρ = exp(x), A the advantage. "sg" (stop gradient) marks a factor
//! that counts as a constant.

/// Bound on the absolute log-ratio in the exponential, so that a ratio stays finite and one token
/// cannot dominate a batch. Beyond the bound, the exponential is constant and has no gradient.
pub const LOG_RATIO_BOUND: f64 = 20.0;

/// Value of a loss, its derivative with respect to log p, and whether a bound removed the
/// derivative.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Surrogate {
    pub loss: f64,
    pub derivative: f64,
    pub clipped: bool,
    /// Whether the active bound was the dual clip.
    pub dual: bool,
}

impl Surrogate {
    /// Loss of a dropped token: value and derivative 0, counted as clipped.
    pub const DROPPED: Surrogate =
        Surrogate { loss: 0.0, derivative: 0.0, clipped: true, dual: false };

    fn new(loss: f64, derivative: f64, clipped: bool) -> Self {
        Surrogate { loss, derivative, clipped, dual: false }
    }

    fn without_clipping(loss: f64, derivative: f64) -> Self {
        Surrogate::new(loss, derivative, false)
    }

    fn without_gradient(loss: f64) -> Self {
        Surrogate::new(loss, 0.0, true)
    }
}

/// Returns exp(x) with x clamped to ±[`LOG_RATIO_BOUND`], and the derivative, which is 0 beyond the
/// bound.
pub fn bounded_exp(x: f64) -> (f64, f64) {
    let value = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp();
    (value, if x.abs() > LOG_RATIO_BOUND { 0.0 } else { value })
}

/// Returns the ratio ρ clipped to [1 − `low`, 1 + `high`].
fn clip_ratio(ratio: f64, low: f64, high: f64) -> f64 {
    ratio.max(1.0 - low).min(1.0 + high)
}

/// Computes PPO's value loss ½ max((V − R)², (clip(V, V_old − c, V_old + c) − R)²), with `clip` =
/// (c, V_old).
pub fn value_loss(value: f64, returns: f64, clip: Option<(f64, f64)>) -> Surrogate {
    let free = value - returns;
    let bounded = clip.map_or(free, |(clip, old)| value.clamp(old - clip, old + clip) - returns);
    if bounded * bounded > free * free {
        Surrogate::without_gradient(0.5 * bounded * bounded)
    } else {
        Surrogate::without_clipping(0.5 * free * free, free)
    }
}

/// Computes the importance-sampled policy loss −A ρ, with ρ = exp(x).
pub fn importance_sampling_loss(x: f64, advantage: f64) -> Surrogate {
    let (ratio, derivative) = bounded_exp(x);
    Surrogate::new(-advantage * ratio, -advantage * derivative, x.abs() > LOG_RATIO_BOUND)
}

/// Computes PPO's clipped loss max(−Aρ, −A·clip(ρ, 1 − low, 1 + high)). For A < 0, it is at most
/// −A·dual.
///
/// Schulman et al. 2017 (equation 7), with separate lower and upper bounds (DAPO, Yu et al. 2025)
/// and the dual clip of Ye et al. 2020 (equation 5).
pub fn clipped_loss(x: f64, advantage: f64, low: f64, high: f64, dual: Option<f64>) -> Surrogate {
    let mut surrogate = importance_sampling_loss(x, advantage);
    let bounded = -advantage * clip_ratio(bounded_exp(x).0, low, high);
    if bounded > surrogate.loss {
        surrogate = Surrogate::without_gradient(bounded);
    }
    match dual {
        Some(dual) if advantage < 0.0 && surrogate.loss > -advantage * dual => {
            Surrogate { dual: true, ..Surrogate::without_gradient(-advantage * dual) }
        }
        _ => surrogate,
    }
}

/// Computes PPO's clipped loss, with part of the gradient kept where clipping would remove it:
/// `beyond` (1 − low) A or `beyond` (1 + high) A (CE-GPPO, Su et al. 2025). `beyond` = (below,
/// above). With `in_value_only`, the kept part is a constant divided by sg(ρ) and has no gradient,
/// as in AgentRL's code.
pub fn partly_clipped_loss(
    x: f64,
    advantage: f64,
    low: f64,
    high: f64,
    beyond: (f64, f64),
    in_value_only: bool,
) -> Surrogate {
    let free = importance_sampling_loss(x, advantage);
    let ratio = bounded_exp(x).0;
    let kept = if ratio < 1.0 - low && advantage < 0.0 {
        beyond.0 * (1.0 - low)
    } else if ratio > 1.0 + high && advantage > 0.0 {
        beyond.1 * (1.0 + high)
    } else {
        return clipped_loss(x, advantage, low, high, None);
    };
    if !in_value_only {
        return Surrogate::new(-advantage * kept, -advantage * kept, true);
    }
    let bounded = -advantage * kept / ratio;
    if bounded > free.loss { Surrogate::without_gradient(bounded) } else { free }
}

/// Computes −sg(clip(ρ, 1 − low, 1 + high)) A log p (CISPO, MiniMax 2025): a clipped token keeps a
/// bounded gradient.
pub fn cispo_loss(logp: f64, x: f64, advantage: f64, low: f64, high: f64) -> Surrogate {
    let ratio = bounded_exp(x).0;
    let weight = clip_ratio(ratio, low, high);
    Surrogate::new(-weight * advantage * logp, -weight * advantage, weight != ratio)
}

/// Computes the loss −sg(ρ) A log p (MiniRL, Zheng et al. 2025): REINFORCE weighted by the ratio.
pub fn weighted_reinforce_loss(logp: f64, x: f64, advantage: f64) -> Surrogate {
    let ratio = bounded_exp(x).0;
    Surrogate::without_clipping(-ratio * advantage * logp, -ratio * advantage)
}

/// Computes the REINFORCE loss −A log p.
pub fn reinforce_loss(logp: f64, advantage: f64) -> Surrogate {
    Surrogate::without_clipping(-advantage * logp, -advantage)
}

/// Computes the smooth clip −A (4/τ) σ(τ (ρ − 1)), with τ by the sign of A (SAPO, Gao et al. 2025).
pub fn soft_gate_loss(x: f64, advantage: f64, positive: f64, negative: f64) -> Surrogate {
    let (ratio, derivative) = bounded_exp(x);
    let tau = if advantage > 0.0 { positive } else { negative };
    let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
    Surrogate::without_clipping(
        -advantage * 4.0 / tau * gate,
        -advantage * 4.0 * gate * (1.0 - gate) * derivative,
    )
}

/// Computes the loss −(A log p − ½ β x²) (DRO, Richemond et al. 2024, with the log-ratio to the old
/// policy).
pub fn direct_loss(logp: f64, x: f64, advantage: f64, beta: f64) -> Surrogate {
    Surrogate::without_clipping(-(advantage * logp - 0.5 * beta * x * x), -(advantage - beta * x))
}

/// Computes the loss −A sg(min(ρ, cap)) log p (DPPO, as in verl). There is no loss if the token's
/// probability has diverged from its old probability by more than `below` or `above` in the
/// direction of A. `divergence` is the signed divergence, positive if p has increased.
pub fn divergence_masked_loss(
    logp: f64,
    x: f64,
    advantage: f64,
    cap: f64,
    divergence: f64,
    below: f64,
    above: f64,
) -> Surrogate {
    let kept = if advantage > 0.0 { divergence <= above } else { divergence >= -below };
    if !kept {
        return Surrogate::DROPPED;
    }
    let weight = bounded_exp(x).0.min(cap);
    Surrogate::without_clipping(-advantage * weight * logp, -advantage * weight)
}

/// Returns the signed divergence of `logp` from `old` as total variation of the event "this token":
/// p − p_old.
pub fn total_variation(logp: f64, old: f64) -> f64 {
    logp.exp() - old.exp()
}

/// Returns the signed divergence of `logp` from `old` as KL(p_old ‖ p) of the event "this token",
/// negative if p has decreased.
pub fn binary_kl(logp: f64, old: f64) -> f64 {
    let p = logp.exp();
    let q = old.exp();
    let rest = if q < 1.0 { (1.0 - q) * ((1.0 - q) / (1.0 - p)).ln() } else { 0.0 };
    let divergence = q * (old - logp) + rest;
    if p > q { divergence } else { -divergence }
}

/// Computes the loss −A ρ + c |x| of a token marked by its covariance (KL-Cov, Cui et al. 2025).
pub fn penalized_loss(x: f64, advantage: f64, coefficient: f64) -> Surrogate {
    let free = importance_sampling_loss(x, advantage);
    let sign = if x == 0.0 { 0.0 } else { x.signum() };
    Surrogate {
        loss: free.loss + coefficient * x.abs(),
        derivative: free.derivative + coefficient * sign,
        ..free
    }
}

/// Computes the loss −A r, with r the geometric mean of a sequence's clipped ratios (GMPO, Zhao et
/// al. 2025). The derivative of r with respect to this token's log p is r if the token's own ratio
/// is not clipped (`moves`), otherwise 0. The weights must divide by the length of the sequence.
pub fn geometric_mean_loss(sequence_log_ratio: f64, advantage: f64, moves: bool) -> Surrogate {
    let (ratio, derivative) = bounded_exp(sequence_log_ratio);
    if moves {
        Surrogate::without_clipping(-advantage * ratio, -advantage * derivative)
    } else {
        Surrogate::without_gradient(-advantage * ratio)
    }
}

/// Computes PPO's clipped loss with the ratio of a complete sequence (GSPO, Zheng et al. 2025):
/// every token has the sequence's ratio and an equal part of its gradient. `sequence_log_ratio` is
/// the mean of x over the sequence's tokens, limited to 10.
pub fn sequence_clipped_loss(
    sequence_log_ratio: f64,
    advantage: f64,
    low: f64,
    high: f64,
) -> Surrogate {
    let bounded = sequence_log_ratio.min(10.0);
    let mut surrogate = clipped_loss(bounded, advantage, low, high, None);
    if bounded < sequence_log_ratio {
        surrogate = Surrogate::without_gradient(surrogate.loss);
    }
    surrogate
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loss_parts(got: Surrogate) -> (f64, f64, bool) {
        (got.loss, got.derivative, got.clipped)
    }

    #[track_caller]
    fn assert_near(got: (f64, f64, bool), loss: f64, derivative: f64, clipped: bool) {
        let close = (got.0 - loss).abs() < 1e-12 && (got.1 - derivative).abs() < 1e-12;
        assert!(close && got.2 == clipped, "{got:?}, expected {loss} {derivative} {clipped}");
    }

    /// Ratios of 1/2, 1 and 2, with bounds of 0.8 and 1.3. A half and a quarter of the gradient are
    /// kept.
    #[test]
    fn clip_keeps_part_of_gradient_beyond_bounds() {
        let half = 0.5f64.ln();
        let double = 2f64.ln();
        let kept = |x, advantage, in_value| {
            loss_parts(partly_clipped_loss(x, advantage, 0.2, 0.3, (0.5, 0.25), in_value))
        };
        assert_near(kept(half, -2.0, false), 0.8, 0.8, true);
        assert_near(kept(double, 2.0, false), -0.65, -0.65, true);
        // Between the bounds, and if the advantage points back, the loss is the plain clipped one.
        assert_near(kept(half, 2.0, false), -1.0, -1.0, false);
        assert_near(kept(double, -2.0, false), 4.0, 4.0, false);
        assert_near(kept(0.0, -2.0, false), 2.0, 2.0, false);
        assert_near(kept(0.0, 2.0, false), -2.0, -2.0, false);
        for x in [half, double] {
            assert_near(kept(x, 0.0, false), 0.0, 0.0, false);
        }
        // Bounds of exactly 1 are not exceeded by a ratio of 1.
        let tight = |advantage| {
            loss_parts(partly_clipped_loss(0.0, advantage, 0.0, 0.0, (0.5, 0.25), false))
        };
        assert_eq!([tight(-1.0), tight(1.0)], [(1.0, 1.0, false), (-1.0, -1.0, false)]);
        // Value only: 2 · 0.4 / 0.5, and −2 · 0.325 / 2.
        assert_near(kept(half, -2.0, true), 1.6, 0.0, true);
        assert_near(kept(double, 2.0, true), -0.325, 0.0, true);
        // If the kept value equals the free one (0.3125 · 0.8 / 0.5), nothing changes.
        assert_near(
            loss_parts(partly_clipped_loss(half, -1.0, 0.2, 0.3, (0.3125, 0.0), true)),
            0.5,
            0.5,
            false,
        );
    }

    /// A bound that is reached but not exceeded does not change the gradient.
    #[test]
    fn clip_is_inactive_at_exact_bounds() {
        let far = LOG_RATIO_BOUND.exp();
        assert_eq!(bounded_exp(LOG_RATIO_BOUND), (far, far));
        assert_eq!(loss_parts(importance_sampling_loss(LOG_RATIO_BOUND, 1.0)), (-far, -far, false));
        assert_eq!(bounded_exp(LOG_RATIO_BOUND + 1.0), (far, 0.0));
        let e = 1f64.exp();
        assert_eq!(loss_parts(clipped_loss(1.0, -1.0, 0.2, 0.2, Some(e))), (e, e, false));
        assert_eq!(loss_parts(clipped_loss(1.0, -1.0, 0.2, 0.2, Some(2.5))), (2.5, 0.0, true));
    }

    /// A sequence's log-ratio of 11 counts as 10, and has no gradient.
    #[test]
    fn sequence_log_ratio_above_10_has_no_gradient() {
        let far = 10f64.exp();
        let at = |sequence_log_ratio| {
            loss_parts(sequence_clipped_loss(sequence_log_ratio, -1.0, 0.2, 0.3))
        };
        assert_eq!([at(10.0), at(11.0)], [(far, far, false), (far, 0.0, true)]);
    }

    /// For an old probability of 1, only q ln(q / p) remains, and the probability has decreased.
    #[test]
    fn binary_kl_handles_old_probability_of_1() {
        assert_eq!(binary_kl(-0.5, 0.0), -0.5);
        // 1/2 ln 2 + 1/2 ln (2/3), from 1/2 to 1/4.
        let got = binary_kl(0.25f64.ln(), 0.5f64.ln());
        assert!((got + 0.5 * (4f64 / 3.0).ln()).abs() < 1e-12, "{got}");
    }

    /// Ratios of 1/2, 1 and 2 have weights of 0.8, 1 and 1.3.
    #[test]
    fn cispo_reports_clipped_weights() {
        for (ratio, weight, is_clipped) in
            [(0.5f64, 0.8, true), (1.0, 1.0, false), (2.0, 1.3, true)]
        {
            let got = loss_parts(cispo_loss(-3.0, ratio.ln(), 2.0, 0.2, 0.3));
            assert_eq!(got, (weight * 6.0, -weight * 2.0, is_clipped), "{ratio}");
        }
    }
}
