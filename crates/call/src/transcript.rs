//! Events of a call, for any number of readers.
//!
//! Each reader receives all events from the first. So a client that repeats a call after its connection broke
//! gets the complete response.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use levade_conversation::{Origin, Reply};
use levade_policy::{FinishReason, TopLogprobs};
use levade_text::{Message, Piece};
use tokio::sync::watch;

use crate::api_error::{ApiError, ErrorKind};

/// A token of a reply.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Id in the vocabulary.
    pub id: u32,
    /// Behaviour log-probability.
    pub logprob: f32,
    /// The likeliest tokens in its place, where they were asked for.
    pub top: TopLogprobs,
    /// Version of the weights that drew it; 0 for tokens of a prompt.
    pub version: u64,
}

/// End of a reply.
#[derive(Debug, Clone, PartialEq)]
pub struct End {
    /// The reply as a client is told it, with its thought.
    pub message: Message,
    /// Parts of `message` in the order in which the model wrote them: text, thoughts and tool calls.
    /// Adjacent parts of one kind are joined.
    pub parts: Vec<Piece>,
    /// Text of the reply as it stands, without the stop string that ended it.
    pub text: String,
    /// The recorded completion of a chat. `None` for prompts of token ids, for chat APIs, and for an aborted
    /// completion without tokens.
    pub reply: Option<Reply>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Whether it calls tools.
    pub calls: bool,
    /// The stop string that ended it, where one did.
    pub stopped_by: Option<String>,
    /// Number of the tokens of its prompt.
    pub prompt_tokens: usize,
    /// Number of its tokens.
    pub tokens: usize,
    /// Number of its tokens within thoughts.
    pub thought_tokens: usize,
}

/// Event of a call, in the order of its happening.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Tokens of the prompt with their log-probabilities, where these were asked for; that of the first is no
    /// number.
    Prompt {
        /// The reply before which they stand, from 0.
        choice: usize,
        /// The tokens.
        tokens: Vec<Token>,
    },
    /// Part of a reply.
    Delta {
        /// The reply, from 0.
        choice: usize,
        /// Text, thoughts and calls that it completes.
        pieces: Vec<Piece>,
        /// Tokens that were drawn.
        tokens: Vec<Token>,
    },
    /// A reply has ended.
    Ended {
        /// The reply, from 0.
        choice: usize,
        /// All of it.
        end: Box<End>,
    },
    /// The call has failed; the last event.
    Failed(ApiError),
    /// All replies have ended; the last event.
    Done,
}

impl Event {
    /// Whether nothing comes after it.
    pub fn is_last(&self) -> bool {
        matches!(self, Event::Failed(_) | Event::Done)
    }
}

/// Splits a message into its parts, in the order in which APIs list them: thought, text, tool calls.
pub fn parts_of(message: &Message) -> Vec<Piece> {
    let filled = |text: &&str| !text.is_empty();
    let thought = message.reasoning_content.as_deref().filter(filled);
    let said = Some(message.content.as_str()).filter(filled);
    let texts = thought.map(|text| Piece::Thought(text.to_owned()));
    let texts = texts.into_iter().chain(said.map(|text| Piece::Speech(text.to_owned())));
    texts.chain(message.tool_calls.iter().cloned().map(|call| Piece::Call(Ok(call)))).collect()
}

/// Tokens of the text that a client is shown, one list for each uninterrupted part of it. Tokens of thoughts
/// and tool calls are left out.
#[derive(Debug, Default, Clone)]
pub struct MessageTokens {
    parts: Vec<Vec<Token>>,
    /// Whether further text belongs to the last part.
    open: bool,
    /// Tokens of which a later part says what they belong to.
    pending: Vec<Token>,
}

impl MessageTokens {
    /// Adds a part of a reply.
    pub fn add(&mut self, pieces: &[Piece], tokens: &[Token]) {
        self.pending.extend_from_slice(tokens);
        if pieces.iter().any(|piece| matches!(piece, Piece::Speech(_))) {
            if !std::mem::replace(&mut self.open, true) {
                self.parts.push(Vec::new());
            }
            if let Some(part) = self.parts.last_mut() {
                part.append(&mut self.pending);
            }
        } else if !pieces.is_empty() {
            self.pending.clear();
        }
        if pieces.iter().any(|piece| matches!(piece, Piece::Thought(_) | Piece::Call(_))) {
            self.open = false;
        }
    }

    /// Takes the tokens of each part that arrived since the last call.
    pub fn take(&mut self) -> Vec<Vec<Token>> {
        self.open = false;
        std::mem::take(&mut self.parts)
    }
}

/// Things known about a call from its start.
#[derive(Debug, Clone, PartialEq)]
pub struct Head {
    /// An id for the response.
    pub id: String,
    /// Name of the model that answers.
    pub model: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Ids of the prompt.
    pub prompt: Vec<u32>,
    /// Whether the prompt starts the completion's reasoning.
    pub opens_reasoning: bool,
    /// Whether the opening limit truncated the prompt.
    pub is_truncated: bool,
    /// How the prompt came about; `None` for prompts in ids or text.
    pub origin: Option<Origin>,
    /// Number of replies.
    pub n: usize,
}

/// Events of a call so far, for any number of readers.
#[derive(Debug)]
pub struct Transcript {
    /// Things known from the start.
    pub head: Head,
    events: Mutex<Vec<Arc<Event>>>,
    count: watch::Sender<usize>,
    readers: watch::Sender<Readers>,
}

/// Who reads a transcript.
#[derive(Debug, Clone, Copy, Default)]
struct Readers {
    now: usize,
    /// Whether one has read the last event.
    satisfied: bool,
}

/// Ends a transcript when it is dropped, where nobody has: a task that dies must not leave clients waiting.
pub struct Ending(Arc<Transcript>);

impl Drop for Ending {
    fn drop(&mut self) {
        let has_ended = {
            let events = self.0.events();
            events.last().is_some_and(|event| event.is_last())
        };
        if !has_ended {
            let message = "the call came to no end: the task that sampled its reply has died";
            self.0.push(Event::Failed(ApiError::new(ErrorKind::Internal, message)));
        }
    }
}

impl Transcript {
    /// A guard that its writer holds until the last event.
    pub fn ending(self: &Arc<Self>) -> Ending {
        Ending(Arc::clone(self))
    }

    fn events(&self) -> MutexGuard<'_, Vec<Arc<Event>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a transcript without events.
    pub fn new(head: Head) -> Arc<Self> {
        let (count, readers) = (watch::Sender::new(0), watch::Sender::new(Readers::default()));
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

    /// A reader of all events, from the first.
    pub fn read(self: &Arc<Self>) -> Reader {
        self.readers.send_modify(|readers| readers.now += 1);
        Reader { transcript: Arc::clone(self), count: self.count.subscribe(), at: 0 }
    }

    /// Whether its last event was read by somebody. A call of which nobody was told the end may be asked for
    /// again.
    pub fn was_read(&self) -> bool {
        self.readers.borrow().satisfied
    }

    /// Whether a reply of it failed, or was given up before its end: that is no answer for who asks again.
    pub fn is_broken(&self) -> bool {
        let events = self.events();
        events.iter().any(|event| match &**event {
            Event::Failed(_) => true,
            Event::Ended { end, .. } => end.finish == FinishReason::Aborted,
            Event::Prompt { .. } | Event::Delta { .. } | Event::Done => false,
        })
    }

    /// Whether somebody reads it now.
    pub fn is_being_read(&self) -> bool {
        self.readers.borrow().now > 0
    }

    /// Waits until nobody reads any more.
    pub async fn abandoned(&self) {
        // The sender lives as long as `self`, so this does not fail.
        let _ = self.readers.subscribe().wait_for(|readers| readers.now == 0).await;
    }

    /// Waits until somebody reads again.
    pub(crate) async fn joined(&self) {
        let _ = self.readers.subscribe().wait_for(|readers| readers.now > 0).await;
    }
}

/// A reader of a transcript. Dropping it before the last event counts as a connection that broke.
#[derive(Debug)]
pub struct Reader {
    transcript: Arc<Transcript>,
    count: watch::Receiver<usize>,
    at: usize,
}

impl Reader {
    /// Returns the transcript.
    pub fn transcript(&self) -> &Arc<Transcript> {
        &self.transcript
    }

    /// Returns what is known from the start of the call.
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

    /// Waits for the end of a call like [`completion`](Self::completion), and calls `observe` for every
    /// event.
    ///
    /// # Errors
    /// Returns the error with which the call failed.
    pub async fn completion_with(mut self, mut observe: impl FnMut(&Event)) -> Result<End, ApiError> {
        let mut completed = None;
        while let Some(event) = self.next().await {
            observe(&event);
            match &*event {
                Event::Ended { end, .. } => completed = Some((**end).clone()),
                Event::Failed(error) => return Err(error.clone()),
                Event::Prompt { .. } | Event::Delta { .. } | Event::Done => {}
            }
        }
        self.satisfied();
        completed.ok_or_else(|| ApiError::new(ErrorKind::Internal, "the call has ended without a completion"))
    }

    /// The next event, where it is there.
    pub fn ready(&mut self) -> Option<Arc<Event>> {
        let event = self.transcript.event(self.at)?;
        self.at += 1;
        Some(event)
    }

    /// Whether the last event was handed out.
    pub fn is_at_end(&self) -> bool {
        self.at
            .checked_sub(1)
            .and_then(|last| self.transcript.event(last))
            .is_some_and(|event| event.is_last())
    }

    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<Arc<Event>> {
        loop {
            if let Some(event) = self.ready() {
                return Some(event);
            }
            if self.is_at_end() {
                return None;
            }
            let at = self.at;
            self.count.wait_for(|count| *count > at).await.ok()?;
        }
    }

    /// Notes that the client has been sent everything.
    pub fn satisfied(&mut self) {
        self.transcript.readers.send_modify(|readers| readers.satisfied = true);
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.transcript.readers.send_modify(|readers| readers.now -= 1);
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
        Event::Delta { choice: 0, pieces: Vec::new(), tokens }
    }

    #[tokio::test]
    async fn every_reader_is_told_everything() {
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
        let mut again = 0;
        while let Some(event) = late.next().await {
            again += usize::from(!event.is_last());
        }
        assert_eq!((seen, again), (49, 49));
    }

    #[tokio::test]
    async fn who_dies_while_writing_leaves_no_reader_waiting() {
        let transcript = transcript();
        let mut reader = transcript.read();
        let ending = transcript.ending();
        transcript.push(delta(1));
        let died = tokio::spawn(async move {
            let _ending = ending;
            panic!("a bug");
        });
        assert!(died.await.is_err());
        reader.next().await.unwrap();
        assert!(
            matches!(&*reader.next().await.unwrap(), Event::Failed(fault) if fault.kind == ErrorKind::Internal)
        );
        assert!(reader.next().await.is_none() && transcript.is_broken());
        drop(transcript.ending());
        assert!(reader.ready().is_none(), "it has an end already");
    }

    #[tokio::test]
    async fn a_reader_that_leaves_early_has_not_read_it() {
        let transcript = transcript();
        transcript.push(delta(1));
        let mut reader = transcript.read();
        reader.next().await.unwrap();
        assert!(transcript.is_being_read());
        drop(reader);
        transcript.abandoned().await;
        assert!(!transcript.is_being_read() && !transcript.was_read());
        transcript.push(Event::Done);
        let mut reader = transcript.read();
        transcript.joined().await;
        while reader.next().await.is_some() {}
        reader.satisfied();
        assert!(transcript.was_read());
    }
}
