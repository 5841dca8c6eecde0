//! Loss terms of a step, token by token.
//!
//! A loss is a sum over terms: one for each trained token of each sequence. [`RecordingLearner`]
//! wraps a learner, trains with it, and keeps the terms. [`PolicyTerms::tokens_of`] lists the terms
//! of one attempt, with the values from which the loss was computed.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::{
    ForwardBackward, Learner, LossTerms, Manifest, MicroBatchPlan, OptimParams, OptimReport,
    PolicyError, Predictions, TrainReport, TrainRequest, UpdateSequences, WeightsRef,
};
use levade_rl::Loss;
use levade_store::PolicyPlan;
use levade_tree::{AttemptId, SegmentId, SequenceInput, Term, TreeBatch};
use serde::Serialize;

/// Loss terms of one policy in one training step.
#[derive(Debug, Clone)]
pub struct PolicyTerms {
    /// Name of the policy.
    pub policy: String,
    /// Weight version of the policy before the step.
    pub version: u64,
    /// Loss terms by micro-batch, in order, over all updates of the step.
    pub batches: Vec<BatchTerms>,
}

/// Loss terms of one micro-batch.
#[derive(Debug, Clone)]
pub struct BatchTerms {
    /// Index of the optimizer update within the step.
    pub update: u32,
    /// Loss function of the update.
    pub loss: Loss,
    /// Sum of the micro-batch's loss as the learner computed it.
    pub sum: f64,
    /// Loss terms in the order in which the learner added them.
    pub terms: LossTerms,
    batch: TreeBatch,
    /// Attempt and leaf of each sequence in the micro-batch.
    sequences: Vec<(AttemptId, SegmentId)>,
    /// Index of each term's token within its sequence.
    indices: Vec<u32>,
}

/// A trained token on one sequence, with the values from which its loss was computed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenTerm {
    /// Index of the optimizer update within the step.
    pub update: u32,
    /// Index of the micro-batch within the step.
    pub micro_batch: u32,
    /// Index of the unit within the micro-batch. A unit is a part of the micro-batch that the model
    /// processes at once.
    pub unit: u32,
    /// Index of the row within the unit. A row is one predicted distribution. The terms of a row
    /// are summed first.
    pub row: u32,
    /// Index of the term within the row.
    pub term: u32,
    /// Leaf of the sequence in the attempt's trajectory.
    pub leaf: SegmentId,
    /// Index of the token within its sequence.
    pub index: u32,
    /// Id of the token.
    pub token: u32,
    /// Number of weight versions between sampling and training.
    pub age: u32,
    /// Log-probability under the weights that were trained.
    pub logp: f64,
    /// Log-probability under the policy that sampled the token. `None` if it is unknown.
    pub behavior: Option<f64>,
    /// Log-probability under the proximal policy, which may be interpolated. `None` if the loss has
    /// no proximal policy.
    pub proximal: Option<f64>,
    /// Log-probability under the reference. `None` if the loss has no reference.
    pub reference: Option<f64>,
    /// Ratio of the token's probability to its probability under the old policy.
    pub ratio: f64,
    /// Log-ratio of the sequence. `None` if the loss uses the token's own ratio.
    pub sequence_log_ratio: Option<f64>,
    /// Whether the token was selected within its update, for losses that treat selected tokens
    /// differently.
    pub marked: bool,
    /// Whether the clipping bound was active.
    pub clipped: bool,
    /// Whether the dual-clipping bound was active.
    pub dual_clipped: bool,
    /// Whether the policy loss of the token is left out, because of a trust region, a selection or
    /// an importance weight of 0.
    pub dropped: bool,
    /// Advantage of the token.
    pub advantage: f64,
    /// Importance weight that corrects for stale or mismatched samplers. `None` if the loss has no
    /// correction.
    pub correction: Option<f64>,
    /// Estimated KL divergence of the policy from the reference at the token.
    pub kl: f64,
    /// Entropy of the distribution that predicts the token, in nats.
    pub entropy: f64,
    /// Loss of the token, without its weight and without the entropy bonus.
    pub loss: f64,
    /// Entropy bonus, which is subtracted from `loss`. 0 for losses without a bonus.
    pub bonus: f64,
    /// Weight of the token, including all normalizers. A token with weight 0 is not trained.
    pub weight: f64,
    /// Contribution of the token to the loss of its update: `weight` × (`loss` − `bonus`).
    pub part: f64,
    /// Weighted entropy bonus of the complete row. The learner adds `weight` × `loss` of the row's
    /// terms and then subtracts this bonus once.
    pub row_bonus: f64,
}

impl PolicyTerms {
    /// Returns the number of optimizer updates to which the terms belong.
    pub fn updates(&self) -> usize {
        self.batches.chunk_by(|a, b| a.update == b.update).count()
    }

    /// Returns the sum of all loss terms, added in the order in which the learner added them.
    pub fn total(&self) -> f64 {
        self.batches.iter().fold(0.0, |sum, batch| sum + batch.terms.total(&batch.batch))
    }

    /// Returns the step's loss as the learner computed it, summed over all updates.
    pub fn sum(&self) -> f64 {
        self.batches.iter().fold(0.0, |sum, batch| sum + batch.sum)
    }

    /// Returns the loss as the step's metrics report it: the mean of [`sum`](Self::sum) over the
    /// updates.
    pub fn loss(&self) -> f64 {
        self.sum() / self.updates().max(1) as f64
    }

    /// Lists the trained tokens of an attempt, ordered by update, sequence and index.
    pub fn tokens_of(&self, attempt: AttemptId) -> Vec<(Loss, TokenTerm)> {
        let mut found = Vec::new();
        for (micro_batch, batch) in self.batches.iter().enumerate() {
            batch.add_attempt_tokens(attempt, micro_batch as u32, &mut found);
        }
        found.sort_by_key(|(_, term)| (term.update, term.leaf.0, term.index));
        found
    }
}

impl BatchTerms {
    fn add_attempt_tokens(
        &self,
        attempt: AttemptId,
        micro_batch: u32,
        found: &mut Vec<(Loss, TokenTerm)>,
    ) {
        let units = (0..).zip(&self.terms.units);
        for (unit, row_index, row) in units
            .flat_map(|(unit, rows)| (0..).zip(rows).map(move |(index, row)| (unit, index, row)))
        {
            for (term_index, at) in (0..).zip(&row.terms) {
                let term: &Term = &self.batch.terms[at.term as usize];
                let (of, leaf) = self.sequences[term.sequence as usize];
                if of != attempt {
                    continue;
                }
                let evaluated = self.loss.evaluate(at.logp, term);
                let point = self.loss.point(at.logp, term);
                let weight = f64::from(term.weight);
                let bonus = self.loss.entropy * row.entropy;
                // A term with weight 0 is not trained, whatever its loss.
                let part = if weight == 0.0 { 0.0 } else { weight * (at.loss - bonus) };
                let target =
                    self.batch.targets.partition_point(|target| target.first_term <= at.term) - 1;
                found.push((
                    self.loss,
                    TokenTerm {
                        update: self.update,
                        micro_batch,
                        unit,
                        row: row_index,
                        term: term_index,
                        leaf,
                        index: self.indices[at.term as usize],
                        token: self.batch.tokens[self.batch.targets[target].token as usize],
                        age: term.age,
                        logp: at.logp.into(),
                        behavior: term.behavior.map(f64::from),
                        proximal: match self.loss.interpolated {
                            Some(_) => point.old,
                            None => term.proximal.map(f64::from),
                        },
                        reference: term.reference.map(f64::from),
                        ratio: evaluated.ratio,
                        sequence_log_ratio: term.sequence_log_ratio.map(f64::from),
                        marked: term.selected,
                        clipped: evaluated.clipped && !evaluated.dual,
                        dual_clipped: evaluated.dual,
                        dropped: evaluated.dropped,
                        advantage: term.advantage.into(),
                        correction: point.correction,
                        kl: evaluated.kl,
                        entropy: row.entropy,
                        loss: at.loss,
                        bonus,
                        weight,
                        part,
                        row_bonus: row.bonus,
                    },
                ));
            }
        }
    }
}

/// Loss terms of a micro-batch, recorded while the learner trained.
struct RecordedTerms {
    batch: TreeBatch,
    terms: LossTerms,
    loss: Loss,
    sum: f64,
    /// Index in the update of each sequence of the micro-batch.
    sequences: Vec<u32>,
    indices: Vec<u32>,
}

/// A learner that forwards all calls to another learner, and records the terms of its losses.
pub(crate) struct RecordingLearner<'a> {
    learner: &'a dyn Learner,
    updates: Mutex<Vec<Vec<RecordedTerms>>>,
}

impl<'a> RecordingLearner<'a> {
    pub fn new(learner: &'a dyn Learner) -> Self {
        RecordingLearner { learner, updates: Mutex::default() }
    }

    /// Returns the recorded loss terms. `plan` is the plan that this learner has trained.
    pub fn into_terms(self, plan: &PolicyPlan) -> PolicyTerms {
        let updates = self.updates.into_inner().unwrap_or_else(PoisonError::into_inner);
        // Updates without sequences are not trained.
        let planned =
            plan.updates.iter().enumerate().filter(|(_, update)| !update.sequences.is_empty());
        let mut batches = Vec::new();
        for ((index, update), kept) in planned.zip(updates) {
            for RecordedTerms { batch, terms, loss, sum, sequences, indices } in kept {
                let planned = sequences.iter().map(|at| &update.sequences[*at as usize]);
                let sequences = planned.map(|path| (path.attempt, path.leaf)).collect();
                batches.push(BatchTerms {
                    update: index as u32,
                    loss,
                    sum,
                    terms,
                    batch,
                    sequences,
                    indices,
                });
            }
        }
        PolicyTerms { policy: plan.policy.clone(), version: plan.version, batches }
    }
}

/// Returns the index of each term's token within its sequence.
fn token_indices(batch: &TreeBatch, sequences: &[SequenceInput]) -> Vec<u32> {
    let mut next = vec![0; sequences.len()];
    let mut index = |term: &Term| {
        let sequence = &sequences[term.sequence as usize];
        let at = &mut next[term.sequence as usize];
        *at += 1;
        sequence.targets[*at - 1].index
    };
    // Terms are sorted by their targets, and targets by their tokens. The targets of each sequence
    // are in the same order.
    batch.terms.iter().map(&mut index).collect()
}

#[async_trait]
impl Learner for RecordingLearner<'_> {
    async fn plan(&self, update: &UpdateSequences) -> Result<MicroBatchPlan, PolicyError> {
        self.learner.plan(update).await
    }

    async fn train(
        &self,
        update: TrainRequest,
        micro_batch_plan: &MicroBatchPlan,
        done: &mut (dyn FnMut() + Send),
    ) -> Result<TrainReport, PolicyError> {
        let TrainRequest { mut sequences, loss, params } = update;
        micro_batch_plan.check(sequences.len(), 1)?;
        let mut sums = Vec::new();
        let mut all = Vec::new();
        for micro_batch in &micro_batch_plan.micro_batches {
            if micro_batch.paths.is_empty() {
                sums.push(ForwardBackward::default());
            } else {
                let taken = micro_batch
                    .paths
                    .iter()
                    .map(|path| std::mem::take(&mut sequences[*path as usize]));
                let sequences: Vec<SequenceInput> = taken.collect();
                let merged = TreeBatch::merge(&sequences)
                    .map_err(|error| PolicyError::Invalid(error.to_string()))?;
                let (found, terms) =
                    self.learner.forward_backward_terms(Arc::new(merged.clone()), loss).await?;
                all.push(RecordedTerms {
                    indices: token_indices(&merged, &sequences),
                    batch: merged,
                    terms,
                    loss,
                    sum: found.loss,
                    sequences: micro_batch.paths.clone(),
                });
                sums.push(found);
            }
            done();
        }
        self.updates.lock().unwrap_or_else(PoisonError::into_inner).push(all);
        Ok(TrainReport { sums, step: self.optim_step(params).await? })
    }

    async fn logprobs(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.learner.logprobs(batch).await
    }

    async fn predictions(&self, batch: Arc<TreeBatch>) -> Result<Predictions, PolicyError> {
        self.learner.predictions(batch).await
    }

    async fn values(&self, batch: Arc<TreeBatch>) -> Result<Vec<f32>, PolicyError> {
        self.learner.values(batch).await
    }

    async fn forward_backward(
        &self,
        batch: Arc<TreeBatch>,
        loss: Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        self.learner.forward_backward(batch, loss).await
    }

    async fn optim_step(&self, params: OptimParams) -> Result<OptimReport, PolicyError> {
        self.learner.optim_step(params).await
    }

    async fn save(&self, dir: &Path, with_optimizer: bool) -> Result<Manifest, PolicyError> {
        self.learner.save(dir, with_optimizer).await
    }

    async fn load(&self, dir: &Path, with_optimizer: bool) -> Result<(), PolicyError> {
        self.learner.load(dir, with_optimizer).await
    }

    fn handoff_time(&self) -> Option<Duration> {
        self.learner.handoff_time()
    }

    async fn publish(&self, version: u64) -> Result<WeightsRef, PolicyError> {
        self.learner.publish(version).await
    }
}
