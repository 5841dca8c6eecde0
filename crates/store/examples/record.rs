//! Measures the store: the time for which async workers are blocked when many attempts end at the
//! same time, and the cost of a long attempt.
//!
//! ```sh
//! cargo run --release -p levade-store --features testing --example record
//! ```
//!
//! Without an argument, both measurements run. `-- ends` runs only the first, in which 64 attempts
//! of 8k tokens end at the same time. `-- long` runs only the second, with an attempt of up to 100
//! turns and 128k tokens, and a fork in each turn.
//!
//! Each stage of `bench_long` runs in its own process, so that the peak memory of the stages is
//! measured separately.
#![allow(clippy::unwrap_used, reason = "a measurement ends where something fails")]

use std::path::Path;
use std::pin::Pin;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use levade_store::testing::wait;
use levade_store::{Attempt, AttemptStart, Memory, Sqlite, Status, Store};
use levade_tree::{
    AttemptId, AttemptSlot, Kind, Outcome, Part, Purpose, RunId, Segment, SegmentId, SequenceInput,
    Trajectory, TreeBatch, VersionRun,
};
use serde_json::json;

/// Number of attempts that end at the same time.
const ATTEMPTS: u32 = 64;
/// Number of tokens per attempt.
const TOKENS: u32 = 8192;
/// Number of rounds. The latencies are the maxima over the rounds; the rate is the median.
const ROUNDS: u32 = 5;

/// Number of tokens in the context of the long attempt at its last turn, without forks.
const LONG: u32 = 128 << 10;
/// Maximum number of turns of the long attempt.
const TURNS: u32 = 100;
/// Number of sampled tokens in a turn, and also in its fork.
const SAMPLED: u32 = 256;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            bench_ends();
            bench_long();
        }
        ["ends"] => bench_ends(),
        ["long"] => bench_long(),
        ["long", stage, turns, file] => {
            run_long_stage(stage, turns.parse().unwrap(), Path::new(file))
        }
        _ => eprintln!("usage: record [ends | long]"),
    }
}

fn run() -> RunId {
    RunId("bench".into())
}

fn sampled(parent: Option<SegmentId>, tokens: u32, turn: u32) -> Segment {
    Segment {
        kind: Kind::Sampled,
        logprobs: (0..tokens).map(|i| -(i as f32).sqrt()).collect(),
        versions: vec![VersionRun { version: 1, len: tokens }],
        ..Segment::context(parent, make_tokens(tokens, turn), turn)
    }
}

/// Creates token ids that differ between turns.
fn make_tokens(tokens: u32, turn: u32) -> Vec<u32> {
    (0..tokens).map(|i| (i ^ turn << 16).wrapping_mul(2_654_435_761) % 50_000).collect()
}

fn attempt(group: u32, sample: u32) -> Attempt {
    let mut trajectory = Trajectory::new();
    let mut parent = None;
    for turn in 0..4 {
        let context = trajectory
            .push(Segment::context(parent, make_tokens(TOKENS / 8, turn + 16 * group), turn))
            .unwrap();
        parent =
            Some(trajectory.push(sampled(Some(context), TOKENS / 8, turn + 16 * sample)).unwrap());
    }
    let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 0, group, sample };
    Attempt {
        id: AttemptId::new(&run(), &slot, 0),
        slot,
        number: 0,
        task: json!({"question": "?"}),
        outcome: Outcome::demonstrated("!"),
        score: Some(1.0),
        reward: Some(1.0),
        step_rewards: Vec::new(),
        status: Status::Completed,
        trajectory,
    }
}

/// A future that records the maximum duration of a single poll, in nanoseconds.
struct PollTimer<F> {
    inner: Pin<Box<F>>,
    max_poll: Arc<AtomicU64>,
}

impl<F: Future> Future for PollTimer<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let start = Instant::now();
        let poll = self.inner.as_mut().poll(context);
        self.max_poll.fetch_max(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        poll
    }
}

/// Runs `work` and returns its output, with the maximum delay of a task that should run once per
/// millisecond in the meantime.
async fn measure_delay<T>(work: impl Future<Output = T>) -> (T, Duration) {
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let ticks = tokio::spawn(async move {
        let every = Duration::from_millis(1);
        let mut worst = Duration::ZERO;
        while !stopped.load(Ordering::Relaxed) {
            let start = Instant::now();
            tokio::time::sleep(every).await;
            worst = worst.max(start.elapsed().saturating_sub(every));
        }
        worst
    });
    let done = work.await;
    stop.store(true, Ordering::Relaxed);
    (done, ticks.await.unwrap())
}

/// A way to record an attempt that has ended.
#[derive(Clone, Copy, PartialEq)]
enum WriteMode {
    /// One call records the complete attempt.
    Complete,
    /// The attempt was started before; one call appends the segments and another one records the
    /// end.
    Incremental,
    /// The async worker blocks until the disk has the data, one attempt at a time.
    Blocking,
}

async fn record(
    store: Arc<dyn Store>,
    write_lock: Arc<Mutex<()>>,
    attempt: Arc<Attempt>,
    way: WriteMode,
) {
    match way {
        WriteMode::Complete => drop(store.record_attempt(&attempt).await.unwrap()),
        WriteMode::Incremental => {
            store.append_segments(&attempt.id, attempt.trajectory.segments()).await.unwrap();
            store.end_attempt(&attempt.id, &attempt.end()).await.unwrap();
        }
        WriteMode::Blocking => {
            let _guard = write_lock.lock().unwrap();
            wait(store.record_attempt(&attempt)).unwrap();
        }
    }
}

fn start_of(attempt: &Attempt) -> AttemptStart {
    let Attempt { id, slot, number, task, .. } = attempt.clone();
    AttemptStart { id, slot, number, task }
}

fn bench_ends() {
    println!(
        "{ATTEMPTS} attempts of {TOKENS} tokens end at once, 2 workers, worst of {ROUNDS} rounds"
    );
    println!(
        "| backend | way | longest in a worker, ms | a task late by, ms | idle, ms | attempts/s |"
    );
    println!("|---|---|---|---|---|---|");
    let ways = [
        (WriteMode::Complete, "whole"),
        (WriteMode::Incremental, "append, end"),
        (WriteMode::Blocking, "blocking, as before"),
    ];
    for (way, name) in ways {
        for backend in ["sqlite", "memory"] {
            if way == WriteMode::Blocking && backend == "memory" {
                continue;
            }
            let mut max_poll = 0u64;
            let mut late = Duration::ZERO;
            let mut idle = Duration::ZERO;
            let mut rates = Vec::new();
            for _ in 0..ROUNDS {
                let dir = tempfile::tempdir().unwrap();
                let runtime = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(2)
                    .enable_all()
                    .build()
                    .unwrap();
                let round_result = runtime.block_on(async {
                    let store: Arc<dyn Store> = match backend {
                        "sqlite" => Arc::new(
                            Sqlite::open(&dir.path().join("run.db"), &run()).await.unwrap(),
                        ),
                        _ => Arc::new(Memory::new(run())),
                    };
                    let made: Vec<_> =
                        (0..ATTEMPTS).map(|i| Arc::new(attempt(i / 8, i % 8))).collect();
                    if way == WriteMode::Incremental {
                        for attempt in &made {
                            store.start_attempt(&start_of(attempt)).await.unwrap();
                        }
                    }
                    let ((), idle) =
                        measure_delay(tokio::time::sleep(Duration::from_millis(100))).await;
                    let max_poll = Arc::new(AtomicU64::new(0));
                    let write_lock = Arc::new(Mutex::new(()));
                    let start = Instant::now();
                    let all = async {
                        let mut tasks = tokio::task::JoinSet::new();
                        for attempt in made {
                            let inner =
                                Box::pin(record(store.clone(), write_lock.clone(), attempt, way));
                            tasks.spawn(PollTimer { inner, max_poll: max_poll.clone() });
                        }
                        tasks.join_all().await;
                    };
                    let ((), late) = measure_delay(all).await;
                    let seconds = start.elapsed().as_secs_f64();
                    (max_poll.load(Ordering::Relaxed), late, idle, f64::from(ATTEMPTS) / seconds)
                });
                max_poll = max_poll.max(round_result.0);
                late = late.max(round_result.1);
                idle = idle.max(round_result.2);
                rates.push(round_result.3);
            }
            rates.sort_by(f64::total_cmp);
            println!(
                "| {backend} | {name} | {:.3} | {:.2} | {:.2} | {:.0} |",
                max_poll as f64 / 1e6,
                late.as_secs_f64() * 1e3,
                idle.as_secs_f64() * 1e3,
                rates[rates.len() / 2]
            );
        }
    }
}

/// Adds the segments of a turn: an observation, a completion, and a fork from the middle of the
/// completion. Returns the id of the completion.
fn add_long_turn(trajectory: &mut Trajectory, turn: u32, parent: Option<SegmentId>) -> SegmentId {
    let context = make_tokens(LONG / TURNS - SAMPLED, turn);
    let context = trajectory.push(Segment::context(parent, context, turn)).unwrap();
    let completion = trajectory.push(sampled(Some(context), SAMPLED, turn)).unwrap();
    let fork =
        Segment { after: Some(SAMPLED / 2), ..sampled(Some(completion), SAMPLED, turn + 1000) };
    trajectory.push(fork).unwrap();
    completion
}

fn bench_long() {
    println!(
        "\nan attempt of up to {TURNS} turns and {LONG} tokens, with a fork of {SAMPLED} tokens \
         each turn"
    );
    println!(
        "| turns | new tokens | file, bytes a token | stage | peak memory, MiB | bytes a token | \
         seconds |"
    );
    println!("|---|---|---|---|---|---|---|");
    for turns in [10, 50, 100] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run.db");
        for stage in ["record", "load", "plan", "paths"] {
            let program = std::env::current_exe().unwrap();
            let arguments = ["long", stage, &turns.to_string()];
            let done = Command::new(program).args(arguments).arg(&file).status().unwrap();
            assert!(done.success());
        }
    }
}

/// Returns the peak resident memory of the process so far, in bytes. 0 if it is unknown.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn run_long_stage(stage: &str, turns: u32, file: &Path) {
    let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 0, group: 0, sample: 0 };
    let id = AttemptId::new(&run(), &slot, 0);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let before = peak_memory();
    let start = Instant::now();
    let new = runtime.block_on(async {
        if stage == "record" {
            let store = Sqlite::open(file, &run()).await.unwrap();
            store
                .start_attempt(&AttemptStart { id, slot, number: 0, task: json!("?") })
                .await
                .unwrap();
            let mut trajectory = Trajectory::new();
            let mut parent = None;
            for turn in 0..turns {
                let num_segments = trajectory.segments().len();
                parent = Some(add_long_turn(&mut trajectory, turn, parent));
                store.append_segments(&id, &trajectory.segments()[num_segments..]).await.unwrap();
            }
            let end = Attempt { status: Status::Completed, ..attempt(0, 0) }.end();
            store.end_attempt(&id, &end).await.unwrap();
            return tokens(&trajectory);
        }
        let store = Sqlite::open_existing(file).await.unwrap();
        let attempt = store.attempt(&id).await.unwrap().unwrap();
        let trajectory = &attempt.trajectory;
        if stage != "load" {
            let sequences = trajectory.leaves().into_iter().map(|leaf| trajectory.sequence(leaf));
            let owners = trajectory.owners();
            assert_eq!(owners.len(), trajectory.segments().len());
            if stage == "paths" {
                // In the form that a learner gets: every sequence with all its tokens, which the
                // sequences share.
                let tokens_of = |segment: &Segment| Arc::from(segment.tokens.as_slice());
                let shared: Vec<Arc<[u32]>> = trajectory.segments().iter().map(tokens_of).collect();
                let input = |sequence: Vec<Part<'_>>| {
                    let mut input = SequenceInput::default();
                    for part in sequence {
                        input.tokens.push(shared[part.segment.id.0 as usize].clone(), part.len);
                    }
                    input
                };
                let sequences: Vec<SequenceInput> = sequences.map(input).collect();
                assert_eq!(
                    TreeBatch::merge(&sequences).unwrap().tokens.len() as u64,
                    tokens(trajectory)
                );
            } else {
                assert_eq!(sequences.map(|path| path.len()).max(), Some(2 * turns as usize + 1));
            }
        }
        tokens(trajectory)
    });
    let peak = peak_memory() - before;
    let seconds = start.elapsed().as_secs_f64();
    let bytes = std::fs::metadata(file).unwrap().len();
    println!(
        "| {turns} | {new} | {:.2} | {stage} | {:.1} | {:.1} | {seconds:.3} |",
        bytes as f64 / new as f64,
        peak as f64 / (1 << 20) as f64,
        peak as f64 / new as f64
    );
}

fn tokens(trajectory: &Trajectory) -> u64 {
    trajectory.segments().iter().map(|segment| segment.tokens.len() as u64).sum()
}
