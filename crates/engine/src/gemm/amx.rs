//! Computes tiles of a matmul with AMX: matrix registers of 16 rows by 16 words, and an instruction
//! that multiplies two of them and adds the result to a third, 16 times as fast as AVX-512.
//!
//! **Order of operations** ([`SumOrder::Tiled`](crate::precision::SumOrder)). k is divided into
//! steps of [`STEP`] words, 32 bf16. In every step, the even and the odd values of k are one chain
//! of fused multiply-adds each, from 0. The two are added, and their sum is added to the sum of the
//! steps before (Intel's manual for TDPBF16PS; the test of matmul checks the processor). Zeros past
//! the end of k change nothing. A run uses this order for every matmul in bf16 or for none, so
//! batch invariance holds; but a run in bf16 has other bits with AMX than without.
//!
//! The rhs is in the panels that all kernels read. The lhs is packed in rows: `[words /
//! 16][rows][16]`, with rows padded to 16 or 32 by arbitrary values, because their results are not
//! used.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::{Cell, RefCell};

use super::matrix::Matrix;
use super::micro_kernel::MicroKernelArgs;
use super::shape::{ChainStart, HALF, MAX_ROWS, NR, RhsRows, STEP};
use crate::precision::pack_words;

/// Number of words of k for which a tile of A stays in the first-level cache of 48 KiB, which
/// panels bypass: 36 KiB.
const L1_WORDS: usize = 288;
/// Number of words of k for which a tile of A stays in the first-level cache if panels come from
/// memory and are prefetched into this cache first: 18 KiB, in addition to an equal part of a
/// panel.
const L1_WORDS_WITH_PANEL: usize = 144;
/// Minimum number of panels for which storing partial sums pays.
const MIN_PANELS: usize = 4;

const _: () =
    assert!(MAX_ROWS == 2 * HALF && NR == 2 * STEP, "a tile is two matrix registers high and wide");

/// Operand of the instruction LDTILECFG: the number of bytes per row, and of rows, of each AMX
/// register.
#[repr(C, align(64))]
struct TileConfiguration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Configures eight full AMX registers, once per thread: the configuration takes as long as a small
/// tile, and nothing else in this program uses the registers.
#[inline(always)]
fn configure_tile_registers() {
    thread_local! {
        static DONE: Cell<bool> = const { Cell::new(false) };
    }
    if !DONE.get() {
        let mut row_bytes = [0; 16];
        let mut rows = [0; 16];
        row_bytes[..8].fill(4 * STEP as u16);
        rows[..8].fill(HALF as u8);
        let configuration =
            TileConfiguration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: AMX is available, or this instruction set would not be selected; the
        // configuration is valid.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, readonly))
        };
        DONE.set(true);
    }
}

/// Contiguous steps of a matmul's rhs: address of the first row, bytes between rows, number of
/// steps.
#[derive(Clone, Copy)]
#[repr(C)]
struct StepRun {
    start: *const f32,
    stride: usize,
    steps: usize,
}

/// Location from which a tile reads its right operand (rhs).
#[derive(Clone, Copy)]
enum RhsSource {
    /// The rhs comes from memory. Data that is read soon is prefetched into the first-level cache.
    Memory,
    /// The rhs is in blocks that were read before. Nothing is prefetched.
    Blocks,
    /// The rhs is in the second-level cache. This leaves time to prefetch the rows of C that come
    /// after this tile, `c_stride` values apart. `c` is their address, or `None` if the tile's sums
    /// are not complete.
    Fetched { c: Option<*mut f32>, c_stride: usize },
}

/// Scratch of a thread: the runs of a matmul, the last step if k ends within it, and the sums of
/// tiles.
struct AmxScratch {
    runs: Vec<StepRun>,
    last: AlignedRows<STEP>,
    sums: Vec<AlignedRows<MAX_ROWS>>,
}

/// Rows of [`NR`] values: the rows of a panel or of a tile.
#[derive(Clone)]
#[repr(align(64))]
struct AlignedRows<const N: usize>([[f32; NR]; N]);

thread_local! {
    static SCRATCH: RefCell<AmxScratch> = const {
        RefCell::new(AmxScratch {
            runs: Vec::new(),
            last: AlignedRows([[0.0; NR]; STEP]),
            sums: Vec::new(),
        })
    };
}

/// Multiplies a tile like [`tile`](super::tile::tile), with `a` packed by [`pack_lhs`]. All blocks
/// of `b` except the last must hold full steps.
///
/// # Safety
/// The requirements of [`tile`](super::tile::tile) apply, and AMX must be available.
#[target_feature(enable = "avx512f")]
pub unsafe fn tile(
    rows: usize,
    a: *const f32,
    b: RhsRows<'_>,
    c: *mut f32,
    c_stride: usize,
    columns: usize,
    chain: ChainStart,
) {
    debug_assert!(b.blocks.len() < 2 || b.block.is_multiple_of(STEP));
    configure_tile_registers();
    SCRATCH.with_borrow_mut(|AmxScratch { runs, last, sums }| {
        // SAFETY: the caller guarantees the extents.
        unsafe {
            list_runs(b, runs, last);
            if rows.is_multiple_of(HALF) && columns == NR && chain == ChainStart::Set {
                // Storing a matrix register waits for the cache lines of its destination.
                for i in 0..rows {
                    let row = c.wrapping_add(i * c_stride);
                    _mm_prefetch::<_MM_HINT_T0>(row.cast());
                    _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(NR / 2).cast());
                }
                multiply(rows, a, runs, (b.ahead.near, RhsSource::Blocks), (c, c_stride), false);
            } else {
                let sums = reserve_sums(sums, 1);
                let resumes = chain == ChainStart::Resume;
                for i in 0..if resumes { rows } else { 0 } {
                    std::ptr::copy_nonoverlapping(c.add(i * c_stride), sums.add(i * NR), columns);
                }
                multiply(rows, a, runs, (b.ahead.near, RhsSource::Blocks), (sums, NR), resumes);
                store_sums(rows, sums, c, c_stride, columns, chain == ChainStart::Add, false);
            }
        }
    });
}

/// Multiplies like [`MicroKernelArgs::multiply`] with its lhs at `a`, all words in one block.
///
/// # Safety
/// The requirements of [`MicroKernelArgs::multiply`] apply, and AMX must be available.
#[target_feature(enable = "avx512f")]
pub unsafe fn micro_kernel(
    args: MicroKernelArgs,
    a: *const f32,
    c: *mut f32,
    c_stride: usize,
    add: bool,
) {
    configure_tile_registers();
    // Processes a part of k for all panels, then the next part, so that the part of A stays in the
    // first-level cache. This pays if there are several panels and several tiles share them. The
    // first of these tiles finds the panels in memory, the other tiles in the second-level cache.
    let fetched = args.next.is_some();
    let parts = if args.shared && args.num_panels() >= MIN_PANELS {
        args.words.div_ceil(if fetched { L1_WORDS } else { L1_WORDS_WITH_PANEL })
    } else {
        1
    };
    let part = args.words.div_ceil(parts).next_multiple_of(STEP);
    let a_step = args.rows.next_multiple_of(HALF);
    SCRATCH.with_borrow_mut(|AmxScratch { runs, last, sums }| {
        // Sums of a panel that is not complete are stored here.
        let (sums, sums_stride) = match parts {
            1 => (reserve_sums(sums, 1), 0),
            _ => (reserve_sums(sums, args.num_panels()), MAX_ROWS * NR),
        };
        for at in (0..args.words).step_by(part) {
            let depth = part.min(args.words - at);
            for panel in 0..args.num_panels() {
                let start = [args.panel(panel, at)];
                let ahead = args.prefetch_target(panel, at, depth);
                let sums = sums.wrapping_add(panel * sums_stride);
                let done = at + depth == args.words;
                let source = if fetched {
                    let c =
                        (done && !args.non_temporal).then(|| args.next_output(panel, c, c_stride));
                    RhsSource::Fetched { c, c_stride }
                } else {
                    RhsSource::Memory
                };
                // SAFETY: the caller guarantees the extents.
                unsafe {
                    list_runs(
                        RhsRows { blocks: &start, block: depth, depth, stride: NR, ahead },
                        runs,
                        last,
                    );
                    multiply(
                        args.rows,
                        a.wrapping_add(at * a_step),
                        runs,
                        (ahead.near, source),
                        (sums, NR),
                        at > 0,
                    );
                    if done {
                        let c = c.wrapping_add(panel * NR);
                        store_sums(
                            args.rows,
                            sums,
                            c,
                            c_stride,
                            args.panel_columns(panel),
                            add,
                            args.non_temporal,
                        );
                    }
                }
            }
        }
    });
}

/// Grows `sums` to hold the sums of `tiles` tiles, and returns its address.
fn reserve_sums(sums: &mut Vec<AlignedRows<MAX_ROWS>>, tiles: usize) -> *mut f32 {
    if sums.len() < tiles {
        sums.resize(tiles, AlignedRows([[0.0; NR]; MAX_ROWS]));
    }
    sums.as_mut_ptr().cast()
}

/// Writes the contiguous runs of the rhs `b` to `runs`. If a block ends within a step, `last`
/// receives this step, padded with zeros.
///
/// # Safety
/// The blocks must cover their extents.
unsafe fn list_runs(b: RhsRows<'_>, runs: &mut Vec<StepRun>, last: &mut AlignedRows<STEP>) {
    runs.clear();
    for (start, depth) in b.iter_blocks() {
        let steps = depth / STEP;
        let rest = depth % STEP;
        if steps > 0 {
            runs.push(StepRun { start, stride: 4 * b.stride, steps });
        }
        if rest > 0 {
            for (i, row) in last.0.iter_mut().enumerate() {
                if i < rest {
                    let from = start.wrapping_add((steps * STEP + i) * b.stride);
                    // SAFETY: within the block; a row of a panel has NR words.
                    unsafe { std::ptr::copy_nonoverlapping(from, row.as_mut_ptr(), NR) };
                } else {
                    row.fill(0.0);
                }
            }
            runs.push(StepRun { start: last.0.as_ptr().cast(), stride: 4 * NR, steps: 1 });
        }
    }
}

/// Computes `sums[i][j] = Σ_k A[i][k] B[k][j]` for all 16 or 32 rows and NR columns, with rows
/// `stride` values apart. With `resume`, the chain continues from the old value of `sums`. `ahead`
/// is prefetched into the second-level cache.
///
/// # Safety
/// `a` must cover as many steps as the runs have, and `sums` all rows.
#[inline(always)]
unsafe fn multiply(
    rows: usize,
    a: *const f32,
    runs: &[StepRun],
    (ahead, source): (*const f32, RhsSource),
    (sums, stride): (*mut f32, usize),
    resume: bool,
) {
    // Rows of C to prefetch; if there are none, the sums, which are in the cache already.
    let (c, c_stride) = match source {
        RhsSource::Fetched { c: Some(c), c_stride } => (c, c_stride),
        _ => (sums, 0),
    };
    /// Sums are in registers 0 to 3, the lhs in 4 and 5, the rhs in 6 and 7. The last arguments are
    /// the number of bytes by which a step advances the lhs, and what a step prefetches.
    macro_rules! multiply {
        (
            [$($zero:expr),*] [$($load:expr),*] [$($step:expr),*] [$($store:expr),*] $advance:literal [$($fetch:expr),*]
        ) => {
            asm!(
                "test {steps}, {steps}",
                "jnz 5f",
                $($zero,)*
                "jmp 6f",
                "5:",
                $($load,)*
                "6:",
                "test {n}, {n}",
                "jz 4f",
                "2:",
                "mov {b}, [{runs}]",
                "mov {stride}, [{runs} + 8]",
                "mov {steps}, [{runs} + 16]",
                "mov {further}, {stride}",
                "shl {further}, 4",
                "3:",
                $($step,)*
                concat!("add {a}, ", $advance),
                $($fetch,)*
                "add {b}, {further}",
                "dec {steps}",
                "jnz 3b",
                "add {runs}, 24",
                "dec {n}",
                "jnz 2b",
                "4:",
                "# not used by all: {lower} {c} {c_line} {ahead}",
                $($store,)*
                n = inout(reg) runs.len() => _,
                runs = inout(reg) runs.as_ptr() => _,
                a = inout(reg) a => _,
                line = in(reg) 4 * STEP,
                b = out(reg) _,
                stride = out(reg) _,
                steps = inout(reg) usize::from(resume) => _,
                further = out(reg) _,
                ahead = inout(reg) ahead => _,
                sums = in(reg) sums,
                // Rows from the 16th on.
                lower = in(reg) sums.wrapping_add(HALF * stride),
                sums_line = in(reg) 4 * stride,
                c = inout(reg) c => _,
                c_line = in(reg) 4 * c_stride,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }
    /// With 32 rows. The arguments are how the rhs and the sums are loaded, and what a step
    /// prefetches.
    macro_rules! tall {
        ($load:literal [$($fetch:expr),*]) => {
            multiply!(
                ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"]
                [
                    concat!($load, " tmm0, [{sums} + {sums_line}]"),
                    concat!($load, " tmm1, [{sums} + {sums_line} + 64]"),
                    concat!($load, " tmm2, [{lower} + {sums_line}]"),
                    concat!($load, " tmm3, [{lower} + {sums_line} + 64]")
                ]
                [
                    "tileloadd tmm4, [{a} + {line}]",
                    concat!($load, " tmm6, [{b} + {stride}]"),
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    concat!($load, " tmm7, [{b} + {stride} + 64]"),
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{a} + {line} + 1024]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7"
                ]
                [
                    "tilestored [{sums} + {sums_line}], tmm0",
                    "tilestored [{sums} + {sums_line} + 64], tmm1",
                    "tilestored [{lower} + {sums_line}], tmm2",
                    "tilestored [{lower} + {sums_line} + 64], tmm3"
                ]
                "2048"
                [$($fetch),*]
            )
        };
    }
    /// With up to 16 rows. The argument is what a step prefetches.
    macro_rules! low {
        ([$($fetch:expr),*]) => {
            multiply!(
                ["tilezero tmm0", "tilezero tmm1"]
                ["tileloadd tmm0, [{sums} + \
                  {sums_line}]", "tileloadd tmm1, [{sums} + {sums_line} \
                                                            + 64]"]
                [
                    "tileloadd tmm4, [{a} + {line}]",
                    "tileloadd tmm6, [{b} + {stride}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b} + {stride} + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7"
                ]
                ["tilestored [{sums} + {sums_line}], \
                  tmm0", "tilestored [{sums} + {sums_line} + \
                                                             64], tmm1"]
                "1024"
                [$($fetch),*]
            )
        };
    }
    /// Prefetches the step of a panel after this step into the second-level cache. Farther ahead is
    /// slower: the processor does not follow another page.
    macro_rules! coming {
        () => {
            concat!(
                ".irp line, 0, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 832, \
                 896, 960\n",
                "prefetcht1 [{b} + 2048 + \\line]\n",
                "prefetcht1 [{b} + 3072 + \\line]\n",
                ".endr"
            )
        };
    }
    /// Prefetches a part of the data that is read later.
    macro_rules! afar {
        () => {
            concat!(
                ".irp line, 0, 64, 128, 192\n",
                "prefetcht1 [{ahead} + \\line]\n",
                ".endr\n",
                "add {ahead}, 256"
            )
        };
    }
    // SAFETY: forwarded from the caller.
    unsafe {
        match source {
            RhsSource::Memory if rows <= HALF => low!([coming!()]),
            _ if rows <= HALF => low!([]),
            RhsSource::Blocks => tall!("tileloadd"[afar!()]),
            RhsSource::Memory => tall!("tileloadd"[coming!()]),
            // Loads that leave the first-level cache to A. Two rows of C per step: they are rarely
            // in the cache, and a matmul waits for them even to overwrite them.
            RhsSource::Fetched { .. } => tall!("tileloaddt1" [
                "prefetcht1 [{c}]",
                "prefetcht1 [{c} + 64]",
                "add {c}, {c_line}",
                "prefetcht1 [{c}]",
                "prefetcht1 [{c} + 64]",
                "add {c}, {c_line}",
                afar!()
            ]),
        }
    }
}

/// Writes the first `rows` rows and `columns` columns of `sums` to C, or adds them to C if `add` is
/// true. With `non_temporal`, full lines that are overwritten are written past the caches.
///
/// # Safety
/// C must have these rows and columns.
#[target_feature(enable = "avx512f")]
unsafe fn store_sums(
    rows: usize,
    sums: *const f32,
    c: *mut f32,
    c_stride: usize,
    columns: usize,
    add: bool,
    non_temporal: bool,
) {
    let non_temporal = non_temporal
        && !add
        && columns == NR
        && (c as usize).is_multiple_of(64)
        && c_stride.is_multiple_of(16);
    let masks =
        [columns, columns.saturating_sub(16)].map(|n| ((1u32 << n.min(16)) - 1) as __mmask16);
    for i in 0..rows {
        // SAFETY: row i of the sums and of C; masked-off lanes are not accessed.
        unsafe {
            let from = sums.add(i * NR);
            let to = c.add(i * c_stride);
            let mut low = _mm512_load_ps(from);
            let mut high = _mm512_load_ps(from.add(16));
            if add {
                low = _mm512_add_ps(_mm512_maskz_loadu_ps(masks[0], to), low);
                high = _mm512_add_ps(_mm512_maskz_loadu_ps(masks[1], to.wrapping_add(16)), high);
            }
            if non_temporal {
                _mm512_stream_ps(to, low);
                _mm512_stream_ps(to.wrapping_add(16), high);
            } else {
                _mm512_mask_storeu_ps(to, masks[0], low);
                _mm512_mask_storeu_ps(to.wrapping_add(16), masks[1], high);
            }
        }
    }
}

/// Waits until the values written past the caches are visible to other threads.
pub fn store_fence() {
    // SAFETY: every processor of this architecture has this instruction.
    unsafe { _mm_sfence() };
}

/// Packs rows `row .. row + rows` and columns `k0 .. k0 + depth` of `a` into `out`, `[steps][padded
/// rows][16]`, with zeros past the last column. `k0` must start a step.
///
/// # Panics
/// Panics if `a` does not have these rows and columns, or if `out` is too short.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub fn pack_lhs(a: Matrix<'_>, row: usize, rows: usize, k0: usize, depth: usize, out: &mut [f32]) {
    if rows == 0 || depth == 0 {
        return;
    }
    let (data, row_stride, k_stride) = a.submatrix(row..row + rows, k0..k0 + depth);
    let padded = rows.next_multiple_of(HALF);
    let steps = depth.div_ceil(2 * STEP);
    assert!(steps * padded * STEP <= out.len(), "{} words for {rows} rows of {depth}", out.len());
    for (step, to) in out.chunks_exact_mut(padded * STEP).take(steps).enumerate() {
        let k = 2 * STEP * step;
        let remaining = (depth - k).min(2 * STEP);
        // SAFETY: `part` checked that all rows and columns exist; masked-off lanes are not
        // accessed.
        unsafe {
            if k_stride == 1 {
                let masks = [remaining, remaining.saturating_sub(16)]
                    .map(|n| ((1u32 << n.min(16)) - 1) as __mmask16);
                for r in 0..rows {
                    let from = data.as_ptr().add(r * row_stride + k);
                    let low = _mm512_maskz_loadu_ps(masks[0], from);
                    let high = _mm512_maskz_loadu_ps(masks[1], from.wrapping_add(16));
                    let both = _mm512_cvtne2ps_pbh(high, low);
                    let to = to.as_mut_ptr().add(r * STEP);
                    _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(both));
                }
            } else {
                for r in (0..rows).step_by(HALF) {
                    let from = data.as_ptr().add(k * k_stride + r);
                    let to = to.as_mut_ptr().add(r * STEP);
                    transpose_register(from, k_stride, (rows - r).min(HALF), remaining, to);
                }
            }
        }
    }
}

/// Packs one register of an lhs whose columns are contiguous. Value k of row i is
/// `from[k * stride + i]`, for i below `rows` and k below `depth`.
///
/// # Safety
/// `from` must cover these values, and `to` a register.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn transpose_register(
    from: *const f32,
    stride: usize,
    rows: usize,
    depth: usize,
    to: *mut f32,
) {
    let mask = ((1u32 << rows) - 1) as __mmask16;
    let zero = _mm512_setzero_si512();
    // SAFETY: the caller guarantees the extents; rows past the depth are not read.
    unsafe {
        let load = |k: usize| {
            let mask = if k < depth { mask } else { 0 };
            _mm512_maskz_loadu_ps(mask, from.wrapping_add(k * stride))
        };
        // Word w of all rows.
        let mut words = [zero; STEP];
        for (w, word) in words.iter_mut().enumerate() {
            *word = pack_words(load(2 * w), load(2 * w + 1));
        }
        // Transposes 16 × 16 words: by pairs, by fours, then by quarters of a register.
        let mut pairs = [zero; STEP];
        for i in (0..STEP).step_by(2) {
            pairs[i] = _mm512_unpacklo_epi32(words[i], words[i + 1]);
            pairs[i + 1] = _mm512_unpackhi_epi32(words[i], words[i + 1]);
        }
        let mut fours = [zero; STEP];
        for i in (0..STEP).step_by(4) {
            fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
            fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
            fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
            fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
        }
        // Quarter q of `fours[4 g + i]` holds words 4 g … 4 g + 3 of row 4 q + i.
        for i in 0..4 {
            let [a, b, c, d] = [fours[i], fours[4 + i], fours[8 + i], fours[12 + i]];
            let ab_even = _mm512_shuffle_i32x4::<0x88>(a, b);
            let ab_odd = _mm512_shuffle_i32x4::<0xdd>(a, b);
            let cd_even = _mm512_shuffle_i32x4::<0x88>(c, d);
            let cd_odd = _mm512_shuffle_i32x4::<0xdd>(c, d);
            for (q, row) in [
                (0, _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even)),
                (2, _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even)),
                (1, _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd)),
                (3, _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd)),
            ] {
                _mm512_storeu_si512(to.add((4 * q + i) * STEP).cast(), row);
            }
        }
    }
}
