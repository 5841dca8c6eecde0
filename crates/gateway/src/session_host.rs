//! The host of sessions that clients start: agents that run outside of this process.
//!
//! The gateway serves the routes. The host opens sessions, or hands out those of attempts that wait
//! for an agent, and ends them.

use std::sync::Arc;

use async_trait::async_trait;
use levade_call::ApiError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::session::Session;

/// Request to start a session. Every field is optional.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StartRequest {
    /// Id of the task. Sessions with the same id are attempts at the same task.
    pub task_id: Option<String>,
    /// Fields of the task, such as `question` and `answer`, for scorers.
    pub task: Map<String, Value>,
    /// Key of the person whom the session serves, by which it can be found and withdrawn.
    pub person: Option<String>,
    /// Maximum wait for an attempt that needs an agent, in seconds, in 0..=60. A host that opens
    /// sessions at once ignores it.
    pub wait_seconds: f64,
}

/// A session that a client has started.
#[derive(Clone)]
pub struct HostedSession {
    /// The session.
    pub session: Arc<Session>,
    /// Task that the host has chosen. `None` if the client chooses its task.
    pub task: Option<Value>,
}

/// Request to end a session. Every field is optional.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EndRequest {
    /// Session to end, for callers with a key of the server instead of the session's key.
    pub session_id: Option<String>,
    /// Final answer. `None` takes the content of the last completion.
    pub final_text: Option<String>,
    /// Error of the agent. The session then counts as failed.
    pub error: Option<String>,
}

/// Result of a session that has ended.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EndedSession {
    /// Id of the recorded attempt. `None` if no call was made in the session, which is then not
    /// recorded as an attempt.
    pub attempt: Option<String>,
    /// Number of recorded calls.
    pub interaction_count: usize,
}

/// Starts, records and ends the sessions of clients.
#[async_trait]
pub trait SessionHost: Send + Sync {
    /// Starts a session.
    ///
    /// # Errors
    /// Returns an error if the session cannot be recorded, and [`ErrorKind::Busy`] if no attempt
    /// needs an agent.
    ///
    /// [`ErrorKind::Busy`]: levade_call::ErrorKind::Busy
    async fn start(&self, request: StartRequest) -> Result<HostedSession, ApiError>;

    /// Ends a session and records it.
    ///
    /// # Errors
    /// Returns an error if the session has ended or cannot be recorded.
    async fn end(&self, session: &Session, end: EndRequest) -> Result<EndedSession, ApiError>;

    /// Returns the session that records a call outside of sessions: the open session of the
    /// conversation `id` with `person`, or a new one, which samples with `seed` if the client sets
    /// it. Returns `None` if such calls are not recorded.
    ///
    /// # Errors
    /// Returns an error if the session cannot be recorded.
    async fn traffic(
        &self,
        id: Option<&str>,
        person: Option<&str>,
        seed: Option<u64>,
    ) -> Result<Option<Arc<Session>>, ApiError>;

    /// Returns the open session with this id: the id that [`start`](Self::start) returned, or that
    /// of a conversation. Returns `None` if several people have a conversation with this id.
    fn find(&self, id: &str) -> Option<Arc<Session>>;
}
