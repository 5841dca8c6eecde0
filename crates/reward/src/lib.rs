//! Scorers: from an answer to a number.
//!
//! A [`Scorer`] looks at the final assistant text of an attempt and at the answer that was expected, and gives a
//! [`Score`]. Nothing that a model writes is an error; an expected answer that makes no sense is one. The scorers built in are pure
//! functions: the same text always scores the same. A [`CommandScorer`] asks a program of the user's.
//!
//! ```
//! use dressage_reward::NumericScorer;
//!
//! let scorer = NumericScorer::default();
//! let score = scorer.score("She sold 48 + 24 = 72 clips.", &"72".into())?;
//! assert_eq!((score.value, score.extracted.as_deref()), (1.0, Some("72")));
//! # Ok::<(), dressage_reward::RewardError>(())
//! ```
//!
//! Also here is [`Rational`], the exact arithmetic that comparing answers and computing them share.

mod answer;
mod boxed;
mod command;
mod numbers;
mod numeric;
mod rational;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use answer::{AnswerScorer, Comparison, FormScore, Place, f1, normalise};
pub use command::CommandScorer;
pub use numeric::{Extract, NumericScorer, Tolerance};
pub use rational::Rational;

/// How answers are scored, as a recipe says it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scorer {
    /// The final number, right or wrong.
    Numeric(NumericScorer),
    /// A short answer in words.
    Answer(AnswerScorer),
    /// What a program says.
    Command(CommandScorer),
}

impl Default for Scorer {
    fn default() -> Self {
        Scorer::Numeric(NumericScorer::default())
    }
}

/// What an answer is worth.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// 1 for right, 0 for wrong; between them for a scorer that gives parts.
    pub value: f64,
    /// What was taken to be the answer; `None` if the text has none.
    pub extracted: Option<String>,
}

/// What can be wrong with a scorer or an expected answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RewardError {
    /// The expected answer is not a number.
    #[error(
        "the expected answer {expected} is not one number of at most 38 digits: give a JSON number, a text \
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
        /// What is wrong with it.
        what: String,
    },
    /// A score is out of range.
    #[error("{name} = {value}, but it must be in 0..=1")]
    Range {
        /// Which one.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// A tolerance is out of range.
    #[error("{name} tolerance = {value}, but it must be finite and at least 0")]
    Tolerance {
        /// Which one.
        name: &'static str,
        /// Its value.
        value: f64,
    },
}

impl Scorer {
    /// Checks the scorer's own settings, so that a recipe fails before anything is sampled.
    ///
    /// # Errors
    /// Names the setting that is out of range.
    pub fn check(&self) -> Result<(), RewardError> {
        match self {
            Scorer::Numeric(scorer) => scorer.check(),
            Scorer::Answer(scorer) => scorer.check(),
            Scorer::Command(scorer) => scorer.check(),
        }
    }

    /// Checks an expected answer.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn check_expected(&self, expected: &Value) -> Result<(), RewardError> {
        match self {
            Scorer::Numeric(scorer) => scorer.score("", expected).map(drop),
            Scorer::Answer(scorer) => scorer.score("", expected).map(drop),
            Scorer::Command(_) => Ok(()),
        }
    }

    /// Scores the text of the final assistant message.
    ///
    /// # Errors
    /// When the expected answer or the scorer's own settings make no sense, or a program breaks; never for what the model wrote.
    pub async fn score(&self, text: &str, expected: &Value) -> Result<Score, RewardError> {
        match self {
            Scorer::Numeric(scorer) => scorer.score(text, expected),
            Scorer::Answer(scorer) => scorer.score(text, expected),
            Scorer::Command(scorer) => scorer.score(text, expected).await,
        }
    }
}
