//! A sampler that returns scripted texts, for tests and examples.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{
    FinishReason, Load, PolicyError, SampleEvent, SampleRequest, SampleStream, Sampler,
};

/// Sampler for tests that returns fixed texts in their order, one per call, with one token per
/// byte. Starts again after the last text.
#[derive(Debug)]
pub struct ScriptedSampler {
    texts: Mutex<VecDeque<String>>,
    /// Id of the token that ends a completion.
    end: u32,
    /// Delay before each token. Zero if there is no delay.
    pace: Duration,
}

impl ScriptedSampler {
    /// Creates a sampler of `texts`, which ends each completion with the token `end`.
    pub fn new(texts: &[&str], end: u32) -> Self {
        ScriptedSampler {
            texts: Mutex::new(texts.iter().map(|text| (*text).to_owned()).collect()),
            end,
            pace: Duration::ZERO,
        }
    }

    /// Returns the sampler with the delay `pace` before each token.
    #[must_use]
    pub fn paced(self, pace: Duration) -> Self {
        ScriptedSampler { pace, ..self }
    }

    fn next(&self) -> Option<String> {
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        let text = texts.pop_front()?;
        texts.push_back(text.clone());
        Some(text)
    }
}

#[async_trait]
impl Sampler for ScriptedSampler {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        if request.params.grammar.is_some() {
            return Err(PolicyError::Invalid("a scripted model does not support grammars".into()));
        }
        let text = self
            .next()
            .ok_or_else(|| PolicyError::Stopped("the scripted model has no texts".into()))?;
        let (sender, stream) = SampleStream::channel();
        let end = self.end;
        let pace = self.pace;
        let params = request.params;
        tokio::spawn(async move {
            let ids = text.bytes().map(u32::from).chain([end]);
            let mut completion_text = Vec::new();
            let mut finish = FinishReason::StopId;
            for (at, id) in ids.enumerate() {
                if at == params.max_tokens {
                    finish = FinishReason::Length;
                    break;
                }
                if !pace.is_zero() {
                    tokio::time::sleep(pace).await;
                }
                let tokens = vec![id];
                let logprobs = vec![-0.5];
                let top = Vec::new();
                if sender
                    .send(Ok(SampleEvent::Tokens { tokens, logprobs, top, version: 0 }))
                    .is_err()
                {
                    return;
                }
                completion_text.extend(u8::try_from(id));
                if params.stop_strings.iter().any(|stop| completion_text.ends_with(stop.as_bytes()))
                {
                    finish = FinishReason::StopString;
                    break;
                }
                tokio::task::yield_now().await;
            }
            let _ = sender.send(Ok(SampleEvent::Finished(finish)));
        });
        Ok(stream)
    }

    async fn abort(&self, _stream: Option<u64>) -> Result<usize, PolicyError> {
        Ok(0)
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        Ok(Load::default())
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        Ok(0)
    }
}
