//! A request with the tokens sampled for it so far, from the queue to its end.

use std::sync::Mutex;

use levade_policy::{
    Constraint, FinishReason, PolicyError, SampleEvent, SampleRequest, SamplingParams, TokenBytes,
    TopLogprobs,
};
use tokio::sync::mpsc::UnboundedSender;
use tracing::debug;

use crate::ops::kv::BLOCK;
use crate::radix::{Prefix, shared_prefix_len};
use crate::token_sampling::SampledToken;

/// Minimum number of tokens that a request must gain to wait until another sequence has computed a
/// shared prompt.
const WORTH_WAITING: usize = 16;

/// Sender of a request's events: tokens, prompt scores and the finish reason.
pub type Events = UnboundedSender<Result<SampleEvent, PolicyError>>;

/// A request and its progress. While it waits it holds no blocks, but keeps the tokens sampled so
/// far.
pub struct Sequence {
    pub policy: u32,
    /// Tokens of the prompt and the completion.
    pub tokens: Vec<u32>,
    /// Number of tokens with keys and values in `blocks`.
    pub computed: usize,
    pub blocks: Vec<u32>,
    /// Whether some of the computed keys and values belong to weights that no longer sample.
    pub is_stale: bool,
    /// Maximum length in tokens: prompt plus `max_tokens`, limited by the context.
    pub max_len: usize,
    /// Number of tokens in the prompt.
    pub prompt: usize,
    /// Last bytes of the completion, in which stop strings are searched.
    tail: Vec<u8>,
    /// Minimum version of the weights that may sample.
    pub min_version: u64,
    pub seed: u64,
    pub stream: u64,
    pub params: SamplingParams,
    /// Grammar constraint of the completion, in the state after the tokens sampled so far.
    pub constraint: Option<Mutex<Box<dyn Constraint>>>,
    /// Log-probabilities of the prompt, kept until they are sent; `None` if the request does not
    /// ask for log-probabilities of the prompt.
    scores: Option<PromptScores>,
    pub events: Events,
}

/// Log-probabilities of the prompt's tokens after the first, and the most likely tokens at their
/// positions.
#[derive(Default)]
struct PromptScores {
    logprobs: Vec<f32>,
    top: Vec<TopLogprobs>,
}

impl Sequence {
    /// Creates a sequence for a request to `policy`, for a model with room for `context` tokens.
    pub fn new(
        policy: u32,
        request: SampleRequest,
        constraint: Option<Box<dyn Constraint>>,
        context: usize,
        token_bytes: Option<&dyn TokenBytes>,
        events: Events,
    ) -> Self {
        let SampleRequest { min_version, seed, stream, prompt, params, .. } = request;
        let sampled = prompt[prompt.len() - params.sampled_before..].to_vec();
        let mut sequence = Sequence {
            policy,
            max_len: prompt.len().saturating_add(params.max_tokens).min(context),
            prompt: prompt.len(),
            tokens: prompt,
            computed: 0,
            blocks: Vec::new(),
            is_stale: false,
            tail: Vec::new(),
            min_version,
            seed,
            stream,
            scores: params.prompt_logprobs.map(|_| PromptScores::default()),
            params,
            constraint: constraint.map(Mutex::new),
            events,
        };
        // A stop string may have started in tokens that an earlier request sampled.
        for token in sampled {
            sequence.completes_stop(token, token_bytes);
        }
        sequence
    }

    /// Returns the number of tokens in the completion. Includes tokens of an earlier request that
    /// this request continues.
    pub fn completion_len(&self) -> usize {
        self.tokens.len() - self.prompt + self.params.sampled_before
    }

    /// Returns the number of key-value blocks that the sequence needs at its maximum length.
    pub fn max_blocks(&self) -> usize {
        self.max_len.div_ceil(BLOCK)
    }

    /// Returns whether a token has been sampled for this request.
    pub fn has_sampled(&self) -> bool {
        self.tokens.len() > self.prompt
    }

    /// Returns the maximum number of leading tokens whose keys and values can come from another
    /// sequence: all tokens except the last, because its row computes the next logits. Returns 0 if
    /// the prompt is scored, because every row's logits are needed.
    pub fn max_shared_tokens(&self) -> usize {
        if self.is_scored() { 0 } else { self.tokens.len() - 1 }
    }

    /// Returns whether log-probabilities of the prompt remain to be sent.
    pub fn is_scored(&self) -> bool {
        self.scores.is_some()
    }

    /// Returns whether the logits after `position` are needed: to sample, or to score the next
    /// token of the prompt.
    pub fn needs_logits(&self, position: usize) -> bool {
        let next = position + 1;
        let samples = next == self.tokens.len() && self.params.max_tokens > 0;
        samples || (self.is_scored() && next < self.prompt)
    }

    /// Stores the log-probability of the next token of the prompt.
    pub fn add_score(&mut self, scored: SampledToken) {
        if let Some(scores) = &mut self.scores {
            scores.logprobs.push(scored.logprob);
            scores
                .top
                .extend(self.params.prompt_logprobs.filter(|top| *top > 0).map(|_| scored.top));
        }
    }

    /// Sends the log-probabilities of the prompt, all of which has been computed.
    pub fn send_scores(&mut self) {
        if let Some(PromptScores { logprobs, top }) = self.scores.take()
            && !logprobs.is_empty()
        {
            // A closed receiver is noticed before the next step.
            let _ = self.events.send(Ok(SampleEvent::Prompt { logprobs, top }));
        }
    }

    /// Discards computed keys and values, but keeps sampled tokens; returns the blocks to release.
    pub fn restart(&mut self) -> Vec<u32> {
        self.computed = 0;
        if let Some(scores) = &mut self.scores {
            *scores = PromptScores::default();
        }
        std::mem::take(&mut self.blocks)
    }

    /// Returns whether `other` is computing a prompt that is worth waiting for, given that `prefix`
    /// is already in the cache.
    pub fn should_wait_for(&self, other: &Sequence, prefix: &Prefix) -> bool {
        let shared = shared_prefix_len(&other.tokens[..other.prompt], &self.tokens)
            .min(self.max_shared_tokens());
        let is_computing =
            other.policy == self.policy && other.computed < other.prompt && !other.is_stale;
        is_computing && shared >= prefix.len + WORTH_WAITING
    }

    /// Returns whether the sequence is done without a completion: the request was for prompt
    /// log-probabilities only.
    pub fn is_done_without_completion(&self) -> bool {
        self.params.max_tokens == 0 && self.computed == self.prompt
    }

    /// Returns the finish reason if `token`, which was sampled last, ends the sequence.
    pub fn check_finished(
        &mut self,
        token: u32,
        context: usize,
        token_bytes: Option<&dyn TokenBytes>,
    ) -> Option<FinishReason> {
        let policy = self.policy;
        let stream = self.stream;
        let sampled = self.tokens.len() - self.prompt;
        if sampled == 1 {
            debug!(policy, stream, "sampled first token");
        }
        let reason = self.find_finish_reason(token, context, token_bytes);
        if let Some(reason) = reason {
            debug!(policy, stream, sampled, ?reason, "finished request");
        }
        reason
    }

    fn find_finish_reason(
        &mut self,
        token: u32,
        context: usize,
        token_bytes: Option<&dyn TokenBytes>,
    ) -> Option<FinishReason> {
        if self.params.stop_ids.contains(&token) {
            return Some(FinishReason::StopId);
        }
        if self.completes_stop(token, token_bytes) && self.completion_len() > self.params.min_tokens
        {
            return Some(FinishReason::StopString);
        }
        let params = &self.params;
        if self.tokens.len() >= self.prompt + params.max_tokens {
            Some(FinishReason::Length)
        } else if self.tokens.len() >= context {
            Some(FinishReason::Context)
        } else {
            None
        }
    }

    /// Returns whether the completion's next token completes a stop string.
    fn completes_stop(&mut self, token: u32, token_bytes: Option<&dyn TokenBytes>) -> bool {
        let max_stop_len = self.params.stop_strings.iter().map(String::len).max().unwrap_or(0);
        if max_stop_len == 0 {
            return false;
        }
        let new = token_bytes.and_then(|bytes| bytes.token_bytes(token)).unwrap_or_default();
        self.tail.extend_from_slice(new);
        let completes = self
            .params
            .stop_strings
            .iter()
            .any(|stop| self.tail.windows(stop.len().max(1)).any(|w| w == stop.as_bytes()));
        // A stop string before `min_tokens` does not end the completion, and its bytes are dropped.
        let kept = if completes { 0 } else { max_stop_len - 1 };
        let surplus = self.tail.len().saturating_sub(kept);
        self.tail.drain(..surplus);
        completes
    }
}
