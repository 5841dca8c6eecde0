//! Sandboxes elsewhere: a client of SandboxFusion's API, as [`service`](crate::service) and others serve it.

use std::time::Duration;

use axum::body::Bytes;
use levade_policy::awake;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::SandboxError;
use crate::service::{CodeAnswer, JupyterAnswer, RunCode, RunJupyter, Status};

/// Time that a request may take beyond the code's own: connecting, and waiting for a place.
const BESIDES: Duration = Duration::from_secs(60);

/// Wait before a service that has no place is asked again; it doubles with each further one, up to the most.
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// Longest answer that is read, in bytes.
const MOST_BYTES: u64 = 256 << 20;

/// A service of SandboxFusion's API.
#[derive(Debug, Clone)]
pub struct Remote {
    url: String,
    key: Option<String>,
    agent: ureq::Agent,
}

impl Remote {
    /// The service at a base URL, or at the address of one of its calls as verl is given it, with the key
    /// that it asks for.
    ///
    /// # Errors
    /// When the URL is of another kind.
    pub fn new(url: &str, key: Option<String>) -> Result<Self, SandboxError> {
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(SandboxError::Request(format!("url = {url:?} must begin with http:// or https://")));
        }
        let agent =
            ureq::Agent::new_with_config(ureq::Agent::config_builder().http_status_as_error(false).build());
        let url = url.trim_end_matches('/');
        let base = ["/run_code", "/run_jupyter"].iter().find_map(|call| url.strip_suffix(call));
        Ok(Remote { url: base.unwrap_or(url).to_owned(), key, agent })
    }

    /// `POST /run_code`
    ///
    /// # Errors
    /// When the service cannot be reached, is busy, refuses the request, or fails.
    pub async fn run_code(&self, request: &RunCode) -> Result<CodeAnswer, SandboxError> {
        let answer: CodeAnswer = self.post("run_code", request, request.run_timeout).await?;
        self.sound(answer.status, &answer.message)?;
        Ok(answer)
    }

    /// `POST /run_jupyter`
    ///
    /// # Errors
    /// When the service cannot be reached, is busy, refuses the request, or fails.
    pub async fn run_jupyter(&self, request: &RunJupyter) -> Result<JupyterAnswer, SandboxError> {
        let answer: JupyterAnswer = self.post("run_jupyter", request, request.total_timeout).await?;
        self.sound(answer.status, &answer.message)?;
        Ok(answer)
    }

    fn sound(&self, status: Status, message: &str) -> Result<(), SandboxError> {
        match status {
            Status::SandboxError => Err(SandboxError::Broken(format!("{}: {message}", self.url))),
            Status::Success | Status::Failed => Ok(()),
        }
    }

    /// Asks for a run. A service that has no place for it is asked again: nothing was run then.
    async fn post<A: DeserializeOwned>(
        &self,
        path: &str,
        request: &impl Serialize,
        seconds: f64,
    ) -> Result<A, SandboxError> {
        let broken = |why: String| SandboxError::Broken(why);
        let url = format!("{}/{path}", self.url);
        let body = Bytes::from(serde_json::to_vec(request).map_err(|error| broken(error.to_string()))?);
        let limit = Duration::from_secs_f64(seconds.clamp(0.0, 1e6)) + BESIDES;
        let (mut pause, mut waited) = (PAUSE, Duration::ZERO);
        let (status, text) = loop {
            let (status, text) = self.once(url.clone(), body.clone(), limit).await?;
            if !matches!(status, 429 | 503) || waited >= BESIDES {
                break (status, text);
            }
            awake::sleep(pause).await;
            waited += pause;
            pause = (2 * pause).min(LONGEST_PAUSE);
        };
        let said = || String::from_utf8_lossy(&text[..text.len().min(500)]).into_owned();
        match status {
            200 => serde_json::from_slice(&text)
                .map_err(|error| broken(format!("{url} answered something else ({error}): {}", said()))),
            // Field and value are in the answer.
            400 | 404 | 422 => Err(SandboxError::Request(format!("{url} refused the request: {}", said()))),
            _ => Err(broken(format!("{url} answered {status}: {}", said()))),
        }
    }

    /// Status and body of the answer to a request.
    async fn once(&self, url: String, body: Bytes, limit: Duration) -> Result<(u16, Vec<u8>), SandboxError> {
        let (agent, key) = (self.agent.clone(), self.key.clone());
        let asked = tokio::task::spawn_blocking(move || {
            let mut request = agent.post(&url).header("content-type", "application/json");
            if let Some(key) = &key {
                request = request.header("authorization", format!("Bearer {key}"));
            }
            let request = request.config().timeout_global(Some(limit)).build();
            let broken = |error: ureq::Error| SandboxError::Broken(format!("{url}: {error}"));
            let mut response = request.send(&body[..]).map_err(broken)?;
            let status = response.status().as_u16();
            let text = response.body_mut().with_config().limit(MOST_BYTES).read_to_vec();
            Ok((status, text.map_err(broken)?))
        });
        asked.await.map_err(|error| SandboxError::Broken(error.to_string()))?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::Router;
    use axum::http::StatusCode;
    use axum::routing::post;

    use super::*;

    #[tokio::test]
    async fn a_service_without_a_place_is_asked_again() {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let answer = move || {
            let first = count.fetch_add(1, Ordering::Relaxed) == 0;
            let full = (StatusCode::TOO_MANY_REQUESTS, r#"{"detail": "full"}"#);
            let done = (StatusCode::OK, r#"{"status": "Success", "run_result": {"status": "Finished"}}"#);
            std::future::ready(if first { full } else { done })
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().route("/run_code", post(answer));
        let server = tokio::spawn(async move { axum::serve(listener, router).await });
        let request: RunCode = serde_json::from_str(r#"{"code": "1", "language": "python"}"#).unwrap();
        let answer = Remote::new(&format!("{url}/run_code"), None).unwrap().run_code(&request).await.unwrap();
        assert_eq!((answer.status, asked.load(Ordering::Relaxed)), (Status::Success, 2));
        server.abort();
    }
}
