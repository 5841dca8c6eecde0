//! Tasks: what an agent is asked, what is expected, and how it can be done.
//!
//! A [`Task`] has an id, a question or a conversation that ends with it, and the expected answer for the
//! scorer. Tasks come from files ([`FileOptions::load`]: JSON, CSV, Parquet) or from a seeded generator
//! ([`Arithmetic`]). A [`Demonstration`] is a worked solution with tool calls, for training before there is
//! any reward.
//!
//! # Guarantees
//! - **Determinism.** The tasks of a file depend on its contents and on the seed of the split; task `index`
//!   of a generator depends on options, seed, split and index.
//! - **Honest evaluations.** The training part and the held-out part of a source share no task, whatever the
//!   seed of a run. [`HeldOutQuestions`] finds tasks of other sources that leak held-out questions.
//! - **True results.** Every tool result in a demonstration is what [`evaluate`] computes, as the calculator
//!   does for agents.
//!
//! # Example
//! ```
//! use levade_tasks::{Arithmetic, ArithmeticOptions, FileOptions, HeldOut, Split};
//!
//! let sums = Arithmetic::new(ArithmeticOptions { words: 0.0, ..ArithmeticOptions::default() }, 7)?;
//! let task = sums.task(Split::Train, 0);
//! assert_eq!(task, sums.task(Split::Train, 0));
//! assert!(task.demonstration.is_some());
//!
//! let file = std::env::temp_dir().join(format!("levade-tasks-{}.jsonl", std::process::id()));
//! let rows = (0..10).map(|n| format!("{{\"question\": \"{n} + 1?\", \"answer\": \"{}\"}}\n", n + 1));
//! std::fs::write(&file, rows.collect::<String>())?;
//! let mut options = FileOptions::new(file.clone());
//! options.held_out = HeldOut::Count(2);
//! let tasks = options.load(7)?;
//! assert_eq!((tasks.rest.len(), tasks.held_out.len()), (8, 2));
//! # std::fs::remove_file(file)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Out of scope: tasks that an environment lists (`levade-agent`), prompts around the question
//! (`levade-recipe`), and scoring (`levade-reward`).

mod annotations;
mod arithmetic;
mod draws;
mod error;
mod expression;
mod file;
mod leaks;
mod near;
mod question;
mod row;
mod spelling;
mod term;
mod wording;

use levade_text::{Message, ToolCall};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use annotations::{Skipped, annotated};
pub use arithmetic::{Arithmetic, ArithmeticOptions, Split};
pub use error::{Place, TaskError};
pub use expression::{CALCULATOR, ExpressionError, Number, calculation, evaluate};
pub use file::{
    AnswerFrom, DemonstrationCounts, FileOptions, FileRow, FileTasks, HeldOut, Paths, without_endings,
};
pub use leaks::{HeldOutQuestions, Matching, seen_among};
pub use question::QuestionKey;
pub use row::TaskRow;

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Task {
    /// Names it for ever: the same task has the same id in every run.
    pub id: String,
    /// The question: the text of the last turn, where a conversation comes before it.
    pub question: String,
    /// The conversation that ends with the question, where it is more than the question.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<Message>,
    /// The expected answer, for the scorer; a list where several answers are right.
    pub answer: Value,
    /// The number that the expected answer is in its row, if `answer` has its digits as a text. Programs and
    /// functions get the number, scorers of text the digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_number: Option<serde_json::Number>,
    /// Where it comes from: the name of a file or a generator.
    pub source: String,
    /// The wording it is an instance of, where it is generated.
    pub template: Option<String>,
    /// The agent that is to do it, where the task says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Kind of task, where that is known. Demonstrations are drawn from all kinds alike.
    pub kind: Option<String>,
    /// How it can be done, where that is known.
    pub demonstration: Option<Demonstration>,
    /// All fields of its row, for tools, scorers and programs; empty where it is generated.
    #[serde(default, skip_serializing_if = "TaskRow::is_empty")]
    pub row: TaskRow,
}

impl Task {
    /// Names of the tools that its row selects out of those of its agent, in verl's field
    /// `extra_info.tool_selection`; `None` where it selects none, and all are there.
    pub fn tool_selection(&self) -> Option<Vec<&str>> {
        let names = self.row.get("extra_info")?.get("tool_selection")?.as_array()?;
        Some(names.iter().filter_map(Value::as_str).collect())
    }

    /// The task with all tools of whichever agent does it.
    pub fn selecting_no_tools(mut self) -> Self {
        if self.tool_selection().is_some() {
            let mut row = (*self.row).clone();
            if let Some(Value::Object(extra)) = row.get_mut("extra_info") {
                extra.remove("tool_selection");
            }
            self.row = row.into();
        }
        self
    }
}

/// A worked solution: calls with their results, then the answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Demonstration {
    /// Calls, in order.
    pub calls: Vec<DemonstratedCall>,
    /// The text of the last assistant turn.
    pub answer: String,
}

/// One assistant turn that calls a tool, and the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DemonstratedCall {
    /// Text that the assistant writes before the call; may be empty.
    pub content: String,
    /// The call.
    pub call: ToolCall,
    /// Answer of the tool.
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
