//! Handles of an engine.
//!
//! A handle belongs to one policy: the base weights, or an adapter over them. The handles of all
//! policies send their commands to the same thread (the `service`), which owns the model. Async
//! code never computes: it sends a command and waits for the response.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use async_trait::async_trait;
use levade_model::{ModelConfig, ModelFiles};
use levade_policy::{
    DeviceStats, ForwardBackward, Grammars, Learner, Load, LoraOptions, LossTerms, Manifest,
    OptimParams, OptimReport, PolicyError, Predictions, SampleRequest, SampleStream, Sampler,
    TokenBytes, WeightsAt, WeightsRef, constrain,
};
use levade_rl::Loss;
use levade_tree::TreeBatch;
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};

use crate::adapter::AdapterLayout;
use crate::cache::KvCache;
use crate::layout::{ParameterLayout, attention_shape};
use crate::learning::{self, TrainingState};
use crate::memory::MemoryPlan;
use crate::options::{EngineOptions, PlannedAdapter};
use crate::precision::{Precision, SumOrder};
use crate::scheduler::{Scheduler, SchedulerLimits};
use crate::service::{
    BASE, CommandInProgress, EngineCommand, EngineService, EngineStatus, LearnerCommand,
    ResponseSender,
};
use crate::simd::Isa;
use crate::transformer::Transformer;
use crate::weights::Weights;
use crate::{Compute, EngineError};

/// Kernel revision of this build, which is the value of [`Fingerprint::kernels`].
const KERNELS: u32 = 5;

/// Settings that determine the bits of a log-probability, in addition to weights and tokens. The
/// instruction set is recorded for information: all instruction sets that add in the same order
/// compute the same values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Kernel revision. It is incremented whenever the order of operations of any kernel changes.
    pub kernels: u32,
    /// Vector instruction set in use.
    pub isa: Isa,
    /// Rounding of matmul operands.
    pub precision: Precision,
    /// Order in which a matmul adds its products.
    #[serde(default)]
    pub order: SumOrder,
}

/// Handle to one policy of a running engine. The engine stops when its last handle is dropped.
#[derive(Clone)]
pub struct Engine {
    commands: Sender<EngineCommand>,
    command_in_progress: watch::Receiver<Option<CommandInProgress>>,
    policy: u32,
    config: Arc<ModelConfig>,
    plan: MemoryPlan,
    fingerprint: Fingerprint,
    context: usize,
    grammars: Option<Arc<dyn Grammars>>,
}

impl Engine {
    /// Loads the weights of `files` and starts the engine's thread. `token_bytes` is required for
    /// stop strings.
    ///
    /// # Errors
    /// Returns an error if the options contradict the model or the machine, memory would not
    /// suffice, or a tensor cannot be read.
    pub fn start(
        files: &ModelFiles,
        options: &EngineOptions,
        token_bytes: Option<Arc<dyn TokenBytes>>,
    ) -> Result<Self, EngineError> {
        // Planned before the weights are loaded, because they reduce the free memory.
        let plan = Self::plan(&files.config, options)?;
        plan.check(options.budget())?;
        let compute = options.compute()?;
        let weights = Weights::load(&compute, files)?;
        Self::start_planned(compute, weights, options, token_bytes, plan)
    }

    /// Starts an engine on weights that are already in memory.
    ///
    /// # Errors
    /// Returns an error if the options contradict the model.
    pub fn start_with(
        compute: Compute,
        weights: Weights,
        options: &EngineOptions,
        token_bytes: Option<Arc<dyn TokenBytes>>,
    ) -> Result<Self, EngineError> {
        if compute.precision != options.precision {
            return Err(EngineError::Options(format!(
                "the weights are packed in {}, but engine.precision = {}; use the same precision \
                 for both",
                compute.precision, options.precision
            )));
        }
        let plan = Self::plan(&weights.config, options)?;
        Self::start_planned(compute, weights, options, token_bytes, plan)
    }

    fn start_planned(
        compute: Compute,
        weights: Weights,
        options: &EngineOptions,
        token_bytes: Option<Arc<dyn TokenBytes>>,
        plan: MemoryPlan,
    ) -> Result<Self, EngineError> {
        let context = if options.context == 0 { weights.config.context } else { options.context };
        let config = Arc::new(weights.config.clone());
        let fingerprint = Fingerprint {
            kernels: KERNELS,
            isa: compute.isa,
            precision: compute.precision,
            order: compute.kernel().order(),
        };
        let model = Transformer::new(compute, weights, context);
        let cache_bytes = options.kv_memory_mb.saturating_mul(1 << 20);
        let cache =
            KvCache::new(attention_shape(&config), config.layers, options.precision, cache_bytes);
        let limits =
            learning::TrainingLimits { rows: options.batch_tokens.max(1), kept: plan.kept };
        let admission = SchedulerLimits { running: options.running, rows: options.step_rows };
        let (commands, inbox) = channel();
        let (command_sender, command_in_progress) = watch::channel(None);
        let learning = TrainingState::new(&model, limits);
        let scheduler = Scheduler::new(cache, admission, token_bytes);
        let EngineOptions { trains, keep_cache, .. } = *options;
        let service = EngineService::new(
            model,
            scheduler,
            learning,
            inbox,
            command_sender,
            trains,
            keep_cache,
        );
        std::thread::Builder::new().name("engine-0".into()).spawn(move || service.run()).map_err(
            |error| EngineError::Options(format!("cannot start the engine's thread: {error}")),
        )?;
        Ok(Engine {
            commands,
            command_in_progress,
            policy: BASE,
            config,
            plan,
            fingerprint,
            context,
            grammars: None,
        })
    }

    /// Computes the memory that an engine with these options will need.
    ///
    /// # Errors
    /// Returns an error if the options contradict the model.
    pub fn plan(config: &ModelConfig, options: &EngineOptions) -> Result<MemoryPlan, EngineError> {
        for (name, value) in [("running", options.running), ("step_rows", options.step_rows)] {
            if value == 0 {
                return Err(EngineError::Options(format!(
                    "engine.{name} = 0; it must be at least 1"
                )));
            }
        }
        if options.context > config.context {
            return Err(EngineError::Options(format!(
                "the context is set to {} tokens, but the model was trained for {}; lower the \
                 context, or use a model with a longer context",
                options.context, config.context
            )));
        }
        if config.head_dim > crate::ops::norm::MAX_HEAD {
            return Err(EngineError::Options(format!(
                "the model's head dimension is {}, but this engine supports at most {}",
                config.head_dim,
                crate::ops::norm::MAX_HEAD
            )));
        }
        for PlannedAdapter { lora, .. } in &options.adapters {
            AdapterLayout::new(&ParameterLayout::new(config), lora)?;
        }
        Ok(MemoryPlan::new(config, options, options.threads(), options.budget()))
    }

    /// Enables grammar-constrained completions, over the model's vocabulary, for requests through
    /// this handle and through handles created from it.
    #[must_use]
    pub fn with_grammars(self, grammars: Arc<dyn Grammars>) -> Self {
        Engine { grammars: Some(grammars), ..self }
    }

    /// Returns the configuration of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the maximum sequence length in tokens.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Returns the memory plan computed at the start.
    pub fn memory_plan(&self) -> MemoryPlan {
        self.plan
    }

    /// Returns the settings that determine the numerics.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    async fn send_command<T>(
        &self,
        command: impl FnOnce(ResponseSender<T>) -> EngineCommand,
    ) -> Result<T, PolicyError> {
        let (response, wait) = oneshot::channel();
        self.commands
            .send(command(response))
            .map_err(|_| PolicyError::Stopped("the engine".into()))?;
        wait.await.map_err(|_| PolicyError::Stopped("the engine".into()))?
    }

    /// Returns load and counters, even while the engine's thread executes a learner's command, such
    /// as the backward pass of a micro-batch, and processes no other command.
    async fn status(&self) -> Result<EngineStatus, PolicyError> {
        let mut command_in_progress = self.command_in_progress.clone();
        tokio::select! {
            biased;
            condition = self.send_command(EngineCommand::Status) => condition,
            learns = command_in_progress.wait_for(Option::is_some) => {
                let learns = learns.ok().and_then(|learns| learns.as_ref().map(CommandInProgress::status));
                learns.ok_or(PolicyError::Stopped("the engine".into()))
            }
        }
    }

    async fn send_learner_command<T>(
        &self,
        command: impl FnOnce(ResponseSender<T>) -> LearnerCommand,
    ) -> Result<T, PolicyError> {
        self.send_command(|response| EngineCommand::Learn(self.policy, command(response))).await
    }

    /// Creates an adapter over the base weights, which are frozen from now on. The adapter is a
    /// policy with its own optimizer and versions; before training it computes the same as the
    /// base. `seed` determines its initial weights. `base` is the name of the base model that the
    /// adapter's files record.
    ///
    /// # Errors
    /// Returns an error if the options contradict the model, the base weights have been trained, or
    /// the engine has stopped.
    pub async fn lora(
        &self,
        options: LoraOptions,
        seed: u64,
        base: &str,
    ) -> Result<Engine, PolicyError> {
        let base = base.to_owned();
        let policy = self
            .send_command(|response| EngineCommand::Lora(options, seed, base, response))
            .await?;
        Ok(Engine { policy, ..self.clone() })
    }

    /// Adds a value head to this policy, which makes it a critic. Values start at 0. A policy that
    /// has a value head keeps it.
    ///
    /// # Errors
    /// Returns an error if the engine has stopped.
    pub async fn add_value_head(&self) -> Result<(), PolicyError> {
        self.send_learner_command(LearnerCommand::AddValueHead).await
    }

    /// Returns a handle to the policy of the base weights, without an adapter.
    pub fn base(&self) -> Engine {
        Engine { policy: BASE, ..self.clone() }
    }

    /// Writes the base weights, merged with this policy's adapter, into the existing directory
    /// `dir` in Hugging Face layout.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written, or if the engine has stopped.
    pub async fn save_merged(&self, dir: &Path) -> Result<(), PolicyError> {
        self.send_learner_command(|response| LearnerCommand::Merge(dir.to_path_buf(), response))
            .await
    }
}

#[async_trait]
impl Sampler for Engine {
    async fn sample(&self, request: SampleRequest) -> Result<SampleStream, PolicyError> {
        request.validate(self.config.vocabulary)?;
        let constraint = constrain(self.grammars.as_ref(), &request).await?;
        let (events, stream) = SampleStream::channel();
        self.send_command(|response| {
            EngineCommand::Sample(self.policy, request, constraint, events, response)
        })
        .await?;
        Ok(stream)
    }

    async fn abort(&self, stream: Option<u64>) -> Result<usize, PolicyError> {
        self.send_command(|response| EngineCommand::Abort(self.policy, stream, response)).await
    }

    async fn workload(&self) -> Result<Load, PolicyError> {
        Ok(self.status().await?.load)
    }

    async fn device_stats(&self) -> Result<Option<DeviceStats>, PolicyError> {
        Ok(Some(self.status().await?.device))
    }

    async fn paused(&self) -> Result<Duration, PolicyError> {
        Ok(self.status().await?.learning_time)
    }

    /// Replaces this policy's weights with weights from files, after checking that every file is as
    /// it was written and fits the policy; if one does not, nothing changes. The accumulated
    /// gradient and the optimizer state are dropped. Requests in flight continue with the new
    /// weights.
    async fn update_weights(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        let WeightsAt::Manifest(manifest) = &weights.at else {
            return weights.check_shared(self.version().await?);
        };
        let manifest = manifest.clone();
        let verified =
            tokio::task::spawn_blocking(move || manifest.verify().map(Path::to_owned)).await;
        let dir = verified.map_err(|_| PolicyError::Stopped("the check of weights".into()))??;
        let version = weights.version;
        let result = self
            .send_learner_command(|response| LearnerCommand::UpdateWeights(dir, version, response))
            .await;
        result.map_err(|error| match error {
            PolicyError::Storage(why) | PolicyError::Invalid(why) => {
                PolicyError::WeightsNotLoaded(why)
            }
            other => other,
        })
    }

    async fn version(&self) -> Result<u64, PolicyError> {
        self.send_command(|response| EngineCommand::Version(self.policy, response)).await
    }
}

#[async_trait]
impl Learner for Engine {
    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.send_learner_command(|response| LearnerCommand::Logprobs(batch, response)).await
    }

    async fn predictions(&self, batch: Arc<TreeBatch>) -> Result<Predictions, PolicyError> {
        self.send_learner_command(|response| LearnerCommand::Predictions(batch, response)).await
    }

    async fn values(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.send_learner_command(|response| LearnerCommand::Values(batch, response)).await
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        self.send_learner_command(|response| LearnerCommand::ForwardBackward(batch, loss, response))
            .await
    }

    async fn forward_backward_terms(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<(ForwardBackward, LossTerms), PolicyError> {
        self.send_learner_command(|response| {
            LearnerCommand::ForwardBackwardTerms(batch, loss, response)
        })
        .await
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        self.send_learner_command(|response| LearnerCommand::OptimStep(params, response)).await
    }

    async fn save(&self, dir: &Path, with_optimizer: bool) -> Result<Manifest, PolicyError> {
        self.send_learner_command(|response| {
            LearnerCommand::Save(dir.to_path_buf(), with_optimizer, response)
        })
        .await
    }

    async fn load(&self, dir: &Path, with_optimizer: bool) -> Result<(), PolicyError> {
        self.send_learner_command(|response| {
            LearnerCommand::Load(dir.to_path_buf(), with_optimizer, response)
        })
        .await
    }

    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        self.send_learner_command(|response| LearnerCommand::Publish(version, response)).await?;
        Ok(WeightsRef { version, at: WeightsAt::Memory })
    }
}
