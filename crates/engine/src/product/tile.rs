//! The innermost loop of a product: one tile of C, up to [`MR`] rows by [`NR`] columns, over a block of k.

use crate::simd::Isa;

/// Rows of a tile. 12 × 32 accumulators fill 24 of the 32 AVX-512 registers.
pub const MR: usize = 12;
/// Columns of a tile and width of a panel: two AVX-512 registers, four AVX2 ones.
pub const NR: usize = 32;

/// Asks for the two cache lines of a row of a tile, to be added to soon. Does nothing where there is no such instruction.
#[inline(always)]
pub fn prefetch(row: *mut f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch accesses nothing; any address will do.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_ET0>(row.cast());
        _mm_prefetch::<_MM_HINT_ET0>(row.wrapping_add(NR / 2).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = row;
}

/// The right operand of a tile: `depth` rows of [`NR`] values, `stride` apart, in one piece or in blocks of `block` rows
/// that lie anywhere.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// Where each block starts.
    pub blocks: &'a [*const f32],
    /// Rows of a block; the last one may have fewer.
    pub block: usize,
    /// Rows in all.
    pub depth: usize,
    /// Distance between rows of a block.
    pub stride: usize,
}

impl Rows<'_> {
    /// Start and number of rows of each block.
    #[inline(always)]
    fn pieces(&self) -> impl Iterator<Item = (*const f32, usize)> + '_ {
        let (block, depth) = (self.block, self.depth);
        self.blocks.iter().enumerate().map(move |(i, start)| (*start, block.min(depth - i * block)))
    }
}

/// `C[i][j] = Σ_k A[k][i] B[k][j]`, one chain from 0 in the order of k, or, with `add`, that sum added to what C held; for i below
/// `rows` and j below `columns`. The chain does not begin at C: C can be large, and every link would round at its size.
/// Row k of A starts `a_stride` values after the one before, row i of C `c_stride` after.
///
/// # Safety
/// All pointers must cover these extents; C must not be accessed by others meanwhile. `isa` must be available.
#[allow(clippy::too_many_arguments)]
pub unsafe fn tile(
    isa: Isa,
    rows: usize,
    a: *const f32,
    a_stride: usize,
    b: Rows<'_>,
    c: *mut f32,
    c_stride: usize,
    columns: usize,
    add: bool,
) {
    debug_assert!((1..=MR).contains(&rows) && (1..=NR).contains(&columns));
    /// Calls `$kernel::<R>` for the number of rows at hand.
    macro_rules! by_rows {
        ($kernel:ident, $rows:expr, $a:expr, $c:expr, [$($r:literal)*]) => {
            match $rows {
                // SAFETY: forwarded from the caller.
                $($r => unsafe { $kernel::<$r>($a, a_stride, b, $c, c_stride, columns, add) },)*
                _ => unreachable!("a tile of {} rows", $rows),
            }
        };
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => by_rows!(avx512, rows, a, c, [1 2 3 4 5 6 7 8 9 10 11 12]),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            // 6 rows at a time: 6 × 16 accumulators fill 12 of the 16 AVX2 registers.
            for first in (0..rows).step_by(6) {
                // SAFETY: stays within the tile.
                let (a, c) = unsafe { (a.add(first), c.add(first * c_stride)) };
                by_rows!(avx2, (rows - first).min(6), a, c, [1 2 3 4 5 6]);
            }
        }
        _ => by_rows!(portable, rows, a, c, [1 2 3 4 5 6 7 8 9 10 11 12]),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[allow(clippy::too_many_arguments)]
unsafe fn avx512<const R: usize>(
    mut a: *const f32,
    a_stride: usize,
    b: Rows<'_>,
    c: *mut f32,
    c_stride: usize,
    columns: usize,
    add: bool,
) {
    use std::arch::x86_64::*;
    let mask = |lanes: usize| -> __mmask16 { ((1u32 << lanes.min(16)) - 1) as u16 };
    let masks = [mask(columns), mask(columns.saturating_sub(16))];
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    // SAFETY: the caller vouches for the extents; masked-off lanes are not accessed.
    unsafe {
        for (mut from, depth) in b.pieces() {
            for _ in 0..depth {
                let b0 = _mm512_loadu_ps(from);
                let b1 = _mm512_loadu_ps(from.add(16));
                for (i, row) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*a.add(i));
                    row[0] = _mm512_fmadd_ps(x, b0, row[0]);
                    row[1] = _mm512_fmadd_ps(x, b1, row[1]);
                }
                a = a.wrapping_add(a_stride);
                from = from.wrapping_add(b.stride);
            }
        }
        for (i, row) in sums.iter().enumerate() {
            for (half, &sum) in row.iter().enumerate() {
                let to = c.wrapping_add(i * c_stride + half * 16);
                let sum = if add { _mm512_add_ps(_mm512_maskz_loadu_ps(masks[half], to), sum) } else { sum };
                _mm512_mask_storeu_ps(to, masks[half], sum);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
#[allow(clippy::too_many_arguments)]
unsafe fn avx2<const R: usize>(
    a: *const f32,
    a_stride: usize,
    b: Rows<'_>,
    c: *mut f32,
    c_stride: usize,
    columns: usize,
    add: bool,
) {
    use std::arch::x86_64::*;
    // SAFETY: the caller vouches for the extents; rows of C are copied by their valid columns only.
    unsafe {
        for half in (0..columns).step_by(16) {
            let width = (columns - half).min(16);
            let mut sums = [[_mm256_setzero_ps(); 2]; R];
            let mut row_copy = [0.0f32; 16];
            let mut a = a;
            for (start, depth) in b.pieces() {
                let mut from = start.add(half);
                for _ in 0..depth {
                    let b0 = _mm256_loadu_ps(from);
                    let b1 = _mm256_loadu_ps(from.add(8));
                    for (i, row) in sums.iter_mut().enumerate() {
                        let x = _mm256_set1_ps(*a.add(i));
                        row[0] = _mm256_fmadd_ps(x, b0, row[0]);
                        row[1] = _mm256_fmadd_ps(x, b1, row[1]);
                    }
                    a = a.wrapping_add(a_stride);
                    from = from.wrapping_add(b.stride);
                }
            }
            for (i, row) in sums.iter().enumerate() {
                let to = c.add(i * c_stride + half);
                if add {
                    std::ptr::copy_nonoverlapping(to, row_copy.as_mut_ptr(), width);
                }
                for (part, &sum) in row.iter().enumerate() {
                    let at = row_copy.as_mut_ptr().add(8 * part);
                    _mm256_storeu_ps(at, if add { _mm256_add_ps(_mm256_loadu_ps(at), sum) } else { sum });
                }
                std::ptr::copy_nonoverlapping(row_copy.as_ptr(), to, width);
            }
        }
    }
}

/// The definition, in plain code; on processors with a fused multiply-add in their baseline the compiler vectorises it.
#[allow(clippy::too_many_arguments)]
unsafe fn portable<const R: usize>(
    a: *const f32,
    a_stride: usize,
    b: Rows<'_>,
    c: *mut f32,
    c_stride: usize,
    columns: usize,
    add: bool,
) {
    // SAFETY: the caller vouches for the extents.
    unsafe {
        let mut sums = [[0.0f32; NR]; R];
        let mut a = a;
        for (start, depth) in b.pieces() {
            for k in 0..depth {
                let from = std::slice::from_raw_parts(start.add(k * b.stride), NR);
                for (i, row) in sums.iter_mut().enumerate() {
                    let x = *a.add(i);
                    for (sum, y) in row.iter_mut().zip(from) {
                        *sum = x.mul_add(*y, *sum);
                    }
                }
                a = a.wrapping_add(a_stride);
            }
        }
        for (i, row) in sums.iter().enumerate() {
            let to = std::slice::from_raw_parts_mut(c.add(i * c_stride), columns);
            for (to, sum) in to.iter_mut().zip(row) {
                *to = if add { *to + sum } else { *sum };
            }
        }
    }
}
