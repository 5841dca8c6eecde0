//! Calls of a group of learners, each executed once, however often it is sent.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use levade_http::{Bounds, ClientRequest, HttpError};
use levade_policy::PolicyError;
use levade_policy::process_time::{sleep, with_timeout};

use super::description::{Description, LearnerRequirements, POLICY};
use super::link::{CallFailure, GroupConnection, LearnerOptions, POLL_INTERVAL, Processes};
use super::wait::{CallTimeouts, LearnerWait};
use super::wire::Body;

const CALL: HeaderName = HeaderName::from_static("x-levade-call");
const STEP: HeaderName = HeaderName::from_static("x-levade-step");
const SAFETENSORS: HeaderValue = HeaderValue::from_static("application/x-safetensors");

/// Maximum size of a learner's response, in bytes. Responses contain numbers per token of a batch.
const MAX_BYTES: usize = 1 << 30;
/// Deadline that is passed to the HTTP client and never reached. `LearnerWait` enforces the actual
/// deadline, which progress extends.
const NO_DEADLINE: Duration = Duration::from_secs(u32::MAX as u64);

/// Connection to a group of learners. The group executes one call at a time.
pub(super) struct LearnerGroup {
    link: GroupConnection,
    description: Description,
    /// Prefix of call IDs (process ID and start time), which distinguishes the calls of this
    /// process.
    origin: String,
    calls: AtomicU64,
    state: Mutex<GroupState>,
}

/// State of a group that decides whether it may get further calls.
#[derive(Default)]
struct GroupState {
    /// Reason why the group's weights are unreliable. `None` while they are reliable.
    failed: Option<String>,
    /// Version of the policy's weights that was published last.
    published: Option<u64>,
}

/// One call to a learner of the group.
pub(super) struct LearnerCall<'a> {
    pub learner: &'a str,
    pub verb: &'static str,
    pub body: Body,
    /// Describes the operation that the caller waits for, given the number of completed
    /// micro-batches.
    pub what: &'a (dyn Fn(usize) -> String + Sync),
}

impl LearnerGroup {
    /// Connects to a group of learners, and checks that it fits the run.
    ///
    /// # Errors
    /// Returns an error if the token is invalid, the group does not respond, or the group does not
    /// fit the run.
    pub async fn connect(
        options: LearnerOptions,
        processes: Option<Processes>,
        expected: &LearnerRequirements,
    ) -> Result<Arc<Self>, PolicyError> {
        let link = GroupConnection::new(options, processes)?;
        let description = link.await_description().await?;
        description.check(expected, &link.options.url)?;
        let nanos = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos());
        let origin = format!("{}-{nanos:x}", std::process::id());
        Ok(Arc::new(LearnerGroup {
            link,
            description,
            origin,
            calls: AtomicU64::new(0),
            state: Mutex::default(),
        }))
    }

    /// Returns the facts that the group reports about itself.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Returns whether this process started the group's processes.
    pub fn is_own(&self) -> bool {
        self.link.is_own()
    }

    /// Returns the URL of the group's rank 0.
    pub fn url(&self) -> &str {
        &self.link.options.url
    }

    /// Waits until the group's processes have exited, and returns the resulting error. Never
    /// returns if this process did not start them.
    pub async fn wait_for_exit(&self) -> PolicyError {
        self.link.stopped_error(&self.link.wait_for_exit().await)
    }

    /// Records the version of the policy's weights that was published last.
    pub fn record_published(&self, version: u64) {
        self.lock_state().published = Some(version);
    }

    /// Executes a call of a learner. Sends the call again with the same id if its response was
    /// lost. Calls `done` for each completed micro-batch. Returns the response and the number of
    /// completed micro-batches.
    ///
    /// # Errors
    /// Returns [`PolicyError::Stopped`] if the group is unreachable or has failed, and
    /// [`PolicyError::Deadline`] with the operation that timed out. The weights are then
    /// unreliable, and no further call is sent. Otherwise returns the group's rejection.
    pub async fn call(
        &self,
        call: LearnerCall<'_>,
        done: &mut (dyn FnMut() + Send),
    ) -> Result<(Body, usize), PolicyError> {
        if let Some(why) = self.lock_state().failed.clone() {
            return Err(self.link.stopped_error(&why));
        }
        let result = self.call_with_retries(call, done).await;
        if let Err(error @ (PolicyError::Stopped(_) | PolicyError::Deadline(..))) = &result {
            self.lock_state().failed.get_or_insert_with(|| error.to_string());
        }
        result
    }

    async fn call_with_retries(
        &self,
        call: LearnerCall<'_>,
        done: &mut (dyn FnMut() + Send),
    ) -> Result<(Body, usize), PolicyError> {
        let LearnerCall { learner, verb, body, what } = call;
        let bytes = body.to_bytes().map_err(|why| {
            PolicyError::Invalid(format!("the learner call {verb} cannot be encoded: {why}"))
        })?;
        drop(body);
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let id = format!("{}-{number}", self.origin);
        let request = ClientRequest {
            method: Method::POST,
            url: self.link.join_url(&format!("/v1/learners/{learner}/{verb}")),
            headers: self.headers_with_id(&id)?,
            body: bytes,
        };
        let limits =
            CallTimeouts { call: self.link.options.call, silence: self.link.options.silence };
        let mut wait =
            LearnerWait::new(limits, format!("the learner at {}", self.link.options.url), what);
        tracing::debug!(learner, verb, call = id, bytes = request.body.len(), "calling a learner");
        loop {
            match self.call_once(&request, &id, &mut wait, done).await {
                Ok(response) => {
                    let read = Body::read(&response).map_err(|why| {
                        self.link.stopped_error(&format!(
                            "the learner's response to {verb} cannot be read: {why}"
                        ))
                    })?;
                    return Ok((read, wait.done));
                }
                Err(CallFailure::Permanent(error)) => return Err(error),
                Err(CallFailure::Retry(why)) => {
                    tracing::warn!(learner, verb, call = id, why, "retrying a call of a learner");
                    self.reconnect(&why, &mut wait).await?;
                }
            }
        }
    }

    /// Sends the request of a call once, and waits for a response, a deadline or the exit of the
    /// learner's processes.
    async fn call_once(
        &self,
        request: &ClientRequest,
        id: &str,
        wait: &mut LearnerWait<'_>,
        done: &mut (dyn FnMut() + Send),
    ) -> Result<Bytes, CallFailure> {
        let bounds = Bounds { deadline: NO_DEADLINE, bytes: MAX_BYTES, redirects: 0 };
        let mut response = std::pin::pin!(self.link.client.send(request.clone(), bounds));
        let mut progress = Box::pin(self.link.progress());
        loop {
            tokio::select! {
                biased;
                answer = &mut response => return match answer {
                    Ok(response) => self.link.check_response(response),
                    Err(error @ (HttpError::Connect { .. } | HttpError::Broken { .. })) => {
                        Err(CallFailure::Retry(error.to_string()))
                    }
                    Err(error) => Err(CallFailure::Permanent(PolicyError::Invalid(error.to_string()))),
                },
                why = self.link.wait_for_exit() => return Err(CallFailure::Permanent(self.link.stopped_error(&why))),
                heard = &mut progress => {
                    if let Some(heard) = heard {
                        (0..wait.note_progress(id, &heard)).for_each(|_| done());
                    }
                    wait.check_deadlines().map_err(CallFailure::Permanent)?;
                    progress = Box::pin(self.link.progress());
                }
                () = tokio::time::sleep(POLL_INTERVAL) => wait.check_deadlines().map_err(CallFailure::Permanent)?,
            }
        }
    }

    /// Reconnects to the group after a lost connection. Fails if the group has lost its state or a
    /// timeout passes. `why` describes the lost connection.
    async fn reconnect(&self, why: &str, wait: &mut LearnerWait<'_>) -> Result<(), PolicyError> {
        let timeout = self.link.options.reconnect;
        let mut last = String::new();
        let found = with_timeout(timeout, async {
            let mut pause = Duration::from_millis(250);
            loop {
                let described = tokio::select! {
                    ended = self.link.wait_for_exit() => return Err(self.link.stopped_error(&ended)),
                    described = self.describe_after(pause) => described,
                };
                pause = (2 * pause).min(POLL_INTERVAL);
                match described {
                    Ok(now) if self.has_same_state(&now) => return Ok(()),
                    Ok(_) => {
                        return Err(self.link.stopped_error(&format!(
                            "{why}; the learner was restarted in the meantime and has lost its \
                             weights"
                        )));
                    }
                    Err(error) => last = error.to_string(),
                }
            }
        });
        found.await.unwrap_or_else(|| {
            Err(self
                .link
                .stopped_error(&format!("the connection was lost for {timeout:?}: {last}")))
        })?;
        wait.note_contact();
        wait.check_deadlines()
    }

    /// Waits for `pause`, then queries the group's description.
    async fn describe_after(&self, pause: Duration) -> Result<Description, PolicyError> {
        sleep(pause).await;
        self.link.get_json("/v1/describe").await
    }

    /// Returns whether the group still has the state that this run relies on: it was not restarted,
    /// and has the published version of the weights or a newer one.
    fn has_same_state(&self, now: &Description) -> bool {
        let published = self.lock_state().published;
        let version = now.learners.get(POLICY).and_then(|policy| policy.version);
        // A call whose response was lost may have published the next version.
        let fits =
            published.is_none_or(|published| version.is_some_and(|version| version >= published));
        now.instance == self.description.instance && fits
    }

    fn headers_with_id(&self, id: &str) -> Result<HeaderMap, PolicyError> {
        let step = self.lock_state().published.unwrap_or_default();
        let mut headers = self.link.headers.clone();
        headers.insert(CALL, to_header_value(id)?);
        headers.insert(STEP, to_header_value(&step.to_string())?);
        headers.insert(CONTENT_TYPE, SAFETENSORS);
        Ok(headers)
    }

    fn lock_state(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn to_header_value(text: &str) -> Result<HeaderValue, PolicyError> {
    HeaderValue::from_str(text).map_err(|error| PolicyError::Invalid(format!("{text:?}: {error}")))
}
