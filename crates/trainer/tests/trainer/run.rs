//! Complete runs on the simulated policy.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{
    ForwardBackward, Learner, Manifest, OptimParams, OptimReport, PolicyError, Sampler, Simulator,
    SimulatorConfig, WeightsRef,
};
use levade_rl::Loss;
use levade_store::testing::wait;
use levade_store::{Attempt, EvalKey, Sqlite, Status, Store};
use levade_text::testing::{VOCABULARY, tiny_chat};
use levade_traces::{Chats, tool_calls};
use levade_trainer::{Event, Observer, RunEnd, StartMode, StopFlag, Trainer, TrainerError, replay};
use levade_tree::{
    AttemptId, AttemptSlot, Purpose, RunId, Segment, SegmentId, Trajectory, TreeBatch, VersionRun,
};
use serde_json::Value;

use crate::common::{Notes, metrics, parts, recipe, simulator};

pub async fn run(
    dir: &Path,
    policy: &Arc<Simulator>,
    start: StartMode,
    overrides: &[&str],
) -> Result<RunEnd, TrainerError> {
    let parts = parts(policy, Duration::ZERO);
    Trainer::new(recipe(dir, overrides), parts, start)
        .await?
        .run(&mut (), &StopFlag::default())
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_trains_evaluates_and_checkpoints() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let RunEnd::Finished(summary) = run(&dir, &policy, StartMode::Fresh, &[]).await.unwrap() else {
        panic!()
    };
    // 2 × ⌈10 / 4⌉ steps of SFT, 5 of GRPO.
    assert_eq!(summary.steps, 11);
    let labels: Vec<_> =
        summary.evals.iter().map(|e| (e.phase, e.step, e.label.as_str())).collect();
    assert_eq!(
        labels,
        [
            (0, 0, "before training"),
            (0, 3, "sft, step 3"),
            (0, 6, "after sft"),
            (1, 3, "grpo, step 3"),
            (1, 5, "after grpo"),
        ]
    );
    // Before training, the policy calls no tool. The evaluation shows an example completion.
    let completion = summary.evals[0].uncalled.as_ref().unwrap();
    assert_eq!(completion.attempt, "eval/0/0/0/0");
    assert!(
        completion.reason.starts_with("the completion does not contain <tool_call>")
            && !completion.completion.is_empty(),
        "{completion:?}"
    );
    assert!(
        summary.evals.iter().all(|eval| eval.uncalled.is_some() == (eval.overall.used_tool == 0.0))
    );
    let last = &summary.evals[4];
    assert_eq!((last.overall.tasks, last.slices.len()), (6, 2));
    assert!(last.slices[1].is_separate && last.slices[1].tasks == 3);
    // The gain of a phase is computed from the milestones, over the tasks that count.
    let [sft, grpo] = &summary.gains[..] else { panic!("{:?}", summary.gains) };
    assert_eq!(
        (sft.to.as_str(), grpo.from.as_str(), grpo.to.as_str()),
        ("after sft", "after sft", "after grpo")
    );
    let change = last.overall.success.estimate - summary.evals[2].overall.success.estimate;
    assert!((grpo.difference.estimate - change).abs() < 1e-9, "{grpo:?}");

    let lines = metrics(&dir);
    let steps: Vec<_> = lines.iter().filter(|l| l.get("eval").is_none()).collect();
    assert_eq!(steps.len(), 11);
    let get = |i: usize, name: &str| {
        steps[i][name].as_f64().unwrap_or_else(|| panic!("{name} in {}", steps[i]))
    };
    assert!(
        get(5, "train/nll") < 0.5 * get(0, "train/nll"),
        "{} {}",
        get(5, "train/nll"),
        get(0, "train/nll")
    );
    for i in 6..11 {
        // The training forward pass reproduces the sampled log-probabilities, bit for bit.
        assert_eq!(get(i, "training/logprob_mismatch"), 0.0);
        assert_eq!(get(i, "training/logprob_mismatch_max"), 0.0);
        assert_eq!(get(i, "response/aborted_ratio"), 0.0);
        assert!(get(i, "actor/grad_norm") > 0.0);
    }
    assert_eq!(get(6, "training/global_step"), 7.0);
    // After the first step of the phase, the penalty is no longer 0.
    assert!(get(10, "actor/kl_loss") > 0.0);

    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    assert_eq!(wait(store.summaries(Purpose::Demonstration)).unwrap().len(), 10);
    let trained = wait(store.summaries(Purpose::Train)).unwrap();
    assert_eq!(trained.len(), 5 * 3 * 4);
    assert_eq!(wait(store.summaries(Purpose::Eval)).unwrap().len(), 5 * 9);
    assert_eq!(wait(store.planned_steps()).unwrap().len(), 11);
    assert_eq!(wait(store.evals()).unwrap().len(), 5);
    // The diversity of tool calls, computed from the record.
    let attempts: Vec<Attempt> =
        trained.iter().map(|summary| wait(store.attempt(&summary.id)).unwrap().unwrap()).collect();
    let mut chats = Chats::default();
    chats.insert("default", "default", Arc::new(tiny_chat().unwrap()));
    for step in 0..5 {
        let fraction = |group: u32| {
            let members = attempts.iter().filter(|a| (a.slot.step, a.slot.group) == (step, group));
            let calls =
                members.map(|a| tool_calls(a, &chats).remove("default").unwrap_or_default());
            let mut calls: Vec<_> = calls.collect();
            assert_eq!(calls.len(), 4);
            calls.sort();
            calls.dedup();
            (calls.len() - 1) as f64 / 3.0
        };
        let wanted = (0..3).map(fraction).sum::<f64>() / 3.0;
        let found = get(6 + step as usize, "diversity/calls");
        assert!((found - wanted).abs() < 1e-12, "step {step}: {found} instead of {wanted}");
    }
    // Tokens carry the version of the weights that sampled them: the number of steps finished
    // before.
    for (summary, attempt) in trained.iter().zip(&attempts) {
        for segment in attempt.trajectory.segments() {
            assert!(segment.token_versions().all(|v| v == u64::from(6 + summary.slot.step)));
        }
    }
    let names: Vec<_> = std::fs::read_dir(dir.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    // The checkpoints at the ends of both phases, and the newest two of the other checkpoints.
    let mut names = names;
    names.sort();
    assert_eq!(
        names,
        ["best", "step-000003", "step-000006", "step-000008", "step-000010", "step-000011"]
    );
    assert_eq!(summary.checkpoint.unwrap(), crate::common::last_checkpoint(&dir));

    // Another start in the same directory is rejected. A resumed run finishes at once, with the
    // same summary.
    let taken = run(&dir, &policy, StartMode::Fresh, &[]).await.unwrap_err();
    assert!(matches!(taken, TrainerError::RunDirExists(_)) && taken.is_user_error(), "{taken}");
    let fresh = simulator(Duration::ZERO, 0.0);
    let RunEnd::Finished(again) = run(&dir, &fresh, StartMode::Resume, &[]).await.unwrap() else {
        panic!()
    };
    assert_eq!((again.evals, again.gains, again.steps), (summary.evals, summary.gains, 11));
    assert_eq!(fresh.weights(), policy.weights());
    assert_eq!(metrics(&dir), lines);
}

/// Evaluations have their own temperature and limits. They do not affect training.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evaluation_settings_do_not_affect_training() {
    let root = tempfile::tempdir().unwrap();
    let own = ["eval.temperature=0.7", "eval.samples=2", "eval.max_turns=1", "eval.max_tokens=9"];
    let policy = simulator(Duration::ZERO, 0.0);
    let plain = simulator(Duration::ZERO, 0.0);
    run(&root.path().join("own"), &policy, StartMode::Fresh, &own).await.unwrap();
    run(&root.path().join("plain"), &plain, StartMode::Fresh, &[]).await.unwrap();
    assert_eq!(policy.weights(), plain.weights());
    let store = wait(Sqlite::open_existing(&root.path().join("own/run.db"))).unwrap();
    let made = |purpose| {
        let keys: Vec<_> =
            wait(store.summaries(purpose)).unwrap().into_iter().map(|summary| summary.id).collect();
        keys.iter()
            .map(|key| wait(store.attempt(key)).unwrap().unwrap().trajectory)
            .collect::<Vec<_>>()
    };
    let evaluated = made(Purpose::Eval);
    assert_eq!(evaluated.len(), 5 * 9 * 2);
    for trajectory in evaluated {
        let sampled = trajectory.segments().iter().filter(|segment| !segment.logprobs.is_empty());
        let temperatures: Vec<f32> = sampled.map(|segment| segment.temperature).collect();
        assert_eq!(temperatures, [0.7]);
        assert!(trajectory.sampled_tokens() <= 9);
    }
    assert!(made(Purpose::Train).iter().any(|trajectory| trajectory.sampled_tokens() > 9));
}

/// The number of concurrent attempts does not change the weights. The micro-batch size changes only
/// rounding errors.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_depend_only_on_recipe_and_seed() {
    let root = tempfile::tempdir().unwrap();
    let mut weights = Vec::new();
    let runs: [&[&str]; 4] =
        [&[], &["engine.concurrency=1"], &["run.seed=4"], &["engine.micro_batch_tokens=100000"]];
    for (i, overrides) in runs.iter().enumerate() {
        let policy = simulator(Duration::ZERO, 0.0);
        run(&root.path().join(i.to_string()), &policy, StartMode::Fresh, overrides).await.unwrap();
        weights.push(policy.weights());
    }
    assert_eq!(weights[0], weights[1]);
    assert_ne!(weights[0], weights[2]);
    let largest =
        weights[0].iter().zip(&weights[3]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 1e-4, "{largest}");
}

/// A policy without context can still learn to end its turn, which is rewarded here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rl_increases_answered_ratio() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let config =
        SimulatorConfig { vocabulary: VOCABULARY, order: 0, rows: 1, ..SimulatorConfig::default() };
    let overrides = [
        "phase=[{kind='rl', steps=40, groups=4, group_size=8, learning_rate=0.2}]",
        "agent.max_tokens=30",
        "eval.tasks=0",
    ];
    run(&dir, &Arc::new(Simulator::new(config)), StartMode::Fresh, &overrides).await.unwrap();
    let finished: Vec<f64> = metrics(&dir)
        .iter()
        .filter_map(|line| line.get("response/answered_ratio")?.as_f64())
        .collect();
    let [first, last] = [&finished[..5], &finished[35..]]
        .map(|steps| steps.iter().sum::<f64>() / steps.len() as f64);
    assert!(first < 0.4 && last > 0.9, "{finished:?}");
}

/// Predicate that matches the wanted kind of event.
type Wanted = fn(&Event) -> bool;

/// An observer that requests a stop at the n-th event of a kind.
struct StopAt {
    stop: StopFlag,
    remaining: u32,
    what: Wanted,
}

impl Observer for StopAt {
    fn event(&mut self, event: &Event) {
        // Further events may follow.
        if self.remaining > 0 && (self.what)(event) {
            self.remaining -= 1;
            if self.remaining == 0 {
                self.stop.stop();
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_and_resumed_run_matches_uninterrupted() {
    stop_and_resume(&[]).await;
}

/// A curriculum whose choices depend on the results of earlier steps.
const CURRICULUM: [&str; 2] =
    ["phase.1.curriculum={band=[0.1, 0.9], retest=0.3}", "tasks.0.train=12"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_and_resumed_curriculum_matches_uninterrupted() {
    let known = stop_and_resume(&CURRICULUM).await;
    let last = known.iter().rev().find(|line| line.get("curriculum/unknown").is_some()).unwrap();
    assert!(last["curriculum/unknown"].as_f64().unwrap() < 12.0, "{last}");
}

/// Scorers that depend on the success that the curriculum has measured.
const SCORERS_BY_SUCCESS: &str = "reward={scorers=[\
     {name='low', kind='numeric', weight=0.5, when={until_success=0.5}}, \
     {name='high', kind='numeric', when={from_success=0.5}}]}";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_and_resumed_scorers_by_success_match_uninterrupted() {
    let known = stop_and_resume(&[CURRICULUM[0], CURRICULUM[1], SCORERS_BY_SUCCESS]).await;
    // A task without a measurement counts as 0.5.
    assert!(known.iter().any(|line| line.get("reward/high/mean").is_some()), "{known:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_read_earlier_answers_also_after_resume() {
    let overrides = ["phase.1.experience={attempts=2, max_characters=40}"];
    stop_and_resume(&overrides).await;
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    run(&dir, &policy, StartMode::Fresh, &overrides).await.unwrap();
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    for (sample, heading) in (0..4).zip([None, Some(1), Some(1), Some(2)]) {
        let slot = AttemptSlot { purpose: Purpose::Train, phase: 1, step: 0, group: 2, sample };
        let attempt = wait(store.last_try(&slot)).unwrap().unwrap();
        let experience = attempt.task["experience"].as_str();
        let expected = heading
            .map(|number| format!("Earlier attempts at this task:\n\nAttempt {number} (score "));
        assert_eq!(experience.is_some(), expected.is_some(), "{sample}");
        let starts =
            expected.is_none_or(|start| experience.unwrap_or_default().starts_with(&start));
        assert!(starts, "{sample}: {experience:?}");
    }
}

/// Stops and resumes a run many times, and compares it with a run that is not stopped. Returns the
/// metrics.
async fn stop_and_resume(overrides: &[&str]) -> Vec<Value> {
    let root = tempfile::tempdir().unwrap();
    let uninterrupted = root.path().join("whole");
    let policy = simulator(Duration::ZERO, 0.0);
    run(&uninterrupted, &policy, StartMode::Fresh, overrides).await.unwrap();

    let dir = root.path().join("stopped");
    let kinds: [(u32, Wanted); 6] = [
        (2, |e| matches!(e, Event::Attempt { purpose: Purpose::Eval, .. })),
        (3, |e| matches!(e, Event::MicroBatch { .. })),
        (4, |e| matches!(e, Event::Step { .. })),
        (1, |e| matches!(e, Event::Evaluated(result) if result.step == 6)),
        (7, |e| matches!(e, Event::Attempt { purpose: Purpose::Train, .. })),
        (1, |e| matches!(e, Event::Checkpoint(_))),
    ];
    let mut start = StartMode::Fresh;
    let mut stops = 0;
    for (left, what) in kinds {
        let fresh = simulator(Duration::from_micros(10), 0.0);
        let stop = StopFlag::default();
        let mut trainer =
            Trainer::new(recipe(&dir, overrides), parts(&fresh, Duration::ZERO), start)
                .await
                .unwrap();
        let mut observer = StopAt { stop: stop.clone(), remaining: left, what };
        match trainer.run(&mut observer, &stop).await.unwrap() {
            RunEnd::Stopped { checkpoint, done, steps } => {
                assert_eq!((checkpoint.is_some(), steps), (done > 0, 11));
                stops += 1;
            }
            RunEnd::Finished(_) => break,
        }
        start = StartMode::Resume;
    }
    assert!(stops >= 5, "{stops}");
    let fresh = simulator(Duration::ZERO, 0.0);
    let resumed = run(&dir, &fresh, StartMode::Resume, overrides).await.unwrap();
    let RunEnd::Finished(summary) = resumed else { panic!() };
    assert_eq!(summary.evals.len(), 5);
    assert_eq!(fresh.weights(), policy.weights());
    let lines = metrics(&dir);
    assert_eq!(lines, metrics(&uninterrupted));
    lines
}

/// Without its checkpoints, a run is repeated from the store alone, and nothing is sampled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resume_without_checkpoints_samples_nothing() {
    for overrides in [&[][..], &CURRICULUM[..]] {
        repeat_from_store(overrides).await;
    }
}

async fn repeat_from_store(overrides: &[&str]) {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    run(&dir, &policy, StartMode::Fresh, overrides).await.unwrap();
    let lines = metrics(&dir);
    std::fs::remove_dir_all(dir.join("checkpoints")).unwrap();
    let mute = simulator(Duration::ZERO, 1.0);
    run(&dir, &mute, StartMode::Resume, overrides).await.unwrap();
    assert_eq!(mute.weights(), policy.weights());
    assert_eq!(mute.device_stats().await.unwrap().unwrap().sampled, 0);
    assert_eq!(metrics(&dir), lines);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_attempts_are_excluded_or_get_reward() {
    let root = tempfile::tempdir().unwrap();
    for (name, overrides) in [("out", &[][..]), ("punished", &["reward.broken=-1.0"][..])] {
        let dir = root.path().join(name);
        run(&dir, &simulator(Duration::ZERO, 0.2), StartMode::Fresh, overrides).await.unwrap();
        let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
        let all = wait(store.summaries(Purpose::Train)).unwrap();
        let broken: Vec<_> = all.iter().filter(|s| s.status == Status::Failed).collect();
        assert!(
            broken.len() > 3 && broken.len() < all.len() / 2,
            "{} of {}",
            broken.len(),
            all.len()
        );
        for attempt in broken {
            assert_eq!(attempt.reward, (name == "punished").then_some(-1.0));
            let outcome = wait(store.attempt(&attempt.id)).unwrap().unwrap().outcome;
            assert!(outcome.error.as_ref().unwrap().contains("configured to fail"), "{outcome:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_of_failing_attempts_lists_failures_and_resumes() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("dead");
    let error =
        run(&dir, &simulator(Duration::ZERO, 1.0), StartMode::Fresh, &[]).await.unwrap_err();
    assert!(!error.is_user_error());
    assert!(
        error.to_string().contains("all 9 attempts failed; error of the first attempt: the simul"),
        "{error}"
    );
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let failures = wait(store.failures(Purpose::Eval)).unwrap();
    assert_eq!(failures.len(), 9);
    for failure in failures {
        assert_eq!(failure.status, Status::Abandoned);
        assert!(failure.error.unwrap().contains("configured to fail"));
    }
    let policy = simulator(Duration::ZERO, 0.0);
    run(&dir, &policy, StartMode::Resume, &[]).await.unwrap();
    // The attempts have the same random streams as in a run that never failed.
    let undisturbed = simulator(Duration::ZERO, 0.0);
    run(&root.path().join("undisturbed"), &undisturbed, StartMode::Fresh, &[]).await.unwrap();
    assert_eq!(policy.weights(), undisturbed.weights());
}

/// Stops the run at its first step, and collects the notes that follow.
struct StopAtFirstStep(StopFlag, Notes);

impl Observer for StopAtFirstStep {
    fn event(&mut self, event: &Event) {
        if matches!(event, Event::Step { .. }) {
            self.0.stop();
        }
        self.1.event(event);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checkpoint_of_stopped_run_is_announced_before_it_is_written() {
    let root = tempfile::tempdir().unwrap();
    for (every, announced) in [(1, false), (2, true)] {
        let dir = root.path().join(every.to_string());
        let checkpoint_every = format!("run.checkpoint_every={every}");
        let overrides = [
            "phase=[{kind='rl', steps=3, groups=2, group_size=2, learning_rate=0.05}]",
            "eval.tasks=0",
            checkpoint_every.as_str(),
        ];
        let policy = simulator(Duration::ZERO, 0.0);
        let recipe = recipe(&dir, &overrides);
        let parts = parts(&policy, Duration::ZERO);
        let mut trainer = Trainer::new(recipe, parts, StartMode::Fresh).await.unwrap();
        let stop = StopFlag::default();
        let mut observer = StopAtFirstStep(stop.clone(), Notes::default());
        let ended = trainer.run(&mut observer, &stop).await.unwrap();
        assert!(matches!(ended, RunEnd::Stopped { done: 1, checkpoint: Some(_), .. }), "{ended:?}");
        let notes = observer.1.0;
        let note = "the run has stopped; writing a checkpoint of step 1";
        assert_eq!(notes.iter().any(|found| found == note), announced, "{every}: {notes:?}");
    }
}

/// Sampled tokens that cannot be trained on are left out and counted. If no other token remains,
/// the run fails with an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn untrainable_tokens_are_masked_and_counted() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let overrides = [
        "phase=[{kind='rl', steps=3, groups=2, group_size=2, learning_rate=0.05}]",
        "agent.max_tokens=8",
        "eval.tasks=0",
    ];
    let policy = simulator(Duration::ZERO, 0.0);
    let stop = StopFlag::default();
    let mut trainer =
        Trainer::new(recipe(&dir, &overrides), parts(&policy, Duration::ZERO), StartMode::Fresh)
            .await
            .unwrap();
    let mut observer =
        StopAt { stop: stop.clone(), remaining: 1, what: |e| matches!(e, Event::Step { .. }) };
    assert!(matches!(trainer.run(&mut observer, &stop).await.unwrap(), RunEnd::Stopped { .. }));
    drop(trainer);

    // Attempts of the next two steps as if another program had made them. In step 1, the first 3 of
    // each completion's 8 tokens were sampled with a filter, and one completion was decoded
    // greedily. In step 2, all completions were decoded greedily.
    let store = Sqlite::resume(&dir.join("run.db"), &RunId(String::new())).await.unwrap();
    let made = store.summaries(Purpose::Train).await.unwrap();
    assert_eq!(made.len(), 4);
    for (step, summary) in (1..3).flat_map(|step| made.iter().map(move |summary| (step, summary))) {
        let attempt = store.attempt(&summary.id).await.unwrap().unwrap();
        let [prompt, completion] = attempt.trajectory.segments() else { panic!() };
        let group = summary.slot.group;
        let sample = summary.slot.sample;
        let part = |range: std::ops::Range<usize>, parent| Segment {
            tokens: completion.tokens[range.clone()].to_vec(),
            logprobs: completion.logprobs[range.clone()].to_vec(),
            versions: vec![VersionRun { version: 0, len: range.len() as u32 }],
            parent: Some(SegmentId(parent)),
            ..completion.clone()
        };
        let temperature =
            if step == 2 || (group, sample) == (1, 0) { 0.0 } else { completion.temperature };
        let mut trajectory = Trajectory::new();
        trajectory.push(prompt.clone()).unwrap();
        trajectory.push(Segment { filtered: true, temperature, ..part(0..3, 0) }).unwrap();
        trajectory.push(Segment { temperature, ..part(3..8, 1) }).unwrap();
        let slot = AttemptSlot { step, ..summary.slot };
        let id = AttemptId::new(store.run(), &slot, 0);
        let reward = Some(f64::from(sample));
        store
            .record_attempts(&[Attempt { id, slot, reward, trajectory, ..attempt }])
            .await
            .unwrap();
    }
    drop(store);
    let error = run(&dir, &policy, StartMode::Resume, &overrides).await.unwrap_err();
    let want = "step 2 of phase 0 has no token to train on: of the sampled tokens, 32 were \
                decoded greedily (segments: 8);";
    assert!(error.to_string().starts_with(want), "{error}");
    let lines = metrics(&dir);
    let get = |step: usize| {
        ["masked_greedy_tokens", "masked_filtered_tokens", "targets"]
            .map(|name| lines[step][format!("training/{name}")].as_f64().unwrap())
    };
    assert_eq!((get(0)[0], get(0)[1]), (0.0, 0.0));
    assert_eq!(get(1), [8.0, 9.0, 15.0]);
}

#[tokio::test]
async fn invalid_runs_are_rejected_before_start() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let rejected = async |overrides: &[&str], start| {
        let error = run(&dir, &policy, start, overrides).await.unwrap_err();
        assert!(error.is_user_error(), "{error}");
        error.to_string()
    };
    let nothing = rejected(&[], StartMode::Resume).await;
    assert!(nothing.contains("holds no run to resume"), "{nothing}");
    let few = rejected(&["phase.0.demonstrations=51"], StartMode::Fresh).await;
    assert!(
        few.contains("`phase.0.demonstrations` is 51, but the training tasks have only 50"),
        "{few}"
    );
    let long = "agent.system=".to_owned() + &"long ".repeat(400);
    let long = rejected(&[&long], StartMode::Fresh).await;
    assert!(
        long.contains("the context holds 2000") && long.contains("arithmetic-train-3-0"),
        "{long}"
    );
    let budget = rejected(&["agent.max_context_tokens=5"], StartMode::Fresh).await;
    assert!(budget.contains("more than `agent.max_context_tokens` = 5, and with"), "{budget}");
    assert!(!dir.exists(), "a run that cannot start leaves nothing behind");

    run(&dir, &policy, StartMode::Fresh, &["eval.tasks=0", "phase.1.steps=1"]).await.unwrap();
    let other = rejected(
        &["eval.tasks=0", "phase.1.steps=1", "phase.0.learning_rate=0.1"],
        StartMode::Resume,
    )
    .await;
    assert!(other.contains("`phase.0.learning_rate` is 0.1 now and was 3.0"), "{other}");
    let second_trainer = Trainer::new(
        recipe(&dir, &["eval.tasks=0", "phase.1.steps=1"]),
        parts(&policy, Duration::ZERO),
        StartMode::Resume,
    )
    .await
    .unwrap();
    let locked = rejected(&["eval.tasks=0", "phase.1.steps=1"], StartMode::Resume).await;
    assert!(locked.contains("another process is working"), "{locked}");
    drop(second_trainer);

    let mut bare = parts(&policy, Duration::ZERO);
    bare.policies[0].learner.as_mut().unwrap().reference = None;
    let error = Trainer::new(recipe(&root.path().join("x"), &[]), bare, StartMode::Fresh)
        .await
        .err()
        .unwrap();
    assert!(matches!(error, TrainerError::NoReference(1)), "{error}");
}

#[path = "saves.rs"]
mod saves;
