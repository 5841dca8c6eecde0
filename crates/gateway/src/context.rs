//! Calls that are longer than their agent may see, kept within its context by a policy.

use std::borrow::Cow;
use std::sync::Arc;

use levade_conversation::{Conversation, Format, Judged, Overflow, Prepared, Request};
use levade_text::{Message, ToolSpec};

use crate::answering::{Answering, Caller};
use crate::blocking::blocking;
use crate::call::{Call, Input};
use crate::fault::{Fault, Kind};
use crate::gateway::Gateway;
use crate::metrics::add;
use crate::route::{RouteContext, Summary};
use crate::session::Session;
use crate::transcript::Event;

impl Gateway {
    /// The prompt of a conversation, cut as the policy of the agent says.
    ///
    /// # Errors
    /// When nothing may go and it is too long all the same; when it cannot be written, or a summary not had.
    pub(crate) async fn fitted(
        &self,
        caller: &Caller,
        answering: &Answering,
        format: &Arc<Format>,
        messages: &[Message],
        tools: &Arc<[ToolSpec]>,
    ) -> Result<Box<Prepared>, Fault> {
        let Answering { agent, model, context, .. } = answering;
        let request = Request { agent, policy: &model.policy, format, messages, tools };
        let with = |conversation: &Conversation| conversation.fitting(&request, context.budget);
        let mut fitting = match &caller.session {
            Some(session) => with(&session.state().conversation),
            None => with(&Conversation::new()),
        };
        // A policy that shortens prompts must see them.
        let max_tokens = match context.budget.overflow {
            Overflow::Fail => model.tokens()?.context.min(context.budget.most),
            _ => usize::MAX,
        };
        loop {
            let kept = match fitting.messages() {
                Cow::Borrowed(_) => None,
                Cow::Owned(messages) => Some(messages),
            };
            let request = Request { messages: kept.as_deref().unwrap_or(messages), ..request };
            let recognised = match &caller.session {
                Some(session) => session.state().conversation.recognise(&request),
                None => Conversation::new().recognise(&request),
            };
            let prepared = blocking(move || recognised.render_within(max_tokens)).await??;
            match fitting.judge(prepared) {
                Judged::Fits(prepared) => return Ok(prepared),
                Judged::Again => {}
                Judged::Summarise(text) => {
                    let summary = match (&caller.session, &context.summary) {
                        (Some(session), Some(by)) => self.summary(session, by, &text).await?,
                        // Without anybody to ask, the turns are dropped.
                        _ => String::new(),
                    };
                    fitting.summarised(&summary);
                }
                Judged::TooLong(prepared) => {
                    let (found, most) = (prepared.prompt.len(), context.budget.most);
                    let message = format!(
                        "the prompt has {found} tokens, more than the {most} that agent.max_context_tokens and the \
                         model's context leave, and agent.context lets none of it go; make it shorter, or allow more"
                    );
                    return Err(Fault::new(Kind::TooLong, message));
                }
            }
        }
    }

    /// Asks for a summary, in a call that is recorded and none of those that the attempt may make.
    async fn summary(&self, session: &Arc<Session>, by: &Summary, text: &str) -> Result<String, Fault> {
        let Summary { agent, model, fixed, tokens, instruction } = by;
        let messages = vec![Message::user(format!("{instruction}\n\n{text}"))];
        let mut call = Call::new(model.name.clone(), Input::Messages(messages));
        call.sampling.max_tokens = Some(*tokens);
        let caller = Caller { session: Some(Arc::clone(session)), ..Caller::default() };
        let (agent, model, fixed) = (agent.clone(), Arc::clone(model), fixed.clone());
        let context = RouteContext::NONE;
        let answering = Answering { agent, model, fixed, context, summarises: true, batch: None };
        let mut reader = Box::pin(self.begin(&caller, call, answering)).await?;
        let mut said = String::new();
        while let Some(event) = reader.next().await {
            match &*event {
                Event::Ended { end, .. } => said = end.message.content.as_str().to_owned(),
                Event::Failed(fault) => return Err(fault.clone()),
                _ => {}
            }
        }
        reader.satisfied();
        add(&self.0.metrics.summaries, 1);
        Ok(said)
    }
}

#[cfg(test)]
#[path = "context_tests.rs"]
mod tests;
