//! Turns batches into weight updates: the trait [`Learner`] and its types.
//!
//! [`Learner::plan`] returns how the learner would divide an update into micro-batches ([`Cut`]). The caller
//! records it. [`Learner::train`] then runs the update exactly so, or rejects it and names the difference. A
//! learner on one rank does this by [`Learner::forward_backward`] for each micro-batch and one
//! [`Learner::optim_step`]. A learner evaluates terms and adds up weight × loss; it knows nothing of
//! algorithms, groups or sequences, so micro-batches change only the order of the sums.
//!
//! [`Learner::publish`] makes the weights those of a version and returns where they are: in memory, in files
//! with a manifest, or in a process group. All samplers of the policy then load them
//! ([`adopt_all`](crate::adopt_all)).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_rl::{Evaluated, Loss};
use levade_tree::{PathInput, Term, TreeBatch};
use serde::{Deserialize, Serialize};

use crate::{Cut, LossTerms, Manifest, PolicyError, Uncut, WeightsRef};

/// Findings of one forward and backward pass over a batch. All fields are sums or extrema, so those of
/// several micro-batches combine.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ForwardBackward {
    /// Sum of weight × loss over the terms.
    pub loss: f64,
    /// Packed tokens that went through the model.
    pub tokens: u64,
    /// Trained tokens.
    pub targets: u64,
    /// Terms with a weight, which the next sums are over: what has none is not trained.
    pub terms: u64,
    /// Sum over terms of −log p.
    pub nll: f64,
    /// Sum over terms of the entropy of the distribution that predicts their token, nats: where paths share a
    /// token, each counts it.
    pub entropy: f64,
    /// Terms whose clip bound was active, the dual clip aside.
    pub clipped: u64,
    /// Terms at the bound of the dual clip.
    pub dual_clipped: u64,
    /// Sum over terms of the estimated KL divergence from the reference.
    pub kl: f64,
    /// Sum over terms with a behaviour log-probability of the ratio that the loss works with: to the proximal
    /// policy where a term has one, else to the behaviour policy.
    pub ratio: f64,
    /// Sum over the same terms of −log ratio: how far the weights have moved, as an estimate of the
    /// divergence from that policy.
    pub drift: f64,
    /// Terms that carry a behaviour log-probability.
    pub behaviour_terms: u64,
    /// Terms of the very weights that are trained whose log-probability differs in any bit from the behaviour
    /// log-probability they carry.
    pub mismatched: u64,
    /// Largest absolute difference between the two.
    pub max_mismatch: f32,
}

impl ForwardBackward {
    /// Adds one term, evaluated at log-probability `logp` of its target, which was predicted with an entropy
    /// of `entropy` nats.
    pub fn add_term(&mut self, term: &Term, logp: f32, entropy: f64, evaluated: &Evaluated) {
        if let Some(behaviour) = term.behaviour.filter(|_| term.age == 0) {
            self.mismatched += u64::from(behaviour.to_bits() != logp.to_bits());
            self.max_mismatch = self.max_mismatch.max((behaviour - logp).abs());
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
        if term.behaviour.is_some() {
            self.behaviour_terms += 1;
            self.ratio += evaluated.ratio;
            self.drift -= evaluated.log_ratio;
        }
    }

    /// Adds one term of a loss of values.
    pub fn add_value(&mut self, term: &Term, evaluated: &Evaluated) {
        if term.weight == 0.0 {
            return;
        }
        self.loss += f64::from(term.weight) * evaluated.loss;
        self.terms += 1;
        self.clipped += u64::from(evaluated.clipped);
    }

    /// Adds the sums of another micro-batch.
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
        self.behaviour_terms += other.behaviour_terms;
        self.mismatched += other.mismatched;
        self.max_mismatch = self.max_mismatch.max(other.max_mismatch);
    }
}

/// Predictions of a policy for every target of a batch, in the order of `batch.targets`, at the target's
/// temperature.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Predictions {
    /// Log-probability of the target: the numbers of [`Learner::logprobs`].
    pub logprobs: Vec<f32>,
    /// Entropy in nats of the distribution that predicts it.
    pub entropies: Vec<f32>,
    /// Σ p² over the vocabulary of that distribution.
    pub concentrations: Vec<f32>,
}

/// One optimiser step: AdamW with decoupled weight decay (Loshchilov & Hutter 2019) after clipping the global
/// norm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimParams {
    /// Learning rate of this step, the schedule already applied.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Weight decay, applied to matrices only (not to norms and biases).
    pub weight_decay: f32,
    /// The gradient is scaled down to this global norm; infinite leaves it.
    pub max_grad_norm: f32,
}

/// Report of an optimiser step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OptimReport {
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Whether the weights changed. A gradient that is not finite skips the step.
    pub applied: bool,
}

/// One update: the sum of a loss over paths, and a step of the optimiser along it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainRequest {
    /// The paths, with all that the loss needs to know in their terms.
    pub paths: Vec<PathInput>,
    /// The loss.
    pub loss: Loss,
    /// The optimiser's numbers.
    pub params: OptimParams,
}

/// Sums and step of an update.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trained {
    /// Sums of each micro-batch, in the order of the cut.
    pub sums: Vec<ForwardBackward>,
    /// The optimiser's step.
    pub step: OptimReport,
}

/// Something that learns.
///
/// A learner elsewhere gets an update in two calls: [`plan`](Learner::plan) with its token ids, and, once the
/// answer is recorded, [`train`](Learner::train) with all paths and their terms. It makes no difference to it
/// which algorithm that is: what needs a forward pass first (log-probabilities of the policy before the
/// update and of a reference, a critic's values) is asked for before, with calls of their own that change
/// nothing, and stands in the terms. A critic is another learner, with a cut of its own.
///
/// Beneath are [`forward_backward`](Learner::forward_backward), which accumulates a gradient until
/// [`optim_step`](Learner::optim_step) applies it: a learner on one rank trains by these, one after another.
#[async_trait]
pub trait Learner: Send + Sync {
    /// How it would cut an update. Changes nothing, and depends on nothing but the update and the learner's
    /// ranks.
    ///
    /// # Errors
    /// When a path is empty, or the learner has stopped.
    async fn plan(&self, update: &Uncut) -> Result<Cut, PolicyError> {
        Cut::filled(update)
    }

    /// Does one update exactly as it is cut. An accumulated gradient is part of it. `done` is called after
    /// each micro-batch, in order of their ends.
    ///
    /// # Errors
    /// [`PolicyError::Cut`], before anything has changed, when the cut does not fit the paths or the
    /// learner's ranks; when a batch does not fit the model or the loss, or the learner has stopped: what has
    /// accumulated is then of no use.
    async fn train(
        &self,
        update: TrainRequest,
        cut: &Cut,
        done: &mut (dyn FnMut() + Send),
    ) -> Result<Trained, PolicyError> {
        let TrainRequest { mut paths, loss, params } = update;
        cut.check(paths.len(), 1)?;
        let mut sums = Vec::with_capacity(cut.micro_batches.len());
        for batch in &cut.micro_batches {
            if batch.paths.is_empty() {
                sums.push(ForwardBackward::default());
            } else {
                let inputs: Vec<PathInput> =
                    batch.paths.iter().map(|path| std::mem::take(&mut paths[*path as usize])).collect();
                let merged = TreeBatch::merge(&inputs).map_err(|e| PolicyError::Invalid(e.to_string()))?;
                sums.push(self.forward_backward(Arc::new(merged), loss).await?);
            }
            done();
        }
        Ok(Trained { sums, step: self.optim_step(params).await? })
    }

    /// Log-probability of every target of the batch, in the order of `batch.targets`. Changes nothing.
    ///
    /// # Errors
    /// When the batch does not fit the model, or the learner has stopped.
    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError>;

    /// Log-probability of every target of the batch, and how spread out the distribution is that predicts it.
    /// Changes nothing.
    ///
    /// # Errors
    /// When the learner does not tell, the batch does not fit the model, or the learner has stopped.
    async fn predictions(&self, batch: Arc<TreeBatch>) -> Result<Predictions, PolicyError> {
        let _ = batch;
        Err(PolicyError::NoPredictions)
    }

    /// A critic's value of the state before every target of the batch, in the order of `batch.targets`.
    /// Changes nothing.
    ///
    /// # Errors
    /// When there is no value head, the batch does not fit the model, or the learner has stopped.
    async fn values(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        let _ = batch;
        Err(PolicyError::NoValueHead)
    }

    /// Adds the gradient of the loss over the batch to what has accumulated.
    ///
    /// # Errors
    /// When the batch does not fit the model or the loss, or the learner has stopped.
    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError>;

    /// Adds the gradient like [`forward_backward`](Self::forward_backward), and returns the loss of each
    /// term.
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
    /// When the learner has stopped.
    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError>;

    /// Writes the weights in Hugging Face layout (`config.json`, `model.safetensors`) and, where asked, the
    /// optimiser state beside them, into an existing folder. Every file is flushed to the disk. Atomicity is
    /// the caller's: write into a temporary folder, then rename. Returns what was written, and where: a
    /// learner elsewhere may keep the files on its own machine, under the same path.
    ///
    /// # Errors
    /// When a file cannot be written (which one, why), or the learner has stopped.
    async fn save(&self, folder: &Path, with_optimiser: bool) -> Result<Manifest, PolicyError>;

    /// Replaces weights and, where `folder` has it and `with_optimiser` asks for it, the optimiser state;
    /// otherwise the optimiser starts afresh. An accumulated gradient is dropped.
    ///
    /// # Errors
    /// When a file is missing or does not fit the model, or the learner has stopped.
    async fn load(&self, folder: &Path, with_optimiser: bool) -> Result<(), PolicyError>;

    /// Goes back to the weights that it began with, and to an optimiser without state. There is nothing to do
    /// for a learner that began with this process and that nobody else has trained.
    ///
    /// # Errors
    /// When the weights cannot be read again, or the learner has stopped.
    async fn begin_again(&self) -> Result<(), PolicyError> {
        Ok(())
    }

    /// For how long devices that it shares with samplers have been handed over between them so far; `None`
    /// where it shares none.
    fn handed_over(&self) -> Option<Duration> {
        None
    }

    /// Makes the current weights those of `version`, and says where samplers get them: each that draws from
    /// this policy is then to [adopt](crate::Sampler::adopt) them.
    ///
    /// # Errors
    /// When the learner has stopped.
    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError>;
}
