//! Computes the backward pass of the layers and of the embedding.
//!
//! The gradient of every parameter is summed in the order of rows. The gradient of a row runs
//! through the operations of the forward pass in reverse order. Threads split outputs, never sums.
//! So a gradient has the same bits on any number of threads.

use std::ops::Range;

use crate::activations::Activations;
use crate::adapter::Adapter;
use crate::buffer::{Buffer, SharedSlice};
use crate::gemm::{Matrix, OutputMode, RhsOperand, gemm};
use crate::layout::{LayerMap, LinearMap, attention_shape, attention_window};
use crate::ops::attention_backward::{self, ForwardValues, SequenceRows};
use crate::ops::kv::KeyValues;
use crate::ops::{add_column_sums, gated, norm};
use crate::scratch::MapScratch;
use crate::transformer::{LayerState, TemporaryRows, TokenRows, Transformer};
use crate::transposed::TransposedWeights;

/// Gradients of rows during the backward pass.
#[derive(Default)]
pub struct RowGradients {
    /// Gradient of the residual stream, one row per token.
    pub dx: Buffer,
    dnormed: Buffer,
    dprojected: Buffer,
    dhidden: Buffer,
    dattended: Buffer,
    dqkv: Buffer,
    partial_sums: Buffer,
    inverses: Buffer,
}

/// Gradients of one layer's keys and values at the positions that precede a unit in its sequence.
pub struct AncestorGradients<'a> {
    /// Gradient of the keys and values at the preceding positions, to which the layer adds. Each
    /// position holds its keys, then its values.
    pub positions: &'a mut [f32],
    /// Gradients that the units below added for the unit's own rows, in the same layout as
    /// `positions`; empty if no unit added any.
    pub own: &'a [f32],
}

/// Gradients of a model's parameters, which the backward pass computes.
pub struct Gradients<'a> {
    /// Gradient of the base weights, in their layout; `None` if they are frozen.
    pub base: Option<&'a mut [f32]>,
    /// Adapter that the rows use, with its gradient.
    pub adapter: Option<(&'a Adapter, &'a mut [f32])>,
    /// Whether the gradients of matrices are added to or overwritten.
    pub mode: OutputMode,
    /// Weight matrices packed for the matmuls of the backward pass.
    pub transposed: &'a mut TransposedWeights,
}

impl Gradients<'_> {
    /// Returns the gradient of the base weights in `range`; empty if the base weights are frozen.
    pub fn base_gradient(&mut self, range: &Range<usize>) -> &mut [f32] {
        match &mut self.base {
            Some(gradient) => &mut gradient[range.clone()],
            None => &mut [],
        }
    }

    /// Adds the gradients of a linear map's weight and bias: dW = dyᵀ x, db = Σ dy.
    fn add_linear_gradients(
        &mut self,
        model: &Transformer,
        scratch: &mut MapScratch,
        map: LinearMap,
        x: &[f32],
        dy: &[f32],
    ) {
        let at = model.weights.layout.linear(map);
        let rows = x.len() / at.inputs;
        let compute = &model.compute;
        let mode = self.mode;
        if let Some(gradient) = &mut self.base {
            let lhs = Matrix::new(dy, rows, at.outputs).transposed();
            let rhs = RhsOperand::Plain(Matrix::new(x, rows, at.inputs));
            let to = &mut gradient[at.weight.clone()];
            gemm(compute, &mut scratch.gemm, lhs, rhs, to, at.inputs, mode);
            add_column_sums(compute, rows, dy, &mut gradient[at.bias.clone()]);
        }
        if let Some((adapter, gradient)) = &mut self.adapter {
            adapter.add_gradient(compute, scratch, map, x, dy, gradient, mode);
        }
    }

    /// Computes the gradient of a linear map's input: dx = dy W.
    fn compute_input_gradient(
        &mut self,
        model: &Transformer,
        scratch: &mut MapScratch,
        map: LinearMap,
        dy: &[f32],
        dx: &mut [f32],
    ) {
        let at = model.weights.layout.linear(map);
        let weight = self.transposed.map(&model.compute, &model.weights, map);
        let lhs = Matrix::new(dy, dy.len() / at.outputs, at.outputs);
        gemm(&model.compute, &mut scratch.gemm, lhs, weight, dx, at.inputs, OutputMode::Set);
        if let Some((adapter, _)) = &self.adapter {
            adapter.add_input_gradient(&model.compute, scratch, map, dy, dx);
        }
    }
}

/// Adds the gradient of a norm's input `x` to `dx`, and the gradient of the norm's weight to
/// `gradients`, given the gradient `dy` of the norm's output. `inverses` is scratch with one value
/// per row.
fn backward_norm(
    model: &Transformer,
    gradients: &mut Gradients<'_>,
    norm: &Range<usize>,
    x: &[f32],
    dy: &[f32],
    inverses: &mut [f32],
    dx: &mut [f32],
) {
    let weights = &model.weights;
    let rows = x.len() / norm.len();
    let epsilon = weights.config.norm_epsilon;
    let to = gradients.base_gradient(norm);
    norm::backward(&model.compute, rows, x, &weights.norm(norm), epsilon, dy, inverses, dx, to);
}

impl RowGradients {
    /// Runs one layer backward: converts the gradient of the layer's output, in `dx`, to the
    /// gradient of the layer's input, and adds the gradients of its parameters.
    #[allow(clippy::too_many_arguments)]
    pub fn run_layer(
        &mut self,
        model: &Transformer,
        layer: usize,
        rows: TokenRows<'_>,
        sequences: &[SequenceRows],
        keys_values: &KeyValues<'_>,
        activations: &mut Activations,
        temporary: &mut TemporaryRows,
        gradients: &mut Gradients<'_>,
        ancestor_gradients: AncestorGradients<'_>,
    ) {
        let config = &model.weights.config;
        let shape = attention_shape(config);
        let compute = &model.compute;
        let weights = &model.weights;
        let at = &weights.layout.layers[layer];
        let count = rows.tokens.len();
        let hidden = config.hidden;
        let wide = config.intermediate;
        let epsilon = config.norm_epsilon;
        let (input, state) = activations.restore_layer(model, layer, rows, temporary, keys_values);
        let LayerState { raw, qkv, stats, attended, before_norms, middle, gate_up } = state;
        let TemporaryRows { normed, scratch, .. } = temporary;
        let map = |site| LinearMap { layer, site };
        let normed = normed.reserve(count * hidden);
        let dx = &mut self.dx[..count * hidden];
        let dnormed = self.dnormed.reserve(count * hidden);
        let inverses = self.inverses.reserve(count);

        // Gradients before the norms after attention and the feed-forward part, if the model has
        // these norms.
        let post_norms = config.has_post_norms();
        let dprojected = self.dprojected.reserve(if post_norms { count * hidden } else { 0 });

        // Feed-forward: out = middle + down(f(gate) · up), or middle + the norm of the latter.
        let dhidden = self.dhidden.reserve(count * wide);
        let gate_up = &mut gate_up[..count * 2 * wide];
        let dout: &[f32] = if post_norms {
            dprojected.fill(0.0);
            let fed = &before_norms[1][..count * hidden];
            backward_norm(model, gradients, &at.mlp_post_norm, fed, dx, inverses, dprojected);
            dprojected
        } else {
            dx
        };
        gradients.compute_input_gradient(model, scratch, map(LayerMap::Down), dout, dhidden);
        gated::backward(compute, config.activation(), count, wide, gate_up, dhidden);
        gradients.add_linear_gradients(model, scratch, map(LayerMap::Down), dhidden, dout);

        let middle = &middle[..count * hidden];
        norm::forward(compute, count, middle, &weights.norm(&at.mlp_norm), epsilon, normed);
        gradients.add_linear_gradients(model, scratch, map(LayerMap::GateUp), normed, gate_up);
        gradients.compute_input_gradient(model, scratch, map(LayerMap::GateUp), gate_up, dnormed);
        backward_norm(model, gradients, &at.mlp_norm, middle, dnormed, inverses, dx);

        // Attention: middle = input + output(attend(qkv)), or input + the norm of the latter.
        let attended = &attended[..count * shape.query_width()];
        let dout: &[f32] = if post_norms {
            dprojected.fill(0.0);
            let projected = &before_norms[0][..count * hidden];
            backward_norm(
                model,
                gradients,
                &at.attention_post_norm,
                projected,
                dx,
                inverses,
                dprojected,
            );
            dprojected
        } else {
            dx
        };
        gradients.add_linear_gradients(model, scratch, map(LayerMap::Output), attended, dout);
        let dattended = self.dattended.reserve(attended.len());
        gradients.compute_input_gradient(model, scratch, map(LayerMap::Output), dout, dattended);

        let dqkv = self.dqkv.reserve(count * shape.qkv_width());
        let saved = ForwardValues {
            qkv: &qkv[..dqkv.len()],
            out: attended,
            stats: &stats[..count * shape.heads * 2],
        };
        let AncestorGradients { positions, own } = ancestor_gradients;
        attention_backward::backward(
            compute,
            keys_values,
            attention_window(config, layer),
            rows.spans,
            sequences,
            saved,
            dattended,
            &mut self.partial_sums,
            positions,
            dqkv,
        );
        for (row, own) in
            dqkv.chunks_exact_mut(shape.qkv_width()).zip(own.chunks_exact(2 * shape.key_width()))
        {
            row[shape.query_width()..].iter_mut().zip(own).for_each(|(to, from)| *to += from);
        }
        for (heads, weight) in
            [(model.query_heads(), &at.query_norm), (model.key_heads(), &at.key_norm)]
        {
            if let Some(rope) = model.rope_table(layer) {
                rope.apply(compute, rows.positions, heads, true, dqkv);
            }
            if config.qk_norm {
                let raw = &raw[..dqkv.len()];
                let to = gradients.base_gradient(weight);
                norm::backward_heads(
                    compute,
                    count,
                    heads,
                    raw,
                    &weights.norm(weight),
                    epsilon,
                    dqkv,
                    to,
                );
            }
        }

        norm::forward(compute, count, input, &weights.norm(&at.attention_norm), epsilon, normed);
        gradients.add_linear_gradients(model, scratch, map(LayerMap::Qkv), normed, dqkv);
        gradients.compute_input_gradient(model, scratch, map(LayerMap::Qkv), dqkv, dnormed);
        backward_norm(model, gradients, &at.attention_norm, input, dnormed, inverses, dx);
    }

    /// Adds each row's gradient to the gradient of its token's embedding, in the order of rows.
    pub fn add_embedding_gradients(
        &self,
        model: &Transformer,
        tokens: &[u32],
        gradients: &mut Gradients<'_>,
    ) {
        let Some(gradient) = &mut gradients.base else { return };
        const COLUMNS: usize = 64;
        let width = model.weights.config.hidden;
        let range = model.weights.layout.embedding.clone();
        let table = SharedSlice::new(&mut gradient[range]);
        let dx = &self.dx;
        let scale = model.weights.config.embedding_scale();
        model.compute.pool.run(width.div_ceil(COLUMNS), |task| {
            let first = task * COLUMNS;
            let columns = COLUMNS.min(width - first);
            for (row, token) in tokens.iter().enumerate() {
                // SAFETY: each range of columns belongs to one task.
                let to = unsafe { table.slice(*token as usize * width + first, columns) };
                let from = &dx[row * width + first..][..columns];
                match scale {
                    None => to.iter_mut().zip(from).for_each(|(to, from)| *to += from),
                    Some(scale) => {
                        to.iter_mut().zip(from).for_each(|(to, from)| *to += scale * from)
                    }
                }
            }
        });
    }
}
