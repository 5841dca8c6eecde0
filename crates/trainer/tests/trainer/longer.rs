//! Runs that go on with another length, that end where they are good enough, and what they must not go on
//! with.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use levade_recipe::Recipe;
use levade_store::testing::{undisturbed, undisturbed_plan, wait};
use levade_store::{Sqlite, Store};
use levade_trainer::{
    Ended, Event, Observer, Parts, Start, StopFlag, Trainer, TrainerError, begun, replay, seconds,
};

use crate::common::{Notes, metrics, parts, simulator};

/// Steps whose learning rate does not depend on how many there are.
const CONSTANT: &str = "phase.1.optimiser.schedule=constant";

/// Asks to stop after a number of steps.
struct StopAfter {
    stop: StopFlag,
    left: u32,
    notes: Notes,
}

impl Observer for StopAfter {
    fn event(&mut self, event: &Event) {
        self.notes.event(event);
        if matches!(event, Event::Step { .. }) {
            self.left = self.left.saturating_sub(1);
            if self.left == 0 {
                self.stop.stop();
            }
        }
    }
}

/// Runs for at most `most` steps. The weights at the end, whether that was the end of the run, and what was
/// to be said.
async fn run(
    folder: &Path,
    start: Start,
    most: u32,
    overrides: &[&str],
) -> Result<(Vec<f32>, bool, String), TrainerError> {
    let policy = simulator(Duration::ZERO, 0.0);
    let recipe = crate::common::recipe(folder, overrides);
    let mut trainer = Trainer::new(recipe, parts(&policy, Duration::ZERO), start).await?;
    let stop = StopFlag::default();
    let mut observer = StopAfter { stop: stop.clone(), left: most, notes: Notes::default() };
    let ended = trainer.run(&mut observer, &stop).await?;
    Ok((policy.weights(), matches!(ended, Ended::Finished(_)), observer.notes.0.join("\n")))
}

/// Everything that a run leaves must be that of `other`.
fn assert_same(folder: &Path, other: &Path) {
    assert_eq!(metrics(folder), metrics(other));
    let plans = |folder: &Path| {
        let store = wait(Sqlite::open_existing(&folder.join("run.db"))).unwrap();
        let steps = wait(store.planned_steps()).unwrap();
        let names = wait(undisturbed(&store)).unwrap();
        let plan = |(phase, step)| wait(store.step(phase, step)).unwrap().unwrap();
        steps.into_iter().map(|at| undisturbed_plan(&plan(at), &names)).collect::<Vec<_>>()
    };
    assert_eq!(plans(folder), plans(other));
}

/// Does a run again by the recipe in its folder: how many steps, and whether all checkpoints are the same.
async fn replayed(folder: &Path) -> (u32, bool) {
    let fresh = || simulator(Duration::ZERO, 0.0);
    let policies = vec![crate::common::trained("default", &fresh())];
    let recipe = Recipe::load(&folder.join("recipe.toml"), &[]).unwrap();
    let mut same = true;
    let steps =
        replay(&recipe, folder, policies, &mut (), &mut |one| same &= one.differs.is_none()).await.unwrap();
    (steps, same)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_steps_are_those_of_a_run_that_always_had_them() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let (longer, whole) = ("phase.1.steps=8", path("whole"));
    let (weights, ..) = run(&whole, Start::Fresh, 99, &[CONSTANT, longer]).await.unwrap();
    // Finished, or stopped in the middle.
    for (name, most) in [("finished", 99), ("stopped", 9)] {
        let folder = path(name);
        let (_, finished, _) = run(&folder, Start::Fresh, most, &[CONSTANT]).await.unwrap();
        assert_eq!(finished, most == 99);
        let (grown, finished, notes) = run(&folder, Start::Resume, 99, &[CONSTANT, longer]).await.unwrap();
        assert!(finished && notes.is_empty(), "{notes}");
        assert_eq!(grown, weights);
        assert_same(&folder, &whole);
        // It is a run of so many steps from now on.
        assert_eq!(replayed(&folder).await, (14, true));
        let fewer = run(&folder, Start::Resume, 99, &[CONSTANT]).await.unwrap_err();
        assert!(matches!(fewer, TrainerError::Differs { .. }) && fewer.is_user_error(), "{fewer}");
        assert!(fewer.to_string().contains("`phase.1.steps` is 5 now and was 8"), "{fewer}");
    }
}

/// The recipe in the folder is the one that the run goes by now, under the name that its attempts bear.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_change_on_the_way_are_written_down() {
    let root = tempfile::tempdir().unwrap();
    let (folder, moved) = (root.path().join("run"), root.path().join("moved"));
    let written = |folder: &Path| Recipe::load(&folder.join("recipe.toml"), &[]).unwrap();
    let (_, finished, _) = run(&folder, Start::Fresh, 5, &[]).await.unwrap();
    assert!(!finished);
    let before = written(&folder);
    std::fs::rename(&folder, &moved).unwrap();
    run(&moved, Start::Resume, 9, &["run.keep=7", "agent.attempt_seconds=99"]).await.unwrap();
    let after = written(&moved);
    assert_eq!((after.run.keep, after.agent.attempt_seconds), (7, 99.0));
    assert_eq!((&after.run.name, &after.run.folder), (&before.run.name, &moved));
    assert_ne!(after.run.keep, before.run.keep);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_phase_can_be_added_and_one_that_is_over_stays_as_it_was() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let sft = "{kind='sft', demonstrations=10, epochs=2, batch=4, learning_rate=3.0}";
    let rl = "{kind='rl', steps=2, groups=2, group_size=4, learning_rate=0.05}";
    let (short, long) = (format!("phase=[{sft}]"), format!("phase=[{sft}, {rl}]"));
    let (weights, ..) = run(&path("whole"), Start::Fresh, 99, &[&long]).await.unwrap();
    run(&path("grown"), Start::Fresh, 99, &[&short]).await.unwrap();
    let (grown, ..) = run(&path("grown"), Start::Resume, 99, &[&long]).await.unwrap();
    assert_eq!(grown, weights);
    assert_same(&path("grown"), &path("whole"));

    let over = run(&path("grown"), Start::Resume, 99, &[&long, "phase.0.epochs=3"]).await.unwrap_err();
    assert!(matches!(over, TrainerError::PhaseOver { phase: 0, later: 1 }) && over.is_user_error(), "{over}");
    // Refused, it is what it was.
    assert_eq!(replayed(&path("grown")).await, (8, true));
    run(&path("grown"), Start::Resume, 99, &[&long]).await.unwrap();
}

/// The learning rate of what is done stays what it was, also where it is done again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schedule_goes_on_as_that_of_the_longer_phase() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("run");
    run(&folder, Start::Fresh, 99, &[]).await.unwrap();
    let rates = || -> Vec<f64> {
        metrics(&folder).iter().filter_map(|line| line.get("actor/lr")?.as_f64()).collect()
    };
    let before = rates();
    let (_, _, notes) = run(&folder, Start::Resume, 99, &["phase.1.steps=9"]).await.unwrap();
    assert!(notes.contains("the learning rate of phase 1 falls over its steps: from step 5 on"), "{notes}");
    let after = rates();
    assert_eq!((&after[..11], after.len()), (&before[..], 15));
    // Step 5 of 9 of a straight line down, after one step of warm-up, from 0.05.
    let expected = 0.05 * (1.0 - 4.0 / 8.0);
    assert!((after[11] - expected).abs() < 1e-6, "{after:?}");
    assert_eq!(replayed(&folder).await, (15, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_phase_ends_where_it_is_good_enough() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    // Every answer is right, so the first evaluation on the way ends a phase.
    let right = "reward={scorer={kind='command', command=['echo', '1']}, unfinished=-0.5}";
    let easy = [right, "phase.0.until=0.1", "phase.1.until=0.1", "eval.before=false", "agent.max_turns=2"];
    let policy = simulator(Duration::ZERO, 0.0);
    let recipe = crate::common::recipe(&path("whole"), &easy);
    let mut trainer = Trainer::new(recipe, parts(&policy, Duration::ZERO), Start::Fresh).await.unwrap();
    let mut notes = Notes::default();
    let Ended::Finished(summary) = trainer.run(&mut notes, &StopFlag::default()).await.unwrap() else {
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

    // Wherever it is stopped, it ends in the same place with the same weights.
    for most in [1, 3, 4, 6] {
        let folder = path(&format!("stopped-{most}"));
        run(&folder, Start::Fresh, most, &easy).await.unwrap();
        let (weights, finished, _) = run(&folder, Start::Resume, 99, &easy).await.unwrap();
        assert!(finished);
        assert_eq!(weights, policy.weights(), "stopped after {most}");
        assert_same(&folder, &path("whole"));
        assert_eq!(replayed(&folder).await, (6, true));
    }
    // A phase that is over by itself can be told to go on.
    let more: Vec<&str> = easy.into_iter().filter(|key| *key != "phase.1.until=0.1").collect();
    let (_, finished, _) = run(&path("whole"), Start::Resume, 99, &more).await.unwrap();
    assert!(finished);
    assert_eq!(replayed(&path("whole")).await, (8, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_are_those_that_a_run_began_with() {
    let root = tempfile::tempdir().unwrap();
    let (folder, rows, model) =
        (root.path().join("run"), root.path().join("rows.jsonl"), root.path().join("config.json"));
    let written = |answer: u32| {
        (0..9).map(|i| format!("{{\"question\": \"{i}?\", \"answer\": {answer}}}\n")).collect::<String>()
    };
    fs::write(&rows, written(1)).unwrap();
    fs::write(&model, "{}").unwrap();
    let tasks = format!("tasks=[{{kind='jsonl', path='{}', held_out=2}}]", rows.display());
    let phase = "phase=[{kind='rl', steps=2, groups=2, group_size=4, learning_rate=0.05}]";
    let go = async |start, most| {
        let policy = simulator(Duration::ZERO, 0.0);
        let parts = Parts { model_files: vec![model.clone()], ..parts(&policy, Duration::ZERO) };
        let recipe = crate::common::recipe(&folder, &[&tasks, phase, "eval.tasks=2"]);
        let stop = StopFlag::default();
        let mut observer = StopAfter { stop: stop.clone(), left: most, notes: Notes::default() };
        Trainer::new(recipe, parts, start).await?.run(&mut observer, &stop).await
    };
    go(Start::Fresh, 1).await.unwrap();
    for (file, changed, whole, name) in [
        (&rows, written(2), written(1), "rows.jsonl of `tasks.0`"),
        (&model, "{ }".into(), "{}".into(), "config.json of `model`"),
    ] {
        fs::write(file, changed).unwrap();
        let refused = go(Start::Resume, 1).await.unwrap_err();
        assert!(refused.is_user_error() && refused.to_string().contains(name), "{refused}");
        fs::write(file, whole).unwrap();
    }
    assert!(matches!(go(Start::Resume, 99).await.unwrap(), Ended::Finished(_)));
}

/// A run remembers its moment; one of an older build, which did not write it down, began when its recipe was
/// written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_moment_is_that_of_the_beginning() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("run");
    assert_eq!(begun(&folder).unwrap(), None);
    run(&folder, Start::Fresh, 1, &[]).await.unwrap();
    assert_eq!(begun(&folder).unwrap(), Some(0));

    fs::remove_file(folder.join("origin.json")).unwrap();
    let written = seconds(fs::metadata(folder.join("recipe.toml")).unwrap().modified().unwrap());
    assert!(seconds(SystemTime::now()) - written < 600);
    assert_eq!(begun(&folder).unwrap(), Some(written));
    run(&folder, Start::Resume, 1, &[]).await.unwrap();
    assert!(folder.join("origin.json").is_file());
}
