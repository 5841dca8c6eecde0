//! Requests with complete responses: redirects, deadline and maximum size.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap, LOCATION};
use hyper::{Method, Request, Response, StatusCode, Uri};

use crate::client::authority;
use crate::hosts::parse_url;
use crate::text;
use crate::unpack::{UnpackError, unpack};
use crate::{Client, HttpError, causes};

/// Request of an HTTP client, with its complete body.
#[derive(Debug, Clone, PartialEq)]
pub struct ClientRequest {
    /// HTTP method, such as `GET`.
    pub method: Method,
    /// URL of the request, with the scheme `http` or `https`.
    pub url: String,
    /// Headers of the request. They are removed if a redirect leads to another host, port or
    /// scheme.
    pub headers: HeaderMap,
    /// Body of the request. Empty if the request has no body.
    pub body: Bytes,
}

/// Limits of the time, size and redirects of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Timeout for the complete response, including redirects.
    pub deadline: Duration,
    /// Maximum size of the response body in bytes, before and after decompression.
    pub bytes: usize,
    /// Maximum number of redirects that are followed.
    pub redirects: u32,
}

/// Complete HTTP response, which can have any status.
#[derive(Debug, Clone, PartialEq)]
pub struct ClientResponse {
    /// Status code of the response, which can be an error.
    pub status: StatusCode,
    /// Headers of the response.
    pub headers: HeaderMap,
    /// Decompressed body of the response.
    pub body: Bytes,
    /// URL that returned the response, after any redirects.
    pub url: String,
}

impl ClientResponse {
    /// Returns the body as text, decoded as its `Content-Type` declares. Invalid UTF-8 is replaced.
    /// If neither the type nor the bytes are text, returns a note with the body's length.
    pub fn text(&self) -> String {
        let kind =
            self.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        text::decode(&self.body, kind)
    }
}

impl Client {
    /// Sends a request, follows redirects as browsers do, and reads the complete response. A
    /// response with an error status is not an error.
    ///
    /// # Errors
    /// Returns an error if a host is not allowed or cannot be reached, the connection breaks, the
    /// deadline passes, the response is too large or cannot be decoded, or there are too many
    /// redirects.
    pub async fn send(
        &self,
        outgoing: ClientRequest,
        bounds: Bounds,
    ) -> Result<ClientResponse, HttpError> {
        let host = authority(&parse_url(&outgoing.url)?);
        match tokio::time::timeout(bounds.deadline, self.follow(outgoing, bounds)).await {
            Ok(result) => result,
            Err(_) => Err(HttpError::Late { host, after: bounds.deadline }),
        }
    }

    async fn follow(
        &self,
        mut outgoing: ClientRequest,
        bounds: Bounds,
    ) -> Result<ClientResponse, HttpError> {
        let first = authority(&parse_url(&outgoing.url)?);
        let mut followed = 0;
        loop {
            let uri = parse_url(&outgoing.url)?;
            let host = authority(&uri);
            let mut request = Request::new(Full::new(outgoing.body.clone()));
            *request.method_mut() = outgoing.method.clone();
            *request.uri_mut() = uri.clone();
            *request.headers_mut() = outgoing.headers.clone();
            let response = self.request(request).await?;
            let Some(to) = redirect_target(&uri, &response) else {
                let (head, body) = response.into_parts();
                let body = collect_body(&host, body, bounds.bytes).await?;
                let body = unpack_body(&host, body, &head.headers, bounds.bytes)?;
                return Ok(ClientResponse {
                    status: head.status,
                    headers: head.headers,
                    body,
                    url: outgoing.url,
                });
            };
            followed += 1;
            if followed > bounds.redirects {
                return Err(HttpError::Redirects { host: first, max: bounds.redirects, to });
            }
            // As in browsers, 303 leads to a GET request, and so do 301 and 302 after a POST
            // request.
            let is_other = match response.status() {
                StatusCode::SEE_OTHER => outgoing.method != Method::HEAD,
                StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND => {
                    outgoing.method == Method::POST
                }
                _ => false,
            };
            if is_other {
                outgoing.method = Method::GET;
                outgoing.body = Bytes::new();
                for name in [CONTENT_TYPE, CONTENT_LENGTH] {
                    outgoing.headers.remove(name);
                }
            }
            let next = parse_url(&to)?;
            if authority(&next) != host || next.scheme() != uri.scheme() {
                // Any header can contain a key, and the target of the redirect is another server.
                outgoing.headers.clear();
            }
            outgoing.headers.remove(HOST);
            outgoing.url = to;
        }
    }
}

/// Returns the target of a redirect, or `None` if the response is not a redirect.
fn redirect_target(from: &Uri, response: &Response<Incoming>) -> Option<String> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    let to = response.headers().get(LOCATION)?.to_str().ok()?.trim();
    Some(resolve_reference(from, to))
}

/// Resolves a URL reference against the URL `from` (RFC 3986, 5.2). Dot segments are kept, because
/// servers resolve them.
fn resolve_reference(from: &Uri, to: &str) -> String {
    let to = to.split('#').next().unwrap_or_default();
    let scheme = from.scheme_str().unwrap_or("http");
    let origin = format!("{scheme}://{}", authority(from));
    // A URL within the query of a relative reference does not make the reference absolute.
    if to.split_once("://").is_some_and(|(before, _)| {
        before.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
    }) {
        to.to_owned()
    } else if to.starts_with("//") {
        format!("{scheme}:{to}")
    } else if to.starts_with('/') {
        format!("{origin}{to}")
    } else if to.starts_with('?') {
        format!("{origin}{}{to}", from.path())
    } else {
        let parent = from.path().rsplit_once('/').map_or("", |(parent, _)| parent);
        format!("{origin}{parent}/{to}")
    }
}

/// Reads a response body to its end. `max` is the maximum size in bytes.
async fn collect_body(host: &str, mut body: Incoming, max: usize) -> Result<Bytes, HttpError> {
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame
            .map_err(|error| HttpError::Broken { host: host.to_owned(), why: causes(&error) })?;
        // Trailers are ignored.
        let Ok(data) = frame.into_data() else { continue };
        if all.len() + data.len() > max {
            return Err(HttpError::TooLarge { host: host.to_owned(), max });
        }
        all.extend_from_slice(&data);
    }
    Ok(all.freeze())
}

/// Decompresses a gzip body, which some servers send although the request does not offer gzip.
/// `max` is the maximum size in bytes.
fn unpack_body(
    host: &str,
    body: Bytes,
    headers: &HeaderMap,
    max: usize,
) -> Result<Bytes, HttpError> {
    let encoding =
        headers.get(CONTENT_ENCODING).and_then(|name| name.to_str().ok()).unwrap_or_default();
    unpack(encoding, body, max).map_err(|why| match why {
        UnpackError::TooLarge => HttpError::TooLarge { host: host.to_owned(), max },
        UnpackError::Unknown | UnpackError::Broken => {
            HttpError::Packed { host: host.to_owned(), encoding: encoding.to_owned() }
        }
    })
}

#[cfg(test)]
#[path = "send_tests.rs"]
mod tests;
