//! Engine side of the comparisons in `bench/`: reads one request per line, runs it, and prints one
//! line of JSON with its duration in seconds. `bench/README.md` describes the requests. The process
//! stays resident, so that peers can alternate in the same run.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use levade_engine::{Engine, EngineOptions};
use levade_model::ModelFiles;
use levade_policy::{Learner, OptimParams, SampleRequest, Sampler, SamplingParams, uniform};
use levade_rl::{Loss, PolicyLoss};
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};
use serde::Deserialize;
use serde_json::{Value, json};

const DEADLINE: Duration = Duration::from_secs(600);

#[derive(Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
enum Request {
    Load {
        model: PathBuf,
        #[serde(default)]
        options: EngineOptions,
    },
    Train {
        tokens: Vec<u32>,
    },
    Group {
        prompt: Vec<u32>,
        rollouts: u64,
        turns: usize,
        new: usize,
        given: usize,
    },
    Forest {
        #[serde(rename = "paths")]
        sequences: Vec<Vec<u32>>,
        first: u32,
    },
    Generate {
        prompts: Vec<Vec<u32>>,
        new_tokens: usize,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let mut engine = None;
    let mut version = 0;
    for line in std::io::stdin().lock().lines() {
        let response =
            match serde_json::from_str(&line?).context("a line of the input is not a request")? {
                Request::Load { model, options } => {
                    let files = ModelFiles::open(&model)?;
                    let started = engine.insert(Engine::start(&files, &options, None)?);
                    let fingerprint = started.fingerprint();
                    let plan = started.memory_plan();
                    let name = format!("levade ({}, {:?})", fingerprint.precision, fingerprint.isa);
                    json!({ "name": name, "planned": plan.total(), "plan": plan.to_string() })
                }
                Request::Train { tokens } => {
                    version += 1;
                    train(engine.as_ref().context("no model is loaded")?, tokens, version).await?
                }
                Request::Group { prompt, rollouts, turns, new, given: tool_tokens } => {
                    version += 1;
                    let engine = engine.as_ref().context("no model is loaded")?;
                    group(engine, &prompt, rollouts, turns, [new, tool_tokens], version).await?
                }
                Request::Forest { sequences, first } => {
                    forest(engine.as_ref().context("no model is loaded")?, sequences, first).await?
                }
                Request::Generate { prompts, new_tokens } => {
                    generate(engine.as_ref().context("no model is loaded")?, prompts, new_tokens)
                        .await?
                }
            };
        println!("{response}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Runs one training step: forward pass, mean cross-entropy of every token except the first,
/// backward pass, AdamW, and publishing of the new weights.
async fn train(engine: &Engine, tokens: Vec<u32>, version: u64) -> Result<Value> {
    let weight = 1.0 / (tokens.len() - 1) as f32;
    let targets = (1..tokens.len() as u32)
        .map(|index| SequenceTarget {
            index,
            temperature: 1.0,
            term: Term { weight, ..Term::default() },
        })
        .collect();
    let start = Instant::now();
    let batch = Arc::new(TreeBatch::merge(&[SequenceInput { tokens: tokens.into(), targets }])?);
    let loss = Loss::new(PolicyLoss::CrossEntropy);
    let sums = engine.forward_backward(batch, loss).await?;
    let backward = start.elapsed();
    engine.optim_step(OPTIM).await?;
    engine.publish(version).await?;
    let seconds = start.elapsed().as_secs_f64();
    let optimizer = seconds - backward.as_secs_f64();
    let parts = json!({ "forward and backward": backward.as_secs_f64(), "optimiser": optimizer });
    Ok(json!({ "seconds": seconds, "loss": sums.loss, "parts": parts }))
}

/// Samples a group of rollouts of several turns, with `new` sampled tokens and `tool_tokens` tokens
/// of a tool result per turn, and runs one update by the clipped loss with made-up advantages.
async fn group(
    engine: &Engine,
    prompt: &[u32],
    rollouts: u64,
    turns: usize,
    [new, tool_tokens]: [usize; 2],
    version: u64,
) -> Result<Value> {
    let start = Instant::now();
    let tasks: Vec<_> = (0..rollouts)
        .map(|stream| {
            let engine = engine.clone();
            let mut sequence = prompt.to_vec();
            tokio::spawn(async move {
                let mut targets = Vec::new();
                let advantage = if stream % 2 == 0 { 1.0 } else { -1.0 };
                for turn in 0..turns {
                    let params = SamplingParams { max_tokens: new, ..SamplingParams::default() };
                    let request = SampleRequest {
                        seed: version,
                        stream,
                        prompt: sequence.clone(),
                        params,
                        ..SampleRequest::default()
                    };
                    let completion = engine.sample(request).await?.collect(DEADLINE).await?;
                    targets.extend(completion.logprobs.iter().enumerate().map(|(i, logprob)| {
                        let term = Term { advantage, behavior: Some(*logprob), ..Term::default() };
                        SequenceTarget {
                            index: (sequence.len() + i) as u32,
                            temperature: 1.0,
                            term,
                        }
                    }));
                    sequence.extend(completion.tokens);
                    if turn + 1 < turns {
                        sequence.extend((0..tool_tokens as u64).map(|i| {
                            (uniform(stream, turn as u64, i)
                                * f64::from(engine.config().vocabulary as u32))
                                as u32
                        }));
                    }
                }
                anyhow::Ok(SequenceInput { tokens: sequence.into(), targets })
            })
        })
        .collect();
    let mut sequences = Vec::new();
    for task in tasks {
        sequences.push(task.await??);
    }
    let sampling = start.elapsed().as_secs_f64();
    let count: usize = sequences.iter().map(|sequence| sequence.targets.len()).sum();
    for target in sequences.iter_mut().flat_map(|sequence| &mut sequence.targets) {
        target.term.weight = 1.0 / count as f32;
    }
    let loss = Loss::clip(0.2, 0.2);
    let sums = engine.forward_backward(Arc::new(TreeBatch::merge(&sequences)?), loss).await?;
    engine.optim_step(OptimParams { learning_rate: 1e-6, max_grad_norm: 1.0, ..OPTIM }).await?;
    engine.publish(version).await?;
    let seconds = start.elapsed().as_secs_f64();
    let training = seconds - sampling;
    let mismatched = sums.mismatched;
    Ok(
        json!({ "seconds": seconds, "sampling": sampling, "training": training, "mismatched": mismatched }),
    )
}

const OPTIM: OptimParams = OptimParams {
    learning_rate: 1e-5,
    beta1: 0.9,
    beta2: 0.999,
    epsilon: 1e-8,
    weight_decay: 0.01,
    max_grad_norm: f32::INFINITY,
};

/// Runs forward and backward passes over all sequences, merged into trees; targets are the tokens
/// from `first` on.
async fn forest(engine: &Engine, sequences: Vec<Vec<u32>>, first: u32) -> Result<Value> {
    let targets: usize = sequences.iter().map(|tokens| tokens.len() - first as usize).sum();
    let weight = 1.0 / targets as f32;
    let sequences: Vec<SequenceInput> = sequences
        .into_iter()
        .map(|tokens| SequenceInput {
            targets: (first..tokens.len() as u32)
                .map(|index| SequenceTarget {
                    index,
                    temperature: 1.0,
                    term: Term { weight, ..Term::default() },
                })
                .collect(),
            tokens: tokens.into(),
        })
        .collect();
    let start = Instant::now();
    let batch = Arc::new(TreeBatch::merge(&sequences)?);
    let tokens = batch.tokens.len();
    let sequence_tokens = batch.sequence_tokens;
    let loss = Loss::new(PolicyLoss::CrossEntropy);
    let sums = engine.forward_backward(batch, loss).await?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(
        json!({ "seconds": seconds, "loss": sums.loss, "tokens": tokens, "path_tokens": sequence_tokens }),
    )
}

/// Samples greedy completions of all prompts at once.
async fn generate(engine: &Engine, prompts: Vec<Vec<u32>>, new_tokens: usize) -> Result<Value> {
    let params =
        SamplingParams { max_tokens: new_tokens, temperature: 0.0, ..SamplingParams::default() };
    let start = Instant::now();
    let mut streams = Vec::new();
    for (stream, prompt) in prompts.into_iter().enumerate() {
        let request = SampleRequest {
            seed: 0,
            stream: stream as u64,
            prompt,
            params: params.clone(),
            ..SampleRequest::default()
        };
        streams.push(engine.sample(request).await?);
    }
    let mut completions = Vec::new();
    for stream in streams {
        completions.push(stream.collect(DEADLINE).await?.tokens);
    }
    Ok(json!({ "seconds": start.elapsed().as_secs_f64(), "tokens": completions }))
}
