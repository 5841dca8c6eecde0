//! Runs the seeds of a simulation.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::TempDir;

/// Result of a simulation.
pub struct Outcome {
    pub violations: Vec<String>,
    pub events: Vec<String>,
    pub requests: u64,
    pub kills: u64,
}

/// Creates a directory for the files of a simulation. Without a disk, a simulated flush takes no
/// time.
pub fn directory() -> TempDir {
    let memory = Path::new("/dev/shm");
    let dir = match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    };
    dir.unwrap()
}

/// Simulates `count` seeds on all cores. Panics if a seed breaks a rule, and names up to ten such
/// seeds.
pub fn run_seeds(simulate: fn(u64) -> Outcome, first: u64, count: u64) {
    let next = AtomicU64::new(first);
    let totals = [AtomicU64::new(0), AtomicU64::new(0)];
    let failed = std::sync::Mutex::new(Vec::new());
    let worker = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + count {
                return;
            }
            let outcome = simulate(seed);
            totals[0].fetch_add(outcome.requests, Ordering::Relaxed);
            totals[1].fetch_add(outcome.kills, Ordering::Relaxed);
            if count == 1 {
                outcome.events.iter().for_each(|event| println!("{event}"));
            }
            if let Some(violation) = outcome.violations.first() {
                println!("seed {seed}: {violation}");
                failed.lock().unwrap().push(seed);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(worker))));
    let [requests, kills] = totals.map(AtomicU64::into_inner);
    println!("{count} seeds from {first}: {requests} requests, {kills} kills");
    let mut failed = failed.into_inner().unwrap();
    failed.sort_unstable();
    let shown = &failed[..failed.len().min(10)];
    assert!(failed.is_empty(), "{} of {count} seeds break a rule: {shown:?}", failed.len());
}

/// Simulates `LEVADE_SEEDS` seeds from `LEVADE_FIRST_SEED` on; by default, 10,000 from 0 on.
pub fn run_seeds_of_environment(simulate: fn(u64) -> Outcome) {
    let first = number_variable("LEVADE_FIRST_SEED", 0);
    run_seeds(simulate, first, number_variable("LEVADE_SEEDS", 10_000));
}

fn number_variable(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, but no number")),
        Err(_) => default,
    }
}
