//! Generates one completion of the simulator.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::{Flag, Published, SimulatorConfig, now};
use crate::device::Device;
use crate::{Constraint, FinishReason, PolicyError, SampleEvent, SampleRequest, TopLogprobs, uniform};

/// State of one completion, which a separate task generates.
pub(super) struct Reply {
    pub(super) config: SimulatorConfig,
    pub(super) published: Arc<Mutex<Arc<Published>>>,
    pub(super) request: SampleRequest,
    /// Constraint of the grammar, if the request has one.
    pub(super) constraint: Option<Box<dyn Constraint>>,
    /// Notified when weights are published.
    pub(super) news: Arc<Notify>,
    pub(super) device: Arc<Device>,
    pub(super) flag: Arc<Flag>,
}

impl Reply {
    /// Computes the log-probabilities of the prompt's tokens except the first.
    fn score(&self, weights: &[f32]) -> SampleEvent {
        let SampleRequest { prompt, params, .. } = &self.request;
        let count = params.prompt_logprobs.unwrap_or(0);
        let (mut logprobs, mut top) = (Vec::new(), Vec::new());
        for at in 1..prompt.len() {
            let row = self.config.row(&prompt[..at]);
            let row = self.config.softmax(weights, row, params.behaviour_temperature());
            logprobs.push(row.logprobs[prompt[at] as usize] as f32);
            top.extend((count > 0).then(|| row.top(count)));
        }
        SampleEvent::Prompt { logprobs, top }
    }

    /// Samples the token after `path`. Returns it with its log-probability and the most likely tokens
    /// at its position.
    fn draw(&mut self, weights: &[f32], path: &[u32]) -> Result<(u32, f32, TopLogprobs), PolicyError> {
        let SampleRequest { seed, stream, prompt, params, .. } = &self.request;
        let constraint = self.constraint.as_deref_mut();
        let allowed = constraint.map(|c| params.allowed(c, self.config.vocabulary)).transpose()?;
        let (greedy, temperature) = (params.temperature == 0.0, params.behaviour_temperature());
        let at = self.config.row(path);
        let row = self.config.softmax(weights, at, temperature);
        let adjusted = params.is_filtered().then(|| {
            let raw = &weights[at..at + self.config.vocabulary];
            let mut logits = raw.to_vec();
            params.adjust(&mut logits, path, path.len() - prompt.len() + params.drawn_before);
            if let Some(allowed) = &allowed {
                allowed.restrict(&mut logits, raw);
            }
            self.config.softmax(&logits, 0, temperature)
        });
        let drawn_from = adjusted.as_ref().unwrap_or(&row);
        let mut token = 0;
        if greedy {
            for (id, logprob) in drawn_from.logprobs.iter().enumerate() {
                if *logprob > drawn_from.logprobs[token] {
                    token = id;
                }
            }
        } else {
            let draw = uniform(*seed, *stream, path.len() as u64);
            let mut cumulative = 0.0;
            // The last possible token gets the remainder that rounding leaves.
            token = drawn_from.probabilities.iter().rposition(|p| *p > 0.0).unwrap_or(0);
            for (id, probability) in drawn_from.probabilities.iter().enumerate() {
                cumulative += probability;
                if draw < cumulative {
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
        Ok((token as u32, row.logprobs[token] as f32, row.top(params.top_logprobs)))
    }

    /// Samples tokens until the completion ends or `send` returns false because the stream was dropped.
    pub(super) async fn run(mut self, send: impl Fn(Result<SampleEvent, PolicyError>) -> bool) {
        let SampleRequest { seed, stream, prompt, params, .. } = &self.request.clone();
        let device = self.device.clone();
        // These counters are far from every position, so latency and failures do not change the sampled
        // tokens.
        let chance = |counter: u64| uniform(*seed, *stream, u64::MAX - counter);
        let fails = chance(prompt.len() as u64) < self.config.failures;
        await_version(&self.published, &self.news, self.request.least_version).await;
        let _running = device.enter().await;
        // A prompt whose log-probabilities are requested needs every row, so it does not use the prefix
        // cache.
        device.prefill(prompt, params.prompt_logprobs.is_none()).await;
        if params.prompt_logprobs.is_some() && !send(Ok(self.score(&now(&self.published).weights))) {
            return;
        }
        let mut path = prompt.clone();
        let finish = loop {
            if self.flag.aborted.load(Ordering::Relaxed) {
                break FinishReason::Aborted;
            }
            if path.len() - prompt.len() == params.max_tokens {
                break FinishReason::Length;
            }
            if path.len() == self.config.context {
                break FinishReason::Context;
            }
            if fails && path.len() > prompt.len() {
                send(Err(PolicyError::Invalid("the simulator was told to fail this request".into())));
                return;
            }
            if !self.config.latency.is_zero() {
                tokio::time::sleep(self.config.latency.mul_f64(chance((1 << 32) + path.len() as u64))).await;
            }
            device.draw().await;
            let published = now(&self.published);
            let (token, logprob, top) = match self.draw(&published.weights, &path) {
                Ok(drawn) => drawn,
                Err(error) => {
                    send(Err(error));
                    return;
                }
            };
            path.push(token);
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
        device.keep(&path);
        send(Ok(SampleEvent::Finished(finish)));
    }
}

/// Waits until the published weights have version `least` or a later one.
async fn await_version(published: &Mutex<Arc<Published>>, news: &Notify, least: u64) {
    loop {
        let told = news.notified();
        if now(published).version >= least {
            return;
        }
        told.await;
    }
}
