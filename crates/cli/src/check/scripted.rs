//! A sampler that always returns the same completion.

use std::sync::Arc;

use async_trait::async_trait;
use levade_policy::{
    FinishReason, Load, PolicyError, SampleEvent, SampleRequest, SampleStream, Sampler, TopLogprobs,
};
use levade_text::Chat;
use tokio::sync::Notify;

/// Text of every completion of the scripted sampler.
const COMPLETION: &str = "This is a scripted reply.";

/// Sampler without a model, for dry runs of agent programs. Every completion is the same text.
pub struct ScriptedSampler {
    tokens: Vec<u32>,
    /// Notified of every completion of the sampler.
    completed: Arc<Notify>,
}

impl ScriptedSampler {
    /// Creates a sampler whose completion is encoded for `chat`. The sampler notifies `completed`
    /// of every completion.
    pub fn new(chat: &Chat, completed: Arc<Notify>) -> Self {
        let mut tokens = chat.tokenizer().encode(COMPLETION);
        tokens.extend(chat.stop_ids().first());
        ScriptedSampler { tokens, completed }
    }
}

#[async_trait]
impl Sampler for ScriptedSampler {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        let (sender, stream) = SampleStream::channel();
        let length = request.params.max_tokens.min(self.tokens.len());
        let tokens = self.tokens[..length].to_vec();
        // A token of probability 1 has no alternatives.
        let top = |ids: &[u32]| ids.iter().map(|id| vec![(*id, 0.0)]).collect::<Vec<TopLogprobs>>();
        if let Some(count) = request.params.prompt_logprobs {
            let ids = request.prompt.get(1..).unwrap_or_default();
            let top = if count > 0 { top(ids) } else { Vec::new() };
            let _ = sender.send(Ok(SampleEvent::Prompt { logprobs: vec![0.0; ids.len()], top }));
        }
        let top = if request.params.top_logprobs > 0 { top(&tokens) } else { Vec::new() };
        let logprobs = vec![0.0; tokens.len()];
        let _ = sender.send(Ok(SampleEvent::Tokens { tokens, logprobs, top, version: 0 }));
        let reason =
            if length < self.tokens.len() { FinishReason::Length } else { FinishReason::StopId };
        let _ = sender.send(Ok(SampleEvent::Finished(reason)));
        self.completed.notify_one();
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
