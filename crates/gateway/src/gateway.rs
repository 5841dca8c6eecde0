//! The gateway: its models and sessions, and the choice of the party that answers a call.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;

use levade_call::{
    ApiError, BatchMembership, CallMetrics, CallOptions, ErrorKind, Input, Party, PromptRecording,
    Reader, Recorder, RecorderOptions, ToolCallIds,
};
use levade_http::Access;
use levade_text::Chat;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::call::Call;
use crate::key;
use crate::responses::Memory;
use crate::route::{choose, find_party};
use crate::session::{Session, SessionOptions};
use crate::session_host::{EndRequest, SessionHost};

/// Settings of a gateway.
#[derive(Debug, Clone)]
pub struct Options {
    /// Keys for calls outside of sessions, each of which must have one, and for starting sessions.
    /// If empty, such calls need no key.
    pub keys: Vec<String>,
    /// Whether calls outside of sessions are accepted.
    pub open: bool,
    /// Hosts that the gateway accepts as its own if a request needs no key, and origins whose pages
    /// can call the gateway.
    pub access: Access,
    /// Maximum number of calls that run at once. Values below 1 mean 1.
    pub running: usize,
    /// Maximum number of calls that wait for a permit. Further calls are rejected with status 429.
    pub waiting: usize,
    /// Maximum size of a request body in bytes.
    pub body_bytes: usize,
    /// Timeout for the wait for a permit.
    pub permit_timeout: Duration,
    /// Time for which a call of a session continues after its client disconnected, so that the
    /// client can reconnect.
    pub grace: Duration,
    /// Interval between the keep-alive messages that a waiting client receives.
    pub ping: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            keys: Vec::new(),
            open: true,
            access: Access::default(),
            running: 1024,
            waiting: 4096,
            body_bytes: 64 << 20,
            permit_timeout: Duration::from_secs(3600),
            grace: Duration::from_secs(10),
            ping: Duration::from_secs(15),
        }
    }
}

/// A model that the gateway serves for calls that belong to no attempt.
#[derive(Clone)]
pub struct Model {
    /// Party that answers calls of the model. `party.model` is the name that clients use.
    pub party: Arc<Party>,
    /// Creation time as a Unix timestamp in seconds.
    pub created: u64,
}

/// Origin of a request.
#[derive(Clone, Default)]
pub struct Caller {
    /// Session of the attempt whose key the request has. `None` outside of attempts.
    pub session: Option<Arc<Session>>,
    /// Name of the agent in the request's path or headers, if the request has one.
    pub agent: Option<String>,
    /// Hash of the path and the complete body. `None` until the body is read.
    pub body: Option<u128>,
    /// Whether the client marks the request as a retry.
    pub retries: bool,
    /// Id of the conversation in the header `x-session-id`, for calls outside of attempts.
    pub traffic_id: Option<String>,
    /// Key of the person who makes the call, in the header `x-person-id`.
    pub person: Option<String>,
}

/// Endpoints of models and attempts. Clones share one state.
#[derive(Clone)]
pub struct Gateway(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub options: Options,
    models: RwLock<Vec<Model>>,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    /// Host of the sessions that clients start. Unset if they cannot start any.
    host: OnceLock<Weak<dyn SessionHost>>,
    slots: Arc<Semaphore>,
    /// Number of calls that wait for a permit.
    pub waiting: AtomicU64,
    /// Number of calls that joined an earlier equal call.
    pub rejoined: AtomicU64,
    pub metrics: Arc<CallMetrics>,
    /// Responses outside of sessions, by id, for clients that continue a response.
    pub responses: Mutex<Memory>,
}

impl Gateway {
    /// Creates a gateway that serves `models` outside of attempts.
    pub fn new(models: Vec<Model>, options: Options) -> Self {
        Gateway(Arc::new(Inner {
            slots: Arc::new(Semaphore::new(options.running.clamp(1, Semaphore::MAX_PERMITS))),
            options,
            models: RwLock::new(models),
            sessions: Mutex::default(),
            host: OnceLock::new(),
            waiting: AtomicU64::new(0),
            rejoined: AtomicU64::new(0),
            metrics: Arc::default(),
            responses: Mutex::default(),
        }))
    }

    /// Returns the models that are served outside of attempts, in their order.
    pub fn models(&self) -> Vec<Model> {
        self.0.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the model named `name`. If there is only one model, `default` and the empty name
    /// also refer to that model, because the clients of no provider can omit the name.
    pub(crate) fn model(&self, name: &str) -> Result<Model, ApiError> {
        let models = self.models();
        if let Some(model) = models.iter().find(|model| model.party.model == name) {
            return Ok(model.clone());
        }
        if let ([only], "" | "default") = (&models[..], name) {
            return Ok(only.clone());
        }
        let names: Vec<&str> = models.iter().map(|model| model.party.model.as_str()).collect();
        let message = format!("there is no model {name:?}; available models: {}", names.join(", "));
        Err(ApiError { kind: ErrorKind::NotFound, message, param: Some("model".into()) })
    }

    /// Opens the endpoint of an attempt. The session has new random keys.
    pub fn open(&self, options: SessionOptions) -> Arc<Session> {
        let attempt = options.attempt.clone();
        let session = Arc::new(Session::new(options));
        let mut sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.insert(attempt, Arc::clone(&session));
        session
    }

    /// Lets clients start sessions, which `host` records, until the host is dropped. Only the first
    /// call has an effect.
    pub fn set_session_host(&self, host: &Arc<dyn SessionHost>) {
        let _ = self.0.host.set(Arc::downgrade(host));
    }

    /// Returns the host of the sessions that clients start, if there is one.
    pub(crate) fn host(&self) -> Option<Arc<dyn SessionHost>> {
        self.0.host.get()?.upgrade()
    }

    /// Removes the session of a finished attempt. From now on, requests with its keys get status
    /// 410.
    pub fn forget(&self, session: &Session) {
        let mut sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.remove(&session.options.attempt);
    }

    /// Returns the session that the key `text` belongs to, or `None` if `text` does not have the
    /// format of an attempt's key. The caller must check whether the key is for calls or for
    /// rewards.
    pub(crate) fn session_of(&self, text: &str) -> Result<Option<Arc<Session>>, ApiError> {
        let Some(attempt) = key::attempt_of(text) else { return Ok(None) };
        let sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(session) = sessions.get(attempt) else {
            let message = format!(
                "the attempt {attempt} has ended or belongs to another process; its key is no \
                 longer valid"
            );
            return Err(ApiError::new(ErrorKind::AttemptEnded, message));
        };
        if !session.key.matches(text) && !session.reward_key.matches(text) {
            return Err(ApiError::new(
                ErrorKind::Unauthorized,
                "the key is not valid for the attempt that it names",
            ));
        }
        Ok(Some(Arc::clone(session)))
    }

    /// Creates a call id that is unique among all processes.
    pub(crate) fn call_id(&self) -> String {
        self.0.metrics.next_id()
    }

    /// Counts a request field that is ignored, and logs its first occurrence.
    pub(crate) fn unknown_field(&self, api: &str, field: &str) {
        self.0.metrics.count_ignored_field(api, field);
    }

    /// Returns the ignored request fields, with the number of their occurrences.
    pub fn unknown_fields(&self) -> BTreeMap<String, u64> {
        self.0.metrics.ignored_fields()
    }

    /// Creates a recorder for a session. `calls` and `tokens` limit the calls and the sampled
    /// tokens of the attempt.
    pub fn recorder(
        &self,
        attempt: &str,
        (seed, stream): (u64, u64),
        (calls, tokens): (u32, usize),
    ) -> Arc<Recorder> {
        Recorder::new(RecorderOptions {
            name: attempt.to_owned(),
            seed,
            stream,
            max_calls: calls,
            max_tokens: tokens,
            grace: self.0.options.grace,
            tool_call_ids: ToolCallIds::FromStream,
            prompt_recording: PromptRecording::WithCompletion,
            metrics: Arc::clone(&self.0.metrics),
        })
    }

    /// Starts a call and returns a reader of its events. If a call has no reader left, the call is
    /// aborted: immediately, or after a grace period if the call belongs to an attempt.
    ///
    /// # Errors
    /// Returns an error if the request is rejected. In this case nothing is recorded.
    pub async fn call(&self, caller: &Caller, call: Call) -> Result<Reader, ApiError> {
        self.call_in(caller, call, None).await
    }

    /// Starts a call that is recorded only together with the remaining calls of its batch.
    pub(crate) async fn call_in(
        &self,
        caller: &Caller,
        call: Call,
        batch: Option<BatchMembership>,
    ) -> Result<Reader, ApiError> {
        if let (Some(session), Some(body)) = (&caller.session, caller.body)
            && let Some(earlier) = session.find_repeated(body, caller.retries)
        {
            self.0.rejoined.fetch_add(1, Ordering::Relaxed);
            return Ok(earlier.read());
        }
        let started = self.start(caller, call, batch).await;
        if let Err(error) = &started {
            self.0.metrics.failed.fetch_add(1, Ordering::Relaxed);
            if let Some(session) = &caller.session {
                session.recorder().count_rejection(error);
            }
        }
        started
    }

    async fn start(
        &self,
        caller: &Caller,
        call: Call,
        batch: Option<BatchMembership>,
    ) -> Result<Reader, ApiError> {
        let party = self.party(caller, &call)?;
        let permit = self.acquire_permit().await?;
        let options = CallOptions { permit: Some(Box::new(permit)), batch };
        if caller.session.is_none()
            && let Some(host) = self.host()
            && let Some(session) = {
                let Caller { traffic_id, person, .. } = caller;
                let seed = call.request.sampling.seed;
                host.traffic(traffic_id.as_deref(), person.as_deref(), seed).await?
            }
        {
            let route = choose(&session.options.routes, None, &call);
            let party = route.map_or(party, |route| Arc::clone(&route.party));
            let reader = levade_call::call(session.recorder(), &party, call.request, options).await;
            if caller.traffic_id.is_none() {
                // The call is a session of its own, which ends with the call.
                tokio::spawn(async move {
                    session.recorder().wait_until_idle().await;
                    // The host logs a failure.
                    let _ = host.end(&session, EndRequest::default()).await;
                });
            }
            return reader;
        }
        let Some(session) = &caller.session else {
            let recorder =
                Recorder::standalone(call.request.sampling.seed, Arc::clone(&self.0.metrics));
            return levade_call::call(&recorder, &party, call.request, options).await;
        };
        let reader = levade_call::call(session.recorder(), &party, call.request, options).await?;
        if let Some(body) = caller.body {
            session.keep(body, reader.transcript());
        }
        Ok(reader)
    }

    /// Returns the party that answers a call.
    ///
    /// # Errors
    /// Returns an [`ErrorKind::NotFound`] error if there is no such agent or model.
    pub(crate) fn party(&self, caller: &Caller, call: &Call) -> Result<Arc<Party>, ApiError> {
        let Some(session) = &caller.session else {
            return Ok(Arc::clone(&self.model(&call.model)?.party));
        };
        let routes = &session.options.routes;
        find_party(routes, caller.agent.as_deref(), call).ok_or_else(|| {
            let names: Vec<&str> = routes.iter().map(|route| route.party.agent.as_str()).collect();
            let agent = caller.agent.as_deref().unwrap_or_default();
            let message = format!(
                "this attempt has no agent {agent:?}; available agents: {}",
                names.join(", ")
            );
            ApiError::new(ErrorKind::NotFound, message)
        })
    }

    /// Returns the party that answers calls to the model `name`.
    pub(crate) fn party_of_model(
        &self,
        caller: &Caller,
        name: &str,
    ) -> Result<Arc<Party>, ApiError> {
        self.party(caller, &Call::new(name, Input::Tokens(Vec::new())))
    }

    /// Returns the chat of the party that answers a call.
    ///
    /// # Errors
    /// Returns an error if there is no such agent or model, or if the party is an external chat
    /// API.
    pub(crate) fn chat_of(&self, caller: &Caller, call: &Call) -> Result<Arc<Chat>, ApiError> {
        Ok(Arc::clone(self.party(caller, call)?.tokens()?.format.chat()))
    }

    /// Waits for one of the permits that limit the number of running calls.
    pub(crate) async fn acquire_permit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let slots = Arc::clone(&self.0.slots);
        if let Ok(permit) = Arc::clone(&slots).try_acquire_owned() {
            return Ok(permit);
        }
        let options = &self.0.options;
        let waiting = &self.0.waiting;
        if waiting.fetch_add(1, Ordering::Relaxed) >= options.waiting as u64 {
            waiting.fetch_sub(1, Ordering::Relaxed);
            let message =
                format!("the queue is full with {} waiting calls; retry later", options.waiting);
            return Err(ApiError::new(ErrorKind::Busy(Duration::from_secs(1)), message));
        }
        let _waiter = Waiter(self);
        match tokio::time::timeout(options.permit_timeout, slots.acquire_owned()).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) => {
                Err(ApiError::new(ErrorKind::Unavailable, "the gateway is shutting down"))
            }
            Err(_) => {
                let message = format!(
                    "timed out after {:?} waiting for one of {} running calls to end",
                    options.permit_timeout, options.running
                );
                Err(ApiError::new(ErrorKind::Deadline, message))
            }
        }
    }
}

/// Counts a call as waiting for a permit until dropped.
struct Waiter<'a>(&'a Gateway);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
