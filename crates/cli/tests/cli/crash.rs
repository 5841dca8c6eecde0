//! Tests of crash recovery: a run that is killed at any point resumes and ends with the weights of
//! an uninterrupted run, bit for bit.
#![cfg(unix)]

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use levade_store::testing::{ids_without_abandoned, plan_without_abandoned, wait};
use levade_store::{AttemptSummary, Sqlite, StepPlan, Store};
use levade_tree::Purpose;

use crate::support::{Workspace, stderr};

const SIGKILL: i32 = 9;

/// The results that a resumed run and an uninterrupted run must have in common.
#[derive(PartialEq)]
pub struct Trace {
    weights: Vec<u8>,
    attempts: Vec<AttemptSummary>,
    plans: Vec<StepPlan>,
    /// Lines of the metrics file, each reduced to the phase, the step, the name of the evaluation
    /// and the mean reward.
    lines: Vec<String>,
}

impl Trace {
    /// Reads the results of the run in `run`, whose store is in `store_file`.
    pub fn read(workspace: &Workspace, store_file: &Path) -> Self {
        let store = wait(Sqlite::open_existing(store_file)).unwrap();
        let purposes = [Purpose::Demonstration, Purpose::Train, Purpose::Eval];
        let steps = wait(store.planned_steps()).unwrap();
        let metrics = std::fs::read_to_string(workspace.path("run/metrics.jsonl")).unwrap();
        let name = |line: &str| {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            format!(
                "{} {} {} {}",
                value["phase"], value["step"], value["eval"], value["critic/rewards/mean"]
            )
        };
        // Attempts in flight at a kill are abandoned, and their replacements have other ids and
        // numbers.
        let names = wait(ids_without_abandoned(&store)).unwrap();
        let summaries = |purpose| {
            let all = wait(store.summaries(purpose)).unwrap().into_iter();
            all.map(|summary| {
                let (id, number) = names[&summary.id];
                AttemptSummary { id, number, ..summary }
            })
        };
        let plan = |(phase, step)| {
            let plan = wait(store.step_plan(phase, step)).unwrap().unwrap();
            plan_without_abandoned(&plan, &names)
        };
        Trace {
            weights: workspace.weights("run"),
            attempts: purposes.into_iter().flat_map(summaries).collect(),
            plans: steps.into_iter().map(plan).collect(),
            lines: metrics.lines().map(name).collect(),
        }
    }

    /// Asserts that the results are those of an uninterrupted run on a file.
    pub fn assert_same(&self, what: &str) {
        let expected = uninterrupted();
        assert_eq!(self.lines, expected.lines, "{what}");
        assert_eq!(self.attempts, expected.attempts, "{what}");
        assert!(self.plans == expected.plans, "{what}: the plans differ");
        assert!(self.weights == expected.weights, "{what}: the weights differ");
    }
}

/// Returns the trace of an uninterrupted run, with one thread per core.
fn uninterrupted() -> &'static Trace {
    static TRACE: OnceLock<Trace> = OnceLock::new();
    TRACE.get_or_init(|| {
        let workspace = Workspace::with_trained_model();
        let output = workspace.train().output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let trace = Trace::read(&workspace, &workspace.path("run/run.db"));
        assert_eq!(trace.attempts.len(), 4 + 3 * 6 + 3 * 7);
        trace
    })
}

/// Returns a command that starts the run with one thread, or resumes it if it exists.
fn command(workspace: &Workspace) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_levade"));
    command.current_dir(workspace.path("")).args([
        "train",
        "recipe.toml",
        "--set",
        "engine.threads=1",
    ]);
    if Path::new(&workspace.path("run/recipe.toml")).exists() {
        command.arg("--resume");
    }
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn assert_recovers_at(points: &[&str]) {
    for point in points {
        let workspace = Workspace::with_trained_model();
        let status = command(&workspace).env("LEVADE_CRASH_AT", point).output().unwrap();
        assert_eq!(
            status.status.signal(),
            Some(SIGKILL),
            "{point} was not reached: {}",
            stderr(&status)
        );
        let output = command(&workspace).output().unwrap();
        assert!(output.status.success(), "{point}: {}", stderr(&output));
        Trace::read(&workspace, &workspace.path("run/run.db")).assert_same(point);
    }
}

#[test]
fn run_recovers_after_kill_during_sampling() {
    assert_recovers_at(&[
        "sampling:1",
        "sampling:11",
        "decode_step:120",
        "tool_call:2",
        "tool_call:8",
        "attempt_recorded:13",
    ]);
}

#[test]
fn run_recovers_after_kill_during_update() {
    assert_recovers_at(&[
        "ledger_written:2",
        "micro_batch:3",
        "before_optim_step:1",
        "in_optim_step:2",
        "after_optim_step:3",
        "metrics_written:2",
    ]);
}

#[test]
fn run_recovers_after_kill_during_checkpoint() {
    assert_recovers_at(&[
        "checkpoint_file:2",
        "weights_saved:3",
        "companions_saved:1",
        "before_rename:2",
        "after_rename:4",
    ]);
}

/// Kills the run repeatedly, after increasing random delays.
#[test]
fn run_recovers_after_kills_at_random_times() {
    let workspace = Workspace::with_trained_model();
    let mut random = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos();
    let mut killed = 0;
    for round in 0u64.. {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let delay =
            Duration::from_millis(10 + 8 * round + u64::from(random >> 16) % (20 + 25 * round));
        let mut child = command(&workspace).spawn().unwrap();
        std::thread::sleep(delay);
        // The run may have ended already.
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            break;
        }
        assert_eq!(
            output.status.signal(),
            Some(SIGKILL),
            "round {round}, {delay:?}: {}",
            stderr(&output)
        );
        killed += 1;
    }
    assert!(killed > 0);
    Trace::read(&workspace, &workspace.path("run/run.db")).assert_same("killed at random times");
}
