//! A reply as it arrives.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;

use super::External;
use super::endpoint::Answering;
use super::error::ExternalError;
use super::http::{Answer, message_of};
use super::reply::{Assembly, ChatEvent, ChatReply, Finish, Wire};
use super::sse::Decoder;
use super::waits::Waits;

/// A reply as it arrives. Dropping it closes its connection.
#[derive(Debug)]
pub struct ChatStream {
    policy: External,
    /// Number of the server.
    server: usize,
    waits: Waits,
    _place: (Arc<OwnedSemaphorePermit>, Answering),
    answer: Answer,
    /// Bytes that have come and were not read.
    first: Option<Bytes>,
    decoder: Decoder,
    assembly: Assembly,
    /// Events that are to be handed out, the last first.
    ready: Vec<ChatEvent>,
    /// Tokens that were taken from the limit before anybody had counted.
    guessed: u64,
    has_ended: bool,
}

/// An answer that has begun.
pub(crate) struct Begun {
    pub answer: Answer,
    /// Its first bytes.
    pub first: Option<Bytes>,
    /// Tokens that were taken from the limit.
    pub guessed: u64,
}

impl ChatStream {
    /// A reply that begins with bytes that have come already.
    pub(super) fn new(
        policy: External,
        server: usize,
        waits: Waits,
        place: (Arc<OwnedSemaphorePermit>, Answering),
        begun: Begun,
    ) -> Self {
        let Begun { answer, first, guessed } = begun;
        ChatStream {
            policy,
            server,
            waits,
            _place: place,
            answer,
            first,
            decoder: Decoder::default(),
            assembly: Assembly::default(),
            ready: Vec::new(),
            guessed,
            has_ended: false,
        }
    }

    /// The next piece, the last of which is the whole reply; `None` after it, or after an error.
    ///
    /// # Errors
    /// When the reply breaks off, is no chat completion, or is larger or slower than it may be.
    pub async fn next(&mut self) -> Option<Result<ChatEvent, ExternalError>> {
        if let Err(error) = self.fill().await {
            return Some(Err(error));
        }
        self.ready.pop().map(Ok)
    }

    /// Waits until a piece can be handed out, or the reply has ended.
    async fn fill(&mut self) -> Result<(), ExternalError> {
        while self.ready.is_empty() && !self.has_ended {
            let read = match self.answer.is_stream {
                true => self.read_events().await,
                false => self.read_whole().await,
            };
            self.ready.reverse();
            if let Err(error) = read {
                self.has_ended = true;
                self.ready.clear();
                if let Some(server) = self.policy.0.servers.get(self.server) {
                    server.failed();
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Waits for the first piece.
    ///
    /// # Errors
    /// As for the next piece.
    pub(super) async fn begun(mut self) -> Result<Self, ExternalError> {
        self.fill().await.map(|()| self)
    }

    /// Waits for the whole reply.
    ///
    /// # Errors
    /// As for the next piece.
    pub async fn whole(mut self) -> Result<ChatReply, ExternalError> {
        while let Some(event) = self.next().await {
            if let ChatEvent::Finished(reply) = event? {
                return Ok(reply);
            }
        }
        Err(self.protocol("it has no end"))
    }

    /// Waits for the whole reply, which must have text, or calls if the request has tools, unless it was
    /// truncated. A reply that was withheld is a failure, whatever text it has.
    ///
    /// # Errors
    /// As for the next piece.
    pub(super) async fn whole_text(self, has_tools: bool) -> Result<ChatReply, ExternalError> {
        let endpoint = self.waits.endpoint.clone();
        let reply = self.whole().await?;
        let has_calls = has_tools && !reply.tool_calls.is_empty();
        let is_empty = reply.content.as_str().trim().is_empty() && !has_calls;
        let why = match &reply.finish {
            Some(Finish::ContentFilter) => "its reply was withheld (content_filter)",
            Some(Finish::Length) => return Ok(reply),
            _ if is_empty => "its reply is empty",
            _ => return Ok(reply),
        };
        Err(ExternalError::Protocol { endpoint, why: why.into() })
    }

    /// A text from the server without the key.
    fn without_key(&self, text: &str) -> String {
        self.policy.0.servers.get(self.server).map(|server| server.without_key(text)).unwrap_or_default()
    }

    fn protocol(&self, why: &str) -> ExternalError {
        ExternalError::Protocol { endpoint: self.waits.endpoint.clone(), why: self.without_key(why) }
    }

    /// Reads what comes next of a stream of events.
    async fn read_events(&mut self) -> Result<(), ExternalError> {
        let options = &self.policy.0.options;
        let (silence, most) = (options.silence, options.most_event_bytes);
        let data = match self.first.take() {
            Some(first) => Some(first),
            None => self.answer.next(silence, &mut self.waits).await?,
        };
        let mut events = Vec::new();
        let is_last = data.is_none();
        match data {
            Some(data) => self.decoder.feed(&data, &mut events),
            None => events.extend(std::mem::take(&mut self.decoder).finish()),
        }
        if self.decoder.pending() > most || events.iter().any(|event| event.len() > most) {
            return Err(ExternalError::TooLarge {
                endpoint: self.waits.endpoint.clone(),
                what: "an event".into(),
                most,
                option: "most_event_bytes".into(),
            });
        }
        for event in events {
            if event.trim_ascii() == b"[DONE]" {
                return self.end();
            }
            self.take(&event)?;
        }
        match is_last {
            // Some servers end without a word; that the reply is whole is told by its reason to end.
            true if self.assembly.reply.finish.is_some() => self.end(),
            true => Err(ExternalError::Broken {
                endpoint: self.waits.endpoint.clone(),
                bytes: self.answer.bytes(),
                why: "the stream ended before the reply".into(),
            }),
            false => Ok(()),
        }
    }

    /// Reads a reply that comes as one value, which servers that cannot stream send in any case.
    async fn read_whole(&mut self) -> Result<(), ExternalError> {
        let mut all = self.first.take().map(Vec::from).unwrap_or_default();
        all.extend(self.answer.whole(&mut self.waits).await?);
        self.take(&all)?;
        self.end()
    }

    /// Takes a whole completion, or a piece of one. A reply that ends with an error is none, whatever text it
    /// has.
    fn take(&mut self, json: &[u8]) -> Result<(), ExternalError> {
        let text =
            std::str::from_utf8(json).map_err(|error| self.protocol(&format!("it is no UTF-8: {error}")))?;
        if text.trim().is_empty() {
            return Ok(());
        }
        let wire: Wire = serde_json::from_str(text).map_err(|error| {
            let begins: String = text.chars().take(80).collect();
            self.protocol(&format!("{error} in what begins {begins:?}"))
        })?;
        if let Some(error) = wire.error.as_ref().filter(|error| !error.is_null()) {
            let message = self.without_key(&message_of(error).unwrap_or_default());
            let (endpoint, status) = (self.waits.endpoint.clone(), 200);
            return Err(ExternalError::Failed { endpoint, status, message });
        }
        self.assembly.take(wire, &mut self.ready);
        match &self.assembly.reply.finish {
            Some(Finish::Other(reason)) if reason == "error" => {
                Err(self.protocol("its reply ended with an error"))
            }
            _ => Ok(()),
        }
    }

    /// Ends the reply.
    fn end(&mut self) -> Result<(), ExternalError> {
        if !self.assembly.has_choice {
            return Err(self.protocol("it has no choice"));
        }
        let is_short = matches!(self.assembly.reply.finish, Some(Finish::Length | Finish::ContentFilter));
        if !self.assembly.has_content && !is_short {
            return Err(self.protocol("its reply has neither content nor calls of tools"));
        }
        let reply = std::mem::take(&mut self.assembly.reply);
        if let (Some(bucket), Some(usage)) = (&self.policy.0.tokens, reply.usage) {
            bucket.give_back(self.guessed as f64 - (usage.prompt_tokens + usage.completion_tokens) as f64);
        }
        self.has_ended = true;
        self.ready.push(ChatEvent::Finished(reply));
        Ok(())
    }
}
