//! Corrections for tokens that another policy drew: importance weights, and what is rejected as too far away.
//!
//! A *log-ratio* here is log p_proximal − log p_behaviour of an action token: how much more likely the
//! weights at the beginning of the step find it than those that drew it. It differs from 0 for tokens of
//! older versions and for samplers whose numerics are not the trainer's. Weights multiply the policy's part
//! of a token's loss, not its penalty; a rejected token has no loss. The denominators that are folded into
//! the terms' weights stay.

use serde::{Deserialize, Serialize};

use crate::RlError;
use crate::moments::Counting;
use crate::surrogate::LOG_RATIO_BOUND;

/// Span of a ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Every token by itself.
    #[default]
    Token,
    /// The product over the path.
    Path,
    /// The geometric mean over the path.
    GeometricMean,
}

impl Level {
    /// Log-ratio of every token of a path at this level.
    fn log_ratios(self, path: &[f64]) -> Vec<f64> {
        let sum: f64 = path.iter().sum();
        match self {
            Level::Token => path.to_vec(),
            Level::Path => vec![sum; path.len()],
            Level::GeometricMean => vec![sum / path.len().max(1) as f64; path.len()],
        }
    }
}

/// Importance weights, π_proximal / π_behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Correction {
    /// Span of the ratio.
    #[serde(default)]
    pub level: Level,
    /// Treatment of ratios that are too large or too small.
    pub bound: Bound,
    /// Divides the weights by their mean over the update.
    #[serde(default)]
    pub normalise: bool,
}

/// Treatment of ratios that are too large or too small.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Bound {
    /// Brings ratios into the interval (truncated importance sampling, with `low` = 0).
    Clamp {
        /// Smallest weight.
        #[serde(default)]
        low: f64,
        /// Largest weight.
        high: f64,
    },
    /// Lets ratios outside count nothing (IcePop).
    Mask {
        /// Smallest ratio that counts.
        low: f64,
        /// Largest ratio that counts.
        high: f64,
    },
}

impl Bound {
    /// The weight of a token, given its log-ratio.
    pub(crate) fn weight(self, log_ratio: f64) -> f64 {
        self.apply(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp())
    }

    fn apply(self, ratio: f64) -> f64 {
        match self {
            Bound::Clamp { low, high } => ratio.max(low).min(high),
            Bound::Mask { low, high } if (low..=high).contains(&ratio) => ratio,
            Bound::Mask { .. } => 0.0,
        }
    }
}

impl Correction {
    /// Decoupled PPO's weight of every token (Hilton et al. 2022, equation 2), at most 5, as AReaL and MiniRL
    /// (Zheng et al. 2025) truncate it.
    pub const DECOUPLED: Correction =
        Correction { level: Level::Token, bound: Bound::Clamp { low: 0.0, high: 5.0 }, normalise: false };

    /// Checks the bounds.
    ///
    /// # Errors
    /// When they are negative, or the wrong way round.
    pub fn check(&self) -> Result<(), RlError> {
        let (Bound::Clamp { low, high } | Bound::Mask { low, high }) = self.bound;
        RlError::at_least_0("lower bound of the correction", low)?;
        RlError::positive("upper bound of the correction", high)?;
        RlError::range(low <= high, "lower bound of the correction", low, "at most the upper one")
    }

    /// The weight of every token of every path, given their log-ratios.
    pub fn weights(&self, paths: &[Vec<f64>], counting: Counting) -> Vec<Vec<f64>> {
        let of_path = |path: &Vec<f64>| -> Vec<f64> {
            self.level.log_ratios(path).into_iter().map(|x| self.bound.weight(x)).collect()
        };
        let mut weights: Vec<Vec<f64>> = paths.iter().map(of_path).collect();
        if self.normalise {
            let mean = match self.level {
                Level::Token => counting.mean(weights.iter().flatten().copied()),
                // Every path counts once.
                Level::Path | Level::GeometricMean => {
                    let means = weights.iter().filter(|path| !path.is_empty());
                    let means = means.map(|path| counting.mean(path.iter().copied()));
                    Counting::Exact.mean(means)
                }
            };
            if mean > 0.0 {
                weights.iter_mut().flatten().for_each(|weight| *weight /= mean);
            }
        }
        weights
    }

    /// The share of tokens whose ratio, at the level of the correction, is beyond the bounds, given the
    /// log-ratios of paths; `None` where there is no token.
    pub fn beyond(&self, paths: &[Vec<f64>]) -> Option<f64> {
        let (Bound::Clamp { low, high } | Bound::Mask { low, high }) = self.bound;
        let (mut all, mut beyond) = (0usize, 0usize);
        for x in paths.iter().flat_map(|path| self.level.log_ratios(path)) {
            all += 1;
            beyond += usize::from(!(low..=high).contains(&x.exp()));
        }
        (all > 0).then(|| beyond as f64 / all as f64)
    }
}

/// Bounds of the distance from the policy that drew a token, which is kept where the statistic lies within.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rejection {
    /// The measure of distance.
    pub statistic: Statistic,
    /// Over what.
    #[serde(default)]
    pub over: Over,
    /// Smallest allowed: for [`Statistic::K1`] and [`Statistic::Ratio`] a ratio, else left out.
    #[serde(default)]
    pub low: Option<f64>,
    /// Largest allowed.
    pub high: f64,
    /// Bounds p_behaviour / p_proximal instead, which is what verl does for K1. For comparisons only.
    #[serde(default)]
    pub inverted: bool,
}

/// A measure of distance, with x the log-ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Statistic {
    /// x, between the logarithms of the bounds.
    K1,
    /// x² / 2.
    K2,
    /// exp(x) − 1 − x.
    K3,
    /// exp(x).
    Ratio,
}

/// Span of a statistic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Over {
    /// Every token by itself.
    #[default]
    Token,
    /// The sum over the path.
    PathSum,
    /// The mean over the path; for [`Statistic::Ratio`] the geometric one.
    PathMean,
    /// The largest of the path.
    PathMax,
}

impl Rejection {
    /// Checks the bounds.
    ///
    /// # Errors
    /// When one makes no sense for the statistic, or they are the wrong way round.
    pub fn check(&self) -> Result<(), RlError> {
        RlError::positive("upper bound of the rejection", self.high)?;
        let Some(low) = self.low else { return Ok(()) };
        if matches!(self.statistic, Statistic::K1 | Statistic::Ratio) {
            RlError::positive("lower bound of the rejection", low)?;
        }
        RlError::range(low <= self.high, "lower bound of the rejection", low, "at most the upper one")
    }

    /// Whether each token of each path is kept, given their log-ratios.
    pub fn keeps(&self, paths: &[Vec<f64>], counting: Counting) -> Vec<Vec<bool>> {
        paths.iter().map(|path| self.keeps_of(path, counting)).collect()
    }

    fn keeps_of(&self, path: &[f64], counting: Counting) -> Vec<bool> {
        let sign = if self.inverted { -1.0 } else { 1.0 };
        let x = path.iter().map(|x| (sign * x).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND));
        // In verl's reading K2 and K3 are taken of the ratio as it is even where K1's is inverted.
        let values: Vec<f64> = match self.statistic {
            Statistic::K1 | Statistic::Ratio => x.collect(),
            Statistic::K2 => path.iter().map(|x| 0.5 * x * x).collect(),
            Statistic::K3 => path.iter().map(|x| x.exp() - 1.0 - x).collect(),
        };
        let of_logarithms = matches!(self.statistic, Statistic::K1 | Statistic::Ratio);
        let (low, high) = if of_logarithms {
            (self.low.map_or(f64::NEG_INFINITY, f64::ln), self.high.ln())
        } else {
            (self.low.unwrap_or(f64::NEG_INFINITY), self.high)
        };
        let kept = |value: f64| (low..=high).contains(&value);
        let whole = match self.over {
            Over::Token => return values.into_iter().map(kept).collect(),
            Over::PathSum => values.iter().sum(),
            Over::PathMean => counting.mean(values.iter().copied()),
            Over::PathMax => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        };
        vec![kept(whole); path.len()]
    }
}

/// Log-probabilities of a token: proximal, behaviour.
type Pair = (f64, f64);

/// How far the policy that drew the tokens is from the one being trained.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Mismatch {
    /// Mean of log p_behaviour − log p_proximal.
    pub kl: f64,
    /// Mean of exp(x) − 1 − x.
    pub k3_kl: f64,
    /// Mean of |log p_behaviour − log p_proximal|.
    pub log_diff_mean: f64,
    /// Largest of |log p_behaviour − log p_proximal|.
    pub log_diff_max: f64,
    /// Mean over paths of the perplexity under the proximal policy.
    pub training_ppl: f64,
    /// Mean over paths of the perplexity under the behaviour policy.
    pub rollout_ppl: f64,
    /// Mean over paths of the difference of their log-perplexities, proximal less behaviour.
    pub log_ppl_diff: f64,
    /// Mean over paths of its magnitude.
    pub log_ppl_abs_diff: f64,
    /// The largest.
    pub log_ppl_diff_max: f64,
    /// The smallest.
    pub log_ppl_diff_min: f64,
    /// Mean over paths of the ratio of perplexities, proximal to behaviour.
    pub ppl_ratio: f64,
    /// χ² divergence over tokens.
    pub chi2_token: f64,
    /// χ² divergence over paths.
    pub chi2_seq: f64,
    /// Largest |p_proximal − p_behaviour| of a token.
    pub probs_diff_max: f64,
    /// Mean of the differences of probabilities.
    pub probs_diff_mean: f64,
    /// Standard deviation of these differences.
    pub probs_diff_std: f64,
    /// Correlation of the two probabilities.
    pub probs_correlation: f64,
    /// Effective sample size of the importance weights, as a share of the tokens.
    pub effective_sample_size: f64,
}

impl Mismatch {
    /// Measures paths of (log p_proximal, log p_behaviour) of their action tokens.
    pub fn new(paths: &[Vec<Pair>], counting: Counting) -> Self {
        let paths: Vec<&Vec<Pair>> = paths.iter().filter(|path| !path.is_empty()).collect();
        let tokens = || paths.iter().flat_map(|path| path.iter().copied());
        if tokens().next().is_none() {
            return Mismatch::default();
        }
        let bounded = |x: f64| x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND);
        let x = || tokens().map(|(proximal, behaviour)| proximal - behaviour);
        let over_paths =
            |of: &dyn Fn(&[Pair]) -> f64| Counting::Exact.mean(paths.iter().map(|path| of(path)));
        let proximal = |path: &[Pair]| -counting.mean(path.iter().map(|(p, _)| *p));
        let behaviour = |path: &[Pair]| -counting.mean(path.iter().map(|(_, b)| *b));
        let difference = |path: &[Pair]| proximal(path) - behaviour(path);
        let differences = || paths.iter().map(|path| difference(path));
        let probs = || tokens().map(|(p, b)| (p.exp(), b.exp()));
        let apart = || probs().map(|(p, b)| (p - b).abs());
        let apart_mean = Counting::Exact.mean(apart());
        let ratios = || x().map(|x| bounded(x).exp());
        let mean_ratio = counting.mean(ratios());
        Mismatch {
            kl: counting.mean(x().map(|x| -x)),
            k3_kl: counting.mean(x().map(|x| x.exp() - 1.0 - x)),
            log_diff_mean: counting.mean(x().map(f64::abs)),
            log_diff_max: x().map(f64::abs).fold(0.0, f64::max),
            training_ppl: over_paths(&|path| proximal(path).exp()),
            rollout_ppl: over_paths(&|path| behaviour(path).exp()),
            log_ppl_diff: over_paths(&difference),
            log_ppl_abs_diff: over_paths(&|path| difference(path).abs()),
            log_ppl_diff_max: differences().fold(f64::NEG_INFINITY, f64::max),
            log_ppl_diff_min: differences().fold(f64::INFINITY, f64::min),
            ppl_ratio: over_paths(&|path| difference(path).exp()),
            chi2_token: counting.mean(x().map(|x| bounded(x).exp().powi(2))) - 1.0,
            chi2_seq: over_paths(&|path| bounded(path.iter().map(|(p, b)| p - b).sum::<f64>()).exp().powi(2))
                - 1.0,
            probs_diff_max: apart().fold(0.0, f64::max),
            probs_diff_mean: apart_mean,
            probs_diff_std: Counting::Exact.variance(apart(), apart_mean).sqrt(),
            probs_correlation: correlation(probs()),
            effective_sample_size: 1.0 / counting.mean(ratios().map(|r| (r / mean_ratio).powi(2))),
        }
    }
}

/// Pearson's correlation; 1 where either side does not vary.
fn correlation(pairs: impl Iterator<Item = (f64, f64)> + Clone) -> f64 {
    let mean = |of: fn((f64, f64)) -> f64| Counting::Exact.mean(pairs.clone().map(of));
    let (mean_a, mean_b) = (mean(|(a, _)| a), mean(|(_, b)| b));
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (a, b) in pairs {
        ab += (a - mean_a) * (b - mean_b);
        aa += (a - mean_a).powi(2);
        bb += (b - mean_b).powi(2);
    }
    if aa == 0.0 || bb == 0.0 { 1.0 } else { ab / (aa * bb).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_checked() {
        let correction = |low, high| Correction { bound: Bound::Mask { low, high }, ..Correction::DECOUPLED };
        for (low, high) in [(0.0, 5.0), (0.5, 2.0), (1.0, 1.0)] {
            assert_eq!(correction(low, high).check(), Ok(()));
        }
        for (low, high) in [(-1.0, 5.0), (2.0, 0.5), (0.0, 0.0), (0.0, f64::INFINITY), (f64::NAN, 5.0)] {
            let found = correction(low, high).check();
            assert!(matches!(found, Err(RlError::Parameter { .. })), "{low} {high}: {found:?}");
        }
        let rejection =
            |statistic, low, high| Rejection { statistic, over: Over::Token, low, high, inverted: false };
        use Statistic::{K1, K2};
        for (statistic, low, high) in [(K1, None, 2.0), (K1, Some(0.5), 2.0), (K2, Some(-1.0), 0.5)] {
            assert_eq!(rejection(statistic, low, high).check(), Ok(()));
        }
        for (statistic, low, high) in [(K1, Some(0.0), 2.0), (K1, Some(3.0), 2.0), (K2, None, 0.0)] {
            let found = rejection(statistic, low, high).check();
            assert!(matches!(found, Err(RlError::Parameter { .. })), "{low:?} {high}: {found:?}");
        }
    }

    #[test]
    fn ratios_are_beyond_bounds_at_the_level_of_the_correction() {
        let bound = Bound::Clamp { low: 0.0, high: 2.0 };
        let at = |level| Correction { level, bound, normalise: false };
        let paths = [vec![1.0, -1.0, 0.0], vec![0.5, 0.5]];
        assert_eq!(at(Level::Token).beyond(&paths), Some(0.2));
        // Of the second path alone: e > 2.
        assert_eq!(at(Level::Path).beyond(&paths), Some(0.4));
        assert_eq!(at(Level::GeometricMean).beyond(&paths), Some(0.0));
        assert_eq!(at(Level::Token).beyond(&[vec![]]), None);
    }

    /// Where every ratio is out of bounds there is nothing to divide by.
    #[test]
    fn weights_that_are_all_masked_stay_0() {
        let correction = Correction { bound: Bound::Mask { low: 0.5, high: 2.0 }, ..Correction::DECOUPLED };
        let correction = Correction { normalise: true, ..correction };
        assert_eq!(correction.weights(&[vec![3.0, -3.0]], Counting::Exact), [[0.0, 0.0]]);
        // Of 1, 2 and 0, with a mean of 1.
        let found = correction.weights(&[vec![0.0, 2f64.ln()], vec![3.0]], Counting::Exact);
        assert_eq!(found, [vec![1.0, 2.0], vec![0.0]]);
    }

    #[test]
    fn correlations_of_what_does_not_vary() {
        let of = |pairs: &[(f64, f64)]| correlation(pairs.iter().copied());
        assert_eq!(of(&[(0.25, 0.5), (0.75, 0.5)]), 1.0);
        assert_eq!(of(&[(0.5, 0.25), (0.5, 0.75)]), 1.0);
        assert!((of(&[(0.25, 0.75), (0.75, 0.25)]) + 1.0).abs() < 1e-12);
    }
}
