//! Finds the step of a run at which two scorers start to diverge. If the new scorer is trusted,
//! this is the start of a reward hack.
//!
//! The new scorer may be noisier or stricter than the old scorer from the start. This is not a
//! divergence as long as the new score of an attempt depends only on its old score, and not on the
//! step. So the null hypothesis is: given the old score, new scores are exchangeable over steps.
//!
//! # Test
//! Attempts are divided into strata by their old score. The residual r of an attempt is its new
//! score minus the mean of its stratum, and s² is the variance of its stratum. Every step t gets
//! the sums R(t) = Σ r and V(t) = Σ s². The statistic of a split before step k is Z(k) = Σ_{t<k}
//! R(t) / √(Σ_{t<k} V · Σ_{t≥k} V / Σ V), and the test takes max Z(k): new scores fall while old
//! ones do not, as after a reward hack. A rise of new scores is ignored. The statistic is divided
//! by √φ, where φ is the mean squared difference of successive R/√V, halved, and at least 1 (Rice
//! 1984): attempts of a step whose errors are correlated then do not count as independent. The
//! p-value is computed by a permutation test, which exchanges the new scores of attempts within a
//! stratum.
//!
//! # Onset
//! Residuals are recomputed against the strata before the split. The onset is the start j of the
//! trapezoid (0 before j, then linear over L steps, then constant) with the largest reduction of
//! the weighted squared error over j and L. Its interval is the percentile interval of a bootstrap
//! over the attempts of each step, widened to contain the estimate.

use std::collections::BTreeMap;

use crate::stats::SplitMix;

/// The scores of one attempt by two scorers, and the attempt's step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TwoScores {
    /// Index of the attempt's step, in the order of the run.
    pub step: usize,
    /// Score that was recorded, from the old scorer.
    pub old: f64,
    /// Score by the new scorer.
    pub new: f64,
}

/// The step at which two scorers start to diverge, with its confidence interval and the evidence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreDivergence {
    /// Index of the first step at which the old scorer overrates attempts, relative to the new
    /// scorer.
    pub step: usize,
    /// First step of the 95 % bootstrap interval of `step`.
    pub low: usize,
    /// Last step of the 95 % bootstrap interval of `step`.
    pub high: usize,
    /// Mean change of the new score after `step`, at an equal old score. It is negative.
    pub change: f64,
    /// p-value of the permutation test, whose null hypothesis is that the scorers do not diverge.
    pub p_value: f64,
}

/// Significance level of the permutation test: in one of 1,000 runs without a divergence, the test
/// reports one.
pub const SIGNIFICANCE: f64 = 0.001;
/// Number of permutations of the test. The smallest possible p-value is 1/2000.
const PERMUTATIONS: u32 = 1999;
/// Number of bootstrap resamples from which the interval of the onset is computed.
const RESAMPLES: u32 = 400;
/// Maximum number of strata of old scores. More distinct old scores are divided into quantiles.
const MAX_STRATA: usize = 8;
/// Numbers of steps over which a divergence can grow to its full size.
const RAMPS: [usize; 7] = [1, 2, 3, 5, 8, 12, 20];

/// Finds the step at which the new scores start to diverge from the old scores. Returns `None` if
/// the test does not reject the null hypothesis at [`SIGNIFICANCE`], in particular if there are
/// fewer than two steps. `seed` determines the permutations.
///
/// # Panics
/// Panics if a score is NaN.
pub fn find_divergence(scores: &[TwoScores], seed: u64) -> Option<ScoreDivergence> {
    let steps = scores.iter().map(|score| score.step + 1).max()?;
    let strata = assign_strata(scores);
    let mut random = SplitMix(seed);
    let new: Vec<f64> = scores.iter().map(|score| score.new).collect();
    let pooled = StratumStatistics::fit(&strata, &new, |_| true);
    let variances = sum_by_step(scores, steps, |i| pooled.variance(strata[i]));
    let statistic = |new: &[f64]| {
        let residuals = sum_by_step(scores, steps, |i| new[i] - pooled.means[strata[i]]);
        largest_split(&residuals, &variances)
    };
    let (observed, split) = statistic(&new)?;
    let mut members: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (i, stratum) in strata.iter().enumerate() {
        members.entry(*stratum).or_default().push(i);
    }
    let mut permuted = new.clone();
    let mut exceeding = 1;
    for _ in 0..PERMUTATIONS {
        for members in members.values() {
            for i in (1..members.len()).rev() {
                permuted.swap(members[i], members[random.random_index(i + 1)]);
            }
        }
        let larger = statistic(&permuted).is_some_and(|(found, _)| found >= observed - 1e-9);
        exceeding += u32::from(larger);
    }
    let p_value = f64::from(exceeding) / f64::from(PERMUTATIONS + 1);
    if p_value > SIGNIFICANCE {
        return None;
    }
    // A slow change starts before the split, so the baseline is fitted twice.
    let mut start = split;
    for _ in 0..2 {
        start = ScoreDeviations::new(scores, &strata, start, steps).estimate(split)?.0;
    }
    let onset = ScoreDeviations::new(scores, &strata, start, steps);
    let (step, change) = onset.estimate(split)?;
    let mut found: Vec<usize> = (0..RESAMPLES)
        .filter_map(|_| Some(onset.resample(&mut random).estimate(split)?.0))
        .chain([step])
        .collect();
    found.sort_unstable();
    let tail = found.len() / 40;
    let (low, high) = (found[tail].min(step), found[found.len() - 1 - tail].max(step));
    Some(ScoreDivergence { step, low, high, change, p_value })
}

/// Returns the stratum of each attempt: its old score, or the quantile of its old score.
fn assign_strata(scores: &[TwoScores]) -> Vec<usize> {
    let mut sorted: Vec<f64> = scores.iter().map(|score| score.old + 0.0).collect();
    sorted.sort_by(f64::total_cmp);
    let mut bounds = sorted.clone();
    bounds.dedup();
    if bounds.len() > MAX_STRATA {
        bounds = (1..MAX_STRATA).map(|q| sorted[q * sorted.len() / MAX_STRATA]).collect();
        bounds.dedup();
    }
    scores.iter().map(|score| bounds.partition_point(|bound| *bound < score.old)).collect()
}

/// Means and variances of new scores, by stratum of old scores.
struct StratumStatistics {
    means: Vec<f64>,
    variances: Vec<f64>,
    counts: Vec<f64>,
    all: f64,
    range: f64,
}

impl StratumStatistics {
    fn fit(strata: &[usize], new: &[f64], is_used: impl Fn(usize) -> bool) -> Self {
        let len = strata.iter().max().map_or(0, |last| last + 1);
        let (mut sums, mut squares, mut counts) = (vec![0.0; len], vec![0.0; len], vec![0.0; len]);
        let center = new.iter().sum::<f64>() / new.len().max(1) as f64;
        for (i, (&stratum, &score)) in strata.iter().zip(new).enumerate() {
            if is_used(i) {
                counts[stratum] += 1.0;
                sums[stratum] += score - center;
                squares[stratum] += (score - center) * (score - center);
            }
        }
        let total: f64 = counts.iter().sum();
        let all = center + sums.iter().sum::<f64>() / total.max(1.0);
        let centered: Vec<f64> = (0..len)
            .map(|s| if counts[s] > 0.0 { sums[s] / counts[s] } else { all - center })
            .collect();
        let variances = (0..len)
            .map(|s| (squares[s] / counts[s].max(1.0) - centered[s] * centered[s]).max(0.0))
            .collect();
        let means = centered.iter().map(|mean| center + mean).collect();
        let [low, high] = [f64::min, f64::max].map(|of| new.iter().copied().fold(center, of));
        StratumStatistics { means, variances, counts, all, range: high - low }
    }

    /// Returns the variance of the new scores in a stratum. It is at least the variance that the
    /// stratum would have if, of two more attempts, exactly one differed by the full range: scores
    /// that have always agreed may still disagree once.
    fn variance(&self, stratum: usize) -> f64 {
        let n = self.counts[stratum] + 2.0;
        self.variances[stratum].max(self.range * self.range * (n - 1.0) / (n * n)).max(1e-12)
    }
}

/// Sums a value of the attempts of each step.
fn sum_by_step(scores: &[TwoScores], steps: usize, value: impl Fn(usize) -> f64) -> Vec<f64> {
    let mut sums = vec![0.0; steps];
    for (i, score) in scores.iter().enumerate() {
        sums[score.step] += value(i);
    }
    sums
}

/// Returns the largest test statistic over all splits of the steps, and the first step after the
/// split that has it. Returns `None` if no split has a finite statistic.
fn largest_split(residuals: &[f64], variances: &[f64]) -> Option<(f64, usize)> {
    let total: f64 = variances.iter().sum();
    let sum: f64 = residuals.iter().sum();
    let (mut before, mut variance) = (0.0, 0.0);
    let mut best: Option<(f64, usize)> = None;
    for step in 1..residuals.len() {
        before += residuals[step - 1] - sum * variances[step - 1] / total;
        variance += variances[step - 1];
        let scale = (variance * (total - variance) / total).sqrt();
        let z: f64 = before / scale;
        if z.is_finite() && best.is_none_or(|(largest, _)| z > largest) {
            best = Some((z, step));
        }
    }
    let z: Vec<f64> = residuals
        .iter()
        .zip(variances)
        .filter(|(_, variance)| **variance > 0.0)
        .map(|(residual, variance)| residual / variance.sqrt())
        .collect();
    let differences: f64 = z.windows(2).map(|pair| (pair[1] - pair[0]).powi(2)).sum();
    let dispersion = (differences / (2.0 * (z.len().max(2) - 1) as f64)).max(1.0);
    best.map(|(z, step)| (z / dispersion.sqrt(), step))
}

/// Deviations of new scores from the relation between old and new scores before a split.
struct ScoreDeviations {
    /// Residuals of the attempts of each step.
    residuals: Vec<Vec<f64>>,
    /// Minimum variance of the residuals of a step.
    variances: Vec<f64>,
}

impl ScoreDeviations {
    fn new(scores: &[TwoScores], strata: &[usize], split: usize, steps: usize) -> Self {
        let new: Vec<f64> = scores.iter().map(|score| score.new).collect();
        let before = StratumStatistics::fit(strata, &new, |i| scores[i].step < split.max(1));
        let mut residuals = vec![Vec::new(); steps];
        for (score, &stratum) in scores.iter().zip(strata) {
            let is_known = before.counts[stratum] > 0.0;
            let mean = if is_known { before.means[stratum] } else { before.all };
            residuals[score.step].push(score.new - mean);
        }
        let sums = sum_by_step(scores, steps, |i| before.variance(strata[i]));
        let counts = residuals.iter().map(|of_step: &Vec<f64>| of_step.len().max(1) as f64);
        let variances = sums.iter().zip(counts).map(|(sum, count)| sum / count).collect();
        ScoreDeviations { residuals, variances }
    }

    /// Returns the start of the trapezoid that fits the residuals best, which is at most `last`,
    /// and its height, which is negative. Returns `None` if no trapezoid fits.
    fn estimate(&self, last: usize) -> Option<(usize, f64)> {
        let points: Vec<(f64, f64)> = self
            .residuals
            .iter()
            .zip(&self.variances)
            .map(|(of_step, min_variance)| {
                let n = of_step.len() as f64;
                if of_step.is_empty() {
                    return (0.0, 0.0);
                }
                let mean = of_step.iter().sum::<f64>() / n;
                let spread = of_step.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / n;
                (mean, n / spread.max(*min_variance))
            })
            .collect();
        let mut best: Option<(f64, usize, f64)> = None;
        for start in 1..=last.min(points.len() - 1) {
            for ramp in RAMPS {
                let (mut product, mut square) = (0.0, 0.0);
                for (i, (deviation, weight)) in points[start..].iter().enumerate() {
                    let height = ((i + 1) as f64 / ramp as f64).min(1.0);
                    product += weight * height * deviation;
                    square += weight * height * height;
                }
                let gain = product * product / square;
                if product < 0.0
                    && gain.is_finite()
                    && best.is_none_or(|(largest, ..)| gain > largest)
                {
                    best = Some((gain, start, product / square));
                }
            }
        }
        best.map(|(_, start, height)| (start, height))
    }

    /// Returns a bootstrap resample: the attempts of each step, sampled with replacement.
    fn resample(&self, random: &mut SplitMix) -> Self {
        let mut residuals = self.residuals.clone();
        for (sampled, observed) in residuals.iter_mut().zip(&self.residuals) {
            sampled.fill_with(|| observed[random.random_index(observed.len())]);
        }
        ScoreDeviations { residuals, variances: self.variances.clone() }
    }
}

#[cfg(test)]
#[path = "score_divergence_tests.rs"]
mod tests;
