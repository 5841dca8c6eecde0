//! Continuous batching: which rows go through the model next.
//!
//! Every step runs one batch: the newest token of each running sequence, and chunks of the prompts still to be computed, up
//! to a number of rows. A request joins as soon as there is room for its longest possible reply, and leaves when it is
//! done. A request whose prompt another running sequence is just computing waits for it: a prompt is computed once.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dressage_policy::{
    FinishReason, Health, PolicyError, SampleEvent, SampleRequest, SamplingParams, TokenBytes, crash_point,
    uniform,
};
use tokio::sync::mpsc::UnboundedSender;

use crate::buffer::{Buffer, Shared};
use crate::cache::Cache;
use crate::choose::choose;
use crate::ops::kv::{BLOCK, Span};
use crate::radix::{Prefix, shared_prefix};
use crate::transformer::{Inference, Rows, Transformer};

/// A prompt that another sequence will have computed soon is worth waiting for from this many tokens on.
const WORTH_WAITING: usize = 16;

/// Where a request's tokens go.
pub type Events = UnboundedSender<Result<SampleEvent, PolicyError>>;

/// Which weights of a policy are drawn from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// Their version.
    pub version: u64,
    /// Whether they are the ones that the policy has now. If not, it draws nothing.
    pub current: bool,
}

impl Default for Published {
    fn default() -> Self {
        Published { version: 0, current: true }
    }
}

/// Limits of the scheduler.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Sequences that run at the same time.
    pub running: usize,
    /// Rows of one step.
    pub rows: usize,
}

/// A request that has not begun yet.
struct Waiting {
    policy: u32,
    request: SampleRequest,
    events: Events,
}

/// A sequence being computed.
struct Running {
    policy: u32,
    /// Prompt and reply.
    tokens: Vec<u32>,
    /// Tokens whose keys and values are in `blocks`.
    computed: usize,
    blocks: Vec<u32>,
    /// Most tokens it may come to.
    longest: usize,
    prompt: usize,
    /// Bytes of the reply's end, where stop strings are looked for.
    tail: Vec<u8>,
    seed: u64,
    stream: u64,
    params: SamplingParams,
    events: Events,
}

impl Running {
    fn blocks_at_most(&self) -> usize {
        self.longest.div_ceil(BLOCK)
    }
}

/// All requests of an engine.
pub struct Scheduler {
    waiting: VecDeque<Waiting>,
    running: Vec<Running>,
    cache: Cache,
    limits: Limits,
    token_bytes: Option<Arc<dyn TokenBytes>>,
    inference: Inference,
    logits: Buffer,
    prefix_hits: u64,
    prefilled: u64,
    drawn: u64,
    busy: Duration,
    /// Running sequences, and the share of the cache that they use, times the seconds that batches took.
    running_seconds: f64,
    cache_in_use_seconds: f64,
}

impl Scheduler {
    /// A scheduler without requests.
    pub fn new(cache: Cache, limits: Limits, token_bytes: Option<Arc<dyn TokenBytes>>) -> Self {
        Scheduler {
            waiting: VecDeque::new(),
            running: Vec::new(),
            cache,
            limits,
            token_bytes,
            inference: Inference::default(),
            logits: Buffer::default(),
            prefix_hits: 0,
            prefilled: 0,
            drawn: 0,
            busy: Duration::ZERO,
            running_seconds: 0.0,
            cache_in_use_seconds: 0.0,
        }
    }

    /// Takes a request to `policy` in, after checking it against the model.
    ///
    /// # Errors
    /// When it can never be served.
    pub fn submit(
        &mut self,
        model: &Transformer,
        policy: u32,
        request: SampleRequest,
        events: Events,
    ) -> Result<(), PolicyError> {
        request.params.validate()?;
        let (prompt, context) = (request.prompt.len(), model.context);
        if prompt == 0 {
            return Err(PolicyError::Invalid("the prompt is empty; it needs at least one token".into()));
        }
        if prompt >= context {
            return Err(PolicyError::PromptTooLong { prompt, context });
        }
        let vocabulary = model.weights.config.vocabulary;
        if let Some(token) = request.prompt.iter().find(|t| **t as usize >= vocabulary) {
            return Err(PolicyError::Invalid(format!(
                "token {token} is outside the model's vocabulary of {vocabulary}; was the prompt made with another tokenizer?"
            )));
        }
        if !request.params.stop_strings.is_empty() && self.token_bytes.is_none() {
            return Err(PolicyError::Invalid(
                "stop_strings need an engine that was started with its tokenizer's bytes; use stop_ids"
                    .into(),
            ));
        }
        let longest = longest(&request, context);
        if longest > self.cache.capacity() {
            return Err(PolicyError::Invalid(format!(
                "prompt and reply may take {longest} tokens, but the key-value memory holds {}; raise engine.kv_memory_mb or lower max_tokens",
                self.cache.capacity()
            )));
        }
        self.waiting.push_back(Waiting { policy, request, events });
        Ok(())
    }

    /// Whether there is anything to do for a policy that may draw.
    pub fn has_work(&self, published: &[Published]) -> bool {
        let current = |policy: u32| published[policy as usize].current;
        self.running.iter().any(|s| current(s.policy)) || self.waiting.iter().any(|w| current(w.policy))
    }

    /// Counters.
    pub fn health(&self) -> Health {
        Health {
            running: self.running.len(),
            waiting: self.waiting.len(),
            prefix_hits: self.prefix_hits,
            prefilled: self.prefilled,
            drawn: self.drawn,
            busy_seconds: self.busy.as_secs_f64(),
            learning_seconds: 0.0,
            running_seconds: self.running_seconds,
            cache_in_use_seconds: self.cache_in_use_seconds,
            cache_in_use: self.cache.occupancy()[0],
            cache_filled: self.cache.occupancy()[1],
        }
    }

    /// The weights of `policy` have changed: nothing that it computed before holds any more. Its running sequences go on and
    /// compute their tokens again.
    pub fn weights_changed(&mut self, policy: u32) {
        self.cache.forget(policy);
        for sequence in self.running.iter_mut().filter(|sequence| sequence.policy == policy) {
            self.cache.release(&std::mem::take(&mut sequence.blocks));
            sequence.computed = 0;
        }
    }

    /// Ends the requests to `policy` of one stream, or all of them. What they have drawn has been handed on, and stays in the
    /// cache: asked for again with it as a part of their prompts, they go on as if nothing had happened.
    pub fn abort(&mut self, policy: u32, stream: Option<u64>) -> usize {
        let meant = |p: u32, s: u64| p == policy && stream.is_none_or(|stream| stream == s);
        let mut aborted = 0;
        let mut end = |events: &Events| {
            let _ = events.send(Ok(SampleEvent::Finished(FinishReason::Aborted)));
            aborted += 1;
        };
        self.waiting.retain(|waiting| {
            let meant = meant(waiting.policy, waiting.request.stream);
            if meant {
                end(&waiting.events);
            }
            !meant
        });
        let (ended, going): (Vec<_>, _) =
            self.running.drain(..).partition(|sequence| meant(sequence.policy, sequence.stream));
        self.running = going;
        for sequence in ended {
            end(&sequence.events);
            retire(&mut self.cache, sequence);
        }
        aborted
    }

    /// Runs one batch; `published` says, for every policy, what it draws from.
    pub fn step(&mut self, model: &Transformer, published: &[Published]) {
        self.drop_abandoned();
        self.admit(model.context);
        let mut batch = self.next_batch(published);
        // Rows of one policy next to each other. The order changes no result.
        batch.sort_by_key(|(index, _)| self.running[*index].policy);
        if batch.is_empty() {
            return;
        }
        crash_point("decode_step");
        let start = Instant::now();
        let (mut tokens, mut positions, mut spans, mut wanted) = (vec![], vec![], vec![], vec![]);
        let mut adapters: Vec<(Range<usize>, usize)> = Vec::new();
        for &(index, len) in &batch {
            let sequence = &mut self.running[index];
            let (from, to) = (sequence.computed, sequence.computed + len);
            while sequence.blocks.len() * BLOCK < to {
                sequence.blocks.push(self.cache.take());
            }
            if to == sequence.tokens.len() {
                wanted.push((index, tokens.len() + len - 1));
            }
            if let Some(adapter) = (sequence.policy as usize).checked_sub(1) {
                let rows = tokens.len()..tokens.len() + len;
                match adapters.last_mut() {
                    Some((run, last)) if *last == adapter => run.end = rows.end,
                    _ => adapters.push((rows, adapter)),
                }
            }
            let blocks = sequence.blocks[..to.div_ceil(BLOCK)].to_vec();
            spans.push(Span { row: tokens.len(), len, position: from, blocks, inherits: None });
            tokens.extend_from_slice(&sequence.tokens[from..to]);
            positions.extend((from..to).map(|p| p as u32));
            self.prefilled += (to.min(sequence.prompt)).saturating_sub(from) as u64;
            sequence.computed = to;
        }
        let rows = Rows { tokens: &tokens, positions: &positions, spans: &spans, adapters: &adapters };
        let last_rows: Vec<usize> = wanted.iter().map(|(_, row)| *row).collect();
        self.inference.run(model, rows, &mut self.cache.blocks, &last_rows, &mut self.logits);
        for &(index, len) in &batch {
            let sequence = &self.running[index];
            if (sequence.computed - len..sequence.computed).contains(&(sequence.prompt - 1)) {
                let whole = &sequence.tokens[..sequence.prompt];
                self.cache.keep(sequence.policy, whole, &sequence.blocks);
            }
        }
        let (running, cache_in_use) = (batch.len() as f64, self.cache.occupancy()[0]);
        self.draw(model, published, &wanted);
        let took = start.elapsed();
        self.busy += took;
        self.running_seconds += running * took.as_secs_f64();
        self.cache_in_use_seconds += cache_in_use * took.as_secs_f64();
    }

    /// Draws a token for every wanted row, hands it on, and ends what is finished.
    fn draw(&mut self, model: &Transformer, published: &[Published], wanted: &[(usize, usize)]) {
        let vocabulary = model.weights.config.vocabulary;
        let logits = Shared::new(&mut self.logits[..wanted.len() * vocabulary]);
        let mut drawn = vec![(0u32, 0.0f32); wanted.len()];
        let results = Shared::new(&mut drawn);
        let running = &self.running;
        model.compute.pool.run(wanted.len(), |task| {
            let sequence = &running[wanted[task].0];
            let u = uniform(sequence.seed, sequence.stream, sequence.tokens.len() as u64);
            // SAFETY: each row belongs to one task.
            let (row, result) =
                unsafe { (logits.slice(task * vocabulary, vocabulary), results.slice(task, 1)) };
            result[0] = choose(model.compute.isa, row, &sequence.params, &sequence.tokens, u);
        });
        let mut done = Vec::new();
        for (&(index, _), &(token, logprob)) in wanted.iter().zip(&drawn) {
            self.drawn += 1;
            let sequence = &mut self.running[index];
            sequence.tokens.push(token);
            let version = published[sequence.policy as usize].version;
            let event = SampleEvent::Tokens { tokens: vec![token], logprobs: vec![logprob], version };
            // A receiver that is gone is noticed before the next step.
            let _ = sequence.events.send(Ok(event));
            if let Some(reason) = finished(sequence, token, model.context, self.token_bytes.as_deref()) {
                let _ = sequence.events.send(Ok(SampleEvent::Finished(reason)));
                done.push(index);
            }
        }
        done.sort_unstable();
        for index in done.into_iter().rev() {
            retire(&mut self.cache, self.running.swap_remove(index));
        }
    }

    /// Ends requests whose stream was dropped.
    fn drop_abandoned(&mut self) {
        self.waiting.retain(|waiting| !waiting.events.is_closed());
        for index in (0..self.running.len()).rev() {
            if self.running[index].events.is_closed() {
                retire(&mut self.cache, self.running.swap_remove(index));
            }
        }
    }

    /// Starts waiting requests, in order, as long as there is room.
    fn admit(&mut self, context: usize) {
        let mut held = VecDeque::new();
        while let Some(waiting) = self.waiting.pop_front() {
            if self.running.len() >= self.limits.running {
                held.push_back(waiting);
                break;
            }
            let (policy, request) = (waiting.policy, &waiting.request);
            // The last token of the prompt is always computed: its row gives the first logits.
            let most = request.prompt.len() - 1;
            let mut prefix = self.cache.longest(policy, &request.prompt, most);
            let prompts = self.running.iter().filter(|s| s.policy == policy && s.computed < s.prompt);
            let shared = prompts.map(|s| shared_prefix(&s.tokens, &request.prompt).min(most));
            if shared.max().unwrap_or(0) >= prefix.len + WORTH_WAITING {
                held.push_back(waiting);
                continue;
            }
            let longest = longest(request, context);
            let whole = prefix.len / BLOCK;
            let shared = whole - self.cache.unused_among(&prefix.blocks[..whole]);
            // A partly shared block is copied while its source is held.
            let transient = usize::from(!prefix.len.is_multiple_of(BLOCK));
            let promised: usize = self.running.iter().map(|s| s.blocks_at_most() - s.blocks.len()).sum();
            let needed = longest.div_ceil(BLOCK) - shared + transient + promised;
            if needed > self.cache.available() && !self.running.is_empty() {
                held.push_back(waiting);
                break;
            }
            if needed > self.cache.available() {
                // Alone and still too large: without the prefix it fits, as `submit` checked.
                prefix = Prefix::default();
            }
            let blocks = self.cache.fork(&prefix);
            self.prefix_hits += prefix.len as u64;
            let Waiting { policy, request, events } = waiting;
            self.running.push(Running {
                policy,
                prompt: request.prompt.len(),
                tokens: request.prompt,
                computed: prefix.len,
                blocks,
                longest,
                tail: Vec::new(),
                seed: request.seed,
                stream: request.stream,
                params: request.params,
                events,
            });
        }
        held.append(&mut self.waiting);
        self.waiting = held;
    }

    /// Which sequences go into the next batch, with how many rows: decoding ones first, then prompts as far as they fit.
    fn next_batch(&self, published: &[Published]) -> Vec<(usize, usize)> {
        let mut left = self.limits.rows;
        let mut batch = Vec::new();
        for decoding in [true, false] {
            for (index, sequence) in self.running.iter().enumerate() {
                let missing = sequence.tokens.len() - sequence.computed;
                let current = published[sequence.policy as usize].current;
                if current && (missing == 1) == decoding && left > 0 {
                    let len = missing.min(left);
                    left -= len;
                    batch.push((index, len));
                }
            }
        }
        batch
    }
}

/// Ends a sequence; what it computed stays for others.
fn retire(cache: &mut Cache, sequence: Running) {
    cache.keep(sequence.policy, &sequence.tokens[..sequence.computed], &sequence.blocks);
    cache.release(&sequence.blocks);
}

/// Most tokens that prompt and reply can come to.
fn longest(request: &SampleRequest, context: usize) -> usize {
    request.prompt.len().saturating_add(request.params.max_tokens).min(context)
}

/// Why a sequence ends with `token`, if it does.
fn finished(
    sequence: &mut Running,
    token: u32,
    context: usize,
    token_bytes: Option<&dyn TokenBytes>,
) -> Option<FinishReason> {
    let params = &sequence.params;
    if params.stop_ids.contains(&token) {
        return Some(FinishReason::StopId);
    }
    let longest_stop = params.stop_strings.iter().map(String::len).max().unwrap_or(0);
    if longest_stop > 0 {
        let new = token_bytes.and_then(|bytes| bytes.token_bytes(token)).unwrap_or_default();
        sequence.tail.extend_from_slice(new);
        let stops = |stop: &String| sequence.tail.windows(stop.len().max(1)).any(|w| w == stop.as_bytes());
        if params.stop_strings.iter().any(stops) {
            return Some(FinishReason::StopString);
        }
        let surplus = sequence.tail.len().saturating_sub(longest_stop - 1);
        sequence.tail.drain(..surplus);
    }
    if sequence.tokens.len() >= sequence.prompt + params.max_tokens {
        Some(FinishReason::Length)
    } else if sequence.tokens.len() >= context {
        Some(FinishReason::Context)
    } else {
        None
    }
}
