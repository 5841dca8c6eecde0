//! Computes a critic's values with its [`ValueHead`]: forward, loss and backward over the targets
//! of a unit.

use levade_policy::ForwardBackward;
use levade_tree::TreeBatch;

use crate::buffer::Buffer;
use crate::gemm::OutputMode;
use crate::head::HeadGradient;
use crate::ops::norm;
use crate::packing::BatchUnit;
use crate::simd::{dot, simd};
use crate::transformer::{Transformer, gather_rows};
use crate::value_head::ValueHead;

simd! {
    fn value_of_row(normed: &[f32], weight: &[f32]) -> f32 {
        dot(normed, weight)
    }
}

simd! {
    fn add_scaled(x: &[f32], factor: f32, sums: &mut [f32]) {
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum = x.mul_add(factor, *sum);
        }
    }
}

/// Buffers of value heads, reused between batches.
#[derive(Default)]
pub struct ValueHeadBuffers {
    rows: Buffer,
    normed: Buffer,
    dnormed: Buffer,
    drows: Buffer,
    inverses: Buffer,
}

impl ValueHeadBuffers {
    /// Computes the value of every target that a token of `unit` predicts, given the residual
    /// stream `x` of the unit after the last layer. With `gradient`, also evaluates the loss, adds
    /// the gradients of the model to the first part of the pair, and adds the gradient of the value
    /// head to the second part.
    #[allow(clippy::too_many_arguments)]
    pub fn compute_values(
        &mut self,
        model: &Transformer,
        head: &ValueHead,
        batch: &TreeBatch,
        unit: &BatchUnit,
        x: &[f32],
        gradient: Option<(HeadGradient<'_>, &mut [f32])>,
        values: &mut [f32],
    ) -> ForwardBackward {
        let config = &model.weights.config;
        let width = config.hidden;
        let epsilon = config.norm_epsilon;
        let compute = &model.compute;
        let weight = &model.weights.norm(&model.weights.layout.norm);
        let w = &head.master[..width];
        let b = head.master[width];
        let predictor = |t: usize| batch.targets[t].predictor as usize;
        let targets: Vec<usize> =
            (0..batch.targets.len()).filter(|t| unit.tokens.contains(&predictor(*t))).collect();
        let row_of = |t: usize| predictor(t) - unit.tokens.start;
        let count = targets.len();
        gather_rows(x, width, targets.iter().map(|t| row_of(*t)), &mut self.rows);
        let rows = &self.rows[..count * width];
        let normed = self.normed.reserve(count * width);
        norm::forward(compute, count, rows, weight, epsilon, normed);
        for (target, normed) in targets.iter().zip(normed.chunks_exact(width)) {
            values[*target] = value_of_row(compute.isa, normed, w) + b;
        }

        let mut sums =
            ForwardBackward { tokens: unit.tokens.len() as u64, ..ForwardBackward::default() };
        let Some((gradient, own)) = gradient else { return sums };
        let HeadGradient { loss, dx, mut base, mode, .. } = gradient;
        let layout = &model.weights.layout;
        if let (OutputMode::Set, Some(base)) = (mode, &mut base) {
            // The language model head has no gradient from values.
            base[layout.head.clone()].fill(0.0);
        }
        let dnormed = self.dnormed.reserve(count * width);
        for ((&target, normed), dnormed) in
            targets.iter().zip(normed.chunks_exact(width)).zip(dnormed.chunks_exact_mut(width))
        {
            let mut derivative = 0.0;
            for term in batch.terms_of(&batch.targets[target]) {
                let evaluated = loss.evaluate(values[target], term);
                derivative += f64::from(term.weight) * evaluated.derivative;
                sums.add_value(term, &evaluated);
            }
            sums.targets += 1;
            let derivative = derivative as f32;
            add_scaled(compute.isa, normed, derivative, &mut own[..width]);
            own[width] += derivative;
            dnormed.iter_mut().zip(w).for_each(|(to, w)| *to = derivative * w);
        }
        let drows = self.drows.reserve(count * width);
        drows.fill(0.0);
        let dweight = base.as_mut().map_or(&mut [][..], |base| &mut base[layout.norm.clone()]);
        let inverses = self.inverses.reserve(count);
        norm::backward(compute, count, rows, weight, epsilon, dnormed, inverses, drows, dweight);
        for (target, d) in targets.iter().zip(drows.chunks_exact(width)) {
            let to = &mut dx[row_of(*target) * width..][..width];
            to.iter_mut().zip(d).for_each(|(to, from)| *to += from);
        }
        sums
    }
}
