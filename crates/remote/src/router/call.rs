//! Runs one call on a replica, and retries it on other replicas if the replica fails.

use std::sync::Arc;

use levade_policy::process_time::with_timeout;
use levade_policy::{FinishReason, PolicyError, SampleEvent, SampleRequest, TopLogprobs};
use tokio::sync::{mpsc, oneshot, watch};

use super::gate::QueueTicket;
use super::pool::{ErrorCause, ReplicaPool};
use super::replica::Replica;

/// A sampling call in flight, which the router can continue on another replica.
pub(crate) struct RoutedCall {
    /// Request for the remaining tokens. Tokens that the caller has received are part of its
    /// prompt.
    pub request: SampleRequest,
    /// Channel through which the caller receives tokens.
    pub events: mpsc::UnboundedSender<Result<SampleEvent, PolicyError>>,
    /// Whether the call is to be aborted.
    pub aborted: watch::Receiver<bool>,
    /// Notified once, when the call is accepted or rejected.
    pub accepted: Option<oneshot::Sender<Result<(), PolicyError>>>,
    /// Number of sampled tokens that the caller has received.
    pub sampled: usize,
    /// Number of prompt log-probabilities that the caller has received.
    pub scored: usize,
    /// Newest sampled token, which is withheld from the caller while it may be the last token of
    /// the completion.
    pub retained: Option<SampleEvent>,
}

/// Waits until the caller aborts the call.
async fn wait_for_abort(aborted: &mut watch::Receiver<bool>) {
    if aborted.wait_for(|aborted| *aborted).await.is_err() {
        std::future::pending::<()>().await;
    }
}

impl RoutedCall {
    /// Runs the sampling call until it ends or the caller drops its stream.
    pub async fn run(mut self, pool: Arc<ReplicaPool>, ticket: QueueTicket) {
        let events = self.events.clone();
        let end = tokio::select! {
            biased;
            () = events.closed() => return,
            end = self.serve(&pool, ticket) => end,
        };
        // The caller may have dropped its stream, so failures to send are ignored.
        match (end, self.accepted.take()) {
            (Err(error), Some(accepted)) => drop(accepted.send(Err(error))),
            (Err(error), None) => drop(events.send(Err(error))),
            (Ok(reason), accepted) => {
                accepted.map(|accepted| accepted.send(Ok(())));
                drop(events.send(Ok(SampleEvent::Finished(reason))));
            }
        }
    }

    fn notify_accepted(&mut self) {
        self.accepted.take().map(|accepted| accepted.send(Ok(())));
    }

    async fn serve(
        &mut self,
        pool: &ReplicaPool,
        mut ticket: QueueTicket,
    ) -> Result<FinishReason, PolicyError> {
        let permit = match ticket.try_take() {
            Some(permit) => permit,
            None => {
                self.notify_accepted();
                tokio::select! {
                    biased;
                    () = wait_for_abort(&mut self.aborted) => return Ok(FinishReason::Aborted),
                    turn = ticket.wait_for_permit() => turn?,
                }
            }
        };
        let end = self.try_replicas(pool).await;
        drop(permit);
        end
    }

    async fn try_replicas(&mut self, pool: &ReplicaPool) -> Result<FinishReason, PolicyError> {
        let mut tried = Vec::new();
        loop {
            let min_version = self.request.min_version;
            let chosen = tokio::select! {
                biased;
                () = wait_for_abort(&mut self.aborted) => return Ok(FinishReason::Aborted),
                chosen = pool.await_replica(&self.request.prompt, min_version, &tried) => chosen?,
            };
            let replica = &chosen.0;
            let error = match self.sample_from(pool, replica).await {
                Ok(reason) => {
                    pool.record_completion(replica, &self.request.prompt);
                    return Ok(reason);
                }
                // The next replica samples the held token again.
                Err(_) if *self.aborted.borrow() => return Ok(FinishReason::Aborted),
                Err(error) => error,
            };
            let blame = ErrorCause::from_error(&error);
            match &error {
                PolicyError::PromptTooLong { .. } if self.sampled > 0 => {
                    return Ok(FinishReason::Context);
                }
                PolicyError::Behind { version, .. } => pool.note_sampled_version(replica, *version),
                error => pool.record_error(replica, error),
            }
            if let Some(reason) = self.finish_reason() {
                return Ok(reason);
            }
            tried.push(replica.index);
            match blame {
                ErrorCause::Request => return Err(error),
                ErrorCause::Neither if !pool.has_untried_replica(&tried) => return Err(error),
                _ if tried.len() >= pool.options.tries => return Err(error),
                ErrorCause::Neither | ErrorCause::Replica => {}
            }
        }
    }

    /// Returns the reason why the completion is complete, or `None` if tokens are missing. Used if
    /// a replica failed after it had sent the last token.
    fn finish_reason(&self) -> Option<FinishReason> {
        let stops = |token| self.request.params.stop_ids.contains(token);
        if self.sampled > 0 && self.request.prompt.last().is_some_and(stops) {
            return Some(FinishReason::StopId);
        }
        let is_scored = self.request.params.prompt_logprobs.is_none()
            || self.scored + 1 >= self.request.prompt.len();
        (self.request.params.max_tokens == 0 && is_scored).then_some(FinishReason::Length)
    }

    /// Samples the remaining tokens of the completion on one replica.
    async fn sample_from(
        &mut self,
        pool: &ReplicaPool,
        replica: &Replica,
    ) -> Result<FinishReason, PolicyError> {
        let options = &pool.options;
        self.retained = None;
        let mut stream = tokio::select! {
            biased;
            () = wait_for_abort(&mut self.aborted) => return Ok(FinishReason::Aborted),
            stream = replica.sampler.sample(self.request.clone()) => stream?,
            () = replica.sleep_unpaused(options.accept, options) => {
                let what = format!("{} to accept a request", replica.name);
                return Err(PolicyError::Deadline(options.accept, what));
            }
        };
        self.notify_accepted();
        let mut is_ending = false;
        let mut read = 0;
        loop {
            let event = tokio::select! {
                biased;
                event = stream.next() => event,
                () = wait_for_abort(&mut self.aborted), if !is_ending => {
                    is_ending = true;
                    let abort = replica.sampler.abort(Some(self.request.stream));
                    with_timeout(options.response_timeout, abort).await;
                    continue;
                }
                () = replica.sleep_unpaused(options.response_timeout, options), if is_ending => return Ok(FinishReason::Aborted),
                () = replica.wait_until_silent(self.request.min_version, options) => {
                    return Err(PolicyError::Deadline(options.silence, format!("a token from \
                                                                               {}", replica.name)));
                }
            };
            match event {
                Some(Ok(SampleEvent::Finished(reason))) => {
                    self.emit_retained();
                    return Ok(reason);
                }
                Some(Ok(SampleEvent::Prompt { logprobs, top })) => {
                    replica.count_event();
                    let count = logprobs.len();
                    self.emit_scores(read, logprobs, top);
                    read += count;
                }
                Some(Ok(SampleEvent::Tokens { version, tokens, logprobs, top })) => {
                    replica.count_event();
                    let min_version = self.request.min_version;
                    if version < min_version {
                        let policy = options.policy.clone();
                        return Err(PolicyError::Behind { policy, min_version, version });
                    }
                    pool.note_sampled_version(replica, version);
                    self.forward_tokens(SampleEvent::Tokens { tokens, logprobs, top, version });
                }
                Some(Err(error)) => return Err(error),
                None => return Err(PolicyError::Stopped(replica.name.clone().into())),
            }
        }
    }

    /// Forwards prompt log-probabilities to the caller, except those that a previous replica has
    /// returned. `read` is the number of log-probabilities that this replica has returned before.
    fn emit_scores(&mut self, read: usize, mut logprobs: Vec<f32>, mut top: Vec<TopLogprobs>) {
        let known = self.scored.saturating_sub(read).min(logprobs.len());
        logprobs.drain(..known);
        top.drain(..known.min(top.len()));
        if !logprobs.is_empty() {
            self.scored += logprobs.len();
            self.events.send(Ok(SampleEvent::Prompt { logprobs, top })).ok();
        }
    }

    /// Forwards tokens that a replica has sampled to the caller.
    fn forward_tokens(&mut self, tokens: SampleEvent) {
        self.emit_retained();
        let SampleEvent::Tokens { mut tokens, mut logprobs, mut top, version } = tokens else {
            return;
        };
        // Only the replica knows whether a token completes a stop string. If the replica failed
        // right after such a token, the next replica would continue past the end of the completion.
        if !self.request.params.stop_strings.is_empty() {
            self.retained = Some(SampleEvent::Tokens {
                tokens: tokens.split_off(tokens.len().saturating_sub(1)),
                logprobs: logprobs.split_off(logprobs.len().saturating_sub(1)),
                top: top.split_off(top.len().saturating_sub(1)),
                version,
            });
        }
        self.emit(SampleEvent::Tokens { tokens, logprobs, top, version });
    }

    fn emit_retained(&mut self) {
        if let Some(retained) = self.retained.take() {
            self.emit(retained);
        }
    }

    /// Sends tokens to the caller, and moves them into the prompt of the remaining request. The
    /// remaining tokens must not be sampled from older weights.
    fn emit(&mut self, event: SampleEvent) {
        let SampleEvent::Tokens { tokens, version, .. } = &event else { return };
        let request = &mut self.request;
        let count = tokens.len();
        if count == 0 {
            return;
        }
        request.prompt.extend(tokens);
        request.params.sampled_before += count;
        // The prompt's log-probabilities arrived before the first token.
        request.params.prompt_logprobs = None;
        request.params.max_tokens = request.params.max_tokens.saturating_sub(count);
        request.min_version = request.min_version.max(*version);
        self.sampled += count;
        // `run` notices when the caller drops its stream.
        self.events.send(Ok(event)).ok();
    }
}
