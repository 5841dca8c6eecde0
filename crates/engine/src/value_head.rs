//! Weights of a critic's value head, which predicts one number per token from the hidden state that
//! the language model head reads.
//!
//! V(s) = w · norm(x) + b. A target's value is that of its predictor: the state before the token.
//! Weights start at zero.

use levade_model::Parameter;

use crate::buffer::Buffer;
use crate::parameters::Parameters;
use crate::tensors::Tensors;

/// Name of the file with the weights of a value head.
pub const FILE: &str = "value_head.safetensors";

/// The weights of a value head: `w`, then `b`.
pub struct ValueHead {
    /// Offsets of the value head's parameters in `master`.
    pub tensors: Tensors,
    /// Parameters of the value head: `w`, then `b`.
    pub master: Buffer,
}

impl ValueHead {
    /// Creates the value head of a model with hidden width `hidden`. Until training, every value is
    /// 0.
    pub fn new(hidden: usize) -> Self {
        let mut tensors = Tensors::default();
        tensors.append([
            parameter("value_head.weight", &[1, hidden]),
            parameter("value_head.bias", &[1]),
        ]);
        ValueHead { master: Buffer::zeroed(tensors.len), tensors }
    }

    /// Returns the parameters of the value head, none of which are packed.
    pub fn parameters(&mut self) -> Parameters<'_> {
        Parameters { tensors: &self.tensors, master: &mut self.master, packed: Vec::new() }
    }
}

fn parameter(name: &str, shape: &[usize]) -> Parameter {
    Parameter { name: name.into(), shape: shape.to_vec() }
}
