//! Where every parameter lies in one flat array.
//!
//! Weights, gradients and both moments of the optimiser are four arrays of this layout. Projections that read the same
//! input lie next to each other, so that query, key and value (and gate and up) are one matrix for the kernels.

use std::ops::Range;

use dressage_model::{ModelConfig, Parameter};

use crate::ops::adamw::Group;

/// A parameter's place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its Hugging Face name and shape.
    pub parameter: Parameter,
    /// Where it lies.
    pub range: Range<usize>,
}

/// Where the parts of one block lie; empty ranges where the model has no such part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayerLayout {
    /// Norm before attention.
    pub attention_norm: Range<usize>,
    /// Query, key and value projections, one below the other.
    pub qkv: Range<usize>,
    /// Their biases.
    pub qkv_bias: Range<usize>,
    /// Norm of each query head.
    pub query_norm: Range<usize>,
    /// Norm of each key head.
    pub key_norm: Range<usize>,
    /// Attention output projection.
    pub output: Range<usize>,
    /// Its bias.
    pub output_bias: Range<usize>,
    /// Norm before the feed-forward part.
    pub mlp_norm: Range<usize>,
    /// Gate and up projections, one below the other.
    pub gate_up: Range<usize>,
    /// Their biases.
    pub gate_up_bias: Range<usize>,
    /// Down projection.
    pub down: Range<usize>,
    /// Its bias.
    pub down_bias: Range<usize>,
}

/// Where everything lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// All parameters, in the order of [`ModelConfig::parameters`].
    pub places: Vec<Place>,
    /// Embedding.
    pub embedding: Range<usize>,
    /// Blocks, first to last.
    pub layers: Vec<LayerLayout>,
    /// Final norm.
    pub norm: Range<usize>,
    /// Head; the embedding itself where they are tied.
    pub head: Range<usize>,
    /// Length of the array.
    pub len: usize,
}

impl Layout {
    /// The layout of a model.
    pub fn new(config: &ModelConfig) -> Self {
        let mut places: Vec<Place> =
            config.parameters().into_iter().map(|parameter| Place { parameter, range: 0..0 }).collect();
        let mut len = 0usize;
        // Lays the parameters whose names are `prefix` + one of `names` next to each other.
        let mut lay = |prefix: &str, names: &[&str]| -> Range<usize> {
            len = len.next_multiple_of(64);
            let start = len;
            for name in names {
                let wanted = format!("{prefix}{name}");
                if let Some(place) = places.iter_mut().find(|p| p.parameter.name == wanted) {
                    let size: usize = place.parameter.shape.iter().product();
                    place.range = len..len + size;
                    len += size;
                }
            }
            start..len
        };
        let embedding = lay("model.embed_tokens", &[".weight"]);
        let layers = (0..config.layers)
            .map(|layer| {
                let prefix = format!("model.layers.{layer}.");
                let mut lay = |names: &[&str]| lay(&prefix, names);
                LayerLayout {
                    attention_norm: lay(&["input_layernorm.weight"]),
                    qkv: lay(&[
                        "self_attn.q_proj.weight",
                        "self_attn.k_proj.weight",
                        "self_attn.v_proj.weight",
                    ]),
                    qkv_bias: lay(&[
                        "self_attn.q_proj.bias",
                        "self_attn.k_proj.bias",
                        "self_attn.v_proj.bias",
                    ]),
                    query_norm: lay(&["self_attn.q_norm.weight"]),
                    key_norm: lay(&["self_attn.k_norm.weight"]),
                    output: lay(&["self_attn.o_proj.weight"]),
                    output_bias: lay(&["self_attn.o_proj.bias"]),
                    mlp_norm: lay(&["post_attention_layernorm.weight"]),
                    gate_up: lay(&["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
                    gate_up_bias: lay(&["mlp.gate_proj.bias", "mlp.up_proj.bias"]),
                    down: lay(&["mlp.down_proj.weight"]),
                    down_bias: lay(&["mlp.down_proj.bias"]),
                }
            })
            .collect();
        let norm = lay("model.norm", &[".weight"]);
        let head = if config.tied { embedding.clone() } else { lay("lm_head", &[".weight"]) };
        Layout { places, embedding, layers, norm, head, len: len.next_multiple_of(64) }
    }

    /// The parameters as groups for the optimiser: weight decay applies to matrices only.
    pub fn groups(&self) -> Vec<Group> {
        self.places
            .iter()
            .map(|p| Group { start: p.range.start, len: p.range.len(), decay: p.parameter.shape.len() > 1 })
            .collect()
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        self.places.iter().map(|p| p.range.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tiny_config;

    #[test]
    fn every_parameter_has_its_own_place() {
        for (qkv_bias, qk_norm, tied) in [(true, false, true), (false, true, false)] {
            let config =
                ModelConfig { qkv_bias, qk_norm, tied, output_bias: true, mlp_bias: true, ..tiny_config() };
            let layout = Layout::new(&config);
            let mut ranges: Vec<_> = layout.places.iter().map(|p| p.range.clone()).collect();
            ranges.sort_by_key(|r| r.start);
            assert!(ranges.iter().all(|r| !r.is_empty()));
            assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
            assert!(ranges[ranges.len() - 1].end <= layout.len);
            assert_eq!(layout.layers[1].query_norm.is_empty(), !qk_norm);
            assert_eq!(layout.head == layout.embedding, tied);
        }
    }
}
