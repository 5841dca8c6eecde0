//! The [`Scorer`] trait and its input.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use levade_tree::{AttemptId, Component, Outcome, Trajectory};
use serde_json::{Map, Value};

use crate::{Score, ScoreError};

/// Input of a scorer: all data about one attempt. It is collected before the attempt's sessions
/// close and is kept in the store, so that the attempt can be scored at any later time.
#[derive(Debug, Clone)]
pub struct ScorerInput {
    /// Identifier of the attempt.
    pub attempt: AttemptId,
    /// The attempt's task with all of its fields, as in the store.
    pub task: Value,
    /// How the attempt ended, with its final answer.
    pub outcome: Outcome,
    /// All tokens of the attempt.
    pub trajectory: Arc<Trajectory>,
}

impl ScorerInput {
    /// Returns the text of the attempt's final answer, without reasoning and tool calls. Empty
    /// unless the attempt ended with an answer.
    pub fn text(&self) -> &str {
        &self.outcome.final_text
    }

    /// Returns the final assistant message, with its reasoning between `<think>` and `</think>`.
    /// Empty unless the attempt ended with an answer.
    pub fn full_text(&self) -> String {
        match self.reasoning().trim() {
            "" => self.text().to_owned(),
            reasoning => format!("<think>\n{reasoning}\n</think>\n\n{}", self.text()),
        }
    }

    /// Returns the reasoning of the attempt's final assistant message.
    pub fn reasoning(&self) -> &str {
        &self.outcome.reasoning
    }

    /// Returns the data for scorers that toolboxes provided before they were closed, by toolbox
    /// name.
    pub fn toolbox_data(&self) -> &Map<String, Value> {
        &self.outcome.scorer_inputs
    }

    /// Returns whether the attempt ended by itself rather than at a limit.
    pub fn is_answered(&self) -> bool {
        self.outcome.finish.is_complete()
    }

    /// Returns the task's expected answer, or null if the task has none.
    pub fn expected(&self) -> &Value {
        expected(&self.task)
    }

    /// Returns the task's expected answer for programs and functions. If the task stores a number
    /// as the string of its digits, this is the number (`answer_number`).
    pub fn expected_value(&self) -> &Value {
        expected_value(&self.task)
    }
}

/// Returns the expected answer of a task, or null if the task has none.
pub(crate) fn expected(task: &Value) -> &Value {
    task.get("answer").unwrap_or(&Value::Null)
}

/// Returns the expected answer of a task for programs and functions, as described at
/// [`ScorerInput::expected_value`].
pub(crate) fn expected_value(task: &Value) -> &Value {
    task.get("answer_number").filter(|number| number.is_number()).unwrap_or(expected(task))
}

/// Returns the field `name` of a task. If the field is missing or null, returns the field of the
/// data set row that the task was read from.
pub fn task_field<'t>(task: &'t Value, name: &str) -> Option<&'t Value> {
    let row_field = || task.get("row")?.get(name);
    task.get(name).filter(|value| !value.is_null()).or_else(row_field)
}

/// Scores attempts, individually or all attempts of a group together.
///
/// Model output never causes an error. If a service is unavailable, the scorer does not return a
/// score of 0, but an error that [may be temporary](ScoreError::is_temporary). A scorer can be
/// called repeatedly for the same attempt, and concurrently for many attempts.
#[async_trait]
pub trait Scorer: Debug + Send + Sync {
    /// Returns whether the scorer scores all attempts of a group together
    /// ([`score_group`](Self::score_group)), and does not score single attempts.
    fn scores_groups(&self) -> bool {
        false
    }

    /// Returns whether only the program or environment that ran an attempt at this task can report
    /// its score.
    fn needs_reported_score(&self, _task: &Value) -> bool {
        false
    }

    /// Checks a task before anything is sampled.
    ///
    /// # Errors
    /// Returns an error if the scorer cannot use the task, for example its expected answer.
    fn check_task(&self, _task: &Value) -> Result<(), ScoreError> {
        Ok(())
    }

    /// Checks before anything is sampled whether the scorer will be able to score attempts at this
    /// task.
    ///
    /// # Errors
    /// Returns an error if the scorer cannot score attempts at the task; the run then does not
    /// start.
    async fn check_ready(&self, _task: &Value) -> Result<(), ScoreError> {
        Ok(())
    }

    /// Scores an attempt. One component is named [`Component::SCORE`]; further components are
    /// optional.
    ///
    /// # Errors
    /// Returns an error if the scorer fails. Model output is never a reason.
    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError>;

    /// Scores the attempts of a group relative to each other. Returns the components of each
    /// attempt, in the order of `group`.
    ///
    /// # Errors
    /// Returns an error if the scorer cannot score all of the attempts.
    async fn score_group(&self, _group: &[ScorerInput]) -> Result<Vec<Vec<Component>>, ScoreError> {
        Ok(Vec::new())
    }
}

/// Returns the components of a scorer that scores only the final answer: the grade in `graded`, or
/// 0 if the attempt ended without an answer.
pub(crate) fn answer_components(
    input: &ScorerInput,
    graded: Result<Score, ScoreError>,
) -> Result<Vec<Component>, ScoreError> {
    // An error in `graded` is returned even without an answer, so that an invalid task is found
    // whatever the model writes.
    let Score { value, extracted } = graded?;
    let score = if input.is_answered() {
        Component { extracted, ..Component::score(value) }
    } else {
        Component::score(0.0)
    };
    Ok(vec![score])
}

/// Returns the first 80 characters of a trimmed text, for an error message.
pub(crate) fn excerpt(text: &str) -> String {
    text.trim().chars().take(80).collect()
}
