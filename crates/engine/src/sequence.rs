//! A sequence: a request with what has been drawn for it, from the queue to its end.

use std::sync::Mutex;

use levade_policy::{
    Constraint, FinishReason, PolicyError, SampleEvent, SampleRequest, SamplingParams, TokenBytes,
    TopLogprobs,
};
use tokio::sync::mpsc::UnboundedSender;
use tracing::debug;

use crate::choose::Chosen;
use crate::ops::kv::BLOCK;
use crate::radix::{Prefix, shared_prefix};

/// A prompt that another sequence will have computed soon is worth waiting for from this many tokens on.
const WORTH_WAITING: usize = 16;

/// Where a request's tokens go.
pub type Events = UnboundedSender<Result<SampleEvent, PolicyError>>;

/// A request and how far it has come. While it waits it holds no blocks, but keeps what was drawn for it.
pub struct Sequence {
    pub policy: u32,
    /// Prompt and reply.
    pub tokens: Vec<u32>,
    /// Tokens whose keys and values are in `blocks`.
    pub computed: usize,
    pub blocks: Vec<u32>,
    /// Whether some of these are of weights that are no longer drawn from.
    pub is_stale: bool,
    /// Most tokens it may come to.
    pub longest: usize,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Bytes of the reply's end, where stop strings are looked for.
    tail: Vec<u8>,
    /// The oldest version of the weights that may draw.
    pub least_version: u64,
    pub seed: u64,
    pub stream: u64,
    pub params: SamplingParams,
    /// Holds the reply to its grammar, in the state after what has been drawn of it.
    pub constraint: Option<Mutex<Box<dyn Constraint>>>,
    /// Log-probabilities of the prompt, until they are handed on; where they were asked for.
    scores: Option<Scores>,
    pub events: Events,
}

/// Log-probabilities of the first tokens of a prompt but the very first, and the most likely ones in their
/// places.
#[derive(Default)]
struct Scores {
    logprobs: Vec<f32>,
    top: Vec<TopLogprobs>,
}

impl Sequence {
    /// A request to `policy` that has not begun, for a model with room for `context` tokens.
    pub fn new(
        policy: u32,
        request: SampleRequest,
        constraint: Option<Box<dyn Constraint>>,
        context: usize,
        token_bytes: Option<&dyn TokenBytes>,
        events: Events,
    ) -> Self {
        let SampleRequest { least_version, seed, stream, prompt, params, .. } = request;
        let drawn = prompt[prompt.len() - params.drawn_before..].to_vec();
        let mut sequence = Sequence {
            policy,
            longest: prompt.len().saturating_add(params.max_tokens).min(context),
            prompt: prompt.len(),
            tokens: prompt,
            computed: 0,
            blocks: Vec::new(),
            is_stale: false,
            tail: Vec::new(),
            least_version,
            seed,
            stream,
            scores: params.prompt_logprobs.map(|_| Scores::default()),
            params,
            constraint: constraint.map(Mutex::new),
            events,
        };
        // A stop string may have begun in what was drawn before.
        for token in drawn {
            sequence.completes_stop(token, token_bytes);
        }
        sequence
    }

    /// How many tokens the reply has, those of an earlier request included.
    pub fn reply(&self) -> usize {
        self.tokens.len() - self.prompt + self.params.drawn_before
    }

    /// Blocks that it takes at its longest.
    pub fn blocks_at_most(&self) -> usize {
        self.longest.div_ceil(BLOCK)
    }

    /// Whether something has been drawn for it.
    pub fn has_begun(&self) -> bool {
        self.tokens.len() > self.prompt
    }

    /// Tokens that can be taken over from others: all but the last, whose row gives the next logits, or none
    /// where every row of the prompt gives some.
    pub fn most_shared(&self) -> usize {
        if self.is_scored() { 0 } else { self.tokens.len() - 1 }
    }

    /// Whether log-probabilities of its prompt are yet to be handed on.
    pub fn is_scored(&self) -> bool {
        self.scores.is_some()
    }

    /// Whether the logits after `position` are wanted: to draw from, or to score the next token of the
    /// prompt.
    pub fn wants(&self, position: usize) -> bool {
        let next = position + 1;
        let draws = next == self.tokens.len() && self.params.max_tokens > 0;
        draws || (self.is_scored() && next < self.prompt)
    }

    /// Remembers a token of its prompt with its log-probability.
    pub fn add_score(&mut self, scored: Chosen) {
        if let Some(scores) = &mut self.scores {
            scores.logprobs.push(scored.logprob);
            scores.top.extend(self.params.prompt_logprobs.filter(|top| *top > 0).map(|_| scored.top));
        }
    }

    /// Hands the log-probabilities of its prompt on, all of which has been computed.
    pub fn tell_scores(&mut self) {
        if let Some(Scores { logprobs, top }) = self.scores.take()
            && !logprobs.is_empty()
        {
            // A receiver that is gone is noticed before the next step.
            let _ = self.events.send(Ok(SampleEvent::Prompt { logprobs, top }));
        }
    }

    /// Forgets what was computed for it, not what was drawn; the blocks that it lies in.
    pub fn start_over(&mut self) -> Vec<u32> {
        self.computed = 0;
        if let Some(scores) = &mut self.scores {
            *scores = Scores::default();
        }
        std::mem::take(&mut self.blocks)
    }

    /// Whether `other` is computing a prompt that this one, which has `prefix`, had better wait for.
    pub fn gains_from(&self, other: &Sequence, prefix: &Prefix) -> bool {
        let shared = shared_prefix(&other.tokens[..other.prompt], &self.tokens).min(self.most_shared());
        let is_computing = other.policy == self.policy && other.computed < other.prompt && !other.is_stale;
        is_computing && shared >= prefix.len + WORTH_WAITING
    }

    /// Whether it is done without any token: its prompt alone was asked about.
    pub fn is_empty_reply(&self) -> bool {
        self.params.max_tokens == 0 && self.computed == self.prompt
    }

    /// Why it ends with `token`, which was drawn last, if it does.
    pub fn finished(
        &mut self,
        token: u32,
        context: usize,
        token_bytes: Option<&dyn TokenBytes>,
    ) -> Option<FinishReason> {
        let (policy, stream, drawn) = (self.policy, self.stream, self.tokens.len() - self.prompt);
        if drawn == 1 {
            debug!(policy, stream, "first token");
        }
        let reason = self.ends(token, context, token_bytes);
        if let Some(reason) = reason {
            debug!(policy, stream, drawn, ?reason, "request finished");
        }
        reason
    }

    fn ends(
        &mut self,
        token: u32,
        context: usize,
        token_bytes: Option<&dyn TokenBytes>,
    ) -> Option<FinishReason> {
        if self.params.stop_ids.contains(&token) {
            return Some(FinishReason::StopId);
        }
        if self.completes_stop(token, token_bytes) && self.reply() > self.params.min_tokens {
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

    /// Whether the reply's next token completes a stop string.
    fn completes_stop(&mut self, token: u32, token_bytes: Option<&dyn TokenBytes>) -> bool {
        let longest_stop = self.params.stop_strings.iter().map(String::len).max().unwrap_or(0);
        if longest_stop == 0 {
            return false;
        }
        let new = token_bytes.and_then(|bytes| bytes.token_bytes(token)).unwrap_or_default();
        self.tail.extend_from_slice(new);
        let stops = |stop: &String| self.tail.windows(stop.len().max(1)).any(|w| w == stop.as_bytes());
        let completes = self.params.stop_strings.iter().any(stops);
        // One that came too early to end the reply is over.
        let kept = if completes { 0 } else { longest_stop - 1 };
        let surplus = self.tail.len().saturating_sub(kept);
        self.tail.drain(..surplus);
        completes
    }
}
