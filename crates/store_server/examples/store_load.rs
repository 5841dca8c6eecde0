//! Load generator of the protocol of Agent Lightning 0.3: `store_load ADDRESS WORKLOAD CONNECTIONS
//! SECONDS [RATE]`.
//!
//! Without a rate, the loop is closed: each connection starts its next operation when it has
//! finished the previous one. With a rate, in operations per second, the loop is open: the start of
//! each operation is fixed in advance, and its latency counts from this time, even if all
//! connections were busy then. The workloads:
//! - `rollouts`: enqueue one rollout, dequeue one, add a span, report success. Counts rollouts.
//! - `spans`: add spans of 1 kB one by one to a rollout per connection. Counts spans.
//! - `traces`: add spans in OTLP batches of 100, as exporters send them. Counts spans.
//!
//! Prints one JSON object: operations per second, and percentiles in ms of the duration of a
//! request and of the latency of an operation (of a batch, for `traces`). Operations that were due
//! but not started at the end are counted as `unstarted`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
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

fn attribute(key: &str, text: &str) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(Any::StringValue(text.to_owned())) }),
        ..KeyValue::default()
    }
}

/// Returns an OTLP batch of spans of about 1 kB.
fn batch(rollout: &Value, first: u64, connection: u64) -> Outcome<Vec<u8>> {
    let names = vec![
        attribute("agentlightning.rollout_id", text(rollout, "rollout_id")?),
        attribute("agentlightning.attempt_id", text(&rollout["attempt"], "attempt_id")?),
    ];
    let spans = (first..first + BATCH)
        .map(|number| Span {
            trace_id: connection.to_be_bytes().repeat(2),
            span_id: (connection << 40 | number).to_be_bytes().to_vec(),
            name: "openai.chat.completion".to_owned(),
            start_time_unix_nano: 1,
            end_time_unix_nano: 2,
            attributes: vec![attribute("gen_ai.prompt", &"x".repeat(700))],
            ..Span::default()
        })
        .collect();
    let request = ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource { attributes: names, ..Resource::default() }),
            scope_spans: vec![ScopeSpans { spans, ..ScopeSpans::default() }],
            ..ResourceSpans::default()
        }],
    };
    Ok(request.encode_to_vec())
}

/// When operations start.
struct Schedule {
    start: Instant,
    until: Instant,
    /// Interval between the starts of operations, or `None` in a closed loop.
    interval: Option<Duration>,
    /// Number of operations whose start was assigned to a connection.
    assigned: AtomicU32,
}

impl Schedule {
    /// Waits for the start of the next operation. Returns the time at which it is due, or `None` at
    /// the end of the run.
    async fn next(&self) -> Option<Instant> {
        let Some(interval) = self.interval else {
            let now = Instant::now();
            return (now < self.until).then_some(now);
        };
        let due = self.start + interval * self.assigned.fetch_add(1, Ordering::Relaxed);
        if due >= self.until || Instant::now() >= self.until {
            return None;
        }
        tokio::time::sleep_until(due.into()).await;
        Some(due)
    }
}

/// What a connection did.
#[derive(Default)]
struct Figures {
    operations: u64,
    /// Durations of requests.
    requests: Vec<Duration>,
    /// Times from the due start of an operation to its end.
    latencies: Vec<Duration>,
}

/// Runs a workload on one connection.
async fn run(
    address: String,
    workload: String,
    id: u64,
    schedule: Arc<Schedule>,
) -> Outcome<Figures> {
    let mut connection = Connection::open(&address).await?;
    let mut figures = Figures::default();
    let rollout = match workload.as_str() {
        "rollouts" => Value::Null,
        _ => connection.json("/rollouts", json!({ "input": {} })).await?,
    };
    connection.durations.clear();
    while let Some(due) = schedule.next().await {
        let count = &mut figures.operations;
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
                *count += 1;
            }
            "spans" => {
                connection.json("/spans", span(&rollout, *count + 1, id)?).await?;
                *count += 1;
            }
            "traces" => {
                let body = batch(&rollout, *count + 1, id)?;
                connection.post("/v1/traces", "application/x-protobuf", &body).await?;
                *count += BATCH;
            }
            other => {
                return Err(
                    format!("unknown workload {other:?}; give rollouts, spans or traces").into()
                );
            }
        }
        figures.latencies.push(due.elapsed());
    }
    figures.requests = connection.durations;
    Ok(figures)
}

/// Returns a percentile in ms.
fn percentile(sorted: &[Duration], per_mille: usize) -> Option<f64> {
    let index = (sorted.len() * per_mille / 1000).min(sorted.len().saturating_sub(1));
    sorted.get(index).map(|duration| duration.as_secs_f64() * 1e3)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, workload, connections, seconds, rate @ ..] = arguments.as_slice() else {
        return Err(
            "usage: store_load ADDRESS rollouts|spans|traces CONNECTIONS SECONDS [RATE]".into()
        );
    };
    let rate: Option<f64> = rate.first().map(|rate| rate.parse()).transpose()?;
    let per_operation = if workload == "traces" { BATCH as f64 } else { 1.0 };
    let interval = rate.map(|rate| Duration::from_secs_f64(per_operation / rate));
    let start = Instant::now();
    let until = start + Duration::from_secs_f64(seconds.parse()?);
    let schedule = Arc::new(Schedule { start, until, interval, assigned: AtomicU32::new(0) });
    let mut running = Vec::new();
    for id in 0..connections.parse()? {
        let schedule = Arc::clone(&schedule);
        running.push(tokio::spawn(run(address.clone(), workload.clone(), id, schedule)));
    }
    let mut all = Figures::default();
    for connection in running {
        let of = connection.await??;
        all.operations += of.operations;
        all.requests.extend(of.requests);
        all.latencies.extend(of.latencies);
    }
    let elapsed = start.elapsed().as_secs_f64();
    all.requests.sort_unstable();
    all.latencies.sort_unstable();
    let due = interval.map(|interval| (until - start).as_secs_f64() / interval.as_secs_f64());
    println!(
        "{}",
        json!({
            "workload": workload,
            "offered_per_second": rate,
            "operations": all.operations,
            "per_second": all.operations as f64 / elapsed,
            "unstarted": due.map(|due| (due as u64).saturating_sub(all.latencies.len() as u64)),
            "requests": all.requests.len(),
            "p50_ms": percentile(&all.requests, 500),
            "p99_ms": percentile(&all.requests, 990),
            "p999_ms": percentile(&all.requests, 999),
            "latency_p50_ms": percentile(&all.latencies, 500),
            "latency_p99_ms": percentile(&all.latencies, 990),
            "latency_p999_ms": percentile(&all.latencies, 999),
        })
    );
    Ok(())
}
