//! Runs every algorithm by name, samples ahead of training, and replays runs from their stores.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use levade_policy::Simulator;
use levade_store::testing::wait;
use levade_store::{Sqlite, Store};
use levade_trainer::{
    ReplayComparison, RunEnd, StartMode, StopFlag, Summary, Trainer, TrainerError, replay,
};
use levade_tree::Purpose;
use serde_json::Value;

use crate::common::{Notes, metrics, parts, recipe, simulator};

async fn run(
    dir: &Path,
    policy: &Arc<Simulator>,
    latency: Duration,
    overrides: &[&str],
) -> Result<Summary, TrainerError> {
    let mut trainer =
        Trainer::new(recipe(dir, overrides), parts(policy, latency), StartMode::Fresh).await?;
    match trainer.run(&mut (), &StopFlag::default()).await? {
        RunEnd::Finished(summary) => Ok(summary),
        stopped => panic!("{stopped:?}"),
    }
}

/// Returns the metrics of the second phase's steps.
fn steps(dir: &Path) -> Vec<Value> {
    metrics(dir)
        .into_iter()
        .filter(|line| line["phase"] == 1 && line.get("eval").is_none())
        .collect()
}

/// Replays a finished run. Returns the number of steps and the comparisons of its checkpoints.
async fn replayed(dir: &Path, overrides: &[&str]) -> (u32, Vec<ReplayComparison>) {
    let (steps, compared, _) = replayed_with_notes(dir, overrides).await;
    (steps, compared)
}

/// Returns the number of steps and the comparisons of a replay, and its notes.
async fn replayed_with_notes(
    dir: &Path,
    overrides: &[&str],
) -> (u32, Vec<ReplayComparison>, Vec<String>) {
    let mut notes = Notes::default();
    let policies = vec![crate::common::trained("default", &simulator(Duration::ZERO, 0.0))];
    let mut compared = Vec::new();
    let recipe = recipe(dir, overrides);
    let steps =
        replay(&recipe, dir, policies, &mut notes, &mut |one| compared.push(one)).await.unwrap();
    (steps, compared, notes.0)
}

/// Returns the override of an RL phase with an algorithm and further keys.
fn phase(algorithm: &str, keys: &str) -> String {
    format!(
        "phase.1={{kind='rl', algorithm='{algorithm}', steps=3, groups=3, group_size=4, \
         learning_rate=0.05, {keys}}}"
    )
}

/// Runs every algorithm, and every option that changes a step's computation. All steps are on
/// policy, bit for bit, and a replay yields the same weights.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn algorithms_run_on_policy_and_replay() {
    let root = tempfile::tempdir().unwrap();
    let mut all: HashSet<Vec<u32>> = HashSet::new();
    let cases = [
        ("grpo", "mini_batches=2, epochs=2"),
        ("dr_grpo", "entropy=0.01"),
        ("dapo", "zero_variance_groups='refill'"),
        ("rloo", "overlong='mask'"),
        ("reinforce_plus_plus", "max_trained_turns=1"),
        ("reinforce_plus_plus_baseline", "overlong={kind='penalize', buffer=8}"),
        ("opo", "normalizer='group_rollout_mean'"),
        ("remax", "epochs=2"),
        ("gpg", "kl={estimator='k3', coefficient=0.01}"),
        (
            "pass_k",
            "k=2, loss={kind='clip_cov', low=0.2, high=0.2, fraction=0.1, lower=0.0, upper=5.0}",
        ),
        ("gspo", "epochs=2"),
        ("gmpo", "epochs=2"),
        ("cispo", "advantage={kind='turns', gamma=0.9}"),
        ("sapo", "loss={kind='kl_cov', coefficient=1.0, fraction=0.1}, epochs=2"),
        ("minirl", "epochs=2, proximal='recompute', correction={bound={kind='clamp', high=2.0}}"),
        (
            "ppo",
            "kl={estimator='k1', coefficient=0.1, apply_to='reward'}, \
             critic={learning_rate=0.1, warmup=1}",
        ),
    ];
    for (algorithm, keys) in cases {
        let dir = root.path().join(algorithm);
        let change = phase(algorithm, keys);
        let overrides = ["eval.tasks=0", &change];
        let policy = simulator(Duration::ZERO, 0.0);
        run(&dir, &policy, Duration::ZERO, &overrides)
            .await
            .unwrap_or_else(|e| panic!("{algorithm}: {e}"));
        for step in steps(&dir) {
            assert_eq!(step["kind"], algorithm);
            assert_eq!(step["training/logprob_mismatch"], 0.0, "{step}");
            assert_eq!(step["training/staleness/max"], 0.0, "{step}");
        }
        assert!(
            all.insert(policy.weights().iter().map(|w| w.to_bits()).collect()),
            "{algorithm} is like another"
        );
        let (steps, compared) = replayed(&dir, &overrides).await;
        assert_eq!(steps, 9, "{algorithm}");
        assert!(
            compared.len() >= 2 && compared.iter().all(|c| c.differs.is_none()),
            "{algorithm}: {compared:?}"
        );
    }
}

/// For every staleness, no token is older than allowed, every task in the order is attempted once
/// and taken once, and the run can be replayed although its attempts ended in an arbitrary order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sampling_ahead_respects_staleness_and_replays() {
    let root = tempfile::tempdir().unwrap();
    let keep = "keep";
    let recompute = "recompute";
    let interpolate = "interpolate";
    let cases = [
        (0, "oldest", keep, recompute),
        (1, "oldest", keep, recompute),
        (4, "first_done", keep, interpolate),
        (3, "freshest", keep, recompute),
        (2, "oldest", "refill", recompute),
    ];
    for (staleness, prefer, uniform, proximal) in cases {
        let dir = root.path().join(format!("{staleness}-{prefer}-{uniform}"));
        let change = format!(
            "phase.1={{kind='rl', steps=12, groups=3, group_size=2, learning_rate=0.05, \
             staleness={staleness}, prefer='{prefer}', zero_variance_groups='{uniform}', \
             proximal='{proximal}', correction={{bound={{kind='clamp', high=2.0}}}}}}"
        );
        let overrides = ["eval.tasks=0", "run.keep=50", "run.checkpoint_every=1", &change];
        let policy = simulator(Duration::from_micros(300), 0.0);
        run(&dir, &policy, Duration::from_millis(4), &overrides).await.unwrap();
        let oldest: Vec<f64> = steps(&dir)
            .iter()
            .map(|step| step["training/staleness/max"].as_f64().unwrap())
            .collect();
        assert_eq!(oldest.len(), 12);
        assert!(oldest.iter().all(|age| *age <= f64::from(staleness)), "{oldest:?}");
        assert!(staleness == 0 || oldest.iter().any(|age| *age > 0.0), "{oldest:?}");

        let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
        let mut taken = Vec::new();
        for step in 0..12 {
            taken.extend(wait(store.step_plan(1, step)).unwrap().unwrap().group_positions);
        }
        taken.sort_unstable();
        let positions = taken.len();
        assert_eq!(taken, (0..positions as u64).collect::<Vec<_>>());
        assert!(if uniform == keep { positions == 36 } else { positions > 36 }, "{positions}");
        assert_eq!(wait(store.summaries(Purpose::Train)).unwrap().len(), 2 * positions);

        let (steps, compared) = replayed(&dir, &overrides).await;
        assert_eq!(steps, 18);
        assert!(
            compared.len() >= 12 && compared.iter().all(|c| c.differs.is_none()),
            "{compared:?}"
        );
    }
}

/// A critic continues from one phase to a later one, across a phase without a critic. This also
/// holds in a replay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn critic_continues_across_phases() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let keys = "steps=2, groups=3, group_size=2, learning_rate=0.05";
    let ppo = format!("{{kind='rl', algorithm='ppo', critic={{learning_rate=0.1}}, {keys}}}");
    let change = format!("phase=[{ppo}, {{kind='rl', algorithm='rloo', {keys}}}, {ppo}]");
    let overrides = ["eval.tasks=0", "run.checkpoint_every=1", "run.keep=9", &change];
    run(&dir, &simulator(Duration::ZERO, 0.0), Duration::ZERO, &overrides).await.unwrap();
    let (steps, compared) = replayed(&dir, &overrides).await;
    assert_eq!((steps, compared.len()), (6, 6));
    assert!(compared.iter().all(|c| c.differs.is_none()), "{compared:?}");
}

/// A changed checkpoint is detected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replay_names_changed_checkpoint_file() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let summary = run(&dir, &policy, Duration::ZERO, &["eval.tasks=0"]).await.unwrap();
    let file = summary.checkpoint.unwrap().join("simulator.weights");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let (_, compared) = replayed(&dir, &["eval.tasks=0"]).await;
    let (last, before) = compared.split_last().unwrap();
    assert!(before.iter().all(|c| c.differs.is_none()), "{before:?}");
    assert!(last.differs.as_ref().unwrap().ends_with("simulator.weights"), "{last:?}");

    // An incomplete checkpoint is not compared, and a note reports it.
    std::fs::remove_file(file).unwrap();
    let (steps, fewer, notes) = replayed_with_notes(&dir, &["eval.tasks=0"]).await;
    assert_eq!((steps, fewer.len()), (11, compared.len() - 1));
    assert!(notes[0].contains("step-000011 is incomplete"), "{notes:?}");
}
