//! Generates one completion of the simulator.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::{CompletionHandle, PublishedWeights, SimulatorConfig, load_published};
use crate::device::SimulatedDevice;
use crate::{
    Constraint, FinishReason, PolicyError, SampleEvent, SampleRequest, TopLogprobs, uniform,
};

/// State of one completion, which a separate task generates.
pub(super) struct CompletionTask {
    pub(super) config: SimulatorConfig,
    pub(super) published: Arc<Mutex<Arc<PublishedWeights>>>,
    pub(super) request: SampleRequest,
    /// Grammar constraint of the completion; `None` if the request has no grammar.
    pub(super) constraint: Option<Box<dyn Constraint>>,
    /// Signal that is sent when weights are published.
    pub(super) published_signal: Arc<Notify>,
    pub(super) device: Arc<SimulatedDevice>,
    pub(super) handle: Arc<CompletionHandle>,
}

impl CompletionTask {
    /// Computes the log-probabilities of the prompt's tokens, except the first token.
    fn score(&self, weights: &[f32]) -> SampleEvent {
        let SampleRequest { prompt, params, .. } = &self.request;
        let count = params.prompt_logprobs.unwrap_or(0);
        let mut logprobs = Vec::new();
        let mut top = Vec::new();
        for at in 1..prompt.len() {
            let row = self.config.row_start(&prompt[..at]);
            let row = self.config.softmax(weights, row, params.behavior_temperature());
            logprobs.push(row.logprobs[prompt[at] as usize] as f32);
            top.extend((count > 0).then(|| row.top_logprobs(count)));
        }
        SampleEvent::Prompt { logprobs, top }
    }

    /// Samples the token after `sequence`. Returns it with its log-probability and the most likely
    /// tokens at its position.
    fn sample_token(
        &mut self,
        weights: &[f32],
        sequence: &[u32],
    ) -> Result<(u32, f32, TopLogprobs), PolicyError> {
        let SampleRequest { seed, stream, prompt, params, .. } = &self.request;
        let constraint = self.constraint.as_deref_mut();
        let allowed = constraint.map(|c| params.allowed(c, self.config.vocabulary)).transpose()?;
        let greedy = params.temperature == 0.0;
        let temperature = params.behavior_temperature();
        let at = self.config.row_start(sequence);
        let row = self.config.softmax(weights, at, temperature);
        let adjusted = params.is_filtered().then(|| {
            let raw = &weights[at..at + self.config.vocabulary];
            let mut logits = raw.to_vec();
            params.adjust(
                &mut logits,
                sequence,
                sequence.len() - prompt.len() + params.sampled_before,
            );
            if let Some(allowed) = &allowed {
                allowed.restrict(&mut logits, raw);
            }
            self.config.softmax(&logits, 0, temperature)
        });
        let distribution = adjusted.as_ref().unwrap_or(&row);
        let mut token = 0;
        if greedy {
            for (id, logprob) in distribution.logprobs.iter().enumerate() {
                if *logprob > distribution.logprobs[token] {
                    token = id;
                }
            }
        } else {
            let threshold = uniform(*seed, *stream, sequence.len() as u64);
            let mut cumulative = 0.0;
            // The last possible token gets the remainder that rounding leaves.
            token = distribution.probabilities.iter().rposition(|p| *p > 0.0).unwrap_or(0);
            for (id, probability) in distribution.probabilities.iter().enumerate() {
                cumulative += probability;
                if threshold < cumulative {
                    token = id;
                    break;
                }
            }
        }
        if let Some(constraint) = &mut self.constraint
            && !params.stop_ids.contains(&(token as u32))
        {
            constraint.push(token as u32)?;
        }
        Ok((token as u32, row.logprobs[token] as f32, row.top_logprobs(params.top_logprobs)))
    }

    /// Samples tokens until the completion ends or `send` returns false because the stream was
    /// dropped.
    pub(super) async fn run(mut self, send: impl Fn(Result<SampleEvent, PolicyError>) -> bool) {
        let SampleRequest { seed, stream, prompt, params, .. } = &self.request.clone();
        let device = self.device.clone();
        // These counters are far from every position, so latency and failures do not change the
        // sampled tokens.
        let chance = |counter: u64| uniform(*seed, *stream, u64::MAX - counter);
        let fails = chance(prompt.len() as u64) < self.config.failures;
        await_version(&self.published, &self.published_signal, self.request.min_version).await;
        let _running = device.acquire_permit().await;
        // A prompt whose log-probabilities are requested needs every row, so it does not use the
        // prefix cache.
        device.prefill(prompt, params.prompt_logprobs.is_none()).await;
        if params.prompt_logprobs.is_some()
            && !send(Ok(self.score(&load_published(&self.published).weights)))
        {
            return;
        }
        let mut sequence = prompt.clone();
        let finish = loop {
            if self.handle.aborted.load(Ordering::Relaxed) {
                break FinishReason::Aborted;
            }
            if sequence.len() - prompt.len() == params.max_tokens {
                break FinishReason::Length;
            }
            if sequence.len() == self.config.context {
                break FinishReason::Context;
            }
            if fails && sequence.len() > prompt.len() {
                send(Err(PolicyError::Invalid(
                    "the simulator is configured to fail this request".into(),
                )));
                return;
            }
            if !self.config.latency.is_zero() {
                tokio::time::sleep(
                    self.config.latency.mul_f64(chance((1 << 32) + sequence.len() as u64)),
                )
                .await;
            }
            device.sample_token().await;
            let published = load_published(&self.published);
            let (token, logprob, top) = match self.sample_token(&published.weights, &sequence) {
                Ok(sampled) => sampled,
                Err(error) => {
                    send(Err(error));
                    return;
                }
            };
            sequence.push(token);
            let event = SampleEvent::Tokens {
                tokens: vec![token],
                logprobs: vec![logprob],
                top: if params.top_logprobs > 0 { vec![top] } else { Vec::new() },
                version: published.version,
            };
            if !send(Ok(event)) {
                return;
            }
            if params.stop_ids.contains(&token) {
                break FinishReason::StopId;
            }
        };
        device.cache_prefix(&sequence);
        send(Ok(SampleEvent::Finished(finish)));
    }
}

/// Waits until the published weights have version `min_version` or a later one.
async fn await_version(
    published: &Mutex<Arc<PublishedWeights>>,
    published_signal: &Notify,
    min_version: u64,
) {
    loop {
        let notification = published_signal.notified();
        if load_published(published).version >= min_version {
            return;
        }
        notification.await;
    }
}
