//! Common parts of HTTP servers: keys, access of web pages, request bodies and listening.
//!
//! [`with_rejections`] rejects requests without a matching route and requests that a foreign web
//! page can cause. [`key_of`] and [`is_valid_key`] check keys, [`read_body`] and [`read_json`] read
//! bodies up to a maximum size, and [`serve`] listens until it is stopped. Out of scope: the format
//! of error bodies, into which each API converts its [`Rejection`]s.
//!
//! ```
//! use axum::Router;
//! use axum::response::IntoResponse;
//! use axum::routing::get;
//! use levade_http::{Access, service};
//!
//! let routes = Router::new().route("/health", get(|| async { "well" }));
//! let app = service::with_rejections(
//!     routes,
//!     Access::default(),
//!     |_headers| false,
//!     |_request, rejection| (rejection.status, rejection.message).into_response(),
//! );
//! # let _: Router = app;
//! ```

use std::future::{Future, ready};
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::serve::ListenerExt;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;

use crate::{Access, Rejection, UnpackError, Verdict, unpack};

/// Message of a response with status 401, which is sent if a request has no valid key.
pub const WRONG_KEY: &str =
    "the key is missing or wrong; send it as Authorization: Bearer or x-api-key";

/// Adds handlers to `routes` that reject requests: by the rules of `access`, and for unknown paths
/// and unsupported methods. `needs_key` returns whether a request is accepted only with a key,
/// which no web page has. `reject` converts a rejection to the API's format.
pub fn with_rejections<S: Clone + Send + Sync + 'static>(
    routes: Router<S>,
    access: Access,
    needs_key: impl Fn(&HeaderMap) -> bool + Send + Sync + 'static,
    reject: impl Fn(&Request, Rejection) -> Response + Send + Sync + 'static,
) -> Router<S> {
    let reject = Arc::new(reject);
    let [reject_path, reject_method] = [Arc::clone(&reject), Arc::clone(&reject)];
    let nowhere = move |request: Request| {
        let message = format!("there is no route {} {}", request.method(), request.uri().path());
        ready(reject_path(&request, Rejection { status: StatusCode::NOT_FOUND, message }))
    };
    // The router adds the header `Allow`.
    let wrong_method = move |request: Request| {
        let method = request.method();
        let path = request.uri().path();
        let message = format!("{path} does not support the method {method}; see the header Allow");
        ready(reject_method(
            &request,
            Rejection { status: StatusCode::METHOD_NOT_ALLOWED, message },
        ))
    };
    let rules = Arc::new((access, needs_key));
    routes.fallback(nowhere).method_not_allowed_fallback(wrong_method).layer(from_fn(
        move |request: Request, next: Next| {
            let rules = Arc::clone(&rules);
            let reject = Arc::clone(&reject);
            async move {
                let (access, needs_key) = &*rules;
                let headers = request.headers();
                let verdict =
                    access.check(request.method(), request.uri(), headers, needs_key(headers));
                let (mut response, cors) = match verdict {
                    Verdict::Allowed(cors) => (next.run(request).await, cors),
                    Verdict::Preflight(cors) => (StatusCode::NO_CONTENT.into_response(), cors),
                    Verdict::Rejected(rejection) => return reject(&request, rejection),
                };
                cors.apply(response.headers_mut());
                response
            }
        },
    ))
}

/// Returns the API key of a request: from `Authorization: Bearer`, as OpenAI's clients send it,
/// from `x-api-key`, as Anthropic's clients do, or from `api-key`. `None` if the request has no
/// key.
pub fn key_of(headers: &HeaderMap) -> Option<&str> {
    let bearer = header_text(headers, "authorization").and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or_else(|| header_text(headers, "x-api-key")).or_else(|| header_text(headers, "api-key"))
}

fn header_text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Returns whether `key` is one of the valid `keys`. If `keys` is empty, no key is required.
pub fn is_valid_key(keys: &[String], key: Option<&str>) -> bool {
    keys.is_empty() || key.is_some_and(|key| keys.iter().any(|known| is_same(known, key)))
}

/// Returns whether two keys are equal, in a time that does not depend on the position of their
/// first difference.
fn is_same(known: &str, key: &str) -> bool {
    known.len() == key.len()
        && known.bytes().zip(key.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

/// Reads a request body of at most `max` bytes, and decompresses it if it has a `Content-Encoding`.
///
/// # Errors
/// Returns a [`Rejection`] with status 413 if the body is larger than `max`, 415 if its encoding is
/// unsupported, and 400 if the body breaks off or does not match its encoding.
pub async fn read_body(headers: &HeaderMap, body: Body, max: usize) -> Result<Bytes, Rejection> {
    let body = axum::body::to_bytes(body, max).await.map_err(|error| {
        let error = error.to_string();
        if error.contains("length limit") {
            rejected(
                StatusCode::PAYLOAD_TOO_LARGE,
                format!("the body exceeds the limit of {max} bytes"),
            )
        } else {
            rejected(StatusCode::BAD_REQUEST, format!("the body ended early: {error}"))
        }
    })?;
    let mut encodings = headers.get_all(header::CONTENT_ENCODING).iter();
    let encoding = match (encodings.next(), encodings.next()) {
        (None, _) => return Ok(body),
        (Some(encoding), None) => encoding.to_str().unwrap_or_default(),
        (Some(_), Some(_)) => return Err(unsupported_encoding("several encodings")),
    };
    unpack(encoding, body, max).map_err(|why| match why {
        UnpackError::Unknown => unsupported_encoding(&format!("{encoding:?}")),
        UnpackError::Broken => rejected(
            StatusCode::BAD_REQUEST,
            format!("the body is not valid {encoding}, which its Content-Encoding names"),
        ),
        UnpackError::TooLarge => rejected(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("the unpacked body exceeds the limit of {max} bytes"),
        ),
    })
}

fn rejected(status: StatusCode, message: String) -> Rejection {
    Rejection { status, message }
}

fn unsupported_encoding(encoding: &str) -> Rejection {
    let message = format!(
        "the Content-Encoding of the body is {encoding}; send the body with gzip or without \
             encoding"
    );
    rejected(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
}

/// Error in the JSON of a request body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonError {
    /// Path of the invalid field; `None` if the error concerns the complete body.
    pub field: Option<String>,
    /// Position and reason of the error.
    pub message: String,
}

/// Parses a request body as JSON.
///
/// # Errors
/// Returns [`JsonError`] if the body is not JSON, contains more than one document, or is not a `T`.
pub fn read_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, JsonError> {
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let field = Some(error.path().to_string()).filter(|path| path != "." && path != "?");
        let why = error.inner().to_string();
        let why = if why.contains("surrogate") || why.contains("unexpected end of hex escape") {
            format!(
                "an unpaired surrogate, such as \\ud83d alone, is not a character; send U+FFFD \
                 instead ({why})"
            )
        } else {
            why
        };
        JsonError { message: format!("{}: {why}", field.as_deref().unwrap_or("the body")), field }
    })?;
    deserializer.end().map_err(|error| JsonError {
        field: None,
        message: format!("the body continues after its JSON: {error}"),
    })?;
    Ok(value)
}

/// Serves the routes of an HTTP API until `stop` completes, and then completes the responses in
/// progress.
///
/// # Errors
/// Returns an error if the listener fails.
pub async fn serve(
    routes: Router,
    listener: TcpListener,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    // Responses and frames of a stream are small. With Nagle's algorithm, each would wait about 40
    // ms for the client to acknowledge the packet before.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY on a connection");
        }
    });
    axum::serve(listener, routes).with_graceful_shutdown(stop).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_of_reads_headers_of_all_clients() {
        for (name, value, expected) in [
            ("authorization", "Bearer a", Some("a")),
            ("authorization", "bearer  a ", Some("a")),
            ("authorization", "a", None),
            ("authorization", "Basic a", None),
            ("x-api-key", "a", Some("a")),
            ("api-key", "a", Some("a")),
        ] {
            let headers = HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())]);
            assert_eq!(key_of(&headers), expected, "{name}: {value}");
        }
        let keys = ["one".to_owned(), "two".to_owned()];
        assert!(is_valid_key(&keys, Some("two")) && is_valid_key(&[], None));
        assert!(!is_valid_key(&keys, Some("tw")) && !is_valid_key(&keys, None));
    }
}
