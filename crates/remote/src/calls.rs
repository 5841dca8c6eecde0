//! Registry of calls in flight, so that they can be aborted.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Table of sampling calls in flight. Clones share one table.
#[derive(Clone, Default)]
pub(crate) struct InFlightCalls(Arc<Mutex<CallTable>>);

#[derive(Default)]
struct CallTable {
    /// Number of calls registered so far.
    count: u64,
    /// Calls in flight, by the number under which they were registered.
    calls: HashMap<u64, InFlightCall>,
}

struct InFlightCall {
    stream: u64,
    abort: watch::Sender<bool>,
}

/// Guard of a registered call. The call can be aborted until the guard is dropped.
pub(crate) struct CallGuard {
    calls: InFlightCalls,
    number: u64,
}

impl InFlightCalls {
    fn lock_table(&self) -> MutexGuard<'_, CallTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a sampling call with its random stream. Returns the call's guard, and a channel
    /// that reports whether to abort the call.
    pub fn register(&self, stream: u64) -> (CallGuard, watch::Receiver<bool>) {
        let (abort, aborted) = watch::channel(false);
        let mut known = self.lock_table();
        known.count += 1;
        let number = known.count;
        known.calls.insert(number, InFlightCall { stream, abort });
        (CallGuard { calls: self.clone(), number }, aborted)
    }

    /// Returns the number of sampling calls in flight.
    pub fn count(&self) -> usize {
        self.lock_table().calls.len()
    }

    /// Aborts the calls with the random stream `stream`, or all calls if `stream` is `None`.
    /// Returns the number of calls that had not been aborted before.
    pub fn abort(&self, stream: Option<u64>) -> usize {
        let known = self.lock_table();
        let meant =
            known.calls.values().filter(|call| stream.is_none_or(|stream| stream == call.stream));
        meant.filter(|call| !call.abort.send_replace(true)).count()
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        self.calls.lock_table().calls.remove(&self.number);
    }
}
