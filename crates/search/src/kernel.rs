//! Computes inner products of vectors with the SIMD instructions of the processor.
//!
//! The 8-bit product is computed exactly in integers. The f32 product is accumulated in sixteen
//! fixed lanes. Neither result depends on the processor.

/// Defines a function that is also compiled for AVX2 and FMA, and selects that version if the
/// processor supports them. The body is plain Rust that the compiler vectorizes.
macro_rules! widened {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block) => {
        $(#[$meta])*
        pub fn $name($($arg: $ty),*) -> $ret {
            #[inline(always)]
            fn body($($arg: $ty),*) -> $ret $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) -> $ret {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                // SAFETY: the condition above has checked that the processor has these
                // instructions.
                return unsafe { avx2($($arg),*) };
            }
            body($($arg),*)
        }
    };
}

/// Number of partial sums in the f32 inner product.
const LANES: usize = 16;

widened! {
    /// Computes the inner product Σ cᵢ qᵢ of 8-bit codes c, passed as bytes, and a query q that is
    /// widened to 16 bits.
    fn dot_codes(codes: &[u8], query: &[i16]) -> i32 {
        codes.iter().zip(query).map(|(code, q)| i32::from(*code as i8) * i32::from(*q)).sum()
    }
}

widened! {
    /// Computes the inner product Σ xᵢ qᵢ of a vector x of little-endian f32 and a query q.
    fn dot_f32(x: &[u8], query: &[f32]) -> f32 {
        let mut sums = [0f32; LANES];
        let mut rows = x.chunks_exact(4 * LANES);
        let mut queries = query.chunks_exact(LANES);
        for (x, q) in rows.by_ref().zip(queries.by_ref()) {
            for (lane, sum) in sums.iter_mut().enumerate() {
                *sum += f32_at(x, lane) * q[lane];
            }
        }
        for (lane, (q, sum)) in queries.remainder().iter().zip(&mut sums).enumerate() {
            *sum += f32_at(rows.remainder(), lane) * q;
        }
        sums.iter().sum()
    }
}

/// Returns the f32 at index `at` of an array of little-endian f32.
#[inline(always)]
fn f32_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([bytes[4 * at], bytes[4 * at + 1], bytes[4 * at + 2], bytes[4 * at + 3]])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn dot_product_matches_f64_reference(
            pairs in prop::collection::vec((-1f32..1.0, -1f32..1.0), 0..200),
        ) {
            let (x, q): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
            let exact: f64 = x.iter().zip(&q).map(|(x, q)| f64::from(*x) * f64::from(*q)).sum();
            prop_assert!((f64::from(dot_f32(&bytes, &q)) - exact).abs() < 1e-4);
        }

        #[test]
        fn integer_dot_product_is_exact(
            pairs in prop::collection::vec((-127i8..=127, -127i16..=127), 0..900),
        ) {
            let (codes, q): (Vec<i8>, Vec<i16>) = pairs.into_iter().unzip();
            let bytes: Vec<u8> = codes.iter().map(|code| *code as u8).collect();
            let exact: i32 = codes.iter().zip(&q).map(|(c, q)| i32::from(*c) * i32::from(*q)).sum();
            prop_assert_eq!(dot_codes(&bytes, &q), exact);
        }
    }
}
