//! Selects the vector instruction set at run time, and provides the elementary functions built on
//! it.
//!
//! Every code path computes the same values: a fused multiply-add rounds once on all of them,
//! reductions run in [`LANES`] fixed lanes for all register widths, and `exp` is our own
//! polynomial. So a result does not depend on the processor, only on the order of operations
//! written here.

use serde::{Deserialize, Serialize};

/// Number of partial sums in every reduction: element i is added to lane i mod 16.
pub const LANES: usize = 16;

/// A set of vector instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Isa {
    /// AVX-512 as in `Avx512`, with matrix registers for matmul in bf16 (AMX).
    Amx,
    /// AVX-512 as in `Avx512`, with an instruction that multiplies bf16 pairs (BF16).
    Avx512Bf16,
    /// AVX-512 (F, BW, DQ, VL) with FMA.
    Avx512,
    /// AVX2 with FMA.
    Avx2,
    /// Baseline instructions of the compiler's target.
    Portable,
}

impl Isa {
    /// Returns the best instruction set that this processor supports.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// Returns all instruction sets that this processor supports, best first.
    pub fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if fma
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                if is_x86_feature_detected!("avx512bf16") {
                    if amx_available() {
                        found.push(Isa::Amx);
                    }
                    found.push(Isa::Avx512Bf16);
                }
                found.push(Isa::Avx512);
            }
            if fma {
                found.push(Isa::Avx2);
            }
        }
        found.push(Isa::Portable);
        found
    }

    /// Returns whether the instruction set can round 32 values to bf16 with one instruction.
    pub const fn rounds_pairs(self) -> bool {
        matches!(self, Isa::Amx | Isa::Avx512Bf16)
    }
}

/// Returns whether the processor has AMX for bf16 and the system allows this process to use it.
/// Requests that permission.
#[cfg(target_arch = "x86_64")]
fn amx_available() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::sync::OnceLock;

    static GRANTED: OnceLock<bool> = OnceLock::new();
    *GRANTED.get_or_init(|| {
        /// Bits of leaf 7 in EDX.
        const BF16: u32 = 1 << 22;
        const TILE: u32 = 1 << 24;
        let features = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0).edx } else { 0 };
        features & BF16 > 0 && features & TILE > 0 && request_amx_permission()
    })
}

/// Requests the AMX registers from Linux (kernel documentation, x86/xstate). Linux grants the
/// registers to processes that request them, and rejects the request if it does not support them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn request_amx_permission() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XTILEDATA: libc::c_long = 18;
    // SAFETY: this call accesses no memory of this process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn request_amx_permission() -> bool {
    false
}

/// Compiles a function once for every [`Isa`], which becomes its first argument. The body is plain
/// Rust that the compiler vectorizes; it must contain no reduction outside fixed lanes.
macro_rules! simd {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(isa: $crate::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            match isa {
                // SAFETY: `Isa::detect` and `Isa::available` return an instruction set only if the
                // processor has it.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Isa::Amx | $crate::simd::Isa::Avx512Bf16 | $crate::simd::Isa::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use simd;

/// Computes eˣ in f32, accurate to about 1 unit in the last place; 0 below −87.3.
///
/// x = n ln 2 + r with |r| ≤ ln 2 / 2. e^r is its Taylor polynomial of degree 7, whose remainder is
/// below 2⁻²⁵.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³: adding it rounds to an integer
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.3, 88.0);
    let shifted = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let mut p = 1.0 / 5040.0;
    p = r.mul_add(p, 1.0 / 720.0);
    p = r.mul_add(p, 1.0 / 120.0);
    p = r.mul_add(p, 1.0 / 24.0);
    p = r.mul_add(p, 1.0 / 6.0);
    p = r.mul_add(p, 0.5);
    p = r.mul_add(p, 1.0);
    p = r.mul_add(p, 1.0);
    // The low bits of the shifted number are n. They become the exponent without a conversion to
    // integer, which would need range checks.
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    let y = p * scale;
    if x < -87.3 { 0.0 } else { y }
}

/// Folds the lanes of a reduction, always in the same order.
#[inline(always)]
pub fn fold_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Returns the largest value, or −∞ if there are no values. NaN is ignored.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
        }
    }
    rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |max, x| if *x > max { *x } else { max })
}

/// Computes Σ x y over two slices of equal length, in fixed lanes.
#[inline(always)]
pub fn dot(x: &[f32], y: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let mut xs = x.chunks_exact(LANES);
    let mut ys = y.chunks_exact(LANES);
    for (a, b) in (&mut xs).zip(&mut ys) {
        for i in 0..LANES {
            lanes[i] = a[i].mul_add(b[i], lanes[i]);
        }
    }
    for (i, (a, b)) in xs.remainder().iter().zip(ys.remainder()).enumerate() {
        lanes[i] = a.mul_add(*b, lanes[i]);
    }
    fold_lanes(lanes)
}

#[cfg(test)]
mod tests {
    use super::*;

    simd! {
        fn exp_all(x: &[f32], y: &mut [f32]) {
            for (y, x) in y.iter_mut().zip(x) {
                *y = exp(*x);
            }
        }
    }

    simd! {
        fn dot_all(x: &[f32], y: &[f32]) -> f32 {
            dot(x, y)
        }
    }

    #[test]
    fn exp_is_accurate_and_equal_on_every_isa() {
        let xs: Vec<f32> = (0..400_001).map(|i| -88.5 + i as f32 * (176.0 / 400_000.0)).collect();
        let mut first = vec![0.0; xs.len()];
        exp_all(Isa::Portable, &xs, &mut first);
        for (x, y) in xs.iter().zip(&first) {
            let exact = f64::from(*x).exp();
            if *x >= -87.3 && *x <= 88.0 {
                assert!(
                    (f64::from(*y) - exact).abs() <= 1.5e-7 * exact,
                    "exp({x}) = {y}, exactly {exact}"
                );
            }
        }
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
        for isa in Isa::available() {
            let mut ys = vec![0.0; xs.len()];
            exp_all(isa, &xs, &mut ys);
            assert!(ys.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?}");
        }
    }

    #[test]
    fn dot_is_equal_on_every_isa() {
        let x: Vec<f32> = (0..577).map(|i| (i as f32 * 0.37).sin()).collect();
        let y: Vec<f32> = (0..577).map(|i| (i as f32 * 0.11).cos()).collect();
        let expected: f64 = x.iter().zip(&y).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let results: Vec<f32> =
            Isa::available().into_iter().map(|isa| dot_all(isa, &x, &y)).collect();
        assert!((f64::from(results[0]) - expected).abs() < 1e-4);
        assert!(results.iter().all(|r| r.to_bits() == results[0].to_bits()));
    }
}
