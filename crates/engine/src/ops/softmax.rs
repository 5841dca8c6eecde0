//! Distribution over the vocabulary that a row of logits defines. Sampling and training share these
//! functions, so both compute the same log-probabilities.
//!
//! log p(t) = (z_t − max) − ln Σ exp(z − max), with z = logits / temperature.

use crate::simd::{Isa, LANES, dot, exp, fold_lanes, max, simd};

/// Number of values after which the sum moves from f32 lanes to f64.
const BLOCK: usize = 1024;

/// Softmax normalizer of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SoftmaxNormalizer {
    /// Largest scaled logit of the row.
    pub max: f32,
    /// Softmax sum of the row: Σ exp(z − max).
    pub sum: f64,
    /// Natural logarithm of `sum`.
    pub log_sum: f32,
}

impl SoftmaxNormalizer {
    /// Returns the log-probability of a token with scaled logit `z`.
    pub fn log_probability(&self, z: f32) -> f32 {
        (z - self.max) - self.log_sum
    }
}

simd! {
    /// Divides the logits by the temperature, in place.
    pub fn scale_logits(logits: &mut [f32], temperature: f32) {
        if temperature != 1.0 {
            for z in logits.iter_mut() {
                *z /= temperature;
            }
        }
    }
}

simd! {
    fn row_max(z: &[f32]) -> f32 {
        max(z)
    }
}

simd! {
    /// Overwrites one block of scaled logits with exp(z − max) and returns its (Σ e, Σ e (z −
    /// max)).
    fn exp_block(z: &mut [f32], max: f32) -> (f32, f32) {
        let (mut sums, mut moments) = ([0.0f32; LANES], [0.0f32; LANES]);
        let mut chunks = z.chunks_exact_mut(LANES);
        for chunk in &mut chunks {
            for i in 0..LANES {
                let d = chunk[i] - max;
                let e = exp(d);
                sums[i] += e;
                moments[i] = e.mul_add(if e == 0.0 { 0.0 } else { d }, moments[i]);
                chunk[i] = e;
            }
        }
        for (i, z) in chunks.into_remainder().iter_mut().enumerate() {
            let d = *z - max;
            let e = exp(d);
            sums[i] += e;
            moments[i] = e.mul_add(if e == 0.0 { 0.0 } else { d }, moments[i]);
            *z = e;
        }
        (fold_lanes(sums), fold_lanes(moments))
    }
}

/// Overwrites a row of scaled logits with exp(z − max); returns its normalizer and its entropy in
/// nats.
pub fn exponentiate(isa: Isa, z: &mut [f32]) -> (SoftmaxNormalizer, f64) {
    let max = row_max(isa, z);
    let mut sum = 0.0f64;
    let mut moment = 0.0f64;
    for block in z.chunks_mut(BLOCK) {
        let (s, m) = exp_block(isa, block, max);
        sum += f64::from(s);
        moment += f64::from(m);
    }
    let log_sum = libm::log(sum);
    (SoftmaxNormalizer { max, sum, log_sum: log_sum as f32 }, log_sum - moment / sum)
}

simd! {
    /// Computes Σ x² of the values.
    pub fn sum_of_squares(x: &[f32]) -> f32 {
        dot(x, x)
    }
}

simd! {
    /// Multiplies every value by `factor`.
    pub fn scale_values(x: &mut [f32], factor: f32) {
        for x in x.iter_mut() {
            *x *= factor;
        }
    }
}

simd! {
    /// Multiplies every exponential by `factor` + `entropy` · (z − `shift`), where z is the scaled
    /// logit from which it was computed. With `shift` = ln Σ exp z − H and `entropy` = c / Σ exp,
    /// this adds the gradient of −c H, with H the entropy, with respect to the scaled logits: c p
    /// (ln p + H).
    pub fn add_entropy(exponentials: &mut [f32], scaled: &[f32], factor: f32, entropy: f32, shift: f32) {
        for (e, z) in exponentials.iter_mut().zip(scaled) {
            *e *= factor + entropy * (z - shift);
        }
    }
}

/// Distribution of one row of scaled logits, ready for sampling. The logits stay unchanged, because
/// the sampled token's logit is needed afterwards.
pub struct TokenDistribution<'a> {
    z: &'a [f32],
    /// Softmax normalizer of the row, with the same numbers as [`exponentiate`].
    pub normalizer: SoftmaxNormalizer,
    /// Σ exp(z − max) of every block of logits.
    blocks: Vec<f64>,
}

impl<'a> TokenDistribution<'a> {
    /// Computes the distribution of a row of scaled logits.
    pub fn from_logits(isa: Isa, z: &'a [f32]) -> Self {
        let max = row_max(isa, z);
        let mut scratch = [0.0; BLOCK];
        let block = |block| f64::from(exponentials(isa, block, max, &mut scratch).1);
        let blocks: Vec<f64> = z.chunks(BLOCK).map(block).collect();
        let sum = blocks.iter().fold(0.0, |sum, block| sum + block);
        TokenDistribution {
            z,
            normalizer: SoftmaxNormalizer { max, sum, log_sum: libm::log(sum) as f32 },
            blocks,
        }
    }

    /// Returns the token at the point `u` in [0, 1) of the cumulative distribution. Tokens with
    /// probability 0 are never sampled.
    pub fn sample(&self, isa: Isa, u: f64) -> usize {
        let SoftmaxNormalizer { max, sum, .. } = self.normalizer;
        let goal = u * sum;
        let mut below = 0.0;
        let mut scratch = [0.0; BLOCK];
        for (index, (block, mass)) in self.z.chunks(BLOCK).zip(&self.blocks).enumerate() {
            if below + mass <= goal {
                below += mass;
                continue;
            }
            for (offset, e) in exponentials(isa, block, max, &mut scratch).0.iter().enumerate() {
                below += f64::from(*e);
                if *e > 0.0 && below > goal {
                    return index * BLOCK + offset;
                }
            }
        }
        // Rounding can leave `goal` slightly above the total; then the last token with positive
        // probability is returned.
        self.z.iter().rposition(|z| exp(z - max) > 0.0).unwrap_or(0)
    }
}

/// Computes exp(z − max) of a block, and their sum.
fn exponentials<'a>(
    isa: Isa,
    block: &[f32],
    max: f32,
    scratch: &'a mut [f32; BLOCK],
) -> (&'a [f32], f32) {
    let scratch = &mut scratch[..block.len()];
    scratch.copy_from_slice(block);
    let (sum, _) = exp_block(isa, scratch, max);
    (scratch, sum)
}

/// Returns the index of the largest value, the first of equal ones.
pub fn argmax(x: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in x.iter().enumerate() {
        if *v > x[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::super::testing::{noise, widen};
    use super::*;

    #[test]
    fn softmax_matches_f64_on_every_isa() {
        let logits = noise(5000 + 7, 1, 30.0);
        for temperature in [1.0, 0.7, 3.0] {
            let z: Vec<f64> = widen(&logits).iter().map(|x| x / f64::from(temperature)).collect();
            let max = z.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = z.iter().map(|x| (x - max).exp()).sum();
            let entropy: f64 =
                z.iter().map(|x| (x - max).exp() / sum * -(x - max - sum.ln())).sum();
            let mut bits = Vec::new();
            for isa in Isa::available() {
                let mut row = logits.clone();
                scale_logits(isa, &mut row, temperature);
                let scaled = row.clone();
                let (normalizer, found) = exponentiate(isa, &mut row);
                assert_eq!(TokenDistribution::from_logits(isa, &scaled).normalizer, normalizer);
                assert!((found - entropy).abs() < 1e-5, "{found} {entropy}");
                for t in [0, 17, 5006] {
                    let logp = normalizer.log_probability(scaled[t]);
                    assert!((f64::from(logp) - (z[t] - max - sum.ln())).abs() < 1e-5);
                    bits.push(logp.to_bits());
                }
            }
            assert!(bits.chunks(3).all(|b| b == &bits[..3]));
        }
    }

    #[test]
    fn samples_follow_token_distribution() {
        let mut row: Vec<f32> = vec![-1000.0; 3000];
        row[5] = 2f32.ln();
        row[2500] = 1f32.ln();
        row[2999] = 1f32.ln();
        for isa in Isa::available() {
            let row = TokenDistribution::from_logits(isa, &row);
            let mut counts = [0; 3];
            for i in 0..4000 {
                let token = row.sample(isa, levade_policy::uniform(1, 2, i));
                let index = [5, 2500, 2999].iter().position(|t| *t == token);
                counts[index.expect("only these have probability")] += 1;
            }
            assert!(
                (counts[0] - 2000i32).abs() < 150 && (counts[1] - 1000i32).abs() < 120,
                "{counts:?}"
            );
            assert_eq!(row.sample(isa, 0.0), 5);
            assert_eq!(row.sample(isa, 1.0 - 1e-16), 2999);
        }
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
    }
}
