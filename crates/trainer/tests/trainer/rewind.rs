//! Runs that go back to an earlier step and repeat the later steps with another reward.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use levade_policy::CRASH_AT;
use levade_recipe::Recipe;
use levade_store::testing::wait;
use levade_store::{Attempt, Purpose, RunId, Sqlite, Status, Store, WithdrawRequest};
use levade_trainer::{RunEnd, StartMode, StopFlag, Trainer, TrainerError, rewind};
use serde_json::Value;

use crate::common::{last_checkpoint, metrics, parts, recipe, replayed, simulator};

/// Six SFT steps, then RL steps with a checkpoint after each.
const COMMON: [&str; 3] =
    ["phase.1.optimizer.schedule=constant", "run.checkpoint_every=1", "run.keep=20"];
/// Number of SFT steps.
const SFT: u32 = 6;
/// A reward that differs from the recipe's reward.
const REWARD: &str = "reward.unfinished=0.5";

/// Environment variable with the directory in which the child process goes back.
const DIR_VARIABLE: &str = "LEVADE_TEST_REWIND";

fn recipe_of(dir: &Path, rl_steps: u32, overrides: &[&str]) -> Recipe {
    let steps = format!("phase.1.steps={rl_steps}");
    recipe(dir, &[&COMMON[..], &[&steps], overrides].concat())
}

async fn train(recipe: Recipe, start: StartMode) {
    let policy = simulator(Duration::ZERO, 0.0);
    let mut trainer = Trainer::new(recipe, parts(&policy, Duration::ZERO), start).await.unwrap();
    let ended = trainer.run(&mut (), &StopFlag::default()).await.unwrap();
    assert!(matches!(ended, RunEnd::Finished(_)));
}

fn store(dir: &Path) -> Sqlite {
    wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap()
}

/// Returns the attempts at training tasks that count.
fn attempts(dir: &Path) -> Vec<Attempt> {
    let store = store(dir);
    let all = wait(store.summaries(Purpose::Train)).unwrap();
    all.iter().map(|summary| wait(store.attempt(&summary.id)).unwrap().unwrap()).collect()
}

fn num_steps(dir: &Path) -> usize {
    wait(store(dir).planned_steps()).unwrap().len()
}

fn evaluated_steps(dir: &Path) -> Vec<(u32, u32)> {
    let evals = wait(store(dir).evals()).unwrap();
    evals.into_iter().map(|(key, _)| (key.phase, key.step)).collect()
}

/// Asserts that two runs have the same plans, attempts, final weights and metrics of RL steps.
fn assert_same(dir: &Path, other: &Path) {
    let steps = wait(store(dir).planned_steps()).unwrap();
    assert_eq!(steps, wait(store(other).planned_steps()).unwrap());
    for (phase, step) in steps {
        let [plan, expected] =
            [dir, other].map(|dir| wait(store(dir).step_plan(phase, step)).unwrap().unwrap());
        assert_eq!(plan, expected, "phase {phase} step {step}");
    }
    assert!(attempts(dir) == attempts(other), "other attempts");
    for file in ["simulator.weights", "simulator.optimiser"] {
        let [bytes, expected] =
            [dir, other].map(|dir| fs::read(last_checkpoint(dir).join(file)).unwrap());
        assert!(bytes == expected, "another {file}");
    }
    let [steps, expected] = [dir, other].map(|dir| -> Vec<Value> {
        metrics(dir).into_iter().filter(|line| line["kind"] == "grpo").collect()
    });
    assert!(!steps.is_empty());
    assert_eq!(steps, expected);
}

/// Writes another reward into the recipe of a run by hand, which a resumed run does not notice.
fn replace_reward(dir: &Path, reward: &str) {
    let file = dir.join("recipe.toml");
    let changed = Recipe::load(&file, &[reward.parse().unwrap()]).unwrap();
    fs::write(&file, changed.to_toml().unwrap()).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewound_run_matches_run_that_got_new_reward_at_that_step() {
    let root = tempfile::tempdir().unwrap();
    let [dir, reference] = ["run", "reference"].map(|name| root.path().join(name));
    train(recipe_of(&dir, 4, &[]), StartMode::Fresh).await;
    let before = attempts(&dir);
    let rewound = rewind(&recipe_of(&dir, 4, &[REWARD]), SFT + 2).await.unwrap();
    assert_eq!((rewound.step, rewound.superseded_steps), (SFT + 2, 2));
    assert_eq!(num_steps(&dir), (SFT + 2) as usize);
    train(recipe_of(&dir, 4, &[REWARD]), StartMode::Resume).await;

    train(recipe_of(&reference, 2, &[]), StartMode::Fresh).await;
    replace_reward(&reference, REWARD);
    train(recipe_of(&reference, 4, &[REWARD]), StartMode::Resume).await;
    assert_same(&dir, &reference);

    // The new reward trains other weights, and the earlier steps have not changed.
    let after = attempts(&dir);
    let [kept, expected] = [&after, &before]
        .map(|all| all.iter().filter(|attempt| attempt.slot.step < 2).collect::<Vec<_>>());
    assert!(kept == expected, "attempts of the first two steps differ");
    assert_ne!(after, before);
    // The directory of the superseded steps is a complete run, with its record, evaluations and
    // weights.
    assert_eq!(rewound.superseded, root.path().canonicalize().unwrap().join("run.superseded-1"));
    assert!(attempts(&rewound.superseded) == before);
    assert_eq!(evaluated_steps(&rewound.superseded), [(0, 0), (0, 3), (0, 6), (1, 3), (1, 4)]);
    for dir in [&dir, &rewound.superseded] {
        assert_eq!(replayed(dir).await, (SFT + 4, true), "{}", dir.display());
    }
    // Scores of the old reward are not compared with scores of the new reward.
    assert_eq!(evaluated_steps(&dir), [(1, 3), (1, 4)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewound_run_with_equal_reward_repeats_itself() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    train(recipe_of(&dir, 4, &["phase.1.staleness=0"]), StartMode::Fresh).await;
    let first = rewind(&recipe_of(&dir, 4, &[]), SFT + 1).await.unwrap();
    train(recipe_of(&dir, 4, &[]), StartMode::Resume).await;
    assert_same(&dir, &first.superseded);
    assert_eq!(evaluated_steps(&dir), evaluated_steps(&first.superseded));
    // The run goes back into the previous phase, whose demonstrations stay.
    let second = rewind(&recipe_of(&dir, 4, &[]), 2).await.unwrap();
    assert!(second.superseded.ends_with("run.superseded-2"), "{second:?}");
    assert_eq!((num_steps(&dir), second.superseded_steps), (2, SFT + 2));
    train(recipe_of(&dir, 4, &[]), StartMode::Resume).await;
    assert_same(&dir, &first.superseded);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_ahead_keeps_all_attempts_of_kept_steps() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let ahead = ["phase.1.staleness=2", "phase.1.oversample=1"];
    train(recipe_of(&dir, 4, &ahead), StartMode::Fresh).await;
    rewind(&recipe_of(&dir, 4, &ahead), SFT + 2).await.unwrap();
    assert_eq!(replayed(&dir).await, (SFT + 2, true));
    train(recipe_of(&dir, 4, &ahead), StartMode::Resume).await;
    assert_eq!(replayed(&dir).await, (SFT + 4, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_takes_nearest_checkpoint_before_and_names_all() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let every = ["run.checkpoint_every=4", "eval.every=0"];
    train(recipe_of(&dir, 4, &every), StartMode::Fresh).await;
    let rewind_to = |step| rewind(recipe_for(&dir, &every), step);
    let error = rewind_to(3).await.unwrap_err();
    let TrainerError::NoCheckpoint { step, kept, .. } = &error else { panic!("{error}") };
    assert_eq!((*step, &kept[..]), (3, &[4, 6, 8, 10][..]));
    let text = error.to_string();
    assert!(text.contains("step 3 or before; it has those at 4, 6, 8, 10"), "{text}");
    let error = rewind_to(11).await.unwrap_err();
    assert!(error.is_user_error());
    let text = error.to_string();
    assert!(text.contains("has 10 steps, so it cannot go back to step 11"), "{text}");
    assert_eq!(num_steps(&dir), 10, "the run is unchanged");
    assert!(!root.path().join("run.superseded-1").exists());
    let rewound = rewind_to(7).await.unwrap();
    assert_eq!((rewound.step, rewound.superseded_steps, num_steps(&dir)), (6, 4, 6));
}

/// Returns a recipe that is never freed, for futures that outlive the caller.
fn recipe_for(dir: &Path, overrides: &[&str]) -> &'static Recipe {
    Box::leak(Box::new(recipe_of(dir, 4, overrides)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_rejects_other_changes_and_stores_outside() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let outside = format!("run.store=sqlite:{}", root.path().join("outside.db").display());
    train(recipe_of(&dir, 1, &[&outside]), StartMode::Fresh).await;
    let rewind_with = |overrides: &[&str]| {
        rewind(recipe_for(&dir, &[&["phase.1.steps=1"], overrides].concat()), SFT)
    };
    let error = rewind_with(&[&outside, "run.seed=9"]).await.unwrap_err().to_string();
    assert!(error.contains("`run.seed` is 9 now and was 3"), "{error}");
    let error = rewind_with(&[&outside]).await.unwrap_err();
    assert!(matches!(&error, TrainerError::StoreOutside { .. }), "{error}");
    assert!(error.to_string().contains("outside.db"), "{error}");
    rewind_with(&["run.store=sqlite:run.db"]).await.unwrap();
    assert_eq!(num_steps(&dir), SFT as usize);
    // Without --from, a new reward is an error that names --from.
    let changed = recipe_of(&dir, 1, &["run.store=sqlite:run.db", REWARD]);
    let policy = simulator(Duration::ZERO, 0.0);
    let resumed = Trainer::new(changed, parts(&policy, Duration::ZERO), StartMode::Resume).await;
    let error = resumed.err().unwrap().to_string();
    assert!(
        error.contains("`reward.unfinished` is 0.5 now") && error.contains("--from"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_keeps_withdrawals() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    train(recipe_of(&dir, 2, &[]), StartMode::Fresh).await;
    let ids: Vec<_> =
        attempts(&dir).iter().map(|attempt| (attempt.id, attempt.slot.step)).collect();
    let of_step = |step| ids.iter().find(|(_, of)| *of == step).unwrap().0;
    let open = || wait(Sqlite::resume(&dir.join("run.db"), &RunId("tiny".into()))).unwrap();
    let request =
        |attempts, erase| WithdrawRequest { attempts, erase, ..WithdrawRequest::default() };
    open().withdraw(&request(vec![of_step(0), of_step(1)], false)).await.unwrap();
    open().withdraw(&request(vec![of_step(0)], true)).await.unwrap();
    let before = wait(store(&dir).withdrawals()).unwrap();
    rewind(&recipe_of(&dir, 2, &[]), SFT + 1).await.unwrap();
    let after = wait(store(&dir).withdrawals()).unwrap();
    let kept: Vec<_> = before.into_iter().filter(|withdrawal| withdrawal.slot.step == 0).collect();
    assert_eq!((after, kept.len()), (kept, 2));
    let erased = wait(store(&dir).attempt(&of_step(0))).unwrap().unwrap();
    assert_eq!((erased.task, erased.trajectory.segments().len()), (Value::Null, 0));
    // The later attempt is made anew.
    train(recipe_of(&dir, 2, &[]), StartMode::Resume).await;
    assert!(attempts(&dir).iter().any(|attempt| attempt.id == of_step(1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewind_keeps_withdrawn_task_of_later_step() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    train(recipe_of(&dir, 2, &[]), StartMode::Fresh).await;
    let later = attempts(&dir).into_iter().find(|attempt| attempt.slot.step == 1).unwrap();
    let request = WithdrawRequest {
        task: Some(later.task["id"].as_str().unwrap().to_owned()),
        tasks: vec![later.task.clone()],
        erase: true,
        ..WithdrawRequest::default()
    };
    let opened = wait(Sqlite::resume(&dir.join("run.db"), &RunId("tiny".into()))).unwrap();
    wait(opened.withdraw(&request)).unwrap();
    drop(opened);
    let before = wait(store(&dir).withdrawals()).unwrap();
    assert!(before.iter().any(|withdrawal| withdrawal.id == later.id));
    rewind(&recipe_of(&dir, 2, &[]), SFT + 1).await.unwrap();
    assert_eq!(wait(store(&dir).withdrawals()).unwrap(), before);
    let kept = wait(store(&dir).attempt(&later.id)).unwrap().unwrap();
    assert_eq!((kept.status, kept.task), (Status::Withdrawn, Value::Null));
}

/// Child process: sets the run back. Returns at once when run as a normal test.
#[test]
fn child() {
    let Ok(dir) = std::env::var(DIR_VARIABLE) else { return };
    wait(rewind(&recipe_of(Path::new(&dir), 3, &[REWARD]), SFT + 1)).unwrap();
}

/// Sets a run of three RL steps back, and kills the process at a crash point.
async fn killed_at(root: &Path, crash_point: &str) -> PathBuf {
    let dir = root.join("run");
    train(recipe_of(&dir, 3, &[]), StartMode::Fresh).await;
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "rewind::child", "--nocapture"])
        .env(DIR_VARIABLE, &dir)
        .env(CRASH_AT, crash_point)
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(9), "{crash_point} is never passed");
    dir
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_before_exchange_leaves_old_run() {
    let root = tempfile::tempdir().unwrap();
    let dir = killed_at(root.path(), "rewind_built").await;
    let old = attempts(&dir);
    assert_eq!(num_steps(&dir), (SFT + 3) as usize);
    train(recipe_of(&dir, 3, &[]), StartMode::Resume).await;
    assert!(attempts(&dir) == old);
    // The directory that was left incomplete is replaced.
    let rewound = rewind(&recipe_of(&dir, 3, &[REWARD]), SFT + 1).await.unwrap();
    assert!(attempts(&rewound.superseded) == old);
    train(recipe_of(&dir, 3, &[REWARD]), StartMode::Resume).await;
    assert!(!root.path().join("run.partial").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_after_exchange_leaves_new_run() {
    let root = tempfile::tempdir().unwrap();
    let dir = killed_at(root.path(), "rewind_exchanged").await;
    assert_eq!(num_steps(&dir), (SFT + 1) as usize);
    assert_eq!(num_steps(&root.path().join("run.partial")), (SFT + 3) as usize);
    train(recipe_of(&dir, 3, &[REWARD]), StartMode::Resume).await;
    assert_eq!(num_steps(&root.path().join("run.superseded-1")), (SFT + 3) as usize);
    assert_eq!(num_steps(&dir), (SFT + 3) as usize);
    assert!(!root.path().join("run.partial").exists());
}
