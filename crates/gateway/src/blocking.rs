//! Runs work that computes for long away from the async workers.

use crate::fault::{Fault, Kind};

/// Runs `work` on a thread for blocking work.
///
/// # Errors
/// Returns an internal error if the work panics.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Fault> {
    let failed = |error| Fault::new(Kind::Internal, format!("writing the prompt came to no end: {error}"));
    tokio::task::spawn_blocking(work).await.map_err(failed)
}
