//! AdamW (Loshchilov & Hutter 2019) over flat arrays, and the gradient's global norm.

use levade_policy::{OptimParams, crash_point};

use crate::Compute;
use crate::buffer::SharedSlice;
use crate::parameters::{ParameterChunk, Parameters};
use crate::simd::{dot, simd};

/// Number of values per task. The norm is summed per block and then in the order of blocks, so the
/// number of threads does not change it.
const BLOCK: usize = 1 << 16;

/// Computes the square root of the sum of squares of `gradient`, with f64 sums across blocks.
pub fn norm(compute: &Compute, gradient: &[f32]) -> f64 {
    let blocks = gradient.len().div_ceil(BLOCK);
    let mut sums = vec![0.0f32; blocks];
    let shared = SharedSlice::new(&mut sums);
    compute.pool.run(blocks, |block| {
        let part = &gradient[block * BLOCK..gradient.len().min((block + 1) * BLOCK)];
        // SAFETY: each block belongs to one task.
        let sum = unsafe { shared.slice(block, 1) };
        sum[0] = square_sum(compute.isa, part);
    });
    sums.iter().map(|s| f64::from(*s)).sum::<f64>().sqrt()
}

simd! {
    fn square_sum(x: &[f32]) -> f32 {
        dot(x, x)
    }
}

/// Constants of one AdamW step, shared by all parameters.
#[derive(Clone, Copy)]
struct AdamwStep {
    gradient_scale: f32,
    beta1: f32,
    beta2: f32,
    keep: f32,
    rate: f32,
    /// Bias correction of the root of the second moment: 1 / √(1 − β₂ᵗ).
    root_correction: f32,
    epsilon: f32,
}

simd! {
    fn step_block(s: AdamwStep, weight: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32]) {
        for (((w, g), m), v) in weight.iter_mut().zip(gradient).zip(first).zip(second) {
            let scaled = *g * s.gradient_scale;
            *m = s.beta1.mul_add(*m, (1.0 - s.beta1) * scaled);
            *v = s.beta2.mul_add(*v, (1.0 - s.beta2) * (scaled * scaled));
            let denominator = v.sqrt().mul_add(s.root_correction, s.epsilon);
            *w = *w * s.keep - s.rate * (*m / denominator);
        }
    }
}

/// Runs AdamW step number `step` (from 1), with the gradient scaled by `gradient_scale`. `moments`
/// are the first and the second moment. Weight decay applies only to matrices.
pub fn step(
    compute: &Compute,
    params: &OptimParams,
    step: u64,
    parameters: Parameters<'_>,
    gradient_scale: f32,
    gradient: &[f32],
    moments: [&mut [f32]; 2],
) {
    let power = |beta: f32| 1.0 - f64::from(beta).powi(i32::try_from(step).unwrap_or(i32::MAX));
    let constants = |decay: f32| AdamwStep {
        gradient_scale,
        beta1: params.beta1,
        beta2: params.beta2,
        keep: 1.0 - params.learning_rate * decay,
        rate: (f64::from(params.learning_rate) / power(params.beta1)) as f32,
        root_correction: power(params.beta2).sqrt().recip() as f32,
        epsilon: params.epsilon,
    };
    let [matrix, other] = [params.weight_decay, 0.0].map(constants);
    let middle = parameters
        .tensors
        .entries
        .get(parameters.tensors.entries.len() / 2)
        .map(|entry| entry.range.start);
    let moments = moments.map(SharedSlice::new);
    parameters.update_chunks(compute, |ParameterChunk { range, is_matrix, .. }, weights| {
        if middle.is_some_and(|middle| range.contains(&middle)) {
            crash_point("in_optim_step");
        }
        // SAFETY: chunks do not overlap, and each belongs to one task.
        let [m, v] =
            unsafe { moments.each_ref().map(|array| array.slice(range.start, range.len())) };
        let constants = if *is_matrix { matrix } else { other };
        step_block(compute.isa, constants, weights, &gradient[range.clone()], m, v);
    });
}

#[cfg(test)]
mod tests {
    use levade_model::Parameter;

    use super::super::testing::{assert_close, noise, widen};
    use super::*;
    use crate::tensors::Tensors;

    #[test]
    fn adamw_matches_f64_over_several_steps() {
        let compute = Compute::new(2);
        let n = BLOCK + 1000;
        let mut tensors = Tensors::default();
        for (name, shape) in [("matrix", vec![2, BLOCK / 2]), ("norm", vec![1000])] {
            tensors.append([Parameter { name: name.into(), shape }]);
        }
        let params = OptimParams {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.1,
            max_grad_norm: 1.0,
        };
        let mut w = noise(n, 1, 2.0);
        let mut m = vec![0.0; n];
        let mut v = vec![0.0; n];
        let mut ew = widen(&w);
        let mut em = vec![0.0; n];
        let mut ev = vec![0.0; n];
        for t in 1..=5 {
            let g = noise(n, 10 + t, 1.0);
            let eg = widen(&g);
            let exact = eg.iter().map(|x| x * x).sum::<f64>().sqrt();
            assert!((norm(&compute, &g) - exact).abs() < 1e-5 * exact);
            let parameters = Parameters { tensors: &tensors, master: &mut w, packed: Vec::new() };
            step(&compute, &params, t, parameters, 0.5, &g, [&mut m, &mut v]);
            for i in 0..n {
                let x = eg[i] * 0.5;
                em[i] = 0.9 * em[i] + 0.1 * x;
                ev[i] = 0.999 * ev[i] + 0.001 * x * x;
                let c1 = 1.0 - 0.9f64.powi(t as i32);
                let c2 = 1.0 - 0.999f64.powi(t as i32);
                let decay = if i < BLOCK { 0.1 } else { 0.0 };
                ew[i] = ew[i] * (1.0 - 0.01 * decay)
                    - 0.01 * (em[i] / c1) / ((ev[i] / c2).sqrt() + 1e-8);
            }
        }
        assert_close(&w, &ew, 2e-6);
    }
}
