//! Client of HTTP services that answer JSON with JSON, such as scoring services.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use levade_policy::process_time::sleep;
use serde_json::Value;
use tokio::sync::Semaphore;

use super::call_deadline::CallDeadline;
use super::endpoint::{EndpointServer, plain_uri};
use super::error::ExternalError;
use super::http::EndpointHttp;

/// Options of an HTTP [`Service`].
#[derive(Debug, Clone, PartialEq)]
pub struct ServiceOptions {
    /// URL to which requests are posted.
    pub url: String,
    /// Environment variable that contains the API key. If `None`, no key is sent.
    pub key_env: Option<String>,
    /// Maximum number of requests in flight. 0 counts as 1.
    pub max_running: usize,
    /// Maximum number of tries per request. A request is retried if the service is unreachable,
    /// busy or fails. 0 counts as 1.
    pub tries: usize,
    /// Timeout for a request with all its tries, which includes the wait for a permit and ends with
    /// the response.
    pub deadline: Duration,
    /// Maximum size of a response, in bytes.
    pub max_bytes: usize,
}

impl ServiceOptions {
    /// Creates options for a service at `url`: 16 requests in flight, 4 tries, a deadline of 60 s,
    /// at most 16 MiB per response, and no key.
    pub fn new(url: impl Into<String>) -> Self {
        ServiceOptions {
            url: url.into(),
            key_env: None,
            max_running: 16,
            tries: 4,
            deadline: Duration::from_secs(60),
            max_bytes: 16 << 20,
        }
    }
}

/// Client of an idempotent HTTP service, whose requests can safely be retried. Clones share limits.
#[derive(Debug, Clone)]
pub struct Service(Arc<ServiceInner>);

#[derive(Debug)]
struct ServiceInner {
    options: ServiceOptions,
    server: EndpointServer,
    http: EndpointHttp,
    permits: Semaphore,
}

impl Service {
    /// Creates a client of the service. Reads the API key from the environment.
    ///
    /// # Errors
    /// Returns [`ExternalError::Invalid`] if the URL is invalid, and [`ExternalError::NoKey`] if
    /// the key is missing.
    pub fn new(options: ServiceOptions) -> Result<Self, ExternalError> {
        let uri = plain_uri(options.url.trim()).map_err(|why| {
            ExternalError::Invalid(format!("the url of a service is invalid: {why}"))
        })?;
        let server =
            EndpointServer::at_uri(uri, options.key_env.as_ref(), |name| std::env::var(name))?;
        let permits = Semaphore::new(options.max_running.clamp(1, Semaphore::MAX_PERMITS));
        Ok(Service(Arc::new(ServiceInner {
            options,
            server,
            http: EndpointHttp::new(None)?,
            permits,
        })))
    }

    /// Posts a JSON request and returns the JSON response. If a retry may succeed, retries the
    /// request with doubling waits.
    ///
    /// # Errors
    /// Returns the last error if no response arrives within the deadline and the maximum number of
    /// tries.
    pub async fn send(&self, question: &Value) -> Result<Value, ExternalError> {
        let ServiceInner { options, server, permits, .. } = &*self.0;
        let mut deadline = CallDeadline::new(options.deadline, server.name.clone());
        let what = format!("a permit for one of {} concurrent requests", options.max_running);
        let permit = deadline.wait(what, permits.acquire()).await?;
        let _permit = permit.map_err(|_| ExternalError::Invalid("the service is closed".into()))?;
        let body = Bytes::from(question.to_string());
        let mut remaining = options.tries.max(1);
        loop {
            remaining -= 1;
            // After a failure, all requests wait for the server's pause.
            deadline.wait(server.pause_text(), sleep(server.remaining_pause())).await?;
            match self.call_once(body.clone(), &mut deadline).await {
                Ok(response) => {
                    server.note_success();
                    return Ok(response);
                }
                Err(error) if remaining > 0 && error.may_pass() => {
                    server.note_cause(&error);
                    if !matches!(error, ExternalError::Busy { .. }) {
                        server.note_rejection(None);
                    }
                    tracing::warn!(
                        endpoint = server.name, %error,
                        "retrying a request to a service"
                    );
                    if server.remaining_pause() > deadline.remaining() {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn call_once(
        &self,
        body: Bytes,
        deadline: &mut CallDeadline,
    ) -> Result<Value, ExternalError> {
        let ServiceInner { options, server, http, .. } = &*self.0;
        let mut response = http.post(server, body, options.max_bytes, deadline).await?;
        let bytes = response.collect(deadline).await?;
        serde_json::from_slice(&bytes).map_err(|error| ExternalError::Protocol {
            endpoint: server.name.clone(),
            why: format!("it is not JSON ({error})"),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// Starts a server that gives these responses (status and body), each to one connection.
    async fn serving(responses: Vec<(&'static str, &'static str)>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/score", listener.local_addr().unwrap());
        tokio::spawn(async move {
            for (status, body) in responses {
                let (mut socket, _) = listener.accept().await.unwrap();
                let mut read = vec![0; 1 << 16];
                let count = socket.read(&mut read).await.unwrap();
                assert!(
                    String::from_utf8_lossy(&read[..count]).starts_with("POST /score HTTP/1.1")
                );
                let head = "content-type: application/json\r\nconnection: close\r\ncontent-length:";
                let response = format!("HTTP/1.1 {status}\r\n{head} {}\r\n\r\n{body}", body.len());
                socket.write_all(response.as_bytes()).await.unwrap();
            }
        });
        url
    }

    fn service(url: String) -> Service {
        Service::new(ServiceOptions {
            deadline: Duration::from_secs(20),
            ..ServiceOptions::new(url)
        })
        .unwrap()
    }

    #[tokio::test]
    async fn failed_request_is_retried() {
        let url =
            serving(vec![("500 Oh", "{}"), ("503 Busy", "{}"), ("200 OK", "{\"score\": 1}")]).await;
        assert_eq!(
            service(url).send(&json!({ "text": "x" })).await.unwrap(),
            json!({ "score": 1 })
        );
    }

    #[tokio::test]
    async fn timed_out_pause_is_reported_with_its_cause() {
        // No server listens on this port.
        let url = "http://127.0.0.1:9/score";
        let deadline = Duration::from_millis(200);
        let options = ServiceOptions { deadline, ..ServiceOptions::new(url) };
        let service = Service::new(options).unwrap();
        // The pause after the failure is longer than the deadline, so the failure is returned.
        let error = service.send(&json!({})).await.unwrap_err();
        assert_eq!(error.code(), "connect", "{error}");
        // Another request only waits for the pause.
        service.0.server.note_rejection(Some(Duration::from_secs(60)));
        let error = service.send(&json!({})).await.unwrap_err();
        assert_eq!(error.code(), "deadline", "{error}");
        let text = error.to_string();
        assert!(text.contains("the pause of http://127.0.0.1:9/score to end"), "{text}");
        assert!(text.contains("cannot connect") && text.contains("refused"), "{text}");
    }

    #[tokio::test]
    async fn permanent_errors_are_not_retried() {
        let url = serving(vec![("400 No", "{\"error\": \"no field text\"}")]).await;
        let error = service(url).send(&json!({})).await.unwrap_err();
        assert!(error.to_string().contains("no field text") && !error.may_pass(), "{error}");
        let url = serving(vec![("200 OK", "{score")]).await;
        let error = service(url).send(&json!({})).await.unwrap_err();
        assert!(error.to_string().contains("it is not JSON") && !error.may_pass(), "{error}");
        // No server listens on this port.
        let options =
            ServiceOptions { tries: 2, ..ServiceOptions::new("http://127.0.0.1:9/score") };
        let error = Service::new(options).unwrap().send(&json!({})).await.unwrap_err();
        assert!(error.to_string().contains("cannot connect") && error.may_pass(), "{error}");
        let error = Service::new(ServiceOptions::new("ftp://x")).unwrap_err();
        assert!(error.to_string().contains("must begin with https:// or http://"), "{error}");
    }
}
