//! Computes the forward pass of the decoder: embedding, layers, final norm, head.
//!
//! A batch is rows of tokens, divided into `TokenSpan`s: runs of rows of one sequence. Sampling and
//! training share this code. They differ only in where keys and values are stored and in which
//! values are kept for the backward pass.
//!
//! Differences between model families (the norms of a layer and the offset added to their weights,
//! the gate, the attention window and the rotary table of a layer) are fields of
//! [`ModelConfig`](levade_model::ModelConfig). They are read between operations, never within one.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::Compute;
use crate::adapter::Adapter;
use crate::buffer::Buffer;
use crate::gemm::{GemmScratch, Matrix, OutputMode, RhsOperand, gemm};
use crate::layout::{LayerMap, LinearMap, attention_shape, attention_window};
use crate::ops::kv::{Blocks, KeyValues, KvBlocks, TokenSpan};
use crate::ops::norm::HeadLayout;
use crate::ops::rope::RopeTable;
use crate::ops::{add_rows, attention, fill_rows, for_rows, gated, norm, softmax};
use crate::scratch::MapScratch;
use crate::value_head::ValueHead;
use crate::weights::Weights;

/// Token rows that go through the model together.
#[derive(Debug, Clone, Copy)]
pub struct TokenRows<'a> {
    /// Token id of every row.
    pub tokens: &'a [u32],
    /// Position of every row in its sequence.
    pub positions: &'a [u32],
    /// Spans of rows of one sequence, in the order of rows.
    pub spans: &'a [TokenSpan],
    /// Ranges of rows that use an adapter, with its index in [`Transformer::adapters`].
    pub adapters: &'a [(Range<usize>, usize)],
}

/// Values that one layer computes from its input and that its backward pass needs, one row per
/// token.
#[derive(Default)]
pub struct LayerState {
    /// Queries, keys and values before their norms; used only by models with query and key norms.
    pub raw: Buffer,
    /// Queries, keys and values after norms and rotary embedding, the input of attention.
    pub qkv: Buffer,
    /// (max, Σ e) of every row and head.
    pub stats: Buffer,
    /// Output of the attention.
    pub attended: Buffer,
    /// Projected output of attention before its norm, and output of the feed-forward part before
    /// its norm; used only by models with these norms.
    pub before_norms: [Buffer; 2],
    /// Residual stream between attention and feed-forward.
    pub middle: Buffer,
    /// Gate and up projections.
    pub gate_up: Buffer,
}

/// Temporary rows shared by all layers.
#[derive(Default)]
pub struct TemporaryRows {
    /// Normalized rows, as wide as the residual stream.
    pub normed: Buffer,
    /// Rows of the feed-forward part, as wide as its activation.
    pub hidden: Buffer,
    /// Scratch of linear maps.
    pub scratch: MapScratch,
}

/// A model that can be run: weights, rotary tables, and the threads that compute.
pub struct Transformer {
    /// Thread pool, instruction set and precision.
    pub compute: Compute,
    /// Base weights of the model.
    pub weights: Weights,
    /// Adapters over the base weights.
    pub adapters: Vec<Adapter>,
    /// Value heads of critics, by adapter index; the key `None` is the base weights.
    pub values: BTreeMap<Option<usize>, ValueHead>,
    /// Rotary tables up to the context. The second table is for windowed layers, if they have their
    /// own.
    ropes: (RopeTable, Option<RopeTable>),
    /// Maximum sequence length in tokens.
    pub context: usize,
}

impl Transformer {
    /// Creates a model with room for sequences of `context` tokens.
    pub fn new(compute: Compute, weights: Weights, context: usize) -> Self {
        let config = &weights.config;
        let table = |rope| RopeTable::new(rope, config.head_dim, context);
        let ropes = (table(&config.rope), config.pattern.local_rope.as_ref().map(table));
        Transformer {
            compute,
            weights,
            adapters: Vec::new(),
            values: BTreeMap::new(),
            ropes,
            context,
        }
    }

    /// Returns the rotary table of a layer, or `None` if the layer has no rotary embedding.
    pub fn rope_table(&self, layer: usize) -> Option<&RopeTable> {
        let pattern = &self.weights.config.pattern;
        let (global, local) = &self.ropes;
        let own = local.as_ref().filter(|_| pattern.windowed.contains(&layer));
        (!pattern.unrotated.contains(&layer)).then(|| own.unwrap_or(global))
    }

    /// Returns the position of query heads in a row of queries, keys and values.
    pub fn query_heads(&self) -> HeadLayout {
        let shape = attention_shape(&self.weights.config);
        HeadLayout {
            stride: shape.qkv_width(),
            offset: 0,
            heads: shape.heads,
            head_dim: shape.head_dim,
        }
    }

    /// Returns the position of key heads in a row of queries, keys and values.
    pub fn key_heads(&self) -> HeadLayout {
        let shape = attention_shape(&self.weights.config);
        HeadLayout {
            stride: shape.qkv_width(),
            offset: shape.query_width(),
            heads: shape.kv_heads,
            head_dim: shape.head_dim,
        }
    }

    /// Looks up the embeddings of `tokens`, which must be in the vocabulary.
    pub fn embed(&self, tokens: &[u32], out: &mut [f32]) {
        let width = self.weights.config.hidden;
        let table = self.weights.parameters_at(&self.weights.layout.embedding);
        for_rows(&self.compute, tokens.len(), width, out, |row, out| {
            out.copy_from_slice(&table[tokens[row] as usize * width..][..width]);
        });
        if let Some(scale) = self.weights.config.embedding_scale() {
            for_rows(&self.compute, tokens.len(), width, out, |_, row| {
                softmax::scale_values(self.compute.isa, row, scale);
            });
        }
    }

    /// Applies a linear map and its adapters: `out = residual + x · Wᵀ (+ bias)`, or the same
    /// without the residual.
    fn apply_linear_map(
        &self,
        scratch: &mut MapScratch,
        adapters: &[(Range<usize>, usize)],
        map: LinearMap,
        x: &[f32],
        residual: Option<&[f32]>,
        out: &mut [f32],
    ) {
        let at = self.weights.layout.linear(map);
        let rows = x.len() / at.inputs;
        let width = at.outputs;
        let bias = self.weights.parameters_at(&at.bias);
        let mode = match (residual, bias.is_empty()) {
            (None, true) => OutputMode::Set,
            (None, false) => {
                fill_rows(&self.compute, rows, bias, out);
                OutputMode::Add
            }
            (Some(residual), _) => {
                for_rows(&self.compute, rows, width, out, |row, out| {
                    let from = &residual[row * width..][..width];
                    out.copy_from_slice(from);
                    for (o, b) in out.iter_mut().zip(bias) {
                        *o += b;
                    }
                });
                OutputMode::Add
            }
        };
        let weight = RhsOperand::Packed(self.weights.packed_map(map));
        gemm(
            &self.compute,
            &mut scratch.gemm,
            Matrix::new(x, rows, at.inputs),
            weight,
            out,
            width,
            mode,
        );
        for (rows, adapter) in adapters {
            let x = &x[rows.start * at.inputs..rows.end * at.inputs];
            let out = &mut out[rows.start * width..rows.end * width];
            self.adapters[*adapter].forward(&self.compute, scratch, map, x, out);
        }
    }

    /// Runs all layers without storing activations. The output of the last layer is left in
    /// `stream`. `state` and `next` are scratch.
    pub fn forward(
        &self,
        rows: TokenRows<'_>,
        kv_blocks: &mut KvBlocks<'_>,
        state: &mut LayerState,
        temporary: &mut TemporaryRows,
        stream: &mut Buffer,
        next: &mut Buffer,
    ) {
        let size = rows.tokens.len() * self.weights.config.hidden;
        self.embed(rows.tokens, stream.reserve(size));
        for layer in 0..self.weights.config.layers {
            let input = &stream[..size];
            self.forward_layer(layer, rows, &kv_blocks.layer(layer), input, state, temporary, next);
            std::mem::swap(stream, next);
        }
    }

    /// Runs layer `layer` on `input` (rows of the residual stream) and writes its output to `out`.
    #[allow(clippy::too_many_arguments)]
    pub fn forward_layer(
        &self,
        layer: usize,
        rows: TokenRows<'_>,
        keys_values: &KeyValues<'_>,
        input: &[f32],
        state: &mut LayerState,
        temporary: &mut TemporaryRows,
        out: &mut Buffer,
    ) {
        self.forward_state(layer, rows, keys_values, input, state, temporary);
        let out = out.reserve(input.len());
        let LayerState { before_norms, middle, gate_up, .. } = state;
        let middle = &middle[..input.len()];
        if self.weights.config.has_post_norms() {
            let norm = &self.weights.layout.layers[layer].mlp_post_norm;
            self.add_normed(norm, middle, &before_norms[1], out);
        } else {
            self.feed_forward(layer, rows, gate_up, Some(middle), temporary, out);
        }
    }

    /// Runs the end of the feed-forward part: the gate and the down projection.
    fn feed_forward(
        &self,
        layer: usize,
        rows: TokenRows<'_>,
        gate_up: &[f32],
        residual: Option<&[f32]>,
        temporary: &mut TemporaryRows,
        out: &mut [f32],
    ) {
        let config = &self.weights.config;
        let count = rows.tokens.len();
        let wide = config.intermediate;
        let TemporaryRows { hidden, scratch, .. } = temporary;
        let activated = hidden.reserve(count * wide);
        gated::forward(
            &self.compute,
            config.activation(),
            count,
            wide,
            &gate_up[..count * 2 * wide],
            activated,
        );
        self.apply_linear_map(
            scratch,
            rows.adapters,
            LinearMap { layer, site: LayerMap::Down },
            activated,
            residual,
            out,
        );
    }

    /// Computes `out = residual + norm(x)`.
    fn add_normed(&self, norm: &Range<usize>, residual: &[f32], x: &[f32], out: &mut [f32]) {
        let config = &self.weights.config;
        let rows = residual.len() / config.hidden;
        norm::forward(&self.compute, rows, x, &self.weights.norm(norm), config.norm_epsilon, out);
        add_rows(&self.compute, rows, config.hidden, residual, out);
    }

    /// Runs the part of [`Transformer::forward_layer`] whose results the layer's backward pass
    /// needs: all except the layer's output.
    pub fn forward_state(
        &self,
        layer: usize,
        rows: TokenRows<'_>,
        keys_values: &KeyValues<'_>,
        input: &[f32],
        state: &mut LayerState,
        temporary: &mut TemporaryRows,
    ) {
        let config = &self.weights.config;
        let shape = attention_shape(config);
        let at = &self.weights.layout.layers[layer];
        let count = rows.tokens.len();
        let compute = &self.compute;
        let epsilon = config.norm_epsilon;
        let TemporaryRows { normed, scratch, .. } = temporary;
        let map = |site| LinearMap { layer, site };
        let adapters = rows.adapters;

        let normed = normed.reserve(input.len());
        norm::forward(
            compute,
            count,
            input,
            &self.weights.norm(&at.attention_norm),
            epsilon,
            normed,
        );
        let qkv = state.qkv.reserve(count * shape.qkv_width());
        self.apply_linear_map(scratch, adapters, map(LayerMap::Qkv), normed, None, qkv);
        if config.qk_norm {
            state.raw.reserve(qkv.len()).copy_from_slice(qkv);
        }
        self.prepare_heads(layer, rows.positions, qkv);

        let attended = state.attended.reserve(count * shape.query_width());
        let stats = state.stats.reserve(count * shape.heads * 2);
        attention::forward(
            compute,
            keys_values,
            attention_window(config, layer),
            rows.spans,
            qkv,
            attended,
            Some(stats),
        );

        let middle = state.middle.reserve(input.len());
        if config.has_post_norms() {
            let projected = state.before_norms[0].reserve(input.len());
            self.apply_linear_map(
                scratch,
                adapters,
                map(LayerMap::Output),
                attended,
                None,
                projected,
            );
            self.add_normed(&at.attention_post_norm, input, projected, middle);
        } else {
            self.apply_linear_map(
                scratch,
                adapters,
                map(LayerMap::Output),
                attended,
                Some(input),
                middle,
            );
        }

        norm::forward(compute, count, middle, &self.weights.norm(&at.mlp_norm), epsilon, normed);
        let gate_up = state.gate_up.reserve(count * 2 * config.intermediate);
        self.apply_linear_map(scratch, adapters, map(LayerMap::GateUp), normed, None, gate_up);
        if config.has_post_norms() {
            let out = state.before_norms[1].reserve(input.len());
            self.feed_forward(layer, rows, gate_up, None, temporary, out);
        }
    }

    /// Applies norms (if the model has them) and rotary embedding to the queries and keys in `qkv`,
    /// in place.
    fn prepare_heads(&self, layer: usize, positions: &[u32], qkv: &mut [f32]) {
        let config = &self.weights.config;
        let at = &self.weights.layout.layers[layer];
        for (heads, weight) in
            [(self.query_heads(), &at.query_norm), (self.key_heads(), &at.key_norm)]
        {
            if config.qk_norm {
                let weight = &self.weights.norm(weight);
                norm::forward_heads(
                    &self.compute,
                    positions.len(),
                    heads,
                    weight,
                    config.norm_epsilon,
                    qkv,
                );
            }
            if let Some(rope) = self.rope_table(layer) {
                rope.apply(&self.compute, positions, heads, false, qkv);
            }
        }
    }

    /// Applies the final norm and the output head to `x` (rows of the residual stream): `logits`
    /// gets one row of the vocabulary per row.
    pub fn compute_logits(
        &self,
        x: &[f32],
        normed: &mut Buffer,
        scratch: &mut GemmScratch,
        logits: &mut Buffer,
    ) {
        let config = &self.weights.config;
        let rows = x.len() / config.hidden;
        let weight = self.weights.norm(&self.weights.layout.norm);
        let normed = normed.reserve(x.len());
        norm::forward(&self.compute, rows, x, &weight, config.norm_epsilon, normed);
        let logits = logits.reserve(rows * config.vocabulary);
        let a = Matrix::new(normed, rows, config.hidden);
        let head = RhsOperand::Packed(&self.weights.head);
        gemm(&self.compute, scratch, a, head, logits, config.vocabulary, OutputMode::Set);
    }
}

/// Copies the `needed` rows of `x` (`width` values each) to the front of `out`.
pub fn gather_rows(
    x: &[f32],
    width: usize,
    needed: impl ExactSizeIterator<Item = usize>,
    out: &mut Buffer,
) {
    let out = out.reserve(needed.len() * width);
    for (to, row) in out.chunks_exact_mut(width).zip(needed) {
        to.copy_from_slice(&x[row * width..][..width]);
    }
}

/// Buffers of a forward pass that no backward pass follows.
#[derive(Default)]
pub struct InferencePass {
    state: LayerState,
    temporary: TemporaryRows,
    /// Residual stream before and after a layer.
    stream: Buffer,
    next: Buffer,
    selected: Buffer,
    normed: Buffer,
}

impl InferencePass {
    /// Runs `rows` through `model`, storing keys and values in `blocks`.
    pub fn run(&mut self, model: &Transformer, rows: TokenRows<'_>, blocks: &mut Blocks) {
        let mut kv_blocks = KvBlocks { stack: blocks, passing: None };
        let InferencePass { state, temporary, stream, next, .. } = self;
        model.forward(rows, &mut kv_blocks, state, temporary, stream, next);
    }

    /// Computes `logits`, one row of the vocabulary for each of the `needed` rows of the last run.
    pub fn logits(
        &mut self,
        model: &Transformer,
        needed: impl ExactSizeIterator<Item = usize> + Clone,
        logits: &mut Buffer,
    ) {
        let width = model.weights.config.hidden;
        gather_rows(&self.stream, width, needed.clone(), &mut self.selected);
        let selected = &self.selected[..needed.len() * width];
        model.compute_logits(selected, &mut self.normed, &mut self.temporary.scratch.gemm, logits);
    }
}
