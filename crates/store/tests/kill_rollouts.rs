//! Kills a process that enqueues, leases and finishes rollouts at a random moment. All writes that
//! it reported must be kept, and every rollout must be leased by one try at a time.

#![allow(clippy::unwrap_used)] // clippy exempts #[test] functions, but not their helpers

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use levade_store::open_rollouts;
use levade_store::rollouts::{
    LeaseEnd, LeaseRequest, NewRollout, PageRequest, RolloutFilter, RolloutStatus, Rollouts,
    SystemClock,
};
use serde_json::value::to_raw_value;
use tokio::task::JoinSet;

const FILE: &str = "LEVADE_TEST_ROLLOUTS";

const WORKERS: usize = 8;

async fn open(file: &str) -> Arc<dyn Rollouts> {
    open_rollouts(file, Arc::new(SystemClock::default())).await.unwrap()
}

/// The child process: works until it is killed, and prints each completed write. Returns at once
/// when run as a normal test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_process_changes_rollouts_until_killed() {
    let Ok(file) = std::env::var(FILE) else { return };
    let store = open(&file).await;
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let store = Arc::clone(&store);
        workers.spawn(async move {
            loop {
                let new = NewRollout::new(to_raw_value(&worker).unwrap());
                let created = store.enqueue(&[new]).await.unwrap();
                println!("\nenqueued {}", created[0].id);
                let leased = store.lease_rollouts(&LeaseRequest::new(1, None)).await.unwrap();
                let Some(leased) = leased.first() else { continue };
                let lease = leased.latest_try.as_ref().unwrap().lease();
                println!("\nleased {}", leased.id);
                store.end_lease(&lease, LeaseEnd::Succeeded, None).await.unwrap();
                println!("\nfinished {}", leased.id);
            }
        });
    }
    workers.join_all().await;
}

#[tokio::test]
async fn acknowledged_rollouts_survive_process_kill() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rollouts.db").display().to_string();
    let [mut enqueued, mut leased, mut finished] =
        [BTreeSet::new(), BTreeSet::new(), BTreeSet::new()];
    for round in 0..6 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_process_changes_rollouts_until_killed", "--nocapture"])
            .env(FILE, &file)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut note = |line: String| {
            if let Some((event, id)) = line.split_once(' ')
                && id.starts_with("ro-")
            {
                let is_new = match event {
                    "enqueued" => enqueued.insert(id.to_owned()),
                    "leased" => leased.insert(id.to_owned()),
                    _ => finished.insert(id.to_owned()),
                };
                assert!(is_new, "{line} twice");
            }
        };
        lines.by_ref().take(200).for_each(&mut note);
        std::thread::sleep(Duration::from_micros(700 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        // Output that the child wrote before it was killed counts, too.
        lines.for_each(&mut note);

        let store = open(&file).await;
        let all = store
            .query_rollouts(&RolloutFilter::default(), &PageRequest::default())
            .await
            .unwrap()
            .items;
        let with = |statuses: &[RolloutStatus]| -> BTreeSet<String> {
            all.iter().filter(|of| statuses.contains(&of.status)).map(|of| of.id.clone()).collect()
        };
        assert!(all.iter().map(|of| of.id.clone()).collect::<BTreeSet<_>>().is_superset(&enqueued));
        assert!(with(&[RolloutStatus::Succeeded]).is_superset(&finished), "round {round}");
        let tried = with(&[RolloutStatus::Succeeded, RolloutStatus::Preparing]);
        assert!(tried.is_superset(&leased), "round {round}");
        // Each worker may have completed at most one more write of each kind without reporting it.
        assert!(
            all.len() - enqueued.len() <= WORKERS * (round as usize + 1),
            "{} of {}",
            all.len(),
            enqueued.len()
        );
        assert!(tried.len() - leased.len() <= WORKERS * (round as usize + 1));
    }
    assert!(finished.len() > 100, "{}", finished.len());
}
