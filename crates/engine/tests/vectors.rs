//! Checks the engine in f32 against the test vectors of losses in `levade-rl`, to 1e-5.
//!
//! For each case a model is built whose heads compute the log-probabilities (or values) of the
//! case. Its layers add nothing, each token has its own hidden state, and the head maps each state
//! only to the token that follows. The derivative by a log-probability is computed from the
//! gradient of the one weight that determines it.

#![allow(clippy::unwrap_used)] // clippy sees only what is inside #[test], not the helpers beside it

#[path = "../../rl/tests/common/mod.rs"]
#[allow(dead_code)]
mod common;
#[path = "../../rl/tests/verl/fixture.rs"]
#[allow(dead_code)]
mod fixture;
#[path = "../../rl/tests/verl/losses.rs"]
mod losses_of_verl;
#[path = "../../rl/tests/asynchronous/losses.rs"]
mod reference_losses;

use levade_engine::testing::{
    Compute, TrainingLimits, TrainingState, Transformer, ValueHead, Weights, tiny_config,
};
use levade_engine::{Isa, Precision};
use levade_model::ModelConfig;
use levade_rl::{Loss, Point};
use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};

const TOLERANCE: f64 = 1e-5;

/// A token whose log-probability the case sets, and the token before it.
struct Step {
    before: usize,
    token: usize,
}

/// Computes Σ weight · loss over points, and its derivative by each log-probability or value.
fn evaluate(loss: Loss, rows: &[Vec<Point>], weights: &[Vec<f64>]) -> (f64, Vec<Vec<f64>>) {
    let mut next = 0;
    let mut steps = Vec::new();
    let mut sequences = Vec::new();
    for (row, weights) in rows.iter().zip(weights) {
        let start = next;
        next += 1 + row.len();
        steps.push(
            (0..row.len())
                .map(|t: usize| Step { before: start + t, token: start + t + 1 })
                .collect::<Vec<_>>(),
        );
        sequences.push(SequenceInput {
            tokens: (start..next).map(|token| token as u32).collect(),
            targets: row
                .iter()
                .zip(weights)
                .enumerate()
                .map(|(t, (point, weight))| SequenceTarget {
                    index: t as u32 + 1,
                    temperature: 1.0,
                    term: Term {
                        weight: *weight as f32,
                        advantage: point.advantage as f32,
                        returns: point.returns as f32,
                        value: point.value.map(|value| value as f32),
                        behavior: point.old.map(|logp| logp as f32),
                        reference: point.reference.map(|logp| logp as f32),
                        sequence_log_ratio: point.sequence_log_ratio.map(|ratio| ratio as f32),
                        selected: point.marked,
                        age: point.age as u32,
                        ..Term::default()
                    },
                })
                .collect(),
        });
    }

    let config = ModelConfig { hidden: 48, tied: false, norm_epsilon: 1e-12, ..tiny_config() };
    let width = config.hidden;
    let vocabulary = config.vocabulary;
    assert!(next <= width, "{next} tokens have no room in {width} states");
    let compute = Compute::with_isa(2, Isa::detect(), Precision::F32);
    let mut model_weights = Weights::zeroed(&config, compute.precision());
    let layout = model_weights.layout.clone();
    for token in 0..next {
        model_weights.master[layout.embedding.start + token * width + token] = 1.0;
    }
    model_weights.master[layout.norm.clone()].fill(1.0);
    // Norm of a normalized state.
    let size = (width as f64).sqrt();
    let mut head = ValueHead::new(width);
    for (steps, row) in steps.iter().zip(rows) {
        for (step, point) in steps.iter().zip(row) {
            if loss.trains_values() {
                head.master[step.before] = (point.logp / size) as f32;
            } else {
                let log_remaining = (vocabulary as f64 - 1.0).ln();
                let logit = point.logp + log_remaining - (1.0 - point.logp.exp()).ln();
                let at = layout.head.start + step.token * width + step.before;
                model_weights.master[at] = (logit / size) as f32;
            }
        }
    }
    model_weights.parameters().pack(&compute);
    let mut model = Transformer::new(compute, model_weights, 64);
    model.values.insert(None, head);
    let mut learning = TrainingState::new(&model, TrainingLimits::NONE);
    let batch = TreeBatch::merge(&sequences).unwrap();
    let sums = learning.forward_backward(&model, None, &batch, &loss).unwrap();
    let derivatives = steps.iter().zip(rows).map(|(steps, row)| {
        steps
            .iter()
            .zip(row)
            .map(|(step, point)| {
                if loss.trains_values() {
                    return f64::from(learning.value_heads[&None].gradient[step.before]) / size;
                }
                let at = layout.head.start + step.token * width + step.before;
                f64::from(learning.optimizer.gradient[at]) / size / (1.0 - point.logp.exp())
            })
            .collect()
    });
    (sums.loss, derivatives.collect())
}
