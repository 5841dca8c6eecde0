//! The simulated network between clients and the store server: it delays, loses and repeats
//! requests and responses, and isolates nodes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use hyper::header::{HOST, HeaderValue};
use hyper::{Request, Response};
use levade_http::{Bounds, ClientRequest, ClientResponse, HttpError};
use levade_store_client::Transport;
use tokio::sync::oneshot;

use crate::random::Random;
use crate::world::World;

/// URL under which clients know the server.
pub const URL: &str = "http://127.0.0.1:4747";

/// Faults of the network, as probabilities in percent.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Requests that do not arrive.
    pub lost_requests: u64,
    /// Responses that do not arrive.
    pub lost_responses: u64,
    /// Requests that arrive a second time, up to [`MAX_REPETITION`] later.
    pub repeated: u64,
    /// Messages that take seconds instead of milliseconds.
    pub slow: u64,
    /// Connections that break while the server works on the request.
    pub broken: u64,
    /// Nodes without a connection.
    pub isolated: BTreeSet<String>,
}

impl Faults {
    /// Samples the probabilities of a network.
    pub fn sample(random: &mut Random) -> Self {
        let mut percent = |max| if random.percent(50) { 0 } else { random.integer(0..max) };
        Faults {
            lost_requests: percent(15),
            lost_responses: percent(15),
            repeated: percent(40),
            slow: percent(30),
            broken: percent(10),
            isolated: BTreeSet::new(),
        }
    }
}

/// Maximum delay of a repetition in milliseconds. It exceeds the time of a lease.
const MAX_REPETITION: u64 = 60_000;

/// Fate of one request in the network.
pub struct Fate {
    pub delay: Duration,
    pub is_lost: bool,
    pub repetition: Option<Duration>,
    pub is_broken: bool,
    pub response_delay: Duration,
    pub is_response_lost: bool,
}

impl Fate {
    /// Samples the fate of the next request.
    pub fn new(random: &mut Random, faults: &Faults) -> Self {
        let mut delay = || match random.percent(faults.slow) {
            true => random.millis(100..8_000),
            false => random.millis(1..20),
        };
        let (delay, response_delay) = (delay(), delay());
        let repetition = random.percent(faults.repeated).then(|| random.millis(1..MAX_REPETITION));
        Fate {
            delay,
            is_lost: random.percent(faults.lost_requests),
            repetition,
            is_broken: random.percent(faults.broken),
            response_delay,
            is_response_lost: random.percent(faults.lost_responses),
        }
    }
}

/// Connection of one node to the server.
pub struct Link {
    pub world: Arc<World>,
    pub node: String,
}

impl Link {
    /// Waits for the delay, and forever if the node is isolated or the message is lost.
    async fn travel(&self, delay: Duration, is_lost: bool) {
        tokio::time::sleep(delay).await;
        if is_lost || self.world.faults().isolated.contains(&self.node) {
            std::future::pending::<()>().await;
        }
    }

    async fn exchange(&self, request: ClientRequest) -> Result<Response<Bytes>, HttpError> {
        let host = || "store".to_owned();
        let fate = self.world.with_random(Fate::new);
        self.travel(fate.delay, fate.is_lost).await;
        let down = || HttpError::Connect { host: host(), why: "connection refused".to_owned() };
        if let Some(delay) = fate.repetition {
            let (world, node) = (Arc::clone(&self.world), self.node.clone());
            let request = request.clone();
            self.world.spawn(async move {
                tokio::time::sleep(delay).await;
                if let Some(server) = world.server() {
                    let (sender, _) = oneshot::channel();
                    server.handle(&world, format!("{node} again"), to_http(request), sender);
                }
            });
        }
        let server = self.world.server().ok_or_else(down)?;
        let (sender, response) = oneshot::channel();
        server.handle(&self.world, self.node.clone(), to_http(request), sender);
        if fate.is_broken {
            let why = "connection reset by peer".to_owned();
            tokio::time::sleep(Duration::from_millis(1)).await;
            return Err(HttpError::Broken { host: host(), why });
        }
        // A server that is killed drops the sender.
        let response = response.await.map_err(|_| {
            let why = "connection closed before message completed".to_owned();
            HttpError::Broken { host: host(), why }
        })?;
        self.travel(fate.response_delay, fate.is_response_lost).await;
        Ok(response)
    }
}

fn to_http(request: ClientRequest) -> Request<Bytes> {
    let mut converted = Request::new(request.body);
    *converted.method_mut() = request.method;
    let path = request.url.strip_prefix(URL).unwrap_or(&request.url);
    *converted.uri_mut() = path.parse().unwrap();
    *converted.headers_mut() = request.headers;
    converted.headers_mut().insert(HOST, HeaderValue::from_static("127.0.0.1:4747"));
    converted
}

#[async_trait]
impl Transport for Link {
    async fn send(
        &self,
        request: ClientRequest,
        bounds: Bounds,
    ) -> Result<ClientResponse, HttpError> {
        let url = request.url.clone();
        let sent = request.body.clone();
        let late = HttpError::Late { host: "store".to_owned(), after: bounds.deadline };
        let exchanged = tokio::time::timeout(bounds.deadline, self.exchange(request)).await;
        let method = url.rsplit('/').next().unwrap_or_default().to_owned();
        let response = match exchanged {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                self.world.note(&self.node, &format!("{method}: {error}"));
                return Err(error);
            }
            Err(_) => {
                self.world.note(&self.node, &format!("{method}: {late}"));
                return Err(late);
            }
        };
        self.world.note(&self.node, &format!("{method}: {}", response.status()));
        self.world.acknowledge(&method, &sent, &response).await;
        let (head, body) = response.into_parts();
        Ok(ClientResponse { status: head.status, headers: head.headers, body, url })
    }
}
