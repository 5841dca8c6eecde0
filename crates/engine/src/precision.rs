//! Precision of matmul: f32 or bf16.
//!
//! In either precision, weights, values between two matmuls, and sums are f32. In bf16 the
//! *operands* of every matmul are rounded when they are packed (`gemm::pack`): weights once per
//! update; activations, and gradients in the backward pass, when they are packed for each matmul;
//! keys and values when they are stored in their blocks. Nothing else is rounded. So the rounding
//! points are the same for sampling and training.
//!
//! Operands are stored as *words* of 32 bits: one f32, or two bf16 that follow each other along k,
//! the earlier one in the low half. Words are kept in arrays of f32 and only moved. The chain adds
//! the later half of a word first, as AVX-512's instruction for pairs does, so other instruction
//! sets compute the same bits with fused multiply-adds. One exception: that instruction treats
//! numbers below 1e-38 as 0.

pub use levade_policy::Precision;

use serde::{Deserialize, Serialize};

use crate::simd::Isa;

const WORD: usize = size_of::<f32>();

/// Returns the number of steps along k that one packed word holds.
pub const fn per_word(precision: Precision) -> usize {
    WORD / precision.bytes()
}

/// Returns the number of packed words that `k` steps take.
pub const fn words(precision: Precision, k: usize) -> usize {
    k.div_ceil(per_word(precision))
}

/// Instruction set and precision, which select the inner loops of matmul.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// Vector instruction set of the kernel.
    pub isa: Isa,
    /// Precision of the operands.
    pub precision: Precision,
}

/// Order in which a matmul adds its products. Only the operands and this order determine the bits
/// of the result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SumOrder {
    /// Products are added step by step along k.
    #[default]
    Chained,
    /// Products are added 32 steps at a time, as the AMX instruction adds them.
    Tiled,
}

impl std::fmt::Display for SumOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SumOrder::Chained => "chained",
            SumOrder::Tiled => "tiled",
        })
    }
}

impl Kernel {
    /// Returns the order in which a matmul with this kernel adds its products.
    pub const fn order(self) -> SumOrder {
        match (self.precision, self.isa) {
            (Precision::Bf16, Isa::Amx) => SumOrder::Tiled,
            _ => SumOrder::Chained,
        }
    }

    /// Returns the number of packed words that `k` steps take.
    pub const fn words(self, k: usize) -> usize {
        words(self.precision, k)
    }

    /// Returns the number of steps along k that one packed word holds.
    pub const fn per_word(self) -> usize {
        per_word(self.precision)
    }
}

/// Mask of the later half of a word, and of the bits that bf16 keeps of an f32.
pub(crate) const HIGH: u32 = 0xffff_0000;

/// Rounds `x` to bf16 (to nearest, ties to even), in the high half of a word. Subnormal numbers
/// become 0, as the instructions for bf16 treat them. NaN stays NaN.
#[inline(always)]
fn round_to_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & HIGH;
    let normal = if magnitude < 0x0080_0000 { bits & 0x8000_0000 } else { rounded };
    if magnitude > 0x7f80_0000 { (bits | 0x0040_0000) & HIGH } else { normal }
}

/// Returns the bf16 value nearest to `x`.
#[inline(always)]
pub fn round_to_bf16(x: f32) -> f32 {
    f32::from_bits(round_to_bits(x))
}

/// Packs two steps along k into a word, rounded.
#[inline(always)]
pub(crate) fn pack_pair(earlier: f32, later: f32) -> f32 {
    f32::from_bits((round_to_bits(earlier) >> 16) | round_to_bits(later))
}

/// Replaces the later half of `word` with `later`, rounded.
#[inline(always)]
pub(crate) fn with_later(word: f32, later: f32) -> f32 {
    f32::from_bits((word.to_bits() & !HIGH) | round_to_bits(later))
}

/// Returns both halves of a packed word as f32: the earlier step, then the later step.
#[inline(always)]
pub(crate) fn split_word(word: f32) -> [f32; 2] {
    let bits = word.to_bits();
    [f32::from_bits(bits << 16), f32::from_bits(bits & HIGH)]
}

/// Packs pairs of steps along k into 16 words, rounded to bf16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(crate) fn pack_words(
    earlier: std::arch::x86_64::__m512,
    later: std::arch::x86_64::__m512,
) -> std::arch::x86_64::__m512i {
    use std::arch::x86_64::*;

    // Lane 2 i takes value i of the low 16 lanes, lane 2 i + 1 takes value i of the high 16 lanes.
    const LANES: [u16; 32] = {
        let mut lanes = [0; 32];
        let mut lane = 0;
        while lane < 32 {
            lanes[lane] = (lane / 2 + lane % 2 * 16) as u16;
            lane += 1;
        }
        lanes
    };
    // SAFETY: the constant has the length accessed; both types are 512 bits.
    unsafe {
        let both = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(later, earlier));
        _mm512_permutexvar_epi16(_mm512_loadu_si512(LANES.as_ptr().cast()), both)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounding_is_to_nearest_even() {
        for (from, to) in [
            (1.0, 1.0),
            (1.0 + 1.0 / 256.0, 1.0),
            (1.0 + 3.0 / 256.0, 1.0 + 4.0 / 256.0),
            (1.0 + 1.1 / 256.0, 1.0 + 2.0 / 256.0),
            (-0.1, -0.100_097_656),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
            (1e-40, 0.0),
            (f32::MIN_POSITIVE, f32::MIN_POSITIVE),
        ] {
            assert_eq!(round_to_bf16(from).to_bits(), f32::to_bits(to), "{from}");
        }
        assert!(round_to_bf16(f32::NAN).is_nan());
        assert!(round_to_bf16(f32::from_bits(0x7f80_0001)).is_nan());
        let word = pack_pair(1.5, -2.0);
        assert_eq!(split_word(word), [1.5, -2.0]);
        assert_eq!(split_word(with_later(word, 0.25)), [1.5, 0.25]);
        assert_eq!(split_word(pack_pair(3.0, 0.0)), [3.0, 0.0]);
    }
}
