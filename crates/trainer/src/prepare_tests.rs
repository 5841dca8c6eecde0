//! Tests the prepared inputs of updates, with a learner whose log-probabilities are known.

use std::path::Path;
use std::sync::{Arc, Mutex};

use levade_policy::{
    Content, ForwardBackward, Manifest, MicroBatchPlan, OptimParams, OptimReport, PolicyError,
    WeightsAt, WeightsRef,
};
use levade_recipe::Phase;
use levade_rl::Loss;
use levade_store::{PerToken, PlannedSequence, PolicyPlan, StepPlan, Update};
use levade_tree::{
    AttemptId, Kind, Segment, SegmentId, SequenceTarget, Trajectory, TreeBatch, VersionRun,
};

use super::*;
use crate::batch::Targets;
use crate::learn::{MicroBatchProgress, UpdateSettings, run_plan};
use crate::policies::PhaseModels;

/// A learner whose log-probability of every token is −id / 10. It records queries and training
/// batches.
#[derive(Default)]
struct FixedLearner {
    queries: Mutex<u32>,
    trained_batches: Mutex<Vec<Arc<TreeBatch>>>,
    /// Losses of the batches.
    losses: Mutex<Vec<Loss>>,
    /// Learning rates and maximum gradient norms of the optimizer steps.
    steps: Mutex<Vec<(f32, f32)>>,
}

fn fixed_logprob(token: u32) -> f32 {
    -(token as f32) / 10.0
}

#[async_trait::async_trait]
impl Learner for FixedLearner {
    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        *self.queries.lock().unwrap() += 1;
        Ok(batch
            .targets
            .iter()
            .map(|target| fixed_logprob(batch.tokens[target.token as usize]))
            .collect())
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        loss.check(&batch).map_err(|e| PolicyError::Invalid(e.to_string()))?;
        self.trained_batches.lock().unwrap().push(batch);
        self.losses.lock().unwrap().push(loss);
        Ok(ForwardBackward::default())
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        self.steps.lock().unwrap().push((params.learning_rate, params.max_grad_norm));
        Ok(OptimReport { grad_norm: 1.0, applied: true })
    }

    async fn save(&self, dir: &Path, _: bool) -> Result<Manifest, PolicyError> {
        Manifest::from_files(dir, Content::Full, &[])
    }

    async fn load(&self, _: &Path, _: bool) -> Result<(), PolicyError> {
        Ok(())
    }

    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        Ok(WeightsRef { version, at: WeightsAt::Memory })
    }
}

fn keys(text: &str) -> RlKeys {
    toml::from_str(&format!("steps = 1\ngroups = 1\ngroup_size = 2\nlearning_rate = 1.0\n{text}"))
        .unwrap()
}

fn id(sample: u8) -> AttemptId {
    AttemptId::from_bytes([sample; 16])
}

/// Returns a sequence whose tokens are (id, log-probability at sampling, age). All tokens except
/// the first are trained, each with a weight of 0.5 and an advantage of 1.
fn make_input(sample: u32, tokens: &[(u32, f32, u32)]) -> (SequenceKey, SequenceInput) {
    let target = |(i, (_, behavior, age)): (usize, &(u32, f32, u32))| SequenceTarget {
        index: i as u32 + 1,
        temperature: 1.0,
        term: Term {
            weight: 0.5,
            advantage: 1.0,
            behavior: Some(*behavior),
            age: *age,
            ..Term::default()
        },
    };
    let input = SequenceInput {
        tokens: std::iter::once(99).chain(tokens.iter().map(|(id, ..)| *id)).collect(),
        targets: tokens.iter().enumerate().map(target).collect(),
    };
    ((id(sample as u8), SegmentId(1)), input)
}

fn terms(batches: &[Inputs]) -> Vec<Term> {
    batches
        .iter()
        .flatten()
        .flat_map(|(_, input)| input.targets.iter().map(|target| target.term))
        .collect()
}

/// Returns the terms of the first update of a step, with one micro-batch, and the number of queries
/// to the learner.
async fn prepare(keys: &RlKeys, exact: bool, batch: Inputs) -> (Vec<Term>, u32) {
    let learner = FixedLearner::default();
    let mut preparer = UpdatePreparer::new(keys, &learner, (1, 2), exact);
    let mut batches = vec![batch];
    preparer.compute_proximal(&batches).await.unwrap();
    preparer.prepare_update(&mut batches, true, 0).await.unwrap();
    let num_queries = *learner.queries.lock().unwrap();
    (terms(&batches), num_queries)
}

/// Returns the weight of the policy's part of a term's loss.
fn weight(term: &Term) -> f64 {
    f64::from(term.weight) * term.correction.map_or(1.0, f64::from)
}

#[track_caller]
fn close(found: f64, want: f64) {
    assert!((found - want).abs() < 1e-5 * want.abs().max(1.0), "{found}, expected {want}");
}

/// Log-ratios of the proximal to the behavior policy are 0.5, −1 and 3. The last weight is
/// truncated.
const STALE: [(u32, f32, u32); 3] = [(10, -1.5, 1), (20, -1.0, 2), (5, -3.5, 1)];

#[tokio::test]
async fn correction_weights_are_proximal_to_behavior_ratios() {
    let (found, num_queries) =
        prepare(&keys("proximal = 'recompute'"), true, vec![make_input(0, &STALE)]).await;
    assert_eq!(num_queries, 1);
    for ((term, (id, ..)), ratio) in
        found.iter().zip(STALE).zip([0.5f64.exp(), (-1.0f64).exp(), 5.0])
    {
        assert_eq!(term.proximal, Some(fixed_logprob(id)));
        assert_eq!(term.weight, 0.5);
        close(weight(term), 0.5 * ratio);
    }
    let bounded = keys(
        "proximal = 'recompute'\ncorrection = { bound = { mask = { low = 0.5, high = 2.0 } } }",
    );
    let (found, _) = prepare(&bounded, true, vec![make_input(0, &STALE)]).await;
    let weights: Vec<f64> = found.iter().map(weight).collect();
    close(weights[0], 0.5 * 0.5f64.exp());
    assert_eq!(weights[1..], [0.0, 0.0]);
    let clamped = keys(
        "proximal = 'recompute'\ncorrection = { bound = { clamp = { low = 1.0, high = 1.0 } } }",
    );
    let (found, _) = prepare(&clamped, true, vec![make_input(0, &STALE)]).await;
    assert!(found.iter().all(|term| weight(term) == 0.5 && term.proximal.is_some()));
    // Ratios to the policy that sampled a token need no weight.
    let (found, num_queries) = prepare(&keys(""), true, vec![make_input(0, &STALE)]).await;
    assert!(
        num_queries == 0 && found.iter().all(|term| weight(term) == 0.5 && term.proximal.is_none())
    );
}

/// A correction over sequences uses only the trained tokens, and so does the mismatch.
#[tokio::test]
async fn corrections_and_rejections_use_only_trained_tokens() {
    let text = "proximal = 'recompute'\n\
                correction = { level = 'sequence', bound = { clamp = { high = 9.0 } } }\n\
                rejection = [{ statistic = 'ratio', over = 'sequence_sum', high = 9.0 }]";
    let keys = keys(text);
    let learner = FixedLearner::default();
    let mut preparer = UpdatePreparer::new(&keys, &learner, (1, 2), true);
    // Log-ratios of 0.5 and 1 for trained tokens. The third, 3, would exceed both bounds if it
    // counted.
    let mut sequence = make_input(0, &[(10, -1.5, 1), (20, -3.0, 1), (5, -3.5, 1)]);
    sequence.1.targets[2].term.weight = 0.0;
    let mut batches = vec![vec![sequence]];
    preparer.compute_proximal(&batches).await.unwrap();
    preparer.prepare_update(&mut batches, true, 0).await.unwrap();
    let found = terms(&batches);
    found[..2].iter().for_each(|term| close(weight(term), 0.5 * 1.5f64.exp()));
    assert_eq!((found[2].weight, found[2].correction, preparer.rejected), (0.0, None, 0));
    let (mismatch, breakdown) = preparer.mismatch().unwrap();
    close(mismatch.kl, -0.75);
    let mut metrics = crate::metrics::Metrics::default();
    breakdown.report(&mut metrics);
    for name in ["age_1", "from_0"] {
        close(metrics.get(&format!("rollout_corr/log_diff_mean_{name}")).unwrap(), 0.75);
        close(metrics.get(&format!("rollout_corr/log_diff_max_{name}")).unwrap(), 1.0);
    }
}

/// A correction weights the policy's gradient but not the KL penalty. A rejection removes both.
#[tokio::test]
async fn correction_does_not_weight_kl_penalty() {
    let text = "proximal = 'recompute'\nkl = { coefficient = 0.5, estimator = 'k2' }\n\
                rejection = [{ statistic = 'ratio', high = 9.0 }]";
    let keys = keys(text);
    let (mut found, _) = prepare(&keys, true, vec![make_input(0, &STALE)]).await;
    for (term, (id, ..)) in found.iter_mut().zip(STALE) {
        term.reference = Some(fixed_logprob(id) + 2.0);
    }
    // At the proximal policy the ratio is 1. The penalty is half of 2² / 2, with a derivative of
    // −2.
    let at = |i: usize| keys.loss().evaluate(fixed_logprob(STALE[i].0), &found[i]);
    for (i, ratio) in [0.5f64.exp(), (-1.0f64).exp()].into_iter().enumerate() {
        close(at(i).loss, -ratio + 1.0);
        close(at(i).derivative, -ratio - 1.0);
        assert_eq!(found[i].weight, 0.5);
    }
    assert_eq!(found[2].weight, 0.0);
}

/// REINFORCE weighted by the ratio to the policy that sampled the token, whatever the center of the
/// trust region.
#[tokio::test]
async fn minirl_weights_use_behavior_policy() {
    let mild = [(10, -1.2, 1), (20, -1.7, 2)];
    let keys = keys("algorithm = 'minirl'\nproximal = 'recompute'");
    let (found, _) = prepare(&keys, true, vec![make_input(0, &mild)]).await;
    for (term, (id, behavior, _)) in found.iter().zip(mild) {
        let present = fixed_logprob(id) + 0.1;
        let got = keys.loss().evaluate(present, term);
        close(got.ratio, 0.1f64.exp());
        close(0.5 * got.derivative, -0.5 * f64::from(present - behavior).exp());
    }
}

#[tokio::test]
async fn recorded_logprobs_are_used_only_if_exact() {
    let recompute = keys("proximal = 'recompute'");
    let fresh = || vec![make_input(0, &[(10, -1.5, 0), (20, -1.0, 0)])];
    let (found, num_queries) = prepare(&recompute, true, fresh()).await;
    assert_eq!(num_queries, 0);
    assert_eq!(
        found.iter().map(|term| (term.proximal, weight(term))).collect::<Vec<_>>(),
        [(Some(-1.5), 0.5), (Some(-1.0), 0.5)]
    );
    // With keys and values of older weights, the recorded log-probabilities differ.
    let (found, num_queries) = prepare(&recompute, false, fresh()).await;
    assert_eq!((num_queries, found[0].proximal), (1, Some(-1.0)));
    close(weight(&found[0]), 0.5 * 0.5f64.exp());
    // One token of another version, or without a behavior policy, suffices for a recomputation.
    let mut foreign = fresh();
    foreign[0].1.targets[1].term.behavior = None;
    let mut mixed = fresh();
    mixed[0].1.targets[1].term.age = 1;
    for batch in [foreign, mixed] {
        let (found, num_queries) = prepare(&recompute, true, batch).await;
        assert_eq!((num_queries, found[1].proximal), (1, Some(-2.0)));
    }
}

/// The proximal policy is the policy at the start of the step for all its updates, and is computed
/// once.
#[tokio::test]
async fn proximal_policy_is_computed_once_per_step() {
    let keys = keys("proximal = 'recompute'");
    let learner = FixedLearner::default();
    let mut preparer = UpdatePreparer::new(&keys, &learner, (1, 2), true);
    let first = vec![vec![make_input(0, &STALE)], vec![make_input(1, &STALE[..1])]];
    preparer.compute_proximal(&first).await.unwrap();
    preparer.compute_proximal(&first).await.unwrap();
    assert_eq!(*learner.queries.lock().unwrap(), 2, "once for each batch");
    for update in 0..2 {
        let mut batches = first.clone();
        preparer.prepare_update(&mut batches, update == 0, update).await.unwrap();
        assert!(terms(&batches).iter().all(|term| term.proximal.is_some()));
    }
    assert_eq!(*learner.queries.lock().unwrap(), 2);
    // Means over the four tokens of log p_behavior − log p_proximal: −0.5, 1, −3 and −0.5.
    close(preparer.mismatch().unwrap().0.kl, -3.0 / 4.0);
}

/// The loss interpolates the proximal policy: no query is made, and no term is changed. The age
/// determines the interpolation.
#[tokio::test]
async fn interpolated_proximal_uses_age_without_forward_pass() {
    let keys = keys("proximal = 'interpolate'");
    let aged = [(10, -1.3, 1), (10, -1.3, 2), (10, -1.3, 4)];
    let (found, num_queries) = prepare(&keys, true, vec![make_input(0, &aged)]).await;
    assert_eq!((num_queries, &found), (0, &terms(&[vec![make_input(0, &aged)]])));
    for (term, age) in found.iter().zip([1.0f64, 2.0, 4.0]) {
        // Interpolates from −1.3 to −1. The last version accounts for a fraction of 1 / age.
        let got = keys.loss().evaluate(-1.0, term);
        let ratio = (0.3 / age).exp();
        let weight = (0.3 * (age - 1.0) / age).exp();
        close(got.ratio, ratio);
        close(got.loss, -weight * ratio.min(1.2));
    }
    // Losses over complete sequences use the same interpolation.
    let gspo = self::keys("algorithm = 'gspo'\nproximal = 'interpolate'");
    let (found, num_queries) = prepare(&gspo, true, vec![make_input(0, &aged)]).await;
    assert_eq!(num_queries, 1);
    let mean = (0.3 + 0.15 + 0.075) / 3.0;
    found.iter().for_each(|term| close(term.sequence_log_ratio.unwrap().into(), mean));
}

#[tokio::test]
async fn sequence_ratios_and_marks_use_current_policy() {
    let batch = || vec![make_input(0, &[(10, -1.5, 1), (20, -1.0, 1)])];
    let gspo = keys("algorithm = 'gspo'");
    let (found, num_queries) = prepare(&gspo, true, batch()).await;
    // −1 + 1.5 and −2 + 1.
    assert_eq!(num_queries, 1);
    found.iter().for_each(|term| close(term.sequence_log_ratio.unwrap().into(), -0.25));
    // On policy the ratio is 1, unless an earlier update has changed the weights.
    let fresh = || vec![make_input(0, &[(10, -1.5, 0), (20, -1.0, 0)])];
    let (found, num_queries) = prepare(&gspo, true, fresh()).await;
    assert_eq!((num_queries, found[0].sequence_log_ratio), (0, Some(0.0)));
    let learner = FixedLearner::default();
    let mut batches = vec![fresh()];
    UpdatePreparer::new(&gspo, &learner, (1, 2), true)
        .prepare_update(&mut batches, false, 1)
        .await
        .unwrap();
    terms(&batches).iter().for_each(|term| close(term.sequence_log_ratio.unwrap().into(), -0.25));

    // The geometric mean of ratios. For a positive advantage they are clipped from above, at e^0.4.
    let (found, _) = prepare(&keys("algorithm = 'gmpo'"), true, batch()).await;
    found.iter().for_each(|term| close(term.sequence_log_ratio.unwrap().into(), (0.4 - 1.0) / 2.0));
    assert_eq!(found.iter().map(|term| term.selected).collect::<Vec<_>>(), [false, true]);

    // The most likely of the tokens with the larger advantage is selected.
    let covarying = keys("loss = { kl_cov = { coefficient = 1.0, share = 0.25 } }");
    let mut batch = batch();
    batch[0].1.targets[1].term.advantage = -1.0;
    batch.push(make_input(1, &[(30, -1.0, 1), (12, -1.0, 1)]));
    let (found, _) = prepare(&covarying, true, batch).await;
    // Mean log-probability −1.8, mean advantage 0.5: covariances of 0.4, 0.3, −0.6 and 0.3.
    assert_eq!(
        found.iter().map(|term| term.selected).collect::<Vec<_>>(),
        [true, false, false, false]
    );
}

/// Clip-Cov samples the tokens to leave out from those whose covariance is in bounds, separately
/// for each update.
#[tokio::test]
async fn clip_cov_resamples_tokens_for_each_update() {
    let text =
        "loss = { clip_cov = { low = 0.2, high = 0.2, share = 0.25, lower = 0.5, upper = 1.5 } }";
    let keys = keys(text);
    let learner = FixedLearner::default();
    let mut preparer = UpdatePreparer::new(&keys, &learner, (1, 2), true);
    // Alternating advantages of 1 and −1, and log-probabilities of −1 and −3: all covariances are
    // 1.
    let mut sequence = make_input(0, &[[(10, -1.0, 1), (30, -3.0, 1)]; 4].concat());
    sequence
        .1
        .targets
        .iter_mut()
        .skip(1)
        .step_by(2)
        .for_each(|target| target.term.advantage = -1.0);
    let mut chosen = Vec::new();
    for update in 0..4 {
        let mut batches = vec![vec![sequence.clone()]];
        preparer.prepare_update(&mut batches, false, update).await.unwrap();
        let marked: Vec<u64> = (0u64..)
            .zip(terms(&batches))
            .filter(|(_, term)| term.selected)
            .map(|(index, _)| index)
            .collect();
        // Two of eight tokens are selected: those with the smallest random numbers of this update.
        let number = |index: &u64| uniform(1, 2, update as u64 * (1 << 32) + index);
        let mut want: Vec<u64> = (0..8).collect();
        want.sort_by(|a, b| number(a).total_cmp(&number(b)));
        want.truncate(2);
        want.sort_unstable();
        assert_eq!(marked, want, "{update}");
        chosen.push(marked);
    }
    chosen.dedup();
    assert!(chosen.len() > 1, "{chosen:?}");
}

/// Tokens with weight 0 do not contribute to ratios and advantages of sequences, nor to covariances
/// of an update.
#[tokio::test]
async fn untrained_and_rejected_tokens_are_excluded_from_statistics() {
    // Log-ratios of 0.5, −1 and 1.5. The last token is not trained.
    let batch = || {
        let mut sequence = make_input(0, &[(10, -1.5, 1), (20, -1.0, 1), (5, -2.0, 1)]);
        sequence.1.targets[2].term =
            Term { weight: 0.0, advantage: 8.0, ..sequence.1.targets[2].term };
        vec![sequence]
    };
    let (found, _) = prepare(&keys("algorithm = 'gspo'"), true, batch()).await;
    found.iter().for_each(|term| close(term.sequence_log_ratio.unwrap().into(), -0.25));
    let (found, _) = prepare(&keys("algorithm = 'gmpo'"), true, batch()).await;
    found.iter().for_each(|term| close(term.sequence_log_ratio.unwrap().into(), (0.4 - 1.0) / 2.0));
    found.iter().for_each(|term| close(term.advantage.into(), 1.0));
    // Of two trained tokens with the same advantage, the first is selected. The third has a higher
    // log-probability and advantage, but is not trained.
    let covarying = keys("loss = { kl_cov = { coefficient = 1.0, share = 0.5 } }");
    let (found, _) = prepare(&covarying, true, batch()).await;
    assert_eq!(found.iter().map(|term| term.selected).collect::<Vec<_>>(), [true, false, false]);

    // The log-ratios to the behavior policy are 0.3, −0.4 and 2.6. The last token is rejected.
    let text = "algorithm = 'gspo'\nproximal = 'recompute'\n\
                rejection = [{ statistic = 'ratio', low = 0.1, high = 9.0 }]";
    let rejecting = keys(text);
    let learner = FixedLearner::default();
    let mut preparer = UpdatePreparer::new(&rejecting, &learner, (1, 2), true);
    let mut batches = vec![vec![make_input(0, &STALE)]];
    preparer.proximal.insert(batches[0][0].0, vec![-1.2, -1.4, -0.9]);
    preparer.prepare_update(&mut batches, false, 1).await.unwrap();
    // The log-ratios of the current to the proximal policy are 0.2, −0.6 and 0.4.
    terms(&batches).iter().for_each(|term| close(term.sequence_log_ratio.unwrap().into(), -0.2));
}

#[tokio::test]
async fn rejected_tokens_get_zero_weight_and_are_counted() {
    let text = "proximal = 'recompute'\n\
                rejection = [{ statistic = 'ratio', over = 'sequence_mean', high = 1.5 }, \
                { statistic = 'ratio', low = 0.5, high = 9.0 }]";
    let keys = keys(text);
    let learner = FixedLearner::default();
    let mut preparer = UpdatePreparer::new(&keys, &learner, (1, 2), true);
    // Log-ratios of 0.5 and −1 have a geometric mean below 1. A log-ratio of 3 exceeds the bound of
    // its sequence.
    let mut batches = vec![vec![make_input(0, &STALE[..2]), make_input(1, &STALE[2..])]];
    preparer.compute_proximal(&batches).await.unwrap();
    preparer.prepare_update(&mut batches, true, 0).await.unwrap();
    let weights: Vec<f64> = terms(&batches).iter().map(weight).collect();
    close(weights[0], 0.5 * 0.5f64.exp());
    assert_eq!((&weights[1..], preparer.rejected), (&[0.0, 0.0][..], 2));
}

/// Corrections and rejections concern the policy's gradient. The critic learns from the plan
/// unchanged.
#[tokio::test]
async fn critic_ignores_corrections_and_rejections() {
    let mut trajectory = Trajectory::new();
    let root = trajectory.push(Segment::context(None, vec![99], 0)).unwrap();
    let completion = Segment {
        kind: Kind::Sampled,
        logprobs: STALE.iter().map(|(_, logprob, _)| *logprob).collect(),
        versions: vec![VersionRun { version: 1, len: 3 }],
        ..Segment::context(Some(root), STALE.iter().map(|(id, ..)| *id).collect(), 0)
    };
    trajectory.push(completion).unwrap();
    let planned = PlannedSequence {
        attempt: id(0),
        leaf: SegmentId(1),
        advantage: PerToken::uniform(1.0),
        weight: PerToken::uniform(0.5),
        returns: Some(PerToken::new([1.0, 2.0, 3.0])),
        values: Some(PerToken::new([0.5, 0.5, 0.5])),
    };
    let micro_batch_plan = MicroBatchPlan::from_sizes([1]);
    let updates = vec![
        Update {
            sequences: vec![planned],
            micro_batch_plan: micro_batch_plan.clone(),
            critic_plan: Some(micro_batch_plan)
        };
        2
    ];
    let policy = PolicyPlan { updates, ..PolicyPlan::default() };
    let plan = StepPlan { phase: 0, step: 0, group_positions: Vec::new(), policies: vec![policy] };
    let text = "algorithm = 'ppo'\nproximal = 'recompute'\n\
                rejection = [{ statistic = 'ratio', high = 4.0 }]\n\
                critic = { clip = 0.2 }";
    let phase = Phase::Rl(Box::new(keys(text)));
    let policy = FixedLearner::default();
    let critic = FixedLearner::default();
    let models = PhaseModels { policy: &policy, reference: None, critic: Some(&critic) };
    let optim = OptimParams {
        learning_rate: 1.0,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.0,
        max_grad_norm: 1.0,
    };
    let rules = UpdateSettings {
        phase: &phase,
        targets: Targets::DEFAULT,
        stream: 0,
        policy: Some(optim),
        critic: Some(OptimParams { learning_rate: 0.5, max_grad_norm: 0.25, ..optim }),
        version: 2,
        seed: 1,
        exact: true,
    };
    let trajectories = HashMap::from([(id(0), &trajectory)]);
    let mut progress = MicroBatchProgress::new(&plan);
    run_plan(&plan.policies[0], &trajectories, models, &rules, &mut progress, &mut ())
        .await
        .unwrap();

    let weights = |learner: &FixedLearner| -> Vec<Vec<f64>> {
        let trained_batches = learner.trained_batches.lock().unwrap();
        trained_batches.iter().map(|batch| batch.terms.iter().map(weight).collect()).collect()
    };
    assert_eq!(weights(&critic), [[0.5; 3], [0.5; 3]]);
    for of_update in weights(&policy) {
        close(of_update[0], 0.5 * 0.5f64.exp());
        close(of_update[1], 0.5 * (-1.0f64).exp());
        assert_eq!(of_update[2], 0.0);
    }
    // Each model has its own loss, learning rate and maximum gradient norm.
    assert_eq!(*policy.steps.lock().unwrap(), [(1.0, 1.0); 2]);
    assert_eq!(*critic.steps.lock().unwrap(), [(0.5, 0.25); 2]);
    let clipped = Loss::new(levade_rl::PolicyLoss::Value { clip: Some(0.2) });
    assert!(critic.losses.lock().unwrap().iter().all(|loss| *loss == clipped));
    assert!(policy.losses.lock().unwrap().iter().all(|loss| *loss != clipped));
    let trained_batches = critic.trained_batches.lock().unwrap();
    let returns: Vec<f32> = trained_batches[0].terms.iter().map(|term| term.returns).collect();
    assert_eq!(returns, [1.0, 2.0, 3.0]);
}

/// While only the critic learns, the policy does not change.
#[tokio::test]
async fn critic_warmup_skips_policy_updates() {
    let mut trajectory = Trajectory::new();
    let root = trajectory.push(Segment::context(None, vec![99], 0)).unwrap();
    let completion = Segment {
        kind: Kind::Sampled,
        logprobs: vec![-1.0],
        versions: vec![VersionRun { version: 0, len: 1 }],
        ..Segment::context(Some(root), vec![3], 0)
    };
    trajectory.push(completion).unwrap();
    let advantage = PerToken::uniform(1.0);
    let weight = PerToken::uniform(1.0);
    let returns = Some(PerToken::uniform(1.0));
    let values = Some(PerToken::uniform(0.5));
    let planned =
        PlannedSequence { attempt: id(0), leaf: SegmentId(1), advantage, weight, returns, values };
    let micro_batch_plan = MicroBatchPlan::from_sizes([1]);
    let updates = vec![Update {
        sequences: vec![planned],
        micro_batch_plan: micro_batch_plan.clone(),
        critic_plan: Some(micro_batch_plan),
    }];
    let policy_plan = PolicyPlan { updates, ..PolicyPlan::default() };
    let plan =
        StepPlan { phase: 0, step: 0, group_positions: Vec::new(), policies: vec![policy_plan] };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("recipe.toml");
    let text = "run = { name = 'x' }\nmodel = { source = './model' }\n\
                tasks = [{ kind = 'arithmetic' }]\n[[phase]]\n\
                kind = 'rl'\nalgorithm = 'ppo'\nsteps = 2\ngroups = 1\ngroup_size = 1\n\
                learning_rate = 1.0\n\
                critic = { warmup = 1 }\n";
    std::fs::write(&file, text).unwrap();
    let recipe = levade_recipe::Recipe::load(&file, &[]).unwrap();
    for (step, steps) in [(0, 0), (1, 1)] {
        let policy = FixedLearner::default();
        let critic = FixedLearner::default();
        let models = PhaseModels { policy: &policy, reference: None, critic: Some(&critic) };
        let rules =
            UpdateSettings::new((0, &recipe.phase[0]), step, None, Targets::DEFAULT, 0, &recipe);
        let trajectories = HashMap::from([(id(0), &trajectory)]);
        let mut progress = MicroBatchProgress::new(&plan);
        run_plan(&plan.policies[0], &trajectories, models, &rules, &mut progress, &mut ())
            .await
            .unwrap();
        assert_eq!(
            (policy.steps.lock().unwrap().len(), critic.steps.lock().unwrap().len()),
            (steps, 1)
        );
    }
}
