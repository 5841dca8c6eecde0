//! Numbers of what an update is prepared with, from a learner whose log-probabilities are known.

use std::path::Path;
use std::sync::{Arc, Mutex};

use levade_policy::{
    Content, Cut, ForwardBackward, Manifest, OptimParams, OptimReport, PolicyError, WeightsAt, WeightsRef,
};
use levade_recipe::Phase;
use levade_rl::Loss;
use levade_store::{PerToken, PlannedPath, PolicyPlan, StepPlan, Update};
use levade_tree::{AttemptId, Kind, PathTarget, Segment, SegmentId, Trajectory, TreeBatch, VersionRun};

use super::*;
use crate::batch::Targets;
use crate::learn::{Progress, Rules, run_plan};
use crate::policies::Models;

/// Says −id / 10 of every token, and remembers what it was asked and what it was to learn.
#[derive(Default)]
struct Known {
    asked: Mutex<u32>,
    learnt: Mutex<Vec<Arc<TreeBatch>>>,
    /// Losses of the batches.
    losses: Mutex<Vec<Loss>>,
    /// Learning rates and bounds of gradient norms of the optimiser steps.
    steps: Mutex<Vec<(f32, f32)>>,
}

fn said(token: u32) -> f32 {
    -(token as f32) / 10.0
}

#[async_trait::async_trait]
impl Learner for Known {
    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        *self.asked.lock().unwrap() += 1;
        Ok(batch.targets.iter().map(|target| said(batch.tokens[target.token as usize])).collect())
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        loss.check(&batch).map_err(|e| PolicyError::Invalid(e.to_string()))?;
        self.learnt.lock().unwrap().push(batch);
        self.losses.lock().unwrap().push(loss);
        Ok(ForwardBackward::default())
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        self.steps.lock().unwrap().push((params.learning_rate, params.max_grad_norm));
        Ok(OptimReport { grad_norm: 1.0, applied: true })
    }

    async fn save(&self, folder: &Path, _: bool) -> Result<Manifest, PolicyError> {
        Manifest::of(folder, Content::Whole, &[])
    }

    async fn load(&self, _: &Path, _: bool) -> Result<(), PolicyError> {
        Ok(())
    }

    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        Ok(WeightsRef { version, at: WeightsAt::Memory })
    }
}

fn keys(text: &str) -> RlKeys {
    toml::from_str(&format!("steps = 1\ngroups = 1\ngroup_size = 2\nlearning_rate = 1.0\n{text}")).unwrap()
}

fn id(sample: u8) -> AttemptId {
    AttemptId::from_bytes([sample; 16])
}

/// A path that trains all of its tokens but the first, by (id, log-probability it was drawn with, age); each
/// with a weight of a half and an advantage of 1.
fn path(sample: u32, tokens: &[(u32, f32, u32)]) -> (PathKey, PathInput) {
    let target = |(i, (_, behaviour, age)): (usize, &(u32, f32, u32))| PathTarget {
        index: i as u32 + 1,
        temperature: 1.0,
        term: Term { weight: 0.5, advantage: 1.0, behaviour: Some(*behaviour), age: *age, ..Term::default() },
    };
    let input = PathInput {
        tokens: std::iter::once(99).chain(tokens.iter().map(|(id, ..)| *id)).collect(),
        targets: tokens.iter().enumerate().map(target).collect(),
    };
    ((id(sample as u8), SegmentId(1)), input)
}

fn terms(batches: &[Inputs]) -> Vec<Term> {
    batches.iter().flatten().flat_map(|(_, input)| input.targets.iter().map(|target| target.term)).collect()
}

/// Terms of the first update of a step, of one micro-batch, and how often the learner was asked.
async fn prepared(keys: &RlKeys, exact: bool, batch: Inputs) -> (Vec<Term>, u32) {
    let learner = Known::default();
    let mut preparer = Preparer::new(keys, &learner, (1, 2), exact);
    let mut batches = vec![batch];
    preparer.begin(&batches).await.unwrap();
    preparer.update(&mut batches, true, 0).await.unwrap();
    let asked = *learner.asked.lock().unwrap();
    (terms(&batches), asked)
}

/// The weight of the policy's part of a term's loss.
fn weight(term: &Term) -> f64 {
    f64::from(term.weight) * term.correction.map_or(1.0, f64::from)
}

#[track_caller]
fn close(found: f64, want: f64) {
    assert!((found - want).abs() < 1e-5 * want.abs().max(1.0), "{found}, expected {want}");
}

/// Log-ratios of the proximal to the behaviour policy of 0.5, −1 and 3: the last weight is truncated.
const STALE: [(u32, f32, u32); 3] = [(10, -1.5, 1), (20, -1.0, 2), (5, -3.5, 1)];

#[tokio::test]
async fn weights_are_those_of_the_proximal_over_the_behaviour_policy() {
    let (found, asked) = prepared(&keys("proximal = 'recompute'"), true, vec![path(0, &STALE)]).await;
    assert_eq!(asked, 1);
    for ((term, (id, ..)), ratio) in found.iter().zip(STALE).zip([0.5f64.exp(), (-1.0f64).exp(), 5.0]) {
        assert_eq!(term.proximal, Some(said(id)));
        assert_eq!(term.weight, 0.5);
        close(weight(term), 0.5 * ratio);
    }
    let bounded =
        keys("proximal = 'recompute'\ncorrection = { bound = { mask = { low = 0.5, high = 2.0 } } }");
    let (found, _) = prepared(&bounded, true, vec![path(0, &STALE)]).await;
    let weights: Vec<f64> = found.iter().map(weight).collect();
    close(weights[0], 0.5 * 0.5f64.exp());
    assert_eq!(weights[1..], [0.0, 0.0]);
    let away = keys("proximal = 'recompute'\ncorrection = { bound = { clamp = { low = 1.0, high = 1.0 } } }");
    let (found, _) = prepared(&away, true, vec![path(0, &STALE)]).await;
    assert!(found.iter().all(|term| weight(term) == 0.5 && term.proximal.is_some()));
    // Ratios to the policy that drew a token need no weight.
    let (found, asked) = prepared(&keys(""), true, vec![path(0, &STALE)]).await;
    assert!(asked == 0 && found.iter().all(|term| weight(term) == 0.5 && term.proximal.is_none()));
}

/// A correction over paths is of the tokens that are trained, and so is the mismatch.
#[tokio::test]
async fn corrections_and_rejections_see_trained_tokens_alone() {
    let text = "proximal = 'recompute'\ncorrection = { level = 'path', bound = { clamp = { high = 9.0 } } }\n\
                rejection = [{ statistic = 'ratio', over = 'path_sum', high = 9.0 }]";
    let (keys, learner) = (keys(text), Known::default());
    let mut preparer = Preparer::new(&keys, &learner, (1, 2), true);
    // Log-ratios of 0.5 and 1; and of 3, too far for either if it counted.
    let mut path = path(0, &[(10, -1.5, 1), (20, -3.0, 1), (5, -3.5, 1)]);
    path.1.targets[2].term.weight = 0.0;
    let mut batches = vec![vec![path]];
    preparer.begin(&batches).await.unwrap();
    preparer.update(&mut batches, true, 0).await.unwrap();
    let found = terms(&batches);
    found[..2].iter().for_each(|term| close(weight(term), 0.5 * 1.5f64.exp()));
    assert_eq!((found[2].weight, found[2].correction, preparer.rejected), (0.0, None, 0));
    let (mismatch, apart) = preparer.mismatch().unwrap();
    close(mismatch.kl, -0.75);
    let mut metrics = crate::metrics::Metrics::default();
    apart.report(&mut metrics);
    for name in ["age_1", "from_0"] {
        close(metrics.get(&format!("rollout_corr/log_diff_mean_{name}")).unwrap(), 0.75);
        close(metrics.get(&format!("rollout_corr/log_diff_max_{name}")).unwrap(), 1.0);
    }
}

/// A correction weighs the policy's gradient and not the penalty for leaving the reference; what is rejected
/// has neither.
#[tokio::test]
async fn a_penalty_is_not_corrected() {
    let text = "proximal = 'recompute'\nkl = { coefficient = 0.5, estimator = 'k2' }\n\
                rejection = [{ statistic = 'ratio', high = 9.0 }]";
    let keys = keys(text);
    let (mut found, _) = prepared(&keys, true, vec![path(0, &STALE)]).await;
    for (term, (id, ..)) in found.iter_mut().zip(STALE) {
        term.reference = Some(said(id) + 2.0);
    }
    // At the proximal policy: a ratio of 1, and half of 2² / 2 for the penalty, of slope −2.
    let at = |i: usize| keys.loss().evaluate(said(STALE[i].0), &found[i]);
    for (i, ratio) in [0.5f64.exp(), (-1.0f64).exp()].into_iter().enumerate() {
        close(at(i).loss, -ratio + 1.0);
        close(at(i).slope, -ratio - 1.0);
        assert_eq!(found[i].weight, 0.5);
    }
    assert_eq!(found[2].weight, 0.0);
}

/// REINFORCE with the ratio as a weight: to the policy that drew the token, whatever the trust region is
/// around.
#[tokio::test]
async fn minirl_is_weighted_by_the_policy_that_drew() {
    let mild = [(10, -1.2, 1), (20, -1.7, 2)];
    let keys = keys("algorithm = 'minirl'\nproximal = 'recompute'");
    let (found, _) = prepared(&keys, true, vec![path(0, &mild)]).await;
    for (term, (id, behaviour, _)) in found.iter().zip(mild) {
        let present = said(id) + 0.1;
        let got = keys.loss().evaluate(present, term);
        close(got.ratio, 0.1f64.exp());
        close(0.5 * got.slope, -0.5 * f64::from(present - behaviour).exp());
    }
}

#[tokio::test]
async fn the_record_stands_in_only_where_it_is_what_the_learner_would_say() {
    let recompute = keys("proximal = 'recompute'");
    let fresh = || vec![path(0, &[(10, -1.5, 0), (20, -1.0, 0)])];
    let (found, asked) = prepared(&recompute, true, fresh()).await;
    assert_eq!(asked, 0);
    assert_eq!(
        found.iter().map(|term| (term.proximal, weight(term))).collect::<Vec<_>>(),
        [(Some(-1.5), 0.5), (Some(-1.0), 0.5)]
    );
    // Keys and values of older weights under it: not so.
    let (found, asked) = prepared(&recompute, false, fresh()).await;
    assert_eq!((asked, found[0].proximal), (1, Some(-1.0)));
    close(weight(&found[0]), 0.5 * 0.5f64.exp());
    // One token of another version, or of nobody's, is enough.
    let mut foreign = fresh();
    foreign[0].1.targets[1].term.behaviour = None;
    let mut mixed = fresh();
    mixed[0].1.targets[1].term.age = 1;
    for batch in [foreign, mixed] {
        let (found, asked) = prepared(&recompute, true, batch).await;
        assert_eq!((asked, found[1].proximal), (1, Some(-2.0)));
    }
}

/// The proximal policy is that at the beginning of the step for all of its updates, and is asked for once.
#[tokio::test]
async fn the_proximal_policy_stays_for_the_step() {
    let (keys, learner) = (keys("proximal = 'recompute'"), Known::default());
    let mut preparer = Preparer::new(&keys, &learner, (1, 2), true);
    let first = vec![vec![path(0, &STALE)], vec![path(1, &STALE[..1])]];
    preparer.begin(&first).await.unwrap();
    preparer.begin(&first).await.unwrap();
    assert_eq!(*learner.asked.lock().unwrap(), 2, "once for each batch");
    for update in 0..2 {
        let mut batches = first.clone();
        preparer.update(&mut batches, update == 0, update).await.unwrap();
        assert!(terms(&batches).iter().all(|term| term.proximal.is_some()));
    }
    assert_eq!(*learner.asked.lock().unwrap(), 2);
    // Means over the four tokens of log p_behaviour − log p_proximal: −0.5, 1, −3 and −0.5.
    close(preparer.mismatch().unwrap().0.kl, -3.0 / 4.0);
}

/// The guess is the loss's: nothing is asked, nothing stands in the terms, and the age decides how far along
/// it lies.
#[tokio::test]
async fn interpolation_needs_no_pass_and_knows_the_age() {
    let keys = keys("proximal = 'interpolate'");
    let aged = [(10, -1.3, 1), (10, -1.3, 2), (10, -1.3, 4)];
    let (found, asked) = prepared(&keys, true, vec![path(0, &aged)]).await;
    assert_eq!((asked, &found), (0, &terms(&[vec![path(0, &aged)]])));
    for (term, age) in found.iter().zip([1.0f64, 2.0, 4.0]) {
        // From −1.3 to −1, of which the last version is a share of 1 / age.
        let got = keys.loss().evaluate(-1.0, term);
        let (ratio, weight) = ((0.3 / age).exp(), (0.3 * (age - 1.0) / age).exp());
        close(got.ratio, ratio);
        close(got.loss, -weight * ratio.min(1.2));
    }
    // What looks at whole paths first does so from the same guess.
    let gspo = self::keys("algorithm = 'gspo'\nproximal = 'interpolate'");
    let (found, asked) = prepared(&gspo, true, vec![path(0, &aged)]).await;
    assert_eq!(asked, 1);
    let mean = (0.3 + 0.15 + 0.075) / 3.0;
    found.iter().for_each(|term| close(term.path_log_ratio.unwrap().into(), mean));
}

#[tokio::test]
async fn ratios_of_paths_and_marks_come_from_the_present_policy() {
    let batch = || vec![path(0, &[(10, -1.5, 1), (20, -1.0, 1)])];
    let gspo = keys("algorithm = 'gspo'");
    let (found, asked) = prepared(&gspo, true, batch()).await;
    // −1 + 1.5 and −2 + 1.
    assert_eq!(asked, 1);
    found.iter().for_each(|term| close(term.path_log_ratio.unwrap().into(), -0.25));
    // On policy nothing has moved, unless an update has been.
    let fresh = || vec![path(0, &[(10, -1.5, 0), (20, -1.0, 0)])];
    let (found, asked) = prepared(&gspo, true, fresh()).await;
    assert_eq!((asked, found[0].path_log_ratio), (0, Some(0.0)));
    let learner = Known::default();
    let mut batches = vec![fresh()];
    Preparer::new(&gspo, &learner, (1, 2), true).update(&mut batches, false, 1).await.unwrap();
    terms(&batches).iter().for_each(|term| close(term.path_log_ratio.unwrap().into(), -0.25));

    // The geometric mean of ratios that are clipped from above, at e^0.4, where the advantage is positive.
    let (found, _) = prepared(&keys("algorithm = 'gmpo'"), true, batch()).await;
    found.iter().for_each(|term| close(term.path_log_ratio.unwrap().into(), (0.4 - 1.0) / 2.0));
    assert_eq!(found.iter().map(|term| term.marked).collect::<Vec<_>>(), [false, true]);

    // The likeliest token of those with the larger advantage.
    let covarying = keys("loss = { kl_cov = { coefficient = 1.0, share = 0.25 } }");
    let mut batch = batch();
    batch[0].1.targets[1].term.advantage = -1.0;
    batch.push(path(1, &[(30, -1.0, 1), (12, -1.0, 1)]));
    let (found, _) = prepared(&covarying, true, batch).await;
    // Mean log-probability −1.8, mean advantage 0.5: covariances of 0.4, 0.3, −0.6 and 0.3.
    assert_eq!(found.iter().map(|term| term.marked).collect::<Vec<_>>(), [true, false, false, false]);
}

/// Clip-Cov draws what it leaves out among tokens whose covariance is in bounds, for each update anew.
#[tokio::test]
async fn tokens_are_drawn_anew_for_each_update() {
    let text = "loss = { clip_cov = { low = 0.2, high = 0.2, share = 0.25, lower = 0.5, upper = 1.5 } }";
    let (keys, learner) = (keys(text), Known::default());
    let mut preparer = Preparer::new(&keys, &learner, (1, 2), true);
    // Advantages of 1 and −1, log-probabilities of −1 and −3, by turns: all covariances are 1.
    let mut path = path(0, &[[(10, -1.0, 1), (30, -3.0, 1)]; 4].concat());
    path.1.targets.iter_mut().skip(1).step_by(2).for_each(|target| target.term.advantage = -1.0);
    let mut chosen = Vec::new();
    for update in 0..4 {
        let mut batches = vec![vec![path.clone()]];
        preparer.update(&mut batches, false, update).await.unwrap();
        let marked: Vec<u64> =
            (0u64..).zip(terms(&batches)).filter(|(_, term)| term.marked).map(|(place, _)| place).collect();
        // Two of eight: those with the smallest numbers of this update.
        let number = |place: &u64| uniform(1, 2, update as u64 * (1 << 32) + place);
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

/// Tokens without weight have no part in ratios and advantages of paths, nor in covariances of an update.
#[tokio::test]
async fn what_is_not_trained_has_no_part_in_statistics() {
    // Log-ratios of 0.5, −1 and 1.5, the last of a token that is not trained.
    let batch = || {
        let mut path = path(0, &[(10, -1.5, 1), (20, -1.0, 1), (5, -2.0, 1)]);
        path.1.targets[2].term = Term { weight: 0.0, advantage: 8.0, ..path.1.targets[2].term };
        vec![path]
    };
    let (found, _) = prepared(&keys("algorithm = 'gspo'"), true, batch()).await;
    found.iter().for_each(|term| close(term.path_log_ratio.unwrap().into(), -0.25));
    let (found, _) = prepared(&keys("algorithm = 'gmpo'"), true, batch()).await;
    found.iter().for_each(|term| close(term.path_log_ratio.unwrap().into(), (0.4 - 1.0) / 2.0));
    found.iter().for_each(|term| close(term.advantage.into(), 1.0));
    // Of two trained tokens with one advantage the first is marked, not the third, the likeliest and best.
    let covarying = keys("loss = { kl_cov = { coefficient = 1.0, share = 0.5 } }");
    let (found, _) = prepared(&covarying, true, batch()).await;
    assert_eq!(found.iter().map(|term| term.marked).collect::<Vec<_>>(), [true, false, false]);

    // Of log-ratios of 0.3, −0.4 and 2.6 to the behaviour policy the last is rejected.
    let text = "algorithm = 'gspo'\nproximal = 'recompute'\n\
                rejection = [{ statistic = 'ratio', low = 0.1, high = 9.0 }]";
    let rejecting = keys(text);
    let learner = Known::default();
    let mut preparer = Preparer::new(&rejecting, &learner, (1, 2), true);
    let mut batches = vec![vec![path(0, &STALE)]];
    preparer.proximal.insert(batches[0][0].0, vec![-1.2, -1.4, -0.9]);
    preparer.update(&mut batches, false, 1).await.unwrap();
    // Those of the present policy to the proximal one are 0.2, −0.6 and 0.4.
    terms(&batches).iter().for_each(|term| close(term.path_log_ratio.unwrap().into(), -0.2));
}

#[tokio::test]
async fn what_is_rejected_weighs_nothing_and_is_counted() {
    let text = "proximal = 'recompute'\nrejection = [{ statistic = 'ratio', over = 'path_mean', high = 1.5 }, \
                { statistic = 'ratio', low = 0.5, high = 9.0 }]";
    let (keys, learner) = (keys(text), Known::default());
    let mut preparer = Preparer::new(&keys, &learner, (1, 2), true);
    // Log-ratios of 0.5 and −1, with a geometric mean below 1; and of 3, too far as a path.
    let mut batches = vec![vec![path(0, &STALE[..2]), path(1, &STALE[2..])]];
    preparer.begin(&batches).await.unwrap();
    preparer.update(&mut batches, true, 0).await.unwrap();
    let weights: Vec<f64> = terms(&batches).iter().map(weight).collect();
    close(weights[0], 0.5 * 0.5f64.exp());
    assert_eq!((&weights[1..], preparer.rejected), (&[0.0, 0.0][..], 2));
}

/// Corrections and rejections are about the policy's gradient: the critic learns from the plan as it stands.
#[tokio::test]
async fn the_critic_learns_from_all_tokens_alike() {
    let mut trajectory = Trajectory::new();
    let root = trajectory.push(Segment::given(None, vec![99], 0)).unwrap();
    let reply = Segment {
        kind: Kind::Sampled,
        logprobs: STALE.iter().map(|(_, logprob, _)| *logprob).collect(),
        versions: vec![VersionRun { version: 1, len: 3 }],
        ..Segment::given(Some(root), STALE.iter().map(|(id, ..)| *id).collect(), 0)
    };
    trajectory.push(reply).unwrap();
    let planned = PlannedPath {
        attempt: id(0),
        leaf: SegmentId(1),
        advantage: PerToken::same(1.0),
        weight: PerToken::same(0.5),
        returns: Some(PerToken::new([1.0, 2.0, 3.0])),
        values: Some(PerToken::new([0.5, 0.5, 0.5])),
    };
    let cut = Cut::of_sizes([1]);
    let updates = vec![Update { paths: vec![planned], cut: cut.clone(), critic: Some(cut) }; 2];
    let policy = PolicyPlan { updates, ..PolicyPlan::default() };
    let plan = StepPlan { phase: 0, step: 0, places: Vec::new(), policies: vec![policy] };
    let text = "algorithm = 'ppo'\nproximal = 'recompute'\nrejection = [{ statistic = 'ratio', high = 4.0 }]\n\
                critic = { clip = 0.2 }";
    let phase = Phase::Rl(Box::new(keys(text)));
    let (policy, critic) = (Known::default(), Known::default());
    let models = Models { policy: &policy, reference: None, critic: Some(&critic) };
    let optim = OptimParams {
        learning_rate: 1.0,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.0,
        max_grad_norm: 1.0,
    };
    let rules = Rules {
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
    let mut progress = Progress::of(&plan);
    run_plan(&plan.policies[0], &trajectories, models, &rules, &mut progress, &mut ()).await.unwrap();

    let weights = |learner: &Known| -> Vec<Vec<f64>> {
        let learnt = learner.learnt.lock().unwrap();
        learnt.iter().map(|batch| batch.terms.iter().map(weight).collect()).collect()
    };
    assert_eq!(weights(&critic), [[0.5; 3], [0.5; 3]]);
    for of_update in weights(&policy) {
        close(of_update[0], 0.5 * 0.5f64.exp());
        close(of_update[1], 0.5 * (-1.0f64).exp());
        assert_eq!(of_update[2], 0.0);
    }
    // Each learns by its own loss, rate and bound of the gradient's norm.
    assert_eq!(*policy.steps.lock().unwrap(), [(1.0, 1.0); 2]);
    assert_eq!(*critic.steps.lock().unwrap(), [(0.5, 0.25); 2]);
    let clipped = Loss::of(levade_rl::PolicyLoss::Value { clip: Some(0.2) });
    assert!(critic.losses.lock().unwrap().iter().all(|loss| *loss == clipped));
    assert!(policy.losses.lock().unwrap().iter().all(|loss| *loss != clipped));
    let learnt = critic.learnt.lock().unwrap();
    let returns: Vec<f32> = learnt[0].terms.iter().map(|term| term.returns).collect();
    assert_eq!(returns, [1.0, 2.0, 3.0]);
}

/// While only the critic learns, the policy is left as it is.
#[tokio::test]
async fn policies_rest_while_the_critic_warms_up() {
    let mut trajectory = Trajectory::new();
    let root = trajectory.push(Segment::given(None, vec![99], 0)).unwrap();
    let reply = Segment {
        kind: Kind::Sampled,
        logprobs: vec![-1.0],
        versions: vec![VersionRun { version: 0, len: 1 }],
        ..Segment::given(Some(root), vec![3], 0)
    };
    trajectory.push(reply).unwrap();
    let (advantage, weight) = (PerToken::same(1.0), PerToken::same(1.0));
    let (returns, values) = (Some(PerToken::same(1.0)), Some(PerToken::same(0.5)));
    let planned = PlannedPath { attempt: id(0), leaf: SegmentId(1), advantage, weight, returns, values };
    let cut = Cut::of_sizes([1]);
    let updates = vec![Update { paths: vec![planned], cut: cut.clone(), critic: Some(cut) }];
    let policy_plan = PolicyPlan { updates, ..PolicyPlan::default() };
    let plan = StepPlan { phase: 0, step: 0, places: Vec::new(), policies: vec![policy_plan] };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("recipe.toml");
    let text = "run = { name = 'x' }\nmodel = { source = './model' }\ntasks = [{ kind = 'arithmetic' }]\n[[phase]]\n\
                kind = 'rl'\nalgorithm = 'ppo'\nsteps = 2\ngroups = 1\ngroup_size = 1\nlearning_rate = 1.0\n\
                critic = { warmup = 1 }\n";
    std::fs::write(&file, text).unwrap();
    let recipe = levade_recipe::Recipe::load(&file, &[]).unwrap();
    for (step, steps) in [(0, 0), (1, 1)] {
        let (policy, critic) = (Known::default(), Known::default());
        let models = Models { policy: &policy, reference: None, critic: Some(&critic) };
        let rules = Rules::new((0, &recipe.phase[0]), step, None, Targets::DEFAULT, 0, &recipe);
        let trajectories = HashMap::from([(id(0), &trajectory)]);
        let mut progress = Progress::of(&plan);
        run_plan(&plan.policies[0], &trajectories, models, &rules, &mut progress, &mut ()).await.unwrap();
        assert_eq!((policy.steps.lock().unwrap().len(), critic.steps.lock().unwrap().len()), (steps, 1));
    }
}
