//! An array of parameters together with the copies of its matrices that kernels read.

use std::ops::Range;

use crate::Compute;
use crate::buffer::Shared;
use crate::product::{Packed, Panels};
use crate::tensors::Tensors;

/// Values that a piece has at most, where it is no panel.
const BLOCK: usize = 1 << 16;

/// An array of parameters, where its tensors lie, and its packed matrices.
pub struct Parameters<'a> {
    /// Where the tensors lie.
    pub tensors: &'a Tensors,
    /// The values.
    pub master: &'a mut [f32],
    /// Where in the array each matrix lies that kernels read packed, and the transpose of it, packed.
    pub packed: Vec<(Range<usize>, &'a mut Packed)>,
}

/// Neighbouring values of an array, for one task: what a panel is packed from, or a block of a tensor that is
/// not packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Where they lie.
    pub range: Range<usize>,
    /// Whether they are of a matrix, and not of a norm or a bias.
    pub is_matrix: bool,
    /// Which of the packed matrices, and which of its panels.
    panel: Option<(usize, usize)>,
}

impl Parameters<'_> {
    /// Packs all matrices again.
    pub fn pack(&mut self, compute: &Compute) {
        for (range, packed) in &mut self.packed {
            packed.refresh(compute, &self.master[range.clone()]);
        }
    }

    /// Calls `change` with every piece and its values, on all threads, and packs what it leaves while that is
    /// in the cache.
    pub fn change(self, compute: &Compute, change: impl Fn(&Piece, &mut [f32]) + Sync) {
        let Parameters { tensors, master, packed } = self;
        let panels: Vec<_> =
            packed.into_iter().map(|(range, packed)| (range.start, packed.panels())).collect();
        let pieces = pieces(tensors, &panels);
        let master = Shared::new(master);
        compute.pool.run(pieces.len(), |task| {
            let piece = &pieces[task];
            // SAFETY: pieces do not overlap, and each belongs to one task.
            let values = unsafe { master.slice(piece.range.start, piece.range.len()) };
            change(piece, values);
            if let Some((matrix, panel)) = piece.panel {
                // SAFETY: each panel belongs to one piece.
                unsafe { panels[matrix].1.pack(compute.kernel(), panel, values) };
            }
        });
    }
}

/// Cuts tensors into pieces, given where each packed matrix starts. Every value of a tensor is in one piece.
fn pieces(tensors: &Tensors, panels: &[(usize, Panels<'_>)]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (matrix, (start, panels)) in panels.iter().enumerate() {
        pieces.extend((0..panels.count()).map(|panel| {
            let rows = panels.rows(panel);
            Piece {
                range: start + rows.start..start + rows.end,
                is_matrix: true,
                panel: Some((matrix, panel)),
            }
        }));
    }
    let is_packed =
        |at: usize| panels.iter().any(|(start, panels)| (*start..start + panels.values()).contains(&at));
    for place in tensors.places.iter().filter(|place| !is_packed(place.range.start)) {
        let Range { start, end } = place.range;
        let block = |at| Piece { range: at..end.min(at + BLOCK), is_matrix: place.is_matrix(), panel: None };
        pieces.extend((start..end).step_by(BLOCK).map(block));
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::precision::Precision;
    use crate::product::NR;
    use crate::testing::tiny_config;
    use crate::weights::Weights;

    /// Every parameter is changed once, and the packed copies are those of what it became.
    #[test]
    fn a_change_reaches_every_parameter_and_its_copy() {
        for (tied, precision) in [(true, Precision::F32), (false, Precision::Bf16)] {
            let config = levade_model::ModelConfig { tied, qkv_bias: true, ..tiny_config() };
            let compute = Compute::with(2, Isa::detect(), precision);
            let mut weights = Weights::zeroed(&config, precision);
            let places = weights.layout.tensors.places.clone();
            let in_matrix = |at: usize| places.iter().any(|p| p.is_matrix() && p.range.contains(&at));
            weights.parameters().change(&compute, |piece, values| {
                for (at, value) in piece.range.clone().zip(values) {
                    assert_eq!(piece.is_matrix, in_matrix(at), "{at}");
                    *value += 1.0 + (at % 251) as f32;
                }
            });
            for at in 0..weights.master.len() {
                let expected =
                    if places.iter().any(|p| p.range.contains(&at)) { 1.0 + (at % 251) as f32 } else { 0.0 };
                assert_eq!(weights.master[at], expected, "{at}");
            }
            let copies = |weights: &mut Weights| -> Vec<u32> {
                let packed = weights.parameters().packed;
                packed
                    .iter()
                    .flat_map(|(_, packed)| {
                        (0..packed.columns().div_ceil(NR))
                            .flat_map(|i| packed.panel(i).iter().map(|word| word.to_bits()))
                    })
                    .collect()
            };
            let found = copies(&mut weights);
            weights.parameters().pack(&compute);
            assert!(found.iter().any(|word| *word != 0) && found == copies(&mut weights), "{precision:?}");
        }
    }
}
