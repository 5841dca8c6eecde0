//! Tests of the complete engine through its public interface: sampled and trained log-probabilities
//! have the same bits; batching, caching, threads and instruction sets change nothing; checkpoints
//! restore everything.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use levade_engine::testing::{Compute, Kernel, family_configs, random_weights, tiny_config};
use levade_engine::{Engine, EngineOptions, Isa, Precision, SumOrder};
use levade_model::ModelConfig;
use levade_policy::{
    Completion, DeviceStats, FinishReason, Learner, LoraOptions, OptimParams, PolicyError,
    SampleEvent, SampleRequest, SampleStream, Sampler, SamplingParams, TokenBytes, uniform,
};
use levade_rl::{Loss, PolicyLoss};
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};

const DEADLINE: Duration = Duration::from_secs(60);
const CROSS_ENTROPY: Loss = Loss::new(PolicyLoss::CrossEntropy);

fn options() -> EngineOptions {
    EngineOptions { kv_memory_mb: 8, batch_tokens: 512, ..EngineOptions::default() }
}

fn start(config: &ModelConfig, threads: usize, isa: Isa, options: &EngineOptions) -> Engine {
    let compute = Compute::with_isa(threads, isa, options.precision);
    let weights = random_weights(&compute, config, 3);
    Engine::start_with(compute, weights, options, Some(Arc::new(OneByte))).unwrap()
}

/// Tokenizer bytes in which token i is the byte i.
struct OneByte;

impl TokenBytes for OneByte {
    fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        const BYTES: [u8; 256] = {
            let mut bytes = [0; 256];
            let mut i = 0;
            while i < 256 {
                bytes[i] = i as u8;
                i += 1;
            }
            bytes
        };
        BYTES.get(id as usize..id as usize + 1)
    }
}

fn tokens(stream: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| 2 + (uniform(99, stream, i) * 250.0) as u32).collect()
}

/// Returns the counters of the device.
async fn stats(engine: &Engine) -> DeviceStats {
    engine.device_stats().await.unwrap().unwrap()
}

fn request(stream: u64, prompt: Vec<u32>, params: SamplingParams) -> SampleRequest {
    SampleRequest { seed: 7, stream, prompt, params, ..SampleRequest::default() }
}

async fn sample(engine: &Engine, request: SampleRequest) -> Completion {
    engine.sample(request).await.unwrap().collect(DEADLINE).await.unwrap()
}

/// A rollout: its sequence, the sampled positions with their log-probabilities, and the
/// temperature.
type Rollout = (Vec<u32>, Vec<(usize, f32)>, f32);

/// Samples rollouts of several turns that share prompts, all at once.
async fn rollouts(engine: &Engine, count: u64) -> Vec<Rollout> {
    let tasks: Vec<_> = (0..count)
        .map(|stream| {
            let engine = engine.clone();
            tokio::spawn(async move {
                let temperature = [1.0, 0.6, 1.7][stream as usize % 3];
                let mut sequence = tokens(stream / 4, 20 + 17 * (stream as usize / 4));
                let mut sampled = Vec::new();
                for turn in 0..3 {
                    let max_tokens = 5 + (stream as usize * 7 + turn * 3) % 23;
                    let params =
                        SamplingParams { temperature, max_tokens, ..SamplingParams::default() };
                    let completion =
                        sample(&engine, request(stream, sequence.clone(), params)).await;
                    sampled.extend(
                        completion
                            .logprobs
                            .iter()
                            .enumerate()
                            .map(|(i, p)| (sequence.len() + i, *p)),
                    );
                    sequence.extend(&completion.tokens);
                    // Tool result.
                    sequence.extend(tokens(1000 + stream, turn * 4 + 1));
                }
                (sequence, sampled, temperature)
            })
        })
        .collect();
    let mut found = Vec::new();
    for task in tasks {
        found.push(task.await.unwrap());
    }
    found
}

fn batch_of(rollouts: &[Rollout]) -> TreeBatch {
    let sequences: Vec<SequenceInput> = rollouts
        .iter()
        .map(|(sequence, sampled, temperature)| SequenceInput {
            tokens: sequence.clone().into(),
            targets: sampled
                .iter()
                .map(|(index, logprob)| SequenceTarget {
                    index: *index as u32,
                    temperature: *temperature,
                    term: Term { weight: 0.01, behavior: Some(*logprob), ..Term::default() },
                })
                .collect(),
        })
        .collect();
    TreeBatch::merge(&sequences).unwrap()
}

/// Recorded behavior log-probabilities equal those of the training forward pass, bit for bit, for
/// every family, precision, instruction set and number of threads, with chunked prompts, a cache
/// that must evict, and merged trees.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sampled_and_trained_logprobs_match_bitwise() {
    for (index, config) in family_configs().iter().enumerate() {
        for precision in [Precision::F32, Precision::Bf16] {
            let mut firsts: BTreeMap<SumOrder, Vec<Rollout>> = BTreeMap::new();
            for (isa, threads, running, step_rows, kv_memory_mb) in [
                (Isa::detect(), 2, 64, 256, 8),
                (Isa::detect(), 1, 3, 13, 1),
                (Isa::Avx512Bf16, 2, 6, 47, 1),
                (Isa::Avx512, 1, 4, 21, 1),
                (Isa::Avx2, 2, 5, 33, 1),
                (Isa::Portable, 1, 8, 64, 8),
            ] {
                // Portable code emulates the fused multiply-add if the compiler's baseline lacks
                // it: once is enough.
                if !Isa::available().contains(&isa) || (isa == Isa::Portable && index > 0) {
                    continue;
                }
                let options =
                    EngineOptions { precision, running, step_rows, kv_memory_mb, ..options() };
                let engine = start(config, threads, isa, &options);
                let rollouts = rollouts(&engine, 12).await;
                assert_nothing_differs(&engine, &rollouts, &format!("{precision}, {isa:?}")).await;
                // The same tokens, for any batching, caching, number of threads and, with one order
                // of sums, instruction set.
                let first = firsts
                    .entry(Kernel { isa, precision }.order())
                    .or_insert_with(|| rollouts.clone());
                assert_eq!(first, &rollouts, "{precision}, {isa:?}");
            }
        }
    }
}

/// Asserts that log-probabilities recorded at sampling equal those that training computes: in one
/// tree, separately, and in the metric that every step reports.
async fn assert_nothing_differs(engine: &Engine, rollouts: &[Rollout], case: &str) {
    let batch = Arc::new(batch_of(rollouts));
    let merged = engine.logprobs(batch.clone()).await.unwrap();
    for (target, logprob) in batch.targets.iter().zip(&merged) {
        for term in batch.terms_of(target) {
            assert_eq!(term.behavior.map(f32::to_bits), Some(logprob.to_bits()), "{case}");
        }
    }
    for rollout in rollouts.chunks(1) {
        let logprobs = engine.logprobs(Arc::new(batch_of(rollout))).await.unwrap();
        let sampled: Vec<u32> = rollout[0].1.iter().map(|(_, p)| p.to_bits()).collect();
        assert_eq!(sampled, logprobs.iter().map(|p| p.to_bits()).collect::<Vec<_>>(), "{case}");
    }
    let sums = engine.forward_backward(batch, CROSS_ENTROPY).await.unwrap();
    assert_eq!((sums.mismatched, sums.max_mismatch), (0, 0.0), "{case}");
    assert!(sums.behavior_terms > 300 && (sums.ratio - sums.behavior_terms as f64).abs() < 1e-9);
}

#[tokio::test]
async fn shared_prompt_is_computed_once() {
    let engine = start(&tiny_config(), 1, Isa::detect(), &options());
    let prompt = tokens(1, 90);
    let params = SamplingParams { max_tokens: 3, ..SamplingParams::default() };
    let mut streams = Vec::new();
    for stream in 0..8 {
        streams.push(engine.sample(request(stream, prompt.clone(), params.clone())).await.unwrap());
    }
    for stream in streams {
        stream.collect(DEADLINE).await.unwrap();
    }
    let stats = stats(&engine).await;
    assert_eq!((stats.prefix_hits, stats.prefilled, stats.sampled), (7 * 89, 90 + 7, 24));
    let load = engine.workload().await.unwrap();
    assert_eq!((load.running, load.waiting), (0, 0));
}

#[tokio::test]
async fn completions_report_their_finish_reason() {
    let engine = start(&tiny_config(), 1, Isa::detect(), &options());
    let plain = SamplingParams { max_tokens: 40, ..SamplingParams::default() };
    let free = sample(&engine, request(1, tokens(1, 10), plain.clone())).await;
    assert_eq!((free.finish, free.tokens.len()), (FinishReason::Length, 40));
    assert_eq!(free.versions.iter().map(|run| run.len).sum::<u32>(), 40);

    let stop_ids = vec![free.tokens[6]];
    let at = free.tokens.iter().position(|t| *t == stop_ids[0]).unwrap();
    let stopped =
        sample(&engine, request(1, tokens(1, 10), SamplingParams { stop_ids, ..plain.clone() }))
            .await;
    assert_eq!((stopped.finish, &stopped.tokens[..]), (FinishReason::StopId, &free.tokens[..=at]));

    let pair = free.tokens.windows(2).position(|w| w[0] < 128 && w[1] < 128).unwrap();
    let text: String = free.tokens[pair..pair + 2].iter().map(|t| char::from(*t as u8)).collect();
    let params = SamplingParams { stop_strings: vec![text], ..plain.clone() };
    let stopped = sample(&engine, request(1, tokens(1, 10), params)).await;
    assert_eq!(stopped.finish, FinishReason::StopString);
    assert_eq!(stopped.tokens, free.tokens[..pair + 2]);

    let full = sample(&engine, request(1, tokens(1, 250), plain.clone())).await;
    assert_eq!((full.finish, full.tokens.len()), (FinishReason::Context, 6));

    let long = engine.sample(request(1, tokens(1, 256), plain.clone())).await.unwrap_err();
    assert!(matches!(long, PolicyError::PromptTooLong { prompt: 256, context: 256 }), "{long}");
    let empty = engine.sample(request(1, vec![], plain.clone())).await.unwrap_err();
    assert!(empty.to_string().contains("empty"));
    let cold = SamplingParams { temperature: -1.0, ..plain };
    let cold = engine.sample(request(1, tokens(1, 5), cold)).await.unwrap_err();
    assert!(cold.to_string().contains("temperature = -1"));
}

#[tokio::test]
async fn dropped_stream_frees_its_slot() {
    let engine =
        start(&tiny_config(), 1, Isa::detect(), &EngineOptions { running: 1, ..options() });
    let params = SamplingParams { max_tokens: 200, ..SamplingParams::default() };
    let abandoned = engine.sample(request(1, tokens(1, 5), params)).await.unwrap();
    drop(abandoned);
    let params = SamplingParams { max_tokens: 2, ..SamplingParams::default() };
    let next = sample(&engine, request(2, tokens(2, 5), params)).await;
    assert_eq!(next.tokens.len(), 2);
}

/// Reads a stream until `count` tokens have arrived.
async fn first_tokens(stream: &mut SampleStream, count: usize) -> Completion {
    let mut found = Completion::default();
    while found.tokens.len() < count {
        match stream.next().await.unwrap().unwrap() {
            SampleEvent::Tokens { tokens, logprobs, version, .. } => {
                found.extend(&tokens, &logprobs, version)
            }
            other => panic!("{other:?} after {} tokens", found.tokens.len()),
        }
    }
    found
}

/// An aborted request keeps its sampled tokens, and when requested again continues with the tokens
/// that would have followed.
#[tokio::test]
async fn aborted_request_resumes_bitwise() {
    // Long enough that no request finishes before the abort arrives.
    const NEW: usize = 3000;
    let config = ModelConfig { context: 4096, ..tiny_config() };
    let engine = start(&config, 2, Isa::detect(), &options());
    let params = SamplingParams { max_tokens: NEW, ..SamplingParams::default() };
    let full = sample(&engine, request(5, tokens(1, 30), params.clone())).await;

    let mut stream = engine.sample(request(5, tokens(1, 30), params.clone())).await.unwrap();
    let mut other = engine.sample(request(6, tokens(1, 30), params.clone())).await.unwrap();
    // Its prompt has been looked up in the cache by now.
    let num_started = first_tokens(&mut other, 1).await.tokens.len();
    let mut part = first_tokens(&mut stream, 20).await;
    assert_eq!(engine.abort(Some(5)).await.unwrap(), 1);
    let rest = stream.collect(DEADLINE).await.unwrap();
    assert_eq!(rest.finish, FinishReason::Aborted);
    part.extend(&rest.tokens, &rest.logprobs, 0);
    assert!(part.tokens.len() < NEW && part.tokens == full.tokens[..part.tokens.len()]);

    let before = stats(&engine).await;
    let prompt = [tokens(1, 30), part.tokens.clone()].concat();
    let rest_params = SamplingParams { max_tokens: NEW - part.tokens.len(), ..params.clone() };
    let resumed = sample(&engine, request(5, prompt.clone(), rest_params)).await;
    assert_eq!([part.tokens, resumed.tokens].concat(), full.tokens);
    assert_eq!([part.logprobs, resumed.logprobs].concat(), full.logprobs);
    assert_eq!(resumed.finish, FinishReason::Length);
    let after = stats(&engine).await;
    assert_eq!(
        after.prefix_hits - before.prefix_hits,
        prompt.len() as u64 - 1,
        "nothing is computed again"
    );
    assert!(after.cache_filled > 0.0 && after.busy_seconds > before.busy_seconds);

    let num_total = num_started + other.collect(DEADLINE).await.unwrap().tokens.len();
    assert_eq!(num_total, NEW, "the other went on");
    let streams = [7, 8].map(|stream| request(stream, tokens(2, 9), params.clone()));
    let mut ends = Vec::new();
    for stream in streams {
        ends.push(engine.sample(stream).await.unwrap());
    }
    assert_eq!(engine.abort(None).await.unwrap(), 2);
    for end in ends {
        assert_eq!(end.collect(DEADLINE).await.unwrap().finish, FinishReason::Aborted);
    }
    assert_eq!(engine.abort(None).await.unwrap(), 0);
}

/// While the engine learns, it reports its pause: a client that waits for a completion can then see
/// the reason for the delay.
#[tokio::test]
async fn training_engine_reports_its_pause() {
    let config = ModelConfig { context: 4096, ..tiny_config() };
    let engine = start(&config, 1, Isa::Portable, &options());
    let target = SequenceTarget { index: 3999, temperature: 1.0, term: Term::default() };
    let sequence = SequenceInput { tokens: tokens(3, 4000).into(), targets: vec![target] };
    let mut learns = engine.logprobs(Arc::new(TreeBatch::merge(&[sequence]).unwrap()));
    let mut pauses = vec![Duration::ZERO];
    loop {
        tokio::select! {
            biased;
            learned = &mut learns => break drop(learned.unwrap()),
            paused = engine.paused() => pauses.push(paused.unwrap()),
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    pauses.dedup();
    assert!(pauses.len() > 2 && pauses.is_sorted(), "{pauses:?}");
    assert!(engine.paused().await.unwrap() >= pauses[pauses.len() - 1]);
}

/// Weights change in the middle of a completion. The completion continues, each token records the
/// version that sampled it, and its log-probability equals the one that training computes under
/// those weights, unless the cache was kept.
#[tokio::test]
async fn completions_continue_across_weight_update() {
    // A learner's command lets completions run for a while first, so this completion has to be
    // long.
    const NEW: usize = 1500;
    let config = ModelConfig { context: 2000, ..tiny_config() };
    for keep_cache in [false, true] {
        let options = EngineOptions { keep_cache, ..options() };
        let engine = start(&config, 2, Isa::detect(), &options);
        let params = SamplingParams { max_tokens: NEW, ..SamplingParams::default() };
        let prompt = tokens(1, 40);
        let mut stream = engine.sample(request(5, prompt.clone(), params)).await.unwrap();
        let mut completion = first_tokens(&mut stream, 10).await;
        let optim = OptimParams { learning_rate: 1e-3, ..optim() };
        let target = SequenceTarget {
            index: 3,
            temperature: 1.0,
            term: Term { weight: 1.0, ..Term::default() },
        };
        let sequence = SequenceInput { tokens: tokens(3, 5).into(), targets: vec![target] };
        let batch = Arc::new(TreeBatch::merge(&[sequence]).unwrap());
        engine.forward_backward(batch, CROSS_ENTROPY).await.unwrap();
        engine.optim_step(optim).await.unwrap();
        engine.publish(1).await.unwrap();
        let rest = stream.collect(DEADLINE).await.unwrap();
        let mut at = 0;
        for run in &rest.versions {
            let sampled = at..at + run.len as usize;
            completion.extend(&rest.tokens[sampled.clone()], &rest.logprobs[sampled], run.version);
            at += run.len as usize;
        }
        let versions: Vec<u64> = completion.versions.iter().map(|run| run.version).collect();
        assert_eq!((versions, completion.tokens.len()), (vec![0, 1], NEW));

        let old = completion.versions[0].len as usize;
        let sampled = completion.logprobs.iter().enumerate().map(|(i, p)| (40 + i, *p)).collect();
        let sequence = [prompt, completion.tokens.clone()].concat();
        let current =
            engine.logprobs(Arc::new(batch_of(&[(sequence, sampled, 1.0)]))).await.unwrap();
        let equal = current[old..]
            .iter()
            .zip(&completion.logprobs[old..])
            .filter(|(a, b)| a.to_bits() == b.to_bits());
        let equal = equal.count();
        let new = NEW - old;
        assert!(new > 10 && (equal == new) != keep_cache, "{equal} of {new} are equal");
    }
}

fn optim() -> OptimParams {
    OptimParams {
        learning_rate: 0.01,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.01,
        max_grad_norm: 1.0,
    }
}

#[path = "training_state.rs"]
mod training_state;
