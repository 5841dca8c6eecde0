//! Tasks: what an agent is asked, what is expected, and how somebody did it.
//!
//! Tasks come from files ([`FileOptions::load`]) or from a seeded generator ([`Arithmetic`]). Both give a
//! training part and a held-out part that share no task, whatever the seed of a run. A [`Demonstration`] is a
//! worked solution with tool calls, to learn from before there is any reward; every result in it is what the
//! tool itself answers.
//!
//! Not here: prompts around the question (the recipe's), and scoring (`levade-reward`).

mod annotations;
mod arithmetic;
mod draws;
mod error;
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
