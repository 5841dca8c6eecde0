//! Configuration of a decoder-only transformer, independent of the file format: sizes, rotary
//! embedding, attention pattern and parameters.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::family::{Activation, AttentionBias, Family, FamilyTraits, Windows};

/// Layers that differ from full attention with rotary embedding, by index. Layer indices start at
/// 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AttentionPattern {
    /// Number of positions that a query of a windowed layer attends to: the last positions,
    /// including the query's own position. `None` only if `windowed` is empty.
    pub window: Option<usize>,
    /// Indices of the layers with the sliding window `window`.
    pub windowed: BTreeSet<usize>,
    /// Rotary embedding of the windowed layers. `None` if they use the same rotary embedding as all
    /// other layers.
    pub local_rope: Option<Rope>,
    /// Indices of the layers without rotary embedding.
    pub unrotated: BTreeSet<usize>,
}

/// Rotary position embedding (RoPE) of the half-split ("rotate half") layout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the geometric series of wavelengths; positive.
    pub theta: f32,
    /// Scaling of the frequencies for contexts longer than the original.
    pub scaling: RopeScaling,
}

/// A method of scaling rotary frequencies, with the parameters of the `rope_scaling` entry of a
/// Hugging Face `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// No scaling of the frequencies.
    None,
    /// All frequencies are divided by `factor`.
    Linear {
        /// Divisor of the frequencies; positive.
        factor: f32,
    },
    /// Llama 3: frequencies of long wavelengths are divided by `factor`, frequencies of short
    /// wavelengths are kept, and frequencies between them are interpolated.
    Llama3 {
        /// Divisor of the frequencies of long wavelengths; positive.
        factor: f32,
        /// Wavelengths above `original_context` / `low_freq_factor` count as long.
        low_freq_factor: f32,
        /// Wavelengths below `original_context` / `high_freq_factor` count as short. Exceeds
        /// `low_freq_factor`.
        high_freq_factor: f32,
        /// Context length before scaling, in tokens; positive.
        original_context: usize,
    },
    /// YaRN (Peng et al. 2023), including the method's scaling of the attention logits.
    Yarn {
        /// Divisor of the frequencies of long wavelengths; positive.
        factor: f32,
        /// Dimensions that make more rotations than this over the original context keep their
        /// frequency.
        beta_fast: f32,
        /// Dimensions that make fewer rotations than this over the original context have their
        /// frequency divided by `factor`.
        beta_slow: f32,
        /// Factor by which cosines and sines are multiplied. `None` means 0.1 ln(`factor`) + 1.
        attention_factor: Option<f32>,
        /// Context length before scaling, in tokens; positive.
        original_context: usize,
    },
}

/// Architecture of a decoder-only transformer: sizes, options and special token ids.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Model family, which determines what each block computes.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// Width of the gated feed-forward layer.
    pub intermediate: usize,
    /// Number of rows of the embedding, which is the number of token ids.
    pub vocabulary: usize,
    /// Maximum sequence length, in tokens.
    pub context: usize,
    /// Epsilon of the RMS norms.
    pub norm_epsilon: f32,
    /// Rotary embedding of the layers. `pattern` lists the layers with another rotary embedding and
    /// the layers without one.
    pub rope: Rope,
    /// Layers with a sliding window or without rotary embedding.
    pub pattern: AttentionPattern,
    /// Number by whose square root attention scores are divided. `None` means the head width
    /// `head_dim`.
    pub query_scalar: Option<f32>,
    /// Whether the output head shares the embedding's weights.
    pub tied: bool,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalized per head.
    pub qk_norm: bool,
    /// Id of the token that starts a text. `None` if the model has none.
    pub bos: Option<u32>,
    /// Ids of the tokens that end a text.
    pub eos: Vec<u32>,
    /// Id of the padding token. `None` if the model has none.
    pub pad: Option<u32>,
}

/// Name and shape of a weight tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameter {
    /// Name of the parameter in Hugging Face files.
    pub name: String,
    /// Shape of the tensor, row-major. The shape of a projection is `[outputs, inputs]`.
    pub shape: Vec<usize>,
}

impl ModelConfig {
    /// Returns this configuration converted to a model of `family` with the same sizes.
    ///
    /// The result has what every model of the family has: norms of queries and keys, biases, a
    /// rotary embedding of windowed layers. Options that only some models of the family enable are
    /// off.
    pub fn with_family(self, family: Family) -> Self {
        let traits = family.traits();
        let local_rope = traits.local_theta.map(|theta| Rope { theta, scaling: RopeScaling::None });
        Self {
            family,
            pattern: AttentionPattern { local_rope, ..AttentionPattern::default() },
            query_scalar: traits.query_scalar,
            qkv_bias: traits.attention_bias == AttentionBias::QueryKeyValue,
            output_bias: false,
            mlp_bias: false,
            qk_norm: traits.qk_norm,
            ..self
        }
    }

    /// Returns the number of positions that a query of `layer` attends to, including the query's
    /// own position. Returns `None` for full attention.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.pattern.window.filter(|_| self.pattern.windowed.contains(&layer))
    }

    /// Returns the factor by which attention scores are multiplied: 1 / √`query_scalar`, or 1 /
    /// √`head_dim` by default.
    pub fn attention_scale(&self) -> f32 {
        1.0 / self.query_scalar.unwrap_or(self.head_dim as f32).sqrt()
    }

    /// Returns the number that norms add to their weight: 0 if they scale by the weight w, 1 if
    /// they scale by 1 + w.
    pub fn norm_offset(&self) -> f32 {
        self.family.traits().blocks.norm_offset
    }

    /// Returns whether the outputs of attention and of the feed-forward part are normalized before
    /// they are added to the residual stream.
    pub fn has_post_norms(&self) -> bool {
        self.family.traits().blocks.post_norms
    }

    /// Returns the factor by which input embeddings are multiplied: √`hidden`, rounded to f32 as
    /// transformers rounds it to the type of the embedding table. Returns `None` if embeddings are
    /// not scaled. The output head is never scaled.
    pub fn embedding_scale(&self) -> Option<f32> {
        self.family.traits().blocks.scaled_embedding.then(|| (self.hidden as f64).sqrt() as f32)
    }

    /// Returns the activation function of the feed-forward gate.
    pub fn activation(&self) -> Activation {
        self.family.traits().blocks.activation
    }

    /// Returns the names of a block's norms: before attention, after attention, before the
    /// feed-forward part, after the feed-forward part. The name of an absent norm is empty.
    pub fn block_norms(&self) -> [&'static str; 4] {
        if self.has_post_norms() {
            [
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ]
        } else {
            ["input_layernorm", "", "post_attention_layernorm", ""]
        }
    }

    /// Returns all weight tensors of the model under their Hugging Face names. The order is fixed:
    /// embedding, blocks from first to last, final norm, output head (unless it is tied to the
    /// embedding).
    pub fn parameters(&self) -> Vec<Parameter> {
        let hidden = self.hidden;
        let intermediate = self.intermediate;
        let head_dim = self.head_dim;
        let queries = self.heads * head_dim;
        let keys = self.kv_heads * head_dim;
        let mut all = Vec::new();
        let mut add =
            |name: String, shape: &[usize]| all.push(Parameter { name, shape: shape.to_vec() });
        add("model.embed_tokens.weight".into(), &[self.vocabulary, hidden]);
        for layer in 0..self.layers {
            let mut block =
                |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}"), shape);
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

    /// Describes the first contradiction that makes the configuration impossible, or returns `None`
    /// if the configuration is possible. The upper bounds are far above the sizes of any model.
    /// They prevent arithmetic on a damaged file's numbers from overflowing.
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
                return Some(format!("the {name} is {value}; it must be between 1 and {limit}"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Some(format!(
                "the number of attention heads, {}, is not a multiple of the number of key and \
                 value heads, {}",
                self.heads, self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Some(format!(
                "the head dimension {} is odd; it must be even, because the rotary embedding \
                 rotates pairs of channels",
                self.head_dim
            ));
        }
        if !(self.norm_epsilon.is_finite() && self.norm_epsilon >= 0.0) {
            return Some(format!(
                "the norm epsilon is {}; it must be a finite number ≥ 0",
                self.norm_epsilon
            ));
        }
        if !(self.rope.theta.is_finite() && self.rope.theta > 0.0) {
            return Some(format!(
                "the rotary base is {}; it must be a positive number",
                self.rope.theta
            ));
        }
        let FamilyTraits { title, attention_bias, mlp_bias, qk_norm, .. } = self.family.traits();
        match attention_bias {
            AttentionBias::QueryKeyValue if self.qkv_bias && !self.output_bias => {}
            AttentionBias::QueryKeyValue => {
                return Some(format!(
                    "a {title} model must have biases on its query, key and value projections, and \
                     none on its output projection"
                ));
            }
            _ if self.qkv_bias != self.output_bias => {
                return Some(
                    "only some of the attention projections have biases; in this model family, all \
                     or none must have them"
                        .into(),
                );
            }
            AttentionBias::Never if self.qkv_bias => {
                return Some(format!("a {title} model must not have biases"));
            }
            AttentionBias::Never | AttentionBias::Configured => {}
        }
        if self.mlp_bias && !mlp_bias {
            return Some(
                "the feed-forward layers have biases, but no model of this family has them".into(),
            );
        }
        if self.qk_norm != *qk_norm {
            let normed =
                FamilyTraits::list_names(|traits| traits.qk_norm.then(|| traits.title.into()));
            return Some(format!(
                "norms on queries and keys are used by {normed}, which require them, and by no \
                 other model"
            ));
        }
        self.rope.scaling.contradiction().or_else(|| self.pattern_contradiction())
    }

    /// Describes the first contradiction in the attention pattern, or returns `None` if the pattern
    /// is possible.
    fn pattern_contradiction(&self) -> Option<String> {
        let AttentionPattern { window, windowed, local_rope, unrotated } = &self.pattern;
        let traits = self.family.traits();
        let title = traits.title;
        if let Some(layer) = windowed.iter().chain(unrotated).find(|layer| **layer >= self.layers) {
            return Some(format!(
                "an attention type is set for layer {layer}, but there are {} layers",
                self.layers
            ));
        }
        if window.is_none_or(|window| window == 0) && !windowed.is_empty() {
            return Some("layers have a sliding window, but its size is missing or 0".into());
        }
        match traits.windows {
            Windows::Never if !windowed.is_empty() => {
                return Some(format!("a {title} model must not have a sliding window"));
            }
            Windows::Every if !windowed.is_empty() && windowed.len() != self.layers => {
                return Some(format!(
                    "a {title} model must have a sliding window on every layer or on none"
                ));
            }
            _ => {}
        }
        if traits.unrotated_interval.is_none() && !unrotated.is_empty() {
            let owners = family_titles(|traits| traits.unrotated_interval.is_some());
            return Some(format!("only {owners} can have layers without rotary embedding"));
        }
        if let Some(rope) = local_rope {
            if !(rope.theta.is_finite() && rope.theta > 0.0) {
                return Some(format!(
                    "the local rotary base is {}; it must be a positive number",
                    rope.theta
                ));
            }
            if rope.scaling != RopeScaling::None {
                return Some("the local rotary embedding is scaled, but no model scales it".into());
            }
        }
        if local_rope.is_some() != traits.local_theta.is_some() {
            let owners = family_titles(|traits| traits.local_theta.is_some());
            return Some(format!(
                "a local rotary embedding is used by {owners}, which require it, and by no other \
                 model"
            ));
        }
        if self.query_scalar.is_some() && traits.query_scalar.is_none() {
            let owners = family_titles(|traits| traits.query_scalar.is_some());
            return Some(format!("only {owners} can have a query scalar"));
        }
        match self.query_scalar {
            Some(scalar) if !(scalar.is_finite() && scalar > 0.0) => {
                Some(format!("the query scalar is {scalar}; it must be a positive number"))
            }
            _ => None,
        }
    }
}

fn family_titles(has: fn(&FamilyTraits) -> bool) -> String {
    FamilyTraits::list_names(|traits| has(traits).then(|| traits.title.into()))
}

impl RopeScaling {
    /// Describes the first impossible parameter of the scaling, or returns `None` if all parameters
    /// are possible.
    fn contradiction(&self) -> Option<String> {
        match *self {
            Self::None => None,
            Self::Linear { factor } => positivity_problem("factor", factor),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positivity_problem("factor", factor)
                    .or_else(|| positivity_problem("low frequency factor", low_freq_factor))
                    .or_else(|| positivity_problem("high frequency factor", high_freq_factor))
                    .or_else(|| original_context_problem(original_context))
                    .or_else(|| {
                        (high_freq_factor <= low_freq_factor).then(|| {
                    format!(
                        "the rotary scaling's high frequency factor {high_freq_factor} must exceed \
                         the low frequency factor {low_freq_factor}"
                    )
                })
                    })
            }
            Self::Yarn { factor, beta_fast, beta_slow, attention_factor, original_context } => {
                positivity_problem("factor", factor)
                    .or_else(|| positivity_problem("beta_fast", beta_fast))
                    .or_else(|| positivity_problem("beta_slow", beta_slow))
                    .or_else(|| {
                        attention_factor
                            .and_then(|value| positivity_problem("attention factor", value))
                    })
                    .or_else(|| original_context_problem(original_context))
            }
        }
    }
}

fn positivity_problem(name: &str, value: f32) -> Option<String> {
    (!(value.is_finite() && value > 0.0))
        .then(|| format!("the rotary scaling's {name} is {value}; it must be a positive number"))
}

fn original_context_problem(value: usize) -> Option<String> {
    (value == 0)
        .then(|| "the rotary scaling's original context is 0; it must be positive".to_string())
}
