//! Trains on tree batches: forward pass, loss and backward pass.
//!
//! A [`TreeBatch`] merges sequences on token ids. Its nodes are runs of tokens, parents before
//! children. The tokens of all nodes are the rows of one batch. All operations except attention
//! treat rows independently. For attention, each node names the blocks of its complete sequence. A
//! node that starts in the middle of a block gets a copy of its parent's part of that block, so
//! blocks stay aligned to absolute positions.
//!
//! A trained token has one term for each sequence that trains it. If the next tokens of a position
//! differ between sequences, one row of logits serves all of them (`head`).
//!
//! Batches larger than the unit are divided by `packing`; `backward` has the order of the
//! gradients' sums.

use std::collections::BTreeMap;
use std::ops::Range;

use levade_policy::{
    ForwardBackward, LossTerms, OptimParams, OptimReport, PolicyError, Predictions,
};
use levade_rl::Loss;
use levade_tree::TreeBatch;

use crate::activations::Activations;
use crate::backward::{AncestorGradients, Gradients, RowGradients};
use crate::buffer::Buffer;
use crate::gemm::OutputMode;
use crate::head::{HeadGradient, OutputHead, TargetResults};
use crate::layout::{ParameterLayout, attention_shape};
use crate::ops::kv::{BLOCK, Blocks, KvBlocks};
use crate::optimizer::{self, Optimizer};
use crate::packing::{self, BatchUnit, ScheduleStep, UnitPacking, schedule};
use crate::transformer::{TemporaryRows, TokenRows, Transformer};
use crate::transposed::TransposedWeights;
use crate::value::ValueHeadBuffers;
use crate::value_head::ValueHead;

/// Limits on the tokens processed at once and on the activations stored. Log-probabilities depend
/// on neither limit. Gradients do not depend on `kept`, and depend on `rows` only by rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingLimits {
    /// Maximum number of packed tokens that go through the model at once.
    pub rows: usize,
    /// Number of layers whose forward activations are stored; the other layers recompute them.
    pub kept: usize,
}

#[cfg(any(test, feature = "testing"))]
impl TrainingLimits {
    /// No limits: the complete batch at once, with all activations stored.
    pub const NONE: TrainingLimits = TrainingLimits { rows: usize::MAX, kept: usize::MAX };
}

/// State and buffers for evaluating and training a model, without the model's weights.
pub struct TrainingState {
    /// Gradient and optimizer state of the base weights.
    pub optimizer: Optimizer,
    /// Optimizer state of the adapters, by adapter index.
    pub adapters: Vec<Optimizer>,
    /// Optimizer state of the value heads, by adapter index; the key `None` is the base weights.
    pub value_heads: BTreeMap<Option<usize>, Optimizer>,
    limits: TrainingLimits,
    activations: Activations,
    /// Keys and values of the current unit, for one layer at a time.
    blocks: Blocks,
    stack: SequenceStack,
    temporary: TemporaryRows,
    head: OutputHead,
    values: ValueHeadBuffers,
    backward: RowGradients,
    transposed: TransposedWeights,
}

/// Keys, values and gradients of the sequence that precedes the current unit, for batches that
/// exceed the limit of rows.
struct SequenceStack {
    /// Keys and values of the positions that precede the current unit, for all layers.
    blocks: Blocks,
    /// Gradients of the keys and values, by layer. Each position holds its keys, then its values.
    gradients: Vec<Buffer>,
}

impl SequenceStack {
    /// Grows the gradients to `positions` positions of `width` values each, and preserves their
    /// contents.
    fn grow_gradients(&mut self, positions: usize, width: usize) {
        for gradient in &mut self.gradients {
            if gradient.len() < positions * width {
                let mut larger = Buffer::zeroed(positions * width);
                larger[..gradient.len()].copy_from_slice(gradient);
                *gradient = larger;
            }
        }
    }
}

/// A unit of a batch, packed into rows for the model.
struct PackedUnit<'a> {
    tokens: &'a [u32],
    packing: UnitPacking,
    /// Range of all rows, with the index of the adapter that is trained or evaluated; empty for the
    /// base weights.
    adapters: Vec<(Range<usize>, usize)>,
}

impl PackedUnit<'_> {
    fn rows(&self) -> TokenRows<'_> {
        TokenRows {
            tokens: self.tokens,
            positions: &self.packing.positions,
            spans: &self.packing.spans,
            adapters: &self.adapters,
        }
    }
}

impl TrainingState {
    /// Creates the training state for `model`. Buffers are allocated at first use.
    pub fn new(model: &Transformer, limits: TrainingLimits) -> Self {
        let config = &model.weights.config;
        let blocks = |layers| Blocks::new(attention_shape(config), layers, model.compute.precision);
        TrainingState {
            optimizer: Optimizer::default(),
            adapters: Vec::new(),
            value_heads: BTreeMap::new(),
            limits,
            activations: Activations::new(config.layers, limits.kept),
            blocks: blocks(1),
            stack: SequenceStack {
                blocks: blocks(config.layers),
                gradients: (0..config.layers).map(|_| Buffer::default()).collect(),
            },
            temporary: TemporaryRows::default(),
            head: OutputHead::default(),
            values: ValueHeadBuffers::default(),
            backward: RowGradients::default(),
            transposed: TransposedWeights::default(),
        }
    }

    /// Computes the log-probability of every target, with the given adapter or without one.
    ///
    /// # Errors
    /// Returns an error if the batch does not fit the model.
    pub fn logprobs(
        &mut self,
        model: &Transformer,
        adapter: Option<usize>,
        batch: &TreeBatch,
    ) -> Result<Vec<f32>, PolicyError> {
        let mut found = vec![0.0; batch.targets.len()];
        self.evaluate_targets(
            model,
            adapter,
            batch,
            None,
            TargetResults { logprobs: &mut found, spread: None, terms: None },
        )?;
        Ok(found)
    }

    /// Computes the log-probability of every target, and the entropy and concentration of the
    /// distribution that predicts it.
    ///
    /// # Errors
    /// Returns an error if the batch does not fit the model.
    pub fn predictions(
        &mut self,
        model: &Transformer,
        adapter: Option<usize>,
        batch: &TreeBatch,
    ) -> Result<Predictions, PolicyError> {
        let zeros = || vec![0.0; batch.targets.len()];
        let mut found =
            Predictions { logprobs: zeros(), entropies: zeros(), concentrations: zeros() };
        let Predictions { logprobs, entropies, concentrations } = &mut found;
        let target_results =
            TargetResults { logprobs, spread: Some((entropies, concentrations)), terms: None };
        self.evaluate_targets(model, adapter, batch, None, target_results)?;
        Ok(found)
    }

    /// Computes the critic's value of the state before every target.
    ///
    /// # Errors
    /// Returns [`PolicyError::NoValueHead`] if the policy has no value head, and an error if the
    /// batch does not fit the model.
    pub fn values(
        &mut self,
        model: &Transformer,
        adapter: Option<usize>,
        batch: &TreeBatch,
    ) -> Result<Vec<f32>, PolicyError> {
        let head = model.values.get(&adapter).ok_or(PolicyError::NoValueHead)?;
        let mut found = vec![0.0; batch.targets.len()];
        self.evaluate_targets(
            model,
            adapter,
            batch,
            Some(head),
            TargetResults { logprobs: &mut found, spread: None, terms: None },
        )?;
        Ok(found)
    }

    /// Computes results for every target with the language model head, or with the value head
    /// `critic` instead.
    fn evaluate_targets(
        &mut self,
        model: &Transformer,
        adapter: Option<usize>,
        batch: &TreeBatch,
        critic: Option<&ValueHead>,
        mut target_results: TargetResults<'_>,
    ) -> Result<(), PolicyError> {
        packing::check(batch, model.context, model.weights.config.vocabulary)?;
        for step in schedule(batch, self.limits.rows) {
            let (unit, push) = match step {
                ScheduleStep::Push(unit) => (unit, true),
                ScheduleStep::Train(unit) => (unit, false),
                ScheduleStep::Pop(_) => continue,
            };
            let packed_unit = self.pack_unit(adapter, batch, &unit, push);
            let TrainingState { activations, temporary, stack, blocks, head, values, .. } = self;
            let mut kv_blocks = KvBlocks { stack: &mut stack.blocks, passing: Some(blocks) };
            activations.forward_only(model, packed_unit.rows(), temporary, &mut kv_blocks);
            let x = activations.output(unit.tokens.len() * model.weights.config.hidden);
            match critic {
                None => head.compute_targets(
                    model,
                    batch,
                    &unit,
                    x,
                    &mut temporary.scratch.gemm,
                    None,
                    &mut target_results,
                ),
                Some(critic) => values.compute_values(
                    model,
                    critic,
                    batch,
                    &unit,
                    x,
                    None,
                    target_results.logprobs,
                ),
            };
        }
        Ok(())
    }

    /// Adds the gradient of `loss` over `batch` to the accumulated gradient of the base weights, or
    /// of an adapter over them.
    ///
    /// # Errors
    /// Returns an error if the batch does not fit the model or the loss; the accumulated gradient
    /// is then unchanged.
    pub fn forward_backward(
        &mut self,
        model: &Transformer,
        adapter: Option<usize>,
        batch: &TreeBatch,
        loss: &Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        self.forward_backward_terms(model, adapter, batch, loss, None)
    }

    /// Adds the gradient like [`forward_backward`](Self::forward_backward), and appends the losses
    /// of all terms to `terms`. A loss over values adds no terms.
    ///
    /// # Errors
    /// See [`forward_backward`](Self::forward_backward).
    pub fn forward_backward_terms(
        &mut self,
        model: &Transformer,
        adapter: Option<usize>,
        batch: &TreeBatch,
        loss: &Loss,
        mut terms: Option<&mut LossTerms>,
    ) -> Result<ForwardBackward, PolicyError> {
        loss.check(batch).map_err(|error| PolicyError::Invalid(error.to_string()))?;
        packing::check(batch, model.context, model.weights.config.vocabulary)?;
        match adapter {
            None => self.optimizer.allocate(model.weights.layout.tensors.len),
            Some(index) => {
                self.ensure_adapter(index);
                self.adapters[index].allocate(model.adapters[index].layout.tensors.len);
            }
        }
        if loss.trains_values() {
            let critic = model.values.get(&adapter).ok_or(PolicyError::NoValueHead)?;
            let optimizer = self.value_heads.entry(adapter).or_default();
            optimizer.allocate(critic.master.len());
            if optimizer.start_pass() == OutputMode::Set {
                optimizer.gradient.fill(0.0);
            }
        }
        let mut found = vec![0.0; batch.targets.len()];
        let mut sums = ForwardBackward::default();
        for step in schedule(batch, self.limits.rows) {
            let (unit, on_stack) = match step {
                ScheduleStep::Push(unit) => {
                    self.push_unit(model, adapter, batch, &unit);
                    continue;
                }
                ScheduleStep::Train(unit) => (unit, false),
                ScheduleStep::Pop(unit) => (unit, true),
            };
            let mut rows = terms.as_ref().map(|_| Vec::new());
            let target_results =
                TargetResults { logprobs: &mut found, spread: None, terms: rows.as_mut() };
            sums.merge(&self.train_unit(
                model,
                adapter,
                batch,
                &unit,
                on_stack,
                loss,
                target_results,
            ));
            if let (Some(terms), Some(rows)) = (&mut terms, rows) {
                terms.units.push(rows);
            }
        }
        Ok(sums)
    }

    /// Runs one optimizer step with the accumulated gradient. A gradient that is not finite is
    /// dropped and changes nothing.
    pub fn optim_step(
        &mut self,
        model: &mut Transformer,
        adapter: Option<usize>,
        params: &OptimParams,
    ) -> OptimReport {
        if let Some(index) = adapter {
            self.ensure_adapter(index);
        }
        let Transformer { compute, weights, adapters, values, .. } = model;
        let mut trained = vec![match adapter {
            None => (&mut self.optimizer, weights.parameters()),
            Some(index) => (&mut self.adapters[index], adapters[index].parameters()),
        }];
        if let Some(head) = values.get_mut(&adapter) {
            trained.push((self.value_heads.entry(adapter).or_default(), head.parameters()));
        }
        optimizer::step(compute, params, trained)
    }

    /// Creates the optimizer of an adapter if it does not exist yet.
    pub fn ensure_adapter(&mut self, index: usize) {
        if self.adapters.len() <= index {
            self.adapters.resize_with(index + 1, Optimizer::default);
        }
    }

    /// Packs a unit and allocates its key-value blocks.
    fn pack_unit<'a>(
        &mut self,
        adapter: Option<usize>,
        batch: &'a TreeBatch,
        unit: &BatchUnit,
        on_stack: bool,
    ) -> PackedUnit<'a> {
        if on_stack {
            self.stack.blocks.grow((unit.above + unit.tokens.len()).div_ceil(BLOCK));
        }
        let packing = UnitPacking::new(batch, unit, self.stack.blocks.len(), on_stack);
        self.blocks.grow(packing.blocks);
        let adapters = adapter.map(|index| (0..unit.tokens.len(), index)).into_iter().collect();
        PackedUnit { tokens: &batch.tokens[unit.tokens.clone()], packing, adapters }
    }

    /// Runs a unit forward and pushes its keys and values onto the stack, with zeroed gradients.
    fn push_unit(
        &mut self,
        model: &Transformer,
        adapter: Option<usize>,
        batch: &TreeBatch,
        unit: &BatchUnit,
    ) {
        let packed_unit = self.pack_unit(adapter, batch, unit, true);
        let width = 2 * attention_shape(&model.weights.config).key_width();
        self.stack.grow_gradients(unit.above + unit.tokens.len(), width);
        for gradient in &mut self.stack.gradients {
            gradient[unit.above * width..][..unit.tokens.len() * width].fill(0.0);
        }
        let TrainingState { activations, temporary, stack, blocks, .. } = self;
        let mut kv_blocks = KvBlocks { stack: &mut stack.blocks, passing: Some(blocks) };
        activations.forward_only(model, packed_unit.rows(), temporary, &mut kv_blocks);
    }

    /// Runs a unit forward and backward, and returns its statistics.
    #[allow(clippy::too_many_arguments)]
    fn train_unit(
        &mut self,
        model: &Transformer,
        adapter: Option<usize>,
        batch: &TreeBatch,
        unit: &BatchUnit,
        on_stack: bool,
        loss: &Loss,
        mut found: TargetResults<'_>,
    ) -> ForwardBackward {
        let config = &model.weights.config;
        let packed_unit = self.pack_unit(adapter, batch, unit, on_stack);
        let rows = packed_unit.rows();
        let size = rows.tokens.len() * config.hidden;
        let TrainingState {
            optimizer,
            adapters,
            value_heads,
            activations,
            temporary,
            stack,
            blocks,
            head,
            values,
            backward,
            transposed,
            ..
        } = self;
        let mut kv_blocks = KvBlocks { stack: &mut stack.blocks, passing: Some(blocks) };
        activations.forward(model, rows, temporary, &mut kv_blocks);

        let dx = backward.dx.reserve(size);
        dx.fill(0.0);
        let mut gradients = match adapter {
            None => {
                let mode = optimizer.start_pass();
                if mode == OutputMode::Set {
                    clear_unwritten_gradients(&model.weights.layout, &mut optimizer.gradient);
                }
                Gradients { base: Some(&mut optimizer.gradient), adapter: None, mode, transposed }
            }
            Some(index) => {
                let optimizer = &mut adapters[index];
                let mode = optimizer.start_pass();
                Gradients {
                    base: None,
                    adapter: Some((&model.adapters[index], &mut optimizer.gradient)),
                    mode,
                    transposed,
                }
            }
        };
        let mode = gradients.mode;
        let gradient = HeadGradient {
            loss,
            dx,
            base: gradients.base.as_deref_mut(),
            mode,
            transposed: gradients.transposed,
        };
        let x = activations.output(size);
        let sums = match (model.values.get(&adapter), value_heads.get_mut(&adapter)) {
            (Some(critic), Some(optimizer)) if loss.trains_values() => {
                let gradient = Some((gradient, &mut optimizer.gradient[..]));
                values.compute_values(model, critic, batch, unit, x, gradient, found.logprobs)
            }
            _ => head.compute_targets(
                model,
                batch,
                unit,
                x,
                &mut temporary.scratch.gemm,
                Some(gradient),
                &mut found,
            ),
        };

        let width = 2 * attention_shape(config).key_width();
        for layer in (0..config.layers).rev() {
            let (positions, own) = stack.gradients[layer].split_at_mut(unit.above * width);
            let own = if on_stack { &own[..rows.tokens.len() * width] } else { &[] };
            backward.run_layer(
                model,
                layer,
                rows,
                &packed_unit.packing.sequences,
                &kv_blocks.layer(layer),
                activations,
                temporary,
                &mut gradients,
                AncestorGradients { positions, own },
            );
        }
        backward.add_embedding_gradients(model, rows.tokens, &mut gradients);
        sums
    }
}

/// Zeroes the parts of a gradient that no matmul overwrites: norms, biases, and the embedding
/// unless it is also the output head.
fn clear_unwritten_gradients(layout: &ParameterLayout, gradient: &mut [f32]) {
    let norms_and_biases = layout
        .tensors
        .entries
        .iter()
        .filter(|entry| !entry.is_matrix())
        .map(|entry| entry.range.clone());
    let table = Some(layout.embedding.clone()).filter(|table| *table != layout.head);
    for range in norms_and_biases.chain(table) {
        gradient[range].fill(0.0);
    }
}

#[cfg(test)]
#[path = "learning_tests.rs"]
mod tests;
