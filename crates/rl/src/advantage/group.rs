//! Advantages by comparison of outcomes within groups, and the statistics of groups that they need.
//!
//! A *group* contains the rollouts of one task, or other rollouts to compare, such as the rollouts
//! of one role or one seat in a game. Scores are compared within the group, so no learned value
//! function is needed.

use serde::{Deserialize, Serialize};

use super::Rollout;
use crate::RlError;

/// Term added to a group's standard deviation before dividing by it, as in common GRPO
/// implementations, so that published hyperparameters apply. It is far below the standard deviation
/// of any distinct scores in 0..=1.
pub const STD_EPSILON: f64 = 1e-6;

/// Estimator that computes advantages from the scores of a group, relative to a baseline.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupBaseline {
    /// Baseline that is subtracted from a score.
    pub compare: Compare,
    /// Whether advantages are divided by the standard deviation of the group's scores: GRPO (Shao
    /// et al. 2024, section 4.1.2) divides, Dr.GRPO (Liu et al. 2025) does not.
    pub scale_by_std: bool,
    /// Advantage of a rollout that is the only one of its group.
    pub singleton: Singleton,
    /// Factor by which all advantages are multiplied.
    pub scale: f64,
    /// Score above which a rollout is a success. A success never has a negative advantage, and any
    /// other rollout never a positive one, whatever the other scores of the group are. `None` sets
    /// no threshold. Must not be NaN.
    pub success: Option<f64>,
}

impl Default for GroupBaseline {
    fn default() -> Self {
        GroupBaseline {
            compare: Compare::default(),
            scale_by_std: false,
            singleton: Singleton::default(),
            scale: 1.0,
            success: None,
        }
    }
}

/// Baseline that is subtracted from the score of a rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compare {
    /// The baseline is the mean score of the group: GRPO and Dr.GRPO.
    #[default]
    Mean,
    /// The baseline is the mean score of the group's other rollouts, which is unbiased: RLOO
    /// (Ahmadian et al. 2024).
    #[serde(rename(serialize = "others"), alias = "others")]
    LeaveOneOut,
    /// The baseline is the mean score weighted by length, which has minimum variance if all tokens'
    /// gradients have the same norm: OPO (Hao et al. 2025).
    LengthWeightedMean,
    /// The baseline is the group's mean score, and advantages are multiplied by B / (B − M). M of a
    /// step's B rollouts are in groups without an advantage, whose zeros would shrink the gradient
    /// of the other groups. GPG (Chu et al. 2025, accurate gradient estimation).
    MeanOfInformative,
    /// The baseline is the group's mean score, and advantages are multiplied by B / the number of
    /// rollouts whose score is not 0. This is verl's GPG. It counts a failure in a mixed group as a
    /// rollout without a gradient, and a group of successes as a group with a gradient. For
    /// comparisons only.
    MeanOfNonzero,
    /// The baseline is the second-best score of k rollouts. An advantage is a mean over all ways to
    /// choose k rollouts of the group: the amount by which this rollout exceeds the second best if
    /// it is the best, otherwise 0. This is the leave-one-out estimator with subsets of k − 1 of
    /// Walder and Karkhanis 2025. Summed over the group, −A log p then has exactly the gradient of
    /// the expected best of k. With k = n, only the best rollout has an advantage.
    SecondBest {
        /// Number k of rollouts that are chosen from the group, at least 2. `None`, or a number
        /// above the group's size, means the complete group.
        #[serde(default)]
        k: Option<usize>,
    },
}

/// Advantage of a rollout that is the only one of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Singleton {
    /// The advantage is 0, because there is no other rollout to compare with.
    #[default]
    Zero,
    /// The advantage is the score itself, as if mean 0 and standard deviation 1 were known, like
    /// verl. It reinforces any behavior of a single rollout, so it is for comparisons only.
    Score,
}

impl GroupBaseline {
    /// Checks the parameters of the baseline.
    ///
    /// # Errors
    /// Returns an error that names the first parameter out of range.
    pub(super) fn check(&self) -> Result<(), RlError> {
        RlError::check_positive("scale of the advantage", self.scale)?;
        if let Some(success) = self.success {
            RlError::check_range(
                !success.is_nan(),
                "success of the advantage",
                success,
                "a number",
            )?;
        }
        match self.compare {
            Compare::SecondBest { k: Some(k) } => {
                RlError::check_range(k >= 2, "k of the advantage", k as f64, "at least 2")
            }
            _ => Ok(()),
        }
    }

    /// Creates GRPO's baseline: the mean, with advantages divided by the standard deviation.
    pub fn scaled() -> Self {
        GroupBaseline { scale_by_std: true, ..GroupBaseline::default() }
    }

    /// Computes the advantages of one group of scores.
    ///
    /// # Errors
    /// Returns an error with the first score that is not finite.
    pub fn advantages(&self, scores: &[f64]) -> Result<Vec<f64>, RlError> {
        let rollouts: Vec<Rollout> =
            scores.iter().map(|&score| Rollout { score, ..Rollout::default() }).collect();
        self.group_advantages(&rollouts.iter().collect::<Vec<_>>())
    }

    /// Computes the advantages of the rollouts of one group. If all scores of the group are equal,
    /// all advantages are exactly 0.
    pub(super) fn group_advantages(&self, rollouts: &[&Rollout]) -> Result<Vec<f64>, RlError> {
        let scores: Vec<f64> = rollouts.iter().map(|rollout| rollout.score).collect();
        if let Some(index) = scores.iter().position(|s| !s.is_finite()) {
            return Err(RlError::Score { index, value: scores[index] });
        }
        let differences = self.compare_scores(&scores, rollouts);
        let advantages = differences.into_iter().zip(rollouts);
        Ok(advantages
            .map(|(advantage, rollout)| self.limit_advantage(advantage, rollout))
            .collect())
    }

    /// Applies a rollout's ceiling, the sign that its success permits, and the scale to an
    /// advantage.
    fn limit_advantage(&self, advantage: f64, rollout: &Rollout) -> f64 {
        let advantage = rollout.ceiling.map_or(advantage, |ceiling| advantage.min(ceiling));
        self.scale
            * match self.success {
                Some(success) if rollout.score <= success => advantage.min(0.0),
                Some(_) => advantage.max(0.0),
                None => advantage,
            }
    }

    fn compare_scores(&self, scores: &[f64], rollouts: &[&Rollout]) -> Vec<f64> {
        if let ([score], Singleton::Score) = (scores, self.singleton) {
            return vec![if self.scale_by_std { score / (1.0 + STD_EPSILON) } else { *score }];
        }
        if all_equal(scores) {
            // Rounding in the mean would leave noise, which dividing by the standard deviation
            // would amplify.
            return vec![0.0; scores.len()];
        }
        let (mean, deviation) = mean_and_deviation(scores);
        let n = scores.len() as f64;
        let scale = if self.scale_by_std { 1.0 / (deviation + STD_EPSILON) } else { 1.0 };
        let differences: Vec<f64> = match self.compare {
            Compare::Mean | Compare::MeanOfInformative | Compare::MeanOfNonzero => {
                scores.iter().map(|s| s - mean).collect()
            }
            Compare::LeaveOneOut => scores.iter().map(|s| (s - mean) * n / (n - 1.0)).collect(),
            Compare::LengthWeightedMean => {
                let lengths: Vec<f64> = rollouts
                    .iter()
                    .map(|rollout| {
                        rollout.sequences.iter().map(super::Sequence::len).sum::<usize>()
                    })
                    .map(|length| length as f64)
                    .collect();
                let total: f64 = lengths.iter().sum();
                let weighted: f64 = scores.iter().zip(&lengths).map(|(s, l)| s * l).sum();
                let baseline = if total > 0.0 { weighted / total } else { mean };
                scores.iter().map(|s| s - baseline).collect()
            }
            Compare::SecondBest { k } => {
                margins_over_second_best(scores, k.unwrap_or(scores.len()))
            }
        };
        differences.into_iter().map(|d| d * scale).collect()
    }
}

/// Returns, for each of at least two scores, the mean amount by which it exceeds the best of the
/// others among `k` scores, over all choices of k.
///
/// If score i is the best and score j the second best of a choice, the remaining k − 2 are from the
/// scores below j. With ascending scores, Aᵢ = Σ_{j<i} (sᵢ − sⱼ) C(j, k − 2) / C(n, k), with j from
/// 0.
fn margins_over_second_best(scores: &[f64], k: usize) -> Vec<f64> {
    let n = scores.len();
    let k = k.min(scores.len());
    let mut rising: Vec<usize> = (0..n).collect();
    rising.sort_by(|a, b| scores[*a].total_cmp(&scores[*b]));
    // C(j, k − 2) / C(n, k) from the largest j down, so that no binomial coefficient is computed.
    let mut fractions = vec![0.0; n - 1];
    let mut fraction = (k * (k - 1)) as f64 / (n * (n - 1)) as f64;
    for j in (k - 2..n - 1).rev() {
        fractions[j] = fraction;
        fraction *= (j + 2 - k) as f64 / j as f64;
    }
    let mut advantages = vec![0.0; n];
    for (i, &at) in rising.iter().enumerate() {
        advantages[at] = rising[..i]
            .iter()
            .zip(&fractions)
            .map(|(below, fraction)| (scores[at] - scores[*below]) * fraction)
            .sum();
    }
    advantages
}

pub(super) fn all_equal(scores: &[f64]) -> bool {
    scores.windows(2).all(|pair| pair[0] == pair[1])
}

/// Returns the mean and the sample standard deviation of at least two scores.
pub(super) fn mean_and_deviation(scores: &[f64]) -> (f64, f64) {
    let n = scores.len() as f64;
    let mean = scores.iter().sum::<f64>() / n;
    let squares = scores.iter().map(|s| (s - mean) * (s - mean)).sum::<f64>();
    (mean, (squares / (n - 1.0)).sqrt())
}

/// Statistics of the groups of rollouts of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct GroupStats {
    /// Number of groups with at least one rollout.
    pub groups: usize,
    /// Number of rollouts, over all groups.
    pub rollouts: usize,
    /// Mean score over all rollouts of the step.
    pub mean: f64,
    /// Mean over groups of the group's best score.
    pub best: f64,
    /// Mean over groups of the standard deviation of the group's scores. Groups of one rollout are
    /// ignored.
    pub deviation: f64,
    /// Fraction of zero-variance groups, whose scores are all equal. Includes groups of one
    /// rollout.
    pub degenerate: f64,
}

impl GroupStats {
    /// Computes the statistics of `groups`, each a list of scores. Empty groups are ignored.
    /// Without groups, all statistics are 0.
    pub fn new<S: AsRef<[f64]>>(groups: &[S]) -> Self {
        let groups: Vec<&[f64]> =
            groups.iter().map(AsRef::as_ref).filter(|g| !g.is_empty()).collect();
        let best: Vec<f64> =
            groups.iter().map(|g| g.iter().copied().fold(f64::NEG_INFINITY, f64::max)).collect();
        let deviations: Vec<f64> =
            groups.iter().filter(|g| g.len() > 1).map(|g| mean_and_deviation(g).1).collect();
        let degenerate: Vec<f64> =
            groups.iter().map(|g| if all_equal(g) { 1.0 } else { 0.0 }).collect();
        GroupStats {
            groups: groups.len(),
            rollouts: groups.iter().map(|g| g.len()).sum(),
            mean: mean_or_zero(&groups.concat()),
            best: mean_or_zero(&best),
            deviation: mean_or_zero(&deviations),
            degenerate: mean_or_zero(&degenerate),
        }
    }
}

fn mean_or_zero(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn zero_variance_groups_get_zero_advantages() {
        for scale_by_std in [false, true] {
            let baseline = GroupBaseline { scale_by_std, ..GroupBaseline::default() };
            assert_eq!(baseline.advantages(&[0.7]).unwrap(), [0.0]);
            // In f64, the mean of these scores is not exactly 0.1.
            assert_eq!(baseline.advantages(&[0.1; 3]).unwrap(), [0.0; 3]);
            assert_eq!(baseline.advantages(&[]).unwrap(), [0.0; 0]);
        }
    }

    #[test]
    fn advantages_reject_nan_scores() {
        let rejected = GroupBaseline::default().advantages(&[1.0, f64::NAN]);
        assert!(matches!(rejected, Err(RlError::Score { index: 1, .. })), "{rejected:?}");
    }

    #[test]
    fn group_stats_match_hand_computed_values() {
        let stats = GroupStats::new(&[vec![1.0, 0.0], vec![1.0, 1.0], vec![], vec![0.0]]);
        assert_eq!((stats.groups, stats.rollouts), (3, 5));
        assert_eq!((stats.mean, stats.best), (0.6, 2.0 / 3.0));
        assert!((stats.deviation - 0.5f64.sqrt() / 2.0).abs() < 1e-15);
        assert_eq!(stats.degenerate, 2.0 / 3.0);
        assert_eq!(GroupStats::new::<Vec<f64>>(&[]), GroupStats::default());
    }

    /// Computes the advantages by enumerating all choices of k.
    fn second_best_of_choices(scores: &[f64], k: usize) -> Vec<f64> {
        let n = scores.len();
        let mut sums = vec![0.0; n];
        let mut choices = 0.0;
        for chosen in (0u32..1 << n).filter(|chosen| chosen.count_ones() as usize == k) {
            choices += 1.0;
            let members: Vec<usize> = (0..n).filter(|i| chosen & 1 << i != 0).collect();
            let best = members.iter().map(|j| scores[*j]).fold(f64::MIN, f64::max);
            for &i in &members {
                let rest = members.iter().filter(|j| **j != i);
                sums[i] += best - rest.map(|j| scores[*j]).fold(f64::MIN, f64::max);
            }
        }
        sums.iter().map(|sum| sum / choices).collect()
    }

    #[test]
    fn second_best_baseline_handles_large_groups() {
        // One success in 1000: it is the best in every choice of k that contains it, a fraction k /
        // n.
        let mut scores = vec![0.0; 1000];
        scores[17] = 1.0;
        for k in [2, 10, 500, 999, 1000] {
            let compare = Compare::SecondBest { k: Some(k) };
            let found =
                GroupBaseline { compare, ..GroupBaseline::default() }.advantages(&scores).unwrap();
            assert!((found[17] - k as f64 / 1000.0).abs() < 1e-12, "{k}: {}", found[17]);
            assert_eq!(found.iter().sum::<f64>(), found[17]);
        }
    }

    #[test]
    fn second_best_baseline_limits_k_to_group_size() {
        let of =
            |k| GroupBaseline { compare: Compare::SecondBest { k }, ..GroupBaseline::default() };
        let scores = [0.25, 1.0, 0.5, 0.0];
        assert_eq!(of(None).advantages(&scores).unwrap(), [0.0, 0.5, 0.0, 0.0]);
        assert_eq!(of(Some(9)).advantages(&scores).unwrap(), of(None).advantages(&scores).unwrap());
        let few = of(Some(1)).check();
        assert!(
            matches!(few, Err(RlError::Parameter { name: "k of the advantage", .. })),
            "{few:?}"
        );
    }

    proptest! {
        /// The closed form is the mean over all choices, also with equal scores.
        #[test]
        fn second_best_baseline_matches_enumerated_choices(scores in prop::collection::vec(0u8..5, 2..9), k in 2usize..9) {
            let scores: Vec<f64> = scores.into_iter().map(|s| f64::from(s) / 4.0).collect();
            prop_assume!(k <= scores.len());
            let compare = Compare::SecondBest { k: Some(k) };
            let found = GroupBaseline { compare, ..GroupBaseline::default() }.advantages(&scores).unwrap();
            for (found, want) in found.iter().zip(second_best_of_choices(&scores, k)) {
                prop_assert!((found - want).abs() < 1e-12, "{} {}", found, want);
            }
        }

        /// Advantages sum to 0, preserve the order of the scores, and have unit standard deviation
        /// if they are scaled.
        #[test]
        fn advantages_are_centered_and_ordered(scores in prop::collection::vec(-5.0f64..5.0, 2..12)) {
            prop_assume!(mean_and_deviation(&scores).1 > 1e-2);
            let scaled = GroupBaseline { scale_by_std: true, ..GroupBaseline::default() };
            let advantages = scaled.advantages(&scores).unwrap();
            prop_assert!(advantages.iter().sum::<f64>().abs() < 1e-9);
            prop_assert!((mean_and_deviation(&advantages).1 - 1.0).abs() < 1e-3);
            for (i, a) in scores.iter().enumerate() {
                for (j, b) in scores.iter().enumerate() {
                    prop_assert!(a >= b || advantages[i] <= advantages[j]);
                }
            }
        }
    }
}
