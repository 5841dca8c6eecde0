use std::collections::HashMap;
use std::time::Instant;

use levade_process::Supervisor;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;

use super::*;
use crate::mcp::{Mcp, McpKeys};
use crate::testing::context;
use crate::{CallError, Session, ToolOutput, ToolSet, Toolbox};

/// Returns a faulty response to a message, or `None` for the regular response. The arguments are
/// the message, the number of earlier messages with the same method, and the session. A GET request
/// counts as a message with the id of the last event.
type FaultInjector = fn(&Value, usize, Option<&str>) -> Option<String>;

fn http(status: &str, headers: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n{body}",
        body.len()
    )
}

fn json_http(status: &str, body: &Value) -> String {
    http(status, "content-type: application/json\r\n", &body.to_string())
}

fn result(message: &Value, result: Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": message["id"], "result": result })
}

fn call_response(message: &Value, text: &str) -> Value {
    result(message, json!({ "content": [{ "type": "text", "text": text }] }))
}

fn response_text(message: &Value, count: usize, session: Option<&str>) -> String {
    if message["id"].is_null() {
        return http("202 Accepted", "", "");
    }
    let method = message["method"].as_str().unwrap();
    match method {
        "initialize" => {
            let about = json!({
                "protocolVersion": "2025-06-18",
                "capabilities": { "tools": {} },
                "serverInfo": { "name": "s", "version": "1" },
            });
            let headers =
                format!("content-type: application/json\r\nmcp-session-id: s-{count}\r\n");
            http("200 OK", &headers, &result(message, about).to_string())
        }
        "tools/list" => {
            let tools =
                json!({ "tools": [{ "name": "echo", "inputSchema": { "type": "object" } }] });
            json_http("200 OK", &result(message, tools))
        }
        "tools/call" => json_http(
            "200 OK",
            &call_response(message, &format!("in {}", session.unwrap_or("none"))),
        ),
        _ => json_http("404 Not Found", &json!({ "error": "no such method" })),
    }
}

/// Compresses the body of a response whose headers require it.
fn compress_body(response: String) -> Vec<u8> {
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    if !head.contains(PACKED.trim()) {
        return response.into_bytes();
    }
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packer, body.as_bytes()).unwrap();
    let packed = packer.finish().unwrap();
    let length = format!("content-length: {}", body.len());
    let head = head.replace(&length, &format!("content-length: {}", packed.len()));
    [head.as_bytes(), b"\r\n\r\n", &packed].concat()
}

/// Starts a server with a fault and returns its address.
async fn server(injector: FaultInjector) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut counts: HashMap<String, usize> = HashMap::new();
        let mut stalled = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            let mut stream = BufReader::new(stream);
            let mut length = 0;
            let mut session = None;
            let mut is_post = false;
            let mut last = Value::Null;
            loop {
                let mut line = String::new();
                stream.read_line(&mut line).await.unwrap();
                let lower = line.trim().to_ascii_lowercase();
                is_post |= lower.starts_with("post ");
                if let Some(value) = lower.strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                if let Some(value) = lower.strip_prefix("mcp-session-id:") {
                    session = Some(value.trim().to_owned());
                }
                if let Some(value) = lower.strip_prefix("last-event-id:") {
                    last = serde_json::from_str(value).unwrap();
                }
                if lower.is_empty() {
                    break;
                }
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).await.unwrap();
            let response = if is_post {
                let message: Value = serde_json::from_slice(&body).unwrap();
                let count = counts
                    .entry(message["method"].as_str().unwrap_or_default().to_owned())
                    .or_default();
                *count += 1;
                let injector = injector(&message, *count - 1, session.as_deref());
                injector.unwrap_or_else(|| response_text(&message, *count, session.as_deref()))
            } else {
                let injector =
                    injector(&json!({ "method": "GET", "id": last }), 0, session.as_deref());
                injector.unwrap_or_else(|| http("405 Method Not Allowed", "", ""))
            };
            let stalls = response.contains(STALLS);
            let _ = stream.write_all(&compress_body(response)).await;
            if stalls {
                stalled.push(stream);
            }
        }
    });
    format!("http://{address}/mcp")
}

fn mcp(url: String) -> Mcp {
    Mcp::new("web", McpKeys { url, ..McpKeys::default() }, None, &Supervisor::default()).unwrap()
}

async fn open(injector: FaultInjector) -> Result<Box<dyn Session>, String> {
    mcp(server(injector).await).open(&context("a")).await.map_err(|error| error.to_string())
}

/// Calls a tool of a server with a fault. The call must end before its timeout.
async fn call(injector: FaultInjector) -> ToolOutput {
    let session = open(injector).await.unwrap();
    let since = Instant::now();
    let output = session.call("echo", &Map::new()).await;
    assert!(since.elapsed().as_secs() < 20, "{output:?}");
    output
}

/// Defines a fault that answers every tool call with the given response.
macro_rules! to_call {
    ($message:ident, $count:ident, $session:ident, $answer:expr) => {
        |$message, $count, $session| {
            let _ = (&$message, $count, $session);
            ($message["method"] == "tools/call").then(|| $answer)
        }
    };
    ($message:ident, $answer:expr) => {
        to_call!($message, _count, _session, $answer)
    };
}

const EVENTS: &str = "content-type: text/event-stream\r\n";
const PACKED: &str = "content-encoding: gzip\r\n";
/// Header of a response after which the connection stays open.
const STALLS: &str = "connection: keep-alive";

#[tokio::test]
async fn invalid_http_response_fails_call_immediately() {
    let cases: &[(FaultInjector, &str)] = &[
        (to_call!(m, { http("202 Accepted", "", "") }), "without a response (HTTP 202 Accepted)"),
        (
            to_call!(m, {
                json_http("200 OK", &json!({ "jsonrpc": "2.0", "id": 9999, "result": {} }))
            }),
            "does not belong to the request",
        ),
        (
            to_call!(m, { http("200 OK", "content-type: application/json\r\n", "") }),
            "is empty (HTTP 200 OK)",
        ),
        (
            to_call!(m, { http("200 OK", "content-type: application/json\r\n", "{\"jsonrpc\":") }),
            "is not JSON",
        ),
        (
            to_call!(m, {
                let whole = json_http("200 OK", &call_response(m, "x"));
                whole.replace("content-length: ", "content-length: 5").replacen("}]}}", "", 1)
            }),
            "broke off",
        ),
        (
            to_call!(m, { http("500 Oh", "content-type: text/plain\r\n", "Traceback: boom") }),
            "HTTP 500 Internal Server Error: Traceback: boom",
        ),
        (
            to_call!(m, { http("200 OK", "content-type: text/html\r\n", "<html>login</html>") }),
            "responded with text/html",
        ),
        (
            to_call!(m, { http("200 OK", "content-encoding: br\r\n", "abc") }),
            "compressed with \"br\"",
        ),
        (to_call!(m, { http("200 OK", "content-encoding: x-gzip\r\n", "abc") }), "is damaged"),
        (
            to_call!(m, { http("500 Oh", PACKED, "out of memory") }),
            "HTTP 500 Internal Server Error: out of memory",
        ),
        (
            to_call!(m, { http("200 OK", EVENTS, "id: 1\nretry: 10\ndata: \n\n") }),
            "events ended without the response, and cannot be resumed (HTTP 405",
        ),
        (
            to_call!(m, {
                let error = json!({ "code": -32602, "message": "the tool is gone" });
                json_http(
                    "404 Not Found",
                    &json!({ "jsonrpc": "2.0", "id": m["id"], "error": error }),
                )
            }),
            "the tool is gone",
        ),
        (
            to_call!(m, { http("200 OK", EVENTS, "event: error\ndata: out of memory\n\n") }),
            "events ended without the response; the last event is \"out of memory\"",
        ),
        (
            to_call!(m, {
                http("200 OK", EVENTS, "data: {\"jsonrpc\":\"2.0\",\"id\":9999,\"result\":{}}\n\n")
            }),
            "events ended without the response",
        ),
        (
            to_call!(m, { http("200 OK", EVENTS, "data: {\"error\":\"Session not found\"}\n\n") }),
            "Session not found",
        ),
        (
            to_call!(m, {
                http(
                    "200 OK",
                    EVENTS,
                    &format!("data: {{\"jsonrpc\":\"2.0\",\"id\":{},\"result\":{{\n\n", m["id"]),
                )
            }),
            "is not JSON: EOF",
        ),
    ];
    for (injector, why) in cases {
        let output = call(*injector).await;
        assert!(output.is_error() && output.read().contains(why), "{why}: {output:?}");
    }
}

#[tokio::test]
async fn stalled_body_fails_call_before_timeout() {
    let stalls: FaultInjector = to_call!(m, {
        let whole = json_http("200 OK", &call_response(m, "x"));
        whole.replace("content-length: ", "content-length: 5").replace("connection: close", STALLS)
    });
    let output = tokio::time::timeout(4 * STALL_TIMEOUT, call(stalls))
        .await
        .expect("an answer before the deadline");
    assert!(output.is_error() && output.read().contains("nothing came for 5s after"), "{output:?}");
}

#[tokio::test]
async fn interrupted_events_are_resumed() {
    let resumes: FaultInjector = |m, _, _| match m["method"].as_str()? {
        "tools/call" => {
            Some(http("200 OK", EVENTS, &format!("id: {}\nretry: 10\ndata: \n\n", m["id"])))
        }
        "GET" if m["id"].is_i64() => {
            Some(http("200 OK", EVENTS, &format!("data: {}\n\n", call_response(m, "resumed"))))
        }
        _ => None,
    };
    assert_eq!(call(resumes).await, ToolOutput::text("resumed"));
}

#[tokio::test]
async fn unusual_http_responses_are_accepted() {
    let cases: &[(FaultInjector, &str)] = &[
        (
            to_call!(
                m,
                http(
                    "200 OK",
                    "content-type: text/plain\r\n",
                    &call_response(m, "plain").to_string()
                )
            ),
            "plain",
        ),
        (to_call!(m, http("200 OK", "", &call_response(m, "none").to_string())), "none"),
        (to_call!(m, json_http("200 OK", &json!([call_response(m, "batch")]))), "batch"),
        (to_call!(m, http("200 OK", PACKED, &call_response(m, "packed").to_string())), "packed"),
        (
            to_call!(m, {
                let events = format!("data: {}\n\n", call_response(m, "packed events"));
                http("200 OK", &format!("{EVENTS}{PACKED}"), &events)
            }),
            "packed events",
        ),
        (
            to_call!(
                m,
                http(
                    "200 OK",
                    "content-encoding: x-gzip\r\n",
                    &call_response(m, "unpacked").to_string()
                )
            ),
            "unpacked",
        ),
        (
            to_call!(
                m,
                http("200 OK", EVENTS, &format!("data: {}\n\n", call_response(m, "event")))
            ),
            "event",
        ),
        (
            to_call!(m, http("200 OK", EVENTS, &format!("data: {}", call_response(m, "no end")))),
            "no end",
        ),
        (
            to_call!(
                m,
                http(
                    "200 OK",
                    EVENTS,
                    &format!("event: response\ndata: {}\n\n", call_response(m, "named"))
                )
            ),
            "named",
        ),
        (to_call!(m, json_http("202 Accepted", &call_response(m, "taken"))), "taken"),
        (
            to_call!(m, {
                let body = call_response(m, "half \u{1}").to_string().replace("\\u0001", "\\ud83d");
                http("200 OK", EVENTS, &format!("data: {body}\n\n"))
            }),
            "half \u{fffd}",
        ),
        (
            to_call!(m, {
                let body = call_response(m, "text id").to_string();
                let id = format!("\"id\":{}", m["id"]);
                http(
                    "200 OK",
                    "content-type: application/json\r\n",
                    &body.replace(&id, &format!("\"id\":\"{}\"", m["id"])),
                )
            }),
            "text id",
        ),
    ];
    for (injector, text) in cases {
        let output = call(*injector).await;
        assert_eq!((output.error, output.read()), (None, (*text).to_owned()));
    }
    let rejected = call(to_call!(
        m,
        json_http(
            "400 Bad Request",
            &json!({ "jsonrpc": "2.0", "id": m["id"], "error": { "code": -32602, "message": "no city" } })
        )
    ))
    .await;
    assert_eq!(
        (rejected.error, rejected.read()),
        (Some(CallError::BadArguments), "no city".to_owned())
    );
}

#[tokio::test]
async fn expired_session_is_renewed_once() {
    let first: FaultInjector = |m, _, session| {
        let is_first = m["method"] == "tools/call" && session == Some("s-1");
        let error = json!({ "code": -32000, "message": "Bad Request: No valid session ID" });
        is_first.then(|| {
            json_http("400 Bad Request", &json!({ "jsonrpc": "2.0", "id": null, "error": error }))
        })
    };
    assert_eq!(call(first).await.read(), "in s-2");
    let first: FaultInjector = |m, _, session| {
        (m["method"] == "tools/call" && session == Some("s-1"))
            .then(|| http("404 Not Found", "", ""))
    };
    assert_eq!(call(first).await.read(), "in s-2");
    let always: FaultInjector =
        to_call!(m, { http("400 Bad Request", "content-type: text/plain\r\n", "never") });
    let output = call(always).await;
    assert!(output.read().contains("HTTP 400 Bad Request: never"), "{output:?}");
    let always: FaultInjector = to_call!(m, { http("404 Not Found", "", "no such session") });
    let output = call(always).await;
    assert!(output.read().contains("HTTP 404 Not Found: no such session"), "{output:?}");
}

#[tokio::test]
async fn closed_connection_falls_back_to_handshake() {
    let closes: FaultInjector =
        |m, _, _| (m["method"] == "server/discover").then(|| "HTTP/1.1\r\n\r\n".into());
    assert_eq!(call(closes).await.read(), "in s-1");
}

#[tokio::test]
async fn open_timeout_names_status_of_busy_server() {
    let busy: FaultInjector =
        |_, _, _| Some(http("503 Service Unavailable", "retry-after: 20\r\n", ""));
    let set =
        ToolSet::new(vec![Arc::new(mcp(server(busy).await))], Duration::from_secs(1)).unwrap();
    let error = set.open(&context("a")).await.unwrap_err().to_string();
    assert!(
        error
            .contains("not ready within 1s; the server responds with HTTP 503 Service Unavailable"),
        "{error}"
    );
}

#[tokio::test]
async fn busy_server_is_retried_after_delay() {
    let fail_once: FaultInjector = |m, count, _| {
        (m["method"] == "initialize" && count == 0)
            .then(|| http("503 Service Unavailable", "retry-after: 0.1\r\n", "busy"))
    };
    assert_eq!(call(fail_once).await.error, None);
    let calls: FaultInjector = to_call!(
        m,
        count,
        session,
        match count {
            0 => http("429 Too Many Requests", "retry-after: 0\r\n", "slow down"),
            _ => json_http("200 OK", &call_response(m, "later")),
        }
    );
    assert_eq!(call(calls).await.read(), "later");
    let long: FaultInjector =
        to_call!(m, { http("503 Service Unavailable", "retry-after: 3600\r\n", "busy") });
    assert!(call(long).await.read().contains("HTTP 503 Service Unavailable: busy"));
}

#[tokio::test]
async fn open_error_explains_unusable_server() {
    let cases: &[(FaultInjector, &[&str])] = &[
        (
            |_, _, _| {
                Some(http(
                    "401 Unauthorized",
                    "content-type: application/json\r\nwww-authenticate: Bearer\r\n",
                    "{\"error\":\"invalid_token\"}",
                ))
            },
            &["HTTP 401 Unauthorized", "invalid_token", "set key_env"],
        ),
        (
            |_, _, _| Some(http("307 Temporary Redirect", "location: /plain\r\n", "")),
            &["HTTP 307", "redirects to \"/plain\"", "set url"],
        ),
        (
            |_, _, _| Some(http("200 OK", "content-type: text/html\r\n", "<html>login</html>")),
            &["text/html", "<html>login", "`url`"],
        ),
        (
            |_, _, _| Some(http("503 Service Unavailable", "retry-after: 99\r\n", "busy")),
            &["HTTP 503 Service Unavailable: busy"],
        ),
        (|_, _, _| Some(http("404 Not Found", "", "")), &["HTTP 404 Not Found", "`url`"]),
        (
            |m, _, _| {
                (m["method"] == "initialize").then(|| {
                let error = json!({ "code": -32602, "message": "Unsupported protocol \
                                                                version", "data": { "supported": ["2024-11-05"] } });
                json_http("200 OK", &json!({ "jsonrpc": "2.0", "id": m["id"], "error": error }))
            })
            },
            &["Unsupported protocol version", "2024-11-05"],
        ),
        (
            |m, _, _| {
                (m["method"] == "tools/list")
                    .then(|| http("500 Oh", "content-type: text/plain\r\n", "boom"))
            },
            &["the server does not list its tools", "HTTP 500 Internal Server Error: boom"],
        ),
    ];
    for (injector, parts) in cases {
        let error = open(*injector).await.err().expect("it does not open");
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?}: {error}");
        assert!(!error.contains("rmcp") && !error.contains("::"), "no Rust types: {error}");
    }
}

async fn passes(chunks: &[&'static str], max_bytes: usize) -> usize {
    let chunks: Vec<std::io::Result<Bytes>> =
        chunks.iter().map(|text| Ok(Bytes::from(*text))).collect();
    let passed = limit_event_size(futures_util::stream::iter(chunks), max_bytes);
    passed.take_while(|chunk| future::ready(chunk.is_ok())).count().await
}

#[tokio::test]
async fn event_size_is_limited_but_stream_length_is_not() {
    assert_eq!(passes(&["data: 12\n\n", "data: 34\n", "\n", "data: 56\n\n"], 10).await, 4);
    assert_eq!(passes(&["data: 12\r\n\r\n", "data: 34\r", "\n\r\n"], 12).await, 3);
    assert_eq!(passes(&["data: 12\n", "data: 34\n", "\n"], 10).await, 1, "two lines are one event");
    assert_eq!(passes(&["data: 12\r\n", "data: 34\r\n", "\r\n"], 12).await, 1, "with CRLF, too");
    assert_eq!(passes(&["data: ", "12345"], 10).await, 1, "no end of a line is needed");
}

#[tokio::test]
async fn invalid_utf8_in_events_becomes_replacement_character() {
    assert_eq!(repair_events(&[b"data: caf\xe9 x\n\n"]).await, "data: caf\u{fffd} x\n\n");
    assert_eq!(
        repair_events(&[b"\xf0\x9f", b"\x98", b"\x80 \xc3", b"\xbc"]).await,
        "\u{1f600} \u{fc}"
    );
    assert_eq!(repair_events(&[b"a\xc3", b"\xffb\n"]).await, "a\u{fffd}\u{fffd}b\n");
}

async fn repair_events(chunks: &[&'static [u8]]) -> String {
    let chunks: Vec<std::io::Result<Bytes>> =
        chunks.iter().map(|chunk| Ok(Bytes::from_static(chunk))).collect();
    let read: Vec<Bytes> =
        replace_invalid_utf8(futures_util::stream::iter(chunks)).try_collect().await.unwrap();
    String::from_utf8(read.concat()).unwrap()
}
