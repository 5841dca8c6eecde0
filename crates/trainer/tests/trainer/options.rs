//! Options of an RL phase other than its algorithm. Each has the documented effect. A run with it
//! that is stopped and resumed, or replayed from its store, ends with the same weights.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use levade_policy::{Learner, Predictions, Simulator};
use levade_store::testing::wait;
use levade_store::{Attempt, PlannedSequence, Sqlite, StepPlan, Store};
use levade_trainer::{Event, Observer, RunEnd, StartMode, StopFlag, Trainer, replay};
use levade_tree::{
    AttemptId, AttemptSlot, Finish, Purpose, SequenceInput, SequenceTarget, Term, TreeBatch,
};
use serde_json::Value;

use crate::common::{metrics, parts, recipe, simulator};

/// An observer that requests a stop at the n-th attempt, micro-batch or step.
struct StopAt(StopFlag, u32);

impl Observer for StopAt {
    fn event(&mut self, event: &Event) {
        if matches!(event, Event::Attempt { .. } | Event::MicroBatch { .. } | Event::Step { .. }) {
            self.1 = self.1.saturating_sub(1);
            if self.1 == 0 {
                self.0.stop();
            }
        }
    }
}

/// Runs to the end, or to the n-th event.
async fn run(
    dir: &Path,
    start: StartMode,
    overrides: &[&str],
    events: u32,
) -> (bool, Arc<Simulator>) {
    let policy = simulator(Duration::ZERO, 0.0);
    let recipe = recipe(dir, overrides);
    let mut trainer = Trainer::new(recipe, parts(&policy, Duration::ZERO), start).await.unwrap();
    let stop = StopFlag::default();
    let ended = trainer.run(&mut StopAt(stop.clone(), events), &stop).await.unwrap();
    (matches!(ended, RunEnd::Finished(_)), policy)
}

/// Runs without and with many stops, and replays from the store with checkpoints and without.
/// Asserts that all results are the same.
async fn same_however_often_it_stops(dir: &Path, overrides: &[&str]) {
    let (finished, policy) = run(dir, StartMode::Fresh, overrides, u32::MAX).await;
    assert!(finished);

    let stopped = dir.with_extension("stopped");
    let mut start = StartMode::Fresh;
    let mut stops = 0;
    let again = loop {
        let (finished, policy) = run(&stopped, start, overrides, 11).await;
        if finished {
            break policy;
        }
        (start, stops) = (StartMode::Resume, stops + 1);
        assert!(stops < 200, "it never ends");
    };
    assert!(stops > 3, "{stops}");
    assert_eq!(again.weights(), policy.weights());
    assert_eq!(metrics(&stopped), metrics(dir));

    let policies = vec![crate::common::trained("default", &simulator(Duration::ZERO, 0.0))];
    let mut compared = Vec::new();
    replay(&recipe(dir, overrides), dir, policies, &mut (), &mut |one| compared.push(one))
        .await
        .unwrap();
    assert!(compared.len() >= 2 && compared.iter().all(|c| c.differs.is_none()), "{compared:?}");

    std::fs::remove_dir_all(stopped.join("checkpoints")).unwrap();
    let (finished, again) = run(&stopped, StartMode::Resume, overrides, u32::MAX).await;
    assert!(finished);
    assert_eq!(again.weights(), policy.weights());
    assert_eq!(metrics(&stopped), metrics(dir));
}

/// Returns overrides for an RL phase without evaluations.
fn phase(keys: &str) -> [String; 2] {
    let phase = format!(
        "phase.1={{kind='rl', steps=4, groups=3, group_size=4, learning_rate=0.05, \
         temperature=0.9, {keys}}}"
    );
    ["eval.tasks=0".to_owned(), phase]
}

/// Returns the plan of a step with the attempts that it trains on.
fn planned(dir: &Path, phase: u32, step: u32) -> (StepPlan, HashMap<AttemptId, Attempt>) {
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let plan = wait(store.step_plan(phase, step)).unwrap().unwrap();
    let keys = plan.sequences();
    let attempts =
        keys.map(|path| (path.attempt, wait(store.attempt(&path.attempt)).unwrap().unwrap()));
    let attempts = attempts.collect();
    (plan, attempts)
}

fn paths_of(plan: &StepPlan) -> impl Iterator<Item = &PlannedSequence> {
    plan.sequences()
}

/// Returns a policy with the weights at the start of the phase.
async fn policy_at_phase_start(dir: &Path) -> Arc<Simulator> {
    let policy = simulator(Duration::ZERO, 0.0);
    policy.load(&dir.join("checkpoints/step-000006"), false).await.unwrap();
    policy
}

/// Returns all tokens of an attempt, which is one sequence, with its sampled tokens as targets.
fn sequence_input(attempt: &Attempt) -> SequenceInput {
    let mut input = SequenceInput::default();
    for segment in attempt.trajectory.segments() {
        let start = input.tokens.len() as u32;
        let sampled = 0..segment.logprobs.len() as u32;
        let target = |i| SequenceTarget {
            index: start + i,
            temperature: segment.temperature,
            term: Term::default(),
        };
        input.targets.extend(sampled.map(target));
        input.tokens.extend(segment.tokens.iter().copied());
    }
    input
}

async fn predictions(policy: &Simulator, attempt: &Attempt) -> Predictions {
    policy
        .predictions(Arc::new(TreeBatch::merge(&[sequence_input(attempt)]).unwrap()))
        .await
        .unwrap()
}

fn finish(attempt: &Attempt) -> Finish {
    attempt.outcome.finish
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bootstrap_adds_critic_value_to_truncated_attempts() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    // Without an SFT phase, some attempts end their turn by chance before they are truncated.
    let phase = "phase=[{kind='rl', algorithm='ppo', overlong='bootstrap', critic={learning_rate=0.1}, steps=4, groups=3, \
                 group_size=4, learning_rate=0.05}]";
    let overrides = ["eval.tasks=0", phase];
    same_however_often_it_stops(&dir, &overrides).await;

    let (plan, attempts) = planned(&dir, 0, 0);
    let critic = simulator(Duration::ZERO, 0.0);
    let mut num_truncated = 0;
    let mut ended = 0;
    for path in paths_of(&plan) {
        let attempt = &attempts[&path.attempt];
        let input = sequence_input(attempt);
        let tokens = input.targets.len();
        let last = path.returns.as_ref().unwrap().iter().nth(tokens - 1).unwrap();
        let mut beyond = SequenceInput { targets: Vec::new(), ..input };
        beyond.tokens.extend([0]);
        let index = beyond.tokens.len() as u32 - 1;
        beyond.targets.push(SequenceTarget { index, temperature: 1.0, term: Term::default() });
        let values = critic.values(Arc::new(TreeBatch::merge(&[beyond]).unwrap())).await.unwrap();
        // The last turn's own reward is also credited to its last token.
        let mut want = attempt.reward.unwrap();
        if finish(attempt) != Finish::Answered {
            want += f64::from(values[0]);
            num_truncated += 1;
        } else {
            ended += 1;
        }
        let earlier: f64 = attempt.step_rewards.iter().map(|reward| reward.reward).sum();
        if attempt.step_rewards.is_empty() {
            assert!((f64::from(last) - want).abs() < 1e-6, "{:?}: {last} {want}", finish(attempt));
        } else {
            assert!(f64::from(last) >= want - 1e-6 && f64::from(last) <= want - earlier + 1e-6);
        }
    }
    assert!(num_truncated > 0 && ended > 0, "{num_truncated} truncated, {ended} ended");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remax_baseline_is_greedy_attempt_reward() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let [no_eval, change] = phase("algorithm='remax', oversample=1, mini_batches=2");
    let plain = change.replace("oversample=1, ", "");
    same_however_often_it_stops(&dir, &[&no_eval, &plain]).await;

    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let baselines = wait(store.summaries(Purpose::Baseline)).unwrap();
    assert_eq!(baselines.len(), 4 * 3);
    let mut compared = 0;
    for step in 0..4 {
        let (plan, attempts) = planned(&dir, 1, step);
        for path in paths_of(&plan) {
            let attempt = &attempts[&path.attempt];
            assert_eq!(attempt.slot.purpose, Purpose::Train);
            let greedy = AttemptSlot { purpose: Purpose::Baseline, sample: 0, ..attempt.slot };
            let baseline = wait(store.last_try(&greedy)).unwrap().unwrap();
            assert_eq!(baseline.task, attempt.task);
            let sampled: Vec<f32> = baseline
                .trajectory
                .segments()
                .iter()
                .filter(|segment| !segment.logprobs.is_empty())
                .map(|segment| segment.temperature)
                .collect();
            assert!(!sampled.is_empty() && sampled.iter().all(|temperature| *temperature == 0.0));
            // The return of the first token is the complete reward.
            let want = attempt.reward.unwrap() - baseline.reward.unwrap();
            let first = f64::from(path.advantage.iter().next().unwrap());
            assert!((first - want).abs() < 1e-6, "{first} {want}");
            compared += 1;
        }
    }
    assert!(compared > 6, "{compared}");
    let steps: Vec<Value> =
        metrics(&dir).into_iter().filter(|line| line["kind"] == "remax").collect();
    assert_eq!(steps.len(), 4);
    for step in steps {
        assert_eq!(
            (&step["training/baselines"], &step["training/baselines_missing"]),
            (&3.0.into(), &0.0.into())
        );
        assert!(step["training/baseline_tokens"].as_f64().unwrap() > 0.0, "{step}");
        assert_eq!(step["training/logprob_mismatch"], 0.0);
    }

    // With oversampling a group still has the requested size, even if its greedy attempt ends late.
    let spare = root.path().join("spare");
    run(&spare, StartMode::Fresh, &[&no_eval, &change], u32::MAX).await;
    let (plan, attempts) = planned(&spare, 1, 0);
    let mut members: HashMap<u32, Vec<u32>> = HashMap::new();
    for path in paths_of(&plan) {
        let AttemptSlot { group, sample, .. } = attempts[&path.attempt].slot;
        members.entry(group).or_default().push(sample);
    }
    assert!(members.values().all(|samples| samples.len() <= 4), "{members:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn optimal_token_baseline_matches_definition() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let [no_eval, change] = phase("advantage={kind='optimal_token', bare_tail=false}");
    let overrides =
        [no_eval.as_str(), &change, "reward.malformed_call=0.0", "reward.failed_call=0.0"];
    same_however_often_it_stops(&dir, &overrides).await;

    let (plan, attempts) = planned(&dir, 1, 0);
    let policy = policy_at_phase_start(&dir).await;
    let mut compared = 0;
    for group in 0..3 {
        // Every token's return is the reward, because nothing is earned before the end.
        let mut energies = Vec::new();
        for attempt in attempts.values().filter(|attempt| attempt.slot.group == group) {
            let found = predictions(&policy, attempt).await;
            let mut sum = 0.0;
            let of_tokens =
                found.logprobs.iter().zip(&found.concentrations).map(|(logprob, squares)| {
                    sum += 1.0 - 2.0 * f64::from(*logprob).exp() + f64::from(*squares);
                    sum
                });
            energies.push((attempt.id, attempt.reward.unwrap(), of_tokens.collect::<Vec<f64>>()));
        }
        // A zero-variance group is not in the plan.
        assert!([0, 4].contains(&energies.len()), "{group}: {}", energies.len());
        for path in paths_of(&plan).filter(|path| attempts[&path.attempt].slot.group == group) {
            let (_, reward, mine) = energies.iter().find(|(key, ..)| *key == path.attempt).unwrap();
            for (t, advantage) in path.advantage.iter().take(mine.len()).enumerate() {
                let present = energies
                    .iter()
                    .filter_map(|(_, reward, energy)| Some((reward, energy.get(t)?)));
                let (top, bottom) =
                    present.fold((0.0, 1e-8), |(top, bottom), (g, w)| (top + g * w, bottom + w));
                let want = reward - top / bottom;
                assert!((f64::from(advantage) - want).abs() < 1e-5, "{t}: {advantage} {want}");
                compared += 1;
            }
        }
    }
    assert!(compared > 100, "{compared}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn low_entropy_tokens_lose_advantages() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let penalty = "kl={estimator='k3', coefficient=0.01, importance_weighted=true}";
    let [no_eval, change] = phase(&format!("high_entropy_fraction=0.2, epochs=2, {penalty}"));
    let overrides = [no_eval.as_str(), &change];
    same_however_often_it_stops(&dir, &overrides).await;

    let (plan, attempts) = planned(&dir, 1, 0);
    let policy = policy_at_phase_start(&dir).await;
    // With a penalty, all attempts are in the plan, so all tokens count in the fraction.
    let mut entropies = Vec::new();
    for attempt in attempts.values() {
        entropies.extend(predictions(&policy, attempt).await.entropies);
    }
    let mut rising = entropies.clone();
    rising.sort_by(f32::total_cmp);
    let wanted = (entropies.len() as f64 * 0.2).round() as usize;
    let threshold = rising[rising.len() - wanted];
    let found = plan.policies[0].high_entropy.as_ref().unwrap();
    assert_eq!((found.tokens, found.thresholds.len()), (entropies.len() as u64, 1));
    assert_eq!(found.thresholds[0] as f32, threshold);
    let mut kept = 0;
    let mut taken = 0;
    for path in &plan.policies[0].updates[0].sequences {
        let of_path = predictions(&policy, &attempts[&path.attempt]).await.entropies;
        let all: Vec<f32> = path.advantage.iter().take(of_path.len()).collect();
        let full_advantage = all.iter().copied().find(|advantage| *advantage != 0.0);
        for (entropy, advantage) in of_path.iter().zip(&all) {
            if *entropy >= threshold {
                assert_eq!(Some(*advantage), full_advantage.or(Some(0.0)));
                kept += usize::from(*advantage != 0.0);
            } else {
                assert_eq!(*advantage, 0.0);
                taken += 1;
            }
        }
    }
    assert!(kept > 10 && taken > 3 * kept, "{kept} kept, {taken} taken");
    let lines = metrics(&dir);
    let steps: Vec<&Value> = lines.iter().filter(|line| line["kind"] == "grpo").collect();
    for step in &steps {
        let fraction = step["actor/high_entropy_fraction"].as_f64().unwrap();
        // The fraction corresponds to an integer number of tokens.
        assert!((0.199..0.25).contains(&fraction), "{step}");
    }
    assert!(steps[3]["actor/kl_loss"].as_f64().unwrap() > 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reference_is_updated_at_interval() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let [no_eval, change] = phase("kl={estimator='k3', coefficient=0.5, reference_every=3}");
    // In eight steps, the reference is updated before the fourth and the seventh. Checkpoints are
    // written between the updates.
    let change = change.replace("steps=4", "steps=8");
    let overrides = [no_eval.as_str(), &change, "run.keep=9"];
    same_however_often_it_stops(&dir, &overrides).await;

    let lines = metrics(&dir);
    let steps: Vec<&Value> = lines.iter().filter(|line| line["kind"] == "grpo").collect();
    let ages: Vec<f64> =
        steps.iter().map(|step| step["actor/reference_age"].as_f64().unwrap()).collect();
    assert_eq!(ages, [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0, 1.0]);
    // Right after an update, the policy equals the reference, and the estimate is exactly 0.
    for (step, age) in steps.iter().zip(&ages) {
        assert_eq!(step["actor/kl_loss"].as_f64().unwrap() == 0.0, *age == 0.0, "{step}");
    }
    let weights =
        |of: &str| std::fs::read(dir.join("checkpoints").join(of).join("simulator.weights")).ok();
    // Six SFT steps came before. After eight steps in total, the reference has the weights of the
    // phase's start. After ten steps, it has the weights of step nine.
    assert_eq!(weights("step-000008/reference"), None);
    let reference_weights = weights("step-000010/reference").unwrap();
    assert_ne!(reference_weights, weights("step-000008").unwrap());
    assert_ne!(reference_weights, weights("step-000010").unwrap());
    assert_eq!(weights("step-000012/reference").as_ref(), None, "it moves to these very weights");
    assert_eq!(weights("step-000014/reference"), weights("step-000012"));
    let fixed = change.replace(", reference_every=3", "");
    let (_, other) =
        run(&root.path().join("fixed"), StartMode::Fresh, &[&no_eval, &fixed], u32::MAX).await;
    let (_, moved) = run(&dir, StartMode::Resume, &overrides, u32::MAX).await;
    assert_ne!(other.weights(), moved.weights());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eval_select_reserves_selection_tasks() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let overrides = ["eval.tasks=8", "eval.select=0.25"];
    let parts = parts(&policy, Duration::ZERO);
    let mut trainer =
        Trainer::new(recipe(&dir, &overrides), parts, StartMode::Fresh).await.unwrap();
    let RunEnd::Finished(summary) = trainer.run(&mut (), &StopFlag::default()).await.unwrap()
    else {
        panic!()
    };
    for eval in &summary.evals {
        let slices: Vec<_> = eval
            .slices
            .iter()
            .map(|s| (s.name.as_str(), s.is_separate, s.selects, s.tasks))
            .collect();
        assert_eq!(
            slices,
            [
                ("arithmetic-choosing", true, true, 2),
                ("arithmetic", false, false, 6),
                ("arithmetic-unseen-wordings", true, false, 3),
            ]
        );
        assert_eq!(eval.overall.tasks, 6);
    }
    // No task occurs twice, and without selection tasks the set of tasks is the same.
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let at = |group| AttemptSlot { purpose: Purpose::Eval, phase: 0, step: 0, group, sample: 0 };
    let eval_tasks: Vec<Value> =
        (0..8).map(|group| wait(store.last_try(&at(group))).unwrap().unwrap().task).collect();
    let unsplit_dir = root.path().join("whole");
    run(&unsplit_dir, StartMode::Fresh, &["eval.tasks=8", "phase=[]"], u32::MAX).await;
    let store = wait(Sqlite::open_existing(&unsplit_dir.join("run.db"))).unwrap();
    let all: Vec<Value> =
        (0..8).map(|group| wait(store.last_try(&at(group))).unwrap().unwrap().task).collect();
    assert_eq!(eval_tasks, all);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evaluations_can_be_left_out() {
    let root = tempfile::tempdir().unwrap();
    let evaluated = async |name: &str, overrides: &[&str]| {
        let dir = root.path().join(name);
        let parts = parts(&simulator(Duration::ZERO, 0.0), Duration::ZERO);
        let recipe = recipe(&dir, overrides);
        let mut trainer = Trainer::new(recipe, parts, StartMode::Fresh).await.unwrap();
        let ended = trainer.run(&mut (), &StopFlag::default()).await.unwrap();
        let RunEnd::Finished(summary) = ended else { panic!() };
        summary.evals.iter().map(|eval| (eval.phase, eval.step)).collect::<Vec<_>>()
    };
    let all = evaluated("all", &[]).await;
    assert_eq!(all, [(0, 0), (0, 3), (0, 6), (1, 3), (1, 5)]);
    let ends = evaluated("ends", &["eval.before=false", "eval.every=0"]).await;
    assert_eq!(ends, [(0, 6), (1, 5)]);
    assert!(evaluated("none", &["eval.tasks=0", "eval.unseen_wordings=0"]).await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensorboard_files_contain_metrics_if_set() {
    let root = tempfile::tempdir().unwrap();
    for is_set in [true, false] {
        let dir = root.path().join(is_set.to_string());
        let tensorboard = format!("metrics.tensorboard={is_set}");
        let overrides = [&tensorboard[..], "phase.1.steps=1"];
        let (finished, _) = run(&dir, StartMode::Fresh, &overrides, u32::MAX).await;
        assert!(finished);
        let files = std::fs::read_dir(dir.join("tensorboard")).into_iter().flatten().flatten();
        let written: Vec<u8> = files.flat_map(|file| std::fs::read(file.path()).unwrap()).collect();
        let name = b"critic/advantages/mean";
        let found = written.windows(name.len()).any(|window| window == name);
        assert_eq!(found, is_set);
    }
}
