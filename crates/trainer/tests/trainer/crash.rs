//! Kills a run with SIGKILL at every named crash point and at random times. The resumed run ends
//! with the weights of an uninterrupted run, bit for bit, with every attempt and the metrics of
//! every step recorded once.
//!
//! The test starts itself as the child process that is killed.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{CRASH_AT, uniform};
use levade_reward::{ScoreError, Scorer, ScorerInput};
use levade_store::testing::{ids_without_abandoned, plan_without_abandoned, wait};
use levade_store::{Attempt, Sqlite, Status, StepPlan, Store};
use levade_trainer::{
    CustomScorers, ReplayComparison, RunEnd, RunParts, StartMode, StopFlag, Trainer, replay,
};
use levade_tree::{Component, Purpose};
use serde_json::Value;

use crate::common::{last_checkpoint, metrics, parts, ranks, recipe, simulator};

/// Environment variable with the directory in which the child process runs.
const DIR_VARIABLE: &str = "LEVADE_TEST_FOLDER";
/// Environment variable with the latency of the child's sampler and tools, in microseconds.
const LATENCY: &str = "LEVADE_TEST_LATENCY";

/// Environment variable with overrides of the child's recipe: keys and values, one per line.
const OVERRIDES: &str = "LEVADE_TEST_OVERRIDES";

/// Child process: starts or resumes the run, and runs it to its end. Returns at once when run as a
/// normal test.
#[test]
fn child() {
    let Ok(dir) = std::env::var(DIR_VARIABLE) else { return };
    let dir = Path::new(&dir);
    let latency = Duration::from_micros(std::env::var(LATENCY).unwrap().parse().unwrap());
    let overrides = std::env::var(OVERRIDES).unwrap();
    let overrides: Vec<&str> = overrides.lines().collect();
    let start = if dir.join("recipe.toml").exists() { StartMode::Resume } else { StartMode::Fresh };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        // About a sixth of the requests fail. The same requests must fail again in a resumed run.
        let policy = simulator(latency / 100, 0.15);
        let recipe = recipe(dir, &overrides);
        let scorers: CustomScorers =
            [("rank".to_owned(), Arc::new(Rank) as Arc<dyn Scorer>)].into();
        let parts = RunParts { scorers, ..parts(&policy, latency) };
        let mut trainer = Trainer::new(recipe, parts, start).await.unwrap();
        let ended = trainer.run(&mut (), &StopFlag::default()).await.unwrap();
        assert!(matches!(ended, RunEnd::Finished(_)));
    });
}

/// A scorer that compares the attempts of a group, for recipes with a scorer `rank`.
#[derive(Debug)]
struct Rank;

#[async_trait]
impl Scorer for Rank {
    fn scores_groups(&self) -> bool {
        true
    }

    async fn score(&self, _: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        Err(ScoreError::Unusable("it compares".into()))
    }

    async fn score_group(&self, group: &[ScorerInput]) -> Result<Vec<Vec<Component>>, ScoreError> {
        Ok(ranks(group))
    }
}

fn spawn(dir: &Path, latency: Duration, crash_at: Option<&str>) -> Child {
    spawn_with(dir, latency, crash_at, &[])
}

fn spawn_with(dir: &Path, latency: Duration, crash_at: Option<&str>, overrides: &[&str]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "crash::child", "--nocapture"])
        .stdout(Stdio::null())
        .stderr(Stdio::inherit());
    command
        .env(OVERRIDES, overrides.join("\n"))
        .env(DIR_VARIABLE, dir)
        .env(LATENCY, latency.as_micros().to_string())
        .env_remove(CRASH_AT);
    if let Some(crash_point) = crash_at {
        command.env(CRASH_AT, crash_point);
    }
    command.spawn().unwrap()
}

/// Everything that a run leaves and that must not depend on interruptions.
struct RunResults {
    weights: Vec<u8>,
    optimizer_state: Vec<u8>,
    attempts: Vec<Attempt>,
    plans: Vec<Option<StepPlan>>,
    evals: Vec<Value>,
    metrics: Vec<Value>,
    checkpoints: Vec<PathBuf>,
    /// Number of attempts that replaced an abandoned attempt.
    after_abandoned: usize,
}

impl RunResults {
    fn read(dir: &Path) -> Self {
        let last = last_checkpoint(dir);
        let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
        let purposes = [Purpose::Demonstration, Purpose::Train, Purpose::Eval];
        let keys = purposes.into_iter().flat_map(|purpose| wait(store.summaries(purpose)).unwrap());
        // Attempts in progress at a kill are abandoned, and their replacements have other ids.
        let names = wait(ids_without_abandoned(&store)).unwrap();
        let attempt = |id| {
            let (name, number) = names[&id];
            Attempt { id: name, number, ..wait(store.attempt(&id)).unwrap().unwrap() }
        };
        let plan = |(phase, step)| {
            wait(store.step_plan(phase, step))
                .unwrap()
                .map(|plan| plan_without_abandoned(&plan, &names))
        };
        let mut checkpoints: Vec<PathBuf> = std::fs::read_dir(dir.join("checkpoints"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into())
            .collect();
        checkpoints.sort();
        RunResults {
            weights: std::fs::read(last.join("simulator.weights")).unwrap(),
            optimizer_state: std::fs::read(last.join("simulator.optimiser")).unwrap(),
            attempts: keys.map(|summary| attempt(summary.id)).collect(),
            plans: wait(store.planned_steps()).unwrap().into_iter().map(plan).collect(),
            evals: wait(store.evals()).unwrap().into_iter().map(|(_, result)| result).collect(),
            metrics: metrics(dir),
            checkpoints,
            after_abandoned: names.iter().filter(|(id, (name, _))| *id != name).count(),
        }
    }

    fn must_equal(&self, other: &RunResults, what: &str) {
        assert!(self.weights == other.weights, "{what}: other weights");
        assert!(self.optimizer_state == other.optimizer_state, "{what}: another optimizer state");
        assert!(self.attempts == other.attempts, "{what}: other attempts");
        assert!(self.plans == other.plans, "{what}: other plans");
        assert!(self.evals == other.evals, "{what}: other evaluations");
        assert_eq!(self.metrics, other.metrics, "{what}");
        assert_eq!(self.checkpoints, other.checkpoints, "{what}");
    }
}

/// Returns the results of a run that is never interrupted.
fn uninterrupted() -> &'static RunResults {
    static LEFT: OnceLock<RunResults> = OnceLock::new();
    LEFT.get_or_init(|| {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run");
        assert!(spawn(&dir, Duration::ZERO, None).wait().unwrap().success());
        let results = RunResults::read(&dir);
        // The run is a useful test: it trained, and some of its attempts failed.
        assert_eq!((results.plans.len(), results.after_abandoned), (11, 0));
        let broken = results.attempts.iter().filter(|a| a.status == Status::Failed).count();
        assert!(broken > 5, "{broken}");
        assert!(results.attempts.iter().filter(|a| a.outcome.calls.ok > 0).count() > 5);
        results
    })
}

fn assert_recovers_from_kill_at(crash_point: &str) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let status = spawn(&dir, Duration::ZERO, Some(crash_point)).wait().unwrap();
    assert_eq!(status.signal(), Some(9), "{crash_point} is never passed, or the run failed before");
    // Kills it once more in the resumed run.
    let status = spawn(&dir, Duration::ZERO, Some(crash_point)).wait().unwrap();
    assert!(status.signal() == Some(9) || status.success(), "{crash_point}: {status}");
    let status = spawn(&dir, Duration::ZERO, None).wait().unwrap();
    assert!(status.success(), "{crash_point}: the run does not go on");
    let results = RunResults::read(&dir);
    results.must_equal(uninterrupted(), crash_point);
    if crash_point.starts_with("sampling") || crash_point.starts_with("tool_call") {
        assert!(results.after_abandoned > 0, "{crash_point}: no attempt was under way");
    }
}

#[test]
fn run_recovers_after_kill_during_sampling() {
    // Counts reach into the first evaluation and into several RL steps.
    for crash_point in [
        "sampling:3",
        "sampling:60",
        "sampling:110",
        "tool_call",
        "tool_call:17",
        "attempt_recorded:2",
    ] {
        assert_recovers_from_kill_at(crash_point);
    }
    assert_recovers_from_kill_at("attempt_recorded:40");
}

#[test]
fn run_recovers_after_kill_before_scoring() {
    assert_recovers_from_kill_at("scoring:3");
    assert_recovers_from_kill_at("scoring:40");
    // An attempt that may have to wait for its score is recorded before it has one, and is not
    // sampled again.
    let park = ["reward.unscored=defer"];
    for crash_point in ["attempt_unscored:3", "attempt_unscored:40", "scoring:40"] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run");
        let run = |crash_at| spawn_with(&dir, Duration::ZERO, crash_at, &park).wait().unwrap();
        assert_eq!(
            run(Some(crash_point)).signal(),
            Some(9),
            "{crash_point} is never passed, or the run failed before"
        );
        let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
        let all = [Purpose::Train, Purpose::Eval]
            .into_iter()
            .flat_map(|of| wait(store.summaries(of)).unwrap());
        let waits: Vec<_> = all.filter(|found| found.status == Status::Unscored).collect();
        assert!(!waits.is_empty(), "{crash_point}");
        assert!(run(None).success(), "{crash_point}: the run does not go on");
        for attempt in waits {
            let tries = wait(store.count_tries(&attempt.slot)).unwrap();
            assert_eq!(tries.next, attempt.number + 1, "{crash_point}: it was made again");
        }
        RunResults::read(&dir).must_equal(uninterrupted(), crash_point);
    }
}

/// The scores of a group are recorded one by one. The missing scores are computed in comparison
/// with the complete group.
#[test]
fn run_recovers_after_kill_between_group_scores() {
    let scorers = "reward.scorers=[{name='right', kind='numeric', weight=0.5}, \
                   {name='rank', kind='numeric', weight=0.5}]";
    let root = tempfile::tempdir().unwrap();
    let run = |dir: &Path, crash_point| {
        spawn_with(dir, Duration::ZERO, crash_point, &[scorers]).wait().unwrap()
    };
    let dir = root.path().join("undisturbed");
    assert!(run(&dir, None).success());
    let undisturbed = RunResults::read(&dir);
    let mut parted = 0;
    for crash_point in ["attempt_recorded:41", "attempt_recorded:42", "attempt_recorded:43"] {
        let dir = root.path().join(crash_point);
        assert_eq!(run(&dir, Some(crash_point)).signal(), Some(9), "{crash_point} is never passed");
        let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
        let attempt_summaries = wait(store.summaries(Purpose::Train)).unwrap();
        parted += attempt_summaries
            .chunk_by(|a, b| (a.slot.step, a.slot.group) == (b.slot.step, b.slot.group))
            .filter(|group| {
                let has = |status| group.iter().any(|attempt| attempt.status == status);
                has(Status::Completed) && has(Status::Unscored)
            })
            .count();
        assert!(run(&dir, None).success(), "{crash_point}: the run does not go on");
        RunResults::read(&dir).must_equal(&undisturbed, crash_point);
    }
    assert!(parted > 0, "no group was recorded in part");
}

#[test]
fn run_recovers_after_kill_near_optimizer_step() {
    for point in
        ["ledger_written", "micro_batch", "before_optim_step", "in_optim_step", "after_optim_step"]
    {
        // In the first phase, and in the second phase between two of its updates.
        for count in [1, 5, 9] {
            assert_recovers_from_kill_at(&format!("{point}:{count}"));
        }
    }
    assert_recovers_from_kill_at("metrics_written:4");
}

#[test]
fn run_recovers_after_kill_during_checkpoint() {
    let points =
        ["checkpoint_file", "weights_saved", "companions_saved", "before_rename", "after_rename"];
    for point in points {
        // The first checkpoint, the checkpoint at the end of a phase, and a checkpoint of the
        // second phase after earlier checkpoints were removed.
        for count in [1, 3, 5] {
            assert_recovers_from_kill_at(&format!("{point}:{count}"));
        }
    }
}

/// Tools and sampler take random times, and the kill happens at a random time.
#[test]
fn run_recovers_after_kills_at_random_times() {
    let expected = uninterrupted();
    for round in 0..3 {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run");
        let mut kills = 0;
        loop {
            let mut child = spawn(&dir, Duration::from_millis(5), None);
            let wait = Duration::from_millis(30).mul_f64(1.0 + 12.0 * uniform(round, 0, kills));
            std::thread::sleep(wait);
            if kills == 25 {
                // The run has been interrupted often enough.
                assert!(child.wait().unwrap().success());
                break;
            }
            if let Some(status) = child.try_wait().unwrap() {
                assert!(status.success());
                break;
            }
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
        }
        assert!(kills > 2, "it was hardly interrupted: {kills}");
        RunResults::read(&dir).must_equal(expected, &format!("round {round}, {kills} kills"));
    }
}

/// If attempts run ahead, the groups of a step depend on which attempts end first, so a killed run
/// differs from an uninterrupted one. But its store stays consistent: exactly one step takes each
/// task, with recorded attempts, and a replay yields the run's weights.
#[test]
fn ahead_sampling_run_recovers_after_kills() {
    let phase = "phase.1={kind='rl', steps=8, groups=3, group_size=2, learning_rate=0.05, staleness=2, \
                 prefer='first_done', proximal='recompute', \
                 correction={bound={kind='clamp', high=2.0}}}";
    let overrides =
        ["eval.tasks=0", "eval.unseen_wordings=0", "run.keep=50", "run.checkpoint_every=1", phase];
    let named = [
        "ledger_written:8",
        "in_optim_step:2",
        "before_rename:1",
        "attempt_recorded:4",
        "tool_call:2",
    ];
    for round in 0..2u64 {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run");
        let mut kills = 0;
        for crash_point in named {
            let crash_at = Some(crash_point).filter(|_| round == 0);
            let mut child = spawn_with(&dir, Duration::from_millis(20), crash_at, &overrides);
            if crash_at.is_none() {
                std::thread::sleep(
                    Duration::from_millis(100).mul_f64(1.0 + uniform(round, 1, kills)),
                );
                // The process may already have exited.
                let _ = child.kill();
            }
            kills += u64::from(child.wait().unwrap().signal() == Some(9));
        }
        assert!(kills >= 3, "round {round}: it was hardly interrupted: {kills}");
        assert!(spawn_with(&dir, Duration::ZERO, None, &overrides).wait().unwrap().success());

        let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
        let plans: Vec<StepPlan> =
            (0..8).map(|step| wait(store.step_plan(1, step)).unwrap().unwrap()).collect();
        let mut taken: Vec<u64> =
            plans.iter().flat_map(|plan| plan.group_positions.iter().copied()).collect();
        taken.sort_unstable();
        assert_eq!(taken, (0..24).collect::<Vec<_>>(), "every task once");
        let recorded = wait(store.summaries(Purpose::Train)).unwrap();
        assert_eq!(recorded.len(), 48, "every attempt, broken ones included");
        for path in plans.iter().flat_map(StepPlan::sequences) {
            let attempt = wait(store.attempt(&path.attempt)).unwrap().unwrap();
            assert_eq!(attempt.status, Status::Completed);
        }
        let steps = metrics(&dir).into_iter().filter(|line| line["phase"] == 1);
        assert_eq!(steps.count(), 8, "every step measured once");

        let policies = vec![crate::common::trained("default", &simulator(Duration::ZERO, 0.0))];
        let mut compared = Vec::new();
        let recipe = recipe(&dir, &overrides);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut note = |one: ReplayComparison| compared.push(one);
        runtime.block_on(replay(&recipe, &dir, policies, &mut (), &mut note)).unwrap();
        assert!(
            compared.len() >= 8 && compared.iter().all(|c| c.differs.is_none()),
            "{compared:?}"
        );
    }
}
