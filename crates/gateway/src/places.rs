//! Places among the calls that are answered at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

use crate::fault::{Fault, Kind};
use crate::gateway::Gateway;

impl Gateway {
    /// Waits for a place among the calls that are answered.
    pub(crate) async fn place(&self) -> Result<OwnedSemaphorePermit, Fault> {
        let slots = Arc::clone(&self.0.slots);
        if let Ok(permit) = Arc::clone(&slots).try_acquire_owned() {
            return Ok(permit);
        }
        let (options, waiting) = (&self.0.options, &self.0.waiting);
        if waiting.fetch_add(1, Ordering::Relaxed) >= options.waiting as u64 {
            waiting.fetch_sub(1, Ordering::Relaxed);
            let message = format!("{} calls are waiting already; come back later", options.waiting);
            return Err(Fault::new(Kind::Busy(Duration::from_secs(1)), message));
        }
        let _counted = Counted(self);
        match tokio::time::timeout(options.reply, slots.acquire_owned()).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) => Err(Fault::new(Kind::Unavailable, "the gateway is closing")),
            Err(_) => {
                let message =
                    format!("waited {:?} for one of {} calls to end", options.reply, options.running);
                Err(Fault::new(Kind::Deadline, message))
            }
        }
    }
}

/// Counts as waiting until it is dropped.
struct Counted<'a>(&'a Gateway);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
