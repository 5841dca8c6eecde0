//! Samples tokens from a policy: the trait [`Sampler`] and its types.
//!
//! A [`SampleRequest`] returns a [`SampleStream`] of tokens, each with its behavior log-probability and the
//! version of the weights that sampled it.
//!
//! # Guarantees of a sampler
//! - **Behavior log-probabilities** are log-softmax(logits / T) over the full vocabulary, and T is recorded.
//!   Top-p, penalties, biases (`adjust`) and grammars (`grammar`) change the distribution that a token is
//!   sampled from, but neither this number nor the reported alternatives ([`SamplingParams::top_logprobs`]).
//!   Tokens sampled with any of them are recorded as filtered and never trained.
//! - **Log-probabilities of a prompt** ([`SamplingParams::prompt_logprobs`]) are those that a learner
//!   computes. Such a prompt is computed completely, under one version of the weights.
//! - **Published weights only.** A sampler does not sample from weights that changed and were not published,
//!   nor from weights older than [`SampleRequest::least_version`]. Requests wait, or are rejected with the
//!   version as the reason. The agent loop requests weights at least as new as those of the previous turn.
//! - **Continuation.** A request that continues an aborted completion states how many tokens at the end of
//!   its prompt belong to that completion ([`SamplingParams::drawn_before`]). It then samples the tokens that
//!   would have followed.
//! - **Load and pauses.** [`Load`] reports the work in progress and waiting; [`Sampler::paused`] reports how
//!   long the sampler stood still, which deadlines of completions exclude. Counters of the device are
//!   optional.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use levade_tree::{Kind, Segment, SegmentId, VersionRun};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::{Grammar, PolicyError, WeightsRef, awake};

/// Most that a presence or frequency penalty takes or gives, as in OpenAI's API.
const MOST_PENALTY: f32 = 2.0;
/// Largest bias of a logit either way, likewise.
const MOST_BIAS: f32 = 100.0;
/// Most alternatives that are reported for a token, likewise.
const MOST_TOP_LOGPROBS: usize = 20;

/// How to draw. The defaults draw from the model's own distribution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingParams {
    /// At most this many new tokens. With `prompt_logprobs` it may be 0: the reply is empty then.
    pub max_tokens: usize,
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Keep this many of the most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep tokens at least this likely relative to the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that prompt or reply have; 1 leaves them.
    pub repetition_penalty: f32,
    /// Taken from the logits of tokens that the reply has, in −2..=2.
    pub presence_penalty: f32,
    /// Taken from the logit of a token as often as the reply has it, in −2..=2.
    pub frequency_penalty: f32,
    /// Added to the logits of tokens, by their ids; each in −100..=100.
    pub logit_bias: BTreeMap<u32, f32>,
    /// None of `stop_ids` is among the first tokens of the reply, this many, and no stop string ends it
    /// there.
    pub min_tokens: usize,
    /// For every token, this many of the most likely ones are reported with their log-probabilities; at most
    /// 20.
    pub top_logprobs: usize,
    /// Whether the log-probabilities of the prompt's own tokens are reported, and this many of the most
    /// likely tokens in the place of each; at most 20. Such a prompt is computed whole, whatever of it is
    /// known.
    pub prompt_logprobs: Option<usize>,
    /// Tokens at the end of the prompt that were drawn before for this very reply, by a request that was
    /// aborted: penalties and `min_tokens` go on counting. `max_tokens` are new ones.
    pub drawn_before: usize,
    /// Tokens that end the reply; the one that did is kept as its last token.
    pub stop_ids: Vec<u32>,
    /// Texts that end the reply; the tokens that complete one are kept. Needs a sampler that knows its
    /// vocabulary.
    pub stop_strings: Vec<String>,
    /// A form that the reply is to have. One of `stop_ids` ends it where the form is complete, or has that
    /// very token; where nothing but the end is left, `min_tokens` do not count. Needs a sampler that knows
    /// its vocabulary, too.
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
            drawn_before: 0,
            stop_ids: Vec::new(),
            stop_strings: Vec::new(),
            grammar: None,
        }
    }
}

impl SamplingParams {
    /// Whether tokens come from another distribution than the one their log-probabilities describe.
    pub fn is_filtered(&self) -> bool {
        self.truncates() || self.adjusts() || self.grammar.is_some()
    }

    /// The temperature of the distributions that log-probabilities are of: 1 for greedy decoding.
    pub fn behaviour_temperature(&self) -> f32 {
        if self.temperature == 0.0 { 1.0 } else { self.temperature }
    }

    /// Whether unlikely tokens are left out (top-p, top-k, min-p).
    pub fn truncates(&self) -> bool {
        self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0
    }

    /// Checks every value.
    ///
    /// # Errors
    /// Names the first value out of range and the range.
    pub fn validate(&self) -> Result<(), PolicyError> {
        let check = |ok: bool, name: &str, value: f32, range: &str| {
            if ok {
                Ok(())
            } else {
                Err(PolicyError::Invalid(format!("{name} = {value}, but it must be {range}")))
            }
        };
        let t = self.temperature;
        check(t == 0.0 || (1e-2..=1e2).contains(&t), "temperature", t, "0 or in 0.01..=100")?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", self.min_p, "in 0..=1")?;
        let r = self.repetition_penalty;
        check(r > 0.0 && r.is_finite(), "repetition_penalty", r, "more than 0")?;
        let p = MOST_PENALTY;
        let penalty = |name, value: f32| check((-p..=p).contains(&value), name, value, "in -2..=2");
        penalty("presence_penalty", self.presence_penalty)?;
        penalty("frequency_penalty", self.frequency_penalty)?;
        for (token, bias) in &self.logit_bias {
            let ok = (-MOST_BIAS..=MOST_BIAS).contains(bias);
            check(ok, &format!("logit_bias of token {token}"), *bias, "in -100..=100")?;
        }
        let top = self.top_logprobs;
        check(top <= MOST_TOP_LOGPROBS, "top_logprobs", top as f32, "at most 20")?;
        let top = self.prompt_logprobs.unwrap_or(0);
        check(top <= MOST_TOP_LOGPROBS, "prompt_logprobs", top as f32, "at most 20")?;
        let is_empty = self.max_tokens == 0 && self.prompt_logprobs.is_none();
        check(
            !is_empty,
            "max_tokens",
            self.max_tokens as f32,
            "at least 1, or have prompt_logprobs beside it",
        )?;
        if self.grammar.is_some() && self.stop_ids.is_empty() {
            let problem = "a grammar needs stop_ids: one of them ends the reply when its form is complete";
            return Err(PolicyError::Invalid(problem.into()));
        }
        let most = self.drawn_before.saturating_add(self.max_tokens);
        check(self.min_tokens <= most, "min_tokens", self.min_tokens as f32, "at most what max_tokens allow")
    }
}

/// A prompt to continue.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SampleRequest {
    /// A name for logs, and for whoever passes the request on.
    pub id: String,
    /// The name of the policy that is asked: there may be several behind one address.
    pub policy: String,
    /// The oldest version of the weights that may draw the reply. A sampler that has older ones waits until
    /// it has these, or refuses with [`PolicyError::Behind`].
    pub least_version: u64,
    /// Seed of the run.
    pub seed: u64,
    /// The stream of random numbers within the run, unique to the call. Together with the position of a token
    /// it decides the draw, so a reply does not depend on what else is being sampled.
    pub stream: u64,
    /// The whole path so far.
    pub prompt: Vec<u32>,
    /// How to draw.
    pub params: SamplingParams,
}

impl SampleRequest {
    /// Checks prompt and parameters against a `vocabulary` of so many tokens.
    ///
    /// # Errors
    /// Names the first value that is wrong, and what it must be.
    pub fn validate(&self, vocabulary: usize) -> Result<(), PolicyError> {
        self.params.validate()?;
        if let Some(token) = self.prompt.iter().find(|token| **token as usize >= vocabulary) {
            return Err(PolicyError::Invalid(format!(
                "token {token} is outside the model's vocabulary of {vocabulary}; was the prompt made with another tokenizer?"
            )));
        }
        if let Some(token) = self.params.logit_bias.keys().find(|token| **token as usize >= vocabulary) {
            return Err(PolicyError::Invalid(format!(
                "logit_bias names token {token}, which is outside the model's vocabulary of {vocabulary}"
            )));
        }
        let (drawn, prompt) = (self.params.drawn_before, self.prompt.len());
        if drawn > prompt {
            return Err(PolicyError::Invalid(format!(
                "drawn_before = {drawn}, but the prompt has only {prompt} tokens; it ends with what was sampled before"
            )));
        }
        Ok(())
    }

    /// Checks that the prompt leaves room in a `context` of so many tokens, for one token of the reply at
    /// least where one may be drawn.
    ///
    /// # Errors
    /// [`PolicyError::PromptTooLong`].
    pub fn check_room(&self, context: usize) -> Result<(), PolicyError> {
        let prompt = self.prompt.len();
        if prompt + self.params.max_tokens.min(1) > context {
            return Err(PolicyError::PromptTooLong { prompt, context });
        }
        Ok(())
    }
}

/// Tokens with their log-probabilities, most likely first, of equals the one with the lower id.
pub type TopLogprobs = Vec<(u32, f32)>;

/// Why a reply ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// One of `stop_ids` was drawn.
    StopId,
    /// One of `stop_strings` was completed.
    StopString,
    /// `max_tokens` were drawn.
    Length,
    /// The context is full.
    Context,
    /// The caller aborted.
    Aborted,
}

/// Event of a stream.
#[derive(Debug, Clone, PartialEq)]
pub enum SampleEvent {
    /// Log-probabilities of the prompt's next tokens but its first, which nothing predicts. All of them come
    /// before the first drawn token, in one event or several, where they were asked for.
    Prompt {
        /// log-softmax(logits / temperature) of each token, at temperature 1 for greedy decoding: the number
        /// that a learner computes for it.
        logprobs: Vec<f32>,
        /// For each of them the most likely tokens in its place; empty where none were asked for.
        top: Vec<TopLogprobs>,
    },
    /// Tokens in the order they were drawn, all under one version of the weights.
    Tokens {
        /// The ids.
        tokens: Vec<u32>,
        /// Their behaviour log-probabilities.
        logprobs: Vec<f32>,
        /// For each of them the most likely tokens in its place, from the distribution that `logprobs` are
        /// of; empty where none were asked for.
        top: Vec<TopLogprobs>,
        /// The weights that drew them.
        version: u64,
    },
    /// The last event.
    Finished(FinishReason),
}

/// A reply as it is being drawn. Dropping it aborts the request.
#[derive(Debug)]
pub struct SampleStream {
    events: mpsc::UnboundedReceiver<Result<SampleEvent, PolicyError>>,
}

impl SampleStream {
    /// A stream and the end that feeds it.
    pub fn channel() -> (mpsc::UnboundedSender<Result<SampleEvent, PolicyError>>, Self) {
        let (sender, events) = mpsc::unbounded_channel();
        (sender, SampleStream { events })
    }

    /// The next event; `None` after the last.
    ///
    /// # Errors
    /// What the sampler reports.
    pub async fn next(&mut self) -> Option<Result<SampleEvent, PolicyError>> {
        self.events.recv().await
    }

    /// Waits for the whole reply, and adds it to `completion` as it comes: what is there when the caller
    /// waits no longer was drawn.
    ///
    /// # Errors
    /// What the sampler reports, or a sampler that stops in the middle.
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

    /// Waits for the whole reply.
    ///
    /// # Errors
    /// What the sampler reports, a sampler that stops in the middle, or `deadline` passing (which aborts the
    /// request).
    pub async fn collect(mut self, deadline: Duration) -> Result<Completion, PolicyError> {
        let mut completion = Completion::default();
        match awake::within(deadline, self.gather(&mut completion)).await {
            Some(result) => result.map(|()| completion),
            None => Err(PolicyError::Deadline(deadline, "a reply from the sampler".into())),
        }
    }
}

/// A whole reply.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The ids, a stop id included.
    pub tokens: Vec<u32>,
    /// Their behaviour log-probabilities.
    pub logprobs: Vec<f32>,
    /// The most likely tokens in the place of each, where they were asked for.
    pub top: Vec<TopLogprobs>,
    /// Log-probabilities of the prompt's tokens but the first, where they were asked for.
    pub prompt_logprobs: Vec<f32>,
    /// The most likely tokens in the place of each of these, likewise.
    pub prompt_top: Vec<TopLogprobs>,
    /// Which weights drew the reply.
    pub versions: Vec<VersionRun>,
    /// Why it ended.
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
    /// Appends tokens drawn under one version.
    pub fn extend(&mut self, tokens: &[u32], logprobs: &[f32], version: u64) {
        self.tokens.extend_from_slice(tokens);
        self.logprobs.extend_from_slice(logprobs);
        match self.versions.last_mut() {
            Some(run) if run.version == version => run.len += tokens.len() as u32,
            _ => self.versions.push(VersionRun { version, len: tokens.len() as u32 }),
        }
    }

    /// The reply as a segment that continues `parent`, drawn with `params` as model call `turn`.
    pub fn into_segment(self, parent: Option<SegmentId>, params: &SamplingParams, turn: u32) -> Segment {
        Segment {
            kind: Kind::Sampled,
            logprobs: self.logprobs,
            temperature: params.temperature,
            filtered: params.is_filtered(),
            versions: self.versions,
            ..Segment::given(parent, self.tokens, turn)
        }
    }
}

/// How much a sampler has to do.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Load {
    /// Requests being decoded.
    pub running: usize,
    /// Requests waiting for room.
    pub waiting: usize,
    /// The share of the memory for keys and values that requests being decoded use.
    pub cache_in_use: f64,
}

/// Counters of the device of a sampler. All but the last are sums since its start.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct DeviceStats {
    /// Tokens of prompts that did not need to be computed again.
    pub prefix_hits: u64,
    /// Tokens of prompts that were computed.
    pub prefilled: u64,
    /// Tokens drawn.
    pub drawn: u64,
    /// Seconds spent on prefilling and drawing.
    pub busy_seconds: f64,
    /// Requests being decoded, summed over the busy seconds: divided by them, the mean.
    pub running_seconds: f64,
    /// The share of the memory for keys and values in use, summed over the busy seconds: divided by them, the
    /// mean.
    pub cache_in_use_seconds: f64,
    /// The share of the memory for keys and values that holds anything, for requests to come included.
    pub cache_filled: f64,
}

/// Something that draws tokens from a policy.
#[async_trait]
pub trait Sampler: Send + Sync {
    /// Starts a reply. Returns once the request is accepted; tokens then arrive on the stream.
    ///
    /// # Errors
    /// When the request is invalid or the sampler has stopped. Later errors arrive on the stream.
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError>;

    /// Ends the requests of one stream, or all of them: each finishes with [`FinishReason::Aborted`] after
    /// the tokens it has drawn. A request whose prompt is the old one and those tokens goes on with the very
    /// tokens that would have followed, as long as the weights are the same. Returns how many were ended.
    ///
    /// # Errors
    /// When the sampler has stopped.
    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError>;

    /// How much it has to do.
    ///
    /// # Errors
    /// When the sampler has stopped.
    async fn workload(&self) -> Result<Load, PolicyError>;

    /// Counters of the device that it runs on, where it has them.
    ///
    /// # Errors
    /// When the sampler has stopped.
    async fn device_stats(&self) -> Result<Option<DeviceStats>, PolicyError> {
        Ok(None)
    }

    /// For how long it has stood still since its start, up to now, while its device trained or its weights
    /// were replaced. Requests are not drawn for meanwhile, which is nobody's fault: deadlines do not count
    /// it. It answers while it stands still, too.
    ///
    /// # Errors
    /// When the sampler has stopped.
    async fn paused(&self) -> Result<Duration, PolicyError> {
        Ok(Duration::ZERO)
    }

    /// Draws from weights that a learner has published, from the next token on. By default for a sampler that
    /// shares its memory with the learner, and so has them already: only that it does is checked.
    ///
    /// # Errors
    /// [`PolicyError::NotAdopted`] when it cannot draw from these weights; when it has stopped.
    async fn adopt(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        weights.check_shared(self.version().await?)
    }

    /// The version of the weights that a token drawn now would carry.
    ///
    /// # Errors
    /// When the sampler has stopped.
    async fn version(&self) -> Result<u64, PolicyError>;
}

/// The bytes of every token of a vocabulary, so that a sampler can recognise stop strings without knowing
/// text.
pub trait TokenBytes: Send + Sync {
    /// The bytes `id` stands for in the middle of a text; `None` for special tokens and ids out of range.
    fn token_bytes(&self, id: u32) -> Option<&[u8]>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_named() {
        let plain = SamplingParams::default();
        let request = |params| SampleRequest {
            seed: 1,
            stream: 1,
            prompt: vec![1, 2],
            params,
            ..SampleRequest::default()
        };
        for (params, want) in [
            (
                SamplingParams { presence_penalty: 2.5, ..plain.clone() },
                "presence_penalty = 2.5, but it must be in -2..=2",
            ),
            (SamplingParams { frequency_penalty: f32::NAN, ..plain.clone() }, "frequency_penalty = NaN, but"),
            (
                SamplingParams { logit_bias: [(3, 1.0), (5, -101.0)].into(), ..plain.clone() },
                "logit_bias of token 5 = -101, but it must be in -100..=100",
            ),
            (SamplingParams { logit_bias: [(9, 1.0)].into(), ..plain.clone() }, "logit_bias names token 9"),
            (
                SamplingParams { top_logprobs: 21, ..plain.clone() },
                "top_logprobs = 21, but it must be at most 20",
            ),
            (
                SamplingParams { prompt_logprobs: Some(21), ..plain.clone() },
                "prompt_logprobs = 21, but it must be at most 20",
            ),
            (
                SamplingParams { max_tokens: 0, ..plain.clone() },
                "max_tokens = 0, but it must be at least 1, or",
            ),
            (SamplingParams { min_tokens: 5, max_tokens: 4, ..plain.clone() }, "min_tokens = 5, but"),
            (
                SamplingParams { drawn_before: 3, ..plain.clone() },
                "drawn_before = 3, but the prompt has only 2",
            ),
        ] {
            let error = request(params).validate(9).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
        let endless = SamplingParams { grammar: Some(Grammar::JsonObject), ..plain.clone() };
        assert!(request(endless).validate(9).unwrap_err().to_string().contains("a grammar needs stop_ids"));
        let good = SamplingParams { min_tokens: 6, max_tokens: 4, drawn_before: 2, ..plain.clone() };
        request(good).validate(9).unwrap();
        let scored = SamplingParams { max_tokens: 0, prompt_logprobs: Some(0), ..plain.clone() };
        request(scored).validate(9).unwrap();
        assert!(request(plain).validate(2).unwrap_err().to_string().contains("token 2 is outside"));
    }

    /// Parameters are written and read as JSON, biases by id.
    #[test]
    fn parameters_survive_json() {
        let params = SamplingParams { logit_bias: [(7, -1.5)].into(), top_logprobs: 3, ..Default::default() };
        let text = serde_json::to_string(&params).unwrap();
        assert!(text.contains(r#""logit_bias":{"7":-1.5}"#), "{text}");
        assert_eq!(serde_json::from_str::<SamplingParams>(&text).unwrap(), params);
        assert_eq!(serde_json::from_str::<SamplingParams>("{}").unwrap(), SamplingParams::default());
    }
}
