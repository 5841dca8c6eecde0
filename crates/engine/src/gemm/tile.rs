//! Innermost loop of matmul: one tile of C, up to [`Kernel::tile_rows`] rows by [`NR`] columns,
//! over a block of k.

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::lhs::{LhsOperand, LhsSteps};
use super::micro_kernel::MicroKernelArgs;
use super::shape::{ChainStart, LINE, NR, PrefetchTarget, RhsRows, VECTOR_ROWS};
#[cfg(target_arch = "x86_64")]
use crate::precision::SumOrder;
use crate::precision::{HIGH, Kernel, Precision, split_word};
use crate::simd::Isa;

/// Number of steps in a round of the innermost loop, which prefetches once per round. (Four are no
/// faster; one and eight are slower.)
const ROUND: usize = 2;

impl MicroKernelArgs {
    /// Computes `C[i][j] = Σ_k A[i][k] B[k][j]`: the sums of blocks of `block` words of k, added in
    /// their order; with `add`, they are added to the old value of C. Row i of C starts `c_stride`
    /// values after the row before.
    ///
    /// # Safety
    /// As for [`tile`].
    pub unsafe fn multiply(
        self,
        kernel: Kernel,
        block: usize,
        c: *mut f32,
        c_stride: usize,
        add: bool,
    ) {
        #[cfg(target_arch = "x86_64")]
        if let (SumOrder::Tiled, LhsOperand::Steps { start, .. }) = (kernel.order(), self.lhs) {
            debug_assert!(self.words <= block);
            // SAFETY: forwarded from the caller; the instruction set is available, or it would not
            // be selected.
            return unsafe { amx::micro_kernel(self, start, c, c_stride, add) };
        }
        for panel in 0..self.num_panels() {
            for at in (0..self.words).step_by(block) {
                let depth = block.min(self.words - at);
                let ahead = self.prefetch_target(panel, at, depth);
                let b = RhsRows {
                    blocks: &[self.panel(panel, at)],
                    block: depth,
                    depth,
                    stride: NR,
                    ahead,
                };
                let lhs = self.lhs.skip_words(at);
                let c = c.wrapping_add(panel * NR);
                // SAFETY: forwarded from the caller.
                unsafe {
                    let chain = ChainStart::new(add || at > 0);
                    tile(kernel, self.rows, lhs, b, c, c_stride, self.panel_columns(panel), chain)
                };
            }
        }
    }

    /// Waits until the values written past the caches are visible to other threads.
    pub fn store_fence() {
        #[cfg(target_arch = "x86_64")]
        amx::store_fence();
    }
}

/// Computes `C[i][j] = Σ_k A[k][i] B[k][j]`, one chain in the order of k, for i below `rows` and j
/// below `columns`. Operands are words. Row i of C starts `c_stride` values after the row before.
///
/// A word of two bf16 is two links of the chain, the *later* step first, because AVX-512's
/// instruction adds in this order. Other instruction sets split the words of B as they read them;
/// the words of A are already [split into links](Kernel::links_per_word).
///
/// # Safety
/// All pointers must cover these extents. No other thread may access C at the same time. The
/// instruction set must be available.
#[allow(clippy::too_many_arguments)]
pub unsafe fn tile(
    kernel: Kernel,
    rows: usize,
    a: LhsOperand,
    b: RhsRows<'_>,
    c: *mut f32,
    c_stride: usize,
    columns: usize,
    chain: ChainStart,
) {
    debug_assert!((1..=kernel.tile_rows()).contains(&rows) && (1..=NR).contains(&columns));
    /// Calls `$kernel::<R, _>` for the number of rows.
    macro_rules! by_rows {
        ($kernel:ident, $rows:expr, $a:expr, $c:expr, [$($r:literal)*]) => {
            match ($rows, $a) {
                $(
                    // SAFETY: forwarded from the caller.
                    ($r, LhsOperand::Steps { start, stride }) => unsafe {
                        $kernel::<$r, false>(start, stride, b, $c, c_stride, columns, chain)
                    },
                    // SAFETY: forwarded from the caller.
                    ($r, LhsOperand::Rows { start, stride }) => unsafe {
                        $kernel::<$r, true>(start, stride, b, $c, c_stride, columns, chain)
                    },
                )*
                _ => unreachable!("a tile of {} rows", $rows),
            }
        };
    }
    /// Processes all rows at once.
    macro_rules! whole {
        ($kernel:ident) => {
            by_rows!($kernel, rows, a, c, [1 2 3 4 5 6 7 8 9 10 11 12])
        };
    }
    /// Processes 6 rows at a time: 6 × 16 accumulators fill 12 of the 16 AVX2 registers.
    #[cfg(target_arch = "x86_64")]
    macro_rules! by_six {
        ($kernel:ident) => {
            for first in (0..rows).step_by(6) {
                // SAFETY: stays within the tile.
                let c = unsafe { c.add(first * c_stride) };
                by_rows!($kernel, (rows - first).min(6), a.skip_rows(first), c, [1 2 3 4 5 6]);
            }
        };
    }
    match (kernel.precision, kernel.isa) {
        #[cfg(target_arch = "x86_64")]
        (Precision::F32, Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512) => whole!(avx512),
        #[cfg(target_arch = "x86_64")]
        (Precision::F32, Isa::Avx2) => by_six!(avx2),
        (Precision::F32, _) => whole!(portable),
        #[cfg(target_arch = "x86_64")]
        (Precision::Bf16, Isa::Amx) => match a {
            // SAFETY: forwarded from the caller.
            LhsOperand::Steps { start, .. } => unsafe {
                amx::tile(rows, start, b, c, c_stride, columns, chain)
            },
            LhsOperand::Rows { .. } => unreachable!("rows of bf16 are packed"),
        },
        #[cfg(target_arch = "x86_64")]
        (Precision::Bf16, Isa::Avx512Bf16) => whole!(avx512_pairs),
        #[cfg(target_arch = "x86_64")]
        (Precision::Bf16, Isa::Avx512) => whole!(avx512_halves),
        #[cfg(target_arch = "x86_64")]
        (Precision::Bf16, Isa::Avx2) => by_six!(avx2_halves),
        (Precision::Bf16, _) => whole!(portable_halves),
    }
}

/// Defines a tile in AVX-512. The parameters are the links of the chain per word, and expressions
/// that load 16 words of B for a link, broadcast a word of A, and multiply-add them.
#[cfg(target_arch = "x86_64")]
macro_rules! avx512_tile {
    (
        $name:ident, $features:literal, $links:literal,
        |$from:ident, $link:ident| $load:expr, |$word:ident| $spread:expr, |$x:ident, $y:ident, $sum:ident| $step:expr
    ) => {
        #[target_feature(enable = $features)]
        #[allow(clippy::too_many_arguments)]
        unsafe fn $name<const R: usize, const IN_ROWS: bool>(
            start: *const f32,
            stride: usize,
            b: RhsRows<'_>,
            c: *mut f32,
            c_stride: usize,
            columns: usize,
            chain: ChainStart,
        ) {
            use std::arch::x86_64::*;
            let mask = |lanes: usize| -> __mmask16 { ((1u32 << lanes.min(16)) - 1) as u16 };
            let masks = [mask(columns), mask(columns.saturating_sub(16))];
            let mut sums = [[_mm512_setzero_ps(); 2]; R];
            let mut a = LhsSteps::<IN_ROWS>::new(start, stride / $links);
            // Neither the tile of C nor the data read next is at an address that the processor
            // predicts. Tiles with fewer rows wait for memory anyway.
            let fetches = R == VECTOR_ROWS;
            let PrefetchTarget { mut near, pace, mut far } = b.ahead;
            // SAFETY: the caller guarantees the extents; masked-off lanes are not accessed, and a
            // prefetch accesses nothing.
            unsafe {
                if fetches {
                    for i in 0..R {
                        for half in [0, 16] {
                            _mm_prefetch::<_MM_HINT_T0>(c.wrapping_add(i * c_stride + half).cast());
                        }
                    }
                }
                let load = |i: usize, half: usize| {
                    let mask = if chain == ChainStart::Set { 0 } else { masks[half] };
                    _mm512_maskz_loadu_ps(mask, c.wrapping_add(i * c_stride + half * 16))
                };
                if chain == ChainStart::Resume {
                    sums = std::array::from_fn(|i| [load(i, 0), load(i, 1)]);
                }
                for (mut from, depth) in b.iter_blocks() {
                    macro_rules! step {
                        () => {
                            for $link in 0..$links {
                                let $from = from;
                                let b0 = $load;
                                let $from = from.add(16);
                                let b1 = $load;
                                for (i, row) in sums.iter_mut().enumerate() {
                                    let $word = a.word(i);
                                    let $x = $spread;
                                    let ($y, $sum) = (b0, row[0]);
                                    row[0] = $step;
                                    let ($y, $sum) = (b1, row[1]);
                                    row[1] = $step;
                                }
                                a.step();
                            }
                            from = from.wrapping_add(b.stride);
                        };
                    }
                    for _ in 0..depth / ROUND {
                        if fetches {
                            for _ in 0..ROUND {
                                _mm_prefetch::<_MM_HINT_T0>(near.cast());
                                near = near.wrapping_add(pace);
                            }
                            _mm_prefetch::<_MM_HINT_T1>(far.cast());
                            far = far.wrapping_add(LINE);
                        }
                        for _ in 0..ROUND {
                            step!();
                        }
                    }
                    for _ in 0..depth % ROUND {
                        step!();
                    }
                }
                for (i, row) in sums.iter().enumerate() {
                    for (half, &sum) in row.iter().enumerate() {
                        let to = c.wrapping_add(i * c_stride + half * 16);
                        let sum = if chain == ChainStart::Add {
                            _mm512_add_ps(load(i, half), sum)
                        } else {
                            sum
                        };
                        _mm512_mask_storeu_ps(to, masks[half], sum);
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
avx512_tile!(
    avx512,
    "avx512f",
    1,
    |from, _link| _mm512_loadu_ps(from),
    |word| _mm512_set1_ps(word),
    |x, y, sum| _mm512_fmadd_ps(x, y, sum)
);

#[cfg(target_arch = "x86_64")]
avx512_tile!(
    avx512_pairs,
    "avx512f,avx512bf16",
    1,
    |from, _link| std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(from.cast())),
    |word| std::mem::transmute::<__m512i, __m512bh>(_mm512_set1_epi32(word.to_bits() as i32)),
    |x, y, sum| _mm512_dpbf16_ps(sum, x, y)
);

#[cfg(target_arch = "x86_64")]
avx512_tile!(
    avx512_halves,
    "avx512f",
    2,
    |from, link| half_512(_mm512_loadu_si512(from.cast()), link),
    |word| _mm512_set1_ps(word),
    |x, y, sum| _mm512_fmadd_ps(x, y, sum)
);

/// Returns the half of each of 16 words that is link `link` of the chain.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn half_512(words: std::arch::x86_64::__m512i, link: usize) -> std::arch::x86_64::__m512 {
    use std::arch::x86_64::*;
    _mm512_castsi512_ps(match link {
        0 => _mm512_and_si512(words, _mm512_set1_epi32(HIGH as i32)),
        _ => _mm512_slli_epi32::<16>(words),
    })
}

/// Defines a tile in AVX2, 16 columns at a time; otherwise like [`avx512_tile`].
#[cfg(target_arch = "x86_64")]
macro_rules! avx2_tile {
    ($name:ident, $links:literal, |$from:ident, $link:ident| $load:expr) => {
        #[target_feature(enable = "avx2,fma")]
        #[allow(clippy::too_many_arguments)]
        unsafe fn $name<const R: usize, const IN_ROWS: bool>(
            start: *const f32,
            stride: usize,
            b: RhsRows<'_>,
            c: *mut f32,
            c_stride: usize,
            columns: usize,
            chain: ChainStart,
        ) {
            use std::arch::x86_64::*;
            // SAFETY: the caller guarantees the extents; masked-off lanes of C are not accessed.
            unsafe {
                for half in (0..columns).step_by(16) {
                    let width = columns - half;
                    let masks = [mask_256(width), mask_256(width.saturating_sub(8))];
                    let at = |i: usize, part: usize| c.wrapping_add(i * c_stride + half + 8 * part);
                    // Masked stores are slow even if the mask is full, so complete registers are
                    // handled separately.
                    let load = |i: usize, part: usize| match width >= 16 {
                        true => _mm256_loadu_ps(at(i, part)),
                        false => _mm256_maskload_ps(at(i, part), masks[part]),
                    };
                    let mut sums = [[_mm256_setzero_ps(); 2]; R];
                    if chain == ChainStart::Resume {
                        sums = std::array::from_fn(|i| [load(i, 0), load(i, 1)]);
                    }
                    let mut a = LhsSteps::<IN_ROWS>::new(start, stride / $links);
                    for (start, depth) in b.iter_blocks() {
                        let mut from = start.add(half);
                        for _ in 0..depth {
                            for $link in 0..$links {
                                let $from = from;
                                let b0 = $load;
                                let $from = from.add(8);
                                let b1 = $load;
                                for (i, row) in sums.iter_mut().enumerate() {
                                    let x = _mm256_set1_ps(a.word(i));
                                    *row = [
                                        _mm256_fmadd_ps(x, b0, row[0]),
                                        _mm256_fmadd_ps(x, b1, row[1]),
                                    ];
                                }
                                a.step();
                            }
                            from = from.wrapping_add(b.stride);
                        }
                    }
                    for (i, row) in sums.iter().enumerate() {
                        for (part, &sum) in row.iter().enumerate() {
                            let sum = if chain == ChainStart::Add {
                                _mm256_add_ps(load(i, part), sum)
                            } else {
                                sum
                            };
                            match width >= 16 {
                                true => _mm256_storeu_ps(at(i, part), sum),
                                false => _mm256_maskstore_ps(at(i, part), masks[part], sum),
                            }
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
avx2_tile!(avx2, 1, |from, _link| _mm256_loadu_ps(from));

#[cfg(target_arch = "x86_64")]
avx2_tile!(avx2_halves, 2, |from, link| half_256(from, link));

/// Returns a mask of the first `lanes` of 8 lanes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
fn mask_256(lanes: usize) -> std::arch::x86_64::__m256i {
    use std::arch::x86_64::*;
    _mm256_cmpgt_epi32(
        _mm256_set1_epi32(lanes.min(8) as i32),
        _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
    )
}

/// Returns the half of each of the 8 words at `from` that is link `link` of the chain.
///
/// # Safety
/// The 8 words must be readable.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn half_256(mut from: *const f32, link: usize) -> std::arch::x86_64::__m256 {
    use std::arch::x86_64::*;
    if link > 0 {
        // Read again for this link: there are too few registers to keep the words, and the compiler
        // would spill sums instead. SAFETY: there is no instruction; the assembly hides from the
        // compiler that the address is the same.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) from, options(pure, readonly, nostack, preserves_flags))
        };
    }
    // SAFETY: guaranteed by the caller.
    let words = unsafe { _mm256_loadu_si256(from.cast()) };
    _mm256_castsi256_ps(match link {
        0 => _mm256_and_si256(words, _mm256_set1_epi32(HIGH as i32)),
        _ => _mm256_slli_epi32::<16>(words),
    })
}

/// Defines a tile in plain code. On targets with a fused multiply-add in their baseline, the
/// compiler vectorizes it.
macro_rules! portable_tile {
    ($name:ident, $links:literal, |$word:ident, $link:ident| $half:expr) => {
        #[allow(clippy::too_many_arguments)]
        unsafe fn $name<const R: usize, const IN_ROWS: bool>(
            start: *const f32,
            stride: usize,
            b: RhsRows<'_>,
            c: *mut f32,
            c_stride: usize,
            columns: usize,
            chain: ChainStart,
        ) {
            // SAFETY: the caller guarantees the extents.
            unsafe {
                let mut sums = [[0.0f32; NR]; R];
                if chain == ChainStart::Resume {
                    for (i, row) in sums.iter_mut().enumerate() {
                        std::ptr::copy_nonoverlapping(
                            c.add(i * c_stride),
                            row.as_mut_ptr(),
                            columns,
                        );
                    }
                }
                let mut a = LhsSteps::<IN_ROWS>::new(start, stride / $links);
                for (start, depth) in b.iter_blocks() {
                    for k in 0..depth {
                        let from = std::slice::from_raw_parts(start.add(k * b.stride), NR);
                        for $link in 0..$links {
                            for (i, row) in sums.iter_mut().enumerate() {
                                let x = a.word(i);
                                for (sum, $word) in row.iter_mut().zip(from) {
                                    *sum = x.mul_add($half, *sum);
                                }
                            }
                            a.step();
                        }
                    }
                }
                for (i, row) in sums.iter().enumerate() {
                    let to = std::slice::from_raw_parts_mut(c.add(i * c_stride), columns);
                    for (to, sum) in to.iter_mut().zip(row) {
                        *to = if chain == ChainStart::Add { *to + sum } else { *sum };
                    }
                }
            }
        }
    };
}

portable_tile!(portable, 1, |word, _link| *word);
portable_tile!(portable_halves, 2, |word, link| split_word(*word)[1 - link]);
