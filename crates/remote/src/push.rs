//! Broadcasts the learner's weights into server memory, over a process group that both sides join.
//!
//! A learner that [`Broadcasts`] opens a group for one push to one server. The server joins before it pauses,
//! and the group ends with the push. So a server that fails costs its own push only. The learner sends the
//! weights that it published last and still holds: [`Publishing`](crate::Publishing) withdraws that offer,
//! and waits for pushes in progress, before the weights change. Servers fall back to folders.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use levade_policy::PolicyError;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, MutexGuard};

/// Library that carries tensors between the processes of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupBackend {
    /// Between processors.
    Gloo,
    /// Between GPUs.
    Nccl,
}

impl GroupBackend {
    /// The name by which servers know it.
    pub fn name(self) -> &'static str {
        match self {
            GroupBackend::Gloo => "gloo",
            GroupBackend::Nccl => "nccl",
        }
    }
}

/// How the processes of a group find each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rendezvous {
    /// At a store that the learner serves.
    Store,
    /// By a unique ID of NCCL's, which is handed on.
    UniqueId,
}

/// A group to open for one push to one server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Opening {
    /// Name of the group.
    pub group: String,
    /// Version of the weights that are to be sent.
    pub version: u64,
    /// Library that carries them.
    pub backend: GroupBackend,
    /// Way in which its processes meet.
    pub rendezvous: Rendezvous,
    /// Processes of the group: the sender, and those of the server.
    pub ranks: usize,
    /// The host by which the server is reached.
    pub peer: String,
    /// How long processes may take to join, and then to take all weights.
    pub seconds: f64,
}

/// Where the processes of a group meet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Meeting {
    /// At a store.
    Store {
        /// Address of the learner's machine, as the server reaches it.
        address: String,
        /// Port of the store.
        port: u16,
    },
    /// By NCCL's unique ID, in base64.
    UniqueId {
        /// The ID.
        unique_id: String,
    },
}

/// A group that is open: where to join, and which tensors will come in which order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// Where its processes meet.
    pub meeting: Meeting,
    /// Names of the tensors, as files of weights have them,
    pub names: Vec<String>,
    /// their types, as PyTorch names them,
    pub dtypes: Vec<String>,
    /// and their shapes.
    pub shapes: Vec<Vec<usize>>,
}

/// Account of a push that went through.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sent {
    /// Tensors that were sent,
    pub tensors: usize,
    /// their bytes,
    pub bytes: u64,
    /// and the time that it took.
    pub seconds: f64,
}

/// A learner that sends its weights into groups.
#[async_trait]
pub trait Broadcasts: Send + Sync {
    /// Opens a group, in place of one that was left open. Its members may join from now on.
    ///
    /// # Errors
    /// When the learner does not hold the weights of that version any more, cannot send them, or is gone.
    async fn open_group(&self, opening: &Opening) -> Result<Opened, PolicyError>;

    /// Sends all weights into the group that is open, which ends with it.
    ///
    /// # Errors
    /// When a member did not join, is gone or late; when the learner is gone.
    async fn send_to(&self, group: &str) -> Result<Sent, PolicyError>;
}

/// Pushes of a learner's weights: one at a time, and only of those that it published last and still holds.
pub struct Pushing {
    learner: Arc<dyn Broadcasts>,
    backend: GroupBackend,
    /// The version that may be sent. Held during a push.
    offered: Mutex<Option<u64>>,
    groups: AtomicU64,
    sent: AtomicU64,
    missed: AtomicU64,
}

impl Pushing {
    /// Pushes of a learner over a library.
    pub fn new(learner: Arc<dyn Broadcasts>, backend: GroupBackend) -> Self {
        let count = AtomicU64::default;
        Pushing {
            learner,
            backend,
            offered: Mutex::default(),
            groups: count(),
            sent: count(),
            missed: count(),
        }
    }

    /// Library that carries the weights.
    pub fn backend(&self) -> GroupBackend {
        self.backend
    }

    /// How many pushes went through, and how many did not.
    pub fn counts(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.missed.load(Ordering::Relaxed))
    }

    /// Lets servers have a version, which the learner holds until these are withdrawn.
    pub(crate) async fn offer(&self, version: u64) {
        *self.offered.lock().await = Some(version);
    }

    /// Lets servers have no more, once a push under way has ended: the learner's weights are about to change.
    pub(crate) async fn withdraw(&self) {
        *self.offered.lock().await = None;
    }

    /// Whether servers may have this version.
    pub(crate) async fn offers(&self, version: u64) -> bool {
        *self.offered.lock().await == Some(version)
    }

    /// Waits until no other push is under way. `None` where the version is not to be had in this way.
    pub(crate) async fn turn(&self, version: u64) -> Option<Turn<'_>> {
        let offered = self.offered.lock().await;
        (*offered == Some(version)).then_some(Turn { pushing: self, version, _alone: offered })
    }
}

/// The right to have weights sent. No other push is under way, and the learner does not learn, until it is
/// dropped.
pub(crate) struct Turn<'a> {
    pushing: &'a Pushing,
    version: u64,
    _alone: MutexGuard<'a, Option<u64>>,
}

impl Turn<'_> {
    pub fn backend(&self) -> GroupBackend {
        self.pushing.backend
    }

    /// Opens a group for a server of so many processes.
    ///
    /// # Errors
    /// When the learner refuses, fails or is gone.
    pub async fn open(
        &self,
        rendezvous: Rendezvous,
        ranks: usize,
        peer: String,
        seconds: f64,
    ) -> Result<(Opening, Opened), PolicyError> {
        let number = self.pushing.groups.fetch_add(1, Ordering::Relaxed);
        let opening = Opening {
            group: format!("levade-{}-{number}", std::process::id()),
            version: self.version,
            backend: self.pushing.backend,
            rendezvous,
            ranks: ranks + 1,
            peer,
            seconds,
        };
        let opened = self.pushing.learner.open_group(&opening).await?;
        Ok((opening, opened))
    }

    /// Has the learner send.
    ///
    /// # Errors
    /// When the learner refuses, fails or is gone.
    pub async fn send(&self, group: &str) -> Result<Sent, PolicyError> {
        self.pushing.learner.send_to(group).await
    }

    /// Takes note of how it ended.
    pub fn ends(&self, well: bool) {
        let count = if well { &self.pushing.sent } else { &self.pushing.missed };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Sends nothing.
    struct Mute;

    #[async_trait]
    impl Broadcasts for Mute {
        async fn open_group(&self, opening: &Opening) -> Result<Opened, PolicyError> {
            let meeting = Meeting::Store { address: opening.peer.clone(), port: 1 };
            Ok(Opened { meeting, names: Vec::new(), dtypes: Vec::new(), shapes: Vec::new() })
        }

        async fn send_to(&self, group: &str) -> Result<Sent, PolicyError> {
            Err(PolicyError::Invalid(group.to_owned()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn weights_do_not_change_while_they_are_sent_and_only_the_newest_are() {
        let pushing = Arc::new(Pushing::new(Arc::new(Mute), GroupBackend::Gloo));
        assert!(pushing.turn(1).await.is_none(), "nothing is published yet");
        pushing.offer(1).await;
        assert!(pushing.turn(2).await.is_none());
        let turn = pushing.turn(1).await.unwrap();
        let (opening, _) = turn.open(Rendezvous::Store, 2, "h".into(), 5.0).await.unwrap();
        assert_eq!((opening.ranks, opening.version), (3, 1));
        // Neither another push nor a change of the weights begins before this one has ended.
        let wait = Duration::from_secs(60);
        assert!(tokio::time::timeout(wait, pushing.turn(1)).await.is_err());
        assert!(tokio::time::timeout(wait, pushing.withdraw()).await.is_err());
        turn.ends(true);
        drop(turn);
        pushing.withdraw().await;
        assert!(pushing.turn(1).await.is_none());
        assert_eq!(pushing.counts(), (1, 0));
    }

    #[test]
    fn a_meeting_is_told_by_its_keys() {
        for (text, meeting) in [
            (
                r#"{"address":"10.0.0.7","port":29500}"#,
                Meeting::Store { address: "10.0.0.7".into(), port: 29500 },
            ),
            (r#"{"unique_id":"AA=="}"#, Meeting::UniqueId { unique_id: "AA==".into() }),
        ] {
            assert_eq!(serde_json::from_str::<Meeting>(text).unwrap(), meeting);
            assert_eq!(serde_json::to_string(&meeting).unwrap(), text);
        }
    }
}
