//! A server of vLLM or SGLang as a sampler: tokens in, tokens out, over its own HTTP API.
//!
//! **Weights** come as folders, or over a process group ([`Pushing`](crate::Pushing)), with the folder to
//! fall back to. Each is checked (sizes, checksums, shapes, configuration) before the server is told of it: a
//! bad one would end vLLM's engine. Then: no request goes out, the server stands still, reads the folder or
//! is sent what is in it, forgets what it had computed, is given a *label* (version and checksum of the
//! weights), and goes on; before anything is drawn for others, the log-probabilities of a probe are compared
//! with the learner's, which lie in the folder (`probe.json`). A server that fails in between has version 0
//! until it has adopted weights as a whole: a router sends it the newest ones before it serves again.
//!
//! **Versions of tokens** are the server's own, by the spans of labels that it tells. A token is handed out
//! at once where no weights have come since its request, and otherwise when its span is known.
//!
//! **Log-probabilities** are those of log-softmax(logits / temperature) over the whole vocabulary, at 1 for
//! greedy decoding; with top-p, top-k, min-p, penalties or biases they are those of what is drawn from,
//! and such segments are no targets. They differ from the learner's in bits.
//!
//! **Draws** depend on seed, stream and place, and, on these servers, also on what else is computed at the
//! time: a reply that is asked for again is another one.
//!
//! A server may **sleep**: it has then given the memory of its devices back, and its weights with it.
//! Requests wait until it has adopted weights again, which wakes it.
//!
//! Not here: several servers (a [`Router`](crate::Router)), whose turn it is ([`Turns`](crate::Turns)),
//! starting servers.

mod adopt;
mod call;
mod dialect;
mod folder;
mod http;
mod options;
mod receive;
mod sglang;
mod sleep;
mod stops;
#[cfg(test)]
pub(crate) mod testing;
mod vllm;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{Load, PolicyError, SampleRequest, SampleStream, Sampler, WeightsRef};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use crate::calls::Calls;
use crate::devices::Wakes;
pub use adopt::ProbeDifference;
use adopt::{Adopted, label_of};
use call::Call;
use dialect::{Dialect, Facts};
pub use folder::FolderChecks;
pub(crate) use folder::{PROBE, ProbeFile};
use http::Http;
pub use options::{InFlight, ServerKind, ServerOptions, TokenizerProbe};
use sleep::Sleep;

/// A server as a sampler. Clones are the same.
#[derive(Clone)]
pub struct Server(Arc<Inner>);

struct Inner {
    options: ServerOptions,
    http: Http,
    dialect: Box<dyn Dialect>,
    facts: tokio::sync::Mutex<Option<Arc<Facts>>>,
    calls: Calls,
    /// Weights that requests are asked under; `None` while they are replaced.
    gate: watch::Sender<Gate>,
    /// Held by whoever replaces weights, or has it sleep.
    adopting: tokio::sync::Mutex<()>,
    sleep: Mutex<Sleep>,
    /// Whoever wakes it when it is asked in its sleep.
    wakes: Mutex<Option<Weak<dyn Wakes>>>,
    paused: Mutex<Paused>,
    /// Events that came, of all replies.
    progress: std::sync::atomic::AtomicU64,
    difference: Mutex<Option<ProbeDifference>>,
}

/// Whether requests may go out, and under which weights.
#[derive(Debug, Clone, Default)]
struct Gate {
    /// How often weights were replaced, or tried to be.
    changes: u64,
    /// Whether they are being replaced, or it sleeps.
    is_closed: bool,
    /// Whether it has no weights before it is woken.
    is_asleep: bool,
    /// Weights that the server has, as a whole.
    weights: Option<Arc<Adopted>>,
}

/// For how long no requests went out.
#[derive(Debug, Default)]
struct Paused {
    total: Duration,
    since: Option<Instant>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// A server at an address; nothing is asked of it yet. Its key is read from the environment now.
    ///
    /// # Errors
    /// When the address cannot be used, or the key is missing.
    pub fn new(options: ServerOptions) -> Result<Self, PolicyError> {
        let http = Http::new(options.kind.name(), &options.url, options.key_env.as_ref())?;
        let dialect: Box<dyn Dialect> = match options.kind {
            ServerKind::Vllm => Box::new(vllm::Vllm),
            ServerKind::Sglang => Box::new(sglang::Sglang { adapters: options.adapters }),
        };
        Ok(Server(Arc::new(Inner {
            options,
            http,
            dialect,
            facts: tokio::sync::Mutex::default(),
            calls: Calls::default(),
            gate: watch::Sender::new(Gate::default()),
            adopting: tokio::sync::Mutex::new(()),
            sleep: Mutex::default(),
            wakes: Mutex::default(),
            paused: Mutex::default(),
            progress: 0.into(),
            difference: Mutex::default(),
        })))
    }

    /// Looks whether the server is there, and was started as it needs to be. Of one that was, says which
    /// program it is.
    ///
    /// # Errors
    /// When it is not there (this may pass), or names the flag that is missing, a context that is too short,
    /// another tokenizer.
    pub async fn look(&self) -> Result<String, PolicyError> {
        let facts = self.0.facts().await?;
        Ok(format!("{} {} with {}", self.0.options.kind.name(), facts.program, facts.model))
    }

    /// How far the log-probabilities of the newest probe were from the learner's.
    pub fn difference(&self) -> Option<ProbeDifference> {
        *lock(&self.0.difference)
    }
}

impl Inner {
    /// Facts about the server, which it is asked for once in its life.
    async fn facts(&self) -> Result<Arc<Facts>, PolicyError> {
        let mut known = self.facts.lock().await;
        if let Some(facts) = &*known {
            return Ok(Arc::clone(facts));
        }
        self.rouse().await?;
        if self.dialect.is_paused(&self.http, self.options.answer).await {
            warn!(server = self.http.name, "it was left paused, and is resumed");
            self.dialect.resume(&self.http, self.options.answer).await?;
        }
        let facts = Arc::new(self.dialect.look(&self.http, &self.options).await?);
        if self.options.sleeps {
            self.dialect.check_sleeps(&self.http, self.options.answer).await?;
        }
        *known = Some(Arc::clone(&facts));
        Ok(facts)
    }

    /// The version of the weights that the server has as a whole; 0 where that is not known of it, as after a
    /// restart.
    async fn version(&self) -> Result<u64, PolicyError> {
        let gate = self.gate.borrow().clone();
        let Some(weights) = gate.weights.filter(|_| !gate.is_closed) else {
            // Whether it is there is asked all the same, of one that is not being given weights.
            if !gate.is_closed {
                self.facts().await?;
            }
            return Ok(0);
        };
        Ok(if self.has(&weights).await? { weights.version } else { 0 })
    }
}

#[async_trait]
impl Sampler for Server {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        let inner = &self.0;
        request.validate(inner.options.vocabulary)?;
        request.check_room(inner.options.context)?;
        if let Some(why) = inner.dialect.refuses(&request.params) {
            return Err(inner.http.refuses(why));
        }
        if !request.params.stop_strings.is_empty() && inner.options.tokens.is_none() {
            return Err(inner.http.refuses("stop strings need a sampler that knows its vocabulary"));
        }
        let (events, stream) = SampleStream::channel();
        let (registered, aborted) = inner.calls.register(request.stream);
        let call = Call::new(Arc::clone(inner), request, events, aborted);
        tokio::spawn(async move {
            call.run().await;
            drop(registered);
        });
        Ok(stream)
    }

    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError> {
        Ok(self.0.calls.abort(stream))
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        let told = self.0.dialect.load(&self.0.http, self.0.options.answer).await?;
        Ok(told.unwrap_or_else(|| Load { running: self.0.calls.count(), ..Load::default() }))
    }

    async fn paused(&self) -> Result<Duration, PolicyError> {
        let paused = lock(&self.0.paused);
        Ok(paused.total + paused.since.map(|since| since.elapsed()).unwrap_or_default())
    }

    async fn adopt(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        self.0.adopt(weights).await
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
