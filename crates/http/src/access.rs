//! Access rules of a server for requests that a web page in a user's browser can cause.
//!
//! A server without keys trusts every client that reaches it. A web page can reach services on the
//! user's machine by a request to another origin. It can also use a name of its own that resolves
//! to 127.0.0.1 (DNS rebinding), which makes the page same-origin. [`Access::check`] decides by
//! `Host`, `Origin`, `Sec-Fetch-Site` and `Content-Type`, before any part of the body is read. It
//! also returns the response headers of cross-origin resource sharing (CORS).
//!
//! Out of scope: keys, bodies and listening ([`service`](crate::service)), and the format of error
//! bodies.

use std::net::IpAddr;

use hyper::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN,
    VARY,
};
use hyper::{Method, StatusCode, Uri};

use crate::HttpError;
use crate::hosts::HostPattern;

/// Host names of this machine, which a server always accepts as its own.
const LOCAL_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// HTTP methods that a web page of an allowed origin can use.
const ALLOWED_METHODS: HeaderValue = HeaderValue::from_static("GET, POST, DELETE, OPTIONS");

/// Request headers that a web page can send if its preflight request lists no headers.
const ALLOWED_HEADERS: HeaderValue =
    HeaderValue::from_static("authorization, content-type, x-api-key");

/// Response headers that a web page can read.
const EXPOSED_HEADERS: HeaderValue =
    HeaderValue::from_static("request-id, retry-after, x-should-retry, content-type");

/// Time for which a browser can cache the response to a preflight request, in seconds.
const PREFLIGHT_SECONDS: HeaderValue = HeaderValue::from_static("600");

/// Origins whose web pages can call a server.
#[derive(Debug, Clone, PartialEq, Eq)]
enum AllowedOrigins {
    Any,
    Listed(Vec<String>),
}

/// Hosts that a server accepts as its own, and origins whose web pages can call it. By default, a
/// server accepts the names of this machine, and no origin except its own.
#[derive(Debug, Clone)]
pub struct Access {
    hosts: Vec<HostPattern>,
    origins: AllowedOrigins,
    /// Whether the server accepts every IP address as its own, because it listens on all addresses.
    any_address: bool,
}

impl Default for Access {
    fn default() -> Self {
        Access {
            hosts: Vec::new(),
            origins: AllowedOrigins::Listed(Vec::new()),
            any_address: false,
        }
    }
}

/// Decision whether a server accepts a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// The request is accepted. [`Cors::apply`] adds the headers that its response needs.
    Allowed(Cors),
    /// The request is the preflight request of an allowed origin. The response must be empty, with
    /// status 204.
    Preflight(Cors),
    /// The request is rejected.
    Rejected(Rejection),
}

/// Rejection of a request, with an HTTP status and a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// HTTP status of the response. [`Access::check`] returns 403 if a foreign web page caused the
    /// request. It returns 415 if a web page can send a body of this type without a preflight
    /// request.
    pub status: StatusCode,
    /// Reason for the rejection, and how to correct the request.
    pub message: String,
}

/// Response headers of cross-origin resource sharing.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Cors(HeaderMap);

impl Cors {
    /// Adds the CORS headers to the headers of a response.
    pub fn apply(&self, headers: &mut HeaderMap) {
        for (name, value) in &self.0 {
            // The response may already have a `Vary` header, so this one is appended.
            if name == VARY {
                headers.append(name, value.clone());
            } else {
                headers.insert(name, value.clone());
            }
        }
    }
}

impl Access {
    /// Creates access rules. `hosts` are additional hosts that the server accepts as its own, and
    /// `origins` are the origins whose web pages can call it. `*.` before a host matches all of its
    /// subdomains; `*` as an origin matches every origin.
    ///
    /// # Errors
    /// Returns [`HttpError::Invalid`] if a host or an origin is malformed.
    pub fn new(hosts: &[String], origins: &[String]) -> Result<Self, HttpError> {
        let hosts = hosts.iter().map(|host| HostPattern::parse(host)).collect::<Result<_, _>>()?;
        let origins = if origins.iter().any(|origin| origin.trim() == "*") {
            AllowedOrigins::Any
        } else {
            AllowedOrigins::Listed(
                origins.iter().map(|text| parse_origin(text)).collect::<Result<_, _>>()?,
            )
        };
        Ok(Access { hosts, origins, ..Access::default() })
    }

    /// Accepts the address that the server listens on as its own. The unspecified addresses 0.0.0.0
    /// and :: accept all IP addresses, which is safe because a web page can only rebind a name.
    #[must_use]
    pub fn with_address(mut self, address: IpAddr) -> Self {
        self.any_address |= address.is_unspecified();
        self.hosts.extend(HostPattern::parse(&address.to_string()));
        self
    }

    /// Decides whether to accept a request, by its method, URI and headers. `needs_key` is true if
    /// the server rejects every request without a key. Since no web page has a key, the origin then
    /// determines only the response headers.
    pub fn check(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
        needs_key: bool,
    ) -> Verdict {
        let origin = headers.get(ORIGIN);
        let allowed = origin.is_some_and(|origin| self.allows(origin));
        if !needs_key
            && let Some(rejection) = self.foreign_page_rejection(method, uri, headers, allowed)
        {
            return Verdict::Rejected(rejection);
        }
        let is_preflight =
            method == Method::OPTIONS && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
        match origin.filter(|_| is_preflight) {
            Some(_) if allowed => Verdict::Preflight(self.cors(origin, Some(headers))),
            Some(origin) if !self.is_own_origin(origin, headers) => {
                Verdict::Rejected(origin_rejection(origin))
            }
            _ => Verdict::Allowed(self.cors(origin.filter(|_| allowed), None)),
        }
    }

    /// Returns a rejection if a foreign web page caused the request or could have caused it,
    /// otherwise `None`. `allowed` states whether the request's origin is allowed.
    fn foreign_page_rejection(
        &self,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
        allowed: bool,
    ) -> Option<Rejection> {
        // A request target in absolute form overrides the Host header (RFC 9112, 3.2.2).
        let named = headers.get_all(HOST).iter().map(|host| host.to_str().unwrap_or_default());
        let mut named = named.chain(uri.authority().map(|authority| authority.as_str()));
        if let Some(host) = named.find(|host| !self.is_own_host(host)) {
            let message = format!(
                "the Host header is {host:?}, which is not a name of this server; without keys, \
                 the server accepts only localhost, 127.0.0.1, [::1], its listen address, and \
                 names set with --allow-host"
            );
            return rejected(StatusCode::FORBIDDEN, message);
        }
        if let Some(origin) = headers.get(ORIGIN) {
            if !allowed && !self.is_own_origin(origin, headers) {
                return Some(origin_rejection(origin));
            }
        } else if let Some(site) = headers.get("sec-fetch-site")
            && !matches!(site.as_bytes(), b"same-origin" | b"none")
            && self.origins != AllowedOrigins::Any
        {
            // Browsers send no Origin with a GET request for an image, a script or a page.
            let message = format!(
                "the request comes from a page of another site (Sec-Fetch-Site: {}); without \
                 keys, this server accepts only requests from pages of its own origin and of \
                 origins set with --allow-origin",
                String::from_utf8_lossy(site.as_bytes())
            );
            return rejected(StatusCode::FORBIDDEN, message);
        }
        // Forms and scripts can send other types of body to any origin, without a preflight
        // request.
        if method == Method::POST && !is_json(headers) && !is_empty(headers) {
            let kind = headers.get(CONTENT_TYPE).map_or(String::new(), |kind| {
                format!(", not {}", String::from_utf8_lossy(kind.as_bytes()))
            });
            let message = format!("the body must have the Content-Type application/json{kind}");
            return rejected(StatusCode::UNSUPPORTED_MEDIA_TYPE, message);
        }
        None
    }

    /// Returns whether a host, with or without a port, is one of the server's own hosts.
    fn is_own_host(&self, text: &str) -> bool {
        split_authority(text).is_some_and(|(host, port)| {
            let port = port.unwrap_or(80);
            LOCAL_NAMES.contains(&host.as_str())
                || self.hosts.iter().any(|pattern| pattern.matches(&host, port))
                || (self.any_address && host.parse::<IpAddr>().is_ok())
        })
    }

    /// Returns whether an origin is the server's own: one of its hosts, at the port that the
    /// request was sent to.
    fn is_own_origin(&self, origin: &HeaderValue, headers: &HeaderMap) -> bool {
        let text = origin.to_str().unwrap_or_default().to_ascii_lowercase();
        let authority = text.split_once("://").map(|(_, authority)| authority);
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        let port = host.map_or(AuthorityPort::Invalid, parse_port);
        authority
            .is_some_and(|authority| self.is_own_host(authority) && parse_port(authority) == port)
    }

    /// Returns whether web pages of an origin can call the server.
    fn allows(&self, origin: &HeaderValue) -> bool {
        match &self.origins {
            AllowedOrigins::Any => true,
            AllowedOrigins::Listed(origins) => {
                let text = origin.to_str().unwrap_or_default().to_ascii_lowercase();
                origins.contains(&text)
            }
        }
    }

    /// Returns the CORS headers of a response. `origin` is the origin of the request, or `None` if
    /// it is not allowed. `preflight` contains the headers of a preflight request, whose response
    /// needs more headers; it is `None` for other requests.
    fn cors(&self, origin: Option<&HeaderValue>, preflight: Option<&HeaderMap>) -> Cors {
        let mut cors = HeaderMap::new();
        match &self.origins {
            AllowedOrigins::Listed(origins) if origins.is_empty() => return Cors(cors),
            AllowedOrigins::Listed(_) => {
                drop(cors.insert(VARY, HeaderValue::from_static("origin")))
            }
            AllowedOrigins::Any => {}
        }
        let Some(origin) = origin else { return Cors(cors) };
        let any = HeaderValue::from_static("*");
        let allowed = if self.origins == AllowedOrigins::Any { any } else { origin.clone() };
        cors.insert(ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        let Some(request) = preflight else {
            cors.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED_HEADERS);
            return Cors(cors);
        };
        let requested =
            request.get(ACCESS_CONTROL_REQUEST_HEADERS).cloned().unwrap_or(ALLOWED_HEADERS);
        cors.insert(ACCESS_CONTROL_ALLOW_METHODS, ALLOWED_METHODS);
        cors.insert(ACCESS_CONTROL_ALLOW_HEADERS, requested);
        cors.insert(ACCESS_CONTROL_MAX_AGE, PREFLIGHT_SECONDS);
        // Chromium requests this permission before a public page may reach a private address.
        if request.contains_key("access-control-request-private-network") {
            let name = HeaderName::from_static("access-control-allow-private-network");
            cors.insert(name, HeaderValue::from_static("true"));
        }
        Cors(cors)
    }
}

fn rejected(status: StatusCode, message: String) -> Option<Rejection> {
    Some(Rejection { status, message })
}

/// Port of an authority such as `localhost:8000`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AuthorityPort {
    /// The authority contains no port.
    Default,
    Number(u16),
    /// There is no authority, or it is invalid.
    Invalid,
}

fn parse_port(text: &str) -> AuthorityPort {
    match split_authority(text) {
        Some((_, None)) => AuthorityPort::Default,
        Some((_, Some(port))) => AuthorityPort::Number(port),
        None => AuthorityPort::Invalid,
    }
}

fn origin_rejection(origin: &HeaderValue) -> Rejection {
    let origin = String::from_utf8_lossy(origin.as_bytes());
    let message = format!(
        "the request comes from a page of {origin:?}, which is not an allowed origin; to allow \
         it, start the server with --allow-origin {origin}"
    );
    Rejection { status: StatusCode::FORBIDDEN, message }
}

/// Parses an allowed origin, such as `http://localhost:3000`.
fn parse_origin(text: &str) -> Result<String, HttpError> {
    let text = text.trim().to_ascii_lowercase();
    let is_origin = text == "null"
        || text.split_once("://").is_some_and(|(scheme, authority)| {
            !scheme.is_empty()
                && !authority.contains(['/', '?', '#', '@', '*'])
                && split_authority(authority).is_some()
        });
    if is_origin {
        Ok(text)
    } else {
        Err(HttpError::Invalid(format!(
            "{text:?} is not an origin; write its scheme, host and port without a path, such as \
             \"http://localhost:3000\", or \"*\" for every origin"
        )))
    }
}

/// Splits an authority such as `localhost:8000` into its host and its port. The host is in lower
/// case, without brackets and final dot.
fn split_authority(text: &str) -> Option<(String, Option<u16>)> {
    let text = text.trim().to_ascii_lowercase();
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            (host, if rest.is_empty() { None } else { Some(rest.strip_prefix(':')?) })
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text.as_str(), None),
        },
    };
    let host = host.strip_suffix('.').unwrap_or(host);
    let port = port.map(str::parse).transpose().ok()?;
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

/// Returns whether the headers declare the request body as JSON.
fn is_json(headers: &HeaderMap) -> bool {
    let mut kinds = headers.get_all(CONTENT_TYPE).iter();
    let (Some(kind), None) = (kinds.next(), kinds.next()) else { return false };
    let kind = kind.to_str().unwrap_or_default().to_ascii_lowercase();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    essence == "application/json"
        || essence.starts_with("application/") && essence.ends_with("+json")
}

/// Returns whether a request has neither a body nor a content type.
fn is_empty(headers: &HeaderMap) -> bool {
    use hyper::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
    let length = headers.get(CONTENT_LENGTH).is_none_or(|length| length == "0");
    length && !headers.contains_key(TRANSFER_ENCODING) && !headers.contains_key(CONTENT_TYPE)
}

#[cfg(test)]
#[path = "access_tests.rs"]
mod tests;
