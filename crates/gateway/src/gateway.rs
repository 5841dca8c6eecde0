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
use crate::responses::ResponseMemory;
use crate::route::{choose_route, find_party};
use crate::session::{Session, SessionOptions};
use crate::session_host::{EndRequest, SessionHost};

/// Settings of a gateway.
#[derive(Debug, Clone)]
pub struct GatewayOptions {
    /// API keys for starting sessions and for calls outside of sessions. Each of these requests
    /// must have one of the keys. If the list is empty, they need no key.
    pub keys: Vec<String>,
    /// Whether the gateway accepts calls outside of sessions.
    pub open: bool,
    /// Hosts that the gateway accepts as its own if a request needs no key, and origins whose pages
    /// can call the gateway.
    pub access: Access,
    /// Maximum number of calls that sample at the same time. Values below 1 mean 1.
    pub running: usize,
    /// Maximum number of calls in the queue for a permit to run. Further calls are rejected with
    /// status 429.
    pub waiting: usize,
    /// Maximum size of a request body in bytes.
    pub body_bytes: usize,
    /// Maximum time that a call waits for a permit to run.
    pub permit_timeout: Duration,
    /// Time for which a call of a session continues after its client disconnected, so that the
    /// client can reconnect.
    pub grace: Duration,
    /// Interval between the keep-alive messages that a waiting client receives.
    pub ping: Duration,
}

impl Default for GatewayOptions {
    fn default() -> Self {
        GatewayOptions {
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

/// Sender of a request: the attempt and agent, or the person and conversation, that the request
/// belongs to.
#[derive(Clone, Default)]
pub struct Caller {
    /// Session that the request's key belongs to. `None` if the call is outside of attempts.
    pub session: Option<Arc<Session>>,
    /// Name of the agent in the request's path or headers. `None` if the request names no agent.
    pub agent: Option<String>,
    /// Hash of the request's path and body. `None` until the body has been read.
    pub body: Option<u128>,
    /// Whether the client marks the request as a retry.
    pub retries: bool,
    /// Id of the conversation from the header `x-session-id`. Only for calls outside of attempts.
    pub traffic_id: Option<String>,
    /// Key of the person who makes the call, from the header `x-person-id`. `None` if the header is
    /// absent.
    pub person: Option<String>,
}

/// HTTP server of model APIs, for attempts and for calls outside of attempts. Clones share one
/// state.
#[derive(Clone)]
pub struct Gateway(pub(crate) Arc<GatewayInner>);

pub(crate) struct GatewayInner {
    pub options: GatewayOptions,
    models: RwLock<Vec<Model>>,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    /// Host of the sessions that clients start. Unset if clients cannot start sessions.
    host: OnceLock<Weak<dyn SessionHost>>,
    slots: Arc<Semaphore>,
    /// Number of calls that wait for a permit.
    pub waiting: AtomicU64,
    /// Number of repeated calls that joined an earlier call with the same body.
    pub rejoined: AtomicU64,
    pub metrics: Arc<CallMetrics>,
    /// Stored responses of calls outside of sessions, by id, so that later calls can continue them.
    pub responses: Mutex<ResponseMemory>,
}

impl Gateway {
    /// Creates a gateway that serves `models` outside of attempts.
    pub fn new(models: Vec<Model>, options: GatewayOptions) -> Self {
        Gateway(Arc::new(GatewayInner {
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

    /// Returns the models that the gateway serves outside of attempts, in the order in which they
    /// were passed.
    pub fn models(&self) -> Vec<Model> {
        self.0.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the model named `name`. If the gateway serves only one model, the names `default`
    /// and `""` also refer to that model, because many clients require a model name and others send
    /// none.
    pub(crate) fn find_model(&self, name: &str) -> Result<Model, ApiError> {
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

    /// Creates a session for an attempt, with new random keys, and serves its endpoint.
    pub fn open_session(&self, options: SessionOptions) -> Arc<Session> {
        let attempt = options.attempt.clone();
        let session = Arc::new(Session::new(options));
        let mut sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.insert(attempt, Arc::clone(&session));
        session
    }

    /// Lets clients start sessions, until `host` is dropped. `host` records these sessions. Only
    /// the first call of this function has an effect.
    pub fn set_session_host(&self, host: &Arc<dyn SessionHost>) {
        let _ = self.0.host.set(Arc::downgrade(host));
    }

    /// Returns the host of the sessions that clients start, or `None` if it is unset or was
    /// dropped.
    pub(crate) fn session_host(&self) -> Option<Arc<dyn SessionHost>> {
        self.0.host.get()?.upgrade()
    }

    /// Removes the session of a finished attempt. Later requests with its keys get status 410.
    pub fn forget_session(&self, session: &Session) {
        let mut sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.remove(&session.options.attempt);
    }

    /// Returns the session that the key `text` belongs to, or `None` if `text` does not have the
    /// format of an attempt's key. The key can be the session's key for calls or its key for
    /// rewards; the caller must check which.
    pub(crate) fn find_session_by_key(&self, text: &str) -> Result<Option<Arc<Session>>, ApiError> {
        let Some(attempt) = key::attempt_name(text) else { return Ok(None) };
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
                "the key names an attempt, but is not valid for it; send the attempt's own key",
            ));
        }
        Ok(Some(Arc::clone(session)))
    }

    /// Creates a call id that is unique across all processes.
    pub(crate) fn new_call_id(&self) -> String {
        self.0.metrics.next_id()
    }

    /// Counts a request field that is ignored, and logs its first occurrence.
    pub(crate) fn count_unknown_field(&self, api: &str, field: &str) {
        self.0.metrics.count_ignored_field(api, field);
    }

    /// Returns the names of ignored request fields, each with the number of its occurrences.
    pub fn unknown_fields(&self) -> BTreeMap<String, u64> {
        self.0.metrics.ignored_fields()
    }

    /// Creates a recorder for the session of the attempt named `attempt`. `calls` and `tokens` are
    /// the maximum numbers of calls and of sampled tokens of the attempt.
    pub fn new_recorder(
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

    /// Starts a call and returns a reader of its events. If all readers of a call are dropped, the
    /// call is aborted: immediately, or after a grace period if the call belongs to an attempt.
    ///
    /// # Errors
    /// Returns an error if the request is rejected. A rejected request is not recorded.
    pub async fn call(&self, caller: &Caller, call: Call) -> Result<Reader, ApiError> {
        self.call_in_batch(caller, call, None).await
    }

    /// Starts a call. If `batch` is set, the call is recorded only if every other call of its batch
    /// starts, too.
    pub(crate) async fn call_in_batch(
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
        let started = self.start_call(caller, call, batch).await;
        if let Err(error) = &started {
            self.0.metrics.failed.fetch_add(1, Ordering::Relaxed);
            if let Some(session) = &caller.session {
                session.recorder().count_rejection(error);
            }
        }
        started
    }

    async fn start_call(
        &self,
        caller: &Caller,
        call: Call,
        batch: Option<BatchMembership>,
    ) -> Result<Reader, ApiError> {
        let party = self.find_party(caller, &call)?;
        let permit = self.acquire_permit().await?;
        let options = CallOptions { permit: Some(Box::new(permit)), batch };
        if caller.session.is_none()
            && let Some(host) = self.session_host()
            && let Some(session) = {
                let Caller { traffic_id, person, .. } = caller;
                let seed = call.request.sampling.seed;
                host.traffic(traffic_id.as_deref(), person.as_deref(), seed).await?
            }
        {
            let route = choose_route(&session.options.routes, None, &call);
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
            session.remember_call(body, reader.transcript());
        }
        Ok(reader)
    }

    /// Returns the party (model and sampling settings) that answers a call.
    ///
    /// # Errors
    /// Returns an [`ErrorKind::NotFound`] error if there is no such agent or model.
    pub(crate) fn find_party(&self, caller: &Caller, call: &Call) -> Result<Arc<Party>, ApiError> {
        let Some(session) = &caller.session else {
            return Ok(Arc::clone(&self.find_model(&call.model)?.party));
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

    /// Returns the party (model and sampling settings) that answers calls to the model `name`.
    pub(crate) fn find_party_for_model(
        &self,
        caller: &Caller,
        name: &str,
    ) -> Result<Arc<Party>, ApiError> {
        self.find_party(caller, &Call::new(name, Input::Tokens(Vec::new())))
    }

    /// Returns the chat format (template and tokenizer) of the party that answers a call.
    ///
    /// # Errors
    /// Returns an error if there is no such agent or model, or if the party is an external chat
    /// API.
    pub(crate) fn find_chat(&self, caller: &Caller, call: &Call) -> Result<Arc<Chat>, ApiError> {
        Ok(Arc::clone(self.find_party(caller, call)?.tokens()?.format.chat()))
    }

    /// Waits for a permit to run a call. The number of permits limits the number of running calls.
    ///
    /// # Errors
    /// Returns an error if the queue is full, if the wait times out, or if the gateway shuts down.
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
        let _waiter = PermitWaiter(self);
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

/// Guard that counts a call as waiting for a permit until the guard is dropped.
struct PermitWaiter<'a>(&'a Gateway);

impl Drop for PermitWaiter<'_> {
    fn drop(&mut self) {
        self.0.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
