//! Load generator of the protocol of Agent Lightning 0.3: `store_load ADDRESS WORKLOAD CONNECTIONS
//! SECONDS`.
//!
//! Each connection sends its next request when it has the response of the previous one. The
//! workloads:
//! - `rollouts`: enqueue one rollout, dequeue one, add a span, report success. Counts rollouts.
//! - `spans`: add spans of 1 kB one by one to a rollout per connection. Counts spans.
//! - `traces`: add spans in OTLP batches of 100, as exporters send them. Counts spans.
//!
//! Prints one JSON object: operations per second, and percentiles of the duration of a request in
//! ms.

use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use prost::Message;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufStream};
use tokio::net::TcpStream;

/// Number of spans of an OTLP batch.
const BATCH: u64 = 100;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A connection, and the durations of its requests.
struct Connection {
    address: String,
    stream: BufStream<TcpStream>,
    durations: Vec<Duration>,
}

impl Connection {
    async fn open(address: &str) -> Outcome<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Connection {
            address: address.to_owned(),
            stream: BufStream::new(stream),
            durations: Vec::new(),
        })
    }

    /// Sends a POST request and returns the body of its response.
    async fn post(&mut self, path: &str, kind: &str, body: &[u8]) -> Outcome<Vec<u8>> {
        let start = Instant::now();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        self.stream.write_all(head.as_bytes()).await?;
        self.stream.write_all(body).await?;
        self.stream.flush().await?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.stream.read_u8().await?);
        }
        let head = String::from_utf8_lossy(&head).to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.ok_or("no content-length")?.trim().parse()?];
        self.stream.read_exact(&mut body).await?;
        self.durations.push(start.elapsed());
        match head.split(' ').nth(1) {
            Some("200" | "201") => Ok(body),
            status => Err(format!("{path}: {status:?}: {}", String::from_utf8_lossy(&body)).into()),
        }
    }

    async fn json(&mut self, path: &str, body: Value) -> Outcome<Value> {
        let body = self
            .post(&format!("/v1/agl{path}"), "application/json", body.to_string().as_bytes())
            .await?;
        Ok(serde_json::from_slice(&body)?)
    }
}

fn text<'a>(value: &'a Value, name: &str) -> Outcome<&'a str> {
    Ok(value[name].as_str().ok_or_else(|| format!("no {name} in {value}"))?)
}

/// Returns a span of about 1 kB.
fn span(rollout: &Value, number: u64, connection: u64) -> Outcome<Value> {
    let attempt = &rollout["attempt"];
    Ok(json!({
        "rollout_id": text(rollout, "rollout_id")?, "attempt_id": text(attempt, "attempt_id")?,
        "sequence_id": number, "trace_id": format!("{connection:032x}"),
        "span_id": format!("{:016x}", connection << 40 | number), "parent_id": null, "name": "openai.chat.completion",
        "status": { "status_code": "OK", "description": null },
        "attributes": { "gen_ai.request.model": "model", "gen_ai.prompt": "x".repeat(700), "gen_ai.usage": 17 },
        "events": [], "links": [], "start_time": 1.0, "end_time": 2.0, "context": null, "parent": null,
        "resource": { "attributes": {}, "schema_url": "" },
    }))
}

/// Returns an OTLP batch of spans of about 1 kB.
fn batch(rollout: &Value, first: u64, connection: u64) -> Outcome<Vec<u8>> {
    let attribute = |key: &str, text: &str| KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(Any::StringValue(text.to_owned())) }),
        ..KeyValue::default()
    };
    let names = vec![
        attribute("agentlightning.rollout_id", text(rollout, "rollout_id")?),
        attribute("agentlightning.attempt_id", text(&rollout["attempt"], "attempt_id")?),
    ];
    let span = |number: u64| Span {
        trace_id: connection.to_be_bytes().repeat(2),
        span_id: (connection << 40 | number).to_be_bytes().to_vec(),
        name: "openai.chat.completion".to_owned(),
        start_time_unix_nano: 1,
        end_time_unix_nano: 2,
        attributes: vec![attribute("gen_ai.prompt", &"x".repeat(700))],
        ..Span::default()
    };
    let spans = (first..first + BATCH).map(span).collect();
    let request = ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource { attributes: names, ..Resource::default() }),
            scope_spans: vec![ScopeSpans { spans, ..ScopeSpans::default() }],
            ..ResourceSpans::default()
        }],
    };
    Ok(request.encode_to_vec())
}

/// Runs a workload on one connection. Returns the number of operations and the durations of
/// requests.
async fn run(
    address: String,
    workload: String,
    id: u64,
    until: Instant,
) -> Outcome<(u64, Vec<Duration>)> {
    let mut connection = Connection::open(&address).await?;
    let mut count = 0;
    let rollout = match workload.as_str() {
        "rollouts" => Value::Null,
        _ => connection.json("/rollouts", json!({ "input": {} })).await?,
    };
    connection.durations.clear();
    while Instant::now() < until {
        match workload.as_str() {
            "rollouts" => {
                let rollouts =
                    json!({ "rollouts": [{ "input": { "question": "x".repeat(100) } }] });
                connection.json("/queues/rollouts/enqueue", rollouts).await?;
                let request = json!({ "limit": 1, "worker_id": format!("worker-{id}") });
                let leased = connection.json("/queues/rollouts/dequeue", request).await?;
                let Some(rollout) = leased.get(0) else { continue };
                connection.json("/spans", span(rollout, 1, id)?).await?;
                let rollout_id = text(rollout, "rollout_id")?;
                let attempt_id = text(&rollout["attempt"], "attempt_id")?;
                let path = format!("/rollouts/{rollout_id}/attempts/{attempt_id}");
                connection.json(&path, json!({ "status": "succeeded" })).await?;
                count += 1;
            }
            "spans" => {
                connection.json("/spans", span(&rollout, count + 1, id)?).await?;
                count += 1;
            }
            "traces" => {
                let body = batch(&rollout, count + 1, id)?;
                connection.post("/v1/traces", "application/x-protobuf", &body).await?;
                count += BATCH;
            }
            other => {
                return Err(
                    format!("unknown workload {other:?}; give rollouts, spans or traces").into()
                );
            }
        }
    }
    Ok((count, connection.durations))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, workload, connections, seconds] = arguments.as_slice() else {
        return Err("usage: store_load ADDRESS rollouts|spans|traces CONNECTIONS SECONDS".into());
    };
    let start = Instant::now();
    let until = start + Duration::from_secs_f64(seconds.parse()?);
    let mut running = Vec::new();
    for id in 0..connections.parse()? {
        running.push(tokio::spawn(run(address.clone(), workload.clone(), id, until)));
    }
    let mut count = 0;
    let mut durations = Vec::new();
    for connection in running {
        let (operations, all) = connection.await??;
        count += operations;
        durations.extend(all);
    }
    let elapsed = start.elapsed().as_secs_f64();
    durations.sort_unstable();
    let percentile = |per_mille: usize| {
        let index = (durations.len() * per_mille / 1000).min(durations.len().saturating_sub(1));
        durations.get(index).map(|duration| duration.as_secs_f64() * 1e3)
    };
    println!(
        "{}",
        json!({
            "workload": workload, "operations": count, "per_second": count as f64 / elapsed,
            "requests": durations.len(), "p50_ms": percentile(500), "p99_ms": percentile(990), "p999_ms": percentile(999),
        })
    );
    Ok(())
}
