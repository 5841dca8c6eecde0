//! Off-policy corrections: importance weights, and rejection of tokens that are too far off-policy.
//!
//! A *log-ratio* here is log p_proximal − log p_behavior of an action token: its log-probability
//! under the weights at the start of the step, minus that under the weights that sampled it. It
//! differs from 0 for tokens from older versions, and if the sampler's numerics differ from the
//! trainer's. Importance weights multiply the policy part of a token's loss, not its penalty. A
//! rejected token has no loss. The denominators in the terms' weights do not change.

use serde::{Deserialize, Serialize};

use crate::RlError;
use crate::moments::Counting;
use crate::surrogate::LOG_RATIO_BOUND;

/// Level at which the importance ratio of two policies is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RatioLevel {
    /// Each token has its own ratio.
    #[default]
    Token,
    /// All tokens have the product of the ratios over the sequence.
    #[serde(rename(serialize = "path"), alias = "path")]
    Sequence,
    /// All tokens have the geometric mean of the ratios over the sequence.
    GeometricMean,
}

impl RatioLevel {
    /// Returns the log-ratio of every token at this level, from the log-ratios of a sequence's
    /// tokens.
    fn log_ratios(self, sequence: &[f64]) -> Vec<f64> {
        let sum: f64 = sequence.iter().sum();
        match self {
            RatioLevel::Token => sequence.to_vec(),
            RatioLevel::Sequence => vec![sum; sequence.len()],
            RatioLevel::GeometricMean => vec![sum / sequence.len().max(1) as f64; sequence.len()],
        }
    }
}

/// Importance weights π_proximal / π_behavior that correct a loss for tokens of another policy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Correction {
    /// Level at which the importance ratio is computed.
    #[serde(default)]
    pub level: RatioLevel,
    /// Treatment of importance ratios that are too large or too small.
    pub bound: Bound,
    /// Whether the importance weights are divided by their mean over the update.
    #[serde(default)]
    #[serde(rename(serialize = "normalise"), alias = "normalise")]
    pub normalize: bool,
}

/// Treatment of importance ratios that are too large or too small.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Bound {
    /// Ratios are clamped to the interval. With `low` = 0, this is truncated importance sampling.
    Clamp {
        /// Minimum weight. Smaller ratios are raised to it.
        #[serde(default)]
        low: f64,
        /// Maximum weight. Larger ratios are lowered to it.
        high: f64,
    },
    /// Ratios outside the interval give the weight 0 (IcePop).
    Mask {
        /// Minimum ratio that gives a weight above 0.
        low: f64,
        /// Maximum ratio that gives a weight above 0.
        high: f64,
    },
}

impl Bound {
    /// Returns the importance weight of a token with this log-ratio.
    pub(crate) fn weight(self, log_ratio: f64) -> f64 {
        self.apply(bounded_ratio(log_ratio))
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
    /// Per-token weight of decoupled PPO (Hilton et al. 2022, equation 2), truncated at 5 as in
    /// AReaL and MiniRL (Zheng et al. 2025).
    pub const DECOUPLED: Correction = Correction {
        level: RatioLevel::Token,
        bound: Bound::Clamp { low: 0.0, high: 5.0 },
        normalize: false,
    };

    /// Checks the bounds.
    ///
    /// # Errors
    /// Returns an error if a bound is negative, or if the lower bound is above the upper one.
    pub fn check(&self) -> Result<(), RlError> {
        let (Bound::Clamp { low, high } | Bound::Mask { low, high }) = self.bound;
        RlError::check_non_negative("lower bound of the correction", low)?;
        RlError::check_positive("upper bound of the correction", high)?;
        RlError::check_range(
            low <= high,
            "lower bound of the correction",
            low,
            "at most the upper bound",
        )
    }

    /// Returns the importance weight of every token of every sequence. `sequences` contains the
    /// log-ratios of each sequence's tokens.
    pub fn weights(&self, sequences: &[Vec<f64>], counting: Counting) -> Vec<Vec<f64>> {
        let mut weights: Vec<Vec<f64>> = sequences
            .iter()
            .map(|sequence| self.level.log_ratios(sequence))
            .map(|log_ratios| log_ratios.into_iter().map(|x| self.bound.weight(x)).collect())
            .collect();
        if self.normalize {
            let mean = match self.level {
                RatioLevel::Token => counting.mean(weights.iter().flatten().copied()),
                // Every sequence counts once.
                RatioLevel::Sequence | RatioLevel::GeometricMean => {
                    let means = weights.iter().filter(|sequence| !sequence.is_empty());
                    let means = means.map(|sequence| counting.mean(sequence.iter().copied()));
                    Counting::Exact.mean(means)
                }
            };
            if mean > 0.0 {
                weights.iter_mut().flatten().for_each(|weight| *weight /= mean);
            }
        }
        weights
    }

    /// Returns the fraction of tokens whose ratio, at the level of the correction, is outside the
    /// bounds. `sequences` contains the log-ratios of each sequence's tokens. Returns `None` if
    /// there are no tokens.
    pub fn out_of_bounds_fraction(&self, sequences: &[Vec<f64>]) -> Option<f64> {
        let (Bound::Clamp { low, high } | Bound::Mask { low, high }) = self.bound;
        let mut all = 0usize;
        let mut outside = 0usize;
        for x in sequences.iter().flat_map(|sequence| self.level.log_ratios(sequence)) {
            all += 1;
            outside += usize::from(!(low..=high).contains(&x.exp()));
        }
        (all > 0).then(|| outside as f64 / all as f64)
    }
}

/// Rejection of tokens by importance ratio: a token is kept if a statistic of its log-ratio is
/// within bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rejection {
    /// Statistic of the log-ratio that is compared with the bounds.
    pub statistic: Statistic,
    /// Span of tokens over which the statistic is computed.
    #[serde(default)]
    pub over: StatisticSpan,
    /// Lower bound of the statistic. For [`Statistic::K1`] and [`Statistic::Ratio`], this is a
    /// ratio. `None` means no lower bound, as is usual for the other statistics, which are never
    /// negative.
    #[serde(default)]
    pub low: Option<f64>,
    /// Upper bound of the statistic. For [`Statistic::K1`] and [`Statistic::Ratio`], this is a
    /// ratio.
    pub high: f64,
    /// Whether the statistic uses the inverse ratio, p_behavior / p_proximal, as in verl for K1.
    /// For comparisons only.
    #[serde(default)]
    pub inverted: bool,
}

/// Statistic of the log-ratio x that decides about the rejection of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Statistic {
    /// The log-ratio x itself, compared with the logarithms of the bounds.
    K1,
    /// The estimator x² / 2 of the KL divergence.
    K2,
    /// The estimator exp(x) − 1 − x of the KL divergence.
    K3,
    /// The ratio exp(x).
    Ratio,
}

/// Span of tokens over which a statistic of the log-ratio is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StatisticSpan {
    /// Each token has its own statistic.
    #[default]
    Token,
    /// All tokens have the sum of the statistic over their sequence.
    #[serde(rename(serialize = "path_sum"), alias = "path_sum")]
    SequenceSum,
    /// All tokens have the mean of the statistic over their sequence. For [`Statistic::Ratio`],
    /// this is the geometric mean.
    #[serde(rename(serialize = "path_mean"), alias = "path_mean")]
    SequenceMean,
    /// All tokens have the maximum of the statistic over their sequence.
    #[serde(rename(serialize = "path_max"), alias = "path_max")]
    SequenceMax,
}

impl Rejection {
    /// Checks the bounds.
    ///
    /// # Errors
    /// Returns an error if a bound is invalid for the statistic, or if the lower bound is above the
    /// upper one.
    pub fn check(&self) -> Result<(), RlError> {
        RlError::check_positive("upper bound of the rejection", self.high)?;
        let Some(low) = self.low else { return Ok(()) };
        if matches!(self.statistic, Statistic::K1 | Statistic::Ratio) {
            RlError::check_positive("lower bound of the rejection", low)?;
        }
        RlError::check_range(
            low <= self.high,
            "lower bound of the rejection",
            low,
            "at most the upper bound",
        )
    }

    /// Returns whether each token of each sequence is kept. `sequences` contains the log-ratios of
    /// each sequence's tokens.
    pub fn kept_tokens(&self, sequences: &[Vec<f64>], counting: Counting) -> Vec<Vec<bool>> {
        sequences.iter().map(|sequence| self.kept_sequence_tokens(sequence, counting)).collect()
    }

    fn kept_sequence_tokens(&self, sequence: &[f64], counting: Counting) -> Vec<bool> {
        let sign = if self.inverted { -1.0 } else { 1.0 };
        let x = sequence.iter().map(|x| (sign * x).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND));
        // As in verl, K2 and K3 use the original ratio even if K1's is inverted.
        let values: Vec<f64> = match self.statistic {
            Statistic::K1 | Statistic::Ratio => x.collect(),
            Statistic::K2 => sequence.iter().map(|x| 0.5 * x * x).collect(),
            Statistic::K3 => sequence.iter().map(|x| x.exp() - 1.0 - x).collect(),
        };
        let uses_log_bounds = matches!(self.statistic, Statistic::K1 | Statistic::Ratio);
        let (low, high) = if uses_log_bounds {
            (self.low.map_or(f64::NEG_INFINITY, f64::ln), self.high.ln())
        } else {
            (self.low.unwrap_or(f64::NEG_INFINITY), self.high)
        };
        let bounds = low..=high;
        let sequence_value = match self.over {
            StatisticSpan::Token => return values.iter().map(|x| bounds.contains(x)).collect(),
            StatisticSpan::SequenceSum => values.iter().sum(),
            StatisticSpan::SequenceMean => counting.mean(values.iter().copied()),
            StatisticSpan::SequenceMax => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        };
        vec![bounds.contains(&sequence_value); sequence.len()]
    }
}

/// Log-probabilities of a token under the proximal and the behavior policy.
type LogProbPair = (f64, f64);

/// Metrics of the difference between the policy that sampled the tokens and the policy that is
/// trained.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Mismatch {
    /// Mean over tokens of log p_behavior − log p_proximal.
    pub kl: f64,
    /// Mean over tokens of exp(x) − 1 − x, with x = log p_proximal − log p_behavior.
    pub k3_kl: f64,
    /// Mean over tokens of |log p_behavior − log p_proximal|.
    pub log_diff_mean: f64,
    /// Maximum over tokens of |log p_behavior − log p_proximal|.
    pub log_diff_max: f64,
    /// Mean over sequences of the perplexity under the proximal policy.
    pub training_ppl: f64,
    /// Mean over sequences of the perplexity under the behavior policy.
    pub rollout_ppl: f64,
    /// Mean over sequences of the log-perplexity difference, proximal minus behavior.
    pub log_ppl_diff: f64,
    /// Mean over sequences of the absolute log-perplexity difference between the two policies.
    pub log_ppl_abs_diff: f64,
    /// Maximum over sequences of the log-perplexity difference, proximal minus behavior.
    pub log_ppl_diff_max: f64,
    /// Minimum over sequences of the log-perplexity difference, proximal minus behavior.
    pub log_ppl_diff_min: f64,
    /// Mean over sequences of the ratio of perplexities, proximal to behavior.
    pub ppl_ratio: f64,
    /// χ² divergence of the two policies, computed per token.
    pub chi2_token: f64,
    /// χ² divergence of the two policies, computed per sequence.
    pub chi2_seq: f64,
    /// Maximum of |p_proximal − p_behavior| over tokens.
    pub probs_diff_max: f64,
    /// Mean of |p_proximal − p_behavior| over tokens.
    pub probs_diff_mean: f64,
    /// Standard deviation of |p_proximal − p_behavior| over tokens.
    pub probs_diff_std: f64,
    /// Correlation of p_proximal and p_behavior over tokens. 1 if either is constant.
    pub probs_correlation: f64,
    /// Effective sample size of the importance weights, as a fraction of the number of tokens.
    pub effective_sample_size: f64,
}

impl Mismatch {
    /// Computes the metrics from sequences. Each sequence is a list of the pairs (log p_proximal,
    /// log p_behavior) of its action tokens. All metrics are 0 if there are no tokens.
    pub fn new(sequences: &[Vec<LogProbPair>], counting: Counting) -> Self {
        let sequences: Vec<&Vec<LogProbPair>> =
            sequences.iter().filter(|sequence| !sequence.is_empty()).collect();
        let tokens = sequences.iter().flat_map(|sequence| sequence.iter().copied());
        if tokens.clone().next().is_none() {
            return Mismatch::default();
        }
        let x = tokens.clone().map(|(proximal, behavior)| proximal - behavior);
        let ratios = x.clone().map(bounded_ratio);
        let mean_ratio = counting.mean(ratios.clone());
        let probs = tokens.map(|(p, b)| (p.exp(), b.exp()));
        let prob_gaps = probs.clone().map(|(p, b)| (p - b).abs());
        let mean_gap = Counting::Exact.mean(prob_gaps.clone());
        // Log-perplexity of each sequence under both policies, and their differences.
        let log_ppls: Vec<LogProbPair> = sequences
            .iter()
            .map(|sequence| {
                let proximal = counting.mean(sequence.iter().map(|(p, _)| *p));
                let behavior = counting.mean(sequence.iter().map(|(_, b)| *b));
                (-proximal, -behavior)
            })
            .collect();
        let differences = log_ppls.iter().map(|(proximal, behavior)| proximal - behavior);
        let sequence_ratios = sequences
            .iter()
            .map(|sequence| bounded_ratio(sequence.iter().map(|(p, b)| p - b).sum::<f64>()));
        // Every sequence counts once.
        let exact = Counting::Exact;
        Mismatch {
            kl: counting.mean(x.clone().map(|x| -x)),
            k3_kl: counting.mean(x.clone().map(|x| x.exp() - 1.0 - x)),
            log_diff_mean: counting.mean(x.clone().map(f64::abs)),
            log_diff_max: x.map(f64::abs).fold(0.0, f64::max),
            training_ppl: exact.mean(log_ppls.iter().map(|(proximal, _)| proximal.exp())),
            rollout_ppl: exact.mean(log_ppls.iter().map(|(_, behavior)| behavior.exp())),
            log_ppl_diff: exact.mean(differences.clone()),
            log_ppl_abs_diff: exact.mean(differences.clone().map(f64::abs)),
            log_ppl_diff_max: differences.clone().fold(f64::NEG_INFINITY, f64::max),
            log_ppl_diff_min: differences.clone().fold(f64::INFINITY, f64::min),
            ppl_ratio: exact.mean(differences.map(f64::exp)),
            chi2_token: counting.mean(ratios.clone().map(|ratio| ratio.powi(2))) - 1.0,
            chi2_seq: exact.mean(sequence_ratios.map(|ratio| ratio.powi(2))) - 1.0,
            probs_diff_max: prob_gaps.clone().fold(0.0, f64::max),
            probs_diff_mean: mean_gap,
            probs_diff_std: exact.variance(prob_gaps, mean_gap).sqrt(),
            probs_correlation: correlation(probs),
            effective_sample_size: 1.0 / counting.mean(ratios.map(|r| (r / mean_ratio).powi(2))),
        }
    }
}

/// Returns the ratio for a log-ratio, which is clamped to ± [`LOG_RATIO_BOUND`] first.
fn bounded_ratio(log_ratio: f64) -> f64 {
    log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
}

/// Returns Pearson's correlation of pairs of numbers, or 1 if the numbers of either side are
/// constant.
fn correlation(pairs: impl Iterator<Item = (f64, f64)> + Clone) -> f64 {
    let mean =
        |component: fn((f64, f64)) -> f64| Counting::Exact.mean(pairs.clone().map(component));
    let mean_a = mean(|(a, _)| a);
    let mean_b = mean(|(_, b)| b);
    let mut ab = 0.0;
    let mut aa = 0.0;
    let mut bb = 0.0;
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
    fn correction_check_rejects_invalid_bounds() {
        let correction =
            |low, high| Correction { bound: Bound::Mask { low, high }, ..Correction::DECOUPLED };
        for (low, high) in [(0.0, 5.0), (0.5, 2.0), (1.0, 1.0)] {
            assert_eq!(correction(low, high).check(), Ok(()));
        }
        for (low, high) in
            [(-1.0, 5.0), (2.0, 0.5), (0.0, 0.0), (0.0, f64::INFINITY), (f64::NAN, 5.0)]
        {
            let found = correction(low, high).check();
            assert!(matches!(found, Err(RlError::Parameter { .. })), "{low} {high}: {found:?}");
        }
        use Statistic::{K1, K2};
        for (statistic, low, high, is_valid) in [
            (K1, None, 2.0, true),
            (K1, Some(0.5), 2.0, true),
            (K2, Some(-1.0), 0.5, true),
            (K1, Some(0.0), 2.0, false),
            (K1, Some(3.0), 2.0, false),
            (K2, None, 0.0, false),
        ] {
            let over = StatisticSpan::Token;
            let rejection = Rejection { statistic, over, low, high, inverted: false };
            match rejection.check() {
                Ok(()) => assert!(is_valid, "{rejection:?}"),
                Err(RlError::Parameter { .. }) => assert!(!is_valid, "{rejection:?}"),
                Err(other) => panic!("{rejection:?}: {other}"),
            }
        }
    }

    #[test]
    fn out_of_bounds_fraction_uses_level_of_correction() {
        let bound = Bound::Clamp { low: 0.0, high: 2.0 };
        let sequences = [vec![1.0, -1.0, 0.0], vec![0.5, 0.5]];
        for (level, want) in [
            (RatioLevel::Token, 0.2),
            // Only the tokens of the second sequence: e > 2.
            (RatioLevel::Sequence, 0.4),
            (RatioLevel::GeometricMean, 0.0),
        ] {
            let correction = Correction { level, bound, normalize: false };
            assert_eq!(correction.out_of_bounds_fraction(&sequences), Some(want), "{level:?}");
            assert_eq!(correction.out_of_bounds_fraction(&[vec![]]), None, "{level:?}");
        }
    }

    /// If every ratio is outside the bounds, the mean is 0, and the weights are not divided by it.
    #[test]
    fn normalization_keeps_all_zero_weights() {
        let correction =
            Correction { bound: Bound::Mask { low: 0.5, high: 2.0 }, ..Correction::DECOUPLED };
        let correction = Correction { normalize: true, ..correction };
        assert_eq!(correction.weights(&[vec![3.0, -3.0]], Counting::Exact), [[0.0, 0.0]]);
        // Of 1, 2 and 0, with a mean of 1.
        let found = correction.weights(&[vec![0.0, 2f64.ln()], vec![3.0]], Counting::Exact);
        assert_eq!(found, [vec![1.0, 2.0], vec![0.0]]);
    }

    #[test]
    fn correlation_of_constant_values_is_1() {
        assert_eq!(correlation([(0.25, 0.5), (0.75, 0.5)].into_iter()), 1.0);
        assert_eq!(correlation([(0.5, 0.25), (0.5, 0.75)].into_iter()), 1.0);
        assert!((correlation([(0.25, 0.75), (0.75, 0.25)].into_iter()) + 1.0).abs() < 1e-12);
    }
}
