//! Computes output head, log-softmax, entropy and loss in one chunked operation: logits exist for a
//! few hundred rows at a time.
//!
//! A row of the head is a predictor (a token whose hidden state predicts other tokens) at one
//! temperature. If the tree branches after it, one row has several targets. Rows that predict no
//! target are never computed.

use levade_policy::{ForwardBackward, LossRow};
use levade_rl::Loss;
use levade_tree::TreeBatch;

use crate::buffer::{Buffer, SharedSlice};
use crate::gemm::{GemmScratch, Matrix, OutputMode, RhsOperand, gemm};
use crate::ops::{for_rows, norm, softmax};
use crate::packing::BatchUnit;
use crate::transformer::{Transformer, gather_rows};
use crate::transposed::TransposedWeights;

/// Maximum number of rows whose logits exist at the same time.
pub const CHUNK: usize = 512;

/// Row of the output head: a predicting token at one temperature, with the targets that it
/// predicts.
struct HeadRow {
    /// Row of the predicting token in the unit.
    predictor: usize,
    temperature: f32,
    /// Indices of the predicted targets in `batch.targets`.
    targets: Vec<usize>,
}

/// Returns the rows of the output head for a unit, sorted by predictor, then by temperature.
fn head_rows(batch: &TreeBatch, unit: &BatchUnit) -> Vec<HeadRow> {
    let mut order: Vec<usize> = (0..batch.targets.len())
        .filter(|t| unit.tokens.contains(&(batch.targets[*t].predictor as usize)))
        .collect();
    let key = |&t: &usize| (batch.targets[t].predictor, batch.targets[t].temperature.to_bits());
    order.sort_by_key(key);
    order
        .chunk_by(|a, b| key(a) == key(b))
        .map(|targets| HeadRow {
            predictor: batch.targets[targets[0]].predictor as usize - unit.tokens.start,
            temperature: batch.targets[targets[0]].temperature,
            targets: targets.to_vec(),
        })
        .collect()
}

/// Buffers of the output head, reused between batches.
#[derive(Default)]
pub struct OutputHead {
    rows: Buffer,
    normed: Buffer,
    logits: Buffer,
    dnormed: Buffer,
    drows: Buffer,
    inverses: Buffer,
}

/// Destination of per-target results: slices with one value for each target of the batch.
pub struct TargetResults<'a> {
    /// Log-probabilities of the targets, in the order of `batch.targets`.
    pub logprobs: &'a mut [f32],
    /// Entropy and Σ p² of the distribution that predicts each target, if requested.
    pub spread: Option<(&'a mut [f32], &'a mut [f32])>,
    /// Losses of the terms, in the order in which they are added, if requested.
    pub terms: Option<&'a mut Vec<LossRow>>,
}

/// Loss, and gradients that the backward pass of the head adds to.
pub struct HeadGradient<'a> {
    /// The loss to differentiate.
    pub loss: &'a Loss,
    /// Gradient of the residual stream after the last layer, one row per token of the unit.
    pub dx: &'a mut [f32],
    /// Gradient of the base weights; `None` if they are frozen.
    pub base: Option<&'a mut [f32]>,
    /// Whether the gradient of the head matrix is added to or overwritten.
    pub mode: OutputMode,
    /// Matrices packed for the backward pass.
    pub transposed: &'a mut TransposedWeights,
}

impl OutputHead {
    /// Computes the results of every target that a token of `unit` predicts, given the residual
    /// stream `x` of the unit after the last layer. With `gradient`, also evaluates the loss and
    /// adds its gradient.
    #[allow(clippy::too_many_arguments)]
    pub fn compute_targets(
        &mut self,
        model: &Transformer,
        batch: &TreeBatch,
        unit: &BatchUnit,
        x: &[f32],
        scratch: &mut GemmScratch,
        mut gradient: Option<HeadGradient<'_>>,
        target_results: &mut TargetResults<'_>,
    ) -> ForwardBackward {
        let config = &model.weights.config;
        let width = config.hidden;
        let vocabulary = config.vocabulary;
        let layout = &model.weights.layout;
        let compute = &model.compute;
        let rows = head_rows(batch, unit);
        let mut sums =
            ForwardBackward { tokens: unit.tokens.len() as u64, ..ForwardBackward::default() };

        for chunk in rows.chunks(CHUNK) {
            gather_rows(x, width, chunk.iter().map(|row| row.predictor), &mut self.rows);
            let selected = &self.rows[..chunk.len() * width];
            model.compute_logits(selected, &mut self.normed, scratch, &mut self.logits);

            let logits = SharedSlice::new(&mut self.logits[..chunk.len() * vocabulary]);
            let spread = target_results.spread.is_some();
            let mut found: Vec<RowResult> = vec![RowResult::default(); chunk.len()];
            let results = SharedSlice::new(&mut found);
            let loss = gradient.as_ref().map(|g| g.loss);
            compute.pool.run(chunk.len(), |index| {
                // SAFETY: each row belongs to one task.
                let (z, result) = unsafe {
                    (logits.slice(index * vocabulary, vocabulary), results.slice(index, 1))
                };
                result[0] = evaluate_row(model, batch, &chunk[index], loss, spread, z);
            });
            for (row, result) in chunk.iter().zip(&found) {
                for (target, value) in row.targets.iter().zip(&result.logprobs) {
                    target_results.logprobs[*target] = *value;
                    if let Some((entropies, concentrations)) = &mut target_results.spread {
                        entropies[*target] = result.entropy as f32;
                        concentrations[*target] = result.concentration as f32;
                    }
                }
                if let (Some(rows), Some(loss)) = (&mut target_results.terms, loss) {
                    let targets = row.targets.iter().copied().zip(result.logprobs.iter().copied());
                    rows.push(LossRow::new(batch, loss, targets, result.entropy));
                }
                sums.merge(&result.sums);
            }

            if let Some(gradient) = gradient.as_mut() {
                let dlogits =
                    Matrix::new(&self.logits[..chunk.len() * vocabulary], chunk.len(), vocabulary);
                let dnormed = self.dnormed.reserve(chunk.len() * width);
                let head = gradient.transposed.head(compute, &model.weights);
                gemm(compute, scratch, dlogits, head, dnormed, width, OutputMode::Set);
                for rows in [&mut *dnormed, &mut self.normed[..chunk.len() * width]] {
                    for_rows(compute, chunk.len(), width, rows, |row, values| {
                        softmax::scale_values(compute.isa, values, found[row].factor);
                    });
                }
                if let Some(base) = &mut gradient.base {
                    let normed =
                        Matrix::new(&self.normed[..chunk.len() * width], chunk.len(), width);
                    let dhead = &mut base[layout.head.clone()];
                    let transposed = dlogits.transposed();
                    gemm(
                        compute,
                        scratch,
                        transposed,
                        RhsOperand::Plain(normed),
                        dhead,
                        width,
                        gradient.mode,
                    );
                    gradient.mode = OutputMode::Add;
                }

                let drows = self.drows.reserve(chunk.len() * width);
                drows.fill(0.0);
                norm::backward(
                    compute,
                    chunk.len(),
                    selected,
                    &model.weights.norm(&layout.norm),
                    config.norm_epsilon,
                    dnormed,
                    self.inverses.reserve(chunk.len()),
                    drows,
                    gradient.base.as_mut().map_or(&mut [], |base| &mut base[layout.norm.clone()]),
                );
                for (row, d) in chunk.iter().zip(drows.chunks_exact(width)) {
                    for (to, from) in
                        gradient.dx[row.predictor * width..][..width].iter_mut().zip(d)
                    {
                        *to += from;
                    }
                }
            }
        }
        if let Some(HeadGradient { mode: OutputMode::Set, base: Some(base), .. }) = gradient {
            base[layout.head.clone()].fill(0.0);
        }
        sums
    }
}

/// Returns the total weight of a target's terms.
fn total_weight(batch: &TreeBatch, target: usize) -> f64 {
    batch.terms_of(&batch.targets[target]).iter().map(|term| f64::from(term.weight)).sum()
}

/// Result of one row of the output head.
#[derive(Debug, Clone, Default)]
struct RowResult {
    /// Log-probabilities of the row's targets.
    logprobs: Vec<f32>,
    /// Entropy of the row's distribution, in nats.
    entropy: f64,
    /// Sum of the squared probabilities (Σ p²) of the row's distribution; 0 if not requested.
    concentration: f64,
    sums: ForwardBackward,
    /// Factor by which the row of logits must still be multiplied to become its gradient.
    factor: f32,
}

/// Evaluates one row: log-probabilities of its targets and, with a loss, its sums. With a loss, the
/// logits are replaced with their gradient, up to a factor.
///
/// d loss / d z_v = Σ_targets g_t (1[v = t] − p_v) / temperature, with g_t = Σ_terms weight · d
/// loss / d log p. A bonus c for the entropy H adds Σ_terms weight · c p_v (ln p_v + H) /
/// temperature.
fn evaluate_row(
    model: &Transformer,
    batch: &TreeBatch,
    row: &HeadRow,
    loss: Option<&Loss>,
    spread: bool,
    z: &mut [f32],
) -> RowResult {
    let isa = model.compute.isa;
    softmax::scale_logits(isa, z, row.temperature);
    let token_of = |target: usize| batch.tokens[batch.targets[target].token as usize] as usize;
    let scaled: Vec<f32> = row.targets.iter().map(|t| z[token_of(*t)]).collect();
    let bonus = loss.map_or(0.0, |loss| loss.entropy);
    let before = if bonus == 0.0 { Vec::new() } else { z.to_vec() };
    let (normalizer, entropy) = softmax::exponentiate(isa, z);
    let logprobs: Vec<f32> = scaled.iter().map(|z| normalizer.log_probability(*z)).collect();
    let concentration = if spread {
        f64::from(softmax::sum_of_squares(isa, z)) / (normalizer.sum * normalizer.sum)
    } else {
        0.0
    };
    let sums = ForwardBackward::default();
    let mut result = RowResult { logprobs, entropy, concentration, sums, factor: 1.0 };
    let Some(loss) = loss else { return result };

    let mut derivatives = Vec::with_capacity(row.targets.len());
    for (&target, &logp) in row.targets.iter().zip(&result.logprobs) {
        let mut derivative = 0.0;
        for term in batch.terms_of(&batch.targets[target]) {
            let evaluated = loss.evaluate(logp, term);
            derivative += f64::from(term.weight) * evaluated.derivative;
            result.sums.add_term(term, logp, entropy, &evaluated);
        }
        result.sums.targets += 1;
        derivatives.push(derivative / f64::from(row.temperature));
    }
    let total: f64 = derivatives.iter().sum();
    let mut factor = -total / normalizer.sum;
    if bonus != 0.0 {
        let weights: f64 = row.targets.iter().map(|t| total_weight(batch, *t)).sum();
        result.sums.loss -= weights * bonus * entropy;
        let derivative = weights * bonus / f64::from(row.temperature) / normalizer.sum;
        let shift = f64::from(normalizer.max) + f64::from(normalizer.log_sum) - entropy;
        softmax::add_entropy(isa, z, &before, factor as f32, derivative as f32, shift as f32);
        for (&target, derivative) in row.targets.iter().zip(&derivatives) {
            z[token_of(target)] += *derivative as f32;
        }
        return result;
    }
    // The factor is applied later to the rows of the matmuls, which are far narrower than the
    // vocabulary. An exception are gradients that nearly cancel, because the factor is then much
    // smaller than they are.
    if total.abs() <= 1e-3 * derivatives.iter().map(|s| s.abs()).sum::<f64>() {
        softmax::scale_values(isa, z, factor as f32);
        factor = 1.0;
    }
    for (&target, derivative) in row.targets.iter().zip(&derivatives) {
        z[token_of(target)] += (derivative / factor) as f32;
    }
    result.factor = factor as f32;
    result
}
