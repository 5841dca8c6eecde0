//! Tests of requests from web pages, compressed bodies, wrong methods and unknown paths, without a
//! network.

use std::io::Write;

use axum::body::Body;
use axum::http::Request as HttpRequest;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::*;
use crate::GatewayOptions;
use crate::testing::TestGateway;

const CHAT: &str = "/v1/chat/completions";

fn body() -> Vec<u8> {
    json!({ "model": "tiny", "messages": [{ "role": "user", "content": "?" }] })
        .to_string()
        .into_bytes()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

async fn send(
    gateway: &Gateway,
    (method, path): (&str, &str),
    headers: &[(&str, &str)],
    body: Vec<u8>,
) -> (StatusCode, HeaderMap, Value) {
    let mut request = HttpRequest::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let length = body.len();
    let request = request.header("content-length", length).body(Body::from(body)).unwrap();
    let (parts, body) = crate::http::build_router(gateway, gateway.0.options.access.clone())
        .oneshot(request)
        .await
        .unwrap()
        .into_parts();
    let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    (parts.status, parts.headers, serde_json::from_slice(&bytes).unwrap_or_default())
}

const JSON: (&str, &str) = ("content-type", "application/json");

fn open(options: GatewayOptions) -> Gateway {
    let served = TestGateway::scripted(&["Yes."]);
    let models = served.gateway.models();
    Gateway::new(models, options)
}

#[tokio::test]
async fn gateway_without_keys_rejects_foreign_pages() {
    let gateway = open(GatewayOptions::default());
    let local = ("host", "127.0.0.1:8000");
    for (headers, status) in [
        (&[local, JSON][..], StatusCode::OK),
        (&[local, JSON, ("origin", "http://127.0.0.1:8000")], StatusCode::OK),
        (&[("host", "evil.example"), JSON], StatusCode::FORBIDDEN),
        (&[local, JSON, ("origin", "http://evil.example")], StatusCode::FORBIDDEN),
        (&[local, ("content-type", "text/plain")], StatusCode::UNSUPPORTED_MEDIA_TYPE),
        (&[local], StatusCode::UNSUPPORTED_MEDIA_TYPE),
    ] {
        let (found, _, response) = send(&gateway, ("POST", CHAT), headers, body()).await;
        assert_eq!(found, status, "{headers:?}: {response}");
        if status == StatusCode::FORBIDDEN {
            let message = response["error"]["message"].as_str().unwrap();
            assert!(message.contains("--allow-"), "{message}");
        }
    }
    // Requests of web pages that only read data are rejected as well, on every path.
    for path in ["/v1/models", "/metrics", "/health", "/nowhere", "/health_generate"] {
        let headers = [local, ("sec-fetch-site", "cross-site")];
        assert_eq!(
            send(&gateway, ("GET", path), &headers, vec![]).await.0,
            StatusCode::FORBIDDEN,
            "{path}"
        );
    }
    assert_eq!(gateway.0.metrics.calls.load(std::sync::atomic::Ordering::Relaxed), 2);
    // A gateway with keys relies on the keys instead.
    let keyed = open(GatewayOptions { keys: vec!["secret".into()], ..GatewayOptions::default() });
    let page = [
        ("host", "evil.example"),
        ("origin", "http://evil.example"),
        ("content-type", "text/plain"),
    ];
    assert_eq!(send(&keyed, ("POST", CHAT), &page, body()).await.0, StatusCode::UNAUTHORIZED);
    let page = [&page[..], &[("authorization", "Bearer secret")]].concat();
    assert_eq!(send(&keyed, ("POST", CHAT), &page, body()).await.0, StatusCode::OK);
}

#[tokio::test]
async fn attempt_key_admits_any_host() {
    let served = TestGateway::scripted(&["Yes."]);
    let key = format!("Bearer {}", served.session.key());
    for (key, status) in [(key.as_str(), StatusCode::OK), ("Bearer sk-test", StatusCode::FORBIDDEN)]
    {
        let headers = [("host", "host.docker.internal:8000"), ("authorization", key), JSON];
        assert_eq!(send(&served.gateway, ("POST", CHAT), &headers, body()).await.0, status);
    }
}

#[tokio::test]
async fn allowed_origin_can_read_every_response() {
    let origins = ["http://localhost:3000".to_owned()];
    let access = Access::new(&[], &origins).unwrap();
    let gateway = open(GatewayOptions { access, ..GatewayOptions::default() });
    let page = [("host", "127.0.0.1:8000"), ("origin", "http://localhost:3000"), JSON];
    let requested = [
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "content-type,authorization"),
    ];
    let (status, headers, _) =
        send(&gateway, ("OPTIONS", CHAT), &[&page[..], &requested].concat(), vec![]).await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    assert_eq!(headers["access-control-allow-headers"], "content-type,authorization");
    let streamed = json!({ "messages": [{ "role": "user", "content": "?" }], "stream": true })
        .to_string()
        .into_bytes();
    for (what, body, status) in [
        (("POST", CHAT), body(), StatusCode::OK),
        (("POST", CHAT), streamed, StatusCode::OK),
        (("POST", CHAT), b"{}".to_vec(), StatusCode::BAD_REQUEST),
        (("GET", "/nowhere"), vec![], StatusCode::NOT_FOUND),
        (("GET", CHAT), vec![], StatusCode::METHOD_NOT_ALLOWED),
    ] {
        let (found, headers, _) = send(&gateway, what, &page, body).await;
        assert_eq!(found, status, "{what:?}");
        assert_eq!(headers["access-control-allow-origin"], "http://localhost:3000", "{what:?}");
    }
}

#[tokio::test]
async fn compressed_bodies_are_decompressed_within_limit() {
    let gateway = open(GatewayOptions { body_bytes: 10_000, ..GatewayOptions::default() });
    let with = async |encoding: &str, body: Vec<u8>| {
        let (status, _, response) =
            send(&gateway, ("POST", CHAT), &[JSON, ("content-encoding", encoding)], body).await;
        (status, response["error"]["message"].as_str().unwrap_or_default().to_owned())
    };
    for (encoding, bytes) in
        [("gzip", gzip(&body())), ("X-GZIP", gzip(&body())), ("identity", body())]
    {
        assert_eq!(with(encoding, bytes).await.0, StatusCode::OK, "{encoding}");
    }
    let mut padded = body();
    padded.extend(vec![b' '; 100_000]);
    let packed = gzip(&padded);
    assert!(packed.len() < 1000);
    let (status, why) = with("gzip", packed).await;
    assert!(status == StatusCode::PAYLOAD_TOO_LARGE && why.contains("unpacked"), "{why}");
    let (status, why) = with("gzip", body()).await;
    assert!(status == StatusCode::BAD_REQUEST && why.contains("gzip"), "{why}");
    for unknown in ["br", "zstd", "gzip, gzip"] {
        let (status, why) = with(unknown, body()).await;
        assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE);
        assert!(why.contains(unknown) && why.contains("send the body with gzip"), "{why}");
    }
}

#[tokio::test]
async fn wrong_method_returns_405_with_allowed_methods() {
    let gateway = open(GatewayOptions::default());
    for (what, allowed) in [
        (("GET", CHAT), "POST"),
        (("PUT", "/v1/models"), "GET,HEAD"),
        (("DELETE", "/v1/messages"), "POST"),
        (("POST", "/v1/responses/x"), "GET,HEAD,DELETE"),
    ] {
        let (status, headers, response) = send(&gateway, what, &[JSON], vec![]).await;
        assert_eq!(
            (status, &headers["allow"]),
            (StatusCode::METHOD_NOT_ALLOWED, &allowed.parse().unwrap())
        );
        assert!(response["error"]["message"].as_str().unwrap().contains(what.0), "{response}");
    }
    assert_eq!(send(&gateway, ("GET", "/v1/nowhere"), &[], vec![]).await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn anthropic_clients_get_anthropic_format() {
    let gateway = open(GatewayOptions::default());
    let version = ("anthropic-version", "2023-06-01");
    let (status, headers, list) = send(&gateway, ("GET", "/v1/models"), &[version], vec![]).await;
    assert!(status == StatusCode::OK && headers.contains_key("request-id"));
    let model = json!({
        "type": "model", "id": "tiny", "display_name": "tiny", "created_at": "1970-01-01T00:00:01Z",
    });
    let want = json!({ "data": [model], "has_more": false, "first_id": "tiny", "last_id": "tiny" });
    assert_eq!(list, want);
    assert_eq!(send(&gateway, ("GET", "/v1/models/tiny"), &[version], vec![]).await.2, model);
    for (what, headers) in [
        (("GET", "/v1/models/other"), &[version][..]),
        (("GET", "/v1/nowhere"), &[version]),
        (("POST", "/v1/messages/batches"), &[JSON]),
    ] {
        let (status, _, response) = send(&gateway, what, headers, vec![]).await;
        assert_eq!(
            (status, &response["type"]),
            (StatusCode::NOT_FOUND, &json!("error")),
            "{what:?}"
        );
        assert_eq!(response["error"]["type"], "not_found_error");
    }
    let (_, _, response) = send(&gateway, ("GET", "/v1/models"), &[], vec![]).await;
    assert_eq!(response["object"], "list");
}

#[tokio::test]
async fn long_prompt_is_rejected_by_byte_count() {
    let served = TestGateway::scripted(&["Yes."]);
    // A token of this model is a byte, and its context has 4,096 tokens.
    let text = "x".repeat(1 << 20);
    let started = std::time::Instant::now();
    for (path, field, value) in [
        (CHAT, "messages", json!([{ "role": "user", "content": text }])),
        ("/v1/completions", "prompt", json!(text)),
    ] {
        let response = served.post(path, &json!({ field: value })).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST);
        let error = &response.json()["error"];
        assert_eq!(error["code"], "context_length_exceeded");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("are at least") && message.contains("bytes"), "{message}");
    }
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

#[tokio::test]
async fn agent_header_is_read_under_both_names() {
    let served = TestGateway::scripted(&["Yes."]);
    let key = format!("Bearer {}", served.session.key());
    for name in ["x-levade-agent", "x-dressage-agent"] {
        for (agent, expected) in [("default", StatusCode::OK), ("nobody", StatusCode::NOT_FOUND)] {
            let headers = [
                ("content-type", "application/json"),
                ("authorization", key.as_str()),
                (name, agent),
            ];
            let (status, ..) = send(&served.gateway, ("POST", CHAT), &headers, body()).await;
            assert_eq!(status, expected, "{name}: {agent}");
        }
    }
}

#[tokio::test]
async fn seat_of_agent_is_recorded_under_its_own_name() {
    let served = TestGateway::scripted(&["Yes.", "No."]);
    let key = format!("Bearer {}", served.session.key());
    for (agent, expected) in [
        ("default@2", StatusCode::OK),
        ("default@1", StatusCode::OK),
        ("default@0", StatusCode::NOT_FOUND),
        ("nobody@1", StatusCode::NOT_FOUND),
    ] {
        let headers = [
            ("content-type", "application/json"),
            ("authorization", key.as_str()),
            ("x-levade-agent", agent),
        ];
        let (status, ..) = send(&served.gateway, ("POST", CHAT), &headers, body()).await;
        assert_eq!(status, expected, "{agent}");
    }
    let reward = |agent: &str| {
        let (name, agent) = ("reward".to_owned(), Some(agent.to_owned()));
        served.session.add_reward(crate::Reward { value: 1.0, name, agent, turn: None })
    };
    reward("default@2").unwrap();
    assert!(reward("nobody@2").is_err());
    let recorded = served.session.close(std::time::Duration::from_secs(5)).await.0;
    let agents: Vec<&str> = recorded.calls.iter().map(|call| call.agent.as_str()).collect();
    assert_eq!(agents, ["default@2", "default@1"]);
}
