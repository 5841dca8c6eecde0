//! Tests of the tool `python`, in a local sandbox and in a service.

use std::time::Duration;

use levade_sandbox::service::{Service, serve};
use levade_tasks::Task;

use super::*;

fn keys(persistent: bool) -> SandboxKeys {
    let protection = Demand::BestEffort;
    SandboxKeys {
        persistent,
        protection,
        memory_mb: 256,
        output_bytes: 1000,
        ..SandboxKeys::default()
    }
}

fn tool(keys: SandboxKeys) -> CodeTool {
    CodeTool::new("sandbox".into(), keys, Some(1.0)).unwrap()
}

fn limits() -> Limits {
    Limits { seconds: 1.0, memory_mb: 256, output_bytes: 1000, ..Limits::default() }
}

async fn open(tool: CodeTool) -> Box<dyn Session> {
    let attempt = ToolContext {
        attempt: "a".into(),
        task: Task::default(),
        seed: 0,
        stream: 0,
        deadline: Duration::from_secs(60),
        params: Default::default(),
    };
    tool.open(&attempt).await.unwrap()
}

async fn call(session: &dyn Session, code: &str) -> (String, Option<CallError>, Vec<String>) {
    let output = session.call("python", json!({ "code": code }).as_object().unwrap()).await;
    (output.read(), output.error, output.metrics.keys().cloned().collect())
}

#[tokio::test]
async fn variables_persist_until_interpreter_is_lost() {
    let mut session = open(tool(keys(true))).await;
    let session_ref = &*session;
    assert_eq!(call(session_ref, "x = 20 + 1").await, success("[no output]"));
    assert_eq!(call(session_ref, "print('x is', x)\nx * 2").await, success("x is 21\n42"));
    let (text, error, metrics) = call(session_ref, "print(1)\n1/0").await;
    assert!(
        text.starts_with("1\nTraceback") && text.ends_with("ZeroDivisionError: division by zero"),
        "{text}"
    );
    assert_eq!((error, metrics), (Some(CallError::Failed), vec!["exceptions".to_owned()]));
    let late = failure("[stopped after 1 seconds; variables are lost]", &["time_limits"]);
    assert_eq!(call(session_ref, "while True: pass").await, late);
    let (text, _, metrics) = call(session_ref, "x").await;
    assert!(
        text.starts_with("[the interpreter was started afresh: earlier variables are lost]\n"),
        "{text}"
    );
    assert!(text.ends_with("NameError: name 'x' is not defined"), "{text}");
    assert_eq!(metrics, ["exceptions", "restarts"]);
    let unused_address =
        failure("[the interpreter ended with exit code 3; variables are lost]", &["crashes"]);
    assert_eq!(call(session_ref, "import os; os._exit(3)").await, unused_address);
    let (text, ..) = call(session_ref, "print('y' * 100000)").await;
    assert!(text.contains("bytes are left out") && text.len() < 1200, "{text}");
    session.close().await.unwrap();
}

fn success(text: &str) -> (String, Option<CallError>, Vec<String>) {
    (text.to_owned(), None, Vec::new())
}

fn failure(text: &str, metrics: &[&str]) -> (String, Option<CallError>, Vec<String>) {
    (
        text.to_owned(),
        Some(CallError::Failed),
        metrics.iter().map(|m| (*m).to_owned()).collect::<Vec<_>>(),
    )
}

#[tokio::test]
async fn calls_without_persistence_share_no_variables() {
    let session = open(tool(keys(false))).await;
    assert!(session.can_run_parallel("python"));
    assert_eq!(call(&*session, "x = 1; x").await.0, "1");
    assert!(call(&*session, "x").await.0.ends_with("NameError: name 'x' is not defined"));
}

#[tokio::test]
async fn code_tool_explains_invalid_arguments() {
    let session = open(tool(keys(false))).await;
    for (arguments, why) in [
        (json!({}), "\"code\" is missing"),
        (json!({ "code": 5 }), "the argument \"code\" is 5, but it must be a string"),
        (
            json!({ "code": "", "language": "c" }),
            "\"language\" is not an argument of this tool; its argument is \"code\"",
        ),
    ] {
        let output = session.call("python", arguments.as_object().unwrap()).await;
        assert_eq!(output, ToolOutput::error(CallError::BadArguments, why));
    }
}

#[tokio::test]
async fn service_matches_sandbox_and_outage_is_observed() {
    let sandbox = Sandbox::start(keys(false).sandbox()).await.unwrap();
    let service = Service::new(sandbox, limits(), &["key".to_owned()], Default::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server =
        tokio::spawn(async move { serve(&service, listener, std::future::pending()).await });
    let variable_names = |key: &str| {
        let keys = SandboxKeys { url: Some(url.clone()), ..keys(true) };
        CodeTool { key: Some(key.into()), ..tool(keys) }
    };
    let session = open(variable_names("key")).await;
    assert_eq!(call(&*session, "print('a')\n6 * 7").await.0, "a\n42");
    let (text, error, metrics) = call(&*session, "1/0").await;
    assert!(text.ends_with("ZeroDivisionError: division by zero"), "{text}");
    assert_eq!((error, metrics), (Some(CallError::Failed), vec!["exceptions".to_owned()]));
    let late = call(&*session, "while True: pass").await;
    assert_eq!(
        (late.0.as_str(), late.2),
        ("[stopped after 1 seconds]", vec!["time_limits".to_owned()])
    );
    let wrong = open(variable_names("other")).await;
    let (text, error, metrics) = call(&*wrong, "1").await;
    assert!(text.contains("responded with status 401"), "{text}");
    assert_eq!((error, metrics), (Some(CallError::Unavailable), vec!["unavailable".to_owned()]));
    server.abort();
    // No server listens at this address: the port belonged to a closed listener.
    let unused_address =
        tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let unreachable =
        open(tool(SandboxKeys { url: Some(format!("http://{unused_address}")), ..keys(false) }))
            .await;
    let (text, error, _) = call(&*unreachable, "1").await;
    assert!(text.starts_with("the code was not run"), "{text}");
    assert_eq!(error, Some(CallError::Unavailable));
}

#[tokio::test]
async fn discover_tools_reports_missing_interpreter() {
    let keys = SandboxKeys { python: "/nowhere/python3".into(), ..keys(true) };
    let tool = CodeTool::new("code".into(), keys, None).unwrap();
    let tools = crate::ToolSet::new(vec![Arc::new(tool)], Duration::from_secs(60)).unwrap();
    let attempt = ToolContext {
        attempt: "a".into(),
        task: Task::default(),
        seed: 0,
        stream: 0,
        deadline: Duration::from_secs(60),
        params: Default::default(),
    };
    let error = tools.discover_tools(&attempt).await.unwrap_err().to_string();
    assert!(error.contains("\"code\"") && error.contains("/nowhere/python3"), "{error}");
}

#[test]
fn new_reports_unset_api_key_variable() {
    let url = Some("http://h".to_owned());
    let key_env = Some("LEVADE_TEST_NO_SUCH_KEY".to_owned());
    let error = CodeTool::new("code".into(), SandboxKeys { url, key_env, ..keys(false) }, None)
        .unwrap_err();
    assert!(error.contains("LEVADE_TEST_NO_SUCH_KEY, which must hold a key, is unset"), "{error}");
    assert_eq!(tool(keys(true)).key, None);
}
