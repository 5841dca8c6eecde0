//! A model's weights: the f32 master copy, and the packed copy that the kernels read, refreshed after every
//! update.

use std::borrow::Cow;
use std::ops::Range;

use levade_model::{ModelConfig, ModelError, ModelFiles};

use crate::Compute;
use crate::buffer::Buffer;
use crate::layout::{Layout, Map};
use crate::parameters::Parameters;
use crate::precision::Precision;
use crate::product::Packed;
use crate::tensors::Place;

/// All weights of a model.
pub struct Weights {
    /// Configuration of the model.
    pub config: ModelConfig,
    /// Where its parameters lie.
    pub layout: Layout,
    /// The parameters.
    pub master: Buffer,
    /// The matrices of all linear maps, in the order of [`Map::all`], packed for `x · Wᵀ`.
    maps: Vec<Packed>,
    /// Packed head.
    pub head: Packed,
    changes: u64,
}

impl Weights {
    /// Weights for `config`, all zero; to be packed in `precision`.
    pub fn zeroed(config: &ModelConfig, precision: Precision) -> Self {
        let layout = Layout::new(config);
        let shape = |map| {
            let at = layout.linear(map);
            (at.inputs, at.outputs)
        };
        let shapes: Vec<_> = Map::all(config.layers).map(shape).collect();
        Weights {
            config: config.clone(),
            master: Buffer::zeroed(layout.tensors.len),
            maps: Packed::together(precision, &shapes),
            head: Packed::empty(precision, config.hidden, config.vocabulary),
            changes: 0,
            layout,
        }
    }

    /// Reads the weights of `files`.
    ///
    /// # Errors
    /// When a tensor is missing, damaged, or of another shape than the configuration says.
    pub fn load(compute: &Compute, files: &ModelFiles) -> Result<Self, ModelError> {
        let mut weights = Weights::zeroed(&files.config, compute.precision);
        weights.read(compute, files)?;
        Ok(weights)
    }

    /// Replaces the weights by those of `files`.
    ///
    /// # Errors
    /// As [`Weights::load`]. Some may have been replaced then; what is packed is what they are in any case.
    pub fn read(&mut self, compute: &Compute, files: &ModelFiles) -> Result<(), ModelError> {
        let Weights { layout, master, .. } = self;
        let read = layout.tensors.places.iter().try_for_each(|Place { parameter, range }| {
            files.tensor_into(&parameter.name, &parameter.shape, &mut master[range.clone()])
        });
        self.parameters().pack(compute);
        read
    }

    /// The master copy and what is packed from it.
    pub fn parameters(&mut self) -> Parameters<'_> {
        let Weights { config, layout, master, maps, head, changes } = self;
        *changes += 1;
        let ranges = Map::all(config.layers).map(|map| layout.linear(map).weight.clone());
        let packed = ranges.zip(maps).chain([(layout.head.clone(), head)]).collect();
        Parameters { tensors: &layout.tensors, master, packed }
    }

    /// How often the parameters have been lent to be changed.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The packed matrix of a linear map.
    pub fn packed(&self, map: Map) -> &Packed {
        &self.maps[map.index()]
    }

    /// Factors of a norm: its weights, to which some families add 1.
    pub fn norm(&self, range: &Range<usize>) -> Cow<'_, [f32]> {
        let weights = self.part(range);
        match self.config.norm_offset() {
            0.0 => Cow::Borrowed(weights),
            offset => weights.iter().map(|weight| offset + weight).collect(),
        }
    }

    /// Part of the master copy.
    pub fn part(&self, range: &Range<usize>) -> &[f32] {
        &self.master[range.clone()]
    }
}
