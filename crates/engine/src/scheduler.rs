//! Schedules rows for continuous batching.
//!
//! Each step runs one batch: the newest token of each running sequence, and chunks of the prompts
//! that are not yet computed, up to a maximum number of rows. A request joins as soon as the cache
//! has room for its maximum length, and leaves when it is done. If a running sequence is computing
//! the prompt that a request shares, the request waits for it, so each prompt is computed once.
//!
//! If the weights change while sequences are running, the sequences continue, and each token
//! records the version that sampled it. The sequences release their blocks and queue again, ahead
//! of new requests, with the tokens sampled so far. So shared tokens are recomputed once, and no
//! sequence needs more memory than it was admitted with. With `engine.keep_cache`, sequences keep
//! their blocks, and no other sequence reuses these blocks.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use levade_policy::{
    Constraint, DeviceStats, FinishReason, Load, PolicyError, SampleEvent, SampleRequest,
    TokenBytes, crash_point,
};

use crate::buffer::Buffer;
use crate::cache::KvCache;
use crate::ops::kv::{BLOCK, TokenSpan};
use crate::radix::Prefix;
use crate::row_sampling::{LogitsRow, max_logits_rows, sample_or_score};
use crate::sequence::{Events, Sequence};
use crate::token_sampling::SampledToken;
use crate::transformer::{InferencePass, TokenRows, Transformer};

/// Published weights that a policy samples with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PublishedWeights {
    /// Version of the weights.
    pub version: u64,
    /// Whether these are the policy's current weights. If not, the policy samples nothing until it
    /// publishes.
    pub current: bool,
}

impl PublishedWeights {
    /// Returns whether `sequence` can be sampled with these weights: they are current, and recent
    /// enough for the request.
    fn can_serve(&self, sequence: &Sequence) -> bool {
        self.current && self.version >= sequence.min_version
    }
}

impl Default for PublishedWeights {
    fn default() -> Self {
        PublishedWeights { version: 0, current: true }
    }
}

/// Limits of the scheduler on running sequences and rows.
#[derive(Debug, Clone, Copy)]
pub struct SchedulerLimits {
    /// Maximum number of sequences that run at the same time.
    pub running: usize,
    /// Maximum number of rows in one step.
    pub rows: usize,
}

/// Queue and running sequences of all policies of an engine.
pub struct Scheduler {
    /// Waiting sequences, in order of admission.
    waiting: VecDeque<Sequence>,
    /// Running sequences, in the order in which they were admitted.
    running: Vec<Sequence>,
    cache: KvCache,
    limits: SchedulerLimits,
    token_bytes: Option<Arc<dyn TokenBytes>>,
    inference: InferencePass,
    logits: Buffer,
    prefix_hits: u64,
    prefilled: u64,
    sampled: u64,
    busy: Duration,
    /// Integrals over the duration of batches: running sequences × seconds, and fraction of the
    /// cache in use × seconds.
    running_seconds: f64,
    cache_in_use_seconds: f64,
}

impl Scheduler {
    /// Creates a scheduler without requests.
    pub fn new(
        cache: KvCache,
        limits: SchedulerLimits,
        token_bytes: Option<Arc<dyn TokenBytes>>,
    ) -> Self {
        Scheduler {
            waiting: VecDeque::new(),
            running: Vec::new(),
            cache,
            limits,
            token_bytes,
            inference: InferencePass::default(),
            logits: Buffer::default(),
            prefix_hits: 0,
            prefilled: 0,
            sampled: 0,
            busy: Duration::ZERO,
            running_seconds: 0.0,
            cache_in_use_seconds: 0.0,
        }
    }

    /// Checks a request to `policy` against the model and queues it. A request with a grammar comes
    /// with its `constraint`.
    ///
    /// # Errors
    /// Returns an error if the request is invalid or can never be served.
    pub fn submit(
        &mut self,
        model: &Transformer,
        policy: u32,
        request: SampleRequest,
        constraint: Option<Box<dyn Constraint>>,
        events: Events,
    ) -> Result<(), PolicyError> {
        request.validate(model.weights.config.vocabulary)?;
        if request.prompt.is_empty() {
            return Err(PolicyError::Invalid(
                "the prompt is empty, but must have at least one token".into(),
            ));
        }
        request.check_room(model.context)?;
        if !request.params.stop_strings.is_empty() && self.token_bytes.is_none() {
            return Err(PolicyError::Invalid(
                "stop_strings require an engine that was started with the bytes of its tokenizer's \
                 tokens; use stop_ids instead"
                    .into(),
            ));
        }
        let sequence = Sequence::new(
            policy,
            request,
            constraint,
            model.context,
            self.token_bytes.as_deref(),
            events,
        );
        if sequence.max_len > self.cache.capacity() {
            return Err(PolicyError::Invalid(format!(
                "prompt and completion may take {} tokens, but the key-value cache holds {}; lower \
                 max_tokens, or start the engine with a larger kv_memory_mb (--kv-memory-mb of \
                 levade serve)",
                sequence.max_len,
                self.cache.capacity()
            )));
        }
        self.waiting.push_back(sequence);
        Ok(())
    }

    /// Returns the number of running and waiting sequences whose policies can sample now.
    pub fn count_ready(&self, published: &[PublishedWeights]) -> usize {
        self.running
            .iter()
            .chain(&self.waiting)
            .filter(|sequence| published[sequence.policy as usize].can_serve(sequence))
            .count()
    }

    /// Returns the number of requests in the scheduler and the memory that they use.
    pub fn load(&self) -> Load {
        Load {
            running: self.running.len(),
            waiting: self.waiting.len(),
            cache_in_use: self.cache.occupancy()[0],
        }
    }

    /// Returns the counters since the start of the engine.
    pub fn stats(&self) -> DeviceStats {
        DeviceStats {
            prefix_hits: self.prefix_hits,
            prefilled: self.prefilled,
            sampled: self.sampled,
            busy_seconds: self.busy.as_secs_f64(),
            running_seconds: self.running_seconds,
            cache_in_use_seconds: self.cache_in_use_seconds,
            cache_filled: self.cache.occupancy()[1],
        }
    }

    /// Discards the cached prefixes of `policy`, because its weights have changed. With `keep`, its
    /// running sequences continue with the keys and values that they have. Without it, they queue
    /// again in their order, ahead of sequences that have not sampled yet, and recompute the tokens
    /// sampled so far. A sequence that scores its prompt always recomputes, because all scores must
    /// come from one version.
    pub fn weights_changed(&mut self, policy: u32, keep: bool) {
        self.cache.remove_prefixes(policy);
        let stopped: Vec<Sequence> = self
            .running
            .extract_if(.., |sequence| {
                let of_policy = sequence.policy == policy;
                let continues = keep && !sequence.is_scored();
                sequence.is_stale |= of_policy && continues;
                of_policy && !continues
            })
            .collect();
        for mut sequence in stopped.into_iter().rev() {
            self.cache.release(&sequence.restart());
            self.waiting.push_front(sequence);
        }
    }

    /// Aborts the requests to `policy` of one stream, or all its requests if `stream` is `None`.
    /// Returns the number of aborted requests. Their sampled tokens have been sent and stay in the
    /// cache: a new request whose prompt includes these tokens continues as if nothing had
    /// happened.
    pub fn abort(&mut self, policy: u32, stream: Option<u64>) -> usize {
        let matches =
            |s: &Sequence| s.policy == policy && stream.is_none_or(|stream| stream == s.stream);
        self.end_matching(matches, |sequence| {
            let _ = sequence.events.send(Ok(SampleEvent::Finished(FinishReason::Aborted)));
        })
    }

    /// Runs one batch. `published` holds the weights that each policy samples with, by policy.
    pub fn step(&mut self, model: &Transformer, published: &[PublishedWeights]) {
        self.drop_abandoned();
        self.admit_waiting(published);
        let mut batch = self.next_batch(published);
        // Sorted so that rows of one policy are adjacent. The order changes no result.
        batch.sort_by_key(|(index, _)| self.running[*index].policy);
        if batch.is_empty() {
            return;
        }
        crash_point("decode_step");
        let start = Instant::now();
        let mut tokens = vec![];
        let mut positions = vec![];
        let mut spans = vec![];
        let mut needed = vec![];
        let mut adapters: Vec<(Range<usize>, usize)> = Vec::new();
        for &(index, len) in &batch {
            let sequence = &mut self.running[index];
            let from = sequence.computed;
            let to = sequence.computed + len;
            while sequence.blocks.len() * BLOCK < to {
                sequence.blocks.push(self.cache.allocate_block());
            }
            let first = tokens.len();
            needed.extend((from..to).filter(|position| sequence.needs_logits(*position)).map(
                |position| LogitsRow { sequence: index, row: first + position - from, position },
            ));
            if let Some(adapter) = (sequence.policy as usize).checked_sub(1) {
                let rows = tokens.len()..tokens.len() + len;
                match adapters.last_mut() {
                    Some((run, last)) if *last == adapter => run.end = rows.end,
                    _ => adapters.push((rows, adapter)),
                }
            }
            let blocks = sequence.blocks[..to.div_ceil(BLOCK)].to_vec();
            spans.push(TokenSpan {
                row: tokens.len(),
                len,
                position: from,
                blocks,
                inherits: None,
            });
            tokens.extend_from_slice(&sequence.tokens[from..to]);
            positions.extend((from..to).map(|p| p as u32));
            self.prefilled += (to.min(sequence.prompt)).saturating_sub(from) as u64;
            sequence.computed = to;
        }
        let rows = TokenRows {
            tokens: &tokens,
            positions: &positions,
            spans: &spans,
            adapters: &adapters,
        };
        self.inference.run(model, rows, &mut self.cache.blocks);
        for &(index, len) in &batch {
            let sequence = &self.running[index];
            let at = sequence.computed - len..sequence.computed;
            if at.contains(&(sequence.prompt - 1)) && !sequence.is_stale {
                let prompt_tokens = &sequence.tokens[..sequence.prompt];
                self.cache.insert_prefix(sequence.policy, prompt_tokens, &sequence.blocks);
            }
        }
        let running = batch.len() as f64;
        let cache_in_use = self.cache.occupancy()[0];
        let mut done = self.sample_rows(model, published, &needed);
        let empty: Vec<usize> = batch
            .iter()
            .map(|(index, _)| *index)
            .filter(|index| self.running[*index].is_done_without_completion())
            .filter(|i| !done.contains(i))
            .collect();
        for index in empty {
            self.running[index].send_scores();
            let _ =
                self.running[index].events.send(Ok(SampleEvent::Finished(FinishReason::Length)));
            done.push(index);
        }
        done.sort_unstable();
        for index in done.into_iter().rev() {
            release_sequence(&mut self.cache, self.running.remove(index));
        }
        let took = start.elapsed();
        self.busy += took;
        self.running_seconds += running * took.as_secs_f64();
        self.cache_in_use_seconds += cache_in_use * took.as_secs_f64();
    }

    /// Samples or scores a token for every row in `needed` and sends it. Returns the indices of the
    /// sequences that are done.
    fn sample_rows(
        &mut self,
        model: &Transformer,
        published: &[PublishedWeights],
        needed: &[LogitsRow],
    ) -> Vec<usize> {
        let mut done = Vec::new();
        for chunk in needed.chunks(max_logits_rows(self.limits.running, self.limits.rows)) {
            self.inference.logits(model, chunk.iter().map(|needed| needed.row), &mut self.logits);
            let found = sample_or_score(model, &self.running, chunk, &mut self.logits);
            for (&LogitsRow { sequence: index, position, .. }, found) in chunk.iter().zip(found) {
                let sequence = &mut self.running[index];
                match found {
                    _ if done.contains(&index) => {}
                    Ok(scored) if position + 1 < sequence.tokens.len() => {
                        sequence.add_score(scored)
                    }
                    Ok(SampledToken { token, logprob, top }) => {
                        self.sampled += 1;
                        sequence.send_scores();
                        sequence.tokens.push(token);
                        let version = published[sequence.policy as usize].version;
                        let top =
                            if sequence.params.top_logprobs > 0 { vec![top] } else { Vec::new() };
                        let tokens = vec![token];
                        let logprobs = vec![logprob];
                        // A closed receiver is noticed before the next step.
                        let _ = sequence.events.send(Ok(SampleEvent::Tokens {
                            tokens,
                            logprobs,
                            top,
                            version,
                        }));
                        let bytes = self.token_bytes.as_deref();
                        if let Some(reason) = sequence.check_finished(token, model.context, bytes) {
                            let _ = sequence.events.send(Ok(SampleEvent::Finished(reason)));
                            done.push(index);
                        }
                    }
                    Err(error) => {
                        let _ = sequence.events.send(Err(error));
                        // No other sequence may reuse these keys and values.
                        sequence.computed = 0;
                        done.push(index);
                    }
                }
            }
        }
        done
    }

    /// Ends requests whose stream was dropped.
    fn drop_abandoned(&mut self) {
        self.end_matching(|sequence| sequence.events.is_closed(), |_| ());
    }

    /// Ends all sequences that match `matches`, after calling `on_end`; returns how many there
    /// were.
    fn end_matching(
        &mut self,
        matches: impl Fn(&Sequence) -> bool,
        on_end: impl Fn(&Sequence),
    ) -> usize {
        let before = self.waiting.len() + self.running.len();
        let Scheduler { waiting, running, cache, .. } = self;
        waiting.retain(|sequence| {
            let ends = matches(sequence);
            if ends {
                on_end(sequence);
            }
            !ends
        });
        for sequence in running.extract_if(.., |sequence| matches(sequence)) {
            on_end(&sequence);
            release_sequence(cache, sequence);
        }
        before - self.waiting.len() - self.running.len()
    }

    /// Admits waiting sequences in order while there is room. Sequences of policies that cannot
    /// sample now are skipped and use no room.
    fn admit_waiting(&mut self, published: &[PublishedWeights]) {
        let mut deferred = VecDeque::new();
        // Whether a sequence that has sampled before has to wait. No sequence that has not sampled
        // yet may take its room.
        let mut is_owed = false;
        while let Some(mut sequence) = self.waiting.pop_front() {
            if self.running.len() >= self.limits.running {
                deferred.push_back(sequence);
                break;
            }
            if !published[sequence.policy as usize].can_serve(&sequence)
                || (is_owed && !sequence.has_sampled())
            {
                deferred.push_back(sequence);
                continue;
            }
            let mut prefix = self.cache.longest_prefix(
                sequence.policy,
                &sequence.tokens,
                sequence.max_shared_tokens(),
            );
            if self.running.iter().any(|other| sequence.should_wait_for(other, &prefix)) {
                is_owed |= sequence.has_sampled();
                deferred.push_back(sequence);
                continue;
            }
            if !self.has_room_for(&sequence, &prefix) {
                if !self.running.is_empty() {
                    deferred.push_back(sequence);
                    break;
                }
                // The only sequence, and still too large: without the prefix it fits, as `submit`
                // checked.
                prefix = Prefix::default();
            }
            self.prefix_hits += prefix.len.min(sequence.prompt) as u64;
            sequence.blocks = self.cache.fork(&prefix);
            sequence.computed = prefix.len;
            self.running.push(sequence);
        }
        deferred.append(&mut self.waiting);
        self.waiting = deferred;
    }

    /// Returns whether a sequence that starts from `prefix` fits alongside the running sequences,
    /// even if all sequences reach their maximum length.
    fn has_room_for(&self, sequence: &Sequence, prefix: &Prefix) -> bool {
        let full_blocks = &prefix.blocks[..prefix.len / BLOCK];
        let shared_blocks = full_blocks.len() - self.cache.unused_among(full_blocks);
        // A partly shared block is copied while its source is referenced.
        let transient = usize::from(!prefix.len.is_multiple_of(BLOCK));
        let promised: usize = self.running.iter().map(|s| s.max_blocks() - s.blocks.len()).sum();
        sequence.max_blocks() - shared_blocks + transient + promised
            <= self.cache.available_blocks()
    }

    /// Selects the sequences of the next batch, each with its number of rows: decoding sequences
    /// first, then prefill chunks in the remaining rows.
    fn next_batch(&self, published: &[PublishedWeights]) -> Vec<(usize, usize)> {
        let mut remaining_rows = self.limits.rows;
        let mut batch = Vec::new();
        for decoding in [true, false] {
            for (index, sequence) in self.running.iter().enumerate() {
                let missing = sequence.tokens.len() - sequence.computed;
                let current = published[sequence.policy as usize].current;
                if current && (missing == 1) == decoding && remaining_rows > 0 {
                    let len = missing.min(remaining_rows);
                    remaining_rows -= len;
                    batch.push((index, len));
                }
            }
        }
        batch
    }
}

/// Releases the blocks of a sequence. The sequence's keys and values stay in the cache for reuse if
/// all of them were computed with the weights that sample now.
fn release_sequence(cache: &mut KvCache, sequence: Sequence) {
    if !sequence.is_stale {
        cache.insert_prefix(
            sequence.policy,
            &sequence.tokens[..sequence.computed],
            &sequence.blocks,
        );
    }
    cache.release(&sequence.blocks);
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
