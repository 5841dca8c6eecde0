//! Records the sessions of agents that run outside of this process.
//!
//! A client starts a session at the gateway, sends its calls with the session's key, posts rewards,
//! and ends the session. Each session becomes an attempt of purpose [`Session`](Purpose::Session),
//! with all of its tokens and log-probabilities. Its slot is the hash of its key. If traffic is
//! recorded, calls without a session are recorded, too. Calls with the same conversation id and the
//! same person form one session. Every other call is a separate session.
//!
//! # Guarantees
//! - **A session that is not ended is closed** when its time is over, and its tokens are recorded.
//!   Sessions of traffic then still complete their calls in flight.
//! - **A session ends once.** A later end, reward or call gets status 410.
//! - **A disconnect loses nothing**: a session that started to end is recorded completely.
//! - **Traffic is served even if it cannot be recorded.** The failure is logged.
//!
//! A process that is killed loses its open sessions. They stay in the record as running until
//! [`Store::abandon_running`] is called. Out of scope: HTTP (`levade-gateway`), and the use of the
//! attempts (`levade-trainer`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use levade_call::{ApiError, ErrorKind, Party, Recording};
use levade_gateway::{
    CallPattern, EndRequest, EndedSession, Gateway, HostedSession, Reward, Route, Session,
    SessionHost, SessionOptions, StartRequest,
};
use levade_policy::{process_time, random_hex};
use levade_store::{Attempt, AttemptStart, End, Status, Store, StoreError};
use levade_tasks::{PERSON, Task};
use levade_tree::{AttemptId, AttemptSlot, DEFAULT, Finish, Outcome};
use serde_json::{Map, Value, json};
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::AbortHandle;
use xxhash_rust::xxh3::xxh3_64;

use crate::program::{add_scorer_input, last_content, percent_encode, recorded_outcome};

#[cfg(doc)]
use levade_tree::Purpose;

/// Source of the tasks of sessions, and the name of sessions in warnings.
pub const SOURCE: &str = "sessions";

/// Timeout for calls in flight to end after their session has ended.
const CALL_END_TIMEOUT: Duration = Duration::from_secs(10);

/// Settings of recorded sessions.
#[derive(Clone)]
pub struct SessionsOptions {
    /// Gateway that serves the calls.
    pub gateway: Gateway,
    /// Store in which the sessions are recorded.
    pub store: Arc<dyn Store>,
    /// Party that answers calls, the same as outside of sessions.
    pub party: Arc<Party>,
    /// Time after its start at which a session is closed.
    pub timeout: Duration,
    /// Whether calls outside of sessions are recorded.
    pub records_traffic: bool,
}

/// Recorder of sessions of agents that run elsewhere.
pub struct Sessions {
    options: SessionsOptions,
    /// Reference to this value, for tasks that outlive a call.
    this: Weak<Sessions>,
    state: Mutex<State>,
    /// Lock that is held while a session of traffic is created, so that a conversation has one
    /// session.
    creating: AsyncMutex<()>,
}

#[derive(Default)]
struct State {
    /// Open sessions by id.
    open: HashMap<String, OpenSession>,
    /// Ids of sessions by their conversation.
    conversations: HashMap<Conversation, String>,
}

/// Key of a conversation in traffic: its id, and the key of the person.
type Conversation = (String, Option<String>);

struct OpenSession {
    session: Arc<Session>,
    start: AttemptStart,
    /// Whether the start is in the store.
    is_started: bool,
    /// Task that closes the session when its time is over.
    deadline: Option<AbortHandle>,
}

/// Reason for the end of a session.
pub(crate) enum Ending {
    /// The client has ended it.
    Client(EndRequest),
    /// The session exceeded its time limit.
    Timeout(Duration),
    /// The server was stopped.
    Shutdown,
}

impl Sessions {
    /// Creates a recorder of sessions, and lets clients of the gateway start some until the
    /// returned value is dropped. Must be called within a tokio runtime.
    pub fn open(options: SessionsOptions) -> Arc<Self> {
        let sessions = Arc::new_cyclic(|this| Sessions {
            options,
            this: Weak::clone(this),
            state: Mutex::default(),
            creating: AsyncMutex::default(),
        });
        let host: Arc<dyn SessionHost> = Arc::clone(&sessions) as _;
        sessions.options.gateway.set_session_host(&host);
        sessions
    }

    /// Closes all open sessions and records them. Call this when the server has stopped.
    pub async fn close_all(&self) {
        let open: Vec<OpenSession> = {
            let mut state = self.state();
            state.conversations.clear();
            state.open.drain().map(|(_, open)| open).collect()
        };
        for open in open {
            // A failure is logged.
            let _ = self.finish(open, Ending::Shutdown).await;
        }
    }

    /// Returns the number of open sessions.
    pub fn num_open(&self) -> usize {
        self.state().open.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session, and records its start if `is_started`.
    async fn create(
        &self,
        request: StartRequest,
        conversation: Option<Conversation>,
        is_started: bool,
        seed: Option<u64>,
    ) -> Result<Arc<Session>, ApiError> {
        let SessionsOptions { gateway, store, party, timeout, .. } = &self.options;
        let id = random_hex(8);
        let task = task_of(&id, request);
        // As outside of sessions, a client that sets a seed gets the same completion again.
        let seed = seed.unwrap_or_else(|| xxh3_64(id.as_bytes()));
        let party = Party { agent: DEFAULT.into(), policy: DEFAULT.into(), ..(**party).clone() };
        let session = gateway.open_session(SessionOptions {
            rollout: percent_encode(&task.id),
            attempt: id.clone(),
            routes: vec![Route { party: Arc::new(party), pattern: CallPattern::default() }],
            recorder: gateway.new_recorder(&id, (seed, 0), (u32::MAX, usize::MAX)),
            rewards: true,
        });
        let slot = AttemptSlot::for_session(session.key());
        let start = AttemptStart {
            id: AttemptId::new(store.run(), &slot, 0),
            slot,
            number: 0,
            task: json!(task),
        };
        if is_started && let Err(error) = store.start(&start).await {
            gateway.forget_session(&session);
            return Err(unrecorded(&error));
        }
        let this = Weak::clone(&self.this);
        let (deadline_id, timeout) = (id.clone(), *timeout);
        let deadline = tokio::spawn(async move {
            process_time::sleep(timeout).await;
            if let Some(sessions) = this.upgrade() {
                sessions.close_late(&deadline_id, timeout).await;
            }
        });
        let deadline = Some(deadline.abort_handle());
        let mut state = self.state();
        state.open.insert(
            id.clone(),
            OpenSession { session: session.clone(), start, is_started, deadline },
        );
        if let Some(conversation) = conversation {
            state.conversations.insert(conversation, id);
        }
        Ok(session)
    }

    /// Closes a session whose time is over.
    async fn close_late(&self, id: &str, timeout: Duration) {
        let traffic = {
            let mut state = self.state();
            let num_conversations = state.conversations.len();
            // The next call of the conversation starts another session.
            state.conversations.retain(|_, session| session != id);
            let is_traffic = state.conversations.len() < num_conversations;
            state.open.get(id).filter(|_| is_traffic).map(|open| Arc::clone(&open.session))
        };
        if let Some(session) = traffic {
            // Clients in production do not know about sessions, so their calls are not aborted.
            let idle = session.recorder().wait_until_idle();
            process_time::with_timeout(timeout, idle).await;
        }
        let Some(mut open) = self.remove(id) else { return };
        // This code runs in the task `deadline`, which must not abort itself.
        open.deadline = None;
        // A failure is logged.
        let _ = self.finish(open, Ending::Timeout(timeout)).await;
    }

    /// Returns the open session of a conversation.
    fn session_of(&self, conversation: &Conversation) -> Option<Arc<Session>> {
        let state = self.state();
        let open = state.open.get(state.conversations.get(conversation)?)?;
        Some(Arc::clone(&open.session))
    }

    fn remove(&self, id: &str) -> Option<OpenSession> {
        let mut state = self.state();
        state.conversations.retain(|_, session| session != id);
        state.open.remove(id)
    }

    /// Closes a session that is no longer open for clients, and records it.
    async fn finish(&self, open: OpenSession, ending: Ending) -> Result<EndedSession, ApiError> {
        let OpenSession { session, start, is_started, deadline } = open;
        if let Some(deadline) = deadline {
            deadline.abort();
        }
        let SessionsOptions { gateway, store, .. } = &self.options;
        let (recorded, rewards) = session.close(CALL_END_TIMEOUT).await;
        gateway.forget_session(&session);
        let interaction_count = recorded.calls.len();
        let has_calls = interaction_count > 0;
        let mut outcome = session_outcome(&recorded, &rewards, ending);
        let total: f64 = rewards.iter().map(|reward| reward.value).sum();
        let is_failed = outcome.error.is_some();
        let score =
            Some(total).filter(|total| !rewards.is_empty() && !is_failed && total.is_finite());
        let id = start.id;
        let status = match (has_calls, is_failed) {
            (false, _) => Status::Abandoned,
            (true, true) => Status::Failed,
            (true, false) => Status::Completed,
        };
        if !has_calls {
            outcome = Outcome { error: Some("no call was made".into()), ..Outcome::initial() };
        }
        let attempt = Attempt {
            outcome,
            score,
            status,
            trajectory: recorded.trajectory,
            ..Attempt::from_start(&start)
        };
        let written = match (is_started, has_calls) {
            (true, _) => record_end(&**store, &attempt).await,
            (false, true) => store.record_attempt(&attempt).await.map(drop),
            (false, false) => Ok(()),
        };
        if let Err(error) = written {
            tracing::error!(%error, session = session.path(), "could not record a session");
            return Err(unrecorded(&error));
        }
        Ok(EndedSession { attempt: has_calls.then(|| id.to_string()), interaction_count })
    }
}

#[async_trait]
impl SessionHost for Sessions {
    async fn start(&self, request: StartRequest) -> Result<HostedSession, ApiError> {
        let session = self.create(request, None, true, None).await?;
        Ok(HostedSession { session, task: None })
    }

    async fn end(&self, session: &Session, end: EndRequest) -> Result<EndedSession, ApiError> {
        let id = session.recorder().name();
        let Some(open) = self.remove(id) else {
            let message = format!("the session {id} has ended");
            return Err(ApiError::new(ErrorKind::AttemptEnded, message));
        };
        let Some(this) = self.this.upgrade() else {
            return Err(ApiError::new(ErrorKind::Unavailable, "the server is shutting down"));
        };
        // A client that disconnects must not interrupt the record.
        let finishing = tokio::spawn(async move { this.finish(open, Ending::Client(end)).await });
        finishing.await.unwrap_or_else(|error| {
            Err(ApiError::new(
                ErrorKind::Internal,
                format!("the end of the session failed: {error}"),
            ))
        })
    }

    async fn traffic(
        &self,
        id: Option<&str>,
        person: Option<&str>,
        seed: Option<u64>,
    ) -> Result<Option<Arc<Session>>, ApiError> {
        if !self.options.records_traffic {
            return Ok(None);
        }
        let person = person.map(str::to_owned);
        let conversation = id.map(|id| (id.to_owned(), person.clone()));
        let _creating = match &conversation {
            Some(conversation) => {
                let creating = self.creating.lock().await;
                if let Some(session) = self.session_of(conversation) {
                    return Ok(Some(session));
                }
                Some(creating)
            }
            None => None,
        };
        let request = StartRequest { person, ..StartRequest::default() };
        let created = self.create(request, conversation, id.is_some(), seed).await;
        Ok(created
            .inspect_err(|error| tracing::error!(error = error.message, "traffic is not recorded"))
            .ok())
    }

    fn find(&self, id: &str) -> Option<Arc<Session>> {
        let state = self.state();
        let mut named = state.conversations.iter().filter(|((known, _), _)| known == id);
        let id = match (named.next(), named.next()) {
            (None, _) => id,
            (Some((_, session)), None) => session.as_str(),
            (Some(_), Some(_)) => return None,
        };
        state.open.get(id).map(|open| Arc::clone(&open.session))
    }
}

async fn record_end(store: &dyn Store, attempt: &Attempt) -> Result<(), StoreError> {
    store.append(&attempt.id, attempt.trajectory.segments()).await?;
    let end: End = attempt.end();
    store.end(&attempt.id, &end).await?;
    Ok(())
}

/// Returns the outcome of a session that ended with `ending`, with the calls and rewards for
/// scorers.
pub(crate) fn session_outcome(recorded: &Recording, rewards: &[Reward], ending: Ending) -> Outcome {
    let mut outcome = recorded_outcome(recorded);
    let given_text = match ending {
        Ending::Client(EndRequest { error: Some(error), .. }) => {
            outcome.error = Some(error);
            None
        }
        Ending::Client(EndRequest { final_text, .. }) => {
            outcome.finish = Finish::Answered;
            final_text
        }
        Ending::Timeout(timeout) => {
            outcome.finish = Finish::Deadline;
            outcome.add_warning(SOURCE, format!("was not ended within {timeout:?}"));
            None
        }
        Ending::Shutdown => {
            outcome.finish = Finish::Deadline;
            outcome.add_warning(SOURCE, "was not ended before the server stopped");
            None
        }
    };
    if outcome.finish.is_complete() {
        outcome.final_text = given_text.or_else(|| last_content(recorded)).unwrap_or_default();
    }
    add_scorer_input(&mut outcome, SOURCE, recorded, rewards, None);
    outcome
}

/// Returns the task of a session.
fn task_of(id: &str, StartRequest { task_id, mut task, person, .. }: StartRequest) -> Task {
    if let Some(person) = person {
        task.insert(PERSON.to_owned(), person.into());
    }
    let text = |task: &Map<String, Value>, name: &str| {
        task.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    Task {
        id: task_id.unwrap_or_else(|| id.to_owned()),
        question: text(&task, "question"),
        answer: task.get("answer").cloned().unwrap_or_default(),
        source: SOURCE.to_owned(),
        row: task.into(),
        ..Task::default()
    }
}

fn unrecorded(error: &StoreError) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, format!("the session cannot be recorded: {error}"))
}

#[cfg(test)]
#[path = "sessions_tests.rs"]
mod tests;
