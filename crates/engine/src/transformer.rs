//! Computes the forward pass of the decoder: embedding, blocks, final norm, head.
//!
//! A batch is rows of tokens, divided into `Span`s: runs of rows on one sequence. Sampling and training share
//! this code. They differ only in where keys and values are stored and in which values are kept for the
//! backward pass.
//!
//! Differences between model families (norms of a block and what their weights are added to, the gate, the
//! attention window and the rotary table of a layer) are fields of
//! [`ModelConfig`](levade_model::ModelConfig). They are read between operations, never within one.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::Compute;
use crate::adapter::Adapter;
use crate::buffer::Buffer;
use crate::layout::{Map, Site, attention_shape, sight};
use crate::ops::kv::{Blocks, KeyValues, Places, Span};
use crate::ops::norm::Heads;
use crate::ops::rope::RopeTable;
use crate::ops::{add_rows, attention, fill_rows, for_rows, gated, norm, softmax};
use crate::product::{Matrix, Mode, Right, Scratch, product};
use crate::scratch::MapScratch;
use crate::value_head::ValueHead;
use crate::weights::Weights;

/// Rows to run through the model.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// Token of every row.
    pub tokens: &'a [u32],
    /// Position of every row on its path.
    pub positions: &'a [u32],
    /// Runs of rows on one path, in the order of rows.
    pub spans: &'a [Span],
    /// Runs of rows that go through an adapter, with its place in [`Transformer::adapters`].
    pub adapters: &'a [(Range<usize>, usize)],
}

/// State that one block computes from its input and its backward pass needs, a row per token.
#[derive(Default)]
pub struct LayerState {
    /// Queries, keys and values before their norms; used only by models that have these.
    pub raw: Buffer,
    /// Queries, keys and values as attention sees them.
    pub qkv: Buffer,
    /// (max, Σ e) of every row and head.
    pub stats: Buffer,
    /// Output of attention.
    pub attended: Buffer,
    /// Projected output of attention before its norm, and output of the feed-forward part before its own;
    /// used only by models that have these.
    pub before_norms: [Buffer; 2],
    /// Residual stream between attention and feed-forward.
    pub middle: Buffer,
    /// Gate and up.
    pub gate_up: Buffer,
}

/// Temporary rows shared by all blocks.
#[derive(Default)]
pub struct Temporary {
    /// Normalised rows, as wide as the residual stream.
    pub normed: Buffer,
    /// Feed-forward rows.
    pub hidden: Buffer,
    /// Scratch of linear maps.
    pub scratch: MapScratch,
}

/// A model that can be run: weights, rotary tables, and where to compute.
pub struct Transformer {
    /// Threads and instructions.
    pub compute: Compute,
    /// The weights.
    pub weights: Weights,
    /// Adapters over them.
    pub adapters: Vec<Adapter>,
    /// The value heads of critics: of the weights themselves (`None`), or of an adapter.
    pub values: BTreeMap<Option<usize>, ValueHead>,
    /// Rotary tables up to the context; the second one of layers with a window, where they have their own.
    ropes: (RopeTable, Option<RopeTable>),
    /// Longest path.
    pub context: usize,
}

impl Transformer {
    /// A model with room for paths of `context` tokens.
    pub fn new(compute: Compute, weights: Weights, context: usize) -> Self {
        let config = &weights.config;
        let table = |rope| RopeTable::new(rope, config.head_dim, context);
        let ropes = (table(&config.rope), config.pattern.local_rope.as_ref().map(table));
        Transformer { compute, weights, adapters: Vec::new(), values: BTreeMap::new(), ropes, context }
    }

    /// Rotary table of a layer, if it has the embedding.
    pub fn rope(&self, layer: usize) -> Option<&RopeTable> {
        let pattern = &self.weights.config.pattern;
        let (global, local) = &self.ropes;
        let own = local.as_ref().filter(|_| pattern.windowed.contains(&layer));
        (!pattern.unrotated.contains(&layer)).then(|| own.unwrap_or(global))
    }

    /// Where the queries of a row of queries, keys and values are.
    pub fn query_heads(&self) -> Heads {
        let shape = attention_shape(&self.weights.config);
        Heads { stride: shape.qkv(), offset: 0, heads: shape.heads, head_dim: shape.head_dim }
    }

    /// Where its keys are.
    pub fn key_heads(&self) -> Heads {
        let shape = attention_shape(&self.weights.config);
        Heads { stride: shape.qkv(), offset: shape.query(), heads: shape.kv_heads, head_dim: shape.head_dim }
    }

    /// Looks up the embeddings of `tokens`, which must lie in the vocabulary.
    pub fn embed(&self, tokens: &[u32], out: &mut [f32]) {
        let width = self.weights.config.hidden;
        let table = self.weights.part(&self.weights.layout.embedding);
        for_rows(&self.compute, tokens.len(), width, out, |row, out| {
            out.copy_from_slice(&table[tokens[row] as usize * width..][..width]);
        });
        if let Some(scale) = self.weights.config.embedding_scale() {
            for_rows(&self.compute, tokens.len(), width, out, |_, row| {
                softmax::multiply(self.compute.isa, row, scale);
            });
        }
    }

    /// A linear map, its adapters included: `out = residual + x · Wᵀ (+ bias)`, or without the residual.
    fn project(
        &self,
        scratch: &mut MapScratch,
        adapters: &[(Range<usize>, usize)],
        map: Map,
        x: &[f32],
        residual: Option<&[f32]>,
        out: &mut [f32],
    ) {
        let at = self.weights.layout.linear(map);
        let (rows, width) = (x.len() / at.inputs, at.outputs);
        let bias = self.weights.part(&at.bias);
        let mode = match (residual, bias.is_empty()) {
            (None, true) => Mode::Set,
            (None, false) => {
                fill_rows(&self.compute, rows, bias, out);
                Mode::Add
            }
            (Some(residual), _) => {
                for_rows(&self.compute, rows, width, out, |row, out| {
                    let from = &residual[row * width..][..width];
                    out.copy_from_slice(from);
                    for (o, b) in out.iter_mut().zip(bias) {
                        *o += b;
                    }
                });
                Mode::Add
            }
        };
        let weight = Right::Packed(self.weights.packed(map));
        product(
            &self.compute,
            &mut scratch.product,
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

    /// Runs all blocks, remembering nothing: the residual stream after the last is in `stream` then. `state`
    /// and `next` are room.
    pub fn forward(
        &self,
        rows: Rows<'_>,
        places: &mut Places<'_>,
        state: &mut LayerState,
        temporary: &mut Temporary,
        stream: &mut Buffer,
        next: &mut Buffer,
    ) {
        let size = rows.tokens.len() * self.weights.config.hidden;
        self.embed(rows.tokens, stream.reserve(size));
        for layer in 0..self.weights.config.layers {
            let input = &stream[..size];
            self.forward_layer(layer, rows, &places.layer(layer), input, state, temporary, next);
            std::mem::swap(stream, next);
        }
    }

    /// Runs block `layer` on `input` (rows of the residual stream), leaving its output in `out`.
    #[allow(clippy::too_many_arguments)]
    pub fn forward_layer(
        &self,
        layer: usize,
        rows: Rows<'_>,
        keys_values: &KeyValues<'_>,
        input: &[f32],
        state: &mut LayerState,
        temporary: &mut Temporary,
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

    /// The end of the feed-forward part: the gate, and the projection down.
    fn feed_forward(
        &self,
        layer: usize,
        rows: Rows<'_>,
        gate_up: &[f32],
        residual: Option<&[f32]>,
        temporary: &mut Temporary,
        out: &mut [f32],
    ) {
        let config = &self.weights.config;
        let (count, wide) = (rows.tokens.len(), config.intermediate);
        let Temporary { hidden, scratch, .. } = temporary;
        let activated = hidden.reserve(count * wide);
        gated::forward(
            &self.compute,
            config.activation(),
            count,
            wide,
            &gate_up[..count * 2 * wide],
            activated,
        );
        self.project(scratch, rows.adapters, Map { layer, site: Site::Down }, activated, residual, out);
    }

    /// `out = residual + norm(x)`.
    fn add_normed(&self, norm: &Range<usize>, residual: &[f32], x: &[f32], out: &mut [f32]) {
        let config = &self.weights.config;
        let rows = residual.len() / config.hidden;
        norm::forward(&self.compute, rows, x, &self.weights.norm(norm), config.norm_epsilon, out);
        add_rows(&self.compute, rows, config.hidden, residual, out);
    }

    /// The part of [`Transformer::forward_layer`] that the block's backward pass needs: all but its output.
    pub fn forward_state(
        &self,
        layer: usize,
        rows: Rows<'_>,
        keys_values: &KeyValues<'_>,
        input: &[f32],
        state: &mut LayerState,
        temporary: &mut Temporary,
    ) {
        let config = &self.weights.config;
        let shape = attention_shape(config);
        let at = &self.weights.layout.layers[layer];
        let count = rows.tokens.len();
        let (compute, epsilon) = (&self.compute, config.norm_epsilon);
        let Temporary { normed, scratch, .. } = temporary;
        let map = |site| Map { layer, site };
        let adapters = rows.adapters;

        let normed = normed.reserve(input.len());
        norm::forward(compute, count, input, &self.weights.norm(&at.attention_norm), epsilon, normed);
        let qkv = state.qkv.reserve(count * shape.qkv());
        self.project(scratch, adapters, map(Site::Qkv), normed, None, qkv);
        if config.qk_norm {
            state.raw.reserve(qkv.len()).copy_from_slice(qkv);
        }
        self.place_heads(layer, rows.positions, qkv);

        let attended = state.attended.reserve(count * shape.query());
        let stats = state.stats.reserve(count * shape.heads * 2);
        attention::forward(
            compute,
            keys_values,
            sight(config, layer),
            rows.spans,
            qkv,
            attended,
            Some(stats),
        );

        let middle = state.middle.reserve(input.len());
        if config.has_post_norms() {
            let projected = state.before_norms[0].reserve(input.len());
            self.project(scratch, adapters, map(Site::Output), attended, None, projected);
            self.add_normed(&at.attention_post_norm, input, projected, middle);
        } else {
            self.project(scratch, adapters, map(Site::Output), attended, Some(input), middle);
        }

        norm::forward(compute, count, middle, &self.weights.norm(&at.mlp_norm), epsilon, normed);
        let gate_up = state.gate_up.reserve(count * 2 * config.intermediate);
        self.project(scratch, adapters, map(Site::GateUp), normed, None, gate_up);
        if config.has_post_norms() {
            let out = state.before_norms[1].reserve(input.len());
            self.feed_forward(layer, rows, gate_up, None, temporary, out);
        }
    }

    /// Norms (where the model has them) and rotary embedding of queries and keys, in place.
    fn place_heads(&self, layer: usize, positions: &[u32], qkv: &mut [f32]) {
        let config = &self.weights.config;
        let at = &self.weights.layout.layers[layer];
        for (heads, weight) in [(self.query_heads(), &at.query_norm), (self.key_heads(), &at.key_norm)] {
            if config.qk_norm {
                let weight = &self.weights.norm(weight);
                norm::forward_heads(&self.compute, positions.len(), heads, weight, config.norm_epsilon, qkv);
            }
            if let Some(rope) = self.rope(layer) {
                rope.apply(&self.compute, positions, heads, false, qkv);
            }
        }
    }

    /// Final norm and head of `x` (rows of the residual stream): logits, rows of the vocabulary.
    pub fn head(&self, x: &[f32], normed: &mut Buffer, scratch: &mut Scratch, logits: &mut Buffer) {
        let config = &self.weights.config;
        let rows = x.len() / config.hidden;
        let weight = self.weights.norm(&self.weights.layout.norm);
        let normed = normed.reserve(x.len());
        norm::forward(&self.compute, rows, x, &weight, config.norm_epsilon, normed);
        let logits = logits.reserve(rows * config.vocabulary);
        let a = Matrix::new(normed, rows, config.hidden);
        let head = Right::Packed(&self.weights.head);
        product(&self.compute, scratch, a, head, logits, config.vocabulary, Mode::Set);
    }
}

/// Copies the `wanted` rows of `x` (`width` values each) to the front of `out`.
pub fn gather_rows(x: &[f32], width: usize, wanted: impl ExactSizeIterator<Item = usize>, out: &mut Buffer) {
    let out = out.reserve(wanted.len() * width);
    for (to, row) in out.chunks_exact_mut(width).zip(wanted) {
        to.copy_from_slice(&x[row * width..][..width]);
    }
}

/// Everything a forward pass without a backward needs.
#[derive(Default)]
pub struct Inference {
    state: LayerState,
    temporary: Temporary,
    /// Residual stream before and after a block.
    stream: Buffer,
    next: Buffer,
    selected: Buffer,
    normed: Buffer,
}

impl Inference {
    /// Runs `rows` through `model`, keeping keys and values in `blocks`.
    pub fn run(&mut self, model: &Transformer, rows: Rows<'_>, blocks: &mut Blocks) {
        let mut places = Places { stack: blocks, passing: None };
        let Inference { state, temporary, stream, next, .. } = self;
        model.forward(rows, &mut places, state, temporary, stream, next);
    }

    /// Leaves in `logits` a row of the vocabulary for each of the `wanted` rows of those that were run last.
    pub fn logits(
        &mut self,
        model: &Transformer,
        wanted: impl ExactSizeIterator<Item = usize> + Clone,
        logits: &mut Buffer,
    ) {
        let width = model.weights.config.hidden;
        gather_rows(&self.stream, width, wanted.clone(), &mut self.selected);
        let selected = &self.selected[..wanted.len() * width];
        model.head(selected, &mut self.normed, &mut self.temporary.scratch.product, logits);
    }
}
