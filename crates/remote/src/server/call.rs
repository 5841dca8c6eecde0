//! One completion from a server, across changes of weights.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use levade_policy::process_time::with_timeout;
use levade_policy::{FinishReason, PolicyError, SampleEvent, SampleRequest, TopLogprobs};
use serde_json::Value;
use tokio::sync::{mpsc, watch};

use super::dialect::{CompletionEnd, RequestTarget, StreamChunk, WeightSpan};
use super::http::EventStream;
use super::options::InFlight;
use super::stops::StopStringSearch;
use super::weight_update::{LoadedWeights, parse_version};
use super::{RequestGate, ServerInner};

/// Maximum number of consecutive requests under the same weights if the server aborts each of them.
const MAX_TRIES: usize = 3;

/// A sampling call in flight on one server.
pub(super) struct ServerCall {
    server: Arc<ServerInner>,
    /// Request for the remaining tokens. Tokens that the caller has received are part of its
    /// prompt.
    request: SampleRequest,
    events: mpsc::UnboundedSender<Result<SampleEvent, PolicyError>>,
    aborted: watch::Receiver<bool>,
    gate: watch::Receiver<RequestGate>,
    /// Whether the maximum number of tokens was reduced so that the completion fits the context.
    is_truncated: bool,
}

/// Progress of one request to the server: the tokens that have arrived.
#[derive(Default)]
struct CallProgress {
    /// Tokens that have arrived but were not sent to the caller, with their log-probabilities and
    /// alternatives.
    pending: Vec<(u32, f32, TopLogprobs)>,
    /// Number of tokens that were sent to the caller.
    emitted: usize,
    /// Number of tokens that were sent to the caller before the server reported the label of their
    /// weights.
    unlabelled: usize,
    /// Whether the last token that has arrived completes a stop string.
    is_stopped: bool,
}

/// Result of a request to the server.
enum RequestOutcome {
    /// The completion is complete.
    Complete(FinishReason),
    /// The completion is partial. The remaining tokens must be requested, with the tokens so far as
    /// part of the prompt.
    Retry,
    /// The completion stopped at an end-of-text token of the model's files, which the request
    /// ignores, so the call continues with another request.
    Continue,
}

impl ServerCall {
    pub fn new(
        server: Arc<ServerInner>,
        mut request: SampleRequest,
        events: mpsc::UnboundedSender<Result<SampleEvent, PolicyError>>,
        aborted: watch::Receiver<bool>,
    ) -> Self {
        let gate = server.gate.subscribe();
        let room = server.options.context - request.prompt.len().min(server.options.context);
        let is_truncated = request.params.max_tokens > room;
        request.params.max_tokens = request.params.max_tokens.min(room);
        ServerCall { server, request, events, aborted, gate, is_truncated }
    }

    /// Runs the sampling call until it ends or the caller drops its stream.
    pub async fn run(mut self) {
        let events = self.events.clone();
        let mut aborted = self.aborted.clone();
        let end = tokio::select! {
            biased;
            () = events.closed() => return,
            result = aborted.wait_for(|aborted| *aborted) => match result {
                Ok(_) => Ok(FinishReason::Aborted),
                Err(_) => return,
            },
            end = self.serve() => end,
        };
        // The caller may have dropped its stream, so failures to send are ignored.
        drop(match end {
            Ok(reason) => events.send(Ok(SampleEvent::Finished(reason))),
            Err(error) => events.send(Err(error)),
        });
    }

    async fn serve(&mut self) -> Result<FinishReason, PolicyError> {
        let mut tries = (0, 0);
        loop {
            let (changes, weights) = self.wait_for_weights().await?;
            tries = if tries.1 == changes { (tries.0 + 1, changes) } else { (1, changes) };
            if tries.0 > MAX_TRIES {
                return Err(self
                    .server
                    .http
                    .stopped_error("another client keeps aborting the server's completions"));
            }
            if let Some(top) = self.request.params.prompt_logprobs {
                let prompt = self.request.prompt.clone();
                let scored = tokio::select! {
                    scored = self.server.score_prompt(&prompt, top, &weights) => scored?,
                    () = wait_for_weight_change(&mut self.gate, changes) => continue,
                };
                let (logprobs, top) = scored;
                self.emit(SampleEvent::Prompt { logprobs, top });
                self.request.params.prompt_logprobs = None;
            }
            if self.request.params.max_tokens == 0 {
                return Ok(if self.is_truncated {
                    FinishReason::Context
                } else {
                    FinishReason::Length
                });
            }
            match self.generate(changes, &weights).await? {
                RequestOutcome::Complete(reason) => return Ok(reason),
                // A token arrived, so the request counts as progress.
                RequestOutcome::Continue => tries.0 = 0,
                RequestOutcome::Retry => {
                    if let Some(why) = self.server.dialect.rejection_reason(&self.request.params) {
                        return Err(self.server.http.rejection_error(why));
                    }
                }
            }
        }
    }

    fn emit(&self, event: SampleEvent) {
        self.server.progress.fetch_add(1, Ordering::Relaxed);
        // `run` notices when the caller drops its stream.
        self.events.send(Ok(event)).ok();
    }

    /// Waits until requests may be sent. Wakes a sleeping server as soon as its devices are free.
    /// Returns the number of weight replacements so far, and the server's weights.
    ///
    /// # Errors
    /// Returns an error if a replacement of the weights takes too long, if the server cannot be
    /// woken, or if its weights are older than the request requires.
    async fn wait_for_weights(&mut self) -> Result<(u64, Arc<LoadedWeights>), PolicyError> {
        let server = Arc::clone(&self.server);
        let min_version = self.request.min_version;
        let limit = server.options.update_timeout * 2;
        let gate = loop {
            let gate_change = async {
                let gate = self.gate.wait_for(|gate| !gate.is_closed || gate.is_asleep).await;
                gate.map(|gate| gate.clone())
            };
            let gate = match with_timeout(limit, gate_change).await {
                Some(Ok(gate)) => gate,
                Some(Err(_)) => return Err(server.http.stopped_error("the server was closed")),
                None => {
                    let what = format!("{} to load weights", server.http.name);
                    return Err(PolicyError::Deadline(limit, what));
                }
            };
            if !gate.is_asleep {
                break gate;
            }
            let wakes = super::lock(&server.wakes).as_ref().and_then(Weak::upgrade);
            match wakes {
                Some(wakes) => wakes.wake().await?,
                None => {
                    return Err(server
                        .http
                        .stopped_error("the server is asleep; wake or restart it"));
                }
            }
            let now = self.gate.borrow();
            if now.is_asleep && now.changes == gate.changes {
                return Err(server
                    .http
                    .stopped_error("the server is still asleep although other servers are awake"));
            }
        };
        match gate.weights {
            Some(weights) if weights.version < min_version => {
                Err(self.behind_error(min_version, weights.version))
            }
            Some(weights) => Ok((gate.changes, weights)),
            None if gate.changes > 0 => {
                Err(server.http.stopped_error("the server has not loaded the weights completely"))
            }
            None if min_version > 0 => Err(self.behind_error(min_version, 0)),
            // No run has loaded weights: the server samples from those that it was started with.
            None => {
                let facts = server.query_facts().await?;
                let mark = server
                    .dialect
                    .query_label(&server.http, &facts, server.options.response_timeout)
                    .await?;
                let label = "as started".to_owned();
                let model = facts.model.clone();
                let seeds = facts.seeds;
                let probe = None;
                Ok((
                    gate.changes,
                    Arc::new(LoadedWeights { version: 0, label, mark, model, seeds, probe }),
                ))
            }
        }
    }

    fn behind_error(&self, min_version: u64, version: u64) -> PolicyError {
        PolicyError::Behind { policy: self.request.policy.clone(), min_version, version }
    }

    /// Returns the random seed for the remaining tokens. Each part of a completion has its own
    /// seed.
    fn seed_of_remaining_tokens(&self) -> u64 {
        let SampleRequest { seed, stream, params, .. } = &self.request;
        (levade_policy::uniform(*seed, *stream, params.sampled_before as u64) * (u64::MAX as f64))
            as u64
    }

    /// Sends one request to the server, and sends its tokens to the caller.
    async fn generate(
        &mut self,
        changes: u64,
        weights: &LoadedWeights,
    ) -> Result<RequestOutcome, PolicyError> {
        let server = Arc::clone(&self.server);
        let target = RequestTarget {
            model: &weights.model,
            label: &weights.label,
            seed: weights.seeds.then(|| self.seed_of_remaining_tokens()),
        };
        let body = server.dialect.generate_body(&self.request, &target);
        let keeps = server.options.in_flight == InFlight::Keep;
        // Requests continue with their old adapter after an adapter is replaced.
        let adapters = server.options.adapters;
        let watches = !(keeps && adapters);
        let top = self.request.params.top_logprobs;
        let route = server.dialect.sampling_route();
        let mut events = tokio::select! {
            biased;
            // The request may have reached the server, but none of its tokens were returned.
            () = wait_for_weight_change(&mut self.gate, changes) => {
                return Ok(RequestOutcome::Retry);
            }
            events = server.http.stream(route, &body, server.options.silence) => events?,
        };
        let strings = self.request.params.stop_strings.clone();
        let bytes = server.options.tokens.clone();
        let mut stops = StopStringSearch::new(&strings, bytes.as_deref());
        let max_count = self.request.params.max_tokens;
        let mut progress = CallProgress::default();
        let mut is_crossing = false;
        let mut gate = self.gate.clone();
        loop {
            let event = tokio::select! {
                biased;
                () = wait_for_weight_change(&mut gate, changes), if watches && !is_crossing => {
                    if !keeps {
                        return Ok(RequestOutcome::Retry);
                    }
                    is_crossing = true;
                    continue;
                }
                event = self.next_event(&mut events, progress.emitted) => event?,
            };
            let Some(event) = event else {
                return Err(server
                    .http
                    .stopped_error("the completion ended without a finish reason"));
            };
            let seen = progress.emitted + progress.pending.len();
            let chunk = server
                .dialect
                .parse_chunk(&event, seen, top)
                .map_err(|why| server.http.stopped_error(&why))?;
            let StreamChunk { tokens, logprobs, top, spans, end } = chunk;
            self.check_tokens(&tokens, seen, max_count)?;
            if let (Some(spans), Some(_)) = (&spans, &end) {
                let num_labelled = spans.last().map_or(0, |span| span.end);
                let all = seen + tokens.len();
                if num_labelled < all {
                    return Err(server.http.stopped_error(&format!(
                        "the server reports weights for {num_labelled} of {all} tokens"
                    )));
                }
            }
            // With adapters, the labels are those of the base model.
            let spans = spans.filter(|_| !adapters);
            let mut top = top.into_iter();
            let before = progress.pending.len();
            let come = tokens.into_iter().zip(logprobs);
            // Tokens after a stop string are dropped.
            if !progress.is_stopped {
                progress.pending.extend(
                    come.map(|(id, logprob)| (id, logprob, top.next().unwrap_or_default())),
                );
                let params = &self.request.params;
                let stop = (before..progress.pending.len()).find(|at| {
                    stops.push_token(progress.pending[*at].0)
                        && (params.sampled_before + *at + 1 > params.min_tokens)
                });
                if let Some(at) = stop {
                    progress.pending.truncate(at + 1);
                    progress.is_stopped = true;
                }
            }
            if let Some(spans) = &spans {
                self.check_labels(spans, &progress, weights)?;
            }
            match spans.filter(|_| is_crossing) {
                Some(spans) => self.emit_by_spans(&spans, &mut progress, weights)?,
                None if !is_crossing => {
                    self.emit_tokens(&mut progress, usize::MAX, weights.version);
                    progress.unlabelled = progress.emitted;
                }
                // Without spans, it is unknown which weights sampled these tokens.
                None => self.emit(SampleEvent::Tokens {
                    tokens: Vec::new(),
                    logprobs: Vec::new(),
                    top: Vec::new(),
                    version: weights.version,
                }),
            }
            // Until then the stream is read for the labels of the held tokens.
            if progress.is_stopped && progress.pending.is_empty() {
                return Ok(RequestOutcome::Complete(FinishReason::StopString));
            }
            if end.is_some() && !progress.pending.is_empty() {
                return Err(server.http.stopped_error(
                    "the server does not report which weights sampled the end of a completion",
                ));
            }
            if let Some(end) = &end {
                self.check_end(end, progress.emitted, max_count)?;
            }
            match end {
                None => {}
                Some(CompletionEnd::Token(id)) if !self.request.params.stop_ids.contains(&id) => {
                    return Ok(RequestOutcome::Continue);
                }
                Some(CompletionEnd::Stop | CompletionEnd::Token(_)) => {
                    return Ok(RequestOutcome::Complete(FinishReason::StopId));
                }
                Some(CompletionEnd::Length) if self.is_truncated => {
                    return Ok(RequestOutcome::Complete(FinishReason::Context));
                }
                Some(CompletionEnd::Length) => {
                    return Ok(RequestOutcome::Complete(FinishReason::Length));
                }
                // A change of weights, or another client, has aborted the request.
                Some(CompletionEnd::Abort) => return Ok(RequestOutcome::Retry),
                Some(CompletionEnd::Failed(why)) => return Err(server.http.stopped_error(&why)),
            }
        }
    }

    /// Returns the next event of the server's stream, or `None` at the end. `seen` is the number of
    /// tokens that have arrived.
    ///
    /// # Errors
    /// Returns an error if the connection breaks, or if the server sends nothing for any call for
    /// too long.
    async fn next_event(
        &self,
        events: &mut EventStream,
        seen: usize,
    ) -> Result<Option<Value>, PolicyError> {
        let server = &self.server;
        let silence = self.server.options.silence;
        let mut next = std::pin::pin!(events.next());
        let data = loop {
            let progress = server.progress.load(Ordering::Relaxed);
            match with_timeout(silence, &mut next).await {
                Some(data) => break data.map_err(|why| server.http.stopped_error(&why))?,
                // The server samples for other calls, and this call waits in its queue.
                None if progress != server.progress.load(Ordering::Relaxed) => {}
                None if server.gate.borrow().is_closed => {}
                None => {
                    let paused = server
                        .dialect
                        .is_paused(&server.http, server.options.response_timeout)
                        .await;
                    let why = if paused { ", which reports that it is paused" } else { "" };
                    let what = format!(
                        "token {} of a completion from {}{why}",
                        seen + 1,
                        server.http.name
                    );
                    return Err(PolicyError::Deadline(silence, what));
                }
            }
        };
        let Some(data) = data.filter(|data| data != b"[DONE]") else { return Ok(None) };
        let read = serde_json::from_slice(&data).map(Some);
        read.map_err(|error| {
            server.http.stopped_error(&format!("an event of the stream is not JSON: {error}"))
        })
    }

    /// Checks that tokens are in the model's vocabulary, and that they and the `seen` earlier
    /// tokens are at most `max_count` tokens.
    fn check_tokens(
        &self,
        tokens: &[u32],
        seen: usize,
        max_count: usize,
    ) -> Result<(), PolicyError> {
        let http = &self.server.http;
        let vocabulary = self.server.options.vocabulary;
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocabulary) {
            let why = format!(
                "token {id} is not one of the {vocabulary} tokens of the model's vocabulary"
            );
            return Err(http.stopped_error(&why));
        }
        if seen + tokens.len() > max_count {
            Err(http.stopped_error(&format!(
                "the server sampled more than the {max_count} tokens that were requested"
            )))
        } else {
            Ok(())
        }
    }

    /// Checks that the reason for which the server ended a completion of `count` tokens is
    /// plausible. Some servers reserve the last positions of the context.
    fn check_end(
        &self,
        end: &CompletionEnd,
        count: usize,
        max_count: usize,
    ) -> Result<(), PolicyError> {
        const KEPT_FREE: usize = 2;
        let server = &self.server;
        let sequence = &self.request.prompt;
        let is_full = sequence.len() + KEPT_FREE >= server.options.context;
        let stopped = || {
            count > 0 && sequence.last().is_some_and(|id| self.request.params.stop_ids.contains(id))
        };
        match end {
            CompletionEnd::Length if count < max_count && !is_full => {
                Err(server.http.stopped_error(&format!(
                    "the server ended a completion for its length after {count} of {max_count} \
                     tokens; check whether it has its own limits"
                )))
            }
            CompletionEnd::Stop if !stopped() => Err(server.http.stopped_error(
                "the server reports that a stop token ended a completion, but the last token is \
                 not a stop token",
            )),
            CompletionEnd::Token(id) if count == 0 || sequence.last() != Some(id) => {
                Err(server.http.stopped_error(&format!(
                    "the server reports that token {id} ended a completion, but the last token is \
                     another"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the tokens that were sent to the caller were sampled from the weights `weights`,
    /// according to the labels in the server's response.
    fn check_labels(
        &self,
        spans: &[WeightSpan],
        progress: &CallProgress,
        weights: &LoadedWeights,
    ) -> Result<(), PolicyError> {
        let mut from = 0;
        for span in spans {
            let is_mark = span.label == weights.mark;
            let was_handed = from < progress.unlabelled && span.end > from;
            if !is_mark && (was_handed || parse_version(&span.label).is_none()) {
                return Err(self.server.http.stopped_error(&format!(
                    "the server sampled tokens with weights {:?}, but {:?} were loaded; check \
                     whether another client loads weights into the server",
                    span.label, weights.mark
                )));
            }
            from = span.end;
        }
        Ok(())
    }

    /// Sends the tokens that the spans cover to the caller, with the version of the weights that
    /// each span names.
    fn emit_by_spans(
        &mut self,
        spans: &[WeightSpan],
        progress: &mut CallProgress,
        weights: &LoadedWeights,
    ) -> Result<(), PolicyError> {
        for span in spans {
            let count = span.end.saturating_sub(progress.emitted);
            let known = (span.label == weights.mark).then_some(weights.version);
            let Some(version) = known.or_else(|| parse_version(&span.label)) else { continue };
            self.emit_tokens(progress, count, version);
        }
        Ok(())
    }

    /// Sends at most `max_count` pending tokens to the caller, and moves them into the prompt of
    /// the remaining request. The remaining tokens must not be sampled from older weights.
    fn emit_tokens(&mut self, progress: &mut CallProgress, max_count: usize, version: u64) {
        let count = progress.pending.len().min(max_count);
        if count == 0 {
            return;
        }
        let mut tokens = Vec::new();
        let mut logprobs = Vec::new();
        let mut top = Vec::new();
        for (id, logprob, likely) in progress.pending.drain(..count) {
            tokens.push(id);
            logprobs.push(logprob);
            top.push(likely);
        }
        if self.request.params.top_logprobs == 0 {
            top.clear();
        }
        progress.emitted += count;
        let request = &mut self.request;
        request.prompt.extend(&tokens);
        request.params.sampled_before += count;
        request.params.max_tokens = request.params.max_tokens.saturating_sub(count);
        request.min_version = request.min_version.max(version);
        self.emit(SampleEvent::Tokens { tokens, logprobs, top, version });
    }
}

/// Waits until the weights are being replaced or have been replaced since the number of
/// replacements was `changes`.
async fn wait_for_weight_change(gate: &mut watch::Receiver<RequestGate>, changes: u64) {
    if gate.wait_for(|gate| gate.changes != changes).await.is_err() {
        std::future::pending::<()>().await;
    }
}
