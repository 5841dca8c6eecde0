//! The weights of a critic's value head: one number for every token, from the hidden state that the head of
//! the language model reads.
//!
//! V(s) = w · norm(x) + b. A target's value is that of its predictor: the state before the token. Weights
//! start at zero.

use levade_model::Parameter;

use crate::buffer::Buffer;
use crate::parameters::Parameters;
use crate::tensors::Tensors;

/// The file it is kept in.
pub const FILE: &str = "value_head.safetensors";

/// The weights of a value head: `w`, then `b`.
pub struct ValueHead {
    /// Where the parameters lie.
    pub tensors: Tensors,
    /// The parameters.
    pub master: Buffer,
}

impl ValueHead {
    /// For a model that is `hidden` wide; every value is 0.
    pub fn new(hidden: usize) -> Self {
        let mut tensors = Tensors::default();
        let parameter = |name: &str, shape: &[usize]| Parameter { name: name.into(), shape: shape.to_vec() };
        tensors.lay([parameter("value_head.weight", &[1, hidden]), parameter("value_head.bias", &[1])]);
        ValueHead { master: Buffer::zeroed(tensors.len), tensors }
    }

    /// The parameters. Nothing is packed.
    pub fn parameters(&mut self) -> Parameters<'_> {
        Parameters { tensors: &self.tensors, master: &mut self.master, packed: Vec::new() }
    }
}
