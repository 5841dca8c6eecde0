//! Selects the prompts from which new prompts are written, and the prompts that are kept: beam
//! search, and evolution with a Pareto front.
//!
//! Everything here is pure. Scores come from attempts at the same selection tasks, in the same
//! order for all prompts.

use levade_policy::uniform;
use levade_recipe::{PromptAlgorithm, PromptKeys};

/// A version of a prompt, with its scores.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PromptCandidate {
    /// Number of the version. 0 is the prompt with which the phase started.
    pub version: u32,
    /// Version of the prompt from which the editor wrote this prompt. `None` for a prompt that the
    /// editor did not write.
    pub parent: Option<u32>,
    pub text: String,
    /// Score of the attempt at each selection task. `None` if the attempt has no score.
    pub scores: Vec<Option<f64>>,
}

impl PromptCandidate {
    /// Returns the mean score over the selection tasks, or `None` if fewer than half of the
    /// attempts have a score.
    pub fn mean(&self) -> Option<f64> {
        mean_score(&self.scores)
    }
}

/// Returns the mean of the existing scores, or `None` if fewer than half of the scores exist.
pub(super) fn mean_score(scores: &[Option<f64>]) -> Option<f64> {
    let known: Vec<f64> = scores.iter().flatten().copied().collect();
    let is_enough = !known.is_empty() && 2 * known.len() >= scores.len();
    is_enough.then(|| known.iter().sum::<f64>() / known.len() as f64)
}

/// Returns the prompts by mean score, the best first. Of two equal prompts, the older prompt comes
/// first. Prompts without a mean score come last.
pub(super) fn rank_candidates(pool: &[PromptCandidate]) -> Vec<&PromptCandidate> {
    let mut ranked: Vec<&PromptCandidate> = pool.iter().collect();
    let key = |candidate: &PromptCandidate| candidate.mean().unwrap_or(f64::NEG_INFINITY);
    ranked.sort_by(|a, b| key(b).total_cmp(&key(a)).then(a.version.cmp(&b.version)));
    ranked
}

/// Returns the Pareto front: the prompts that are best at one or more tasks, each with the number
/// of these tasks. A prompt is left out if another prompt is at least as good at every task and
/// better at one.
pub(super) fn pareto_front(pool: &[PromptCandidate]) -> Vec<(&PromptCandidate, usize)> {
    let score = |candidate: &PromptCandidate, task: usize| {
        candidate.scores.get(task).copied().flatten().unwrap_or(f64::NEG_INFINITY)
    };
    let tasks = pool.iter().map(|candidate| candidate.scores.len()).max().unwrap_or(0);
    let dominates = |other: &PromptCandidate, one: &PromptCandidate| {
        (0..tasks).all(|task| score(other, task) >= score(one, task))
            && (0..tasks).any(|task| score(other, task) > score(one, task))
    };
    let best = |task: usize| {
        pool.iter().map(|candidate| score(candidate, task)).fold(f64::NEG_INFINITY, f64::max)
    };
    let best: Vec<f64> = (0..tasks).map(best).collect();
    let wins = |candidate: &PromptCandidate| {
        let is_best =
            |task: &usize| best[*task].is_finite() && score(candidate, *task) == best[*task];
        (0..tasks).filter(is_best).count()
    };
    pool.iter()
        .filter(|one| !pool.iter().any(|other| dominates(other, one)))
        .map(|candidate| (candidate, wins(candidate)))
        .filter(|(_, wins)| *wins > 0)
        .collect()
}

/// Selects the parent prompts of a round, one for each new prompt. `stream` is the random stream of
/// the round.
pub(super) fn select_parents<'a>(
    pool: &'a [PromptCandidate],
    keys: &PromptKeys,
    seed: u64,
    stream: u64,
) -> Vec<&'a PromptCandidate> {
    let ranked = rank_candidates(pool);
    match keys.algorithm {
        PromptAlgorithm::Apo => {
            let beam: Vec<&PromptCandidate> = ranked.into_iter().take(keys.beam_width).collect();
            // A beam that is not full yet has more children of each parent.
            let parents = beam.iter().cycle().take(keys.beam_width);
            parents.flat_map(|parent| std::iter::repeat_n(*parent, keys.branch_factor)).collect()
        }
        PromptAlgorithm::Gepa => {
            let mut front = pareto_front(pool);
            // No prompt has a score: all are equal.
            if front.is_empty() {
                front = ranked.into_iter().map(|candidate| (candidate, 1)).collect();
            }
            let total: usize = front.iter().map(|(_, wins)| wins).sum();
            let pick = |child: usize| {
                let mut at = uniform(seed, stream, child as u64) * total as f64;
                let found = front.iter().find(|(_, wins)| {
                    at -= *wins as f64;
                    at < 0.0
                });
                found.or(front.last()).map(|(candidate, _)| *candidate)
            };
            (0..keys.branch_factor).filter_map(pick).collect()
        }
    }
}

/// Returns whether a new prompt is better than its parent. `child` and `parent` are their mean
/// scores on the same tasks.
pub(super) fn is_better(child: Option<f64>, parent: Option<f64>) -> bool {
    child.is_some_and(|child| parent.is_none_or(|parent| child > parent))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(version: u32, scores: &[f64]) -> PromptCandidate {
        // A negative number stands for an attempt without a score.
        let scores = scores.iter().map(|score| (*score >= 0.0).then_some(*score)).collect();
        PromptCandidate { version, parent: None, text: format!("prompt {version}"), scores }
    }

    fn keys(text: &str) -> PromptKeys {
        toml::from_str(&format!("editor = 'e'\n{text}")).unwrap()
    }

    fn versions(candidates: &[&PromptCandidate]) -> Vec<u32> {
        candidates.iter().map(|candidate| candidate.version).collect()
    }

    #[test]
    fn rank_candidates_orders_by_mean_then_age_and_puts_unscored_last() {
        let pool = [
            candidate(0, &[-1.0, -1.0, 1.0]),
            candidate(1, &[0.0, 1.0, 0.0]),
            candidate(2, &[1.0, 1.0, 0.0]),
            candidate(3, &[1.0, -1.0, 0.0]),
            candidate(4, &[0.5, 0.5, -1.0]),
        ];
        assert_eq!(pool[0].mean(), None, "one score of three is too few");
        assert_eq!(versions(&rank_candidates(&pool)), [2, 3, 4, 1, 0]);
    }

    #[test]
    fn pareto_front_keeps_specialists_and_drops_dominated_prompts() {
        let pool = [
            candidate(0, &[1.0, 0.0, 0.0]),
            candidate(1, &[0.0, 1.0, 0.5]),
            candidate(2, &[0.0, 1.0, 0.0]),
            candidate(3, &[0.5, 0.5, 0.4]),
        ];
        let front = pareto_front(&pool);
        let front: Vec<_> = front.iter().map(|(found, wins)| (found.version, *wins)).collect();
        assert_eq!(front, [(0, 1), (1, 2)]);
        assert!(pareto_front(&[candidate(0, &[-1.0])]).is_empty());
    }

    #[test]
    fn apo_repeats_beam_until_it_is_full() {
        let pool: Vec<_> = (0..5).map(|i| candidate(i, &[f64::from(i) / 5.0])).collect();
        let keys = keys("beam_width = 3\nbranch_factor = 2");
        assert_eq!(versions(&select_parents(&pool, &keys, 1, 2)), [4, 4, 3, 3, 2, 2]);
        assert_eq!(versions(&select_parents(&pool[..2], &keys, 1, 2)), [1, 1, 0, 0, 1, 1]);
    }

    #[test]
    fn gepa_samples_parents_by_number_of_won_tasks() {
        let pool = [
            candidate(0, &[1.0, 0.0, 0.0, 0.0]),
            candidate(1, &[0.0, 1.0, 1.0, 1.0]),
            candidate(2, &[0.0, 0.0, 0.0, 1.0]),
        ];
        let keys = keys("algorithm = 'gepa'\nbranch_factor = 4000");
        let sampled = versions(&select_parents(&pool, &keys, 7, 9));
        let of_zero = sampled.iter().filter(|version| **version == 0).count();
        assert!(sampled.iter().all(|version| *version < 2), "2 is dominated");
        assert!((900..1100).contains(&of_zero), "{of_zero} of 4000 are not a quarter");
        assert_eq!(sampled, versions(&select_parents(&pool, &keys, 7, 9)));
        let unscored = [candidate(0, &[-1.0]), candidate(1, &[-1.0])];
        assert_eq!(select_parents(&unscored, &keys, 7, 9).len(), 4000);
    }

    #[test]
    fn is_better_requires_higher_score_than_parent() {
        assert!(is_better(Some(0.6), Some(0.5)) && is_better(Some(0.0), None));
        assert!(!is_better(Some(0.5), Some(0.5)) && !is_better(None, Some(0.5)));
        assert!(!is_better(None, None));
    }
}
