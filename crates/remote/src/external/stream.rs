//! A reply of a chat API as it arrives.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;

use super::External;
use super::call_deadline::CallDeadline;
use super::endpoint::ResponseGuard;
use super::error::ExternalError;
use super::http::{ResponseBody, extract_message};
use super::response::{ChatEvent, ChatResponse, CompletionAssembly, Finish, WireCompletion};
use super::sse::SseDecoder;

/// A streamed chat completion. Dropping the stream closes its connection.
#[derive(Debug)]
pub struct ChatStream {
    policy: External,
    /// Index of the server that sends the completion.
    server: usize,
    deadline: CallDeadline,
    _permit: (Arc<OwnedSemaphorePermit>, ResponseGuard),
    response: ResponseBody,
    /// Bytes that have arrived but were not parsed.
    first: Option<Bytes>,
    decoder: SseDecoder,
    assembly: CompletionAssembly,
    /// Events to return, in reverse order.
    ready: Vec<ChatEvent>,
    /// Number of tokens that were taken from the rate limit as an estimate, before the server
    /// reported the token counts.
    guessed: u64,
    has_ended: bool,
}

/// Start of a response whose first bytes have arrived.
pub(crate) struct ResponseStart {
    pub response: ResponseBody,
    /// First bytes of the response. `None` once they are consumed.
    pub first: Option<Bytes>,
    /// Number of tokens that were taken from the rate limit as an estimate.
    pub guessed: u64,
}

impl ChatStream {
    /// Creates a stream of chat events from a response whose first bytes have arrived.
    pub(super) fn new(
        policy: External,
        server: usize,
        deadline: CallDeadline,
        permit: (Arc<OwnedSemaphorePermit>, ResponseGuard),
        start: ResponseStart,
    ) -> Self {
        let ResponseStart { response, first, guessed } = start;
        ChatStream {
            policy,
            server,
            deadline,
            _permit: permit,
            response,
            first,
            decoder: SseDecoder::default(),
            assembly: CompletionAssembly::default(),
            ready: Vec::new(),
            guessed,
            has_ended: false,
        }
    }

    /// Returns the next event of the completion. The last event contains the complete response.
    /// After the last event or an error, returns `None`.
    ///
    /// # Errors
    /// Returns an error if the response breaks off, is not a chat completion, exceeds its maximum
    /// size, or times out.
    pub async fn next(&mut self) -> Option<Result<ChatEvent, ExternalError>> {
        if let Err(error) = self.wait_for_event().await {
            return Some(Err(error));
        }
        self.ready.pop().map(Ok)
    }

    /// Waits until an event can be returned or the completion has ended.
    async fn wait_for_event(&mut self) -> Result<(), ExternalError> {
        while self.ready.is_empty() && !self.has_ended {
            let read = if self.response.is_stream {
                self.read_events().await
            } else {
                self.read_all().await
            };
            self.ready.reverse();
            if let Err(error) = read {
                self.has_ended = true;
                self.ready.clear();
                if let Some(server) = self.policy.0.servers.get(self.server) {
                    server.record_failure();
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Waits for the first event of the completion.
    ///
    /// # Errors
    /// Returns the errors of [`next`](Self::next).
    pub(super) async fn start_response(mut self) -> Result<Self, ExternalError> {
        self.wait_for_event().await.map(|()| self)
    }

    /// Waits for the complete response.
    ///
    /// # Errors
    /// Returns the errors of [`next`](Self::next).
    pub async fn collect(mut self) -> Result<ChatResponse, ExternalError> {
        while let Some(event) = self.next().await {
            if let ChatEvent::Finished(response) = event? {
                return Ok(response);
            }
        }
        Err(self.protocol_error("it is incomplete"))
    }

    /// Waits for the complete response. It must have text or, if `has_tools` is true, text or tool
    /// calls, unless it was truncated. A response withheld by a content filter is a failure, even
    /// if it has text.
    ///
    /// # Errors
    /// Returns the errors of [`next`](Self::next). Returns an error if the response has no such
    /// content or was withheld.
    pub(super) async fn collect_text(self, has_tools: bool) -> Result<ChatResponse, ExternalError> {
        let endpoint = self.deadline.endpoint.clone();
        let response = self.collect().await?;
        let has_calls = has_tools && !response.tool_calls.is_empty();
        let is_empty = response.content.as_str().trim().is_empty() && !has_calls;
        let why = match &response.finish {
            Some(Finish::ContentFilter) => "the completion was withheld (content_filter)",
            Some(Finish::Length) => return Ok(response),
            _ if is_empty => "the completion is empty",
            _ => return Ok(response),
        };
        Err(ExternalError::Protocol { endpoint, why: why.into() })
    }

    /// Replaces the API key in a server's text by `[key]`.
    fn without_key(&self, text: &str) -> String {
        self.policy
            .0
            .servers
            .get(self.server)
            .map(|server| server.without_key(text))
            .unwrap_or_default()
    }

    fn protocol_error(&self, why: &str) -> ExternalError {
        ExternalError::Protocol {
            endpoint: self.deadline.endpoint.clone(),
            why: self.without_key(why),
        }
    }

    /// Reads the next events of a streamed response.
    async fn read_events(&mut self) -> Result<(), ExternalError> {
        let options = &self.policy.0.options;
        let silence = options.silence;
        let max = options.max_event_bytes;
        let data = match self.first.take() {
            Some(first) => Some(first),
            None => self.response.next_bytes(silence, &mut self.deadline).await?,
        };
        let mut events = Vec::new();
        let is_last = data.is_none();
        match data {
            Some(data) => self.decoder.feed(&data, &mut events),
            None => events.extend(std::mem::take(&mut self.decoder).finish()),
        }
        if self.decoder.num_pending_bytes() > max || events.iter().any(|event| event.len() > max) {
            return Err(ExternalError::TooLarge {
                endpoint: self.deadline.endpoint.clone(),
                what: "an event".into(),
                max,
                option: "max_event_bytes".into(),
            });
        }
        for event in events {
            if event.trim_ascii() == b"[DONE]" {
                return self.end_completion();
            }
            self.parse_chunk(&event)?;
        }
        match is_last {
            // Some servers close the stream without `[DONE]`; a finish reason shows that the reply
            // is complete.
            true if self.assembly.response.finish.is_some() => self.end_completion(),
            true => Err(ExternalError::Broken {
                endpoint: self.deadline.endpoint.clone(),
                bytes: self.response.num_bytes(),
                why: "the stream ended before the completion".into(),
            }),
            false => Ok(()),
        }
    }

    /// Reads a response that is one JSON value. Servers without streaming send such a response even
    /// if a stream was requested.
    async fn read_all(&mut self) -> Result<(), ExternalError> {
        let mut all = self.first.take().map(Vec::from).unwrap_or_default();
        all.extend(self.response.collect(&mut self.deadline).await?);
        self.parse_chunk(&all)?;
        self.end_completion()
    }

    /// Parses the JSON of a complete completion or of one chunk. An error in the JSON makes the
    /// call fail, even if text has arrived.
    fn parse_chunk(&mut self, json: &[u8]) -> Result<(), ExternalError> {
        let text = std::str::from_utf8(json)
            .map_err(|error| self.protocol_error(&format!("the text is not UTF-8: {error}")))?;
        if text.trim().is_empty() {
            return Ok(());
        }
        let wire: WireCompletion = serde_json::from_str(text).map_err(|error| {
            let excerpt: String = text.chars().take(80).collect();
            self.protocol_error(&format!("{error} in the data that starts with {excerpt:?}"))
        })?;
        if let Some(error) = wire.error.as_ref().filter(|error| !error.is_null()) {
            let message = self.without_key(&extract_message(error).unwrap_or_default());
            let endpoint = self.deadline.endpoint.clone();
            let status = 200;
            return Err(ExternalError::Failed { endpoint, status, message });
        }
        self.assembly.add_chunk(wire, &mut self.ready);
        match &self.assembly.response.finish {
            Some(Finish::Other(reason)) if reason == "error" => {
                Err(self.protocol_error("the completion ended with an error"))
            }
            _ => Ok(()),
        }
    }

    /// Ends the completion: corrects the rate limit by the actual token counts, and queues the last
    /// event.
    fn end_completion(&mut self) -> Result<(), ExternalError> {
        if !self.assembly.has_choice {
            return Err(self.protocol_error("the completion has no choices"));
        }
        let is_short =
            matches!(self.assembly.response.finish, Some(Finish::Length | Finish::ContentFilter));
        if !self.assembly.has_content && !is_short {
            return Err(self.protocol_error("the completion has neither content nor tool calls"));
        }
        let response = std::mem::take(&mut self.assembly.response);
        if let (Some(bucket), Some(usage)) = (&self.policy.0.tokens, response.usage) {
            bucket.give_back(
                self.guessed as f64 - (usage.prompt_tokens + usage.completion_tokens) as f64,
            );
        }
        self.has_ended = true;
        self.ready.push(ChatEvent::Finished(response));
        Ok(())
    }
}
