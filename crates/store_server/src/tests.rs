//! Tests of the server over a socket.

use std::sync::Arc;
use std::time::{Duration, Instant};

use levade_http::Access;
use levade_store::open_rollouts;
use levade_store::rollouts::ManualClock;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::{ServerOptions, serve};

/// A running server.
pub(crate) struct Server {
    address: String,
    pub clock: Arc<ManualClock>,
    stop: Option<oneshot::Sender<()>>,
    served: JoinHandle<std::io::Result<()>>,
}

/// A response: status, head in lower case, and body.
pub(crate) struct Response {
    pub status: u16,
    head: String,
    pub body: Vec<u8>,
}

impl Response {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }
}

pub(crate) async fn server(options: ServerOptions) -> Server {
    let clock = Arc::new(ManualClock::new(1000.0));
    let store = open_rollouts("memory:", clock.clone()).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async {
        let _ = stopped.await;
    };
    let served = tokio::spawn(serve(store, options, listener, stopped));
    Server { address, clock, stop: Some(stop), served }
}

pub(crate) fn without_debounce() -> ServerOptions {
    ServerOptions { scan_debounce: Duration::ZERO, ..ServerOptions::default() }
}

impl Server {
    pub async fn send(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Response {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        let is_set = |name: &str| headers.iter().any(|header| header.starts_with(name));
        if !is_set("host:") {
            head += &format!("host: {}\r\n", self.address);
        }
        if !body.is_empty() {
            head += &format!("content-length: {}\r\n", body.len());
            if !is_set("content-type:") {
                head += "content-type: application/json\r\n";
            }
        }
        for header in headers {
            head += &format!("{header}\r\n");
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
        stream.write_all(body).await.unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        let end = all.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let head = String::from_utf8_lossy(&all[..end]).to_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut body = all.split_off(end + 4);
        if head.contains("transfer-encoding: chunked") {
            body = unchunked(&body);
        }
        Response { status, head, body }
    }

    pub async fn get(&self, path: &str) -> Response {
        self.send("GET", &format!("/v1/agl{path}"), &[], b"").await
    }

    pub async fn post(&self, path: &str, body: Value) -> Response {
        self.send("POST", &format!("/v1/agl{path}"), &[], body.to_string().as_bytes()).await
    }
}

fn unchunked(mut body: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some(end) = body.windows(2).position(|window| window == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&body[..end]).unwrap(), 16).unwrap();
        all.extend_from_slice(&body[end + 2..end + 2 + size]);
        body = &body[end + size + 4..];
    }
    all
}

#[tokio::test]
async fn rollout_lives_from_enqueue_to_success() {
    let server = server(without_debounce()).await;
    let input = json!({ "q": 1, "x": 12345678901234567890123_u128.to_string() });
    let created =
        server.post("/queues/rollouts/enqueue", json!({ "rollouts": [{ "input": input }] })).await;
    assert_eq!(created.status, 201);
    let rollout = &created.json()[0];
    assert_eq!((&rollout["status"], &rollout["attempt"]), (&json!("queuing"), &Value::Null));
    assert!(rollout.get("attempt").is_none() && rollout["metadata"] == json!({}));
    let leased = server.send("POST", "/v1/agl/queues/rollouts/dequeue", &[], b"").await.json();
    let id = leased[0]["rollout_id"].as_str().unwrap();
    assert_eq!(
        (&leased[0]["attempt"]["sequence_id"], &leased[0]["status"]),
        (&json!(1), &json!("preparing"))
    );
    assert_eq!(
        server.post("/queues/rollouts/dequeue", json!({ "limit": 0 })).await.json(),
        json!([])
    );
    let updated = server
        .post(
            &format!("/rollouts/{id}/attempts/latest"),
            json!({ "status": "succeeded", "worker_id": "w" }),
        )
        .await;
    assert_eq!((updated.status, &updated.json()["end_time"]), (200, &json!(1000.0)));
    let finished =
        server.post("/waits/rollouts", json!({ "rollout_ids": [id, "ro-none"] })).await.json();
    assert_eq!(
        (finished.as_array().unwrap().len(), &finished[0]["status"]),
        (1, &json!("succeeded"))
    );
    let page = server
        .get(&format!("/rollouts?status_in=succeeded&rollout_id_in={id}&limit=2"))
        .await
        .json();
    assert_eq!(page["items"][0]["input"], input);
    assert_eq!(
        (&page["limit"], &page["offset"], &page["total"]),
        (&json!(2), &json!(0), &json!(1))
    );
    assert_eq!(server.get("/workers/w").await.json()["status"], "idle");
    assert_eq!(server.get("/statistics").await.json()["total_attempts"], 1);
}

#[tokio::test]
async fn errors_have_status_and_text_of_the_protocol() {
    let server = server(without_debounce()).await;
    for (method, path, body, status, text) in [
        ("GET", "/rollouts/ro-none", "", 404, "Rollout ro-none not found"),
        ("POST", "/rollouts/ro-none", "{}", 404, "Item does not exist"),
        ("POST", "/rollouts/ro-none/attempts", "", 404, "Rollout ro-none not found"),
        (
            "POST",
            "/rollouts/x",
            r#"{"status":null}"#,
            400,
            "status is invalid; it cannot be a null value.",
        ),
        (
            "POST",
            "/rollouts/x/attempts/y",
            r#"{"metadata":null}"#,
            400,
            "it cannot be a null value.",
        ),
        ("POST", "/workers/w", r#"{"heartbeat_stats":null}"#, 400, "it cannot be a null value."),
        ("GET", "/rollouts?limit=0", "", 400, "Limit must be greater than 0 or -1 for no limit"),
        ("GET", "/rollouts?offset=-1", "", 400, "Offset must be"),
        (
            "GET",
            "/rollouts?sort_by=zz",
            "",
            400,
            "Invalid sort_by: zz, allowed fields are: rollout_id, input",
        ),
        ("GET", "/rollouts?sort_order=zz", "", 422, "zz"),
        ("GET", "/rollouts?status_in=zz", "", 422, "zz"),
        ("GET", "/rollouts?limit=a", "", 422, "int_parsing"),
        ("POST", "/rollouts/search", "", 422, "missing"),
        ("POST", "/rollouts/search", "{", 422, "json_invalid"),
        ("POST", "/rollouts", "{}", 422, "input"),
        ("POST", "/rollouts", r#"{"input":1,"mode":"zz"}"#, 422, "mode"),
        ("POST", "/rollouts", r#"{"input":1,"config":{"max_attempts":0}}"#, 422, "max_attempts"),
        ("POST", "/rollouts", r#"{"input":1,"metadata":[]}"#, 422, "metadata"),
        ("GET", "/spans", "", 422, "rollout_id"),
        ("POST", "/resources", r#"{"a":{"resource_type":"zz"}}"#, 422, "union_tag_invalid"),
        ("PUT", "/rollouts", "{}", 405, "Method Not Allowed"),
        ("GET", "/nothing", "", 404, "Not Found"),
    ] {
        let response = server.send(method, &format!("/v1/agl{path}"), &[], body.as_bytes()).await;
        let text_of = response.json().to_string();
        assert_eq!(response.status, status, "{method} {path} {body}: {text_of}");
        assert!(text_of.contains(text), "{method} {path} {body}: {text_of}");
        assert!(response.head.contains("content-type: application/json"), "{}", response.head);
    }
    assert_eq!(server.get("/workers/none").await.json(), Value::Null);
    assert_eq!(server.get("/rollouts/ro-none/attempts").await.json()["total"], 0);
    assert_eq!(
        server.post("/rollouts", json!({ "input": null })).await.json()["input"],
        Value::Null
    );
}

#[tokio::test]
async fn clients_see_no_announcement_of_a_run() {
    let server = server(without_debounce()).await;
    let prompt = json!({ "resource_type": "prompt_template", "template": "x", "engine": "jinja" });
    let put = server.post("/resources", json!({ "p": prompt })).await.json();
    let announcement = r#"["run/a", {"levade_runner_protocol":1,"recipe":""}]"#;
    let path = "/v1/rollouts/put_resources";
    assert_eq!(server.send("POST", path, &[], announcement.as_bytes()).await.status, 200);
    let listed = server.get("/resources").await.json();
    assert_eq!((&listed["total"], &listed["items"]), (&json!(1), &json!([put.clone()])));
    assert_eq!(server.get("/resources/latest").await.json(), put);
}

#[tokio::test]
async fn request_applies_exceeded_try_timeout() {
    let server = server(without_debounce()).await;
    let config =
        json!({ "timeout_seconds": 5.0, "max_attempts": 2, "retry_condition": ["timeout"] });
    let started = server
        .post("/rollouts", json!({ "input": 1, "config": config, "worker_id": "w" }))
        .await
        .json();
    let path = format!("/rollouts/{}", started["rollout_id"].as_str().unwrap());
    server.clock.advance(6.0);
    let found = server.get(&path).await.json();
    assert_eq!(
        (&found["status"], &found["attempt"]["status"]),
        (&json!("requeuing"), &json!("timeout"))
    );
    assert_eq!(server.get("/workers/w").await.json()["status"], "unknown");
}

#[tokio::test]
async fn traces_are_accepted_as_json_and_gzip_with_partial_success() {
    use std::io::Write;
    let server = server(without_debounce()).await;
    let started = server.post("/rollouts", json!({ "input": 1 })).await.json();
    let trace_id = "0".repeat(31) + "1";
    let names = [
        ("agentlightning.rollout_id", &started["rollout_id"]),
        ("agentlightning.attempt_id", &started["attempt"]["attempt_id"]),
    ]
    .map(|(key, value)| json!({ "key": key, "value": { "stringValue": value } }));
    let [first, second] = ["0000000000000001", "0000000000000002"].map(
        |id| json!({ "traceId": trace_id, "spanId": id, "name": "call", "attributes": names }),
    );
    let unnamed = json!({ "traceId": trace_id, "spanId": "0000000000000009", "name": "x" });
    let all = [first, second, unnamed];
    let body = json!({ "resourceSpans": [{ "scopeSpans": [{ "spans": all }] }] }).to_string();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(body.as_bytes()).unwrap();
    let packed = packed.finish().unwrap();
    let response = server.send("POST", "/v1/traces", &["content-encoding: gzip"], &packed).await;
    assert_eq!(response.status, 200);
    assert_eq!(
        response.json()["partialSuccess"]["rejectedSpans"].to_string().trim_matches('"'),
        "1"
    );
    let spans = format!("/spans?rollout_id={}", started["rollout_id"].as_str().unwrap());
    let page = server.get(&spans).await.json();
    assert_eq!((&page["total"], &page["items"][1]["sequence_id"]), (&json!(2), &json!(2)));
    let text = server
        .send("POST", "/v1/traces", &["content-type: text/plain", "x-api-key: a"], b"x")
        .await;
    assert!(text.status == 415 || text.status == 400, "{}", text.status);
    let wrong =
        server.send("POST", "/v1/traces", &["content-type: application/x-protobuf"], b"\xff").await;
    assert_eq!(wrong.status, 400);
    assert!(String::from_utf8_lossy(&wrong.body).contains("Unable to parse OTLP payload"));
}

#[tokio::test]
async fn api_key_is_accepted_in_three_headers() {
    let server = server(ServerOptions { keys: vec!["secret".into()], ..without_debounce() }).await;
    assert_eq!(server.get("/health").await.status, 200);
    assert_eq!(server.get("/rollouts").await.status, 401);
    for (header, status) in [
        ("authorization: Bearer secret", 200),
        ("x-api-key: secret", 200),
        // levade:secret
        ("authorization: Basic bGV2YWRlOnNlY3JldA==", 200),
        ("authorization: Bearer wrong", 401),
        ("authorization: Basic bGV2YWRl", 401),
    ] {
        assert_eq!(
            server.send("GET", "/v1/agl/rollouts", &[header], b"").await.status,
            status,
            "{header}"
        );
    }
}

#[tokio::test]
async fn foreign_pages_are_rejected_and_permitted_origins_get_cors() {
    let origin = "http://localhost:3000".to_owned();
    let access = Access::new(&[], std::slice::from_ref(&origin)).unwrap();
    let server =
        server(ServerOptions { access, cors_origins: vec![origin], ..without_debounce() }).await;
    let path = "/v1/agl/rollouts";
    for (headers, status) in [
        (vec!["host: evil.example"], 403),
        (vec!["origin: http://evil.example"], 403),
        (vec!["origin: http://localhost:3000"], 200),
        (vec![], 200),
    ] {
        assert_eq!(server.send("GET", path, &headers, b"").await.status, status, "{headers:?}");
    }
    let plain = ["content-type: text/plain"];
    assert_eq!(server.send("POST", path, &plain, b"{\"input\":1}").await.status, 415);
    let preflight = ["origin: http://localhost:3000", "access-control-request-method: POST"];
    let response = server.send("OPTIONS", path, &preflight, b"").await;
    assert_eq!(response.status, 200);
    for header in [
        "access-control-allow-origin: http://localhost:3000",
        "access-control-allow-credentials: true",
    ] {
        assert!(response.head.contains(header), "{}", response.head);
    }
}

#[tokio::test]
async fn server_stop_ends_waiting_requests() {
    let mut server = server(without_debounce()).await;
    let started = server.post("/rollouts", json!({ "input": 1 })).await.json();
    let body = json!({ "rollout_ids": [started["rollout_id"]], "timeout": null }).to_string();
    let stop = server.stop.take().unwrap();
    let start = Instant::now();
    let (waited, ()) =
        tokio::join!(server.send("POST", "/v1/agl/waits/rollouts", &[], body.as_bytes()), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            stop.send(()).unwrap();
        });
    assert_eq!((waited.status, waited.json()), (200, json!([])));
    server.served.await.unwrap().unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[tokio::test]
async fn metrics_count_requests_by_route() {
    let server = server(without_debounce()).await;
    for id in ["a", "b"] {
        server.get(&format!("/workers/{id}")).await;
    }
    let metrics = server.send("GET", "/v1/prometheus/", &[], b"").await;
    let text = String::from_utf8_lossy(&metrics.body).into_owned();
    let line = "levade_store_request_seconds_count{method=\"GET\",path=\"/v1/agl/workers/{id}\",status=\"200\"} 2";
    assert!(text.contains(line), "{text}");
}
