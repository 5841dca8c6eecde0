//! Tests of user-defined tools, in processes under a supervisor.

#![allow(clippy::unwrap_used)] // clippy sees only the code inside #[test], not the helper functions

mod command;
mod hazards;
mod python;
mod toolbox;
mod users;
mod verl;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use levade_process::Supervisor;
use levade_tasks::Task;
use levade_text::{ParsedCompletion, ToolCall};
use levade_tools::{
    Observation, OpenTools, PythonKeys, PythonTools, ToolContext, ToolSet, Toolbox,
};
use serde_json::{Map, Value};

/// Returns the supervisor process, which is an example of this crate.
fn supervisor() -> Supervisor {
    let test = std::env::current_exe().unwrap();
    let supervisor = test.ancestors().nth(2).unwrap().join("examples/supervise_tools");
    assert!(
        supervisor.exists(),
        "first build it: cargo build -p levade-tools --example supervise_tools"
    );
    Supervisor(vec![supervisor.display().to_string()])
}

fn write(dir: &Path, name: &str, text: &str) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn keys(file: PathBuf) -> PythonKeys {
    PythonKeys { file: Some(file), workers: 1, start_seconds: 60.0, ..PythonKeys::default() }
}

fn set_of(keys: PythonKeys, deadline: Duration) -> ToolSet {
    let toolbox: Arc<dyn Toolbox> = Arc::new(PythonTools::new("own", &keys, supervisor()).unwrap());
    ToolSet::new(vec![toolbox], deadline).unwrap()
}

/// Returns the tools of a Python file with the content `text`.
fn python(dir: &Path, text: &str, deadline: Duration) -> ToolSet {
    set_of(keys(write(dir, "own.py", text)), deadline)
}

fn attempt(name: &str, row: Value) -> ToolContext {
    let Value::Object(row) = row else { panic!("{row}") };
    ToolContext {
        attempt: name.into(),
        task: Task { id: name.into(), row: row.into(), ..Task::default() },
        seed: 0,
        stream: 0,
        deadline: Duration::from_secs(300),
        params: Default::default(),
    }
}

fn call(name: &str, arguments: Value) -> ToolCall {
    let Value::Object(arguments) = arguments else { panic!("{arguments}") };
    ToolCall { id: String::new(), name: name.into(), arguments: arguments.into() }
}

async fn open(set: &ToolSet, name: &str) -> OpenTools {
    set.open(&attempt(name, Value::Object(Map::new()))).await.unwrap()
}

async fn call_tools(open: &mut OpenTools, calls: Vec<ToolCall>) -> Vec<Observation> {
    let completion = ParsedCompletion {
        content: String::new(),
        calls: calls.into_iter().map(Ok).collect(),
        bare: false,
    };
    open.execute_calls(&completion, true).await
}

async fn call_tool(open: &mut OpenTools, name: &str, arguments: Value) -> Observation {
    call_tools(open, vec![call(name, arguments)]).await.remove(0)
}

async fn text(open: &mut OpenTools, name: &str, arguments: Value) -> String {
    call_tool(open, name, arguments).await.text
}

/// Timeout that must not fire in a test.
const LONG: Duration = Duration::from_secs(120);
