//! The engine's threads: one static pool, fork and join, tasks handed out one by one.
//!
//! A decoded token takes a few hundred parallel regions of some tens of microseconds, so joining must cost about a
//! microsecond: workers spin for a while before they sleep. Which thread runs a task never changes a result, because every
//! output element is computed by one task, in one order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

/// Spins before a waiting thread gives up its processor, and before a worker goes to sleep.
const SPINS_BEFORE_YIELD: u32 = 2_000;
const SPINS_BEFORE_SLEEP: u32 = 20_000;

/// A parallel region: `body(task)` for every task below `tasks`.
#[derive(Clone, Copy)]
struct Region {
    body: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

struct State {
    /// Counts regions; a change starts one.
    epoch: AtomicU64,
    region: std::cell::UnsafeCell<Option<Region>>,
    next: AtomicUsize,
    /// Workers that are still in the current region.
    busy: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleeping: Vec<AtomicBool>,
}

// SAFETY: `region` is written only by the owner while no worker is in a region (`busy` = 0), and read by workers only
// after they saw the epoch change, which is released after the write.
unsafe impl Sync for State {}
// SAFETY: as above; the pointer it holds is only followed inside `run`, which outlives the region.
unsafe impl Send for State {}

/// A pool of threads, of which the caller is one.
pub struct Pool {
    state: Arc<State>,
    workers: Vec<(JoinHandle<()>, Thread)>,
}

impl Pool {
    /// A pool of `threads` threads, the caller's included; at least 1.
    pub fn new(threads: usize) -> Self {
        let extra = threads.max(1) - 1;
        let state = Arc::new(State {
            epoch: AtomicU64::new(0),
            region: std::cell::UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleeping: (0..extra).map(|_| AtomicBool::new(false)).collect(),
        });
        let workers = (0..extra)
            .filter_map(|index| {
                let state = Arc::clone(&state);
                let name = format!("engine-{}", index + 1);
                // Without the thread the pool is smaller, which changes speed alone.
                let handle = std::thread::Builder::new().name(name).spawn(move || state.work(index)).ok()?;
                let thread = handle.thread().clone();
                Some((handle, thread))
            })
            .collect();
        Pool { state, workers }
    }

    /// Number of threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `body(task)` for every `task` below `tasks`, in any order, on all threads; returns when all are done.
    ///
    /// # Panics
    /// When a task panicked.
    pub fn run(&self, tasks: usize, body: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(body);
            return;
        }
        let state = &*self.state;
        let body: &(dyn Fn(usize) + Sync) = &body;
        // SAFETY: the lifetime is erased only until the end of this call, which waits for every worker to leave the region.
        let body = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync), *const (dyn Fn(usize) + Sync + 'static)>(
                body,
            )
        };
        // SAFETY: no worker is in a region: the previous call waited for `busy` = 0.
        unsafe { *state.region.get() = Some(Region { body, tasks }) };
        state.next.store(0, Ordering::Relaxed);
        state.busy.store(self.workers.len(), Ordering::Relaxed);
        state.epoch.fetch_add(1, Ordering::SeqCst);
        for (index, (_, thread)) in self.workers.iter().enumerate() {
            if state.sleeping[index].swap(false, Ordering::SeqCst) {
                thread.unpark();
            }
        }
        state.drain(Region { body, tasks });
        let mut spins = 0;
        while state.busy.load(Ordering::Acquire) > 0 {
            wait(&mut spins);
        }
        assert!(
            !state.panicked.load(Ordering::Relaxed),
            "a task of the engine's pool panicked; see the message above"
        );
    }
}

impl State {
    fn work(&self, index: usize) {
        let mut seen = 0;
        let mut spins = 0;
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch == seen {
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                if spins < SPINS_BEFORE_SLEEP {
                    wait(&mut spins);
                } else {
                    self.sleeping[index].store(true, Ordering::SeqCst);
                    // The owner either sees `sleeping` and wakes us, or had changed the epoch before we looked again.
                    if self.epoch.load(Ordering::SeqCst) == seen && !self.stop.load(Ordering::SeqCst) {
                        std::thread::park();
                    }
                    self.sleeping[index].store(false, Ordering::SeqCst);
                }
                continue;
            }
            seen = epoch;
            spins = 0;
            // SAFETY: written before the epoch changed, and not again before this worker leaves the region.
            if let Some(region) = unsafe { *self.region.get() } {
                let drained = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.drain(region)));
                if drained.is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                }
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }

    fn drain(&self, region: Region) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= region.tasks {
                return;
            }
            // SAFETY: the owner keeps the closure alive until all workers have left the region.
            unsafe { (*region.body)(task) };
        }
    }
}

fn wait(spins: &mut u32) {
    *spins += 1;
    if *spins % SPINS_BEFORE_YIELD == 0 {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        for (handle, thread) in self.workers.drain(..) {
            thread.unpark();
            // A worker cannot fail outside a region, and a panic inside one was reported by `run`.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, |task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn sleeping_workers_wake() {
        let pool = Pool::new(2);
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let sum = AtomicUsize::new(0);
            pool.run(100, |task| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 4950);
        }
    }
}
