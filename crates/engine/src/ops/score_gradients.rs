//! Weights and score gradients of attention's backward pass, in the layouts that its matmuls read.

#[cfg(target_arch = "x86_64")]
use super::attention_amx;
use super::kv::BLOCK;
use super::scores::ScoreRows;
use crate::buffer::Buffer;
use crate::gemm::Matrix;
use crate::gemm::lhs::LhsOperand;
use crate::gemm::pack::pack_rows;
use crate::precision::{Kernel, Precision, SumOrder};
use crate::simd::{LANES, exp, simd};

impl ScoreRows<'_> {
    /// Computes weights P = exp(s − max) / Σ and score gradients dS = P ∘ (dO Vᵀ − D), 0 at
    /// positions that a row does not attend to. It covers positions from `first_position` to the
    /// end of the block that holds the last position of the last row. The results are rows of rhs
    /// operands, in the fields documented for them. The score gradients from `first_position` on
    /// are also returned as an lhs, in `lhs` if they need packing.
    pub fn compute(mut self, kernel: Kernel, lhs: &mut Buffer) -> LhsOperand {
        let end = self.seen.next_multiple_of(BLOCK);
        #[cfg(target_arch = "x86_64")]
        if kernel.order() == SumOrder::Tiled {
            let rows = self.rows.len();
            let to = lhs.reserve(kernel.lhs_words(rows, end - self.first_position)).as_mut_ptr();
            let needed = |rows: usize| (rows - 1) * self.stride + end;
            assert!(needed(rows) <= self.p.len().min(self.s.len()));
            assert!(self.pairs.iter().all(|words| needed(rows.div_ceil(2)) <= words.len()));
            // SAFETY: all rows and words are within the lengths asserted above; the order is AMX's,
            // which is available.
            unsafe { attention_amx::score_gradients(&mut self, end, to, kernel.lhs_rows(rows)) };
            return LhsOperand::from_packed(kernel, to, rows);
        }
        let ScoreRows { rows, first_position, seen, stride, p, s, pairs: [weights, gradients] } =
            self;
        for (r, row) in rows.iter().enumerate() {
            let p = &mut p[r * stride..][..end];
            let s = &mut s[r * stride..][..end];
            let seen = row.first..row.own;
            row_gradients(
                kernel.isa,
                &mut p[seen.clone()],
                &mut s[seen],
                row.max,
                row.inverse,
                row.mean,
            );
            for values in [p, s] {
                values[first_position..row.first].fill(0.0);
                values[row.own..].fill(0.0);
            }
        }
        if kernel.precision == Precision::Bf16 {
            let width = end - first_position;
            pack_rows(
                kernel,
                &p[first_position..],
                stride,
                width,
                rows.len(),
                stride,
                &mut weights[first_position..],
            );
            pack_rows(
                kernel,
                &s[first_position..],
                stride,
                width,
                rows.len(),
                stride,
                &mut gradients[first_position..],
            );
        }
        let from = Matrix::with_stride(s, rows.len(), seen, stride);
        LhsOperand::pack(kernel, from, 0..rows.len(), first_position..seen, lhs)
    }
}

simd! {
    /// Converts one row in place: scores in `p` become attention weights, dO Vᵀ in `s` becomes
    /// score gradients.
    fn row_gradients(p: &mut [f32], s: &mut [f32], max: f32, inverse: f32, mean: f32) {
        let gradients = |p: &mut [f32; LANES], s: &mut [f32; LANES]| {
            for (p, s) in p.iter_mut().zip(s) {
                *p = exp(*p - max) * inverse;
                *s = *p * (*s - mean);
            }
        };
        let (p, p_rest) = p.as_chunks_mut();
        let (s, s_rest) = s.as_chunks_mut();
        for (p, s) in p.iter_mut().zip(s) {
            gradients(p, s);
        }
        // The rest is processed as a full chunk.
        let (mut p_last, mut s_last) = ([0.0; LANES], [0.0; LANES]);
        p_last[..p_rest.len()].copy_from_slice(p_rest);
        s_last[..s_rest.len()].copy_from_slice(s_rest);
        gradients(&mut p_last, &mut s_last);
        p_rest.copy_from_slice(&p_last[..p_rest.len()]);
        s_rest.copy_from_slice(&s_last[..s_rest.len()]);
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::super::scores::QueryRow;
    use super::super::testing::noise;
    use super::*;
    use crate::gemm::pack::pack_tile;
    use crate::simd::Isa;

    /// Operands computed in registers for AMX equal packed operands, bit for bit.
    #[test]
    fn amx_backward_operands_match_packing() {
        if !Isa::available().contains(&Isa::Amx) {
            return;
        }
        let kernel = Kernel { isa: Isa::Amx, precision: Precision::Bf16 };
        for (count, before, first_position) in
            [(32usize, 0usize, 0usize), (32, 75, 32), (17, 64, 0), (1, 40, 0), (5, 27, 0)]
        {
            let seen = before + count;
            let end = seen.next_multiple_of(32);
            let stride = end + LANES;
            let rows: Vec<QueryRow> = (0..count)
                .map(|r| QueryRow {
                    max: 2.0,
                    inverse: 0.5 + r as f32 / 100.0,
                    mean: r as f32 / 9.0,
                    first: if first_position > 0 { first_position + r } else { 0 },
                    own: before + r + 1,
                })
                .collect();
            let [p, s] = [1, 2].map(|seed| noise(count * stride, seed, 4.0));
            let words = count.div_ceil(2) * stride;
            let [mut weights, mut gradients] = [1.0, 2.0].map(|garbage| vec![garbage; words]);
            let mut lhs = Buffer::default();
            let mut p_made = p.clone();
            let mut s_made = s.clone();
            let scores = ScoreRows {
                rows: &rows,
                first_position,
                seen,
                stride,
                p: &mut p_made,
                s: &mut s_made,
                pairs: [&mut weights, &mut gradients],
            };
            scores.compute(kernel, &mut lhs);

            let mut p = p;
            let mut s = s;
            for (r, row) in rows.iter().enumerate() {
                let p = &mut p[r * stride..][..end];
                let s = &mut s[r * stride..][..end];
                row_gradients(
                    kernel.isa,
                    &mut p[..row.own],
                    &mut s[..row.own],
                    row.max,
                    row.inverse,
                    row.mean,
                );
                for values in [p, s] {
                    values[..row.first].fill(0.0);
                    values[row.own..].fill(0.0);
                }
            }
            for (values, found) in [(&p, &weights), (&s, &gradients)] {
                let mut expected = vec![0.0; words];
                pack_rows(kernel, values, stride, end, count, stride, &mut expected);
                for (expected, found) in expected.chunks(stride).zip(found.chunks(stride)) {
                    let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                    assert!(
                        expected[first_position..end]
                            .iter()
                            .zip(&found[first_position..])
                            .all(same),
                        "{count} rows after {before}"
                    );
                }
            }
            let mut expected = vec![0.0; kernel.lhs_words(count, end - first_position)];
            let from = Matrix::with_stride(&s, count, end, stride);
            pack_tile(kernel, from, 0, count, first_position, end - first_position, &mut expected);
            let high = kernel.lhs_rows(count) * 16;
            for (expected, found) in expected.chunks(high).zip(lhs.chunks(high)) {
                let same = expected
                    .iter()
                    .zip(found)
                    .take(count * 16)
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{count} rows after {before}");
            }
        }
    }
}
