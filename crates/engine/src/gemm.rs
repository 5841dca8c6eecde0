//! Matmul: C = A B or C += A B, with operands in f32 or bf16
//! ([`Precision`](crate::precision::Precision)) and sums in f32. A is the lhs, B the rhs; k is the
//! inner dimension.
//!
//! **Order of operations.** k is divided into blocks of 192 words (`block_words`). For every
//! element of C, each block is one chain of fused multiply-adds from 0 in the order of k (in bf16
//! the later of every two steps comes first). The blocks' sums are added, in order, to the old
//! value of C, or the first is taken as it is. With AMX
//! ([`SumOrder::Tiled`](crate::precision::SumOrder)) a block in bf16 adds 32 steps at a time, see
//! `amx`. Tiles and threads split only rows and columns, and a sum stored in C between two blocks
//! is the same f32 that it would be in a register. So the bits of an element depend only on its row
//! of A, its column of B and its own old value. They do not depend on other rows, the packing, the
//! number of threads, or the instruction set (except for AMX in bf16). Batch invariance
//! (ARCHITECTURE.md) rests on this.
//!
//! Blocks keep chains short and start them at 0 for accuracy: one chain over all of k that started
//! at the residual stream would round every link at the magnitude of the total. (With blocks of 768
//! words the errors of gradients were 2.5 times as large, which was more than PyTorch's. Blocks of
//! 96 words are still more accurate but cost a few percent of the speed.)
//!
//! **Layout.** The rhs is read in *panels* of [`NR`] columns, `[k][NR]`, so that a tile streams
//! through memory. Weights are packed once per update ([`PackedMatrix`]); any other rhs is packed
//! into scratch for each call. The lhs is packed into tiles
//! ([`Kernel::tile_rows`](crate::precision::Kernel::tile_rows)), `[k][rows]`. If no instruction
//! multiplies bf16, its words are split into the links of chains
//! ([`Kernel::links_per_word`](crate::precision::Kernel::links_per_word)); for AMX it has the
//! layout of `amx`. If it is faster to read rows of the lhs in place, they are not packed
//! ([`Kernel::reads_rows`](crate::precision::Kernel::reads_rows)).

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
pub(crate) mod lhs;
mod matrix;
mod micro_kernel;
pub(crate) mod pack;
mod packed;
pub(crate) mod shape;
pub(crate) mod tile;

use std::ops::Range;

use crate::Compute;
use crate::buffer::{Buffer, SharedSlice};
use crate::precision::{Kernel, SumOrder};
use crate::simd::Isa;

pub use matrix::Matrix;
pub use packed::{PackedMatrix, Panels};
pub use shape::{MAX_ROWS, NR};

use lhs::LhsOperand;
use micro_kernel::{MicroKernelArgs, PREFETCH_PARTS};
use pack::{PACK_K, pack_panels, pack_tile};

/// Returns the number of words in a block of k. The length is part of the definition of matmul:
/// short blocks improve accuracy (see above). Tiled sums round seldom enough without short blocks.
const fn block_words(order: SumOrder) -> usize {
    match order {
        SumOrder::Chained => 192,
        SumOrder::Tiled => SLAB,
    }
}

/// Number of words of k that matmul adds up before it stores partial sums in C, a multiple of the
/// block length. It is small, so that the second-level cache holds several panels of B for each
/// tile of A.
pub const SLAB: usize = 768;

/// Maximum number of values of A packed at a time (8 MiB).
pub const SLAB_A: usize = 2 << 20;
/// Maximum number of words of B that a task processes for each tile of A, to stay in the
/// second-level cache: 0.5 MiB, or 1 MiB with AMX, because every processor with AMX has 2 MiB of
/// second-level cache.
const fn max_group_words(order: SumOrder) -> usize {
    match order {
        SumOrder::Chained => 128 << 10,
        SumOrder::Tiled => 256 << 10,
    }
}
/// Returns whether the second-level cache has room for another group of panels, so that the next
/// group can be prefetched.
fn can_prefetch_next_group(kernel: Kernel) -> bool {
    kernel.isa == Isa::Amx && kernel.order() == SumOrder::Chained
}
/// Number of values of C that the caches hold until they are read again (4 MiB). A larger C that is
/// overwritten is written past the caches, which saves reading it.
const CACHED_C: usize = 1 << 20;
/// Minimum number of tiles of A in a chunk: fewer tiles do not justify reading a group of panels.
const MIN_TILES: usize = 8;
/// Maximum number of tiles of A that process weights one panel at a time. A matmul with so few
/// tiles waits for memory, which would be idle while the tiles process a whole group of panels from
/// the second-level cache.
const FEW_TILES: usize = 6;
/// Number of tasks per thread if a matmul is large enough. With several tasks per thread, the last
/// task to finish delays the matmul little.
const TASKS_PER_THREAD: usize = 4;
/// Maximum number of rows for which the calling thread packs A without the pool: waking the pool
/// would take longer.
const SERIAL_ROWS: usize = 16;

/// Right operand of a matmul, K × N.
#[derive(Clone, Copy)]
pub enum RhsOperand<'a> {
    /// A matrix packed in advance, such as weights.
    Packed(&'a PackedMatrix),
    /// A plain matrix, which is packed for each call.
    Plain(Matrix<'a>),
}

/// Whether a matmul overwrites its output C or adds to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputMode {
    /// The product overwrites C.
    Set,
    /// The product is added to C.
    Add,
}

/// Scratch for packed operands, reused between calls.
#[derive(Default)]
pub struct GemmScratch {
    lhs: Buffer,
    rhs: Buffer,
}

/// Computes C = A B, or C += A B. `a` is M × K, `b` is K × N; row i of C starts at `c[i *
/// c_stride]`.
///
/// # Panics
/// Panics if shapes or precisions do not agree, or if C is too short: a bug in the caller.
pub fn gemm(
    compute: &Compute,
    scratch: &mut GemmScratch,
    a: Matrix<'_>,
    b: RhsOperand<'_>,
    c: &mut [f32],
    c_stride: usize,
    mode: OutputMode,
) {
    let m = a.rows;
    let k = a.cols;
    let (depth, n) = match b {
        RhsOperand::Packed(packed) => {
            assert_eq!(packed.precision(), compute.precision, "precision of a packed operand");
            (packed.depth(), packed.columns())
        }
        RhsOperand::Plain(matrix) => (matrix.rows, matrix.cols),
    };
    assert_eq!(k, depth, "inner dimensions of a product");
    if m == 0 || n == 0 {
        return;
    }
    assert!(
        n <= c_stride && (m - 1) * c_stride + n <= c.len(),
        "C holds {} values, not {m} x {n}",
        c.len()
    );
    if k == 0 {
        if mode == OutputMode::Set {
            (0..m).for_each(|i| c[i * c_stride..][..n].fill(0.0));
        }
        return;
    }
    let kernel = compute.kernel();
    let words = kernel.words(k);
    let per_word = kernel.per_word();
    let mr = kernel.tile_rows();
    let block = block_words(kernel.order());
    let in_place = kernel.reads_rows(a);
    let panels = n.div_ceil(NR);
    let c = SharedSlice::new(c);
    // A few rows wait for weights that stream through the caches, and that would evict C.
    let few = m <= FEW_TILES * mr && matches!(b, RhsOperand::Packed(_));
    let holds_more = !few && can_prefetch_next_group(kernel);
    let passes = m * n > CACHED_C || (few && panels * NR * words > max_group_words(kernel.order()));
    let non_temporal = mode == OutputMode::Set && words <= SLAB && passes;

    for w0 in (0..words).step_by(SLAB) {
        let wb = SLAB.min(words - w0);
        let k0 = w0 * per_word;
        let kb = (wb * per_word).min(k - k0);
        let wl = kernel.lhs_depth(wb);
        let slab_rows = (SLAB_A / wl).max(mr) / mr * mr;
        for m0 in (0..m).step_by(slab_rows) {
            let mb = slab_rows.min(m - m0);
            let tiles = mb.div_ceil(mr);
            let lhs =
                SharedSlice::new(scratch.lhs.reserve(if in_place { 0 } else { tiles * mr * wl }));
            // The rhs is packed for the first rows and reused for the other rows.
            let plain = match b {
                RhsOperand::Plain(matrix) if m0 == 0 => Some(matrix),
                _ => None,
            };
            let rhs = SharedSlice::new(match plain {
                Some(_) => scratch.rhs.reserve(panels * NR * wb),
                None => &mut scratch.rhs,
            });
            let slab = OperandSlab { rows: m0..m0 + mb, steps: k0..k0 + kb };
            pack_slab(compute, &slab, (!in_place).then_some((a, &lhs)), plain.map(|b| (b, &rhs)));

            // A task processes a group of panels for each tile of a chunk, so that rows of C are
            // written in long pieces. Few tiles make one chunk.
            let threads = compute.pool.threads();
            // The stream of weights is interrupted at the end of each task, so few rows make one
            // task per thread.
            let num_tasks = threads * if few { 1 } else { TASKS_PER_THREAD };
            let max_chunks = tiles.div_ceil(MIN_TILES);
            let group = (panels * max_chunks / num_tasks)
                .min(max_group_words(kernel.order()) / (NR * wb))
                .max(1);
            // The same number for every thread, if there are enough panels.
            let groups = panels.div_ceil(group).next_multiple_of(threads).min(panels);
            let chunk = tiles.div_ceil(num_tasks.div_ceil(groups).min(max_chunks));
            let chunks = tiles.div_ceil(chunk);
            let add = mode == OutputMode::Add || w0 > 0;
            compute.pool.run(chunks * groups, |task| {
                // Neighboring tasks share a group of panels. If there is only one chunk, each
                // thread processes neighboring groups: what a strip prefetches is what the thread
                // reads next.
                let (group_at, chunk_at) = match chunks {
                    1 => (contiguous_group_index(task, groups, threads), 0),
                    _ => (task / chunks, task % chunks),
                };
                let tiles = chunk_at * chunk..tiles.min((chunk_at + 1) * chunk);
                let group = panels * group_at / groups..panels * (group_at + 1) / groups;
                let (first_panel, distance) = match b {
                    RhsOperand::Packed(packed) => {
                        (packed.panel(group.start)[w0 * NR..].as_ptr(), packed.panel_distance())
                    }
                    RhsOperand::Plain(_) => {
                        (rhs.pointer(group.start * NR * wb).cast_const(), NR * wb)
                    }
                };
                let run_tile = |tile_at: usize, these: Range<usize>, shared: bool| {
                    let first = tile_at * mr;
                    let is_first_tile = tile_at == tiles.start;
                    let tiles_left = tiles.end - tile_at;
                    let rows = mr.min(mb - first);
                    let from = if in_place {
                        LhsOperand::from_rows(
                            a.submatrix(m0 + first..m0 + first + rows, k0..k0 + kb),
                        )
                    } else {
                        LhsOperand::from_packed(kernel, lhs.pointer(first * wl), rows)
                    };
                    let args = MicroKernelArgs {
                        rows,
                        lhs: from,
                        words: wb,
                        panels: first_panel.wrapping_add((these.start - group.start) * distance),
                        distance,
                        columns: n.min(these.end * NR) - these.start * NR,
                        shared,
                        non_temporal,
                        // Prefetches what is read from farther away next: another panel during the
                        // first tile, then another tile.
                        next: (!is_first_tile).then_some((mr, wl)),
                        prefetch_part: (holds_more
                            && !is_first_tile
                            && tiles_left <= PREFETCH_PARTS)
                            .then(|| PREFETCH_PARTS - tiles_left),
                    };
                    // SAFETY: the operands hold these words; rows and columns of C are within its
                    // bounds (asserted above), and no other task has this part of C.
                    unsafe {
                        let c = c.pointer((m0 + first) * c_stride + these.start * NR);
                        args.multiply(kernel, block, c, c_stride, add);
                    }
                };
                if few {
                    group.clone().for_each(|at| {
                        tiles.clone().for_each(|tile| run_tile(tile, at..at + 1, false))
                    });
                } else {
                    tiles.clone().for_each(|tile| run_tile(tile, group.clone(), tiles.len() > 1));
                }
                if non_temporal {
                    MicroKernelArgs::store_fence();
                }
            });
        }
    }
}

/// Maps a task number to the index of the group of panels that the task processes. If `threads`
/// threads take the `tasks` tasks round-robin, each thread processes a contiguous run of groups.
fn contiguous_group_index(task: usize, tasks: usize, threads: usize) -> usize {
    // The first threads have one task more if the tasks do not divide evenly.
    let thread = task % threads;
    let each = tasks / threads;
    let more = tasks % threads;
    thread * each + thread.min(more) + task / threads
}

/// Part of a matmul whose operands are packed together: some rows of A, and all columns of B, for
/// some steps of k.
struct OperandSlab {
    rows: Range<usize>,
    steps: Range<usize>,
}

/// Packs a slab of A (`lhs`) into tiles, a slab of B (`rhs`) into panels, or both. Each operand
/// comes with its destination; `None` skips the operand.
fn pack_slab(
    compute: &Compute,
    slab: &OperandSlab,
    lhs: Option<(Matrix<'_>, &SharedSlice<'_>)>,
    rhs: Option<(Matrix<'_>, &SharedSlice<'_>)>,
) {
    let kernel = compute.kernel();
    let mr = kernel.tile_rows();
    let m0 = slab.rows.start;
    let mb = slab.rows.len();
    let k0 = slab.steps.start;
    let kb = slab.steps.len();
    let wl = kernel.lhs_depth(kernel.words(kb));
    let a_group = lhs.map_or(1, |(a, _)| a.transposed().columns_together(mr));
    let b_group = rhs.map_or(1, |(b, _)| b.columns_together(NR));
    let tiles = lhs.map_or(0, |_| mb.div_ceil(mr));
    let panels = rhs.map_or(0, |(b, _)| b.cols.div_ceil(NR));
    let rhs_tasks = panels.div_ceil(b_group);
    let pack = |task: usize| {
        if let Some((b, to)) = rhs
            && task < rhs_tasks
        {
            let group = task * b_group..panels.min((task + 1) * b_group);
            // SAFETY: each panel is packed by one task.
            unsafe { pack_panels(kernel, b, group, slab.steps.clone(), to) };
        } else if let Some((a, to)) = lhs {
            let task = task - rhs_tasks;
            let group = task * a_group..tiles.min((task + 1) * a_group);
            let step = if group.len() > 1 { PACK_K } else { kb };
            for at in (0..kb).step_by(step) {
                let depth = step.min(kb - at);
                for tile in group.clone() {
                    let first = tile * mr;
                    let rows = mr.min(mb - first);
                    let start = first * wl + kernel.lhs_words(rows, at);
                    // SAFETY: each tile is packed by one task.
                    let to = unsafe { to.slice(start, kernel.lhs_words(rows, depth)) };
                    pack_tile(kernel, a, m0 + first, rows, k0 + at, depth, to);
                }
            }
        }
    };
    let tasks = rhs_tasks + tiles.div_ceil(a_group);
    if mb <= SERIAL_ROWS && rhs_tasks == 0 {
        (0..tasks).for_each(pack);
    } else if tasks > 0 {
        compute.pool.run(tasks, pack);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::precision::{Precision, round_to_bf16};

    fn noise(len: usize, seed: u64) -> Vec<f32> {
        (0..len as u64).map(|i| levade_policy::uniform(seed, 0, i) as f32 - 0.5).collect()
    }

    /// The definition: the sum of every block, with the blocks added in order.
    fn multiply_by_definition(
        kernel: Kernel,
        a: Matrix<'_>,
        b: Matrix<'_>,
        c: &mut [f32],
        stride: usize,
        mode: OutputMode,
    ) {
        let round = |x: f32| if kernel.precision == Precision::Bf16 { round_to_bf16(x) } else { x };
        let steps: Vec<usize> = (0..a.cols).collect();
        for i in 0..a.rows {
            for j in 0..b.cols {
                let chain = |steps: &mut dyn Iterator<Item = &usize>| {
                    steps.fold(0.0f32, |sum, &k| {
                        round(a.element(i, k)).mul_add(round(b.element(k, j)), sum)
                    })
                };
                let sums =
                    steps.chunks(block_words(kernel.order()) * kernel.per_word()).map(|steps| {
                        match kernel.order() {
                            SumOrder::Chained => chain(
                                &mut steps
                                    .chunks(kernel.per_word())
                                    .flat_map(|word| word.iter().rev()),
                            ),
                            SumOrder::Tiled => steps.chunks(32).fold(0.0, |sum, steps| {
                                sum + (chain(&mut steps.iter().step_by(2))
                                    + chain(&mut steps.iter().skip(1).step_by(2)))
                            }),
                        }
                    });
                let old = (mode == OutputMode::Add).then_some(c[i * stride + j]);
                c[i * stride + j] = old.into_iter().chain(sums).reduce(|a, b| a + b).unwrap_or(0.0);
            }
        }
    }

    fn all_computes(threads: usize) -> Vec<Compute> {
        let both = [Precision::F32, Precision::Bf16];
        Isa::available()
            .into_iter()
            .flat_map(|isa| both.map(|precision| Compute::with_isa(threads, isa, precision)))
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        /// Every code path gives the bits of the definition, for all shapes, transpositions and
        /// numbers of threads.
        #[test]
        fn matmul_matches_definition_bitwise(
            m in 1usize..40, n in 1usize..80, k in 1usize..1100,
            a_t in any::<bool>(), b_t in any::<bool>(), add in any::<bool>(), threads in 1usize..3, seed in any::<u64>(),
        ) {
            let (a_data, b_data) = (noise(m * k, seed), noise(k * n, seed ^ 1));
            let a = if a_t { Matrix::new(&a_data, k, m).transposed() } else { Matrix::new(&a_data, m, k) };
            let b = if b_t { Matrix::new(&b_data, n, k).transposed() } else { Matrix::new(&b_data, k, n) };
            let mode = if add { OutputMode::Add } else { OutputMode::Set };
            let stride = n + 3;
            let start = noise(m * stride, seed ^ 2);
            for compute in all_computes(threads) {
                let kernel = compute.kernel();
                let mut expected = start.clone();
                multiply_by_definition(kernel, a, b, &mut expected, stride, mode);
                let mut scratch = GemmScratch::default();
                let packed = PackedMatrix::new(&compute, b);
                for right in [RhsOperand::Plain(b), RhsOperand::Packed(&packed)] {
                    let mut c = start.clone();
                    gemm(&compute, &mut scratch, a, right, &mut c, stride, mode);
                    prop_assert!(c.iter().zip(&expected).all(|(x, y)| x.to_bits() == y.to_bits()), "{kernel:?}");
                }
            }
        }
    }

    /// The last case has few rows and more weights than the caches hold.
    #[test]
    fn matmul_across_slabs_matches_definition() {
        for (m, n, k) in [(3, 40, 9001), (5000, 33, 450), (40, 1040, 600)] {
            let a_data = noise(m * k, 5);
            let b_data = noise(k * n, 6);
            let a = Matrix::new(&a_data, m, k);
            let b = Matrix::new(&b_data, k, n);
            for precision in [Precision::F32, Precision::Bf16] {
                let compute = Compute::with_isa(2, Isa::detect(), precision);
                let mut expected = vec![0.0; m * n];
                multiply_by_definition(compute.kernel(), a, b, &mut expected, n, OutputMode::Set);
                let packed = PackedMatrix::new(&compute, b);
                for rhs in [RhsOperand::Plain(b), RhsOperand::Packed(&packed)] {
                    // Full cache lines, because only these are written past the caches.
                    let mut c = Buffer::zeroed(m * n);
                    c.fill(1.0);
                    gemm(&compute, &mut GemmScratch::default(), a, rhs, &mut c, n, OutputMode::Set);
                    assert!(
                        c.iter().zip(&expected).all(|(x, y)| x.to_bits() == y.to_bits()),
                        "{precision}"
                    );
                }
            }
        }
    }

    /// Round-robin threads each process a contiguous run, and no task is left out.
    #[test]
    fn round_robin_threads_process_contiguous_groups() {
        for (tasks, threads) in [(18, 2), (55, 2), (3, 4), (1, 1), (64, 5)] {
            let indices: Vec<usize> =
                (0..tasks).map(|task| contiguous_group_index(task, tasks, threads)).collect();
            let of_threads =
                (0..threads).flat_map(|thread| indices.iter().skip(thread).step_by(threads));
            assert!(
                of_threads.copied().eq(0..tasks),
                "{tasks} tasks, {threads} threads: {indices:?}"
            );
        }
    }

    /// A C too large for the caches has the bits of a C computed in parts, for all alignments of
    /// its rows.
    #[test]
    fn large_matmul_matches_its_parts() {
        let m = 1030;
        let n = 1040;
        let k = 40;
        let a_data = noise(m * k, 1);
        let b_data = noise(k * n, 2);
        let b = RhsOperand::Plain(Matrix::new(&b_data, k, n));
        assert!(m * n > CACHED_C);
        for (compute, stride) in
            all_computes(2).iter().flat_map(|compute| [(compute, n), (compute, n + 3)])
        {
            let run = |a: &[f32], c: &mut [f32]| {
                let a = Matrix::new(a, a.len() / k, k);
                gemm(compute, &mut GemmScratch::default(), a, b, c, stride, OutputMode::Set);
            };
            let [mut full, mut parts] = [(); 2].map(|()| Buffer::zeroed(m * stride));
            run(&a_data, &mut full);
            for (a, c) in a_data.chunks(500 * k).zip(parts.chunks_mut(500 * stride)) {
                run(a, c);
            }
            let same = full.iter().zip(&parts[..]).all(|(x, y)| x.to_bits() == y.to_bits());
            assert!(same && full[0] != 0.0, "{:?}, rows of {stride}", compute.kernel());
        }
    }
}
