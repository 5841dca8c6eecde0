//! Numbers of a decoder-only transformer, whatever file they came from.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// A family of architectures, by what distinguishes it from the shared blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Llama 2 and 3, SmolLM2: no biases unless the configuration asks for them.
    Llama,
    /// Mistral: Llama with a sliding window on every layer, or on none.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on the query, key and value projections.
    Qwen2,
    /// Qwen3: RMS norm over each head of queries and keys, before the rotary embedding.
    Qwen3,
    /// Gemma 3: norms that scale by 1 + w, before and after attention and the feed-forward part, norms of
    /// queries and keys, GELU, scaled embeddings, and most layers with a sliding window.
    Gemma3,
    /// SmolLM3: Llama with some layers whose queries and keys are not rotated.
    #[serde(rename = "smollm3")]
    SmolLm3,
}

/// The function that gates the feed-forward part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x / (1 + exp(−x)).
    Silu,
    /// x Φ(x) with Φ by tanh (Hendrycks & Gimpel 2016), `gelu_pytorch_tanh` in transformers.
    GeluTanh,
}

/// Layers that do not attend to their whole path by rotated queries and keys. Layers count from 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Pattern {
    /// Positions that a query of a windowed layer sees: the last ones up to its own.
    pub window: Option<usize>,
    /// Layers with that window.
    pub windowed: BTreeSet<usize>,
    /// Rotary embedding of the windowed layers, where they have one of their own.
    pub local_rope: Option<Rope>,
    /// Layers without rotary embedding.
    pub unrotated: BTreeSet<usize>,
}

/// Rotary position embedding, the half-split ("rotate half") kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f32,
    /// How the frequencies are stretched for contexts longer than the original.
    pub scaling: RopeScaling,
}

/// Ways to stretch rotary frequencies, with the parameters of the `rope_scaling` entry of a Hugging Face
/// `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// Positions left as trained.
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
    /// Layers that attend otherwise.
    pub pattern: Pattern,
    /// Attention scores are divided by the root of this; `None` takes `head_dim`.
    pub query_scalar: Option<f32>,
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

/// A weight that a model has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Hugging Face name.
    pub name: String,
    /// Shape, row-major: a projection is `[outputs, inputs]`.
    pub shape: Vec<usize>,
}

impl ModelConfig {
    /// Positions that a query of a layer sees, its own included; `None` for the whole path.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.pattern.window.filter(|_| self.pattern.windowed.contains(&layer))
    }

    /// Factor of attention scores.
    pub fn attention_scale(&self) -> f32 {
        1.0 / self.query_scalar.unwrap_or(self.head_dim as f32).sqrt()
    }

    /// Number to which the weight of a norm is added: norms scale by their weight, or by 1 + weight.
    pub fn norm_offset(&self) -> f32 {
        if self.family == Family::Gemma3 { 1.0 } else { 0.0 }
    }

    /// Whether the outputs of attention and of the feed-forward part are normalised before they are added to
    /// the residual stream.
    pub fn has_post_norms(&self) -> bool {
        self.family == Family::Gemma3
    }

    /// Factor of embeddings on their way in (not in the head), where there is one: the root of the width,
    /// rounded to f32 as transformers rounds it to the type of the table.
    pub fn embedding_scale(&self) -> Option<f32> {
        (self.family == Family::Gemma3).then(|| (self.hidden as f64).sqrt() as f32)
    }

    /// Gate of the feed-forward part.
    pub fn activation(&self) -> Activation {
        if self.family == Family::Gemma3 { Activation::GeluTanh } else { Activation::Silu }
    }

    /// Names of a block's norms, as far as it has them: before attention, after it, before the feed-forward
    /// part, after it.
    pub fn block_norms(&self) -> [&'static str; 4] {
        match self.has_post_norms() {
            true => [
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ],
            false => ["input_layernorm", "", "post_attention_layernorm", ""],
        }
    }

    /// Every weight of the model under its Hugging Face name, in a fixed order: embedding, blocks from first
    /// to last, final norm, head (where it is not tied to the embedding).
    pub fn parameters(&self) -> Vec<Parameter> {
        let (hidden, intermediate, head_dim) = (self.hidden, self.intermediate, self.head_dim);
        let (queries, keys) = (self.heads * head_dim, self.kv_heads * head_dim);
        let mut all = Vec::new();
        let mut add = |name: String, shape: &[usize]| all.push(Parameter { name, shape: shape.to_vec() });
        add("model.embed_tokens.weight".into(), &[self.vocabulary, hidden]);
        for layer in 0..self.layers {
            let mut block = |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}"), shape);
            let [before_attention, after_attention, before_mlp, after_mlp] = self.block_norms();
            block(&format!("{before_attention}.weight"), &[hidden]);
            for (name, outputs, inputs, bias) in [
                ("q_proj", queries, hidden, self.qkv_bias),
                ("k_proj", keys, hidden, self.qkv_bias),
                ("v_proj", keys, hidden, self.qkv_bias),
                ("o_proj", hidden, queries, self.output_bias),
            ] {
                block(&format!("self_attn.{name}.weight"), &[outputs, inputs]);
                if bias {
                    block(&format!("self_attn.{name}.bias"), &[outputs]);
                }
            }
            if self.qk_norm {
                block("self_attn.q_norm.weight", &[head_dim]);
                block("self_attn.k_norm.weight", &[head_dim]);
            }
            for norm in [after_attention, before_mlp].into_iter().filter(|norm| !norm.is_empty()) {
                block(&format!("{norm}.weight"), &[hidden]);
            }
            for (name, outputs, inputs) in [
                ("gate_proj", intermediate, hidden),
                ("up_proj", intermediate, hidden),
                ("down_proj", hidden, intermediate),
            ] {
                block(&format!("mlp.{name}.weight"), &[outputs, inputs]);
                if self.mlp_bias {
                    block(&format!("mlp.{name}.bias"), &[outputs]);
                }
            }
            if !after_mlp.is_empty() {
                block(&format!("{after_mlp}.weight"), &[hidden]);
            }
        }
        add("model.norm.weight".into(), &[hidden]);
        if !self.tied {
            add("lm_head.weight".into(), &[self.vocabulary, hidden]);
        }
        all
    }

    /// First contradiction that makes the configuration impossible, if any. The upper bounds are far beyond
    /// any model; they keep the arithmetic on a damaged file's numbers from overflowing.
    pub(crate) fn contradiction(&self) -> Option<String> {
        for (name, value, limit) in [
            ("hidden size", self.hidden, 1 << 20),
            ("number of layers", self.layers, 1 << 12),
            ("number of attention heads", self.heads, 1 << 14),
            ("number of key and value heads", self.kv_heads, 1 << 14),
            ("head dimension", self.head_dim, 1 << 14),
            ("feed-forward size", self.intermediate, 1 << 24),
            ("vocabulary size", self.vocabulary, 1 << 28),
            ("context length", self.context, 1 << 40),
        ] {
            if value == 0 || value > limit {
                return Some(format!("the {name} is {value}; it must lie between 1 and {limit}"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Some(format!(
                "{} attention heads cannot share {} key and value heads evenly",
                self.heads, self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Some(format!(
                "the head dimension {} is odd; the rotary embedding needs pairs",
                self.head_dim
            ));
        }
        if !(self.norm_epsilon.is_finite() && self.norm_epsilon >= 0.0) {
            return Some(format!("the norm epsilon {} is not a small number ≥ 0", self.norm_epsilon));
        }
        if !(self.rope.theta.is_finite() && self.rope.theta > 0.0) {
            return Some(format!("the rotary base {} is not a positive number", self.rope.theta));
        }
        if self.family != Family::Qwen2 && self.qkv_bias != self.output_bias {
            return Some(
                "biases on only some of the attention projections fit no model of this family".into(),
            );
        }
        if self.family == Family::Qwen2 && (!self.qkv_bias || self.output_bias) {
            return Some(
                "a Qwen2 model has biases on its query, key and value projections and on no other of attention".into(),
            );
        }
        if self.mlp_bias && !matches!(self.family, Family::Llama | Family::SmolLm3) {
            return Some("feed-forward biases fit no model of this family".into());
        }
        if self.family == Family::Mistral && self.qkv_bias {
            return Some("a Mistral model has no biases".into());
        }
        if self.qk_norm != matches!(self.family, Family::Qwen3 | Family::Gemma3) {
            return Some("norms on queries and keys belong to Qwen3 and Gemma 3, and these have them".into());
        }
        self.rope.scaling.contradiction().or_else(|| self.impossible_pattern())
    }

    /// First contradiction in how layers attend.
    fn impossible_pattern(&self) -> Option<String> {
        let Pattern { window, windowed, local_rope, unrotated } = &self.pattern;
        let gemma = self.family == Family::Gemma3;
        if let Some(layer) = windowed.iter().chain(unrotated).find(|layer| **layer >= self.layers) {
            return Some(format!(
                "layer {layer} is given a kind of attention, but there are {} layers",
                self.layers
            ));
        }
        if window.is_none_or(|window| window == 0) && !windowed.is_empty() {
            return Some("layers have a sliding window, but its size is missing or 0".into());
        }
        if self.family == Family::Llama && !windowed.is_empty() {
            return Some("a Llama model has no sliding window".into());
        }
        if self.family == Family::Mistral && !windowed.is_empty() && windowed.len() != self.layers {
            return Some("a Mistral model has a sliding window on every layer or on none".into());
        }
        if self.family != Family::SmolLm3 && !unrotated.is_empty() {
            return Some("layers without rotary embedding belong to SmolLM3".into());
        }
        if let Some(rope) = local_rope {
            if !(rope.theta.is_finite() && rope.theta > 0.0) {
                return Some(format!("the local rotary base {} is not a positive number", rope.theta));
            }
            if rope.scaling != RopeScaling::None {
                return Some("the local rotary embedding is scaled, which fits no model".into());
            }
        }
        if local_rope.is_some() != gemma || (self.query_scalar.is_some() && !gemma) {
            return Some("a local rotary embedding and a scalar of queries belong to Gemma 3".into());
        }
        match self.query_scalar {
            Some(scalar) if !(scalar.is_finite() && scalar > 0.0) => {
                Some(format!("the scalar of queries is {scalar}; it must be a positive number"))
            }
            _ => None,
        }
    }
}

impl RopeScaling {
    fn contradiction(&self) -> Option<String> {
        let positive = |name: &str, value: f32| {
            (!(value.is_finite() && value > 0.0))
                .then(|| format!("the rotary scaling's {name} is {value}; it must be a positive number"))
        };
        let context = |value: usize| {
            (value == 0)
                .then(|| "the rotary scaling's original context is 0; it must be positive".to_string())
        };
        match *self {
            Self::None => None,
            Self::Linear { factor } => positive("factor", factor),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("factor", factor)
                    .or_else(|| positive("low frequency factor", low_freq_factor))
                    .or_else(|| positive("high frequency factor", high_freq_factor))
                    .or_else(|| context(original_context))
                    .or_else(|| {
                        (high_freq_factor <= low_freq_factor).then(|| {
                    format!(
                        "the rotary scaling's high frequency factor {high_freq_factor} does not exceed the \
                                 low one, {low_freq_factor}"
                    )
                })
                    })
            }
            Self::Yarn { factor, beta_fast, beta_slow, attention_factor, original_context } => {
                positive("factor", factor)
                    .or_else(|| positive("beta_fast", beta_fast))
                    .or_else(|| positive("beta_slow", beta_slow))
                    .or_else(|| attention_factor.and_then(|value| positive("attention factor", value)))
                    .or_else(|| context(original_context))
            }
        }
    }
}
