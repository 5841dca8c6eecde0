//! A sequence: a request with what has been drawn for it, from the queue to its end.

use dressage_policy::{FinishReason, PolicyError, SampleEvent, SampleRequest, SamplingParams, TokenBytes};
use tokio::sync::mpsc::UnboundedSender;
use tracing::debug;

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
    pub events: Events,
}

impl Sequence {
    /// A request to `policy` that has not begun, for a model with room for `context` tokens.
    pub fn new(
        policy: u32,
        request: SampleRequest,
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
            params,
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

    /// Tokens that can be taken over from others: all but the last, whose row gives the next logits.
    pub fn most_shared(&self) -> usize {
        self.tokens.len() - 1
    }

    /// Whether `other` is computing a prompt that this one, which has `prefix`, had better wait for.
    pub fn gains_from(&self, other: &Sequence, prefix: &Prefix) -> bool {
        let shared = shared_prefix(&other.tokens[..other.prompt], &self.tokens).min(self.most_shared());
        let is_computing = other.policy == self.policy && other.computed < other.prompt && !other.is_stale;
        is_computing && shared >= prefix.len + WORTH_WAITING
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
