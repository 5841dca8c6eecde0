//! Outcomes against those of the same group, and statistics of groups.
//!
//! A *group* is the rollouts of one task, or whatever else should be compared: one role of a game, one seat
//! at its table. Its scores are compared with each other, so a task needs no learned value.

use serde::{Deserialize, Serialize};

use super::Rollout;
use crate::RlError;

/// Added to the standard deviation before dividing by it, as in the GRPO implementations in use, so that
/// published hyper-parameters carry over. It is far below any spread that distinct scores in 0..=1 have.
pub const STD_EPSILON: f64 = 1e-6;

/// How the scores of a group become advantages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupBaseline {
    /// Baseline of a score.
    pub compare: Compare,
    /// Whether to divide by the group's standard deviation: GRPO (Shao et al. 2024, section 4.1.2) divides,
    /// Dr.GRPO (Liu et al. 2025) does not.
    pub scale_by_std: bool,
    /// Advantage of a rollout that is alone in its group.
    pub singleton: Singleton,
    /// Advantages are multiplied by this.
    pub scale: f64,
    /// Where given, a score above it is never punished and one up to it never reinforced, whatever the group
    /// did. A number.
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

/// Baseline of a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compare {
    /// The mean of its group: GRPO and Dr.GRPO.
    #[default]
    Mean,
    /// The mean of the others: RLOO (Ahmadian et al. 2024), unbiased.
    Others,
    /// The mean weighted by length, which has the least variance where a token's gradient has the same size
    /// everywhere: OPO (Hao et al. 2025).
    LengthWeightedMean,
    /// The mean, times B / (B − M): M of a step's B rollouts are in groups without an advantage, whose zeros
    /// would shrink the gradient of the others: GPG (Chu et al. 2025, accurate gradient estimation).
    MeanOfInformative,
    /// The mean, times B / the number of rollouts whose score is not 0: GPG as verl computes it, which takes
    /// a failure in a mixed group for one without a gradient, and a group of successes for one with. For
    /// comparisons only.
    MeanOfNonzero,
    /// The second best of k: an advantage is the mean, over all ways to choose k rollouts of the group, of by
    /// how much this one beats the others where it is the best of them, and 0 where it is not (Walder and
    /// Karkhanis 2025, the leave-one-out estimator with subsets of k − 1). Summed over the group, −A log p
    /// then has the gradient of the expected best of k, exactly; with k = n only the best has an advantage.
    SecondBest {
        /// How many are chosen, at least 2; all of the group where not given, or where there are fewer.
        #[serde(default)]
        k: Option<usize>,
    },
}

/// The advantage of a rollout that is alone in its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Singleton {
    /// 0: there is nothing to compare with.
    #[default]
    Zero,
    /// Score itself, as if mean 0 and deviation 1 were known. This is what verl does; it reinforces whatever
    /// a lone rollout did, so it is here for comparisons only.
    Score,
}

impl GroupBaseline {
    /// Checks its parameters.
    ///
    /// # Errors
    /// Names the first that is out of range.
    pub(super) fn check(&self) -> Result<(), RlError> {
        RlError::positive("scale of the advantage", self.scale)?;
        if let Some(success) = self.success {
            RlError::range(!success.is_nan(), "success of the advantage", success, "a number")?;
        }
        match self.compare {
            Compare::SecondBest { k: Some(k) } => {
                RlError::range(k >= 2, "k of the advantage", k as f64, "at least 2")
            }
            _ => Ok(()),
        }
    }

    /// GRPO's: against the mean, over the standard deviation.
    pub fn scaled() -> Self {
        GroupBaseline { scale_by_std: true, ..GroupBaseline::default() }
    }

    /// Advantages of one group of scores.
    ///
    /// # Errors
    /// Names the first score that is not finite.
    pub fn advantages(&self, scores: &[f64]) -> Result<Vec<f64>, RlError> {
        let rollouts: Vec<Rollout> =
            scores.iter().map(|&score| Rollout { score, ..Rollout::default() }).collect();
        self.of_group(&rollouts.iter().collect::<Vec<_>>())
    }

    /// Advantages of the rollouts of one group. A group whose scores are all equal gets exact zeros.
    pub(super) fn of_group(&self, rollouts: &[&Rollout]) -> Result<Vec<f64>, RlError> {
        let scores: Vec<f64> = rollouts.iter().map(|rollout| rollout.score).collect();
        if let Some(index) = scores.iter().position(|s| !s.is_finite()) {
            return Err(RlError::Score { index, value: scores[index] });
        }
        let compared = self.compared(&scores, rollouts);
        let bounded = |(advantage, rollout): (f64, &&Rollout)| {
            let advantage = rollout.ceiling.map_or(advantage, |ceiling| advantage.min(ceiling));
            self.scale
                * match self.success {
                    Some(success) if rollout.score <= success => advantage.min(0.0),
                    Some(_) => advantage.max(0.0),
                    None => advantage,
                }
        };
        Ok(compared.into_iter().zip(rollouts).map(bounded).collect())
    }

    fn compared(&self, scores: &[f64], rollouts: &[&Rollout]) -> Vec<f64> {
        if let ([score], Singleton::Score) = (scores, self.singleton) {
            return vec![if self.scale_by_std { score / (1.0 + STD_EPSILON) } else { *score }];
        }
        if all_equal(scores) {
            // Rounding in the mean would otherwise leave noise, and the deviation would magnify it.
            return vec![0.0; scores.len()];
        }
        let (mean, deviation) = mean_and_deviation(scores);
        let n = scores.len() as f64;
        let scale = if self.scale_by_std { 1.0 / (deviation + STD_EPSILON) } else { 1.0 };
        let differences: Vec<f64> = match self.compare {
            Compare::Mean | Compare::MeanOfInformative | Compare::MeanOfNonzero => {
                scores.iter().map(|s| s - mean).collect()
            }
            Compare::Others => scores.iter().map(|s| (s - mean) * n / (n - 1.0)).collect(),
            Compare::LengthWeightedMean => {
                let length =
                    |rollout: &Rollout| rollout.paths.iter().map(super::Path::len).sum::<usize>() as f64;
                let lengths: Vec<f64> = rollouts.iter().map(|rollout| length(rollout)).collect();
                let total: f64 = lengths.iter().sum();
                let weighted: f64 = scores.iter().zip(&lengths).map(|(s, l)| s * l).sum();
                let baseline = if total > 0.0 { weighted / total } else { mean };
                scores.iter().map(|s| s - baseline).collect()
            }
            Compare::SecondBest { k } => over_second_best(scores, k.unwrap_or(scores.len())),
        };
        differences.into_iter().map(|d| d * scale).collect()
    }
}

/// By how much each of at least two scores beats the best of the others among `k` of them, a mean over all
/// choices of k.
///
/// A choice in which score i is the best and score j the second leaves k − 2 to choose among those below j:
/// with scores in rising order Aᵢ = Σ_{j<i} (sᵢ − sⱼ) C(j, k − 2) / C(n, k), j counted from 0.
fn over_second_best(scores: &[f64], k: usize) -> Vec<f64> {
    let (n, k) = (scores.len(), k.min(scores.len()));
    let mut rising: Vec<usize> = (0..n).collect();
    rising.sort_by(|a, b| scores[*a].total_cmp(&scores[*b]));
    // C(j, k − 2) / C(n, k) from the largest j on, so that no binomial has to be computed.
    let mut shares = vec![0.0; n - 1];
    let mut share = (k * (k - 1)) as f64 / (n * (n - 1)) as f64;
    for j in (k - 2..n - 1).rev() {
        shares[j] = share;
        share *= (j + 2 - k) as f64 / j as f64;
    }
    let mut advantages = vec![0.0; n];
    for (i, &at) in rising.iter().enumerate() {
        advantages[at] =
            rising[..i].iter().zip(&shares).map(|(below, share)| (scores[at] - scores[*below]) * share).sum();
    }
    advantages
}

pub(super) fn all_equal(scores: &[f64]) -> bool {
    scores.windows(2).all(|pair| pair[0] == pair[1])
}

/// Mean and sample standard deviation of at least two numbers.
pub(super) fn mean_and_deviation(scores: &[f64]) -> (f64, f64) {
    let n = scores.len() as f64;
    let mean = scores.iter().sum::<f64>() / n;
    let squares = scores.iter().map(|s| (s - mean) * (s - mean)).sum::<f64>();
    (mean, (squares / (n - 1.0)).sqrt())
}

/// Statistics of the groups of a step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct GroupStats {
    /// How many groups have a rollout.
    pub groups: usize,
    /// How many rollouts there are.
    pub rollouts: usize,
    /// Mean score over rollouts.
    pub mean: f64,
    /// Mean over groups of the best score.
    pub best: f64,
    /// Mean over groups with at least two rollouts of the standard deviation of the scores.
    pub deviation: f64,
    /// Share of groups whose scores are all equal, so that they teach nothing. Groups of one count here.
    pub degenerate: f64,
}

impl GroupStats {
    /// Statistics of groups of scores. Empty groups are left out; without any group everything is 0.
    pub fn new<S: AsRef<[f64]>>(groups: &[S]) -> Self {
        let groups: Vec<&[f64]> = groups.iter().map(AsRef::as_ref).filter(|g| !g.is_empty()).collect();
        let average = |values: &[f64]| {
            if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
        };
        let best: Vec<f64> =
            groups.iter().map(|g| g.iter().copied().fold(f64::NEG_INFINITY, f64::max)).collect();
        let deviations: Vec<f64> =
            groups.iter().filter(|g| g.len() > 1).map(|g| mean_and_deviation(g).1).collect();
        let degenerate: Vec<f64> = groups.iter().map(|g| if all_equal(g) { 1.0 } else { 0.0 }).collect();
        GroupStats {
            groups: groups.len(),
            rollouts: groups.iter().map(|g| g.len()).sum(),
            mean: average(&groups.concat()),
            best: average(&best),
            deviation: average(&deviations),
            degenerate: average(&degenerate),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn groups_that_teach_nothing_get_zeros() {
        for scale_by_std in [false, true] {
            let baseline = GroupBaseline { scale_by_std, ..GroupBaseline::default() };
            assert_eq!(baseline.advantages(&[0.7]).unwrap(), [0.0]);
            // The mean of these is not 0.1 in f64.
            assert_eq!(baseline.advantages(&[0.1; 3]).unwrap(), [0.0; 3]);
            assert_eq!(baseline.advantages(&[]).unwrap(), [0.0; 0]);
        }
    }

    #[test]
    fn refuses_scores_that_are_not_numbers() {
        let refused = GroupBaseline::default().advantages(&[1.0, f64::NAN]);
        assert!(matches!(refused, Err(RlError::Score { index: 1, .. })), "{refused:?}");
    }

    #[test]
    fn statistics_of_groups() {
        let stats = GroupStats::new(&[vec![1.0, 0.0], vec![1.0, 1.0], vec![], vec![0.0]]);
        assert_eq!((stats.groups, stats.rollouts), (3, 5));
        assert_eq!((stats.mean, stats.best), (0.6, 2.0 / 3.0));
        assert!((stats.deviation - 0.5f64.sqrt() / 2.0).abs() < 1e-15);
        assert_eq!(stats.degenerate, 2.0 / 3.0);
        assert_eq!(GroupStats::new::<Vec<f64>>(&[]), GroupStats::default());
    }

    /// Every choice of k one by one.
    fn second_best_of_choices(scores: &[f64], k: usize) -> Vec<f64> {
        let n = scores.len();
        let (mut sums, mut choices) = (vec![0.0; n], 0.0);
        for chosen in (0u32..1 << n).filter(|chosen| chosen.count_ones() as usize == k) {
            choices += 1.0;
            let members: Vec<usize> = (0..n).filter(|i| chosen & 1 << i != 0).collect();
            for &i in &members {
                let best =
                    |of: &mut dyn Iterator<Item = usize>| of.map(|j| scores[j]).fold(f64::MIN, f64::max);
                let all = best(&mut members.iter().copied());
                sums[i] += all - best(&mut members.iter().copied().filter(|j| *j != i));
            }
        }
        sums.iter().map(|sum| sum / choices).collect()
    }

    #[test]
    fn k_of_many_needs_no_large_numbers() {
        // One success of 1000: it is the best of every choice of k that it is in, a share of k / n.
        let mut scores = vec![0.0; 1000];
        scores[17] = 1.0;
        for k in [2, 10, 500, 999, 1000] {
            let compare = Compare::SecondBest { k: Some(k) };
            let found = GroupBaseline { compare, ..GroupBaseline::default() }.advantages(&scores).unwrap();
            assert!((found[17] - k as f64 / 1000.0).abs() < 1e-12, "{k}: {}", found[17]);
            assert_eq!(found.iter().sum::<f64>(), found[17]);
        }
    }

    #[test]
    fn more_than_there_are_is_all() {
        let of = |k| GroupBaseline { compare: Compare::SecondBest { k }, ..GroupBaseline::default() };
        let scores = [0.25, 1.0, 0.5, 0.0];
        assert_eq!(of(None).advantages(&scores).unwrap(), [0.0, 0.5, 0.0, 0.0]);
        assert_eq!(of(Some(9)).advantages(&scores).unwrap(), of(None).advantages(&scores).unwrap());
        let few = of(Some(1)).check();
        assert!(matches!(few, Err(RlError::Parameter { name: "k of the advantage", .. })), "{few:?}");
    }

    proptest! {
        /// The closed form is the mean over choices, ties and all.
        #[test]
        fn second_best_of_k(scores in prop::collection::vec(0u8..5, 2..9), k in 2usize..9) {
            let scores: Vec<f64> = scores.into_iter().map(|s| f64::from(s) / 4.0).collect();
            prop_assume!(k <= scores.len());
            let compare = Compare::SecondBest { k: Some(k) };
            let found = GroupBaseline { compare, ..GroupBaseline::default() }.advantages(&scores).unwrap();
            for (found, want) in found.iter().zip(second_best_of_choices(&scores, k)) {
                prop_assert!((found - want).abs() < 1e-12, "{} {}", found, want);
            }
        }

        /// Advantages sum to zero, keep the order of the scores, and have unit deviation where they are
        /// scaled.
        #[test]
        fn advantages_are_centred(scores in prop::collection::vec(-5.0f64..5.0, 2..12)) {
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
