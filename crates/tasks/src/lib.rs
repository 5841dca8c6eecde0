//! Tasks for agents: the question, the expected answer, and a demonstration if there is one.
//!
//! A [`Task`] has an id, a question or a conversation that ends with the question, and the expected
//! answer for the scorer. Tasks come from files ([`FileOptions::load`]: JSON, CSV, Parquet) or from
//! a seeded generator ([`Arithmetic`]). A [`Demonstration`] is a worked solution with tool calls.
//! It is used for supervised training before reinforcement learning, when there is no reward yet.
//!
//! # Guarantees
//! - **Determinism.** The tasks of a file depend only on its contents and on the split seed. Task
//!   `index` of a generator depends only on options, seed, split and index.
//! - **Unbiased evaluations.** The training part and the held-out part of a source share no task,
//!   whatever the seed of a run. [`HeldOutQuestions`] finds tasks of other sources that leak
//!   held-out questions.
//! - **Correct tool results.** Every tool result in a demonstration is computed by [`evaluate`],
//!   like the calculator's results for agents.
//!
//! # Example
//! ```
//! use levade_tasks::{Arithmetic, ArithmeticOptions, FileOptions, HeldOutCount, Split};
//!
//! let sums =
//!     Arithmetic::new(ArithmeticOptions { words: 0.0, ..ArithmeticOptions::default() }, 7)?;
//! let task = sums.task(Split::Train, 0);
//! assert_eq!(task, sums.task(Split::Train, 0));
//! assert!(task.demonstration.is_some());
//!
//! let file = std::env::temp_dir().join(format!("levade-tasks-{}.jsonl", std::process::id()));
//! let rows =
//!     (0..10).map(|n| format!("{{\"question\": \"{n} + 1?\", \"answer\": \"{}\"}}\n", n + 1));
//! std::fs::write(&file, rows.collect::<String>())?;
//! let mut options = FileOptions::new(file.clone());
//! options.held_out = HeldOutCount::Count(2);
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
mod error;
mod expression;
mod file;
mod leaks;
mod near;
mod person;
mod question;
mod row;
mod spelling;
mod task_rng;
mod term;
mod wording;

use levade_text::{Message, ToolCall};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use annotations::{SkipReason, parse_annotations};
pub use arithmetic::{Arithmetic, ArithmeticOptions, Split};
pub use error::{RowLocation, TaskError};
pub use expression::{CALCULATOR, ExpressionError, Number, calculation, evaluate};
pub use file::{
    AnswerPart, DemonstrationCounts, FileOptions, FileRow, FileTasks, HeldOutCount, Paths,
    without_endings,
};
pub use leaks::{HeldOutQuestions, MatchingRule, filter_seen};
pub use person::{PERSON, persons};
pub use question::QuestionKey;
pub use row::TaskRow;

/// A task for an agent: a question and its expected answer.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Task {
    /// Identifier of the task, which is the same in every run.
    pub id: String,
    /// Question of the task. In a conversation, it is the text of the last turn.
    pub question: String,
    /// Conversation that ends with the question. Empty if the task is only a question.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<Message>,
    /// Expected answer, for scorers. It is a list if several answers are right.
    pub answer: Value,
    /// Expected answer as a number, if the row has a number and `answer` has its digits as a
    /// string. Programs and functions get the number, scorers of text get the digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_number: Option<serde_json::Number>,
    /// Source of the task: the name of a data file or of a generator.
    pub source: String,
    /// Name of the wording of a generated task. `None` if the task was not generated.
    pub template: Option<String>,
    /// Name of the agent for this task. `None` if any agent can do the task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Kind of task. Demonstrations are sampled evenly over all kinds. `None` if the kind is
    /// unknown.
    pub kind: Option<String>,
    /// Worked solution. `None` if no solution is known.
    pub demonstration: Option<Demonstration>,
    /// All fields of the row that the task was read from, for tools, scorers and programs. Empty if
    /// the task was generated.
    #[serde(default, skip_serializing_if = "TaskRow::is_empty")]
    pub row: TaskRow,
    /// Success rate of the policy at the task, from 0 to 1, measured before the attempt was
    /// started. `None` unless the scorers of the attempt depend on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_success: Option<f64>,
    /// Text about earlier attempts at the task, which the agent reads after the question. `None` if
    /// there is no such text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experience: Option<String>,
}

impl Task {
    /// Returns the names of the tools that the task's row selects among the agent's tools, in
    /// verl's field `extra_info.tool_selection`. `None` if the row selects no tools; then all tools
    /// are available.
    pub fn tool_selection(&self) -> Option<Vec<&str>> {
        let names = self.row.get("extra_info")?.get("tool_selection")?.as_array()?;
        Some(names.iter().filter_map(Value::as_str).collect())
    }

    /// Returns the task without its tool selection, so that all tools of the agent are available.
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

/// A worked solution of a task: tool calls with their results, followed by the answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Demonstration {
    /// Tool calls of the solution, in order.
    pub calls: Vec<DemonstratedCall>,
    /// Text of the last assistant turn, which contains the answer.
    pub answer: String,
}

/// An assistant turn of a demonstration that calls a tool, together with the tool result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DemonstratedCall {
    /// Text of the assistant turn before the tool call. It can be empty.
    pub content: String,
    /// The tool call of the turn.
    pub call: ToolCall,
    /// Text of the tool result.
    pub result: String,
}

impl Demonstration {
    /// Returns the demonstration as chat messages after the question: an assistant turn and a tool
    /// turn for each call, followed by the answer.
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
