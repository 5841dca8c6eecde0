//! Runs that resume after demonstrations were withdrawn.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use levade_recipe::Recipe;
use levade_store::testing::wait;
use levade_store::{Attempt, AttemptStart, Sqlite, Store, WithdrawRequest};
use levade_trainer::{
    Event, Observer, RunEnd, StartMode, StopFlag, Trainer, TrainerError, rewind, with_copies,
};
use levade_tree::{AttemptId, AttemptSlot, Purpose, RunId};

use crate::common::{parts, recipe, simulator};

/// Four steps that imitate the policy's own completions.
const OWN: &str = "phase=[{kind='sft', source={policy='default', min_score=0.0, tasks=48}, \
    demonstrations=4, batch=2, epochs=2, learning_rate=0.05}]";
/// Four steps that imitate the demonstrations of tasks.
const OF_TASKS: &str =
    "phase=[{kind='sft', demonstrations=4, batch=2, epochs=2, learning_rate=0.05}]";

fn recipe_of(dir: &Path, phase: &str) -> Recipe {
    let policy = "policy.default={kind='trained'}";
    recipe(dir, &[policy, phase, "run.checkpoint_every=1", "run.keep=20", "eval.every=0"])
}

/// Stops the run after this number of steps.
struct StopAfter(u32, StopFlag);

impl Observer for StopAfter {
    fn event(&mut self, event: &Event) {
        if matches!(event, Event::Step { step, .. } if *step == self.0) {
            self.1.stop();
        }
    }
}

async fn run(recipe: Recipe, start: StartMode, steps: u32) -> Result<RunEnd, TrainerError> {
    let parts = parts(&simulator(Duration::ZERO, 0.0), Duration::ZERO);
    let stop = StopFlag::default();
    let mut observer = StopAfter(steps, stop.clone());
    Trainer::new(recipe, parts, start).await?.run(&mut observer, &stop).await
}

fn store(dir: &Path) -> Sqlite {
    wait(Sqlite::resume(&dir.join("run.db"), &RunId("tiny".into()))).unwrap()
}

/// Returns the attempts that the steps so far trained on.
fn trained(store: &Sqlite) -> BTreeSet<AttemptId> {
    let steps = wait(store.planned_steps()).unwrap();
    let plans = steps.into_iter().map(|(phase, step)| wait(store.step_plan(phase, step)).unwrap());
    let plans: Vec<_> = plans.map(Option::unwrap).collect();
    plans.iter().flat_map(|plan| plan.sequences()).map(|sequence| sequence.attempt).collect()
}

/// Returns a demonstration of the phase. If `is_trained`, a step has trained on it, otherwise no
/// step has.
fn demonstration(store: &Sqlite, is_trained: bool) -> Attempt {
    let (trained, all) = (trained(store), wait(store.summaries(Purpose::Demonstration)).unwrap());
    // Originals are in step 0 if there are copies.
    let last = all.iter().map(|summary| summary.slot.step).max();
    let is_wanted = |id: &AttemptId| trained.contains(id) == is_trained;
    let found = all.iter().find(|one| Some(one.slot.step) == last && is_wanted(&one.id));
    wait(store.attempt(&found.unwrap().id)).unwrap().unwrap()
}

fn withdraw(store: &Sqlite, ids: impl IntoIterator<Item = AttemptId>) {
    let request =
        WithdrawRequest { attempts: ids.into_iter().collect(), ..WithdrawRequest::default() };
    wait(store.withdraw(&request)).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withdrawn_demonstration_is_rejected_by_name_on_resume() {
    for phase in [OWN, OF_TASKS] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run");
        run(recipe_of(&dir, phase), StartMode::Fresh, 1).await.unwrap();
        let withdrawn = demonstration(&store(&dir), false);
        withdraw(&store(&dir), [withdrawn.id]);
        let error = run(recipe_of(&dir, phase), StartMode::Resume, 4).await.unwrap_err();
        assert!(
            matches!(&error, TrainerError::Withdrawn(slot) if *slot == withdrawn.slot),
            "{phase}: {error}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worked_solution_of_withdrawn_task_is_rejected_by_name() {
    const THEN_TASKS: &str = "phase=[{kind='sft', \
        source={policy='default', min_score=0.0, tasks=48}, demonstrations=4, \
        batch=2, epochs=2, learning_rate=0.05}, \
        {kind='sft', demonstrations=24, batch=12, epochs=1, learning_rate=0.05}]";
    let root = tempfile::tempdir().unwrap();
    let [undisturbed, dir] = ["undisturbed", "run"].map(|name| root.path().join(name));
    let ended = run(recipe_of(&undisturbed, THEN_TASKS), StartMode::Fresh, u32::MAX).await.unwrap();
    assert!(matches!(ended, RunEnd::Finished(_)), "{ended:?}");
    // A task that only the second phase imitates.
    let task = {
        let store = store(&undisturbed);
        let all = wait(store.summaries(Purpose::Demonstration)).unwrap();
        let read = |id: &AttemptId| wait(store.attempt(id)).unwrap().unwrap().task;
        let (first, second): (Vec<_>, Vec<_>) = all.iter().partition(|it| it.slot.phase == 0);
        let known: Vec<_> = first.iter().map(|it| read(&it.id)).collect();
        let mut later = second.iter().map(|it| read(&it.id));
        later.find(|task| !known.contains(task)).unwrap()
    };
    run(recipe_of(&dir, THEN_TASKS), StartMode::Fresh, 1).await.unwrap();
    {
        let store = store(&dir);
        let purpose = Purpose::Eval;
        let slot = AttemptSlot { purpose, phase: 0, step: 9, group: 0, sample: 0 };
        let id = AttemptId::new(store.run(), &slot, 0);
        wait(store.start_attempt(&AttemptStart { id, slot, number: 0, task: task.clone() }))
            .unwrap();
        let name = task["id"].as_str().unwrap().to_owned();
        let tasks = vec![task.clone()];
        let request = WithdrawRequest { tasks, task: Some(name), ..WithdrawRequest::default() };
        assert_eq!(wait(store.withdraw(&request)).unwrap().len(), 1);
    }
    let error = run(recipe_of(&dir, THEN_TASKS), StartMode::Resume, u32::MAX).await.unwrap_err();
    let name = task["id"].to_string();
    assert!(matches!(&error, TrainerError::WithdrawnTask(what) if *what == name), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempt_withdrawn_with_its_copy_is_made_anew() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    run(recipe_of(&dir, OWN), StartMode::Fresh, 1).await.unwrap();
    let (copy, ids) = {
        let store = store(&dir);
        let copy = demonstration(&store, false);
        let ids = wait(with_copies(&store, &BTreeSet::from([copy.id]))).unwrap();
        assert_eq!(ids.len(), 2);
        let original = *ids.iter().find(|id| **id != copy.id).unwrap();
        assert_eq!(wait(with_copies(&store, &BTreeSet::from([original]))).unwrap(), ids);
        assert!(!trained(&store).contains(&original), "steps train on copies");
        withdraw(&store, ids.iter().copied());
        (copy, ids)
    };
    let ended = run(recipe_of(&dir, OWN), StartMode::Resume, u32::MAX).await.unwrap();
    assert!(matches!(ended, RunEnd::Finished(_)), "{ended:?}");
    let store = store(&dir);
    assert!(trained(&store).is_disjoint(&ids));
    let original = AttemptSlot { step: 0, ..copy.slot };
    assert_eq!(wait(store.count_tries(&original)).unwrap().next, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_step_rejects_withdrawn_demonstration() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    run(recipe_of(&dir, OWN), StartMode::Fresh, 1).await.unwrap();
    let copy = {
        let store = store(&dir);
        let copy = demonstration(&store, true);
        withdraw(&store, wait(with_copies(&store, &BTreeSet::from([copy.id]))).unwrap());
        copy
    };
    // Without checkpoints, the run repeats its first step.
    std::fs::remove_dir_all(dir.join("checkpoints")).unwrap();
    let error = run(recipe_of(&dir, OWN), StartMode::Resume, 4).await.unwrap_err();
    assert!(matches!(&error, TrainerError::Withdrawn(slot) if *slot == copy.slot), "{error}");
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewound_run_keeps_withdrawals_of_copies() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    run(recipe_of(&dir, OWN), StartMode::Fresh, 2).await.unwrap();
    let before = {
        let store = store(&dir);
        let copy = demonstration(&store, true);
        withdraw(&store, wait(with_copies(&store, &BTreeSet::from([copy.id]))).unwrap());
        wait(store.withdrawals()).unwrap()
    };
    let rewound = rewind(&recipe_of(&dir, OWN), 1).await.unwrap();
    assert_eq!((rewound.step, before.len()), (1, 2));
    assert_eq!(wait(store(&dir).withdrawals()).unwrap(), before);
}
