//! Isolates panics of external code, so that they do not end the run.

use tokio::task::JoinSet;

/// Runs a future of external code in a separate task, so that a panic in it does not end the run.
///
/// # Errors
/// Returns the panic's message if the future panics.
pub(crate) async fn catch_panic<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, String> {
    // A `JoinSet` aborts its task when it is dropped, for example when an attempt is cancelled.
    let mut set = JoinSet::new();
    set.spawn(work);
    match set.join_next().await {
        Some(done) => done.map_err(|error| error.to_string()),
        None => Err("the spawned task ended without a result".into()),
    }
}
