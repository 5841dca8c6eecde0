//! Scores the attempts of a recorded run again, with other scorers, and finds the step at which the
//! old and the new scores start to diverge.
//!
//! Nothing is sampled or recorded. The attempts that count for training are scored in their groups,
//! so that scorers that compare attempts can be used. An attempt that the new scorers cannot decide
//! is unscored, and is left out of the comparison. `unscored = VALUE` of a recipe is ignored,
//! because a substitute value is not a score.

use std::collections::BTreeMap;

use futures_util::stream::{self, StreamExt};
use levade_recipe::{RewardKeys, UnscoredEffect};
use levade_rl::{ScoreDivergence, TwoScores, find_divergence};
use levade_store::{Attempt, Status, Store};
use levade_tree::{AttemptId, AttemptSlot, Purpose};
use serde::Serialize;

use crate::TrainerError;
use crate::completions::score_group;
use crate::scoring::Scorers;

/// A recorded attempt with its recorded score and its score by new scorers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RescoredAttempt {
    /// Id of the attempt.
    pub id: AttemptId,
    /// Name of the attempt's slot, such as `train/1/3/0/2`.
    pub attempt: String,
    /// Index of the attempt's phase, from 0.
    pub phase: u32,
    /// Index of the step for which the attempt was started.
    pub step: u32,
    /// Recorded score. `None` if the attempt has no recorded score.
    pub old: Option<f64>,
    /// New score. `None` if the new scorers could not score the attempt.
    pub new: Option<f64>,
    /// Reason why there is no new score. `None` if there is a new score.
    pub error: Option<String>,
}

/// Scores of a run's training attempts by the old and by the new scorers.
#[derive(Debug, Clone, PartialEq)]
pub struct RescoredRun {
    /// The attempts, sorted by slot.
    pub attempts: Vec<RescoredAttempt>,
    /// Phase and step of every step that has an attempt with both scores.
    pub steps: Vec<(u32, u32)>,
    /// Step at which new and recorded scores start to diverge, as an index of `steps`. `None` if
    /// the scores do not diverge.
    pub divergence: Option<ScoreDivergence>,
}

/// Returns reward keys for scoring recorded attempts again. Substitute values for missing scores
/// are disabled, and an unavailable scorer is only retried, never waited for.
pub fn rescoring_keys(keys: &RewardKeys) -> RewardKeys {
    let without = |effect: UnscoredEffect| match effect {
        UnscoredEffect::Value(_) | UnscoredEffect::Defer => UnscoredEffect::Retry,
        effect => effect,
    };
    let mut keys = keys.clone();
    keys.unscored = without(keys.unscored);
    for scorer in &mut keys.scorers {
        scorer.unscored = scorer.unscored.map(without);
    }
    keys
}

/// Scores the training attempts of a recorded run again, at most `concurrency` groups at a time.
/// Calls `progress` with the number of finished groups and the number of all groups.
///
/// # Errors
/// Returns an error if the store cannot be read.
pub async fn rescore(
    store: &dyn Store,
    scorers: &Scorers,
    concurrency: usize,
    seed: u64,
    progress: &mut (dyn FnMut(usize, usize) + Send),
) -> Result<RescoredRun, TrainerError> {
    let mut groups: BTreeMap<(u32, u32, u32), Vec<AttemptId>> = BTreeMap::new();
    for summary in store.summaries(Purpose::Train).await? {
        let AttemptSlot { phase, step, group, .. } = summary.slot;
        // A failed attempt has no outcome that could be scored.
        if summary.status != Status::Failed {
            groups.entry((phase, step, group)).or_default().push(summary.id);
        }
    }
    let total = groups.len();
    let rescored = stream::iter(groups.into_values()).map(|ids| rescore_group(store, scorers, ids));
    let mut rescored = rescored.buffer_unordered(concurrency.max(1));
    let mut found: Vec<(AttemptSlot, RescoredAttempt)> = Vec::new();
    let mut done = 0;
    while let Some(group) = rescored.next().await {
        found.extend(group?);
        done += 1;
        progress(done, total);
    }
    found.sort_by_key(|(slot, _)| *slot);
    let attempts: Vec<RescoredAttempt> = found.into_iter().map(|(_, attempt)| attempt).collect();
    let both = |a: &RescoredAttempt| Some(((a.phase, a.step), a.old?, a.new?));
    let mut steps: Vec<(u32, u32)> =
        attempts.iter().filter_map(both).map(|(step, ..)| step).collect();
    steps.sort_unstable();
    steps.dedup();
    let scores: Vec<TwoScores> = attempts
        .iter()
        .filter_map(both)
        .map(|(at, old, new)| TwoScores { step: steps.partition_point(|s| *s < at), old, new })
        .collect();
    Ok(RescoredRun { divergence: find_divergence(&scores, seed), steps, attempts })
}

async fn rescore_group(
    store: &dyn Store,
    scorers: &Scorers,
    ids: Vec<AttemptId>,
) -> Result<Vec<(AttemptSlot, RescoredAttempt)>, TrainerError> {
    let mut group: Vec<(usize, Attempt)> = Vec::with_capacity(ids.len());
    let mut old = Vec::with_capacity(ids.len());
    let mut unscorable = None;
    for (index, id) in ids.into_iter().enumerate() {
        let mut attempt = store.attempt(&id).await?.ok_or(TrainerError::Unrecorded(id))?;
        if unscorable.is_none() {
            let id = attempt.task["id"].as_str().unwrap_or_default();
            unscorable = scorers.check_task(id, &attempt.task, &[]).err().map(|e| e.to_string());
        }
        old.push(attempt.score.take());
        attempt.outcome.error = None;
        group.push((index, attempt));
    }
    let scored = match &unscorable {
        Some(_) => group,
        None => score_group(scorers, group).await,
    };
    let rescored = scored.into_iter().map(|(index, attempt)| {
        let AttemptSlot { phase, step, .. } = attempt.slot;
        let new = attempt.score;
        let why = unscorable.clone().or(attempt.outcome.error);
        let error = why.filter(|_| new.is_none());
        let (id, name, old) = (attempt.id, attempt.slot.name(), old[index]);
        (attempt.slot, RescoredAttempt { id, attempt: name, phase, step, old, new, error })
    });
    Ok(rescored.collect())
}

#[cfg(test)]
mod tests {
    use levade_store::{AttemptStart, Memory};
    use levade_tree::{Outcome, RunId};
    use serde_json::json;

    use super::*;

    /// Records `steps` steps of 4 groups of 8 attempts. Half of the answers are right. From step
    /// `hack` on, the leaky scorer that was recorded accepts all answers.
    async fn recorded_run(steps: u32, hack: u32) -> Memory {
        let run = RunId("hack".into());
        let store = Memory::new(run.clone());
        for step in 0..steps {
            for (group, sample) in (0..4).flat_map(|group| (0..8).map(move |s| (group, s))) {
                let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step, group, sample };
                let is_right = (step + group + sample).is_multiple_of(2);
                let answer = if is_right { "It is 4." } else { "It is 5." };
                let task = json!({"id": "t", "question": "2+2?", "answer": 4});
                let id = AttemptId::new(&run, &slot, 0);
                let attempt = Attempt {
                    outcome: Outcome::demonstrated(answer),
                    status: Status::Completed,
                    score: Some(f64::from(is_right || step >= hack)),
                    ..Attempt::from_start(&AttemptStart { id, slot, number: 0, task })
                };
                store.record_attempt(&attempt).await.unwrap();
            }
        }
        store
    }

    async fn rescored(store: &Memory) -> RescoredRun {
        let keys = rescoring_keys(&RewardKeys::default());
        let scorers = Scorers::new(&keys, BTreeMap::new());
        rescore(store, &scorers, 2, 0, &mut |_, _| ()).await.unwrap()
    }

    #[tokio::test]
    async fn rescore_names_first_step_of_planted_hack() {
        let found = rescored(&recorded_run(20, 12).await).await;
        assert_eq!((found.attempts.len(), found.steps.len()), (20 * 32, 20));
        assert!(found.attempts.iter().all(|attempt| attempt.new.is_some()));
        let divergence = found.divergence.expect("the hack is named");
        assert_eq!((divergence.step, divergence.low, divergence.high), (12, 12, 12));
        assert_eq!(rescored(&recorded_run(20, 99).await).await.divergence, None);
    }

    #[tokio::test]
    async fn attempt_that_cannot_be_scored_is_unscored() {
        let store = recorded_run(1, 9).await;
        let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 0, group: 9, sample: 0 };
        let id = AttemptId::new(store.run(), &slot, 0);
        let task = json!({"id": "wordy", "answer": "no number"});
        let attempt = Attempt {
            outcome: Outcome::demonstrated("4"),
            status: Status::Completed,
            score: Some(1.0),
            ..Attempt::from_start(&AttemptStart { id, slot, number: 0, task })
        };
        store.record_attempt(&attempt).await.unwrap();
        let found = rescored(&store).await;
        let last = found.attempts.last().unwrap();
        assert_eq!((last.id, last.old, last.new), (id, Some(1.0), None));
        assert!(last.error.as_ref().is_some_and(|why| why.contains("wordy")), "{last:?}");
    }
}
