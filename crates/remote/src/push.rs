//! Broadcasts the learner's weights into server memory, over a process group that both sides join.
//!
//! A learner that implements [`BroadcastWeights`] opens a group for one push to one server. The
//! server joins before it pauses, and the group ends with the push, so the failure of a server
//! affects only its own push. The learner sends the weights that it published last and still holds:
//! before the weights change, [`PublishingLearner`](crate::PublishingLearner) withdraws this offer
//! and waits for pushes in progress. If a push fails, the server loads the weights from the
//! directory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use levade_policy::PolicyError;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, MutexGuard};

/// Communication library that sends tensors between the processes of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupBackend {
    /// Gloo, which sends tensors between CPUs.
    Gloo,
    /// NCCL, which sends tensors between GPUs.
    Nccl,
}

impl GroupBackend {
    /// Returns the name by which servers know the library.
    pub fn name(self) -> &'static str {
        match self {
            GroupBackend::Gloo => "gloo",
            GroupBackend::Nccl => "nccl",
        }
    }
}

/// Method by which the processes of a group find each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rendezvous {
    /// The processes connect to a key-value store that the learner serves.
    Store,
    /// The processes use a unique id of NCCL, which the learner creates and the server receives.
    UniqueId,
}

/// Request to open a process group for one push of weights to one server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupSpec {
    /// Name of the process group.
    pub group: String,
    /// Version of the weights to send.
    pub version: u64,
    /// Library that sends the tensors.
    pub backend: GroupBackend,
    /// Method by which the processes find each other.
    pub rendezvous: Rendezvous,
    /// Number of processes in the group: the sender, and the processes of the server.
    pub ranks: usize,
    /// Host name or IP address of the server, as the learner reaches it.
    pub peer: String,
    /// Timeout in seconds for joining, and again for receiving all weights.
    pub seconds: f64,
}

/// Information that a process needs to join a process group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RendezvousInfo {
    /// The process connects to a key-value store.
    Store {
        /// Address of the learner's machine, as the server reaches it.
        address: String,
        /// TCP port of the store.
        port: u16,
    },
    /// The process uses a unique id of NCCL.
    UniqueId {
        /// NCCL's unique id, in base64.
        unique_id: String,
    },
}

/// An open process group, and the tensors that will be sent through it, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupInfo {
    /// Information that the processes need to join.
    #[serde(rename = "meeting")]
    pub rendezvous: RendezvousInfo,
    /// Names of the tensors, as in weight files, in the order in which they are sent.
    pub names: Vec<String>,
    /// Data types of the tensors, as PyTorch names them, one per name.
    pub dtypes: Vec<String>,
    /// Shapes of the tensors, one per name.
    pub shapes: Vec<Vec<usize>>,
}

/// Statistics of a successful push of weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SendReport {
    /// Number of tensors that were sent.
    pub tensors: usize,
    /// Total size of the tensors, in bytes.
    pub bytes: u64,
    /// Duration of the push, in seconds.
    pub seconds: f64,
}

/// A learner that can send its weights to servers through process groups.
#[async_trait]
pub trait BroadcastWeights: Send + Sync {
    /// Opens a process group, which processes can then join. Closes a group that was left open.
    ///
    /// # Errors
    /// Returns an error if the learner no longer holds the weights of the requested version, cannot
    /// send them, or is unreachable.
    async fn open_group(&self, opening: &GroupSpec) -> Result<GroupInfo, PolicyError>;

    /// Sends all weights through the open process group `group`, and closes the group.
    ///
    /// # Errors
    /// Returns an error if a process did not join, exited or timed out, or if the learner is
    /// unreachable.
    async fn send_to(&self, group: &str) -> Result<SendReport, PolicyError>;
}

/// Coordinates pushes of a learner's weights: one push at a time, and only of the weights that the
/// learner published last and still holds.
pub struct WeightBroadcast {
    learner: Arc<dyn BroadcastWeights>,
    backend: GroupBackend,
    /// Version of the weights that may be pushed. `None` if the weights may not be pushed. Locked
    /// during a push.
    offered: Mutex<Option<u64>>,
    groups: AtomicU64,
    sent: AtomicU64,
    missed: AtomicU64,
}

impl WeightBroadcast {
    /// Creates a coordinator for pushes of `learner` over `backend`.
    pub fn new(learner: Arc<dyn BroadcastWeights>, backend: GroupBackend) -> Self {
        let count = AtomicU64::default;
        WeightBroadcast {
            learner,
            backend,
            offered: Mutex::default(),
            groups: count(),
            sent: count(),
            missed: count(),
        }
    }

    /// Returns the library that sends the weights.
    pub fn backend(&self) -> GroupBackend {
        self.backend
    }

    /// Returns the numbers of successful and of failed pushes.
    pub fn counts(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.missed.load(Ordering::Relaxed))
    }

    /// Allows pushes of the version `version`. The learner must hold these weights until
    /// [`withdraw`](Self::withdraw) is called.
    pub(crate) async fn offer(&self, version: u64) {
        *self.offered.lock().await = Some(version);
    }

    /// Disallows pushes, and waits until a push in progress has ended. Must be called before the
    /// learner's weights change.
    pub(crate) async fn withdraw(&self) {
        *self.offered.lock().await = None;
    }

    /// Returns whether the weights of version `version` may be pushed.
    pub(crate) async fn is_offered(&self, version: u64) -> bool {
        *self.offered.lock().await == Some(version)
    }

    /// Waits until no other push is in progress, and returns a permit. Returns `None` if the
    /// weights of version `version` may not be pushed.
    pub(crate) async fn acquire_permit(&self, version: u64) -> Option<BroadcastPermit<'_>> {
        let offered = self.offered.lock().await;
        (*offered == Some(version)).then_some(BroadcastPermit {
            broadcast: self,
            version,
            _lock: offered,
        })
    }
}

/// Permit to push weights. Until it is dropped, no other push runs, and the learner's weights do
/// not change.
pub(crate) struct BroadcastPermit<'a> {
    broadcast: &'a WeightBroadcast,
    version: u64,
    _lock: MutexGuard<'a, Option<u64>>,
}

impl BroadcastPermit<'_> {
    pub fn backend(&self) -> GroupBackend {
        self.broadcast.backend
    }

    /// Opens a process group for a push to a server that has `ranks` processes and the address
    /// `peer`. `seconds` is the timeout.
    ///
    /// # Errors
    /// Returns an error if the learner rejects the request, fails or is unreachable.
    pub async fn open_push_group(
        &self,
        rendezvous: Rendezvous,
        ranks: usize,
        peer: String,
        seconds: f64,
    ) -> Result<(GroupSpec, GroupInfo), PolicyError> {
        let number = self.broadcast.groups.fetch_add(1, Ordering::Relaxed);
        let opening = GroupSpec {
            group: format!("levade-{}-{number}", std::process::id()),
            version: self.version,
            backend: self.broadcast.backend,
            rendezvous,
            ranks: ranks + 1,
            peer,
            seconds,
        };
        let opened = self.broadcast.learner.open_group(&opening).await?;
        Ok((opening, opened))
    }

    /// Makes the learner send its weights through the process group.
    ///
    /// # Errors
    /// Returns an error if the learner rejects the request, fails or is unreachable.
    pub async fn send_weights(&self, group: &str) -> Result<SendReport, PolicyError> {
        self.broadcast.learner.send_to(group).await
    }

    /// Counts the push as successful if `well` is true, otherwise as failed.
    pub fn count_push(&self, well: bool) {
        let count = if well { &self.broadcast.sent } else { &self.broadcast.missed };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A learner whose broadcasts always fail.
    struct Mute;

    #[async_trait]
    impl BroadcastWeights for Mute {
        async fn open_group(&self, opening: &GroupSpec) -> Result<GroupInfo, PolicyError> {
            let rendezvous = RendezvousInfo::Store { address: opening.peer.clone(), port: 1 };
            Ok(GroupInfo { rendezvous, names: Vec::new(), dtypes: Vec::new(), shapes: Vec::new() })
        }

        async fn send_to(&self, group: &str) -> Result<SendReport, PolicyError> {
            Err(PolicyError::Invalid(group.to_owned()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn push_excludes_other_pushes_and_weight_changes() {
        let broadcast = Arc::new(WeightBroadcast::new(Arc::new(Mute), GroupBackend::Gloo));
        assert!(broadcast.acquire_permit(1).await.is_none(), "nothing is published yet");
        broadcast.offer(1).await;
        assert!(broadcast.acquire_permit(2).await.is_none());
        let permit = broadcast.acquire_permit(1).await.unwrap();
        let (opening, _) =
            permit.open_push_group(Rendezvous::Store, 2, "h".into(), 5.0).await.unwrap();
        assert_eq!((opening.ranks, opening.version), (3, 1));
        // Neither another push nor a change of the weights starts before this push has ended.
        let wait = Duration::from_secs(60);
        assert!(tokio::time::timeout(wait, broadcast.acquire_permit(1)).await.is_err());
        assert!(tokio::time::timeout(wait, broadcast.withdraw()).await.is_err());
        permit.count_push(true);
        drop(permit);
        broadcast.withdraw().await;
        assert!(broadcast.acquire_permit(1).await.is_none());
        assert_eq!(broadcast.counts(), (1, 0));
    }

    #[test]
    fn rendezvous_info_round_trips_through_json() {
        for (text, rendezvous) in [
            (
                r#"{"address":"10.0.0.7","port":29500}"#,
                RendezvousInfo::Store { address: "10.0.0.7".into(), port: 29500 },
            ),
            (r#"{"unique_id":"AA=="}"#, RendezvousInfo::UniqueId { unique_id: "AA==".into() }),
        ] {
            assert_eq!(serde_json::from_str::<RendezvousInfo>(text).unwrap(), rendezvous);
            assert_eq!(serde_json::to_string(&rendezvous).unwrap(), text);
        }
    }
}
