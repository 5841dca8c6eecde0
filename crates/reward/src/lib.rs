//! Scorers: compute the score of an attempt from its recorded data.
//!
//! A [`Scorer`] reads the [`ScorerInput`] of an attempt (its task, outcome, final text and tokens,
//! and data from its tools) and returns [`Component`]s. It scores attempts individually, or all
//! attempts of a group together. The store holds all of this input, so scoring can be repeated at
//! any time.
//!
//! A [`CommandScorer`] runs a program of the user, and a [`PythonScorer`] a Python function. Their
//! processes receive only named environment variables and end with the scorer. An [`HttpScorer`]
//! calls a service, a [`JudgeScorer`] queries a language model, and a [`CodeScorer`] runs tests in
//! a sandbox. The binary passes the network client or the sandbox to these scorers, because this
//! crate contains neither. A [`SqlScorer`] runs queries, a [`SchemaScorer`] validates JSON, and a
//! [`StateScorer`] compares the state of tools.
//!
//! # Example
//! ```
//! use levade_reward::NumericScorer;
//!
//! let scorer = NumericScorer::default();
//! let score = scorer.grade("She sold 48 + 24 = 72 clips.", &"72".into())?;
//! assert_eq!((score.value, score.extracted.as_deref()), (1.0, Some("72")));
//! # Ok::<(), levade_reward::ScoreError>(())
//! ```
//!
//! # Guarantees
//! - **Model output never causes an error.** An invalid expected answer does.
//! - **A scorer that cannot score returns an error**, never a score of 0. The recipe decides what
//!   happens to the attempt.
//! - **Answer comparison is pure.** Scorers that compare the final answer with the expected answer
//!   give the same text the same score.
//!
//! [`Rational`] provides the exact arithmetic that compares and computes answers.
//!
//! Out of scope: the assignment of scorers to tasks, the weights of components, and the handling of
//! attempts without a score (`levade-trainer`).

mod answer;
mod blocks;
mod bounds;
mod box_context;
mod boxed;
mod characters;
mod choice;
mod chunks;
mod code;
mod command;
mod contained;
mod context;
mod decimal;
mod doubts;
mod format;
mod http;
mod json;
mod judge;
mod languages;
mod maths;
mod numbers;
mod numeric;
mod pattern;
mod program;
mod python;
mod rational;
mod retraction;
mod schema;
mod scorer;
mod services;
mod short;
mod sql;
mod state;
#[cfg(test)]
mod testing;
mod units;
mod unsettled;
mod words;

use std::sync::Arc;

use levade_process::Supervisor;
use serde::{Deserialize, Serialize};
use services::UnconnectedScorer;

pub use answer::{AnswerLocation, AnswerScorer, Comparison, FormatScore, word_f1};
pub use choice::{ChoiceScorer, OPTION_LABELS, OPTION_TEXTS, split_letters};
pub use code::{
    CodeKeys, CodeScorer, Isolation, Program, ProgramEnd, ProgramResult, Runner, TestScoring,
};
pub use command::{CommandKeys, CommandScorer};
pub use format::FormatScorer;
pub use http::{HttpKeys, HttpScorer};
pub use judge::{Group, JudgeEndpoint, JudgeKeys, JudgeScorer, Verdict};
pub use levade_tree::Component;
pub use maths::{MathsLocation, MathsScorer, Percent, Units};
pub use numeric::{NumberLocation, NumericScorer, Tolerance};
pub use program::{ProgramScorer, RewardSource};
pub use python::{Completions, PythonKeys, PythonScorer, SolutionText};
pub use rational::Rational;
pub use schema::SchemaScorer;
pub use scorer::{Scorer, ScorerInput, task_field};
pub use services::{Chat, ChatText, Service};
pub use short::normalize;
pub use sql::{Columns, SqlScorer};
pub use state::StateScorer;

/// A scorer in a recipe: its kind, with the recipe keys of this kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScorerKind {
    /// Compares the final number of a completion with the expected number.
    Numeric(NumericScorer),
    /// Compares mathematical answers by value rather than by notation.
    Maths(MathsScorer),
    /// Compares a short text answer with the accepted answers.
    Answer(AnswerScorer),
    /// Checks which option of a multiple-choice task the completion selects.
    Choice(ChoiceScorer),
    /// Checks the format of a completion.
    #[serde(alias = "form")]
    Format(FormatScorer),
    /// Validates the JSON in the final answer against a schema.
    JsonSchema(SchemaScorer),
    /// Compares the rows that an SQL query returns with the rows of the expected query.
    Sql(SqlScorer),
    /// Compares the final state of the tools with the expected state.
    State(StateScorer),
    /// Runs the tests of a program in a sandbox.
    Code(CodeKeys),
    /// Runs a program of the user, which prints the score.
    Command(CommandKeys),
    /// Sends the attempt to a scoring service.
    Http(HttpKeys),
    /// Queries a language model that judges the answer.
    Judge(JudgeKeys),
    /// Calls a Python function of the user.
    Python(PythonKeys),
    /// Uses the reward that the agent's own program reports.
    Program(ProgramScorer),
    /// Uses the score that the task's environment reports.
    Environment(EnvironmentKeys),
}

/// Options of [`ScorerKind::Environment`], which has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentKeys {}

impl Default for ScorerKind {
    fn default() -> Self {
        ScorerKind::Numeric(NumericScorer::default())
    }
}

/// The score of one answer, with the text that was extracted as the answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Score of the answer: 1 if it is correct, 0 if it is wrong, and a value in between for
    /// partial credit.
    pub value: f64,
    /// Text that the scorer extracted as the answer. `None` if the scorer found no answer.
    pub extracted: Option<String>,
}

/// Reason why an attempt or a task cannot be scored.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScoreError {
    /// The service that computes the score is unreachable now, or does not respond.
    #[error("{0}")]
    Unavailable(String),
    /// The scorer cannot use its input or settings, or the result is not a valid score.
    #[error("{0}")]
    Unusable(String),
    /// The expected answer is not a number.
    #[error(
        "the expected answer {expected} is not one number of at most 1,200 digits: give a JSON \
         number, a string that contains exactly one number, in plain text or in LaTeX, or a list \
         of these"
    )]
    Expected {
        /// The expected answer, as JSON.
        expected: String,
    },
    /// The expected answer is neither a string nor a list of strings.
    #[error("the expected answer {expected} is neither a string nor a list of strings")]
    ExpectedText {
        /// The expected answer, as JSON.
        expected: String,
    },
    /// A scoring program or function of the user failed.
    #[error("the scorer `{command}`: {what}")]
    Command {
        /// Command line of the program, or file of the function.
        command: String,
        /// Description of the failure.
        what: String,
    },
    /// The value of a recipe key is outside 0..=1.
    #[error("{name} = {value}, but it must be in 0..=1")]
    Range {
        /// Name of the recipe key.
        name: &'static str,
        /// Value of the recipe key.
        value: f64,
    },
    /// A numeric tolerance is negative or not finite.
    #[error("{name} tolerance = {value}, but it must be finite and at least 0")]
    Tolerance {
        /// Kind of the tolerance, such as "relative".
        name: &'static str,
        /// Value of the tolerance.
        value: f64,
    },
}

impl ScoreError {
    /// Returns whether the error may be temporary, so that a later call of the scorer can succeed.
    pub fn is_temporary(&self) -> bool {
        matches!(self, ScoreError::Unavailable(_) | ScoreError::Command { .. })
    }
}

impl ScorerKind {
    /// Returns the name of the scorer's kind in a recipe, such as `json_schema`.
    pub fn name(&self) -> &'static str {
        match self {
            ScorerKind::Numeric(_) => "numeric",
            ScorerKind::Maths(_) => "maths",
            ScorerKind::Answer(_) => "answer",
            ScorerKind::Choice(_) => "choice",
            ScorerKind::Format(_) => "form",
            ScorerKind::JsonSchema(_) => "json_schema",
            ScorerKind::Sql(_) => "sql",
            ScorerKind::State(_) => "state",
            ScorerKind::Code(_) => "code",
            ScorerKind::Command(_) => "command",
            ScorerKind::Http(_) => "http",
            ScorerKind::Judge(_) => "judge",
            ScorerKind::Python(_) => "python",
            ScorerKind::Program(_) => "program",
            ScorerKind::Environment(_) => "environment",
        }
    }

    /// Checks the scorer's own settings, so that a recipe fails before anything is sampled.
    ///
    /// # Errors
    /// Returns an error that names the invalid setting, if there is one.
    pub fn check(&self) -> Result<(), ScoreError> {
        match self {
            ScorerKind::Numeric(scorer) => scorer.check(),
            ScorerKind::Maths(scorer) => scorer.check(),
            ScorerKind::Answer(scorer) => scorer.check(),
            ScorerKind::Choice(scorer) => scorer.check(),
            ScorerKind::Format(scorer) => scorer.check(),
            ScorerKind::JsonSchema(scorer) => scorer.check(),
            ScorerKind::Sql(scorer) => scorer.check(),
            ScorerKind::Code(keys) => keys.check(),
            ScorerKind::Command(keys) => keys.check(),
            ScorerKind::Http(keys) => keys.check(),
            ScorerKind::Judge(keys) => keys.check(),
            ScorerKind::Python(keys) => keys.check(),
            ScorerKind::State(_) | ScorerKind::Program(_) | ScorerKind::Environment(_) => Ok(()),
        }
    }

    /// Creates the scorer of this kind.
    ///
    /// The kinds `http`, `judge`, `code` and `environment` need a client, a sandbox or an
    /// environment. For them, this function returns a scorer that always fails; use
    /// [`HttpScorer::new`], [`JudgeScorer::new`] or [`CodeScorer::new`] instead. Scorers that start
    /// processes should be created with a [`Supervisor`] ([`CommandScorer::new`],
    /// [`PythonScorer::new`]), so that the processes end with this process.
    pub fn scorer(&self) -> Arc<dyn Scorer> {
        match self {
            ScorerKind::Numeric(scorer) => Arc::new(*scorer),
            ScorerKind::Maths(scorer) => Arc::new(*scorer),
            ScorerKind::Answer(scorer) => Arc::new(*scorer),
            ScorerKind::Choice(scorer) => Arc::new(*scorer),
            ScorerKind::Format(scorer) => Arc::new(scorer.clone()),
            ScorerKind::JsonSchema(scorer) => Arc::new(scorer.clone()),
            ScorerKind::Sql(scorer) => Arc::new(scorer.clone()),
            ScorerKind::State(scorer) => Arc::new(scorer.clone()),
            ScorerKind::Command(keys) => {
                Arc::new(CommandScorer::new(keys.clone(), Supervisor::default()))
            }
            ScorerKind::Code(_)
            | ScorerKind::Http(_)
            | ScorerKind::Judge(_)
            | ScorerKind::Environment(_) => Arc::new(UnconnectedScorer(self.name())),
            ScorerKind::Python(keys) => PythonScorer::new(keys.clone(), Supervisor::default()),
            ScorerKind::Program(scorer) => Arc::new(*scorer),
        }
    }
}
