//! The engine as a service: one thread that owns the model, and handles that talk to it.
//!
//! Async code never computes: it sends a command and waits for the answer. Between two commands the thread runs the scheduler's
//! batches; a learner's command waits while sequences are running, but not for ever.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

use async_trait::async_trait;
use dressage_model::{ModelConfig, ModelError, ModelFiles, SafetensorsFile, write_json};
use dressage_policy::{
    ForwardBackward, Health, Learner, OptimParams, OptimReport, PolicyError, SampleRequest, SampleStream,
    Sampler, TokenBytes, crash_point,
};
use dressage_rl::Loss;
use dressage_tree::TreeBatch;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::cache::Cache;
use crate::learning::{self, Learning};
use crate::memory::{self, MemoryPlan};
use crate::precision::Precision;
use crate::scheduler::{Events, Limits, Scheduler};
use crate::simd::Isa;
use crate::transformer::Transformer;
use crate::weights::{Weights, attention_shape};
use crate::{Compute, EngineError};

/// Batches that running sequences may still take before a waiting learner's command goes first.
const PATIENCE: usize = 256;

/// The policy that the base weights are.
const BASE: u32 = 0;

const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const MOMENTS: [&str; 2] = ["optimiser.first.safetensors", "optimiser.second.safetensors"];
const STEPS: &str = "optimiser.json";

/// How to run a model. The defaults suit a small model on a laptop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineOptions {
    /// Threads; 0 takes one for every processor.
    pub threads: usize,
    /// Longest path in tokens; 0 takes the model's own context.
    pub context: usize,
    /// Packed tokens of a batch that go through the model at once; larger batches take several passes. 0 for an engine that
    /// is only sampled from.
    pub batch_tokens: usize,
    /// Whether it will be trained; if not, batches are only evaluated.
    pub trains: bool,
    /// Most memory to use, in MiB; 0 for what is free. Where it is short, training computes activations again.
    pub memory_mb: usize,
    /// Memory for keys and values of sampling, in MiB.
    pub kv_memory_mb: usize,
    /// Sequences sampled at the same time.
    pub running: usize,
    /// Rows of one sampling step: running sequences and chunks of prompts.
    pub step_rows: usize,
    /// Whether keys and values stay when the weights change. Sequences that are being drawn then go on at once instead of
    /// being computed again, but what they draw from then on is not what training will find for it.
    pub keep_cache: bool,
    /// What the operands of products are rounded to, keys and values included.
    pub precision: Precision,
    /// Vector instructions; the best there are by default.
    pub isa: Option<Isa>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            threads: 0,
            context: 0,
            batch_tokens: 4096,
            trains: true,
            memory_mb: 0,
            kv_memory_mb: 1024,
            running: 64,
            step_rows: 256,
            keep_cache: false,
            precision: Precision::F32,
            isa: None,
        }
    }
}

impl EngineOptions {
    /// Bytes that the engine may take.
    pub fn budget(&self) -> u64 {
        let free = memory::available().unwrap_or(u64::MAX);
        if self.memory_mb == 0 { free } else { free.min((self.memory_mb as u64).saturating_mul(1 << 20)) }
    }

    fn threads(&self) -> usize {
        let found = std::thread::available_parallelism().map_or(1, |n| n.get());
        if self.threads == 0 { found } else { self.threads }
    }

    fn compute(&self) -> Result<Compute, EngineError> {
        let isa = self.isa.unwrap_or_else(Isa::detect);
        if !Isa::available().contains(&isa) {
            return Err(EngineError::Options(format!(
                "engine.isa = {isa:?}, but this processor runs {:?}; leave it out to take the best",
                Isa::available()
            )));
        }
        Ok(Compute::with(self.threads(), isa, self.precision))
    }
}

/// [`Fingerprint::kernels`] of this build.
const KERNELS: u32 = 2;

/// What the bits of a log-probability depend on besides weights and tokens. The instruction set is recorded, though all sets
/// compute the same values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Raised whenever the order of operations of any kernel changes.
    pub kernels: u32,
    /// Vector instructions in use.
    pub isa: Isa,
    /// What the operands of products are rounded to.
    pub precision: Precision,
}

/// A question to the engine's thread, with the way back.
type Answer<T> = oneshot::Sender<Result<T, PolicyError>>;

enum Command {
    Sample(SampleRequest, Events, Answer<()>),
    Abort(Option<u64>, Answer<usize>),
    Health(Answer<Health>),
    Version(Answer<u64>),
    Learn(LearnerCommand),
}

/// Commands that use or change the weights.
enum LearnerCommand {
    Logprobs(Arc<TreeBatch>, Answer<Vec<f32>>),
    ForwardBackward(Arc<TreeBatch>, Loss, Answer<ForwardBackward>),
    OptimStep(OptimParams, Answer<OptimReport>),
    Save(PathBuf, bool, Answer<()>),
    Load(PathBuf, bool, Answer<()>),
    Publish(u64, Answer<()>),
}

/// A handle to a running engine; the last one to go stops it.
#[derive(Clone)]
pub struct Engine {
    commands: Sender<Command>,
    config: Arc<ModelConfig>,
    plan: MemoryPlan,
    fingerprint: Fingerprint,
    context: usize,
}

impl Engine {
    /// Loads the weights of `files` and starts the engine's thread. `token_bytes` lets it recognise stop strings.
    ///
    /// # Errors
    /// When the options contradict the model or the machine, memory would not suffice, or a tensor cannot be read.
    pub fn start(
        files: &ModelFiles,
        options: &EngineOptions,
        token_bytes: Option<Arc<dyn TokenBytes>>,
    ) -> Result<Self, EngineError> {
        Self::plan(&files.config, options)?.check(options.budget())?;
        let compute = options.compute()?;
        let weights = Weights::load(&compute, files)?;
        Self::start_with(compute, weights, options, token_bytes)
    }

    /// Starts an engine on weights that are in memory already.
    ///
    /// # Errors
    /// When the options contradict the model.
    pub fn start_with(
        compute: Compute,
        weights: Weights,
        options: &EngineOptions,
        token_bytes: Option<Arc<dyn TokenBytes>>,
    ) -> Result<Self, EngineError> {
        let plan = Self::plan(&weights.config, options)?;
        let context = if options.context == 0 { weights.config.context } else { options.context };
        let config = Arc::new(weights.config.clone());
        let fingerprint = Fingerprint { kernels: KERNELS, isa: compute.isa, precision: compute.precision };
        let model = Transformer::new(compute, weights, context);
        let cache_bytes = options.kv_memory_mb.saturating_mul(1 << 20);
        let cache = Cache::new(attention_shape(&config), config.layers, options.precision, cache_bytes);
        let limits = learning::Limits { rows: options.batch_tokens.max(1), kept: plan.kept };
        let admission = Limits { running: options.running, rows: options.step_rows };
        let (commands, inbox) = channel();
        let service = Service {
            learning: Learning::new(&model, limits),
            scheduler: Scheduler::new(cache, admission, token_bytes),
            model,
            inbox,
            pending: Default::default(),
            version: 0,
            published: true,
            keeps_cache: options.keep_cache,
        };
        std::thread::Builder::new().name("engine-0".into()).spawn(move || service.run()).map_err(
            |error| EngineError::Options(format!("the engine's thread could not be started: {error}")),
        )?;
        Ok(Engine { commands, config, plan, fingerprint, context })
    }

    /// What an engine with these options will need.
    ///
    /// # Errors
    /// When the options contradict the model.
    pub fn plan(config: &ModelConfig, options: &EngineOptions) -> Result<MemoryPlan, EngineError> {
        for (name, value) in [("running", options.running), ("step_rows", options.step_rows)] {
            if value == 0 {
                return Err(EngineError::Options(format!("engine.{name} = 0; it must be at least 1")));
            }
        }
        if options.context > config.context {
            return Err(EngineError::Options(format!(
                "the context is set to {}, but the model was trained for {}; lower it, or use a model with a longer one",
                options.context, config.context
            )));
        }
        if config.head_dim > crate::ops::norm::MAX_HEAD {
            return Err(EngineError::Options(format!(
                "the model's heads are {} wide; this engine takes up to {}",
                config.head_dim,
                crate::ops::norm::MAX_HEAD
            )));
        }
        Ok(MemoryPlan::new(config, options, options.threads(), options.budget()))
    }

    /// What the model is.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Longest path in tokens.
    pub fn context(&self) -> usize {
        self.context
    }

    /// What the engine was planned to need.
    pub fn memory_plan(&self) -> MemoryPlan {
        self.plan
    }

    /// What its numerics depend on.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    async fn ask<T>(&self, command: impl FnOnce(Answer<T>) -> Command) -> Result<T, PolicyError> {
        let (answer, wait) = oneshot::channel();
        self.commands.send(command(answer)).map_err(|_| PolicyError::Stopped("the engine"))?;
        wait.await.map_err(|_| PolicyError::Stopped("the engine"))?
    }

    async fn learn<T>(&self, command: impl FnOnce(Answer<T>) -> LearnerCommand) -> Result<T, PolicyError> {
        self.ask(|answer| Command::Learn(command(answer))).await
    }
}

#[async_trait]
impl Sampler for Engine {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        let (events, stream) = SampleStream::channel();
        self.ask(|answer| Command::Sample(request, events, answer)).await?;
        Ok(stream)
    }

    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError> {
        self.ask(|answer| Command::Abort(stream, answer)).await
    }

    async fn health(&self) -> Result<Health, PolicyError> {
        self.ask(Command::Health).await
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        self.ask(Command::Version).await
    }
}

#[async_trait]
impl Learner for Engine {
    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.learn(|answer| LearnerCommand::Logprobs(batch, answer)).await
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        self.learn(|answer| LearnerCommand::ForwardBackward(batch, loss, answer)).await
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        self.learn(|answer| LearnerCommand::OptimStep(params, answer)).await
    }

    async fn save(&self, folder: &Path, with_optimiser: bool) -> Result<(), PolicyError> {
        self.learn(|answer| LearnerCommand::Save(folder.to_path_buf(), with_optimiser, answer)).await
    }

    async fn load(&self, folder: &Path, with_optimiser: bool) -> Result<(), PolicyError> {
        self.learn(|answer| LearnerCommand::Load(folder.to_path_buf(), with_optimiser, answer)).await
    }

    async fn publish(&self, version: u64) -> Result<(), PolicyError> {
        self.learn(|answer| LearnerCommand::Publish(version, answer)).await
    }
}

/// The engine's thread.
struct Service {
    model: Transformer,
    scheduler: Scheduler,
    learning: Learning,
    inbox: Receiver<Command>,
    pending: std::collections::VecDeque<LearnerCommand>,
    version: u64,
    /// Whether the weights are those of `version`.
    published: bool,
    /// Whether keys and values outlive the weights that they were computed with.
    keeps_cache: bool,
}

impl Service {
    fn run(mut self) {
        let mut waited = 0;
        loop {
            // Weights that have changed draw nothing until they are published.
            let drawing = self.published && !self.scheduler.is_idle();
            // Sleep only when there is nothing to do at all.
            if !drawing && self.pending.is_empty() {
                match self.inbox.recv() {
                    Ok(command) => self.take(command),
                    Err(_) => return,
                }
            }
            loop {
                match self.inbox.try_recv() {
                    Ok(command) => self.take(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            let drawing = self.published && !self.scheduler.is_idle();
            if !drawing || waited >= PATIENCE {
                if let Some(command) = self.pending.pop_front() {
                    self.learn(command);
                }
                waited = 0;
            } else {
                waited += usize::from(!self.pending.is_empty());
                self.scheduler.step(&self.model, self.version);
            }
        }
    }

    fn take(&mut self, command: Command) {
        // An answer nobody waits for any more is dropped.
        match command {
            Command::Sample(request, events, answer) => {
                let accepted = if self.published {
                    self.scheduler.submit(&self.model, BASE, request, events)
                } else {
                    Err(PolicyError::Invalid(format!(
                        "the weights have changed since version {} was published; publish them before sampling",
                        self.version
                    )))
                };
                let _ = answer.send(accepted);
            }
            Command::Abort(stream, answer) => drop(answer.send(Ok(self.scheduler.abort(BASE, stream)))),
            Command::Health(answer) => drop(answer.send(Ok(self.scheduler.health()))),
            Command::Version(answer) => drop(answer.send(Ok(self.version))),
            Command::Learn(command) => self.pending.push_back(command),
        }
    }

    fn learn(&mut self, command: LearnerCommand) {
        match command {
            LearnerCommand::Logprobs(batch, answer) => {
                drop(answer.send(self.learning.logprobs(&self.model, &batch)));
            }
            LearnerCommand::ForwardBackward(batch, loss, answer) => {
                drop(answer.send(self.learning.forward_backward(&self.model, &batch, &loss)));
            }
            LearnerCommand::OptimStep(params, answer) => {
                let report = self.learning.optim_step(&mut self.model, &params);
                if report.applied {
                    self.weights_changed(self.keeps_cache);
                }
                drop(answer.send(Ok(report)));
            }
            LearnerCommand::Save(folder, with_optimiser, answer) => {
                drop(answer.send(self.save(&folder, with_optimiser).map_err(storage)));
            }
            LearnerCommand::Load(folder, with_optimiser, answer) => {
                let loaded = self.load(&folder, with_optimiser).map_err(storage);
                self.weights_changed(false);
                drop(answer.send(loaded));
            }
            LearnerCommand::Publish(version, answer) => {
                self.version = version;
                self.published = true;
                drop(answer.send(Ok(())));
            }
        }
    }

    fn weights_changed(&mut self, keep_cache: bool) {
        self.published = false;
        if !keep_cache {
            self.scheduler.weights_changed(BASE);
        }
    }

    fn save(&self, folder: &Path, with_optimiser: bool) -> Result<(), ModelError> {
        let weights = &self.model.weights;
        write_json(&folder.join(CONFIG), &weights.config.to_hf_json())?;
        weights.write(&folder.join(WEIGHTS), &weights.master)?;
        crash_point("checkpoint_file");
        let optimiser = &self.learning.optimiser;
        if with_optimiser && !optimiser.first.is_empty() {
            for (name, moment) in MOMENTS.iter().zip([&optimiser.first, &optimiser.second]) {
                weights.write(&folder.join(name), moment)?;
            }
            let steps = serde_json::json!({ "schema": 1, "steps": optimiser.steps });
            write_json(&folder.join(STEPS), &steps)?;
        }
        Ok(())
    }

    fn load(&mut self, folder: &Path, with_optimiser: bool) -> Result<(), ModelError> {
        let files = ModelFiles::open(folder)?;
        self.model.weights.read(&self.model.compute, &files)?;
        let optimiser = &mut self.learning.optimiser;
        *optimiser = Default::default();
        let steps = folder.join(STEPS);
        if !with_optimiser || !steps.exists() {
            return Ok(());
        }
        let damaged = |what: String| ModelError::Damaged { path: steps.clone(), what };
        let text = std::fs::read_to_string(&steps).map_err(|error| damaged(error.to_string()))?;
        let value: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        let count = value["steps"].as_u64().ok_or_else(|| damaged("it has no number of steps".into()))?;
        let layout = &self.model.weights.layout;
        optimiser.ensure(layout);
        for (name, moment) in MOMENTS.iter().zip([&mut optimiser.first, &mut optimiser.second]) {
            let file = SafetensorsFile::open(&folder.join(name))?;
            for place in &layout.places {
                let parameter = &place.parameter;
                if file.shape(&parameter.name) != Some(&parameter.shape) {
                    return Err(ModelError::Damaged {
                        path: folder.join(name),
                        what: format!("it has no {} of shape {:?}", parameter.name, parameter.shape),
                    });
                }
                file.read(&parameter.name, &mut moment[place.range.clone()])?;
            }
        }
        optimiser.steps = count;
        Ok(())
    }
}

fn storage(error: ModelError) -> PolicyError {
    PolicyError::Storage(error.to_string())
}
