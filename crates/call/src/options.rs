//! Options of a call, and batches: calls that are recorded together or not at all.

use tokio::sync::watch;

/// Options of a call that do not come from the client's request.
#[derive(Default)]
pub struct CallOptions {
    /// Permit to run, which is dropped when the call has ended, or when its batch waits for further
    /// calls.
    pub permit: Option<Box<dyn Send + Sync>>,
    /// Membership in the batch of the call. `None` for a single call.
    pub batch: Option<BatchMembership>,
}

/// Membership of a call in a batch. Notifies the call whether all calls of the batch have started.
#[derive(Clone)]
pub struct BatchMembership(watch::Receiver<Option<bool>>);

/// Sender that notifies all calls of a batch whether every call has started.
pub struct BatchOutcome(watch::Sender<Option<bool>>);

impl BatchMembership {
    /// Creates a batch whose calls are about to start.
    pub fn new() -> (BatchOutcome, BatchMembership) {
        let (outcome, batch) = watch::channel(None);
        (BatchOutcome(outcome), BatchMembership(batch))
    }

    /// Waits until all calls of the batch have started or one is rejected. Returns whether the
    /// calls are recorded. They are also recorded if the sender is dropped because the client has
    /// disconnected, like a single call.
    pub(crate) async fn is_recorded(&self) -> bool {
        let mut outcome = self.0.clone();
        outcome
            .wait_for(Option::is_some)
            .await
            .map_or(true, |all_started| *all_started != Some(false))
    }

    /// Waits until a call of the batch is rejected. Never returns if all calls are accepted.
    pub(crate) async fn wait_for_rejection(&self) {
        if self.is_recorded().await {
            std::future::pending::<()>().await;
        }
    }
}

impl BatchOutcome {
    /// Notifies all calls of the batch whether every call has started.
    pub fn send(&self, all_started: bool) {
        self.0.send_replace(Some(all_started));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn batch_is_recorded_unless_a_call_is_rejected() {
        for (outcome, is_recorded) in [(Some(true), true), (Some(false), false), (None, true)] {
            let (sender, batch) = BatchMembership::new();
            let wait = Duration::from_secs(60);
            assert!(tokio::time::timeout(wait, batch.is_recorded()).await.is_err(), "{outcome:?}");
            match outcome {
                Some(all_started) => sender.send(all_started),
                None => drop(sender),
            }
            assert_eq!(batch.is_recorded().await, is_recorded, "{outcome:?}");
            let rejected = tokio::time::timeout(wait, batch.wait_for_rejection()).await.is_ok();
            assert_eq!(rejected, !is_recorded, "{outcome:?}");
        }
    }
}
