//! A model's weights: the f32 master copy, and the packed copy that the kernels read, which is
//! refreshed after every update.

use std::borrow::Cow;
use std::ops::Range;

use levade_model::{ModelConfig, ModelError, ModelFiles};

use crate::Compute;
use crate::buffer::Buffer;
use crate::gemm::PackedMatrix;
use crate::layout::{LinearMap, ParameterLayout};
use crate::parameters::Parameters;
use crate::precision::Precision;
use crate::tensors::TensorEntry;

/// All weights of a model.
pub struct Weights {
    /// Configuration of the model.
    pub config: ModelConfig,
    /// Layout of the parameters.
    pub layout: ParameterLayout,
    /// All parameters, in f32.
    pub master: Buffer,
    /// Matrices of all linear maps, in the order of [`LinearMap::all`], packed for `x · Wᵀ`.
    maps: Vec<PackedMatrix>,
    /// Output head, packed for `x · Wᵀ`.
    pub head: PackedMatrix,
    changes: u64,
}

impl Weights {
    /// Creates weights for `config`, all zero, with packed copies in `precision`.
    pub fn zeroed(config: &ModelConfig, precision: Precision) -> Self {
        let layout = ParameterLayout::new(config);
        let shapes: Vec<_> = LinearMap::all(config.layers)
            .map(|map| {
                let at = layout.linear(map);
                (at.inputs, at.outputs)
            })
            .collect();
        Weights {
            config: config.clone(),
            master: Buffer::zeroed(layout.tensors.len),
            maps: PackedMatrix::zeroed_together(precision, &shapes),
            head: PackedMatrix::zeroed(precision, config.hidden, config.vocabulary),
            changes: 0,
            layout,
        }
    }

    /// Loads the weights of `files`.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing, damaged, or has another shape than in the
    /// configuration.
    pub fn load(compute: &Compute, files: &ModelFiles) -> Result<Self, ModelError> {
        let mut weights = Weights::zeroed(&files.config, compute.precision);
        weights.read(compute, files)?;
        Ok(weights)
    }

    /// Replaces the weights with the weights in `files`.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::load`]. Some weights may then have been replaced; the
    /// packed copies match the master copy in any case.
    pub fn read(&mut self, compute: &Compute, files: &ModelFiles) -> Result<(), ModelError> {
        let Weights { layout, master, .. } = self;
        let read =
            layout.tensors.entries.iter().try_for_each(|TensorEntry { parameter, range }| {
                files.tensor_into(&parameter.name, &parameter.shape, &mut master[range.clone()])
            });
        self.parameters().pack(compute);
        read
    }

    /// Returns the parameters and their packed copies, for changes.
    pub fn parameters(&mut self) -> Parameters<'_> {
        let Weights { config, layout, master, maps, head, changes } = self;
        *changes += 1;
        let ranges = LinearMap::all(config.layers).map(|map| layout.linear(map).weight.clone());
        let packed = ranges.zip(maps).chain([(layout.head.clone(), head)]).collect();
        Parameters { tensors: &layout.tensors, master, packed }
    }

    /// Returns how often the parameters have been borrowed for changes.
    pub fn change_count(&self) -> u64 {
        self.changes
    }

    /// Returns the packed matrix of a linear map.
    pub fn packed_map(&self, map: LinearMap) -> &PackedMatrix {
        &self.maps[map.index()]
    }

    /// Returns the factors of a norm: its weights, to which some families add 1.
    pub fn norm(&self, range: &Range<usize>) -> Cow<'_, [f32]> {
        let weights = self.parameters_at(range);
        match self.config.norm_offset() {
            0.0 => Cow::Borrowed(weights),
            offset => weights.iter().map(|weight| offset + weight).collect(),
        }
    }

    /// Returns the parameters at `range` in the master copy.
    pub fn parameters_at(&self, range: &Range<usize>) -> &[f32] {
        &self.master[range.clone()]
    }
}
