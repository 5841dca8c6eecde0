//! Offsets of every parameter in one flat array.
//!
//! Projections that read the same input are adjacent, so that query, key and value (and gate and
//! up) are one matrix for the kernels.

use std::collections::HashMap;
use std::ops::Range;

use levade_model::ModelConfig;

use crate::ops::kv::{AttentionShape, AttentionWindow};
use crate::tensors::Tensors;

/// Returns the shape of a model's attention.
pub fn attention_shape(config: &ModelConfig) -> AttentionShape {
    AttentionShape { heads: config.heads, kv_heads: config.kv_heads, head_dim: config.head_dim }
}

/// Returns the attention scale and window of a layer. Without a window, it is `usize::MAX`.
pub fn attention_window(config: &ModelConfig, layer: usize) -> AttentionWindow {
    AttentionWindow {
        scale: config.attention_scale(),
        window: config.window(layer).unwrap_or(usize::MAX),
    }
}

/// Linear maps of a layer. Projections that read the same input are one map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerMap {
    /// Query, key and value, stacked along the outputs.
    Qkv,
    /// Output projection of attention.
    Output,
    /// Gate and up projections of the feed-forward part, stacked along the outputs.
    GateUp,
    /// Down projection of the feed-forward part.
    Down,
}

impl LayerMap {
    /// All linear maps of a layer, in the order of the forward pass.
    pub const ALL: [LayerMap; 4] =
        [LayerMap::Qkv, LayerMap::Output, LayerMap::GateUp, LayerMap::Down];

    /// Returns the names of the projections within a layer that the map consists of, as in Hugging
    /// Face checkpoints.
    pub fn modules(self) -> &'static [&'static str] {
        match self {
            LayerMap::Qkv => &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            LayerMap::Output => &["self_attn.o_proj"],
            LayerMap::GateUp => &["mlp.gate_proj", "mlp.up_proj"],
            LayerMap::Down => &["mlp.down_proj"],
        }
    }
}

/// One linear map of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearMap {
    /// Index of the layer.
    pub layer: usize,
    /// Linear map within the layer.
    pub site: LayerMap,
}

impl LinearMap {
    /// Returns all maps of a model with `layers` layers, in the order of the forward pass.
    pub fn all(layers: usize) -> impl Iterator<Item = LinearMap> {
        (0..layers).flat_map(|layer| LayerMap::ALL.map(|site| LinearMap { layer, site }))
    }

    /// Returns the index of the map among all linear maps of the model.
    pub fn index(self) -> usize {
        self.layer * LayerMap::ALL.len() + self.site as usize
    }
}

/// Location and size of a linear map in the parameter array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearLayout {
    /// Range of the weight matrix, `outputs` × `inputs`.
    pub weight: Range<usize>,
    /// Range of the bias, `outputs` values; empty if the map has no bias.
    pub bias: Range<usize>,
    /// Number of rows of the weight matrix.
    pub outputs: usize,
    /// Number of columns of the weight matrix.
    pub inputs: usize,
}

/// Ranges of one layer's parameters in the parameter array. A range is empty if the model does not
/// have the parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerLayout {
    /// Range of the weights of the norm before attention.
    pub attention_norm: Range<usize>,
    /// Range of the weights of the norm of attention's output.
    pub attention_post_norm: Range<usize>,
    /// Range of the weights of the norm of each query head.
    pub query_norm: Range<usize>,
    /// Range of the weights of the norm of each key head.
    pub key_norm: Range<usize>,
    /// Range of the weights of the norm before the feed-forward part.
    pub mlp_norm: Range<usize>,
    /// Range of the weights of the norm of the feed-forward part's output.
    pub mlp_post_norm: Range<usize>,
    linear: [LinearLayout; 4],
}

/// Ranges of all parameters of a model in the parameter array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterLayout {
    /// Tensors of all parameters, under their Hugging Face names.
    pub tensors: Tensors,
    /// Range of the token embedding.
    pub embedding: Range<usize>,
    /// Layouts of the layers, first to last.
    pub layers: Vec<LayerLayout>,
    /// Range of the weights of the final norm.
    pub norm: Range<usize>,
    /// Range of the output head; equals the range of the embedding if head and embedding are tied.
    pub head: Range<usize>,
}

impl ParameterLayout {
    /// Creates the layout of a model.
    pub fn new(config: &ModelConfig) -> Self {
        let mut remaining: HashMap<_, _> = config
            .parameters()
            .into_iter()
            .map(|parameter| (parameter.name.clone(), parameter))
            .collect();
        let mut tensors = Tensors::default();
        // Places the parameters whose names are `prefix` + one of `names` next to each other.
        let mut lay = |prefix: &str, names: &[String]| {
            tensors.append(
                names.iter().filter_map(|name| remaining.remove(&format!("{prefix}{name}"))),
            )
        };
        let embedding = lay("model.embed_tokens", &single_name(".weight"));
        let layers = (0..config.layers)
            .map(|layer| {
                let prefix = format!("model.layers.{layer}.");
                let mut lay = |names: &[String]| lay(&prefix, names);
                let mut linear = |site: LayerMap, outputs, inputs| {
                    let named = |part: &str| -> Vec<String> {
                        site.modules().iter().map(|module| format!("{module}.{part}")).collect()
                    };
                    LinearLayout {
                        weight: lay(&named("weight")),
                        bias: lay(&named("bias")),
                        outputs,
                        inputs,
                    }
                };
                let shape = attention_shape(config);
                let hidden = config.hidden;
                let wide = config.intermediate;
                let linear = [
                    linear(LayerMap::Qkv, shape.qkv_width(), hidden),
                    linear(LayerMap::Output, hidden, shape.query_width()),
                    linear(LayerMap::GateUp, 2 * wide, hidden),
                    linear(LayerMap::Down, hidden, wide),
                ];
                let [before_attention, after_attention, before_mlp, after_mlp] =
                    config.block_norms().map(|norm| single_name(&format!("{norm}.weight")));
                LayerLayout {
                    attention_norm: lay(&before_attention),
                    attention_post_norm: lay(&after_attention),
                    query_norm: lay(&single_name("self_attn.q_norm.weight")),
                    key_norm: lay(&single_name("self_attn.k_norm.weight")),
                    mlp_norm: lay(&before_mlp),
                    mlp_post_norm: lay(&after_mlp),
                    linear,
                }
            })
            .collect();
        let norm = lay("model.norm", &single_name(".weight"));
        let head =
            if config.tied { embedding.clone() } else { lay("lm_head", &single_name(".weight")) };
        ParameterLayout { tensors, embedding, layers, norm, head }
    }

    /// Returns the layout of a linear map.
    pub fn linear(&self, map: LinearMap) -> &LinearLayout {
        &self.layers[map.layer].linear[map.site as usize]
    }
}

fn single_name(name: &str) -> [String; 1] {
    [name.to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::tiny_config;

    #[test]
    fn layout_gives_parameters_disjoint_ranges() {
        for (qkv_bias, qk_norm, tied) in [(true, false, true), (false, true, false)] {
            let config = ModelConfig {
                qkv_bias,
                qk_norm,
                tied,
                output_bias: true,
                mlp_bias: true,
                ..tiny_config()
            };
            let layout = ParameterLayout::new(&config);
            let mut ranges: Vec<_> =
                layout.tensors.entries.iter().map(|p| p.range.clone()).collect();
            assert_eq!(ranges.len(), config.parameters().len());
            ranges.sort_by_key(|r| r.start);
            assert!(ranges.iter().all(|r| !r.is_empty()));
            assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
            assert!(ranges[ranges.len() - 1].end <= layout.tensors.len);
            assert_eq!(
                layout.linear(LinearMap { layer: 1, site: LayerMap::Output }).bias.len(),
                config.hidden
            );
            assert_eq!(layout.layers[1].query_norm.is_empty(), !qk_norm);
            assert!(
                layout.layers[1].attention_post_norm.is_empty()
                    && layout.layers[1].mlp_post_norm.is_empty()
            );
            assert_eq!(layout.head == layout.embedding, tied);
        }
    }
}
