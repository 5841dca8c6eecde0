//! Prompts that fit: the built-in loop under a context policy.

use std::borrow::Cow;

use levade_conversation::{Conversation, ConversationError, Judged, Origin, Prepared, Request};
use levade_policy::{CallStreams, SampleRequest, SamplingParams};
use levade_text::{Message, TextError};
use levade_tree::ContextCut;

use super::{AttemptRequest, Broken, Run};
use crate::{Agent, Summariser};

/// How summaries are sampled: what all calls of an attempt have in common.
pub(super) struct Draws<'a> {
    pub id: &'a str,
    pub seed: u64,
    pub params: &'a SamplingParams,
    pub streams: &'a mut CallStreams,
    pub least_version: u64,
}

impl<'a> Draws<'a> {
    pub(super) fn new(request: &'a AttemptRequest, streams: &'a mut CallStreams, least_version: u64) -> Self {
        Draws { id: &request.id, seed: request.seed, params: &request.params, streams, least_version }
    }
}

/// A prompt for the agent's next reply.
pub(super) enum Prompted {
    /// Within the budget.
    Fits(Box<Prepared>),
    /// Beyond it, and nothing may go.
    TooLong(Box<Prepared>),
}

impl Run<'_> {
    /// Writes the prompt for these messages, cut as the context policy says.
    pub(super) async fn fitted(
        &mut self,
        messages: &[Message],
        mut draws: Draws<'_>,
    ) -> Result<Prompted, Broken> {
        let Agent { name: agent, policy, format, context, .. } = self.agent;
        let (budget, tools) = (context.budget, self.specs.clone());
        let request = Request { agent, policy, format, messages, tools: &tools };
        let mut fitting = self.conversation.fitting(&request, budget);
        loop {
            let messages = match fitting.messages() {
                Cow::Borrowed(_) => None,
                Cow::Owned(messages) => Some(messages),
            };
            let request = Request { messages: messages.as_deref().unwrap_or(request.messages), ..request };
            let prepared = rendered(&self.conversation, &request).await?;
            match fitting.judge(prepared) {
                Judged::Fits(prepared) => {
                    self.note_cut(&prepared);
                    return Ok(Prompted::Fits(prepared));
                }
                Judged::TooLong(prepared) => return Ok(Prompted::TooLong(prepared)),
                Judged::Again => {}
                Judged::Summarise(text) => fitting.summarised(&self.summary(&text, &mut draws).await?),
            }
        }
    }

    /// Writes down that the prompt of the next turn was cut.
    fn note_cut(&mut self, prepared: &Prepared) {
        if let Origin::Forked(fork) = prepared.origin
            && fork.reason.is_cut()
        {
            let turn = self.conversation.next_turn();
            let (agent, why) = (self.agent.name.clone(), fork.reason.words().to_owned());
            self.outcome.cuts.push(ContextCut { turn, agent, why });
        }
    }

    /// Asks for a summary of a text, in a conversation of its own, which is recorded. Its tokens are none of
    /// those that `max_tokens` bounds.
    async fn summary(&mut self, text: &str, draws: &mut Draws<'_>) -> Result<String, Broken> {
        let options = &self.agent.context.summary;
        let own;
        let summariser = match &self.agent.summariser {
            Some(summariser) => summariser,
            None => {
                let Agent { name, policy, sampler, format, .. } = self.agent;
                own = Summariser {
                    agent: crate::context::summary_agent(name),
                    policy: policy.clone(),
                    sampler: sampler.clone(),
                    format: format.clone(),
                };
                &own
            }
        };
        let Summariser { agent, policy, sampler, format } = summariser;
        let messages = options.request(text);
        let request = Request { agent, policy, format, messages: &messages, tools: &[] };
        let mut prepared = rendered(&self.conversation, &request).await?;
        self.conversation.give(&mut prepared)?;
        let prompt = prepared.prompt.clone();
        let params = SamplingParams {
            max_tokens: options.tokens,
            stop_ids: format.chat().stop_ids().to_vec(),
            ..draws.params.clone()
        };
        let least_version = if *policy == self.agent.policy { draws.least_version } else { 0 };
        let request = SampleRequest {
            id: format!("{}/summary/{}", draws.id, self.conversation.next_turn()),
            policy: policy.clone(),
            least_version,
            seed: draws.seed,
            stream: draws.streams.admit(agent, &prompt),
            prompt,
            params,
        };
        let drawn = self.reply(&**sampler, request, prepared, false).await?;
        let reply = self.keep(drawn)?;
        Ok(reply.message().content.as_str().to_owned())
    }
}

/// Writes a prompt. The template is rendered away from the async workers: it may take seconds until one of
/// its bounds stops it.
async fn rendered(conversation: &Conversation, request: &Request<'_>) -> Result<Prepared, Broken> {
    let recognised = conversation.recognise(request);
    let done = tokio::task::spawn_blocking(move || recognised.render()).await;
    let broken = |error| TextError::Template(format!("rendering came to no end: {error}"));
    Ok(done.unwrap_or_else(|error| Err(ConversationError::Text(broken(error))))?)
}

#[cfg(test)]
#[path = "fitting_tests.rs"]
mod tests;
