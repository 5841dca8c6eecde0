//! Samples tokens from a policy: the trait [`Sampler`] and its types.
//!
//! A [`SampleRequest`] returns a [`SampleStream`] of tokens, each with its behavior log-probability
//! and the version of the weights that sampled it.
//!
//! # Guarantees of a sampler
//! - **Behavior log-probabilities** are log-softmax(logits / T) over the full vocabulary, and T is
//!   recorded. Top-p, penalties, biases (`adjust`) and grammars (`grammar`) change the distribution
//!   that a token is sampled from, but neither this number nor the reported alternatives
//!   ([`SamplingParams::top_logprobs`]). Tokens sampled with any of them are recorded as filtered
//!   and never trained.
//! - **Log-probabilities of a prompt** ([`SamplingParams::prompt_logprobs`]) are those that a
//!   learner computes. Such a prompt is computed completely, under one version of the weights.
//! - **Published weights only.** A sampler does not sample from weights that changed and were not
//!   published, nor from weights older than [`SampleRequest::min_version`]. Requests wait, or are
//!   rejected with the version as the reason. The agent loop requests weights at least as new as
//!   those of the previous turn.
//! - **Continuation.** A request that continues an aborted completion states how many tokens at the
//!   end of its prompt belong to that completion ([`SamplingParams::sampled_before`]). It then
//!   samples the tokens that would have followed.
//! - **Load and pauses.** [`Load`] reports the work in progress and waiting; [`Sampler::paused`]
//!   reports how long the sampler stood still, which deadlines of completions exclude. Counters of
//!   the device are optional.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use levade_tree::{Kind, Segment, SegmentId, VersionRun};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::{Grammar, PolicyError, WeightsRef, process_time};

/// Maximum absolute value of a presence or frequency penalty, as in OpenAI's API.
const MAX_PENALTY: f32 = 2.0;
/// Maximum absolute value of a logit bias, as in OpenAI's API.
const MAX_BIAS: f32 = 100.0;
/// Maximum number of alternatives reported per token, as in OpenAI's API.
const MAX_TOP_LOGPROBS: usize = 20;

/// Sampling parameters. The defaults sample from the model's own distribution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingParams {
    /// Maximum number of new tokens. It may be 0 if `prompt_logprobs` is set: the completion is
    /// then empty.
    pub max_tokens: usize,
    /// Temperature by which logits are divided: 0, or a value in 0.01..=100. 0 selects the most
    /// likely token (greedy decoding).
    pub temperature: f32,
    /// Cumulative probability of top-p sampling, in (0, 1]: the smallest set of most likely tokens
    /// that reaches it is kept. 1 keeps all tokens.
    pub top_p: f32,
    /// Number of most likely tokens to keep in top-k sampling; 0 keeps all tokens.
    pub top_k: usize,
    /// Minimum probability of a kept token in min-p sampling, as a fraction of the probability of
    /// the most likely token. 0 keeps all tokens.
    pub min_p: f32,
    /// Divisor of positive logits, and factor of negative logits, of tokens that occur in the
    /// prompt or the completion. 1 disables the penalty.
    pub repetition_penalty: f32,
    /// Value in −2..=2 that is subtracted from the logits of tokens that occur in the completion. 0
    /// disables the penalty.
    pub presence_penalty: f32,
    /// Value in −2..=2 that is subtracted from the logit of a token once for each of its
    /// occurrences in the completion. 0 disables the penalty.
    pub frequency_penalty: f32,
    /// Values in −100..=100 that are added to the logits of tokens, by token id.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Number of tokens at the start of the completion among which no token of `stop_ids` is
    /// sampled and no stop string ends the completion.
    pub min_tokens: usize,
    /// Number of most likely tokens reported with their log-probabilities at every position, at
    /// most 20.
    pub top_logprobs: usize,
    /// Number of most likely tokens reported at every position of the prompt, at most 20, in
    /// addition to the log-probabilities of the prompt's own tokens. `None` reports neither. A
    /// prompt with this option is computed completely, even if parts of it are cached.
    pub prompt_logprobs: Option<usize>,
    /// Number of tokens at the end of the prompt that an aborted request sampled for this
    /// completion. Penalties and `min_tokens` count these tokens; `max_tokens` does not.
    #[serde(rename = "drawn_before")]
    pub sampled_before: usize,
    /// Token ids that end the completion. The completion includes the stop token.
    pub stop_ids: Vec<u32>,
    /// Stop strings: texts that end the completion. The completion includes the tokens that
    /// complete a stop string. Stop strings require a sampler that knows its vocabulary.
    pub stop_strings: Vec<String>,
    /// Output format of the completion. A token of `stop_ids` is allowed when the format is
    /// complete, or when the format itself allows this token; it ends the completion in both cases.
    /// If the format allows only the end, `min_tokens` is ignored. A grammar requires a sampler
    /// that knows its vocabulary.
    pub grammar: Option<Grammar>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            max_tokens: 256,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            min_tokens: 0,
            top_logprobs: 0,
            prompt_logprobs: None,
            sampled_before: 0,
            stop_ids: Vec::new(),
            stop_strings: Vec::new(),
            grammar: None,
        }
    }
}

impl SamplingParams {
    /// Returns whether tokens are sampled from another distribution than the distribution that
    /// their log-probabilities refer to.
    pub fn is_filtered(&self) -> bool {
        self.has_truncation() || self.has_adjustments() || self.grammar.is_some()
    }

    /// Returns the temperature of the distributions that log-probabilities refer to: 1 for greedy
    /// decoding.
    pub fn behavior_temperature(&self) -> f32 {
        if self.temperature == 0.0 { 1.0 } else { self.temperature }
    }

    /// Returns whether unlikely tokens are excluded (top-p, top-k, min-p).
    pub fn has_truncation(&self) -> bool {
        self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0
    }

    /// Checks that every value is in its range.
    ///
    /// # Errors
    /// Returns [`PolicyError::Invalid`] with the name and range of the first invalid value, if
    /// there is one.
    pub fn validate(&self) -> Result<(), PolicyError> {
        let t = self.temperature;
        check_range(t == 0.0 || (1e-2..=1e2).contains(&t), "temperature", t, "0 or in 0.01..=100")?;
        check_range(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")?;
        check_range((0.0..=1.0).contains(&self.min_p), "min_p", self.min_p, "in 0..=1")?;
        let r = self.repetition_penalty;
        check_range(r > 0.0 && r.is_finite(), "repetition_penalty", r, "more than 0")?;
        let p = MAX_PENALTY;
        let penalty =
            |name, value: f32| check_range((-p..=p).contains(&value), name, value, "in -2..=2");
        penalty("presence_penalty", self.presence_penalty)?;
        penalty("frequency_penalty", self.frequency_penalty)?;
        for (token, bias) in &self.logit_bias {
            let ok = (-MAX_BIAS..=MAX_BIAS).contains(bias);
            check_range(ok, &format!("logit_bias of token {token}"), *bias, "in -100..=100")?;
        }
        let top = self.top_logprobs;
        check_range(top <= MAX_TOP_LOGPROBS, "top_logprobs", top as f32, "at most 20")?;
        let top = self.prompt_logprobs.unwrap_or(0);
        check_range(top <= MAX_TOP_LOGPROBS, "prompt_logprobs", top as f32, "at most 20")?;
        let is_empty = self.max_tokens == 0 && self.prompt_logprobs.is_none();
        check_range(
            !is_empty,
            "max_tokens",
            self.max_tokens as f32,
            "at least 1, unless prompt_logprobs is set",
        )?;
        if self.grammar.is_some() && self.stop_ids.is_empty() {
            let problem = "a grammar requires stop_ids, because a stop token ends the completion";
            return Err(PolicyError::Invalid(problem.into()));
        }
        let max = self.sampled_before.saturating_add(self.max_tokens);
        check_range(
            self.min_tokens <= max,
            "min_tokens",
            self.min_tokens as f32,
            "at most drawn_before + max_tokens",
        )
    }
}

fn check_range(ok: bool, name: &str, value: f32, range: &str) -> Result<(), PolicyError> {
    if ok {
        Ok(())
    } else {
        Err(PolicyError::Invalid(format!("{name} = {value}, but it must be {range}")))
    }
}

/// Request for one completion of a prompt.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SampleRequest {
    /// Name of the request in logs and at services that forward it.
    pub id: String,
    /// Name of the requested policy, because one address can serve several policies.
    pub policy: String,
    /// Minimum version of the weights that sample the completion. A sampler with older weights
    /// waits for this version, or rejects the request with [`PolicyError::Behind`].
    #[serde(rename = "least_version")]
    pub min_version: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Stream of random numbers within the run, unique to the call. The stream and the position of
    /// a token determine the random number that samples it, so a completion does not depend on
    /// concurrent requests.
    pub stream: u64,
    /// Token ids of the prompt: the complete sequence so far.
    pub prompt: Vec<u32>,
    /// Sampling parameters of the completion.
    pub params: SamplingParams,
}

impl SampleRequest {
    /// Checks the prompt and the parameters against a vocabulary of `vocabulary` tokens.
    ///
    /// # Errors
    /// Returns [`PolicyError::Invalid`] if a value is invalid, with the first invalid value and the
    /// valid range.
    pub fn validate(&self, vocabulary: usize) -> Result<(), PolicyError> {
        self.params.validate()?;
        if let Some(token) = self.prompt.iter().find(|token| **token as usize >= vocabulary) {
            return Err(PolicyError::Invalid(format!(
                "token {token} is outside the model's vocabulary of {vocabulary}; was the prompt \
                 made with another tokenizer?"
            )));
        }
        if let Some(token) =
            self.params.logit_bias.keys().find(|token| **token as usize >= vocabulary)
        {
            return Err(PolicyError::Invalid(format!(
                "logit_bias names token {token}, which is outside the model's vocabulary of \
                 {vocabulary}"
            )));
        }
        let sampled = self.params.sampled_before;
        let prompt = self.prompt.len();
        if sampled > prompt {
            return Err(PolicyError::Invalid(format!(
                "drawn_before = {sampled}, but the prompt has only {prompt} tokens; the prompt \
                 must end with the tokens sampled before"
            )));
        }
        Ok(())
    }

    /// Checks that the prompt fits into a context of `context` tokens and, if `max_tokens` is not
    /// 0, leaves room for at least one new token.
    ///
    /// # Errors
    /// Returns [`PolicyError::PromptTooLong`] if the prompt is too long.
    pub fn check_room(&self, context: usize) -> Result<(), PolicyError> {
        let prompt = self.prompt.len();
        if prompt + self.params.max_tokens.min(1) > context {
            return Err(PolicyError::PromptTooLong { prompt, context });
        }
        Ok(())
    }
}

/// Token ids with their log-probabilities, most likely first; equally likely tokens are ordered by
/// id.
pub type TopLogprobs = Vec<(u32, f32)>;

/// Reason why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// One of `stop_ids` was sampled.
    StopId,
    /// One of `stop_strings` was completed.
    StopString,
    /// `max_tokens` tokens were sampled.
    Length,
    /// The context is full.
    Context,
    /// The caller aborted the request.
    Aborted,
}

/// Event of a [`SampleStream`].
#[derive(Debug, Clone, PartialEq)]
pub enum SampleEvent {
    /// Log-probabilities of the next prompt tokens, if the request asks for them. The first token
    /// of a prompt has no log-probability, because nothing predicts it. All such events precede the
    /// first sampled token.
    Prompt {
        /// log-softmax(logits / temperature) of each token, at temperature 1 for greedy decoding:
        /// the number that a learner computes for it.
        logprobs: Vec<f32>,
        /// The most likely tokens at the position of each token; empty if none were requested.
        top: Vec<TopLogprobs>,
    },
    /// Sampled tokens in order, all sampled with one version of the weights.
    Tokens {
        /// Ids of the sampled tokens.
        tokens: Vec<u32>,
        /// Behavior log-probability of each token.
        logprobs: Vec<f32>,
        /// The most likely tokens at the position of each token, from the distribution that
        /// `logprobs` refers to; empty if none were requested.
        top: Vec<TopLogprobs>,
        /// Version of the weights that sampled the tokens.
        version: u64,
    },
    /// The end of the completion; no event follows.
    Finished(FinishReason),
}

/// Stream of the events of one completion. Dropping the stream aborts the request.
#[derive(Debug)]
pub struct SampleStream {
    events: mpsc::UnboundedReceiver<Result<SampleEvent, PolicyError>>,
}

impl SampleStream {
    /// Creates a stream and the sender of its events.
    pub fn channel() -> (mpsc::UnboundedSender<Result<SampleEvent, PolicyError>>, Self) {
        let (sender, events) = mpsc::unbounded_channel();
        (sender, SampleStream { events })
    }

    /// Waits for the next event and returns it, or `None` after the last event.
    ///
    /// # Errors
    /// Returns the error that the sampler reports, if it reports one.
    pub async fn next(&mut self) -> Option<Result<SampleEvent, PolicyError>> {
        self.events.recv().await
    }

    /// Waits for the rest of the completion and adds each event to `completion` as it arrives. If
    /// this future is dropped, `completion` keeps the tokens received until then.
    ///
    /// # Errors
    /// Returns the error that the sampler reports, or [`PolicyError::Stopped`] if the stream ends
    /// early.
    pub async fn gather(&mut self, completion: &mut Completion) -> Result<(), PolicyError> {
        loop {
            match self.next().await {
                Some(Ok(SampleEvent::Prompt { logprobs, top })) => {
                    completion.prompt_logprobs.extend(logprobs);
                    completion.prompt_top.extend(top);
                }
                Some(Ok(SampleEvent::Tokens { tokens, logprobs, top, version })) => {
                    completion.extend(&tokens, &logprobs, version);
                    completion.top.extend(top);
                }
                Some(Ok(SampleEvent::Finished(reason))) => {
                    completion.finish = reason;
                    return Ok(());
                }
                Some(Err(error)) => return Err(error),
                None => return Err(PolicyError::Stopped("the sampler".into())),
            }
        }
    }

    /// Waits for the completion, for at most `deadline`.
    ///
    /// # Errors
    /// Returns the error that the sampler reports, [`PolicyError::Stopped`] if the stream ends
    /// early, and [`PolicyError::Deadline`] if `deadline` passes, which also aborts the request.
    pub async fn collect(mut self, deadline: Duration) -> Result<Completion, PolicyError> {
        let mut completion = Completion::default();
        match process_time::with_timeout(deadline, self.gather(&mut completion)).await {
            Some(result) => result.map(|()| completion),
            None => Err(PolicyError::Deadline(deadline, "a completion from the sampler".into())),
        }
    }
}

/// Completion of a prompt, with log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// Token ids of the completion, including the stop token.
    pub tokens: Vec<u32>,
    /// Behavior log-probability of each token.
    pub logprobs: Vec<f32>,
    /// The most likely tokens at the position of each completion token; empty if none were
    /// requested.
    pub top: Vec<TopLogprobs>,
    /// Log-probabilities of the prompt's tokens except the first; empty if they were not requested.
    pub prompt_logprobs: Vec<f32>,
    /// The most likely tokens at the position of each prompt token except the first; empty if none
    /// were requested.
    pub prompt_top: Vec<TopLogprobs>,
    /// Versions of the weights that sampled the completion, as runs of tokens.
    pub versions: Vec<VersionRun>,
    /// Reason why the completion ended; [`FinishReason::Aborted`] until the end is known.
    pub finish: FinishReason,
}

impl Default for Completion {
    fn default() -> Self {
        Completion {
            tokens: Vec::new(),
            logprobs: Vec::new(),
            top: Vec::new(),
            prompt_logprobs: Vec::new(),
            prompt_top: Vec::new(),
            versions: Vec::new(),
            finish: FinishReason::Aborted,
        }
    }
}

impl Completion {
    /// Appends tokens that were sampled under one version of the weights.
    pub fn extend(&mut self, tokens: &[u32], logprobs: &[f32], version: u64) {
        self.tokens.extend_from_slice(tokens);
        self.logprobs.extend_from_slice(logprobs);
        match self.versions.last_mut() {
            Some(run) if run.version == version => run.len += tokens.len() as u32,
            _ => self.versions.push(VersionRun { version, len: tokens.len() as u32 }),
        }
    }

    /// Converts the completion to a segment that continues the segment `parent`. `params` are the
    /// parameters of the request, and `turn` is the index of the model call.
    pub fn into_segment(
        self,
        parent: Option<SegmentId>,
        params: &SamplingParams,
        turn: u32,
    ) -> Segment {
        Segment {
            kind: Kind::Sampled,
            logprobs: self.logprobs,
            temperature: params.temperature,
            filtered: params.is_filtered(),
            versions: self.versions,
            ..Segment::context(parent, self.tokens, turn)
        }
    }
}

/// Load of a sampler: its queued and running work.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Load {
    /// Number of requests being decoded.
    pub running: usize,
    /// Number of requests waiting to be decoded.
    pub waiting: usize,
    /// Fraction of the key-value cache that requests being decoded use.
    pub cache_in_use: f64,
}

/// Counters of a sampler's device. All fields except the last are sums since the device's start.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct DeviceStats {
    /// Number of prompt tokens that were found in the prefix cache.
    pub prefix_hits: u64,
    /// Number of prompt tokens that were computed.
    pub prefilled: u64,
    /// Number of sampled tokens.
    #[serde(rename = "drawn")]
    pub sampled: u64,
    /// Time spent on prefill and decoding, in seconds.
    pub busy_seconds: f64,
    /// Integral, over the busy time, of the number of requests being decoded. Divided by
    /// `busy_seconds`, it is the mean number.
    pub running_seconds: f64,
    /// Integral, over the busy time, of the fraction of the key-value cache in use. Divided by
    /// `busy_seconds`, it is the mean fraction.
    pub cache_in_use_seconds: f64,
    /// Fraction of the key-value cache that holds data, including data kept for future requests.
    pub cache_filled: f64,
}

/// Samples tokens from a policy.
#[async_trait]
pub trait Sampler: Send + Sync {
    /// Starts a completion and returns when the request has been accepted. Tokens then arrive on
    /// the returned stream.
    ///
    /// # Errors
    /// Returns an error if the request is invalid or the sampler has stopped. Later errors arrive
    /// on the stream.
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError>;

    /// Aborts the requests with the random stream `stream`, or all requests if `stream` is `None`,
    /// and returns their number. Each request finishes with [`FinishReason::Aborted`] after the
    /// tokens sampled so far. A new request whose prompt is the old prompt plus these tokens
    /// samples the tokens that would have followed, if the weights are the same.
    ///
    /// # Errors
    /// Returns an error if the sampler has stopped.
    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError>;

    /// Returns the sampler's current load.
    ///
    /// # Errors
    /// Returns an error if the sampler has stopped.
    async fn workload(&self) -> Result<Load, PolicyError>;

    /// Returns the counters of the sampler's device, or `None` if the sampler has no device of its
    /// own.
    ///
    /// # Errors
    /// Returns an error if the sampler has stopped.
    async fn device_stats(&self) -> Result<Option<DeviceStats>, PolicyError> {
        Ok(None)
    }

    /// Returns the total time for which the sampler has been paused since its start, because its
    /// device trained or its weights were replaced. A sampler decodes no requests during a pause,
    /// so deadlines exclude this time. The call also returns during a pause, and counts the pause
    /// up to now.
    ///
    /// # Errors
    /// Returns an error if the sampler has stopped.
    async fn paused(&self) -> Result<Duration, PolicyError> {
        Ok(Duration::ZERO)
    }

    /// Loads weights that a learner has published; the next sampled token uses them. The default
    /// implementation is for a sampler that shares its memory with the learner: it only checks that
    /// the sampler has this version.
    ///
    /// # Errors
    /// Returns [`PolicyError::WeightsNotLoaded`] if the sampler cannot load these weights, and an
    /// error if it has stopped.
    async fn update_weights(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        weights.check_shared(self.version().await?)
    }

    /// Returns the version of the weights that would sample the next token.
    ///
    /// # Errors
    /// Returns an error if the sampler has stopped.
    async fn version(&self) -> Result<u64, PolicyError>;
}

/// Access to the bytes of every token of a vocabulary, with which a sampler detects stop strings
/// without a tokenizer.
pub trait TokenBytes: Send + Sync {
    /// Returns the bytes that the token `id` stands for within a text. Returns `None` for special
    /// tokens and for ids out of range.
    fn token_bytes(&self, id: u32) -> Option<&[u8]>;
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
