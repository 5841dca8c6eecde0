//! The scorers of a run: selects the scorers of a task, adds up their components, and computes the
//! other parts of a reward.
//!
//! # Guarantees
//! - **A failure of a scorer is not a score of 0**, unless the recipe sets `unscored = 0`. The
//!   recipe decides what happens to the attempt.
//! - **Scoring changes no sampled token**, and can be repeated: the store contains everything that
//!   a scorer reads.

mod moment;
mod step_rewards;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use levade_policy::process_time;
use levade_recipe::{RewardKeys, ScorerKeys, UnscoredEffect, WhenKeys};
use levade_reward::{ScoreError, Scorer, ScorerInput, task_field};
use levade_store::{Attempt, Status};
use levade_tasks::without_endings;
use levade_tree::{AttemptId, Component, Finish, Outcome};
use serde_json::Value;

use crate::TrainerError;
use crate::panics::catch_panic;
use moment::{TrainingMoment, first_uncovered_moment};
pub(crate) use step_rewards::sum_of_components;
use step_rewards::{agent_score, call_rewards, component_reward};

/// Scorers that the program provides, by name. They replace the recipe's scorers of these names.
pub type CustomScorers = BTreeMap<String, Arc<dyn Scorer>>;

/// The scorers of a run. All clones share the same scorers.
#[derive(Debug, Clone)]
pub struct Scorers(Arc<ScorerSet>);

#[derive(Debug)]
struct ScorerSet {
    scorers: Vec<NamedScorer>,
    keys: RewardKeys,
}

/// A scorer with its name, weights and conditions in the recipe.
#[derive(Debug)]
struct NamedScorer {
    name: String,
    /// Name of the source under which failures of the scorer are reported.
    source: String,
    weight: f64,
    weights: BTreeMap<String, f64>,
    when: WhenKeys,
    unscored: UnscoredEffect,
    scorer: Arc<dyn Scorer>,
}

/// Maximum number of calls of a scorer for one attempt if `unscored = "retry"`.
const MAX_CALLS: u32 = 3;

/// Timeout of a scorer's dry run, which is made before any attempt.
const DRY_RUN_TIMEOUT: Duration = Duration::from_secs(120);

/// Pause before the first retry of a scorer call. The pause doubles with each further retry.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Result of the dry run of a scorer, in which the scorer scores a synthetic attempt.
#[derive(Debug, Clone)]
pub struct DryRunScore {
    /// Name of the scorer.
    pub scorer: String,
    /// The components that the scorer returned, or its error. `None` if the scorer applies to no
    /// task, or if the score can only come from the program that drives an attempt.
    pub result: Option<Result<Vec<Component>, ScoreError>>,
}

/// A failure of a scorer, because of which an attempt could not be scored.
#[derive(Debug, Clone)]
pub(crate) struct ScoringFailure {
    /// Name of the scorer that failed.
    pub scorer: String,
    /// Name of the source under which failures of the scorer are reported.
    pub source: String,
    /// Message of the failure.
    pub why: String,
    /// What happens to the attempt.
    pub action: FailureAction,
}

/// What happens to an attempt that could not be scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureAction {
    /// The attempt counts as failed. `retry` states whether another try could succeed.
    Broken { retry: bool },
    /// The attempt is left out of training.
    Dropped,
    /// The attempt waits until the scorer is available.
    Deferred,
}

impl NamedScorer {
    fn applies_to(&self, task: &Value) -> bool {
        let matches_field = |(name, values): (&str, &[String])| {
            let found = task_field(task, name).and_then(Value::as_str);
            // The name of the source's file matches as well.
            let is_file =
                |value: &str, found: &str| name == "source" && without_endings(value) == found;
            found.is_some_and(|found| {
                values.iter().any(|value| value == found || is_file(value, found))
            })
        };
        let mut row = self.when.row.iter();
        self.when.fields().all(matches_field)
            && row.all(|(name, values)| match &task["row"][name] {
                Value::Null => false,
                Value::String(text) => values.contains(text),
                other => values.contains(&other.to_string()),
            })
    }

    /// Returns the score components as they are recorded: with the scorer's name as prefix, and
    /// with their weights.
    fn name_components(&self, components: Vec<Component>) -> Result<Vec<Component>, ScoreError> {
        let unusable =
            |what: String| ScoreError::Unusable(format!("the scorer {}: {what}", self.name));
        let mut scores = 0;
        let mut named = Vec::with_capacity(components.len());
        for component in components {
            let Component { name, value, .. } = &component;
            if !value.is_finite() {
                return Err(unusable(format!(
                    "the component {name} is {value}, but scores must be finite"
                )));
            }
            let is_score = name == Component::SCORE;
            let (name, weight) = if is_score {
                scores += 1;
                (self.name.clone(), Some(self.weight).filter(|weight| *weight != 0.0))
            } else {
                (format!("{}.{name}", self.name), self.weights.get(name).copied())
            };
            named.push(Component { name, weight, ..component });
        }
        // Without a component for the score, the attempt would count as worthless.
        if scores == 0 && self.weight != 0.0 {
            return Err(unusable(format!(
                "the result has no component called `{}`",
                Component::SCORE
            )));
        }
        Ok(named)
    }

    /// Calls the scorer. A temporary failure is retried if `unscored = "retry"`. `timeout` applies
    /// to each call.
    async fn call<T: Send + 'static, W: Future<Output = Result<T, ScoreError>> + Send + 'static>(
        &self,
        timeout: Duration,
        make_call: impl Fn(Arc<dyn Scorer>) -> W,
    ) -> Result<T, ScoreError> {
        let mut calls_left = if self.unscored == UnscoredEffect::Retry { MAX_CALLS } else { 1 };
        let mut pause = RETRY_INTERVAL;
        loop {
            calls_left -= 1;
            let outcome =
                process_time::with_timeout(timeout, catch_panic(make_call(self.scorer.clone())))
                    .await;
            let result = match outcome {
                Some(result) => result.unwrap_or_else(|panic| Err(ScoreError::Unusable(panic))),
                None => {
                    let late =
                        format!("the scorer {} did not respond within {timeout:?}", self.name);
                    Err(ScoreError::Unavailable(late))
                }
            };
            match result {
                Err(error) if calls_left > 0 && error.is_temporary() => {
                    process_time::sleep(pause).await;
                    pause *= 2;
                }
                result => return result,
            }
        }
    }

    /// Calls the scorer with a synthetic attempt whose answer is the expected answer of `task`.
    async fn dry_run(&self, task: Value) -> Result<Vec<Component>, ScoreError> {
        let outcome = Outcome::demonstrated(first_text(&task["answer"]));
        let attempt = AttemptId::from_bytes([0; 16]);
        let scorer_input = ScorerInput { attempt, task, outcome, trajectory: Arc::default() };
        self.scorer.check_task(&scorer_input.task)?;
        self.scorer.check_ready(&scorer_input.task).await?;
        let scoring = async {
            if self.scorer.scores_groups() {
                let group =
                    self.scorer.score_group(&[scorer_input.clone(), scorer_input.clone()]).await?;
                Ok(group.into_iter().next().unwrap_or_default())
            } else {
                self.scorer.score(&scorer_input).await
            }
        };
        let late = || Err(ScoreError::Unavailable(format!("timed out after {DRY_RUN_TIMEOUT:?}")));
        let components =
            process_time::with_timeout(DRY_RUN_TIMEOUT, scoring).await.unwrap_or_else(late)?;
        self.name_components(components)
    }

    fn to_scoring_failure(&self, error: &ScoreError) -> ScoringFailure {
        let again = error.is_temporary();
        let fate = match self.unscored {
            UnscoredEffect::Drop => FailureAction::Dropped,
            // Deferring helps only if the error is temporary.
            UnscoredEffect::Defer if again => FailureAction::Deferred,
            _ => FailureAction::Broken { retry: again },
        };
        let scorer = self.name.clone();
        let source = self.source.clone();
        ScoringFailure { scorer, source, why: error.to_string(), action: fate }
    }
}

/// Returns the names of the scorers that a task's row selects in its field `scorer`, or `None` if
/// the row selects no scorers.
fn selected_scorers(task: &Value) -> Option<Vec<&str>> {
    match task_field(task, "scorer")? {
        Value::String(name) => Some(vec![name.as_str()]),
        Value::Array(names) => Some(names.iter().filter_map(Value::as_str).collect()),
        _ => None,
    }
}

/// Returns an expected answer as text. If there are several expected answers, returns the first.
fn first_text(expected: &Value) -> String {
    match expected {
        Value::String(text) => text.clone(),
        Value::Array(several) => several.first().map(first_text).unwrap_or_default(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// Converts an attempt to a scorer input, into which its trajectory is moved.
fn scorer_input(attempt: &mut Attempt) -> ScorerInput {
    let trajectory = Arc::new(std::mem::take(&mut attempt.trajectory));
    ScorerInput {
        attempt: attempt.id,
        task: attempt.task.clone(),
        outcome: attempt.outcome.clone(),
        trajectory,
    }
}

/// Moves the trajectory of a scorer input back into its attempt.
fn restore_scorer_input(attempt: &mut Attempt, scorer_input: ScorerInput) {
    attempt.trajectory = Arc::unwrap_or_clone(scorer_input.trajectory);
}

impl Scorers {
    /// Creates the scorers of a recipe. `custom` replaces scorers of the same names.
    pub fn new(keys: &RewardKeys, mut custom: CustomScorers) -> Self {
        let mut make_scorer = |scorer: &ScorerKeys, source: String| NamedScorer {
            name: scorer.name.clone(),
            source,
            weight: scorer.weight,
            weights: scorer.weights.clone(),
            when: scorer.when.clone(),
            unscored: scorer.unscored.unwrap_or(keys.unscored),
            scorer: custom.remove(&scorer.name).unwrap_or_else(|| scorer.scorer.scorer()),
        };
        let scorers = match &keys.scorers[..] {
            [] => vec![make_scorer(&keys.single_scorer(), "scorer".into())],
            several => several
                .iter()
                .map(|keys| make_scorer(keys, format!("scorer {}", keys.name)))
                .collect(),
        };
        Scorers(Arc::new(ScorerSet { scorers, keys: keys.clone() }))
    }

    /// Returns the maximum time for which a run waits for an unavailable scorer.
    pub(crate) fn outage_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.0.keys.timeout_seconds)
    }

    /// Returns whether the measured success at a task determines which scorers apply to an attempt.
    pub(crate) fn depend_on_success(&self) -> bool {
        self.0.scorers.iter().any(|named| named.when.depends_on_success())
    }

    /// Returns the scorers that apply to an attempt: the scorers that its task names, or else the
    /// scorers whose `when` matches the task and the moment at which the attempt was started.
    fn attempt_scorers<'a>(&'a self, attempt: &Attempt) -> impl Iterator<Item = &'a NamedScorer> {
        let moment =
            selected_scorers(&attempt.task).is_none().then(|| TrainingMoment::of_attempt(attempt));
        self.task_scorers(&attempt.task)
            .filter(move |named| moment.is_none_or(|moment| moment.satisfies(&named.when)))
    }

    /// Returns the scorers that apply to a task at any moment of the training: the scorers that the
    /// task names, or else the scorers whose `when` matches the task.
    fn task_scorers<'a>(&'a self, task: &Value) -> impl Iterator<Item = &'a NamedScorer> {
        let chosen = selected_scorers(task);
        self.0.scorers.iter().filter(move |named| match &chosen {
            Some(names) => names.contains(&named.name.as_str()),
            None => named.applies_to(task),
        })
    }

    /// Returns the names of the scorers that compare the attempts of a group.
    pub(crate) fn group_scorers(&self) -> impl Iterator<Item = &str> {
        self.0
            .scorers
            .iter()
            .filter(|named| named.scorer.scores_groups())
            .map(|named| named.name.as_str())
    }

    /// Returns whether a scorer of the attempt compares all attempts of a group with each other.
    pub(crate) fn compares_group(&self, attempt: &Attempt) -> bool {
        self.attempt_scorers(attempt).any(|named| named.scorer.scores_groups())
    }

    /// Returns whether an attempt may be recorded before it is scored.
    pub(crate) fn can_defer(&self, attempt: &Attempt) -> bool {
        self.attempt_scorers(attempt)
            .any(|named| named.unscored == UnscoredEffect::Defer || named.scorer.scores_groups())
    }

    /// Checks that a task can be scored. Error messages list `sources`, the names of all sources.
    ///
    /// # Errors
    /// Returns an error if the task names an unknown scorer, if no scorer applies to the task at
    /// some moment of the training, or if a scorer rejects the task.
    pub(crate) fn check_task(
        &self,
        id: &str,
        task: &Value,
        sources: &[String],
    ) -> Result<(), TrainerError> {
        let known =
            || self.0.scorers.iter().map(|named| named.name.clone()).collect::<Vec<_>>().join(", ");
        for name in selected_scorers(task).unwrap_or_default() {
            if !self.0.scorers.iter().any(|named| named.name == name) {
                let task = id.to_owned();
                let name = name.to_owned();
                let known = known();
                return Err(TrainerError::UnknownScorer { task, name, known });
            }
        }
        let mut some = false;
        for named in self.task_scorers(task) {
            some = true;
            let answer = |source| TrainerError::AnswerKey { task: id.to_owned(), source };
            named.scorer.check_task(task).map_err(answer)?;
        }
        let source =
            || task_field(task, "source").and_then(Value::as_str).unwrap_or_default().to_owned();
        let none = || TrainerError::NoScorer {
            task: id.to_owned(),
            known: known(),
            of: source(),
            sources: sources.join(", "),
        };
        if !some {
            return Err(none());
        }
        let conditions: Vec<&WhenKeys> = self.task_scorers(task).map(|named| &named.when).collect();
        match first_uncovered_moment(&conditions).filter(|_| selected_scorers(task).is_none()) {
            None => Ok(()),
            Some(gap) => {
                let why = format!("no scorer applies {gap}; widen `when` of [[reward.scorers]]");
                let (task, source) = (id.to_owned(), ScoreError::Unusable(why));
                Err(TrainerError::AnswerKey { task, source })
            }
        }
    }

    /// Checks that the scorers of a task are ready to score it. Skips the scorers whose names are
    /// in `checked`, and adds the names of the other scorers to it.
    ///
    /// # Errors
    /// Returns an error if a scorer is not ready.
    pub(crate) async fn check_ready(
        &self,
        id: &str,
        task: &Value,
        checked: &mut Vec<String>,
    ) -> Result<(), TrainerError> {
        for named in self.task_scorers(task) {
            if !checked.contains(&named.name) {
                checked.push(named.name.clone());
                let to_error = |source| TrainerError::AnswerKey { task: id.to_owned(), source };
                named.scorer.check_ready(task).await.map_err(to_error)?;
            }
        }
        Ok(())
    }

    /// Dry-runs each scorer on a synthetic attempt at the first task to which the scorer applies.
    /// `find` returns this task. The answer of the attempt is the expected answer of the task.
    pub(crate) async fn dry_run(
        &self,
        find: impl Fn(&dyn Fn(&Value) -> bool) -> Option<Value>,
    ) -> Vec<DryRunScore> {
        let mut found = Vec::new();
        for named in &self.0.scorers {
            let is_for =
                |task: &Value| self.task_scorers(task).any(|other| other.name == named.name);
            // A dry run has no program that drives the attempt and could score it.
            let task = find(&is_for).filter(|task| !named.scorer.needs_reported_score(task));
            let gave = match task {
                None => None,
                Some(task) => Some(named.dry_run(task).await),
            };
            found.push(DryRunScore { scorer: named.name.clone(), result: gave });
        }
        found
    }

    /// Scores an attempt independently of its group, and replaces the components of its score.
    ///
    /// # Errors
    /// Returns an error if a scorer fails and the recipe sets no substitute value.
    pub(crate) async fn score(&self, attempt: &mut Attempt) -> Result<(), ScoringFailure> {
        let single_scorers: Vec<&NamedScorer> =
            self.attempt_scorers(attempt).filter(|named| !named.scorer.scores_groups()).collect();
        let scorer_input = Arc::new(scorer_input(attempt));
        let mut components = Vec::new();
        let mut warnings = Vec::new();
        let mut failed = None;
        for named in single_scorers {
            let input = scorer_input.clone();
            let result = named
                .call(self.outage_timeout(), |scorer| {
                    let input = input.clone();
                    async move { scorer.score(&input).await }
                })
                .await;
            match (result.and_then(|result| named.name_components(result)), named.unscored) {
                (Ok(result), _) => components.extend(result),
                (Err(error), UnscoredEffect::Value(value)) => {
                    warnings.push((named.source.clone(), error.to_string()));
                    components.extend(
                        named.name_components(vec![Component::score(value)]).unwrap_or_default(),
                    );
                }
                (Err(error), _) => {
                    failed = Some(named.to_scoring_failure(&error));
                    break;
                }
            }
        }
        restore_scorer_input(attempt, Arc::unwrap_or_clone(scorer_input));
        if let Some(failed) = failed {
            return Err(failed);
        }
        for (source, why) in warnings {
            attempt.outcome.add_warning(source, why);
        }
        attempt.outcome.components = components;
        Ok(())
    }

    /// Compares the attempts of a group with each other, and adds the resulting components to
    /// `attempts`. `other_attempts` belong to the same group, but already have scores and do not
    /// change.
    ///
    /// # Errors
    /// Returns an error if a scorer fails and the recipe sets no substitute value.
    pub(crate) async fn score_together(
        &self,
        attempts: &mut [&mut Attempt],
        other_attempts: &[Attempt],
    ) -> Result<(), ScoringFailure> {
        let Some(first) = attempts.first() else { return Ok(()) };
        let comparing: Vec<&NamedScorer> =
            self.attempt_scorers(first).filter(|named| named.scorer.scores_groups()).collect();
        let mut other_attempts = other_attempts.to_vec();
        // Sorted by sample index, so that the result does not depend on which of them already have
        // scores.
        let mut group_attempts: Vec<&mut Attempt> =
            attempts.iter_mut().map(|attempt| &mut **attempt).chain(&mut other_attempts).collect();
        group_attempts.sort_by_key(|attempt| attempt.slot.sample);
        let group: Arc<Vec<ScorerInput>> =
            Arc::new(group_attempts.iter_mut().map(|entry| scorer_input(entry)).collect());
        let mut components_by_attempt: Vec<Vec<Component>> = vec![Vec::new(); group_attempts.len()];
        let mut warnings = Vec::new();
        let mut failed = None;
        for named in comparing {
            let make_call = |scorer: Arc<dyn Scorer>| {
                let group = group.clone();
                async move { scorer.score_group(&group).await }
            };
            let scores = named.call(self.outage_timeout(), make_call).await.and_then(|scores| {
                if scores.len() == components_by_attempt.len() {
                    return scores
                        .into_iter()
                        .map(|entry| named.name_components(entry))
                        .collect::<Result<Vec<_>, _>>();
                }
                let what = format!(
                    "the scorer {} returned {} scores for {} attempts",
                    named.name,
                    scores.len(),
                    components_by_attempt.len()
                );
                Err(ScoreError::Unusable(what))
            });
            match (scores, named.unscored) {
                (Ok(scores), _) => components_by_attempt
                    .iter_mut()
                    .zip(scores)
                    .for_each(|(entry, more)| entry.extend(more)),
                (Err(error), UnscoredEffect::Value(value)) => {
                    warnings.push((named.source.clone(), error.to_string()));
                    for entry in &mut components_by_attempt {
                        entry.extend(
                            named
                                .name_components(vec![Component::score(value)])
                                .unwrap_or_default(),
                        );
                    }
                }
                (Err(error), _) => {
                    failed = Some(named.to_scoring_failure(&error));
                    break;
                }
            }
        }
        for (attempt, scorer_input) in group_attempts.iter_mut().zip(Arc::unwrap_or_clone(group)) {
            restore_scorer_input(attempt, scorer_input);
        }
        if let Some(failed) = failed {
            return Err(failed);
        }
        // The attempts in `other_attempts` are copies, so changes to them have no effect.
        for (attempt, more) in group_attempts.into_iter().zip(components_by_attempt) {
            attempt.outcome.components.extend(more);
            for (source, why) in &warnings {
                attempt.outcome.add_warning(source.as_str(), why.as_str());
            }
        }
        Ok(())
    }

    /// Computes the score and the reward of an attempt from its components.
    pub(crate) fn compute_score(&self, attempt: Attempt) -> Attempt {
        let keys = &self.0.keys;
        let mut outcome = attempt.outcome;
        let score = match keys.of.as_str() {
            "" => sum_of_components(&outcome.components),
            agent => agent_score(agent, &outcome.components),
        };
        // The extracted text is stored once, with the outcome: the text of the first scorer that
        // extracted one.
        let extracted: Vec<String> =
            outcome.components.iter_mut().filter_map(|c| c.extracted.take()).collect();
        outcome.extracted = extracted.into_iter().next();
        let mut step_rewards = call_rewards(keys, &outcome);
        let unfinished_penalty = if outcome.finish.is_complete() { 0.0 } else { keys.unfinished };
        let reward = score
            + unfinished_penalty
            + step_rewards.iter().map(|step_rewards| step_rewards.reward).sum::<f64>();
        step_rewards.extend(outcome.components.iter().filter_map(component_reward));
        Attempt {
            score: Some(score),
            // Adding 0 turns −0 into 0, because the store does not distinguish them.
            reward: Some(reward + 0.0),
            step_rewards,
            status: Status::Completed,
            outcome,
            ..attempt
        }
    }

    /// Marks an attempt as failed for a reason outside the model.
    pub(crate) fn mark_broken(&self, attempt: Attempt) -> Attempt {
        Attempt { reward: self.0.keys.broken, status: Status::Failed, ..attempt }
    }
}

impl ScoringFailure {
    /// Returns the attempt with this failure as a warning, marked as failed or as left out of
    /// training.
    pub(crate) fn apply_to(&self, scorers: &Scorers, mut attempt: Attempt) -> Attempt {
        let outcome = &mut attempt.outcome;
        outcome.add_warning(self.source.as_str(), self.why.as_str());
        outcome.error.get_or_insert_with(|| format!("the answer cannot be scored: {}", self.why));
        outcome.finish = Finish::Failed;
        let broken = scorers.mark_broken(attempt);
        if self.action == FailureAction::Dropped {
            Attempt { reward: None, ..broken }
        } else {
            broken
        }
    }
}

#[cfg(test)]
#[path = "scoring_tests.rs"]
mod tests;
