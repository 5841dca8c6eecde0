//! HTTP connection to a group of learners: its address, its responses, and the state of its
//! processes.

use std::any::Any;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use hyper::{Method, StatusCode};
use levade_http::{Bounds, Client, ClientRequest, ClientResponse, Hosts};
use levade_policy::PolicyError;
use levade_policy::process_time::{sleep, with_timeout};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::description::Description;
use super::wait::LearnerProgress;

/// Interval at which deadlines are checked and the learner's progress is queried.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout for queries that require no computation.
const SMALL_CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// Address and timeouts of a group of learners.
#[derive(Clone, PartialEq, Eq)]
pub struct LearnerOptions {
    /// URL of the group's rank 0, such as `http://127.0.0.1:29700`.
    pub url: String,
    /// Bearer token that the group requires.
    pub token: String,
    /// Timeout for one operation: a micro-batch, an optimizer step, a forward pass, or writing or
    /// reading weights.
    pub call: Duration,
    /// Maximum time in which the group does not report its progress.
    pub silence: Duration,
    /// Maximum time for which the connection may be lost.
    pub reconnect: Duration,
    /// Timeout for the group's first description, which it returns once its models are loaded.
    pub start: Duration,
}

impl fmt::Debug for LearnerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LearnerOptions { url, call, silence, reconnect, .. } = self;
        write!(f, "LearnerOptions {{ {url}, {call:?}, {silence:?}, {reconnect:?} }}")
    }
}

/// Processes of a learner group that this process has started.
pub struct Processes {
    /// Reports how the processes exited, once they have.
    pub ended: watch::Receiver<Option<String>>,
    /// Guard that ends the processes when dropped.
    pub guard: Box<dyn Any + Send + Sync>,
}

/// HTTP connection to a group of learners.
pub(super) struct GroupConnection {
    pub options: LearnerOptions,
    pub client: Client,
    /// Headers that every request contains.
    pub headers: HeaderMap,
    ended: Option<watch::Receiver<Option<String>>>,
    _guard: Option<Box<dyn Any + Send + Sync>>,
}

/// Reason why sending a call to a learner brought no result.
pub(super) enum CallFailure {
    /// The connection broke, or the group is busy. The same call can be sent again.
    Retry(String),
    /// The call must not be sent again.
    Permanent(PolicyError),
}

/// JSON body of an error response: `{"error": …}`.
#[derive(Deserialize)]
struct ErrorBody {
    error: ErrorReason,
}

#[derive(Deserialize)]
struct ErrorReason {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

impl GroupConnection {
    /// Creates a connection to a group of learners, without contacting the group.
    ///
    /// # Errors
    /// Returns an error if the token is not a valid header value, or if TLS cannot be set up.
    pub fn new(options: LearnerOptions, processes: Option<Processes>) -> Result<Self, PolicyError> {
        let invalid =
            |why: String| PolicyError::Invalid(format!("the learner at {}: {why}", options.url));
        let token = HeaderValue::from_str(&format!("Bearer {}", options.token));
        let mut token = token.map_err(|_| {
            invalid("its token is not a valid header value; use visible ASCII characters".into())
        })?;
        token.set_sensitive(true);
        let headers = HeaderMap::from_iter([(AUTHORIZATION, token)]);
        let client =
            Client::new(Hosts::default(), None).map_err(|error| invalid(error.to_string()))?;
        let (ended, guard) = processes.map(|Processes { ended, guard }| (ended, guard)).unzip();
        Ok(GroupConnection { options, client, headers, ended, _guard: guard })
    }

    /// Waits until the group has started, and returns its description.
    ///
    /// # Errors
    /// Returns an error if the group rejects the query, exits, or does not start in time.
    pub async fn await_description(&self) -> Result<Description, PolicyError> {
        let timeout = self.options.start;
        let mut last = String::new();
        let described = with_timeout(timeout, async {
            loop {
                let described = tokio::select! {
                    ended = self.wait_for_exit() => return Err(self.stopped_error(&ended)),
                    described = self.get_json("/v1/describe") => described,
                };
                match described {
                    Err(PolicyError::Stopped(why)) => last = why.to_string(),
                    described => return described,
                }
                sleep(POLL_INTERVAL).await;
            }
        });
        described.await.unwrap_or_else(|| {
            let what = format!("the learner at {} to describe itself: {last}", self.options.url);
            Err(PolicyError::Deadline(timeout, what))
        })
    }

    /// Waits for the poll interval, then returns the progress of the group's current call, or
    /// `None` if the group does not report progress.
    pub async fn progress(&self) -> Option<LearnerProgress> {
        tokio::time::sleep(POLL_INTERVAL).await;
        self.get_json("/v1/progress").await.ok()
    }

    /// Gets `path` from the group, and parses the JSON response.
    pub async fn get_json<T: DeserializeOwned>(&self, path: &str) -> Result<T, PolicyError> {
        let url = self.join_url(path);
        let request = ClientRequest {
            method: Method::GET,
            url: url.clone(),
            headers: self.headers.clone(),
            body: Bytes::new(),
        };
        let bounds = Bounds { deadline: SMALL_CALL_TIMEOUT, bytes: 1 << 20, redirects: 0 };
        let response = self.client.send(request, bounds).await.map_err(|error| {
            if error.is_transient() {
                PolicyError::Stopped(error.to_string().into())
            } else {
                PolicyError::Invalid(error.to_string())
            }
        })?;
        let body = self.check_response(response).map_err(|miss| match miss {
            CallFailure::Retry(why) => PolicyError::Stopped(why.into()),
            CallFailure::Permanent(error) => error,
        })?;
        serde_json::from_slice(&body).map_err(|error| {
            PolicyError::Invalid(format!("the response of {url} cannot be read: {error}"))
        })
    }

    /// Returns the body of a successful response to a call, or the reason of the failure.
    pub fn check_response(&self, response: ClientResponse) -> Result<Bytes, CallFailure> {
        if response.status.is_success() {
            return Ok(response.body);
        }
        let ErrorBody { error: ErrorReason { code, message } } =
            serde_json::from_slice(&response.body).unwrap_or_else(|_| ErrorBody {
                error: ErrorReason {
                    code: String::new(),
                    message: response.text().chars().take(500).collect(),
                },
            });
        let url = &self.options.url;
        Err(CallFailure::Permanent(match (response.status, code.as_str()) {
            (StatusCode::SERVICE_UNAVAILABLE, "busy") => return Err(CallFailure::Retry(message)),
            (StatusCode::CONFLICT, _) => PolicyError::PlanMismatch(message),
            (StatusCode::UNPROCESSABLE_ENTITY, "no_predictions") => PolicyError::NoPredictions,
            (StatusCode::UNPROCESSABLE_ENTITY, "no_value_head") => PolicyError::NoValueHead,
            (StatusCode::UNAUTHORIZED, _) => PolicyError::Invalid(format!(
                "the learner at {url} does not accept the token; send the token that it was \
                 started with"
            )),
            (StatusCode::INSUFFICIENT_STORAGE, _) | (_, "storage") => PolicyError::Storage(message),
            (status, _) if status.is_client_error() => PolicyError::Invalid(format!(
                "the learner at {url} rejects the call: {message} ({status})"
            )),
            (status, _) => self.stopped_error(&format!("{message} ({status})")),
        }))
    }

    pub fn join_url(&self, path: &str) -> String {
        format!("{}{path}", self.options.url.trim_end_matches('/'))
    }

    /// Returns whether this process started the group's processes.
    pub fn is_own(&self) -> bool {
        self.ended.is_some()
    }

    /// Waits until the group's processes have exited, and returns a description of their exit.
    /// Never returns if this process did not start them.
    pub async fn wait_for_exit(&self) -> String {
        let Some(ended) = &self.ended else { return std::future::pending().await };
        let mut ended = ended.clone();
        let ended =
            ended.wait_for(Option::is_some).await.map(|why| why.clone().unwrap_or_default());
        ended.unwrap_or_else(|_| "the learner's processes are no longer supervised".into())
    }

    pub fn stopped_error(&self, why: &str) -> PolicyError {
        PolicyError::Stopped(format!("the learner at {} ({why})", self.options.url).into())
    }
}
