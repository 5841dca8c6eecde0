//! Thread pool of the engine: one static pool with fork and join, which hands out tasks one by one.
//!
//! A sampled token takes a few hundred parallel regions of some tens of microseconds, so joining
//! must cost about a microsecond: workers spin for a while before they sleep ([`LINGER`]). Which
//! thread runs a task never changes a result, because every output element is computed by one task,
//! in one order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Number of spins after which a waiting thread yields its processor once.
const SPINS_BEFORE_YIELD: u32 = 2_000;
/// Time for which a worker looks for a region before it sleeps. Within a batch the engine's thread
/// occasionally works without the pool for a millisecond or two, for instance when the cache
/// allocates new pages. A worker that slept during that time would return its processor, in a
/// virtual machine to another one; both were measured to be slower afterwards, for seconds. Between
/// batches that wait for tools, or in an idle process, a worker does sleep.
const LINGER: Duration = Duration::from_millis(20);

/// Lower half of a ticket while a region is being set up.
const CLOSED: u64 = u32::MAX as u64;

/// State that the threads of a pool share. A parallel region is `body(task)` for every task below
/// `tasks`.
///
/// `ticket` is (epoch, next task). A thread reads the ticket, then the region, and claims the task
/// by swapping the ticket for the next one. The swap fails if the epoch has changed since, so a
/// thread that slept through a region never touches its closure. The owner waits for tasks, not for
/// threads: a thread that the system does not schedule delays no other thread.
struct PoolState {
    ticket: AtomicU64,
    body: [AtomicUsize; 2],
    tasks: AtomicUsize,
    completed: AtomicUsize,
    /// Whether a parallel region is running. Only one region can run at a time.
    busy: AtomicBool,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleeping: Vec<AtomicBool>,
}

/// Pool of threads, including the calling thread.
pub struct ThreadPool {
    state: Arc<PoolState>,
    workers: Vec<(JoinHandle<()>, Thread)>,
}

impl ThreadPool {
    /// Creates a pool of `threads` threads, including the calling thread; at least 1.
    pub fn new(threads: usize) -> Self {
        let extra = threads.max(1) - 1;
        let state = Arc::new(PoolState {
            ticket: AtomicU64::new(CLOSED),
            body: [AtomicUsize::new(0), AtomicUsize::new(0)],
            tasks: AtomicUsize::new(0),
            completed: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleeping: (0..extra).map(|_| AtomicBool::new(false)).collect(),
        });
        let workers = (0..extra)
            .filter_map(|index| {
                let state = Arc::clone(&state);
                let name = format!("engine-{}", index + 1);
                // If a thread cannot be started, the pool is smaller, which changes only speed.
                let handle = std::thread::Builder::new()
                    .name(name)
                    .spawn(move || state.run_worker(index))
                    .ok()?;
                let thread = handle.thread().clone();
                Some((handle, thread))
            })
            .collect();
        ThreadPool { state, workers }
    }

    /// Returns the number of threads, including the calling thread.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `body(task)` for every `task` below `tasks`, in any order, on all threads. Returns when
    /// all tasks are done. Only one thread may call this at a time, and not from within a task.
    ///
    /// # Panics
    /// Panics if a task panicked, or if another call is running.
    pub fn run(&self, tasks: usize, body: impl Fn(usize) + Sync) {
        if tasks <= 1 || self.workers.is_empty() {
            (0..tasks).for_each(body);
            return;
        }
        assert!((tasks as u64) < CLOSED, "{tasks} tasks");
        let state = &*self.state;
        // If two regions ran at the same time, each could run the other's tasks after the closures
        // of these tasks were dropped.
        assert!(
            !state.busy.swap(true, Ordering::Acquire),
            "the engine's pool is in use, either by another thread or by the task that calls it"
        );
        let body: &(dyn Fn(usize) + Sync) = &body;
        // SAFETY: a reference to a trait object is two words. Only threads that claimed a task of
        // this region dereference it, and all tasks are completed before this call returns.
        let words = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), [usize; 2]>(body) };
        let epoch = (state.ticket.load(Ordering::Relaxed) >> 32).wrapping_add(1) << 32;
        state.ticket.store(epoch | CLOSED, Ordering::SeqCst);
        state.body[0].store(words[0], Ordering::SeqCst);
        state.body[1].store(words[1], Ordering::SeqCst);
        state.tasks.store(tasks, Ordering::SeqCst);
        state.completed.store(0, Ordering::SeqCst);
        state.ticket.store(epoch, Ordering::SeqCst);
        for (index, (_, thread)) in self.workers.iter().enumerate() {
            if state.sleeping[index].swap(false, Ordering::SeqCst) {
                thread.unpark();
            }
        }
        while state.run_one() {}
        let mut spins = 0;
        while state.completed.load(Ordering::Acquire) < tasks {
            spin_or_yield(&mut spins);
        }
        let panicked = state.panicked.swap(false, Ordering::Relaxed);
        state.busy.store(false, Ordering::Release);
        assert!(!panicked, "a task of the engine's pool panicked; see the message above");
    }
}

impl PoolState {
    fn run_worker(&self, index: usize) {
        let mut spins = 0u32;
        let mut idle_since = None;
        while !self.stop.load(Ordering::Relaxed) {
            if self.run_one() {
                (spins, idle_since) = (0, None);
                continue;
            }
            spin_or_yield(&mut spins);
            if !spins.is_multiple_of(SPINS_BEFORE_YIELD) {
                continue;
            }
            // The clock is read no more often than the thread yields.
            if idle_since.get_or_insert_with(Instant::now).elapsed() >= LINGER {
                self.sleeping[index].store(true, Ordering::SeqCst);
                // The owner either sees `sleeping` and wakes this thread, or it opened the region
                // before this check.
                if !self.has_task() && !self.stop.load(Ordering::SeqCst) {
                    std::thread::park();
                }
                self.sleeping[index].store(false, Ordering::SeqCst);
                idle_since = None;
            }
        }
    }

    fn has_task(&self) -> bool {
        let next = self.ticket.load(Ordering::SeqCst) & CLOSED;
        next != CLOSED && (next as usize) < self.tasks.load(Ordering::SeqCst)
    }

    /// Claims and runs one task of the current region. Returns `false` if no task is left.
    fn run_one(&self) -> bool {
        let ticket = self.ticket.load(Ordering::SeqCst);
        let task = ticket & CLOSED;
        let words = [self.body[0].load(Ordering::SeqCst), self.body[1].load(Ordering::SeqCst)];
        if task == CLOSED || task as usize >= self.tasks.load(Ordering::SeqCst) {
            return false;
        }
        if self
            .ticket
            .compare_exchange(ticket, ticket + 1, Ordering::SeqCst, Ordering::SeqCst)
            .is_err()
        {
            // Another thread was faster, or the region is over: try again.
            return true;
        }
        // SAFETY: the ticket did not change between reading the region and claiming the task, so
        // the words are this region's closure, and the owner keeps it alive until the task is
        // completed.
        let body = unsafe { std::mem::transmute::<[usize; 2], &(dyn Fn(usize) + Sync)>(words) };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(task as usize))).is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
        self.completed.fetch_add(1, Ordering::Release);
        true
    }
}

fn spin_or_yield(spins: &mut u32) {
    *spins = spins.wrapping_add(1);
    if spins.is_multiple_of(SPINS_BEFORE_YIELD) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        for (handle, thread) in self.workers.drain(..) {
            thread.unpark();
            // A worker's loop cannot panic, because panics of tasks are caught.
            let _ = handle.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_pool_executes_every_task_once() {
        for threads in [1, 2, 3] {
            let pool = ThreadPool::new(threads);
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
    fn task_panic_propagates_and_pool_recovers() {
        let pool = ThreadPool::new(2);
        let run = std::panic::AssertUnwindSafe(|| pool.run(10, |task| assert_ne!(task, 5)));
        assert!(std::panic::catch_unwind(run).is_err());
        pool.run(10, |_| ());
    }

    #[test]
    fn nested_parallel_region_panics_and_pool_recovers() {
        let pool = ThreadPool::new(2);
        let num_rejected = AtomicUsize::new(0);
        pool.run(2, |_| {
            let nested = std::panic::AssertUnwindSafe(|| pool.run(2, |_| ()));
            num_rejected.fetch_add(
                usize::from(std::panic::catch_unwind(nested).is_err()),
                Ordering::Relaxed,
            );
        });
        assert_eq!(num_rejected.load(Ordering::Relaxed), 2);
        pool.run(10, |_| ());
    }

    #[test]
    fn sleeping_pool_workers_wake_for_new_region() {
        let pool = ThreadPool::new(2);
        for _ in 0..3 {
            std::thread::sleep(3 * LINGER);
            let sum = AtomicUsize::new(0);
            pool.run(100, |task| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 4950);
        }
    }
}
