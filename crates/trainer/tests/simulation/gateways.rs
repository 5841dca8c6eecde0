//! The gateways of the trainer processes, and the network between them and runners.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use bytes::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Request, StatusCode};
use levade_gateway::{Gateway, build_router};
use levade_http::Access;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinSet};
use tower_service::Service as _;

use crate::network::Fate;
use crate::world::World;

/// A model call of a runner.
#[derive(Clone)]
pub struct ModelCall {
    /// Name of the runner.
    pub node: String,
    /// Base URL of the attempt's session.
    pub base_url: String,
    /// Key of the session.
    pub key: String,
    /// Name of the attempt's slot, and the number of the try.
    pub attempt: (String, u32),
    /// Number of times that the runner has sent the call before.
    pub retries: u32,
    /// Body of the request.
    pub body: Value,
}

impl ModelCall {
    /// Returns the trainer process to which the call goes.
    fn trainer(&self) -> &str {
        let host = self.base_url.strip_prefix("http://").unwrap();
        host.split('/').next().unwrap()
    }

    fn to_http(&self) -> Request<Body> {
        let path = &self.base_url["http://".len() + self.trainer().len()..];
        Request::post(format!("{path}/v1/chat/completions"))
            .header(HOST, self.trainer())
            .header(AUTHORIZATION, format!("Bearer {}", self.key))
            .header(CONTENT_TYPE, "application/json")
            .header("x-stainless-retry-count", self.retries)
            .body(Body::from(self.body.to_string()))
            .unwrap()
    }
}

/// Waits for the delay of a message between two nodes. Waits forever if a node is isolated or the
/// message is lost.
async fn travel(world: &World, nodes: [&String; 2], delay: Duration, is_lost: bool) {
    tokio::time::sleep(delay).await;
    let isolated = world.faults().isolated;
    if is_lost || nodes.iter().any(|node| isolated.contains(*node)) {
        std::future::pending::<()>().await;
    }
}

/// The gateway of a running trainer process. Dropping it aborts its calls, as the end of the
/// process does.
struct RunningGateway {
    routes: Router,
    calls: JoinSet<()>,
}

/// Connection of a runner to a gateway. Dropping it aborts the call of the runner.
struct Connection(AbortHandle);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The gateways of the running trainer processes.
#[derive(Default)]
pub struct Gateways {
    /// The gateways by the names of their processes.
    running: Mutex<BTreeMap<String, RunningGateway>>,
    /// Newest try that a runner has leased, by name of the slot.
    newest: Mutex<BTreeMap<String, u32>>,
}

impl Gateways {
    /// Opens the gateway of a trainer process.
    pub fn open(&self, trainer: &str, gateway: &Gateway) {
        let routes = build_router(gateway, Access::default());
        let gateway = RunningGateway { routes, calls: JoinSet::new() };
        self.running.lock().unwrap().insert(trainer.to_owned(), gateway);
    }

    /// Closes the gateway of a trainer process that has ended.
    pub fn close(&self, trainer: &str) {
        self.running.lock().unwrap().remove(trainer);
    }

    fn is_open(&self, trainer: &str) -> bool {
        self.running.lock().unwrap().contains_key(trainer)
    }

    /// Starts a call in the process of the gateway, which sends the response to `sender`. Returns
    /// `None` if the process has ended.
    fn start_call(
        self: &Arc<Self>,
        world: &Arc<World>,
        call: ModelCall,
        sender: oneshot::Sender<(StatusCode, Bytes)>,
    ) -> Option<AbortHandle> {
        let mut running = self.running.lock().unwrap();
        let gateway = running.get_mut(call.trainer())?;
        while gateway.calls.try_join_next().is_some() {}
        let routes = gateway.routes.clone();
        let handling = Arc::clone(self).handle(Arc::clone(world), routes, call, sender);
        Some(gateway.calls.spawn(handling))
    }

    /// Records that a try is leased. The trainer enqueues a try after it has closed the session of
    /// the previous try.
    pub fn lease(&self, (slot, number): &(String, u32)) {
        let mut newest = self.newest.lock().unwrap();
        let known = newest.entry(slot.clone()).or_default();
        *known = (*known).max(*number);
    }

    /// Sends a call, and returns the status and the body of the response. Waits forever if a
    /// message is lost. Dropping the future disconnects the runner.
    ///
    /// # Errors
    /// Returns an error if the connection cannot be opened or breaks.
    pub async fn call(
        self: &Arc<Self>,
        world: &Arc<World>,
        call: ModelCall,
    ) -> Result<(u16, Value), String> {
        let fate = world.with_random(Fate::new);
        let trainer = call.trainer().to_owned();
        let nodes = [&call.node, &trainer];
        travel(world, nodes, fate.delay, fate.is_lost).await;
        let no_connection = || format!("{trainer}: connection refused");
        let (sender, response) = oneshot::channel();
        let handling = self.start_call(world, call.clone(), sender).ok_or_else(no_connection)?;
        // The gateway notices that a connection ends, but not that a response is lost.
        let _connection = (!fate.is_response_lost).then(|| Connection(handling));
        if fate.is_broken {
            tokio::time::sleep(Duration::from_millis(1)).await;
            return Err(format!("{trainer}: connection reset by peer"));
        }
        let response = response.await.map_err(|_| format!("{trainer}: connection closed"))?;
        travel(world, nodes, fate.response_delay, fate.is_response_lost).await;
        // A trainer that has ended in the meantime sends nothing.
        if !self.is_open(&trainer) {
            return Err(no_connection());
        }
        let (status, body) = response;
        Ok((status.as_u16(), serde_json::from_slice(&body).unwrap_or_default()))
    }

    /// Executes a call, checks the rule of leases, and sends the response.
    async fn handle(
        self: Arc<Self>,
        world: Arc<World>,
        mut routes: Router,
        call: ModelCall,
        sender: oneshot::Sender<(StatusCode, Bytes)>,
    ) {
        // A router is always ready, and never fails.
        let Ok(response) = routes.call(call.to_http()).await;
        let status = response.status();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let (slot, number) = &call.attempt;
        let newest = self.newest.lock().unwrap().get(slot).copied().unwrap_or_default();
        world.check(*number >= newest || !status.is_success(), || {
            format!("a call of try {number} of {slot} succeeded although try {newest} is leased")
        });
        // The runner may have disconnected.
        let _ = sender.send((status, body));
    }
}
