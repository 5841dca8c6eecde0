//! The value head of a critic: one number for every token, from the hidden state that the head of the language model reads.
//!
//! V(s) = w · norm(x) + b. A target's value is that of its predictor: the state before the token. Weights start at zero.

use dressage_model::Parameter;
use dressage_policy::ForwardBackward;
use dressage_tree::TreeBatch;

use crate::buffer::Buffer;
use crate::head::HeadGradient;
use crate::ops::norm;
use crate::packing::Unit;
use crate::parameters::Parameters;
use crate::product::Mode;
use crate::simd::{dot, simd};
use crate::tensors::Tensors;
use crate::transformer::{Transformer, gather_rows};

/// The file it is kept in.
pub const FILE: &str = "value_head.safetensors";

/// The weights of a value head: `w`, then `b`.
pub struct ValueHead {
    /// Where the parameters lie.
    pub tensors: Tensors,
    /// The parameters.
    pub master: Buffer,
}

impl ValueHead {
    /// For a model that is `hidden` wide; every value is 0.
    pub fn new(hidden: usize) -> Self {
        let mut tensors = Tensors::default();
        let parameter = |name: &str, shape: &[usize]| Parameter { name: name.into(), shape: shape.to_vec() };
        tensors.lay([parameter("value_head.weight", &[1, hidden]), parameter("value_head.bias", &[1])]);
        ValueHead { master: Buffer::zeroed(tensors.len), tensors }
    }

    /// The parameters. Nothing is packed.
    pub fn parameters(&mut self) -> Parameters<'_> {
        Parameters { tensors: &self.tensors, master: &mut self.master, packed: Vec::new() }
    }
}

simd! {
    fn value(normed: &[f32], weight: &[f32]) -> f32 {
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

/// Buffers of value heads, kept between batches.
#[derive(Default)]
pub struct Values {
    rows: Buffer,
    normed: Buffer,
    dnormed: Buffer,
    drows: Buffer,
    inverses: Buffer,
}

impl Values {
    /// Fills in the value of every target that a token of `unit` predicts, given the residual stream `x` of the unit after the
    /// last block. Where gradients are given, that of the model and that of the head itself (added to), also evaluates the loss.
    #[allow(clippy::too_many_arguments)]
    pub fn run(
        &mut self,
        model: &Transformer,
        head: &ValueHead,
        batch: &TreeBatch,
        unit: &Unit,
        x: &[f32],
        gradient: Option<(HeadGradient<'_>, &mut [f32])>,
        values: &mut [f32],
    ) -> ForwardBackward {
        let config = &model.weights.config;
        let (width, epsilon, compute) = (config.hidden, config.norm_epsilon, &model.compute);
        let weight = model.weights.part(&model.weights.layout.norm);
        let (w, b) = (&head.master[..width], head.master[width]);
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
            values[*target] = value(compute.isa, normed, w) + b;
        }

        let mut sums = ForwardBackward { tokens: unit.tokens.len() as u64, ..ForwardBackward::default() };
        let Some((gradient, own)) = gradient else { return sums };
        let HeadGradient { loss, dx, mut base, mode, .. } = gradient;
        let layout = &model.weights.layout;
        if let (Mode::Set, Some(base)) = (mode, &mut base) {
            // The language model's head has no part in this.
            base[layout.head.clone()].fill(0.0);
        }
        let dnormed = self.dnormed.reserve(count * width);
        for ((&target, normed), dnormed) in
            targets.iter().zip(normed.chunks_exact(width)).zip(dnormed.chunks_exact_mut(width))
        {
            let mut slope = 0.0;
            for term in batch.terms_of(&batch.targets[target]) {
                let evaluated = loss.evaluate(values[target], term);
                slope += f64::from(term.weight) * evaluated.slope;
                sums.add_value(term, &evaluated);
            }
            sums.targets += 1;
            let slope = slope as f32;
            add_scaled(compute.isa, normed, slope, &mut own[..width]);
            own[width] += slope;
            dnormed.iter_mut().zip(w).for_each(|(to, w)| *to = slope * w);
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
