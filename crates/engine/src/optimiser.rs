//! Gradient, moments, and the step that uses them.

use dressage_policy::{OptimParams, OptimReport};

use crate::buffer::Buffer;
use crate::layout::Layout;
use crate::ops::adamw;
use crate::product::Mode;
use crate::transformer::Transformer;

/// Gradient and moments, in the layout of the weights; allocated by the first backward pass.
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
    /// Allocates what is not there yet.
    pub fn ensure(&mut self, layout: &Layout) {
        for buffer in [&mut self.gradient, &mut self.first, &mut self.second] {
            if buffer.is_empty() {
                *buffer = Buffer::zeroed(layout.len);
            }
        }
    }

    /// Clears what products do not write to, where nothing has accumulated yet; says how products begin.
    pub fn begin(&mut self, layout: &Layout) -> Mode {
        if std::mem::replace(&mut self.accumulated, true) {
            return Mode::Add;
        }
        let norms_and_biases =
            layout.groups().into_iter().filter(|g| !g.decay).map(|g| g.start..g.start + g.len);
        let table = Some(layout.embedding.clone()).filter(|table| *table != layout.head);
        for range in norms_and_biases.chain(table) {
            self.gradient[range].fill(0.0);
        }
        Mode::Set
    }

    /// One optimiser step over what has accumulated. A gradient that is not finite is dropped and changes nothing.
    pub fn step(&mut self, model: &mut Transformer, params: &OptimParams) -> OptimReport {
        self.ensure(&model.weights.layout);
        if !self.accumulated {
            self.gradient.fill(0.0);
        }
        self.accumulated = false;
        let grad_norm = adamw::norm(&model.compute, &self.gradient);
        if !grad_norm.is_finite() {
            return OptimReport { grad_norm, applied: false };
        }
        let limit = f64::from(params.max_grad_norm);
        let scale = if grad_norm > limit { (limit / (grad_norm + 1e-6)) as f32 } else { 1.0 };
        self.steps += 1;
        adamw::step(
            &model.compute,
            &model.weights.layout.groups(),
            params,
            self.steps,
            scale,
            &mut model.weights.master,
            &self.gradient,
            &mut self.first,
            &mut self.second,
        );
        model.weights.refresh(&model.compute);
        OptimReport { grad_norm, applied: true }
    }
}
