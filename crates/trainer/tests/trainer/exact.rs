//! Compares estimators with exact expectations, on a policy so small that all its outcomes can be
//! enumerated. Unbiased estimators are also compared with the true gradient.

use std::sync::Arc;

use levade_policy::{
    Learner, OptimParams, SampleRequest, Sampler, SamplingParams, Simulator, SimulatorConfig,
};
use levade_rl::{
    Alignment, Compare, Counting, Estimator, GroupBaseline, Loss, PolicyLoss, Rollout, Sequence,
    Singleton,
};
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};

/// Number of tokens in the vocabulary. An attempt has two tokens.
const TOKENS: usize = 3;
/// Number of attempts in a group.
const GROUP: usize = 3;
const PROMPT: u32 = 0;

/// An attempt, represented by its two tokens.
type Attempt = [usize; 2];

/// Returns the score of an attempt.
fn score(attempt: Attempt) -> f64 {
    [[1.0, 0.0, 0.3], [0.2, 0.9, 0.0], [0.0, 0.5, 0.1]][attempt[0]][attempt[1]]
}

/// Returns the part of the score that the first token earns at once.
fn early(attempt: Attempt) -> f64 {
    [0.1, 0.0, 0.05][attempt[0]]
}

/// A critic's values of the states before each token: the start, and after each possible first
/// token.
const VALUES: [f64; 4] = [0.3, 0.5, 0.2, 0.4];

fn every_attempt() -> Vec<Attempt> {
    (0..TOKENS).flat_map(|a| (0..TOKENS).map(move |b| [a, b])).collect()
}

/// Probabilities of the next token in each of the four states.
struct Policy([[f64; TOKENS]; 4]);

/// Returns the states before each token of an attempt.
fn states(attempt: Attempt) -> [usize; 2] {
    [0, 1 + attempt[0]]
}

impl Policy {
    async fn of(simulator: &Simulator) -> Self {
        let mut p = [[0.0; TOKENS]; 4];
        for attempt in every_attempt() {
            let batch = TreeBatch::merge(&[input(attempt, &[0.0; 2])]).unwrap();
            let logprobs = simulator.logprobs(Arc::new(batch)).await.unwrap();
            for t in 0..2 {
                p[states(attempt)[t]][attempt[t]] = f64::from(logprobs[t]).exp();
            }
        }
        // Probabilities rounded to f32 do not sum to exactly 1.
        Policy(p.map(|row| row.map(|x| x / row.iter().sum::<f64>())))
    }

    fn probability(&self, attempt: Attempt) -> f64 {
        (0..2).map(|t| self.0[states(attempt)[t]][attempt[t]]).product()
    }

    /// Adds `scale` × d log p(token) / d logits of its state.
    fn add_gradient(&self, attempt: Attempt, t: usize, scale: f64, to: &mut Gradients) {
        let state = states(attempt)[t];
        for (token, p) in self.0[state].iter().enumerate() {
            let indicator = if token == attempt[t] { 1.0 } else { 0.0 };
            to[state][token] += scale * (indicator - p);
        }
    }

    /// Returns the gradient of the expected score.
    fn truth(&self) -> Gradients {
        let mut gradients = Gradients::default();
        for attempt in every_attempt() {
            for t in 0..2 {
                self.add_gradient(
                    attempt,
                    t,
                    self.probability(attempt) * score(attempt),
                    &mut gradients,
                );
            }
        }
        gradients
    }

    /// Returns the mean of the estimator over all possible groups.
    fn expectation(&self, estimator: &Estimator) -> Gradients {
        let mut gradients = Gradients::default();
        let all = every_attempt();
        for a in &all {
            for b in &all {
                for c in &all {
                    let group = [*a, *b, *c];
                    let p: f64 = group.iter().map(|attempt| self.probability(*attempt)).product();
                    for (attempt, advantages) in
                        group.iter().zip(self.advantages(estimator, &group))
                    {
                        for (t, advantage) in advantages.iter().enumerate() {
                            self.add_gradient(
                                *attempt,
                                t,
                                p * advantage / GROUP as f64,
                                &mut gradients,
                            );
                        }
                    }
                }
            }
        }
        gradients
    }

    /// Returns the gradient of the expected best score of `k` attempts.
    fn exact_best_gradient(&self, k: u32) -> Gradients {
        let mut gradients = Gradients::default();
        let all = every_attempt();
        for combination in 0..all.len().pow(k) {
            let chosen_attempts: Vec<Attempt> =
                (0..k).map(|i| all[combination / all.len().pow(i) % all.len()]).collect();
            let p: f64 = chosen_attempts.iter().map(|attempt| self.probability(*attempt)).product();
            let best =
                chosen_attempts.iter().map(|attempt| score(*attempt)).fold(f64::MIN, f64::max);
            for attempt in chosen_attempts {
                (0..2).for_each(|t| self.add_gradient(attempt, t, p * best, &mut gradients));
            }
        }
        gradients
    }

    /// Returns the advantages of both tokens of every attempt in a group.
    fn advantages(&self, estimator: &Estimator, group: &[Attempt]) -> Vec<[f64; 2]> {
        let rollout = |attempt: &Attempt| {
            let states = states(*attempt);
            Rollout {
                score: score(*attempt),
                components: vec![early(*attempt), score(*attempt) - early(*attempt)],
                rival: Some(0.4),
                sequences: vec![Sequence {
                    turns_before: 0,
                    truncation_value: None,
                    turns: vec![1, 1],
                    rewards: vec![early(*attempt), score(*attempt) - early(*attempt)],
                    values: states.iter().map(|s| VALUES[*s]).collect(),
                    behavior: (0..2).map(|t| self.0[states[t]][attempt[t]].ln()).collect(),
                    concentration: states
                        .iter()
                        .map(|s| self.0[*s].iter().map(|p| p * p).sum())
                        .collect(),
                    positions: vec![0, 1],
                    masked: vec![],
                }],
                ..Rollout::default()
            }
        };
        let found = estimator.advantages(&group.iter().map(rollout).collect::<Vec<_>>()).unwrap();
        found.iter().map(|paths| [paths[0].advantages[0], paths[0].advantages[1]]).collect()
    }
}

/// A number for every logit of every state.
type Gradients = [[f64; TOKENS]; 4];

/// Returns an attempt as a sequence whose tokens are trained with these advantages.
fn input(attempt: Attempt, advantages: &[f64; 2]) -> SequenceInput {
    let target = |t: usize| SequenceTarget {
        index: t as u32 + 1,
        temperature: 1.0,
        term: Term {
            weight: 1.0 / GROUP as f32,
            advantage: advantages[t] as f32,
            behavior: Some(-1.0),
            ..Term::default()
        },
    };
    let tokens = [PROMPT].into_iter().chain(attempt.iter().map(|token| *token as u32)).collect();
    SequenceInput { tokens, targets: vec![target(0), target(1)] }
}

async fn sample_attempt(simulator: &Simulator, stream: u64) -> Attempt {
    let params = SamplingParams { max_tokens: 2, ..SamplingParams::default() };
    let request = SampleRequest {
        seed: 11,
        stream,
        prompt: vec![PROMPT],
        params,
        ..SampleRequest::default()
    };
    let completion = simulator.sample(request).await.unwrap();
    let completion = completion.collect(std::time::Duration::from_secs(5)).await.unwrap();
    [completion.tokens[0] as usize, completion.tokens[1] as usize]
}

fn simulator() -> Simulator {
    Simulator::new(SimulatorConfig {
        vocabulary: TOKENS,
        order: 4,
        rows: 4096,
        context: 8,
        spread: 1.0,
        seed: 3,
        ..SimulatorConfig::default()
    })
}

/// Returns the rows of the simulator's table that represent the four states. They are found by
/// their gradients.
async fn rows(simulator: &Simulator) -> [usize; 4] {
    let mut rows = [usize::MAX; 4];
    for attempt in every_attempt() {
        for t in 0..2 {
            let advantages = if t == 0 { [1.0, 0.0] } else { [0.0, 1.0] };
            let batch = TreeBatch::merge(&[input(attempt, &advantages)]).unwrap();
            simulator
                .forward_backward(Arc::new(batch), Loss::new(PolicyLoss::Reinforce))
                .await
                .unwrap();
            let gradient = simulator.take_gradient();
            rows[states(attempt)[t]] = gradient.iter().position(|g| *g != 0.0).unwrap() / TOKENS;
        }
    }
    rows
}

fn largest_difference(a: &Gradients, b: &Gradients) -> f64 {
    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn estimators_match_exact_expectation() {
    const GROUPS: usize = 3000;
    let simulator = simulator();
    let policy = Policy::of(&simulator).await;
    let rows = rows(&simulator).await;
    let truth = policy.truth();
    let group = |compare, scale_by_std| {
        Estimator::Group(GroupBaseline { compare, scale_by_std, ..GroupBaseline::default() })
    };
    let counting = Counting::Exact;
    // Each with the ratio of its expectation to the true gradient, if it is known.
    let estimators = [
        ("GRPO", group(Compare::Mean, true), None),
        // The mean includes the attempt's own score: (n − 1) / n of the gradient.
        ("Dr.GRPO", group(Compare::Mean, false), Some((GROUP as f64 - 1.0) / GROUP as f64)),
        ("RLOO", group(Compare::LeaveOneOut, false), Some(1.0)),
        (
            "OPO",
            group(Compare::LengthWeightedMean, false),
            Some((GROUP as f64 - 1.0) / GROUP as f64),
        ),
        // With a single group, either no group or every group is informative.
        (
            "GPG",
            group(Compare::MeanOfInformative, false),
            Some((GROUP as f64 - 1.0) / GROUP as f64),
        ),
        ("verl's GPG", group(Compare::MeanOfNonzero, false), None),
        ("pass@k", group(Compare::SecondBest { k: None }, false), None),
        ("pass@k, k = 2", group(Compare::SecondBest { k: Some(2) }, false), None),
        (
            "GDPO",
            Estimator::Gdpo {
                weights: vec![1.0, 0.5],
                baseline: GroupBaseline::default(),
                counting,
                recenter: false,
            },
            None,
        ),
        (
            "REINFORCE++",
            Estimator::ReinforcePlusPlus { gamma: 1.0, counting, one_turn: false },
            None,
        ),
        (
            "REINFORCE++-baseline",
            Estimator::ReinforcePlusPlusBaseline {
                singleton: Singleton::Zero,
                counting,
                recenter: false,
            },
            None,
        ),
        ("GAE", Estimator::Gae { gamma: 1.0, lambda: 1.0, whiten: None }, Some(1.0)),
        ("GAE, λ = 0.5", Estimator::Gae { gamma: 0.9, lambda: 0.5, whiten: None }, None),
        (
            "turns",
            Estimator::Turns { gamma: 1.0, scale_by_std: false },
            Some((GROUP as f64 - 1.0) / GROUP as f64),
        ),
        ("ReMax", Estimator::ReMax, Some(1.0)),
        (
            "optimal token baseline",
            Estimator::OptimalToken { alignment: Alignment::ActionToken, bare_tail: true },
            None,
        ),
    ];
    let mut groups = Vec::with_capacity(GROUPS);
    for g in 0..GROUPS as u64 {
        let mut group = Vec::with_capacity(GROUP);
        for i in 0..GROUP as u64 {
            group.push(sample_attempt(&simulator, 1 + g * GROUP as u64 + i).await);
        }
        groups.push(group);
    }
    for (name, estimator, truth_fraction) in estimators {
        let exact = policy.expectation(&estimator);
        if let Some(fraction) = truth_fraction {
            let scaled = truth.map(|row| row.map(|partial| fraction * partial));
            assert!(
                largest_difference(&exact, &scaled) < 1e-12,
                "{name}: {exact:?}, truth {scaled:?}"
            );
        } else {
            assert!(largest_difference(&exact, &truth) > 1e-6, "{name} is unbiased");
        }
        let mut sums = Gradients::default();
        let mut squares = Gradients::default();
        for group in &groups {
            let advantages = policy.advantages(&estimator, group);
            let paths: Vec<SequenceInput> =
                group.iter().zip(&advantages).map(|(a, adv)| input(*a, adv)).collect();
            let batch = Arc::new(TreeBatch::merge(&paths).unwrap());
            simulator.forward_backward(batch, Loss::new(PolicyLoss::Reinforce)).await.unwrap();
            let gradient = simulator.take_gradient();
            for state in 0..4 {
                for token in 0..TOKENS {
                    // The loss decreases when the score increases.
                    let partial = -gradient[rows[state] * TOKENS + token];
                    sums[state][token] += partial;
                    squares[state][token] += partial * partial;
                }
            }
        }
        let n = GROUPS as f64;
        for state in 0..4 {
            for token in 0..TOKENS {
                let mean = sums[state][token] / n;
                let error = ((squares[state][token] / n - mean * mean) / n).sqrt();
                let want = exact[state][token];
                assert!(
                    (mean - want).abs() <= 3.0 * error + 1e-7,
                    "{name}, state {state}, token {token}: {mean} ± {error}, expected {want}"
                );
            }
        }
    }
}

/// Summed over the group, the comparison with the second best of k has the gradient of the expected
/// best of k.
#[tokio::test]
async fn second_best_baseline_yields_unbiased_pass_k() {
    let policy = Policy::of(&simulator()).await;
    for k in 2..=GROUP {
        let compare = Compare::SecondBest { k: Some(k) };
        let found = policy
            .expectation(&Estimator::Group(GroupBaseline { compare, ..GroupBaseline::default() }));
        let truth = policy.exact_best_gradient(k as u32);
        let sums = found.map(|row| row.map(|mean| GROUP as f64 * mean));
        assert!(largest_difference(&sums, &truth) < 1e-12, "k = {k}: {sums:?}, truth {truth:?}");
    }
}

/// A critic trained on sampled attempts converges to the values of the states.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn critic_converges_to_true_values() {
    let actor = simulator();
    let critic = simulator();
    let policy = Policy::of(&actor).await;
    let rows = rows(&critic).await;
    let loss = Loss::new(PolicyLoss::Value { clip: Some(0.5) });
    let mut expected = [0.0; 4];
    for attempt in every_attempt() {
        expected[0] += policy.probability(attempt) * score(attempt);
        expected[1 + attempt[0]] += policy.0[1 + attempt[0]][attempt[1]] * score(attempt);
    }
    let steps = 6000u64;
    for step in 0..steps {
        let mut paths = Vec::new();
        for i in 0..8 {
            let attempt = sample_attempt(&actor, 1_000_000 + step * 8 + i).await;
            let mut path = input(attempt, &[0.0; 2]);
            for target in &mut path.targets {
                target.term.returns = score(attempt) as f32;
                target.term.weight = 1.0 / 16.0;
            }
            paths.push(path);
        }
        let values = critic.values(Arc::new(TreeBatch::merge(&paths).unwrap())).await.unwrap();
        let mut batch = TreeBatch::merge(&paths).unwrap();
        for (target, value) in batch.targets.clone().iter().zip(values) {
            let first = target.first_term as usize;
            batch.terms[first..first + target.terms as usize]
                .iter_mut()
                .for_each(|term| term.value = Some(value));
        }
        critic.forward_backward(Arc::new(batch), loss).await.unwrap();
        let remaining = 1.0 - step as f32 / steps as f32;
        let params = OptimParams {
            learning_rate: 0.004 * remaining,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: f32::INFINITY,
        };
        critic.optim_step(params).await.unwrap();
    }
    let weights = critic.weights();
    for (state, expected) in expected.iter().enumerate() {
        let value = f64::from(weights[rows[state] * TOKENS]);
        assert!((value - expected).abs() < 0.02, "state {state}: {value}, expected {expected}");
    }
}
