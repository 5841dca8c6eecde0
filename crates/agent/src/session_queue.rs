//! Attempts of a run that agents elsewhere make: clients start them as sessions of the gateway.
//!
//! An attempt waits in a [`SessionQueue`] until a client starts a session. The response contains
//! the attempt's task and the key for its calls. The client calls the model, posts rewards and ends
//! the session, which ends the attempt. The outcome is computed as for a recorded session
//! ([`Sessions`](crate::Sessions)), but the tokens belong to an attempt slot of the run.
//!
//! # Guarantees
//! - **One client per attempt.** A started attempt leaves the queue.
//! - **A lost client** loses the attempt. If a client makes no call for the silence timeout, the
//!   try counts as lost. Any client can repeat it, with the same random stream.
//! - **A session ends once.** A later end, reward or call gets status 410, as do those of attempts
//!   that timed out or that the run no longer needs.
//! - **Every wait has a timeout**: for a client while attempts wait and no client makes one, for a
//!   call of a client, and for the end of the attempt.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use levade_call::{ApiError, ErrorKind, Recorder, Recording};
use levade_gateway::{
    EndRequest, EndedSession, Gateway, HostedSession, Reward, Session, SessionHost, StartRequest,
};
use levade_policy::process_time::{self, Stopwatch};
use serde_json::Value;
use tokio::sync::{Notify, oneshot};
use tracing::{Instrument, debug_span};

use crate::cast::CallerKind;
use crate::program::{agent_turns, find_rejection_finish, task_to_json};
use crate::sessions::{SOURCE, SessionEnding, create_session_outcome};
use crate::{Agent, AgentLoop, Attempt, AttemptContext, AttemptLimits, Program};

/// Maximum interval between two checks whether a client has started a session.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Time without a started session after which the user is notified for the first time. This time
/// doubles with every notice.
const NOTICE_AFTER: Duration = Duration::from_secs(60);

/// Maximum wait of a request for an attempt, in seconds.
const MAX_REQUEST_WAIT: f64 = 60.0;

/// Delay after which a client that got no attempt may repeat its request.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Options of a queue of attempts that external clients make in sessions.
#[derive(Debug, Clone)]
pub struct SessionQueueOptions {
    /// URL at which clients start sessions, for messages to the user.
    pub url: String,
    /// Timeout for a client to start any session while attempts wait and no session is open.
    pub wait: Duration,
    /// Timeout between calls of a session. A client without a call for this time counts as lost.
    pub silence: Duration,
}

/// Queue of the attempts that wait for a client, and of the attempts that clients are making.
pub struct SessionQueue {
    options: SessionQueueOptions,
    note: Box<dyn Fn(String) + Send + Sync>,
    state: Mutex<SessionQueueState>,
    /// Notified when an attempt is added to the queue.
    offered: Notify,
}

#[derive(Default)]
struct SessionQueueState {
    /// Number of attempts that have been added to the queue so far.
    num_offers: u64,
    /// Waiting attempts, ordered by the time at which they were added to the queue.
    waiting: BTreeMap<u64, WaitingAttempt>,
    /// Started sessions by their ids.
    started: HashMap<String, StartedSession>,
    /// Number of sessions that clients have started so far.
    num_starts: u64,
    /// Number of notices to the user since a client last started a session.
    num_notices: u32,
}

/// Attempt that waits for a client.
struct WaitingAttempt {
    session: Arc<Session>,
    task: Value,
    started: oneshot::Sender<()>,
    ended: oneshot::Sender<ClientEndRequest>,
}

struct StartedSession {
    session: Arc<Session>,
    ended: oneshot::Sender<ClientEndRequest>,
}

/// End of a session at the request of its client.
struct ClientEndRequest {
    request: EndRequest,
    response: oneshot::Sender<EndedSession>,
}

/// Position of an attempt in the queue. If the position is dropped, the session of the attempt
/// responds with status 410.
struct QueuePosition<'a> {
    queue: &'a SessionQueue,
    gateway: &'a Gateway,
    session: Arc<Session>,
    number: u64,
    started: oneshot::Receiver<()>,
    ended: oneshot::Receiver<ClientEndRequest>,
}

impl Drop for QueuePosition<'_> {
    fn drop(&mut self) {
        let mut state = self.queue.lock_state();
        state.waiting.remove(&self.number);
        state.started.remove(self.session.recorder().name());
        drop(state);
        self.gateway.forget_session(&self.session);
        // An attempt that the run no longer needs must not continue to sample for its client.
        self.session.recorder().abort();
    }
}

impl SessionQueue {
    /// Creates a queue whose attempts clients of `gateway` can start, until the returned value is
    /// dropped. `note` receives messages for the user.
    pub fn open(
        gateway: &Gateway,
        options: SessionQueueOptions,
        note: impl Fn(String) + Send + Sync + 'static,
    ) -> Arc<Self> {
        let queue = Arc::new(SessionQueue {
            options,
            note: Box::new(note),
            state: Mutex::default(),
            offered: Notify::new(),
        });
        let host: Arc<dyn SessionHost> = Arc::clone(&queue) as _;
        gateway.set_session_host(&host);
        queue
    }

    fn lock_state(&self) -> MutexGuard<'_, SessionQueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an attempt with this session and this task to the queue. Returns the attempt's position
    /// in the queue.
    fn offer_attempt<'a>(
        &'a self,
        gateway: &'a Gateway,
        session: &Arc<Session>,
        task: Value,
    ) -> QueuePosition<'a> {
        let (start_sender, started) = oneshot::channel();
        let (end_sender, ended) = oneshot::channel();
        let session = Arc::clone(session);
        let mut state = self.lock_state();
        let number = state.num_offers;
        state.num_offers += 1;
        let attempt = WaitingAttempt {
            session: session.clone(),
            task,
            started: start_sender,
            ended: end_sender,
        };
        state.waiting.insert(number, attempt);
        drop(state);
        self.offered.notify_waiters();
        QueuePosition { queue: self, gateway, session, number, started, ended }
    }

    /// Removes the first waiting attempt, and returns its session. If `task_id` is set, only
    /// attempts at this task are considered.
    fn take_waiting_attempt(&self, task_id: Option<&str>) -> Option<HostedSession> {
        let mut state = self.lock_state();
        let is_wanted = |attempt: &WaitingAttempt| {
            task_id.is_none() || task_id == attempt.task.get("id").and_then(Value::as_str)
        };
        let number = *state.waiting.iter().find(|(_, attempt)| is_wanted(attempt))?.0;
        let WaitingAttempt { session, task, started, ended } = state.waiting.remove(&number)?;
        // The receiver exists: a dropped attempt is not in the queue.
        let _ = started.send(());
        let id = session.recorder().name().to_owned();
        state.started.insert(id, StartedSession { session: Arc::clone(&session), ended });
        state.num_starts += 1;
        state.num_notices = 0;
        Some(HostedSession { session, task: Some(task) })
    }

    /// Waits until a client has started the attempt.
    ///
    /// # Errors
    /// Returns a message if no client starts any attempt within the timeout. Time in which a
    /// session is open does not count.
    async fn wait_for_start(&self, started: &mut oneshot::Receiver<()>) -> Result<(), String> {
        let SessionQueueOptions { url, wait, .. } = &self.options;
        let mut clock = Stopwatch::start();
        let mut since = Duration::ZERO;
        let mut known_starts = self.lock_state().num_starts;
        loop {
            let interval = POLL_INTERVAL.min(*wait);
            if let Some(result) = process_time::with_timeout(interval, &mut *started).await {
                return result.map_err(|_| "the queue of sessions has ended".to_owned());
            }
            let elapsed = clock.elapsed();
            let (num_starts, is_busy) = {
                let state = self.lock_state();
                (state.num_starts, !state.started.is_empty())
            };
            // A client that makes another attempt can start this one next.
            if is_busy || num_starts != known_starts {
                (known_starts, since) = (num_starts, elapsed);
            }
            let waited = elapsed.saturating_sub(since);
            if waited >= *wait {
                return Err(format!(
                    "no client has started a session at {url} within {wait:?} \
                     (sessions.wait_seconds)"
                ));
            }
            self.notify_of_wait(waited);
        }
    }

    /// Notifies the user that no client has started a session, if `waited` has reached the time for
    /// the next notice.
    fn notify_of_wait(&self, waited: Duration) {
        let mut state = self.lock_state();
        if waited < NOTICE_AFTER.saturating_mul(1 << state.num_notices.min(16)) {
            return;
        }
        state.num_notices += 1;
        let waiting = state.waiting.len();
        drop(state);
        let url = &self.options.url;
        let seconds = waited.as_secs();
        (self.note)(format!(
            "no client has started a session for {seconds} s; {waiting} attempts wait; agents \
             start one with: POST {url}"
        ));
    }
}

#[async_trait]
impl SessionHost for SessionQueue {
    async fn start(&self, request: StartRequest) -> Result<HostedSession, ApiError> {
        let StartRequest { task_id, task, person, wait_seconds } = request;
        if !task.is_empty() {
            let message = "this run chooses the tasks of its sessions; leave out the task in the \
                           request, and read the task from the response";
            return Err(ApiError::field("task", message));
        }
        if person.is_some() {
            let message = "this run chooses the tasks of its sessions; leave out the person in the \
                           request, and name the field with the person of a task in the run's \
                           recipe (tasks.person)";
            return Err(ApiError::field("person", message));
        }
        if !(0.0..=MAX_REQUEST_WAIT).contains(&wait_seconds) {
            let message = format!(
                "wait_seconds is {wait_seconds}, but must be in 0..={MAX_REQUEST_WAIT}; repeat the \
                 request to wait longer"
            );
            return Err(ApiError::field("wait_seconds", message));
        }
        let task_id = task_id.as_deref();
        let waiting = async {
            loop {
                let mut offered = std::pin::pin!(self.offered.notified());
                // An attempt that is offered from now on completes the wait.
                offered.as_mut().enable();
                if let Some(session) = self.take_waiting_attempt(task_id) {
                    return session;
                }
                offered.await;
            }
        };
        let wait = Duration::from_secs_f64(wait_seconds);
        process_time::with_timeout(wait, waiting).await.ok_or_else(|| {
            let of_task = task_id.map_or(String::new(), |id| format!(" at the task {id:?}"));
            let message = format!(
                "no attempt{of_task} waits for an agent now; repeat the request later, or set \
                 wait_seconds to wait for an attempt"
            );
            ApiError::new(ErrorKind::Busy(RETRY_DELAY), message)
        })
    }

    async fn end(&self, session: &Session, end: EndRequest) -> Result<EndedSession, ApiError> {
        let id = session.recorder().name();
        let has_ended = || {
            let message = format!("the session {id} has ended");
            ApiError::new(ErrorKind::AttemptEnded, message)
        };
        let removed = self.lock_state().started.remove(id);
        let StartedSession { ended, .. } = removed.ok_or_else(has_ended)?;
        let (response, receiver) = oneshot::channel();
        let request = ClientEndRequest { request: end, response };
        ended.send(request).map_err(|_| has_ended())?;
        receiver.await.map_err(|_| has_ended())
    }

    async fn traffic(
        &self,
        _: Option<&str>,
        _: Option<&str>,
        _: Option<u64>,
    ) -> Result<Option<Arc<Session>>, ApiError> {
        Ok(None)
    }

    fn find(&self, id: &str) -> Option<Arc<Session>> {
        self.lock_state().started.get(id).map(|started| Arc::clone(&started.session))
    }
}

/// Agent loop that leaves its attempts to external agents, which start sessions at the gateway.
#[derive(Clone)]
pub struct SessionLoop {
    /// Program whose options open the sessions of attempts. The program has no command.
    pub program: Program,
    /// Queue from which clients start the attempts.
    pub queue: Arc<SessionQueue>,
}

#[async_trait]
impl AgentLoop for SessionLoop {
    /// Makes one attempt through an external agent. If the returned future is dropped, the session
    /// is closed.
    async fn run(&self, context: AttemptContext) -> Attempt {
        let span = debug_span!("session", id = %context.name);
        self.run_attempt(context).instrument(span).await
    }

    fn can_be_taught(&self, _: &Agent) -> bool {
        true
    }
}

impl SessionLoop {
    async fn run_attempt(&self, context: AttemptContext) -> Attempt {
        let SessionLoop { program, queue } = self;
        let opened = match program.open_session(&context, CallerKind::Program) {
            Ok(opened) => opened,
            Err(why) => return Attempt::failed("policies", why),
        };
        let mut task = task_to_json(&context);
        task["is_evaluation"] = context.is_evaluation.into();
        let mut position = queue.offer_attempt(&program.gateway, &opened.session, task);
        if let Err(why) = queue.wait_for_start(&mut position.started).await {
            return Attempt::failed(SOURCE, why);
        }
        let timeout = context.limits.attempt_timeout;
        let silence = queue.options.silence;
        let ended = async {
            tokio::select! {
                ended = &mut position.ended => ended.ok(),
                () = wait_for_silence(opened.session.recorder(), silence) => None,
            }
        };
        let ended = opened.own_player().wait_within(timeout, ended).await;
        let recorded = opened.close_session(&program.gateway).await;
        let (ending, response) = match ended {
            None => (SessionEnding::Timeout(timeout), None),
            Some(Some(ClientEndRequest { request, response })) => {
                (SessionEnding::Client(request), Some(response))
            }
            Some(None) => {
                let why = format!(
                    "the client sent no call for {silence:?} (sessions.silence_seconds) and did \
                     not end the session"
                );
                let lost = Attempt::failed(SOURCE, why);
                return Attempt { trajectory: recorded.0.trajectory, is_lost: true, ..lost };
            }
        };
        let interaction_count = recorded.0.calls.len();
        let external =
            context.teacher.as_ref().map_or_else(Vec::new, |_| recorded.0.external.clone());
        let made = create_ended_attempt(&context.limits, recorded, ending);
        let attempt = opened.complete_attempt(&context, made, &external).await;
        if let Some(response) = response {
            // Sending fails if the client has disconnected.
            let _ = response
                .send(EndedSession { attempt: Some(context.name.clone()), interaction_count });
        }
        attempt
    }
}

/// Waits until a session has had no call for the time `silence`.
async fn wait_for_silence(recorder: &Recorder, silence: Duration) {
    loop {
        recorder.wait_until_idle().await;
        let num_calls = recorder.ended_calls();
        process_time::sleep(silence).await;
        // A call that is in flight now ends the silence.
        recorder.wait_until_idle().await;
        if recorder.ended_calls() == num_calls {
            return;
        }
    }
}

fn create_ended_attempt(
    limits: &AttemptLimits,
    (recorded, rewards): (Recording, Vec<Reward>),
    ending: SessionEnding,
) -> Attempt {
    let has_error = matches!(&ending, SessionEnding::Client(EndRequest { error: Some(_), .. }));
    let mut outcome = create_session_outcome(&recorded, &rewards, ending);
    if has_error
        && let Some(finish) = find_rejection_finish(&recorded, limits, &agent_turns(&recorded))
    {
        outcome.finish = finish;
        outcome.error = None;
    }
    if recorded.calls.is_empty() && outcome.error.is_none() {
        let why = if recorded.rejected.is_empty() {
            "the client called no model; it must use the session's api_key".to_owned()
        } else {
            format!("the client had all its calls rejected, by reason: {:?}", recorded.rejected)
        };
        let failed = Attempt::failed(SOURCE, why);
        return Attempt { trajectory: recorded.trajectory, ..failed };
    }
    if let Some(error) = outcome.error.clone() {
        outcome.add_warning(SOURCE, error);
    }
    Attempt::new(recorded.trajectory, outcome)
}

#[cfg(test)]
#[path = "session_queue_tests.rs"]
mod tests;
