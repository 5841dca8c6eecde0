//! Computes attention weights in registers, as the operands that AMX reads.
//!
//! Without AMX, weights are computed in f32 in the memory of the scores, and packed from there if
//! necessary. With AMX, matmul is so fast that packing would take longer. Weights and their
//! gradients are therefore computed in registers in the layout that the next matmul reads. The
//! values are bit for bit those of packing.

use std::arch::x86_64::*;

use super::scores::{QueryRow, ScoreRows};
use crate::gemm::shape::STEP;
use crate::precision::pack_words;
use crate::simd::{LANES, exp};

/// Number of positions that one instruction processes.
const WIDE: usize = 2 * STEP;

/// Returns a mask for the 16 positions from `at` on. A lane is set if its position is below `seen`.
#[inline(always)]
fn mask_below(seen: usize, at: usize) -> __mmask16 {
    ((1u32 << seen.saturating_sub(at).min(LANES)) - 1) as __mmask16
}

/// Computes [`exp`] of every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn exp_lanes(x: __m512) -> __m512 {
    let mut lanes = [0.0f32; LANES];
    // SAFETY: both are 512 bits.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), x) };
    for lane in &mut lanes {
        *lane = exp(*lane);
    }
    // SAFETY: as above.
    unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
}

/// Writes 32 values of a row to a packed lhs.
///
/// # Safety
/// `to` must have 16 words.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn store_row([low, high]: [__m512; 2], to: *mut f32) {
    let both = _mm512_cvtne2ps_pbh(high, low);
    // SAFETY: the caller guarantees the words; both types are 512 bits.
    unsafe { _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(both)) }
}

/// Computes one row's weights e = exp(s − max) over some positions, of which the row attends to the
/// first `seen`. Adds them to `sums`, in lanes by position, and writes them, 0 past `seen`, as 16
/// words every `step` words from `to` on.
///
/// # Safety
/// AMX must be available. `scores` must hold full steps of 32 positions, and `to` as many.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub unsafe fn compute_weights(
    scores: &[f32],
    seen: usize,
    max: f32,
    sums: &mut [f32; LANES],
    to: *mut f32,
    step: usize,
) {
    let max = _mm512_set1_ps(max);
    // SAFETY: the caller guarantees the extents.
    unsafe {
        let mut sum = _mm512_loadu_ps(sums.as_ptr());
        for at in (0..scores.len()).step_by(WIDE) {
            let mut weights = [_mm512_setzero_ps(); 2];
            for (half, weights) in weights.iter_mut().enumerate() {
                let at = at + half * LANES;
                if at < seen {
                    let e = exp_lanes(_mm512_sub_ps(_mm512_loadu_ps(scores.as_ptr().add(at)), max));
                    *weights = _mm512_maskz_mov_ps(mask_below(seen, at), e);
                    sum = _mm512_add_ps(sum, *weights);
                }
            }
            store_row(weights, to.wrapping_add(at / WIDE * step));
        }
        _mm512_storeu_ps(sums.as_mut_ptr(), sum);
    }
}

/// Implements [`ScoreRows::compute`] for AMX: writes weights and score gradients as words to
/// `scores.pairs`, and score gradients as an lhs of `high` rows to `lhs`.
///
/// # Safety
/// AMX must be available. All rows of `scores` must exist up to `end`. `end` and the scores'
/// `first_position` must be multiples of 32. `lhs` must have as many steps from `first_position`
/// on, with an even `high`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub unsafe fn score_gradients(scores: &mut ScoreRows<'_>, end: usize, lhs: *mut f32, high: usize) {
    let ScoreRows { rows, first_position, stride, .. } = *scores;
    let p = scores.p.as_ptr();
    let s = scores.s.as_ptr();
    let pairs = scores.pairs.each_mut().map(|words| words.as_mut_ptr());
    let zero = _mm512_setzero_ps();
    for (word, two) in rows.chunks(2).enumerate() {
        // A missing second row attends to nothing.
        let two = [two[0], two.get(1).copied().unwrap_or(QueryRow { first: 0, own: 0, ..two[0] })];
        for at in (first_position..end).step_by(WIDE) {
            // Indexed by row, then by half.
            let mut weights = [[zero; 2]; 2];
            let mut gradients = [[zero; 2]; 2];
            // SAFETY: the caller guarantees the extents.
            unsafe {
                for (i, row) in two.iter().enumerate() {
                    let [max, inverse, mean] =
                        [row.max, row.inverse, row.mean].map(|x| _mm512_set1_ps(x));
                    for half in 0..2 {
                        let at = at + half * LANES;
                        if at < row.own && at + LANES > row.first {
                            let from = (2 * word + i) * stride + at;
                            let e = exp_lanes(_mm512_sub_ps(_mm512_loadu_ps(p.add(from)), max));
                            let weight = _mm512_mul_ps(e, inverse);
                            let gradient = _mm512_mul_ps(
                                weight,
                                _mm512_sub_ps(_mm512_loadu_ps(s.add(from)), mean),
                            );
                            let mask = mask_below(row.own, at) & !mask_below(row.first, at);
                            weights[i][half] = _mm512_maskz_mov_ps(mask, weight);
                            gradients[i][half] = _mm512_maskz_mov_ps(mask, gradient);
                        }
                    }
                }
                for (pair, to) in [weights, gradients].into_iter().zip(pairs) {
                    let [earlier, later] = pair;
                    for (half, (earlier, later)) in earlier.into_iter().zip(later).enumerate() {
                        let to = to.add(word * stride + at + half * LANES);
                        _mm512_storeu_si512(to.cast(), pack_words(earlier, later));
                    }
                }
                for (i, gradients) in gradients.into_iter().enumerate() {
                    store_row(
                        gradients,
                        lhs.add(((at - first_position) / WIDE * high + 2 * word + i) * STEP),
                    );
                }
            }
        }
    }
}
