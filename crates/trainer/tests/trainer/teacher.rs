//! Phases that imitate an external policy, or completions in the rows of tasks.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use levade_agent::Teacher;
use levade_policy::Simulator;
use levade_store::testing::wait;
use levade_store::{Sqlite, Status, Store};
use levade_text::{Message, Role, ToolCall};
use levade_trainer::{RunEnd, StartMode, StopFlag, Trainer, TrainerError};
use levade_tree::{Kind, Purpose};
use serde_json::json;

use crate::common::{metrics, parts, recipe, simulator};

const TAUGHT: [&str; 5] = [
    "policy.default={kind='trained'}",
    "policy.teacher={kind='external', url='http://127.0.0.1:9/v1', model='m'}",
    "phase.0.source={policy='teacher'}",
    "phase.0.epochs=4",
    "phase.1.steps=1",
];

/// A teacher that evaluates expressions with the tool, and cannot answer expressions that contain a
/// 7.
fn teacher(num_requests: &Arc<AtomicUsize>) -> Teacher {
    taught(num_requests, || ())
}

/// The same teacher, with a function that runs at each completion.
fn taught(num_requests: &Arc<AtomicUsize>, then: impl Fn() + Send + Sync + 'static) -> Teacher {
    let num_requests = Arc::clone(num_requests);
    Teacher::from_rule(move |messages| {
        num_requests.fetch_add(1, Ordering::Relaxed);
        then();
        let last = messages.last().unwrap();
        if last.role == Role::Tool {
            return Ok(Message::assistant(format!("The answer is {}.", last.content.as_str())));
        }
        let parts = last.content.split(|c: char| !c.is_ascii_digit() && !"+-*/×÷−() ".contains(c));
        let expression = parts.map(str::trim).max_by_key(|text| text.len()).unwrap();
        if expression.contains('7') {
            return Ok(Message::assistant("I do not know."));
        }
        let arguments = json!({ "expression": expression }).as_object().unwrap().clone();
        Ok(Message::calls(
            "",
            vec![ToolCall {
                id: "t".into(),
                name: "calculator".into(),
                arguments: arguments.into(),
            }],
        ))
    })
}

async fn run(
    dir: &Path,
    policy: &Arc<Simulator>,
    start: StartMode,
    teacher: Teacher,
    overrides: &[&str],
) -> Result<RunEnd, TrainerError> {
    let mut parts = parts(policy, Duration::ZERO);
    parts.teachers = BTreeMap::from([("teacher".to_owned(), teacher)]);
    let overrides = [&TAUGHT[..], overrides].concat();
    Trainer::new(recipe(dir, &overrides), parts, start)
        .await?
        .run(&mut (), &StopFlag::default())
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sft_imitates_good_teacher_attempts() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let num_requests = Arc::new(AtomicUsize::new(0));
    let policy = simulator(Duration::ZERO, 0.0);
    run(&dir, &policy, StartMode::Fresh, teacher(&num_requests), &[]).await.unwrap();

    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let made = wait(store.summaries(Purpose::Demonstration)).unwrap();
    let good = made.iter().filter(|attempt| attempt.score == Some(1.0)).count();
    assert_eq!(good, 10);
    assert!(made.len() > good, "some hold a 7");
    for summary in &made {
        let attempt = wait(store.attempt(&summary.id)).unwrap().unwrap();
        let segments = attempt.trajectory.segments();
        assert!(segments.iter().all(|s| s.policy == "default" && s.kind != Kind::Sampled));
        let demonstrated = segments.iter().filter(|s| s.kind == Kind::Demonstrated).count();
        assert_eq!(demonstrated, if attempt.score == Some(1.0) { 2 } else { 1 });
    }
    // Only the good attempts are in the plans, and the policy learns them.
    let plans = wait(store.planned_steps()).unwrap();
    assert_eq!(plans.iter().filter(|(phase, _)| *phase == 0).count(), 12);
    let lines = metrics(&dir);
    let nll: Vec<f64> = lines.iter().filter_map(|line| line.get("train/nll")?.as_f64()).collect();
    assert!(nll[11] < 0.7 * nll[0], "{nll:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resumed_run_does_not_repeat_teacher_calls() {
    let root = tempfile::tempdir().unwrap();
    let uninterrupted = root.path().join("whole");
    let interrupted = root.path().join("cut");
    let num_requests = Arc::new(AtomicUsize::new(0));
    let policy = simulator(Duration::ZERO, 0.0);
    run(&uninterrupted, &policy, StartMode::Fresh, teacher(&num_requests), &[]).await.unwrap();
    let want = policy.weights();
    let all = num_requests.load(Ordering::Relaxed);

    // Stops during the last demonstrations. Attempts end immediately, so the attempts of the first
    // round end together.
    let stop = StopFlag::default();
    let num_requests = Arc::new(AtomicUsize::new(0));
    let policy = simulator(Duration::ZERO, 0.0);
    let mut parts = parts(&policy, Duration::ZERO);
    let ends = stop.clone();
    let seen = Arc::clone(&num_requests);
    let stopping = taught(&num_requests, move || {
        if seen.load(Ordering::Relaxed) == all - 2 {
            ends.stop();
        }
    });
    parts.teachers = BTreeMap::from([("teacher".to_owned(), stopping)]);
    let mut trainer =
        Trainer::new(recipe(&interrupted, &TAUGHT), parts, StartMode::Fresh).await.unwrap();
    let ended = trainer.run(&mut (), &stop).await.unwrap();
    assert!(matches!(ended, RunEnd::Stopped { done: 0, .. }), "{ended:?}");
    drop(trainer);
    let store = wait(Sqlite::open_existing(&interrupted.join("run.db"))).unwrap();
    let made = wait(store.summaries(Purpose::Demonstration)).unwrap();
    let made = made.iter().filter(|attempt| attempt.status == Status::Completed).count();
    drop(store);

    let again = Arc::new(AtomicUsize::new(0));
    let policy = simulator(Duration::ZERO, 0.0);
    run(&interrupted, &policy, StartMode::Resume, teacher(&again), &[]).await.unwrap();
    assert_eq!(policy.weights(), want);
    let again = again.load(Ordering::Relaxed);
    assert!(made > 0 && again < all, "{made} were made, and then {again} of {all} replies");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weak_teacher_is_reported_by_name() {
    let root = tempfile::tempdir().unwrap();
    let ignorant = Teacher::from_rule(|_| Ok(Message::assistant("I do not know.")));
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let error = run(&dir, &policy, StartMode::Fresh, ignorant, &["phase.0.source.tasks=12"])
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("teacher reached a score of 1 in 0 of 12 attempts"), "{text}");
    assert!(error.is_user_error());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sft_imitates_row_completions_that_score_well() {
    let root = tempfile::tempdir().unwrap();
    let tasks = root.path().join("tasks.jsonl");
    let row = |a: u32| {
        let arguments = json!({ "expression": format!("{a}+4") });
        let call = json!({ "tool_calls": [{ "function": { "name": "calculator", "arguments": arguments } }] });
        // One row in three contradicts its tool result, and four rows have no completions.
        let assistant_text =
            format!("The answer is {}.", if a.is_multiple_of(3) { 0 } else { a + 4 });
        let mut row = json!({ "question": format!("What is {a} and 4?"), "answer": a + 4 });
        if a > 4 {
            row["replies"] = json!([call, assistant_text]);
        }
        format!("{row}\n")
    };
    std::fs::write(&tasks, (1..=30).map(row).collect::<String>()).unwrap();
    let source = format!("tasks.0={{kind='file', path='{}', held_out=6}}", tasks.display());
    let with = [source.as_str(), "eval.unseen_wordings=0", "phase.1.steps=1", "phase.0.epochs=6"];
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let start = async |overrides: &[&str]| {
        let recipe = recipe(&dir, &[&with[..], overrides].concat());
        Trainer::new(recipe, parts(&policy, Duration::ZERO), StartMode::Fresh).await
    };
    let few = ["phase.0.source={field='replies'}", "phase.0.demonstrations=25"];
    let error = start(&few).await.err().unwrap();
    assert!(matches!(error, TrainerError::TooFewDemonstrations { wanted: 25, .. }), "{error}");
    let other = ["phase.0.source={field='question'}", "phase.0.demonstrations=5"];
    let error = start(&other).await.err().unwrap();
    assert!(
        error
            .to_string()
            .contains("the field `question` of the task's row is not a list of completions"),
        "{error}"
    );

    let good = ["phase.0.source={field='replies'}", "phase.0.demonstrations=8"];
    start(&good).await.unwrap().run(&mut (), &StopFlag::default()).await.unwrap();
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let made = wait(store.summaries(Purpose::Demonstration)).unwrap();
    assert_eq!(made.iter().filter(|attempt| attempt.score == Some(1.0)).count(), 8);
    for summary in &made {
        let attempt = wait(store.attempt(&summary.id)).unwrap().unwrap();
        assert_eq!(
            (attempt.outcome.calls.ok, attempt.outcome.turns),
            (1, 2),
            "its call was answered"
        );
        let demonstrated =
            attempt.trajectory.segments().iter().filter(|s| s.kind == Kind::Demonstrated);
        assert_eq!(demonstrated.count(), 2);
    }
    let lines = metrics(&dir);
    let nll: Vec<f64> = lines.iter().filter_map(|line| line.get("train/nll")?.as_f64()).collect();
    assert!(nll[nll.len() - 1] < 0.8 * nll[0], "{nll:?}");
}
