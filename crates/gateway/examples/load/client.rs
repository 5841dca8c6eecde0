//! Clients of a gateway over HTTP/1.1, each with one keep-alive connection.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::Barrier;
use tokio::task::LocalSet;

use crate::{COMPLETION_TOKENS, MODEL, Result, TIMEOUT, messages, quantile};

/// A connection to a gateway.
struct Client {
    address: String,
    sender: SendRequest<Full<Bytes>>,
}

/// Measurements of one completion.
struct TimedResponse {
    /// Time from the request to the first byte of the body. `total` is the time to the last byte.
    first: Duration,
    total: Duration,
    body: Vec<u8>,
}

impl Client {
    async fn new(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        tokio::task::spawn_local(connection);
        Ok(Client { address: address.to_owned(), sender })
    }

    /// Sends the prompt with the index `number`.
    async fn request(&mut self, number: usize, stream: bool) -> Result<Response<Incoming>> {
        let mut body = json!({ "model": MODEL, "messages": messages(number), "max_tokens": COMPLETION_TOKENS });
        if stream {
            body["stream"] = true.into();
        }
        let request = Request::post("/v1/chat/completions")
            .header("host", &self.address)
            .header("content-type", "application/json")
            .header("authorization", "Bearer sk-none")
            .body(Full::new(Bytes::from(body.to_string())))?;
        self.sender.ready().await?;
        let response = self.sender.send_request(request).await?;
        if !response.status().is_success() {
            let status = response.status();
            let body = response.into_body().collect().await?.to_bytes();
            return Err(format!("{status}: {}", String::from_utf8_lossy(&body)).into());
        }
        Ok(response)
    }

    /// Sends a prompt and reads the complete body.
    async fn read_response(&mut self, number: usize, stream: bool) -> Result<TimedResponse> {
        let started = Instant::now();
        let mut body = self.request(number, stream).await?.into_body();
        let mut first = None;
        let mut read = Vec::new();
        while let Some(frame) = body.frame().await {
            first.get_or_insert_with(|| started.elapsed());
            read.extend_from_slice(&frame?.into_data().unwrap_or_default());
        }
        let total = started.elapsed();
        let response = TimedResponse { first: first.unwrap_or(total), total, body: read };
        if stream && !is_done(&response.body) {
            Err("a stream ended before its last event".into())
        } else {
            Ok(response)
        }
    }
}

/// Returns whether a stream has ended properly.
fn is_done(body: &[u8]) -> bool {
    body.trim_ascii_end().ends_with(b"data: [DONE]")
}

async fn with_timeout<T>(what: &str, work: impl Future<Output = Result<T>>) -> Result<T> {
    let done = tokio::time::timeout(TIMEOUT, work).await;
    done.map_err(|_| format!("timed out after {TIMEOUT:?} waiting for {what}"))?
}

/// Requests chat completions for the duration `time`, after one uncounted request per connection.
pub async fn calls(
    address: &str,
    connections: usize,
    time: Duration,
    stream: bool,
) -> Result<Value> {
    let ready = Arc::new(Barrier::new(connections));
    let next = Rc::new(Cell::new(0));
    let one = |at: usize| {
        let address = address.to_owned();
        let ready = Arc::clone(&ready);
        let next = Rc::clone(&next);
        async move {
            let mut client = Client::new(&address).await?;
            with_timeout("a first completion", client.read_response(at, stream)).await?;
            ready.wait().await;
            let started = Instant::now();
            let mut times = Vec::new();
            let mut last = None;
            while started.elapsed() < time {
                let number = next.replace(next.get() + 1);
                let response =
                    with_timeout("a reply", client.read_response(number, stream)).await?;
                times.push((response.first, response.total));
                last = Some(response.body);
            }
            Ok((times, started.elapsed(), last))
        }
    };
    let local = LocalSet::new();
    let tasks: Vec<_> = (0..connections).map(|at| local.spawn_local(one(at))).collect();
    let ended: Vec<Result<_>> = local
        .run_until(async {
            let mut ended = Vec::new();
            for task in tasks {
                ended.push(task.await.unwrap_or_else(|error| Err(error.into())));
            }
            ended
        })
        .await;
    let mut firsts = Vec::new();
    let mut wholes = Vec::new();
    let mut max_duration = Duration::ZERO;
    let mut usage = Value::Null;
    for ended in ended {
        let (times, took, last) = ended?;
        firsts.extend(times.iter().map(|(first, _)| *first));
        wholes.extend(times.iter().map(|(_, total)| *total));
        max_duration = max_duration.max(took);
        if let Some(body) = last.filter(|_| !stream) {
            usage = serde_json::from_slice::<Value>(&body)?["usage"].take();
        }
    }
    Ok(json!({
        "connections": connections, "stream": stream, "calls": wholes.len(), "usage": usage,
        "calls_a_second": wholes.len() as f64 / max_duration.as_secs_f64(),
        "first_p50_ms": quantile(&mut firsts, 0.5),
        "p50_ms": quantile(&mut wholes, 0.5), "p99_ms": quantile(&mut wholes, 0.99),
    }))
}

/// Opens `number` concurrent streams and waits until all have ended. Reports the resident memory of
/// the server, whose process id is `pid`, before, with all streams open, and after.
pub async fn streams(address: &str, number: usize, pid: u32) -> Result<Value> {
    let before = memory(pid)?;
    let opened = Rc::new(Cell::new(0));
    let ended = Rc::new(Cell::new(0));
    let all = Arc::new(Barrier::new(number + 1));
    let started = Instant::now();
    let one = |at: usize| {
        let address = address.to_owned();
        let all = Arc::clone(&all);
        let opened = Rc::clone(&opened);
        let ended = Rc::clone(&ended);
        async move {
            let mut client = Client::new(&address).await?;
            let mut body = client.request(at, true).await?.into_body();
            let first = body.frame().await.ok_or("a stream ended before its first event")??;
            let mut read = first.into_data().unwrap_or_default().to_vec();
            opened.set(opened.get() + 1);
            all.wait().await;
            while let Some(frame) = body.frame().await {
                read.extend_from_slice(&frame?.into_data().unwrap_or_default());
            }
            ended.set(ended.get() + usize::from(is_done(&read)));
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        }
    };
    let local = LocalSet::new();
    let tasks: Vec<_> =
        (0..number).map(|at| local.spawn_local(with_timeout("a stream", one(at)))).collect();
    let measured = async {
        let waited = tokio::time::timeout(TIMEOUT, all.wait()).await;
        waited.map_err(|_| {
            format!("only {} of {number} streams opened within {TIMEOUT:?}", opened.get())
        })?;
        let open = memory(pid)?;
        let opening = started.elapsed();
        let running = running(address).await?;
        for task in tasks {
            task.await??;
        }
        Ok(json!({
            "streams": number, "running_at_once": running, "ended": ended.get(),
            "opening_s": opening.as_secs_f64(), "all_s": started.elapsed().as_secs_f64(),
            "before_mib": before, "open_mib": open, "after_mib": memory(pid)?,
            "kib_a_stream": (open - before) * 1024.0 / number as f64,
        }))
    };
    local.run_until(measured).await
}

/// Returns the number of calls that a gateway is currently running.
async fn running(address: &str) -> Result<usize> {
    let mut client = Client::new(address).await?;
    let request = Request::get("/metrics").header("host", address).body(Full::default())?;
    let body = client.sender.send_request(request).await?.into_body().collect().await?.to_bytes();
    let text = String::from_utf8_lossy(&body);
    let line = text.lines().find_map(|line| line.strip_prefix("levade_calls_running "));
    Ok(line.ok_or("the metrics have no levade_calls_running")?.parse()?)
}

/// Returns the resident memory of a process, in MiB.
fn memory(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .ok_or("the status of the process has no VmRSS")?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024.0)
}
