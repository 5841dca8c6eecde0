//! Measures the speed of the kernels against the limits of the machine: `kernels [PRECISION]
//! [ISA]`, in SmolLM2-135M's shapes with 2 threads.
//!
//! First it measures the machine's limits: multiply-adds per second with all operands in registers,
//! and bytes per second read from memory. Then it measures matmul: packed weights (forward),
//! weights packed for each call (gradients of activations), and long sums (gradients of weights).
//! Values are medians. The percentage in brackets is relative to the register limit measured just
//! before, because the speed of a shared machine changes from second to second.

use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use levade_engine::testing::{
    Buffer, Compute, GemmScratch, Matrix, OutputMode, PackedMatrix, RhsOperand, gemm,
};
use levade_engine::{Isa, Precision};

const THREADS: usize = 2;
/// Number of iterations of a loop over registers: some hundredths of a second, more with AMX.
const REPEATS: usize = 10_000_000;
/// Seconds for which a matmul is repeated between two measurements of the register limit.
const MIN_ROUND_SECONDS: f64 = 0.01;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let precision: Precision = match arguments.next() {
        Some(text) => {
            serde_json::from_value(serde_json::Value::String(text)).context("the precision")?
        }
        None => Precision::F32,
    };
    let isa: Isa = match arguments.next() {
        Some(text) => serde_json::from_value(serde_json::Value::String(text))
            .context("the instruction set")?,
        None => Isa::detect(),
    };
    ensure!(
        Isa::available().contains(&isa),
        "this processor does not support {isa:?}; it supports {:?}",
        Isa::available()
    );
    let compute = Compute::with_isa(THREADS, isa, precision);
    println!("{precision}, {isa:?}, {THREADS} threads");
    let limit = limits::multiply_adds(isa, precision);
    match limit {
        Some(run) => println!("registers: {:.0} GF/s", on_all_threads(|| run(REPEATS)) * 1e-9),
        None => println!("registers: unknown for this instruction set"),
    }
    println!("memory: {:.1} GB/s read", on_all_threads(limits::read) * 1e-9);
    let mut scratch = GemmScratch::default();
    for (rows, what) in
        [(1, "decode"), (16, "decode"), (64, "decode"), (512, "train"), (2048, "train")]
    {
        for (inputs, outputs) in [(576, 960), (576, 3072), (1536, 576), (576, 49152)] {
            let x = noise(rows * inputs);
            let w = noise(outputs * inputs);
            let mut y = Buffer::zeroed(rows * outputs);
            let weights = Matrix::new(&w, outputs, inputs);
            let packed = PackedMatrix::new(&compute, weights.transposed());
            let flops = 2.0 * (rows * inputs * outputs) as f64;
            let mut run = |a: Matrix<'_>,
                           b: RhsOperand<'_>,
                           to: &mut Buffer,
                           columns: usize,
                           mode: OutputMode| {
                speed(limit, flops, || gemm(&compute, &mut scratch, a, b, to, columns, mode))
            };
            let forward = run(
                Matrix::new(&x, rows, inputs),
                RhsOperand::Packed(&packed),
                &mut y,
                outputs,
                OutputMode::Set,
            );
            print!("{what:7}{rows:5} x {inputs:5} x {outputs:5}: forward {forward}");
            if what == "decode" {
                let bytes = packed.columns() * compute.kernel().words(inputs) * 4;
                println!(", {:5.1} GB/s", bytes as f64 / flops * forward.rate / 1e9);
                continue;
            }
            let dy = Matrix::new(&y, rows, outputs);
            let mut dx = Buffer::zeroed(rows * inputs);
            let backward = run(dy, RhsOperand::Plain(weights), &mut dx, inputs, OutputMode::Set);
            let mut dw = Buffer::zeroed(outputs * inputs);
            let x = RhsOperand::Plain(Matrix::new(&x, rows, inputs));
            let long = run(dy.transposed(), x, &mut dw, inputs, OutputMode::Add);
            println!(", of activations {backward}, of weights {long}");
        }
    }
    Ok(())
}

/// Returns the work of all threads per second, given the work of one call: the best of three
/// measurements.
fn on_all_threads(work: impl Fn() -> f64 + Sync) -> f64 {
    (0..3).map(|_| at_once(&work)).fold(0.0, f64::max)
}

/// Returns the work of all threads per second, measured in each thread's second call.
fn at_once(work: impl Fn() -> f64 + Sync) -> f64 {
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    work();
                    barrier.wait();
                    let start = Instant::now();
                    let done = work();
                    done / start.elapsed().as_secs_f64()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(0.0)).sum()
    })
}

/// Limits of the machine, on one thread.
mod limits {
    use std::hint::black_box;

    use super::{Buffer, Isa, Precision};

    /// Number of bytes read at a time.
    const BYTES: usize = 256 << 20;

    /// Reads memory from one end to the other; returns the number of bytes.
    pub fn read() -> f64 {
        thread_local! {
            static MEMORY: Buffer = super::noise(BYTES / 4);
        }
        MEMORY.with(|memory| {
            let mut lanes = [0.0f32; 64];
            for chunk in memory.as_chunks().0 {
                for (lane, value) in lanes.iter_mut().zip(chunk as &[f32; 64]) {
                    *lane += value;
                }
            }
            black_box(lanes);
        });
        BYTES as f64
    }

    /// Returns a function that runs a loop of multiply-adds whose operands stay in registers, and
    /// that returns the number of operations. Returns `None` if the limit is not known for the
    /// instruction set.
    pub fn multiply_adds(isa: Isa, precision: Precision) -> Option<fn(usize) -> f64> {
        #[cfg(target_arch = "x86_64")]
        match (isa, precision) {
            // SAFETY: the instruction set is available, or the engine would have rejected it.
            (Isa::Amx, Precision::Bf16) => return Some(|n| unsafe { x86::tiles(n) }),
            // SAFETY: as above.
            (Isa::Avx512Bf16, Precision::Bf16) => return Some(|n| unsafe { x86::pairs(n) }),
            (Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512, _) => {
                // SAFETY: as above.
                return Some(|n| unsafe { x86::avx512(n) });
            }
            // SAFETY: as above.
            (Isa::Avx2, _) => return Some(|n| unsafe { x86::avx2(n) }),
            _ => {}
        }
        let _ = (isa, precision);
        None
    }

    #[cfg(target_arch = "x86_64")]
    mod x86 {
        use std::arch::asm;

        /// Defines a loop over twelve independent instructions with `$flops` operations each.
        macro_rules! spin {
            ($name:ident, $features:literal, $flops:literal, $instruction:literal, $register:literal) => {
                #[target_feature(enable = $features)]
                pub unsafe fn $name(n: usize) -> f64 {
                    // SAFETY: only these registers are modified.
                    unsafe {
                        asm!(
                            // The registers could contain subnormal numbers, which take a hundred
                            // times as long.
                            ".irp i, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13",
                            "vxorps xmm\\i, xmm\\i, xmm\\i",
                            ".endr",
                            "2:",
                            ".irp i, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11",
                            concat!($instruction, " ", $register, "\\i, ", $register, "12, ", $register, "13"),
                            ".endr",
                            "dec {n}",
                            "jnz 2b",
                            n = inout(reg) n => _,
                            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
                            out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                            out("xmm12") _, out("xmm13") _,
                            options(nostack, nomem)
                        );
                    }
                    (n * 12 * $flops) as f64
                }
            };
        }

        spin!(avx512, "avx512f", 32, "vfmadd231ps", "zmm");
        spin!(pairs, "avx512f,avx512bf16", 64, "vdpbf16ps", "zmm");
        spin!(avx2, "avx2,fma", 16, "vfmadd231ps", "ymm");

        /// Multiplies full matrix registers, all of them zero.
        pub unsafe fn tiles(n: usize) -> f64 {
            const OPERATIONS: usize = 4 * 2 * 16 * 16 * 32;
            #[repr(align(64))]
            struct Configuration([u8; 64]);
            let mut configuration = Configuration([0; 64]);
            configuration.0[0] = 1;
            for register in 0..8 {
                configuration.0[16 + 2 * register] = 64;
                configuration.0[48 + register] = 16;
            }
            // SAFETY: the configuration is valid; only these registers are modified.
            unsafe {
                asm!(
                    "ldtilecfg [{whole}]",
                    "2:",
                    "tdpbf16ps tmm0, tmm4, tmm5", "tdpbf16ps tmm1, tmm4, tmm6",
                    "tdpbf16ps tmm2, tmm7, tmm5", "tdpbf16ps tmm3, tmm7, tmm6",
                    "dec {n}",
                    "jnz 2b",
                    "tilerelease",
                    whole = in(reg) &raw const configuration, n = inout(reg) n => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, options(nostack)
                );
            }
            (n * OPERATIONS) as f64
        }
    }
}

/// Returns reproducible values, in huge pages if large, like the engine's own memory.
fn noise(len: usize) -> Buffer {
    let mut values = Buffer::zeroed(len);
    values
        .iter_mut()
        .enumerate()
        .for_each(|(i, value)| *value = ((i * 7919) % 1009) as f32 / 1009.0 - 0.5);
    values
}

/// Speed of a matmul.
struct Speed {
    /// Operations per second.
    rate: f64,
    /// Fraction of the register limit, if that limit is known.
    fraction: Option<f64>,
}

impl std::fmt::Display for Speed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:7.0} GF/s", self.rate * 1e-9)?;
        self.fraction.map_or(Ok(()), |fraction| write!(f, " ({:3.0} %)", 100.0 * fraction))
    }
}

/// Measures medians over rounds of calls with `flops` operations each; each round first measures
/// `limit`.
fn speed(limit: Option<fn(usize) -> f64>, flops: f64, mut call: impl FnMut()) -> Speed {
    let mut rates = Vec::new();
    let mut fractions = Vec::new();
    let started = Instant::now();
    while rates.len() < 5 || (started.elapsed().as_secs_f64() < 0.5 && rates.len() < 50) {
        let peak = limit.map(|run| at_once(|| run(REPEATS / 10)));
        let start = Instant::now();
        let mut calls = 0;
        while calls == 0 || start.elapsed().as_secs_f64() < MIN_ROUND_SECONDS {
            call();
            calls += 1;
        }
        let rate = flops * f64::from(calls) / start.elapsed().as_secs_f64();
        rates.push(rate);
        fractions.extend(peak.map(|peak| rate / peak));
    }
    Speed { rate: median(rates).unwrap_or(0.0), fraction: median(fractions) }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
