//! Toolboxes that call web services: an HTTP endpoint as one tool, or a node of AgentDock.

mod endpoint;
mod node;
pub(super) mod retries;
mod services;

use std::time::Duration;

use bytes::Bytes;
use hyper::header::HeaderMap;
use hyper::{Method, StatusCode};
use levade_http::{Bounds, Client, ClientRequest, ClientResponse, HttpError};

pub use endpoint::{HttpEndpoint, HttpKeys};
pub use node::{AgentDockNode, McpapiKeys};
pub(super) use services::PermittedHosts;

use super::{CallError, ToolOutput};
use retries::{INITIAL_RETRY_WAIT, MAX_RETRY_WAIT, retry_after};

/// Maximum size of a response body, in bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// Maximum number of redirects that a request follows.
const MAX_REDIRECTS: u32 = 5;

/// HTTP client of a service with the service's headers and retry limit.
#[derive(Debug, Clone)]
pub(super) struct HttpCaller {
    pub client: Client,
    /// Headers of every request, such as API keys.
    pub headers: HeaderMap,
    /// Maximum number of retries of a request that the service has not accepted.
    pub retries: u32,
}

impl HttpCaller {
    /// Sends an HTTP request and returns the response. Retries if the connection fails or the
    /// service responds with 429 or 503. After other failures, retries only GET and HEAD requests,
    /// which have no effect.
    async fn send(
        &self,
        method: Method,
        url: String,
        body: Bytes,
    ) -> Result<ClientResponse, HttpError> {
        // The set's timeout already limits the call. This one is only for requests that hang beyond
        // it.
        let bounds = Bounds {
            deadline: Duration::from_secs(24 * 3600),
            bytes: MAX_RESPONSE_BYTES,
            redirects: MAX_REDIRECTS,
        };
        let changes_nothing = matches!(method, Method::GET | Method::HEAD);
        let mut wait = INITIAL_RETRY_WAIT;
        let mut tried = 0;
        loop {
            let mut headers = self.headers.clone();
            if !body.is_empty() {
                headers
                    .entry("content-type")
                    .or_insert(hyper::header::HeaderValue::from_static("application/json"));
            }
            let request = ClientRequest {
                method: method.clone(),
                url: url.clone(),
                headers,
                body: body.clone(),
            };
            let response = self.client.send(request, bounds).await;
            let requested = match &response {
                Ok(result) => match result.status {
                    StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                        Some(retry_after(&result.headers))
                    }
                    status if status.is_server_error() && changes_nothing => Some(None),
                    _ => None,
                },
                Err(HttpError::Connect { .. }) => Some(None),
                Err(error) if error.is_transient() && changes_nothing => Some(None),
                Err(_) => None,
            };
            let next_wait = requested
                .filter(|requested| tried < self.retries && *requested <= Some(MAX_RETRY_WAIT));
            let Some(requested) = next_wait else { return response };
            tokio::time::sleep(requested.unwrap_or(wait)).await;
            wait = wait.mul_f64(1.5);
            tried += 1;
        }
    }
}

/// Describes a failed HTTP request to the model.
fn request_failure(error: &HttpError) -> ToolOutput {
    match error {
        // The model, or a page that it requested, has named the host.
        HttpError::Denied(_) | HttpError::Invalid(_) => {
            ToolOutput::error(CallError::BadArguments, error.to_string())
        }
        HttpError::TooLarge { .. } | HttpError::Redirects { .. } => {
            ToolOutput::error(CallError::Failed, error.to_string())
        }
        _ => ToolOutput::error(CallError::Unavailable, error.to_string()),
    }
}

#[cfg(test)]
mod testing;
