//! Prompts of calls: rendered from messages, encoded from text, or passed as token ids.

use std::sync::Arc;

use levade_conversation::{Origin, PreparedPrompt};
use levade_text::{Message, ToolSpec};

use crate::api_error::ApiError;
use crate::blocking::blocking;
use crate::fit::{FittedPrompt, SummarizeFn, fit};
use crate::metrics::{CallMetrics, add};
use crate::party::{Party, TokenBackend};
use crate::recorder::Recorder;
use crate::request::{Input, OpeningLimit};

/// Prompt of a model call, rendered from messages or given as token ids.
#[derive(Clone)]
pub(crate) enum Prompt {
    /// The prompt was rendered from messages.
    Chat(Box<PreparedPrompt>),
    /// The prompt consists of token ids, which were encoded from a text or sent by the client.
    Ids(Arc<[u32]>),
}

impl Prompt {
    pub fn ids(&self) -> &[u32] {
        match self {
            Prompt::Chat(prepared) => &prepared.prompt,
            Prompt::Ids(ids) => ids,
        }
    }

    pub fn origin(&self) -> Option<Origin> {
        match self {
            Prompt::Chat(prepared) => Some(prepared.origin),
            Prompt::Ids(_) => None,
        }
    }

    /// Returns whether the prompt starts the completion's reasoning.
    pub fn opens_reasoning(&self) -> bool {
        matches!(self, Prompt::Chat(prepared) if prepared.in_reasoning)
    }
}

/// Renders or encodes the prompt of a call. Also returns whether the opening limit truncated the
/// prompt.
pub(crate) async fn prompt(
    recorder: &Arc<Recorder>,
    party: &Arc<Party>,
    backend: TokenBackend<'_>,
    input: Input,
    tools: &[ToolSpec],
    rules: (Option<OpeningLimit>, SummarizeFn<'_>),
) -> Result<(Prompt, bool), ApiError> {
    let ids: Arc<[u32]> = match input {
        Input::Messages(messages) => {
            check_messages(&messages)?;
            let FittedPrompt { prepared, is_truncated } =
                fit(recorder, party, &messages, tools, rules).await?;
            return Ok((Prompt::Chat(prepared), is_truncated));
        }
        Input::Tokens(ids) => ids.into(),
        Input::Text(text) => {
            let format = Arc::clone(backend.format);
            let context = backend.context;
            blocking(move || {
                let tokenizer = format.chat().tokenizer();
                tokenizer.check_length(&text, context).map(|()| tokenizer.encode_document(&text))
            })
            .await??
            .into()
        }
    };
    if ids.is_empty() {
        Err(ApiError::field("prompt", "the prompt is empty, but must have at least one token"))
    } else {
        Ok((Prompt::Ids(ids), false))
    }
}

/// Checks that a request has messages, and that the model supports all their parts.
fn check_messages(messages: &[Message]) -> Result<(), ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field(
            "messages",
            "messages is empty, but must have at least one message",
        ));
    }
    for (index, message) in messages.iter().enumerate() {
        if let Some(part) = message.content.non_text_parts().next() {
            let param = format!("messages[{index}].content");
            let kind = part.kind();
            let message = format!(
                "a part of type {kind:?} is not supported, because this model reads only text; \
                 remove the part"
            );
            return Err(ApiError::field(&param, message));
        }
    }
    Ok(())
}

/// Counts an admitted call and its prompt in the metrics.
pub(crate) fn count_prompt(metrics: &CallMetrics, prompt: &Prompt) {
    add(&metrics.calls, 1);
    add(&metrics.prompt_tokens, prompt.ids().len() as u64);
    let Prompt::Chat(prepared) = prompt else { return };
    add(&metrics.drifted, u64::from(prepared.drift.is_some()));
    add(&metrics.systems_joined, u64::from(prepared.shifted.joined));
    add(&metrics.systems_moved, u64::from(prepared.shifted.moved));
    if let Origin::Forked(fork) = prepared.origin {
        add(&metrics.forked, 1);
        add(&metrics.truncated, u64::from(fork.reason.is_truncation()));
    }
}
