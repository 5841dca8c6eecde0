//! Metrics over several attempts per task: expected score of the best, the worst or the majority of
//! k attempts.
//!
//! Each is an expectation over the choice of k of a task's n attempts, without replacement. Best
//! and worst are exact, the majority is estimated from random samples. For scores of 0 and 1, the
//! best of k is pass@k (Chen et al. 2021, equation 1).

use std::collections::BTreeMap;

use crate::stats::SplitMix;

/// Returns the expected score of the best of k attempts. `k` must be from 1 to the number of
/// scores.
pub fn expected_best_score(scores: &[f64], k: usize) -> f64 {
    let mut sorted = scores.to_vec();
    sorted.sort_by(f64::total_cmp);
    expected_last_of(&sorted, k)
}

/// Returns the expected score of the worst of k attempts. `k` must be from 1 to the number of
/// scores.
pub fn expected_worst_score(scores: &[f64], k: usize) -> f64 {
    let mut sorted = scores.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    expected_last_of(&sorted, k)
}

/// Computes the expected score of the last of k attempts in the order of `sorted`. The sum is
/// Σ s_i C(i, k − 1) / C(n, k), with i from 0: C(i, k − 1) is the number of choices in which the
/// i-th score is the last of k.
fn expected_last_of(sorted: &[f64], k: usize) -> f64 {
    let n = sorted.len();
    // Probability that the i-th is the last of k, starting from the end: k / n for the last score.
    let mut chance = k as f64 / n as f64;
    let mut sum = 0.0;
    for (i, score) in sorted.iter().enumerate().skip(k - 1).rev() {
        sum += chance * score;
        // C(i − 1, k − 1) / C(i, k − 1).
        chance *= if i == 0 { 0.0 } else { (i + 1 - k) as f64 / i as f64 };
    }
    sum
}

/// Returns the mean score of the majority answer of k attempts, over `samples` random samples of k.
/// Among equally frequent answers, the one sampled first wins. An answer's score is the mean over
/// the sampled attempts that gave it. Attempts without an answer do not vote; a sample without any
/// answer scores 0.
pub fn expected_majority_score(
    final_answers: &[Option<&str>],
    scores: &[f64],
    k: usize,
    samples: u32,
    seed: u64,
) -> f64 {
    let mut random = SplitMix(seed);
    let mut indices: Vec<usize> = (0..final_answers.len()).collect();
    let mut sum = 0.0;
    for _ in 0..samples {
        // For each answer: its count, the index of its first occurrence, and the sum of its scores.
        let mut votes: BTreeMap<&str, (usize, usize, f64)> = BTreeMap::new();
        for sampled in 0..k {
            let other = sampled + random.random_index(indices.len() - sampled);
            indices.swap(sampled, other);
            let Some(answer) = final_answers[indices[sampled]] else { continue };
            let vote = votes.entry(answer).or_insert((0, sampled, 0.0));
            vote.0 += 1;
            vote.2 += scores[indices[sampled]];
        }
        let majority =
            votes.values().max_by_key(|(count, first, _)| (*count, std::cmp::Reverse(*first)));
        sum += majority.map_or(0.0, |(count, _, score)| score / *count as f64);
    }
    sum / f64::from(samples)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns all choices of k of n.
    fn subsets(n: usize, k: usize) -> Vec<Vec<usize>> {
        (0..1u32 << n)
            .filter(|mask| mask.count_ones() as usize == k)
            .map(|mask| (0..n).filter(|i| mask >> i & 1 == 1).collect())
            .collect()
    }

    #[test]
    fn expected_best_score_matches_pass_at_k() {
        let scores = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0];
        assert_eq!(expected_best_score(&scores, 1), 1.0 / 3.0);
        // 1 − C(4, 2) / C(6, 2).
        assert!((expected_best_score(&scores, 2) - 0.6).abs() < 1e-12);
        assert_eq!((expected_best_score(&scores, 5), expected_best_score(&scores, 6)), (1.0, 1.0));
        assert_eq!(expected_worst_score(&scores, 6), 0.0);
        assert_eq!(expected_best_score(&[0.0; 4], 4), 0.0);
    }

    #[test]
    fn majority_score_is_score_of_majority_answer() {
        let final_answers = ["7", "8", "7", "9"].map(Some);
        let scores = [1.0, 0.0, 1.0, 0.0];
        assert_eq!(expected_majority_score(&final_answers, &scores, 4, 50, 1), 1.0);
        assert!((expected_majority_score(&final_answers, &scores, 1, 4000, 1) - 0.5).abs() < 0.03);
        // Of three sampled attempts, two answer "7" unless one of them is missing; then the first
        // one decides: 1 in 3 of the 2 in 4.
        assert!(
            (expected_majority_score(&final_answers, &scores, 3, 4000, 2) - (0.5 + 0.5 / 3.0))
                .abs()
                < 0.03
        );
        assert_eq!(
            expected_majority_score(&final_answers, &scores, 2, 9, 5),
            expected_majority_score(&final_answers, &scores, 2, 9, 5)
        );
        // One answer wins against any number of attempts without one.
        assert_eq!(
            expected_majority_score(
                &[None, None, None, Some("7")],
                &[0.0, 0.0, 0.0, 1.0],
                4,
                50,
                1
            ),
            1.0
        );
        assert_eq!(expected_majority_score(&[None, None], &[0.0, 0.0], 2, 50, 1), 0.0);
    }

    proptest! {
        #[test]
        fn best_and_worst_match_subset_means(scores in prop::collection::vec(-2.0f64..2.0, 1..7), k in 1usize..7) {
            let k = k.min(scores.len());
            let all = subsets(scores.len(), k);
            let mean = |of: fn(f64, f64) -> f64, start: f64| {
                all.iter().map(|s| s.iter().map(|i| scores[*i]).fold(start, of)).sum::<f64>() / all.len() as f64
            };
            prop_assert!((expected_best_score(&scores, k) - mean(f64::max, f64::NEG_INFINITY)).abs() < 1e-9);
            prop_assert!((expected_worst_score(&scores, k) - mean(f64::min, f64::INFINITY)).abs() < 1e-9);
        }
    }
}
