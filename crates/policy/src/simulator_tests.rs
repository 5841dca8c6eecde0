//! Tests that the simulator keeps the contracts of [`Sampler`] and [`Learner`], as engines must.

use levade_rl::PolicyLoss;
use levade_tree::{SequenceInput, SequenceTarget, Term};

use super::*;
use crate::{
    AllowedTokens, Completion, Constraint, FinishReason, Grammar, MicroBatchPlan, SamplingParams,
    TimeoutPolicy, TrainRequest, UpdateSequences,
};

fn small() -> SimulatorConfig {
    SimulatorConfig {
        vocabulary: 7,
        order: 2,
        rows: 500,
        context: 40,
        spread: 1.0,
        ..SimulatorConfig::default()
    }
}

fn request(stream: u64, temperature: f32) -> SampleRequest {
    let params = SamplingParams {
        max_tokens: 12,
        temperature,
        stop_ids: vec![6],
        ..SamplingParams::default()
    };
    SampleRequest { seed: 5, stream, prompt: vec![1, 2, 3], params, ..SampleRequest::default() }
}

async fn complete(simulator: &Simulator, request: SampleRequest) -> Completion {
    simulator.sample(request).await.unwrap().collect(Duration::from_secs(10)).await.unwrap()
}

fn sequence_input(
    prompt: &[u32],
    completion: &Completion,
    temperature: f32,
    advantage: f32,
) -> SequenceInput {
    SequenceInput {
        tokens: prompt.iter().chain(&completion.tokens).copied().collect(),
        targets: (0..completion.tokens.len())
            .map(|i: usize| SequenceTarget {
                index: (prompt.len() + i) as u32,
                temperature,
                term: Term {
                    weight: 0.25,
                    advantage,
                    behavior: Some(completion.logprobs[i]),
                    ..Term::default()
                },
            })
            .collect(),
    }
}

const CLIP: Loss = Loss::clip(0.2, 0.2);
const IMITATE: Loss = Loss::new(PolicyLoss::CrossEntropy);
const ADAM: OptimParams = OptimParams {
    learning_rate: 0.1,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-8,
    weight_decay: 0.001,
    max_grad_norm: 1.0,
};

#[tokio::test]
async fn sampler_drops_handles_of_finished_completions() {
    let simulator = Simulator::new(small());
    for stream in 0..500 {
        complete(&simulator, request(stream, 1.0)).await;
    }
    let kept = simulator.completions.lock().unwrap().capacity();
    assert!(kept < 100, "{kept} of 500");
}

#[tokio::test]
async fn sampled_logprobs_match_learner_bitwise() {
    let simulator = Simulator::new(small());
    for temperature in [1.0, 0.6] {
        let mut sequences = Vec::new();
        for stream in 0..20 {
            let completion = complete(&simulator, request(stream, temperature)).await;
            assert!(completion.tokens.len() == 12 || completion.tokens.ends_with(&[6]));
            sequences.push(sequence_input(&[1, 2, 3], &completion, temperature, 0.5));
        }
        let batch = Arc::new(TreeBatch::merge(&sequences).unwrap());
        let sums = simulator.forward_backward(batch.clone(), CLIP).await.unwrap();
        assert_eq!((sums.mismatched, sums.max_mismatch), (0, 0.0));
        assert_eq!(sums.behavior_terms, sums.terms);
        assert_eq!(sums.ratio, sums.terms as f64);
        let again = simulator.logprobs(batch.clone()).await.unwrap();
        for (target, logprob) in batch.targets.iter().zip(again) {
            assert_eq!(
                batch.terms_of(target)[0].behavior.map(f32::to_bits),
                Some(logprob.to_bits())
            );
        }
    }
}

/// The log-probabilities of a prompt equal those that the learner computes, with and without a
/// completion.
#[tokio::test]
async fn prompt_logprobs_match_learner_bitwise() {
    let simulator = Simulator::new(small());
    let prompt = [1, 2, 3, 3, 0, 5, 2, 1];
    for (temperature, max_tokens) in [(1.0, 4), (0.6, 0), (0.0, 4)] {
        let mut request = request(1, temperature);
        request.prompt = prompt.to_vec();
        request.params.max_tokens = max_tokens;
        request.params.prompt_logprobs = Some(2);
        let behavior = request.params.behavior_temperature();
        let before = simulator.device_stats().await.unwrap().unwrap().prefilled;
        let completion = complete(&simulator, request).await;
        let after = simulator.device_stats().await.unwrap().unwrap().prefilled;
        assert_eq!(after - before, 8, "computed whole");
        assert!(
            completion.tokens.len() <= max_tokens
                && (max_tokens == 0) == completion.tokens.is_empty()
        );
        assert!(
            completion.prompt_top.len() == 7
                && completion.prompt_top.iter().all(|top| top.len() == 2)
        );
        let tokens = prompt[1..].to_vec();
        let logprobs = completion.prompt_logprobs;
        let full = Completion { tokens, logprobs, ..Completion::default() };
        let batch = Arc::new(
            TreeBatch::merge(&[sequence_input(&prompt[..1], &full, behavior, 0.5)]).unwrap(),
        );
        let found = simulator.logprobs(batch).await.unwrap();
        assert_eq!(found, full.logprobs);
    }
}

/// A constraint that increases the token by 1 or 2 per step, starting from 1 or 2, and ends at 4.
struct Stairs(u32);

impl Grammars for Stairs {
    fn start(&self, _: &Grammar) -> Result<Box<dyn Constraint>, PolicyError> {
        Ok(Box::new(Stairs(self.0)))
    }
}

impl Constraint for Stairs {
    fn allowed(&mut self) -> Result<AllowedTokens, PolicyError> {
        let tokens = (self.0 + 1..=(self.0 + 2).min(4)).collect();
        Ok(AllowedTokens { tokens, may_end: self.0 == 4 })
    }

    fn push(&mut self, token: u32) -> Result<(), PolicyError> {
        if token <= self.0 || token > self.0 + 2 {
            return Err(PolicyError::Invalid(format!("no step from {} to {token}", self.0)));
        }
        self.0 = token;
        Ok(())
    }
}

/// Completions match the grammar and are recorded as filtered, also when they continue an aborted
/// completion. Without grammars, the simulator rejects such requests.
#[tokio::test]
async fn constrained_completions_match_grammar() {
    let plain = Simulator::new(small());
    let constrained = |stream, temperature| {
        let mut request = request(stream, temperature);
        request.params.grammar = Some(Grammar::JsonObject);
        request
    };
    let rejected = plain.sample(constrained(1, 1.0)).await.err().unwrap();
    assert!(rejected.to_string().contains("without support for grammars"), "{rejected}");
    let simulator = plain.with_grammars(Arc::new(Stairs(0)));
    let mut sampled = std::collections::BTreeSet::new();
    for stream in 0..40 {
        let mut request = constrained(stream, [1.0, 0.6, 0.0][stream as usize % 3]);
        let params = request.params.clone();
        let completion = complete(&simulator, request.clone()).await;
        let (last, stairs) = completion.tokens.split_last().unwrap();
        assert_eq!((*last, stairs.last(), completion.finish), (6, Some(&4), FinishReason::StopId));
        assert!(
            [&[0], stairs].concat().windows(2).all(|w| w[0] < w[1] && w[1] <= w[0] + 2),
            "{stairs:?}"
        );
        sampled.insert(stairs.to_vec());
        request.prompt.push(stairs[0]);
        request.params.sampled_before = 1;
        let rest = complete(&simulator, request.clone()).await;
        assert_eq!(rest.tokens, completion.tokens[1..]);
        request.params.sampled_before = 2;
        assert!(
            simulator.sample(request).await.is_err(),
            "the prompt's own token is no part of the form"
        );
        assert!(!completion.into_segment(None, &params, 0).is_target());
    }
    assert!(sampled.len() > 3, "{sampled:?}");
}

#[tokio::test]
async fn simulated_completions_are_independent_and_follow_the_distribution() {
    let simulator = Simulator::new(small());
    let standalone = complete(&simulator, request(3, 1.0)).await;
    let (a, b) =
        tokio::join!(complete(&simulator, request(3, 1.0)), complete(&simulator, request(4, 1.0)));
    assert_eq!(a, standalone);
    assert_ne!(b, standalone);
    // A continued completion samples the same tokens, because positions are absolute.
    let mut full = request(3, 1.0);
    full.params.stop_ids.clear();
    let mut first = full.clone();
    let mut rest = full.clone();
    let full = complete(&simulator, full).await;
    first.params.max_tokens = 5;
    let head = complete(&simulator, first).await;
    rest.prompt.extend(&head.tokens);
    rest.params.max_tokens = 7;
    assert_eq!([head.tokens, complete(&simulator, rest).await.tokens].concat(), full.tokens);

    let trials = 4000;
    let mut counts = [0.0; 7];
    for stream in 0..trials {
        let mut one = request(stream, 0.6);
        one.params.max_tokens = 1;
        counts[complete(&simulator, one).await.tokens[0] as usize] += 1.0 / trials as f64;
    }
    let expected =
        simulator.config.softmax(&simulator.weights(), simulator.config.row_start(&[2, 3]), 0.6);
    for (count, p) in counts.iter().zip(&expected.probabilities) {
        // Five standard deviations of the observed frequency.
        assert!((count - p).abs() < 5.0 * (p * (1.0 - p) / trials as f64).sqrt(), "{count} {p}");
    }
    let greedy = complete(&simulator, request(0, 0.0)).await;
    assert_eq!(greedy, complete(&simulator, request(1, 0.0)).await);
}

#[tokio::test]
async fn forward_backward_matches_numeric_gradient() {
    let simulator = Simulator::new(small());
    let mut sequences = Vec::new();
    for stream in 0..3 {
        let completion = complete(&simulator, request(stream, 0.8)).await;
        sequences.push(sequence_input(&[1, 2, 3], &completion, 0.8, stream as f32 - 0.7));
    }
    let batch = Arc::new(TreeBatch::merge(&sequences).unwrap());
    simulator.forward_backward(batch.clone(), CLIP).await.unwrap();
    let gradient = simulator.lock_state().gradient.clone();
    let mut checked = 0;
    for i in (0..gradient.len()).filter(|&i| gradient[i] != 0.0) {
        let at = |shift: f32| {
            let old = simulator.lock_state().weights[i];
            simulator.lock_state().weights[i] = old + shift;
            let sums = futures_block(simulator.forward_backward(batch.clone(), CLIP)).unwrap();
            simulator.lock_state().weights[i] = old;
            sums.loss
        };
        let numeric = (at(1e-3) - at(-1e-3)) / 2e-3;
        assert!((numeric - gradient[i]).abs() < 2e-3, "{i}: {numeric} {}", gradient[i]);
        checked += 1;
    }
    assert!(checked > 20);
}

/// The simulator never waits while it trains, so one poll finishes the future.
fn futures_block<T>(future: impl Future<Output = T>) -> T {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).as_mut().poll(&mut context) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("the simulator waited"),
    }
}

#[tokio::test]
async fn saved_training_state_resumes_bitwise() {
    let simulator = Simulator::new(small());
    let demonstration =
        Completion { tokens: vec![5, 4, 6], logprobs: vec![0.0; 3], ..Completion::default() };
    let batch = Arc::new(
        TreeBatch::merge(&[sequence_input(&[1, 2, 3], &demonstration, 1.0, 0.0)]).unwrap(),
    );
    let train = async |simulator: &Simulator, steps: usize| {
        let mut loss = 0.0;
        for _ in 0..steps {
            loss = simulator.forward_backward(batch.clone(), IMITATE).await.unwrap().loss;
            assert!(simulator.optim_step(ADAM).await.unwrap().applied);
        }
        loss
    };
    let before = train(&simulator, 1).await;
    assert!(train(&simulator, 400).await < 0.1 * before);
    // Samplers use new weights only after publication.
    assert_eq!(simulator.version().await.unwrap(), 0);
    simulator.publish(401).await.unwrap();
    let completion = complete(&simulator, request(0, 0.0)).await;
    assert_eq!((completion.tokens, completion.versions[0].version), (vec![5, 4, 6], 401));

    let dir = tempfile::tempdir().unwrap();
    simulator.save(dir.path(), true).await.unwrap();
    let other = Simulator::new(SimulatorConfig { seed: 9, ..small() });
    other.load(dir.path(), true).await.unwrap();
    train(&simulator, 3).await;
    train(&other, 3).await;
    assert_eq!(simulator.weights(), other.weights());
    // Without its saved state the optimizer starts from zero.
    other.load(dir.path(), false).await.unwrap();
    train(&other, 3).await;
    assert_ne!(simulator.weights(), other.weights());

    let bigger = Simulator::new(SimulatorConfig { rows: 501, ..small() });
    let error = bigger.load(dir.path(), true).await.unwrap_err().to_string();
    assert!(error.contains("simulator.weights has 14000 bytes instead of 14028"), "{error}");
}

#[tokio::test]
async fn optim_step_skips_non_finite_gradient() {
    let simulator = Simulator::new(small());
    let before = simulator.weights();
    simulator.lock_state().gradient[3] = f64::NAN;
    assert!(!simulator.optim_step(ADAM).await.unwrap().applied);
    assert_eq!(simulator.weights(), before);
    assert!(simulator.optim_step(ADAM).await.unwrap().applied);
}

#[tokio::test]
async fn sample_injects_failures_and_rejects_invalid_requests() {
    let flaky = Simulator::new(SimulatorConfig { failures: 0.5, ..small() });
    let mut failed = Vec::new();
    for stream in 0..40 {
        let stream = flaky.sample(request(stream, 1.0)).await.unwrap();
        failed.push(stream.collect(Duration::from_secs(10)).await.is_err());
    }
    let count = failed.iter().filter(|f| **f).count();
    assert!((10..=30).contains(&count), "{count}");
    let again = flaky.sample(request(0, 1.0)).await.unwrap().collect(Duration::from_secs(10)).await;
    assert_eq!(again.is_err(), failed[0]);

    let simulator = Simulator::new(small());
    let mut long = request(0, 1.0);
    long.prompt = vec![1; 40];
    assert!(matches!(
        simulator.sample(long).await,
        Err(PolicyError::PromptTooLong { prompt: 40, context: 40 })
    ));
    let mut foreign = request(0, 1.0);
    foreign.prompt = vec![7];
    assert!(simulator.sample(foreign).await.unwrap_err().to_string().contains("token 7"));
    let mut filtered = request(0, 1.0);
    filtered.params.top_k = 2;
    assert!(simulator.sample(filtered).await.is_err());
    let mut full = request(0, 1.0);
    (full.prompt, full.params.stop_ids) = (vec![1; 35], Vec::new());
    assert_eq!(complete(&simulator, full).await.finish, FinishReason::Context);
}

#[tokio::test]
async fn latency_preserves_tokens_and_respects_deadlines() {
    let slow = Simulator::new(SimulatorConfig { latency: Duration::from_millis(200), ..small() });
    let stream = slow.sample(request(0, 1.0)).await.unwrap();
    let error = stream.collect(Duration::from_millis(20)).await.unwrap_err();
    assert!(matches!(error, PolicyError::Deadline(..)), "{error}");
    let quick = complete(&Simulator::new(small()), request(0, 1.0)).await;
    let slow = Simulator::new(SimulatorConfig { latency: Duration::from_millis(2), ..small() });
    assert_eq!(complete(&slow, request(0, 1.0)).await, quick);
}

/// Time passes as on one machine: the time of a batch depends on its size, a prompt is computed
/// once, excess sequences wait, and nothing is sampled during training.
#[tokio::test(start_paused = true)]
async fn simulated_time_matches_device_timing() {
    let millis = Duration::from_millis;
    let timing = Timing {
        prompt: millis(4),
        batch: millis(10),
        sequence: millis(1),
        learn: millis(2),
        update: millis(50),
    };
    let config = SimulatorConfig { timing, running: 2, ..small() };
    let simulator = Simulator::new(config.clone());
    let start = tokio::time::Instant::now();
    let first = complete(&simulator, endless_request(0)).await;
    assert_eq!(start.elapsed(), millis(3 * 4 + 12 * 11));

    let mut streams = Vec::new();
    for stream in 1..4 {
        streams.push(simulator.sample(endless_request(stream)).await.unwrap());
    }
    tokio::time::sleep(millis(1)).await;
    let load = simulator.workload().await.unwrap();
    assert_eq!((load.running, load.waiting), (2, 1));
    let start = tokio::time::Instant::now();
    for stream in streams {
        stream.collect(Duration::from_secs(10)).await.unwrap();
    }
    // Two sequences run concurrently, then the third. One token of each prompt is computed; the
    // rest is cached.
    let expected = millis(4 + 12 * 12) + millis(4 + 12 * 11);
    assert!(start.elapsed().abs_diff(expected) <= millis(2), "{:?}", start.elapsed());
    let stats = async || simulator.device_stats().await.unwrap().unwrap();
    let found = stats().await;
    assert_eq!((found.prefilled, found.prefix_hits, found.sampled), (6, 6, 48));

    let batch =
        Arc::new(TreeBatch::merge(&[sequence_input(&[1, 2, 3], &first, 1.0, 0.5)]).unwrap());
    let stream = simulator.sample(endless_request(9)).await.unwrap();
    tokio::task::yield_now().await;
    let start = tokio::time::Instant::now();
    simulator.forward_backward(batch.clone(), CLIP).await.unwrap();
    simulator.optim_step(ADAM).await.unwrap();
    stream.collect(Duration::from_secs(10)).await.unwrap();
    let learning = millis(15 * 2 + 50);
    assert!(start.elapsed() >= learning + millis(12 * 11), "{:?}", start.elapsed());
    assert_eq!(simulator.paused().await.unwrap(), learning);
    let prefilled = stats().await.prefilled;

    // New weights clear the prefix cache.
    simulator.publish(1).await.unwrap();
    complete(&simulator, endless_request(10)).await;
    assert_eq!(stats().await.prefilled, prefilled + 3);

    let fails = async |fraction| {
        let simulator =
            Simulator::new(SimulatorConfig { learner_failures: fraction, ..config.clone() });
        let mut failed = Vec::new();
        for _ in 0..40 {
            failed.push(simulator.logprobs(batch.clone()).await.is_err());
        }
        failed
    };
    let half = fails(0.5).await;
    assert!((10..=30).contains(&half.iter().filter(|failed| **failed).count()), "{half:?}");
    assert_eq!(half, fails(0.5).await);
}

fn endless_request(stream: u64) -> SampleRequest {
    let mut request = request(stream, 1.0);
    request.params.stop_ids.clear();
    request
}

/// Entropy and Σ p² are those of the distribution formed by the log-probabilities of all tokens.
#[tokio::test]
async fn predictions_match_entropy_and_squared_probabilities() {
    let config = SimulatorConfig {
        vocabulary: 5,
        spread: 2.0,
        rows: 64,
        context: 8,
        ..SimulatorConfig::default()
    };
    let simulator = Simulator::new(config);
    let all: Vec<SequenceInput> = (0..5)
        .map(|token| SequenceInput {
            tokens: vec![1, 2, token].into(),
            targets: vec![SequenceTarget { index: 2, temperature: 0.7, term: Term::default() }],
        })
        .collect();
    let batch = Arc::new(TreeBatch::merge(&all).unwrap());
    let found = simulator.predictions(batch.clone()).await.unwrap();
    assert_eq!(found.logprobs, simulator.logprobs(batch).await.unwrap());
    let p: Vec<f64> = found.logprobs.iter().map(|logprob| f64::from(*logprob).exp()).collect();
    let entropy: f64 = p.iter().map(|p| -p * p.ln()).sum();
    let squares: f64 = p.iter().map(|p| p * p).sum();
    assert!(entropy > 0.1 && squares < 0.95, "{p:?}");
    assert!(found.entropies.iter().all(|found| (f64::from(*found) - entropy).abs() < 1e-5));
    assert!(found.concentrations.iter().all(|found| (f64::from(*found) - squares).abs() < 1e-5));
}

/// Compares penalties, biases and alternatives with a naive computation in f64. A completion that
/// is truncated anywhere and continued is the same.
#[tokio::test]
async fn adjusted_sampling_matches_naive_reference() {
    let simulator = Simulator::new(small());
    let weights = simulator.weights();
    let mut differ = 0;
    for stream in 0..40 {
        let temperature = [1.0, 0.6, 0.0][stream as usize % 3];
        let mut request = request(stream, temperature);
        request.params.repetition_penalty = [1.0, 1.3][stream as usize / 3 % 2];
        request.params.presence_penalty = 0.75;
        request.params.frequency_penalty = 0.5;
        request.params.logit_bias = [(2, -1.25), (5, 0.5)].into();
        (request.params.min_tokens, request.params.top_logprobs) = (4, 3);
        let completion = complete(&simulator, request.clone()).await;
        assert_eq!(
            (completion.top.len(), request.params.is_filtered()),
            (completion.tokens.len(), true)
        );

        let mut sequence = request.prompt.clone();
        for (i, token) in completion.tokens.iter().enumerate() {
            let at = simulator.config.row_start(&sequence);
            let t = if temperature == 0.0 { 1.0 } else { f64::from(temperature) };
            let plain: Vec<f64> = weights[at..at + 7].iter().map(|z| f64::from(*z)).collect();
            let masses: Vec<f64> = (0..7)
                .map(|id: usize| {
                    let same = |tokens: &[u32]| {
                        tokens.iter().filter(|token| **token as usize == id).count() as f64
                    };
                    let mut z = plain[id];
                    if same(&sequence) > 0.0 {
                        let penalty = f64::from(request.params.repetition_penalty);
                        z = if z > 0.0 { z / penalty } else { z * penalty };
                    }
                    let count = same(&sequence[3..]);
                    z -= 0.5 * count + if count > 0.0 { 0.75 } else { 0.0 };
                    z += [0.0, 0.0, -1.25, 0.0, 0.0, 0.5, 0.0][id];
                    if id == 6 && i < 4 { 0.0 } else { (z / t).exp() }
                })
                .collect();
            let goal = uniform(5, stream, sequence.len() as u64) * masses.iter().sum::<f64>();
            let sampled = (0..7).find(|id| masses[..=*id].iter().sum::<f64>() > goal).unwrap();
            let best = (0..7).rev().max_by(|a, b| masses[*a].total_cmp(&masses[*b])).unwrap();
            assert_eq!(
                *token as usize,
                if temperature == 0.0 { best } else { sampled },
                "{stream} {i}"
            );
            // The recorded log-probabilities are those of the unadjusted distribution.
            let total: f64 = plain.iter().map(|z| (z / t).exp()).sum();
            let mut logprobs: Vec<(u32, f64)> =
                plain.iter().enumerate().map(|(id, z)| (id as u32, z / t - total.ln())).collect();
            assert!((f64::from(completion.logprobs[i]) - logprobs[*token as usize].1).abs() < 1e-6);
            logprobs.sort_by(|a, b| b.1.total_cmp(&a.1));
            for (found, want) in completion.top[i].iter().zip(&logprobs) {
                assert!(
                    found.0 == want.0 && (f64::from(found.1) - want.1).abs() < 1e-6,
                    "{found:?} {want:?}"
                );
            }
            assert_eq!(completion.top[i].len(), 3);
            sequence.push(*token);
        }
        let split = 1 + stream as usize % (completion.tokens.len() - 1);
        let mut rest = request.clone();
        rest.prompt.extend(&completion.tokens[..split]);
        (rest.params.max_tokens, rest.params.sampled_before) = (12 - split, split);
        let continued = complete(&simulator, rest.clone()).await;
        assert_eq!(
            (&continued.tokens[..], &continued.top[..]),
            (&completion.tokens[split..], &completion.top[split..])
        );
        rest.params.sampled_before = 0;
        differ +=
            usize::from(complete(&simulator, rest).await.tokens != completion.tokens[split..]);
    }
    assert!(differ > 10, "what was drawn before counts: {differ}");
}

#[path = "simulator_updates_tests.rs"]
mod updates;
