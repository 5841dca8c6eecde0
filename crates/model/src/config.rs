//! What a model is: the numbers of a decoder-only transformer, whatever file they came from.

use serde::{Deserialize, Serialize};

/// A family of architectures, by what distinguishes it from the shared blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Llama 2 and 3, SmolLM2: no biases unless the configuration asks for them.
    Llama,
    /// Qwen2 and Qwen2.5: biases on the query, key and value projections.
    Qwen2,
    /// Qwen3: RMS norm over each head of queries and keys, before the rotary embedding.
    Qwen3,
}

/// Rotary position embedding, the half-split ("rotate half") kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f32,
    /// How the frequencies are stretched for contexts longer than the original.
    pub scaling: RopeScaling,
}

/// Ways to stretch rotary frequencies, with the parameters of the `rope_scaling` entry of a Hugging Face `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// As trained.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f32,
    },
    /// Llama 3: long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f32,
        /// Wavelengths beyond original / this are long.
        low_freq_factor: f32,
        /// Wavelengths under original / this are short.
        high_freq_factor: f32,
        /// Context before stretching.
        original_context: usize,
    },
    /// YaRN (Peng et al. 2023), with its scaling of the attention logits.
    Yarn {
        /// The divisor of long wavelengths.
        factor: f32,
        /// Rotations over the original context above which a dimension is kept.
        beta_fast: f32,
        /// Rotations under which a dimension is divided.
        beta_slow: f32,
        /// Multiplies cosines and sines; `None` takes 0.1 ln(factor) + 1.
        attention_factor: Option<f32>,
        /// Context before stretching.
        original_context: usize,
    },
}

/// The shape of a decoder-only transformer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Which family it belongs to.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Width of the gated feed-forward layer.
    pub intermediate: usize,
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Longest sequence.
    pub context: usize,
    /// Epsilon of the RMS norms.
    pub norm_epsilon: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Whether the head shares the embedding's weights.
    pub tied: bool,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalised per head.
    pub qk_norm: bool,
    /// Token that starts a text, if the model has one.
    pub bos: Option<u32>,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    /// Padding token, if the model has one.
    pub pad: Option<u32>,
}
