//! GRPO in one file: a small transformer with random weights learns to add two digits modulo 5.
//!
//! ```sh
//! cargo run --release -p levade-engine --example grpo -- 1      # with seed 1
//! ```
//!
//! Every step does what a run of `levade train` does, on tokens: it samples a group of completions
//! for each task, scores them, compares each completion with its group (the advantage), merges the
//! sequences into a tree so that shared tokens go through the model once, and updates the weights.
//! It omits text, tools, the store, checkpoints and resuming.

use std::sync::Arc;
use std::time::Duration;

use levade_engine::testing::{Compute, random_weights, tiny_config};
use levade_engine::{Engine, EngineOptions};
use levade_model::ModelConfig;
use levade_policy::{Learner, OptimParams, SampleRequest, Sampler, SamplingParams};
use levade_rl::{
    Estimator, GroupBaseline, Loss, Normalizer, PolicyLoss, Rollout, RolloutTokens, Sequence,
};
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Number of digits, which is also the size of the vocabulary. A random completion is right in one
/// of five cases.
const DIGITS: u32 = 5;
/// Number of completions of each task, which are compared with each other.
const GROUP_SIZE: usize = 16;
/// Number of steps, each of which trains on all tasks.
const STEPS: u64 = 60;

/// Sum of two digits.
#[derive(Clone, Copy)]
struct Task {
    a: u32,
    b: u32,
}

impl Task {
    fn all() -> Vec<Task> {
        (0..DIGITS).flat_map(|a| (0..DIGITS).map(move |b| Task { a, b })).collect()
    }

    fn prompt(self) -> Vec<u32> {
        vec![self.a, self.b]
    }

    /// Returns 1 for the right digit, and 0 otherwise.
    fn reward(self, completion: u32) -> f64 {
        f64::from(u8::from(completion == (self.a + self.b) % DIGITS))
    }
}

/// Sampled completion of one token, with its behavior log-probability.
struct Sample {
    task: usize,
    token: u32,
    logprob: f32,
    reward: f64,
}

/// Samples `count` completions of each task at a temperature. The random stream of a completion
/// depends on the step and its number only.
async fn sample(
    engine: &Engine,
    tasks: &[Task],
    (seed, step): (u64, u64),
    (count, temperature): (usize, f32),
) -> Result<Vec<Sample>> {
    let mut waiting = Vec::new();
    for index in 0..tasks.len() * count {
        let request = SampleRequest {
            seed,
            stream: step << 32 | index as u64,
            prompt: tasks[index / count].prompt(),
            params: SamplingParams { max_tokens: 1, temperature, ..SamplingParams::default() },
            ..SampleRequest::default()
        };
        waiting.push((index / count, engine.sample(request).await?));
    }
    let mut sampled = Vec::new();
    for (task, stream) in waiting {
        let completion = stream.collect(Duration::from_secs(60)).await?;
        let token = completion.tokens[0];
        let logprob = completion.logprobs[0];
        sampled.push(Sample { task, token, logprob, reward: tasks[task].reward(token) });
    }
    Ok(sampled)
}

/// Computes the advantage of each completion: its reward less the mean of its group, over the
/// group's deviation.
fn advantages(sampled: &[Sample]) -> Result<Vec<f64>> {
    let rollouts: Vec<Rollout> = sampled
        .iter()
        .map(|one| Rollout {
            group: one.task as u64,
            score: one.reward,
            sequences: vec![Sequence {
                turns: vec![1],
                rewards: vec![one.reward],
                ..Sequence::default()
            }],
            ..Rollout::default()
        })
        .collect();
    let estimated = Estimator::Group(GroupBaseline::scaled()).advantages(&rollouts)?;
    Ok(estimated.iter().map(|paths| paths[0].advantages[0]).collect())
}

/// Merges the sequences of a step into a batch. The normalizer is in the weights of the terms, so
/// the loss of the batch is a plain sum.
fn batch(tasks: &[Task], sampled: &[Sample], advantages: &[f64]) -> Result<TreeBatch> {
    let sizes: Vec<RolloutTokens> =
        sampled.iter().map(|one| RolloutTokens { group: one.task as u64, tokens: 1 }).collect();
    let weights = Normalizer::TokenMean.weights(&sizes);
    let sequences: Vec<SequenceInput> = sampled
        .iter()
        .enumerate()
        .map(|(index, one)| {
            let mut tokens = tasks[one.task].prompt();
            tokens.push(one.token);
            let term = Term {
                weight: weights[index] as f32,
                advantage: advantages[index] as f32,
                behavior: Some(one.logprob),
                ..Term::default()
            };
            let target = SequenceTarget { index: tokens.len() as u32 - 1, temperature: 1.0, term };
            SequenceInput { tokens: tokens.into(), targets: vec![target] }
        })
        .collect();
    Ok(TreeBatch::merge(&sequences)?)
}

fn mean_reward(sampled: &[Sample]) -> f64 {
    sampled.iter().map(|one| one.reward).sum::<f64>() / sampled.len() as f64
}

/// Trains from random weights. Calls `report` with each step and its mean reward. Returns the mean
/// rewards of completions sampled before the first step and after the last one.
pub async fn train(seed: u64, mut report: impl FnMut(u64, f64)) -> Result<(f64, f64)> {
    let config = ModelConfig {
        vocabulary: DIGITS as usize,
        context: 16,
        bos: None,
        eos: vec![],
        ..tiny_config()
    };
    let compute = Compute::new(2);
    let weights = random_weights(&compute, &config, seed);
    let options = EngineOptions { kv_memory_mb: 16, running: 512, ..EngineOptions::default() };
    // One engine samples and trains the same weights in the same memory.
    let engine = Engine::start_with(compute, weights, &options, None)?;
    let loss = Loss {
        policy: PolicyLoss::Clip { low: 0.2, high: 0.2, dual: None, trust: None, keep: None },
        kl: None,
        entropy: 0.0,
        interpolated: None,
    };
    let optimizer = OptimParams {
        learning_rate: 2e-3,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.0,
        max_grad_norm: 1.0,
    };
    let tasks = Task::all();
    let mut first = None;
    for step in 0..STEPS {
        let sampled = sample(&engine, &tasks, (seed, step), (GROUP_SIZE, 1.0)).await?;
        let reward = mean_reward(&sampled);
        report(step, reward);
        first.get_or_insert(reward);
        let batch = batch(&tasks, &sampled, &advantages(&sampled)?)?;
        let sums = engine.forward_backward(Arc::new(batch), loss).await?;
        // What was sampled is what is trained: no log-probability differs in any bit.
        assert_eq!(sums.mismatched, 0);
        engine.optim_step(optimizer).await?;
        engine.publish(step + 1).await?;
    }
    let sampled = sample(&engine, &tasks, (seed, STEPS), (GROUP_SIZE, 1.0)).await?;
    Ok((first.unwrap_or_default(), mean_reward(&sampled)))
}

#[tokio::main]
async fn main() -> Result<()> {
    let seed = std::env::args().nth(1).map_or(Ok(1), |text| text.parse())?;
    let (first, last) = train(seed, |step, reward| {
        if step % 10 == 0 {
            println!("step {step:>3}  reward {reward:.3}");
        }
    })
    .await?;
    println!("reward {first:.3} → {last:.3}");
    Ok(())
}
