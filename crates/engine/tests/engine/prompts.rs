//! Log-probabilities of prompts equal those that training computes for the same tokens.

use std::sync::Arc;
use std::time::Duration;

use levade_engine::testing::{Compute, random_weights, tiny_config};
use levade_engine::{Engine, EngineOptions, Isa, Precision};
use levade_policy::{
    Completion, FinishReason, Learner, LoraOptions, SampleRequest, Sampler, SamplingParams, uniform,
};
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};

const DEADLINE: Duration = Duration::from_secs(60);

fn options() -> EngineOptions {
    EngineOptions { kv_memory_mb: 8, batch_tokens: 512, ..EngineOptions::default() }
}

fn start(options: &EngineOptions) -> Engine {
    let compute = Compute::with_isa(2, Isa::detect(), options.precision);
    let weights = random_weights(&compute, &tiny_config(), 3);
    Engine::start_with(compute, weights, options, None).unwrap()
}

fn tokens(stream: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| 2 + (uniform(99, stream, i) * 250.0) as u32).collect()
}

fn request(stream: u64, prompt: Vec<u32>, params: SamplingParams) -> SampleRequest {
    SampleRequest { seed: 7, stream, prompt, params, ..SampleRequest::default() }
}

async fn sample(engine: &Engine, request: SampleRequest) -> Completion {
    engine.sample(request).await.unwrap().collect(DEADLINE).await.unwrap()
}

/// Merges a sequence whose tokens except the first are all targets.
fn batch_of(sequence: &[u32], temperature: f32) -> Arc<TreeBatch> {
    let targets = (1..sequence.len())
        .map(|index: usize| SequenceTarget {
            index: index as u32,
            temperature,
            term: Term::default(),
        })
        .collect();
    Arc::new(
        TreeBatch::merge(&[SequenceInput { tokens: sequence.to_vec().into(), targets }]).unwrap(),
    )
}

/// Prompt log-probabilities equal those that training computes, for the base weights and an
/// adapter, in both precisions and at several temperatures.
#[tokio::test]
async fn prompt_logprobs_match_training_bitwise() {
    for precision in [Precision::F32, Precision::Bf16] {
        let options = EngineOptions { precision, ..options() };
        let base = start(&options);
        let adapter = base.lora(LoraOptions::default(), 5, "tiny").await.unwrap();
        for (engine, temperature) in [(&base, 1.0), (&base, 0.6), (&adapter, 1.7), (&adapter, 0.0)]
        {
            let sequence = tokens(5, 200);
            let params = SamplingParams {
                temperature,
                max_tokens: 20,
                prompt_logprobs: Some(2),
                top_logprobs: 2,
                ..SamplingParams::default()
            };
            // Another request that is sampled in the same batches.
            let concurrent = SamplingParams { max_tokens: 20, ..SamplingParams::default() };
            let (scored, _) = tokio::join!(
                sample(engine, request(1, sequence.clone(), params.clone())),
                sample(&base, request(2, sequence.clone(), concurrent)),
            );
            let behavior = if temperature == 0.0 { 1.0 } else { temperature };
            let found = engine.logprobs(batch_of(&sequence, behavior)).await.unwrap();
            assert_eq!(found.len(), 199);
            assert_eq!(
                bits_of(&found),
                bits_of(&scored.prompt_logprobs),
                "{precision} at {temperature}"
            );
            // Scoring a completion as a prompt gives the log-probabilities reported during
            // sampling.
            let full = [&sequence[..], &scored.tokens].concat();
            let again = SamplingParams { max_tokens: 0, ..params };
            let again = sample(engine, request(3, full, again)).await;
            assert_eq!((again.finish, again.tokens.len()), (FinishReason::Length, 0));
            assert_eq!(bits_of(&again.prompt_logprobs[..199]), bits_of(&scored.prompt_logprobs));
            assert_eq!(bits_of(&again.prompt_logprobs[199..]), bits_of(&scored.logprobs));
            assert_eq!(again.prompt_top, [scored.prompt_top, scored.top].concat());
        }
    }
}

fn bits_of(logprobs: &[f32]) -> Vec<u32> {
    logprobs.iter().map(|p| p.to_bits()).collect::<Vec<_>>()
}
