//! Tests of runs whose servers and sandboxes are killed: the affected attempts are repeated or
//! scored again, and the run completes all of its steps.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{Workspace, stderr, stdout};

/// Timeout for an event that a test waits for.
const EVENT_TIMEOUT: Duration = Duration::from_secs(90);

fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let started_at = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(started_at.elapsed() < EVENT_TIMEOUT, "waited {EVENT_TIMEOUT:?} for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn kill(pid: &str) {
    assert!(Command::new("kill").args(["-9", pid]).status().unwrap().success(), "no process {pid}");
}

/// Starts a run.
fn start(workspace: &Workspace) -> Child {
    Command::new(env!("CARGO_BIN_EXE_levade"))
        .current_dir(workspace.path(""))
        .args(["train", "recipe.toml"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn end(run: Child) -> Output {
    let output = run.wait_with_output().unwrap();
    assert!(output.status.success(), "{}\n{}", stdout(&output), stderr(&output));
    output
}

/// Returns the values of a metric in all steps.
fn metric(workspace: &Workspace, name: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(workspace.path("run/metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line.get(name).and_then(Value::as_f64)).collect()
}

/// Creates a directory with a model that calls its tool, and a recipe with the RL phase only.
/// `tool` and `reward` are added to the recipe.
fn new_workspace(tool: &str, reward: &str) -> Workspace {
    let workspace = Workspace::with_trained_model();
    let recipe = std::fs::read_to_string(workspace.path("recipe.toml")).unwrap();
    let (before, rest) = recipe.split_once("[[phase]]").unwrap();
    let (_, rl) = rest.split_once("[[phase]]").unwrap();
    let recipe = format!("{before}{tool}\n[[phase]]{rl}")
        .replace("[reward]", &format!("[reward]\n{reward}"))
        .replace("max_turns = 2", "max_turns = 2\nretries = 3");
    workspace.write("recipe.toml", recipe);
    workspace
}

/// An MCP server with a calculator. In the first call of all its processes, it writes its process
/// id to the file `calling` and waits to be killed.
const SERVER: &str = r#"
import json, os, sys, time
for line in sys.stdin:
    ask = json.loads(line)
    if "id" not in ask:
        continue
    method, result = ask["method"], {}
    if method == "initialize":
        result = {"protocolVersion": ask["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "sums", "version": "1"}}
    elif method == "tools/list":
        # As the model has learnt it.
        schema = {"type": "object", "properties": {"expression": {
            "type": "string", "description": "The expression, such as (12 + 7) * 3."}},
            "required": ["expression"], "additionalProperties": False}
        result = {"tools": [{"name": "calculator", "inputSchema": schema, "description":
            "Evaluates an arithmetic expression with + - * / ^ and parentheses."}]}
    elif method == "tools/call":
        try:
            file = os.open("calling", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            pass
        else:
            os.write(file, f"{os.getpid()}\n".encode())
            time.sleep(600)
        expression = ask["params"]["arguments"]["expression"]
        try:
            text = str(eval(expression, {"__builtins__": {}}))
        except Exception as error:
            text = repr(error)
        result = {"content": [{"type": "text", "text": text}]}
    elif method != "ping":
        print(json.dumps({"jsonrpc": "2.0", "id": ask["id"], "error": {"code": -32601, "message": method}}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": ask["id"], "result": result}), flush=True)
"#;

#[test]
fn killed_tool_server_costs_one_try() {
    let tool = r#"
[[tool]]
kind = "mcp"
name = "sums"
command = ["python3", "server.py"]
outage = "retry"
"#;
    let workspace = new_workspace(tool, "");
    workspace.write("server.py", SERVER);
    workspace.replace("recipe.toml", "tools = [\"calculator\"]", "tools = [\"sums\"]");
    workspace.replace("recipe.toml", "tasks = 4", "tasks = 0");
    workspace.replace("recipe.toml", "unseen_wordings = 3", "");
    let run = start(&workspace);
    let pid = wait_for("a call", || {
        let text = std::fs::read_to_string(workspace.path("calling")).ok()?;
        text.strip_suffix('\n').map(str::to_owned)
    });
    kill(&pid);
    let output = end(run);
    let report = stdout(&output);
    assert!(report.contains("3 steps"), "{report}");
    assert_eq!(metric(&workspace, "training/retried"), [1.0, 0.0, 0.0]);
    // The failure is reported once, and there are no other failures.
    let troubles: Vec<&str> = report.lines().filter(|line| line.starts_with("warning ")).collect();
    assert!(troubles.iter().all(|line| line.contains("1 time,")), "{report}");
    assert!(troubles.iter().any(|line| line.contains("tool calculator")), "{report}");
    assert_eq!(metric(&workspace, "response/aborted_ratio"), [0.0; 3]);
}

/// A judge server that drops its third connection, is unreachable for a second, and starts again.
struct Judge {
    responses: Arc<AtomicUsize>,
    url: String,
}

impl Judge {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let responses = Arc::new(AtomicUsize::new(0));
        let count = responses.clone();
        std::thread::spawn(move || {
            let mut listener = Some(listener);
            let mut num_connections = 0;
            loop {
                let open = listener.take().unwrap_or_else(|| {
                    wait_for("the judge's port", || TcpListener::bind(address).ok())
                });
                let Ok((socket, _)) = open.accept() else { return };
                num_connections += 1;
                if num_connections == 3 {
                    // Dropping the listener also closes the connections that wait to be accepted.
                    drop((socket, open));
                    std::thread::sleep(Duration::from_secs(1));
                    continue;
                }
                respond(socket);
                count.fetch_add(1, Ordering::SeqCst);
                listener = Some(open);
            }
        });
        Judge { responses, url: format!("http://{address}/v1") }
    }
}

fn respond(mut socket: TcpStream) {
    let mut read = vec![0; 1 << 16];
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut request = Vec::new();
    // The request is read completely: closing a connection with unread data resets it, which would
    // lose the response.
    while !is_complete(&request) {
        match socket.read(&mut read) {
            Ok(count @ 1..) => request.extend_from_slice(&read[..count]),
            _ => return,
        }
    }
    let response = json!({ "choices": [{ "message": { "role": "assistant", "content": "4" }, "finish_reason": "stop" }] });
    let body = response.to_string();
    let head = "content-type: application/json\r\nconnection: close\r\ncontent-length:";
    let _ = socket
        .write_all(format!("HTTP/1.1 200 OK\r\n{head} {}\r\n\r\n{body}", body.len()).as_bytes());
}

fn is_complete(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request).to_lowercase();
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    length.is_none_or(|length| body.len() >= length.trim().parse().unwrap())
}

#[test]
fn unreachable_judge_defers_scores_without_loss() {
    let judge = Judge::start();
    let keys = format!(
        r#"scorer = {{ kind = "judge", endpoints = [{{ url = "{}", model = "m" }}], cache = 0,
           verdict = {{ kind = "number", min = 1, max = 5 }} }}
unscored = "defer""#,
        judge.url
    )
    .replace(",\n           ", ", ");
    let workspace = new_workspace("", &keys);
    workspace.replace("recipe.toml", "tasks = 4", "tasks = 0");
    workspace.replace("recipe.toml", "unseen_wordings = 3", "");
    let output = end(start(&workspace));
    assert!(stdout(&output).contains("3 steps"), "{}", stdout(&output));
    // Every attempt got its score, even if late. No attempt was repeated or left out because of the
    // outage.
    assert_eq!(metric(&workspace, "critic/score/max"), [0.75; 3]);
    assert_eq!(metric(&workspace, "training/retried"), [0.0; 3]);
    assert_eq!(metric(&workspace, "response/aborted_ratio"), [0.0; 3]);
    assert!(
        judge.responses.load(Ordering::SeqCst) > 3,
        "{}",
        judge.responses.load(Ordering::SeqCst)
    );
}

/// Returns the ids and commands of the child processes of a process.
#[cfg(target_os = "linux")]
fn descendants(pid: u32) -> Vec<(u32, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(child) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let parent = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        if parent == Some(pid) {
            let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            found.push((child, String::from_utf8_lossy(&command).replace('\0', " ")));
        }
    }
    found
}

/// The final answer of each attempt is run as a program and tested. The sandbox is killed twice
/// during a test.
#[cfg(target_os = "linux")]
#[test]
fn killed_sandbox_loses_no_score() {
    let keys = r#"scorer = { kind = "code", tests = "tests", value = "fraction", protection = "best-effort", seconds = 20 }"#;
    let workspace = new_workspace("", keys);
    let tests = json!(["import time; time.sleep(0.2); assert add(1, 2) == 3"]);
    let rows: Vec<String> = (1..30)
        .map(|n| {
            json!({ "question": format!("What is {n} + 7?"), "answer": "x", "tests": tests })
                .to_string()
        })
        .collect();
    workspace.write("tasks.jsonl", rows.join("\n"));
    let recipe = std::fs::read_to_string(workspace.path("recipe.toml")).unwrap();
    let (before, rest) = recipe.split_once("[[tasks]]").unwrap();
    let (_, after) = rest.split_once("[agent]").unwrap();
    let tasks = "[[tasks]]\nkind = \"file\"\npath = \"tasks.jsonl\"\n";
    workspace.write("recipe.toml", format!("{before}{tasks}\n[agent]{after}"));
    workspace.replace("recipe.toml", "tasks = 4", "tasks = 0");
    workspace.replace("recipe.toml", "unseen_wordings = 3", "");
    let run = start(&workspace);
    let forks = |run: u32| {
        descendants(run)
            .into_iter()
            .find(|(pid, command)| command.contains("python") && !descendants(*pid).is_empty())
    };
    // The sandbox is tested before the run starts, so the first programs are not those of attempts.
    wait_for("the run to begin", || workspace.path("run/recipe.toml").exists().then_some(()));
    let mut killed = Vec::new();
    // A scorer is called at most three times, so two kills must not fail an attempt.
    for _ in 0..2 {
        let (pid, _) = wait_for("a program under test", || {
            forks(run.id()).filter(|(pid, _)| !killed.contains(pid))
        });
        kill(&pid.to_string());
        killed.push(pid);
    }
    let output = end(run);
    assert!(stdout(&output).contains("3 steps"), "{}", stdout(&output));
    // The repeated calls of the scorer got a new sandbox: no attempt was repeated or left out.
    assert_eq!(metric(&workspace, "training/retried"), [0.0; 3]);
    assert_eq!(metric(&workspace, "critic/score/mean").len(), 3);
    assert!(Path::new(&workspace.path("run/checkpoints")).exists());
}
