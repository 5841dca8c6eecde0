//! A test server that sends scripted bytes.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

/// A step of a scripted response.
#[derive(Debug, Clone)]
pub enum Step {
    Send(Vec<u8>),
    Wait(Duration),
    /// Sends nothing more, and keeps the connection open.
    Hang,
}

/// A received request.
#[derive(Debug, Clone)]
pub struct RecordedRequest {
    pub head: String,
    pub body: Value,
}

/// A server that sends one scripted response per request, and repeats the last one.
pub struct TestServer {
    pub url: String,
    pub seen: Arc<Mutex<Vec<RecordedRequest>>>,
    task: JoinHandle<()>,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn read_request(from: &mut (impl AsyncRead + Unpin)) -> Option<RecordedRequest> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.unwrap_or("0").parse().unwrap();
            if bytes.len() >= end + 4 + length {
                let body = serde_json::from_slice(&bytes[end + 4..]).unwrap_or_default();
                return Some(RecordedRequest { head, body });
            }
        }
        match from.read(&mut buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
        }
    }
}

async fn respond(
    mut socket: impl AsyncRead + AsyncWrite + Unpin,
    steps: Vec<Step>,
    seen: Arc<Mutex<Vec<RecordedRequest>>>,
) {
    let Some(request) = read_request(&mut socket).await else { return };
    seen.lock().unwrap().push(request);
    for step in steps {
        match step {
            Step::Send(bytes) => {
                if socket.write_all(&bytes).await.and(socket.flush().await).is_err() {
                    return;
                }
            }
            Step::Wait(time) => tokio::time::sleep(time).await,
            Step::Hang => std::future::pending().await,
        }
    }
    socket.shutdown().await.ok();
}

impl TestServer {
    pub async fn new(responses: Vec<Vec<Step>>) -> Self {
        Self::start(responses, None).await
    }

    /// Starts a TLS server with a certificate issued by `authority.pem`.
    pub async fn with_tls(responses: Vec<Vec<Step>>) -> Self {
        let chain = CertificateDer::from_pem_slice(include_bytes!("testing/server.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_slice(include_bytes!("testing/server.key.pem")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions();
        let config =
            config.unwrap().with_no_client_auth().with_single_cert(vec![chain], key).unwrap();
        Self::start(responses, Some(TlsAcceptor::from(Arc::new(config)))).await
    }

    async fn start(responses: Vec<Vec<Step>>, tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://localhost:{}", listener.local_addr().unwrap().port());
        let seen: Arc<Mutex<Vec<RecordedRequest>>> = Arc::default();
        let known = seen.clone();
        let task = tokio::spawn(async move {
            let mut responses = responses.into_iter().peekable();
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let next = responses.next().unwrap();
                if responses.peek().is_none() {
                    responses = vec![next.clone()].into_iter().peekable();
                }
                let seen = known.clone();
                let tls = tls.clone();
                tokio::spawn(async move {
                    match tls {
                        None => respond(socket, next, seen).await,
                        Some(tls) => {
                            if let Ok(socket) = tls.accept(socket).await {
                                respond(socket, next, seen).await;
                            }
                        }
                    }
                });
            }
        });
        TestServer { url, seen, task }
    }

    pub fn received_requests(&self) -> usize {
        self.seen.lock().unwrap().len()
    }
}

/// Sends the head of a response whose body ends with the connection.
pub fn head(status: &str, headers: &str) -> Step {
    Step::Send(format!("HTTP/1.1 {status}\r\n{headers}connection: close\r\n\r\n").into_bytes())
}

/// Builds a response with a JSON body.
pub fn json_response(status: &str, headers: &str, body: &Value) -> Vec<Step> {
    let body = body.to_string();
    let headers =
        format!("content-type: application/json\r\ncontent-length: {}\r\n{headers}", body.len());
    vec![head(status, &headers), Step::Send(body.into_bytes())]
}

/// Builds a complete completion.
pub fn completion(text: &str) -> Value {
    json!({"model": "m-1", "choices": [{"index": 0, "message": {"role": "assistant", "content": text},
        "finish_reason": "stop"}], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
}

pub fn events_head() -> Step {
    head("200 OK", "content-type: text/event-stream; charset=utf-8\r\n")
}

/// Builds a chunk of a reply, as a server-sent event.
pub fn delta_event(delta: &Value, finish: Option<&str>) -> Vec<u8> {
    let json =
        json!({"model": "m-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]});
    format!("data: {json}\n\n").into_bytes()
}
