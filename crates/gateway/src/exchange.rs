//! One call from its admission to its record.
//!
//! A call is drawn by a task of its own, which writes a [`Transcript`]; whoever answers the client reads
//! that. So a connection that breaks ends nothing at once, and what was drawn is recorded in any case.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use levade_conversation::{Conversation, Origin};
use levade_policy::{
    CallStreams, Completion, FinishReason, Grammar, SampleEvent, SampleRequest, SampleStream, SamplingParams,
    TopLogprobs, within,
};
use levade_text::{Message, Piece, ToolSpec};
use tokio::sync::OwnedSemaphorePermit;

use crate::answering::{Answering, Caller};
use crate::batch::Batch;
use crate::call::{Call, Input, ToolChoice};
use crate::fault::{Fault, Kind};
use crate::forms;
use crate::gateway::{Gateway, now};
use crate::metrics::add;
use crate::model::{Backend, Model, TokenModel};
use crate::prompt::Prompt;
use crate::reading::{Reading, Turn};
use crate::session::{Called, Running, Session};
use crate::transcript::{End, Event, Head, Reader, Token, Transcript};

/// Most replies to one call.
const MOST_REPLIES: usize = 128;

/// All that the replies of a call have in common.
struct Exchange {
    gateway: Gateway,
    session: Option<Arc<Session>>,
    model: Arc<Model>,
    drawn: TokenModel,
    agent: String,
    transcript: Arc<Transcript>,
    tools: Arc<[ToolSpec]>,
    tool_choice: ToolChoice,
    parallel_calls: bool,
    /// Whether replies are JSON of a form, in which tags of thoughts and calls are text.
    is_json: bool,
    /// Whether clients are told the stop string that ends a reply.
    keeps_stop: bool,
    /// The question of a call that may be a probe.
    question: Option<String>,
    /// Whether it is a summary, which no limit of the attempt counts.
    summarises: bool,
    reply: Duration,
    begun: Instant,
    /// The other calls of the body.
    batch: Option<Batch>,
    /// Held until all is drawn.
    place: Mutex<Option<OwnedSemaphorePermit>>,
    /// Held until the call has ended.
    _running: Option<Running>,
}

/// A place among the calls, and one in the session: held until the call has ended.
pub(crate) type Held = (Option<OwnedSemaphorePermit>, Option<Running>);

/// Tokens that have come, in parts of which each is text of the message or none of it.
#[derive(Default)]
struct Told {
    parts: Vec<(Vec<Piece>, Vec<Token>)>,
    /// Tokens of which it is not known yet what they say.
    pending: Vec<Token>,
}

/// Returns whether pieces have text of the message among them.
fn speaks(pieces: &[Piece]) -> bool {
    pieces.iter().any(|piece| matches!(piece, Piece::Speech(_)))
}

impl Told {
    /// Reads tokens, and adds them to a reply.
    fn add(
        &mut self,
        reading: &mut Reading,
        completion: &mut Completion,
        (ids, logprobs, top, version): (Vec<u32>, Vec<f32>, Vec<TopLogprobs>, u64),
    ) {
        for (at, (&id, &logprob)) in ids.iter().zip(&logprobs).enumerate() {
            let pieces = reading.push(id);
            self.pending.push(Token { id, logprob, top: top.get(at).cloned().unwrap_or_default(), version });
            if pieces.is_empty() {
                continue;
            }
            match self.parts.last_mut().filter(|(last, _)| speaks(last) == speaks(&pieces)) {
                Some((last, tokens)) => {
                    last.extend(pieces);
                    tokens.append(&mut self.pending);
                }
                None => self.parts.push((pieces, std::mem::take(&mut self.pending))),
            }
        }
        completion.extend(&ids, &logprobs, version);
        completion.top.extend(top);
    }

    /// Returns the parts, the last of which may say nothing yet.
    fn into_parts(mut self) -> Vec<(Vec<Piece>, Vec<Token>)> {
        if !self.pending.is_empty() {
            self.parts.push((Vec::new(), self.pending));
        }
        self.parts
    }
}

/// One reply to be drawn.
struct Choice {
    index: usize,
    prompt: Prompt,
    params: SamplingParams,
    stream: SampleStream,
    calls: String,
}

impl Gateway {
    /// Begins a call. What comes of it is read from its transcript; a call that is not read any more is
    /// ended, after some grace where it belongs to an attempt.
    ///
    /// # Errors
    /// When the request cannot be served: then nothing of it is recorded.
    pub async fn call(&self, caller: &Caller, call: Call) -> Result<Reader, Fault> {
        self.call_of(caller, call, None).await
    }

    /// Begins a call that is recorded only with the others of its body, where it has such.
    pub(crate) async fn call_of(
        &self,
        caller: &Caller,
        call: Call,
        batch: Option<Batch>,
    ) -> Result<Reader, Fault> {
        let begun = match self.again(caller, &call) {
            Ok(Some(reader)) => Ok(reader),
            Ok(None) => match self.answering(caller, &call) {
                Ok(answering) => self.begin(caller, call, Answering { batch, ..answering }).await,
                Err(fault) => Err(fault),
            },
            Err(fault) => Err(fault),
        };
        if let Err(fault) = &begun {
            add(&self.0.metrics.failed, 1);
            if let Some(session) = &caller.session {
                session.refused(fault);
            }
        }
        begun
    }

    /// The answer to an earlier call that this one repeats.
    fn again(&self, caller: &Caller, call: &Call) -> Result<Option<Reader>, Fault> {
        if let (Some(session), Some(body)) = (&caller.session, caller.body)
            && let Some(earlier) = session.repeated(body, caller.retries)
        {
            add(&self.0.metrics.rejoined, 1);
            return Ok(Some(earlier.read()));
        }
        if !(1..=MOST_REPLIES).contains(&call.n) {
            let message = format!("n = {}, but it must be in 1..={MOST_REPLIES}", call.n);
            return Err(Fault::field("n", message));
        }
        Ok(None)
    }

    /// A place for a call, and in its session.
    pub(crate) async fn held(&self, caller: &Caller, summarises: bool) -> Result<Held, Fault> {
        // A summary is asked for by a call that has its place: it must not wait for another.
        let place = if summarises { None } else { Some(self.place().await?) };
        let session = caller.session.as_ref();
        Ok((place, session.map(|session| session.admit(!summarises)).transpose()?))
    }

    /// Begins a call that is none of before.
    pub(crate) async fn begin(
        &self,
        caller: &Caller,
        call: Call,
        answering: Answering,
    ) -> Result<Reader, Fault> {
        let begun = Instant::now();
        let drawn = match &answering.model.backend {
            Backend::Tokens(drawn) => drawn.clone(),
            Backend::Messages(responder) => {
                let responder = Arc::clone(responder);
                return self.relay(caller, call, answering, &*responder, begun).await;
            }
        };
        let fixed = answering.fixed.clone();
        let mut params = parameters(&call, &drawn, fixed.as_ref());
        params.grammar = if fixed.is_none() { forms::grammar(self, &call, &drawn).await? } else { None };
        params.validate()?;

        let (place, running) = self.held(caller, answering.summarises).await?;
        let form = forms::asked(&call);
        let Call { input, tools, tool_choice, parallel_calls, n, sampling, .. } = call;
        let tools: Arc<[ToolSpec]> = tools.into();
        let question = match (&caller.session, &input) {
            (Some(session), Input::Messages(messages)) if !answering.summarises => {
                session.state().probes.begins(&answering.agent, messages, &tools)
            }
            _ => None,
        };
        let prompt = self.prompt(caller, &answering, &drawn.format, input, &tools).await?;
        let Answering { agent, model, summarises, batch, .. } = answering;
        if let Prompt::Chat(prepared) = &prompt
            && prepared.in_thought
            && params.grammar.is_some()
        {
            let message =
                "this model's replies begin with a thought, which no form can be held to; leave it out";
            return Err(Fault::field(form.unwrap_or("response_format"), message));
        }
        let ids: Arc<[u32]> = match &prompt {
            Prompt::Chat(prepared) => prepared.prompt.as_slice().into(),
            Prompt::Ids(ids) => Arc::clone(ids),
        };
        let context = drawn.context;
        if ids.len() >= context {
            return Err(levade_policy::PolicyError::PromptTooLong { prompt: ids.len(), context }.into());
        }
        params.max_tokens = params.max_tokens.min(context - ids.len());
        let (seed, streams, least_version) = match &caller.session {
            Some(session) => {
                let mut state = session.state();
                if !summarises {
                    params.max_tokens = params.max_tokens.min(state.left_tokens).max(1);
                }
                let streams: Vec<u64> = (0..n).map(|_| state.streams.admit(&agent, &ids)).collect();
                if let Some(fixed) = fixed.as_ref().filter(|_| !summarises) {
                    for name in sampling.overridden_by(fixed).into_iter().chain(form) {
                        *state.recorded.overridden.entry(name.to_owned()).or_default() += 1;
                    }
                }
                let least = state.versions.get(&model.policy).copied().unwrap_or(0);
                (session.options.seed, streams, least)
            }
            None => {
                let mut streams = CallStreams::new(0);
                let streams = (0..n).map(|_| streams.admit(&agent, &ids)).collect();
                (sampling.seed.unwrap_or_else(|| self.random_seed()), streams, 0)
            }
        };
        // Fewest tokens are checked against most, which only now are known.
        params.min_tokens = params.min_tokens.min(params.max_tokens);
        let reply =
            caller.session.as_ref().map_or(self.0.options.reply, |session| session.options.limits.reply);

        let id = self.call_id();
        let mut choices = Vec::with_capacity(n);
        for (index, stream) in streams.into_iter().enumerate() {
            let request = SampleRequest {
                id: format!("{id}/{index}"),
                policy: model.policy.clone(),
                least_version,
                seed,
                stream,
                prompt: ids.to_vec(),
                params: params.clone(),
            };
            let begun = within(&*drawn.sampler, reply, drawn.sampler.sample(request)).await;
            let late =
                || Fault::new(Kind::Deadline, format!("waited {reply:?} for the sampler to take the call"));
            let calls = format!("{:08x}", stream as u32);
            let mut prompt = prompt.clone();
            if let Prompt::Chat(prepared) = &mut prompt {
                prepared.name_calls(&calls);
            }
            let stream = begun.ok_or_else(late)??;
            choices.push(Choice { index, prompt, params: params.clone(), stream, calls });
        }
        let origin = match &prompt {
            Prompt::Chat(prepared) => Some(prepared.origin),
            Prompt::Ids(_) => None,
        };
        let metrics = &self.0.metrics;
        add(&metrics.calls, 1);
        add(&metrics.prompt_tokens, ids.len() as u64);
        add(&metrics.forked, u64::from(matches!(origin, Some(Origin::Forked(_)))));
        let cut = matches!(origin, Some(Origin::Forked(fork)) if fork.reason.is_cut());
        add(&metrics.cut, u64::from(cut));
        let head = Head { id, model: model.name.clone(), created: now(), prompt: ids.to_vec(), origin, n };
        let transcript = Transcript::new(head);
        let reader = transcript.read();
        if let (Some(session), Some(body)) = (&caller.session, caller.body) {
            session.keep(body, &transcript);
        }
        let exchange = Exchange {
            gateway: self.clone(),
            session: caller.session.clone(),
            model,
            drawn,
            agent,
            transcript,
            tools,
            tool_choice,
            parallel_calls,
            is_json: matches!(params.grammar, Some(Grammar::JsonObject | Grammar::JsonSchema(_))),
            keeps_stop: sampling.keeps_stop,
            question,
            summarises,
            reply,
            begun,
            batch,
            place: Mutex::new(place),
            _running: running,
        };
        tokio::spawn(exchange.run(choices));
        Ok(reader)
    }

    /// A seed that no other call has.
    fn random_seed(&self) -> u64 {
        xxhash_rust::xxh3::xxh3_64(self.call_id().as_bytes())
    }
}

/// The parameters of a call: a recipe's where it fixes them, else those that the client asks for.
fn parameters(call: &Call, model: &TokenModel, fixed: Option<&SamplingParams>) -> SamplingParams {
    let asked = &call.sampling;
    let mut params = match fixed {
        Some(fixed) => {
            let most = asked.max_tokens.unwrap_or(usize::MAX).min(fixed.max_tokens);
            let top_logprobs = asked.logprobs.unwrap_or(0);
            SamplingParams {
                max_tokens: most,
                top_logprobs,
                stop_strings: asked.stop.clone(),
                ..fixed.clone()
            }
        }
        None => asked.over(&model.sampling),
    };
    if fixed.is_some() || !asked.ignore_eos {
        params.stop_ids = model.format.chat().stop_ids().to_vec();
    }
    params.stop_ids.extend(&asked.stop_ids);
    params
}

/// Waits until nobody wants a reply any more.
pub(crate) async fn given_up(gateway: &Gateway, session: Option<&Arc<Session>>, transcript: &Transcript) {
    let Some(session) = session else {
        transcript.abandoned().await;
        return add(&gateway.0.metrics.aborted, 1);
    };
    let left = async {
        loop {
            transcript.abandoned().await;
            let joined = tokio::time::timeout(gateway.0.options.grace, transcript.joined());
            if joined.await.is_err() {
                return add(&gateway.0.metrics.aborted, 1);
            }
        }
    };
    tokio::select! {
        () = left => {}
        () = session.closed() => {}
    }
}

/// Waits until another call of the body is refused; for ever where there is none.
async fn refused(batch: Option<&Batch>) {
    match batch {
        Some(batch) => batch.refused().await,
        None => std::future::pending().await,
    }
}

impl Exchange {
    /// Draws all replies.
    async fn run(self, choices: Vec<Choice>) {
        let _ending = self.transcript.ending();
        add(&self.gateway.0.metrics.running, 1);
        let drawn = futures_util::future::join_all(choices.into_iter().map(|choice| self.draw(choice))).await;
        let metrics = &self.gateway.0.metrics;
        metrics.running.fetch_sub(1, Ordering::Relaxed);
        metrics.whole.add(self.begun.elapsed());
        match drawn.into_iter().find_map(Result::err) {
            None => self.transcript.push(Event::Done),
            Some(fault) => {
                add(&metrics.failed, 1);
                self.transcript.push(Event::Failed(fault));
            }
        }
    }

    /// Draws one reply, and records it as far as it came.
    async fn draw(&self, choice: Choice) -> Result<(), Fault> {
        let Choice { index, prompt, params, mut stream, calls } = choice;
        let in_thought = matches!(&prompt, Prompt::Chat(prepared) if prepared.in_thought);
        let is_chat = matches!(prompt, Prompt::Chat(_));
        let chat = self.drawn.format.chat();
        let calls_are_text = self.tool_choice == ToolChoice::None || self.tools.is_empty();
        let tools = Arc::clone(&self.tools);
        let turn = Turn { chat: Arc::clone(chat), in_thought, tools, calls_are_text };
        let turn = Some(turn).filter(|_| is_chat && !self.is_json);
        // Only a whole reply shows whether it is a call without tags.
        let whole = turn.is_some() && chat.reads_bare_calls() && !calls_are_text;
        let mut reading = match &turn {
            Some(turn) => Reading::chat(turn, &params.stop_strings, &calls),
            None => Reading::text(chat, &params.stop_strings),
        };
        if !self.parallel_calls {
            reading.most_calls(1);
        }
        if self.keeps_stop {
            reading.keep_stop();
        }
        let (mut completion, mut read) = (Completion::default(), 0);
        let follow = async {
            // One wait for all tokens: what time it allows does not begin anew with each.
            let mut given_up =
                std::pin::pin!(given_up(&self.gateway, self.session.as_ref(), &self.transcript));
            let mut refused = std::pin::pin!(refused(self.batch.as_ref()));
            // An event that came right after tokens, and is none of them.
            let mut after = None;
            loop {
                let event = match after.take() {
                    Some(event) => event,
                    None => tokio::select! {
                        event = stream.next() => event,
                        () = &mut given_up => return Ok(FinishReason::Aborted),
                        () = &mut refused => return Ok(FinishReason::Aborted),
                    },
                };
                match event {
                    Some(Ok(SampleEvent::Tokens { tokens, logprobs, top, version })) => {
                        if reading.tokens() == 0 {
                            self.gateway.0.metrics.first_token.add(self.begun.elapsed());
                        }
                        let mut told = Told::default();
                        told.add(&mut reading, &mut completion, (tokens, logprobs, top, version));
                        // Tokens that are there by now are told of together: each event wakes all readers.
                        while let Some(event) = stream.next().now_or_never() {
                            let Some(Ok(SampleEvent::Tokens { tokens, logprobs, top, version })) = event
                            else {
                                after = Some(event);
                                break;
                            };
                            told.add(&mut reading, &mut completion, (tokens, logprobs, top, version));
                        }
                        for (pieces, tokens) in told.into_parts() {
                            let pieces = if whole { Vec::new() } else { pieces };
                            self.transcript.push(Event::Delta { choice: index, pieces, tokens });
                        }
                    }
                    Some(Ok(SampleEvent::Prompt { logprobs, top })) => {
                        read += self.prompt_read(index, read, &logprobs, &top);
                    }
                    Some(Ok(SampleEvent::Finished(reason))) => return Ok(reason),
                    Some(Err(error)) => return Err(Fault::from(error)),
                    None => return Err(Fault::new(Kind::Unavailable, "the sampler stopped in the middle")),
                }
            }
        };
        let ended = within(&*self.drawn.sampler, self.reply, follow).await;
        drop(stream);
        if let Some(batch) = &self.batch {
            // Those that have not begun may wait for this place.
            self.place.lock().unwrap_or_else(PoisonError::into_inner).take();
            if !batch.counts().await {
                return Err(Fault::new(Kind::Invalid, "another prompt of the same body was refused"));
            }
        }
        let ended = ended.unwrap_or_else(|| {
            Err(Fault::new(Kind::Deadline, format!("the reply was not done within {:?}", self.reply)))
        });
        completion.finish = *ended.as_ref().unwrap_or(&FinishReason::Aborted);
        add(&self.gateway.0.metrics.drawn_tokens, completion.tokens.len() as u64);
        let fault = ended.as_ref().err().cloned();
        let end = self.record(prompt, completion, &params, (reading, turn.as_ref()), fault.as_ref())?;
        if let Some(fault) = fault {
            return Err(fault);
        }
        let (rest, end) = end;
        if whole {
            let pieces = end.parts.clone();
            self.transcript.push(Event::Delta { choice: index, pieces, tokens: Vec::new() });
        } else if !rest.is_empty() {
            self.transcript.push(Event::Delta { choice: index, pieces: rest, tokens: Vec::new() });
        }
        self.transcript.push(Event::Ended { choice: index, end: Box::new(end) });
        Ok(())
    }

    /// Tells of the log-probabilities of the prompt's next tokens, after `read` of them; returns of how many.
    fn prompt_read(&self, choice: usize, read: usize, logprobs: &[f32], top: &[TopLogprobs]) -> usize {
        // Nothing predicts the first token.
        let first = if read == 0 { 1 } else { 0 };
        let known = logprobs.iter().enumerate().map(|(at, logprob)| {
            let top = top.get(at).cloned().unwrap_or_default();
            (*logprob, top)
        });
        let all = std::iter::repeat_n((f32::NAN, Vec::new()), first).chain(known);
        let ids = self.transcript.head.prompt.iter().skip(read);
        let tokens: Vec<Token> =
            ids.zip(all).map(|(&id, (logprob, top))| Token { id, logprob, top, version: 0 }).collect();
        let count = tokens.len();
        self.transcript.push(Event::Prompt { choice, tokens });
        count
    }

    /// Records a reply, and reads it as a whole.
    fn record(
        &self,
        prompt: Prompt,
        completion: Completion,
        params: &SamplingParams,
        (reading, of): (Reading, Option<&Turn>),
        fault: Option<&Fault>,
    ) -> Result<(Vec<Piece>, End), Fault> {
        let (finish, tokens) = (completion.finish, completion.tokens.len());
        let version = completion.versions.last().map(|run| run.version);
        let failed = |error: levade_tree::TreeError| Fault::new(Kind::Internal, error.to_string());
        let origin = match &prompt {
            Prompt::Chat(prepared) => Some(prepared.origin),
            Prompt::Ids(_) => None,
        };
        let prompt_tokens = self.transcript.head.prompt.len();
        let (mut turn, mut reply, mut segment) = (None, None, None);
        let mut alone = Conversation::new();
        let mut state = self.session.as_ref().map(|session| session.state());
        // A reply of which nothing was drawn leaves no trace.
        if tokens > 0 || fault.is_none() {
            let conversation = state.as_mut().map_or(&mut alone, |state| &mut state.conversation);
            match prompt {
                Prompt::Chat(prepared) => {
                    let read = conversation.record(*prepared, completion, params).map_err(failed)?;
                    (turn, segment) = (Some(read.turn), Some(read.segment));
                    reply = Some(read);
                }
                Prompt::Ids(ids) => {
                    let party = (self.agent.as_str(), self.model.policy.as_str());
                    conversation.record_ids(party, &ids, completion, params).map_err(failed)?;
                }
            }
        }
        let (rest, mut end) = reading.end(reply, of, finish);
        end.prompt_tokens = prompt_tokens;
        if let Some(state) = &mut state {
            if let Some(segment) = segment {
                if let Some(question) = self.question.clone() {
                    state.probes.replied(&self.agent, question, segment);
                }
                state.conversation.told(segment, &end.message);
                // Some clients put the stop string back that ended the reply.
                if let Some(stop) = &end.stopped_by {
                    let content = format!("{}{stop}", end.message.content.as_str()).into();
                    state.conversation.told(segment, &Message { content, ..end.message.clone() });
                }
            }
            if !self.summarises {
                state.left_tokens = state.left_tokens.saturating_sub(tokens);
            }
            if let Some(version) = version {
                let least = state.versions.entry(self.model.policy.clone()).or_default();
                *least = version.max(*least);
            }
            state.recorded.calls.push(Called {
                agent: self.agent.clone(),
                model: self.model.name.clone(),
                external: false,
                summary: self.summarises,
                probe: false,
                origin,
                prompt: prompt_tokens,
                tokens,
                finish,
                fault: fault.map(ToString::to_string),
                turn,
                content: end.message.content.as_str().to_owned(),
                calls: end.message.tool_calls.len(),
            });
        }
        Ok((rest, end))
    }
}

#[cfg(test)]
#[path = "exchange_tests.rs"]
mod tests;
