//! Calls of models that others serve: passed on in messages, told in the caller's dialect, recorded as
//! messages.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use levade_policy::{FinishReason, awake};
use levade_text::{Message, Piece, ToolSpec};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::answering::{Answering, Caller};
use crate::call::{Call, Input};
use crate::exchange::{Held, given_up};
use crate::external::{Answer, ExternalCall, Query, Responder, Said};
use crate::fault::{Fault, Kind};
use crate::gateway::{Gateway, now};
use crate::metrics::add;
use crate::model::Model;
use crate::session::{Called, Session};
use crate::transcript::{End, Event, Head, Reader, Transcript, parts_of};

/// A call under way.
struct Relay {
    gateway: Gateway,
    session: Option<Arc<Session>>,
    model: Arc<Model>,
    agent: String,
    transcript: Arc<Transcript>,
    messages: Vec<Message>,
    tools: Vec<ToolSpec>,
    /// The reply so far.
    reply: Message,
    /// Longest wait for it.
    longest: Duration,
    begun: Instant,
    /// Whether a context policy asks.
    summarises: bool,
    /// Held until the call has ended.
    _held: Held,
}

impl Gateway {
    /// Passes a call on, and waits until its reply begins.
    ///
    /// # Errors
    /// When it cannot be passed on, or is refused.
    pub(crate) async fn relay(
        &self,
        caller: &Caller,
        call: Call,
        answering: Answering,
        responder: &dyn Responder,
        begun: Instant,
    ) -> Result<Reader, Fault> {
        let Answering { agent, model, summarises, .. } = answering;
        let Call { input, tools, tool_choice, parallel_calls, constraint, sampling, n, .. } = call;
        let Input::Messages(messages) = input else {
            return Err(model.tokens().err().unwrap_or_else(|| Fault::field("prompt", "give messages")));
        };
        if messages.is_empty() {
            return Err(Fault::field("messages", "there are no messages; give at least one"));
        }
        if n != 1 {
            let message = format!("n = {n}, but the model {:?} gives one reply a call", model.name);
            return Err(Fault::field("n", message));
        }
        let held = self.held(caller, summarises).await?;
        let longest =
            caller.session.as_ref().map_or(self.0.options.reply, |session| session.options.limits.reply);
        let query = Query {
            messages: messages.clone(),
            tools: tools.clone(),
            tool_choice,
            parallel_calls,
            constraint,
            sampling,
            deadline: longest,
        };
        let mut said = responder.respond(query);
        let first = awake::within(longest, said.recv()).await.ok_or_else(|| late(&model, longest))?;
        let first = first.ok_or_else(|| stopped(&model))??;

        add(&self.0.metrics.calls, 1);
        let (id, name) = (self.call_id(), model.name.clone());
        let head = Head { id, model: name, created: now(), prompt: Vec::new(), origin: None, n };
        let transcript = Transcript::new(head);
        let reader = transcript.read();
        if let (Some(session), Some(body)) = (&caller.session, caller.body) {
            session.keep(body, &transcript);
        }
        let relay = Relay {
            gateway: self.clone(),
            session: caller.session.clone(),
            model,
            agent,
            transcript,
            messages,
            tools,
            reply: Message::assistant(""),
            longest,
            begun,
            summarises,
            _held: held,
        };
        tokio::spawn(relay.run(first, said));
        Ok(reader)
    }
}

fn late(model: &Model, longest: Duration) -> Fault {
    Fault::new(Kind::Deadline, format!("the reply of {:?} was not done within {longest:?}", model.name))
}

fn stopped(model: &Model) -> Fault {
    Fault::new(Kind::Unavailable, format!("the reply of {:?} stopped in the middle", model.name))
}

impl Relay {
    /// Tells of the reply as it comes, and records it.
    async fn run(mut self, first: Said, mut said: UnboundedReceiver<Result<Said, Fault>>) {
        let (gateway, _ending) = (self.gateway.clone(), self.transcript.ending());
        let metrics = &gateway.0.metrics;
        add(&metrics.running, 1);
        metrics.first_token.add(self.begun.elapsed());
        let left = self.longest.saturating_sub(self.begun.elapsed());
        let ended = awake::within(left, self.follow(first, &mut said)).await;
        drop(said);
        let ended = ended.unwrap_or_else(|| Err(late(&self.model, self.longest)));
        metrics.running.fetch_sub(1, Ordering::Relaxed);
        metrics.whole.add(self.begun.elapsed());
        let fault = ended.as_ref().err().cloned();
        let answer = ended.unwrap_or_else(|_| self.so_far());
        add(&metrics.prompt_tokens, answer.prompt_tokens as u64);
        add(&metrics.drawn_tokens, answer.tokens as u64);
        self.record(&answer, fault.as_ref());
        if let Some(fault) = fault {
            add(&metrics.failed, 1);
            self.transcript.push(Event::Failed(fault));
            return;
        }
        let Answer { message, finish, prompt_tokens, tokens, thought_tokens } = answer;
        let calls = !message.tool_calls.is_empty();
        if calls {
            let pieces = message.tool_calls.iter().cloned().map(Ok).map(Piece::Call).collect();
            self.transcript.push(Event::Delta { choice: 0, pieces, tokens: Vec::new() });
        }
        let text = message.content.as_str().to_owned();
        let stopped_by = None;
        let parts = parts_of(&message);
        let end =
            End { message, parts, text, finish, calls, stopped_by, prompt_tokens, tokens, thought_tokens };
        self.transcript.push(Event::Ended { choice: 0, end: Box::new(end) });
        self.transcript.push(Event::Done);
    }

    /// Tells of the parts of a reply until it ends, or nobody wants it any more.
    async fn follow(
        &mut self,
        first: Said,
        said: &mut UnboundedReceiver<Result<Said, Fault>>,
    ) -> Result<Answer, Fault> {
        let (gateway, session, transcript) =
            (self.gateway.clone(), self.session.clone(), Arc::clone(&self.transcript));
        let mut given_up = std::pin::pin!(given_up(&gateway, session.as_ref(), &transcript));
        let mut next = Some(Ok(first));
        loop {
            let piece = match next.ok_or_else(|| stopped(&self.model))?? {
                Said::Ended(answer) => return Ok(*answer),
                Said::Thought(text) => {
                    self.reply.reasoning_content.get_or_insert_default().push_str(&text);
                    Piece::Thought(text)
                }
                Said::Speech(text) => {
                    self.reply.content = format!("{}{text}", self.reply.content.as_str()).into();
                    Piece::Speech(text)
                }
            };
            self.transcript.push(Event::Delta { choice: 0, pieces: vec![piece], tokens: Vec::new() });
            next = tokio::select! {
                next = said.recv() => next,
                () = &mut given_up => return Ok(self.so_far()),
            };
        }
    }

    /// The reply as far as it came.
    fn so_far(&self) -> Answer {
        let finish = FinishReason::Aborted;
        Answer { message: self.reply.clone(), finish, prompt_tokens: 0, tokens: 0, thought_tokens: 0 }
    }

    fn record(&mut self, answer: &Answer, fault: Option<&Fault>) {
        let Some(session) = &self.session else { return };
        let (agent, policy) = (self.agent.clone(), self.model.policy.clone());
        let fault = fault.map(ToString::to_string);
        let mut state = session.state();
        let at = state.recorded.external.len();
        let (after, shared) = state.histories.note(at, &self.messages, &answer.message);
        let known = ExternalCall::tools(&state.recorded.external, at) == self.tools;
        let tools = (!known).then(|| std::mem::take(&mut self.tools));
        state.recorded.calls.push(Called {
            agent: agent.clone(),
            model: self.model.name.clone(),
            external: true,
            summary: self.summarises,
            probe: false,
            origin: None,
            prompt: answer.prompt_tokens,
            tokens: answer.tokens,
            finish: answer.finish,
            fault: fault.clone(),
            turn: None,
            content: answer.message.content.as_str().to_owned(),
            calls: answer.message.tool_calls.len(),
        });
        state.recorded.external.push(ExternalCall {
            agent,
            policy,
            after,
            shared,
            messages: self.messages.split_off(shared),
            tools,
            reply: answer.message.clone(),
            finish: answer.finish,
            prompt_tokens: answer.prompt_tokens,
            tokens: answer.tokens,
            fault,
        });
    }
}

#[cfg(test)]
#[path = "relay_tests.rs"]
mod tests;
