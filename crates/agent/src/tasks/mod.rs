//! Tasks: what an agent is asked, what is expected, and how somebody did it.
//!
//! Tasks come from a JSONL file ([`JsonlOptions::load`]) or from a seeded generator ([`Arithmetic`]). Both give a training
//! part and a held-out part that share no task. A [`Demonstration`] is a worked solution with tool calls, to learn from
//! before there is any reward; every result in it is what the tool itself answers.
//!
//! Not here: prompts around the question (the recipe's), and scoring (`dressage-reward`).

mod annotations;
mod arithmetic;
mod draws;
mod jsonl;
mod term;
mod wording;

use std::path::PathBuf;

use dressage_text::{Message, ToolCall};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use annotations::{Skipped, annotated};
pub use arithmetic::{Arithmetic, ArithmeticOptions, Split};
pub use jsonl::{AnswerFrom, DemonstrationCounts, JsonlOptions, JsonlTasks};

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// Names it for ever: the same task has the same id in every run.
    pub id: String,
    /// What is asked.
    pub question: String,
    /// What is expected, for the scorer.
    pub answer: Value,
    /// Where it comes from: the name of a file or a generator.
    pub source: String,
    /// The wording it is an instance of, where it is generated.
    pub template: Option<String>,
    /// What kind of task it is, where that is known. Demonstrations are drawn from all kinds alike.
    pub kind: Option<String>,
    /// How it can be done, where that is known.
    pub demonstration: Option<Demonstration>,
}

/// A worked solution: calls with their results, then the answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Demonstration {
    /// What is called, in order.
    pub calls: Vec<DemonstratedCall>,
    /// The text of the last assistant turn.
    pub answer: String,
}

/// One assistant turn that calls a tool, and the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DemonstratedCall {
    /// What the assistant writes before the call; may be empty.
    pub content: String,
    /// The call.
    pub call: ToolCall,
    /// What the tool answers.
    pub result: String,
}

impl Demonstration {
    /// The turns after the question: for each call an assistant turn and a tool turn, then the answer.
    pub fn messages(&self) -> Vec<Message> {
        let mut messages = Vec::with_capacity(2 * self.calls.len() + 1);
        for step in &self.calls {
            messages.push(Message::calls(step.content.clone(), vec![step.call.clone()]));
            messages.push(Message::tool(step.result.clone()));
        }
        messages.push(Message::assistant(self.answer.clone()));
        messages
    }
}

/// What can be wrong with a source of tasks.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// The file cannot be read.
    #[error("cannot read the tasks of {}: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        why: std::io::Error,
    },
    /// The file has no rows.
    #[error("{} has no rows: it must hold one JSON object on each line", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A row is not JSON.
    #[error("{}, line {line}, column {column}: the row is not valid JSON: {why}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// What the parser says.
        why: String,
    },
    /// A row is JSON, but not an object.
    #[error("{}, line {line}: the row is not a JSON object", path.display())]
    NotObject {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// A row lacks a field.
    #[error(
        "{}, line {line}: the row has no field {field:?}; it has {has}. Name the right field in the recipe, or complete \
         the row",
        path.display()
    )]
    NoField {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The field.
        field: String,
        /// The fields there are.
        has: String,
    },
    /// A field holds something else than it must.
    #[error("{}, line {line}: field {field:?} is {found}, but it must be {expected}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The field.
        field: String,
        /// What it holds, shortened.
        found: String,
        /// What it must hold.
        expected: &'static str,
    },
    /// More rows are to be held out than there are to spare.
    #[error(
        "{} has {rows} different questions, so {held_out} of them cannot be held out and leave one to train on: hold out \
         fewer",
        path.display()
    )]
    HeldOut {
        /// The file.
        path: PathBuf,
        /// Different questions in it.
        rows: usize,
        /// How many are to be held out.
        held_out: usize,
    },
    /// An option of a generator is out of range.
    #[error("{name} = {value}, but it must be {range}")]
    Option {
        /// The option.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it may be.
        range: &'static str,
    },
}
