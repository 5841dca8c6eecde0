//! Rollouts over HTTP: the contract of every backend, lost responses and unreachable servers.
#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_store::rollouts::{
    Json, LeaseEnd, LeaseRequest, ManualClock, NewRollout, Rollout, RolloutError, Rollouts,
};
use levade_store::{Code, StoreError, rollouts_contract};
use levade_store_client::worker::{RetryError, RolloutExecutor, WorkerOptions, run_worker};
use levade_store_client::{HttpRollouts, ServiceOptions, open_rollouts};
use levade_store_server::ServerOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use support::{Server, memory, options, reserve_port};

async fn start_server(store: Arc<dyn Rollouts>, keys: &[&str]) -> Server {
    let keys = keys.iter().map(|key| (*key).to_owned()).collect();
    Server::start(store, ServerOptions { keys, ..ServerOptions::default() }).await
}

rollouts_contract!(over_http, async |clock: Arc<ManualClock>| {
    let server = start_server(open_rollouts("memory:", clock).await.unwrap(), &[]).await;
    let client = HttpRollouts::connect(&server.url, &options(10.0)).await.unwrap();
    (server, Arc::new(client) as Arc<dyn Rollouts>)
});

fn new(key: Option<&str>) -> NewRollout {
    let input = serde_json::value::to_raw_value("task").unwrap();
    NewRollout { key: key.map(str::to_owned), ..NewRollout::new(input) }
}

/// Forwards connections to a server. Of the first `lost` responses to requests for `path`, nothing
/// arrives. Returns the URL.
async fn start_lossy_proxy(server: &str, path: &'static str, mut lost: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = server.strip_prefix("http://").unwrap().to_owned();
    tokio::spawn(async move {
        loop {
            let (mut from, _) = listener.accept().await.unwrap();
            let mut to = TcpStream::connect(&server).await.unwrap();
            let request = read_message(&mut from).await;
            let is_lost = lost > 0 && String::from_utf8_lossy(&request).contains(path);
            to.write_all(&request).await.unwrap();
            let response = read_message(&mut to).await;
            if is_lost {
                lost -= 1;
            } else {
                from.write_all(&response).await.unwrap();
            }
        }
    });
    url
}

/// Reads a message of HTTP, whose head states the length of its body.
async fn read_message(stream: &mut TcpStream) -> Vec<u8> {
    let mut message = Vec::new();
    while stream.read_buf(&mut message).await.unwrap() > 0 {
        let Some(len) = message.windows(4).position(|end| end == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&message[..len]).to_ascii_lowercase();
        let (_, length) = head.split_once("content-length: ").expect(&head);
        let length: usize = length.lines().next().unwrap().parse().unwrap();
        if message.len() >= len + 4 + length {
            break;
        }
    }
    message
}

#[tokio::test]
async fn lost_lease_response_is_repeated_with_the_same_leases() {
    let store = memory().await;
    store.enqueue(&[new(None), new(None)]).await.unwrap();
    let server = start_server(Arc::clone(&store), &[]).await;
    let url = start_lossy_proxy(&server.url, "/v1/rollouts/lease", 2).await;
    let client = HttpRollouts::connect(&url, &options(10.0)).await.unwrap();
    let leased = client.lease_rollouts(&LeaseRequest::new(1, Some("w"))).await.unwrap();
    assert_eq!(leased.len(), 1);
    assert_eq!(store.statistics().await.unwrap().queued_rollouts, 1, "one rollout is still queued");
}

#[tokio::test]
async fn lost_enqueue_response_is_repeated_only_with_keys() {
    let store = memory().await;
    let server = start_server(Arc::clone(&store), &[]).await;
    let url = start_lossy_proxy(&server.url, "/v1/rollouts/enqueue", 2).await;
    let client = HttpRollouts::connect(&url, &options(10.0)).await.unwrap();
    let error = client.enqueue(&[new(None)]).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.to_string().contains("could execute it twice"), "{error}");
    assert_eq!(client.enqueue(&[new(Some("k"))]).await.unwrap().len(), 1);
    assert_eq!(store.statistics().await.unwrap().rollouts, 2);
}

#[tokio::test]
async fn unreachable_server_error_names_url_timeout_and_cause() {
    let (_socket, url) = reserve_port();
    let error = HttpRollouts::connect(&url, &options(1.5)).await.err().unwrap();
    let text = error.to_string();
    assert!(error.is_retryable() && text.contains(&url), "{text}");
    let parts = ["after 1.5s", "LEVADE_STORE_TIMEOUT", "cannot connect", "levade store serve"];
    for part in parts {
        assert!(text.contains(part), "{text}");
    }
}

#[tokio::test]
async fn client_waits_for_a_server_that_starts_later() {
    let (socket, url) = reserve_port();
    let client = tokio::spawn(async move { HttpRollouts::connect(&url, &options(30.0)).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let listener = socket.listen(64).unwrap();
    let _server = Server::start_on(listener, memory().await, ServerOptions::default());
    let client = client.await.unwrap().unwrap();
    assert!(client.now() > 1.7e9, "the time of the store");
}

#[tokio::test]
async fn missing_key_and_wrong_url_fail_without_retry() {
    let server = start_server(memory().await, &["secret"]).await;
    let error = HttpRollouts::connect(&server.url, &options(30.0)).await.err().unwrap();
    assert_eq!(error.code(), Code::Forbidden);
    assert!(error.to_string().contains("LEVADE_STORE_KEY"), "{error}");
    let with_key = ServiceOptions { key: Some("secret".to_owned()), ..options(30.0) };
    HttpRollouts::connect(&server.url, &with_key).await.unwrap();
    let url = format!("{}/elsewhere", server.url);
    let error = HttpRollouts::connect(&url, &with_key).await.err().unwrap();
    assert_eq!(error.code(), Code::NotFound, "{error}");
    let url = server.url.replace("http://", "http://levade:secret@");
    let error = HttpRollouts::connect(&url, &with_key).await.err().unwrap();
    assert!(matches!(error, StoreError::Open { .. }), "{error}");
}

#[tokio::test]
async fn unknown_rollout_error_keeps_its_type() {
    let server = start_server(memory().await, &[]).await;
    let client = HttpRollouts::connect(&server.url, &options(10.0)).await.unwrap();
    let error = client.start_try("ro-none", None).await.unwrap_err();
    assert!(
        matches!(&error, RolloutError::UnknownRollout { rollout_id } if rollout_id == "ro-none"),
        "{error}"
    );
}

/// Work of a worker for which no queue is ever announced.
struct Unannounced;

#[async_trait]
impl RolloutExecutor for Unannounced {
    type Error = RetryError;

    async fn queues(&self) -> Result<Vec<String>, RetryError> {
        std::future::pending().await
    }

    async fn execute(&self, _: &Rollout) -> (LeaseEnd, Option<Json>) {
        unreachable!("nothing is leased")
    }

    fn stats(&self, _: Vec<String>, _: usize) -> Option<Json> {
        None
    }

    fn note(&self, _: String) {}
}

#[tokio::test]
async fn worker_without_queues_stops_at_the_first_request() {
    let options = WorkerOptions {
        store: memory().await,
        slots: 1,
        name: "w".to_owned(),
        once: false,
        wait: Duration::from_secs(3600),
        drain: Duration::from_secs(3600),
    };
    let (stop, requests) = tokio::sync::mpsc::unbounded_channel();
    let worker = run_worker(options, Arc::new(Unannounced), requests);
    let request = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        stop.send(()).unwrap();
    };
    let (ended, ()) = tokio::join!(tokio::time::timeout(Duration::from_secs(10), worker), request);
    assert!(ended.unwrap().is_ok());
}

#[tokio::test]
async fn open_rollouts_takes_sqlite_locations_and_rejects_other_schemes() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rollouts.db");
    let clock = Arc::new(ManualClock::new(1.0));
    open_rollouts(&format!("sqlite:{}", file.display()), clock.clone()).await.unwrap();
    assert!(file.exists());
    let error = open_rollouts("postgres://u:secret@h/x", clock).await.err().unwrap();
    assert_eq!(error.code(), Code::Invalid);
    let text = error.to_string();
    assert!(text.contains("postgres://") && !text.contains("secret"), "{text}");
}
