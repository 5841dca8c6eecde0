//! Table of the supported model families: what their blocks compute, the defaults of absent keys,
//! and their names in Hugging Face files and in GGUF.
//!
//! Readers, writers and checks of configurations derive from the rows of this table, and so do the
//! small models of tests. To add a family whose blocks consist of parts that the engine supports,
//! add a variant of [`Family`], a row here, and cases in `conformance/models.py`.

use serde::{Deserialize, Serialize};

/// Family of model architectures. Each variant lists how the family differs from the common
/// transformer blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Llama 2 and 3, SmolLM2: no biases unless the configuration enables them.
    Llama,
    /// Mistral: Llama with a sliding window on all layers or on none.
    Mistral,
    /// Qwen2 and Qwen2.5: biases on the query, key and value projections.
    Qwen2,
    /// Qwen3: an RMS norm over each head of queries and keys, before the rotary embedding.
    Qwen3,
    /// Gemma 3: norms that scale by 1 + w, before and after attention and the feed-forward part,
    /// norms of queries and keys, GELU, scaled embeddings, and most layers with a sliding window.
    Gemma3,
    /// SmolLM3: Llama in which some layers have no rotary embedding.
    #[serde(rename = "smollm3")]
    SmolLm3,
}

/// Properties of a model family, which form one row of the table of families.
#[derive(Debug)]
pub struct FamilyTraits {
    /// Family that has these properties.
    pub family: Family,
    /// Name of the family in messages.
    pub title: &'static str,
    /// Names of further models with the same blocks, for messages; may be empty.
    pub relatives: &'static str,
    /// Value of `model_type` in the family's `config.json` files.
    pub model_type: &'static str,
    /// Value of `model_type` of multimodal (text and image) models whose text model belongs to this
    /// family. `None` if there are no such models.
    pub model_type_with_images: Option<&'static str>,
    /// Name of the family's model class in transformers.
    pub class: &'static str,
    /// Properties of the family's GGUF files. `None` if these files have another family's
    /// architecture.
    pub gguf: Option<Gguf>,
    /// Computation that every block of the family performs.
    pub blocks: BlockTraits,
    /// Whether queries and keys are normalized per head.
    pub qk_norm: bool,
    /// Attention projections that have biases.
    pub attention_bias: AttentionBias,
    /// Whether files may enable biases in the feed-forward part.
    pub mlp_bias: bool,
    /// Layers that have a sliding window.
    pub windows: Windows,
    /// Default interval n of layers without rotary embedding: every n-th layer, unless the file
    /// lists these layers. `None` if all layers have rotary embedding.
    pub unrotated_interval: Option<usize>,
    /// Default rotary base of layers with a sliding window. `None` if these layers use the same
    /// base as all other layers.
    pub local_theta: Option<f32>,
    /// Default for the number whose square root divides attention scores. `None` if it is always
    /// the width of a head.
    pub query_scalar: Option<f32>,
    /// Keys of `config.json` that are rejected if set, because they change the computation.
    pub rejected_keys: &'static [&'static str],
    /// Values of keys that a `config.json` does not contain.
    pub defaults: ConfigDefaults,
}

/// Activation function of the feed-forward gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// SiLU: x / (1 + exp(−x)).
    Silu,
    /// GELU: x Φ(x), where Φ is approximated with tanh (Hendrycks & Gimpel 2016);
    /// `gelu_pytorch_tanh` in transformers.
    GeluTanh,
}

/// Computation of a transformer block, independent of its sizes. If two families have equal values,
/// the same weights compute the same function in both.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockTraits {
    /// Number that norms add to their weight: 0 or 1.
    pub norm_offset: f32,
    /// Whether the outputs of attention and of the feed-forward part are normalized before they are
    /// added to the residual stream.
    pub post_norms: bool,
    /// Whether input embeddings are multiplied by the square root of the hidden size.
    pub scaled_embedding: bool,
    /// Activation function of the feed-forward gate.
    pub activation: Activation,
}

/// Attention projections of a family that have biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionBias {
    /// The query, key and value projections always have biases. The output projection never has
    /// a bias.
    QueryKeyValue,
    /// No projection has a bias.
    Never,
    /// All projections have biases if `attention_bias` is set in `config.json`. Otherwise no
    /// projection has a bias.
    Configured,
}

/// Layers of a family that have a sliding window. The window size is the size in the file or, by
/// default, the family's; `null` or 0 in the file disables windows. Unless the variant is
/// [`Self::Never`] or [`Self::Every`], the file can list the layers in `layer_types`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// No layer has a window.
    Never,
    /// All layers have a window.
    Every,
    /// All layers except every n-th layer have a window, where n is the value. The file can set
    /// another n.
    AllExceptEveryNth(usize),
    /// Layers with index `max_window_layers` or higher have a window, if `use_sliding_window` is
    /// set.
    Last,
    /// Layers without rotary embedding have a window, if `use_sliding_window` is set.
    Unrotated,
}

/// Properties of the GGUF files of a model family.
#[derive(Debug)]
pub struct Gguf {
    /// Value of the metadata key `general.architecture`.
    pub architecture: &'static str,
    /// Whether converters reorder the rows of each head so that the two elements of a rotary pair
    /// are adjacent. If `false`, the rows are in two halves, as in Hugging Face files.
    pub interleaved: bool,
    /// Rotary base that GGUF runtimes use if the file does not set a base.
    pub theta: f32,
}

/// Values that transformers uses for keys that `config.json` does not contain. `None` if the key is
/// required, or if the value is computed from other keys.
#[derive(Debug)]
pub struct ConfigDefaults {
    pub(crate) heads: Option<usize>,
    /// Number of key and value heads; `None` means as many as query heads.
    pub(crate) kv_heads: Option<usize>,
    /// Width of a head; `None` means the hidden size divided by the number of heads.
    pub(crate) head_dim: Option<usize>,
    pub(crate) vocabulary: Option<usize>,
    pub(crate) context: usize,
    pub(crate) theta: f32,
    pub(crate) tied: bool,
    /// Size of sliding windows in tokens, for layers that have one.
    pub(crate) window: Option<usize>,
}

/// Properties of a plain Llama block, without names. Each row of the table of families specifies
/// only its differences from these.
const PLAIN: FamilyTraits = FamilyTraits {
    family: Family::Llama,
    title: "",
    relatives: "",
    model_type: "",
    model_type_with_images: None,
    class: "",
    gguf: None,
    blocks: BlockTraits {
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
    rejected_keys: &[],
    defaults: DEFAULTS,
};

const DEFAULTS: ConfigDefaults = ConfigDefaults {
    heads: None,
    kv_heads: None,
    head_dim: None,
    vocabulary: None,
    context: 32_768,
    theta: 10_000.0,
    tied: false,
    window: None,
};

/// Table of all model families, in the order of the variants of [`Family`].
static TRAITS: [FamilyTraits; 6] = [
    FamilyTraits {
        family: Family::Llama,
        title: "Llama",
        relatives: "Llama 2 and 3, SmolLM2",
        model_type: "llama",
        class: "LlamaForCausalLM",
        gguf: Some(Gguf { architecture: "llama", interleaved: true, theta: 10_000.0 }),
        mlp_bias: true,
        defaults: ConfigDefaults { context: 2048, ..DEFAULTS },
        ..PLAIN
    },
    FamilyTraits {
        family: Family::Mistral,
        title: "Mistral",
        model_type: "mistral",
        class: "MistralForCausalLM",
        attention_bias: AttentionBias::Never,
        windows: Windows::Every,
        defaults: ConfigDefaults {
            kv_heads: Some(8),
            context: 131_072,
            window: Some(4096),
            ..DEFAULTS
        },
        ..PLAIN
    },
    FamilyTraits {
        family: Family::Qwen2,
        title: "Qwen2",
        model_type: "qwen2",
        class: "Qwen2ForCausalLM",
        gguf: Some(Gguf { architecture: "qwen2", interleaved: false, theta: 10_000.0 }),
        attention_bias: AttentionBias::QueryKeyValue,
        windows: Windows::Last,
        defaults: ConfigDefaults { window: Some(4096), ..DEFAULTS },
        ..PLAIN
    },
    FamilyTraits {
        family: Family::Qwen3,
        title: "Qwen3",
        model_type: "qwen3",
        class: "Qwen3ForCausalLM",
        gguf: Some(Gguf { architecture: "qwen3", interleaved: false, theta: 10_000.0 }),
        qk_norm: true,
        windows: Windows::Last,
        defaults: ConfigDefaults { head_dim: Some(128), window: Some(4096), ..DEFAULTS },
        ..PLAIN
    },
    FamilyTraits {
        family: Family::Gemma3,
        title: "Gemma 3",
        model_type: "gemma3_text",
        model_type_with_images: Some("gemma3"),
        class: "Gemma3ForCausalLM",
        gguf: Some(Gguf { architecture: "gemma3", interleaved: false, theta: 1_000_000.0 }),
        blocks: BlockTraits {
            norm_offset: 1.0,
            post_norms: true,
            scaled_embedding: true,
            activation: Activation::GeluTanh,
        },
        qk_norm: true,
        windows: Windows::AllExceptEveryNth(6),
        local_theta: Some(10_000.0),
        query_scalar: Some(256.0),
        rejected_keys: &[
            "final_logit_softcapping",
            "attn_logit_softcapping",
            "use_bidirectional_attention",
        ],
        // The text configuration of a multimodal model contains only values that differ from these.
        defaults: ConfigDefaults {
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
    FamilyTraits {
        family: Family::SmolLm3,
        title: "SmolLM3",
        model_type: "smollm3",
        class: "SmolLM3ForCausalLM",
        gguf: Some(Gguf { architecture: "smollm3", interleaved: true, theta: 10_000.0 }),
        mlp_bias: true,
        windows: Windows::Unrotated,
        unrotated_interval: Some(4),
        defaults: ConfigDefaults { kv_heads: Some(4), theta: 2_000_000.0, tied: true, ..DEFAULTS },
        ..PLAIN
    },
];

impl Family {
    /// Returns all families, in the order of the variants.
    pub fn all() -> impl Iterator<Item = Self> {
        TRAITS.iter().map(|traits| traits.family)
    }

    /// Returns the properties of the family.
    pub fn traits(self) -> &'static FamilyTraits {
        &TRAITS[self as usize]
    }
}

impl FamilyTraits {
    /// Returns the properties of the first family for which `matches` returns `true`.
    pub(crate) fn find(matches: impl Fn(&FamilyTraits) -> bool) -> Option<&'static Self> {
        TRAITS.iter().find(|traits| matches(traits))
    }

    /// Returns a text such as "a, b and c" that lists the names that `name` returns for the
    /// families. Families for which `name` returns `None` are left out.
    pub(crate) fn list_names(name: impl Fn(&FamilyTraits) -> Option<String>) -> String {
        let names: Vec<String> = TRAITS.iter().filter_map(name).collect();
        match names.split_last() {
            Some((last, first)) if !first.is_empty() => format!("{} and {last}", first.join(", ")),
            _ => names.concat(),
        }
    }

    /// Returns `name`, followed by the family's relatives in parentheses if the family has any.
    pub(crate) fn with_relatives(&self, name: &str) -> String {
        if self.relatives.is_empty() {
            name.to_owned()
        } else {
            format!("{name} ({})", self.relatives)
        }
    }
}

impl Windows {
    /// Returns whether the layers of the family have sliding windows only if `use_sliding_window`
    /// is set.
    pub(crate) fn need_switch(self) -> bool {
        matches!(self, Self::Last | Self::Unrotated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn family_table_matches_variant_order() {
        for family in Family::all() {
            assert_eq!(family.traits().family, family);
        }
        let name = |traits: &FamilyTraits| Some(traits.title.to_owned());
        assert_eq!(
            FamilyTraits::list_names(name),
            "Llama, Mistral, Qwen2, Qwen3, Gemma 3 and SmolLM3"
        );
    }
}
