//! Runs code many times and checks for leftovers.
//!
//! Usage: `cargo run --release --example many -p levade-sandbox -- 10000`. Arguments: the number of
//! runs [10000], and the number of concurrent runs [2].
//!
//! Of every seven runs, five exit normally, one is ended by a signal, and one leaves detached
//! processes behind. Prints the throughput and the duration of sequential runs. Also prints the
//! numbers of processes, descriptors and mounts before and after the runs, including the mounts
//! that the fork server sees. The exit code is 1 if any of these has grown, if an outcome was
//! wrong, or if the sandbox does not start.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use levade_sandbox::{Demand, Language, Options, Run, Sandbox};

const CODES: [(&str, i32); 7] = [
    ("print(sum(range(10)))", 0),
    ("import json; print(json.dumps({'a': 1}))", 0),
    ("open('/tmp/x', 'w').write('x' * 1000)", 0),
    ("raise SystemExit(0)", 0),
    ("import subprocess; subprocess.run(['/bin/true'])", 0),
    ("import os; os.abort()", -6),
    (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(1000)",
        0,
    ),
];

/// Returns the number of this process and its descendants, of their descriptors, and of the mounts
/// that they see.
fn resource_counts() -> [usize; 3] {
    let mut open = vec![std::process::id()];
    let mut totals = [0; 3];
    while let Some(pid) = open.pop() {
        totals[0] += 1;
        totals[1] += std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        totals[2] += std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))
            .map_or(0, |text| text.lines().count());
        for thread in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten()
        {
            let children =
                std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            open.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    totals
}

#[tokio::main]
async fn main() -> ExitCode {
    let (count, at_once): (usize, usize) = (argument(1, 10_000), argument(2, 2));
    let options =
        Options { concurrency: at_once, protection: Demand::BestEffort, ..Options::default() };
    let sandbox = match Sandbox::start(options).await {
        Ok(sandbox) => sandbox,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{}", sandbox.protection());
    let mut sequential: Vec<Duration> = Vec::new();
    for _ in 0..50 {
        let started = Instant::now();
        let done = sandbox.run(&Run::new(Language::Python, "pass")).await;
        sequential.push(started.elapsed());
        assert_eq!(done.map(|outcome| outcome.return_code()), Ok(Some(0)));
    }
    sequential.sort();
    println!("one after the other: p50 {:?}, p95 {:?}", sequential[25], sequential[47]);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = resource_counts();
    let next = Arc::new(AtomicUsize::new(0));
    let wrong = Arc::new(AtomicUsize::new(0));
    let started = Instant::now();
    let workers = (0..at_once).map(|_| {
        let sandbox = sandbox.clone();
        let next = Arc::clone(&next);
        let wrong = Arc::clone(&wrong);
        tokio::spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= count {
                    return;
                }
                let (code, expected) = CODES[number % CODES.len()];
                match sandbox.run(&Run::new(Language::Python, code)).await {
                    Ok(outcome) if outcome.return_code() == Some(expected) => {}
                    other => {
                        wrong.fetch_add(1, Ordering::Relaxed);
                        eprintln!("{code}: {other:?}");
                    }
                }
            }
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        assert!(worker.await.is_ok());
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("{count} runs, {at_once} at once: {:.1} runs/s", count as f64 / seconds);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let after = resource_counts();
    let wrong = wrong.load(Ordering::Relaxed);
    println!(
        "processes, descriptors, mounts before: {before:?}, after: {after:?}; wrong outcomes: \
         {wrong}"
    );
    let is_clean = after.iter().zip(&before).all(|(after, before)| after <= before) && wrong == 0;
    if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn argument(at: usize, default: usize) -> usize {
    std::env::args().nth(at).and_then(|text| text.parse().ok()).unwrap_or(default)
}
