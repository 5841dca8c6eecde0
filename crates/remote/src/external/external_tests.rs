use serde_json::{Value, json};
use tokio::time::Instant;

use levade_text::{Message, ToolSpec};

use super::testing::*;
use super::*;

const SECRET: &str = "sk-very-secret";

fn options(servers: &[&TestServer]) -> ExternalOptions {
    ExternalOptions {
        endpoints: servers
            .iter()
            .map(|server| Endpoint {
                base_url: server.url.clone(),
                model: "m".into(),
                key_env: Some("TEST_KEY".into()),
            })
            .collect(),
        deadline: Duration::from_secs(20),
        ..ExternalOptions::default()
    }
}

fn external(options: ExternalOptions) -> External {
    External::with_environment(options, |_| Ok(SECRET.into())).unwrap()
}

fn external_for(servers: &[&TestServer]) -> External {
    external(options(servers))
}

fn question() -> ChatRequest {
    ChatRequest { messages: vec![Message::user("2 + 3?")], ..ChatRequest::default() }
}

async fn error_of(steps: Vec<Step>) -> ExternalError {
    let server = TestServer::new(vec![steps]).await;
    let error = external_for(&[&server]).chat(&question()).await.unwrap_err();
    assert_eq!(server.received_requests(), 1, "{error}");
    assert!(!format!("{error}{error:?}").contains(SECRET), "{error:?}");
    error
}

#[tokio::test]
async fn chat_sends_openai_request_and_parses_response() {
    let server = TestServer::new(vec![json_response("200 OK", "", &completion("5"))]).await;
    let tool = ToolSpec {
        name: "add".into(),
        description: String::new(),
        parameters: json!({"type": "object"}),
    };
    let request = ChatRequest { tools: vec![tool], ..question() };
    let response = external_for(&[&server]).chat(&request).await.unwrap();
    assert_eq!(
        (&*response.content, response.finish, &*response.model),
        ("5", Some(Finish::Stop), "m-1")
    );
    assert_eq!(response.usage.unwrap().prompt_tokens, 7);
    let seen = server.seen.lock().unwrap()[0].clone();
    assert!(seen.head.starts_with("post /v1/chat/completions http/1.1"), "{}", seen.head);
    assert!(seen.head.contains(&format!("authorization: bearer {SECRET}")));
    assert_eq!(
        (&seen.body["messages"][0]["content"], &seen.body["model"]),
        (&json!("2 + 3?"), &json!("m"))
    );
    assert_eq!(seen.body["tools"][0]["function"]["name"], "add");
}

#[tokio::test]
async fn streamed_chunks_are_independent_of_byte_boundaries() {
    let mut stream = b": hello\n\n".to_vec();
    stream.extend(delta_event(&json!({"role": "assistant", "content": ""}), None));
    stream.extend(delta_event(&json!({"reasoning_content": "süß"}), None));
    stream.extend(delta_event(&json!({"content": "Fü"}), None));
    stream.extend(delta_event(&json!({"content": "nf"}), None));
    for part in [
        json!({"index": 0, "id": "c", "function": {"name": "add", "arguments": "{\"a\""}}),
        json!({"index": 0, "function": {"arguments": ": 2}"}}),
    ] {
        stream.extend(delta_event(&json!({ "tool_calls": [part] }), None));
    }
    stream.extend(delta_event(&json!({}), Some("tool_calls")));
    stream.extend(
        b"data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 7, \"completion_tokens\": 9}}\r\n\r\n",
    );
    stream.extend(b"data: [DONE]\n\n");
    for size in [1, 7, 50, 10_000] {
        let mut steps = vec![events_head()];
        for chunk in stream.chunks(size) {
            steps.push(Step::Send(chunk.to_vec()));
            if size == 50 {
                steps.push(Step::Wait(Duration::from_millis(3)));
            }
        }
        let server = TestServer::new(vec![steps]).await;
        let mut response = external_for(&[&server]).stream(&question()).await.unwrap();
        let mut events = Vec::new();
        while let Some(event) = response.next().await {
            events.push(event.unwrap());
        }
        assert!(server.seen.lock().unwrap()[0].body["stream"] == true);
        let Some(ChatEvent::Finished(complete)) = events.pop() else { panic!("{events:?}") };
        assert_eq!((&*complete.content, &*complete.reasoning), ("Fünf", "süß"));
        assert_eq!(complete.finish, Some(Finish::ToolCalls));
        assert_eq!(complete.message().unwrap().tool_calls[0].arguments["a"], 2);
        assert_eq!(complete.usage.unwrap().completion_tokens, 9);
        let reasoning_event = ChatEvent::Reasoning("süß".into());
        let calls = [call_event(Some("add"), "{\"a\""), call_event(None, ": 2}")];
        assert_eq!(
            events,
            [&[reasoning_event, text_event("Fü"), text_event("nf")][..], &calls[..]].concat()
        );
    }
}

fn call_event(name: Option<&str>, arguments: &str) -> ChatEvent {
    ChatEvent::Call { index: 0, name: name.map(str::to_owned), arguments: arguments.into() }
}

fn text_event(text: &str) -> ChatEvent {
    ChatEvent::Content(text.into())
}

#[tokio::test]
async fn stream_accepts_missing_end_and_unstreamed_response() {
    let mut no_end = delta_event(&json!({"content": "5"}), Some("stop"));
    no_end.truncate(no_end.len() - 1);
    for steps in
        [vec![events_head(), Step::Send(no_end)], json_response("200 OK", "", &completion("5"))]
    {
        let server = TestServer::new(vec![steps]).await;
        let response =
            external_for(&[&server]).stream(&question()).await.unwrap().collect().await.unwrap();
        assert_eq!(response.content, "5");
    }
}

#[tokio::test]
async fn rejected_call_is_retried_after_requested_pause() {
    let busy = json!({"error": {"message": "slow down"}});
    let server = TestServer::new(vec![
        json_response("429 Too Many Requests", "retry-after: 1\r\n", &busy),
        json_response("503 Service Unavailable", "", &busy),
        // The connection ends without a response, or after its head.
        vec![],
        vec![events_head()],
        json_response("200 OK", "", &completion("5")),
    ])
    .await;
    let start = Instant::now();
    assert_eq!(external_for(&[&server]).chat(&question()).await.unwrap().content, "5");
    assert_eq!(server.received_requests(), 5);
    assert!(
        start.elapsed() >= Duration::from_millis(1000 + 500 + 1000 + 1000),
        "{:?}",
        start.elapsed()
    );
    // A wait that would end after the deadline is not started.
    let server =
        TestServer::new(vec![json_response("429 Too Many Requests", "retry-after: 90\r\n", &busy)])
            .await;
    let start = Instant::now();
    let error = external_for(&[&server]).chat(&question()).await.unwrap_err();
    let message = "slow down".into();
    let endpoint = format!("{}/v1/chat/completions", server.url);
    assert_eq!(error, ExternalError::Busy { endpoint, status: 429, message, retry_after: 90 });
    assert!(start.elapsed() < Duration::from_secs(5));
    // `Retry-After` can be an HTTP date.
    let at = std::time::SystemTime::now() + Duration::from_secs(100);
    let headers = format!("retry-after: {}\r\n", httpdate::fmt_http_date(at));
    let server =
        TestServer::new(vec![json_response("429 Too Many Requests", &headers, &busy)]).await;
    let error = external_for(&[&server]).chat(&question()).await.unwrap_err();
    assert!(matches!(error, ExternalError::Busy { retry_after: 90..=100, .. }), "{error}");
}

#[tokio::test]
async fn tries_limit_number_of_requests() {
    let server = TestServer::new(vec![json_response(
        "503 Service Unavailable",
        "",
        &json!({"detail": "loading"}),
    )])
    .await;
    let error = external(ExternalOptions { tries: 2, ..options(&[&server]) })
        .chat(&question())
        .await
        .unwrap_err();
    assert_eq!((error.code(), server.received_requests()), ("busy", 2));
    assert!(error.to_string().contains("loading"), "{error}");
}

#[tokio::test]
async fn busy_or_unreachable_endpoints_are_skipped() {
    let busy = TestServer::new(vec![json_response(
        "429 Too Many Requests",
        "retry-after: 60\r\n",
        &json!({}),
    )])
    .await;
    let good = TestServer::new(vec![json_response("200 OK", "", &completion("5"))]).await;
    let mut options = options(&[&busy, &busy, &good]);
    // No server listens on this port.
    let free =
        tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    options.endpoints[1].base_url = format!("http://127.0.0.1:{free}");
    let policy = external(options);
    let start = Instant::now();
    for _ in 0..3 {
        assert_eq!(policy.chat(&question()).await.unwrap().content, "5");
    }
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(
        (busy.received_requests(), good.received_requests()),
        (1, 3),
        "the busy one is left alone"
    );
}

#[tokio::test]
async fn calls_use_endpoint_with_fewest_calls() {
    let hangs = || vec![Step::Hang];
    let one = TestServer::new(vec![hangs()]).await;
    let other = TestServer::new(vec![hangs()]).await;
    let policy = external_for(&[&one, &other]);
    let mut calls = Vec::new();
    for num_calls in 1..=6 {
        let policy = policy.clone();
        calls.push(tokio::spawn(async move { policy.chat(&question()).await }));
        let requests_sent = async {
            while one.received_requests() + other.received_requests() < num_calls {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), requests_sent).await.unwrap();
    }
    assert_eq!((one.received_requests(), other.received_requests()), (3, 3));
    // Ended calls no longer count.
    for call in calls.drain(2..) {
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
    }
    assert_eq!(
        policy.0.servers.iter().map(|server| server.num_running()).collect::<Vec<_>>(),
        [1, 1]
    );
    calls.into_iter().for_each(|call| call.abort());
}

#[tokio::test]
async fn connect_error_names_unreachable_server() {
    let free =
        tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let endpoint =
        Endpoint { base_url: format!("http://127.0.0.1:{free}"), model: "m".into(), key_env: None };
    let options =
        ExternalOptions { endpoints: vec![endpoint], tries: 1, ..ExternalOptions::default() };
    let error = external(options).chat(&question()).await.unwrap_err();
    assert_eq!(error.code(), "connect");
    assert!(
        error.to_string().contains(&format!("127.0.0.1:{free}"))
            && error.to_string().contains("refused"),
        "{error}"
    );
}

#[tokio::test]
async fn permanent_errors_are_returned_without_retry() {
    let failed =
        error_of(json_status("500 Internal Server Error", json!({"error": {"message": "oh"}})))
            .await;
    assert!(
        failed.may_pass() && failed.to_string().contains("failed with status 500: oh"),
        "{failed}"
    );
    let rejected =
        error_of(json_status("400 Bad Request", json!({"error": "no such model"}))).await;
    assert!(
        !rejected.may_pass() && rejected.to_string().contains("status 400: no such model"),
        "{rejected}"
    );
    let wrong = json_status(
        "401 Unauthorized",
        json!({"error": {"message": format!("wrong key {SECRET}")}}),
    );
    let wrong = error_of(wrong).await.to_string();
    assert!(wrong.contains("wrong key [key]; check the environment variable TEST_KEY"), "{wrong}");
    let moved =
        vec![head("302 Found", "location: http://169.254.169.254/x\r\ncontent-length: 0\r\n")];
    let moved = error_of(moved).await.to_string();
    assert!(
        moved.contains("redirects to \"http://169.254.169.254/x\", which is not followed"),
        "{moved}"
    );
    let page = vec![
        head("200 OK", "content-type: text/html\r\n"),
        Step::Send(b"<html>Log in</html>".to_vec()),
    ];
    let page = error_of(page).await.to_string();
    assert!(page.contains("content type \"text/html\"") && page.contains("Log in"), "{page}");
    let nameless = error_of(vec![head("200 OK", ""), Step::Send(b"{}".to_vec())]).await.to_string();
    assert!(nameless.contains("no content type"), "{nameless}");
}

fn json_status(status: &str, body: Value) -> Vec<Step> {
    json_response(status, "", &body)
}

#[tokio::test]
async fn malformed_responses_are_reported_with_reason() {
    for (steps, code, why) in [
        (
            event_stream(b"data: {\"choices\": oops}\n\n"),
            "protocol",
            "starts with \"{\\\"choices\\\": oops}\"",
        ),
        (
            event_stream(b"data: {\"choices\": [{\"delta\": {\"content\": \"\xff\"}}]}\n\n"),
            "protocol",
            "not UTF-8",
        ),
        (event_stream(b"data: [DONE]\n\n"), "protocol", "no choice"),
        (event_stream(b"data: [1]\n\n"), "protocol", "invalid"),
        (
            event_stream(&delta_event(&json!({"content": "so fa"}), None)),
            "broken",
            "ended before the completion",
        ),
        (
            event_stream(b"data: {\"error\": {\"message\": \"out of memory\"}}\n\n"),
            "failed",
            "out of memory",
        ),
        (event_stream(b"<garbage>\0\0\n\n\n"), "broken", "ended before"),
        (json_response("200 OK", "", &json!({"choices": []})), "protocol", "no choice"),
        (json_response("200 OK", "", &json!({"choices": 7})), "protocol", "invalid type"),
        (json_response("200 OK", "", &json!("x")), "protocol", "invalid type"),
        (
            // The connection closes in the middle of the body.
            vec![
                head("200 OK", "content-type: application/json\r\ncontent-length: 99\r\n"),
                Step::Send(b"{\"ch".to_vec()),
            ],
            "broken",
            "after 4 bytes",
        ),
    ] {
        let error = error_of(steps).await;
        assert!(error.code() == code && error.to_string().contains(why), "{error:?}");
    }
}

fn event_stream(bytes: &[u8]) -> Vec<Step> {
    vec![events_head(), Step::Send(bytes.to_vec())]
}

#[tokio::test]
async fn response_sizes_are_bounded() {
    let huge = vec![
        head("200 OK", "content-type: application/json\r\n"),
        Step::Send(vec![b' '; 2 << 20]),
        Step::Hang,
    ];
    let huge = server_with(huge).await;
    let small = ExternalOptions { max_bytes: 1 << 20, ..options(&[&huge]) };
    let error = external(small).chat(&question()).await.unwrap_err();
    assert!(
        error.to_string().contains("the response of") && error.to_string().contains("`max_bytes`"),
        "{error}"
    );
    let endless = server_with(vec![events_head(), Step::Send(vec![b'x'; 3000]), Step::Hang]).await;
    let small = ExternalOptions { max_event_bytes: 2000, ..options(&[&endless]) };
    let error = external(small).chat(&question()).await.unwrap_err();
    assert!(
        error.to_string().contains("an event of") && error.to_string().contains("2000 bytes"),
        "{error}"
    );
    // The text of an error is bounded and truncated too.
    let error =
        error_of(vec![head("400 Bad Request", ""), Step::Send(vec![b'y'; 3000])]).await.to_string();
    assert!(error.len() < 700 && error.ends_with("yyy…"), "{error}");
}

async fn server_with(steps: Vec<Step>) -> TestServer {
    TestServer::new(vec![steps]).await
}

#[tokio::test]
async fn timeouts_name_their_operation() {
    let ms = Duration::from_millis;
    let hangs = TestServer::new(vec![vec![Step::Hang]]).await;
    let short = ExternalOptions { deadline: ms(300), ..options(&[&hangs]) };
    let error = external(short.clone()).chat(&question()).await.unwrap_err().to_string();
    assert!(
        error.starts_with("waited 300ms for the server to respond (http://localhost:"),
        "{error}"
    );
    let stops = TestServer::new(vec![vec![
        events_head(),
        Step::Send(delta_event(&json!({"content": "a"}), None)),
        Step::Hang,
    ]])
    .await;
    let silent = ExternalOptions { silence: ms(200), ..options(&[&stops]) };
    let mut stream = external(silent).stream(&question()).await.unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap(), ChatEvent::Content("a".into()));
    let error = stream.next().await.unwrap().unwrap_err().to_string();
    assert!(error.starts_with("waited 200ms for more of a response after "), "{error}");
    assert!(stream.next().await.is_none());
    // A server that keeps sending comments without end.
    let talk = [Step::Send(b": still here\n\n".to_vec()), Step::Wait(ms(50))];
    let talks = TestServer::new(vec![
        [vec![events_head()], talk.iter().cycle().take(80).cloned().collect()].concat(),
    ])
    .await;
    let error = external(ExternalOptions { deadline: ms(1000), ..options(&[&talks]) })
        .chat(&question())
        .await;
    assert!(error.unwrap_err().to_string().starts_with("waited 1s for more of a response"));
    let policy = external(ExternalOptions { max_running: 1, ..short });
    let question = question();
    let (first, second) = tokio::join!(policy.chat(&question), async {
        tokio::time::sleep(ms(20)).await;
        policy.chat(&question).await
    });
    assert!(first.is_err());
    // It gets the permit for its last 20 ms.
    assert!(second.unwrap_err().to_string().starts_with("waited 300ms for "));
}

#[tokio::test]
async fn rate_limits_and_concurrency_are_enforced() {
    let slow = [
        vec![Step::Wait(Duration::from_millis(150))],
        json_response("200 OK", "", &completion("5")),
    ]
    .concat();
    let server = TestServer::new(vec![slow]).await;
    let policy = external(ExternalOptions { max_running: 2, ..options(&[&server]) });
    let start = Instant::now();
    let question = question();
    let responses = futures_util::future::join_all((0..6).map(|_| policy.chat(&question))).await;
    assert!(responses.iter().all(Result::is_ok) && start.elapsed() >= Duration::from_millis(450));
    let limited = ExternalOptions {
        requests_per_minute: 2,
        deadline: Duration::from_secs(2),
        ..options(&[&server])
    };
    let policy = external(limited);
    for _ in 0..2 {
        policy.chat(&question).await.unwrap();
    }
    let error = policy.chat(&question).await.unwrap_err().to_string();
    assert!(error.starts_with("waited 2s for the limit requests_per_minute = 2"), "{error}");
    // The server reports 9 tokens, so three calls with an estimate of 1000 each fit into 2500.
    let limited = ExternalOptions {
        tokens_per_minute: 2500,
        deadline: Duration::from_secs(2),
        ..options(&[&server])
    };
    let policy = external(limited);
    let mut long = question.clone();
    long.params.max_tokens = Some(1000);
    for _ in 0..3 {
        policy.chat(&long).await.unwrap();
    }
    long.params.max_tokens = Some(5000);
    let error = policy.chat(&long).await.unwrap_err().to_string();
    assert!(error.contains("the limit tokens_per_minute = 2500"), "{error}");
}

#[tokio::test]
async fn tls_requires_trusted_certificate_authority() {
    let server = TestServer::with_tls(vec![json_response("200 OK", "", &completion("5"))]).await;
    let stranger = external(ExternalOptions { tries: 1, ..options(&[&server]) });
    let error = stranger.chat(&question()).await.unwrap_err();
    assert_eq!((error.code(), server.received_requests()), ("connect", 0));
    assert!(error.to_string().contains("certificate"), "{error}");
    let roots = concat!(env!("CARGO_MANIFEST_DIR"), "/src/external/testing/authority.pem");
    let known = external(ExternalOptions { roots: Some(roots.into()), ..options(&[&server]) });
    assert_eq!(known.chat(&question()).await.unwrap().content, "5");
    for file in ["/nowhere.pem", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")] {
        let options = ExternalOptions { roots: Some(file.into()), ..options(&[&server]) };
        let error =
            External::with_environment(options, |_| Ok("k".into())).unwrap_err().to_string();
        assert!(error.contains(file), "{error}");
    }
}

#[tokio::test]
async fn dropped_stream_frees_permit_and_debug_hides_key() {
    let server = TestServer::new(vec![vec![
        events_head(),
        Step::Send(delta_event(&json!({"content": "hi"}), None)),
        Step::Hang,
    ]])
    .await;
    let policy = external(ExternalOptions {
        max_running: 1,
        deadline: Duration::from_secs(5),
        ..options(&[&server])
    });
    for _ in 0..3 {
        let stream = policy.stream(&question()).await.unwrap();
        assert!(!format!("{stream:?}{policy:?}").contains(SECRET));
    }
    assert_eq!(server.received_requests(), 3);
    let missing =
        External::with_environment(options(&[&server]), |_| Err(std::env::VarError::NotPresent));
    assert_eq!(missing.unwrap_err().code(), "no_key");
    let none = External::new(ExternalOptions::default()).unwrap_err();
    assert!(none.to_string().contains("no endpoint"), "{none}");
}
