//! Runs with failures outside the model. They continue and report the failures.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{Simulator, SimulatorConfig, Timing};
use levade_store::testing::wait;
use levade_store::{Attempt, CreditTarget, Sqlite, Status, StepReward, Store};
use levade_text::ToolSpec;
use levade_tools::{
    Calculator, CallError, Session, ToolContext, ToolError, ToolOutput, ToolSet, Toolbox,
};
use levade_trainer::{RunEnd, RunParts, StartMode, StopFlag, Summary, Trainer};
use levade_tree::{AttemptId, Outcome, Purpose};
use serde_json::{Map, Value};

use crate::common::{metrics, parts, recipe, simulator};

async fn finish(dir: &Path, overrides: &[&str], parts: RunParts, start: StartMode) -> Summary {
    let mut trainer = Trainer::new(recipe(dir, overrides), parts, start).await.unwrap();
    match trainer.run(&mut (), &StopFlag::default()).await.unwrap() {
        RunEnd::Finished(summary) => summary,
        other => panic!("{other:?}"),
    }
}

/// A calculator that fails for some attempts of the second phase. Calls at the first task return an
/// error, calls at the second task never return, and one attempt at the third task panics.
struct Fragile;

struct FragileSession {
    calculator: Box<dyn Session>,
    group: Option<u32>,
}

#[async_trait]
impl Toolbox for Fragile {
    fn name(&self) -> &str {
        Calculator::NAME
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        Some(vec![Calculator::spec()])
    }

    async fn open(&self, context: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        let attempt = &context.attempt;
        assert!(
            !attempt.ends_with("group 2/sample 1") || !attempt.contains("train"),
            "a bug in the tool"
        );
        let group = (0..3).find(|group| {
            attempt.contains("train") && attempt.contains(&format!("group {group}/"))
        });
        let calculator = Calculator::default().open(context).await?;
        Ok(Box::new(FragileSession { calculator, group }))
    }
}

#[async_trait]
impl Session for FragileSession {
    fn specs(&self) -> Vec<ToolSpec> {
        vec![Calculator::spec()]
    }

    async fn call(&self, tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        match self.group {
            Some(0) => ToolOutput::error(CallError::Unavailable, "the backend is down"),
            Some(1) => std::future::pending().await,
            _ => self.calculator.call(tool, arguments).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn step_survives_tool_scorer_and_agent_failures() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let tools = ToolSet::new(vec![Arc::new(Fragile)], Duration::from_secs(60)).unwrap();
    let parts = crate::common::parts_with(&policy, tools);
    // Every answer that contains an even digit makes the scorer fail.
    let judge = r#"read line; case "${line%%,*}" in *[02468]*) echo the judge is away >&2; exit 1;; esac; echo 0.5"#;
    let scorer =
        format!("reward.scorer={{ kind = \"command\", command = [\"sh\", \"-c\", {judge:?}] }}");
    let overrides =
        [&scorer, "agent.attempt_seconds=2.0", "eval.tasks=0", "eval.unseen_wordings=0"];
    let summary = finish(&dir, &overrides, parts, StartMode::Fresh).await;
    assert_eq!(summary.steps, 11);
    let troubles: Vec<(&str, u64, &str)> = summary.warnings.iter().collect();
    for (source, why) in [
        ("tool calculator", "the backend is down"),
        ("attempt", ""),
        ("scorer", "exited with exit status: 1: the judge is away"),
    ] {
        assert!(
            troubles.iter().any(|(s, count, w)| *s == source && *count > 0 && w.contains(why)),
            "{troubles:?}"
        );
    }
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let all = wait(store.summaries(Purpose::Train)).unwrap();
    assert_eq!(all.len(), 5 * 3 * 4);
    let outcomes: Vec<Outcome> =
        all.iter().map(|a| wait(store.attempt(&a.id)).unwrap().unwrap().outcome).collect();
    let have = |want: &str| outcomes.iter().filter(|o| format!("{o:?}").contains(want)).count();
    assert!(
        have("was not done within 2s") > 0 && have("panicked") == 5,
        "{} {}",
        have("not done"),
        have("panicked")
    );
    // Failed attempts are left out of training. Attempts that exceeded the deadline count as
    // unfinished.
    for (attempt, outcome) in all.iter().zip(&outcomes) {
        assert_eq!(attempt.reward.is_none(), attempt.status == Status::Failed, "{outcome:?}");
    }
    let lines = metrics(&dir);
    let steps: Vec<&Value> =
        lines.iter().filter(|l| l.get("response/aborted_ratio").is_some()).collect();
    assert_eq!(steps.len(), 5);
    assert!(steps.iter().all(|l| l["response/aborted_ratio"].as_f64().unwrap() > 0.0));
}

/// A calculator that cannot be opened for the attempts for which the function returns true.
struct Shut<F>(F);

#[async_trait]
impl<F: Fn(&str) -> bool + Send + Sync> Toolbox for Shut<F> {
    fn name(&self) -> &str {
        Calculator::NAME
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        Some(vec![Calculator::spec()])
    }

    async fn open(&self, context: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        if (self.0)(&context.attempt) {
            return Err(ToolError::Open { tool: "calculator".into(), why: "not yet".into() });
        }
        Calculator::default().open(context).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_attempt_is_retried_if_configured() {
    let root = tempfile::tempdir().unwrap();
    for (retries, broken) in [("0", true), ("1", false)] {
        let dir = root.path().join(retries);
        let policy = simulator(Duration::ZERO, 0.0);
        // The first try of each attempt fails.
        let times = AtomicUsize::new(0);
        let reluctant = Shut(move |attempt: &str| {
            attempt.contains("sample 1") && times.fetch_add(1, Ordering::SeqCst).is_multiple_of(2)
        });
        let tools = ToolSet::new(vec![Arc::new(reluctant)], Duration::from_secs(60)).unwrap();
        let parts = crate::common::parts_with(&policy, tools);
        let retries = format!("agent.retries={retries}");
        // Attempts run one after the other, so that the counter alternates between first tries and
        // retries.
        let overrides =
            [&retries, "engine.concurrency=1", "eval.tasks=0", "eval.unseen_wordings=0"];
        let summary = finish(&dir, &overrides, parts, StartMode::Fresh).await;
        assert!(
            summary
                .warnings
                .iter()
                .any(|(source, _, why)| source == "tools" && why.contains("not yet"))
        );
        let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
        let all = wait(store.summaries(Purpose::Train)).unwrap();
        assert_eq!(all.iter().any(|attempt| attempt.status == Status::Failed), broken);
        // The retry is a separate attempt, and so is the failed try.
        let again: Vec<_> = all.iter().filter(|attempt| attempt.number == 1).collect();
        assert_eq!(again.is_empty(), broken);
        for attempt in again {
            let first = AttemptId::new(store.run(), &attempt.slot, 0);
            let first = wait(store.attempt(&first)).unwrap().unwrap();
            assert_eq!((first.status, first.reward), (Status::Superseded, None));
            assert!(first.outcome.error.unwrap().contains("not yet"));
        }
    }
}

/// With oversampling, a group is complete without its slow attempts, and the run can be replayed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversampling_does_not_wait_for_stragglers() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let tools = ToolSet::new(vec![Arc::new(Slow)], Duration::from_secs(600)).unwrap();
    let with = |tools: &ToolSet| crate::common::parts_with(&policy, tools.clone());
    let overrides =
        ["phase.1.oversample=1", "engine.concurrency=16", "eval.tasks=0", "eval.unseen_wordings=0"];
    let start = std::time::Instant::now();
    finish(&dir, &overrides, with(&tools), StartMode::Fresh).await;
    assert!(start.elapsed() < Duration::from_secs(300), "a straggler was waited for");
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let all = wait(store.summaries(Purpose::Train)).unwrap();
    assert_eq!(all.len(), 5 * 3 * 4);
    assert!(all.iter().all(|attempt| attempt.slot.sample != 2), "the slow one was not given up");
    // The run is repeated from the store alone, and ends with the same weights.
    std::fs::remove_dir_all(dir.join("checkpoints")).unwrap();
    let mute = simulator(Duration::ZERO, 1.0);
    let parts = crate::common::parts_with(&mute, tools);
    finish(&dir, &overrides, parts, StartMode::Resume).await;
    assert_eq!(mute.weights(), policy.weights());
}

/// Training takes longer than the completion timeout. Attempts that continue across updates do not
/// fail because of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_update_does_not_time_out_completions() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let batch = Duration::from_millis(1);
    let update = Duration::from_millis(2500);
    let timing = Timing { batch, update, ..Timing::default() };
    let policy = Arc::new(Simulator::new(SimulatorConfig { timing, ..crate::common::simulated() }));
    let overrides = [
        "phase.0.demonstrations=4",
        "phase.0.epochs=1",
        "phase.1.staleness=2",
        "phase.1.steps=3",
        "agent.max_tokens=30",
        "agent.completion_seconds=2.0",
        "engine.concurrency=16",
        "eval.tasks=0",
        "eval.unseen_wordings=0",
    ];
    let summary = finish(&dir, &overrides, parts(&policy, Duration::ZERO), StartMode::Fresh).await;
    assert_eq!(summary.warnings.iter().collect::<Vec<_>>(), []);
    let lines = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let updates: Vec<f64> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| line["phase"] == 1)
        .map(|line| line["timing_s/update_actor"].as_f64().unwrap())
        .collect();
    assert!(updates.len() == 3 && updates.iter().all(|seconds| *seconds > 2.0), "{updates:?}");
}

/// A hanging device ends the run with an error that names the operation. The run can be resumed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_device_ends_run_with_error() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let timing = Timing { update: Duration::from_secs(3600), ..Timing::default() };
    let hanging =
        Arc::new(Simulator::new(SimulatorConfig { timing, ..crate::common::simulated() }));
    let overrides = ["engine.call_seconds=0.2", "eval.tasks=0", "eval.unseen_wordings=0"];
    let parts_of = |policy: &Arc<Simulator>| parts(policy, Duration::ZERO);
    let recipe = recipe(&dir, &overrides);
    let mut trainer = Trainer::new(recipe, parts_of(&hanging), StartMode::Fresh).await.unwrap();
    let error = trainer.run(&mut (), &StopFlag::default()).await.unwrap_err();
    assert_eq!(error.to_string(), "waited 200ms for an optimizer step");
    drop(trainer);
    let patient = ["engine.call_seconds=60", "eval.tasks=0", "eval.unseen_wordings=0"];
    finish(&dir, &patient, parts_of(&simulator(Duration::ZERO, 0.0)), StartMode::Resume).await;
}

/// Attempts that fail at once do not count towards their group's size.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversampled_attempts_replace_failed_ones() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    // The first two attempts at each task fail.
    let shut = Shut(|attempt: &str| {
        attempt.contains("train")
            && ["sample 0", "sample 1"].iter().any(|end| attempt.ends_with(end))
    });
    let tools = ToolSet::new(vec![Arc::new(shut)], Duration::from_secs(60)).unwrap();
    let parts = crate::common::parts_with(&policy, tools);
    let overrides =
        ["phase.1.oversample=2", "engine.concurrency=16", "eval.tasks=0", "eval.unseen_wordings=0"];
    finish(&dir, &overrides, parts, StartMode::Fresh).await;
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let all = wait(store.summaries(Purpose::Train)).unwrap();
    let rewarded = all.iter().filter(|attempt| attempt.reward.is_some()).count();
    assert_eq!(rewarded, 5 * 3 * 4);
    assert!(all.len() > rewarded, "nothing broke");
}

/// A calculator whose opening blocks for the third attempt at each task.
struct Slow;

#[async_trait]
impl Toolbox for Slow {
    fn name(&self) -> &str {
        Calculator::NAME
    }

    fn specs(&self) -> Option<Vec<ToolSpec>> {
        Some(vec![Calculator::spec()])
    }

    async fn open(&self, context: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        if context.attempt.contains("train") && context.attempt.ends_with("sample 2") {
            tokio::time::sleep(Duration::from_secs(400)).await;
        }
        Calculator::default().open(context).await
    }
}

/// A calculator that returns a reward and metrics with each value. Its description is configurable.
#[derive(Clone)]
struct RewardingCalculator {
    description: &'static str,
}

impl RewardingCalculator {
    fn parts(self, policy: &Arc<Simulator>) -> RunParts {
        let tools = ToolSet::new(vec![Arc::new(self)], Duration::from_secs(60)).unwrap();
        crate::common::parts_with(policy, tools)
    }
}

#[async_trait]
impl Toolbox for RewardingCalculator {
    fn name(&self) -> &str {
        "bank"
    }

    async fn open(&self, _context: &ToolContext) -> Result<Box<dyn Session>, ToolError> {
        Ok(Box::new(self.clone()))
    }
}

#[async_trait]
impl Session for RewardingCalculator {
    fn specs(&self) -> Vec<ToolSpec> {
        vec![ToolSpec { description: self.description.into(), ..Calculator::spec() }]
    }

    async fn call(&self, tool: &str, arguments: &Map<String, Value>) -> ToolOutput {
        let output = Calculator::default().call(tool, arguments).await;
        let Some(value) = arguments.get("expression").filter(|_| !output.is_error()) else {
            return output;
        };
        let metrics = [("length".to_owned(), value.to_string().len() as f64)].into();
        ToolOutput { reward: Some(0.25), metrics, ..output }
    }
}

/// Rewards of tools are credited to their turns, their metrics are reported by toolbox, and a run
/// resumes only with unchanged tools.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tool_rewards_and_metrics_are_recorded() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let overrides = ["eval.tasks=0", "eval.unseen_wordings=0"];
    finish(
        &dir,
        &overrides,
        RewardingCalculator { description: "Pays." }.parts(&policy),
        StartMode::Fresh,
    )
    .await;

    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let all = wait(store.summaries(Purpose::Train)).unwrap();
    let all: Vec<Attempt> =
        all.iter().map(|a| wait(store.attempt(&a.id)).unwrap().unwrap()).collect();
    let mut paid = 0;
    for attempt in &all {
        let outcome = &attempt.outcome;
        for (turn, calls) in &outcome.calls_by_turn {
            let failed = calls.errors() - calls.malformed;
            let shaping = -0.1 * f64::from(calls.malformed) - 0.05 * f64::from(failed);
            let turn_reward =
                |reward: &&StepReward| reward.credit_target == CreditTarget::Turn(*turn);
            let step_reward =
                attempt.step_rewards.iter().find(turn_reward).map_or(0.0, |reward| reward.reward);
            let pays = 0.25 * f64::from(calls.ok);
            assert!((step_reward - shaping - pays).abs() < 1e-12, "{attempt:?}");
            paid += u32::from(pays > 0.0);
        }
        let truncation_reward = if outcome.finish.is_complete() { 0.0 } else { -0.5 };
        let step_rewards: f64 = attempt.step_rewards.iter().map(|reward| reward.reward).sum();
        assert!(
            (attempt.reward.unwrap() - attempt.score.unwrap() - truncation_reward - step_rewards)
                .abs()
                < 1e-12
        );
    }
    assert!(paid > 0);

    // Each metric is a mean over the attempts of a step, in the order of the steps.
    let text = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let lines: Vec<&Value> =
        lines.iter().filter(|l| l.get("response/aborted_ratio").is_some()).collect();
    for (step, line) in (0..).zip(&lines) {
        let of_step: Vec<&Attempt> =
            all.iter().filter(|attempt| attempt.slot.step == step).collect();
        for name in ["calls", "errors", "length"] {
            let found: Vec<f64> = of_step
                .iter()
                .filter_map(|attempt| {
                    attempt.outcome.tool_metrics.get(&format!("bank/{name}")).copied()
                })
                .collect();
            let mean = found.iter().sum::<f64>() / of_step.len() as f64;
            let reported =
                line.get(format!("tools/bank/{name}")).map(|value| value.as_f64().unwrap());
            assert_eq!(reported.is_none(), found.is_empty(), "{step} {name}");
            assert!(
                (reported.unwrap_or(mean) - mean).abs() < 1e-9,
                "{step} {name}: {reported:?} {mean}"
            );
        }
    }
    let took =
        |line: &&&Value| line["timing_s/tools/bank"].as_f64().is_some_and(|seconds| seconds > 0.0);
    assert!(lines.iter().filter(took).count() > 0);
    drop(store);

    let overrides = [overrides[0], overrides[1], "phase.1.steps=6"];
    let other = RewardingCalculator { description: "Pays well." }.parts(&policy);
    let error =
        Trainer::new(recipe(&dir, &overrides), other, StartMode::Resume).await.err().unwrap();
    let why = ": the tool calculator of `agent default` was changed, added or removed";
    assert!(error.to_string().contains(why), "{error}");
    finish(
        &dir,
        &overrides,
        RewardingCalculator { description: "Pays." }.parts(&policy),
        StartMode::Resume,
    )
    .await;
}
