//! Tests of step plans.

use super::*;

/// Changes the plan of the second policy.
fn with_changed_policy(mut plan: StepPlan, change: impl FnOnce(&mut PolicyPlan)) -> StepPlan {
    change(&mut plan.policies[1]);
    plan
}

pub async fn record_step_is_idempotent_and_rejects_changes(store: TestStore) {
    let run = store.run().clone();
    assert_eq!(store.step_plan(1, 2).await.unwrap(), None);
    let kl = AppliedKlPenalty { coefficient: 0.1, found: 0.25, rollouts: 3 };
    let high_entropy = HighEntropy { tokens: 9, kept: 2, thresholds: vec![0.1, 0.7] };
    let first = with_changed_policy(plan(&run, &[(0.5, 0.25), (-1.0, 2.0)]), |of| {
        (of.kl, of.high_entropy) = (Some(kl), Some(high_entropy.clone()));
    });
    assert_eq!(store.record_step(&first).await.unwrap(), WriteOutcome::Written);
    assert_eq!(store.record_step(&first).await.unwrap(), WriteOutcome::AlreadyRecorded);
    let other_attempts = [
        with_changed_policy(first.clone(), |of| of.kl = None),
        with_changed_policy(first.clone(), |of| of.policy = "c".into()),
        with_changed_policy(first.clone(), |of| of.version = 4),
        with_changed_policy(first.clone(), |of| of.updates.truncate(1)),
        with_changed_policy(first.clone(), |of| {
            of.updates[1].micro_batch_plan = MicroBatchPlan::from_sizes([1, 1])
        }),
        with_changed_policy(first.clone(), |of| of.updates[1].critic_plan = None),
        StepPlan { group_positions: vec![7, 8], ..first.clone() },
        plan(&run, &[(0.5, 0.25)]),
        plan(&run, &[(0.5, 0.25), (-1.0, 2.5)]),
    ];
    for other in &other_attempts {
        let text = assert_rejected(store.record_step(other), Code::Conflict).await;
        assert!(text.contains("plan of phase 1/step 2 is already recorded"), "{text}");
    }
    let later = StepPlan { phase: 2, step: 0, ..first.clone() };
    let earlier = StepPlan { step: 1, policies: Vec::new(), ..first.clone() };
    for plan in [&later, &earlier] {
        store.record_step(plan).await.unwrap();
    }
    for plan in [first, later, earlier] {
        assert_eq!(store.step_plan(plan.phase, plan.step).await.unwrap(), Some(plan));
    }
    assert_eq!(store.planned_steps().await.unwrap(), [(1, 1), (1, 2), (2, 0)]);
    let endless = [
        plan(&run, &[(f32::NAN, 1.0)]),
        plan(&run, &[(1.0, f32::INFINITY)]),
        plan(&run, &[(1.0, 1.0), (f32::NEG_INFINITY, 1.0)]),
        with_changed_policy(plan(&run, &[]), |of| {
            of.kl = Some(AppliedKlPenalty { found: f64::NAN, ..kl })
        }),
        with_changed_policy(plan(&run, &[(0.5, 0.25), (1.0, 2.0)]), |of| {
            of.updates[1].micro_batch_plan = MicroBatchPlan::from_sizes([1])
        }),
    ];
    for bad in endless {
        assert_rejected(store.record_step(&StepPlan { step: 9, ..bad }), Code::Invalid).await;
    }
    assert_eq!(store.step_plan(1, 9).await.unwrap(), None);
}

/// Returns the bits of the first numbers of each sequence.
fn number_bits(plan: &StepPlan) -> Vec<u32> {
    let lists = plan
        .sequences()
        .flat_map(|p| [Some(&p.advantage), Some(&p.weight), p.returns.as_ref()])
        .flatten();
    lists.flat_map(|numbers| numbers.iter().take(3)).map(f32::to_bits).collect()
}

pub async fn plan_numbers_round_trip_exactly(store: TestStore) {
    let run = store.run().clone();
    let mut numbers = vec![(-0.0, f32::MIN_POSITIVE), (f32::MAX, 1e-45), (0.0, -0.0)];
    numbers.extend((0..40u32).filter_map(|i| {
        let sample = |n| f32::from_bits((uniform(u64::from(i), 3, n) * f64::from(u32::MAX)) as u32);
        Some((sample(0), sample(1))).filter(|(a, b)| a.is_finite() && b.is_finite())
    }));
    let written = plan(&run, &numbers);
    store.record_step(&written).await.unwrap();
    let read = store.step_plan(1, 2).await.unwrap().unwrap();
    assert_eq!(number_bits(&read), number_bits(&written));
    assert_eq!(read, written);
    // Plans that differ only in the sign of a zero are different.
    numbers[0].0 = 0.0;
    assert_rejected(store.record_step(&plan(&run, &numbers)), Code::Conflict).await;
}
