//! A way to wait for a record in tests that are not async.

use std::future::Future;
use std::thread;

/// Waits for a future, on a thread of its own: also from within a runtime.
///
/// # Panics
/// Panics where the future does, or no runtime can be made.
pub fn wait<T: Send>(future: impl Future<Output = T> + Send) -> T {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(future)
    };
    thread::scope(|scope| match scope.spawn(run).join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}
