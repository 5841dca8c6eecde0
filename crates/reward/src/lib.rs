//! Scorers: compute the score of an attempt from its record.
//!
//! A [`Scorer`] reads the [`Evidence`] of an attempt (its task, how it ended, its final text, every token,
//! results that its tools returned) and returns [`Component`]s. It scores attempts one by one, or those of a
//! group together. All of the evidence is in the record, so scoring can be repeated at any time.
//!
//! A [`CommandScorer`] runs a program of the user, a [`PythonScorer`] a function, in processes that get named
//! environment variables only and end with the scorer. An [`HttpScorer`] calls a service, a [`JudgeScorer`] a
//! language model, and a [`CodeScorer`] runs tests in a sandbox; the binary passes the client or the sandbox
//! to them, so this crate knows none. A [`SqlScorer`] runs queries; a [`SchemaScorer`] checks JSON.
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
//! - **Model output is never an error.** An expected answer without meaning is one.
//! - **A scorer that cannot score is an error** and never a score of 0; the recipe decides what happens to
//!   the attempt.
//! - **Scorers that compare the final answer** with the expected one are pure functions: the same text has
//!   the same score.
//!
//! [`Rational`] is exact arithmetic, for comparing answers and computing them.
//!
//! Out of scope: which tasks a scorer is for, the weights of components, and attempts without a score
//! (`levade-trainer`).

mod answer;
mod around;
mod asked;
mod blocks;
mod bounds;
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
mod form;
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
mod short;
mod sql;
#[cfg(test)]
mod testing;
mod units;
mod words;

use std::sync::Arc;

use asked::Unwired;
use levade_process::Supervisor;
use serde::{Deserialize, Serialize};

pub use answer::{AnswerScorer, Comparison, FormScore, Place, f1};
pub use asked::{Chat, ChatText, Service};
pub use choice::{ChoiceScorer, OPTION_LABELS, OPTION_TEXTS, lettered};
pub use code::{CodeKeys, CodeScorer, Passing, Program, ProgramEnd, Ran, Runner, Walls};
pub use command::{CommandKeys, CommandScorer};
pub use form::FormScorer;
pub use http::{HttpKeys, HttpScorer};
pub use judge::{Group, JudgeEndpoint, JudgeKeys, JudgeScorer, Verdict};
pub use levade_tree::Component;
pub use maths::{MathsPlace, MathsScorer, Percent, Units};
pub use numeric::{Extract, NumericScorer, Tolerance};
pub use program::{ProgramScorer, Said};
pub use python::{Completions, PythonKeys, PythonScorer, Solution};
pub use rational::Rational;
pub use schema::SchemaScorer;
pub use scorer::{Evidence, Scorer, task_field};
pub use short::normalise;
pub use sql::{Columns, SqlScorer};

/// A scorer as a recipe says it: its kind with its options.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScorerKind {
    /// The final number, right or wrong.
    Numeric(NumericScorer),
    /// A mathematical answer, by what it means.
    Maths(MathsScorer),
    /// A short answer in words.
    Answer(AnswerScorer),
    /// An option of several.
    Choice(ChoiceScorer),
    /// The form of a reply.
    Form(FormScorer),
    /// JSON that keeps to a schema.
    JsonSchema(SchemaScorer),
    /// A query, by the rows that it gives.
    Sql(SqlScorer),
    /// A program, by tests that it passes in a sandbox.
    Code(CodeKeys),
    /// Asks a program.
    Command(CommandKeys),
    /// Asks a service.
    Http(HttpKeys),
    /// Asks a language model.
    Judge(JudgeKeys),
    /// Calls a function in Python.
    Python(PythonKeys),
    /// Takes what the agent's own program says.
    Program(ProgramScorer),
    /// Takes what the environment says that the task comes from.
    Environment(EnvironmentKeys),
}

/// Options of what an environment says: none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentKeys {}

impl Default for ScorerKind {
    fn default() -> Self {
        ScorerKind::Numeric(NumericScorer::default())
    }
}

/// Worth of an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// 1 for right, 0 for wrong; between them for a scorer that gives parts.
    pub value: f64,
    /// Text that was taken to be the answer; `None` if the text has none.
    pub extracted: Option<String>,
}

/// Why something cannot be scored.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScoreError {
    /// Whoever scores cannot be asked now, or does not answer.
    #[error("{0}")]
    Unavailable(String),
    /// The evidence makes no sense to a scorer, or its score makes none.
    #[error("{0}")]
    Unusable(String),
    /// The expected answer is not a number.
    #[error(
        "the expected answer {expected} is not one number of at most 1,200 digits: give a JSON number, a text \
         that holds exactly one, in plain text or in LaTeX, or a list of these"
    )]
    Expected {
        /// The expected answer, as JSON.
        expected: String,
    },
    /// The expected answer is neither a text nor a list of texts.
    #[error("the expected answer {expected} is neither a text nor a list of them")]
    ExpectedText {
        /// The expected answer, as JSON.
        expected: String,
    },
    /// A program that scores does not.
    #[error("the scorer `{command}` {what}")]
    Command {
        /// The program and its arguments.
        command: String,
        /// Fault in it.
        what: String,
    },
    /// A score is out of range.
    #[error("{name} = {value}, but it must be in 0..=1")]
    Range {
        /// Which one.
        name: &'static str,
        /// Value of the key.
        value: f64,
    },
    /// A tolerance is out of range.
    #[error("{name} tolerance = {value}, but it must be finite and at least 0")]
    Tolerance {
        /// Which one.
        name: &'static str,
        /// Value of the key.
        value: f64,
    },
}

impl ScoreError {
    /// Whether it may be gone when the scorer is asked again.
    pub fn may_pass(&self) -> bool {
        matches!(self, ScoreError::Unavailable(_) | ScoreError::Command { .. })
    }
}

impl ScorerKind {
    /// Name in a recipe.
    pub fn name(&self) -> &'static str {
        match self {
            ScorerKind::Numeric(_) => "numeric",
            ScorerKind::Maths(_) => "maths",
            ScorerKind::Answer(_) => "answer",
            ScorerKind::Choice(_) => "choice",
            ScorerKind::Form(_) => "form",
            ScorerKind::JsonSchema(_) => "json_schema",
            ScorerKind::Sql(_) => "sql",
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
    /// Names the setting that is out of range.
    pub fn check(&self) -> Result<(), ScoreError> {
        match self {
            ScorerKind::Numeric(scorer) => scorer.check(),
            ScorerKind::Maths(scorer) => scorer.check(),
            ScorerKind::Answer(scorer) => scorer.check(),
            ScorerKind::Choice(scorer) => scorer.check(),
            ScorerKind::Form(scorer) => scorer.check(),
            ScorerKind::JsonSchema(scorer) => scorer.check(),
            ScorerKind::Sql(scorer) => scorer.check(),
            ScorerKind::Code(keys) => keys.check(),
            ScorerKind::Command(keys) => keys.check(),
            ScorerKind::Http(keys) => keys.check(),
            ScorerKind::Judge(keys) => keys.check(),
            ScorerKind::Python(keys) => keys.check(),
            ScorerKind::Program(_) | ScorerKind::Environment(_) => Ok(()),
        }
    }

    /// The scorer itself. One that asks over a network has to be given a client instead ([`HttpScorer::new`],
    /// [`JudgeScorer::new`]), one that runs programs a sandbox ([`CodeScorer::new`]): this one scores
    /// nothing. One that starts processes should be given a [`Supervisor`] ([`CommandScorer::new`],
    /// [`PythonScorer::new`]), so that they end with this process.
    pub fn scorer(&self) -> Arc<dyn Scorer> {
        match self {
            ScorerKind::Numeric(scorer) => Arc::new(*scorer),
            ScorerKind::Maths(scorer) => Arc::new(*scorer),
            ScorerKind::Answer(scorer) => Arc::new(*scorer),
            ScorerKind::Choice(scorer) => Arc::new(*scorer),
            ScorerKind::Form(scorer) => Arc::new(scorer.clone()),
            ScorerKind::JsonSchema(scorer) => Arc::new(scorer.clone()),
            ScorerKind::Sql(scorer) => Arc::new(scorer.clone()),
            ScorerKind::Command(keys) => Arc::new(CommandScorer::new(keys.clone(), Supervisor::default())),
            ScorerKind::Code(_) | ScorerKind::Http(_) | ScorerKind::Judge(_) | ScorerKind::Environment(_) => {
                Arc::new(Unwired(self.name()))
            }
            ScorerKind::Python(keys) => PythonScorer::new(keys.clone(), Supervisor::default()),
            ScorerKind::Program(scorer) => Arc::new(*scorer),
        }
    }
}
