//! Toolboxes that are services on the web: one endpoint as a tool, or a node of AgentDock.

mod endpoint;
mod node;
pub(super) mod retries;
mod services;

use std::time::Duration;

use bytes::Bytes;
use hyper::header::HeaderMap;
use hyper::{Method, StatusCode};
use levade_http::{Ask, Bounds, Client, HttpError, Reply};

pub use endpoint::{Endpoint, HttpKeys};
pub use node::{McpapiKeys, Node};
pub(super) use services::Services;

use super::{CallError, ToolOutput};
use retries::{FIRST_WAIT, LONGEST_WAIT, retry_after};

/// Most bytes of an answer.
const MOST_BYTES: usize = 64 << 20;

/// Most redirects that are followed.
const REDIRECTS: u32 = 5;

/// How a service is asked.
#[derive(Debug, Clone)]
pub(super) struct Asks {
    pub client: Client,
    /// Headers of every question, keys for instance.
    pub headers: HeaderMap,
    /// How often a question is repeated that nobody has taken.
    pub retries: u32,
}

impl Asks {
    /// Asks, and again where the service was not there or turned the question away; after other failures only
    /// where the question changes nothing.
    async fn ask(&self, method: Method, url: String, body: Bytes) -> Result<Reply, HttpError> {
        // The deadline of a call stands around this, so this one is for what hangs behind it.
        let bounds =
            Bounds { deadline: Duration::from_secs(24 * 3600), bytes: MOST_BYTES, redirects: REDIRECTS };
        let changes_nothing = matches!(method, Method::GET | Method::HEAD);
        let mut wait = FIRST_WAIT;
        let mut tried = 0;
        loop {
            let mut headers = self.headers.clone();
            if !body.is_empty() {
                headers
                    .entry("content-type")
                    .or_insert(hyper::header::HeaderValue::from_static("application/json"));
            }
            let ask = Ask { method: method.clone(), url: url.clone(), headers, body: body.clone() };
            let answer = self.client.ask(ask, bounds).await;
            let asked = match &answer {
                Ok(reply) => match reply.status {
                    StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                        Some(retry_after(&reply.headers))
                    }
                    status if status.is_server_error() && changes_nothing => Some(None),
                    _ => None,
                },
                Err(HttpError::Connect { .. }) => Some(None),
                Err(error) if error.may_pass() && changes_nothing => Some(None),
                Err(_) => None,
            };
            let again = asked.filter(|asked| tried < self.retries && *asked <= Some(LONGEST_WAIT));
            let Some(asked) = again else { return answer };
            tokio::time::sleep(asked.unwrap_or(wait)).await;
            wait = wait.mul_f64(1.5);
            tried += 1;
        }
    }
}

/// What the model reads of a question that has no answer.
fn unanswered(error: &HttpError) -> ToolOutput {
    match error {
        // The model has named the host, or the page that led there.
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
