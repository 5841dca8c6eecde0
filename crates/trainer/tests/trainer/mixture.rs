//! Agents that are played by several policies.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use levade_store::testing::wait;
use levade_store::{Sqlite, Store};
use levade_text::testing::tiny_chat;
use levade_trainer::{ChatBackend, Policy, RunEnd, StartMode, StopFlag, Trainer};
use levade_tree::{Kind, Purpose};

use crate::common::{parts, recipe, simulator, trained};

const MIXED: [&str; 6] = [
    "policy.default={kind='trained'}",
    "policy.opponent={kind='frozen'}",
    "agent.policy=[{name='default', weight=3}, {name='opponent', weight=1}]",
    "phase.0.demonstrations=4",
    "phase.0.epochs=1",
    "phase.1.steps=2",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opponent_attempts_are_recorded_but_not_trained() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let opponent = simulator(Duration::ZERO, 0.0);
    let before = opponent.weights();
    let mut parts = parts(&policy, Duration::ZERO);
    parts.policies.push(Policy { learner: None, ..trained("opponent", &opponent) });
    let pick = Arc::new(|_: u64, stream: u64, _: &str| usize::from(stream.is_multiple_of(3)));
    parts.agents[0].backends.push(ChatBackend::Policy(Arc::new(tiny_chat().unwrap())));
    parts.agents[0].pick = Some(pick);
    let mut trainer = Trainer::new(recipe(&dir, &MIXED), parts, StartMode::Fresh).await.unwrap();
    let ended = trainer.run(&mut (), &StopFlag::default()).await.unwrap();
    assert!(matches!(ended, RunEnd::Finished(_)), "{ended:?}");
    drop(trainer);

    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let mut played: BTreeMap<String, usize> = BTreeMap::new();
    for summary in wait(store.summaries(Purpose::Train)).unwrap() {
        let attempt = wait(store.attempt(&summary.id)).unwrap().unwrap();
        let segments = attempt.trajectory.segments();
        let policy = segments[0].policy.clone();
        assert_eq!(attempt.outcome.cast.get("default"), Some(&policy));
        assert!(
            segments.iter().all(|segment| segment.policy == policy && segment.agent == "default")
        );
        *played.entry(policy).or_default() +=
            segments.iter().filter(|s| s.kind == Kind::Sampled).count();
    }
    assert!(played["default"] > 0 && played["opponent"] > 0, "{played:?}");
    for (phase, step) in wait(store.planned_steps()).unwrap() {
        let plan = wait(store.step_plan(phase, step)).unwrap().unwrap();
        assert!(plan.policies.iter().all(|plan| plan.policy == "default"));
    }
    assert_eq!(opponent.weights(), before);
}

/// Rewards depend on the playing policy. An opponent that always wins must not affect the baseline
/// of the policy's own attempts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn group_baseline_excludes_opponent_attempts() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let opponent = simulator(Duration::ZERO, 0.0);
    let mut parts = parts(&policy, Duration::ZERO);
    parts.policies.push(Policy { learner: None, ..trained("opponent", &opponent) });
    // The opponent plays half of the attempts.
    let pick = Arc::new(|_: u64, stream: u64, _: &str| usize::from(stream.is_multiple_of(2)));
    parts.agents[0].backends.push(ChatBackend::Policy(Arc::new(tiny_chat().unwrap())));
    parts.agents[0].pick = Some(pick);
    let plain = [
        "phase.1.kl={estimator=\"k3\", coefficient=1e-9}",
        "phase.1.advantage={kind=\"group\"}",
        "phase.1.group_size=8",
    ];
    let overrides: Vec<&str> = MIXED.into_iter().chain(plain).collect();
    let mut trainer =
        Trainer::new(recipe(&dir, &overrides), parts, StartMode::Fresh).await.unwrap();
    let ended = trainer.run(&mut (), &StopFlag::default()).await.unwrap();
    assert!(matches!(ended, RunEnd::Finished(_)), "{ended:?}");
    drop(trainer);

    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let mut checked = 0;
    for (phase, step) in
        wait(store.planned_steps()).unwrap().into_iter().filter(|(phase, _)| *phase == 1)
    {
        let plan = wait(store.step_plan(phase, step)).unwrap().unwrap();
        let mut groups: BTreeMap<u32, Vec<(f64, f64)>> = BTreeMap::new();
        for path in plan.policies[0].sequences() {
            let attempt = wait(store.attempt(&path.attempt)).unwrap().unwrap();
            let advantage = path.advantage.iter().next().unwrap();
            let of_group = groups.entry(attempt.slot.group).or_default();
            of_group.push((attempt.reward.unwrap(), advantage.into()));
        }
        for group in groups.into_values().filter(|group| group.len() > 1) {
            // Every attempt of the policy is in the plan, because the penalty gives all of them a
            // gradient.
            let mean = group.iter().map(|(reward, _)| reward).sum::<f64>() / group.len() as f64;
            for (reward, advantage) in &group {
                assert!((advantage - (reward - mean)).abs() < 1e-5, "{group:?}");
            }
            checked += usize::from(group.iter().any(|(_, advantage)| *advantage != 0.0));
        }
    }
    assert!(checked > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evaluation_uses_only_trained_policies() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let opponent = simulator(Duration::ZERO, 0.0);
    let mut parts = parts(&policy, Duration::ZERO);
    parts.policies.push(Policy { learner: None, ..trained("opponent", &opponent) });
    let pick = Arc::new(|_: u64, stream: u64, _: &str| usize::from(stream.is_multiple_of(2)));
    parts.agents[0].backends.push(ChatBackend::Policy(Arc::new(tiny_chat().unwrap())));
    parts.agents[0].pick = Some(pick);
    let mut trainer = Trainer::new(recipe(&dir, &MIXED), parts, StartMode::Fresh).await.unwrap();
    trainer.run(&mut (), &StopFlag::default()).await.unwrap();
    drop(trainer);

    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let evaluated = wait(store.summaries(Purpose::Eval)).unwrap();
    assert!(!evaluated.is_empty());
    for summary in evaluated {
        let attempt = wait(store.attempt(&summary.id)).unwrap().unwrap();
        assert_eq!(attempt.outcome.cast["default"], "default");
        assert!(attempt.trajectory.segments().iter().all(|segment| segment.policy == "default"));
    }
}
