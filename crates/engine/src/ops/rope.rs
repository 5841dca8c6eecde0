//! Rotary position embedding (Su et al. 2021), the half-split kind: values i and i + d/2 of a head
//! form a pair that is rotated by position × frequency i.
//!
//! Frequencies and angles are computed in f32 exactly as `transformers` does, because rounding an
//! angle of thousands of radians differently changes the model. Cosine and sine of that f32 angle
//! are then exact up to rounding.

use levade_model::{Rope, RopeScaling};

use super::for_rows;
use super::norm::HeadLayout;
use crate::Compute;
use crate::simd::simd;

/// Cosines and sines for every position, `[context][head_dim / 2]`.
pub struct RopeTable {
    cosine: Vec<f32>,
    sine: Vec<f32>,
    half: usize,
}

impl RopeTable {
    /// Computes the rotary tables for positions below `context`.
    pub fn new(rope: &Rope, head_dim: usize, context: usize) -> Self {
        let half = head_dim / 2;
        let frequencies: Vec<f32> = (0..half).map(|i| frequency(rope, i, head_dim)).collect();
        let scale = attention_scale(&rope.scaling);
        let mut table = RopeTable {
            cosine: Vec::with_capacity(context * half),
            sine: Vec::with_capacity(context * half),
            half,
        };
        for position in 0..context {
            for f in &frequencies {
                let angle = f64::from(position as f32 * f);
                table.cosine.push(libm::cos(angle) as f32 * scale);
                table.sine.push(libm::sin(angle) as f32 * scale);
            }
        }
        table
    }

    /// Rotates the heads of every row of `x` by `positions[row]`. With `inverse` it rotates
    /// backwards, which is the gradient.
    pub fn apply(
        &self,
        compute: &Compute,
        positions: &[u32],
        at: HeadLayout,
        inverse: bool,
        x: &mut [f32],
    ) {
        for_rows(compute, positions.len(), at.stride, x, |row, x| {
            let first = positions[row] as usize * self.half;
            let cosine = &self.cosine[first..][..self.half];
            let sine = &self.sine[first..][..self.half];
            let sign = if inverse { -1.0 } else { 1.0 };
            rotate_pairs(
                compute.isa,
                &mut x[at.offset..][..at.heads * at.head_dim],
                cosine,
                sine,
                sign,
            );
        });
    }
}

simd! {
    fn rotate_pairs(heads: &mut [f32], cosine: &[f32], sine: &[f32], sign: f32) {
        let half = cosine.len();
        for head in heads.chunks_exact_mut(2 * half) {
            let (low, high) = head.split_at_mut(half);
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(cosine).zip(sine) {
                let (x, y, s) = (*a, *b, s * sign);
                *a = x.mul_add(*c, -(y * s));
                *b = y.mul_add(*c, x * s);
            }
        }
    }
}

/// Returns the frequency of pair `i`, in radians per position.
fn frequency(rope: &Rope, i: usize, head_dim: usize) -> f32 {
    // torch computes theta ** (2i / d) in f32; f64 followed by rounding gives the same power.
    let exponent = (2 * i) as f32 / head_dim as f32;
    let base = 1.0 / libm::pow(f64::from(rope.theta), f64::from(exponent)) as f32;
    match rope.scaling {
        RopeScaling::None => base,
        RopeScaling::Linear { factor } => base / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let wavelength = 2.0 * std::f32::consts::PI / base;
            let original = original_context as f32;
            if wavelength > original / low_freq_factor {
                base / factor
            } else if wavelength < original / high_freq_factor {
                base
            } else {
                let smooth = (original / wavelength - low_freq_factor)
                    / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * base / factor + smooth * base
            }
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, .. } => {
            // The pair that makes `rotations` rotations over the original context (YaRN, appendix
            // A.2).
            let pair = |rotations: f32| {
                let d = head_dim as f64;
                let wavelength =
                    original_context as f64 / (f64::from(rotations) * 2.0 * std::f64::consts::PI);
                d * libm::log(wavelength) / (2.0 * libm::log(f64::from(rope.theta)))
            };
            let low = pair(beta_fast).floor().max(0.0) as f32;
            let high = pair(beta_slow).ceil().min(head_dim as f64 - 1.0) as f32;
            let high = if high == low { high + 0.001 } else { high };
            let ramp = ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
            let kept = 1.0 - ramp;
            base / factor * (1.0 - kept) + base * kept
        }
    }
}

/// Returns the factor of cosines and sines: 1 except for YaRN.
fn attention_scale(scaling: &RopeScaling) -> f32 {
    match *scaling {
        RopeScaling::Yarn { attention_factor: Some(scale), .. } => scale,
        RopeScaling::Yarn { factor, .. } if factor > 1.0 => {
            (0.1 * libm::log(f64::from(factor)) + 1.0) as f32
        }
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::noise;
    use super::*;

    const AT: HeadLayout = HeadLayout { stride: 20, offset: 3, heads: 2, head_dim: 8 };

    #[test]
    fn rope_rotation_matches_f64_reference_and_inverts() {
        let compute = Compute::new(1);
        let table = RopeTable::new(&Rope { theta: 10_000.0, scaling: RopeScaling::None }, 8, 100);
        let positions = [0, 1, 99];
        let x = noise(3 * AT.stride, 1, 2.0);
        let mut y = x.clone();
        table.apply(&compute, &positions, AT, false, &mut y);
        assert_eq!(y[..AT.stride], x[..AT.stride], "position 0 is not turned");
        for (row, position) in positions.iter().enumerate() {
            for head in 0..2 {
                for i in 0..4 {
                    let at = row * AT.stride + AT.offset + head * 8 + i;
                    let angle = f64::from(*position) / 10_000f64.powf(i as f64 / 4.0);
                    let a = f64::from(x[at]);
                    let b = f64::from(x[at + 4]);
                    assert!((f64::from(y[at]) - (a * angle.cos() - b * angle.sin())).abs() < 1e-5);
                    assert!(
                        (f64::from(y[at + 4]) - (b * angle.cos() + a * angle.sin())).abs() < 1e-5
                    );
                }
            }
        }
        table.apply(&compute, &positions, AT, true, &mut y);
        assert!(y.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-6), "the inverse undoes it");
    }

    #[test]
    fn rope_scaling_divides_only_long_wavelengths() {
        let plain = Rope { theta: 500_000.0, scaling: RopeScaling::None };
        let llama3 = stretched(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        });
        let yarn = stretched(RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            original_context: 8192,
        });
        let linear = stretched(RopeScaling::Linear { factor: 2.0 });
        for (rope, factor) in [(&llama3, 8.0), (&yarn, 4.0)] {
            assert_eq!(frequency(rope, 0, 128), frequency(&plain, 0, 128));
            assert_eq!(frequency(rope, 63, 128), frequency(&plain, 63, 128) / factor);
        }
        assert_eq!(frequency(&linear, 5, 128), frequency(&plain, 5, 128) / 2.0);
        assert!((attention_scale(&yarn.scaling) - 1.138_629_4).abs() < 1e-6);
    }

    fn stretched(scaling: RopeScaling) -> Rope {
        Rope { theta: 500_000.0, scaling }
    }
}
