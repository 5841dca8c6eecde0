//! Runs long computations outside of the async workers.

use levade_policy::run_blocking;

use crate::api_error::{ApiError, ErrorKind};

/// Runs `work` on a thread of Tokio's blocking pool, with [`run_blocking`].
///
/// # Errors
/// Returns an [`ErrorKind::Internal`] error if the work panics.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    run_blocking(work).await.map_err(|error| {
        ApiError::new(ErrorKind::Internal, format!("preparing the request failed: {error}"))
    })
}
