//! Gradient and moments of the optimizer, and the optimizer step.

use levade_policy::{OptimParams, OptimReport};

use crate::Compute;
use crate::buffer::Buffer;
use crate::gemm::OutputMode;
use crate::ops::adamw;
use crate::parameters::Parameters;

/// Gradient and AdamW moments of one array of parameters, in the array's layout. The first backward
/// pass allocates the buffers.
#[derive(Default)]
pub struct Optimizer {
    /// Gradient accumulated since the last step; valid only if `accumulated` is true.
    pub gradient: Buffer,
    /// First moment of AdamW, one value per parameter.
    pub first: Buffer,
    /// Second moment of AdamW, one value per parameter.
    pub second: Buffer,
    /// Number of optimizer steps taken.
    pub steps: u64,
    /// Whether a gradient has accumulated. If not, the next matmuls overwrite `gradient`, which
    /// saves clearing and reading it.
    accumulated: bool,
}

impl Optimizer {
    /// Allocates missing buffers for `len` parameters.
    pub fn allocate(&mut self, len: usize) {
        for buffer in [&mut self.gradient, &mut self.first, &mut self.second] {
            if buffer.is_empty() {
                *buffer = Buffer::zeroed(len);
            }
        }
    }

    /// Starts a backward pass, and returns whether its matmuls overwrite the gradient or add to it.
    /// If they overwrite it, the caller must zero the parts that matmuls do not write.
    pub fn start_pass(&mut self) -> OutputMode {
        if std::mem::replace(&mut self.accumulated, true) {
            OutputMode::Add
        } else {
            OutputMode::Set
        }
    }

    /// Prepares an optimizer step for `len` parameters; returns the norm of the accumulated
    /// gradient.
    fn prepare_step(&mut self, compute: &Compute, len: usize) -> f64 {
        self.allocate(len);
        if !std::mem::take(&mut self.accumulated) {
            self.gradient.fill(0.0);
        }
        adamw::norm(compute, &self.gradient)
    }

    fn step(
        &mut self,
        compute: &Compute,
        params: &OptimParams,
        scale: f32,
        parameters: Parameters<'_>,
    ) {
        self.steps += 1;
        let moments = [&mut *self.first, &mut *self.second];
        adamw::step(compute, params, self.steps, parameters, scale, &self.gradient, moments);
    }
}

/// Runs one optimizer step for parameters that are trained together, with gradients clipped by
/// their joint norm. A gradient that is not finite is dropped and changes nothing.
pub fn step(
    compute: &Compute,
    params: &OptimParams,
    mut trained: Vec<(&mut Optimizer, Parameters<'_>)>,
) -> OptimReport {
    let squares = trained.iter_mut().map(|(optimizer, parameters)| {
        optimizer.prepare_step(compute, parameters.master.len()).powi(2)
    });
    let grad_norm = squares.sum::<f64>().sqrt();
    if !grad_norm.is_finite() {
        return OptimReport { grad_norm, applied: false };
    }
    let limit = f64::from(params.max_grad_norm);
    let scale = if grad_norm > limit { (limit / (grad_norm + 1e-6)) as f32 } else { 1.0 };
    for (optimizer, parameters) in trained {
        optimizer.step(compute, params, scale, parameters);
    }
    OptimReport { grad_norm, applied: true }
}
