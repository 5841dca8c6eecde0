//! Tests of environments in processes under a supervisor: their tasks and scores, and the handling
//! of processes that fail. The Python package is a small one with reasoning-gym's interface, in the
//! directory of the recipe, so that nothing needs to be installed.

#![allow(clippy::unwrap_used)] // clippy sees only what is inside #[test], not the helpers beside it

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use levade_agent::environments::{
    DatasetOptions, EnvironmentOptions, EnvironmentScorer, Environments, ReasoningGymOptions,
    TaskList, VerifiersOptions, WorkerOptions,
};
use levade_process::Supervisor;
use levade_reward::{ScoreError, Scorer, ScorerInput};
use levade_tasks::Task;
use levade_tree::{AttemptId, Component, Outcome, Trajectory};
use serde_json::{Map, json};
use tempfile::TempDir;

/// Data set of sums whose scoring fails in the way that the answer names. `shaky` generates another
/// task each time.
const PACKAGE: &str = r#"
import os, random, time

class Sums:
    def __init__(self, seed, size, most=9):
        assert most > 0, "most must be more than 0"
        self.seed, self.size, self.most = seed, size, most

    def __getitem__(self, place):
        draw = random.Random(self.seed + place)
        a, b = draw.randint(0, self.most), draw.randint(0, self.most)
        return {"question": f"{a} + {b} = ? ({place})", "answer": str(a + b), "metadata": {"terms": (a, b), "of": {1}}}

    def score_answer(self, answer, entry):
        print("noise on standard output")
        if answer == "nan":
            return float("nan")
        if answer == "text":
            return "very good"
        if answer == "raise":
            return 1 / 0
        if answer == "exit":
            os._exit(3)
        if answer == "hang":
            time.sleep(1000)
        return 0.25 if answer is None else float(answer == entry["answer"])

class Shaky(Sums):
    def __getitem__(self, place):
        return {"question": str(random.random()), "answer": "1"}

def create_dataset(name, **config):
    return {"sums": Sums, "shaky": Shaky, "more": Sums}[name](**config)
"#;

fn dir() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let package = dir.path().join("reasoning_gym");
    std::fs::create_dir(&package).unwrap();
    std::fs::write(package.join("__init__.py"), PACKAGE).unwrap();
    std::fs::write(package.join("factory.py"), "DATASETS = {'sums': 1, 'shaky': 1, 'more': 1}")
        .unwrap();
    dir
}

/// Returns the supervisor process, which is an example of this crate.
fn supervisor() -> Supervisor {
    let test = std::env::current_exe().unwrap();
    let supervisor = test.ancestors().nth(2).unwrap().join("examples/keep");
    assert!(supervisor.exists(), "first build it: cargo build -p levade-agent --example keep");
    Supervisor(vec![supervisor.display().to_string()])
}

fn worker(dir: &Path, seconds: f64) -> WorkerOptions {
    WorkerOptions { dir: dir.to_owned(), seconds, ..WorkerOptions::default() }
}

fn options(dir: &Path, datasets: &[(&str, f64)]) -> ReasoningGymOptions {
    let dataset = |&(name, fraction): &(&str, f64)| DatasetOptions {
        name: name.into(),
        weight: fraction,
        config: Map::new(),
    };
    ReasoningGymOptions {
        name: String::new(),
        datasets: datasets.iter().map(dataset).collect(),
        train: 12,
        held_out: 4,
        seed: None,
        held_out_seed: None,
        tag: "answer".into(),
        demonstration: "<answer>{answer}</answer>".into(),
        agent: String::new(),
        worker: worker(dir, 60.0),
    }
}

fn environments(options: ReasoningGymOptions) -> Environments {
    Environments::new([EnvironmentOptions::ReasoningGym(options)], &supervisor())
}

async fn list_tasks(
    environments: &Environments,
    seed: u64,
    split_seed: u64,
) -> Result<TaskList, String> {
    let found = environments.find("reasoning_gym").unwrap();
    found.tasks(seed, split_seed).await.map_err(|error| error.to_string())
}

async fn score(environments: &Environments, task: &Task, text: &str) -> Result<f64, ScoreError> {
    let task = json!(task);
    let trajectory = Arc::new(Trajectory::default());
    let attempt = AttemptId::from_bytes([1; 16]);
    let outcome = Outcome::demonstrated(text);
    let scorer_input = ScorerInput { attempt, task, outcome, trajectory };
    let components = EnvironmentScorer::new(environments.clone()).score(&scorer_input).await?;
    assert_eq!(components[0].name, Component::SCORE);
    Ok(components[0].value)
}

#[tokio::test]
async fn tasks_follow_seeds_and_are_scored_by_dataset() {
    let dir = dir();
    let environments = environments(options(dir.path(), &[("sums", 3.0), ("more", 1.0)]));
    let first = list_tasks(&environments, 1, 1).await.unwrap();
    assert_eq!(first, list_tasks(&environments, 1, 1).await.unwrap());
    let kinds = |tasks: &[Task], kind: &str| {
        tasks.iter().filter(|task| task.kind.as_deref() == Some(kind)).count()
    };
    assert_eq!((kinds(&first.train, "sums"), kinds(&first.held_out, "sums")), (9, 3));
    // Both data sets generate tasks alike, and a task of the first is not repeated by the second.
    assert_eq!(kinds(&first.train, "more") + kinds(&first.held_out, "more") + first.repeated, 4);
    let other = list_tasks(&environments, 2, 1).await.unwrap();
    assert_eq!(other.held_out, first.held_out, "they follow from the split alone");
    assert!(first.train.iter().all(|task| !other.train.contains(task)));

    let task = &first.train[0];
    let expected_answer = task.answer.as_str().unwrap();
    assert_eq!(
        task.demonstration.as_ref().unwrap().answer,
        format!("<answer>{expected_answer}</answer>")
    );
    for (text, want) in [
        (format!("<answer>0x</answer> or <answer> {expected_answer}\n</answer>"), 1.0),
        (format!("<answer>{expected_answer}</answer> or <answer>0x</answer>"), 0.0),
        (expected_answer.to_owned(), 0.25),
        (String::new(), 0.25),
        // The data set fails to score this answer, but not its own answer.
        ("<answer>raise</answer>".to_owned(), 0.0),
    ] {
        assert_eq!(score(&environments, task, &text).await.unwrap(), want, "{text:?}");
    }
}

#[tokio::test]
async fn invalid_score_is_reported_as_error() {
    let dir = dir();
    let environments = environments(options(dir.path(), &[("sums", 1.0)]));
    let task = &list_tasks(&environments, 1, 1).await.unwrap().train[0];
    for (expected_answer, want) in [
        ("nan", "the score of sums is nan, which is no reward"),
        ("text", "the score of sums is 'very good', which is no number"),
        ("exit", "the worker ended with exit status: 3"),
    ] {
        let error = score(&environments, task, &format!("<answer>{expected_answer}</answer>"))
            .await
            .unwrap_err();
        assert!(error.to_string().contains(want), "{error}");
        assert!(error.is_temporary(), "another try may be better: {error}");
    }
    assert_eq!(
        score(&environments, task, "").await.unwrap(),
        0.25,
        "another process has taken its place"
    );
}

#[tokio::test]
async fn hanging_environment_is_stopped_at_timeout() {
    let dir = dir();
    let mut options = options(dir.path(), &[("sums", 1.0)]);
    let task = list_tasks(&environments(options.clone()), 1, 1).await.unwrap().train.remove(0);
    options.worker.seconds = 4.0;
    let environments = environments(options);
    let since = Instant::now();
    let error = score(&environments, &task, "<answer>hang</answer>").await.unwrap_err().to_string();
    let want = "did not respond to the request \"score\" within 4s (worker.seconds)";
    assert!(error.contains(want), "{error}");
    assert!(since.elapsed() < Duration::from_secs(60));
}

#[tokio::test]
async fn unusable_options_are_rejected_before_sampling() {
    let dir = dir();
    let listing_error = async |options| list_tasks(&environments(options), 1, 1).await.unwrap_err();
    let error = listing_error(options(dir.path(), &[("sum", 1.0)])).await;
    assert!(error.contains("has no data set 'sum'; did you mean sums?"), "{error}");
    let error = listing_error(options(dir.path(), &[("shaky", 1.0)])).await;
    assert!(error.contains("gives another task at the same seed and place each time"), "{error}");
    let mut config = options(dir.path(), &[("sums", 1.0)]);
    config.datasets[0].config = json!({ "most": 0 }).as_object().unwrap().clone();
    let error = listing_error(config).await;
    assert!(
        error.contains("the data set sums refuses its config: most must be more than 0"),
        "{error}"
    );
    let empty = tempfile::tempdir().unwrap();
    let error = listing_error(options(empty.path(), &[("sums", 1.0)])).await;
    assert!(error.contains("-m pip install reasoning-gym"), "{error}");
    let mut python = options(dir.path(), &[("sums", 1.0)]);
    python.worker.python = "/nonexistent/python".into();
    let error = listing_error(python).await;
    assert!(error.contains("cannot start /nonexistent/python"), "{error}");
    let verifiers = VerifiersOptions {
        name: String::new(),
        environment: "nobody-has-this".into(),
        config: Map::new(),
        train: 1,
        held_out: 0,
        agent: String::new(),
        worker: worker(empty.path(), 60.0),
    };
    let all = Environments::new([EnvironmentOptions::Verifiers(verifiers)], &supervisor());
    let error = all.find("nobody-has-this").unwrap().tasks(1, 1).await.unwrap_err().to_string();
    assert!(
        error.contains("pip install 'verifiers>=0.4'") && error.contains("nobody-has-this"),
        "{error}"
    );
}

/// Parses actions in completions with the worker's own code, for a stand-in of a gymnasium
/// environment.
const ACTIONS: &str = r#"
import re, sys, types
package = types.ModuleType("levade_worker")
sys.modules["levade_worker"] = package
for name in ("numbers", "episode"):
    setattr(package, name, types.ModuleType(name))
package.episode.NoAction = ValueError
found = {}
exec(WORLDS, found)
def number(names, text):
    world = object.__new__(found["World"])
    world.options = {"actions": names}
    world.world = types.SimpleNamespace(action_space=types.SimpleNamespace(n=12))
    return world.number(text)
compass = ["north", "north east", "east", "stay"]
assert number(compass, "I go north east.") == 1
assert number(compass, "Not north east, but NORTH") == 0
assert number(compass, "east") == 2
assert number(["r", "R", "u"], "Then R") == 1 and number(["r", "R", "u"], "Then r") == 0
assert number([], "from 1 to 11") == 11
try:
    number(compass, "northern")
except ValueError as error:
    assert "Reply with one of: north, north east" in str(error)
else:
    raise AssertionError
"#;

#[test]
fn action_is_parsed_from_completion() {
    let worlds = include_str!("../../src/environments/worker/worlds.py");
    let script = ACTIONS.replace("WORLDS", &format!("{worlds:?}"));
    let ran = std::process::Command::new("python3").args(["-c", &script]).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}
