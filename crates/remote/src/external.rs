//! Client of OpenAI-compatible chat APIs: an opponent, a judge or a teacher that is called in
//! messages.
//!
//! Among the servers of one model, the server with the fewest calls is used. If a server fails, the
//! call passes to the next server. A server has failed if it returns an error status, if its
//! response is not a completion or has no content, or if its connection ends. A server that has
//! used up its part of the call's time is slow: then both servers work on the call, and the first
//! response counts. A server that failed ranks behind the other servers for a while. A stream
//! changes its server only before its first chunk, since returned chunks cannot be taken back.
//!
//! # Guarantees
//! - **Retries repeat nothing.** The same server is called again only if it rejected the call (429,
//!   503), if no connection was made, or if no byte of the response arrived.
//! - **Waits** between tries double, with jitter, and are at least as long as the server requests.
//! - **Bounded.** Everything sent or received is bounded, in bytes and in time.
//! - **Keys** come from the environment and never appear in errors or logs.

mod call_deadline;
mod endpoint;
mod error;
mod http;
mod limits;
mod request;
mod response;
mod service;
mod sse;
mod stream;
#[cfg(test)]
mod testing;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use levade_policy::process_time::sleep;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::{debug, warn};

use call_deadline::CallDeadline;
pub use endpoint::Endpoint;
pub(crate) use endpoint::{EndpointServer, plain_uri};
pub use error::ExternalError;
use http::{EndpointHttp, ResponseBody};
pub(crate) use http::{MAX_ERROR_BYTES, extract_message, truncate};
use limits::RateLimit;
pub use request::{ChatParams, ChatRequest};
pub use response::{CalledTool, ChatEvent, ChatResponse, Finish, Usage};
pub use service::{Service, ServiceOptions};
pub(crate) use sse::SseDecoder;
pub use stream::ChatStream;
use stream::ResponseStart;

/// Timeout of [`External::check_reachable`] for each endpoint.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Options of an external policy.
#[derive(Debug, Clone, PartialEq)]
pub struct ExternalOptions {
    /// Servers with the models that they serve, in order of preference. Among the servers of one
    /// model, the server with the fewest calls is used, and on a tie the first. A server of another
    /// model is used only if these servers fail.
    pub endpoints: Vec<Endpoint>,
    /// Maximum number of calls in flight. Must be at least 1.
    pub max_running: usize,
    /// Maximum number of requests per minute. 0 disables the limit.
    pub requests_per_minute: u64,
    /// Maximum number of prompt and completion tokens per minute. 0 disables the limit.
    pub tokens_per_minute: u64,
    /// Maximum number of requests per call. Must be at least 1. A request is retried only if it was
    /// rejected as busy or if no byte of its response arrived. Each endpoint is tried once in any
    /// case.
    pub tries: usize,
    /// Timeout for a call, which includes the wait for a permit and ends with the completion.
    pub deadline: Duration,
    /// Timeout for the first bytes of a response, and for the next bytes of a streamed response.
    pub silence: Duration,
    /// Path of a PEM file with root certificates that are trusted in addition to Mozilla's list.
    /// Needed for servers with a private certificate authority.
    pub roots: Option<PathBuf>,
    /// Maximum size of a response, in bytes. Must be at least 1.
    pub max_bytes: usize,
    /// Maximum size of one event of a streamed response, in bytes. Must be at least 1.
    pub max_event_bytes: usize,
}

impl Default for ExternalOptions {
    fn default() -> Self {
        ExternalOptions {
            endpoints: Vec::new(),
            max_running: 16,
            requests_per_minute: 0,
            tokens_per_minute: 0,
            tries: 6,
            deadline: Duration::from_secs(600),
            silence: Duration::from_secs(120),
            roots: None,
            max_bytes: 16 << 20,
            max_event_bytes: 1 << 20,
        }
    }
}

/// A policy that is sampled through third-party chat APIs. Clones share rate limits and
/// connections.
#[derive(Debug, Clone)]
pub struct External(Arc<ExternalInner>);

#[derive(Debug)]
struct ExternalInner {
    options: ExternalOptions,
    servers: Vec<EndpointServer>,
    http: EndpointHttp,
    permits: Arc<Semaphore>,
    requests: Option<RateLimit>,
    tokens: Option<RateLimit>,
}

impl External {
    /// Creates a policy that is sampled through one or several endpoints. Reads the API keys from
    /// the environment.
    ///
    /// # Errors
    /// Returns [`ExternalError::Invalid`] if an address or option is invalid, and
    /// [`ExternalError::NoKey`] if a key is missing.
    pub fn new(options: ExternalOptions) -> Result<Self, ExternalError> {
        Self::with_environment(options, |name| std::env::var(name))
    }

    /// Creates a policy whose endpoints all have the API key `key`. Their `key_env` is ignored.
    ///
    /// # Errors
    /// Returns [`ExternalError::Invalid`] if an address or option is invalid.
    pub fn with_key(mut options: ExternalOptions, key: &str) -> Result<Self, ExternalError> {
        for endpoint in &mut options.endpoints {
            endpoint.key_env = Some("LEVADE_API_KEY".into());
        }
        Self::with_environment(options, |_| Ok(key.to_owned()))
    }

    fn with_environment(
        options: ExternalOptions,
        variable: impl Fn(&str) -> Result<String, std::env::VarError>,
    ) -> Result<Self, ExternalError> {
        if options.endpoints.is_empty() {
            return Err(ExternalError::Invalid(
                "an external policy has no endpoint; add one".into(),
            ));
        }
        let sizes = [
            ("most_running", options.max_running),
            ("tries", options.tries),
            ("max_bytes", options.max_bytes),
            ("max_event_bytes", options.max_event_bytes),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(ExternalError::Invalid(format!("{name} is 0, but must be at least 1")));
        }
        let servers =
            options.endpoints.iter().map(|endpoint| EndpointServer::new(endpoint, &variable));
        Ok(External(Arc::new(ExternalInner {
            servers: servers.collect::<Result<_, _>>()?,
            http: EndpointHttp::new(options.roots.as_deref())?,
            permits: Arc::new(Semaphore::new(options.max_running.min(Semaphore::MAX_PERMITS))),
            requests: RateLimit::new(options.requests_per_minute),
            tokens: RateLimit::new(options.tokens_per_minute),
            options,
        })))
    }

    /// Requests a streamed completion. Returns when the first chunk of the completion has arrived.
    ///
    /// # Errors
    /// Returns the failure of the endpoint if there is only one. Returns [`ExternalError::All`]
    /// with the failure of each endpoint if no endpoint starts a response within the deadline and
    /// the maximum number of tries.
    pub async fn stream(&self, request: &ChatRequest) -> Result<ChatStream, ExternalError> {
        self.call(request, true, ChatStream::start_response).await
    }

    /// Requests a completion and waits for its end. The completion has text or, if the request has
    /// tools, text or tool calls.
    ///
    /// # Errors
    /// Returns the same errors as [`stream`](Self::stream).
    pub async fn chat(&self, request: &ChatRequest) -> Result<ChatResponse, ExternalError> {
        let has_tools = !request.tools.is_empty();
        self.call(request, false, |stream| stream.collect_text(has_tools)).await
    }

    /// Checks that at least one endpoint accepts TCP connections. Sends no request.
    ///
    /// # Errors
    /// Returns the failure of the endpoint if there is only one. Returns [`ExternalError::All`]
    /// with the failure of each endpoint if no endpoint accepts a connection within 5 s.
    pub async fn check_reachable(&self) -> Result<(), ExternalError> {
        let mut failures = Vec::new();
        for server in &self.0.servers {
            match server.connect(CONNECT_TIMEOUT).await {
                Ok(()) => return Ok(()),
                Err(error) => failures.push(error),
            }
        }
        Err(match failures.len() {
            1 => failures.remove(0),
            _ => ExternalError::All { failures },
        })
    }

    /// Sends a chat request to endpoints, in order of preference, until `finish` succeeds on the
    /// response of an endpoint.
    async fn call<T, F>(
        &self,
        request: &ChatRequest,
        stream: bool,
        finish: impl Fn(ChatStream) -> F + Sync,
    ) -> Result<T, ExternalError>
    where
        F: Future<Output = Result<T, ExternalError>> + Send,
    {
        let ExternalInner { options, servers, .. } = &*self.0;
        let names: Vec<&str> = servers.iter().map(|server| &*server.name).collect();
        let mut deadline = CallDeadline::new(options.deadline, names.join(", "));
        let what = format!("a permit for one of {} concurrent calls", options.max_running);
        let permit = deadline.wait(what, self.0.permits.clone().acquire_owned()).await?;
        let permit =
            Arc::new(permit.map_err(|_| ExternalError::Invalid("the policy is closed".into()))?);
        let per_minute = options.requests_per_minute;
        let limit = self.0.requests.as_ref();
        let what = format!("the limit requests_per_minute = {per_minute}");
        await_limit(&mut deadline, what.clone(), limit, 1).await?;
        let guessed = request
            .estimate_tokens(request.to_body(&servers[0].model, stream).to_string().as_bytes());
        let per_minute = options.tokens_per_minute;
        let tokens = self.0.tokens.as_ref();
        await_limit(
            &mut deadline,
            format!("the limit tokens_per_minute = {per_minute}"),
            tokens,
            guessed,
        )
        .await?;
        let mut state = FailoverState::new(servers.len());
        let mut running = FuturesUnordered::new();
        loop {
            if let Some(number) = state.next_endpoint(servers, options.tries, deadline.remaining())
            {
                state.record_request(number);
                let permit = permit.clone();
                let mut deadline = deadline.clone();
                let finish = &finish;
                // The first request has waited for the limit before the time of any endpoint
                // started.
                let is_again = state.request_counts.iter().sum::<usize>() > 1;
                let what = what.clone();
                running.push(async move {
                    let request_future = async {
                        if is_again {
                            await_limit(&mut deadline, what, limit, 1).await?;
                        }
                        finish(
                            self.send(request, stream, number, (permit, guessed), deadline).await?,
                        )
                        .await
                    };
                    (number, request_future.await)
                });
            } else if running.is_empty() {
                break;
            }
            // The part of the remaining time after which the next endpoint is called too.
            let num_untried = state.num_untried(servers);
            let part = deadline.remaining() / (num_untried as u32 + 1);
            tokio::select! {
                Some((number, done)) = running.next() => match done {
                    Ok(done) => {
                        state.record_success(servers, number);
                        return Ok(done);
                    }
                    Err(error) => state.record_failure(servers, number, error),
                },
                _ = sleep(part), if num_untried > 0 => state.mark_slow(servers),
            }
        }
        // No tokens were sampled.
        if let Some(limit) = &self.0.tokens {
            limit.give_back(guessed as f64);
        }
        Err(state.into_error(servers, options.deadline))
    }

    /// Sends a chat request to the endpoint `number`, after waiting for the pause that the endpoint
    /// has requested, if any. Returns when the first bytes of the response have arrived.
    async fn send(
        &self,
        request: &ChatRequest,
        stream: bool,
        number: usize,
        (permit, guessed): (Arc<OwnedSemaphorePermit>, u64),
        mut deadline: CallDeadline,
    ) -> Result<ChatStream, ExternalError> {
        let server = &self.0.servers[number];
        let running = server.start_response();
        deadline.wait(server.pause_text(), sleep(server.remaining_pause())).await?;
        deadline.endpoint.clone_from(&server.name);
        let body = request.to_body(&server.model, stream).to_string();
        let (response, first) = self.post_request(server, Bytes::from(body), &mut deadline).await?;
        debug!(endpoint = server.name, stream, "a chat completion started");
        let start = ResponseStart { response, first, guessed };
        Ok(ChatStream::new(self.clone(), number, deadline, (permit, running), start))
    }

    /// Posts a request, and waits for the first bytes of the response.
    async fn post_request(
        &self,
        server: &EndpointServer,
        body: Bytes,
        deadline: &mut CallDeadline,
    ) -> Result<(ResponseBody, Option<Bytes>), ExternalError> {
        let options = &self.0.options;
        let mut response = self.0.http.post(server, body, options.max_bytes, deadline).await?;
        match response.next_bytes(options.silence, deadline).await? {
            None => Err(ExternalError::Broken {
                endpoint: server.name.clone(),
                bytes: 0,
                why: "the response is empty".into(),
            }),
            first => Ok((response, first)),
        }
    }
}

/// State of one chat call that tries several endpoints.
struct FailoverState {
    /// Number of requests to each endpoint in this call.
    request_counts: Vec<usize>,
    is_running: Vec<bool>,
    /// Whether to call a further endpoint although the requests in flight have not failed.
    is_slow: bool,
    failures: Vec<Option<ExternalError>>,
}

impl FailoverState {
    fn new(count: usize) -> Self {
        let failures = (0..count).map(|_| None).collect();
        FailoverState {
            request_counts: vec![0; count],
            is_running: vec![false; count],
            is_slow: false,
            failures,
        }
    }

    /// Returns the index of the next endpoint to call. Returns `None` if a request is in flight and
    /// not slow, or if no endpoint is left that can be called.
    fn next_endpoint(
        &self,
        servers: &[EndpointServer],
        tries: usize,
        remaining: Duration,
    ) -> Option<usize> {
        if self.is_running.contains(&true) && !self.is_slow {
            return None;
        }
        let free = (0..servers.len()).filter(|number| !self.is_running[*number]).filter(|number| {
            match &self.failures[*number] {
                None => self.request_counts[*number] == 0,
                Some(error) => {
                    error.is_safe_to_retry() && self.request_counts.iter().sum::<usize>() < tries
                }
            }
        });
        // Only servers of one model share load: which model responds must not depend on the load.
        let preference = |number: usize| {
            servers
                .iter()
                .position(|server| server.model == servers[number].model)
                .unwrap_or(number)
        };
        let ranked = free.map(|number| {
            let (pause, is_avoided, running) = servers[number].rank();
            ((pause, is_avoided, preference(number), running), number)
        });
        // A wait that would end after the deadline is useless.
        ranked.min().filter(|((pause, ..), _)| *pause <= remaining).map(|(_, number)| number)
    }

    /// Returns the number of endpoints that this call has not tried and that are not in a pause.
    fn num_untried(&self, servers: &[EndpointServer]) -> usize {
        (0..servers.len())
            .filter(|number| {
                self.request_counts[*number] == 0 && servers[*number].remaining_pause().is_zero()
            })
            .count()
    }

    fn record_request(&mut self, number: usize) {
        (self.request_counts[number], self.is_running[number], self.is_slow) =
            (self.request_counts[number] + 1, true, false);
    }

    /// Marks the endpoints with requests in flight as slow, because they have used up their
    /// fraction of the deadline.
    fn mark_slow(&mut self, servers: &[EndpointServer]) {
        self.is_slow = true;
        for (server, _) in
            servers.iter().zip(&self.is_running).filter(|(_, is_running)| **is_running)
        {
            warn!(
                endpoint = server.name,
                "a chat completion is slow, so another endpoint is called in parallel"
            );
            server.record_failure();
        }
    }

    /// Records that the endpoint `number` failed. The call continues at the next endpoint, if there
    /// is one.
    fn record_failure(&mut self, servers: &[EndpointServer], number: usize, error: ExternalError) {
        let server = &servers[number];
        warn!(endpoint = server.name, %error, "a chat completion failed");
        server.note_cause(&error);
        match &error {
            // The status handler has already set the pause that the server requested.
            ExternalError::Busy { .. } => {}
            error if error.is_safe_to_retry() => drop(server.note_rejection(None)),
            error if error.is_request_error() => {}
            // The wait for one of this client's own limits timed out.
            ExternalError::Deadline { endpoint, .. } if *endpoint != server.name => {}
            _ => server.record_failure(),
        }
        self.is_running[number] = false;
        self.is_slow = self.is_running.contains(&true);
        self.failures[number] = Some(error);
    }

    /// Records that the endpoint `number` served the request. Since the request was valid, other
    /// endpoints that rejected it as invalid count as failed.
    fn record_success(&self, servers: &[EndpointServer], number: usize) {
        servers[number].note_success();
        for (server, error) in servers.iter().zip(&self.failures) {
            if error.as_ref().is_some_and(ExternalError::is_request_error) {
                server.record_failure();
            }
        }
    }

    /// Builds the error of a call that no endpoint served. `waited` is the duration of the call.
    fn into_error(mut self, servers: &[EndpointServer], waited: Duration) -> ExternalError {
        for (failure, server) in self.failures.iter_mut().zip(servers) {
            let endpoint = server.name.clone();
            let pause = Duration::from_secs(server.remaining_pause().as_secs() + 1);
            let cause = server.describe_last_failure();
            let what = format!("an endpoint that can be called again, in {pause:?}{cause}");
            failure.get_or_insert(ExternalError::Deadline { endpoint, waited, what });
        }
        let mut failures: Vec<ExternalError> = self.failures.into_iter().flatten().collect();
        match failures.len() {
            1 => failures.remove(0),
            _ => ExternalError::All { failures },
        }
    }
}

/// Takes `amount` from the rate limit, and waits until this amount is available. Returns
/// immediately if `limit` is `None`, which means no limit.
async fn await_limit(
    deadline: &mut CallDeadline,
    what: String,
    limit: Option<&RateLimit>,
    amount: u64,
) -> Result<(), ExternalError> {
    let Some(limit) = limit else { return Ok(()) };
    let wait = limit.take(amount as f64);
    let waited = deadline.wait(what, sleep(wait)).await;
    if waited.is_err() {
        limit.give_back(amount as f64);
    }
    waited.map(|_| ())
}

#[cfg(test)]
#[path = "external/failover_tests.rs"]
mod failover_tests;

#[cfg(test)]
#[path = "external/external_tests.rs"]
mod tests;
