//! Responses: as one JSON document or as a stream of events, with keep-alive data while the client
//! waits.

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
use levade_call::BatchMembership;
use levade_call::{ApiError, ErrorKind};
use levade_call::{End, Event, Head, MessageTokens, Reader, Token, Transcript};

/// A completion, collected from the events of a call until its end.
#[derive(Debug)]
pub(crate) struct CollectedCompletion {
    /// Prompt tokens with their log-probabilities. Empty if the request does not ask for them. The
    /// log-probability of the first token is NaN.
    pub prompt: Vec<Token>,
    /// Sampled tokens of the completion.
    pub tokens: Vec<Token>,
    /// Tokens of each part of the message's text, without reasoning and tool calls.
    pub message: Vec<Vec<Token>>,
    /// End of the completion: the message, the finish reason and the token counts.
    pub end: End,
}

/// Writer of responses in the format of one API.
pub(crate) trait ApiDialect: Send + 'static {
    /// Returns the body of an error response.
    fn error_body(&self, error: &ApiError) -> Value;

    /// Returns the body of a response that is not streamed.
    fn complete_body(&mut self, head: &Head, completions: Vec<CollectedCompletion>) -> Value;

    /// Returns the frames at the start of a streamed response. Can be empty.
    fn start_frames(&mut self, head: &Head) -> String;

    /// Returns the frames of a stream that report `event`. Empty if the API does not report this
    /// event.
    fn event_frames(&mut self, head: &Head, event: &Event) -> String;

    /// Returns a stream frame that keeps the connection of a waiting client alive.
    fn ping_frame(&self) -> String {
        ": ping\n\n".into()
    }
}

/// Formats a frame of a server-sent event stream. `name` is the event's name. `None` if the API
/// does not name events.
pub(crate) fn format_frame(name: Option<&str>, data: &Value) -> String {
    match name {
        Some(name) => format!("event: {name}\ndata: {data}\n\n"),
        None => format!("data: {data}\n\n"),
    }
}

/// Returns an HTTP response with the JSON document `value`.
pub(crate) fn json_response(status: StatusCode, value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// Converts an HTTP server's rejection of a request into an error of the called API.
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

/// Returns an HTTP error response with the JSON body `body`. It has a `retry-after` header if the
/// gateway is busy.
pub(crate) fn error_response(error: &ApiError, body: &Value) -> Response {
    let mut response = json_response(status_code(error.kind), body);
    if let ErrorKind::Busy(after) = error.kind {
        let seconds = HeaderValue::from(after.as_secs().max(1));
        response.headers_mut().insert(header::RETRY_AFTER, seconds);
    }
    if error.kind.is_final() {
        // Clients of OpenAI's and Anthropic's APIs decide by this header, whatever the status is.
        let no = HeaderValue::from_static("false");
        response.headers_mut().insert(HeaderName::from_static("x-should-retry"), no);
    }
    response
}

/// Writes the HTTP response to a call, in the format of `dialect`: as a stream if `streams` is
/// true, otherwise as one document. If no other data is sent for the duration `ping`, the client
/// receives a keep-alive message.
pub(crate) async fn write_response<D: ApiDialect>(
    started: Result<Reader, ApiError>,
    mut dialect: D,
    streams: bool,
    ping: Duration,
) -> Response {
    let reader = match started {
        Ok(reader) => reader,
        Err(error) => return error_response(&error, &dialect.error_body(&error)),
    };
    if streams {
        let first = dialect.start_frames(reader.head());
        return stream_response(StreamWriter {
            reader,
            dialect,
            first: Some(first),
            ended: false,
            ping,
        });
    }
    let mut gathering = CompletionCollector::new(reader);
    match tokio::time::timeout(ping, gathering.read_all()).await {
        Ok(Ok(())) => {
            let completions = gathering.take_completions();
            let bytes = dialect.complete_body(gathering.reader.head(), completions).to_string();
            full_response(StatusCode::OK, bytes, gathering.reader)
        }
        Ok(Err(error)) => error_response(&error, &dialect.error_body(&error)),
        Err(_) => keep_alive_response(gathering, dialect, ping),
    }
}

/// A completion whose end has not been read yet.
#[derive(Default)]
struct PartialCompletion {
    prompt: Vec<Token>,
    tokens: Vec<Token>,
    message: MessageTokens,
    end: Option<End>,
}

/// Reader that collects the completions of a call.
struct CompletionCollector {
    reader: Reader,
    completions: Vec<PartialCompletion>,
}

impl CompletionCollector {
    fn new(reader: Reader) -> Self {
        let completions = (0..reader.head().n).map(|_| Default::default()).collect();
        CompletionCollector { reader, completions }
    }

    /// Reads the events of a call until its end. Cancel safe: the next call of this function
    /// continues with the next event.
    async fn read_all(&mut self) -> Result<(), ApiError> {
        while let Some(event) = self.reader.next().await {
            match &*event {
                Event::Prompt { choice, tokens } => {
                    self.completions[*choice].prompt.extend(tokens.iter().cloned());
                }
                Event::Delta { choice, deltas, tokens } => {
                    let completion = &mut self.completions[*choice];
                    completion.tokens.extend(tokens.iter().cloned());
                    completion.message.add(deltas, tokens);
                }
                Event::Ended { choice, end } => {
                    self.completions[*choice].end = Some((**end).clone())
                }
                Event::Failed(error) => return Err(error.clone()),
                Event::Done => {}
            }
        }
        Ok(())
    }

    fn take_completions(&mut self) -> Vec<CollectedCompletion> {
        let completions = std::mem::take(&mut self.completions).into_iter();
        completions
            .filter_map(|PartialCompletion { prompt, tokens, mut message, end }| {
                Some(CollectedCompletion { prompt, tokens, message: message.take(), end: end? })
            })
            .collect()
    }
}

/// Waits for the end of a call, and collects its completions.
///
/// # Errors
/// Returns the error of the call if the call fails.
async fn gather(reader: Reader) -> Result<(Head, Vec<CollectedCompletion>), ApiError> {
    let mut gathering = CompletionCollector::new(reader);
    gathering.read_all().await?;
    gathering.reader.mark_received();
    Ok((gathering.reader.head().clone(), gathering.take_completions()))
}

/// Executes the calls of one request body concurrently, and waits until all have ended. If one call
/// is rejected, no call is recorded.
///
/// # Errors
/// Returns the error of the first call, in order, that failed or was rejected.
pub(crate) async fn gather_all(
    gateway: &Gateway,
    caller: &Caller,
    calls: Vec<Call>,
) -> Result<Vec<(Head, Vec<CollectedCompletion>)>, ApiError> {
    let readers = start_all(gateway, caller, calls).await?;
    join_all(readers.into_iter().map(gather)).await.into_iter().collect()
}

/// Starts the calls of one request body. If one call is rejected, no call is recorded.
async fn start_all(
    gateway: &Gateway,
    caller: &Caller,
    calls: Vec<Call>,
) -> Result<Vec<Reader>, ApiError> {
    let (outcome, batch) = BatchMembership::new();
    let started = join_all(calls.into_iter().enumerate().map(async |(index, call)| {
        // Equal prompts of one body are separate calls, so each gets its own hash.
        let body = caller.body.map(|body| body.wrapping_add(index as u128 + 1));
        gateway.call_in_batch(&Caller { body, ..caller.clone() }, call, Some(batch.clone())).await
    }))
    .await;
    let readers = started.into_iter().collect::<Result<Vec<Reader>, ApiError>>();
    outcome.send(readers.is_ok());
    readers
}

/// Executes the calls of one request body concurrently, and merges their events into one reader.
/// The choices of the merged call are the choices of the calls, in order.
///
/// # Errors
/// Returns the error of the first call, in order, that is rejected. In this case no call is
/// recorded.
pub(crate) async fn merge_all(
    gateway: &Gateway,
    caller: &Caller,
    calls: Vec<Call>,
) -> Result<EventMerger, ApiError> {
    let readers = start_all(gateway, caller, calls).await?;
    let heads: Vec<Head> = readers.iter().map(|reader| reader.head().clone()).collect();
    let first = heads[0].clone();
    let head = Head {
        prompt: Vec::new(),
        origin: None,
        n: heads.iter().map(|head| head.n).sum(),
        ..first
    };
    let transcript = Transcript::new(head);
    let reader = transcript.read();
    let prompts = heads.into_iter().map(|head| head.prompt).collect();
    tokio::spawn(follow_all(readers, transcript));
    Ok(EventMerger { reader, prompts })
}

/// Several calls whose events are read as the events of one call.
pub(crate) struct EventMerger {
    /// Reader of the merged events of all calls.
    pub reader: Reader,
    /// Prompts of the calls as token ids, in order.
    pub prompts: Vec<Vec<u32>>,
}

/// Writes the events of several calls into one transcript, until all calls have ended or one call
/// fails, or the reader of the transcript is dropped.
async fn follow_all(readers: Vec<Reader>, transcript: Arc<Transcript>) {
    let _ending = transcript.end_guard();
    let mut offset = 0;
    let streams = readers.into_iter().map(|reader| {
        let first = offset;
        offset += reader.head().n;
        Box::pin(stream::unfold(reader, move |mut reader| async move {
            let event = reader.next().await?;
            if event.is_last() {
                // The merged transcript tracks whether its own reader received the end.
                reader.mark_received();
            }
            Some(((first, event), reader))
        }))
    });
    let mut events = stream::select_all(streams);
    let follow = async {
        while let Some((first, event)) = events.next().await {
            match &*event {
                Event::Prompt { choice, tokens } => {
                    transcript
                        .push(Event::Prompt { choice: first + choice, tokens: tokens.clone() });
                }
                Event::Delta { choice, deltas, tokens } => {
                    let deltas = deltas.clone();
                    let tokens = tokens.clone();
                    transcript.push(Event::Delta { choice: first + choice, deltas, tokens });
                }
                Event::Ended { choice, end } => {
                    transcript.push(Event::Ended { choice: first + choice, end: end.clone() });
                }
                Event::Failed(error) => return transcript.push(Event::Failed(error.clone())),
                Event::Done => {}
            }
        }
        transcript.push(Event::Done);
    };
    tokio::select! {
        () = follow => {}
        () = transcript.wait_until_abandoned() => {}
    }
}

/// Returns an HTTP response with the complete body `text`. The call counts as read when the HTTP
/// server takes the body, since the server does not poll a body again after it has written
/// `content-length` bytes.
fn full_response(status: StatusCode, text: String, reader: Reader) -> Response {
    let bytes = Bytes::from(text);
    let length = HeaderValue::from(bytes.len());
    let state = (Some(bytes), reader);
    let body = stream::unfold(state, |(bytes, mut reader)| async move {
        let bytes = bytes?;
        reader.mark_received();
        Some((Ok::<_, std::convert::Infallible>(bytes), (None, reader)))
    });
    let mut response = Response::new(Body::from_stream(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CONTENT_LENGTH, length);
    response
}

/// Returns an HTTP response whose body starts with spaces, which JSON permits, until the call has
/// ended. The status has been sent by then, so an error appears only in the body.
fn keep_alive_response<D: ApiDialect>(
    gathering: CompletionCollector,
    dialect: D,
    ping: Duration,
) -> Response {
    let state = Some((gathering, dialect, false));
    let body = stream::unfold(state, move |state| async move {
        let (mut gathering, mut dialect, ended) = state?;
        if ended {
            gathering.reader.mark_received();
            return None;
        }
        let (text, ended) = match tokio::time::timeout(ping, gathering.read_all()).await {
            Err(_) => (" ".to_owned(), false),
            Ok(Err(error)) => (dialect.error_body(&error).to_string(), true),
            Ok(Ok(())) => {
                let completions = gathering.take_completions();
                (dialect.complete_body(gathering.reader.head(), completions).to_string(), true)
            }
        };
        Some((
            Ok::<_, std::convert::Infallible>(Bytes::from(text)),
            Some((gathering, dialect, ended)),
        ))
    });
    let mut response = Response::new(Body::from_stream(body));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// State of a streamed response between two frames.
struct StreamWriter<D> {
    reader: Reader,
    dialect: D,
    first: Option<String>,
    ended: bool,
    ping: Duration,
}

fn stream_response<D: ApiDialect>(streaming: StreamWriter<D>) -> Response {
    let body = stream::unfold(streaming, |mut streaming| async move {
        let text = streaming.next_frames().await?;
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(text)), streaming))
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl<D: ApiDialect> StreamWriter<D> {
    /// Returns the next text of a streamed response: the initial frames, all frames that are ready,
    /// or a keep-alive frame after the ping interval. Returns `None` after the last event.
    async fn next_frames(&mut self) -> Option<String> {
        if let Some(first) = self.first.take().filter(|first| !first.is_empty()) {
            return Some(first);
        }
        loop {
            if self.ended {
                self.reader.mark_received();
                return None;
            }
            let Ok(event) = tokio::time::timeout(self.ping, self.reader.next()).await else {
                return Some(self.dialect.ping_frame());
            };
            let mut text = String::new();
            let mut event: Option<Arc<Event>> = event;
            while let Some(found) = event {
                text += &self.dialect.event_frames(self.reader.head(), &found);
                self.ended |= found.is_last();
                event = self.reader.try_next();
            }
            self.ended |= text.is_empty() && self.reader.is_at_end();
            if !text.is_empty() {
                return Some(text);
            }
        }
    }
}

/// Returns the HTTP status code of an error. All APIs use the same codes.
fn status_code(kind: ErrorKind) -> StatusCode {
    match kind {
        // Clients retry other statuses, although a retry would fail in the same way.
        ErrorKind::Invalid | ErrorKind::TooLong | ErrorKind::Limit => StatusCode::BAD_REQUEST,
        ErrorKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        ErrorKind::Unauthorized => StatusCode::UNAUTHORIZED,
        ErrorKind::Forbidden => StatusCode::FORBIDDEN,
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::Method => StatusCode::METHOD_NOT_ALLOWED,
        ErrorKind::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        ErrorKind::AttemptEnded => StatusCode::GONE,
        ErrorKind::Busy(_) => StatusCode::TOO_MANY_REQUESTS,
        ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Deadline => StatusCode::GATEWAY_TIMEOUT,
        ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
