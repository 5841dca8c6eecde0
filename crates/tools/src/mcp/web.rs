//! MCP transport over streamable HTTP, with the client of `levade-http`.

mod body;

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt};
use futures_util::{Stream, TryStreamExt, future};
use http_body_util::{BodyExt, BodyStream, Full};
use hyper::body::{Body, Incoming};
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue,
    LOCATION,
};
use hyper::{Method, Request, Response, StatusCode};
use levade_http::{Client, HttpError, UnpackError, unpack};
use rmcp::model::{ClientJsonRpcMessage, JsonRpcMessage, RequestId, ServerJsonRpcMessage};
use rmcp::transport::common::http_header::{
    EVENT_STREAM_MIME_TYPE, HEADER_LAST_EVENT_ID, HEADER_SESSION_ID, JSON_MIME_TYPE,
};
use rmcp::transport::streamable_http_client::{
    StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse,
    StreamableHttpResponseLimits,
};
use sse_stream::{Error as SseError, Sse, SseStream};

use super::ledger::RequestLedger;
use super::lenient;
use crate::web::retries::{INITIAL_RETRY_WAIT, MAX_RETRY_WAIT, retry_after};
use body::*;

type Error = StreamableHttpError<HttpError>;
type Headers = HashMap<HeaderName, HeaderValue>;

/// Maximum number of bytes of an HTTP error response that are read.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// Maximum number of characters of a response that an error message shows.
const MAX_SHOWN_CHARS: usize = 400;

/// Timeout between chunks of a response body of known length. A server that announces a length has
/// the complete body already.
const STALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of retries of a message that a busy server has not accepted.
const MAX_RETRIES: u32 = 2;

/// HTTP client of one MCP connection.
#[derive(Clone)]
pub(super) struct HttpTransport {
    client: Client,
    /// Whether requests carry an API key.
    has_key: bool,
    ledger: Arc<RequestLedger>,
    /// Last request for which a new session was opened after HTTP status 400 or 404.
    renewed: Arc<Mutex<Option<RequestId>>>,
    /// Requests whose events have ids, with the id of the last event, from which the SDK resumes
    /// the stream.
    resumable: ResumableRequests,
}

/// Requests to a server, each with the id of its last event.
type ResumableRequests = Arc<Mutex<Vec<(RequestId, String)>>>;

impl HttpTransport {
    /// Creates a client that sends `headers` with its requests and registers messages in `ledger`.
    pub fn new(
        client: Client,
        headers: &[(HeaderName, HeaderValue)],
        ledger: Arc<RequestLedger>,
    ) -> Self {
        let has_key = headers.iter().any(|(name, _)| name == AUTHORIZATION);
        HttpTransport {
            client,
            has_key,
            ledger,
            renewed: Arc::default(),
            resumable: Arc::default(),
        }
    }

    async fn send(
        &self,
        (method, uri, accept): (Method, &str, &'static str),
        session: Option<&str>,
        key: Option<String>,
        headers: Headers,
        body: Bytes,
    ) -> Result<Response<Incoming>, Error> {
        let mut request = Request::builder().method(&method).uri(uri).header(ACCEPT, accept);
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, JSON_MIME_TYPE);
        }
        if let Some(session) = session {
            request = request.header(HEADER_SESSION_ID, session);
        }
        if let Some(key) = key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.body(Full::new(body)).map_err(|error| {
            StreamableHttpError::Client(HttpError::Invalid(format!(
                "cannot send a request to {uri}: {error}"
            )))
        })?;
        let mut wait = INITIAL_RETRY_WAIT;
        let mut tries = 0;
        loop {
            let response =
                self.client.request(request.clone()).await.map_err(StreamableHttpError::Client)?;
            let is_busy = matches!(
                response.status(),
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
            );
            let requested = retry_after(response.headers());
            if !is_busy
                || method != Method::POST
                || tries == MAX_RETRIES
                || requested > Some(MAX_RETRY_WAIT)
            {
                return Ok(response);
            }
            self.ledger.note_wait(format!("the server responds with HTTP {}", response.status()));
            tokio::time::sleep(requested.unwrap_or(wait)).await;
            wait = wait.mul_f64(1.5);
            tries += 1;
        }
    }

    /// Processes the HTTP response to a request. Returns the server's message, or an error response
    /// with the reason.
    async fn read_response(
        &self,
        id: RequestId,
        in_session: bool,
        response: Response<Incoming>,
        limits: StreamableHttpResponseLimits,
    ) -> Result<StreamableHttpPostResponse, Error> {
        let (head, body) = response.into_parts();
        let session =
            head.headers.get(HEADER_SESSION_ID).and_then(|id| id.to_str().ok()).map(str::to_owned);
        let fail = |why: String| {
            Ok(StreamableHttpPostResponse::Json(
                self.ledger.fail_request(&id, why),
                session.clone(),
            ))
        };
        if !head.status.is_success() {
            let (text, _) = read(body, MAX_ERROR_BYTES).await.unwrap_or_default();
            let text = unpack_body(&head.headers, text, MAX_ERROR_BYTES).unwrap_or_default();
            let error = lenient::parse(&text).ok().filter(|error| error.get("error").is_some());
            let is_key = matches!(head.status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
            let is_own = error.as_ref().is_some_and(|error| error["id"].is_number());
            let is_expired = match head.status {
                StatusCode::NOT_FOUND => true,
                StatusCode::BAD_REQUEST => !is_own,
                _ => false,
            };
            if is_expired && in_session && self.may_renew_session(&id) {
                return Err(StreamableHttpError::SessionExpired);
            }
            if error.is_some_and(|error| error.get("jsonrpc").is_some()) && !is_key {
                let read = self.ledger.read(&text, Some(&id));
                if let Some(message) = read.into_iter().find(|message| is_response(message, &id)) {
                    return Ok(StreamableHttpPostResponse::Json(message, session));
                }
            }
            return fail(self.rejection_text(head.status, &head.headers, &text));
        }
        let is_stream = has_content_type(&head.headers, EVENT_STREAM_MIME_TYPE);
        if is_stream && content_encoding(&head.headers).is_empty() {
            let events = self
                .parse_events(event_stream(body_chunks(body), limits.max_sse_event_size), Some(id));
            return Ok(StreamableHttpPostResponse::Sse(events, session));
        }
        let text = match read(body, limits.max_json_response_size).await {
            Ok((text, true)) => text,
            Ok((_, false)) => {
                return fail(format!(
                    "the server's response is longer than {} bytes",
                    limits.max_json_response_size
                ));
            }
            Err(StreamableHttpError::Client(error)) => return fail(error.to_string()),
            Err(error) => return Err(error),
        };
        let text = match unpack_body(&head.headers, text, limits.max_json_response_size) {
            Ok(text) => text,
            Err(why) => return fail(why),
        };
        if is_stream {
            let all = stream::once(future::ready(Ok(Bytes::from(text))));
            let events = self.parse_events(event_stream(all, limits.max_sse_event_size), Some(id));
            return Ok(StreamableHttpPostResponse::Sse(events, session));
        }
        let read = self.ledger.read(&text, Some(&id));
        if let Some(message) = read.into_iter().find(|message| is_response(message, &id)) {
            return Ok(StreamableHttpPostResponse::Json(message, session));
        }
        if text.trim_ascii().is_empty() {
            return fail(match head.status {
                status @ (StatusCode::ACCEPTED | StatusCode::NO_CONTENT) => {
                    format!("the server accepted the request without a response (HTTP {status})")
                }
                status => format!("the server's response is empty (HTTP {status})"),
            });
        }
        match (lenient::parse(&text), has_content_type(&head.headers, JSON_MIME_TYPE)) {
            (Ok(_), _) => fail(format!(
                "the server's response does not belong to the request {id}: {}",
                shorten(&text)
            )),
            (Err(why), true) => {
                fail(format!("the server's response is not JSON: {why}: {}", shorten(&text)))
            }
            (Err(_), false) => {
                let kind = content_type(&head.headers).unwrap_or_else(|| "no content type".into());
                fail(format!(
                    "the server responded with {kind}, which is not a message of this protocol (is \
                     `url` the address of its MCP endpoint?): {}",
                    shorten(&text)
                ))
            }
        }
    }

    /// Returns the pending request whose last event has the id `last`, if there is one.
    fn resumed_request(&self, last: &str) -> Option<RequestId> {
        let resumable = self.resumable.lock().unwrap_or_else(PoisonError::into_inner);
        let found =
            resumable.iter().find(|(id, known)| known == last && self.ledger.is_pending(id));
        found.map(|(id, _)| id.clone())
    }

    /// Returns whether HTTP status 400 or 404 may mean that the session has expired. The result is
    /// true once per request.
    fn may_renew_session(&self, id: &RequestId) -> bool {
        let mut renewed = self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
        renewed.replace(id.clone()).as_ref() != Some(id)
    }

    /// Describes an HTTP error status and how to fix the cause.
    fn rejection_text(&self, status: StatusCode, headers: &HeaderMap, text: &[u8]) -> String {
        let text = match shorten(text) {
            text if text.is_empty() => String::new(),
            text => format!(": {text}"),
        };
        let way_out = match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN if self.has_key => {
                "; the server does not accept the key in the environment variable that key_env \
                 names"
                    .to_owned()
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                "; set key_env to the environment variable that holds the server's key".to_owned()
            }
            status if status.is_redirection() => match headers.get(LOCATION) {
                Some(to) => format!(
                    "; the server redirects to {:?}: set url to that address",
                    String::from_utf8_lossy(to.as_bytes())
                ),
                None => String::new(),
            },
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
                "; is `url` the address of the server's MCP endpoint?".to_owned()
            }
            _ => String::new(),
        };
        format!("HTTP {status}{text}{way_out}")
    }

    /// Parses the MCP messages in events. If the events end before the response to `request` and
    /// cannot be resumed, an error response to `request` follows.
    fn parse_events(
        &self,
        events: BoxStream<'static, Result<Sse, SseError>>,
        request: Option<RequestId>,
    ) -> BoxStream<'static, Result<Sse, SseError>> {
        let messages = MessageStream {
            events,
            request,
            ledger: Arc::clone(&self.ledger),
            read: VecDeque::new(),
            noise: None,
            can_resume: false,
            resumable: Arc::clone(&self.resumable),
        };
        stream::unfold(messages, |mut messages| async { Some((messages.next().await?, messages)) })
            .boxed()
    }
}

/// Stream of server-sent events, which parses the MCP messages in them.
struct MessageStream {
    events: BoxStream<'static, Result<Sse, SseError>>,
    /// Request to which the events respond. `None` if they respond to no request, and after they
    /// end.
    request: Option<RequestId>,
    ledger: Arc<RequestLedger>,
    /// Events that have been parsed but not yet passed on.
    read: VecDeque<Sse>,
    /// Text of the last event that contains no message; `None` if there is none.
    noise: Option<String>,
    /// Whether the server gives its events ids, from which the SDK can resume the stream.
    can_resume: bool,
    resumable: ResumableRequests,
}

impl MessageStream {
    async fn next(&mut self) -> Option<Result<Sse, SseError>> {
        if let Some(event) = self.read.pop_front() {
            return Some(Ok(event));
        }
        let event = match self.events.next().await {
            Some(Ok(event)) => event,
            ended => {
                let pending =
                    self.request.take().filter(|id| self.ledger.is_pending(id) && !self.can_resume);
                let Some(id) = pending else { return ended };
                let why = match ended {
                    Some(Err(error)) => {
                        format!(
                            "the server's response was interrupted: {}",
                            levade_http::causes(&error)
                        )
                    }
                    _ => "the server's events ended without the response".to_owned(),
                };
                let noise = self.noise.take().map(|text| format!("; the last event is {text:?}"));
                let why = why + &noise.unwrap_or_default();
                return Some(Ok(Sse::default().data(text_of(&self.ledger.fail_request(&id, why)))));
            }
        };
        if let Some(last) = event.id.clone().filter(|id| !id.is_empty()) {
            self.can_resume = true;
            if let Some(request) = &self.request {
                let mut resumable = self.resumable.lock().unwrap_or_else(PoisonError::into_inner);
                resumable.retain(|(known, _)| known != request && self.ledger.is_pending(known));
                resumable.push((request.clone(), last));
            }
        }
        let data = event.data.as_deref().unwrap_or_default();
        // A truncated event is sent again after resuming.
        let is_truncated = self.can_resume && lenient::parse(data.as_bytes()).is_err();
        let messages = if is_truncated {
            Vec::new()
        } else {
            self.ledger.read(data.as_bytes(), self.request.as_ref())
        };
        if messages.is_empty() && !is_truncated && !data.trim().is_empty() {
            self.noise = Some(shorten(data.as_bytes()));
        }
        // The SDK accepts messages only from events with this name or without a name.
        let named = Sse { event: None, ..event.clone() };
        self.read = messages
            .iter()
            .map(|message| Sse { data: Some(text_of(message)), ..named.clone() })
            .collect();
        // An event without a message still carries the position from which to resume.
        Some(Ok(self.read.pop_front().unwrap_or(Sse { data: None, ..event })))
    }
}

/// Returns whether a message is the response to a request.
fn is_response(message: &ServerJsonRpcMessage, id: &RequestId) -> bool {
    match message {
        JsonRpcMessage::Response(response) => response.id == *id,
        JsonRpcMessage::Error(error) => error.id.as_ref() == Some(id),
        _ => false,
    }
}

fn text_of(message: &ServerJsonRpcMessage) -> String {
    serde_json::to_string(message).unwrap_or_default()
}

impl StreamableHttpClient for HttpTransport {
    type Error = HttpError;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        auth_header: Option<String>,
        custom_headers: Headers,
    ) -> Result<StreamableHttpPostResponse, Error> {
        let limits = StreamableHttpResponseLimits::default();
        self.post_message_with_response_limits(
            uri,
            message,
            session_id,
            auth_header,
            custom_headers,
            limits,
        )
        .await
    }

    async fn post_message_with_response_limits(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        auth_header: Option<String>,
        custom_headers: Headers,
        limits: StreamableHttpResponseLimits,
    ) -> Result<StreamableHttpPostResponse, Error> {
        let body = serde_json::to_vec(&message)?.into();
        let accept = "application/json, text/event-stream";
        let session = session_id.as_deref();
        self.ledger.register(&message);
        let sent = (Method::POST, &*uri, accept);
        let response = self.send(sent, session, auth_header, custom_headers, body).await?;
        if let JsonRpcMessage::Request(request) = message {
            return self.read_response(request.id, session.is_some(), response, limits).await;
        }
        // A message that needs no response counts as accepted with any success status.
        match response.status() {
            status if status.is_success() => Ok(StreamableHttpPostResponse::Accepted),
            StatusCode::NOT_FOUND if session.is_some() => Err(StreamableHttpError::SessionExpired),
            status => {
                let headers = response.headers().clone();
                let (text, _) =
                    read(response.into_body(), MAX_ERROR_BYTES).await.unwrap_or_default();
                let why = self.rejection_text(status, &headers, &text);
                Err(StreamableHttpError::UnexpectedServerResponse(Cow::Owned(why)))
            }
        }
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session_id: Arc<str>,
        auth_header: Option<String>,
        custom_headers: Headers,
    ) -> Result<(), Error> {
        let sent = (Method::DELETE, &*uri, "*/*");
        let response =
            self.send(sent, Some(&session_id), auth_header, custom_headers, Bytes::new()).await?;
        match response.status() {
            status if status.is_success() => Ok(()),
            // The server keeps its sessions according to its own policy.
            StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_FOUND => Ok(()),
            status => Err(status_error(status, "the server does not end the session")),
        }
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        auth_header: Option<String>,
        mut custom_headers: Headers,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, Error> {
        let request = last_event_id.as_ref().and_then(|last| self.resumed_request(last));
        let last = last_event_id.and_then(|id| HeaderValue::from_str(&id).ok());
        if let (Some(last), Ok(name)) = (last, HeaderName::try_from(HEADER_LAST_EVENT_ID)) {
            custom_headers.insert(name, last);
        }
        let sent = (Method::GET, &*uri, EVENT_STREAM_MIME_TYPE);
        let session = session_id.as_deref();
        let response = self.send(sent, session, auth_header, custom_headers, Bytes::new()).await?;
        match response.status() {
            // The rest of the response is lost.
            status if let (true, Some(id)) = (status.is_client_error(), request) => {
                let why = format!(
                    "the server's events ended without the response, and cannot be resumed (HTTP \
                     {status})"
                );
                let event = Sse::default().data(text_of(&self.ledger.fail_request(&id, why)));
                Ok(stream::once(future::ready(Ok(event))).boxed())
            }
            StatusCode::METHOD_NOT_ALLOWED => Err(StreamableHttpError::ServerDoesNotSupportSse),
            StatusCode::NOT_FOUND if session.is_some() => Err(StreamableHttpError::SessionExpired),
            status if !status.is_success() => {
                Err(status_error(status, "the server has no stream of events"))
            }
            _ if !has_content_type(response.headers(), EVENT_STREAM_MIME_TYPE) => {
                Err(StreamableHttpError::UnexpectedContentType(content_type(response.headers())))
            }
            _ => Ok(self.parse_events(
                event_stream(body_chunks(response.into_body()), super::MAX_RESPONSE_BYTES),
                None,
            )),
        }
    }
}

fn status_error(status: StatusCode, problem: &str) -> Error {
    StreamableHttpError::UnexpectedServerResponse(Cow::Owned(format!("{problem} (HTTP {status})")))
}

#[cfg(test)]
#[path = "web_tests.rs"]
mod tests;
