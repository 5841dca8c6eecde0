//! From Hugging Face tensor names to GGUF's, and between the two orders of rows.

use crate::ModelConfig;

/// Where a parameter is in a GGUF file.
#[derive(Debug, PartialEq)]
pub(super) struct Place {
    pub(super) name: String,
    /// Heads whose rows stand in interleaved order; `None` where rows are in order.
    pub(super) interleaved_heads: Option<usize>,
    /// Number that the file's values have more than the model's: norms that scale by 1 + w are stored as
    /// that sum.
    pub(super) offset: f32,
}

/// Tensors outside the blocks: (Hugging Face, GGUF).
const OUTER: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// A block's norms in the order of [`ModelConfig::block_norms`].
const NORMS: [&str; 4] = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"];

/// Other modules of a block: (Hugging Face, GGUF). Both add `.weight` or `.bias`.
const MODULES: [(&str, &str); 9] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Where the parameter with this Hugging Face name is; `None` for names that no model here has.
pub(super) fn place(config: &ModelConfig, name: &str) -> Option<Place> {
    let offset = if name.ends_with("norm.weight") { config.norm_offset() } else { 0.0 };
    if let Some((_, outer)) = OUTER.iter().find(|(hf, _)| *hf == name) {
        return Some(Place { name: (*outer).to_string(), interleaved_heads: None, offset });
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    let norms = config.block_norms();
    let (_, gguf) = norms
        .iter()
        .zip(&NORMS)
        .chain(MODULES.iter().map(|(hf, gguf)| (hf, gguf)))
        .find(|(hf, _)| **hf == module)?;
    let is_interleaved = config.family.traits().gguf.as_ref().is_some_and(|gguf| gguf.interleaved);
    let interleaved_heads = match *gguf {
        "attn_q" if is_interleaved => Some(config.heads),
        "attn_k" if is_interleaved => Some(config.kv_heads),
        _ => None,
    };
    Some(Place { name: format!("blk.{layer}.{gguf}.{kind}"), interleaved_heads, offset })
}

/// The row of an interleaved matrix that belongs at `row` of the half-split one: within a head of width `d`,
/// row `half × d/2 + i` comes from row `2 i + half`.
pub(super) fn interleaved_row(row: usize, head_dim: usize) -> usize {
    let (head, within) = (row / head_dim, row % head_dim);
    let (half, i) = (within / (head_dim / 2), within % (head_dim / 2));
    head * head_dim + 2 * i + half
}
