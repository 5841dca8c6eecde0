//! Runs that resume with another length, that stop early at a target success rate, and inputs that
//! must not change.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use levade_recipe::Recipe;
use levade_store::testing::{ids_without_abandoned, plan_without_abandoned, wait};
use levade_store::{Sqlite, Store};
use levade_trainer::{
    Event, Observer, RunEnd, RunParts, StartMode, StopFlag, Trainer, TrainerError, seconds,
    started_at,
};

use crate::common::{Notes, metrics, parts, replayed, simulator};

/// A learning rate that does not depend on the number of steps.
const CONSTANT: &str = "phase.1.optimizer.schedule=constant";

/// An observer that requests a stop after a number of steps.
struct StopAfter {
    stop: StopFlag,
    remaining: u32,
    notes: Notes,
}

impl Observer for StopAfter {
    fn event(&mut self, event: &Event) {
        self.notes.event(event);
        if matches!(event, Event::Step { .. }) {
            self.remaining = self.remaining.saturating_sub(1);
            if self.remaining == 0 {
                self.stop.stop();
            }
        }
    }
}

/// Runs for at most `max_steps` steps. Returns the final weights, whether the run is finished, and
/// the notes.
async fn run(
    dir: &Path,
    start: StartMode,
    max_steps: u32,
    overrides: &[&str],
) -> Result<(Vec<f32>, bool, String), TrainerError> {
    let policy = simulator(Duration::ZERO, 0.0);
    let recipe = crate::common::recipe(dir, overrides);
    let mut trainer = Trainer::new(recipe, parts(&policy, Duration::ZERO), start).await?;
    let stop = StopFlag::default();
    let mut observer =
        StopAfter { stop: stop.clone(), remaining: max_steps, notes: Notes::default() };
    let ended = trainer.run(&mut observer, &stop).await?;
    Ok((policy.weights(), matches!(ended, RunEnd::Finished(_)), observer.notes.0.join("\n")))
}

/// Asserts that both runs left the same metrics and plans.
fn assert_same(dir: &Path, other: &Path) {
    assert_eq!(metrics(dir), metrics(other));
    let [plans, expected] = [dir, other].map(|dir| {
        let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
        let names = wait(ids_without_abandoned(&store)).unwrap();
        let mut plans = Vec::new();
        for (phase, step) in wait(store.planned_steps()).unwrap() {
            let plan = wait(store.step_plan(phase, step)).unwrap().unwrap();
            plans.push(plan_without_abandoned(&plan, &names));
        }
        plans
    });
    assert_eq!(plans, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extended_run_matches_run_of_full_length() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let longer = "phase.1.steps=8";
    let uninterrupted = path("whole");
    let (weights, ..) =
        run(&uninterrupted, StartMode::Fresh, 99, &[CONSTANT, longer]).await.unwrap();
    // The run is finished, or stopped in the middle.
    for (name, max_steps) in [("finished", 99), ("stopped", 9)] {
        let dir = path(name);
        let (_, finished, _) = run(&dir, StartMode::Fresh, max_steps, &[CONSTANT]).await.unwrap();
        assert_eq!(finished, max_steps == 99);
        let (grown, finished, notes) =
            run(&dir, StartMode::Resume, 99, &[CONSTANT, longer]).await.unwrap();
        assert!(finished && notes.is_empty(), "{notes}");
        assert_eq!(grown, weights);
        assert_same(&dir, &uninterrupted);
        // From now on the run has this number of steps.
        assert_eq!(replayed(&dir).await, (14, true));
        let fewer = run(&dir, StartMode::Resume, 99, &[CONSTANT]).await.unwrap_err();
        assert!(matches!(fewer, TrainerError::Differs { .. }) && fewer.is_user_error(), "{fewer}");
        assert!(fewer.to_string().contains("`phase.1.steps` is 5 now and was 8"), "{fewer}");
    }
}

/// The recipe in the directory is the current one, under the name that the attempts carry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resume_writes_changed_keys_to_recipe() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let moved = root.path().join("moved");
    let written = |dir: &Path| Recipe::load(&dir.join("recipe.toml"), &[]).unwrap();
    let (_, finished, _) = run(&dir, StartMode::Fresh, 5, &[]).await.unwrap();
    assert!(!finished);
    let before = written(&dir);
    std::fs::rename(&dir, &moved).unwrap();
    run(&moved, StartMode::Resume, 9, &["run.keep=7", "agent.attempt_seconds=99"]).await.unwrap();
    let after = written(&moved);
    assert_eq!((after.run.keep, after.agent.attempt_seconds), (7, 99.0));
    assert_eq!((&after.run.name, &after.run.folder), (&before.run.name, &moved));
    assert_ne!(after.run.keep, before.run.keep);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resume_accepts_added_phase_and_rejects_changed_one() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let sft = "{kind='sft', demonstrations=10, epochs=2, batch=4, learning_rate=3.0}";
    let rl = "{kind='rl', steps=2, groups=2, group_size=4, learning_rate=0.05}";
    let short = format!("phase=[{sft}]");
    let long = format!("phase=[{sft}, {rl}]");
    let (weights, ..) = run(&path("whole"), StartMode::Fresh, 99, &[&long]).await.unwrap();
    run(&path("grown"), StartMode::Fresh, 99, &[&short]).await.unwrap();
    let (grown, ..) = run(&path("grown"), StartMode::Resume, 99, &[&long]).await.unwrap();
    assert_eq!(grown, weights);
    assert_same(&path("grown"), &path("whole"));

    let over =
        run(&path("grown"), StartMode::Resume, 99, &[&long, "phase.0.epochs=3"]).await.unwrap_err();
    assert!(
        matches!(over, TrainerError::PhaseFinished { phase: 0, later: 1 }) && over.is_user_error(),
        "{over}"
    );
    // A rejected change leaves the run as it was.
    assert_eq!(replayed(&path("grown")).await, (8, true));
    run(&path("grown"), StartMode::Resume, 99, &[&long]).await.unwrap();
}

/// Completed steps keep their learning rate, including in a replay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schedule_of_extended_phase_applies_to_new_steps() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    run(&dir, StartMode::Fresh, 99, &[]).await.unwrap();
    let rates = || -> Vec<f64> {
        metrics(&dir).iter().filter_map(|line| line.get("actor/lr")?.as_f64()).collect()
    };
    let before = rates();
    let (_, _, notes) = run(&dir, StartMode::Resume, 99, &["phase.1.steps=9"]).await.unwrap();
    assert!(
        notes.contains("the learning rate of phase 1 decays over its steps: from step 5 on"),
        "{notes}"
    );
    let after = rates();
    assert_eq!((&after[..11], after.len()), (&before[..], 15));
    // Step 5 of 9 of a linear decay from 0.05, after one warm-up step.
    let expected = 0.05 * (1.0 - 4.0 / 8.0);
    assert!((after[11] - expected).abs() < 1e-6, "{after:?}");
    assert_eq!(replayed(&dir).await, (15, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn phase_stops_early_at_success_rate() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    // Every answer is correct, so the first evaluation within a phase ends it.
    let right = "reward={scorer={kind='command', command=['echo', '1']}, unfinished=-0.5}";
    let easy =
        [right, "phase.0.until=0.1", "phase.1.until=0.1", "eval.before=false", "agent.max_turns=2"];
    let policy = simulator(Duration::ZERO, 0.0);
    let recipe = crate::common::recipe(&path("whole"), &easy);
    let mut trainer =
        Trainer::new(recipe, parts(&policy, Duration::ZERO), StartMode::Fresh).await.unwrap();
    let mut notes = Notes::default();
    let RunEnd::Finished(summary) = trainer.run(&mut notes, &StopFlag::default()).await.unwrap()
    else {
        panic!()
    };
    drop(trainer);
    let evals: Vec<_> = summary.evals.iter().map(|eval| (eval.phase, eval.step)).collect();
    assert_eq!((summary.steps, evals), (6, vec![(0, 3), (1, 3)]), "{:?}", summary.evals);
    assert!(
        notes.0.iter().any(|note| note.contains("phase 0 (sft) ends after step 3 of 6")),
        "{:?}",
        notes.0
    );
    assert_eq!(summary.gains.len(), 1);

    // Wherever the run is stopped, it ends at the same step with the same weights.
    for max_steps in [1, 3, 4, 6] {
        let dir = path(&format!("stopped-{max_steps}"));
        run(&dir, StartMode::Fresh, max_steps, &easy).await.unwrap();
        let (weights, finished, _) = run(&dir, StartMode::Resume, 99, &easy).await.unwrap();
        assert!(finished);
        assert_eq!(weights, policy.weights(), "stopped after {max_steps}");
        assert_same(&dir, &path("whole"));
        assert_eq!(replayed(&dir).await, (6, true));
    }
    // A phase that stopped early can be continued.
    let more: Vec<&str> = easy.into_iter().filter(|key| *key != "phase.1.until=0.1").collect();
    let (_, finished, _) = run(&path("whole"), StartMode::Resume, 99, &more).await.unwrap();
    assert!(finished);
    assert_eq!(replayed(&path("whole")).await, (8, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resume_rejects_changed_files() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let rows = root.path().join("rows.jsonl");
    let model = root.path().join("config.json");
    let written = |answer: u32| {
        (0..9)
            .map(|i| format!("{{\"question\": \"{i}?\", \"answer\": {answer}}}\n"))
            .collect::<String>()
    };
    fs::write(&rows, written(1)).unwrap();
    fs::write(&model, "{}").unwrap();
    let tasks = format!("tasks=[{{kind='jsonl', path='{}', held_out=2}}]", rows.display());
    let phase = "phase=[{kind='rl', steps=2, groups=2, group_size=4, learning_rate=0.05}]";
    let go = async |start, max_steps| {
        let policy = simulator(Duration::ZERO, 0.0);
        let parts = RunParts { model_files: vec![model.clone()], ..parts(&policy, Duration::ZERO) };
        let recipe = crate::common::recipe(&dir, &[&tasks, phase, "eval.tasks=2"]);
        let stop = StopFlag::default();
        let mut observer =
            StopAfter { stop: stop.clone(), remaining: max_steps, notes: Notes::default() };
        Trainer::new(recipe, parts, start).await?.run(&mut observer, &stop).await
    };
    go(StartMode::Fresh, 1).await.unwrap();
    for (file, changed, contents, name) in [
        (&rows, written(2), written(1), "rows.jsonl of `tasks.0`"),
        (&model, "{ }".into(), "{}".into(), "config.json of `model`"),
    ] {
        fs::write(file, changed).unwrap();
        let rejected = go(StartMode::Resume, 1).await.unwrap_err();
        assert!(rejected.is_user_error() && rejected.to_string().contains(name), "{rejected}");
        fs::write(file, contents).unwrap();
    }
    assert!(matches!(go(StartMode::Resume, 99).await.unwrap(), RunEnd::Finished(_)));
}

/// A run records its start. For a run of an older build, which did not record it, the start is the
/// modification time of its recipe.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn started_at_returns_start_of_run() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    assert_eq!(started_at(&dir).unwrap(), None);
    run(&dir, StartMode::Fresh, 1, &[]).await.unwrap();
    assert_eq!(started_at(&dir).unwrap(), Some(0));

    fs::remove_file(dir.join("origin.json")).unwrap();
    let written = seconds(fs::metadata(dir.join("recipe.toml")).unwrap().modified().unwrap());
    assert!(seconds(SystemTime::now()) - written < 600);
    assert_eq!(started_at(&dir).unwrap(), Some(written));
    run(&dir, StartMode::Resume, 1, &[]).await.unwrap();
    assert!(dir.join("origin.json").is_file());
}
