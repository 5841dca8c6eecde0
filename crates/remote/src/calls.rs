//! Calls under way, so that they can be aborted.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Calls under way; clones have the same.
#[derive(Clone, Default)]
pub(crate) struct Calls(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    /// How many calls there have been.
    count: u64,
    /// Those under way by number.
    calls: HashMap<u64, UnderWay>,
}

struct UnderWay {
    stream: u64,
    abort: watch::Sender<bool>,
}

/// A call that may be aborted, until this is dropped.
pub(crate) struct Registered {
    calls: Calls,
    number: u64,
}

impl Calls {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a call with its stream of random numbers, and says where it is told to end.
    pub fn register(&self, stream: u64) -> (Registered, watch::Receiver<bool>) {
        let (abort, aborted) = watch::channel(false);
        let mut known = self.lock();
        known.count += 1;
        let number = known.count;
        known.calls.insert(number, UnderWay { stream, abort });
        (Registered { calls: self.clone(), number }, aborted)
    }

    /// How many are under way.
    pub fn count(&self) -> usize {
        self.lock().calls.len()
    }

    /// Tells the calls of a stream, or all, to end. Returns how many had not been told before.
    pub fn abort(&self, stream: Option<u64>) -> usize {
        let known = self.lock();
        let meant = known.calls.values().filter(|call| stream.is_none_or(|stream| stream == call.stream));
        meant.filter(|call| !call.abort.send_replace(true)).count()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.calls.lock().calls.remove(&self.number);
    }
}
