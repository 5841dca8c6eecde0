//! The forward pass of training: what is remembered of it, and what is computed again.
//!
//! Of every block its input is remembered. Of the first few blocks everything is that the backward pass
//! needs; the others compute it again from their input when their turn comes, which gives the same bits and
//! costs another forward pass of the block.

use crate::buffer::Buffer;
use crate::ops::kv::{KeyValues, Places};
use crate::transformer::{LayerState, Rows, Temporary, Transformer};

/// Record of a forward pass, for the backward pass to come.
pub struct Activations {
    /// The blocks of which everything is remembered.
    states: Vec<LayerState>,
    /// The state of the block that was computed last, if it is not kept.
    shared: LayerState,
    /// Residual stream before every block, and after the last.
    stream: Vec<Buffer>,
}

impl Activations {
    /// For a model of `layers` blocks; nothing is allocated yet.
    pub fn new(layers: usize, kept: usize) -> Self {
        Activations {
            states: (0..kept.min(layers)).map(|_| LayerState::default()).collect(),
            shared: LayerState::default(),
            stream: (0..=layers).map(|_| Buffer::default()).collect(),
        }
    }

    /// Runs all blocks and remembers what the backward pass needs.
    pub fn forward(
        &mut self,
        model: &Transformer,
        rows: Rows<'_>,
        temporary: &mut Temporary,
        places: &mut Places<'_>,
    ) {
        let size = rows.tokens.len() * model.weights.config.hidden;
        model.embed(rows.tokens, self.stream[0].reserve(size));
        for layer in 0..model.weights.config.layers {
            let (before, after) = self.stream.split_at_mut(layer + 1);
            let (input, out) = (&before[layer][..size], &mut after[0]);
            let state = self.states.get_mut(layer).unwrap_or(&mut self.shared);
            model.forward_layer(layer, rows, &places.layer(layer), input, state, temporary, out);
        }
    }

    /// Runs all blocks without remembering anything but what the last one gives.
    pub fn forward_only(
        &mut self,
        model: &Transformer,
        rows: Rows<'_>,
        temporary: &mut Temporary,
        places: &mut Places<'_>,
    ) {
        let [first, .., last] = &mut self.stream[..] else { return };
        model.forward(rows, places, &mut self.shared, temporary, last, first);
    }

    /// The residual stream after the last block, `size` values.
    pub fn output(&self, size: usize) -> &[f32] {
        &self.stream[self.stream.len() - 1][..size]
    }

    /// Input and state of a block, for its backward pass; what is not remembered is computed again. Its keys
    /// and values are in their blocks afterwards.
    pub fn recall(
        &mut self,
        model: &Transformer,
        layer: usize,
        rows: Rows<'_>,
        temporary: &mut Temporary,
        keys_values: &KeyValues<'_>,
    ) -> (&[f32], &mut LayerState) {
        let input = &self.stream[layer][..rows.tokens.len() * model.weights.config.hidden];
        let state = match self.states.get_mut(layer) {
            Some(state) => {
                keys_values.store(&model.compute, rows.spans, &state.qkv);
                state
            }
            None => {
                model.forward_state(layer, rows, keys_values, input, &mut self.shared, temporary);
                &mut self.shared
            }
        };
        (input, state)
    }
}
