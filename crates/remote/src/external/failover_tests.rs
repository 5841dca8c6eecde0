use serde_json::{Value, json};
use tokio::time::Instant;

use levade_text::Message;

use super::testing::*;
use super::*;

fn question() -> ChatRequest {
    ChatRequest { messages: vec![Message::user("2 + 3?")], ..ChatRequest::default() }
}

/// Creates a policy over servers of different models, `m0`, `m1` and so on.
fn external_for(servers: &[&TestServer], deadline: Duration) -> External {
    let endpoints = servers
        .iter()
        .enumerate()
        .map(|(number, server)| Endpoint {
            base_url: server.url.clone(),
            model: format!("m{number}"),
            key_env: None,
        })
        .collect();
    External::new(ExternalOptions { endpoints, deadline, ..ExternalOptions::default() }).unwrap()
}

/// Returns responses of failing servers, each with a part of its error message.
fn failures() -> Vec<(&'static str, Vec<Step>)> {
    let html = head("200 OK", "content-type: text/html\r\n");
    let length = head("200 OK", "content-type: application/json\r\ncontent-length: 99\r\n");
    vec![
        ("status 500", json_status("500 Internal Server Error", json!({"error": "oh"}))),
        ("status 502", json_status("502 Bad Gateway", json!({}))),
        ("status 401", json_status("401 Unauthorized", json!({"error": "who"}))),
        ("status 403", json_status("403 Forbidden", json!({}))),
        ("status 404", json_status("404 Not Found", json!({"error": "no such model"}))),
        ("status 400", json_status("400 Bad Request", json!({"error": "too long"}))),
        ("redirects", vec![head("302 Found", "location: http://h/\r\ncontent-length: 0\r\n")]),
        ("text/html", vec![html, Step::Send(b"<html>Log in</html>".to_vec())]),
        ("cannot be used", json_status("200 OK", json!({"choices": 7}))),
        ("no choice", json_status("200 OK", json!({"choices": []}))),
        ("no choice", json_status("200 OK", json!({}))),
        ("status 200: oom", json_status("200 OK", json!({"error": {"message": "oom"}}))),
        ("neither content", choice_response(json!({"role": "assistant", "content": null}), "stop")),
        ("neither content", choice_response(json!({"role": "assistant"}), "stop")),
        (
            "ended with an error",
            choice_response(json!({"role": "assistant", "content": "4"}), "error"),
        ),
        (
            "ended with an error",
            vec![events_head(), Step::Send(delta_event(&json!({"content": "4"}), Some("error")))],
        ),
        ("broke off", vec![length, Step::Send(b"{\"ch".to_vec())]),
        ("broke off", vec![]),
        ("broke off", vec![Step::Send(b"SSH-2.0-OpenSSH_9.6\r\n".to_vec())]),
        ("broke off", vec![events_head(), Step::Send(b"<garbage>\n\n".to_vec())]),
        ("busy", json_response("429 Too Many Requests", "retry-after: 60\r\n", &json!({}))),
        ("waited", vec![Step::Hang]),
        ("waited", vec![length_of_nothing(), Step::Hang]),
        (
            "waited",
            [vec![Step::Wait(Duration::from_secs(25))], json_status("200 OK", completion("6"))]
                .concat(),
        ),
    ]
}

fn json_status(status: &str, body: Value) -> Vec<Step> {
    json_response(status, "", &body)
}

fn length_of_nothing() -> Step {
    head("200 OK", "content-type: application/json\r\ncontent-length: 99\r\n")
}

#[tokio::test]
async fn failed_call_moves_to_next_endpoint() {
    for (what, steps) in failures() {
        let bad = TestServer::new(vec![steps.clone()]).await;
        let good = TestServer::new(vec![json_response("200 OK", "", &completion("5"))]).await;
        let policy = external_for(&[&bad, &good], Duration::from_secs(4));
        let start = Instant::now();
        for _ in 0..6 {
            let response =
                policy.chat(&question()).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(response.content, "5", "{what}");
        }
        // The first call takes the hanging endpoint's half of the time; later calls avoid it.
        assert!(start.elapsed() < Duration::from_millis(3800), "{what}: {:?}", start.elapsed());
        // A connection that sends nothing is retried after a short wait.
        assert!(
            bad.received_requests() <= 2 && good.received_requests() == 6,
            "{what}: {} {}",
            bad.received_requests(),
            good.received_requests()
        );
        assert_eq!((model_of(&bad), model_of(&good)), (json!("m0"), json!("m1")), "{what}");
    }
}

fn model_of(server: &TestServer) -> Value {
    server.seen.lock().unwrap()[0].body["model"].clone()
}

#[tokio::test]
async fn concurrent_calls_succeed_despite_failing_endpoint() {
    for (what, steps) in failures() {
        let bad = TestServer::new(vec![steps]).await;
        let good = TestServer::new(vec![json_response("200 OK", "", &completion("5"))]).await;
        for servers in [[&bad, &good], [&good, &bad]] {
            let policy = external_for(&servers, Duration::from_secs(4));
            let question = question();
            let responses =
                futures_util::future::join_all((0..6).map(|_| policy.chat(&question))).await;
            assert!(
                responses.iter().all(|response| response.as_ref().is_ok_and(|r| r.content == "5")),
                "{what}"
            );
        }
    }
}

#[tokio::test]
async fn concurrent_calls_use_preferred_model_unless_it_fails() {
    let first = TestServer::new(vec![slow("5").concat()]).await;
    let second = TestServer::new(vec![slow("6").concat()]).await;
    let policy = external_for(&[&first, &second], Duration::from_secs(4));
    let question = question();
    let responses = futures_util::future::join_all((0..8).map(|_| policy.chat(&question))).await;
    assert!(responses.iter().all(|response| response.as_ref().is_ok_and(|r| r.content == "5")));
    assert_eq!((first.received_requests(), second.received_requests()), (8, 0));

    // Servers of the same model share the calls.
    let endpoints = vec![endpoint_of(&first), endpoint_of(&second)];
    let policy =
        External::new(ExternalOptions { endpoints, ..ExternalOptions::default() }).unwrap();
    let responses = futures_util::future::join_all((0..8).map(|_| policy.chat(&question))).await;
    assert!(responses.iter().all(Result::is_ok));
    assert_eq!((first.received_requests(), second.received_requests()), (12, 4));
}

fn slow(text: &str) -> [Vec<Step>; 2] {
    [vec![Step::Wait(Duration::from_millis(50))], json_response("200 OK", "", &completion(text))]
}

fn endpoint_of(server: &TestServer) -> Endpoint {
    Endpoint { base_url: server.url.clone(), model: "m".into(), key_env: None }
}

#[tokio::test]
async fn stream_fails_over_only_before_first_chunk() {
    for (what, steps) in failures() {
        let bad = TestServer::new(vec![steps]).await;
        let mut stream = delta_event(&json!({"content": "5"}), Some("stop"));
        stream.extend(b"data: [DONE]\n\n");
        let good = TestServer::new(vec![vec![events_head(), Step::Send(stream)]]).await;
        let policy = external_for(&[&bad, &good], Duration::from_secs(4));
        let stream =
            policy.stream(&question()).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(stream.collect().await.unwrap().content, "5", "{what}");
    }
    // After the first chunk, the caller gets the failure, and the next call uses another endpoint.
    let breaks = TestServer::new(vec![vec![
        events_head(),
        Step::Send(delta_event(&json!({"content": "so"}), None)),
    ]])
    .await;
    let good = TestServer::new(vec![json_response("200 OK", "", &completion("5"))]).await;
    let policy = external_for(&[&breaks, &good], Duration::from_secs(5));
    let stream = policy.stream(&question()).await.unwrap();
    assert_eq!(stream.collect().await.unwrap_err().code(), "broken");
    assert_eq!(policy.stream(&question()).await.unwrap().collect().await.unwrap().content, "5");
    assert_eq!((breaks.received_requests(), good.received_requests()), (1, 1));
}

#[tokio::test]
async fn stream_ending_with_error_is_failure() {
    let chunks =
        [delta_event(&json!({"content": "so"}), None), delta_event(&json!({}), Some("error"))];
    let [first, last] = chunks.map(Step::Send);
    let steps = vec![events_head(), first, Step::Wait(Duration::from_millis(100)), last];
    let fails = TestServer::new(vec![steps]).await;
    let good = TestServer::new(vec![json_response("200 OK", "", &completion("5"))]).await;
    let policy = external_for(&[&fails, &good], Duration::from_secs(5));
    let error = policy.stream(&question()).await.unwrap().collect().await.unwrap_err();
    assert!(error.to_string().contains("ended with an error"), "{error}");
    assert_eq!(policy.chat(&question()).await.unwrap().content, "5", "the endpoint is avoided");
    assert_eq!((fails.received_requests(), good.received_requests()), (1, 1));
}

#[tokio::test]
async fn response_keeps_unknown_finish_reason() {
    let choice = json!({"message": {"content": "5"}, "finish_reason": "eos"});
    let server =
        TestServer::new(vec![json_response("200 OK", "", &json!({ "choices": [choice] }))]).await;
    let response =
        external_for(&[&server], Duration::from_secs(5)).chat(&question()).await.unwrap();
    assert_eq!((&*response.content, response.finish), ("5", Some(Finish::Other("eos".into()))));
}

#[tokio::test]
async fn usage_replaces_estimate_in_token_limit() {
    let mut completion = completion("5");
    completion["usage"] = json!({ "prompt_tokens": 700, "completion_tokens": 200 });
    let server = TestServer::new(vec![json_response("200 OK", "", &completion)]).await;
    let endpoints =
        vec![Endpoint { base_url: server.url.clone(), model: "m".into(), key_env: None }];
    let options =
        ExternalOptions { endpoints, tokens_per_minute: 6000, ..ExternalOptions::default() };
    let policy = External::new(options).unwrap();
    let mut question = question();
    question.params.max_tokens = Some(1000);
    policy.chat(&question).await.unwrap();
    // 5100 of 6000 are left, and 100 flow back per second.
    let wait = policy.0.tokens.as_ref().unwrap().take(5700.0);
    assert!((4.0..=6.0).contains(&wait.as_secs_f64()), "{wait:?}");
}

#[tokio::test]
async fn each_retry_counts_toward_request_limit() {
    let bad = TestServer::new(vec![json_response("500 Oh", "", &json!({}))]).await;
    let good = TestServer::new(vec![json_response("200 OK", "", &completion("5"))]).await;
    let endpoints = vec![endpoint_of(&bad), endpoint_of(&good)];
    let options =
        ExternalOptions { endpoints, requests_per_minute: 6, ..ExternalOptions::default() };
    let policy = External::new(options).unwrap();
    policy.chat(&question()).await.unwrap();
    // 4 of 6 are left, and one flows back every 10 s.
    let wait = policy.0.requests.as_ref().unwrap().take(6.0);
    assert!((15.0..=20.0).contains(&wait.as_secs_f64()), "{wait:?}");
}

/// Creates servers that do not exist, and a state in which each was called once.
fn called_servers(names: &[&str]) -> (Vec<EndpointServer>, FailoverState) {
    let servers = names
        .iter()
        .map(|name| {
            let endpoint =
                Endpoint { base_url: format!("http://{name}"), model: "m".into(), key_env: None };
            EndpointServer::new(&endpoint, |_| Err(std::env::VarError::NotPresent)).unwrap()
        })
        .collect::<Vec<_>>();
    let mut state = FailoverState::new(names.len());
    (0..names.len()).for_each(|number| state.record_request(number));
    (servers, state)
}

#[tokio::test]
async fn failure_avoids_endpoint_only_if_at_fault() {
    let (servers, _) = called_servers(&["a"]);
    let endpoint = || servers[0].name.clone();
    for (error, is_paused, is_avoided) in [
        // The endpoint has set its pause already.
        (
            ExternalError::Busy {
                endpoint: endpoint(),
                status: 429,
                message: message(),
                retry_after: 3,
            },
            false,
            false,
        ),
        (ExternalError::Connect { endpoint: endpoint(), why: message() }, true, false),
        (ExternalError::Invalid(message()), false, false),
        (
            ExternalError::Rejected { endpoint: endpoint(), status: 400, message: message() },
            false,
            false,
        ),
        (
            ExternalError::Rejected { endpoint: endpoint(), status: 404, message: message() },
            false,
            true,
        ),
        (deadline_error("http://a, http://b".into()), false, false),
        (deadline_error(endpoint()), false, true),
        (ExternalError::Protocol { endpoint: endpoint(), why: message() }, false, true),
    ] {
        let (servers, mut state) = called_servers(&["a"]);
        let what = error.to_string();
        state.record_failure(&servers, 0, error);
        let (pause, has_failed, _) = servers[0].rank();
        assert_eq!((!pause.is_zero(), has_failed), (is_paused, is_avoided), "{what}");
    }
}

fn message() -> String {
    "m".to_owned()
}

fn deadline_error(endpoint: String) -> ExternalError {
    ExternalError::Deadline { endpoint, waited: Duration::from_secs(1), what: "a response".into() }
}

#[tokio::test]
async fn error_names_uncalled_endpoint_and_its_pause() {
    let (servers, mut state) = called_servers(&["a", "b"]);
    state.record_failure(
        &servers,
        0,
        ExternalError::Protocol { endpoint: servers[0].name.clone(), why: "no choice".into() },
    );
    servers[1].note_rejection(Some(Duration::from_secs(90)));
    let error = state.into_error(&servers, Duration::from_secs(7));
    assert_eq!(error.failures().len(), 2);
    let text = error.to_string();
    assert!(
        text.contains("waited 7s for an endpoint that can be called again, in 90s (http://b"),
        "{text}"
    );
}

#[tokio::test]
async fn pause_of_uncalled_endpoint_is_reported_with_its_cause() {
    let (servers, mut state) = called_servers(&["a"]);
    let endpoint = servers[0].name.clone();
    state.record_failure(&servers, 0, ExternalError::Connect { endpoint, why: "refused".into() });
    // A wait is no cause, so the earlier failure stays the cause.
    let waited = Duration::from_secs(1);
    let what = servers[0].pause_text();
    assert!(what.contains("to end, after a failure: cannot connect to http://a"), "{what}");
    state.record_failure(
        &servers,
        0,
        ExternalError::Deadline { endpoint: "x".into(), waited, what },
    );
    // Another call finds the endpoint in its pause.
    let text = FailoverState::new(1).into_error(&servers, Duration::from_secs(7)).to_string();
    assert!(text.contains("called again, in"), "{text}");
    assert_eq!(text.matches("after a failure").count(), 1, "{text}");
    assert!(text.contains("cannot connect to http://a") && text.contains("refused"), "{text}");
    servers[0].note_success();
    assert_eq!(servers[0].describe_last_failure(), "");
}

#[tokio::test]
async fn error_lists_failure_of_each_endpoint() {
    let oh = TestServer::new(vec![json_status("500 Oh", json!({"error": "broken GPU"}))]).await;
    let who = TestServer::new(vec![json_status("401 Who", json!({"error": "no key"}))]).await;
    let hangs = TestServer::new(vec![vec![Step::Hang]]).await;
    let error = external_for(&[&oh, &who, &hangs], Duration::from_secs(1))
        .chat(&question())
        .await
        .unwrap_err();
    assert_eq!((error.code(), error.failures().len(), error.may_pass()), ("all", 3, true));
    let text = error.to_string();
    for part in [
        "broken GPU",
        "no key",
        "waited 1s for the server to respond",
        &oh.url,
        &who.url,
        &hangs.url,
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(
        (oh.received_requests(), who.received_requests(), hangs.received_requests()),
        (1, 1, 1)
    );
}

#[tokio::test]
async fn rejected_request_is_sent_once_per_endpoint() {
    let one = TestServer::new(vec![rejection()]).await;
    let other = TestServer::new(vec![rejection()]).await;
    let policy = external_for(&[&one, &other], Duration::from_secs(20));
    let start = Instant::now();
    let error = policy.chat(&question()).await.unwrap_err();
    assert!(!error.may_pass() && error.failures().len() == 2, "{error}");
    assert_eq!((one.received_requests(), other.received_requests()), (1, 1));
    assert!(start.elapsed() < Duration::from_secs(2));
    // The request is at fault, so no endpoint is avoided.
    assert!(policy.0.servers.iter().all(|server| server.rank() == (Duration::ZERO, false, 0)));
}

fn rejection() -> Vec<Step> {
    json_response("400 Bad Request", "", &json!({"error": "too long"}))
}

#[tokio::test]
async fn slow_endpoint_completes_call_if_next_endpoint_fails() {
    let slow = [
        vec![Step::Wait(Duration::from_millis(1500))],
        json_response("200 OK", "", &completion("5")),
    ];
    let slow = TestServer::new(vec![slow.concat()]).await;
    let bad = TestServer::new(vec![json_response("500 Oh", "", &json!({}))]).await;
    // The first endpoint's half of the time ends after a second; the other endpoint fails then.
    let policy = external_for(&[&slow, &bad], Duration::from_secs(2));
    assert_eq!(policy.chat(&question()).await.unwrap().content, "5");
    assert_eq!((slow.received_requests(), bad.received_requests()), (1, 1));
}

#[tokio::test]
async fn response_without_text_fails_over() {
    let call =
        json!([{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
    for (why, steps) in [
        (
            "withheld",
            choice_response(json!({"role": "assistant", "content": "4"}), "content_filter"),
        ),
        (
            "is empty",
            choice_response(
                json!({"role": "assistant", "content": null, "tool_calls": call}),
                "tool_calls",
            ),
        ),
    ] {
        let bad = TestServer::new(vec![steps]).await;
        let good = TestServer::new(vec![json_response("200 OK", "", &completion("5"))]).await;
        let policy = external_for(&[&bad, &good], Duration::from_secs(5));
        assert_eq!(policy.chat(&question()).await.unwrap().content, "5", "{why}");
        let error = external_for(&[&bad, &bad], Duration::from_secs(5))
            .chat(&question())
            .await
            .unwrap_err();
        assert!(error.failures().len() == 2 && error.to_string().contains(why), "{error}");
    }
}

fn choice_response(message: Value, finish: &str) -> Vec<Step> {
    let choice = json!({"index": 0, "message": message, "finish_reason": finish});
    json_response("200 OK", "", &json!({ "choices": [choice] }))
}

#[tokio::test]
async fn empty_text_fails_complete_response() {
    let empty = TestServer::new(vec![json_response("200 OK", "", &completion(" \n"))]).await;
    let good = TestServer::new(vec![json_response("200 OK", "", &completion("5"))]).await;
    assert_eq!(
        external_for(&[&empty, &good], Duration::from_secs(5))
            .chat(&question())
            .await
            .unwrap()
            .content,
        "5"
    );
    // An assistant message of a policy may be empty.
    let stream = external_for(&[&empty], Duration::from_secs(5)).stream(&question()).await.unwrap();
    assert_eq!(stream.collect().await.unwrap().content, " \n");
    // A reply that used all its tokens for reasoning is no failure of its endpoint.
    let truncated = json!({"choices": [{"message": {"content": null}, "finish_reason": "length"}]});
    let truncated = TestServer::new(vec![json_response("200 OK", "", &truncated)]).await;
    let response =
        external_for(&[&truncated, &good], Duration::from_secs(5)).chat(&question()).await.unwrap();
    assert_eq!((&*response.content, response.finish), ("", Some(Finish::Length)));
}
