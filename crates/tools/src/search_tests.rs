use std::time::Duration;

use levade_search::{Analyzer, HttpOptions, build, serve};
use tempfile::TempDir;
use tokio::net::TcpListener;

use super::*;
use crate::testing::context;

const CORPUS: &str = r#"{"id": "1", "title": "Ada Lovelace", "text": "She wrote the first program, for an engine of Babbage."}
{"id": "2", "text": "Engines of steam moved trains."}
"#;

fn keys() -> SearchKeys {
    SearchKeys { top_k: 2, passage_chars: 200, ..SearchKeys::default() }
}

/// Creates a tool that searches the index `i` in a directory.
fn local_tool(dir: &TempDir, keys: SearchKeys) -> SearchTool {
    let keys = SearchKeys { index: Some(dir.path().join("i")), ..keys };
    SearchTool::new("wiki", keys, Retries::default()).unwrap()
}

fn remote_tool(url: &str, retries: Retries) -> Result<SearchTool, String> {
    SearchTool::new("wiki", SearchKeys { url: Some(url.into()), ..keys() }, retries)
}

/// Creates a directory with an index `i`.
fn build_index() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let corpus = dir.path().join("c.jsonl");
    std::fs::write(&corpus, CORPUS).unwrap();
    build(&corpus, &dir.path().join("i"), Analyzer::English, None, &mut |_| {}).unwrap();
    dir
}

async fn call(tool: &SearchTool, arguments: Value) -> ToolOutput {
    let mut session = tool.open(&context("a")).await.unwrap();
    let output = session.call(SearchTool::NAME, arguments.as_object().unwrap()).await;
    session.close().await.unwrap();
    output
}

fn metrics(output: &ToolOutput) -> Vec<(&str, f64)> {
    output.metrics.iter().map(|(name, value)| (name.as_str(), *value)).collect()
}

#[tokio::test]
async fn passages_are_numbered_titled_and_truncated() {
    let dir = build_index();
    let tool = local_tool(&dir, keys());
    let output = call(&tool, json!({ "query": "first engine" })).await;
    let ada = "Doc 1 (Title: Ada Lovelace)\nShe wrote the first program, for an engine of Babbage.";
    let both = format!("{ada}\n\nDoc 2\nEngines of steam moved trains.");
    assert_eq!(output.read(), both);
    let counted =
        [("empty", 0.0), ("failures", 0.0), ("passages", 2.0), ("queries", 1.0), ("retries", 0.0)];
    assert_eq!(metrics(&output), counted);
    let output = call(&tool, json!({ "queries": ["program", "zebra"] })).await;
    assert_eq!(output.read(), format!("{ada}\n---\nNo passage was found for \"zebra\"."));
    assert_eq!(output.metrics["empty"], 1.0);
    let short = SearchKeys { top_k: 1, passage_chars: 9, ..keys() };
    let tool = local_tool(&dir, short);
    let output = call(&tool, json!({ "query": ["steam"] })).await;
    assert_eq!(output.read(), "Doc 1\nEngines o…");
}

#[tokio::test]
async fn search_tool_explains_invalid_queries() {
    let dir = build_index();
    let tool = local_tool(&dir, keys());
    for (arguments, why) in [
        (json!({}), "\"query\" is missing"),
        (json!({ "query": null }), "\"query\" is missing"),
        (json!({ "query": " " }), "\"query\" is empty"),
        (json!({ "queries": [] }), "\"queries\" is empty"),
        (json!({ "query": 5 }), "the argument \"query\" contains 5, but a query must be a string"),
        (
            json!({ "queries": ["a", ["b"]] }),
            "the argument \"queries\" contains [\"b\"], but a query must be a string",
        ),
        (
            json!({ "query": "a", "queries": ["b"] }),
            "both \"query\" and \"queries\" are set; set only one of them",
        ),
        (
            json!({ "query": "a", "top_k": 9 }),
            "\"top_k\" is not an argument of this tool; its arguments are \"query\" and \
             \"queries\"",
        ),
        (
            json!({ "queries": vec!["a"; 9] }),
            "the argument \"queries\" has 9 queries, but at most 8 are allowed",
        ),
        (
            json!({ "query": "a".repeat(MAX_QUERY_BYTES + 1) }),
            "a query in \"query\" has 65537 bytes, but may have at most 65536",
        ),
    ] {
        assert_eq!(call(&tool, arguments).await, ToolOutput::error(CallError::BadArguments, why));
    }
}

#[tokio::test]
async fn server_failures_are_observations_with_retries() {
    let dir = build_index();
    let index = Index::open(&dir.path().join("i"), true).unwrap();
    let searcher = Searcher::new(index, Mode::Bm25, None, 1).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server =
        tokio::spawn(serve(searcher, HttpOptions::default(), listener, std::future::pending()));
    let retries = Retries {
        tries: 3,
        pause: Duration::from_millis(1),
        deadline: Duration::from_millis(2000),
    };
    let url = format!("http://{address}/retrieve");
    let tool = remote_tool(&url, retries).unwrap();
    let output = call(&tool, json!({ "query": "program" })).await;
    assert!(
        output.read().starts_with("Doc 1 (Title: Ada Lovelace)\nShe wrote"),
        "{}",
        output.read()
    );
    server.abort();
    let _ = server.await;
    let elsewhere = remote_tool("http://127.0.0.1:9/retrieve", retries);
    let output = call(&elsewhere.unwrap(), json!({ "query": "program" })).await;
    assert_eq!(output.error, Some(CallError::Unavailable));
    assert!(
        output.read().starts_with("the search failed: http://127.0.0.1:9/retrieve: "),
        "{}",
        output.read()
    );
    assert_eq!(metrics(&output), [("failures", 1.0), ("queries", 1.0), ("retries", 2.0)]);
}

#[test]
fn new_reports_missing_index_and_invalid_url() {
    let dir = tempfile::tempdir().unwrap();
    let absent = SearchKeys { index: Some(dir.path().join("absent")), ..keys() };
    let error = SearchTool::new("wiki", absent, Retries::default()).err().unwrap();
    assert!(error.contains("absent: the directory does not exist"), "{error}");
    let error = remote_tool("nowhere", Retries::default()).err().unwrap();
    assert!(error.contains("\"nowhere\""), "{error}");
}
