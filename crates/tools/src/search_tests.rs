use std::time::Duration;

use levade_search::{Analyzer, HttpOptions, build, serve};
use tempfile::TempDir;
use tokio::net::TcpListener;

use super::*;
use crate::testing::context;

const CORPUS: &str = r#"{"id": "1", "title": "Ada Lovelace", "text": "She wrote the first program, for an engine of Babbage."}
{"id": "2", "text": "Engines of steam moved trains."}
"#;

fn options() -> SearchOptions {
    SearchOptions { top_k: 2, passage_chars: 200, parallel: true }
}

/// A folder with an index `i`.
fn made() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let corpus = folder.path().join("c.jsonl");
    std::fs::write(&corpus, CORPUS).unwrap();
    build(&corpus, &folder.path().join("i"), Analyzer::English, None, &mut |_| {}).unwrap();
    folder
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
async fn passages_are_shown_as_peers_show_them() {
    let folder = made();
    let tool = SearchTool::local("wiki", &folder.path().join("i"), options()).unwrap();
    let output = call(&tool, json!({ "query": "first engine" })).await;
    let ada = "Doc 1 (Title: Ada Lovelace)\nShe wrote the first program, for an engine of Babbage.";
    let both = format!("{ada}\n\nDoc 2\nEngines of steam moved trains.");
    assert_eq!(output.read(), both);
    let counted = [("empty", 0.0), ("failures", 0.0), ("passages", 2.0), ("queries", 1.0), ("retries", 0.0)];
    assert_eq!(metrics(&output), counted);
    let output = call(&tool, json!({ "queries": ["program", "zebra"] })).await;
    assert_eq!(output.read(), format!("{ada}\n---\nNo passage was found for \"zebra\"."));
    assert_eq!(output.metrics["empty"], 1.0);
    let short = SearchOptions { top_k: 1, passage_chars: 9, ..options() };
    let tool = SearchTool::local("wiki", &folder.path().join("i"), short).unwrap();
    let output = call(&tool, json!({ "query": ["steam"] })).await;
    assert_eq!(output.read(), "Doc 1\nEngines o…");
}

#[tokio::test]
async fn arguments_that_do_not_fit_are_explained() {
    let folder = made();
    let tool = SearchTool::local("wiki", &folder.path().join("i"), options()).unwrap();
    for (arguments, why) in [
        (json!({}), "\"query\" is missing"),
        (json!({ "query": null }), "\"query\" is missing"),
        (json!({ "query": " " }), "\"query\" is empty"),
        (json!({ "queries": [] }), "\"queries\" is empty"),
        (json!({ "query": 5 }), "\"query\" has 5, but a query is a string"),
        (json!({ "queries": ["a", ["b"]] }), "\"queries\" has [\"b\"], but a query is a string"),
        (json!({ "query": "a", "queries": ["b"] }), "give \"query\" or \"queries\", not both"),
        (json!({ "query": "a", "top_k": 9 }), "\"top_k\" is not an argument; \"query\" and \"queries\" are"),
        (json!({ "queries": vec!["a"; 9] }), "\"queries\" has 9 queries, but at most 8 are answered at once"),
        (
            json!({ "query": "a".repeat(LONGEST_QUERY + 1) }),
            "\"query\" has 65537 bytes, but a query has at most 65536",
        ),
    ] {
        assert_eq!(call(&tool, arguments).await, ToolOutput::error(CallError::BadArguments, why));
    }
}

#[tokio::test]
async fn a_server_is_asked_and_its_failures_are_observations() {
    let folder = made();
    let index = Index::open(&folder.path().join("i"), true).unwrap();
    let searcher = Searcher::new(index, Mode::Bm25, None, 1).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(serve(searcher, HttpOptions::default(), listener, std::future::pending()));
    let retries =
        Retries { tries: 3, pause: Duration::from_millis(1), deadline: Duration::from_millis(2000) };
    let url = format!("http://{address}/retrieve");
    let tool = SearchTool::server("wiki", &url, None, retries, options()).unwrap();
    let output = call(&tool, json!({ "query": "program" })).await;
    assert!(output.read().starts_with("Doc 1 (Title: Ada Lovelace)\nShe wrote"), "{}", output.read());
    server.abort();
    let _ = server.await;
    let elsewhere = SearchTool::server("wiki", "http://127.0.0.1:9/retrieve", None, retries, options());
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
fn indices_and_addresses_that_cannot_be_used_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = SearchTool::local("wiki", &folder.path().join("absent"), options()).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("\"wiki\"") && text.contains("absent does not exist"), "{text}");
    let error = SearchTool::server("wiki", "nowhere", None, Retries::default(), options()).err().unwrap();
    assert!(error.to_string().contains("\"nowhere\""), "{error}");
}
