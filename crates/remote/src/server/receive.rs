//! A server as a receiver in a process group over which weights are sent.

use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::PolicyError;
use serde_json::Value;

use super::http::Http;
use crate::push::{GroupBackend, Opened, Opening, Rendezvous, Sent};

/// Time to wait for an immediate rejection by the server before anything is sent.
const REFUSES: Duration = Duration::from_millis(100);

/// The learner's part of a push, which starts when it is first polled.
pub(super) type Sending<'a> = Pin<Box<dyn Future<Output = Result<Sent, PolicyError>> + Send + 'a>>;

/// A group that a server will join or has joined.
#[derive(Debug, Clone)]
pub(super) struct Joint {
    pub opening: Opening,
    pub opened: Opened,
}

/// A push into a paused server.
#[derive(Debug, Clone)]
pub(super) struct Receiving<'a> {
    pub joint: &'a Joint,
    /// Label of the new weights.
    pub label: &'a str,
    /// Whether to keep the KV cache, because requests are frozen in it.
    pub keeps: bool,
    /// Timeout for receiving the weights.
    pub within: Duration,
    /// Timeout for responses that require no computation.
    pub answer: Duration,
}

/// API of a kind of server that receives weights over a group.
#[async_trait]
pub(super) trait Receives: Send + Sync {
    /// Returns how the server's processes join a group.
    fn rendezvous(&self, backend: GroupBackend) -> Rendezvous;

    /// Returns the number of server processes that receive weights.
    ///
    /// # Errors
    /// Returns an error if the server is unreachable or cannot receive weights over a group.
    async fn receivers(&self, http: &Http, within: Duration) -> Result<usize, PolicyError>;

    /// Makes all processes join, and returns when they have.
    ///
    /// # Errors
    /// Returns an error if the server rejects the request, is unreachable or times out.
    async fn join(&self, http: &Http, joint: &Joint, within: Duration) -> Result<(), PolicyError>;

    /// Makes a paused server receive the weights, and drop what earlier weights cached.
    ///
    /// # Errors
    /// Returns an error if the server or the learner rejects the request, is unreachable or times
    /// out. The server may have some of the weights then, and must not sample.
    async fn receive(
        &self,
        http: &Http,
        push: &Receiving<'_>,
        sending: Sending<'_>,
    ) -> Result<Sent, PolicyError>;

    /// Makes the server leave a group, whatever the group's state.
    ///
    /// # Errors
    /// Returns an error if the server rejects the request or is unreachable.
    async fn leave(&self, http: &Http, joint: &Joint, within: Duration) -> Result<(), PolicyError>;
}

/// Makes the learner send weights to a server that expects them, unless the server rejects them at
/// once. `leave` ends a group whose server has failed, so that the learner need not wait for it.
///
/// # Errors
/// Returns the first error of the server or the learner.
pub(super) async fn received(
    http: &Http,
    update: impl Future<Output = Result<Value, PolicyError>>,
    mut sending: Sending<'_>,
    leave: impl Future<Output = Result<(), PolicyError>>,
) -> Result<(Value, Sent), PolicyError> {
    let mut update = std::pin::pin!(update);
    if let Ok(answer) = tokio::time::timeout(REFUSES, &mut update).await {
        let answer = answer?;
        return Err(http.gone(&format!("it answered {answer} before any weights were sent")));
    }
    tokio::select! {
        // The group has ended; a server that still waits in it is limited by its own timeout.
        sent = &mut sending => {
            let sent = sent?;
            Ok((update.await?, sent))
        }
        answer = &mut update => match answer {
            Ok(answer) => Ok((answer, sending.await?)),
            Err(error) => {
                leave.await.ok();
                sending.await.ok();
                Err(error)
            }
        }
    }
}
