//! Scores existing completions like those that an evaluation samples.
//!
//! Each completion is an attempt whose only turn is the completion. The completions for one task
//! are a group, so that scorers which compare the attempts of a group can be used. A completion
//! that a scorer cannot decide has no score and is never counted as incorrect.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::stream::{self, StreamExt};
use levade_rl::{Interval, mean_score, wilson_interval};
use levade_store::{Attempt, AttemptStart};
use levade_tasks::Task;
use levade_tree::{AttemptId, AttemptSlot, Outcome, Purpose, RunId};
use serde_json::json;

use crate::TrainerError;
use crate::eval_result::{NUM_RESAMPLES, is_correct};
use crate::scoring::Scorers;

/// Scores of completions that were read from a file.
#[derive(Debug)]
pub struct ScoredCompletions {
    /// The scored completions as attempts, in the order of the file. The outcome of an attempt that
    /// could not be scored contains the error.
    pub attempts: Vec<Attempt>,
    /// Fraction of the scored completions with a score of 1, with its 95 % interval. `None` if no
    /// completion has a score.
    pub success: Option<Interval>,
    /// Mean score with its 95 % bootstrap interval. `None` if every score is 0 or 1.
    pub score: Option<Interval>,
}

/// Scores completions for tasks, at most `concurrency` groups at a time.
///
/// # Errors
/// Returns an error if no scorer applies to a task, or if a scorer rejects a task.
pub async fn score_completions(
    scorers: &Scorers,
    completions: Vec<(Task, String)>,
    concurrency: usize,
) -> Result<ScoredCompletions, TrainerError> {
    let run = RunId("score".into());
    let mut groups: BTreeMap<(String, String), u32> = BTreeMap::new();
    let mut samples: Vec<u32> = Vec::new();
    let mut attempts: Vec<Vec<(usize, Attempt)>> = Vec::new();
    let sources: BTreeSet<&str> =
        completions.iter().map(|(task, _)| task.source.as_str()).collect();
    let sources: Vec<String> = sources.into_iter().map(str::to_owned).collect();
    for (index, (task, completion)) in completions.into_iter().enumerate() {
        let next = groups.len() as u32;
        // Tasks of several files can have the same id.
        let group = *groups.entry((task.id.clone(), task.question.clone())).or_insert(next);
        if group == next {
            scorers.check_task(&task.id, &json!(task), &sources)?;
            samples.push(0);
            attempts.push(Vec::new());
        }
        let sample = samples[group as usize];
        samples[group as usize] += 1;
        let slot = AttemptSlot { purpose: Purpose::Eval, phase: 0, step: 0, group, sample };
        let id = AttemptId::new(&run, &slot, 0);
        let start = AttemptStart { id, slot, number: 0, task: json!(task) };
        let attempt =
            Attempt { outcome: Outcome::demonstrated(completion), ..Attempt::from_start(&start) };
        attempts[group as usize].push((index, attempt));
    }
    let scored = stream::iter(attempts).map(|group| score_group(scorers, group));
    let mut scored: Vec<(usize, Attempt)> = scored
        .buffer_unordered(concurrency.max(1))
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .flatten()
        .collect();
    scored.sort_unstable_by_key(|(index, _)| *index);
    let attempts: Vec<Attempt> = scored.into_iter().map(|(_, attempt)| attempt).collect();
    let scores: Vec<f64> = attempts.iter().filter_map(|attempt| attempt.score).collect();
    let num_correct = attempts.iter().filter(|attempt| is_correct(attempt)).count() as u64;
    let has_partial_scores = scores.iter().any(|score| *score != 0.0 && *score != 1.0);
    Ok(ScoredCompletions {
        success: if scores.is_empty() {
            None
        } else {
            Some(wilson_interval(num_correct, scores.len() as u64)?)
        },
        score: if has_partial_scores { Some(mean_score(&scores, NUM_RESAMPLES, 0)?) } else { None },
        attempts,
    })
}

/// Scores the completions of one task: first each completion independently, then all together if a
/// scorer compares the attempts of a group.
pub(crate) async fn score_group(
    scorers: &Scorers,
    group: Vec<(usize, Attempt)>,
) -> Vec<(usize, Attempt)> {
    let mut scored = Vec::with_capacity(group.len());
    let mut unscored = Vec::new();
    for (index, mut attempt) in group {
        match scorers.score(&mut attempt).await {
            Ok(()) => scored.push((index, attempt)),
            Err(failure) => unscored.push((index, failure.apply_to(scorers, attempt))),
        }
    }
    if let Some((_, first)) = scored.first()
        && scorers.compares_group(first)
    {
        let mut scored_attempts: Vec<&mut Attempt> =
            scored.iter_mut().map(|(_, attempt)| attempt).collect();
        if let Err(failure) = scorers.score_together(&mut scored_attempts, &[]).await {
            let failed = scored
                .into_iter()
                .map(|(index, attempt)| (index, failure.apply_to(scorers, attempt)));
            unscored.extend(failed);
            return unscored;
        }
    }
    let finished =
        scored.into_iter().map(|(index, attempt)| (index, scorers.compute_score(attempt)));
    finished.chain(unscored).collect()
}

#[cfg(test)]
mod tests {
    use levade_store::Status;

    use super::*;
    use levade_recipe::RewardKeys;

    fn task(id: &str, answer: i64) -> Task {
        Task { id: id.to_owned(), question: "?".into(), answer: json!(answer), ..Task::default() }
    }

    #[tokio::test]
    async fn score_completions_keeps_file_order() {
        let scorers = Scorers::new(&RewardKeys::default(), BTreeMap::new());
        let completions =
            [("a", 4, "It is 4."), ("b", 5, "4"), ("a", 4, "5"), ("b", 5, "The answer is 5")];
        let completions =
            completions.map(|(id, answer, completion)| (task(id, answer), completion.to_owned()));
        let ScoredCompletions { attempts, success, score } =
            score_completions(&scorers, completions.into(), 2).await.unwrap();
        let scores: Vec<_> = attempts.iter().map(|attempt| attempt.score).collect();
        assert_eq!(scores, [Some(1.0), Some(0.0), Some(0.0), Some(1.0)]);
        let group_and_sample: Vec<_> =
            attempts.iter().map(|a| (a.slot.group, a.slot.sample)).collect();
        assert_eq!(group_and_sample, [(0, 0), (1, 0), (0, 1), (1, 1)]);
        assert!(attempts.iter().all(|attempt| attempt.status == Status::Completed));
        assert_eq!((success.unwrap().estimate, score), (0.5, None));
    }

    #[tokio::test]
    async fn numeric_scorer_rejects_task_without_number() {
        let scorers = Scorers::new(&RewardKeys::default(), BTreeMap::new());
        let wordy = Task { answer: json!("no number"), ..task("a", 0) };
        let error = score_completions(&scorers, vec![(wordy, "1".into())], 1).await.unwrap_err();
        assert!(error.to_string().contains('a'), "{error}");
        let none = score_completions(&scorers, Vec::new(), 1).await.unwrap();
        assert_eq!((none.attempts.len(), none.success), (0, None));
    }
}
