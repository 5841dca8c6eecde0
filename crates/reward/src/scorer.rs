//! The contract of scorers: whatever says what an attempt is worth.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use levade_tree::{AttemptId, Component, Outcome, Trajectory};
use serde_json::{Map, Value};

use crate::{Score, ScoreError};

/// All that an attempt is judged by. It is taken before the attempt's sessions close, and is in the record,
/// so that what was made can be scored at any later time.
#[derive(Debug, Clone)]
pub struct Evidence {
    /// The attempt.
    pub attempt: AttemptId,
    /// The task, with all that is known of it, as it is recorded.
    pub task: Value,
    /// How it ended.
    pub outcome: Outcome,
    /// Every token.
    pub trajectory: Arc<Trajectory>,
}

impl Evidence {
    /// The text of the final answer, without thoughts and calls. Empty unless the attempt ended with one.
    pub fn text(&self) -> &str {
        &self.outcome.final_text
    }

    /// The final reply with its thoughts, between `<think>` and `</think>`. Empty unless the attempt ended
    /// with an answer.
    pub fn whole(&self) -> String {
        match self.thought().trim() {
            "" => self.text().to_owned(),
            thought => format!("<think>\n{thought}\n</think>\n\n{}", self.text()),
        }
    }

    /// The thoughts of the final reply.
    pub fn thought(&self) -> &str {
        &self.outcome.thought
    }

    /// Knowledge that toolboxes handed over before they were closed, by the toolbox's name.
    pub fn handed(&self) -> &Map<String, Value> {
        &self.outcome.evidence
    }

    /// Whether the attempt came to its own end, rather than to a limit.
    pub fn is_answered(&self) -> bool {
        self.outcome.finish.is_whole()
    }

    /// The expected answer; null where the task has none.
    pub fn expected(&self) -> &Value {
        expected(&self.task)
    }

    /// The expected answer for programs and functions: a number that its task has as the text of its digits
    /// is the number.
    pub fn expected_value(&self) -> &Value {
        expected_value(&self.task)
    }
}

/// The expected answer of a task.
pub(crate) fn expected(task: &Value) -> &Value {
    task.get("answer").unwrap_or(&Value::Null)
}

/// The expected answer of a task, for programs and functions.
pub(crate) fn expected_value(task: &Value) -> &Value {
    task.get("answer_number").filter(|number| number.is_number()).unwrap_or(expected(task))
}

/// A field of a task, or else of the row that it was read from.
pub fn task_field<'t>(task: &'t Value, name: &str) -> Option<&'t Value> {
    let of_row = || task.get("row")?.get(name);
    task.get(name).filter(|value| !value.is_null()).or_else(of_row)
}

/// Says what attempts are worth: one by one, or those of a group together.
///
/// Nothing that a model wrote is an error. A scorer that cannot score now, because whoever it asks is away,
/// gives an error that [may pass](ScoreError::may_pass); it never gives 0 for that. It may be asked about the
/// same evidence again, and about many attempts at once.
#[async_trait]
pub trait Scorer: Debug + Send + Sync {
    /// Whether it scores the attempts of a group together ([`score_group`](Self::score_group)), and none by
    /// itself.
    fn is_by_group(&self) -> bool {
        false
    }

    /// Whether nobody but the one who led an attempt at this task can say what it is worth.
    fn is_led(&self, _task: &Value) -> bool {
        false
    }

    /// Checks a task before anything is sampled.
    ///
    /// # Errors
    /// When the task, such as its expected answer, makes no sense to the scorer.
    fn check_task(&self, _task: &Value) -> Result<(), ScoreError> {
        Ok(())
    }

    /// Finds before anything is sampled whether it could score attempts at this task.
    ///
    /// # Errors
    /// When it could not, so that a run does not begin.
    async fn check_ready(&self, _task: &Value) -> Result<(), ScoreError> {
        Ok(())
    }

    /// Scores an attempt. One component is called [`Component::SCORE`]; others tell more.
    ///
    /// # Errors
    /// When the scorer cannot, for whatever reason but what the model wrote.
    async fn score(&self, evidence: &Evidence) -> Result<Vec<Component>, ScoreError>;

    /// Scores the attempts of a group, each against the others: the components of each, in their order.
    ///
    /// # Errors
    /// When the scorer cannot score all of them.
    async fn score_group(&self, _group: &[Evidence]) -> Result<Vec<Vec<Component>>, ScoreError> {
        Ok(Vec::new())
    }
}

/// The score of a scorer that looks at the final answer alone, where `graded` is that of the answer. Without
/// one it is 0.
pub(crate) fn of_answer(
    evidence: &Evidence,
    graded: Result<Score, ScoreError>,
) -> Result<Vec<Component>, ScoreError> {
    // Graded also without an answer, so that a task that cannot be scored is found whatever the model says.
    let Score { value, extracted } = graded?;
    let score = if evidence.is_answered() {
        Component { extracted, ..Component::score(value) }
    } else {
        Component::score(0.0)
    };
    Ok(vec![score])
}

/// Returns the beginning of a text, for a message.
pub(crate) fn shown(text: &str) -> String {
    text.trim().chars().take(80).collect()
}
