//! Registry of calls in flight, so that they can be aborted.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Calls in flight. Clones share the same calls.
#[derive(Clone, Default)]
pub(crate) struct Calls(Arc<Mutex<CallTable>>);

#[derive(Default)]
struct CallTable {
    /// Number of calls registered so far.
    count: u64,
    /// Calls in flight, by call number.
    calls: HashMap<u64, InFlightCall>,
}

struct InFlightCall {
    stream: u64,
    abort: watch::Sender<bool>,
}

/// Guard of a registered call, which can be aborted until the guard is dropped.
pub(crate) struct CallGuard {
    calls: Calls,
    number: u64,
}

impl Calls {
    fn lock(&self) -> MutexGuard<'_, CallTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a call with its random stream. Returns the channel that reports whether to abort
    /// it.
    pub fn register(&self, stream: u64) -> (CallGuard, watch::Receiver<bool>) {
        let (abort, aborted) = watch::channel(false);
        let mut known = self.lock();
        known.count += 1;
        let number = known.count;
        known.calls.insert(number, InFlightCall { stream, abort });
        (CallGuard { calls: self.clone(), number }, aborted)
    }

    /// Returns the number of calls in flight.
    pub fn count(&self) -> usize {
        self.lock().calls.len()
    }

    /// Aborts the calls of a stream, or all calls. Returns how many were not aborted before.
    pub fn abort(&self, stream: Option<u64>) -> usize {
        let known = self.lock();
        let meant =
            known.calls.values().filter(|call| stream.is_none_or(|stream| stream == call.stream));
        meant.filter(|call| !call.abort.send_replace(true)).count()
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        self.calls.lock().calls.remove(&self.number);
    }
}
