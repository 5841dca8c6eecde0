//! Gradient, moments, and the step that uses them.

use levade_policy::{OptimParams, OptimReport};

use crate::Compute;
use crate::buffer::Buffer;
use crate::ops::adamw;
use crate::parameters::Parameters;
use crate::product::Mode;

/// Gradient and moments of one array of parameters, in its layout; allocated by the first backward pass.
#[derive(Default)]
pub struct Optimiser {
    /// Gradient accumulated since the last step; only where `accumulated` says so.
    pub gradient: Buffer,
    /// First moment.
    pub first: Buffer,
    /// Second moment.
    pub second: Buffer,
    /// Steps taken.
    pub steps: u64,
    /// Whether anything has accumulated. If not, products overwrite what lies in `gradient`, which saves
    /// clearing and reading it.
    accumulated: bool,
}

impl Optimiser {
    /// Allocates what is not there yet, for `len` parameters.
    pub fn ensure(&mut self, len: usize) {
        for buffer in [&mut self.gradient, &mut self.first, &mut self.second] {
            if buffer.is_empty() {
                *buffer = Buffer::zeroed(len);
            }
        }
    }

    /// Says how products of a backward pass begin. Where nothing has accumulated yet, the caller clears what
    /// they do not write to.
    pub fn begin(&mut self) -> Mode {
        if std::mem::replace(&mut self.accumulated, true) { Mode::Add } else { Mode::Set }
    }

    /// Prepares for a step of `len` parameters; returns the norm of what has accumulated.
    fn close(&mut self, compute: &Compute, len: usize) -> f64 {
        self.ensure(len);
        if !std::mem::take(&mut self.accumulated) {
            self.gradient.fill(0.0);
        }
        adamw::norm(compute, &self.gradient)
    }

    fn step(&mut self, compute: &Compute, params: &OptimParams, scale: f32, parameters: Parameters<'_>) {
        self.steps += 1;
        let moments = [&mut *self.first, &mut *self.second];
        adamw::step(compute, params, self.steps, parameters, scale, &self.gradient, moments);
    }
}

/// One step of parameters that are trained together over what has accumulated for them, clipped by the norm
/// of all of it. A gradient that is not finite is dropped and changes nothing.
pub fn step(
    compute: &Compute,
    params: &OptimParams,
    mut trained: Vec<(&mut Optimiser, Parameters<'_>)>,
) -> OptimReport {
    let squares = trained
        .iter_mut()
        .map(|(optimiser, parameters)| optimiser.close(compute, parameters.master.len()).powi(2));
    let grad_norm = squares.sum::<f64>().sqrt();
    if !grad_norm.is_finite() {
        return OptimReport { grad_norm, applied: false };
    }
    let limit = f64::from(params.max_grad_norm);
    let scale = if grad_norm > limit { (limit / (grad_norm + 1e-6)) as f32 } else { 1.0 };
    for (optimiser, parameters) in trained {
        optimiser.step(compute, params, scale, parameters);
    }
    OptimReport { grad_norm, applied: true }
}
