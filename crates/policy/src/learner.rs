//! Turns batches into weight updates: the trait [`Learner`] and its types.
//!
//! [`Learner::plan`] returns how the learner would divide an update into micro-batches
//! ([`MicroBatchPlan`]). The caller records this plan. [`Learner::train`] then runs the update
//! exactly as planned, or rejects the plan and names the difference. A learner on one rank does
//! this by [`Learner::forward_backward`] for each micro-batch and one [`Learner::optim_step`]. A
//! learner evaluates terms and adds up weight × loss. It does not depend on algorithms, groups or
//! sequences, so micro-batches change only the order of the sums.
//!
//! [`Learner::publish`] makes the current weights those of a version and returns their location: in
//! memory, in files with a manifest, or in a process group. All samplers of the policy then load
//! them ([`update_sampler_weights`](crate::update_sampler_weights)).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_rl::{Loss, TermLoss};
use levade_tree::{SequenceInput, Term, TreeBatch};
use serde::{Deserialize, Serialize};

use crate::{LossTerms, Manifest, MicroBatchPlan, PolicyError, UpdateSequences, WeightsRef};

/// Statistics of one forward and backward pass over a batch. All fields are sums or maxima, so the
/// statistics of several micro-batches can be combined.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ForwardBackward {
    /// Sum of weight × loss over the terms.
    pub loss: f64,
    /// Number of packed tokens that went through the model.
    pub tokens: u64,
    /// Number of trained tokens.
    pub targets: u64,
    /// Number of terms with a nonzero weight. The sums below are over these terms; other terms are
    /// not trained.
    pub terms: u64,
    /// Sum over terms of −log p (negative log-likelihood), in nats.
    pub nll: f64,
    /// Sum over terms of the entropy of the distribution that predicts the term's token, in nats. A
    /// token that several sequences share counts once per sequence.
    pub entropy: f64,
    /// Number of terms whose clip bound was active, except terms that the dual clip clipped.
    pub clipped: u64,
    /// Number of terms that the dual clip clipped.
    pub dual_clipped: u64,
    /// Sum over terms of the estimated KL divergence from the reference policy, in nats.
    pub kl: f64,
    /// Sum of the probability ratio that the loss uses, over terms with a behavior log-probability.
    /// The denominator is the proximal policy if the term has one, and otherwise the behavior
    /// policy.
    pub ratio: f64,
    /// Sum of −log ratio over the terms with a behavior log-probability: an estimate of the KL
    /// divergence from the policy in the denominator of the ratio.
    pub drift: f64,
    /// Number of terms with a nonzero weight and a behavior log-probability.
    #[serde(rename = "behaviour_terms")]
    pub behavior_terms: u64,
    /// Number of mismatched terms: terms whose token was sampled by the same weights that are
    /// trained, but whose log-probability differs in any bit from the behavior log-probability.
    pub mismatched: u64,
    /// Maximum absolute difference between log-probability and behavior log-probability over the
    /// mismatched terms.
    pub max_mismatch: f32,
}

impl ForwardBackward {
    /// Adds the statistics of one term. `logp` is the log-probability of the term's target, and
    /// `entropy` is the entropy, in nats, of the distribution that predicts the target.
    pub fn add_term(&mut self, term: &Term, logp: f32, entropy: f64, evaluated: &TermLoss) {
        if let Some(behavior) = term.behavior.filter(|_| term.age == 0) {
            self.mismatched += u64::from(behavior.to_bits() != logp.to_bits());
            self.max_mismatch = self.max_mismatch.max((behavior - logp).abs());
        }
        if term.weight == 0.0 {
            return;
        }
        self.loss += f64::from(term.weight) * evaluated.loss;
        self.terms += 1;
        self.nll -= f64::from(logp);
        self.entropy += entropy;
        self.clipped += u64::from(evaluated.clipped && !evaluated.dual);
        self.dual_clipped += u64::from(evaluated.dual);
        self.kl += evaluated.kl;
        if term.behavior.is_some() {
            self.behavior_terms += 1;
            self.ratio += evaluated.ratio;
            self.drift -= evaluated.log_ratio;
        }
    }

    /// Adds the statistics of one term of a value loss.
    pub fn add_value(&mut self, term: &Term, evaluated: &TermLoss) {
        if term.weight == 0.0 {
            return;
        }
        self.loss += f64::from(term.weight) * evaluated.loss;
        self.terms += 1;
        self.clipped += u64::from(evaluated.clipped);
    }

    /// Adds the statistics of another micro-batch.
    pub fn merge(&mut self, other: &Self) {
        self.loss += other.loss;
        self.tokens += other.tokens;
        self.targets += other.targets;
        self.terms += other.terms;
        self.nll += other.nll;
        self.entropy += other.entropy;
        self.clipped += other.clipped;
        self.dual_clipped += other.dual_clipped;
        self.kl += other.kl;
        self.ratio += other.ratio;
        self.drift += other.drift;
        self.behavior_terms += other.behavior_terms;
        self.mismatched += other.mismatched;
        self.max_mismatch = self.max_mismatch.max(other.max_mismatch);
    }
}

/// Predictions of a policy for every target of a batch, in the order of `batch.targets`, at the
/// target's temperature.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Predictions {
    /// Log-probabilities of the targets, as [`Learner::logprobs`] returns them.
    pub logprobs: Vec<f32>,
    /// Entropies in nats of the distributions that predict the targets.
    pub entropies: Vec<f32>,
    /// Sum of the squared probabilities over the vocabulary (Σ p²) for each of these distributions.
    pub concentrations: Vec<f32>,
}

/// Parameters of one AdamW step with decoupled weight decay (Loshchilov & Hutter 2019), after
/// clipping of the global gradient norm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimParams {
    /// Learning rate of this step, with the schedule applied.
    pub learning_rate: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Value added to the square root of the second moment.
    pub epsilon: f32,
    /// Weight decay, applied to matrices but not to norms and biases.
    pub weight_decay: f32,
    /// Maximum global gradient norm. A larger gradient is scaled down to this norm. Infinity
    /// disables clipping.
    pub max_grad_norm: f32,
}

/// Result of an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OptimReport {
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Whether the weights have changed. A step whose gradient is not finite is skipped.
    pub applied: bool,
}

/// One update: a loss over sequences, and the optimizer step that follows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainRequest {
    /// The sequences, whose terms hold all data that the loss needs.
    #[serde(rename = "paths")]
    pub sequences: Vec<SequenceInput>,
    /// Loss function.
    pub loss: Loss,
    /// Parameters of the optimizer step.
    pub params: OptimParams,
}

/// Result of an update: the statistics of its micro-batches and the optimizer step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainReport {
    /// Statistics of each micro-batch, in the order of the micro-batch plan.
    pub sums: Vec<ForwardBackward>,
    /// Result of the optimizer step.
    pub step: OptimReport,
}

/// Trains a policy.
///
/// A remote learner gets an update in two calls. First, [`plan`](Learner::plan) receives the token
/// ids of the update. After the caller has recorded the plan, [`train`](Learner::train) receives
/// all sequences and their terms.
///
/// The learner is independent of the algorithm. Some algorithms need a forward pass before the
/// update: the log-probabilities of the policy or of a reference, or the values of a critic. The
/// caller requests these beforehand, with methods that change nothing, and stores the results in
/// the terms. A critic is another learner, with a micro-batch plan of its own.
///
/// The default `train` calls [`forward_backward`](Learner::forward_backward), which accumulates a
/// gradient, for one micro-batch after another, and then [`optim_step`](Learner::optim_step), which
/// applies it. This suffices for a learner on one rank.
#[async_trait]
pub trait Learner: Send + Sync {
    /// Returns how the learner would divide an update into micro-batches. The plan depends only on
    /// the update and the learner's ranks. The call changes nothing.
    ///
    /// # Errors
    /// Returns an error if a sequence is empty or the learner has stopped.
    async fn plan(&self, update: &UpdateSequences) -> Result<MicroBatchPlan, PolicyError> {
        MicroBatchPlan::pack(update)
    }

    /// Runs one update exactly as `plan` divides it. A gradient accumulated before is part of the
    /// update. `done` is called after each micro-batch, in the order in which they finish.
    ///
    /// # Errors
    /// Returns [`PolicyError::PlanMismatch`], before anything has changed, if `plan` does not fit
    /// the sequences or the learner's ranks. Returns an error if a batch does not fit the model or
    /// the loss, or if the learner has stopped; the accumulated gradient is then unusable.
    async fn train(
        &self,
        update: TrainRequest,
        plan: &MicroBatchPlan,
        done: &mut (dyn FnMut() + Send),
    ) -> Result<TrainReport, PolicyError> {
        let TrainRequest { mut sequences, loss, params } = update;
        plan.check(sequences.len(), 1)?;
        let mut sums = Vec::with_capacity(plan.micro_batches.len());
        for batch in &plan.micro_batches {
            if batch.paths.is_empty() {
                sums.push(ForwardBackward::default());
            } else {
                let inputs: Vec<SequenceInput> = batch
                    .paths
                    .iter()
                    .map(|sequence| std::mem::take(&mut sequences[*sequence as usize]))
                    .collect();
                let merged =
                    TreeBatch::merge(&inputs).map_err(|e| PolicyError::Invalid(e.to_string()))?;
                sums.push(self.forward_backward(Arc::new(merged), loss).await?);
            }
            done();
        }
        Ok(TrainReport { sums, step: self.optim_step(params).await? })
    }

    /// Returns the log-probability of every target of the batch, in the order of `batch.targets`.
    /// Changes nothing.
    ///
    /// # Errors
    /// Returns an error if the batch does not fit the model or the learner has stopped.
    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError>;

    /// Returns the log-probability of every target of the batch, with the entropy and concentration
    /// of the distribution that predicts it. Changes nothing.
    ///
    /// # Errors
    /// Returns [`PolicyError::NoPredictions`] if the learner does not report predictions, and an
    /// error if the batch does not fit the model or the learner has stopped.
    async fn predictions(&self, batch: Arc<TreeBatch>) -> Result<Predictions, PolicyError> {
        let _ = batch;
        Err(PolicyError::NoPredictions)
    }

    /// Returns the critic's value of the state before every target of the batch, in the order of
    /// `batch.targets`. Changes nothing.
    ///
    /// # Errors
    /// Returns [`PolicyError::NoValueHead`] if the learner has no value head, and an error if the
    /// batch does not fit the model or the learner has stopped.
    async fn values(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        let _ = batch;
        Err(PolicyError::NoValueHead)
    }

    /// Adds the gradient of the loss over the batch to the accumulated gradient.
    ///
    /// # Errors
    /// Returns an error if the batch does not fit the model or the loss, or if the learner has
    /// stopped.
    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError>;

    /// Adds the gradient like [`forward_backward`](Self::forward_backward), and returns the loss of
    /// each term.
    ///
    /// # Errors
    /// Returns [`PolicyError::NoTerms`] if the learner does not report terms, and the errors of
    /// [`forward_backward`](Self::forward_backward).
    async fn forward_backward_terms(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<(ForwardBackward, LossTerms), PolicyError> {
        let _ = (batch, loss);
        Err(PolicyError::NoTerms)
    }

    /// Applies the accumulated gradient and clears it.
    ///
    /// # Errors
    /// Returns an error if the learner has stopped.
    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError>;

    /// Writes the weights in Hugging Face layout (`config.json`, `model.safetensors`) into the
    /// existing directory `dir`, with the optimizer state alongside if `with_optimizer` is set.
    /// Every file is flushed to the disk. For atomicity, the caller must write into a temporary
    /// directory and then rename it. Returns which files were written and where: a remote learner
    /// may keep them on its own machine, under the same path.
    ///
    /// # Errors
    /// Returns an error with the file and the reason if a file cannot be written, and an error if
    /// the learner has stopped.
    async fn save(&self, dir: &Path, with_optimizer: bool) -> Result<Manifest, PolicyError>;

    /// Replaces the weights with the weights in the directory `dir`. If `with_optimizer` is set and
    /// `dir` contains the optimizer state, this state is loaded too; otherwise the optimizer state
    /// is reset. An accumulated gradient is discarded.
    ///
    /// # Errors
    /// Returns an error if a file is missing or does not fit the model, or if the learner has
    /// stopped.
    async fn load(&self, dir: &Path, with_optimizer: bool) -> Result<(), PolicyError>;

    /// Restores the initial weights and resets the optimizer state. The default does nothing, which
    /// is right for a learner that was started with this process and that no other process trains.
    ///
    /// # Errors
    /// Returns an error if the initial weights cannot be read, or if the learner has stopped.
    async fn reset(&self) -> Result<(), PolicyError> {
        Ok(())
    }

    /// Returns the total time spent so far on handing over devices between this learner and
    /// samplers, or `None` if the learner shares no devices with samplers.
    fn handoff_time(&self) -> Option<Duration> {
        None
    }

    /// Publishes the current weights as version `version` and returns their location. Each sampler
    /// of this policy must then [load](crate::Sampler::update_weights) them.
    ///
    /// # Errors
    /// Returns an error if the learner has stopped.
    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError>;
}
