//! Compares evaluations of a run on the same tasks.

use std::collections::BTreeMap;

use levade_rl::{Interval, ScorePair, paired_difference};
use levade_store::Store;
use levade_tree::Purpose;

use crate::TrainerError;
use crate::eval_result::{EvalResult, NUM_RESAMPLES};

/// The improvement of the mean score from one evaluation to a later evaluation on the same tasks.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreGain {
    /// Label of the earlier evaluation.
    pub from: String,
    /// Label of the later evaluation.
    pub to: String,
    /// Difference of the two mean scores, with its 95 % bootstrap interval over tasks. If every
    /// score is 0 or 1, it is the difference of the success rates. Slices that are reported
    /// separately do not count.
    pub difference: Interval,
    /// Whether some scores are neither 0 nor 1. If so, `difference` is not a difference of success
    /// rates.
    pub graded: bool,
}

impl ScoreGain {
    /// Returns the gain from each evaluation in `evals` to the next. All evaluations must have the
    /// same tasks.
    ///
    /// # Errors
    /// Returns an error if the attempts of the evaluations cannot be read from the store.
    pub(crate) async fn between(
        evals: &[&EvalResult],
        store: &dyn Store,
    ) -> Result<Vec<ScoreGain>, TrainerError> {
        let attempts = store.summaries(Purpose::Eval).await?;
        // Sum of the scores and number of the attempts at every task that counts, by the task's
        // index.
        let scored = |eval: &EvalResult| -> BTreeMap<u32, (f64, f64)> {
            let counted: Vec<bool> = eval
                .slices
                .iter()
                .flat_map(|slice| (0..slice.tasks).map(|_| !slice.is_separate))
                .collect();
            let mut found: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
            for attempt in
                attempts.iter().filter(|a| (a.slot.phase, a.slot.step) == (eval.phase, eval.step))
            {
                if counted.get(attempt.slot.group as usize) == Some(&true) {
                    let (sum, made) = found.entry(attempt.slot.group).or_default();
                    *sum += attempt.score.unwrap_or(0.0);
                    *made += 1.0;
                }
            }
            found
        };
        let mut gains = Vec::new();
        for pair in evals.windows(2) {
            let before = scored(pair[0]);
            let after = scored(pair[1]);
            let pairs: Vec<ScorePair> = before
                .into_iter()
                .filter_map(|(group, before)| {
                    let [before, after] = [before, *after.get(&group)?].map(|(sum, n)| sum / n);
                    Some(ScorePair { cluster: group.into(), before, after })
                })
                .collect();
            let difference = paired_difference(&pairs, NUM_RESAMPLES, 0)?;
            let from = pair[0].label.clone();
            let to = pair[1].label.clone();
            let graded = pair.iter().any(|eval| eval.overall.score.is_some());
            gains.push(ScoreGain { from, to, difference, graded });
        }
        Ok(gains)
    }
}

/// Returns the evaluations that a summary compares: the evaluation before training, and the last
/// evaluation of each phase.
pub fn milestone_evals(evals: &[EvalResult]) -> Vec<&EvalResult> {
    let mut picked: Vec<&EvalResult> = evals.iter().take(1).collect();
    for (i, eval) in evals.iter().enumerate().skip(1) {
        // The last evaluation of a phase is made after its last step.
        if evals.get(i + 1).is_none_or(|next| next.phase != eval.phase) {
            picked.push(eval);
        }
    }
    picked
}

#[cfg(test)]
mod tests {
    use levade_store::{Attempt, Memory};
    use levade_tree::{AttemptSlot, RunId};

    use super::*;
    use crate::eval_result::tests::{blank, eval};

    #[test]
    fn milestone_evals_are_first_and_phase_end_evaluations() {
        let evals = [
            eval(0, 0, "before"),
            eval(0, 3, "x"),
            eval(0, 6, "sft"),
            eval(1, 3, "y"),
            eval(1, 5, "grpo"),
        ];
        let labels: Vec<&str> =
            milestone_evals(&evals).iter().map(|eval| eval.label.as_str()).collect();
        assert_eq!(labels, ["before", "sft", "grpo"]);
        assert_eq!(milestone_evals(&[]).len(), 0);
    }

    #[tokio::test]
    async fn gain_ignores_separate_slices() {
        let store = Memory::new(RunId("r".into()));
        let before = eval(0, 0, "before");
        let after = eval(1, 7, "after");
        // Scores by task. If the separate slice counted, the gain would be 5/9.
        let scores = [(&before, "100100010"), (&after, "111011111")];
        for (eval, scores) in scores {
            let attempts = scores.bytes().zip(0..).map(|(score, group)| Attempt {
                score: Some(f64::from(score - b'0')),
                ..blank(AttemptSlot {
                    purpose: Purpose::Eval,
                    phase: eval.phase,
                    step: eval.step,
                    group,
                    sample: 0,
                })
            });
            store.record_attempts(&attempts.collect::<Vec<_>>()).await.unwrap();
        }
        let gains = ScoreGain::between(&[&before, &after], &store).await.unwrap();
        let [gain] = &gains[..] else { panic!("{gains:?}") };
        assert_eq!((gain.from.as_str(), gain.to.as_str()), ("before", "after"));
        // a: 1001 → 1110, c: 10 → 11.
        assert!((gain.difference.estimate - 2.0 / 6.0).abs() < 1e-12, "{gain:?}");
        assert!(
            gain.difference.low < gain.difference.estimate
                && gain.difference.estimate < gain.difference.high
        );
        assert!(!gain.graded);
        let mut scored = after.clone();
        scored.overall.score = Some(scored.overall.success);
        assert!(ScoreGain::between(&[&before, &scored], &store).await.unwrap()[0].graded);
        assert_eq!(ScoreGain::between(&[&before], &store).await.unwrap(), []);
    }
}
