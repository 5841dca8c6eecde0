//! Client of the rollouts on a store server.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::random_hex;
use levade_store::rollouts::{
    Json, Lease, LeaseEnd, LeaseRequest, NewRollout, NewSpan, Page, PageRequest, Resources,
    ResourcesFilter, Result, Rollout, RolloutError, RolloutFilter, RolloutStatistics,
    RolloutUpdate, Rollouts, Span, SpanFilter, SpanOutcome, Try, TrySelector, TryUpdate, Worker,
    WorkerFilter,
};
use levade_store::{Code, StoreError, WriteOutcome};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::ServiceOptions;
use crate::service::{CallError, MAX_HOLD, ServerCall, ServiceClient, Transport};

/// HTTP client of the rollout store on a `levade store serve`.
///
/// A wait for a server that does not respond ends with [`Code::Unavailable`]. Requests whose
/// repetition has an effect are not repeated after a lost response: a rollout without a key, a try
/// without a lease, and resources.
pub struct HttpRollouts {
    service: ServiceClient,
    /// Random text that identifies this client. The idempotency keys of its lease requests start
    /// with this text.
    client_id: String,
    lease_requests: AtomicU64,
}

impl fmt::Debug for HttpRollouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpRollouts").field("url", &self.service.url()).finish_non_exhaustive()
    }
}

impl HttpRollouts {
    /// Connects to the store server at `url`, and waits until the server responds.
    ///
    /// # Errors
    /// Returns an error if the URL is invalid, if the server rejects the key, or if it does not
    /// respond before the timeout of `options`.
    pub async fn connect(
        url: &str,
        options: &ServiceOptions,
    ) -> std::result::Result<Self, StoreError> {
        Self::connect_service(ServiceClient::new(url, options)?).await
    }

    /// Connects to the store server at `url` and sends the requests over `transport` instead of the
    /// network of this machine.
    ///
    /// # Errors
    /// Returns the errors of [`connect`](Self::connect).
    pub async fn connect_over(
        transport: Arc<dyn Transport>,
        url: &str,
        options: &ServiceOptions,
    ) -> std::result::Result<Self, StoreError> {
        Self::connect_service(ServiceClient::with_transport(transport, url, options)?).await
    }

    async fn connect_service(service: ServiceClient) -> std::result::Result<Self, StoreError> {
        let client_id = random_hex(16);
        let rollouts = HttpRollouts { service, client_id, lease_requests: AtomicU64::new(0) };
        match rollouts.call_repeatable("statistics", &()).await {
            Ok(RolloutStatistics { .. }) => Ok(rollouts),
            Err(RolloutError::Store(error)) => Err(error),
            Err(error) => {
                Err(rollouts.to_request_error("statistics", error.code(), error.to_string()))
            }
        }
    }

    fn to_request_error(&self, method: &str, code: Code, why: String) -> StoreError {
        StoreError::Failed {
            location: self.service.url().to_owned(),
            action: "request",
            key: format!("`{method}`"),
            code,
            source: why.into(),
        }
    }

    /// Calls a method of the server that is safe to repeat. If the response is lost, the client
    /// repeats the request.
    async fn call_repeatable<R: DeserializeOwned>(
        &self,
        method: &str,
        arguments: &impl Serialize,
    ) -> Result<R> {
        self.call(method, arguments, Duration::ZERO, true).await
    }

    /// Calls a method of the server that is not safe to repeat. If the response is lost, the client
    /// returns an error.
    async fn call_once<R: DeserializeOwned>(
        &self,
        method: &str,
        arguments: &impl Serialize,
    ) -> Result<R> {
        self.call(method, arguments, Duration::ZERO, false).await
    }

    async fn call<R: DeserializeOwned>(
        &self,
        method: &str,
        arguments: &impl Serialize,
        hold: Duration,
        is_repeatable: bool,
    ) -> Result<R> {
        let invalid = |error: serde_json::Error| {
            RolloutError::Store(self.to_request_error(method, Code::Invalid, error.to_string()))
        };
        let call = ServerCall {
            path: format!("/v1/rollouts/{method}"),
            body: serde_json::to_vec(arguments).map_err(invalid)?.into(),
            content_type: "application/json",
            epoch: None,
            hold,
            is_repeatable,
        };
        match self.service.call(call).await {
            Ok(body) => serde_json::from_slice(&body).map_err(invalid),
            Err(CallError::Rejected(error)) => Err(error),
            Err(CallError::Failed(code, why)) => {
                Err(RolloutError::Store(self.to_request_error(method, code, why)))
            }
        }
    }
}

/// Deadline of a wait that the client splits into several HTTP requests.
struct WaitDeadline {
    /// Time at which the wait ends. `None` if that time is beyond the range of the clock, so that
    /// the wait never ends.
    deadline: Option<Instant>,
}

impl WaitDeadline {
    fn new(wait: Duration) -> Self {
        WaitDeadline { deadline: Instant::now().checked_add(wait) }
    }

    /// Returns the time for which the server may hold the next request, and whether that request is
    /// the last of the wait.
    fn next_hold(&self) -> (Duration, bool) {
        match self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
            Some(left) => (left.min(MAX_HOLD), left <= MAX_HOLD),
            None => (MAX_HOLD, false),
        }
    }
}

#[async_trait]
impl Rollouts for HttpRollouts {
    fn location(&self) -> &str {
        self.service.url()
    }

    fn now(&self) -> f64 {
        self.service.now()
    }

    async fn enqueue(&self, new: &[NewRollout]) -> Result<Vec<Rollout>> {
        if new.iter().all(|new| new.key.is_some()) {
            self.call_repeatable("enqueue", &(new,)).await
        } else {
            self.call_once("enqueue", &(new,)).await
        }
    }

    async fn start_rollout(&self, new: &NewRollout, worker: Option<&str>) -> Result<Rollout> {
        self.call_once("start", &(new, worker)).await
    }

    async fn start_try(&self, rollout_id: &str, worker: Option<&str>) -> Result<Rollout> {
        self.call_once("start_try", &(rollout_id, worker)).await
    }

    async fn lease_rollouts(&self, request: &LeaseRequest) -> Result<Vec<Rollout>> {
        if request.max == 0 {
            return Ok(Vec::new());
        }
        let mut part = request.clone();
        part.key.get_or_insert_with(|| {
            format!("{}-{}", self.client_id, self.lease_requests.fetch_add(1, Ordering::Relaxed))
        });
        let wait = WaitDeadline::new(request.wait);
        loop {
            let (hold, is_last) = wait.next_hold();
            part.wait = hold;
            let leased: Vec<Rollout> = self.call("lease", &(&part,), hold, true).await?;
            if is_last || !leased.is_empty() {
                return Ok(leased);
            }
        }
    }

    async fn record_heartbeat(&self, lease: &Lease) -> Result<Option<f64>> {
        self.call_repeatable("heartbeat", &(lease,)).await
    }

    async fn end_lease(
        &self,
        lease: &Lease,
        end: LeaseEnd,
        metadata: Option<Json>,
    ) -> Result<WriteOutcome> {
        self.call_repeatable("finish", &(lease, end, metadata)).await
    }

    async fn cancel_rollouts(&self, ids: &[String]) -> Result<u64> {
        self.call_repeatable("cancel", &(ids,)).await
    }

    async fn expire_tries(&self) -> Result<Vec<Try>> {
        self.call_repeatable("expire", &()).await
    }

    async fn update_rollout(&self, rollout_id: &str, update: &RolloutUpdate) -> Result<Rollout> {
        self.call_repeatable("update_rollout", &(rollout_id, update)).await
    }

    async fn update_try(
        &self,
        rollout_id: &str,
        name: &TrySelector,
        update: &TryUpdate,
    ) -> Result<Try> {
        self.call_repeatable("update_try", &(rollout_id, name, update)).await
    }

    async fn rollout(&self, rollout_id: &str) -> Result<Option<Rollout>> {
        self.call_repeatable("rollout", &(rollout_id,)).await
    }

    async fn query_rollouts(
        &self,
        filter: &RolloutFilter,
        page: &PageRequest,
    ) -> Result<Page<Rollout>> {
        self.call_repeatable("rollouts", &(filter, page)).await
    }

    async fn query_tries(&self, rollout_id: &str, page: &PageRequest) -> Result<Page<Try>> {
        self.call_repeatable("tries", &(rollout_id, page)).await
    }

    async fn wait_for_changes(
        &self,
        since: u64,
        max: usize,
        wait: Duration,
    ) -> Result<(Vec<Rollout>, u64)> {
        let wait = WaitDeadline::new(wait);
        loop {
            let (hold, is_last) = wait.next_hold();
            let changes: (Vec<Rollout>, u64) =
                self.call("changes", &(since, max, hold), hold, true).await?;
            if is_last || !changes.0.is_empty() {
                return Ok(changes);
            }
        }
    }

    async fn wait_until_finished(&self, ids: &[String], wait: Duration) -> Result<Vec<Rollout>> {
        let wait = WaitDeadline::new(wait);
        loop {
            let (hold, is_last) = wait.next_hold();
            let (finished, is_complete) =
                self.call("wait_finished", &(ids, hold), hold, true).await?;
            if is_last || is_complete {
                return Ok(finished);
            }
        }
    }

    async fn put_resources(&self, id: Option<&str>, value: &Json) -> Result<Resources> {
        self.call_once("put_resources", &(id, value)).await
    }

    async fn resources(&self, id: Option<&str>, version: Option<u64>) -> Result<Option<Resources>> {
        self.call_repeatable("resources", &(id, version)).await
    }

    async fn query_resources(
        &self,
        filter: &ResourcesFilter,
        page: &PageRequest,
    ) -> Result<Page<Resources>> {
        self.call_repeatable("query_resources", &(filter, page)).await
    }

    async fn record_worker_heartbeat(&self, id: &str, stats: Option<Json>) -> Result<Worker> {
        self.call_repeatable("beat_worker", &(id, stats)).await
    }

    async fn worker(&self, id: &str) -> Result<Option<Worker>> {
        self.call_repeatable("worker", &(id,)).await
    }

    async fn query_workers(
        &self,
        filter: &WorkerFilter,
        page: &PageRequest,
    ) -> Result<Page<Worker>> {
        self.call_repeatable("workers", &(filter, page)).await
    }

    async fn add_spans(&self, spans: Vec<NewSpan>) -> Result<Vec<SpanOutcome>> {
        self.call_repeatable("add_spans", &(spans,)).await
    }

    async fn query_spans(&self, filter: &SpanFilter, page: &PageRequest) -> Result<Page<Span>> {
        self.call_repeatable("spans", &(filter, page)).await
    }

    async fn reserve_span_numbers(&self, rollout_id: &str, count: u64) -> Result<u64> {
        self.call_repeatable("reserve_span_numbers", &(rollout_id, count)).await
    }

    async fn statistics(&self) -> Result<RolloutStatistics> {
        self.call_repeatable("statistics", &()).await
    }
}
