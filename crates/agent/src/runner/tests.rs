//! Tests of leased attempts: reports, lost leases and cancellation, with a runner that the test
//! plays.

use std::sync::Arc;
use std::time::Duration;

use levade_gateway::{Gateway, GatewayOptions};
use levade_policy::{Sampler, Simulator};
use levade_store::open_rollouts;
use levade_store::rollouts::{
    LeaseEnd, LeaseRequest, Rollout, RolloutStatus, Rollouts, SystemClock,
};
use levade_tree::{CallCounts, Finish, Outcome};
use serde_json::value::to_raw_value;
use tokio::task::JoinHandle;

use super::*;
use crate::testing::{agent, context, player};
use crate::{AgentLoop, Attempt, AttemptContext, Program};

/// A trainer's loop, and the store that it shares with the runner of the test.
struct Bench {
    store: Arc<dyn Rollouts>,
    runner_loop: RunnerLoop,
}

impl Bench {
    async fn new(lease: Duration, wait: Duration) -> Self {
        let store = open_rollouts("memory:", Arc::new(SystemClock::default())).await.unwrap();
        let options = RunnerQueueOptions {
            store: "memory:".into(),
            queue: "run/x".into(),
            resources_id: "run/x".into(),
            recipe_version: 3,
            lease,
            wait,
        };
        let queue = RunnerQueue::new(Arc::clone(&store), options, |_| {});
        let program = Program {
            command: vec!["solve".into()],
            dir: Default::default(),
            passes: Vec::new(),
            supervisor: Default::default(),
            gateway: Gateway::new(Vec::new(), GatewayOptions::default()),
            address: "http://trainer:1".into(),
            rewards: false,
            has_seats: false,
            workers: None,
        };
        Bench { store, runner_loop: RunnerLoop { leased: LeasedLoop::Tools(program), queue } }
    }

    fn start(&self) -> JoinHandle<Attempt> {
        self.start_for(false)
    }

    fn start_for(&self, is_evaluation: bool) -> JoinHandle<Attempt> {
        let runner_loop = self.runner_loop.clone();
        let sampler: Arc<dyn Sampler> = Arc::new(Simulator::new(Default::default()));
        let context = context(vec![agent("solver", player("student", sampler), Vec::new())]);
        let context = AttemptContext { is_evaluation, ..context };
        tokio::spawn(async move { runner_loop.run(context).await })
    }

    async fn lease(&self) -> Rollout {
        self.lease_from("run/x").await
    }

    async fn lease_from(&self, queue: &str) -> Rollout {
        let request = LeaseRequest {
            queues: vec![queue.into()],
            wait: Duration::from_secs(10),
            ..LeaseRequest::new(1, Some("r"))
        };
        self.store
            .lease_rollouts(&request)
            .await
            .unwrap()
            .pop()
            .expect("an attempt waits for a runner")
    }
}

async fn joined(attempt: JoinHandle<Attempt>) -> Attempt {
    tokio::time::timeout(Duration::from_secs(20), attempt).await.expect("the attempt ends").unwrap()
}

const LEASE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reported_outcome_ends_attempt() {
    let bench = Bench::new(LEASE, LEASE).await;
    let attempt = bench.start();
    let rollout = bench.lease().await;
    let leased: LeasedAttempt = serde_json::from_str(rollout.input.get()).unwrap();
    assert_eq!((leased.agent.as_str(), leased.seed, leased.stream), ("solver", 7, 11));
    assert_eq!(leased.recipe_version, 3);
    assert!(leased.endpoint.base_url.starts_with("http://trainer:1/rollout/"));
    let outcome = Outcome {
        calls: CallCounts { ok: 2, ..CallCounts::default() },
        rewards_by_turn: vec![(0, 0.1)],
        ..Outcome::demonstrated("5")
    };
    let report = AttemptReport::Tools { outcome: Box::new(outcome), tool_times: Vec::new() };
    let lease = rollout.latest_try.unwrap().lease();
    let metadata = Some(to_raw_value(&report).unwrap());
    bench.store.end_lease(&lease, LeaseEnd::Succeeded, metadata).await.unwrap();
    let Attempt { outcome, is_lost, .. } = joined(attempt).await;
    assert!(!is_lost);
    assert_eq!((outcome.final_text.as_str(), outcome.finish), ("5", Finish::Answered));
    assert_eq!((outcome.calls.ok, &outcome.rewards_by_turn[..]), (2, &[(0, 0.1)][..]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evaluation_attempt_is_added_to_evaluation_queue() {
    let bench = Bench::new(LEASE, LEASE).await;
    let evaluation = bench.start_for(true);
    let rollout = bench.lease_from("run/x/evaluation").await;
    assert_eq!(rollout.mode.as_deref(), Some("val"));
    let training = bench.start();
    assert_eq!(bench.lease().await.mode.as_deref(), Some("train"));
    // A resumed run cancels both.
    assert_eq!(bench.runner_loop.queue.cancel_all().await.unwrap(), 2);
    assert!(joined(evaluation).await.is_lost && joined(training).await.is_lost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_lease_loses_attempt() {
    let bench = Bench::new(Duration::from_millis(600), LEASE).await;
    let attempt = bench.start();
    let rollout = bench.lease().await;
    let made = joined(attempt).await;
    assert!(made.is_lost, "{made:?}");
    let lease = rollout.latest_try.unwrap().lease();
    let late = bench.store.end_lease(&lease, LeaseEnd::Succeeded, None).await;
    // A late report cannot change an attempt that has ended.
    drop(late);
    let next = bench.start();
    assert_ne!(bench.lease().await.id, rollout.id);
    next.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn returned_lease_loses_attempt_and_cancels_rollout() {
    let bench = Bench::new(LEASE, LEASE).await;
    let attempt = bench.start();
    let rollout = bench.lease().await;
    let lease = rollout.latest_try.unwrap().lease();
    bench.store.end_lease(&lease, LeaseEnd::Released, None).await.unwrap();
    assert!(joined(attempt).await.is_lost);
    let ids = [rollout.id];
    let ended = bench.store.wait_until_finished(&ids, Duration::from_secs(10)).await.unwrap();
    assert_eq!(ended[0].status, RolloutStatus::Cancelled);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_attempt_cancels_its_rollout() {
    let bench = Bench::new(LEASE, LEASE).await;
    let attempt = bench.start();
    let rollout = bench.lease().await;
    let lease = rollout.latest_try.unwrap().lease();
    bench.store.record_heartbeat(&lease).await.unwrap();
    attempt.abort();
    let notified = async {
        while bench.store.record_heartbeat(&lease).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let notified = tokio::time::timeout(Duration::from_secs(20), notified).await;
    notified.expect("the runner is notified that the attempt was dropped");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempt_without_runner_fails_after_wait() {
    let bench = Bench::new(Duration::from_millis(600), Duration::from_millis(900)).await;
    let made = joined(bench.start()).await;
    let error = made.outcome.error.unwrap();
    assert!(!made.is_lost && error.contains("levade runner --store memory:"), "{error}");
    assert!(error.contains("0 runners are connected"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_report_names_reason() {
    let bench = Bench::new(LEASE, LEASE).await;
    let attempt = bench.start();
    let lease = bench.lease().await.latest_try.unwrap().lease();
    let report = AttemptReport::Failed { why: "the file t.py is missing".into() };
    let metadata = Some(to_raw_value(&report).unwrap());
    bench.store.end_lease(&lease, LeaseEnd::Failed, metadata).await.unwrap();
    let error = joined(attempt).await.outcome.error.unwrap();
    assert!(error.contains("the file t.py is missing"), "{error}");
}
