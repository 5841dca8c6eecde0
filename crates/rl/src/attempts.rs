//! Several attempts at each task: what the best, the worst or the majority of k of them is worth.
//!
//! Each is an expectation over which k of a task's n attempts are drawn, without replacement: exact for best
//! and worst, from draws for the majority. For scores of 0 and 1 the best of k is pass@k (Chen et al. 2021,
//! equation 1).

use std::collections::BTreeMap;

use crate::stats::SplitMix;

/// Mean score of the best of k attempts; k is at least 1 and at most the number of scores.
pub fn best_of(scores: &[f64], k: usize) -> f64 {
    let mut sorted = scores.to_vec();
    sorted.sort_by(f64::total_cmp);
    of_sorted(&sorted, k)
}

/// Mean score of the worst of k attempts.
pub fn worst_of(scores: &[f64], k: usize) -> f64 {
    let mut sorted = scores.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    of_sorted(&sorted, k)
}

/// Σ s_i C(i, k − 1) / C(n, k), i from 0: the i-th is the last of k in as many draws as there are ways to
/// choose the others before it.
fn of_sorted(sorted: &[f64], k: usize) -> f64 {
    let n = sorted.len();
    // The chance that the last of k is the i-th, from the end: k / n for the very last.
    let mut chance = k as f64 / n as f64;
    let mut sum = 0.0;
    for (i, score) in sorted.iter().enumerate().skip(k - 1).rev() {
        sum += chance * score;
        // C(i − 1, k − 1) / C(i, k − 1).
        chance *= if i == 0 { 0.0 } else { (i + 1 - k) as f64 / i as f64 };
    }
    sum
}

/// Mean score of the answer that most of k attempts give, over `draws` draws. Of equally frequent answers the
/// one that was drawn first counts; its score is the mean of those of the drawn attempts that gave it.
/// Attempts without an answer do not vote; where none of a draw has one, the draw counts 0.
pub fn majority_of(answers: &[Option<&str>], scores: &[f64], k: usize, draws: u32, seed: u64) -> f64 {
    let mut random = SplitMix(seed);
    let mut places: Vec<usize> = (0..answers.len()).collect();
    let mut sum = 0.0;
    for _ in 0..draws {
        // For each answer: how often, its first place, the sum of its scores.
        let mut votes: BTreeMap<&str, (usize, usize, f64)> = BTreeMap::new();
        for drawn in 0..k {
            let other = drawn + random.below(places.len() - drawn);
            places.swap(drawn, other);
            let Some(answer) = answers[places[drawn]] else { continue };
            let vote = votes.entry(answer).or_insert((0, drawn, 0.0));
            vote.0 += 1;
            vote.2 += scores[places[drawn]];
        }
        let most = votes.values().max_by_key(|(count, first, _)| (*count, std::cmp::Reverse(*first)));
        sum += most.map_or(0.0, |(count, _, score)| score / *count as f64);
    }
    sum / f64::from(draws)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every way to choose k of n.
    fn subsets(n: usize, k: usize) -> Vec<Vec<usize>> {
        (0..1u32 << n)
            .filter(|mask| mask.count_ones() as usize == k)
            .map(|mask| (0..n).filter(|i| mask >> i & 1 == 1).collect())
            .collect()
    }

    #[test]
    fn pass_at_k() {
        let scores = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0];
        assert_eq!(best_of(&scores, 1), 1.0 / 3.0);
        // 1 − C(4, 2) / C(6, 2).
        assert!((best_of(&scores, 2) - 0.6).abs() < 1e-12);
        assert_eq!((best_of(&scores, 5), best_of(&scores, 6)), (1.0, 1.0));
        assert_eq!(worst_of(&scores, 6), 0.0);
        assert_eq!(best_of(&[0.0; 4], 4), 0.0);
    }

    #[test]
    fn the_majority_decides() {
        let (answers, scores) = (["7", "8", "7", "9"].map(Some), [1.0, 0.0, 1.0, 0.0]);
        assert_eq!(majority_of(&answers, &scores, 4, 50, 1), 1.0);
        assert!((majority_of(&answers, &scores, 1, 4000, 1) - 0.5).abs() < 0.03);
        // Of three, two are "7" unless one of them is left out; then the first decides: 1 in 3 of the 2 in 4.
        assert!((majority_of(&answers, &scores, 3, 4000, 2) - (0.5 + 0.5 / 3.0)).abs() < 0.03);
        assert_eq!(majority_of(&answers, &scores, 2, 9, 5), majority_of(&answers, &scores, 2, 9, 5));
        // One answer outvotes any number of attempts that gave none.
        assert_eq!(majority_of(&[None, None, None, Some("7")], &[0.0, 0.0, 0.0, 1.0], 4, 50, 1), 1.0);
        assert_eq!(majority_of(&[None, None], &[0.0, 0.0], 2, 50, 1), 0.0);
    }

    proptest! {
        #[test]
        fn best_and_worst_are_means_over_subsets(scores in prop::collection::vec(-2.0f64..2.0, 1..7), k in 1usize..7) {
            let k = k.min(scores.len());
            let all = subsets(scores.len(), k);
            let mean = |of: fn(f64, f64) -> f64, start: f64| {
                all.iter().map(|s| s.iter().map(|i| scores[*i]).fold(start, of)).sum::<f64>() / all.len() as f64
            };
            prop_assert!((best_of(&scores, k) - mean(f64::max, f64::NEG_INFINITY)).abs() < 1e-9);
            prop_assert!((worst_of(&scores, k) - mean(f64::min, f64::INFINITY)).abs() < 1e-9);
        }
    }
}
