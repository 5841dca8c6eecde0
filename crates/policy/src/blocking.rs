//! Runs long computations outside of the async workers.
//!
//! A simulation repeats its events exactly only if one thread does all of its work. Such a thread
//! calls [`block_in_caller`], and then runs the computations itself.

use std::cell::Cell;

use tokio::task::JoinError;

thread_local! {
    static IN_CALLER: Cell<bool> = const { Cell::new(false) };
}

/// Makes the current thread run its blocking work itself, until the thread ends.
pub fn block_in_caller() {
    IN_CALLER.set(true);
}

/// Returns whether the current thread runs its blocking work itself.
pub fn is_blocking_in_caller() -> bool {
    IN_CALLER.get()
}

/// Runs `work` on a thread of Tokio's blocking pool, or in the caller after [`block_in_caller`].
///
/// # Errors
/// Returns an error if the work panics on a thread of the pool.
pub async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    if is_blocking_in_caller() { Ok(work()) } else { tokio::task::spawn_blocking(work).await }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Returns whether blocking work runs on the thread that awaits it.
    fn runs_in_caller(prepare: fn()) -> bool {
        let run = move || {
            prepare();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let worker = runtime.block_on(run_blocking(|| thread::current().id()));
            worker.unwrap() == thread::current().id()
        };
        thread::spawn(run).join().unwrap()
    }

    #[test]
    fn blocking_work_runs_in_caller_only_after_block_in_caller() {
        assert!(runs_in_caller(block_in_caller));
        assert!(!runs_in_caller(|| ()));
    }
}
