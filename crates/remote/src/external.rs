//! Policies that others serve: any OpenAI-compatible chat API, as an opponent, a judge or a demonstrator.
//!
//! A call is made again only where nothing can happen twice by it: when it was turned away (429, 503), when
//! no connection came about, or when nothing of the answer came. Waits between tries double, with jitter, and
//! are at least what the server asks for; meanwhile another endpoint is asked, where there is one. Whatever
//! is sent or received is bounded, in bytes and in time. Keys come from the environment and are shown
//! nowhere.

mod endpoint;
mod error;
mod http;
mod limits;
mod reply;
mod request;
mod service;
mod sse;
mod stream;
#[cfg(test)]
mod testing;
mod waits;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dressage_policy::awake::sleep;
use tokio::sync::Semaphore;
use tracing::{debug, warn};

pub use endpoint::Endpoint;
pub(crate) use endpoint::{Server, plain_uri};
pub use error::ExternalError;
use http::{Answer, Http};
pub(crate) use http::{MOST_ERROR_BYTES, cut, message_of};
use limits::Bucket;
pub use reply::{CalledTool, ChatEvent, ChatReply, Finish, Usage};
pub use request::{ChatParams, ChatRequest};
pub use service::{Service, ServiceOptions};
pub(crate) use sse::Decoder;
use stream::Begun;
pub use stream::ChatStream;
use waits::Waits;

/// Settings of an external policy.
#[derive(Debug, Clone, PartialEq)]
pub struct ExternalOptions {
    /// Servers of the same model: the one with the fewest calls is asked, of several the first.
    pub endpoints: Vec<Endpoint>,
    /// Most calls under way at once.
    pub most_running: usize,
    /// Most requests in a minute, 0 for any number,
    pub requests_per_minute: u64,
    /// and most tokens of prompts and replies.
    pub tokens_per_minute: u64,
    /// Times that a call is tried, where that cannot do anything twice.
    pub tries: usize,
    /// The time that a call has, from the wait for a place to the end of the reply,
    pub deadline: Duration,
    /// and how long a reply that is streamed may stop.
    pub silence: Duration,
    /// File of certificates (PEM) that are trusted beside Mozilla's list, for servers with an authority of
    /// their own.
    pub roots: Option<PathBuf>,
    /// Most bytes of an answer,
    pub most_bytes: usize,
    /// and of one event of a stream.
    pub most_event_bytes: usize,
}

impl Default for ExternalOptions {
    fn default() -> Self {
        ExternalOptions {
            endpoints: Vec::new(),
            most_running: 16,
            requests_per_minute: 0,
            tokens_per_minute: 0,
            tries: 6,
            deadline: Duration::from_secs(600),
            silence: Duration::from_secs(120),
            roots: None,
            most_bytes: 16 << 20,
            most_event_bytes: 1 << 20,
        }
    }
}

/// A policy that others serve.
#[derive(Debug, Clone)]
pub struct External(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    options: ExternalOptions,
    servers: Vec<Server>,
    http: Http,
    places: Arc<Semaphore>,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

impl External {
    /// A policy behind one endpoint or several. Keys are read from the environment now.
    ///
    /// # Errors
    /// When an address or an option cannot be used, or a key is missing: which.
    pub fn new(options: ExternalOptions) -> Result<Self, ExternalError> {
        Self::with_environment(options, |name| std::env::var(name))
    }

    fn with_environment(
        options: ExternalOptions,
        variable: impl Fn(&str) -> Result<String, std::env::VarError>,
    ) -> Result<Self, ExternalError> {
        if options.endpoints.is_empty() {
            return Err(ExternalError::Invalid("an external policy has no endpoint; give it one".into()));
        }
        let sizes = [
            ("most_running", options.most_running),
            ("tries", options.tries),
            ("most_bytes", options.most_bytes),
            ("most_event_bytes", options.most_event_bytes),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(ExternalError::Invalid(format!("{name} = 0, but it must be at least 1")));
        }
        let servers = options.endpoints.iter().map(|endpoint| Server::new(endpoint, &variable));
        Ok(External(Arc::new(Inner {
            servers: servers.collect::<Result<_, _>>()?,
            http: Http::new(options.roots.as_deref())?,
            places: Arc::new(Semaphore::new(options.most_running.min(Semaphore::MAX_PERMITS))),
            requests: Bucket::new(options.requests_per_minute),
            tokens: Bucket::new(options.tokens_per_minute),
            options,
        })))
    }

    /// Asks for a reply that is streamed. Returns when its first bytes have come.
    ///
    /// # Errors
    /// When no endpoint begins one within the deadline and the tries: the last reason.
    pub async fn stream(&self, request: &ChatRequest) -> Result<ChatStream, ExternalError> {
        self.ask(request, true).await
    }

    /// Asks for a whole reply.
    ///
    /// # Errors
    /// As for one that is streamed; when it breaks off, or is no chat completion.
    pub async fn chat(&self, request: &ChatRequest) -> Result<ChatReply, ExternalError> {
        let stream = self.ask(request, false).await?;
        stream.whole().await
    }

    async fn ask(&self, request: &ChatRequest, stream: bool) -> Result<ChatStream, ExternalError> {
        let Inner { options, servers, .. } = &*self.0;
        let names: Vec<&str> = servers.iter().map(|server| &*server.name).collect();
        let mut waits = Waits::new(options.deadline, names.join(", "));
        let what = format!("a place among {} calls", options.most_running);
        let place = waits.wait(what, self.0.places.clone().acquire_owned()).await?;
        let place = place.map_err(|_| ExternalError::Invalid("the policy is closed".into()))?;
        let mut last: Option<ExternalError> = None;
        let mut guessed = None;
        for _ in 0..options.tries {
            // Among those that may be asked, the one with the least to do.
            let awake =
                servers.iter().enumerate().min_by_key(|(_, server)| (server.rests_for(), server.running()));
            let Some((number, server)) = awake else { break };
            let rest = server.rests_for();
            // There is no point in a wait that would end after the deadline.
            if rest > waits.left() {
                break;
            }
            waits.wait(format!("{} to be asked again", server.name), sleep(rest)).await?;
            let body = request.body(&server.model, stream).to_string();
            let (per_minute, limit) = (options.requests_per_minute, self.0.requests.as_ref());
            await_limit(&mut waits, format!("the limit requests_per_minute = {per_minute}"), limit, 1)
                .await?;
            if guessed.is_none() {
                let tokens = request.tokens(body.as_bytes());
                let (per_minute, limit) = (options.tokens_per_minute, self.0.tokens.as_ref());
                await_limit(&mut waits, format!("the limit tokens_per_minute = {per_minute}"), limit, tokens)
                    .await?;
                guessed = Some(tokens);
            }
            waits.endpoint.clone_from(&server.name);
            let running = server.begun();
            match self.begin(server, Bytes::from(body), &mut waits).await {
                Ok((answer, first)) => {
                    server.answered();
                    debug!(endpoint = server.name, stream, "a chat completion begins");
                    let begun = Begun { answer, first, guessed: guessed.unwrap_or_default() };
                    return Ok(ChatStream::new(self.clone(), number, waits, (place, running), begun));
                }
                Err(error) if error.repeats_nothing() => {
                    // One that answered with a status has said how long it wants to be left alone.
                    if !matches!(error, ExternalError::Busy { .. }) {
                        server.turned_away(None);
                    }
                    warn!(endpoint = server.name, %error, "a chat completion is asked for again");
                    last = Some(error);
                }
                Err(error) => {
                    last = Some(error);
                    break;
                }
            }
        }
        // Nothing was drawn.
        if let (Some(bucket), Some(tokens)) = (&self.0.tokens, guessed) {
            bucket.give_back(tokens as f64);
        }
        let (endpoint, waited) = (waits.endpoint.clone(), options.deadline);
        let what = "an endpoint that may be asked again".to_owned();
        Err(last.unwrap_or(ExternalError::Deadline { endpoint, waited, what }))
    }

    /// Sends a request, and waits for the first bytes of its answer.
    async fn begin(
        &self,
        server: &Server,
        body: Bytes,
        waits: &mut Waits,
    ) -> Result<(Answer, Option<Bytes>), ExternalError> {
        let options = &self.0.options;
        let mut answer = self.0.http.post(server, body, options.most_bytes, waits).await?;
        match answer.next(options.silence, waits).await? {
            None => Err(ExternalError::Broken {
                endpoint: server.name.clone(),
                bytes: 0,
                why: "the answer is empty".into(),
            }),
            first => Ok((answer, first)),
        }
    }
}

/// Takes an amount from a limit, where there is one, and waits until it is there.
async fn await_limit(
    waits: &mut Waits,
    what: String,
    bucket: Option<&Bucket>,
    amount: u64,
) -> Result<(), ExternalError> {
    let Some(bucket) = bucket else { return Ok(()) };
    let wait = bucket.take(amount as f64);
    let waited = waits.wait(what, sleep(wait)).await;
    if waited.is_err() {
        bucket.give_back(amount as f64);
    }
    waited.map(|_| ())
}

#[cfg(test)]
#[path = "external/external_tests.rs"]
mod tests;
