//! Client that uses a vLLM or SGLang server as a sampler: tokens in, tokens out, over the server's
//! HTTP API.
//!
//! **Weights** come as directories, or over a process group
//! ([`WeightBroadcast`](crate::WeightBroadcast)) with the directory as fallback. The files are
//! checked (sizes, checksums, shapes, configuration) before the server receives their path, because
//! invalid weights would crash vLLM's engine. Then requests are held back, and the server pauses,
//! loads the weights, drops its cache, gets a *label* (version and checksum of the weights), and
//! resumes. Before other requests are sent, the log-probabilities of a probe are compared with the
//! learner's, which are in the directory (`probe.json`). A server that fails in between has
//! version 0 until it has loaded weights completely. A router sends such a server the newest
//! weights before it serves again.
//!
//! **Versions of tokens** come from the server, which reports spans of labels. A token is returned
//! at once if no weights were loaded since its request, and otherwise when its span is known.
//!
//! **Log-probabilities** are log-softmax(logits / temperature) over the complete vocabulary, at
//! temperature 1 for greedy decoding. With top-p, top-k, min-p, penalties or biases they refer to
//! the modified distribution that was sampled from, and such segments are not training targets.
//! They are not bitwise equal to the learner's.
//!
//! **Sampling** depends on seed, stream and position and, on these servers, also on what else is
//! computed at the time: a repeated request returns another completion.
//!
//! A server may **sleep**: it has then released its device memory, including its weights. Requests
//! wait until it has loaded weights again, which wakes it.
//!
//! Out of scope: several servers ([`Router`](crate::Router)), ownership of devices
//! ([`Colocation`](crate::Colocation)), and starting servers.

mod call;
mod dialect;
mod http;
mod options;
mod receive;
mod sglang;
mod sleep;
mod stops;
#[cfg(test)]
pub(crate) mod testing;
mod vllm;
mod weight_dir;
mod weight_update;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{Load, PolicyError, SampleRequest, SampleStream, Sampler, WeightsRef};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use crate::calls::InFlightCalls;
use crate::devices::SamplerWaker;
use call::ServerCall;
use dialect::{Facts, ServerDialect};
use http::Http;
pub use options::{InFlight, ServerKind, ServerOptions, TokenizerProbe};
use sleep::SleepState;
pub use weight_dir::DirChecks;
pub(crate) use weight_dir::{PROBE, ProbeFile};
pub use weight_update::ProbeDifference;
use weight_update::{LoadedWeights, format_label};

/// A vLLM or SGLang server as a sampler. Clones refer to the same server and share its state.
#[derive(Clone)]
pub struct Server(Arc<ServerInner>);

struct ServerInner {
    options: ServerOptions,
    http: Http,
    dialect: Box<dyn ServerDialect>,
    facts: tokio::sync::Mutex<Option<Arc<Facts>>>,
    calls: InFlightCalls,
    /// Weights that requests use, and whether requests may be sent.
    gate: watch::Sender<RequestGate>,
    /// Locked while weights are replaced, and while the server falls asleep.
    update_lock: tokio::sync::Mutex<()>,
    sleep: Mutex<SleepState>,
    /// Object that wakes the server if it gets a request while asleep. `None` unless the server
    /// shares its devices.
    wakes: Mutex<Option<Weak<dyn SamplerWaker>>>,
    paused: Mutex<PauseClock>,
    /// Number of events received, over all completions.
    progress: std::sync::atomic::AtomicU64,
    difference: Mutex<Option<ProbeDifference>>,
}

/// Weights that requests to the server use, and whether requests may be sent.
#[derive(Debug, Clone, Default)]
struct RequestGate {
    /// Number of times that the weights were replaced, including failed attempts.
    changes: u64,
    /// Whether requests are held back, because weights are being replaced or the server sleeps.
    is_closed: bool,
    /// Whether the server sleeps and has no weights until it is woken.
    is_asleep: bool,
    /// Weights that the server has loaded completely. `None` if it has none.
    weights: Option<Arc<LoadedWeights>>,
}

/// Clock of the time in which requests to the server were held back.
#[derive(Debug, Default)]
struct PauseClock {
    total: Duration,
    since: Option<Instant>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Creates a client of an inference server, without contacting the server. Reads the API key
    /// from the environment.
    ///
    /// # Errors
    /// Returns [`PolicyError::Invalid`] if the address is invalid or the key is missing.
    pub fn new(options: ServerOptions) -> Result<Self, PolicyError> {
        let http = Http::new(options.kind.name(), &options.url, options.key_env.as_ref())?;
        let dialect: Box<dyn ServerDialect> = match options.kind {
            ServerKind::Vllm => Box::new(vllm::Vllm),
            ServerKind::Sglang => Box::new(sglang::Sglang { adapters: options.adapters }),
        };
        Ok(Server(Arc::new(ServerInner {
            options,
            http,
            dialect,
            facts: tokio::sync::Mutex::default(),
            calls: InFlightCalls::default(),
            gate: watch::Sender::new(RequestGate::default()),
            update_lock: tokio::sync::Mutex::new(()),
            sleep: Mutex::default(),
            wakes: Mutex::default(),
            paused: Mutex::default(),
            progress: 0.into(),
            difference: Mutex::default(),
        })))
    }

    /// Inspects the server: checks that it is reachable and was started with the required options.
    /// Returns the server's kind, version and model as text.
    ///
    /// # Errors
    /// Returns an error if the server is unreachable, which may be temporary. Returns an error that
    /// names the cause if a flag is missing, the context is too short, or the tokenizer differs.
    pub async fn inspect(&self) -> Result<String, PolicyError> {
        let facts = self.0.query_facts().await?;
        Ok(format!("{} {} with {}", self.0.options.kind.name(), facts.program, facts.model))
    }

    /// Returns the difference between the server's log-probabilities of the newest probe and the
    /// learner's. `None` before the first probe.
    pub fn probe_difference(&self) -> Option<ProbeDifference> {
        *lock(&self.0.difference)
    }
}

impl ServerInner {
    /// Returns the properties of the server. They are queried once, then cached.
    async fn query_facts(&self) -> Result<Arc<Facts>, PolicyError> {
        let mut known = self.facts.lock().await;
        if let Some(facts) = &*known {
            return Ok(Arc::clone(facts));
        }
        self.wake_if_asleep().await?;
        if self.dialect.is_paused(&self.http, self.options.response_timeout).await {
            warn!(server = self.http.name, "resuming a server that was left paused");
            self.dialect.resume(&self.http, self.options.response_timeout).await?;
        }
        let facts = Arc::new(self.dialect.inspect(&self.http, &self.options).await?);
        if self.options.sleeps {
            self.dialect.check_sleeps(&self.http, self.options.response_timeout).await?;
        }
        *known = Some(Arc::clone(&facts));
        Ok(facts)
    }

    /// Returns the version of the weights that the server has loaded completely, or 0 if the
    /// version is unknown, for example after a restart.
    async fn version(&self) -> Result<u64, PolicyError> {
        let gate = self.gate.borrow().clone();
        let Some(weights) = gate.weights.filter(|_| !gate.is_closed) else {
            // Unless weights are being replaced, still checks that the server is reachable.
            if !gate.is_closed {
                self.query_facts().await?;
            }
            return Ok(0);
        };
        Ok(if self.still_has(&weights).await? { weights.version } else { 0 })
    }
}

#[async_trait]
impl Sampler for Server {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        let inner = &self.0;
        request.validate(inner.options.vocabulary)?;
        request.check_room(inner.options.context)?;
        if let Some(why) = inner.dialect.rejection_reason(&request.params) {
            return Err(inner.http.rejection_error(why));
        }
        if !request.params.stop_strings.is_empty() && inner.options.tokens.is_none() {
            return Err(inner
                .http
                .rejection_error("stop strings require a sampler that knows its vocabulary"));
        }
        let (events, stream) = SampleStream::channel();
        let (call_guard, aborted) = inner.calls.register(request.stream);
        let call = ServerCall::new(Arc::clone(inner), request, events, aborted);
        tokio::spawn(async move {
            call.run().await;
            drop(call_guard);
        });
        Ok(stream)
    }

    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError> {
        Ok(self.0.calls.abort(stream))
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        let reported =
            self.0.dialect.query_load(&self.0.http, self.0.options.response_timeout).await?;
        Ok(reported.unwrap_or_else(|| Load { running: self.0.calls.count(), ..Load::default() }))
    }

    async fn paused(&self) -> Result<Duration, PolicyError> {
        let paused = lock(&self.0.paused);
        Ok(paused.total + paused.since.map(|since| since.elapsed()).unwrap_or_default())
    }

    async fn update_weights(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        self.0.update_weights(weights).await
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        self.0.version().await
    }
}

#[cfg(test)]
#[path = "server/server_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "server/odd_tests.rs"]
mod odd_tests;
