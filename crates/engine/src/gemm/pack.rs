//! Packs operands into panels and tiles of words.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::lhs::LhsOperand;
use super::matrix::Matrix;
use super::shape::{NR, VECTOR_ROWS};
use crate::buffer::{Buffer, SharedSlice};
use crate::precision::{Kernel, Precision, pack_pair, round_to_bf16, split_word, with_later};
use crate::simd::simd;

/// Number of steps of k for which neighboring tiles or panels are packed one after the other, if
/// they are adjacent in memory: a multiple of the steps to which any lhs is padded.
pub const PACK_K: usize = 32;

/// Packs columns `column ..` of rows `k0 .. k0 + depth` of `b` into `out`, `[words of depth][NR]`,
/// with zeros past the last column. `k0` must start a word.
pub fn pack_panel(
    kernel: Kernel,
    b: Matrix<'_>,
    k0: usize,
    depth: usize,
    column: usize,
    out: &mut [f32],
) {
    let columns = NR.min(b.cols - column);
    if columns < NR {
        out.fill(0.0);
    }
    let data = &b.data[k0 * b.row_stride + column * b.col_stride..];
    if b.col_stride == 1 {
        pack_rows(kernel, data, b.row_stride, columns, depth, NR, out);
    } else {
        pack_columns(kernel, data, b.col_stride, columns, depth, NR, out);
    }
}

/// Packs adjacent `panels` of the rows `steps` of `b` into `to`: panel i into slot i. A slot has
/// the shape `[words of steps][NR]`.
///
/// # Safety
/// No other thread may use these slots at the same time.
pub unsafe fn pack_panels(
    kernel: Kernel,
    b: Matrix<'_>,
    panels: Range<usize>,
    steps: Range<usize>,
    to: &SharedSlice<'_>,
) {
    let step = if panels.len() > 1 { PACK_K } else { steps.len() };
    for at in (0..steps.len()).step_by(step.max(1)) {
        let depth = step.min(steps.len() - at);
        for panel in panels.clone() {
            let start = (panel * kernel.words(steps.len()) + at / kernel.per_word()) * NR;
            // SAFETY: guaranteed by the caller.
            let to = unsafe { to.slice(start, kernel.words(depth) * NR) };
            pack_panel(kernel, b, steps.start + at, depth, panel * NR, to);
        }
    }
}

impl LhsOperand {
    /// Creates an lhs of `rows`, at most a tile's, and the columns `steps` of `a`: in place if a
    /// tile can read them there, and otherwise packed into `scratch`. `steps` must start a word.
    ///
    /// # Panics
    /// Panics if `a` does not have these rows and columns.
    pub fn pack(
        kernel: Kernel,
        a: Matrix<'_>,
        rows: Range<usize>,
        steps: Range<usize>,
        scratch: &mut Buffer,
    ) -> Self {
        match kernel.precision {
            Precision::F32 => {
                let part = a.submatrix(rows, steps);
                match part {
                    (.., 1) => LhsOperand::from_rows(part),
                    (data, _, stride) => LhsOperand::Steps { start: data.as_ptr(), stride },
                }
            }
            Precision::Bf16 => {
                let to = scratch.reserve(kernel.lhs_words(rows.len(), steps.len()));
                pack_tile(kernel, a, rows.start, rows.len(), steps.start, steps.len(), to);
                LhsOperand::from_packed(kernel, to.as_ptr(), rows.len())
            }
        }
    }
}

/// Packs rows `row .. row + rows` and columns `k0 .. k0 + depth` of `a` into `out`, `[words of
/// depth][rows]`, with each word [split into links](Kernel::links_per_word), or in the layout of
/// [`amx::pack_lhs`] with AMX. `out` takes [`Kernel::lhs_words`] words. `k0` must start a word.
pub fn pack_tile(
    kernel: Kernel,
    a: Matrix<'_>,
    row: usize,
    rows: usize,
    k0: usize,
    depth: usize,
    out: &mut [f32],
) {
    debug_assert!(rows <= kernel.tile_rows());
    #[cfg(target_arch = "x86_64")]
    if kernel.order() == crate::precision::SumOrder::Tiled {
        // SAFETY: the instruction set is available, or it would not be selected.
        return unsafe { amx::pack_lhs(a, row, rows, k0, depth, out) };
    }
    let data = &a.data[row * a.row_stride + k0 * a.col_stride..];
    let unsplit = if kernel.links_per_word() > 1 {
        Kernel { precision: Precision::F32, ..kernel }
    } else {
        kernel
    };
    if a.col_stride == 1 {
        pack_columns(unsplit, data, a.row_stride, rows, depth, rows, out);
    } else {
        pack_rows(unsplit, data, a.col_stride, rows, depth, rows, out);
    }
    if kernel.links_per_word() > 1 {
        out[depth * rows..].fill(0.0);
        round_and_swap_pairs(kernel.isa, rows, out);
    }
}

simd! {
    /// Converts the steps of `rows` rows to links of a chain: rounds the values, and puts the later
    /// step of a word first.
    fn round_and_swap_pairs(rows: usize, steps: &mut [f32]) {
        let turn = |earlier: &mut [f32], later: &mut [f32]| {
            for (earlier, later) in earlier.iter_mut().zip(later) {
                (*earlier, *later) = (round_to_bf16(*later), round_to_bf16(*earlier));
            }
        };
        for word in steps.chunks_exact_mut(2 * rows) {
            let (earlier, later) = word.split_at_mut(rows);
            // With a constant width the compiler emits straight vector code.
            match rows {
                VECTOR_ROWS => turn(&mut earlier[..VECTOR_ROWS], &mut later[..VECTOR_ROWS]),
                _ => turn(earlier, later),
            }
        }
    }
}

/// Packs words from a matrix whose rows run along k: `out[w * out_stride + i]` holds step k of
/// `data[k * stride + i]`, for i below `width` and k below `depth`.
pub fn pack_rows(
    kernel: Kernel,
    data: &[f32],
    stride: usize,
    width: usize,
    depth: usize,
    out_stride: usize,
    out: &mut [f32],
) {
    match kernel.precision {
        Precision::F32 => copy_rows(kernel.isa, data, stride, width, depth, out_stride, out),
        #[cfg(target_arch = "x86_64")]
        Precision::Bf16 if kernel.isa.rounds_pairs() => {
            // SAFETY: the instruction set is available, or it would not be selected.
            unsafe { bf16::pair_rows(data, stride, width, depth, out_stride, out) }
        }
        Precision::Bf16 => pair_rows(kernel.isa, data, stride, width, depth, out_stride, out),
    }
}

/// Packs words from a matrix whose columns run along k: `out[w * out_stride + i]` holds step k of
/// `data[i * stride + k]`, for i below `width` and k below `depth`.
pub fn pack_columns(
    kernel: Kernel,
    data: &[f32],
    stride: usize,
    width: usize,
    depth: usize,
    out_stride: usize,
    out: &mut [f32],
) {
    match kernel.precision {
        Precision::F32 => transpose(kernel.isa, data, stride, width, depth, out_stride, out),
        #[cfg(target_arch = "x86_64")]
        Precision::Bf16 if kernel.isa.rounds_pairs() => {
            // SAFETY: the instruction set is available, or it would not be selected.
            unsafe { bf16::pair_columns(data, stride, width, depth, out_stride, out) }
        }
        Precision::Bf16 => pair_columns(kernel.isa, data, stride, width, depth, out_stride, out),
    }
}

/// Unpacks the output of [`pack_rows`] to f32: rows of `stride` values, in `scratch` unless the
/// words are f32 already.
pub fn unpack_rows<'a>(
    kernel: Kernel,
    words: &'a [f32],
    stride: usize,
    scratch: &'a mut Buffer,
) -> &'a [f32] {
    match kernel.precision {
        Precision::F32 => words,
        Precision::Bf16 => {
            let to = scratch.reserve(2 * words.len());
            split_rows(kernel.isa, words, stride, to);
            to
        }
    }
}

simd! {
    fn split_rows(words: &[f32], stride: usize, to: &mut [f32]) {
        for (from, to) in words.chunks_exact(stride).zip(to.chunks_exact_mut(2 * stride)) {
            let (earlier, later) = to.split_at_mut(stride);
            for ((word, earlier), later) in from.iter().zip(earlier).zip(later) {
                [*earlier, *later] = split_word(*word);
            }
        }
    }
}

/// Writes step `k` of an rhs in words, `[words][stride]`. Steps must be written in order: an
/// earlier step clears the later half of its word, so that the step not written yet is zero instead
/// of a remainder of another operand.
pub fn put_step(kernel: Kernel, k: usize, from: &[f32], stride: usize, out: &mut [f32]) {
    let word = k / kernel.per_word();
    let to = &mut out[word * stride..][..from.len()];
    match kernel.precision {
        Precision::F32 => to.copy_from_slice(from),
        Precision::Bf16 if k.is_multiple_of(2) => put_earlier(kernel.isa, from, to),
        Precision::Bf16 => put_later(kernel.isa, from, to),
    }
}

simd! {
    fn put_earlier(from: &[f32], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = pack_pair(*from, 0.0);
        }
    }
}

simd! {
    fn put_later(from: &[f32], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = with_later(*to, *from);
        }
    }
}

simd! {
    fn copy_rows(data: &[f32], stride: usize, width: usize, depth: usize, out_stride: usize, out: &mut [f32]) {
        if width == NR && out_stride == NR {
            for k in 0..depth {
                let (from, to) = (&data[k * stride..][..NR], &mut out[k * NR..][..NR]);
                prefetch_line(from, AHEAD * stride);
                prefetch_line(from, AHEAD * stride + 16);
                to.copy_from_slice(from);
            }
        } else if width == VECTOR_ROWS && out_stride == VECTOR_ROWS {
            for k in 0..depth {
                let (from, to) = (&data[k * stride..][..VECTOR_ROWS], &mut out[k * VECTOR_ROWS..][..VECTOR_ROWS]);
                prefetch_line(from, AHEAD * stride);
                to.copy_from_slice(from);
            }
        } else {
            for k in 0..depth {
                out[k * out_stride..][..width].copy_from_slice(&data[k * stride..][..width]);
            }
        }
    }
}

/// Packs one row of words from two rows of values.
#[inline(always)]
fn pair_row(earlier: &[f32], later: &[f32], to: &mut [f32]) {
    for ((to, a), b) in to.iter_mut().zip(earlier).zip(later) {
        *to = pack_pair(*a, *b);
    }
}

simd! {
    fn pair_rows(data: &[f32], stride: usize, width: usize, depth: usize, out_stride: usize, out: &mut [f32]) {
        const ZEROS: [f32; NR] = [0.0; NR];
        for w in 0..depth / 2 {
            let (a, b) = (&data[2 * w * stride..], &data[(2 * w + 1) * stride..]);
            let to = &mut out[w * out_stride..];
            // With a constant width the compiler emits straight vector code.
            match width {
                NR => pair_row(&a[..NR], &b[..NR], &mut to[..NR]),
                _ => pair_row(&a[..width], &b[..width], &mut to[..width]),
            }
        }
        if depth % 2 == 1 {
            let (from, to) = (&data[(depth - 1) * stride..][..width], &mut out[depth / 2 * out_stride..][..width]);
            for (from, to) in from.chunks(NR).zip(to.chunks_mut(NR)) {
                pair_row(from, &ZEROS, to);
            }
        }
    }
}

simd! {
    fn transpose(data: &[f32], stride: usize, width: usize, depth: usize, out_stride: usize, out: &mut [f32]) {
        let row = |i: usize, k: usize| -> &[f32; RUN] {
            let from = &data[i * stride + k..];
            prefetch_line(from, RUNS * RUN);
            first_values(from)
        };
        let rest = transpose_runs(width, depth, out_stride, out, row);
        for k in rest..depth {
            for i in 0..width {
                out[k * out_stride + i] = data[i * stride + k];
            }
        }
    }
}

simd! {
    fn pair_columns(data: &[f32], stride: usize, width: usize, depth: usize, out_stride: usize, out: &mut [f32]) {
        let pairs = |from: &[f32; 2 * RUN]| std::array::from_fn(|w| pack_pair(from[2 * w], from[2 * w + 1]));
        pair_columns_with(data, stride, width, depth, out_stride, out, pairs);
    }
}

/// Implements [`pack_columns`] in bf16; `pairs` packs a run of words.
#[inline(always)]
fn pair_columns_with(
    data: &[f32],
    stride: usize,
    width: usize,
    depth: usize,
    out_stride: usize,
    out: &mut [f32],
    pairs: impl Fn(&[f32; 2 * RUN]) -> [f32; RUN],
) {
    let row = |i: usize, w: usize| {
        let from = &data[i * stride + 2 * w..];
        prefetch_line(from, RUNS * RUN);
        prefetch_line(from, (RUNS + 1) * RUN);
        pairs(first_values(from))
    };
    let rest = transpose_runs(width, depth / 2, out_stride, out, row);
    for w in rest..depth.div_ceil(2) {
        for i in 0..width {
            let at = i * stride + 2 * w;
            let later = if 2 * w + 1 < depth { data[at + 1] } else { 0.0 };
            out[w * out_stride + i] = pack_pair(data[at], later);
        }
    }
}

/// Packing with the instruction that rounds 32 values at a time.
#[cfg(target_arch = "x86_64")]
mod bf16 {
    use std::arch::x86_64::*;

    use super::{AHEAD, RUN, pair_columns_with};
    use crate::precision::pack_words;

    /// Packs rows like [`pair_rows`](super::pair_rows), with the instruction that rounds pairs to
    /// bf16.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub fn pair_rows(
        data: &[f32],
        stride: usize,
        width: usize,
        depth: usize,
        out_stride: usize,
        out: &mut [f32],
    ) {
        if width == 0 || depth == 0 {
            return;
        }
        assert!((depth - 1) * stride + width <= data.len());
        assert!((depth.div_ceil(2) - 1) * out_stride + width <= out.len());
        // SAFETY: all rows are within the lengths asserted above; masked-off lanes are not
        // accessed, and a prefetch accesses nothing.
        unsafe {
            for w in 0..depth.div_ceil(2) {
                for column in (0..width).step_by(16) {
                    let mask = ((1u32 << (width - column).min(16)) - 1) as __mmask16;
                    let earlier = data.as_ptr().add(2 * w * stride + column);
                    let ahead = earlier.wrapping_add(AHEAD * stride);
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(stride).cast());
                    let later = if 2 * w + 1 < depth { mask } else { 0 };
                    let words = pack_words(
                        _mm512_maskz_loadu_ps(mask, earlier),
                        _mm512_maskz_loadu_ps(later, earlier.wrapping_add(stride)),
                    );
                    let to = out.as_mut_ptr().add(w * out_stride + column);
                    _mm512_mask_storeu_ps(to, mask, _mm512_castsi512_ps(words));
                }
            }
        }
    }

    /// Packs like [`pair_columns`](super::pair_columns).
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub fn pair_columns(
        data: &[f32],
        stride: usize,
        width: usize,
        depth: usize,
        out_stride: usize,
        out: &mut [f32],
    ) {
        let pairs = |from: &[f32; 2 * RUN]| {
            let mut words = [0.0; RUN];
            // SAFETY: both arrays have the lengths accessed.
            unsafe {
                let [low, high] = [0, RUN].map(|at| _mm512_loadu_ps(from.as_ptr().add(at)));
                let both = std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low));
                _mm512_storeu_ps(words.as_mut_ptr(), both);
            }
            words
        };
        pair_columns_with(data, stride, width, depth, out_stride, out, pairs);
    }
}

/// Number of rows to prefetch in advance: their stride is too large for the processor's own
/// prefetcher.
const AHEAD: usize = 16;
/// Number of runs of four rows that are transposed before the next four rows.
const CHUNK: usize = 8;
/// Number of runs of a row to prefetch in advance.
const RUNS: usize = 8;

/// Prefetches the cache line of `data[at]`, which can be past its end.
#[inline(always)]
fn prefetch_line(data: &[f32], at: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: part of SSE, and a prefetch accesses nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(data.as_ptr().wrapping_add(at).cast());
    }
}

/// Number of words of a row that are transposed at a time: a cache line.
const RUN: usize = 16;

/// Returns the first `N` values of `data` as an array.
#[inline(always)]
fn first_values<const N: usize>(data: &[f32]) -> &[f32; N] {
    match data.first_chunk() {
        Some(run) => run,
        None => unreachable!("{} values where {N} are read", data.len()),
    }
}

/// Computes `out[w * out_stride + i] = row(i, w)` for i below `width` and full runs of w below
/// `depth`, in blocks of 4 runs; returns the first w that is left.
#[inline(always)]
fn transpose_runs<R: std::borrow::Borrow<[f32; RUN]>>(
    width: usize,
    depth: usize,
    out_stride: usize,
    out: &mut [f32],
    row: impl Fn(usize, usize) -> R,
) -> usize {
    let full = depth / RUN * RUN;
    for start in (0..full).step_by(CHUNK * RUN) {
        let end = full.min(start + CHUNK * RUN);
        let mut i = 0;
        while i + 4 <= width {
            for w in (start..end).step_by(RUN) {
                let rows = [row(i, w), row(i + 1, w), row(i + 2, w), row(i + 3, w)];
                let to = &mut out[w * out_stride + i..][..(RUN - 1) * out_stride + 4];
                transpose_4x16(rows.each_ref().map(|r| r.borrow()), out_stride, to);
            }
            i += 4;
        }
        while i < width {
            for w in (start..end).step_by(RUN) {
                for (step, value) in row(i, w).borrow().iter().enumerate() {
                    out[(w + step) * out_stride + i] = *value;
                }
            }
            i += 1;
        }
    }
    full
}

/// Transposes four runs of 16 values to 16 runs of four, `out_stride` apart.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transpose_4x16(rows: [&[f32; RUN]; 4], out_stride: usize, out: &mut [f32]) {
    use std::arch::x86_64::*;
    assert!(out.len() >= (RUN - 1) * out_stride + 4);
    for k in (0..RUN).step_by(4) {
        // SAFETY: SSE2 is part of x86-64, and all accesses are within the runs and the length
        // asserted above.
        unsafe {
            let [a, b, c, d] = rows.map(|row| _mm_loadu_ps(row.as_ptr().add(k)));
            let ab_low = _mm_unpacklo_ps(a, b);
            let ab_high = _mm_unpackhi_ps(a, b);
            let cd_low = _mm_unpacklo_ps(c, d);
            let cd_high = _mm_unpackhi_ps(c, d);
            let to = out.as_mut_ptr().add(k * out_stride);
            _mm_storeu_ps(to, _mm_movelh_ps(ab_low, cd_low));
            _mm_storeu_ps(to.add(out_stride), _mm_movehl_ps(cd_low, ab_low));
            _mm_storeu_ps(to.add(2 * out_stride), _mm_movelh_ps(ab_high, cd_high));
            _mm_storeu_ps(to.add(3 * out_stride), _mm_movehl_ps(cd_high, ab_high));
        }
    }
}

/// Transposes four runs of 16 values to 16 runs of four, `out_stride` apart.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn transpose_4x16(rows: [&[f32; RUN]; 4], out_stride: usize, out: &mut [f32]) {
    for k in 0..RUN {
        for (i, row) in rows.iter().enumerate() {
            out[k * out_stride + i] = row[k];
        }
    }
}
