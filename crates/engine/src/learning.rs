//! Training: forward and backward over a tree batch, and the optimiser.
//!
//! The gradient of every parameter is summed in the order of rows, and every row's own gradient in the order of operations of
//! the forward pass reversed; threads split outputs, never sums. So a gradient is the same bits on any number of threads.

use dressage_policy::{ForwardBackward, OptimParams, OptimReport, PolicyError};
use dressage_rl::Loss;
use dressage_tree::TreeBatch;

use crate::buffer::{Buffer, Shared};
use crate::head::{Head, HeadGradient};
use crate::layout::Layout;
use crate::ops::attention::Blocks;
use crate::ops::attention_backward::{self, Saved};
use crate::ops::{adamw, add_column_sums, norm, swiglu};
use crate::packing::Packing;
use crate::product::{Matrix, Mode, Right, product};
use crate::transformer::{LayerState, Rows, Temporary, Transformer};
use crate::weights::attention_shape;

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
    fn begin(&mut self, layout: &Layout) -> Mode {
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
}

/// Everything that training needs besides the model.
pub struct Learning {
    /// Gradient and optimiser state.
    pub optimiser: Optimiser,
    layers: Vec<LayerState>,
    blocks: Blocks,
    temporary: Temporary,
    head: Head,
    backward: Backward,
    /// Residual stream after the last block.
    out: Buffer,
}

/// Gradients of rows while they travel back.
#[derive(Default)]
struct Backward {
    /// Gradient of the residual stream.
    dx: Buffer,
    dnormed: Buffer,
    dhidden: Buffer,
    dattended: Buffer,
    dqkv: Buffer,
    shares: Buffer,
    inverses: Buffer,
}

impl Learning {
    /// Training state for `model`, without memory for gradients until they are needed.
    pub fn new(model: &Transformer) -> Self {
        Learning {
            optimiser: Optimiser::default(),
            layers: Vec::new(),
            blocks: Blocks::new(attention_shape(&model.weights.config), 1, model.compute.precision),
            temporary: Temporary::default(),
            head: Head::default(),
            backward: Backward::default(),
            out: Buffer::default(),
        }
    }

    /// Log-probability of every target.
    ///
    /// # Errors
    /// When the batch does not fit the model.
    pub fn logprobs(&mut self, model: &Transformer, batch: &TreeBatch) -> Result<Vec<f32>, PolicyError> {
        check_temperatures(batch)?;
        let packing = Packing::new(batch, model.context, model.weights.config.vocabulary)?;
        self.forward(model, batch, &packing, false);
        let x = &self.out[..batch.tokens.len() * model.weights.config.hidden];
        Ok(self.head.run(model, batch, x, &mut self.temporary.scratch, None).0)
    }

    /// Adds the gradient of `loss` over `batch` to the accumulated one.
    ///
    /// # Errors
    /// When the batch does not fit the model or the loss; nothing has been added then.
    pub fn forward_backward(
        &mut self,
        model: &Transformer,
        batch: &TreeBatch,
        loss: &Loss,
    ) -> Result<ForwardBackward, PolicyError> {
        loss.check(batch).map_err(|error| PolicyError::Invalid(error.to_string()))?;
        check_temperatures(batch)?;
        let config = &model.weights.config;
        let packing = Packing::new(batch, model.context, config.vocabulary)?;
        self.optimiser.ensure(&model.weights.layout);
        self.forward(model, batch, &packing, true);
        let rows = batch.tokens.len();
        let x = &self.out[..rows * config.hidden];
        let dx = self.backward.dx.reserve(rows * config.hidden);
        dx.fill(0.0);
        let mode = self.optimiser.begin(&model.weights.layout);
        let gradient = HeadGradient { loss, dx, parameters: &mut self.optimiser.gradient, mode };
        let (_, sums) = self.head.run(model, batch, x, &mut self.temporary.scratch, Some(gradient));
        for layer in (0..config.layers).rev() {
            self.backward_layer(model, layer, &packing, mode);
        }
        self.backward_embedding(model, &batch.tokens);
        Ok(sums)
    }

    /// One optimiser step over what has accumulated. A gradient that is not finite is dropped and changes nothing.
    pub fn optim_step(&mut self, model: &mut Transformer, params: &OptimParams) -> OptimReport {
        self.optimiser.ensure(&model.weights.layout);
        if !self.optimiser.accumulated {
            self.optimiser.gradient.fill(0.0);
        }
        self.optimiser.accumulated = false;
        let grad_norm = adamw::norm(&model.compute, &self.optimiser.gradient);
        if !grad_norm.is_finite() {
            return OptimReport { grad_norm, applied: false };
        }
        let limit = f64::from(params.max_grad_norm);
        let scale = if grad_norm > limit { (limit / (grad_norm + 1e-6)) as f32 } else { 1.0 };
        self.optimiser.steps += 1;
        adamw::step(
            &model.compute,
            &model.weights.layout.groups(),
            params,
            self.optimiser.steps,
            scale,
            &mut model.weights.master,
            &self.optimiser.gradient,
            &mut self.optimiser.first,
            &mut self.optimiser.second,
        );
        model.weights.refresh(&model.compute);
        OptimReport { grad_norm, applied: true }
    }

    /// Runs all blocks; with `keep`, every block's state is remembered.
    fn forward(&mut self, model: &Transformer, batch: &TreeBatch, packing: &Packing, keep: bool) {
        let config = &model.weights.config;
        let rows = Rows { tokens: &batch.tokens, positions: &packing.positions, spans: &packing.spans };
        self.blocks.grow(packing.blocks);
        let states = if keep { config.layers } else { 1 };
        if self.layers.len() < states {
            self.layers.resize_with(states, LayerState::default);
        }
        model.embed(rows.tokens, self.layers[0].input.reserve(rows.tokens.len() * config.hidden));
        for layer in 0..config.layers {
            let state = &mut self.layers[if keep { layer } else { 0 }];
            model.forward_layer(layer, rows, &mut self.blocks, 0, state, &mut self.temporary, &mut self.out);
            if layer + 1 < config.layers {
                let next = if keep { layer + 1 } else { 0 };
                std::mem::swap(&mut self.layers[next].input, &mut self.out);
            }
        }
    }

    /// Turns the gradient of a block's output into that of its input, adding to the parameters' on the way; matrices' gradients
    /// are overwritten if `mode` says so.
    fn backward_layer(&mut self, model: &Transformer, layer: usize, packing: &Packing, mode: Mode) {
        let config = &model.weights.config;
        let shape = attention_shape(config);
        let (compute, layout) = (&model.compute, &model.weights.layout.layers[layer]);
        let rows = packing.positions.len();
        let (hidden, wide, epsilon) = (config.hidden, config.intermediate, config.norm_epsilon);
        let (query, qkv_width) = (shape.query(), shape.qkv());
        let state = &mut self.layers[layer];
        let scratch = &mut self.temporary.scratch;
        let gradient = &mut self.optimiser.gradient;
        let weights = &model.weights;
        let back = &mut self.backward;
        let dx = &mut back.dx[..rows * hidden];
        let normed = &mut self.temporary.normed.reserve(rows * hidden)[..];

        // Feed-forward: out = middle + down(silu(gate) · up).
        let dhidden = back.dhidden.reserve(rows * wide);
        let gate_up = &mut state.gate_up[..rows * 2 * wide];
        let down = Matrix::new(weights.part(&layout.down), hidden, wide);
        product(
            compute,
            scratch,
            Matrix::new(dx, rows, hidden),
            Right::Plain(down),
            dhidden,
            wide,
            Mode::Set,
        );
        swiglu::backward(compute, rows, wide, gate_up, dhidden);
        let activated = Matrix::new(dhidden, rows, wide);
        let slope = Matrix::new(dx, rows, hidden).transposed();
        let to = &mut gradient[layout.down.clone()];
        product(compute, scratch, slope, Right::Plain(activated), to, wide, mode);
        add_column_sums(compute, rows, dx, &mut gradient[layout.down_bias.clone()]);

        let middle = &state.middle[..rows * hidden];
        norm::forward(compute, rows, middle, weights.part(&layout.mlp_norm), epsilon, normed);
        let slope = Matrix::new(gate_up, rows, 2 * wide);
        let input = Matrix::new(normed, rows, hidden);
        let to = &mut gradient[layout.gate_up.clone()];
        product(compute, scratch, slope.transposed(), Right::Plain(input), to, hidden, mode);
        add_column_sums(compute, rows, gate_up, &mut gradient[layout.gate_up_bias.clone()]);
        let dnormed = back.dnormed.reserve(rows * hidden);
        let matrix = Matrix::new(weights.part(&layout.gate_up), 2 * wide, hidden);
        product(compute, scratch, slope, Right::Plain(matrix), dnormed, hidden, Mode::Set);
        let inverses = back.inverses.reserve(rows);
        norm::backward(
            compute,
            rows,
            middle,
            weights.part(&layout.mlp_norm),
            epsilon,
            dnormed,
            inverses,
            dx,
            &mut gradient[layout.mlp_norm.clone()],
        );

        // Attention: middle = input + output(attend(qkv)).
        let attended = &state.attended[..rows * query];
        let slope = Matrix::new(dx, rows, hidden);
        let to = &mut gradient[layout.output.clone()];
        let right = Right::Plain(Matrix::new(attended, rows, query));
        product(compute, scratch, slope.transposed(), right, to, query, mode);
        add_column_sums(compute, rows, dx, &mut gradient[layout.output_bias.clone()]);
        let dattended = back.dattended.reserve(rows * query);
        let matrix = Matrix::new(weights.part(&layout.output), hidden, query);
        product(compute, scratch, slope, Right::Plain(matrix), dattended, query, Mode::Set);

        let dqkv = back.dqkv.reserve(rows * qkv_width);
        let saved = Saved {
            qkv: &state.qkv[..rows * qkv_width],
            out: attended,
            stats: &state.stats[..rows * shape.heads * 2],
        };
        let (spans, paths) = (&packing.spans, &packing.paths);
        attention_backward::backward(compute, shape, spans, paths, saved, dattended, &mut back.shares, dqkv);
        let norms = [(model.query_heads(), &layout.query_norm), (model.key_heads(), &layout.key_norm)];
        for (heads, weight) in norms {
            model.rope.apply(compute, &packing.positions, heads, true, dqkv);
            if config.qk_norm {
                let raw = &state.raw[..rows * qkv_width];
                let to = &mut gradient[weight.clone()];
                norm::backward_heads(compute, rows, heads, raw, weights.part(weight), epsilon, dqkv, to);
            }
        }

        let input = &state.input[..rows * hidden];
        norm::forward(compute, rows, input, weights.part(&layout.attention_norm), epsilon, normed);
        let slope = Matrix::new(dqkv, rows, qkv_width);
        let to = &mut gradient[layout.qkv.clone()];
        let right = Right::Plain(Matrix::new(normed, rows, hidden));
        product(compute, scratch, slope.transposed(), right, to, hidden, mode);
        add_column_sums(compute, rows, dqkv, &mut gradient[layout.qkv_bias.clone()]);
        let matrix = Matrix::new(weights.part(&layout.qkv), qkv_width, hidden);
        product(compute, scratch, slope, Right::Plain(matrix), dnormed, hidden, Mode::Set);
        norm::backward(
            compute,
            rows,
            input,
            weights.part(&layout.attention_norm),
            epsilon,
            dnormed,
            inverses,
            dx,
            &mut gradient[layout.attention_norm.clone()],
        );
    }

    /// Adds each row's gradient to its token's embedding, in the order of rows.
    fn backward_embedding(&mut self, model: &Transformer, tokens: &[u32]) {
        const COLUMNS: usize = 64;
        let width = model.weights.config.hidden;
        let range = model.weights.layout.embedding.clone();
        let table = Shared::new(&mut self.optimiser.gradient[range]);
        let dx = &self.backward.dx;
        model.compute.pool.run(width.div_ceil(COLUMNS), |task| {
            let first = task * COLUMNS;
            let columns = COLUMNS.min(width - first);
            for (row, token) in tokens.iter().enumerate() {
                // SAFETY: each range of columns belongs to one task.
                let to = unsafe { table.slice(*token as usize * width + first, columns) };
                for (to, from) in to.iter_mut().zip(&dx[row * width + first..][..columns]) {
                    *to += from;
                }
            }
        });
    }
}

fn check_temperatures(batch: &TreeBatch) -> Result<(), PolicyError> {
    match batch.targets.iter().find(|t| !(t.temperature > 0.0 && t.temperature.is_finite())) {
        None => Ok(()),
        Some(target) => Err(PolicyError::Invalid(format!(
            "a target has temperature {}, but training needs one above 0; segments sampled greedily cannot be trained on",
            target.temperature
        ))),
    }
}

#[cfg(test)]
mod tests {
    use dressage_policy::uniform;
    use dressage_rl::{KlEstimator, KlPenalty, PolicyLoss};
    use dressage_tree::{PathInput, PathTarget, Term};

    use super::*;
    use crate::reference::Reference;
    use crate::testing::{family_configs, random_weights, tiny_config};
    use crate::{Compute, Precision};

    /// Paths that share a prompt and part ways, with several temperatures and terms.
    fn paths(vocabulary: usize) -> Vec<PathInput> {
        let token = |stream, i| (uniform(3, stream, i) * vocabulary as f64) as u32;
        (0..5u64)
            .map(|path| {
                let shared = [40, 40, 40, 21, 0][path as usize];
                let own = 9 + 7 * path;
                let mut tokens: Vec<u32> = (0..shared).map(|i| token(0, i)).collect();
                tokens.extend((0..own).map(|i| token(1 + path, i)));
                let targets = (shared.max(1) as u32..tokens.len() as u32)
                    .filter(|index| index % 3 > 0)
                    .map(|index| {
                        let draw = |k: u64| uniform(11, path, u64::from(index) * 8 + k) as f32;
                        let term = Term {
                            weight: draw(0) * 0.2,
                            advantage: draw(1) * 4.0 - 2.0,
                            behaviour: Some(-5.0 - draw(2)),
                            reference: Some(-5.0 - draw(3)),
                            ..Term::default()
                        };
                        PathTarget { index, temperature: [1.0, 0.7][(index % 2) as usize], term }
                    })
                    .collect();
                PathInput { tokens, targets }
            })
            .collect()
    }

    fn model(config: &dressage_model::ModelConfig, threads: usize) -> Transformer {
        let compute = Compute::new(threads);
        let weights = random_weights(&compute, config, 5);
        Transformer::new(compute, weights, config.context)
    }

    fn losses() -> [Loss; 2] {
        let kl = KlPenalty { estimator: KlEstimator::K3, coefficient: 0.1 };
        [
            Loss { policy: PolicyLoss::CrossEntropy, kl: None },
            Loss { policy: PolicyLoss::Clip { low: 0.2, high: 0.28, dual: Some(3.0) }, kl: Some(kl) },
        ]
    }

    /// The loss of all paths, each computed alone in f64.
    fn exact_loss(reference: &Reference, paths: &[PathInput], loss: &Loss) -> f64 {
        let mut sum = 0.0;
        for path in paths {
            let logits = reference.logits(&path.tokens);
            for t in &path.targets {
                let logp =
                    Reference::logprob(&logits, &path.tokens, t.index as usize, f64::from(t.temperature));
                // The loss takes an f32; its own slope carries the rest of the f64.
                let at = loss.evaluate(logp as f32, &t.term);
                let value = at.loss + at.dlogp * (logp - f64::from(logp as f32));
                sum += f64::from(t.term.weight) * value;
            }
        }
        sum
    }

    #[test]
    fn loss_and_gradient_match_f64_for_every_family() {
        for config in family_configs() {
            let model = model(&config, 2);
            let paths = paths(config.vocabulary);
            let batch = TreeBatch::merge(&paths).unwrap();
            assert!((batch.tokens.len() as u64) < batch.path_tokens);
            for loss in losses() {
                let mut learning = Learning::new(&model);
                let sums = learning.forward_backward(&model, &batch, &loss).unwrap();
                let mut reference = Reference::new(&model.weights);
                let exact = exact_loss(&reference, &paths, &loss);
                assert!((sums.loss - exact).abs() < 1e-5 * (1.0 + exact.abs()), "{} {exact}", sums.loss);
                for (stream, place) in model.weights.layout.places.iter().enumerate() {
                    // The slope along a random direction within one tensor.
                    let name = &place.parameter.name;
                    let start = reference.parameters[name].clone();
                    let direction: Vec<f64> =
                        (0..start.len()).map(|i| uniform(17, stream as u64, i as u64) - 0.5).collect();
                    let step = 1e-5 / (start.len() as f64).sqrt();
                    let mut along = |t: f64| {
                        let moved = start.iter().zip(&direction).map(|(x, d)| x + t * d).collect();
                        reference.parameters.insert(name.clone(), moved);
                        exact_loss(&reference, &paths, &loss)
                    };
                    let expected = (along(step) - along(-step)) / (2.0 * step);
                    reference.parameters.insert(name.clone(), start);
                    let gradient = &learning.optimiser.gradient[place.range.clone()];
                    let found: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * d).sum();
                    let size: f64 = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
                    assert!(
                        (found - expected).abs() < 1e-3 * size,
                        "{name}: {found} {expected}, norm {size}"
                    );
                }
            }
        }
    }

    /// Training the tree and training each path alone give the same gradient, and threads change no bit of it.
    #[test]
    fn trees_and_threads_do_not_change_the_gradient() {
        let config = tiny_config();
        let paths = paths(config.vocabulary);
        let loss = losses()[1];
        let whole = TreeBatch::merge(&paths).unwrap();
        let gradients: Vec<Vec<f32>> = [1, 2]
            .iter()
            .map(|threads| {
                let model = model(&config, *threads);
                let mut learning = Learning::new(&model);
                learning.forward_backward(&model, &whole, &loss).unwrap();
                learning.optimiser.gradient.to_vec()
            })
            .collect();
        assert!(gradients[0].iter().zip(&gradients[1]).all(|(a, b)| a.to_bits() == b.to_bits()));

        let model = model(&config, 1);
        let mut learning = Learning::new(&model);
        for path in &paths {
            let alone = TreeBatch::merge(std::slice::from_ref(path)).unwrap();
            learning.forward_backward(&model, &alone, &loss).unwrap();
        }
        for place in &model.weights.layout.places {
            let pairs = gradients[0][place.range.clone()]
                .iter()
                .zip(&learning.optimiser.gradient[place.range.clone()]);
            let (mut error, mut size) = (0.0, 0.0);
            for (a, b) in pairs {
                error += f64::from(a - b).powi(2);
                size += f64::from(*b).powi(2);
            }
            assert!(error.sqrt() <= 1e-5 * size.sqrt(), "{}: {error} of {size}", place.parameter.name);
        }
    }

    /// In bf16 the gradient is that of f32 up to the rounding of operands; trees and threads change it no more than in f32.
    #[test]
    fn the_gradient_in_bf16_is_near_that_in_f32() {
        for config in family_configs() {
            let paths = paths(config.vocabulary);
            let whole = TreeBatch::merge(&paths).unwrap();
            let gradient = |threads, precision| {
                let compute = Compute::with(threads, crate::Isa::detect(), precision);
                let weights = random_weights(&compute, &config, 5);
                let model = Transformer::new(compute, weights, config.context);
                let mut learning = Learning::new(&model);
                learning.forward_backward(&model, &whole, &losses()[0]).unwrap();
                (model, learning.optimiser.gradient.to_vec())
            };
            let (model, exact) = gradient(1, Precision::F32);
            let (_, found) = gradient(1, Precision::Bf16);
            let (_, again) = gradient(2, Precision::Bf16);
            assert!(found.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()));
            for place in &model.weights.layout.places {
                let norm =
                    |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                let (a, b) = (&found[place.range.clone()], &exact[place.range.clone()]);
                let (error, size) =
                    (norm(&mut a.iter().zip(b).map(|(a, b)| a - b)), norm(&mut b.iter().copied()));
                assert!(error < 0.03 * size, "{}: {error} of {size}", place.parameter.name);
                assert!(error > 0.0, "{}", place.parameter.name);
            }
        }
    }

    /// Products write over what the last step left, in every parameter, with tied and untied heads.
    #[test]
    fn a_step_leaves_nothing_behind() {
        for config in family_configs() {
            let mut model = model(&config, 1);
            let still = OptimParams {
                learning_rate: 0.0,
                beta1: 0.9,
                beta2: 0.99,
                epsilon: 1e-8,
                weight_decay: 0.0,
                max_grad_norm: 1.0,
            };
            let paths = paths(config.vocabulary);
            let [first, second] = [&paths[..2], &paths[2..]].map(|paths| TreeBatch::merge(paths).unwrap());
            let loss = losses()[1];
            let (mut new, mut used) = (Learning::new(&model), Learning::new(&model));
            used.forward_backward(&model, &second, &loss).unwrap();
            used.optim_step(&mut model, &still);
            for learning in [&mut new, &mut used] {
                learning.forward_backward(&model, &first, &loss).unwrap();
                learning.forward_backward(&model, &second, &loss).unwrap();
            }
            assert_eq!(new.optimiser.gradient.to_vec(), used.optimiser.gradient.to_vec());
            // A batch without targets overwrites all of it with nothing.
            used.optim_step(&mut model, &still);
            let silent = PathInput { tokens: paths[0].tokens.clone(), targets: vec![] };
            used.forward_backward(&model, &TreeBatch::merge(&[silent]).unwrap(), &loss).unwrap();
            assert!(used.optimiser.gradient.iter().all(|g| *g == 0.0));
        }
    }

    #[test]
    fn a_gradient_that_is_not_finite_changes_nothing() {
        let mut model = model(&tiny_config(), 1);
        let mut learning = Learning::new(&model);
        learning.optimiser.ensure(&model.weights.layout);
        learning.optimiser.begin(&model.weights.layout);
        learning.optimiser.gradient[7] = f32::NAN;
        let before = model.weights.master.to_vec();
        let params = OptimParams {
            learning_rate: 0.1,
            beta1: 0.9,
            beta2: 0.99,
            epsilon: 1e-8,
            weight_decay: 0.0,
            max_grad_norm: 1.0,
        };
        let report = learning.optim_step(&mut model, &params);
        assert!(!report.applied && report.grad_norm.is_nan());
        assert_eq!(before, model.weights.master.to_vec());
        // Nor does it stay for the next step.
        let report = learning.optim_step(&mut model, &params);
        assert!(report.applied && report.grad_norm == 0.0);
    }

    #[test]
    fn what_cannot_be_trained_is_refused() {
        let model = model(&tiny_config(), 1);
        let mut learning = Learning::new(&model);
        let loss = losses()[0];
        let message = |path: PathInput, learning: &mut Learning| {
            let batch = TreeBatch::merge(&[path]).unwrap();
            learning.forward_backward(&model, &batch, &loss).unwrap_err().to_string()
        };
        let target = |temperature| PathTarget { index: 1, temperature, term: Term::default() };
        let alien = PathInput { tokens: vec![1, 300], targets: vec![] };
        assert!(message(alien, &mut learning).contains("token 300"));
        let long = PathInput { tokens: vec![1; 257], targets: vec![] };
        assert!(message(long, &mut learning).contains("257 tokens"));
        let greedy = PathInput { tokens: vec![1, 2], targets: vec![target(0.0)] };
        assert!(message(greedy, &mut learning).contains("temperature 0"));
    }
}
