//! Gradient, moments, and the step that uses them.

use dressage_policy::{OptimParams, OptimReport};

use crate::Compute;
use crate::buffer::Buffer;
use crate::ops::adamw::{self, Group};
use crate::product::Mode;

/// Gradient and moments of one array of parameters, in its layout; allocated by the first backward pass.
#[derive(Default)]
pub struct Optimiser {
    /// What has accumulated since the last step; only where `accumulated` says so.
    pub gradient: Buffer,
    /// First moment.
    pub first: Buffer,
    /// Second moment.
    pub second: Buffer,
    /// Steps taken.
    pub steps: u64,
    /// Whether anything has accumulated. If not, products overwrite what lies in `gradient`, which saves clearing and reading it.
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

    /// Says how products of a backward pass begin. Where nothing has accumulated yet, the caller clears what they do not
    /// write to.
    pub fn begin(&mut self) -> Mode {
        if std::mem::replace(&mut self.accumulated, true) { Mode::Add } else { Mode::Set }
    }

    /// One step of `master` over what has accumulated. A gradient that is not finite is dropped and changes nothing.
    pub fn step(
        &mut self,
        compute: &Compute,
        groups: &[Group],
        params: &OptimParams,
        master: &mut [f32],
    ) -> OptimReport {
        self.ensure(master.len());
        if !self.accumulated {
            self.gradient.fill(0.0);
        }
        self.accumulated = false;
        let grad_norm = adamw::norm(compute, &self.gradient);
        if !grad_norm.is_finite() {
            return OptimReport { grad_norm, applied: false };
        }
        let limit = f64::from(params.max_grad_norm);
        let scale = if grad_norm > limit { (limit / (grad_norm + 1e-6)) as f32 } else { 1.0 };
        self.steps += 1;
        adamw::step(
            compute,
            groups,
            params,
            self.steps,
            scale,
            master,
            &self.gradient,
            &mut self.first,
            &mut self.second,
        );
        OptimReport { grad_norm, applied: true }
    }
}
