//! A tabular policy that implements both traits, with real sampling and training but no neural
//! network.
//!
//! The distribution of the next token is a softmax over one row of a table, selected by the last
//! few tokens. So sampling, exact log-probabilities, gradients and AdamW fit in a few hundred lines
//! and run in microseconds, and everything above the traits (agent loops, batches, checkpoints,
//! resume after a kill) can be tested to the bit without an engine.
//!
//! The simulator keeps the contracts of [`Sampler`] and [`Learner`], including batch invariance and
//! bitwise equality of sampled and recomputed log-probabilities. It can simulate the timing of a
//! device, and inject failures: whether a request fails depends only on the request, and whether a
//! learner call fails depends only on its number. Out of scope: truncation (top-p, top-k, min-p),
//! stop strings, and weights that another program can read.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use levade_rl::Loss;
use levade_tree::TreeBatch;
use tokio::sync::Notify;

use crate::crash::crash_point;
use crate::device::{SimulatedDevice, Timing};
use crate::numbers::{read_numbers, write_numbers};
use crate::{
    Content, DeviceStats, ForwardBackward, Grammars, Learner, Load, Manifest, OptimParams,
    OptimReport, PolicyError, Predictions, SampleRequest, SampleStream, Sampler, TopLogprobs,
    WeightsAt, WeightsRef, constrain, uniform,
};

mod completion;

use completion::CompletionTask;

/// Stream of the random numbers that initialize the weights; attempts use other streams.
const INITIAL_STREAM: u64 = u64::MAX;
/// Stream of the random numbers that decide which of the learner's calls fail.
const LEARNER_STREAM: u64 = u64::MAX - 1;
const WEIGHTS: &str = "simulator.weights";
const OPTIMIZER: &str = "simulator.optimiser";

/// Configuration of a simulator.
#[derive(Debug, Clone, PartialEq)]
pub struct SimulatorConfig {
    /// Number of token ids in the simulator's vocabulary.
    pub vocabulary: usize,
    /// Number of preceding tokens that determine the distribution of the next token.
    pub order: usize,
    /// Number of rows of the weight table. Contexts whose hashes coincide share a row.
    pub rows: usize,
    /// Maximum sequence length in tokens.
    pub context: usize,
    /// Seed of the initial weight table.
    pub seed: u64,
    /// Bound on the initial logits, which are uniform in −`spread`..`spread`.
    pub spread: f32,
    /// Maximum latency of a token. The latency of each token is sampled uniformly.
    pub latency: Duration,
    /// Time that operations take on the simulated device.
    pub timing: Timing,
    /// Maximum number of concurrently running sequences; 0 means no limit. Further sequences wait.
    pub running: usize,
    /// Fraction of requests that fail after their first token, in 0..=1.
    pub failures: f64,
    /// Fraction of batches on which the learner fails, in 0..=1.
    pub learner_failures: f64,
}

impl Default for SimulatorConfig {
    fn default() -> Self {
        SimulatorConfig {
            vocabulary: 64,
            order: 3,
            rows: 4096,
            context: 1024,
            seed: 0,
            spread: 0.1,
            latency: Duration::ZERO,
            timing: Timing::default(),
            running: 0,
            failures: 0.0,
            learner_failures: 0.0,
        }
    }
}

/// Weights, gradient and AdamW state of a simulator.
struct SimulatorState {
    weights: Vec<f32>,
    gradient: Vec<f64>,
    first: Vec<f32>,
    second: Vec<f32>,
    steps: u64,
}

/// Weights that the simulator's samplers use.
struct PublishedWeights {
    weights: Vec<f32>,
    version: u64,
}

/// Tabular policy that samples and trains: its weights are a table of logits. As a critic, its
/// value of a state is the first weight of the state's row.
pub struct Simulator {
    config: SimulatorConfig,
    state: Mutex<SimulatorState>,
    published: Arc<Mutex<Arc<PublishedWeights>>>,
    published_signal: Arc<Notify>,
    device: Arc<SimulatedDevice>,
    /// Number of batches that the learner has received.
    batches: AtomicU64,
    completions: Mutex<Vec<Weak<CompletionHandle>>>,
    grammars: Option<Arc<dyn Grammars>>,
}

/// Handle of a running completion, with which it can be aborted.
struct CompletionHandle {
    stream: u64,
    /// Whether the completion must end before its next token.
    aborted: AtomicBool,
}

impl Simulator {
    /// Creates a simulator with random weights, published as version 0.
    pub fn new(config: SimulatorConfig) -> Self {
        let size = config.rows * config.vocabulary;
        let spread = f64::from(config.spread);
        let weights: Vec<f32> = (0..size as u64)
            .map(|i| ((2.0 * uniform(config.seed, INITIAL_STREAM, i) - 1.0) * spread) as f32)
            .collect();
        Simulator {
            published: Arc::new(Mutex::new(Arc::new(PublishedWeights {
                weights: weights.clone(),
                version: 0,
            }))),
            state: Mutex::new(SimulatorState {
                weights,
                gradient: vec![0.0; size],
                first: vec![0.0; size],
                second: vec![0.0; size],
                steps: 0,
            }),
            published_signal: Arc::default(),
            device: Arc::new(SimulatedDevice::new(config.timing, config.running)),
            batches: AtomicU64::new(0),
            completions: Mutex::default(),
            grammars: None,
            config,
        }
    }

    /// Enables grammar-constrained completions over the simulator's vocabulary.
    #[must_use]
    pub fn with_grammars(self, grammars: Arc<dyn Grammars>) -> Self {
        Simulator { grammars: Some(grammars), ..self }
    }

    /// Returns the current weights, published or not.
    pub fn weights(&self) -> Vec<f32> {
        self.lock_state().weights.clone()
    }

    /// Returns the accumulated gradient and clears it.
    pub fn take_gradient(&self) -> Vec<f64> {
        let mut state = self.lock_state();
        let size = state.gradient.len();
        std::mem::replace(&mut state.gradient, vec![0.0; size])
    }

    fn lock_state(&self) -> MutexGuard<'_, SimulatorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load_published_weights(&self) -> Arc<PublishedWeights> {
        load_published(&self.published)
    }

    /// Checks a batch, waits for its simulated time, and returns an error if the configuration
    /// makes this batch fail.
    async fn admit_batch(&self, batch: &TreeBatch) -> Result<(), PolicyError> {
        self.check_batch(batch)?;
        self.device.run_training(batch.tokens.len()).await;
        let number = self.batches.fetch_add(1, Ordering::Relaxed);
        if uniform(self.config.seed, LEARNER_STREAM, number) < self.config.learner_failures {
            return Err(PolicyError::Invalid(
                "the simulator is configured to fail on this batch".into(),
            ));
        }
        Ok(())
    }

    /// Checks that every token of the batch is in the vocabulary and that every sequence fits into
    /// the context.
    fn check_batch(&self, batch: &TreeBatch) -> Result<(), PolicyError> {
        let SimulatorConfig { vocabulary, context, .. } = self.config;
        if let Some(token) = batch.tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(PolicyError::Invalid(format!(
                "token {token} is outside the simulator's vocabulary of {vocabulary} tokens"
            )));
        }
        match batch
            .nodes
            .iter()
            .map(|node| (node.depth + node.len) as usize)
            .find(|&len| len > context)
        {
            Some(prompt) => Err(PolicyError::PromptTooLong { prompt, context }),
            None => Ok(()),
        }
    }
}

/// Returns the weights that samplers use now.
fn load_published(published: &Mutex<Arc<PublishedWeights>>) -> Arc<PublishedWeights> {
    published.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Distribution of the next token, computed from one row of the weight table. Sampling and training
/// share this computation.
struct RowDistribution {
    /// Probabilities at the requested temperature.
    probabilities: Vec<f64>,
    /// Logarithms of the probabilities.
    logprobs: Vec<f64>,
}

impl RowDistribution {
    /// Returns the `count` most likely tokens with their log-probabilities.
    fn top_logprobs(&self, count: usize) -> TopLogprobs {
        if count == 0 {
            return Vec::new();
        }
        let mut order: Vec<usize> = (0..self.logprobs.len()).collect();
        order.sort_by(|a, b| self.logprobs[*b].total_cmp(&self.logprobs[*a]));
        order.iter().take(count).map(|&id| (id as u32, self.logprobs[id] as f32)).collect()
    }

    /// Returns the entropy of the distribution in nats.
    fn entropy(&self) -> f64 {
        -self.probabilities.iter().zip(&self.logprobs).map(|(p, l)| p * l).sum::<f64>()
    }
}

impl SimulatorConfig {
    /// Returns the index of the first weight of the table row that the end of `history` selects
    /// (FNV-1a hash of the last tokens and their number).
    fn row_start(&self, history: &[u32]) -> usize {
        let recent = &history[history.len().saturating_sub(self.order)..];
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for word in recent.iter().copied().chain([recent.len() as u32]) {
            for byte in word.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        ((hash >> 32 ^ hash) as usize % self.rows) * self.vocabulary
    }

    /// Computes log-softmax(logits / temperature), always in the same order of operations.
    fn softmax(&self, weights: &[f32], row: usize, temperature: f32) -> RowDistribution {
        let logits: Vec<f64> = weights[row..row + self.vocabulary]
            .iter()
            .map(|&w| f64::from(w) / f64::from(temperature))
            .collect();
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let normalizer = top + logits.iter().map(|z| (z - top).exp()).sum::<f64>().ln();
        let logprobs: Vec<f64> = logits.iter().map(|z| z - normalizer).collect();
        RowDistribution { probabilities: logprobs.iter().map(|l| l.exp()).collect(), logprobs }
    }
}

/// Returns the last `order` tokens before a target in its sequence. The last of these tokens is the
/// token at index `predictor` of the batch.
fn preceding_tokens(batch: &TreeBatch, predictor: u32, order: usize) -> Vec<u32> {
    let mut reversed = Vec::with_capacity(order);
    let mut node = batch.nodes.partition_point(|node| node.start <= predictor) - 1;
    let mut end = predictor + 1;
    loop {
        let start = batch.nodes[node].start;
        reversed.extend(
            batch.tokens[start as usize..end as usize].iter().rev().take(order - reversed.len()),
        );
        match batch.nodes[node].parent {
            Some(parent) if reversed.len() < order => {
                node = parent as usize;
                end = batch.nodes[node].start + batch.nodes[node].len;
            }
            _ => break,
        }
    }
    reversed.reverse();
    reversed
}

#[async_trait]
impl Sampler for Simulator {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        let SimulatorConfig { vocabulary, context, .. } = self.config;
        request.validate(vocabulary)?;
        if request.params.has_truncation() || !request.params.stop_strings.is_empty() {
            return Err(PolicyError::Invalid(
                "the simulator supports neither truncation (top_p, top_k, min_p) nor stop \
                 strings; send the request without them"
                    .into(),
            ));
        }
        request.check_room(context)?;
        let constraint = constrain(self.grammars.as_ref(), &request).await?;
        let handle =
            Arc::new(CompletionHandle { stream: request.stream, aborted: AtomicBool::new(false) });
        {
            let mut completions = self.completions.lock().unwrap_or_else(PoisonError::into_inner);
            // Finished completions are removed before the list would grow, which bounds its
            // capacity.
            if completions.len() == completions.capacity() {
                completions.retain(|completion| completion.strong_count() > 0);
            }
            completions.push(Arc::downgrade(&handle));
        }
        let completion = CompletionTask {
            handle,
            config: self.config.clone(),
            published: self.published.clone(),
            published_signal: self.published_signal.clone(),
            request,
            constraint,
            device: self.device.clone(),
        };
        let (sender, stream) = SampleStream::channel();
        tokio::spawn(async move {
            completion.run(|event| sender.send(event).is_ok()).await;
        });
        Ok(stream)
    }

    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError> {
        let mut completions = self.completions.lock().unwrap_or_else(PoisonError::into_inner);
        completions.retain(|completion| completion.strong_count() > 0);
        let running = completions.len();
        completions.retain(|completion| {
            let Some(handle) = completion.upgrade() else { return false };
            let is_match = stream.is_none_or(|stream| stream == handle.stream);
            if is_match {
                handle.aborted.store(true, Ordering::Relaxed);
            }
            !is_match
        });
        Ok(running - completions.len())
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        Ok(self.device.load())
    }

    async fn device_stats(&self) -> Result<Option<DeviceStats>, PolicyError> {
        Ok(Some(self.device.stats()))
    }

    async fn paused(&self) -> Result<Duration, PolicyError> {
        Ok(self.device.training_time())
    }

    async fn update_weights(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        let WeightsAt::Manifest(manifest) = &weights.at else {
            return weights.check_shared(self.version().await?);
        };
        self.load(manifest.verify()?, false).await?;
        self.publish(weights.version).await.map(|_| ())
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        Ok(self.load_published_weights().version)
    }
}

#[async_trait]
impl Learner for Simulator {
    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.admit_batch(&batch).await?;
        let state = self.lock_state();
        Ok(batch
            .targets
            .iter()
            .map(|target| {
                let row = self.config.row_start(&preceding_tokens(
                    &batch,
                    target.predictor,
                    self.config.order,
                ));
                let row = self.config.softmax(&state.weights, row, target.temperature);
                row.logprobs[batch.tokens[target.token as usize] as usize] as f32
            })
            .collect())
    }

    async fn predictions(&self, batch: Arc<TreeBatch>) -> Result<Predictions, PolicyError> {
        self.admit_batch(&batch).await?;
        let state = self.lock_state();
        let mut found = Predictions::default();
        for target in &batch.targets {
            let row = self.config.row_start(&preceding_tokens(
                &batch,
                target.predictor,
                self.config.order,
            ));
            let row = self.config.softmax(&state.weights, row, target.temperature);
            found.logprobs.push(row.logprobs[batch.tokens[target.token as usize] as usize] as f32);
            found.entropies.push(row.entropy() as f32);
            found.concentrations.push(row.probabilities.iter().map(|p| p * p).sum::<f64>() as f32);
        }
        Ok(found)
    }

    async fn values(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.admit_batch(&batch).await?;
        let state = self.lock_state();
        let row = |predictor| {
            self.config.row_start(&preceding_tokens(&batch, predictor, self.config.order))
        };
        Ok(batch.targets.iter().map(|target| state.weights[row(target.predictor)]).collect())
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        self.admit_batch(&batch).await?;
        loss.check(&batch).map_err(|e| PolicyError::Invalid(e.to_string()))?;
        let mut guard = self.lock_state();
        let state = &mut *guard;
        let mut sums =
            ForwardBackward { tokens: batch.tokens.len() as u64, ..ForwardBackward::default() };
        for target in &batch.targets {
            let at = self.config.row_start(&preceding_tokens(
                &batch,
                target.predictor,
                self.config.order,
            ));
            if loss.trains_values() {
                for term in batch.terms_of(target) {
                    let evaluated = loss.evaluate(state.weights[at], term);
                    state.gradient[at] += f64::from(term.weight) * evaluated.derivative;
                    sums.add_value(term, &evaluated);
                }
                continue;
            }
            let row = self.config.softmax(&state.weights, at, target.temperature);
            let token = batch.tokens[target.token as usize] as usize;
            let logprob = row.logprobs[token] as f32;
            let entropy = row.entropy();
            sums.targets += 1;
            let mut derivative = 0.0;
            let mut bonus = 0.0;
            for term in batch.terms_of(target) {
                let evaluated = loss.evaluate(logprob, term);
                derivative += f64::from(term.weight) * evaluated.derivative;
                bonus += f64::from(term.weight) * loss.entropy;
                sums.add_term(term, logprob, entropy, &evaluated);
            }
            sums.loss -= bonus * entropy;
            // d log p(token) / d logit = [is the token] − p, and d entropy / d logit = −p (log p +
            // entropy), each divided by the temperature.
            for (id, (p, logp)) in row.probabilities.iter().zip(&row.logprobs).enumerate() {
                let indicator = if id == token { 1.0 } else { 0.0 };
                let logit_gradient = derivative * (indicator - p) + bonus * p * (logp + entropy);
                state.gradient[at + id] += logit_gradient / f64::from(target.temperature);
            }
        }
        Ok(sums)
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        self.device.run_optimizer_step().await;
        let mut guard = self.lock_state();
        let state = &mut *guard;
        let grad_norm = state.gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
        let applied = grad_norm.is_finite();
        if applied {
            let scale = (f64::from(params.max_grad_norm) / grad_norm).min(1.0);
            state.steps += 1;
            let correction = |beta: f32| 1.0 - f64::from(beta).powi(state.steps as i32);
            let first = correction(params.beta1);
            let second = correction(params.beta2);
            let beta1 = f64::from(params.beta1);
            let beta2 = f64::from(params.beta2);
            let half = state.weights.len() / 2;
            for i in 0..state.weights.len() {
                if i == half {
                    crash_point("in_optim_step");
                }
                let gradient = state.gradient[i] * scale;
                let m = beta1 * f64::from(state.first[i]) + (1.0 - beta1) * gradient;
                let v = beta2 * f64::from(state.second[i]) + (1.0 - beta2) * gradient * gradient;
                (state.first[i], state.second[i]) = (m as f32, v as f32);
                let step = (m / first) / ((v / second).sqrt() + f64::from(params.epsilon));
                let weight = f64::from(state.weights[i]);
                let decay = f64::from(params.weight_decay) * weight;
                state.weights[i] =
                    (weight - f64::from(params.learning_rate) * (step + decay)) as f32;
            }
        }
        state.gradient.fill(0.0);
        Ok(OptimReport { grad_norm, applied })
    }

    async fn save(&self, dir: &Path, with_optimizer: bool) -> Result<Manifest, PolicyError> {
        let state = self.lock_state();
        let mut names = vec![WEIGHTS.to_owned()];
        write_numbers(&dir.join(WEIGHTS), &state.weights, None)?;
        crash_point("checkpoint_file");
        if with_optimizer {
            let moments: Vec<f32> = state.first.iter().chain(&state.second).copied().collect();
            write_numbers(&dir.join(OPTIMIZER), &moments, Some(state.steps))?;
            names.push(OPTIMIZER.to_owned());
        }
        Manifest::from_files(dir, Content::Full, &names)
    }

    async fn load(&self, dir: &Path, with_optimizer: bool) -> Result<(), PolicyError> {
        let mut guard = self.lock_state();
        let state = &mut *guard;
        let size = state.weights.len();
        let (weights, _) = read_numbers(&dir.join(WEIGHTS), size, false)?;
        let optimizer = dir.join(OPTIMIZER);
        let (moments, steps) = if with_optimizer && optimizer.exists() {
            read_numbers(&optimizer, 2 * size, true)?
        } else {
            (vec![0.0; 2 * size], 0)
        };
        state.weights = weights;
        state.first = moments[..size].to_vec();
        state.second = moments[size..].to_vec();
        state.steps = steps;
        state.gradient.fill(0.0);
        Ok(())
    }

    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        let weights = self.lock_state().weights.clone();
        self.device.clear_prefix_cache();
        *self.published.lock().unwrap_or_else(PoisonError::into_inner) =
            Arc::new(PublishedWeights { weights, version });
        self.published_signal.notify_waiters();
        Ok(WeightsRef { version, at: WeightsAt::Memory })
    }
}

#[cfg(test)]
#[path = "simulator_tests.rs"]
mod tests;
