//! Events of a call, for any number of readers.
//!
//! Each reader receives all events from the first. A client that repeats a call after a broken
//! connection therefore gets the complete response.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use levade_conversation::{Origin, RecordedCompletion};
use levade_policy::{FinishReason, TopLogprobs};
use levade_text::{CompletionDelta, Message};
use tokio::sync::watch;

use crate::api_error::{ApiError, ErrorKind};

/// A token of a prompt or a completion, with its log-probability.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Id of the token in the vocabulary.
    pub id: u32,
    /// Log-probability of the token under the distribution from which it was sampled (behavior
    /// policy).
    pub logprob: f32,
    /// Most likely tokens at this position, with their log-probabilities. Empty unless the request
    /// asks for alternatives.
    pub top: TopLogprobs,
    /// Version of the weights that sampled the token. 0 for prompt tokens.
    pub version: u64,
}

/// End of a completion: its message, finish reason and counts.
#[derive(Debug, Clone, PartialEq)]
pub struct End {
    /// Assistant message as the client receives it, with its reasoning.
    pub message: Message,
    /// Parts of `message` in the order in which the model wrote them: text, reasoning and tool
    /// calls. Adjacent parts of one kind are joined.
    pub parts: Vec<CompletionDelta>,
    /// Raw text of the completion, without the stop string that ended it unless the client keeps
    /// stop strings.
    pub text: String,
    /// Completion of a chat as it was recorded. `None` for prompts of token ids, for chat APIs, and
    /// for an aborted completion without tokens.
    pub recorded_completion: Option<RecordedCompletion>,
    /// Reason why the completion ended.
    pub finish: FinishReason,
    /// Whether the completion calls tools.
    pub calls: bool,
    /// Stop string that ended the completion. `None` if it ended otherwise.
    pub stopped_by: Option<String>,
    /// Number of prompt tokens.
    pub prompt_tokens: usize,
    /// Number of completion tokens.
    pub tokens: usize,
    /// Number of completion tokens that belong to reasoning.
    pub reasoning_tokens: usize,
}

/// Event of a model call. Events are stored in the order in which they occur.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Prompt tokens with their log-probabilities. Only sent if the request asks for them. The
    /// log-probability of the first token is NaN.
    Prompt {
        /// Index of the completion to which the prompt belongs, from 0.
        choice: usize,
        /// Further prompt tokens, which follow the tokens of earlier events.
        tokens: Vec<Token>,
    },
    /// Further tokens of a completion.
    Delta {
        /// Index of the completion, from 0.
        choice: usize,
        /// Text, reasoning and tool calls that the event's tokens complete.
        deltas: Vec<CompletionDelta>,
        /// Sampled tokens. Empty if a chat API answers the call.
        tokens: Vec<Token>,
    },
    /// A completion has ended.
    Ended {
        /// Index of the completion, from 0.
        choice: usize,
        /// Message, finish reason and token counts of the completion.
        end: Box<End>,
    },
    /// The call has failed. This is the last event.
    Failed(ApiError),
    /// All completions have ended. This is the last event.
    Done,
}

impl Event {
    /// Returns whether this event is the last event of a call.
    pub fn is_last(&self) -> bool {
        matches!(self, Event::Failed(_) | Event::Done)
    }
}

/// Splits a message into its parts, in the order in which APIs list them: reasoning, text, tool
/// calls.
pub fn message_parts(message: &Message) -> Vec<CompletionDelta> {
    let reasoning = message.reasoning_content.as_deref().filter(|text| !text.is_empty());
    let speech = Some(message.content.as_str()).filter(|text| !text.is_empty());
    let texts = reasoning.map(|text| CompletionDelta::Reasoning(text.to_owned()));
    let texts =
        texts.into_iter().chain(speech.map(|text| CompletionDelta::Speech(text.to_owned())));
    texts
        .chain(message.tool_calls.iter().cloned().map(|call| CompletionDelta::Call(Ok(call))))
        .collect()
}

/// Tokens of the text that a client receives. Each uninterrupted part of the text has its own list.
/// Tokens of reasoning and tool calls are excluded.
#[derive(Debug, Default, Clone)]
pub struct MessageTokens {
    parts: Vec<Vec<Token>>,
    /// Whether further text belongs to the last part of the text.
    open: bool,
    /// Tokens that have not completed a delta, so that it is unknown whether they belong to the
    /// text.
    pending: Vec<Token>,
}

impl MessageTokens {
    /// Adds sampled tokens, and the deltas that they complete.
    pub fn add(&mut self, deltas: &[CompletionDelta], tokens: &[Token]) {
        self.pending.extend_from_slice(tokens);
        if deltas.iter().any(|delta| matches!(delta, CompletionDelta::Speech(_))) {
            if !std::mem::replace(&mut self.open, true) {
                self.parts.push(Vec::new());
            }
            if let Some(part) = self.parts.last_mut() {
                part.append(&mut self.pending);
            }
        } else if !deltas.is_empty() {
            self.pending.clear();
        }
        if deltas
            .iter()
            .any(|delta| matches!(delta, CompletionDelta::Reasoning(_) | CompletionDelta::Call(_)))
        {
            self.open = false;
        }
    }

    /// Removes and returns the tokens of each part of the text.
    pub fn take(&mut self) -> Vec<Vec<Token>> {
        self.open = false;
        std::mem::take(&mut self.parts)
    }
}

/// Data of a call that are known at its start.
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    /// Id of the API response.
    pub id: String,
    /// Name of the model in the API response.
    pub model: String,
    /// Time at which the call started, as a Unix timestamp in seconds.
    pub created: u64,
    /// Token ids of the prompt. Empty if a chat API answers the call.
    pub prompt: Vec<u32>,
    /// Whether the prompt starts the completion's reasoning.
    pub opens_reasoning: bool,
    /// Whether the opening limit truncated the prompt.
    pub is_truncated: bool,
    /// Origin of the prompt. `None` for prompts of token ids or text, and for chat APIs.
    pub origin: Option<Origin>,
    /// Number of completions of the call.
    pub n: usize,
}

/// Events of a model call so far, which any number of readers can read.
#[derive(Debug)]
pub struct Transcript {
    /// Data of the call that are known at its start.
    pub head: Head,
    events: Mutex<Vec<Arc<Event>>>,
    count: watch::Sender<usize>,
    readers: watch::Sender<ReaderState>,
}

/// State of the readers of a transcript.
#[derive(Debug, Clone, Copy, Default)]
struct ReaderState {
    count: usize,
    /// Whether a client has received the last event.
    is_received: bool,
}

/// Guard that ends a transcript as failed when the guard is dropped, unless the transcript has
/// already ended. Thus readers do not wait forever if the task that writes the transcript panics.
pub struct EndGuard(Arc<Transcript>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        let has_ended = {
            let events = self.0.events();
            events.last().is_some_and(|event| event.is_last())
        };
        if !has_ended {
            let message = "the call failed: the task that sampled its completion has exited";
            self.0.push(Event::Failed(ApiError::new(ErrorKind::Internal, message)));
        }
    }
}

impl Transcript {
    /// Returns a guard for the task that writes the transcript. The task drops the guard after it
    /// has written the last event.
    pub fn end_guard(self: &Arc<Self>) -> EndGuard {
        EndGuard(Arc::clone(self))
    }

    fn events(&self) -> MutexGuard<'_, Vec<Arc<Event>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a transcript without events.
    pub fn new(head: Head) -> Arc<Self> {
        let count = watch::Sender::new(0);
        let readers = watch::Sender::new(ReaderState::default());
        Arc::new(Transcript { head, events: Mutex::default(), count, readers })
    }

    /// Appends an event, and wakes all readers.
    pub fn push(&self, event: Event) {
        let mut events = self.events();
        events.push(Arc::new(event));
        self.count.send_replace(events.len());
    }

    fn event(&self, at: usize) -> Option<Arc<Event>> {
        self.events().get(at).cloned()
    }

    /// Creates a reader that starts at the first event.
    pub fn read(self: &Arc<Self>) -> Reader {
        self.readers.send_modify(|readers| readers.count += 1);
        Reader { transcript: Arc::clone(self), count: self.count.subscribe(), at: 0 }
    }

    /// Returns whether a client has received the last event. If not, a client may repeat the call
    /// to get its response.
    pub fn was_read(&self) -> bool {
        self.readers.borrow().is_received
    }

    /// Returns whether a completion failed or was aborted. A repeated call must then not be
    /// answered from this transcript.
    pub fn is_broken(&self) -> bool {
        let events = self.events();
        events.iter().any(|event| match &**event {
            Event::Failed(_) => true,
            Event::Ended { end, .. } => end.finish == FinishReason::Aborted,
            Event::Prompt { .. } | Event::Delta { .. } | Event::Done => false,
        })
    }

    /// Returns whether any reader of the transcript exists.
    pub fn is_being_read(&self) -> bool {
        self.readers.borrow().count > 0
    }

    /// Waits until no reader of the transcript exists.
    pub async fn wait_until_abandoned(&self) {
        // The sender exists as long as `self`, so this does not fail.
        let _ = self.readers.subscribe().wait_for(|readers| readers.count == 0).await;
    }

    /// Waits until a reader of the transcript exists.
    pub(crate) async fn wait_for_reader(&self) {
        let _ = self.readers.subscribe().wait_for(|readers| readers.count > 0).await;
    }
}

/// Reader of a transcript. Dropping the reader before [`Reader::mark_received`] counts as a broken
/// connection.
#[derive(Debug)]
pub struct Reader {
    transcript: Arc<Transcript>,
    count: watch::Receiver<usize>,
    at: usize,
}

impl Reader {
    /// Returns the transcript that the reader reads.
    pub fn transcript(&self) -> &Arc<Transcript> {
        &self.transcript
    }

    /// Returns the data of the call that are known at its start.
    pub fn head(&self) -> &Head {
        &self.transcript.head
    }

    /// Waits for the end of a call with one completion, and returns the completion.
    ///
    /// # Errors
    /// Returns the error with which the call failed.
    pub async fn completion(self) -> Result<End, ApiError> {
        self.completion_with(|_| {}).await
    }

    /// Waits for the end of a call like [`completion`](Self::completion), and calls `observe` for
    /// every event.
    ///
    /// # Errors
    /// Returns the error with which the call failed.
    pub async fn completion_with(
        mut self,
        mut observe: impl FnMut(&Event),
    ) -> Result<End, ApiError> {
        let mut completed = None;
        while let Some(event) = self.next().await {
            observe(&event);
            match &*event {
                Event::Ended { end, .. } => completed = Some((**end).clone()),
                Event::Failed(error) => return Err(error.clone()),
                Event::Prompt { .. } | Event::Delta { .. } | Event::Done => {}
            }
        }
        self.mark_received();
        completed.ok_or_else(|| {
            ApiError::new(ErrorKind::Internal, "the call ended without a completion")
        })
    }

    /// Returns the next event if it is available, without waiting. Otherwise returns `None`.
    pub fn try_next(&mut self) -> Option<Arc<Event>> {
        let event = self.transcript.event(self.at)?;
        self.at += 1;
        Some(event)
    }

    /// Returns whether the last event has been returned.
    pub fn is_at_end(&self) -> bool {
        self.at
            .checked_sub(1)
            .and_then(|last| self.transcript.event(last))
            .is_some_and(|event| event.is_last())
    }

    /// Waits for the next event. Returns `None` after the last event.
    pub async fn next(&mut self) -> Option<Arc<Event>> {
        loop {
            if let Some(event) = self.try_next() {
                return Some(event);
            }
            if self.is_at_end() {
                return None;
            }
            let at = self.at;
            self.count.wait_for(|count| *count > at).await.ok()?;
        }
    }

    /// Marks the transcript as completely received by a client.
    pub fn mark_received(&mut self) {
        self.transcript.readers.send_modify(|readers| readers.is_received = true);
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.transcript.readers.send_modify(|readers| readers.count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transcript() -> Arc<Transcript> {
        Transcript::new(Head {
            id: "x".into(),
            model: "m".into(),
            created: 0,
            prompt: vec![1],
            opens_reasoning: false,
            is_truncated: false,
            origin: None,
            n: 1,
        })
    }

    fn delta(id: u32) -> Event {
        let tokens = vec![Token { id, logprob: -1.0, top: Vec::new(), version: 0 }];
        Event::Delta { choice: 0, deltas: Vec::new(), tokens }
    }

    #[tokio::test]
    async fn every_reader_receives_all_events() {
        let transcript = transcript();
        let mut early = transcript.read();
        transcript.push(delta(1));
        assert_eq!(*early.next().await.unwrap(), delta(1));
        let writer = Arc::clone(&transcript);
        let written = tokio::spawn(async move {
            for id in 2..50 {
                writer.push(delta(id));
                tokio::task::yield_now().await;
            }
            writer.push(Event::Done);
        });
        let mut seen = 1;
        while let Some(event) = early.next().await {
            seen += usize::from(!event.is_last());
        }
        written.await.unwrap();
        let mut late = transcript.read();
        let mut second_count = 0;
        while let Some(event) = late.next().await {
            second_count += usize::from(!event.is_last());
        }
        assert_eq!((seen, second_count), (49, 49));
    }

    #[tokio::test]
    async fn panicking_writer_fails_transcript_for_readers() {
        let transcript = transcript();
        let mut reader = transcript.read();
        let guard = transcript.end_guard();
        transcript.push(delta(1));
        let panicked = tokio::spawn(async move {
            let _ending = guard;
            panic!("a bug");
        });
        assert!(panicked.await.is_err());
        reader.next().await.unwrap();
        assert!(
            matches!(&*reader.next().await.unwrap(), Event::Failed(fault) if fault.kind == ErrorKind::Internal)
        );
        assert!(reader.next().await.is_none() && transcript.is_broken());
        drop(transcript.end_guard());
        assert!(reader.try_next().is_none(), "it has an end already");
    }

    #[tokio::test]
    async fn transcript_is_unread_if_reader_leaves_early() {
        let transcript = transcript();
        transcript.push(delta(1));
        let mut reader = transcript.read();
        reader.next().await.unwrap();
        assert!(transcript.is_being_read());
        drop(reader);
        transcript.wait_until_abandoned().await;
        assert!(!transcript.is_being_read() && !transcript.was_read());
        transcript.push(Event::Done);
        let mut reader = transcript.read();
        transcript.wait_for_reader().await;
        while reader.next().await.is_some() {}
        reader.mark_received();
        assert!(transcript.was_read());
    }
}
