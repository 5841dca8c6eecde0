//! Runs one call on a replica, and retries it on other replicas if the replica fails.

use std::sync::Arc;

use levade_policy::awake::within;
use levade_policy::{FinishReason, PolicyError, SampleEvent, SampleRequest, TopLogprobs};
use tokio::sync::{mpsc, oneshot, watch};

use super::gate::Ticket;
use super::member::Member;
use super::pool::{Fault, Pool};

/// A call in flight.
pub(crate) struct Call {
    /// The remaining work: tokens already sent to the caller are part of the prompt.
    pub request: SampleRequest,
    /// Channel through which the caller receives tokens.
    pub events: mpsc::UnboundedSender<Result<SampleEvent, PolicyError>>,
    /// Whether the call is to be aborted.
    pub aborted: watch::Receiver<bool>,
    /// Notified once, when the call is accepted or rejected.
    pub accepted: Option<oneshot::Sender<Result<(), PolicyError>>>,
    /// Number of tokens sent to the caller.
    pub drawn: usize,
    /// Number of prompt log-probabilities sent to the caller.
    pub scored: usize,
    /// The newest token, held back while it may be the last token of the completion.
    pub held: Option<SampleEvent>,
}

/// Waits until the call is to be aborted.
async fn ended(aborted: &mut watch::Receiver<bool>) {
    if aborted.wait_for(|aborted| *aborted).await.is_err() {
        std::future::pending::<()>().await;
    }
}

impl Call {
    /// Runs the call until it ends or the caller drops its stream.
    pub async fn run(mut self, pool: Arc<Pool>, ticket: Ticket) {
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

    fn accepts(&mut self) {
        self.accepted.take().map(|accepted| accepted.send(Ok(())));
    }

    async fn serve(&mut self, pool: &Pool, mut ticket: Ticket) -> Result<FinishReason, PolicyError> {
        let turn = match ticket.now() {
            Some(turn) => turn,
            None => {
                self.accepts();
                tokio::select! {
                    biased;
                    () = ended(&mut self.aborted) => return Ok(FinishReason::Aborted),
                    turn = ticket.turn() => turn?,
                }
            }
        };
        let end = self.try_members(pool).await;
        drop(turn);
        end
    }

    async fn try_members(&mut self, pool: &Pool) -> Result<FinishReason, PolicyError> {
        let mut tried = Vec::new();
        loop {
            let least = self.request.least_version;
            let chosen = tokio::select! {
                biased;
                () = ended(&mut self.aborted) => return Ok(FinishReason::Aborted),
                chosen = pool.await_member(&self.request.prompt, least, &tried) => chosen?,
            };
            let member = &chosen.0;
            let error = match self.on(pool, member).await {
                Ok(reason) => {
                    pool.finishes(member, &self.request.prompt);
                    return Ok(reason);
                }
                // The next replica samples the held token again.
                Err(_) if *self.aborted.borrow() => return Ok(FinishReason::Aborted),
                Err(error) => error,
            };
            let fault = Fault::of(&error);
            match &error {
                PolicyError::PromptTooLong { .. } if self.drawn > 0 => return Ok(FinishReason::Context),
                PolicyError::Behind { version, .. } => pool.drew_with(member, *version),
                error => pool.blames(member, error),
            }
            if let Some(reason) = self.is_whole() {
                return Ok(reason);
            }
            tried.push(member.index);
            match fault {
                Fault::Request => return Err(error),
                Fault::Nobody if !pool.has_other(&tried) => return Err(error),
                _ if tried.len() >= pool.options.tries => return Err(error),
                Fault::Nobody | Fault::Member => {}
            }
        }
    }

    /// Returns why the completion is complete, or `None` if it is not. Used if the replica failed
    /// after the last token.
    fn is_whole(&self) -> Option<FinishReason> {
        let stops = |token| self.request.params.stop_ids.contains(token);
        if self.drawn > 0 && self.request.prompt.last().is_some_and(stops) {
            return Some(FinishReason::StopId);
        }
        let is_scored =
            self.request.params.prompt_logprobs.is_none() || self.scored + 1 >= self.request.prompt.len();
        (self.request.params.max_tokens == 0 && is_scored).then_some(FinishReason::Length)
    }

    /// Samples the remaining tokens on one replica.
    async fn on(&mut self, pool: &Pool, member: &Member) -> Result<FinishReason, PolicyError> {
        let options = &pool.options;
        self.held = None;
        let mut stream = tokio::select! {
            biased;
            () = ended(&mut self.aborted) => return Ok(FinishReason::Aborted),
            stream = member.sampler.sample(self.request.clone()) => stream?,
            () = member.over(options.accept, options) => {
                let what = format!("{} to accept a request", member.name);
                return Err(PolicyError::Deadline(options.accept, what));
            }
        };
        self.accepts();
        let (mut is_ending, mut read) = (false, 0);
        loop {
            let event = tokio::select! {
                biased;
                event = stream.next() => event,
                () = ended(&mut self.aborted), if !is_ending => {
                    is_ending = true;
                    let abort = member.sampler.abort(Some(self.request.stream));
                    within(options.answer, abort).await;
                    continue;
                }
                () = member.over(options.answer, options), if is_ending => return Ok(FinishReason::Aborted),
                () = member.falls_silent(self.request.least_version, options) => {
                    return Err(PolicyError::Deadline(options.silence, format!("a token from {}", member.name)));
                }
            };
            match event {
                Some(Ok(SampleEvent::Finished(reason))) => {
                    self.hand_out_held();
                    return Ok(reason);
                }
                Some(Ok(SampleEvent::Prompt { logprobs, top })) => {
                    member.progresses();
                    let count = logprobs.len();
                    self.scores(read, logprobs, top);
                    read += count;
                }
                Some(Ok(SampleEvent::Tokens { version, tokens, logprobs, top })) => {
                    member.progresses();
                    let least = self.request.least_version;
                    if version < least {
                        let policy = options.policy.clone();
                        return Err(PolicyError::Behind { policy, least, version });
                    }
                    pool.drew_with(member, version);
                    self.takes(SampleEvent::Tokens { tokens, logprobs, top, version });
                }
                Some(Err(error)) => return Err(error),
                None => return Err(PolicyError::Stopped(member.name.clone().into())),
            }
        }
    }

    /// Forwards prompt log-probabilities, of which this replica has returned `read` before, except
    /// those that a previous replica has returned.
    fn scores(&mut self, read: usize, mut logprobs: Vec<f32>, mut top: Vec<TopLogprobs>) {
        let known = self.scored.saturating_sub(read).min(logprobs.len());
        logprobs.drain(..known);
        top.drain(..known.min(top.len()));
        if !logprobs.is_empty() {
            self.scored += logprobs.len();
            self.events.send(Ok(SampleEvent::Prompt { logprobs, top })).ok();
        }
    }

    /// Forwards tokens that a replica sampled.
    fn takes(&mut self, tokens: SampleEvent) {
        self.hand_out_held();
        let SampleEvent::Tokens { mut tokens, mut logprobs, mut top, version } = tokens else { return };
        // Only the replica knows whether a token completes a stop string. If the replica failed
        // right after such a token, the next replica would continue past the end of the completion.
        if !self.request.params.stop_strings.is_empty() {
            let last = |len: usize| len.saturating_sub(1);
            self.held = Some(SampleEvent::Tokens {
                tokens: tokens.split_off(last(tokens.len())),
                logprobs: logprobs.split_off(last(logprobs.len())),
                top: top.split_off(last(top.len())),
                version,
            });
        }
        self.hand_out(SampleEvent::Tokens { tokens, logprobs, top, version });
    }

    fn hand_out_held(&mut self) {
        if let Some(held) = self.held.take() {
            self.hand_out(held);
        }
    }

    /// Sends tokens to the caller, and moves them into the prompt of the remaining work, which
    /// requires weights that are no older.
    fn hand_out(&mut self, event: SampleEvent) {
        let SampleEvent::Tokens { tokens, version, .. } = &event else { return };
        let (request, count) = (&mut self.request, tokens.len());
        if count == 0 {
            return;
        }
        request.prompt.extend(tokens);
        request.params.drawn_before += count;
        // The prompt's log-probabilities arrived before the first token.
        request.params.prompt_logprobs = None;
        request.params.max_tokens = request.params.max_tokens.saturating_sub(count);
        request.least_version = request.least_version.max(*version);
        self.drawn += count;
        // `run` notices when the caller drops its stream.
        self.events.send(Ok(event)).ok();
    }
}
