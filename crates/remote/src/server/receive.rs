//! A server as a receiver in a process group over which weights are sent.

use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::PolicyError;
use serde_json::Value;

use super::http::Http;
use crate::push::{GroupBackend, GroupInfo, GroupSpec, Rendezvous, SendReport};

/// Time for which the learner waits for an immediate rejection by the server before it sends
/// weights.
const REJECTION_WAIT: Duration = Duration::from_millis(100);

/// Future in which the learner sends its weights. The push starts when the future is first polled.
pub(super) type SendFuture<'a> =
    Pin<Box<dyn Future<Output = Result<SendReport, PolicyError>> + Send + 'a>>;

/// A process group that a server will join or has joined.
#[derive(Debug, Clone)]
pub(super) struct JoinedGroup {
    pub opening: GroupSpec,
    pub opened: GroupInfo,
}

/// A push of weights into a paused server.
#[derive(Debug, Clone)]
pub(super) struct ReceiveSpec<'a> {
    pub joint: &'a JoinedGroup,
    /// Label that the server gives to the new weights.
    pub label: &'a str,
    /// Whether the server keeps its KV cache, because requests are frozen in it.
    pub keeps: bool,
    /// Timeout for receiving the weights.
    pub within: Duration,
    /// Timeout for responses that require no computation.
    pub response_timeout: Duration,
}

/// Part of a server's HTTP API through which the server receives weights over a process group.
#[async_trait]
pub(super) trait ReceiveWeights: Send + Sync {
    /// Returns the method by which the server's processes join a process group of `backend`.
    fn rendezvous(&self, backend: GroupBackend) -> Rendezvous;

    /// Returns the number of server processes that receive weights.
    ///
    /// # Errors
    /// Returns an error if the server is unreachable or cannot receive weights over a group.
    async fn count_receivers(&self, http: &Http, within: Duration) -> Result<usize, PolicyError>;

    /// Makes all processes of the server join a process group, and returns when they have joined.
    ///
    /// # Errors
    /// Returns an error if the server rejects the request, is unreachable or times out.
    async fn join_group(
        &self,
        http: &Http,
        joint: &JoinedGroup,
        within: Duration,
    ) -> Result<(), PolicyError>;

    /// Makes a paused server receive weights over a process group, and drop what it has cached for
    /// earlier weights. `sending` is the learner's part of the push.
    ///
    /// # Errors
    /// Returns an error if the server or the learner rejects the request, is unreachable or times
    /// out. The server may then have only some of the weights, and must not sample.
    async fn receive(
        &self,
        http: &Http,
        push: &ReceiveSpec<'_>,
        sending: SendFuture<'_>,
    ) -> Result<SendReport, PolicyError>;

    /// Makes the server leave a process group, whatever the state of the group.
    ///
    /// # Errors
    /// Returns an error if the server rejects the request or is unreachable.
    async fn leave_group(
        &self,
        http: &Http,
        joint: &JoinedGroup,
        within: Duration,
    ) -> Result<(), PolicyError>;
}

/// Makes the learner send weights to a server that is ready to receive them, unless the server
/// rejects them immediately. `leave` ends the process group of a server that has failed, so that
/// the learner need not wait for the server.
///
/// # Errors
/// Returns the first error of the server or the learner.
pub(super) async fn receive_weights(
    http: &Http,
    update: impl Future<Output = Result<Value, PolicyError>>,
    mut sending: SendFuture<'_>,
    leave: impl Future<Output = Result<(), PolicyError>>,
) -> Result<(Value, SendReport), PolicyError> {
    let mut update = std::pin::pin!(update);
    if let Ok(response) = tokio::time::timeout(REJECTION_WAIT, &mut update).await {
        let response = response?;
        return Err(http.stopped_error(&format!(
            "the server returned {response} before any weights were sent"
        )));
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
