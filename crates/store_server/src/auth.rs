//! Checks API keys and the origins of web pages.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use levade_http::{Access, Verdict, service};

use crate::response::ApiError;

/// Paths of health checks. A request for such a path needs neither a key nor one of the server's
/// host names.
const HEALTH: [&str; 2] = ["/v1/agl/health", "/healthz"];

/// Media types that request bodies can have besides JSON. A web page can send these types only
/// after a preflight request, which the server grants only to permitted origins.
const OTHER_TYPES: [&[u8]; 2] =
    [b"application/x-protobuf", levade_store::wire::MEDIA_TYPE.as_bytes()];

/// Access rules of the server: API keys, and rules for requests of web pages.
pub(crate) struct AccessRules {
    pub keys: Vec<String>,
    pub access: Access,
}

/// Rejects a request without a valid API key. If no key is required, rejects a request that a
/// foreign web page could have caused.
pub(crate) async fn check_access(
    State(rules): State<Arc<AccessRules>>,
    request: Request,
    next: Next,
) -> Response {
    match find_rejection(&rules, &request) {
        Some(error) => error.into_response(),
        None => next.run(request).await,
    }
}

fn find_rejection(rules: &AccessRules, request: &Request) -> Option<ApiError> {
    let path = request.uri().path();
    if HEALTH.contains(&path) {
        return None;
    }
    if !rules.keys.is_empty() {
        let basic = basic_password(request.headers());
        let key = basic.as_deref().or_else(|| service::key_of(request.headers()));
        let is_admitted = service::is_valid_key(&rules.keys, key);
        return (!is_admitted).then(|| ApiError::new(StatusCode::UNAUTHORIZED, service::WRONG_KEY));
    }
    let is_other_type = request.headers().get(header::CONTENT_TYPE).is_some_and(|kind| {
        let kind = kind.as_bytes().to_ascii_lowercase();
        OTHER_TYPES.iter().any(|known| kind.starts_with(known))
    });
    // An empty body may have any type, because aiohttp sends application/octet-stream. The origin
    // of a page, which browsers send with every POST request, is still checked.
    let length = request.headers().get(header::CONTENT_LENGTH);
    let is_empty = length.is_none_or(|length| length == "0")
        && !request.headers().contains_key(header::TRANSFER_ENCODING);
    let method = if is_other_type || is_empty { &Method::GET } else { request.method() };
    match rules.access.check(method, request.uri(), request.headers(), false) {
        Verdict::Rejected(rejection) => Some(rejection.into()),
        Verdict::Allowed(_) | Verdict::Preflight(_) => None,
    }
}

/// Returns the password of a request's HTTP Basic authentication. A client that cannot set headers
/// sends the API key in a URL such as `http://levade:KEY@host:4747`.
fn basic_password(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, encoded) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    Some(decoded.split_once(':')?.1.to_owned())
}
