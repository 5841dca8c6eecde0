//! Prompts of calls: messages, text and token ids, written as token ids.

use std::sync::Arc;

use levade_conversation::{Format, Prepared};
use levade_text::{Message, ToolSpec};

use crate::answering::{Answering, Caller};
use crate::blocking::blocking;
use crate::call::Input;
use crate::fault::Fault;
use crate::gateway::Gateway;
use crate::metrics::add;

/// Prompt of a call.
#[derive(Clone)]
pub(crate) enum Prompt {
    /// Of messages.
    Chat(Box<Prepared>),
    /// In ids.
    Ids(Arc<[u32]>),
}

impl Gateway {
    /// Writes the prompt, away from the async workers: a template may take long.
    pub(crate) async fn prompt(
        &self,
        caller: &Caller,
        answering: &Answering,
        format: &Arc<Format>,
        input: Input,
        tools: &Arc<[ToolSpec]>,
    ) -> Result<Prompt, Fault> {
        let messages = match input {
            Input::Messages(messages) => messages,
            Input::Tokens(ids) => return given(ids.into()),
            Input::Text(text) => {
                let (format, context) = (Arc::clone(format), answering.model.tokens()?.context);
                let encode = move || {
                    let tokenizer = format.chat().tokenizer();
                    tokenizer.check_length(&text, context).map(|()| tokenizer.encode_document(&text))
                };
                return given(blocking(encode).await??.into());
            }
        };
        check_messages(&messages)?;
        let prepared = self.fitted(caller, answering, format, &messages, tools).await?;
        add(&self.0.metrics.drifted, u64::from(prepared.drift.is_some()));
        add(&self.0.metrics.systems_joined, u64::from(prepared.shifted.joined));
        add(&self.0.metrics.systems_moved, u64::from(prepared.shifted.moved));
        Ok(Prompt::Chat(prepared))
    }
}

fn given(ids: Arc<[u32]>) -> Result<Prompt, Fault> {
    match ids.is_empty() {
        true => Err(Fault::field("prompt", "the prompt is empty; give at least one token")),
        false => Ok(Prompt::Ids(ids)),
    }
}

fn check_messages(messages: &[Message]) -> Result<(), Fault> {
    if messages.is_empty() {
        return Err(Fault::field("messages", "there are no messages; give at least one"));
    }
    for (place, message) in messages.iter().enumerate() {
        if let Some(part) = message.content.others().next() {
            let param = format!("messages[{place}].content");
            let what = part.kind();
            let message =
                format!("a part of type {what:?} cannot be shown to this model, which reads text alone");
            return Err(Fault::field(&param, message));
        }
    }
    Ok(())
}
