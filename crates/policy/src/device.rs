//! The device of the simulated policy: the time that operations take, and which of them run
//! concurrently.
//!
//! As on one machine, sampling and training alternate. Every running sequence samples one token in
//! each batch, a prompt is computed without the prefix that is already in the cache, and the number
//! of running sequences is limited. Operations whose time is 0 take no time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{RwLock, Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep};

use crate::{DeviceStats, Load};

/// Time that operations of the simulated device take; all zero by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timing {
    /// Time per prompt token that is not in the prefix cache.
    pub prompt: Duration,
    /// Time per batch, in which each running sequence samples one token.
    pub batch: Duration,
    /// Additional time per sequence in a batch.
    pub sequence: Duration,
    /// Time per token that goes through the model in training or evaluation.
    pub learn: Duration,
    /// Time per optimizer step.
    pub update: Duration,
}

/// Maximum number of sequences in the prefix cache.
const MAX_CACHED_SEQUENCES: usize = 512;

/// Simulated device that samples and trains.
pub(crate) struct SimulatedDevice {
    timing: Timing,
    /// Lock of the device: sequences that are being computed lock it for reading, and training
    /// locks it for writing.
    ownership: RwLock<()>,
    /// Permits for further running sequences: one for each free slot.
    permits: Semaphore,
    waiting: AtomicUsize,
    running: AtomicUsize,
    prefix_cache: Mutex<VecDeque<Vec<u32>>>,
    prefix_hits: AtomicU64,
    prefilled: AtomicU64,
    sampled: AtomicU64,
    /// Time spent on sampling, in nanoseconds. The next fields count nanoseconds of training, and
    /// nanoseconds of sampling multiplied by the number of running sequences.
    busy: AtomicU64,
    training: AtomicU64,
    occupied: AtomicU64,
    /// Start and duration of the training operation in progress, if there is one.
    current_training: Mutex<Option<(Instant, Duration)>>,
}

/// Permit of a running sequence on the simulated device.
pub(crate) struct SequencePermit<'a> {
    device: &'a SimulatedDevice,
    _permit: Option<SemaphorePermit<'a>>,
}

impl Drop for SequencePermit<'_> {
    fn drop(&mut self) {
        self.device.running.fetch_sub(1, Ordering::Relaxed);
    }
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

impl SimulatedDevice {
    /// Creates a device that runs at most `running` sequences concurrently; 0 sets no limit.
    pub fn new(timing: Timing, running: usize) -> Self {
        SimulatedDevice {
            timing,
            ownership: RwLock::default(),
            permits: Semaphore::new(if running == 0 { Semaphore::MAX_PERMITS } else { running }),
            waiting: AtomicUsize::default(),
            running: AtomicUsize::default(),
            prefix_cache: Mutex::default(),
            prefix_hits: AtomicU64::default(),
            prefilled: AtomicU64::default(),
            sampled: AtomicU64::default(),
            busy: AtomicU64::default(),
            training: AtomicU64::default(),
            occupied: AtomicU64::default(),
            current_training: Mutex::default(),
        }
    }

    /// Waits until the device has a free slot for another running sequence.
    pub async fn acquire_permit(&self) -> SequencePermit<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let permit = self.permits.acquire().await.ok();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.running.fetch_add(1, Ordering::Relaxed);
        SequencePermit { device: self, _permit: permit }
    }

    /// Waits for as long as computing `prompt` takes, and adds the prompt to the prefix cache. If
    /// `use_cache` is true, the longest cached prefix takes no time.
    pub async fn prefill(&self, prompt: &[u32], use_cache: bool) {
        let cached = if use_cache {
            let prefix_cache = self.prefix_cache.lock().unwrap_or_else(PoisonError::into_inner);
            // The last token is always computed, because the first new token is sampled from its
            // logits.
            prefix_cache
                .iter()
                .map(|sequence| sequence.iter().zip(prompt).take_while(|(a, b)| a == b).count())
                .max()
                .unwrap_or(0)
                .min(prompt.len().saturating_sub(1))
        } else {
            0
        };
        let new = prompt.len() - cached;
        self.prefix_hits.fetch_add(cached as u64, Ordering::Relaxed);
        self.prefilled.fetch_add(new as u64, Ordering::Relaxed);
        self.sample(self.timing.prompt * new as u32).await;
        self.cache_prefix(prompt);
    }

    /// Waits for as long as one token takes in a batch of all running sequences.
    pub async fn sample_token(&self) {
        let running = self.running.load(Ordering::Relaxed).max(1) as u32;
        self.sample(self.timing.batch + self.timing.sequence * running).await;
        self.sampled.fetch_add(1, Ordering::Relaxed);
    }

    async fn sample(&self, time: Duration) {
        if time.is_zero() {
            return;
        }
        let _guard = self.ownership.read().await;
        sleep(time).await;
        // Each concurrent sequence adds its fraction of the time.
        let running = self.running.load(Ordering::Relaxed).max(1) as u64;
        self.busy.fetch_add(nanoseconds(time) / running, Ordering::Relaxed);
        self.occupied.fetch_add(nanoseconds(time), Ordering::Relaxed);
    }

    /// Adds a sequence to the prefix cache.
    pub fn cache_prefix(&self, sequence: &[u32]) {
        let mut prefix_cache = self.prefix_cache.lock().unwrap_or_else(PoisonError::into_inner);
        prefix_cache.truncate(MAX_CACHED_SEQUENCES - 1);
        prefix_cache.push_front(sequence.to_vec());
    }

    /// Clears the prefix cache, because the weights have changed.
    pub fn clear_prefix_cache(&self) {
        self.prefix_cache.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Waits for as long as training on `tokens` tokens takes. No sequence samples in this time.
    pub async fn run_training(&self, tokens: usize) {
        self.run_exclusively(self.timing.learn * tokens as u32).await;
    }

    /// Waits for as long as an optimizer step takes.
    pub async fn run_optimizer_step(&self) {
        self.run_exclusively(self.timing.update).await;
    }

    async fn run_exclusively(&self, time: Duration) {
        if time.is_zero() {
            return;
        }
        let _guard = self.ownership.write().await;
        *self.lock_training() = Some((Instant::now(), time));
        sleep(time).await;
        let mut training = self.lock_training();
        self.training.fetch_add(nanoseconds(time), Ordering::Relaxed);
        *training = None;
    }

    fn lock_training(&self) -> MutexGuard<'_, Option<(Instant, Duration)>> {
        self.current_training.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the numbers of running and waiting sequences on the device.
    pub fn load(&self) -> Load {
        Load {
            running: self.running.load(Ordering::Relaxed),
            waiting: self.waiting.load(Ordering::Relaxed),
            cache_in_use: 0.0,
        }
    }

    /// Returns the device's counters since its start.
    pub fn stats(&self) -> DeviceStats {
        DeviceStats {
            prefix_hits: self.prefix_hits.load(Ordering::Relaxed),
            prefilled: self.prefilled.load(Ordering::Relaxed),
            sampled: self.sampled.load(Ordering::Relaxed),
            busy_seconds: counter_seconds(&self.busy),
            running_seconds: counter_seconds(&self.occupied),
            cache_in_use_seconds: 0.0,
            cache_filled: 0.0,
        }
    }

    /// Returns how long the device has trained since the start.
    pub fn training_time(&self) -> Duration {
        // A training operation in progress counts up to now, because a deadline that expires
        // meanwhile must exclude it.
        let training = self.lock_training();
        let in_progress =
            training.map_or(Duration::ZERO, |(since, time)| since.elapsed().min(time));
        Duration::from_nanos(self.training.load(Ordering::Relaxed)) + in_progress
    }
}

fn counter_seconds(counter: &AtomicU64) -> f64 {
    Duration::from_nanos(counter.load(Ordering::Relaxed)).as_secs_f64()
}
