//! Answers: as one JSON document or as a stream of events, with signs of life while the client waits.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use levade_http::Rejection;
use serde_json::Value;

use crate::call::Call;
use crate::gateway::Caller;
use crate::gateway::Gateway;
use levade_call::Batch;
use levade_call::{ApiError, ErrorKind};
use levade_call::{End, Event, Head, MessageTokens, Reader, Token, Transcript};

/// A reply, put together.
#[derive(Debug)]
pub(crate) struct Gathered {
    /// Tokens of the prompt with their log-probabilities, where these were asked for; that of the first is no
    /// number.
    pub prompt: Vec<Token>,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// Those of each part of its message, without thought and calls.
    pub message: Vec<Vec<Token>>,
    /// The rest of it.
    pub end: End,
}

/// How an API writes what comes of a call.
pub(crate) trait Dialect: Send + 'static {
    /// Body of an error.
    fn fault(&self, fault: &ApiError) -> Value;

    /// Body of an answer.
    fn whole(&mut self, head: &Head, replies: Vec<Gathered>) -> Value;

    /// Frames that a stream begins with.
    fn begin(&mut self, head: &Head) -> String;

    /// Frames that tell of an event.
    fn event(&mut self, head: &Head, event: &Event) -> String;

    /// Frame that keeps a client waiting.
    fn ping(&self) -> String {
        ": ping\n\n".into()
    }
}

/// A frame of a stream: some data, under a name where the API has such.
pub(crate) fn frame(name: Option<&str>, data: &Value) -> String {
    match name {
        Some(name) => format!("event: {name}\ndata: {data}\n\n"),
        None => format!("data: {data}\n\n"),
    }
}

/// A JSON document as an answer.
pub(crate) fn json(status: StatusCode, value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// Converts a rejection of a request into an error of the API.
pub(super) fn to_api_error(rejection: Rejection) -> ApiError {
    let kind = match rejection.status {
        StatusCode::BAD_REQUEST => ErrorKind::Invalid,
        StatusCode::METHOD_NOT_ALLOWED => ErrorKind::Method,
        StatusCode::NOT_FOUND => ErrorKind::NotFound,
        StatusCode::PAYLOAD_TOO_LARGE => ErrorKind::TooLarge,
        StatusCode::UNSUPPORTED_MEDIA_TYPE => ErrorKind::MediaType,
        _ => ErrorKind::Forbidden,
    };
    ApiError::new(kind, rejection.message)
}

/// An error as an answer.
pub(crate) fn failed(fault: &ApiError, body: &Value) -> Response {
    let mut response = json(status(fault.kind), body);
    if let ErrorKind::Busy(after) = fault.kind {
        let seconds = HeaderValue::from(after.as_secs().max(1));
        response.headers_mut().insert(header::RETRY_AFTER, seconds);
    }
    if fault.kind.is_final() {
        // Clients of OpenAI's and Anthropic's APIs go by this, whatever the status.
        let no = HeaderValue::from_static("false");
        response.headers_mut().insert(HeaderName::from_static("x-should-retry"), no);
    }
    response
}

/// Answers a call in a dialect, as a stream or as a whole. Where nothing has come after `ping`, a client gets
/// a sign of life each time it has passed.
pub(crate) async fn answer<D: Dialect>(
    begun: Result<Reader, ApiError>,
    mut dialect: D,
    streams: bool,
    ping: Duration,
) -> Response {
    let reader = match begun {
        Ok(reader) => reader,
        Err(fault) => return failed(&fault, &dialect.fault(&fault)),
    };
    if streams {
        let first = dialect.begin(reader.head());
        return streamed(Streaming { reader, dialect, first: Some(first), ended: false, ping });
    }
    let mut gathering = Gathering::new(reader);
    match tokio::time::timeout(ping, gathering.all()).await {
        Ok(Ok(())) => {
            let replies = gathering.replies();
            let bytes = dialect.whole(gathering.reader.head(), replies).to_string();
            plain(StatusCode::OK, bytes, gathering.reader)
        }
        Ok(Err(fault)) => failed(&fault, &dialect.fault(&fault)),
        Err(_) => slow(gathering, dialect, ping),
    }
}

/// A reply so far.
#[derive(Default)]
struct Partial {
    prompt: Vec<Token>,
    tokens: Vec<Token>,
    message: MessageTokens,
    end: Option<End>,
}

/// Events of a call, put together.
struct Gathering {
    reader: Reader,
    replies: Vec<Partial>,
}

impl Gathering {
    fn new(reader: Reader) -> Self {
        let replies = (0..reader.head().n).map(|_| Default::default()).collect();
        Gathering { reader, replies }
    }

    /// Reads all events. Can be given up, and gone on with.
    async fn all(&mut self) -> Result<(), ApiError> {
        while let Some(event) = self.reader.next().await {
            match &*event {
                Event::Prompt { choice, tokens } => {
                    self.replies[*choice].prompt.extend(tokens.iter().cloned());
                }
                Event::Delta { choice, pieces, tokens } => {
                    let reply = &mut self.replies[*choice];
                    reply.tokens.extend(tokens.iter().cloned());
                    reply.message.add(pieces, tokens);
                }
                Event::Ended { choice, end } => self.replies[*choice].end = Some((**end).clone()),
                Event::Failed(fault) => return Err(fault.clone()),
                Event::Done => {}
            }
        }
        Ok(())
    }

    fn replies(&mut self) -> Vec<Gathered> {
        let replies = std::mem::take(&mut self.replies).into_iter();
        replies
            .filter_map(|Partial { prompt, tokens, mut message, end }| {
                Some(Gathered { prompt, tokens, message: message.take(), end: end? })
            })
            .collect()
    }
}

/// Waits for all of a call.
///
/// # Errors
/// What the call failed with.
async fn gather(reader: Reader) -> Result<(Head, Vec<Gathered>), ApiError> {
    let mut gathering = Gathering::new(reader);
    gathering.all().await?;
    gathering.reader.satisfied();
    Ok((gathering.reader.head().clone(), gathering.replies()))
}

/// Makes several calls of one body at once, and waits for all of them. Where one is refused, none is
/// recorded.
///
/// # Errors
/// What the first of them in their order failed with, or was refused for.
pub(crate) async fn gather_all(
    gateway: &Gateway,
    caller: &Caller,
    calls: Vec<Call>,
) -> Result<Vec<(Head, Vec<Gathered>)>, ApiError> {
    let readers = begin_all(gateway, caller, calls).await?;
    join_all(readers.into_iter().map(gather)).await.into_iter().collect()
}

/// Begins several calls of one body. If one is rejected, none is recorded.
async fn begin_all(gateway: &Gateway, caller: &Caller, calls: Vec<Call>) -> Result<Vec<Reader>, ApiError> {
    let (outcome, batch) = Batch::new();
    let begin = async |(place, call)| {
        // Equal prompts of one body are calls of their own.
        let body = caller.body.map(|body| body.wrapping_add(place as u128 + 1));
        gateway.call_in(&Caller { body, ..caller.clone() }, call, Some(batch.clone())).await
    };
    let begun = join_all(calls.into_iter().enumerate().map(begin)).await;
    let readers = begun.into_iter().collect::<Result<Vec<Reader>, ApiError>>();
    outcome.send(readers.is_ok());
    readers
}

/// Makes several calls of one body at once, and reads them as one, whose replies are theirs in order.
///
/// # Errors
/// Returns the fault of the first of them in their order that is rejected. Then none is recorded.
pub(crate) async fn merge_all(
    gateway: &Gateway,
    caller: &Caller,
    calls: Vec<Call>,
) -> Result<Merged, ApiError> {
    let readers = begin_all(gateway, caller, calls).await?;
    let heads: Vec<Head> = readers.iter().map(|reader| reader.head().clone()).collect();
    let first = heads[0].clone();
    let head = Head { prompt: Vec::new(), origin: None, n: heads.iter().map(|head| head.n).sum(), ..first };
    let transcript = Transcript::new(head);
    let reader = transcript.read();
    let prompts = heads.into_iter().map(|head| head.prompt).collect();
    tokio::spawn(follow_all(readers, transcript));
    Ok(Merged { reader, prompts })
}

/// Calls that are read as one.
pub(crate) struct Merged {
    /// Reads all of them.
    pub reader: Reader,
    /// Their prompts.
    pub prompts: Vec<Vec<u32>>,
}

/// Writes the events of several calls into one transcript, until all have ended or its reader is gone.
async fn follow_all(readers: Vec<Reader>, transcript: Arc<Transcript>) {
    let _ending = transcript.ending();
    let mut offset = 0;
    let streams = readers.into_iter().map(|reader| {
        let first = offset;
        offset += reader.head().n;
        Box::pin(stream::unfold(reader, move |mut reader| async move {
            let event = reader.next().await?;
            if event.is_last() {
                // The merged transcript has a reader of its own.
                reader.satisfied();
            }
            Some(((first, event), reader))
        }))
    });
    let mut events = stream::select_all(streams);
    let follow = async {
        while let Some((first, event)) = events.next().await {
            match &*event {
                Event::Prompt { choice, tokens } => {
                    transcript.push(Event::Prompt { choice: first + choice, tokens: tokens.clone() });
                }
                Event::Delta { choice, pieces, tokens } => {
                    let (pieces, tokens) = (pieces.clone(), tokens.clone());
                    transcript.push(Event::Delta { choice: first + choice, pieces, tokens });
                }
                Event::Ended { choice, end } => {
                    transcript.push(Event::Ended { choice: first + choice, end: end.clone() });
                }
                Event::Failed(fault) => return transcript.push(Event::Failed(fault.clone())),
                Event::Done => {}
            }
        }
        transcript.push(Event::Done);
    };
    tokio::select! {
        () = follow => {}
        () = transcript.abandoned() => {}
    }
}

/// A whole body; once it is taken, the call counts as read. A server that has written as many bytes as were
/// announced never asks whether more come.
fn plain(status: StatusCode, text: String, reader: Reader) -> Response {
    let bytes = Bytes::from(text);
    let length = HeaderValue::from(bytes.len());
    let state = (Some(bytes), reader);
    let body = stream::unfold(state, |(bytes, mut reader)| async move {
        let bytes = bytes?;
        reader.satisfied();
        Some((Ok::<_, std::convert::Infallible>(bytes), (None, reader)))
    });
    let mut response = Response::new(Body::from_stream(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CONTENT_LENGTH, length);
    response
}

/// A body that begins with white space, which JSON does not mind, until there is something to say. Its status
/// was sent before anybody knew: an error stands in the body alone.
fn slow<D: Dialect>(gathering: Gathering, dialect: D, ping: Duration) -> Response {
    let state = Some((gathering, dialect, false));
    let body = stream::unfold(state, move |state| async move {
        let (mut gathering, mut dialect, ended) = state?;
        if ended {
            gathering.reader.satisfied();
            return None;
        }
        let (text, ended) = match tokio::time::timeout(ping, gathering.all()).await {
            Err(_) => (" ".to_owned(), false),
            Ok(Err(fault)) => (dialect.fault(&fault).to_string(), true),
            Ok(Ok(())) => {
                let replies = gathering.replies();
                (dialect.whole(gathering.reader.head(), replies).to_string(), true)
            }
        };
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(text)), Some((gathering, dialect, ended))))
    });
    let mut response = Response::new(Body::from_stream(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A stream of events on its way to a client.
struct Streaming<D> {
    reader: Reader,
    dialect: D,
    first: Option<String>,
    ended: bool,
    ping: Duration,
}

fn streamed<D: Dialect>(streaming: Streaming<D>) -> Response {
    let body = stream::unfold(streaming, |mut streaming| async move {
        let text = streaming.next().await?;
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(text)), streaming))
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl<D: Dialect> Streaming<D> {
    /// Frames to send next: all that is there, or what comes first, or a sign of life.
    async fn next(&mut self) -> Option<String> {
        if let Some(first) = self.first.take().filter(|first| !first.is_empty()) {
            return Some(first);
        }
        loop {
            if self.ended {
                self.reader.satisfied();
                return None;
            }
            let Ok(event) = tokio::time::timeout(self.ping, self.reader.next()).await else {
                return Some(self.dialect.ping());
            };
            let mut text = String::new();
            let mut event: Option<Arc<Event>> = event;
            while let Some(found) = event {
                text += &self.dialect.event(self.reader.head(), &found);
                self.ended |= found.is_last();
                event = self.reader.ready();
            }
            self.ended |= text.is_empty() && self.reader.is_at_end();
            if !text.is_empty() {
                return Some(text);
            }
        }
    }
}

/// Returns the HTTP status of an error, the same in all APIs.
fn status(kind: ErrorKind) -> StatusCode {
    match kind {
        // Clients retry other statuses, although a retry would fail in the same way.
        ErrorKind::Invalid | ErrorKind::TooLong | ErrorKind::Limit => StatusCode::BAD_REQUEST,
        ErrorKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        ErrorKind::Unauthorized => StatusCode::UNAUTHORIZED,
        ErrorKind::Forbidden => StatusCode::FORBIDDEN,
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::Method => StatusCode::METHOD_NOT_ALLOWED,
        ErrorKind::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        ErrorKind::Gone => StatusCode::GONE,
        ErrorKind::Busy(_) => StatusCode::TOO_MANY_REQUESTS,
        ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Deadline => StatusCode::GATEWAY_TIMEOUT,
        ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
