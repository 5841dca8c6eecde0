//! Streamable HTTP, asked through the room `http`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use dressage_http::{Client, HttpError};
use futures_util::stream::{BoxStream, StreamExt};
use futures_util::{Stream, TryStreamExt, future};
use http_body_util::{BodyExt, BodyStream, Full};
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, WWW_AUTHENTICATE,
};
use hyper::{Method, Request, Response, StatusCode};
use rmcp::model::{ClientJsonRpcMessage, ClientRequest, ErrorData, JsonRpcMessage, ServerJsonRpcMessage};
use rmcp::transport::common::http_header::{
    EVENT_STREAM_MIME_TYPE, HEADER_LAST_EVENT_ID, HEADER_SESSION_ID, JSON_MIME_TYPE,
};
use rmcp::transport::streamable_http_client::{
    StreamableHttpClient, StreamableHttpError, StreamableHttpPostResponse, StreamableHttpResponseLimits,
};
use sse_stream::{Error as SseError, Sse, SseStream};

type Error = StreamableHttpError<HttpError>;
type Headers = HashMap<HeaderName, HeaderValue>;

/// Bytes of an answer that tells of an error that are read.
const MOST_ERROR_BYTES: usize = 64 << 10;

/// Characters of one that are shown.
const MOST_SHOWN: usize = 400;

/// The client, as the SDK asks it.
#[derive(Clone)]
pub(super) struct Web(pub Client);

impl Web {
    async fn send(
        &self,
        (method, uri, accept): (Method, &str, &'static str),
        session: Option<&str>,
        key: Option<String>,
        headers: Headers,
        body: Bytes,
    ) -> Result<Response<Incoming>, Error> {
        let invalid = |error: &dyn std::fmt::Display| {
            StreamableHttpError::Client(HttpError::Invalid(format!("{uri} cannot be asked: {error}")))
        };
        let mut request = Request::builder().method(method).uri(uri).header(ACCEPT, accept);
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
        let request = request.body(Full::new(body)).map_err(|error| invalid(&error))?;
        self.0.request(request).await.map_err(StreamableHttpError::Client)
    }
}

impl StreamableHttpClient for Web {
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
        self.post_message_with_response_limits(uri, message, session_id, auth_header, custom_headers, limits)
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
        let sent = (Method::POST, &*uri, accept);
        let response = self.send(sent, session, auth_header, custom_headers, body).await?;
        let (head, body) = response.into_parts();
        if matches!(head.status, StatusCode::ACCEPTED | StatusCode::NO_CONTENT) {
            return Ok(StreamableHttpPostResponse::Accepted);
        }
        if head.status == StatusCode::NOT_FOUND && session.is_some() {
            return Err(StreamableHttpError::SessionExpired);
        }
        let answered = head.headers.get(HEADER_SESSION_ID).and_then(|id| id.to_str().ok()).map(str::to_owned);
        if !head.status.is_success() {
            return refused(&message, session.is_some(), (head.status, &head.headers), body, answered).await;
        }
        if is(&head.headers, EVENT_STREAM_MIME_TYPE) {
            return Ok(StreamableHttpPostResponse::Sse(events(body, limits.max_sse_event_size), answered));
        }
        let is_request = matches!(message, JsonRpcMessage::Request(_));
        if !is(&head.headers, JSON_MIME_TYPE) {
            // What needs no answer is taken, whatever is said to it.
            return match is_request {
                true => Err(StreamableHttpError::UnexpectedContentType(content_type(&head.headers))),
                false => Ok(StreamableHttpPostResponse::Accepted),
            };
        }
        let (text, is_whole) = read(body, limits.max_json_response_size).await?;
        if !is_whole {
            return Err(StreamableHttpError::ResponseBodyTooLarge {
                max_size: limits.max_json_response_size,
            });
        }
        match serde_json::from_slice::<ServerJsonRpcMessage>(&text) {
            Ok(answer) => Ok(StreamableHttpPostResponse::Json(answer, answered)),
            Err(_) if !is_request => Ok(StreamableHttpPostResponse::Accepted),
            Err(error) => {
                let why = format!("it is no message of this protocol ({error}): {}", shown(&text));
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
        let response = self.send(sent, Some(&session_id), auth_header, custom_headers, Bytes::new()).await?;
        match response.status() {
            status if status.is_success() => Ok(()),
            // It keeps its sessions for as long as it likes.
            StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_FOUND => Ok(()),
            status => Err(told(status, "it does not end the session")),
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
        let last = last_event_id.and_then(|id| HeaderValue::from_str(&id).ok());
        if let (Some(last), Ok(name)) = (last, HeaderName::try_from(HEADER_LAST_EVENT_ID)) {
            custom_headers.insert(name, last);
        }
        let sent = (Method::GET, &*uri, EVENT_STREAM_MIME_TYPE);
        let session = session_id.as_deref();
        let response = self.send(sent, session, auth_header, custom_headers, Bytes::new()).await?;
        match response.status() {
            StatusCode::METHOD_NOT_ALLOWED => Err(StreamableHttpError::ServerDoesNotSupportSse),
            StatusCode::NOT_FOUND if session.is_some() => Err(StreamableHttpError::SessionExpired),
            status if !status.is_success() => Err(told(status, "it has no stream of events")),
            _ if !is(response.headers(), EVENT_STREAM_MIME_TYPE) => {
                Err(StreamableHttpError::UnexpectedContentType(content_type(response.headers())))
            }
            _ => Ok(events(response.into_body(), super::MOST_BYTES)),
        }
    }
}

fn told(status: StatusCode, what: &str) -> Error {
    StreamableHttpError::UnexpectedServerResponse(Cow::Owned(format!("{what} (HTTP {status})")))
}

/// Reads the answer to a message that was turned away.
async fn refused(
    message: &ClientJsonRpcMessage,
    in_session: bool,
    (status, headers): (StatusCode, &HeaderMap),
    body: Incoming,
    answered: Option<String>,
) -> Result<StreamableHttpPostResponse, Error> {
    let (text, _) = read(body, MOST_ERROR_BYTES).await.unwrap_or_default();
    let is_key = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
    let error = match serde_json::from_slice::<ServerJsonRpcMessage>(&text) {
        Ok(JsonRpcMessage::Error(error)) if !is_key => Some(error),
        _ => None,
    };
    // Servers of the older generation turn the question away that only the newer one knows, in whatever way,
    // and without its id.
    if let JsonRpcMessage::Request(request) = message
        && matches!(request.request, ClientRequest::DiscoverRequest(_))
        && !in_session
        && status.is_client_error()
        && !is_key
    {
        let error = error.map(|error| error.error);
        let error = error
            .unwrap_or_else(|| ErrorData::invalid_request(format!("HTTP {status}: {}", shown(&text)), None));
        let answer = ServerJsonRpcMessage::error(error, Some(request.id.clone()));
        return Ok(StreamableHttpPostResponse::Json(answer, None));
    }
    if let Some(error) = error {
        return Ok(StreamableHttpPostResponse::Json(JsonRpcMessage::Error(error), answered));
    }
    let wants = match headers.get(WWW_AUTHENTICATE) {
        Some(_) if is_key => "; it wants a key",
        _ => "",
    };
    let why = format!("HTTP {status}{wants}: {}", shown(&text));
    Err(StreamableHttpError::UnexpectedServerResponse(Cow::Owned(why)))
}

fn content_type(headers: &HeaderMap) -> Option<String> {
    headers.get(CONTENT_TYPE).map(|kind| String::from_utf8_lossy(kind.as_bytes()).into_owned())
}

fn is(headers: &HeaderMap, wanted: &str) -> bool {
    let kind = content_type(headers).unwrap_or_default();
    kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case(wanted)
}

fn shown(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    match text.trim().char_indices().nth(MOST_SHOWN) {
        Some((end, _)) => format!("{}…", &text.trim()[..end]),
        None => text.trim().to_owned(),
    }
}

/// The beginning of a body, and whether it is all.
async fn read(mut body: Incoming, most: usize) -> Result<(Vec<u8>, bool), Error> {
    let mut all = Vec::new();
    while let Some(frame) = body.frame().await {
        let broken = |error: hyper::Error| {
            let why = dressage_http::causes(&error);
            StreamableHttpError::Client(HttpError::Broken { host: "the server".into(), why })
        };
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        let left = most - all.len();
        all.extend_from_slice(&data[..data.len().min(left)]);
        if data.len() > left {
            return Ok((all, false));
        }
    }
    Ok((all, true))
}

/// Events of a body, each of at most so many bytes.
fn events(body: Incoming, most: usize) -> BoxStream<'static, Result<Sse, SseError>> {
    let broken = |error: hyper::Error| std::io::Error::other(dressage_http::causes(&error));
    let frames = TryStreamExt::map_err(BodyStream::new(body), broken);
    let bytes = frames.try_filter_map(|frame| future::ready(Ok(frame.into_data().ok())));
    SseStream::from_bytes_stream(bounded(bytes, most)).boxed()
}

/// Ends a stream of events with an error once one of them is too long: whoever reads it keeps an event until
/// it is whole.
fn bounded(
    bytes: impl Stream<Item = std::io::Result<Bytes>>,
    most: usize,
) -> impl Stream<Item = std::io::Result<Bytes>> {
    let (mut length, mut is_line_empty, mut last) = (0, true, 0);
    bytes.map(move |chunk| {
        let chunk = chunk?;
        for &byte in &chunk {
            length += 1;
            match byte {
                b'\n' if last == b'\r' => {}
                b'\n' | b'\r' if is_line_empty => length = 0,
                b'\n' | b'\r' => is_line_empty = true,
                _ => is_line_empty = false,
            }
            last = byte;
            if length > most {
                return Err(std::io::Error::other(format!("an event is longer than {most} bytes")));
            }
        }
        Ok(chunk)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn passes(chunks: &[&'static str], most: usize) -> usize {
        let chunks: Vec<std::io::Result<Bytes>> = chunks.iter().map(|text| Ok(Bytes::from(*text))).collect();
        let passed = bounded(futures_util::stream::iter(chunks), most);
        passed.take_while(|chunk| future::ready(chunk.is_ok())).count().await
    }

    #[tokio::test]
    async fn events_are_bounded_and_streams_are_not() {
        assert_eq!(passes(&["data: 12\n\n", "data: 34\n", "\n", "data: 56\n\n"], 10).await, 4);
        assert_eq!(passes(&["data: 12\r\n\r\n", "data: 34\r", "\n\r\n"], 12).await, 3);
        assert_eq!(passes(&["data: 12\n", "data: 34\n", "\n"], 10).await, 1, "two lines are one event");
        assert_eq!(passes(&["data: 12\r\n", "data: 34\r\n", "\r\n"], 12).await, 1, "with CRLF, too");
        assert_eq!(passes(&["data: ", "12345"], 10).await, 1, "no end of a line is needed");
    }
}
