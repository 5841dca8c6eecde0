//! The device of the simulated policy: what it takes how long, and what it does at the same time.
//!
//! As on one machine, sampling and training take turns, every sequence that runs draws a token in each batch,
//! prompts are computed as far as nobody has computed their beginning, and only so many sequences run at
//! once. Where no time is asked for, none passes.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{RwLock, Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep};

use crate::{DeviceStats, Load};

/// How long things take; all zero by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timing {
    /// Each token of a prompt, where it is not in the cache.
    pub prompt: Duration,
    /// Each batch in which all running sequences draw a token,
    pub batch: Duration,
    /// and in it each sequence.
    pub sequence: Duration,
    /// Each token that goes through the model to be learnt from, or to be evaluated.
    pub learn: Duration,
    /// Each step of the optimiser.
    pub update: Duration,
}

/// Paths whose beginnings are known.
const KNOWN: usize = 512;

/// A device that samples and learns.
pub(crate) struct Device {
    timing: Timing,
    /// Held together by sequences that are computed, alone by what learns.
    turn: RwLock<()>,
    /// Sequences that may still begin.
    room: Semaphore,
    waiting: AtomicUsize,
    running: AtomicUsize,
    known: Mutex<VecDeque<Vec<u32>>>,
    prefix_hits: AtomicU64,
    prefilled: AtomicU64,
    drawn: AtomicU64,
    /// Nanoseconds of sampling and of learning, and the former times the sequences that ran.
    busy: AtomicU64,
    learning: AtomicU64,
    occupied: AtomicU64,
    /// Since when it learns, and for how long.
    learns: Mutex<Option<(Instant, Duration)>>,
}

/// The place of a sequence that runs.
pub(crate) struct Running<'a> {
    device: &'a Device,
    _permit: Option<SemaphorePermit<'a>>,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.device.running.fetch_sub(1, Ordering::Relaxed);
    }
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

impl Device {
    /// One on which at most `running` sequences run at once; 0 for any number.
    pub fn new(timing: Timing, running: usize) -> Self {
        Device {
            timing,
            turn: RwLock::default(),
            room: Semaphore::new(if running == 0 { Semaphore::MAX_PERMITS } else { running }),
            waiting: AtomicUsize::default(),
            running: AtomicUsize::default(),
            known: Mutex::default(),
            prefix_hits: AtomicU64::default(),
            prefilled: AtomicU64::default(),
            drawn: AtomicU64::default(),
            busy: AtomicU64::default(),
            learning: AtomicU64::default(),
            occupied: AtomicU64::default(),
            learns: Mutex::default(),
        }
    }

    /// Waits until another sequence may run.
    pub async fn enter(&self) -> Running<'_> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let permit = self.room.acquire().await.ok();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.running.fetch_add(1, Ordering::Relaxed);
        Running { device: self, _permit: permit }
    }

    /// Computes a prompt: all of it, or where it `shares`, all but what others have computed.
    pub async fn prefill(&self, prompt: &[u32], shares: bool) {
        let shared = if shares {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            let shared = |path: &Vec<u32>| path.iter().zip(prompt).take_while(|(a, b)| a == b).count();
            // The last token is computed in any case: it is what the first is drawn from.
            known.iter().map(shared).max().unwrap_or(0).min(prompt.len().saturating_sub(1))
        } else {
            0
        };
        let new = prompt.len() - shared;
        self.prefix_hits.fetch_add(shared as u64, Ordering::Relaxed);
        self.prefilled.fetch_add(new as u64, Ordering::Relaxed);
        self.sample(self.timing.prompt * new as u32).await;
        self.keep(prompt);
    }

    /// Lets the time pass that a token takes in a batch of all that run.
    pub async fn draw(&self) {
        let running = self.running.load(Ordering::Relaxed).max(1) as u32;
        self.sample(self.timing.batch + self.timing.sequence * running).await;
        self.drawn.fetch_add(1, Ordering::Relaxed);
    }

    async fn sample(&self, time: Duration) {
        if time.is_zero() {
            return;
        }
        let _turn = self.turn.read().await;
        sleep(time).await;
        // Each of those that run at the same time counts its share.
        let running = self.running.load(Ordering::Relaxed).max(1) as u64;
        self.busy.fetch_add(nanoseconds(time) / running, Ordering::Relaxed);
        self.occupied.fetch_add(nanoseconds(time), Ordering::Relaxed);
    }

    /// Remembers a path as computed.
    pub fn keep(&self, path: &[u32]) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.truncate(KNOWN - 1);
        known.push_front(path.to_vec());
    }

    /// Forgets what it has computed: the weights have changed.
    pub fn forget(&self) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Lets the time pass that so many tokens of learning take; nothing is sampled meanwhile.
    pub async fn learn(&self, tokens: usize) {
        self.work(self.timing.learn * tokens as u32).await;
    }

    /// Waits for as long as an optimiser step takes.
    pub async fn update(&self) {
        self.work(self.timing.update).await;
    }

    async fn work(&self, time: Duration) {
        if time.is_zero() {
            return;
        }
        let _turn = self.turn.write().await;
        *self.learns() = Some((Instant::now(), time));
        sleep(time).await;
        let mut learns = self.learns();
        self.learning.fetch_add(nanoseconds(time), Ordering::Relaxed);
        *learns = None;
    }

    fn learns(&self) -> MutexGuard<'_, Option<(Instant, Duration)>> {
        self.learns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many sequences run and wait.
    pub fn load(&self) -> Load {
        Load {
            running: self.running.load(Ordering::Relaxed),
            waiting: self.waiting.load(Ordering::Relaxed),
            cache_in_use: 0.0,
        }
    }

    /// Counters since the start.
    pub fn stats(&self) -> DeviceStats {
        let seconds =
            |counter: &AtomicU64| Duration::from_nanos(counter.load(Ordering::Relaxed)).as_secs_f64();
        DeviceStats {
            prefix_hits: self.prefix_hits.load(Ordering::Relaxed),
            prefilled: self.prefilled.load(Ordering::Relaxed),
            drawn: self.drawn.load(Ordering::Relaxed),
            busy_seconds: seconds(&self.busy),
            running_seconds: seconds(&self.occupied),
            cache_in_use_seconds: 0.0,
            cache_filled: 0.0,
        }
    }

    /// For how long it has learnt since the start.
    pub fn learning(&self) -> Duration {
        // What is under way counts as far as it has come: who waits for a reply meanwhile wants to know what
        // it is that takes so long.
        let learns = self.learns();
        let under_way = learns.map_or(Duration::ZERO, |(since, time)| since.elapsed().min(time));
        Duration::from_nanos(self.learning.load(Ordering::Relaxed)) + under_way
    }
}
