//! Work of others that may panic, which is then not the end of the run.

use tokio::task::JoinSet;

/// Does something that may panic.
///
/// # Errors
/// With what it panicked.
pub(crate) async fn alone<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, String> {
    // A set ends its task when it is dropped, as an attempt that is given up is.
    let mut set = JoinSet::new();
    set.spawn(work);
    match set.join_next().await {
        Some(done) => done.map_err(|error| error.to_string()),
        None => Err("it was never begun".into()),
    }
}
