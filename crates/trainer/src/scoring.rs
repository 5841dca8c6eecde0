//! The scorers of a run: selects the scorers of a task, adds up their components, and computes the
//! other parts of a reward.
//!
//! # Guarantees
//! - **A scorer that cannot score never counts as a score of 0.** The recipe decides what happens
//!   to the attempt.
//! - **Scoring changes no sampled token**, and can be repeated: the store contains everything that
//!   a scorer reads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use levade_policy::process_time;
use levade_recipe::{RewardKeys, ScorerKeys, UnscoredEffect, WhenKeys};
use levade_reward::{ScoreError, Scorer, ScorerInput, task_field};
use levade_store::{Attempt, CreditTarget, Earned, Status};
use levade_tasks::without_endings;
use levade_tree::{AttemptId, CallCounts, Component, Finish, Outcome};
use serde_json::Value;

use crate::TrainerError;
use crate::alone::alone;

/// Scorers that a program provides in place of the recipe's scorers with these names.
pub type CustomScorers = BTreeMap<String, Arc<dyn Scorer>>;

/// The scorers of a run. Clones share them.
#[derive(Debug, Clone)]
pub struct Scorers(Arc<All>);

#[derive(Debug)]
struct All {
    scorers: Vec<NamedScorer>,
    keys: RewardKeys,
}

/// A scorer of a run.
#[derive(Debug)]
struct NamedScorer {
    name: String,
    /// Source name under which failures of the scorer are reported.
    source: String,
    weight: f64,
    weights: BTreeMap<String, f64>,
    when: WhenKeys,
    unscored: UnscoredEffect,
    scorer: Arc<dyn Scorer>,
}

/// Maximum number of calls of a scorer for an attempt under `unscored = "retry"`.
const MAX_CALLS: u32 = 3;

/// Timeout of a scorer in a dry run, before any attempt is made.
const REHEARSAL: Duration = Duration::from_secs(120);

/// Pause before the first retry. It doubles with each further retry.
const PAUSE: Duration = Duration::from_millis(100);

/// Result of a scorer's dry run on a synthetic attempt.
#[derive(Debug, Clone)]
pub struct DryRunScore {
    /// Name of the scorer.
    pub scorer: String,
    /// The components that the scorer returned, or its error. `None` if it scores no task, or if
    /// only the program that drives an attempt could compute the score.
    pub gave: Option<Result<Vec<Component>, ScoreError>>,
}

/// Reason why an attempt could not be scored.
#[derive(Debug, Clone)]
pub(crate) struct ScoringFailure {
    /// Name of the scorer.
    pub scorer: String,
    /// Source name under which failures of the scorer are reported.
    pub source: String,
    /// Message of the failure.
    pub why: String,
    /// Consequence for the attempt.
    pub fate: Fate,
}

/// Consequence for an attempt that could not be scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The attempt failed. `again` is whether another try may succeed.
    Broken { again: bool },
    /// The attempt is left out of training.
    Dropped,
    /// The attempt waits for the scorer.
    Parked,
}

impl NamedScorer {
    fn is_for(&self, task: &Value) -> bool {
        let holds = |(name, values): (&str, &[String])| {
            let found = task_field(task, name).and_then(Value::as_str);
            // The name of the source's file matches as well.
            let is_file = |value: &str, found: &str| name == "source" && without_endings(value) == found;
            found.is_some_and(|found| values.iter().any(|value| value == found || is_file(value, found)))
        };
        self.when.fields().all(holds)
    }

    /// Returns the components as they are recorded: prefixed with the name of the scorer, with
    /// weights.
    fn named(&self, components: Vec<Component>) -> Result<Vec<Component>, ScoreError> {
        let unusable = |what: String| ScoreError::Unusable(format!("the scorer {}: {what}", self.name));
        let mut scores = 0;
        let mut named = Vec::with_capacity(components.len());
        for component in components {
            let Component { name, value, .. } = &component;
            if !value.is_finite() {
                return Err(unusable(format!("its component {name} is {value}, which is no number")));
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
        // Without a score component, the attempt would count as worthless.
        if scores == 0 && self.weight != 0.0 {
            return Err(unusable(format!("it gave no component called `{}`", Component::SCORE)));
        }
        Ok(named)
    }

    /// Calls the scorer, with retries if `unscored = "retry"`. `longest` is the timeout of each
    /// call.
    async fn ask<T: Send + 'static, W: Future<Output = Result<T, ScoreError>> + Send + 'static>(
        &self,
        longest: Duration,
        ask: impl Fn(Arc<dyn Scorer>) -> W,
    ) -> Result<T, ScoreError> {
        let mut left = if self.unscored == UnscoredEffect::Retry { MAX_CALLS } else { 1 };
        let mut pause = PAUSE;
        loop {
            left -= 1;
            let asked = process_time::with_timeout(longest, alone(ask(self.scorer.clone()))).await;
            let answer = match asked {
                Some(answer) => answer.unwrap_or_else(|panic| Err(ScoreError::Unusable(panic))),
                None => {
                    let late = format!("the scorer {} did not answer within {longest:?}", self.name);
                    Err(ScoreError::Unavailable(late))
                }
            };
            match answer {
                Err(error) if left > 0 && error.is_temporary() => {
                    process_time::sleep(pause).await;
                    pause *= 2;
                }
                answer => return answer,
            }
        }
    }

    /// Dry-runs the scorer on a synthetic attempt that ends with the expected answer of its task.
    async fn rehearse(&self, task: Value) -> Result<Vec<Component>, ScoreError> {
        let outcome = Outcome::demonstrated(first_text(&task["answer"]));
        let attempt = AttemptId::from_bytes([0; 16]);
        let scorer_input = ScorerInput { attempt, task, outcome, trajectory: Arc::default() };
        self.scorer.check_task(&scorer_input.task)?;
        self.scorer.check_ready(&scorer_input.task).await?;
        let asked = async {
            match self.scorer.scores_groups() {
                false => self.scorer.score(&scorer_input).await,
                true => {
                    let group =
                        self.scorer.score_group(&[scorer_input.clone(), scorer_input.clone()]).await?;
                    Ok(group.into_iter().next().unwrap_or_default())
                }
            }
        };
        let late = || Err(ScoreError::Unavailable(format!("it did not answer within {REHEARSAL:?}")));
        let given = process_time::with_timeout(REHEARSAL, asked).await.unwrap_or_else(late)?;
        self.named(given)
    }

    fn not_scored(&self, error: &ScoreError) -> ScoringFailure {
        let again = error.is_temporary();
        let fate = match self.unscored {
            UnscoredEffect::Drop => Fate::Dropped,
            // Deferring helps only if the error is temporary.
            UnscoredEffect::Park if again => Fate::Parked,
            _ => Fate::Broken { again },
        };
        let (scorer, source) = (self.name.clone(), self.source.clone());
        ScoringFailure { scorer, source, why: error.to_string(), fate }
    }
}

/// Returns the names of the scorers that a task selects in the field `scorer` of its row. Returns
/// `None` if it selects none.
fn chosen(task: &Value) -> Option<Vec<&str>> {
    match task_field(task, "scorer")? {
        Value::String(name) => Some(vec![name.as_str()]),
        Value::Array(names) => Some(names.iter().filter_map(Value::as_str).collect()),
        _ => None,
    }
}

/// Returns a text or a number as text. Of several values, returns the first.
fn first_text(expected: &Value) -> String {
    match expected {
        Value::String(text) => text.clone(),
        Value::Array(several) => several.first().map(first_text).unwrap_or_default(),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// Moves the trajectory of an attempt into a scorer input.
fn scorer_input(attempt: &mut Attempt) -> ScorerInput {
    let trajectory = Arc::new(std::mem::take(&mut attempt.trajectory));
    ScorerInput {
        attempt: attempt.id,
        task: attempt.task.clone(),
        outcome: attempt.outcome.clone(),
        trajectory,
    }
}

/// Moves the trajectory back into its attempt.
fn give_back(attempt: &mut Attempt, scorer_input: ScorerInput) {
    attempt.trajectory = Arc::unwrap_or_clone(scorer_input.trajectory);
}

impl Scorers {
    /// Creates the scorers of a recipe.
    pub fn new(keys: &RewardKeys, mut custom: CustomScorers) -> Self {
        let mut of = |scorer: &ScorerKeys, source: String| NamedScorer {
            name: scorer.name.clone(),
            source,
            weight: scorer.weight,
            weights: scorer.weights.clone(),
            when: scorer.when.clone(),
            unscored: scorer.unscored.unwrap_or(keys.unscored),
            scorer: custom.remove(&scorer.name).unwrap_or_else(|| scorer.scorer.scorer()),
        };
        let scorers = match &keys.scorers[..] {
            [] => vec![of(&keys.single_scorer(), "scorer".into())],
            several => several.iter().map(|keys| of(keys, format!("scorer {}", keys.name))).collect(),
        };
        Scorers(Arc::new(All { scorers, keys: keys.clone() }))
    }

    /// Returns the outage timeout of scorers.
    pub(crate) fn outage(&self) -> Duration {
        Duration::from_secs_f64(self.0.keys.outage_seconds)
    }

    /// Returns the scorers of a task: the scorers that it names, otherwise those whose `when`
    /// matches it.
    fn of<'a>(&'a self, task: &'a Value) -> impl Iterator<Item = &'a NamedScorer> {
        let chosen = chosen(task);
        self.0.scorers.iter().filter(move |named| match &chosen {
            Some(names) => names.contains(&named.name.as_str()),
            None => named.is_for(task),
        })
    }

    /// Returns the names of the scorers that compare the attempts of a group.
    pub(crate) fn by_group(&self) -> impl Iterator<Item = &str> {
        self.0.scorers.iter().filter(|named| named.scorer.scores_groups()).map(|named| named.name.as_str())
    }

    /// Returns whether the attempts at a task are scored together, after each has been scored
    /// independently.
    pub(crate) fn compares(&self, task: &Value) -> bool {
        self.of(task).any(|named| named.scorer.scores_groups())
    }

    /// Returns whether an attempt at a task may have to wait for its score. Such an attempt is
    /// recorded before it has a score.
    pub(crate) fn may_wait(&self, task: &Value) -> bool {
        self.of(task).any(|named| named.unscored == UnscoredEffect::Park || named.scorer.scores_groups())
    }

    /// Checks that a task can be scored. `sources` are the sources of all tasks, for messages.
    ///
    /// # Errors
    /// Returns an error if the task names an unknown scorer, if no scorer applies to it, or if a
    /// scorer rejects it.
    pub(crate) fn check_task(&self, id: &str, task: &Value, sources: &[String]) -> Result<(), TrainerError> {
        let known = || self.0.scorers.iter().map(|named| named.name.clone()).collect::<Vec<_>>().join(", ");
        for name in chosen(task).unwrap_or_default() {
            if !self.0.scorers.iter().any(|named| named.name == name) {
                let (task, name, known) = (id.to_owned(), name.to_owned(), known());
                return Err(TrainerError::UnknownScorer { task, name, known });
            }
        }
        let mut some = false;
        for named in self.of(task) {
            some = true;
            let answer = |source| TrainerError::Answer { task: id.to_owned(), source };
            named.scorer.check_task(task).map_err(answer)?;
        }
        let source = || task_field(task, "source").and_then(Value::as_str).unwrap_or_default().to_owned();
        let none = || TrainerError::NoScorer {
            task: id.to_owned(),
            known: known(),
            of: source(),
            sources: sources.join(", "),
        };
        if some { Ok(()) } else { Err(none()) }
    }

    /// Checks that the scorers of a task are ready to score it. Skips the scorers in `asked`, and
    /// adds the checked ones to it.
    ///
    /// # Errors
    /// Returns an error if a scorer is not ready.
    pub(crate) async fn check_ready(
        &self,
        id: &str,
        task: &Value,
        asked: &mut Vec<String>,
    ) -> Result<(), TrainerError> {
        for named in self.of(task) {
            if !asked.contains(&named.name) {
                asked.push(named.name.clone());
                let answer = |source| TrainerError::Answer { task: id.to_owned(), source };
                named.scorer.check_ready(task).await.map_err(answer)?;
            }
        }
        Ok(())
    }

    /// Dry-runs each scorer on a synthetic attempt at the first task that `find` returns for it.
    /// The attempt ends with the expected answer of that task.
    pub(crate) async fn rehearse(
        &self,
        find: impl Fn(&dyn Fn(&Value) -> bool) -> Option<Value>,
    ) -> Vec<DryRunScore> {
        let mut found = Vec::new();
        for named in &self.0.scorers {
            let is_for = |task: &Value| self.of(task).any(|other| other.name == named.name);
            // A dry run has no program that drives the attempt and could score it.
            let task = find(&is_for).filter(|task| !named.scorer.needs_reported_score(task));
            let gave = match task {
                None => None,
                Some(task) => Some(named.rehearse(task).await),
            };
            found.push(DryRunScore { scorer: named.name.clone(), gave });
        }
        found
    }

    /// Scores an attempt independently of its group. Replaces its components.
    ///
    /// # Errors
    /// Returns an error if a scorer fails and the recipe has no substitute value for this case.
    pub(crate) async fn score(&self, attempt: &mut Attempt) -> Result<(), ScoringFailure> {
        let task = attempt.task.clone();
        let scorer_input = Arc::new(scorer_input(attempt));
        let (mut components, mut troubles, mut failed) = (Vec::new(), Vec::new(), None);
        let alone: Vec<&NamedScorer> = self.of(&task).filter(|named| !named.scorer.scores_groups()).collect();
        for named in alone {
            let of = scorer_input.clone();
            let ask = |scorer: Arc<dyn Scorer>| {
                let of = of.clone();
                async move { scorer.score(&of).await }
            };
            let answer = named.ask(self.outage(), ask).await;
            match (answer.and_then(|answer| named.named(answer)), named.unscored) {
                (Ok(answer), _) => components.extend(answer),
                (Err(error), UnscoredEffect::Value(value)) => {
                    troubles.push((named.source.clone(), error.to_string()));
                    components.extend(named.named(vec![Component::score(value)]).unwrap_or_default());
                }
                (Err(error), _) => {
                    failed = Some(named.not_scored(&error));
                    break;
                }
            }
        }
        give_back(attempt, Arc::unwrap_or_clone(scorer_input));
        if let Some(failed) = failed {
            return Err(failed);
        }
        for (source, why) in troubles {
            attempt.outcome.trouble(source, why);
        }
        attempt.outcome.components = components;
        Ok(())
    }

    /// Scores `attempts` of a group together with the attempts `beside` them, which already have
    /// scores. Adds to their components.
    ///
    /// # Errors
    /// Returns an error if a scorer fails and the recipe has no substitute value for this case.
    pub(crate) async fn score_together(
        &self,
        attempts: &mut [&mut Attempt],
        other_attempts: &[Attempt],
    ) -> Result<(), ScoringFailure> {
        let Some(task) = attempts.first().map(|attempt| attempt.task.clone()) else { return Ok(()) };
        let mut other_attempts = other_attempts.to_vec();
        // Sorted by sample index, so that the result does not depend on which of them already have
        // scores.
        let mut members: Vec<&mut Attempt> =
            attempts.iter_mut().map(|attempt| &mut **attempt).chain(&mut other_attempts).collect();
        members.sort_by_key(|attempt| attempt.placement.sample);
        let group: Arc<Vec<ScorerInput>> = Arc::new(members.iter_mut().map(|of| scorer_input(of)).collect());
        let mut given: Vec<Vec<Component>> = vec![Vec::new(); members.len()];
        let (mut troubles, mut failed) = (Vec::new(), None);
        let comparing: Vec<&NamedScorer> =
            self.of(&task).filter(|named| named.scorer.scores_groups()).collect();
        for named in comparing {
            let ask = |scorer: Arc<dyn Scorer>| {
                let group = group.clone();
                async move { scorer.score_group(&group).await }
            };
            let answer = named.ask(self.outage(), ask).await.and_then(|answer| {
                if answer.len() == given.len() {
                    return answer.into_iter().map(|of| named.named(of)).collect::<Result<Vec<_>, _>>();
                }
                let what = format!("the scorer {} scored {} of {}", named.name, answer.len(), given.len());
                Err(ScoreError::Unusable(what))
            });
            match (answer, named.unscored) {
                (Ok(answer), _) => given.iter_mut().zip(answer).for_each(|(of, more)| of.extend(more)),
                (Err(error), UnscoredEffect::Value(value)) => {
                    troubles.push((named.source.clone(), error.to_string()));
                    for of in &mut given {
                        of.extend(named.named(vec![Component::score(value)]).unwrap_or_default());
                    }
                }
                (Err(error), _) => {
                    failed = Some(named.not_scored(&error));
                    break;
                }
            }
        }
        for (attempt, scorer_input) in members.iter_mut().zip(Arc::unwrap_or_clone(group)) {
            give_back(attempt, scorer_input);
        }
        if let Some(failed) = failed {
            return Err(failed);
        }
        // The attempts in `beside` are copies, so changes to them have no effect.
        for (attempt, more) in members.into_iter().zip(given) {
            attempt.outcome.components.extend(more);
            for (source, why) in &troubles {
                attempt.outcome.trouble(source.as_str(), why.as_str());
            }
        }
        Ok(())
    }

    /// Computes the score and the reward of an attempt that has all its components.
    pub(crate) fn finish(&self, attempt: Attempt) -> Attempt {
        let keys = &self.0.keys;
        let mut outcome = attempt.outcome;
        let score = outcome.components.iter().map(Component::share).fold(0.0, |sum, share| sum + share);
        // The extracted text is stored once, with the outcome: the text of the first scorer that
        // extracted one.
        let extracted: Vec<String> =
            outcome.components.iter_mut().filter_map(|c| c.extracted.take()).collect();
        outcome.extracted = extracted.into_iter().next();
        let mut earned = calls(keys, &outcome);
        let cut = if outcome.finish.is_whole() { 0.0 } else { keys.unfinished };
        let reward = score + cut + earned.iter().map(|earned| earned.reward).sum::<f64>();
        earned.extend(outcome.components.iter().filter_map(of_part));
        Attempt {
            score: Some(score),
            // Adding 0 turns −0 into 0, because the store does not distinguish them.
            reward: Some(reward + 0.0),
            earned,
            status: Status::Completed,
            outcome,
            ..attempt
        }
    }

    /// Marks an attempt as failed outside the model.
    pub(crate) fn broken(&self, attempt: Attempt) -> Attempt {
        Attempt { reward: self.0.keys.broken, status: Status::Failed, ..attempt }
    }
}

/// Returns the reward of a component that refers to a part of an attempt, as credit of that part.
fn of_part(component: &Component) -> Option<Earned> {
    let (by, reward) = (component.on.clone()?, component.share());
    (reward != 0.0).then_some(Earned { by, reward })
}

/// Returns the rewards of turns: for the validity of their tool calls, and those that tools
/// assigned.
fn calls(keys: &RewardKeys, outcome: &Outcome) -> Vec<Earned> {
    let of_calls = |(turn, calls): &(u32, CallCounts)| {
        let malformed = f64::from(calls.malformed);
        let failed = f64::from(calls.errors()) - malformed;
        (*turn, keys.malformed_call * malformed + keys.failed_call * failed)
    };
    let mut by_turn: BTreeMap<u32, f64> = outcome.calls_by_turn.iter().map(of_calls).collect();
    for (turn, reward) in &outcome.earned_by_turn {
        *by_turn.entry(*turn).or_default() += reward;
    }
    let of_turn = |(turn, reward)| (reward != 0.0).then_some(Earned { by: CreditTarget::Turn(turn), reward });
    by_turn.into_iter().filter_map(of_turn).collect()
}

impl ScoringFailure {
    /// Returns the attempt, marked as failed or left out.
    pub(crate) fn of(&self, scorers: &Scorers, mut attempt: Attempt) -> Attempt {
        let outcome = &mut attempt.outcome;
        outcome.trouble(self.source.as_str(), self.why.as_str());
        outcome.error.get_or_insert_with(|| format!("the answer cannot be scored: {}", self.why));
        outcome.finish = Finish::Failed;
        let broken = scorers.broken(attempt);
        if self.fate == Fate::Dropped { Attempt { reward: None, ..broken } } else { broken }
    }
}

#[cfg(test)]
#[path = "scoring_tests.rs"]
mod tests;
