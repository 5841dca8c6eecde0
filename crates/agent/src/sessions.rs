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
use levade_store::{Attempt, AttemptEnd, AttemptStart, Status, Store, StoreError};
use levade_tasks::{PERSON, Task};
use levade_tree::{AttemptId, AttemptSlot, DEFAULT, Finish, Outcome};
use serde_json::{Map, Value, json};
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::AbortHandle;
use xxhash_rust::xxh3::xxh3_64;

use crate::program::{
    add_scorer_input, create_recorded_outcome, find_last_content, replace_reserved_chars,
};

#[cfg(doc)]
use levade_tree::Purpose;

/// Name of the task source of sessions. Warnings about sessions also have this name.
pub const SOURCE: &str = "sessions";

/// Timeout for calls in flight to end after their session has ended.
const CALL_END_TIMEOUT: Duration = Duration::from_secs(10);

/// Options of the recorder of sessions.
#[derive(Clone)]
pub struct SessionsOptions {
    /// Gateway that serves the model calls of sessions.
    pub gateway: Gateway,
    /// Store in which the sessions are recorded.
    pub store: Arc<dyn Store>,
    /// Party that answers the calls of sessions. The same party answers calls outside of sessions.
    pub party: Arc<Party>,
    /// Maximum duration of a session. The session is closed after this time.
    pub timeout: Duration,
    /// Whether calls outside of sessions are recorded.
    pub records_traffic: bool,
}

/// Recorder of the sessions of agents that run elsewhere.
pub struct Sessions {
    options: SessionsOptions,
    /// Weak reference to this value, for tasks that outlive a call.
    this: Weak<Sessions>,
    state: Mutex<SessionsState>,
    /// Lock that is held while traffic creates a session, so that a conversation has only one
    /// session.
    creating: AsyncMutex<()>,
}

#[derive(Default)]
struct SessionsState {
    /// Open sessions by their ids.
    open: HashMap<String, OpenSession>,
    /// Ids of the sessions that traffic created, by their conversation.
    conversations: HashMap<Conversation, String>,
}

/// Key of a conversation in traffic: the id of the conversation, and the key of the person.
type Conversation = (String, Option<String>);

struct OpenSession {
    session: Arc<Session>,
    start: AttemptStart,
    /// Whether the store contains the start of the session.
    is_started: bool,
    /// Handle of the task that closes the session at the session's time limit.
    deadline: Option<AbortHandle>,
}

/// Reason why a session ended.
pub(crate) enum SessionEnding {
    /// The client ended the session with this request.
    Client(EndRequest),
    /// The session exceeded this time limit.
    Timeout(Duration),
    /// The server was stopped.
    Shutdown,
}

impl Sessions {
    /// Creates a recorder of sessions. Until the returned value is dropped, clients of the gateway
    /// can start sessions. This function must be called within a tokio runtime.
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
            let mut state = self.lock_state();
            state.conversations.clear();
            state.open.drain().map(|(_, open)| open).collect()
        };
        for open in open {
            // A failure is logged.
            let _ = self.finish_session(open, SessionEnding::Shutdown).await;
        }
    }

    /// Returns the number of open sessions.
    pub fn num_open(&self) -> usize {
        self.lock_state().open.len()
    }

    fn lock_state(&self) -> MutexGuard<'_, SessionsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a session. If `is_started` is true, the start of the session is recorded.
    async fn create_session(
        &self,
        request: StartRequest,
        conversation: Option<Conversation>,
        is_started: bool,
        seed: Option<u64>,
    ) -> Result<Arc<Session>, ApiError> {
        let SessionsOptions { gateway, store, party, timeout, .. } = &self.options;
        let id = random_hex(8);
        let task = create_session_task(&id, request);
        // As outside of sessions, a client that sets a seed gets the same completion again.
        let seed = seed.unwrap_or_else(|| xxh3_64(id.as_bytes()));
        let party = Party { agent: DEFAULT.into(), policy: DEFAULT.into(), ..(**party).clone() };
        let session = gateway.open_session(SessionOptions {
            rollout: replace_reserved_chars(&task.id),
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
        if is_started && let Err(error) = store.start_attempt(&start).await {
            gateway.forget_session(&session);
            return Err(to_recording_error(&error));
        }
        let this = Weak::clone(&self.this);
        let (deadline_id, timeout) = (id.clone(), *timeout);
        let deadline = tokio::spawn(async move {
            process_time::sleep(timeout).await;
            if let Some(sessions) = this.upgrade() {
                sessions.close_overdue_session(&deadline_id, timeout).await;
            }
        });
        let deadline = Some(deadline.abort_handle());
        let mut state = self.lock_state();
        state.open.insert(
            id.clone(),
            OpenSession { session: session.clone(), start, is_started, deadline },
        );
        if let Some(conversation) = conversation {
            state.conversations.insert(conversation, id);
        }
        Ok(session)
    }

    /// Closes a session that has exceeded its time limit.
    async fn close_overdue_session(&self, id: &str, timeout: Duration) {
        let traffic = {
            let mut state = self.lock_state();
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
        let Some(mut open) = self.remove_session(id) else { return };
        // This code runs in the task `deadline`, which must not abort itself.
        open.deadline = None;
        // A failure is logged.
        let _ = self.finish_session(open, SessionEnding::Timeout(timeout)).await;
    }

    /// Returns the open session of a conversation, or `None` if the conversation has none.
    fn find_conversation_session(&self, conversation: &Conversation) -> Option<Arc<Session>> {
        let state = self.lock_state();
        let open = state.open.get(state.conversations.get(conversation)?)?;
        Some(Arc::clone(&open.session))
    }

    fn remove_session(&self, id: &str) -> Option<OpenSession> {
        let mut state = self.lock_state();
        state.conversations.retain(|_, session| session != id);
        state.open.remove(id)
    }

    /// Closes a session that was removed from the open sessions, and records its end.
    async fn finish_session(
        &self,
        open: OpenSession,
        ending: SessionEnding,
    ) -> Result<EndedSession, ApiError> {
        let OpenSession { session, start, is_started, deadline } = open;
        if let Some(deadline) = deadline {
            deadline.abort();
        }
        let SessionsOptions { gateway, store, .. } = &self.options;
        let (recorded, rewards) = session.close(CALL_END_TIMEOUT).await;
        gateway.forget_session(&session);
        let interaction_count = recorded.calls.len();
        let has_calls = interaction_count > 0;
        let mut outcome = create_session_outcome(&recorded, &rewards, ending);
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
            return Err(to_recording_error(&error));
        }
        Ok(EndedSession { attempt: has_calls.then(|| id.to_string()), interaction_count })
    }
}

#[async_trait]
impl SessionHost for Sessions {
    async fn start(&self, request: StartRequest) -> Result<HostedSession, ApiError> {
        let session = self.create_session(request, None, true, None).await?;
        Ok(HostedSession { session, task: None })
    }

    async fn end(&self, session: &Session, end: EndRequest) -> Result<EndedSession, ApiError> {
        let id = session.recorder().name();
        let Some(open) = self.remove_session(id) else {
            let message = format!("the session {id} has ended");
            return Err(ApiError::new(ErrorKind::AttemptEnded, message));
        };
        let Some(this) = self.this.upgrade() else {
            return Err(ApiError::new(ErrorKind::Unavailable, "the server is shutting down"));
        };
        // A client that disconnects must not interrupt the record.
        let finishing =
            tokio::spawn(
                async move { this.finish_session(open, SessionEnding::Client(end)).await },
            );
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
                if let Some(session) = self.find_conversation_session(conversation) {
                    return Ok(Some(session));
                }
                Some(creating)
            }
            None => None,
        };
        let request = StartRequest { person, ..StartRequest::default() };
        let created = self.create_session(request, conversation, id.is_some(), seed).await;
        Ok(created
            .inspect_err(|error| tracing::error!(error = error.message, "traffic is not recorded"))
            .ok())
    }

    fn find(&self, id: &str) -> Option<Arc<Session>> {
        let state = self.lock_state();
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
    store.append_segments(&attempt.id, attempt.trajectory.segments()).await?;
    let end: AttemptEnd = attempt.end();
    store.end_attempt(&attempt.id, &end).await?;
    Ok(())
}

/// Creates the outcome of a session that ended with `ending`. The outcome contains the calls and
/// rewards for scorers.
pub(crate) fn create_session_outcome(
    recorded: &Recording,
    rewards: &[Reward],
    ending: SessionEnding,
) -> Outcome {
    let mut outcome = create_recorded_outcome(recorded);
    let given_text = match ending {
        SessionEnding::Client(EndRequest { error: Some(error), .. }) => {
            outcome.error = Some(error);
            None
        }
        SessionEnding::Client(EndRequest { final_text, .. }) => {
            outcome.finish = Finish::Answered;
            final_text
        }
        SessionEnding::Timeout(timeout) => {
            outcome.finish = Finish::Deadline;
            outcome.add_warning(SOURCE, format!("was not ended within {timeout:?}"));
            None
        }
        SessionEnding::Shutdown => {
            outcome.finish = Finish::Deadline;
            outcome.add_warning(SOURCE, "was not ended before the server stopped");
            None
        }
    };
    if outcome.finish.is_complete() {
        outcome.final_text = given_text.or_else(|| find_last_content(recorded)).unwrap_or_default();
    }
    add_scorer_input(&mut outcome, SOURCE, recorded, rewards, None);
    outcome
}

fn create_session_task(
    id: &str,
    StartRequest { task_id, mut task, person, .. }: StartRequest,
) -> Task {
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

fn to_recording_error(error: &StoreError) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, format!("the session cannot be recorded: {error}"))
}

#[cfg(test)]
#[path = "sessions_tests.rs"]
mod tests;
