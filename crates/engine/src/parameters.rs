//! An array of parameters with the packed copies of its matrices that kernels read.

use std::ops::Range;

use crate::Compute;
use crate::buffer::SharedSlice;
use crate::gemm::{PackedMatrix, Panels};
use crate::tensors::Tensors;

/// Maximum number of values in a chunk that is not a panel.
const BLOCK: usize = 1 << 16;

/// Parameter array with the layout of its tensors and its packed matrices.
pub struct Parameters<'a> {
    /// Layout of the tensors.
    pub tensors: &'a Tensors,
    /// Values of the parameters.
    pub master: &'a mut [f32],
    /// Range of each matrix that kernels read packed, with its transpose, packed.
    pub packed: Vec<(Range<usize>, &'a mut PackedMatrix)>,
}

/// Contiguous values of a parameter array, processed by one task: the source of one panel, or a
/// block of a tensor that is not packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterChunk {
    /// Range of the chunk in the parameter array.
    pub range: Range<usize>,
    /// Whether the values belong to a matrix, as opposed to a norm or a bias.
    pub is_matrix: bool,
    /// Index of the packed matrix, and index of its panel, that the chunk fills. `None` if the
    /// tensor is not packed.
    panel: Option<(usize, usize)>,
}

impl Parameters<'_> {
    /// Packs all matrices again from the current parameters.
    pub fn pack(&mut self, compute: &Compute) {
        for (range, packed) in &mut self.packed {
            packed.repack_transposed(compute, &self.master[range.clone()]);
        }
    }

    /// Calls `change` with every chunk and its values, on all threads, and packs the changed values
    /// while they are in the cache.
    pub fn update_chunks(
        self,
        compute: &Compute,
        change: impl Fn(&ParameterChunk, &mut [f32]) + Sync,
    ) {
        let Parameters { tensors, master, packed } = self;
        let panels: Vec<_> =
            packed.into_iter().map(|(range, packed)| (range.start, packed.panels())).collect();
        let chunks = split_into_chunks(tensors, &panels);
        let master = SharedSlice::new(master);
        compute.pool.run(chunks.len(), |task| {
            let chunk = &chunks[task];
            // SAFETY: chunks do not overlap, and each belongs to one task.
            let values = unsafe { master.slice(chunk.range.start, chunk.range.len()) };
            change(chunk, values);
            if let Some((matrix, panel)) = chunk.panel {
                // SAFETY: each panel belongs to one chunk.
                unsafe { panels[matrix].1.pack(compute.kernel(), panel, values) };
            }
        });
    }
}

/// Divides tensors into chunks, given the start of each packed matrix. Every value of a tensor is
/// in one chunk.
fn split_into_chunks(tensors: &Tensors, panels: &[(usize, Panels<'_>)]) -> Vec<ParameterChunk> {
    let mut chunks = Vec::new();
    for (matrix, (start, panels)) in panels.iter().enumerate() {
        chunks.extend((0..panels.num_panels()).map(|panel| {
            let rows = panels.rows(panel);
            ParameterChunk {
                range: start + rows.start..start + rows.end,
                is_matrix: true,
                panel: Some((matrix, panel)),
            }
        }));
    }
    let is_packed = |at: usize| {
        panels.iter().any(|(start, panels)| (*start..start + panels.values()).contains(&at))
    };
    for entry in tensors.entries.iter().filter(|entry| !is_packed(entry.range.start)) {
        let Range { start, end } = entry.range;
        let block = |at| ParameterChunk {
            range: at..end.min(at + BLOCK),
            is_matrix: entry.is_matrix(),
            panel: None,
        };
        chunks.extend((start..end).step_by(BLOCK).map(block));
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::gemm::NR;
    use crate::precision::Precision;
    use crate::testing::tiny_config;
    use crate::weights::Weights;

    /// Every parameter is changed once, and the packed copies match the changed values.
    #[test]
    fn parameter_change_updates_packed_copies() {
        for (tied, precision) in [(true, Precision::F32), (false, Precision::Bf16)] {
            let config = levade_model::ModelConfig { tied, qkv_bias: true, ..tiny_config() };
            let compute = Compute::with_isa(2, Isa::detect(), precision);
            let mut weights = Weights::zeroed(&config, precision);
            let entries = weights.layout.tensors.entries.clone();
            let in_matrix =
                |at: usize| entries.iter().any(|p| p.is_matrix() && p.range.contains(&at));
            weights.parameters().update_chunks(&compute, |chunk, values| {
                for (at, value) in chunk.range.clone().zip(values) {
                    assert_eq!(chunk.is_matrix, in_matrix(at), "{at}");
                    *value += 1.0 + (at % 251) as f32;
                }
            });
            for at in 0..weights.master.len() {
                let expected = if entries.iter().any(|p| p.range.contains(&at)) {
                    1.0 + (at % 251) as f32
                } else {
                    0.0
                };
                assert_eq!(weights.master[at], expected, "{at}");
            }
            let found = packed_bits(&mut weights);
            weights.parameters().pack(&compute);
            assert!(
                found.iter().any(|word| *word != 0) && found == packed_bits(&mut weights),
                "{precision:?}"
            );
        }
    }

    fn packed_bits(weights: &mut Weights) -> Vec<u32> {
        let packed = weights.parameters().packed;
        packed
            .iter()
            .flat_map(|(_, packed)| {
                (0..packed.columns().div_ceil(NR))
                    .flat_map(|i| packed.panel(i).iter().map(|word| word.to_bits()))
            })
            .collect()
    }
}
