//! Toolboxes and helper functions for tests.

#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use levade_tasks::Task;
use levade_text::{ParsedCompletion, ToolCall, ToolSpec};
use serde_json::{Map, Value, json};

use super::{CallError, Session, ToolContext, ToolError, ToolOutput, Toolbox};

/// Returns the context of an attempt with the name `attempt`, at a task with the same id.
pub fn context(attempt: &str) -> ToolContext {
    ToolContext {
        attempt: attempt.into(),
        task: Task { id: attempt.into(), ..Task::default() },
        seed: 7,
        stream: 11,
        deadline: Duration::from_secs(60),
        params: Default::default(),
    }
}

/// Returns the description of a tool without arguments.
pub fn spec(name: &str) -> ToolSpec {
    let parameters = json!({ "type": "object" });
    ToolSpec { name: name.into(), description: String::new(), parameters }
}

/// Returns a call of a tool.
pub fn call(name: &str, arguments: Value) -> ToolCall {
    let arguments = arguments.as_object().unwrap().clone();
    ToolCall { id: String::new(), name: name.into(), arguments: arguments.into() }
}

/// Returns a parsed completion that makes these calls.
pub fn parsed_calls(calls: &[ToolCall]) -> ParsedCompletion {
    ParsedCompletion {
        content: String::new(),
        calls: calls.iter().cloned().map(Ok).collect(),
        bare: false,
    }
}

/// Log of events, in order.
pub type Log = Arc<Mutex<Vec<String>>>;

/// A toolbox that logs its events and whose calls behave as their arguments specify.
#[derive(Clone)]
pub struct LoggedToolbox {
    pub name: &'static str,
    /// Name of the method that never completes, or of another special behavior.
    pub hangs: &'static str,
    /// Names of the tools that open sessions have. A test can replace them while a session is open.
    pub tools: Arc<Mutex<Vec<&'static str>>>,
    pub parallel: bool,
    pub acts: bool,
    pub log: Log,
}

impl LoggedToolbox {
    /// Creates a toolbox with a tool of its own name.
    pub fn new(name: &'static str, log: &Log) -> Self {
        let hangs = "";
        let tools = Arc::new(Mutex::new(vec![name]));
        LoggedToolbox { name, hangs, tools, parallel: false, acts: false, log: log.clone() }
    }

    async fn note(&self, verb: &str, line: String) {
        self.log.lock().unwrap().push(line);
        if verb == self.hangs {
            std::future::pending::<()>().await;
        }
    }
}

struct LoggedSession(LoggedToolbox);

impl Drop for LoggedSession {
    fn drop(&mut self) {
        self.0.log.lock().unwrap().push(format!("drop {}", self.0.name));
    }
}

#[async_trait]
impl Toolbox for LoggedToolbox {
    fn name(&self) -> &str {
        self.name
    }

    async fn open(&self, attempt: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        self.note("open", format!("open {} for {}", self.name, attempt.attempt)).await;
        if self.hangs == "refuses" {
            return Err(ToolError::Open { tool: self.name.into(), why: "no".into() });
        }
        Ok(Box::new(LoggedSession(self.clone())))
    }
}

#[async_trait]
impl Session for LoggedSession {
    fn specs(&self) -> Vec<ToolSpec> {
        self.0.tools.lock().unwrap().iter().map(|name| spec(name)).collect()
    }

    fn can_run_parallel(&self, _tool: &str) -> bool {
        self.0.parallel
    }

    fn has_effect(&self, _tool: &str) -> bool {
        self.0.acts
    }

    async fn call(&self, tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let argument = |key: &str| arguments.get(key);
        let number = argument("n").map_or(0, |n| n.as_u64().unwrap());
        self.0.note("call", format!("call {tool} {number}")).await;
        if argument("hang").is_some() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(Duration::from_millis(
            argument("millis").map_or(0, |n| n.as_u64().unwrap()),
        ))
        .await;
        self.0.log.lock().unwrap().push(format!("answer {tool} {number}"));
        let output = match argument("fail").and_then(Value::as_str) {
            Some(why) => ToolOutput::error(CallError::Unavailable, why),
            None => ToolOutput::text(format!("done {number}")),
        };
        ToolOutput {
            reward: argument("reward").and_then(Value::as_f64),
            metrics: argument("reward").map(|_| ("moves".to_owned(), 1.0)).into_iter().collect(),
            ends: argument("ends").and_then(Value::as_str).map(str::to_owned),
            ..output
        }
    }

    async fn scorer_input(&mut self) -> Result<Map<String, Value>, ToolError> {
        self.0.note("evidence", format!("evidence {}", self.0.name)).await;
        match self.0.hangs {
            "floods" => Ok(Map::from_iter([("text".to_owned(), Value::from("x".repeat(1 << 20)))])),
            "digs" => {
                let deep = (0..120).fold(Value::Null, |inner, _| json!([inner]));
                Ok(Map::from_iter([("deep".to_owned(), deep)]))
            }
            "knows" => Ok(Map::from_iter([("files".to_owned(), json!(["a.txt"]))])),
            _ => Ok(Map::new()),
        }
    }

    async fn close(&mut self) -> Result<(), ToolError> {
        tokio::task::yield_now().await;
        self.0.note("close", format!("close {}", self.0.name)).await;
        Ok(())
    }
}
