//! Random cases for the guarantee that sampling and training compute the same bits.
//!
//! Each case starts an engine with random settings: family, sizes, precision, instruction set,
//! threads, memory for keys and values, rows of a step, rows of a training batch, and perhaps an
//! adapter. Attempts of several turns at several tasks are sampled from it in parallel, with forks,
//! aborts, and in some cases an update of the weights during sampling. Then one engine step trains
//! on the recorded sequences, merged into trees. Every log-probability recorded under the last
//! weights is compared with the one that this step computes. Nothing is recomputed in between.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use levade_model::{AttentionPattern, Family, ModelConfig, Rope, RopeScaling, Windows};
use levade_policy::{
    FinishReason, Learner, LoraOptions, PolicyError, Precision, SampleRequest, Sampler,
    SamplingParams, uniform,
};
use levade_rl::{Loss, PolicyLoss};
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::{random_weights, tiny_config};
use crate::layout::attention_shape;
use crate::{Compute, Engine, EngineOptions, Isa};

const DEADLINE: Duration = Duration::from_secs(120);
/// Maximum sequence length in tokens.
const CONTEXT: usize = 1024;
/// Minimum and maximum number of tokens of a completion that outlasts an update: a learner's
/// command lets completions run for some hundred steps first.
const LONG_COMPLETION_TOKENS: [usize; 2] = [270, 400];

/// Random numbers of one case, in sequence.
struct RandomStream {
    seed: u64,
    case: u64,
    next: u64,
}

impl RandomStream {
    fn unit(&mut self) -> f64 {
        self.next += 1;
        uniform(self.seed, self.case, self.next)
    }

    /// Returns an integer in `low..=high`, with smaller integers more likely, because sizes should
    /// vary by factors.
    fn size(&mut self, low: usize, high: usize) -> usize {
        let a = (low as f64).ln();
        let b = (high as f64 + 1.0).ln();
        ((a + self.unit() * (b - a)).exp() as usize).clamp(low, high)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[((self.unit() * from.len() as f64) as usize).min(from.len() - 1)]
    }

    fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    fn tokens(&mut self, len: usize, vocabulary: usize) -> Vec<u32> {
        (0..len).map(|_| (self.unit() * vocabulary as f64) as u32).collect()
    }
}

/// Description and results of a case.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Description of the engine.
    pub description: String,
    /// Number of recorded log-probabilities that were compared.
    pub compared: u64,
    /// Number of values that differ in any bit.
    pub different: u64,
    /// Number of requests that were aborted and resumed.
    pub resumed: u64,
    /// Number of attempts that were sampled from more than one version of the weights.
    pub updated: u64,
    /// Number of prompt tokens that came from the cache.
    pub prefix_hits: u64,
}

fn scaling(random: &mut RandomStream) -> RopeScaling {
    let original_context = random.pick(&[32, 128]);
    match random.pick(&["none", "none", "none", "linear", "llama3", "yarn"]) {
        "linear" => RopeScaling::Linear { factor: 2.5 },
        "llama3" => RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context,
        },
        "yarn" => RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            original_context,
        },
        _ => RopeScaling::None,
    }
}

/// Samples the attention pattern of the layers: windows within a block, within a stretch and over a
/// few stretches, for some layers or for all.
fn pattern(random: &mut RandomStream, family: Family, layers: usize) -> AttentionPattern {
    let traits = family.traits();
    let some = |random: &mut RandomStream, p| (0..layers).filter(|_| random.chance(p)).collect();
    let windowed = match traits.windows {
        Windows::Never => return AttentionPattern::default(),
        Windows::Every => (0..layers).collect(),
        Windows::Last => some(random, 0.2),
        Windows::AllExceptEveryNth(_) | Windows::Unrotated => some(random, 0.6),
    };
    AttentionPattern {
        window: Some(random.size(1, 600)),
        windowed,
        local_rope: traits
            .local_theta
            .map(|usual| Rope { theta: random.pick(&[300.0, usual]), scaling: RopeScaling::None }),
        unrotated: if traits.unrotated_interval.is_some() { some(random, 0.4) } else { [].into() },
    }
}

/// Samples a model's shape. With `large`, some dimensions are as wide and deep as in real models:
/// matmuls over several slabs, many query heads per key head, heads of several panels.
fn model(random: &mut RandomStream, large: bool) -> ModelConfig {
    // Families with their own rotary table for local layers are listed twice.
    let families = Family::all().flat_map(|family| {
        let count = if family.traits().local_theta.is_some() { 2 } else { 1 };
        std::iter::repeat_n(family, count)
    });
    let family = random.pick(&families.collect::<Vec<_>>());
    let layers = if large { 1 } else { random.size(1, 3) };
    let pattern = pattern(random, family, layers);
    let kv_heads = if large { random.size(1, 2) } else { random.size(1, 4) };
    let head_dim = if large { random.pick(&[64, 80, 128]) } else { 2 * random.size(2, 32) };
    let config = ModelConfig {
        family,
        hidden: 4 * if large { random.size(24, 96) } else { random.size(3, 24) },
        layers,
        heads: kv_heads * if large { random.pick(&[2, 5, 7, 8]) } else { random.size(1, 3) },
        kv_heads,
        head_dim,
        intermediate: if large { random.size(600, 2200) } else { random.size(8, 120) },
        vocabulary: if large { random.size(1000, 5200) } else { random.size(20, 400) },
        context: CONTEXT,
        norm_epsilon: 1e-5,
        rope: Rope { theta: random.pick(&[1e4, 1e6]), scaling: scaling(random) },
        tied: random.chance(0.5),
        bos: None,
        eos: vec![0],
        ..tiny_config()
    }
    .with_family(family);
    let query_scalar = config.query_scalar.map(|_| random.pick(&[20.0, 168.0]));
    ModelConfig { pattern, query_scalar, ..config }
}

/// A recorded attempt.
#[derive(Clone, Default)]
struct Attempt {
    tokens: Vec<u32>,
    /// Index, log-probability and version of every sampled token.
    sampled: Vec<(usize, f32, u64)>,
    resumed: u64,
}

/// Plan of an attempt.
#[derive(Clone)]
struct Script {
    stream: u64,
    temperature: f32,
    prompt: Vec<u32>,
    /// For each turn, the number of tokens to sample, then the tokens of the tool result.
    turns: Vec<(usize, Vec<u32>)>,
    /// Turn in which the attempt is aborted after some tokens, and then resumed.
    aborted: Option<usize>,
    /// Number of tokens to keep for another attempt, which forks from this one when it is done.
    fork: Option<usize>,
    /// Semaphore with one permit for every attempt whose first request the engine has accepted.
    accepted: Arc<Semaphore>,
}

impl Script {
    fn params(&self, max_tokens: usize) -> SamplingParams {
        SamplingParams { temperature: self.temperature, max_tokens, ..SamplingParams::default() }
    }

    async fn complete(
        &self,
        engine: &Engine,
        attempt: &mut Attempt,
        tokens: usize,
    ) -> Result<bool, PolicyError> {
        let prompt = attempt.tokens.clone();
        let request = SampleRequest {
            seed: 1,
            stream: self.stream,
            prompt,
            params: self.params(tokens),
            ..SampleRequest::default()
        };
        let completion = engine.sample(request).await?;
        if attempt.sampled.is_empty() {
            self.accepted.add_permits(1);
        }
        let completion = completion.collect(DEADLINE).await?;
        let versions = completion.versions.iter().flat_map(|run| (0..run.len).map(|_| run.version));
        let positions = attempt.tokens.len()..;
        attempt.sampled.extend(
            positions.zip(&completion.logprobs).zip(versions).map(|((at, p), v)| (at, *p, v)),
        );
        attempt.tokens.extend(completion.tokens);
        Ok(completion.finish == FinishReason::Aborted)
    }

    async fn run(self, engine: Engine) -> Result<Vec<Attempt>, PolicyError> {
        let mut attempt = Attempt { tokens: self.prompt.clone(), ..Attempt::default() };
        for (turn, (tokens, tool_tokens)) in self.turns.iter().enumerate() {
            let before = attempt.tokens.len();
            if self.aborted == Some(turn) {
                let aborting = engine.clone();
                let stream = self.stream;
                let abort = tokio::spawn(async move { aborting.abort(Some(stream)).await });
                attempt.resumed += u64::from(self.complete(&engine, &mut attempt, *tokens).await?);
                abort.await.map_err(|_| PolicyError::Stopped("the task that aborts".into()))??;
            }
            let remaining = (before + tokens).saturating_sub(attempt.tokens.len());
            if remaining > 0 {
                self.complete(&engine, &mut attempt, remaining).await?;
            }
            attempt.tokens.extend(tool_tokens);
        }
        let mut attempts = vec![attempt.clone()];
        if let Some(kept) = self.fork {
            let kept = kept.min(attempt.tokens.len());
            let mut forked =
                Attempt { tokens: attempt.tokens[..kept].to_vec(), ..Attempt::default() };
            let other = Script { stream: self.stream + 1000, ..self.clone() };
            other.complete(&engine, &mut forked, 5).await?;
            attempts.push(forked);
        }
        Ok(attempts)
    }
}

fn scripts(random: &mut RandomStream, vocabulary: usize, long: bool, updates: bool) -> Vec<Script> {
    let system = if long { random.size(257, 330) } else { random.size(1, 60) };
    let system = random.tokens(system, vocabulary);
    let mut scripts = Vec::new();
    let accepted = Arc::new(Semaphore::new(0));
    for _ in 0..random.size(1, 3) {
        let question = random.size(1, 40);
        let prompt = [system.clone(), random.tokens(question, vocabulary)].concat();
        for _ in 0..random.size(1, 4) {
            let mut turns: Vec<(usize, Vec<u32>)> = (0..random.size(1, 3))
                .map(|_| {
                    let num_sampled = random.size(1, 20);
                    let tool_tokens = random.size(1, 10);
                    (num_sampled, random.tokens(tool_tokens, vocabulary))
                })
                .collect();
            if updates && random.chance(0.5) {
                turns[0].0 = random.size(LONG_COMPLETION_TOKENS[0], LONG_COMPLETION_TOKENS[1]);
            }
            scripts.push(Script {
                stream: scripts.len() as u64,
                temperature: random.pick(&[1.0, 0.3, 0.7, 1.3, 2.5]),
                prompt: prompt.clone(),
                aborted: random.chance(0.2).then(|| random.size(1, turns.len()) - 1),
                fork: random.chance(0.2).then(|| random.size(1, 80)),
                turns,
                accepted: Arc::clone(&accepted),
            });
        }
    }
    scripts
}

/// Runs case number `case` of a seed.
///
/// # Errors
/// Returns an error if the engine rejects a request or stops.
pub async fn run(seed: u64, case: u64) -> Result<Outcome, PolicyError> {
    let random = &mut RandomStream { seed, case, next: 0 };
    let large = random.chance(0.08);
    let config = model(random, large);
    // Portable code is slow if it has to emulate the fused multiply-add, and only its innermost
    // loop differs: few and small cases are enough.
    let isas = Isa::available();
    let isa = if !large && random.chance(0.05) {
        Isa::Portable
    } else {
        random.pick(&isas[..isas.len().max(2) - 1])
    };
    let precision = random.pick(&[Precision::F32, Precision::Bf16]);
    let threads = random.pick(&[1, 2]);
    // Some cases have prompts so long that attempts share tiles (`ops/attention_tiles.rs`).
    let long = random.chance(0.1);
    let updates = random.chance(0.1);
    // Room for at least one sequence.
    let sequence_mib = attention_shape(&config)
        .sequence_bytes(config.layers, precision, CONTEXT)
        .div_ceil(1 << 20);
    let options = EngineOptions {
        context: CONTEXT,
        batch_tokens: random.size(8, 2000),
        kv_memory_mb: if large || long || updates { sequence_mib } else { random.pick(&[1, 1, 4]) },
        running: random.size(1, 16),
        step_rows: random.size(1, 100),
        precision,
        ..EngineOptions::default()
    };
    let description = format!(
        "case {case}: {:?}, {:?}, {} layers of {} and {}, {} of {} heads of {}, {:?}, {} tokens; \
         {isa:?}, {precision}, {threads} threads, {} running, {} rows a step, {} rows a batch{}",
        config.family,
        config.pattern,
        config.layers,
        config.hidden,
        config.intermediate,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.rope.scaling,
        config.vocabulary,
        options.running,
        options.step_rows,
        options.batch_tokens,
        if updates { ", an update" } else { "" }
    );
    let compute = Compute::with_isa(threads, isa, precision);
    let weights = random_weights(&compute, &config, seed ^ case);
    let base = Engine::start_with(compute, weights, &options, None)
        .map_err(|error| PolicyError::Invalid(error.to_string()))?;
    let tokens = random.tokens(20, config.vocabulary);
    let lesson = merge_sequences(&[SequenceInput {
        tokens: tokens.into(),
        targets: (1..20)
            .map(|index| SequenceTarget {
                index,
                temperature: 1.0,
                term: Term { weight: 1.0, ..Term::default() },
            })
            .collect(),
    }])?;
    let engine = if random.chance(0.2) {
        let engine = base.lora(LoraOptions { rank: 3, ..LoraOptions::default() }, case, "").await?;
        // One step, so that the adapter changes the output.
        engine.forward_backward(lesson.clone(), CROSS_ENTROPY).await?;
        engine.optim_step(OPTIM).await?;
        engine.publish(1).await?;
        engine
    } else {
        base
    };

    if updates {
        engine.forward_backward(lesson, CROSS_ENTROPY).await?;
    }
    let scripts = scripts(random, config.vocabulary, long && !large, updates);
    let attempts = scripts.len() as u32;
    let accepted = Arc::clone(&scripts[0].accepted);
    let tasks: Vec<_> = scripts
        .into_iter()
        .map(|script| {
            let temperature = script.temperature;
            (temperature, tokio::spawn(script.run(engine.clone())))
        })
        .collect();
    let mut last = engine.version().await?;
    if updates {
        // Commands sent after the first requests find completions in progress.
        let all = timeout(DEADLINE, accepted.acquire_many(attempts)).await;
        all.map_err(|_| PolicyError::Stopped("the first requests of all attempts".into()))?
            .map_err(|_| PolicyError::Stopped("the count of requests".into()))?
            .forget();
        engine.optim_step(OPTIM).await?;
        last += 1;
        engine.publish(last).await?;
    }
    let mut outcome =
        Outcome { description, compared: 0, different: 0, resumed: 0, updated: 0, prefix_hits: 0 };
    let mut sequences = Vec::new();
    for (temperature, task) in tasks {
        for attempt in task.await.map_err(|_| PolicyError::Stopped("an attempt".into()))?? {
            outcome.resumed += attempt.resumed;
            let versions: BTreeSet<u64> =
                attempt.sampled.iter().map(|(_, _, version)| *version).collect();
            outcome.updated += u64::from(versions.len() > 1);
            outcome.compared +=
                attempt.sampled.iter().filter(|(_, _, version)| *version == last).count() as u64;
            let targets = attempt.sampled.iter().map(|&(index, logprob, version)| SequenceTarget {
                index: index as u32,
                temperature,
                term: Term {
                    weight: 0.01,
                    behavior: Some(logprob),
                    age: (last - version) as u32,
                    version,
                    ..Term::default()
                },
            });
            sequences
                .push(SequenceInput { targets: targets.collect(), tokens: attempt.tokens.into() });
        }
    }
    outcome.prefix_hits = engine.device_stats().await?.map_or(0, |stats| stats.prefix_hits);
    for part in sequences.chunks(random.size(1, sequences.len())) {
        outcome.different +=
            engine.forward_backward(merge_sequences(part)?, CROSS_ENTROPY).await?.mismatched;
    }
    Ok(outcome)
}

const CROSS_ENTROPY: Loss = Loss::new(PolicyLoss::CrossEntropy);

const OPTIM: levade_policy::OptimParams = levade_policy::OptimParams {
    learning_rate: 0.01,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-8,
    weight_decay: 0.0,
    max_grad_norm: 1.0,
};

fn merge_sequences(sequences: &[SequenceInput]) -> Result<Arc<TreeBatch>, PolicyError> {
    TreeBatch::merge(sequences)
        .map(Arc::new)
        .map_err(|error| PolicyError::Invalid(error.to_string()))
}
