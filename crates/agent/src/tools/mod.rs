//! Tools: what an agent can do besides write.
//!
//! A [`Tool`] is opened once per attempt; the [`ToolSession`] that gives is executed many times and always closed, also
//! when the attempt is cancelled. A [`ToolSet`] is the tools of a recipe; [`ToolSet::open`] opens them all as one
//! [`OpenTools`].
//!
//! Nothing that a model writes is an error of the program: a call that cannot be read, names no tool, has wrong arguments,
//! fails or takes too long becomes an [`Observation`] that the model sees, and a counter in [`CallCounts`](dressage_tree::CallCounts).
//!
//! Not here: reading calls from text (`dressage-text`), and the loop that alternates sampling and calling.

mod calculator;
mod delayed;
mod expression;
mod set;

use async_trait::async_trait;
use dressage_text::ToolSpec;
use serde_json::{Map, Value};

pub use calculator::Calculator;
pub use delayed::Delayed;
pub use expression::{ExpressionError, MAX_DEPTH, MAX_LENGTH, Number, evaluate};
pub use set::{Observation, ObservationKind, OpenTools, ToolSet};

/// Something an agent can use.
#[async_trait]
pub trait Tool: Send + Sync {
    /// Its name, what it does, and a JSON schema of its arguments.
    fn spec(&self) -> ToolSpec;

    /// Starts a session for the attempt with this id.
    ///
    /// # Errors
    /// When what the tool stands for cannot be reached or started. The attempt then does not begin.
    async fn open(&self, attempt: &str) -> Result<Box<dyn ToolSession>, ToolError>;
}

/// A tool in use by one attempt.
#[async_trait]
pub trait ToolSession: Send {
    /// Answers one call. A call past its deadline is dropped at an await point; the session must then answer the next one
    /// or say why it cannot.
    ///
    /// # Errors
    /// What the model should read instead of an answer.
    async fn execute(&mut self, arguments: &Map<String, Value>) -> Result<String, CallError>;

    /// Ends the session and frees what it holds. Called exactly once, after the last call.
    ///
    /// # Errors
    /// When something could not be freed.
    async fn close(&mut self) -> Result<(), ToolError> {
        Ok(())
    }
}

/// Why a call has no answer. The text is for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallError {
    /// The arguments do not fit the tool's schema.
    BadArguments(String),
    /// The arguments fit, but there is no answer.
    Failed(String),
}

/// What can be wrong with tools themselves.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// Two tools of one set have the same name.
    #[error("two tools are named {name:?}: calls could not tell them apart, so give one another name")]
    SameName {
        /// The name.
        name: String,
    },
    /// A session could not be started.
    #[error("tool {tool:?} could not be opened: {why}")]
    Open {
        /// The tool.
        tool: String,
        /// What went wrong.
        why: String,
    },
    /// A session could not be ended.
    #[error("tool {tool:?} could not be closed: {why}")]
    Close {
        /// The tool.
        tool: String,
        /// What went wrong.
        why: String,
    },
}
