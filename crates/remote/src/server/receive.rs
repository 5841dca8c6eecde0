//! A server as a member of a process group over which it is sent weights.

use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::PolicyError;
use serde_json::Value;

use super::http::Http;
use crate::push::{GroupBackend, Opened, Opening, Rendezvous, Sent};

/// A server that does not take weights says so within this time; only then anything is sent.
const REFUSES: Duration = Duration::from_millis(100);

/// The learner's part of a push, which begins when it is first waited for.
pub(super) type Sending<'a> = Pin<Box<dyn Future<Output = Result<Sent, PolicyError>> + Send + 'a>>;

/// A group that a server is to join, or has joined.
#[derive(Debug, Clone)]
pub(super) struct Joint {
    pub opening: Opening,
    pub opened: Opened,
}

/// A push into a server that stands still.
#[derive(Debug, Clone)]
pub(super) struct Receiving<'a> {
    pub joint: &'a Joint,
    /// Label that the weights get.
    pub label: &'a str,
    /// Whether replies stand still meanwhile, and hold their part of the cache.
    pub keeps: bool,
    /// How long it may take,
    pub within: Duration,
    /// and how long an answer may that nothing is computed for.
    pub answer: Duration,
}

/// A kind of server that takes weights over a group.
#[async_trait]
pub(super) trait Receives: Send + Sync {
    /// How its processes find a group.
    fn rendezvous(&self, backend: GroupBackend) -> Rendezvous;

    /// How many processes of it take weights.
    ///
    /// # Errors
    /// When it is gone, or cannot take any in this way.
    async fn receivers(&self, http: &Http, within: Duration) -> Result<usize, PolicyError>;

    /// Has all of them join. Returns when they have.
    ///
    /// # Errors
    /// When it refuses, is gone or late.
    async fn join(&self, http: &Http, joint: &Joint, within: Duration) -> Result<(), PolicyError>;

    /// Has a server that stands still take what is sent, and forget what earlier weights computed.
    ///
    /// # Errors
    /// When it or the learner refuses, is gone or late: it may have some of the weights then, and must not
    /// draw.
    async fn receive(
        &self,
        http: &Http,
        push: &Receiving<'_>,
        sending: Sending<'_>,
    ) -> Result<Sent, PolicyError>;

    /// Has it leave a group, whatever has become of it.
    ///
    /// # Errors
    /// When it refuses or is gone.
    async fn leave(&self, http: &Http, joint: &Joint, within: Duration) -> Result<(), PolicyError>;
}

/// Has a learner send what a server was asked to take, once the server has not refused it at once. `leave`
/// ends a group whose server has failed, so that the learner need not wait for it.
///
/// # Errors
/// When one of them fails: the error of the first.
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
        // The group has ended: a server that still waits in it is left to its own deadline.
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
