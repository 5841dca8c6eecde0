//! Stores activations of the training forward pass, or recomputes them.
//!
//! The input of every layer is stored. For the first few layers, all values are stored that the
//! backward pass needs. The other layers recompute them from their input during the backward pass,
//! which gives the same bits and costs another forward pass of the layer.

use crate::buffer::Buffer;
use crate::ops::kv::{KeyValues, KvBlocks};
use crate::transformer::{LayerState, TemporaryRows, TokenRows, Transformer};

/// Activations of a forward pass, for the backward pass.
pub struct Activations {
    /// States of the layers whose activations are stored.
    states: Vec<LayerState>,
    /// State of the most recently computed layer, if `states` does not store this layer.
    recomputed: LayerState,
    /// Residual stream before every layer and after the last layer.
    stream: Vec<Buffer>,
}

impl Activations {
    /// Creates empty activations for a model with `layers` layers. The states of `kept` layers will
    /// be stored. Memory is allocated at first use.
    pub fn new(layers: usize, kept: usize) -> Self {
        Activations {
            states: (0..kept.min(layers)).map(|_| LayerState::default()).collect(),
            recomputed: LayerState::default(),
            stream: (0..=layers).map(|_| Buffer::default()).collect(),
        }
    }

    /// Runs all layers and stores the activations for the backward pass.
    pub fn forward(
        &mut self,
        model: &Transformer,
        rows: TokenRows<'_>,
        temporary: &mut TemporaryRows,
        kv_blocks: &mut KvBlocks<'_>,
    ) {
        let size = rows.tokens.len() * model.weights.config.hidden;
        model.embed(rows.tokens, self.stream[0].reserve(size));
        for layer in 0..model.weights.config.layers {
            let (before, after) = self.stream.split_at_mut(layer + 1);
            let input = &before[layer][..size];
            let out = &mut after[0];
            let state = self.states.get_mut(layer).unwrap_or(&mut self.recomputed);
            model.forward_layer(layer, rows, &kv_blocks.layer(layer), input, state, temporary, out);
        }
    }

    /// Runs all layers and stores only the output of the last one.
    pub fn forward_only(
        &mut self,
        model: &Transformer,
        rows: TokenRows<'_>,
        temporary: &mut TemporaryRows,
        kv_blocks: &mut KvBlocks<'_>,
    ) {
        let [first, .., last] = &mut self.stream[..] else { return };
        model.forward(rows, kv_blocks, &mut self.recomputed, temporary, last, first);
    }

    /// Returns the residual stream after the last layer, `size` values.
    pub fn output(&self, size: usize) -> &[f32] {
        &self.stream[self.stream.len() - 1][..size]
    }

    /// Returns the input and the state of a layer for the layer's backward pass. Recomputes the
    /// state if it is not stored. Afterwards, `keys_values` holds the layer's keys and values.
    pub fn restore_layer(
        &mut self,
        model: &Transformer,
        layer: usize,
        rows: TokenRows<'_>,
        temporary: &mut TemporaryRows,
        keys_values: &KeyValues<'_>,
    ) -> (&[f32], &mut LayerState) {
        let input = &self.stream[layer][..rows.tokens.len() * model.weights.config.hidden];
        let state = match self.states.get_mut(layer) {
            Some(state) => {
                keys_values.store_keys_values(&model.compute, rows.spans, &state.qkv);
                state
            }
            None => {
                model.forward_state(
                    layer,
                    rows,
                    keys_values,
                    input,
                    &mut self.recomputed,
                    temporary,
                );
                &mut self.recomputed
            }
        };
        (input, state)
    }
}
