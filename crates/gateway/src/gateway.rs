//! The gateway: models, sessions, and what all calls share.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use levade_http::Access;
use tokio::sync::Semaphore;

use crate::fault::{Fault, Kind};
use crate::key;
use crate::metrics::Metrics;
use crate::model::Model;
use crate::responses::Memory;
use crate::session::{Session, SessionOptions};

/// Settings of a gateway.
#[derive(Debug, Clone)]
pub struct Options {
    /// Keys of which calls outside of sessions must bear one; with none, none is asked for.
    pub keys: Vec<String>,
    /// Whether calls outside of sessions are answered at all.
    pub open: bool,
    /// Hosts that the gateway answers as if it asks for no key, and origins whose pages can call it.
    pub access: Access,
    /// Most calls that are answered at once.
    pub running: usize,
    /// Most calls that wait for their turn; more are told to come back.
    pub waiting: usize,
    /// Most bytes of a body.
    pub body_bytes: usize,
    /// Longest wait for one reply outside of sessions, and for a place before it.
    pub reply: Duration,
    /// How long a call of a session goes on after its client went away, in case it comes back.
    pub grace: Duration,
    /// How often a client that waits is sent a sign of life.
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
            reply: Duration::from_secs(3600),
            grace: Duration::from_secs(10),
            ping: Duration::from_secs(15),
        }
    }
}

/// Endpoints of models and attempts. Clones are the same gateway.
#[derive(Clone)]
pub struct Gateway(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub options: Options,
    models: RwLock<Vec<Arc<Model>>>,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    pub slots: Arc<Semaphore>,
    pub waiting: AtomicU64,
    pub metrics: Metrics,
    /// Unknown fields of requests, with how often they came; each is named in the log once.
    unknown: Mutex<BTreeMap<String, u64>>,
    /// Responses outside of sessions, for clients that continue one by its id.
    pub responses: Mutex<Memory>,
    /// Counts calls, for their ids.
    calls: AtomicU64,
    /// Tells this process' ids from others'.
    born: u64,
}

impl Gateway {
    /// A gateway to these models.
    pub fn new(models: Vec<Model>, options: Options) -> Self {
        let born = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        Gateway(Arc::new(Inner {
            slots: Arc::new(Semaphore::new(options.running.clamp(1, Semaphore::MAX_PERMITS))),
            options,
            models: RwLock::new(models.into_iter().map(Arc::new).collect()),
            sessions: Mutex::default(),
            waiting: AtomicU64::new(0),
            metrics: Metrics::default(),
            unknown: Mutex::default(),
            responses: Mutex::default(),
            calls: AtomicU64::new(0),
            born,
        }))
    }

    /// The models, in their order.
    pub fn models(&self) -> Vec<Arc<Model>> {
        self.0.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The model of this name. Where there is one only, names that no provider's clients can do without
    /// (`default`, or none) mean it.
    pub(crate) fn model(&self, name: &str) -> Result<Arc<Model>, Fault> {
        let models = self.models();
        if let Some(model) = models.iter().find(|model| model.name == name) {
            return Ok(Arc::clone(model));
        }
        if let ([only], "" | "default") = (&models[..], name) {
            return Ok(Arc::clone(only));
        }
        let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
        let message = format!("there is no model {name:?}; there is: {}", names.join(", "));
        Err(Fault { kind: Kind::NotFound, message, param: Some("model".into()) })
    }

    /// Opens the endpoint of an attempt.
    pub fn open(&self, options: SessionOptions) -> Arc<Session> {
        let attempt = options.attempt.clone();
        let session = Arc::new(Session::new(options));
        let mut sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.insert(attempt, Arc::clone(&session));
        session
    }

    /// Forgets an attempt that is over: its key is told so from now on.
    pub fn forget(&self, session: &Session) {
        let mut sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.remove(&session.options.attempt);
    }

    /// The session that a key is of; `None` for a key of another form. Of which purpose the key is, its
    /// caller finds out.
    pub(crate) fn session_of(&self, text: &str) -> Result<Option<Arc<Session>>, Fault> {
        let Some(attempt) = key::attempt_of(text) else { return Ok(None) };
        let sessions = self.0.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(session) = sessions.get(attempt) else {
            let message =
                format!("the attempt {attempt} is over, or was another process'; its key is no longer good");
            return Err(Fault::new(Kind::Gone, message));
        };
        if !session.key.is(text) && !session.reward_key.is(text) {
            return Err(Fault::new(Kind::Unauthorised, "this is not the key of its attempt"));
        }
        Ok(Some(Arc::clone(session)))
    }

    /// An id for a call, unique among all processes but by intent.
    pub(crate) fn call_id(&self) -> String {
        let count = self.0.calls.fetch_add(1, Ordering::Relaxed);
        format!("{:x}{count:06x}", self.0.born)
    }

    /// Counts a field of a request that nobody here knows, and names it in the log once.
    pub(crate) fn unknown_field(&self, api: &str, field: &str) {
        let name = format!("{api}.{field}");
        let mut unknown = self.0.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        // A client that makes up names must not fill the memory.
        if unknown.len() >= 1000 && !unknown.contains_key(&name) {
            return;
        }
        let count = unknown.entry(name).or_default();
        *count += 1;
        if *count == 1 {
            tracing::warn!(api, field, "requests have a field that is not known, and is ignored");
        }
    }

    /// Unknown fields of requests so far, with how often they came.
    pub fn unknown_fields(&self) -> BTreeMap<String, u64> {
        self.0.unknown.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
