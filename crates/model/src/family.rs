//! Traits of the model families: what each one's blocks have, what its files say when they say nothing, and
//! the names of both in Hugging Face's files and in GGUF.
//!
//! Readers, writers and checks of configurations derive from these rows, and so do the small models of tests.
//! A family whose blocks are made of parts that the engine has needs a variant of [`Family`] and a row here,
//! and cases in `conformance/models.py`.

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

/// What a family has.
#[derive(Debug)]
pub struct Traits {
    /// The family.
    pub family: Family,
    /// Its name in messages.
    pub title: &'static str,
    /// Other models that have its blocks, for messages; may be empty.
    pub relatives: &'static str,
    /// `model_type` in a `config.json`.
    pub model_type: &'static str,
    /// `model_type` of models of text and images whose text part belongs to this family.
    pub model_type_with_images: Option<&'static str>,
    /// Class in transformers.
    pub class: &'static str,
    /// How its GGUF files differ; `None` if they bear another family's architecture.
    pub gguf: Option<Gguf>,
    /// What every block computes.
    pub blocks: Blocks,
    /// Whether queries and keys are normalized per head.
    pub qk_norm: bool,
    /// Which projections of attention have biases.
    pub attention_bias: AttentionBias,
    /// Whether files may ask for biases in the feed-forward part.
    pub mlp_bias: bool,
    /// Layers with a sliding window.
    pub windows: Windows,
    /// Layers without rotary embedding unless a file lists them: every n-th. `None` if all layers have it.
    pub unrotated_interval: Option<usize>,
    /// Rotary base of layers with a window unless a file says another, for families in which it is their own.
    pub local_theta: Option<f32>,
    /// Square of the divisor of attention scores unless a file says another; `None` if it is the head's
    /// width.
    pub query_scalar: Option<f32>,
    /// Keys of a `config.json` under which it would compute otherwise.
    pub refused: &'static [&'static str],
    /// What absent keys of a `config.json` mean.
    pub defaults: Defaults,
}

/// The function that gates the feed-forward part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x / (1 + exp(−x)).
    Silu,
    /// x Φ(x) with Φ by tanh (Hendrycks & Gimpel 2016), `gelu_pytorch_tanh` in transformers.
    GeluTanh,
}

/// What a block computes, whatever its sizes: weights of families with equal ones mean the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Blocks {
    /// Number to which the weight of a norm is added.
    pub norm_offset: f32,
    /// Whether the outputs of attention and of the feed-forward part are normalized.
    pub post_norms: bool,
    /// Whether embeddings are multiplied by the root of the width.
    pub scaled_embedding: bool,
    /// Gate of the feed-forward part.
    pub activation: Activation,
}

/// Biases of attention's projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionBias {
    /// Queries, keys and values always have them, and outputs never.
    QueryKeyValue,
    /// No projection has one.
    Never,
    /// All have them if `attention_bias` says so.
    Configured,
}

/// Which layers have a sliding window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// None.
    Never,
    /// All, if a file says a size.
    Every,
    /// All but every n-th, if a file says a size; files may say another n.
    ButEvery(usize),
    /// Those from `max_window_layers` on, if `use_sliding_window` is set.
    Last,
    /// Those without rotary embedding, if `use_sliding_window` is set.
    Unrotated,
}

/// A family's GGUF files.
#[derive(Debug)]
pub struct Gguf {
    /// `general.architecture`.
    pub architecture: &'static str,
    /// Whether converters reorder the rows of each head so that the two members of a rotary pair are
    /// neighbours; otherwise the two halves stand apart, as Hugging Face has them.
    pub interleaved: bool,
    /// The runtime's rotary base where a file does not say.
    pub theta: f32,
}

/// Values that transformers takes where a `config.json` does not say; `None` where a file must say, or where
/// it follows from other numbers.
#[derive(Debug)]
pub struct Defaults {
    pub(crate) heads: Option<usize>,
    /// `None`: as many as query heads.
    pub(crate) kv_heads: Option<usize>,
    /// `None`: the width shared out among the heads.
    pub(crate) head_dim: Option<usize>,
    pub(crate) vocabulary: Option<usize>,
    pub(crate) context: usize,
    pub(crate) theta: f32,
    pub(crate) tied: bool,
    /// Size of sliding windows, where layers have them.
    pub(crate) window: Option<usize>,
}

/// Qwen3's traits without the norms that set it apart: rows say what differs from it.
const PLAIN: Traits = Traits {
    family: Family::Llama,
    title: "",
    relatives: "",
    model_type: "",
    model_type_with_images: None,
    class: "",
    gguf: None,
    blocks: Blocks {
        norm_offset: 0.0,
        post_norms: false,
        scaled_embedding: false,
        activation: Activation::Silu,
    },
    qk_norm: false,
    attention_bias: AttentionBias::Configured,
    mlp_bias: false,
    windows: Windows::Never,
    unrotated_interval: None,
    local_theta: None,
    query_scalar: None,
    refused: &[],
    defaults: DEFAULTS,
};

const DEFAULTS: Defaults = Defaults {
    heads: None,
    kv_heads: None,
    head_dim: None,
    vocabulary: None,
    context: 32_768,
    theta: 10_000.0,
    tied: false,
    window: None,
};

/// The rows, in the order of [`Family`].
static TRAITS: [Traits; 6] = [
    Traits {
        family: Family::Llama,
        title: "Llama",
        relatives: "Llama 2 and 3, SmolLM2",
        model_type: "llama",
        class: "LlamaForCausalLM",
        gguf: Some(Gguf { architecture: "llama", interleaved: true, theta: 10_000.0 }),
        mlp_bias: true,
        defaults: Defaults { context: 2048, ..DEFAULTS },
        ..PLAIN
    },
    Traits {
        family: Family::Mistral,
        title: "Mistral",
        model_type: "mistral",
        class: "MistralForCausalLM",
        attention_bias: AttentionBias::Never,
        windows: Windows::Every,
        defaults: Defaults { kv_heads: Some(8), context: 131_072, window: Some(4096), ..DEFAULTS },
        ..PLAIN
    },
    Traits {
        family: Family::Qwen2,
        title: "Qwen2",
        model_type: "qwen2",
        class: "Qwen2ForCausalLM",
        gguf: Some(Gguf { architecture: "qwen2", interleaved: false, theta: 10_000.0 }),
        attention_bias: AttentionBias::QueryKeyValue,
        windows: Windows::Last,
        defaults: Defaults { window: Some(4096), ..DEFAULTS },
        ..PLAIN
    },
    Traits {
        family: Family::Qwen3,
        title: "Qwen3",
        model_type: "qwen3",
        class: "Qwen3ForCausalLM",
        gguf: Some(Gguf { architecture: "qwen3", interleaved: false, theta: 10_000.0 }),
        qk_norm: true,
        windows: Windows::Last,
        defaults: Defaults { head_dim: Some(128), window: Some(4096), ..DEFAULTS },
        ..PLAIN
    },
    Traits {
        family: Family::Gemma3,
        title: "Gemma 3",
        model_type: "gemma3_text",
        model_type_with_images: Some("gemma3"),
        class: "Gemma3ForCausalLM",
        gguf: Some(Gguf { architecture: "gemma3", interleaved: false, theta: 1_000_000.0 }),
        blocks: Blocks {
            norm_offset: 1.0,
            post_norms: true,
            scaled_embedding: true,
            activation: Activation::GeluTanh,
        },
        qk_norm: true,
        windows: Windows::ButEvery(6),
        local_theta: Some(10_000.0),
        query_scalar: Some(256.0),
        refused: &["final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"],
        // The text part of a larger model says what differs from these alone.
        defaults: Defaults {
            heads: Some(8),
            kv_heads: Some(4),
            head_dim: Some(256),
            vocabulary: Some(262_208),
            context: 131_072,
            theta: 1_000_000.0,
            tied: true,
            window: Some(4096),
        },
        ..PLAIN
    },
    Traits {
        family: Family::SmolLm3,
        title: "SmolLM3",
        model_type: "smollm3",
        class: "SmolLM3ForCausalLM",
        gguf: Some(Gguf { architecture: "smollm3", interleaved: true, theta: 10_000.0 }),
        mlp_bias: true,
        windows: Windows::Unrotated,
        unrotated_interval: Some(4),
        defaults: Defaults { kv_heads: Some(4), theta: 2_000_000.0, tied: true, ..DEFAULTS },
        ..PLAIN
    },
];

impl Family {
    /// Every family.
    pub fn all() -> impl Iterator<Item = Self> {
        TRAITS.iter().map(|traits| traits.family)
    }

    /// What the family has.
    pub fn traits(self) -> &'static Traits {
        &TRAITS[self as usize]
    }
}

impl Traits {
    /// The first family of which `matches` holds.
    pub(crate) fn find(matches: impl Fn(&Traits) -> bool) -> Option<&'static Self> {
        TRAITS.iter().find(|traits| matches(traits))
    }

    /// "a, b and c", of the families that `name` names.
    pub(crate) fn list(name: impl Fn(&Traits) -> Option<String>) -> String {
        let names: Vec<String> = TRAITS.iter().filter_map(name).collect();
        match names.split_last() {
            Some((last, first)) if !first.is_empty() => format!("{} and {last}", first.join(", ")),
            _ => names.concat(),
        }
    }

    /// `name`, with the relatives of the family in parentheses.
    pub(crate) fn with_relatives(&self, name: &str) -> String {
        if self.relatives.is_empty() { name.to_owned() } else { format!("{name} ({})", self.relatives) }
    }
}

impl Windows {
    /// Whether layers have windows only if `use_sliding_window` is set.
    pub(crate) fn are_switched(self) -> bool {
        matches!(self, Self::Last | Self::Unrotated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stand_in_the_order_of_families() {
        for family in Family::all() {
            assert_eq!(family.traits().family, family);
        }
        let name = |traits: &Traits| Some(traits.title.to_owned());
        assert_eq!(Traits::list(name), "Llama, Mistral, Qwen2, Qwen3, Gemma 3 and SmolLM3");
    }
}
