//! A client of retrieval servers: Levade's, Search-R1's, or any other with a compatible
//! `/retrieve`.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Method, StatusCode, Uri};
use levade_http::{Bounds, Client as Http, ClientRequest, ClientResponse, Hosts, HttpError};
use levade_policy::process_time;
use serde_json::{Value, json};

use crate::{Hit, Passage, SearchError};

/// Maximum size of a server's response, in bytes.
const MAX_BYTES: usize = 64 << 20;
/// Maximum number of characters of a response that an error message quotes.
const MAX_SHOWN: usize = 300;
/// Maximum pause before a retry of a request.
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Retry policy and timeout of the requests to a retrieval server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retries {
    /// Maximum number of requests, including the first one. 0 is treated as 1. Defaults to 3.
    pub tries: u32,
    /// Pause before the first retry. It doubles with each further retry, up to 5 seconds. Defaults
    /// to 0.25 seconds.
    pub pause: Duration,
    /// Timeout for each request. Defaults to 10 seconds.
    pub deadline: Duration,
}

impl Default for Retries {
    fn default() -> Self {
        Retries { tries: 3, pause: Duration::from_millis(250), deadline: Duration::from_secs(10) }
    }
}

/// HTTP client of one retrieval server.
#[derive(Clone)]
pub struct Client {
    http: Http,
    url: Uri,
    key: Option<String>,
    retries: Retries,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("url", &self.url).field("retries", &self.retries).finish()
    }
}

impl Client {
    /// Creates a client of the retrieval server at `url`, which includes the path
    /// (`http://host:8000/retrieve`). If `key` is set, the client sends it as a bearer token.
    ///
    /// # Errors
    /// Returns an error if `url` is not an HTTP or HTTPS URL with a host, or TLS cannot be set up.
    pub fn new(url: &str, key: Option<String>, retries: Retries) -> Result<Self, SearchError> {
        let unfit = |why: String| {
            SearchError::Query(format!(
                "the address {url:?} of a retrieval server is invalid: {why}"
            ))
        };
        let parsed: Uri =
            url.parse().map_err(|error| unfit(format!("the URL cannot be parsed: {error}")))?;
        if !matches!(parsed.scheme_str(), Some("http" | "https")) || parsed.host().is_none() {
            return Err(unfit(
                "the URL must begin with http:// or https:// and name a host".into(),
            ));
        }
        // The user configured this server, so every host is allowed, including private addresses.
        let http = Http::new(Hosts::allow_all(), None)
            .map_err(|error| SearchError::Internal(error.to_string()))?;
        Ok(Client { http, url: parsed, key, retries })
    }

    /// Requests the `count` best passages for each query. Returns the number of retries and the
    /// result. Transient failures are retried, which is safe because a search changes nothing on
    /// the server.
    ///
    /// # Errors
    /// The result is the last error if all requests failed, or the first error that is not
    /// transient.
    pub async fn retrieve(
        &self,
        queries: &[String],
        count: usize,
    ) -> (u32, Result<Vec<Vec<Hit>>, SearchError>) {
        let body = json!({ "queries": queries, "topk": count, "return_scores": true });
        let body = Bytes::from(body.to_string());
        let mut pause = self.retries.pause;
        let mut failed = 0;
        loop {
            let deadline = self.retries.deadline;
            let tried = process_time::with_timeout(
                deadline,
                self.send_queries(body.clone(), queries.len(), count),
            )
            .await;
            let error = match tried.unwrap_or_else(|| {
                Err(self.server_error(format!("no response within {deadline:?}"), true))
            }) {
                Err(error @ SearchError::Server { may_pass: true, .. }) => error,
                done => return (failed, done),
            };
            failed += 1;
            if failed >= self.retries.tries {
                return (failed - 1, Err(error));
            }
            process_time::sleep(pause).await;
            pause = (2 * pause).min(MAX_RETRY_INTERVAL);
        }
    }

    async fn send_queries(
        &self,
        body: Bytes,
        queries: usize,
        count: usize,
    ) -> Result<Vec<Vec<Hit>>, SearchError> {
        let mut headers =
            HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        if let Some(key) = &self.key {
            let value = HeaderValue::from_str(&format!("Bearer {key}"));
            headers.insert(
                AUTHORIZATION,
                value.map_err(|error| self.server_error(error.to_string(), false))?,
            );
        }
        let request =
            ClientRequest { method: Method::POST, url: self.url.to_string(), headers, body };
        // The timeout in `retrieve` excludes pauses of this process, which `levade_http` does not
        // detect. The deadline here is only a safety net.
        let bounds = Bounds { deadline: self.retries.deadline * 4, bytes: MAX_BYTES, redirects: 0 };
        let ClientResponse { status, body: response, .. } =
            self.http.send(request, bounds).await.map_err(|error| {
                let way_out = if matches!(error, HttpError::TooLarge { .. }) {
                    "; ask for fewer passages"
                } else {
                    ""
                };
                self.server_error(format!("{error}{way_out}"), error.is_transient())
            })?;
        if status != StatusCode::OK {
            let may_pass = status.is_server_error()
                || [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT].contains(&status);
            return Err(self.server_error(format!("{status}: {}", error_text(&response)), may_pass));
        }
        let response: Value = serde_json::from_slice(&response).map_err(|error| {
            self.server_error(
                format!("the answer is no JSON ({error}): {}", response_excerpt(&response)),
                false,
            )
        })?;
        let found = parse_response(&response, queries, count);
        found.map_err(|why| {
            self.server_error(format!("the answer is not that of /retrieve: {why}"), false)
        })
    }

    fn server_error(&self, why: String, may_pass: bool) -> SearchError {
        let why = match &self.key {
            Some(key) => why.replace(key.as_str(), "[key]"),
            None => why,
        };
        SearchError::Server { url: self.url.to_string(), why, may_pass }
    }
}

/// Parses a response such as `{"result": [[{"document", "score"}]]}`, with one list of passages per
/// query. Reranker servers return documents as strings, and some servers return documents without
/// scores.
fn parse_response(response: &Value, queries: usize, count: usize) -> Result<Vec<Vec<Hit>>, String> {
    let lists = response
        .get("result")
        .and_then(Value::as_array)
        .ok_or("the response has no list `result`")?;
    if lists.len() != queries {
        return Err(format!("the response has {} results for {queries} queries", lists.len()));
    }
    lists
        .iter()
        .map(|list| {
            let hits = list.as_array().ok_or("a result in the response is not a list")?;
            hits.iter().take(count).map(parse_hit).collect::<Result<Vec<_>, String>>()
        })
        .collect()
}

fn parse_hit(value: &Value) -> Result<Hit, String> {
    let document = value.get("document").unwrap_or(value);
    let score = value.get("score").and_then(Value::as_f64).unwrap_or_default() as f32;
    if let Some(contents) = document.as_str() {
        return Ok(Hit {
            passage: Passage::from_contents(String::new(), contents.to_owned()),
            score,
        });
    }
    let text = |key: &str| document.get(key).and_then(Value::as_str).map(str::to_owned);
    let id = match document.get("id") {
        Some(Value::String(id)) => id.clone(),
        Some(Value::Number(id)) => id.to_string(),
        _ => String::new(),
    };
    let passage = match (text("contents"), text("text")) {
        (Some(contents), _) => Passage::from_contents(id, contents),
        (None, Some(body)) => Passage { id, title: text("title").unwrap_or_default(), text: body },
        (None, None) => {
            return Err("a document in the response has neither `contents` nor `text`".into());
        }
    };
    Ok(Hit { passage, score })
}

/// Returns the error message in a JSON response (`error.message` or `detail`), or the start of the
/// response if there is none.
fn error_text(response: &[u8]) -> String {
    let value: Value = serde_json::from_slice(response).unwrap_or_default();
    let message = value["error"]["message"].as_str().or_else(|| value["detail"].as_str());
    message
        .map_or_else(|| response_excerpt(response), |message| response_excerpt(message.as_bytes()))
}

/// Returns the first characters of a response, followed by "…" if the response was truncated.
fn response_excerpt(response: &[u8]) -> String {
    let text = String::from_utf8_lossy(response);
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
