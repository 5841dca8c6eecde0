//! Compares loss and gradients of small models of every family with f64, and with other ways to
//! compute them.

use levade_policy::{LoraOptions, uniform};
use levade_rl::{KlEstimator, KlPenalty, PolicyLoss};
use levade_tree::{SequenceInput, SequenceTarget, Term};

use super::*;
use crate::adapter::Adapter;
use crate::reference::ReferenceModel;
use crate::tensors::TensorEntry;
use crate::testing::{family_configs, random_weights, tiny_config};
use crate::{Compute, Precision};

/// Returns sequences that share a prompt and fork. Several sequences train the shared tokens, each
/// with its own terms, and the third at other temperatures.
fn test_sequences(vocabulary: usize) -> Vec<SequenceInput> {
    let token = |stream, i| (uniform(3, stream, i) * vocabulary as f64) as u32;
    (0..5u64)
        .map(|sequence| {
            let shared = [40, 40, 40, 21, 0][sequence as usize];
            let own = 9 + 7 * sequence;
            let mut tokens: Vec<u32> = (0..shared).map(|i| token(0, i)).collect();
            tokens.extend((0..own).map(|i| token(1 + sequence, i)));
            let first = [1, 28, 28, 9, 1][sequence as usize];
            let targets = (first..tokens.len() as u32)
                .filter(|index| index % 3 > 0)
                .map(|index| {
                    let random = |k: u64| uniform(11, sequence, u64::from(index) * 8 + k) as f32;
                    let term = Term {
                        weight: random(0) * 0.2,
                        advantage: random(1) * 4.0 - 2.0,
                        behavior: Some(-5.0 - random(2)),
                        reference: Some(-5.0 - random(3)),
                        ..Term::default()
                    };
                    let warm = index % 2 == 0 || sequence == 2;
                    SequenceTarget { index, temperature: if warm { 1.0 } else { 0.7 }, term }
                })
                .collect();
            SequenceInput { tokens: tokens.into(), targets }
        })
        .collect()
}

fn model(config: &levade_model::ModelConfig, threads: usize) -> Transformer {
    let compute = Compute::new(threads);
    let weights = random_weights(&compute, config, 5);
    Transformer::new(compute, weights, config.context)
}

fn losses() -> [Loss; 3] {
    let kl = KlPenalty { estimator: KlEstimator::K3, coefficient: 0.1, importance_weighted: false };
    [
        Loss::new(PolicyLoss::CrossEntropy),
        Loss {
            policy: PolicyLoss::Clip {
                low: 0.2,
                high: 0.28,
                dual: Some(3.0),
                trust: None,
                keep: None,
            },
            kl: Some(kl),
            entropy: 0.0,
            interpolated: None,
        },
        Loss { entropy: 0.3, ..Loss::clip(0.2, 0.2) },
    ]
}

/// Computes the sums of −log p and of the entropy over the terms of all sequences, in f64.
fn exact_counts(reference: &ReferenceModel, sequences: &[SequenceInput]) -> (f64, f64) {
    let mut nll = 0.0;
    let mut entropy = 0.0;
    for sequence in sequences {
        let logits = reference.logits(&sequence.tokens.to_vec());
        for t in sequence.targets.iter().filter(|t| t.term.weight != 0.0) {
            let index = t.index as usize;
            let temperature = f64::from(t.temperature);
            nll -= ReferenceModel::logprob(&logits, &sequence.tokens.to_vec(), index, temperature);
            entropy += ReferenceModel::entropy(&logits, index, temperature);
        }
    }
    (nll, entropy)
}

/// Computes each loss of all sequences, each sequence separately in f64.
fn exact_losses<const N: usize>(
    reference: &ReferenceModel,
    sequences: &[SequenceInput],
    losses: &[Loss; N],
) -> [f64; N] {
    let mut sums = [0.0; N];
    for sequence in sequences {
        let tokens = sequence.tokens.to_vec();
        let logits = reference.logits(&tokens);
        for t in &sequence.targets {
            let index = t.index as usize;
            let temperature = f64::from(t.temperature);
            let logp = ReferenceModel::logprob(&logits, &tokens, index, temperature);
            let entropy = ReferenceModel::entropy(&logits, index, temperature);
            for (sum, loss) in sums.iter_mut().zip(losses) {
                // The loss takes an f32; its derivative carries the rest of the f64.
                let at = loss.evaluate(logp as f32, &t.term);
                let value = at.loss + at.derivative * (logp - f64::from(logp as f32));
                *sum += f64::from(t.term.weight) * (value - loss.entropy * entropy);
            }
        }
    }
    sums
}

fn exact_loss(reference: &ReferenceModel, sequences: &[SequenceInput], loss: &Loss) -> f64 {
    exact_losses(reference, sequences, &[*loss])[0]
}

#[test]
fn loss_and_gradient_match_f64_for_every_family() {
    for config in family_configs() {
        let model = model(&config, 2);
        let sequences = test_sequences(config.vocabulary);
        let batch = TreeBatch::merge(&sequences).unwrap();
        assert!((batch.tokens.len() as u64) < batch.sequence_tokens);
        let num_shared =
            |terms: u32| batch.targets.iter().filter(|target| target.terms == terms).count();
        assert!(num_shared(3) > 2 && num_shared(2) > 2 && num_shared(1) > 2);
        assert!(
            batch.targets.windows(2).any(|pair| pair[0].token == pair[1].token),
            "at two temperatures"
        );
        let losses = losses();
        let mut reference = ReferenceModel::new(&model.weights);
        let (nll, entropy) = exact_counts(&reference, &sequences);
        let exact = exact_losses(&reference, &sequences, &losses);
        let gradients = losses.each_ref().map(|loss| {
            let mut learning = TrainingState::new(&model, TrainingLimits::NONE);
            let sums = learning.forward_backward(&model, None, &batch, loss).unwrap();
            assert_eq!(sums.terms as usize, batch.terms.len());
            assert!((sums.nll - nll).abs() < 1e-5 * nll, "{} {nll}", sums.nll);
            assert!((sums.entropy - entropy).abs() < 1e-5 * entropy, "{} {entropy}", sums.entropy);
            (sums.loss, learning.optimizer.gradient.to_vec())
        });
        for ((loss, _), exact) in gradients.iter().zip(exact) {
            assert!((loss - exact).abs() < 1e-5 * (1.0 + exact.abs()), "{loss} {exact}");
        }
        for (stream, entry) in model.weights.layout.tensors.entries.iter().enumerate() {
            let name = &entry.parameter.name;
            let start = reference.parameters[name].clone();
            let direction = random_direction(stream as u64, start.len());
            let step = 1e-5 / (start.len() as f64).sqrt();
            let mut along = |t: f64| {
                reference.parameters.insert(name.clone(), move_along(&start, &direction, t));
                exact_losses(&reference, &sequences, &losses)
            };
            let above = along(step);
            let below = along(-step);
            reference.parameters.insert(name.clone(), start);
            for (i, (_, gradient)) in gradients.iter().enumerate() {
                let expected = (above[i] - below[i]) / (2.0 * step);
                let gradient = &gradient[entry.range.clone()];
                assert_close_along(&format!("{name}, loss {i}"), expected, gradient, &direction);
            }
        }
    }
}

/// Training the tree and training each sequence separately give the same gradient, and the number
/// of threads changes no bit of it.
#[test]
fn gradient_is_independent_of_merging_and_threads() {
    let config = tiny_config();
    let sequences = test_sequences(config.vocabulary);
    let loss = losses()[1];
    let merged = TreeBatch::merge(&sequences).unwrap();
    let gradients: Vec<Vec<f32>> = [1, 2]
        .iter()
        .map(|threads| {
            let model = model(&config, *threads);
            let mut learning = TrainingState::new(&model, TrainingLimits::NONE);
            learning.forward_backward(&model, None, &merged, &loss).unwrap();
            learning.optimizer.gradient.to_vec()
        })
        .collect();
    assert!(gradients[0].iter().zip(&gradients[1]).all(|(a, b)| a.to_bits() == b.to_bits()));

    let model = model(&config, 1);
    let mut learning = TrainingState::new(&model, TrainingLimits::NONE);
    for sequence in &sequences {
        let separate = TreeBatch::merge(std::slice::from_ref(sequence)).unwrap();
        learning.forward_backward(&model, None, &separate, &loss).unwrap();
    }
    for entry in &model.weights.layout.tensors.entries {
        let pairs = gradients[0][entry.range.clone()]
            .iter()
            .zip(&learning.optimizer.gradient[entry.range.clone()]);
        let mut error = 0.0;
        let mut size = 0.0;
        for (a, b) in pairs {
            error += f64::from(a - b).powi(2);
            size += f64::from(*b).powi(2);
        }
        assert!(error.sqrt() <= 1e-5 * size.sqrt(), "{}: {error} of {size}", entry.parameter.name);
    }
}

/// A batch that goes through the model in units computes the same log-probabilities, bit for bit,
/// and the same gradient up to rounding. Recomputing activations changes no bit at all.
#[test]
fn gradient_is_independent_of_units_and_recomputation() {
    for config in family_configs() {
        for precision in [Precision::F32, Precision::Bf16] {
            let compute = Compute::with_isa(2, crate::Isa::detect(), precision);
            let weights = random_weights(&compute, &config, 5);
            let model = Transformer::new(compute, weights, config.context);
            let sequences = test_sequences(config.vocabulary);
            let batch = TreeBatch::merge(&sequences).unwrap();
            let run = |limits: TrainingLimits| {
                let mut learning = TrainingState::new(&model, limits);
                let logprobs = learning.logprobs(&model, None, &batch).unwrap();
                let sums = learning.forward_backward(&model, None, &batch, &losses()[1]).unwrap();
                assert_eq!(sums.tokens, batch.tokens.len() as u64);
                let bits: Vec<u32> = logprobs.iter().map(|p| p.to_bits()).collect();
                (bits, sums, learning.optimizer.gradient.to_vec())
            };
            let (logprobs, sums, gradient) = run(TrainingLimits::NONE);
            for kept in [0, 1] {
                let again = run(TrainingLimits { kept, ..TrainingLimits::NONE });
                assert_eq!((&again.0, &again.1), (&logprobs, &sums));
                assert!(again.2.iter().zip(&gradient).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
            for rows in [100, 33, 20, 7, 1] {
                let parts = run(TrainingLimits { rows, kept: 1 });
                assert_eq!(parts.0, logprobs);
                assert!((parts.1.loss - sums.loss).abs() < 1e-9 * sums.loss.abs().max(1.0));
                for entry in &model.weights.layout.tensors.entries {
                    let mut error = 0.0;
                    let mut size = 0.0;
                    for (a, b) in
                        parts.2[entry.range.clone()].iter().zip(&gradient[entry.range.clone()])
                    {
                        error += f64::from(a - b).powi(2);
                        size += f64::from(*b).powi(2);
                    }
                    // In bf16, sums over rows are rounded once more when keys and values pass on
                    // their gradient.
                    let tolerance = if precision == Precision::F32 { 1e-5 } else { 1e-2 };
                    let name = &entry.parameter.name;
                    assert!(
                        error.sqrt() <= tolerance * size.sqrt(),
                        "{rows} {name}: {error} of {size}"
                    );
                }
            }
        }
    }
}

/// In bf16 the gradient equals the gradient in f32 up to the rounding of operands. The number of
/// threads changes no bit.
#[test]
fn bf16_gradient_is_close_to_f32() {
    for config in family_configs() {
        let sequences = test_sequences(config.vocabulary);
        let merged = TreeBatch::merge(&sequences).unwrap();
        let gradient = |threads, precision| {
            let compute = Compute::with_isa(threads, crate::Isa::detect(), precision);
            let weights = random_weights(&compute, &config, 5);
            let model = Transformer::new(compute, weights, config.context);
            let mut learning = TrainingState::new(&model, TrainingLimits::NONE);
            learning.forward_backward(&model, None, &merged, &losses()[0]).unwrap();
            (model, learning.optimizer.gradient.to_vec())
        };
        let (model, exact) = gradient(1, Precision::F32);
        let (_, found) = gradient(1, Precision::Bf16);
        let (_, again) = gradient(2, Precision::Bf16);
        assert!(found.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()));
        for entry in &model.weights.layout.tensors.entries {
            let a = &found[entry.range.clone()];
            let b = &exact[entry.range.clone()];
            let error = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
            let size = norm(&mut b.iter().copied());
            assert!(error < 0.03 * size, "{}: {error} of {size}", entry.parameter.name);
            assert!(error > 0.0, "{}", entry.parameter.name);
        }
    }
}

fn norm(x: &mut dyn Iterator<Item = f32>) -> f64 {
    x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// Compares derivatives along random directions of A and of B with those of weights merged in f64,
/// also in units.
#[test]
fn adapter_gradients_match_f64_reference() {
    for config in family_configs() {
        let mut model = model(&config, 2);
        let targets =
            ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"].map(str::to_owned).to_vec();
        let options = LoraOptions {
            rank: 3,
            alpha: 5.0,
            targets,
            rank_stabilized: true,
            ranks: [("q_proj".into(), 2), ("layers.1.mlp.down_proj".into(), 5)].into(),
            alphas: [("o_proj".into(), 3.0)].into(),
        };
        let mut adapter =
            Adapter::new(&model.compute, &model.weights.layout, options, 1, String::new()).unwrap();
        let sequences = test_sequences(config.vocabulary);
        let batch = TreeBatch::merge(&sequences).unwrap();
        let loss = losses()[1];
        let mut learning = TrainingState::new(&model, TrainingLimits::NONE);
        let base = learning.logprobs(&model, None, &batch).unwrap();
        model.adapters.push(adapter);
        assert_eq!(
            learning.logprobs(&model, Some(0), &batch).unwrap(),
            base,
            "a new one changes nothing"
        );
        adapter = model.adapters.remove(0);
        for (i, value) in adapter.master.iter_mut().enumerate() {
            *value += (uniform(23, 0, i as u64) - 0.5) as f32 * 0.3;
        }
        adapter.parameters().pack(&model.compute);
        model.adapters.push(adapter);

        let sums = learning.forward_backward(&model, Some(0), &batch, &loss).unwrap();
        assert!(learning.optimizer.gradient.is_empty(), "the weights are frozen");
        let gradient = learning.adapters[0].gradient.to_vec();
        let mut parts = TrainingState::new(&model, TrainingLimits { rows: 13, kept: 1 });
        parts.forward_backward(&model, Some(0), &batch, &loss).unwrap();
        let layout = &model.weights.layout;
        let exact_at = |moved: &[f64]| {
            let mut merged: Vec<f64> = model.weights.master.iter().map(|w| f64::from(*w)).collect();
            for TensorEntry { range, .. } in &layout.tensors.entries {
                model.adapters[0].merge_into(moved, range, &mut merged[range.clone()]);
            }
            exact_loss(&ReferenceModel::from_weights(&config, layout, &merged), &sequences, &loss)
        };
        let start: Vec<f64> = model.adapters[0].master.iter().map(|v| f64::from(*v)).collect();
        assert!((sums.loss - exact_at(&start)).abs() < 1e-5 * (1.0 + sums.loss.abs()));
        for TensorEntry { parameter, range } in &model.adapters[0].layout.tensors.entries {
            let direction = |i: usize| uniform(29, range.start as u64, i as u64) - 0.5;
            let step = 1e-5 / (range.len() as f64).sqrt();
            let along = |t: f64| {
                let mut moved = start.clone();
                moved[range.clone()]
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, v)| *v += t * direction(i));
                exact_at(&moved)
            };
            let expected = (along(step) - along(-step)) / (2.0 * step);
            for gradient in [&gradient[range.clone()], &parts.adapters[0].gradient[range.clone()]] {
                let found: f64 =
                    gradient.iter().enumerate().map(|(i, g)| f64::from(*g) * direction(i)).sum();
                let size: f64 = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
                assert!(
                    (found - expected).abs() < 1e-3 * size,
                    "{parameter:?}: {found} {expected}, {size}"
                );
            }
        }
    }
}

/// Compares values, and derivatives of their loss along random directions of every parameter and of
/// the value head, with f64.
#[test]
fn critic_values_and_gradients_match_f64_reference() {
    for config in family_configs() {
        let mut model = model(&config, 2);
        let mut head = ValueHead::new(config.hidden);
        for i in 0..=config.hidden {
            head.master[i] = (uniform(31, 0, i as u64) - 0.5) as f32 * 0.3;
        }
        let mut sequences = test_sequences(config.vocabulary);
        for (i, target) in
            sequences.iter_mut().flat_map(|sequence| &mut sequence.targets).enumerate()
        {
            target.term.returns = (uniform(37, 0, i as u64) * 2.0 - 1.0) as f32;
            target.term.value = Some((uniform(37, 1, i as u64) * 2.0 - 1.0) as f32);
        }
        let batch = TreeBatch::merge(&sequences).unwrap();
        let loss = Loss::new(PolicyLoss::Value { clip: Some(0.2) });
        let mut learning = TrainingState::new(&model, TrainingLimits::NONE);
        let none = learning.values(&model, None, &batch);
        assert!(matches!(none, Err(PolicyError::NoValueHead)));
        model.values.insert(None, head);
        let values = learning.values(&model, None, &batch).unwrap();
        let sums = learning.forward_backward(&model, None, &batch, &loss).unwrap();
        assert!(sums.clipped > 5 && sums.terms > 20);
        let mut parts = TrainingState::new(&model, TrainingLimits { rows: 13, kept: 1 });
        assert_eq!(parts.values(&model, None, &batch).unwrap(), values);

        let exact = |reference: &ReferenceModel, head: &[f64]| {
            let mut sum = 0.0;
            for sequence in &sequences {
                let states = reference.hidden_states(&sequence.tokens.to_vec());
                for target in &sequence.targets {
                    let x = &states[target.index as usize - 1];
                    let value: f64 = x.iter().zip(head).map(|(x, w)| x * w).sum();
                    let value = value + head[config.hidden];
                    let at = loss.evaluate(value as f32, &target.term);
                    let rest = at.derivative * (value - f64::from(value as f32));
                    sum += f64::from(target.term.weight) * (at.loss + rest);
                }
            }
            sum
        };
        let mut reference = ReferenceModel::new(&model.weights);
        let own: Vec<f64> = model.values[&None].master.iter().map(|v| f64::from(*v)).collect();
        assert!((sums.loss - exact(&reference, &own)).abs() < 1e-5);
        let direction = random_direction(0, config.hidden + 1);
        let along = |t| exact(&reference, &move_along(&own, &direction, t));
        let expected = (along(1e-6) - along(-1e-6)) / 2e-6;
        assert_close_along("head", expected, &learning.value_heads[&None].gradient, &direction);
        for (stream, entry) in model.weights.layout.tensors.entries.iter().enumerate() {
            let name = &entry.parameter.name;
            let start = reference.parameters[name].clone();
            let direction = random_direction(1 + stream as u64, start.len());
            let step = 1e-5 / (start.len() as f64).sqrt();
            let mut along = |t: f64| {
                reference.parameters.insert(name.clone(), move_along(&start, &direction, t));
                exact(&reference, &own)
            };
            let expected = (along(step) - along(-step)) / (2.0 * step);
            reference.parameters.insert(name.clone(), start);
            assert_close_along(
                name,
                expected,
                &learning.optimizer.gradient[entry.range.clone()],
                &direction,
            );
        }
    }
}

fn assert_close_along(name: &str, expected: f64, gradient: &[f32], direction: &[f64]) {
    let found: f64 = gradient.iter().zip(direction).map(|(g, d)| f64::from(*g) * d).sum();
    let size: f64 = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    assert!((found - expected).abs() <= 1e-3 * size + 1e-9, "{name}: {found} {expected}, {size}");
}

fn random_direction(stream: u64, len: usize) -> Vec<f64> {
    (0..len as u64).map(|i| uniform(41, stream, i) - 0.5).collect()
}

fn move_along(start: &[f64], direction: &[f64], t: f64) -> Vec<f64> {
    start.iter().zip(direction).map(|(x, d)| x + t * d).collect()
}

/// Matmuls overwrite the gradient of the last step in every parameter, with tied and untied heads.
#[test]
fn backward_after_optimizer_step_overwrites_old_gradient() {
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
        let sequences = test_sequences(config.vocabulary);
        let [first, second] = [&sequences[..2], &sequences[2..]]
            .map(|sequences| TreeBatch::merge(sequences).unwrap());
        let loss = losses()[1];
        let (mut new, mut used) = (
            TrainingState::new(&model, TrainingLimits::NONE),
            TrainingState::new(&model, TrainingLimits::NONE),
        );
        used.forward_backward(&model, None, &second, &loss).unwrap();
        used.optim_step(&mut model, None, &still);
        for learning in [&mut new, &mut used] {
            learning.forward_backward(&model, None, &first, &loss).unwrap();
            learning.forward_backward(&model, None, &second, &loss).unwrap();
        }
        assert_eq!(new.optimizer.gradient.to_vec(), used.optimizer.gradient.to_vec());
        // A batch without targets overwrites the complete gradient with zeros.
        used.optim_step(&mut model, None, &still);
        let silent = SequenceInput { tokens: sequences[0].tokens.clone(), targets: vec![] };
        used.forward_backward(&model, None, &TreeBatch::merge(&[silent]).unwrap(), &loss).unwrap();
        assert!(used.optimizer.gradient.iter().all(|g| *g == 0.0));
    }
}

#[test]
fn nonfinite_gradient_changes_nothing() {
    let mut model = model(&tiny_config(), 1);
    let mut learning = TrainingState::new(&model, TrainingLimits::NONE);
    learning.optimizer.allocate(model.weights.layout.tensors.len);
    learning.optimizer.start_pass();
    learning.optimizer.gradient[7] = f32::NAN;
    let before = model.weights.master.to_vec();
    let params = OptimParams {
        learning_rate: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.0,
        max_grad_norm: 1.0,
    };
    let report = learning.optim_step(&mut model, None, &params);
    assert!(!report.applied && report.grad_norm.is_nan());
    assert_eq!(before, model.weights.master.to_vec());
    // The next step does not see the dropped gradient.
    let report = learning.optim_step(&mut model, None, &params);
    assert!(report.applied && report.grad_norm == 0.0);
}

#[test]
fn forward_backward_rejects_untrainable_batches() {
    let model = model(&tiny_config(), 1);
    let mut learning = TrainingState::new(&model, TrainingLimits::NONE);
    let loss = losses()[0];
    let message = |sequence: SequenceInput, learning: &mut TrainingState| {
        let batch = TreeBatch::merge(&[sequence]).unwrap();
        learning.forward_backward(&model, None, &batch, &loss).unwrap_err().to_string()
    };
    let target = |temperature| SequenceTarget { index: 1, temperature, term: Term::default() };
    let alien = SequenceInput { tokens: vec![1, 300].into(), targets: vec![] };
    assert!(message(alien, &mut learning).contains("token 300"));
    let long = SequenceInput { tokens: vec![1; 257].into(), targets: vec![] };
    assert!(message(long, &mut learning).contains("257 tokens"));
    let greedy = SequenceInput { tokens: vec![1, 2].into(), targets: vec![target(0.0)] };
    assert!(message(greedy, &mut learning).contains("temperature 0"));
}

#[path = "learning_terms_tests.rs"]
mod terms;
