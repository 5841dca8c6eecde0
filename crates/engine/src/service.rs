//! Runs the engine's thread, which owns the model and executes the commands of handles.
//!
//! One thread owns the model and receives commands; one pool of threads computes. Async code never
//! computes: it sends a command and waits. Between two commands the thread runs the scheduler's
//! batches. A learner's command waits while more than a few sequences are running, because a batch
//! of a few rows would read all weights for them. Its wait is bounded by
//! `MAX_BATCHES_BEFORE_COMMAND`. Changed weights sample nothing until they are published: requests
//! wait for that.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use levade_model::ModelError;
use levade_policy::{
    Constraint, DeviceStats, ForwardBackward, Load, LoraOptions, LossTerms, Manifest, OptimParams,
    OptimReport, PolicyError, Predictions, SampleRequest,
};
use levade_rl::Loss;
use levade_tree::TreeBatch;
use tokio::sync::{oneshot, watch};
use tracing::debug;

use crate::adapter::Adapter;
use crate::checkpoint;
use crate::learning::TrainingState;
use crate::scheduler::{PublishedWeights, Scheduler};
use crate::sequence::Events;
use crate::transformer::Transformer;
use crate::value_head::ValueHead;

/// Index of the policy of the base weights. Policy i is adapter i − 1.
pub const BASE: u32 = 0;

/// Maximum number of batches that running sequences take while a learner's command waits.
const MAX_BATCHES_BEFORE_COMMAND: usize = 256;

/// If fewer sequences than this are running, a learner's command waits for one batch only. Reading
/// the weights takes longer than computing so few rows, and during the command other sequences
/// join, when their tool calls have finished.
const MIN_RUNNING_TO_WAIT: usize = 12;

/// Channel for the response to a command.
pub type ResponseSender<T> = oneshot::Sender<Result<T, PolicyError>>;

/// Command of a handle to the engine's thread. The number in a variant is the index of the policy.
pub enum EngineCommand {
    /// Samples a completion.
    Sample(u32, SampleRequest, Option<Box<dyn Constraint>>, Events, ResponseSender<()>),
    /// Aborts the requests of a stream, or all requests of the policy if the stream is `None`. The
    /// response is the number of aborted requests.
    Abort(u32, Option<u64>, ResponseSender<usize>),
    /// Returns the engine's load and counters.
    Status(ResponseSender<EngineStatus>),
    /// Returns the version of the policy's published weights.
    Version(u32, ResponseSender<u64>),
    /// Creates an adapter with options, a seed and the name of the base model. The response is the
    /// index of the adapter's policy.
    Lora(LoraOptions, u64, String, ResponseSender<u32>),
    /// Uses or changes the weights of a policy.
    Learn(u32, LearnerCommand),
}

/// Commands that use or change the weights of a policy.
pub enum LearnerCommand {
    /// Computes the log-probabilities of all targets of a batch.
    Logprobs(Arc<TreeBatch>, ResponseSender<Vec<f32>>),
    /// Computes log-probabilities, entropies and concentrations of all targets of a batch.
    Predictions(Arc<TreeBatch>, ResponseSender<Predictions>),
    /// Computes the critic's values of all targets of a batch.
    Values(Arc<TreeBatch>, ResponseSender<Vec<f32>>),
    /// Adds a value head to the policy.
    AddValueHead(ResponseSender<()>),
    /// Accumulates the gradient of a loss over a batch.
    ForwardBackward(Arc<TreeBatch>, Loss, ResponseSender<ForwardBackward>),
    /// Accumulates the gradient of a loss over a batch, and returns the losses of the terms.
    ForwardBackwardTerms(Arc<TreeBatch>, Loss, ResponseSender<(ForwardBackward, LossTerms)>),
    /// Runs an optimizer step with the accumulated gradient.
    OptimStep(OptimParams, ResponseSender<OptimReport>),
    /// Saves the weights to a directory, and the optimizer state if the flag is set.
    Save(PathBuf, bool, ResponseSender<Manifest>),
    /// Loads the weights from a directory, and the optimizer state if the flag is set.
    Load(PathBuf, bool, ResponseSender<()>),
    /// Saves the base weights and the adapter merged into one model.
    Merge(PathBuf, ResponseSender<()>),
    /// Publishes the current weights under a version. Requests are sampled with these weights from
    /// now on.
    Publish(u64, ResponseSender<()>),
    /// Loads weights from a directory and publishes them under a version.
    UpdateWeights(PathBuf, u64, ResponseSender<()>),
}

impl LearnerCommand {
    /// Returns the command's name for logs.
    fn name(&self) -> &'static str {
        match self {
            LearnerCommand::Logprobs(..) => "logprobs",
            LearnerCommand::Predictions(..) => "predictions",
            LearnerCommand::Values(..) => "values",
            LearnerCommand::AddValueHead(..) => "add_value_head",
            LearnerCommand::ForwardBackward(..) => "forward_backward",
            LearnerCommand::ForwardBackwardTerms(..) => "forward_backward_terms",
            LearnerCommand::OptimStep(..) => "optim_step",
            LearnerCommand::Save(..) => "save",
            LearnerCommand::Load(..) => "load",
            LearnerCommand::Merge(..) => "merge",
            LearnerCommand::Publish(..) => "publish",
            LearnerCommand::UpdateWeights(..) => "adopt",
        }
    }
}

/// A learner's command in progress, during which the engine's thread responds to nothing.
#[derive(Debug, Clone)]
pub struct CommandInProgress {
    since: Instant,
    /// Load and counters before the command.
    status: EngineStatus,
}

/// Load and counters of an engine.
#[derive(Debug, Clone)]
pub struct EngineStatus {
    /// Running and waiting requests.
    pub load: Load,
    /// Counters since the start.
    pub device: DeviceStats,
    /// Time spent on commands that use or change weights, since the start.
    pub learning_time: Duration,
}

impl CommandInProgress {
    /// Returns load and counters, including the time of the command so far.
    pub fn status(&self) -> EngineStatus {
        let mut status = self.status.clone();
        status.learning_time += self.since.elapsed();
        status
    }
}

/// State of the engine's thread.
pub struct EngineService {
    model: Transformer,
    scheduler: Scheduler,
    learning: TrainingState,
    inbox: Receiver<EngineCommand>,
    command_in_progress: watch::Sender<Option<CommandInProgress>>,
    pending: VecDeque<(u32, LearnerCommand)>,
    learning_time: Duration,
    /// Published weights, by policy.
    published: Vec<PublishedWeights>,
    /// Whether the base weights have been trained. Adapters over trained base weights are rejected.
    base_trained: bool,
    /// Whether memory was planned for training.
    trains: bool,
    /// Whether running sequences keep their keys and values when the weights change.
    keeps_cache: bool,
}

impl EngineService {
    /// Creates a service for `model`, with its weights published as version 0.
    /// `command_in_progress` publishes the learner's command in progress.
    pub fn new(
        model: Transformer,
        scheduler: Scheduler,
        learning: TrainingState,
        inbox: Receiver<EngineCommand>,
        command_in_progress: watch::Sender<Option<CommandInProgress>>,
        trains: bool,
        keeps_cache: bool,
    ) -> Self {
        EngineService {
            model,
            scheduler,
            learning,
            inbox,
            command_in_progress,
            pending: VecDeque::new(),
            learning_time: Duration::ZERO,
            published: vec![PublishedWeights::default()],
            base_trained: false,
            trains,
            keeps_cache,
        }
    }

    /// Runs until the last handle is dropped.
    pub fn run(mut self) {
        let mut waited = 0;
        loop {
            // Blocks only if there is nothing to do.
            if self.pending.is_empty() && self.scheduler.count_ready(&self.published) == 0 {
                match self.inbox.recv() {
                    Ok(command) => self.process_command(command),
                    Err(_) => return,
                }
            }
            loop {
                match self.inbox.try_recv() {
                    Ok(command) => self.process_command(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            let ready = self.scheduler.count_ready(&self.published);
            let max_wait = if ready < MIN_RUNNING_TO_WAIT { 1 } else { MAX_BATCHES_BEFORE_COMMAND };
            if waited >= max_wait || ready == 0 {
                if let Some((policy, command)) = self.pending.pop_front() {
                    let since = Instant::now();
                    let name = command.name();
                    self.command_in_progress
                        .send_replace(Some(CommandInProgress { since, status: self.status() }));
                    debug!(policy, command = name, "started learner command");
                    self.run_learner_command(policy, command);
                    let took = since.elapsed();
                    debug!(
                        policy,
                        command = name,
                        seconds = took.as_secs_f64(),
                        "finished learner command"
                    );
                    self.learning_time += took;
                    self.command_in_progress.send_replace(None);
                }
                waited = 0;
            } else {
                waited += usize::from(!self.pending.is_empty());
                self.scheduler.step(&self.model, &self.published);
            }
        }
    }

    fn status(&self) -> EngineStatus {
        let load = self.scheduler.load();
        let device = self.scheduler.stats();
        EngineStatus { load, device, learning_time: self.learning_time }
    }

    fn process_command(&mut self, command: EngineCommand) {
        // A response that no caller waits for is dropped.
        match command {
            EngineCommand::Sample(policy, request, constraint, events, response) => {
                let id = request.id.clone();
                let name = request.policy.clone();
                let stream = request.stream;
                let prompt = request.prompt.len();
                let submitted =
                    self.scheduler.submit(&self.model, policy, request, constraint, events);
                match &submitted {
                    Ok(()) => debug!(id, name, policy, stream, prompt, "accepted request"),
                    Err(error) => {
                        debug!(id, name, policy, stream, prompt, %error, "rejected request")
                    }
                }
                let _ = response.send(submitted);
            }
            EngineCommand::Abort(policy, stream, response) => {
                let ended = self.scheduler.abort(policy, stream);
                debug!(policy, stream, ended, "aborted requests");
                let _ = response.send(Ok(ended));
            }
            EngineCommand::Status(response) => drop(response.send(Ok(self.status()))),
            EngineCommand::Version(policy, response) => {
                drop(response.send(Ok(self.published[policy as usize].version)));
            }
            EngineCommand::Lora(options, seed, base, response) => {
                drop(response.send(self.create_adapter(options, seed, base)))
            }
            EngineCommand::Learn(policy, command) => self.pending.push_back((policy, command)),
        }
    }

    fn create_adapter(
        &mut self,
        options: LoraOptions,
        seed: u64,
        base: String,
    ) -> Result<u32, PolicyError> {
        if self.base_trained {
            return Err(PolicyError::Invalid(
                "the base weights have already been trained; create adapters before training, or \
                 on a saved model"
                    .into(),
            ));
        }
        let Transformer { compute, weights, adapters, .. } = &mut self.model;
        let adapter = Adapter::new(compute, &weights.layout, options, seed, base);
        adapters.push(adapter.map_err(|error| PolicyError::Invalid(error.to_string()))?);
        self.published.push(PublishedWeights::default());
        Ok(adapters.len() as u32)
    }

    fn run_learner_command(&mut self, policy: u32, command: LearnerCommand) {
        let adapter = (policy as usize).checked_sub(1);
        let is_frozen = adapter.is_none() && !self.model.adapters.is_empty();
        let frozen = || {
            if is_frozen {
                Err(PolicyError::Invalid(
                "the base weights are frozen because they have adapters; train an adapter instead"
                    .into(),
            ))
            } else {
                Ok(())
            }
        };
        let trains = self.trains;
        let trainable = || {
            if trains {
                frozen()
            } else {
                Err(PolicyError::Invalid(
                "this engine was started without memory for training; start it with trains = true"
                    .into(),
            ))
            }
        };
        let EngineService { model, learning, .. } = self;
        match command {
            LearnerCommand::Logprobs(batch, response) => {
                drop(response.send(learning.logprobs(model, adapter, &batch)));
            }
            LearnerCommand::Predictions(batch, response) => {
                drop(response.send(learning.predictions(model, adapter, &batch)));
            }
            LearnerCommand::Values(batch, response) => {
                drop(response.send(learning.values(model, adapter, &batch)));
            }
            LearnerCommand::AddValueHead(response) => {
                let hidden = model.weights.config.hidden;
                model.values.entry(adapter).or_insert_with(|| ValueHead::new(hidden));
                drop(response.send(Ok(())));
            }
            LearnerCommand::ForwardBackward(batch, loss, response) => {
                let sums = trainable()
                    .and_then(|()| learning.forward_backward(model, adapter, &batch, &loss));
                drop(response.send(sums));
            }
            LearnerCommand::ForwardBackwardTerms(batch, loss, response) => {
                let mut terms = LossTerms::default();
                let sums = trainable().and_then(|()| {
                    learning.forward_backward_terms(model, adapter, &batch, &loss, Some(&mut terms))
                });
                drop(response.send(sums.map(|sums| (sums, terms))));
            }
            LearnerCommand::OptimStep(params, response) => {
                let report = trainable().map(|()| learning.optim_step(model, adapter, &params));
                if report.as_ref().is_ok_and(|report| report.applied) {
                    self.base_trained |= policy == BASE;
                    self.weights_changed(policy, self.keeps_cache);
                }
                drop(response.send(report));
            }
            LearnerCommand::Save(dir, with_optimizer, response) => {
                let saved = checkpoint::save(model, learning, adapter, &dir, with_optimizer);
                let saved = saved
                    .map_err(to_storage_error)
                    .and_then(|(content, names)| Manifest::from_files(&dir, content, &names));
                drop(response.send(saved));
            }
            LearnerCommand::Load(dir, with_optimizer, response) => {
                let opened = frozen().and_then(|()| {
                    checkpoint::open(model, adapter, &dir, with_optimizer).map_err(to_storage_error)
                });
                let replaced = opened.and_then(|saved| self.replace_weights(policy, saved));
                drop(response.send(replaced));
            }
            LearnerCommand::UpdateWeights(dir, version, response) => {
                let opened = frozen().and_then(|()| {
                    checkpoint::open(model, adapter, &dir, false).map_err(to_storage_error)
                });
                let replaced = opened.and_then(|saved| self.replace_weights(policy, saved));
                if replaced.is_ok() {
                    self.published[policy as usize] = PublishedWeights { version, current: true };
                }
                drop(response.send(replaced));
            }
            LearnerCommand::Merge(dir, response) => {
                drop(
                    response.send(
                        checkpoint::save_merged(model, adapter, &dir).map_err(to_storage_error),
                    ),
                );
            }
            LearnerCommand::Publish(version, response) => {
                self.published[policy as usize] = PublishedWeights { version, current: true };
                drop(response.send(Ok(())));
            }
        }
    }

    /// Replaces the weights of a policy with opened files.
    fn replace_weights(
        &mut self,
        policy: u32,
        saved: checkpoint::OpenedFiles,
    ) -> Result<(), PolicyError> {
        let loaded = checkpoint::load(&mut self.model, &mut self.learning, saved);
        self.weights_changed(policy, false);
        loaded.map_err(|error| {
            let state =
                "some of the weights have been replaced; load a complete directory before you \
                 continue";
            PolicyError::Storage(format!("{error}\n{state}"))
        })
    }

    fn weights_changed(&mut self, policy: u32, keep_cache: bool) {
        self.published[policy as usize].current = false;
        self.scheduler.weights_changed(policy, keep_cache);
    }
}

fn to_storage_error(error: ModelError) -> PolicyError {
    PolicyError::Storage(error.to_string())
}
