//! The host of sessions that clients start: agents that run outside of this process.
//!
//! The gateway serves the routes. The host opens sessions, or hands out the sessions of attempts
//! that wait for an agent, and ends the sessions.

use std::sync::Arc;

use async_trait::async_trait;
use levade_call::ApiError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::session::Session;

/// Request body to start a session. Every field is optional.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StartRequest {
    /// Id of the task. Sessions with the same task id are attempts at the same task.
    pub task_id: Option<String>,
    /// Fields of the task, such as `question` and `answer`, for scorers.
    pub task: Map<String, Value>,
    /// Key of the person whom the session serves. Under this key, the recorded session can be found
    /// and withdrawn.
    pub person: Option<String>,
    /// Maximum wait for an attempt that needs an agent, in seconds, in 0..=60. Ignored by hosts
    /// that start sessions immediately.
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

/// Request body to end a session. Every field is optional.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EndRequest {
    /// Id of the session to end. Only needed if the caller has a key of the server instead of the
    /// session's key.
    pub session_id: Option<String>,
    /// Final answer of the attempt. If `None`, the content of the last completion is the final
    /// answer.
    pub final_text: Option<String>,
    /// Error message of the agent. If set, the session counts as failed.
    pub error: Option<String>,
}

/// Result of a session that has ended.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EndedSession {
    /// Id of the recorded attempt. `None` if the session had no calls and was therefore not
    /// recorded as an attempt.
    pub attempt: Option<String>,
    /// Number of recorded calls of the session.
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
    /// conversation `id` with `person`, or a new session. A new session samples with `seed` if it
    /// is set. Returns `None` if calls outside of sessions are not recorded.
    ///
    /// # Errors
    /// Returns an error if the session cannot be recorded.
    async fn traffic(
        &self,
        id: Option<&str>,
        person: Option<&str>,
        seed: Option<u64>,
    ) -> Result<Option<Arc<Session>>, ApiError>;

    /// Returns the open session `id`, which is a session id from [`start`](Self::start) or a
    /// conversation id. Returns `None` if there is no such session, or if several people have a
    /// conversation with this id.
    fn find(&self, id: &str) -> Option<Arc<Session>>;
}
