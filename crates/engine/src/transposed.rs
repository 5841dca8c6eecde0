//! Packs the model's matrices for the backward pass, which computes `dy · W`.
//!
//! A batch needs each matrix once for every unit that goes through the model, and the head once for
//! every chunk of rows. In bf16, matmul is so fast that packing for each call takes a noticeable
//! fraction of the time, so matrices are packed once after every update. In f32 that fraction is
//! small and the copies would be twice as large, so matrices are packed for each matmul.

use std::ops::Range;

use crate::Compute;
use crate::gemm::{Matrix, PackedMatrix, RhsOperand};
use crate::layout::{LinearLayout, LinearMap, ParameterLayout};
use crate::precision::Precision;
use crate::weights::Weights;

/// Packed copies of a model's weight matrices for the backward pass, allocated at first use.
#[derive(Default)]
pub struct TransposedWeights {
    /// Matrices of all linear maps, in the order of [`LinearMap::all`], then the output head. Each
    /// matrix has the change count of the weights from which it was packed.
    matrices: Vec<(Option<u64>, PackedMatrix)>,
}

impl TransposedWeights {
    /// Returns the matrix of a linear map, outputs × inputs, as an rhs.
    pub fn map<'a>(
        &'a mut self,
        compute: &Compute,
        weights: &'a Weights,
        map: LinearMap,
    ) -> RhsOperand<'a> {
        let LinearLayout { weight, outputs, inputs, .. } = weights.layout.linear(map);
        self.matrix(compute, weights, map.index(), weight, [*outputs, *inputs])
    }

    /// Returns the matrix of the output head, vocabulary × hidden, as an rhs.
    pub fn head<'a>(&'a mut self, compute: &Compute, weights: &'a Weights) -> RhsOperand<'a> {
        let config = &weights.config;
        let last = LinearMap::all(weights.config.layers).count();
        self.matrix(
            compute,
            weights,
            last,
            &weights.layout.head,
            [config.vocabulary, config.hidden],
        )
    }

    fn matrix<'a>(
        &'a mut self,
        compute: &Compute,
        weights: &'a Weights,
        index: usize,
        range: &Range<usize>,
        [rows, columns]: [usize; 2],
    ) -> RhsOperand<'a> {
        let matrix = Matrix::new(weights.parameters_at(range), rows, columns);
        if compute.precision == Precision::F32 {
            return RhsOperand::Plain(matrix);
        }
        if self.matrices.is_empty() {
            let shapes = matrix_shapes(&weights.layout, weights.config.layers, compute.precision);
            let empty = PackedMatrix::zeroed_together(compute.precision, &shapes);
            self.matrices = empty.into_iter().map(|packed| (None, packed)).collect();
        }
        let (state, packed) = &mut self.matrices[index];
        if *state != Some(weights.change_count()) {
            packed.repack(compute, matrix);
            *state = Some(weights.change_count());
        }
        RhsOperand::Packed(packed)
    }
}

/// Returns (K, N) of every matrix that is kept packed; empty in f32.
pub fn matrix_shapes(
    layout: &ParameterLayout,
    layers: usize,
    precision: Precision,
) -> Vec<(usize, usize)> {
    if precision == Precision::F32 {
        return Vec::new();
    }
    let hidden = layout.norm.len();
    let maps =
        LinearMap::all(layers).map(|map| (layout.linear(map).outputs, layout.linear(map).inputs));
    maps.chain([(layout.head.len() / hidden, hidden)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::layout::LayerMap;
    use crate::testing::{random_weights, tiny_config};

    /// A copy matches the current weights, including after a change.
    #[test]
    fn packed_copies_follow_weight_changes() {
        let compute = Compute::with_isa(2, Isa::detect(), Precision::Bf16);
        let mut weights = random_weights(&compute, &tiny_config(), 1);
        let mut transposed = TransposedWeights::default();
        for round in 0..3 {
            for map in LinearMap::all(weights.config.layers) {
                let at = weights.layout.linear(map);
                let matrix = Matrix::new(weights.parameters_at(&at.weight), at.outputs, at.inputs);
                let expected = PackedMatrix::new(&compute, matrix);
                let RhsOperand::Packed(found) = transposed.map(&compute, &weights, map) else {
                    panic!("{map:?}")
                };
                assert!(found.has_same_words(&expected), "{map:?} after {round} changes");
            }
            let config = &weights.config;
            let head = Matrix::new(
                weights.parameters_at(&weights.layout.head),
                config.vocabulary,
                config.hidden,
            );
            let expected = PackedMatrix::new(&compute, head);
            let RhsOperand::Packed(found) = transposed.head(&compute, &weights) else {
                panic!("the head")
            };
            assert!(found.has_same_words(&expected), "the head after {round} changes");
            weights
                .parameters()
                .update_chunks(&compute, |_, values| values.iter_mut().for_each(|w| *w += 0.5));
        }
    }

    /// In f32 there is no copy.
    #[test]
    fn f32_matrices_are_not_copied_for_backward() {
        let compute = Compute::with_isa(1, Isa::detect(), Precision::F32);
        let weights = random_weights(&compute, &tiny_config(), 1);
        let map = LinearMap { layer: 0, site: LayerMap::Down };
        assert!(matches!(
            TransposedWeights::default().map(&compute, &weights, map),
            RhsOperand::Plain(_)
        ));
        assert!(matrix_shapes(&weights.layout, weights.config.layers, Precision::F32).is_empty());
    }
}
