use std::time::Duration;

use serde_json::json;

use super::*;
use crate::testing::context;
use crate::{CallError, ObservationKind, ToolSet};

fn server(script: &str) -> McpKeys {
    let command = ["python3", "-c", script].map(str::to_owned).to_vec();
    McpKeys { command, environment: vec!["NAMED".into()], ..McpKeys::default() }
}

fn bad() -> McpKeys {
    server(include_str!("server_for_tests.py"))
}

fn mcp(keys: McpKeys) -> Mcp {
    Mcp::new("tests", keys, Some(5.0), &Supervisor::default()).unwrap()
}

async fn call_tool(session: &dyn Session, tool: &str, arguments: Value) -> ToolOutput {
    session.call(tool, arguments.as_object().unwrap()).await
}

#[tokio::test]
async fn session_calls_tools_of_server() {
    let mut session = mcp(bad()).open(&context("a")).await.unwrap();
    let names: Vec<String> = session.specs().into_iter().map(|spec| spec.name).collect();
    assert_eq!(names.len(), 14, "all pages are read: {names:?}");
    let s = &*session;
    assert_eq!(call_tool(s, "count", json!({})).await, ToolOutput::text("1"));
    assert_eq!(call_tool(s, "count", json!({})).await, ToolOutput::text("2"));
    let echoed = call_tool(s, "echo", json!({"length": 7})).await.read();
    assert_eq!(echoed, "[{\"length\": 7}, null, null]");
    assert_eq!(
        call_tool(s, "fails", json!({})).await,
        ToolOutput::error(CallError::Failed, "no such file")
    );
    let image = call_tool(s, "image", json!({})).await.read();
    assert_eq!(image, "[a part of type \"image\", which cannot be shown]\na cat");
    assert_eq!(call_tool(s, "structured", json!({})).await.read(), "{\"sum\":3}");
    assert_eq!(call_tool(s, "floods", json!({})).await.read(), "done");
    assert_eq!(call_tool(s, "garbage", json!({})).await.read(), "after garbage");
    let long = call_tool(s, "long", json!({"length": 50_000_000})).await;
    assert_eq!(long.read().len(), 50_000_000);
    assert_eq!(call_tool(s, "changes", json!({})).await.read(), "changed");
    let failed = call_tool(s, "fails", json!({})).await;
    assert_eq!(
        (failed.error, failed.read().as_str()),
        (Some(CallError::BadArguments), "Unknown tool: fails")
    );
    assert_eq!(call_tool(s, "count", json!({})).await.read(), "3", "all this was one server");
    session.close().await.unwrap();
}

#[tokio::test]
async fn exited_server_is_restarted_and_reported() {
    let mut session = mcp(bad()).open(&context("a")).await.unwrap();
    let s = &*session;
    call_tool(s, "count", json!({})).await;
    let exited = call_tool(s, "dies", json!({})).await;
    assert_eq!(exited.error, Some(CallError::Unavailable));
    let stderr_text = exited.read();
    assert!(stderr_text.contains("code 3") && stderr_text.contains("out of luck"), "{stderr_text}");
    let next = call_tool(s, "count", json!({})).await;
    assert_eq!((next.error, next.metrics.get("restarts")), (None, Some(&1.0)));
    assert!(next.read().starts_with("[the server of this tool was restarted"), "{}", next.read());
    assert!(next.read().ends_with("\n1"), "{}", next.read());
    assert_eq!(call_tool(s, "count", json!({})).await, ToolOutput::text("2"), "it is told once");
    session.close().await.unwrap();
}

#[tokio::test]
async fn hanging_call_does_not_affect_next_call() {
    let toolbox: Arc<dyn Toolbox> = Arc::new(mcp(bad()));
    let set = ToolSet::new(vec![toolbox], Duration::from_secs(8)).unwrap();
    let mut open = set.open(&context("a")).await.unwrap();
    let late = open.execute_calls(&call_without_arguments("hangs"), true).await;
    assert_eq!(late[0].kind, ObservationKind::Timeout, "{late:?}");
    let next = open.execute_calls(&call_without_arguments("count"), true).await;
    assert_eq!(next[0].kind, ObservationKind::Ok, "{next:?}");
    assert!(next[0].text.contains("did not respond any more]"), "{next:?}");
    open.close().await.unwrap();
}

fn call_without_arguments(name: &str) -> levade_text::ParsedCompletion {
    let call = levade_text::ToolCall {
        id: String::new(),
        name: name.into(),
        arguments: Map::new().into(),
    };
    levade_text::ParsedCompletion { calls: vec![Ok(call)], ..Default::default() }
}

#[tokio::test]
async fn unreadable_response_fails_call_immediately() {
    let mut session = mcp(bad()).open(&context("a")).await.unwrap();
    for (line, why) in [
        (
            r#"{"jsonrpc":"2.0","id":ID,"result":{"content":[{"type":"text"#,
            "the server's response is not JSON: EOF",
        ),
        (
            r#"{"jsonrpc":"2.0","id":ID,"result":{"a":undefined}}"#,
            "the server's response is not JSON: expected value at column",
        ),
        (r#"{"jsonrpc":"2.0","id":ID,"error":{"code":-1}}"#, "an error without a message, code -1"),
        (r#"{"jsonrpc":"2.0","id":ID,"error":"boom"}"#, "boom"),
        (
            r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"Parse error"}}"#,
            "Parse error",
        ),
    ] {
        let output = call_tool(&*session, "odd", json!({ "line": line })).await;
        assert!(output.is_error() && output.read().contains(why), "{line}: {output:?}");
    }
    let deep = format!(
        r#"{{"jsonrpc":"2.0","id":ID,"result":{}1{}}}"#,
        "[".repeat(3000),
        "]".repeat(3000)
    );
    let output = call_tool(&*session, "odd", json!({ "line": deep })).await;
    assert_eq!(output.error, Some(CallError::Unavailable));
    assert!(output.read().contains("recursion limit exceeded"), "{output:?}");
    for (line, text) in [
        (
            r#"{"jsonrpc":"2.0","id":ID,"result":{"content":[],"structuredContent":{"x":NaN}}}"#,
            "{\"x\":null}",
        ),
        (
            r#"{"id":"ID","result":{"content":[{"type":"text","text":"caf\u{e9} \ud83d"}]}}"#,
            "caf\u{fffd} \u{fffd}",
        ),
        (r#"[{"jsonrpc":"2.0","id":ID,"result":"batch"}]"#, "batch"),
    ] {
        let line = line.replace("\\u{e9}", "\u{e9}");
        let output = call_tool(&*session, "odd", json!({ "line": line })).await;
        assert_eq!((output.error, output.read()), (None, text.to_owned()), "{line}");
    }
    let line = r#"{"jsonrpc":"2.0","id":ID,"result":"no end"}"#;
    let output = call_tool(&*session, "odd", json!({ "line": line, "end": "" })).await;
    assert_eq!(output.read(), "no end", "a message without the end of its line");
    assert_eq!(
        call_tool(&*session, "count", json!({})).await,
        ToolOutput::text("1"),
        "all this was one server"
    );
    session.close().await.unwrap();
}

#[tokio::test]
async fn message_split_by_pause_is_accepted() {
    let mut session = mcp(bad()).open(&context("a")).await.unwrap();
    let parts =
        json!({ "start": r#"{"jsonrpc":"2.0","#, "line": r#""id":ID,"result":"two parts"}"# });
    assert_eq!(call_tool(&*session, "odd", parts).await, ToolOutput::text("two parts"));
    session.close().await.unwrap();
}

#[tokio::test]
async fn announced_tool_can_be_called_in_same_attempt() {
    let toolbox: Arc<dyn Toolbox> = Arc::new(mcp(McpKeys { deny: vec!["dies".into()], ..bad() }));
    let set = ToolSet::new(vec![toolbox], Duration::from_secs(30)).unwrap();
    let mut open = set.open(&context("a")).await.unwrap();
    let unknown = open.execute_calls(&call_without_arguments("grown"), true).await;
    assert_eq!(unknown[0].kind, ObservationKind::UnknownTool);
    let grows = open.execute_calls(&call_without_arguments("grows"), true).await;
    assert!(
        grows[0]
            .text
            .starts_with("grown is there\n[The tools have changed. New: {\"name\":\"grown\""),
        "{grows:?}"
    );
    assert!(!grows[0].text.contains("dies"), "{grows:?}");
    let grown = open.execute_calls(&call_without_arguments("grown"), true).await;
    assert_eq!(grown[0].text, "it grew");
    open.close().await.unwrap();
}

#[tokio::test]
async fn call_returns_without_missing_tool_list() {
    let script = include_str!("server_for_tests.py");
    let script = script.replace(
        "send({\"id\": identity, \"result\": page(",
        "\"grown\" in TOOLS or send({\"id\": identity, \"result\": page(",
    );
    let toolbox: Arc<dyn Toolbox> = Arc::new(mcp(server(&script)));
    let set = ToolSet::new(vec![toolbox], Duration::from_secs(30)).unwrap();
    let mut open = set.open(&context("a")).await.unwrap();
    for (name, text) in [("grows", "grown is there"), ("count", "1")] {
        let call = levade_text::ToolCall {
            id: String::new(),
            name: name.into(),
            arguments: Map::new().into(),
        };
        let parsed = levade_text::ParsedCompletion { calls: vec![Ok(call)], ..Default::default() };
        let output = open.execute_calls(&parsed, true).await;
        assert_eq!((output[0].kind, output[0].text.as_str()), (ObservationKind::Ok, text));
    }
    open.close().await.unwrap();
}

#[tokio::test]
async fn progress_reports_extend_timeout_up_to_limit() {
    let idle = Duration::from_secs(5);
    let toolbox = mcp(McpKeys { progress_seconds: Some(9.0), ..bad() });
    let set = ToolSet::new(vec![Arc::new(toolbox) as Arc<dyn Toolbox>], idle).unwrap();
    let mut open = set.open(&context("a")).await.unwrap();
    let mut works = async |name: &str, steps: u32| {
        let arguments = json!({ "length": steps }).as_object().unwrap().clone();
        let call = levade_text::ToolCall {
            id: String::new(),
            name: name.into(),
            arguments: arguments.into(),
        };
        let parsed = levade_text::ParsedCompletion { calls: vec![Ok(call)], ..Default::default() };
        open.execute_calls(&parsed, true).await.remove(0)
    };
    let done = works("works", 13).await;
    assert_eq!(
        (done.kind, done.text.as_str()),
        (ObservationKind::Ok, "done"),
        "longer than it may be idle"
    );
    let endless = works("works", 1000).await;
    assert_eq!(endless.kind, ObservationKind::Timeout, "{endless:?}");
    assert!(endless.text.contains("did not answer within 9s"), "{endless:?}");
    let next = works("count", 0).await;
    assert!(next.text.ends_with("did not respond any more]\n1"), "{next:?}");
    let idle = works("hangs", 0).await;
    assert_eq!(idle.kind, ObservationKind::Timeout, "{idle:?}");
    assert!(idle.text.contains("did not answer within 5s"), "{idle:?}");
    open.close().await.unwrap();
}

#[tokio::test]
async fn tools_are_renamed_for_agents() {
    let names = BTreeMap::from([
        ("echo".to_owned(), "say".to_owned()),
        ("count".to_owned(), "echo".to_owned()),
    ]);
    let allow = vec!["echo".into(), "count".into()];
    let renamed = mcp(McpKeys { rename: names, allow, ..bad() });
    let mut session = renamed.clone().open(&context("a")).await.unwrap();
    let specs: Vec<String> = session.specs().into_iter().map(|spec| spec.name).collect();
    assert_eq!(specs, ["echo", "say"]);
    assert_eq!(call_tool(&*session, "echo", json!({})).await.read(), "1");
    assert_eq!(call_tool(&*session, "say", json!({})).await.read(), "[{}, null, null]");
    session.close().await.unwrap();
    let clash = BTreeMap::from([("echo".to_owned(), "count".to_owned())]);
    let error = mcp(McpKeys { rename: clash, ..bad() })
        .open(&context("a"))
        .await
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("two tools of the server would have the name \"count\"")
            && error.contains("rename"),
        "{error}"
    );
    let missing = BTreeMap::from([("ecko".to_owned(), "x".to_owned())]);
    let error = mcp(McpKeys { rename: missing, ..bad() })
        .open(&context("a"))
        .await
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("the server has no tool \"ecko\""), "{error}");
}

#[tokio::test]
async fn attempts_share_server_only_if_configured() {
    let own = mcp(bad());
    let (mut a, mut b) =
        (own.open(&context("a")).await.unwrap(), own.open(&context("a")).await.unwrap());
    assert_eq!(call_tool(&*a, "count", json!({})).await.read(), "1");
    assert_eq!(call_tool(&*b, "count", json!({})).await.read(), "1");
    a.close().await.unwrap();
    b.close().await.unwrap();
    let shared_mcp = mcp(McpKeys { shared: true, ..bad() });
    let (mut a, mut b) = (
        shared_mcp.open(&context("a")).await.unwrap(),
        shared_mcp.open(&context("a")).await.unwrap(),
    );
    assert_eq!(call_tool(&*a, "count", json!({})).await.read(), "1");
    assert_eq!(call_tool(&*b, "count", json!({})).await.read(), "2");
    a.close().await.unwrap();
    assert_eq!(call_tool(&*b, "count", json!({})).await.read(), "3", "the others go on");
    assert_eq!(call_tool(&*b, "dies", json!({})).await.error, Some(CallError::Unavailable));
    assert!(call_tool(&*b, "count", json!({})).await.read().ends_with("\n1"));
    b.close().await.unwrap();
}

#[tokio::test]
async fn tools_are_allowed_and_denied_by_name() {
    let some = McpKeys { allow: vec!["echo".into(), "count".into()], ..bad() };
    assert_eq!(tool_names(mcp(some.clone()).open(&context("a")).await.unwrap()), ["count", "echo"]);
    assert_eq!(
        tool_names(
            mcp(McpKeys { deny: vec!["echo".into()], ..some }).open(&context("a")).await.unwrap()
        ),
        ["count"]
    );
    let none = mcp(McpKeys { allow: vec!["ecko".into()], ..bad() });
    let error = none.open(&context("a")).await.err().unwrap().to_string();
    assert!(error.contains("the server has no tool \"ecko\"; it has count, echo"), "{error}");
}

fn tool_names(session: Box<dyn Session>) -> Vec<String> {
    session.specs().into_iter().map(|s| s.name).collect()
}

#[tokio::test]
async fn open_error_explains_failed_server_start() {
    let error = opening_error("import nothing_of_this_name").await;
    assert!(error.contains("code 1") && error.contains("ModuleNotFoundError"), "{error}");
    let error = opening_error("import sys; sys.stdin.readline(); print('hello')").await;
    assert!(
        error.contains("tool \"tests\" could not be opened") && error.contains("hello"),
        "{error}"
    );
    let error = opening_error(
        "import sys\nfor line in range(40): print('step', line, file=sys.stderr)\nsys.exit(4)",
    )
    .await;
    assert!(
        error.contains("code 4") && error.contains("step 30\n") && !error.contains("step 29"),
        "{error}"
    );
    let rejecting_script = "
import json, sys
for line in sys.stdin:
    error = {'code': -32602, 'message': 'Unsupported protocol version', 'data': {'supported': ['2024-11-05']}}
    print(json.dumps({'jsonrpc': '2.0', 'id': json.loads(line).get('id'), 'error': error}), \
    flush=True)
";
    let error = opening_error(rejecting_script).await;
    assert!(
        error.contains("Unsupported protocol version ({\"supported\":[\"2024-11-05\"]})"),
        "{error}"
    );
    assert!(!error.contains("signal") && !error.contains("::"), "{error}");
}

async fn opening_error(script: &str) -> String {
    let opened = mcp(server(script)).open(&context("a")).await;
    opened.err().expect("it does not start").to_string()
}

#[tokio::test]
async fn open_timeout_reports_server_output() {
    let error = timeout_error(
        "
import sys, time
print('listening', flush=True)
print('waiting for the database', file=sys.stderr, flush=True)
time.sleep(60)
",
    )
    .await;
    for part in [
        "not ready within 3s",
        "is not a response: \"listening\"",
        "it printed: waiting for the database",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let error = timeout_error(
        "
import os
while True: os.write(1, b'more\\n' * 10000)
",
    )
    .await;
    assert!(error.contains("not ready within 3s") && error.contains("\"more\""), "{error}");
}

async fn timeout_error(script: &str) -> String {
    let toolbox: Arc<dyn Toolbox> = Arc::new(mcp(server(script)));
    let set = ToolSet::new(vec![toolbox], Duration::from_secs(3)).unwrap();
    let since = std::time::Instant::now();
    let error = set.open(&context("a")).await.unwrap_err().to_string();
    assert!(since.elapsed() < Duration::from_secs(8), "{error}: {:?}", since.elapsed());
    error
}

#[tokio::test]
async fn slow_server_is_started_once() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("starts");
    let slow = format!(
        "import time\nopen({mark:?}, 'a').write('x')\ntime.sleep(11)\n{}",
        include_str!("server_for_tests.py")
    );
    let mut session = mcp(server(&slow)).open(&context("a")).await.unwrap();
    assert_eq!(call_tool(&*session, "count", json!({})).await.read(), "1");
    assert_eq!(std::fs::read_to_string(&mark).unwrap(), "x");
    session.close().await.unwrap();
}

#[tokio::test]
async fn handshake_requirement_is_remembered() {
    for otherwise in ["sys.exit(1)", "answer(None)", "answer({})"] {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("first");
        let script = format!(
            "
import json, sys
def answer(result):
    print(json.dumps({{'jsonrpc': '2.0', 'id': message['id'], 'result': result}}), flush=True)
is_first = True
for line in sys.stdin:
    message = json.loads(line)
    method = message.get('method')
    if is_first:
        open({log:?}, 'a').write(method + ' ')
        is_first = False
    if method == 'initialize':
        answer({{'protocolVersion': '2025-06-18', 'capabilities': {{}}, 'serverInfo': {{'name': \
        'x', 'version': '1'}}}})
    elif method == 'tools/list':
        answer({{'tools': [{{'name': 'a', 'inputSchema': {{'type': 'object'}}}}]}})
    elif 'id' in message:
        {otherwise}
"
        );
        let toolbox = mcp(server(&script));
        for _ in 0..2 {
            let mut session = toolbox.open(&context("a")).await.unwrap();
            assert_eq!(session.specs()[0].name, "a", "{otherwise}");
            session.close().await.unwrap();
        }
        let first = std::fs::read_to_string(&log).unwrap();
        assert_eq!(first.split(' ').rev().nth(1), Some("initialize"), "{otherwise}: {first}");
        assert_eq!(first.matches("discover").count(), 1, "{otherwise}: {first}");
    }
}
