//! Maps Hugging Face tensor names to GGUF names, and converts between the two row orders.

use crate::ModelConfig;

/// Location of a parameter in a GGUF file, and how its stored values differ from the model's.
#[derive(Debug, PartialEq)]
pub(super) struct GgufParameter {
    pub(super) name: String,
    /// Number of heads whose rows are stored in interleaved order. `None` if the rows are in
    /// Hugging Face order.
    pub(super) interleaved_heads: Option<usize>,
    /// Offset that is subtracted from stored values: 1 for norms that scale by 1 + w, because GGUF
    /// stores 1 + w, and otherwise 0.
    pub(super) offset: f32,
}

/// Names of tensors outside the blocks: (Hugging Face, GGUF).
const OUTER: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// GGUF names of a block's norms, in the order of [`ModelConfig::block_norms`].
const NORMS: [&str; 4] = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"];

/// Names of the other modules of a block: (Hugging Face, GGUF). Both formats append `.weight` or
/// `.bias`.
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

/// Returns the location of the parameter with the Hugging Face name `name`, or `None` if no
/// supported model has such a parameter.
pub(super) fn locate_parameter(config: &ModelConfig, name: &str) -> Option<GgufParameter> {
    let offset = if name.ends_with("norm.weight") { config.norm_offset() } else { 0.0 };
    if let Some((_, outer)) = OUTER.iter().find(|(hf, _)| *hf == name) {
        return Some(GgufParameter { name: (*outer).to_string(), interleaved_heads: None, offset });
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
    Some(GgufParameter { name: format!("blk.{layer}.{gguf}.{kind}"), interleaved_heads, offset })
}

/// Returns the row of the interleaved matrix that corresponds to `row` of the half-split matrix.
/// Within a head of width `d`, row `half × d/2 + i` comes from row `2 i + half`.
pub(super) fn interleaved_row(row: usize, head_dim: usize) -> usize {
    let head = row / head_dim;
    let within = row % head_dim;
    let half = within / (head_dim / 2);
    let i = within % (head_dim / 2);
    head * head_dim + 2 * i + half
}
