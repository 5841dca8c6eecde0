//! Confidence intervals for evaluations: of a success rate, and of a difference between two
//! evaluations.
//!
//! All functions are pure; the bootstrap takes its seed from the caller.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::RlError;

/// The 97.5 % quantile of the standard normal distribution: 95 % of the distribution is within ±
/// this value.
const Z_95: f64 = 1.959_963_984_540_054;

/// An estimate with its 95 % confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Estimated value.
    pub estimate: f64,
    /// Lower end of the 95 % interval.
    pub low: f64,
    /// Upper end of the 95 % interval.
    pub high: f64,
}

impl Interval {
    /// Returns whether `value` is in the confidence interval, ends included.
    pub fn contains(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }
}

/// Computes Wilson's 95 % score interval for a proportion (Wilson 1927). Unlike the normal
/// approximation, it is accurate near 0 and 1 and for few trials. It assumes independent trials.
///
/// # Errors
/// Returns an error if there are no trials, or more successes than trials.
pub fn wilson_interval(successes: u64, trials: u64) -> Result<Interval, RlError> {
    if trials == 0 {
        return Err(RlError::NoObservations);
    }
    if successes > trials {
        return Err(RlError::Proportion { successes, trials });
    }
    let n = trials as f64;
    let p = successes as f64 / n;
    let z2 = Z_95 * Z_95;
    let center = (p + z2 / (2.0 * n)) / (1.0 + z2 / n);
    let half = Z_95 / (1.0 + z2 / n) * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
    // At 0 and 1 the ends are exact; rounding would change them slightly.
    let low = if successes == 0 { 0.0 } else { center - half };
    let high = if successes == trials { 1.0 } else { center + half };
    Ok(Interval { estimate: p, low, high })
}

/// Scores of one observation before and after a change, such as training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScorePair {
    /// Number of the observation's cluster, usually its task. Observations in a cluster can depend
    /// on each other.
    pub cluster: u64,
    /// Score before the change.
    pub before: f64,
    /// Score after the change.
    pub after: f64,
}

/// Computes the mean of after − before, for scores from 0 to 1, with a 95 % interval by the cluster
/// bootstrap. Complete clusters are resampled with replacement, as many as there are, `resamples`
/// times. The interval is between the 2.5 % and 97.5 % quantiles of the mean difference (Efron &
/// Tibshirani 1993, sections 8 and 13; Field & Welsh 2007 for clusters).
///
/// The bootstrap resamples observed values only, so its interval would be a point if all
/// differences are equal. The interval therefore also extends as far as unobserved clusters could
/// move the mean: none of n clusters was of that kind, which bounds their fraction by z² / (n +
/// z²), Wilson's bound for 0 of n, at either end of the range. The bootstrap interval is wider
/// unless there are few clusters or almost no variation.
///
/// The result depends only on the pairs (in any order, up to the rounding of sums), `resamples` and
/// `seed`.
///
/// # Errors
/// Returns an error if there are no pairs or no resamples, or if a score is not finite.
pub fn paired_difference(
    pairs: &[ScorePair],
    resamples: u32,
    seed: u64,
) -> Result<Interval, RlError> {
    let mut clusters: BTreeMap<u64, (f64, f64)> = BTreeMap::new();
    for (index, pair) in pairs.iter().enumerate() {
        let difference = pair.after - pair.before;
        if !difference.is_finite() {
            let value = if pair.before.is_finite() { pair.after } else { pair.before };
            return Err(RlError::Score { index, value });
        }
        let cluster = clusters.entry(pair.cluster).or_default();
        cluster.0 += difference;
        cluster.1 += 1.0;
    }
    bootstrap_mean(&clusters.into_values().collect::<Vec<_>>(), (-1.0, 1.0), resamples, seed)
}

/// Computes the mean of independent scores from 0 to 1, with a 95 % interval as in
/// [`paired_difference`]. For only failures or only successes, it is Wilson's interval.
///
/// # Errors
/// Returns an error if there are no scores or no resamples, or if a score is not finite.
pub fn mean_score(scores: &[f64], resamples: u32, seed: u64) -> Result<Interval, RlError> {
    if let Some(index) = scores.iter().position(|score| !score.is_finite()) {
        return Err(RlError::Score { index, value: scores[index] });
    }
    let clusters: Vec<(f64, f64)> = scores.iter().map(|score| (*score, 1.0)).collect();
    bootstrap_mean(&clusters, (0.0, 1.0), resamples, seed)
}

/// Bootstraps the mean over `clusters`, each of which has the sum and the count of its
/// observations. The means of clusters are in `range`; a mean outside extends the range.
fn bootstrap_mean(
    clusters: &[(f64, f64)],
    range: (f64, f64),
    resamples: u32,
    seed: u64,
) -> Result<Interval, RlError> {
    if clusters.is_empty() || resamples == 0 {
        return Err(RlError::NoObservations);
    }
    let mut random = SplitMix(seed);
    let mut means: Vec<f64> = (0..resamples)
        .map(|_| {
            overall_mean(clusters.iter().map(|_| clusters[random.random_index(clusters.len())]))
        })
        .collect();
    means.sort_by(f64::total_cmp);
    let estimate = overall_mean(clusters.iter().copied());
    let cluster_means = clusters.iter().map(|(sum, count)| sum / count);
    let lowest = cluster_means.clone().fold(range.0, f64::min);
    let highest = cluster_means.fold(range.1, f64::max);
    let unseen = Z_95 * Z_95 / (clusters.len() as f64 + Z_95 * Z_95);
    Ok(Interval {
        estimate,
        low: quantile(&means, 0.025).min(estimate - unseen * (estimate - lowest)),
        high: quantile(&means, 0.975).max(estimate + unseen * (highest - estimate)),
    })
}

/// Returns the mean over all observations of `clusters`, each of which has the sum and the count of
/// its observations.
fn overall_mean(clusters: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (sum, count) = clusters.fold((0.0, 0.0), |(sum, count), (s, c)| (sum + s, count + c));
    sum / count
}

/// Returns the quantile `q` of sorted, non-empty numbers, interpolated between neighbors.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let below = at.floor() as usize;
    let above = at.ceil() as usize;
    sorted[below] + (sorted[above] - sorted[below]) * (at - at.floor())
}

/// The SplitMix64 generator (Steele, Lea & Flood, OOPSLA 2014): small, and sufficient to sample
/// indices. Token sampling uses a counter-based generator in another crate.
pub(crate) struct SplitMix(pub u64);

impl SplitMix {
    /// Returns a random index below `n`, which must be at least 1. The bias of the multiplication
    /// is below n / 2⁶⁴.
    pub fn random_index(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        ((u128::from(z) * n as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// 10 of 100 and 0 of 10: values computed by hand from Wilson's formula. At 0, they also agree
    /// with the closed form z² / (n + z²).
    #[test]
    fn wilson_matches_known_values() {
        let i = wilson_interval(10, 100).unwrap();
        assert!((i.low - 0.055_229_1).abs() < 1e-6 && (i.high - 0.174_365_7).abs() < 1e-6, "{i:?}");
        let i = wilson_interval(0, 10).unwrap();
        assert_eq!(i.low, 0.0);
        assert!((i.high - Z_95 * Z_95 / (10.0 + Z_95 * Z_95)).abs() < 1e-12, "{i:?}");
        let i = wilson_interval(10, 10).unwrap();
        assert!((i.low - 10.0 / (10.0 + Z_95 * Z_95)).abs() < 1e-12 && i.high == 1.0, "{i:?}");
        assert_eq!(wilson_interval(0, 0), Err(RlError::NoObservations));
        assert_eq!(wilson_interval(3, 2), Err(RlError::Proportion { successes: 3, trials: 2 }));
    }

    /// At 0.5, 1.5 and 3.6 of the way.
    #[test]
    fn quantile_interpolates_between_neighbors() {
        assert_eq!(quantile(&[0.0, 1.0, 4.0], 0.25), 0.5);
        assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.75), 3.0);
        assert!((quantile(&[10.0, 20.0, 40.0, 80.0, 160.0], 0.9) - 128.0).abs() < 1e-9);
        assert_eq!([0.0, 1.0].map(|q| quantile(&[3.0, 5.0], q)), [3.0, 5.0]);
        assert_eq!(quantile(&[3.0], 0.5), 3.0);
    }

    /// The published first numbers of the generator for the seed 1234567. An index below 2⁶³ is
    /// half of the number.
    #[test]
    fn split_mix_matches_published_numbers() {
        let mut random = SplitMix(1_234_567);
        let published: [u64; 5] = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        for number in published {
            assert_eq!(random.random_index(1 << 63) as u64, number >> 1);
        }
    }

    #[test]
    fn bootstrap_is_deterministic_and_rejects_empty_input() {
        let pairs: Vec<_> = (0..40)
            .map(|i| ScorePair { cluster: i, before: (i % 3) as f64, after: (i % 5) as f64 })
            .collect();
        let once = paired_difference(&pairs, 500, 1).unwrap();
        assert_eq!(once, paired_difference(&pairs, 500, 1).unwrap());
        assert_ne!(once, paired_difference(&pairs, 500, 2).unwrap());
        assert_eq!(paired_difference(&[], 500, 1), Err(RlError::NoObservations));
        assert_eq!(paired_difference(&pairs, 0, 1), Err(RlError::NoObservations));
        let bad = [ScorePair { cluster: 0, before: 0.0, after: f64::NAN }];
        assert!(matches!(paired_difference(&bad, 10, 1), Err(RlError::Score { index: 0, .. })));
    }

    /// For independent differences, the interval must agree with the normal approximation, mean ±
    /// 1.96 σ/√n.
    #[test]
    fn bootstrap_agrees_with_normal_approximation() {
        let n = 400;
        let pairs: Vec<_> = (0..n)
            .map(|i| ScorePair {
                cluster: i,
                before: 0.0,
                after: if i % 4 == 0 { 1.0 } else { 0.0 },
            })
            .collect();
        let got = paired_difference(&pairs, 4000, 3).unwrap();
        let half = Z_95 * (0.25f64 * 0.75 / n as f64).sqrt();
        assert_eq!(got.estimate, 0.25);
        assert!((got.low - (0.25 - half)).abs() < 0.006, "{got:?} {half}");
        assert!((got.high - (0.25 + half)).abs() < 0.006, "{got:?} {half}");
        assert!(!got.contains(0.0));
    }

    #[track_caller]
    fn assert_ends(interval: Interval, low: f64, high: f64) {
        assert!(
            (interval.low - low).abs() < 1e-12 && (interval.high - high).abs() < 1e-12,
            "{interval:?}, expected {low} to {high}"
        );
    }

    /// Returns `n` equal pairs, each in a cluster of its own.
    fn equal_pairs(n: u64, before: f64, after: f64) -> Vec<ScorePair> {
        (0..n).map(|cluster| ScorePair { cluster, before, after }).collect()
    }

    /// If the observations do not vary, the interval is Wilson's at 0 or at 1, on both sides of a
    /// constant difference.
    #[test]
    fn intervals_of_constant_scores_match_wilson() {
        for n in [1, 10, 200] {
            let wrong = mean_score(&vec![0.0; n as usize], 200, 1).unwrap();
            let right = mean_score(&vec![1.0; n as usize], 200, 1).unwrap();
            let none = wilson_interval(0, n).unwrap();
            let all = wilson_interval(n, n).unwrap();
            assert_ends(wrong, 0.0, none.high);
            assert_ends(right, all.low, 1.0);
            let same = paired_difference(&equal_pairs(n, 1.0, 1.0), 200, 1).unwrap();
            assert_ends(same, -none.high, none.high);
            assert!(same.contains(0.0));
            let better = paired_difference(&equal_pairs(n, 0.0, 1.0), 200, 1).unwrap();
            assert_ends(better, 1.0 - 2.0 * none.high, 1.0);
        }
        // All scores of one half: the interval extends in both directions.
        let half = wilson_interval(0, 10).unwrap().high / 2.0;
        assert_ends(mean_score(&[0.5; 10], 200, 1).unwrap(), 0.5 - half, 0.5 + half);
        // A little variation does not make the interval smaller than no variation.
        let varied = mean_score(&[0.0, 0.0, 0.0, 0.0, 0.125], 2000, 1).unwrap();
        let constant = mean_score(&[0.0; 5], 2000, 1).unwrap();
        assert!(varied.high > constant.high && constant.high > 0.4, "{varied:?} {constant:?}");
        // Scores outside 0..=1 extend the range.
        let outside = mean_score(&[-2.0; 4], 200, 1).unwrap();
        assert!(outside.low == -2.0 && outside.high > -2.0 && outside.high < 1.0, "{outside:?}");
        assert_eq!(mean_score(&[], 10, 1), Err(RlError::NoObservations));
        assert!(matches!(
            mean_score(&[0.0, f64::NAN], 10, 1),
            Err(RlError::Score { index: 1, .. })
        ));
    }

    /// Copies of an observation in one cluster add no information: the interval must not shrink.
    #[test]
    fn clustered_copies_do_not_shrink_interval() {
        let [single, tenfold] = [1, 10].map(|copies| {
            let pairs: Vec<ScorePair> = (0..100 * copies)
                .map(|i| i / copies)
                .map(|cluster| ScorePair { cluster, before: 0.0, after: (cluster % 2) as f64 })
                .collect();
            let interval = paired_difference(&pairs, 2000, 5).unwrap();
            interval.high - interval.low
        });
        assert!((single - tenfold).abs() < 1e-9, "{single} {tenfold}");
    }

    proptest! {
        #[test]
        fn wilson_contains_estimate(trials in 1u64..500, rate in 0.0f64..=1.0) {
            let successes = (rate * trials as f64) as u64;
            let i = wilson_interval(successes, trials).unwrap();
            prop_assert!(0.0 <= i.low && i.high <= 1.0 && i.contains(i.estimate), "{:?}", i);
        }
    }
}
