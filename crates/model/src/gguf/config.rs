//! Reads the model configuration and the tokenizer from the metadata of a GGUF file.

use std::collections::BTreeSet;
use std::f64::consts::TAU;

use super::read::{GgufHeader, Metadata};
use crate::family::{FamilyTraits, Windows};
use crate::tokenizer::{GgufTokenizer, LLAMA3_PRE_TOKENIZERS, TokenType};
use crate::{AttentionPattern, ModelConfig, ModelError, Rope, RopeScaling};

/// Name of the tensor that contains the divisors of the rotary frequencies in Llama 3 files.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Reads the model configuration from the metadata keys `{architecture}.*`. `rope_factors` is the
/// contents of the tensor [`ROPE_FACTORS`], or `None` if the file does not contain the tensor.
pub(super) fn read_model_config(
    directory: &GgufHeader,
    tokenizer: &GgufTokenizer,
    rope_factors: Option<&[f32]>,
) -> Result<ModelConfig, ModelError> {
    let metadata = &directory.metadata;
    let path = metadata.path();
    reject_partial_models(metadata)?;
    let architecture = metadata
        .text("general.architecture")?
        .ok_or_else(|| metadata.missing_key_error("general.architecture"))?;
    let Some((traits, gguf)) = FamilyTraits::find(|traits| {
        traits.gguf.as_ref().is_some_and(|gguf| gguf.architecture == architecture)
    })
    .and_then(|traits| Some((traits, traits.gguf.as_ref()?))) else {
        return Err(ModelError::unsupported(
            path,
            format!("the model architecture (general.architecture) is {architecture:?}"),
            format!("Levade runs the architectures {}", list_architectures(|_| true)),
        ));
    };
    let key = |name: &str| format!("{architecture}.{name}");
    let size = |name: &str| metadata.size(&key(name));
    let need = |name: &str| size(name)?.ok_or_else(|| metadata.missing_key_error(&key(name)));

    if let Some(experts @ 1..) = size("expert_count")? {
        return Err(ModelError::unsupported(
            path,
            format!("{} is {experts}", key("expert_count")),
            "Levade does not run mixture-of-experts models: choose a dense model",
        ));
    }
    let hidden = need("embedding_length")?;
    let heads = need("attention.head_count")?;
    let context = need("context_length")?;
    let layers = need("block_count")?;
    let pattern = read_pattern(metadata, traits, architecture, layers, context)?;
    let head_dim = match size("attention.key_length")? {
        Some(width) => width,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let what = format!("{hidden} channels cannot be split evenly into {heads} heads");
            return Err(ModelError::config(
                path,
                format!("{}: {what}", key("attention.head_count")),
            ));
        }
    };
    for name in ["attention.value_length", "rope.dimension_count"] {
        if let Some(width) = size(name)?.filter(|&width| width != head_dim) {
            return Err(ModelError::unsupported(
                path,
                format!(
                    "metadata key {} is {width}, but a head has {head_dim} channels",
                    key(name)
                ),
                "in models that Levade runs, keys and values have the same head dimension, and the \
                 rotary embedding covers all of it",
            ));
        }
    }
    let vocabulary = match directory.tensors.get("token_embd.weight") {
        Some(entry) => entry.shape.first().copied().unwrap_or(0),
        None => tokenizer.tokens.len(),
    };
    if tokenizer.tokens.len() > vocabulary {
        let tokens = tokenizer.tokens.len();
        return Err(ModelError::config(
            path,
            format!(
                "tokenizer.ggml.tokens has {tokens} tokens, but token_embd.weight has \
                 {vocabulary} rows"
            ),
        ));
    }
    let theta = metadata.float(&key("rope.freq_base"))?.unwrap_or(gguf.theta);
    for name in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(cap) = metadata.float(&key(name))?.filter(|cap| *cap != 0.0) {
            let what = format!("{} is {cap}", key(name));
            return Err(ModelError::unsupported(
                path,
                what,
                "Levade runs only models without logit soft-capping: choose another model",
            ));
        }
    }
    let scaling = match rope_factors {
        Some(factors) => recover_llama3_scaling(metadata, factors, theta, head_dim)?,
        None => read_scaling(metadata, architecture, context)?,
    };
    let has = |name: &str| directory.tensors.contains_key(name);
    let epsilon_key = key("attention.layer_norm_rms_epsilon");
    let config = ModelConfig {
        family: traits.family,
        hidden,
        layers,
        heads,
        kv_heads: size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        intermediate: need("feed_forward_length")?,
        vocabulary,
        context,
        norm_epsilon: metadata
            .float(&epsilon_key)?
            .ok_or_else(|| metadata.missing_key_error(&epsilon_key))?,
        rope: Rope { theta, scaling },
        pattern,
        query_scalar: traits.query_scalar.map(|_| query_scalar(layers, hidden, heads, head_dim)),
        tied: !has("output.weight"),
        qkv_bias: has("blk.0.attn_q.bias"),
        output_bias: has("blk.0.attn_output.bias"),
        mlp_bias: has("blk.0.ffn_up.bias"),
        qk_norm: has("blk.0.attn_q_norm.weight"),
        bos: tokenizer.bos,
        eos: read_end_tokens(metadata, tokenizer)?,
        pad: tokenizer.pad,
    };
    if let Some(what) = config.contradiction() {
        return Err(ModelError::config(path, what));
    }
    if metadata.bool(&key("attention.causal"))? == Some(false) {
        let way_out = "Levade runs models with causal attention only";
        return Err(ModelError::unsupported(
            path,
            format!("{} is false", key("attention.causal")),
            way_out,
        ));
    }
    metadata.check_unread(architecture, |name, number| {
        WITHOUT_EFFECT.contains(&name) || (number == Some(1.0) && FACTORS.contains(&name))
    })?;
    Ok(config)
}

/// Returns the architectures of the families that satisfy `matches`, as text for a message.
fn list_architectures(matches: fn(&FamilyTraits) -> bool) -> String {
    let known = |traits: &FamilyTraits| {
        traits.gguf.as_ref().filter(|_| matches(traits)).map(|gguf| gguf.architecture)
    };
    FamilyTraits::list_names(|traits| {
        known(traits).map(|architecture| traits.with_relatives(architecture))
    })
}

/// Reads the attention pattern of the layers: sliding windows and missing rotary embeddings. Files
/// contain only the size of the window. As in the GGUF runtime (llama.cpp, `llama-model.cpp`), the
/// architecture determines which layers have a window or no rotary embedding.
fn read_pattern(
    metadata: &Metadata,
    traits: &FamilyTraits,
    architecture: &str,
    layers: usize,
    context: usize,
) -> Result<AttentionPattern, ModelError> {
    let key = |name: &str| format!("{architecture}.{name}");
    let window = metadata.size(&key("attention.sliding_window"))?.filter(|window| *window > 0);
    // The code below iterates over the layers. A larger number of layers is rejected later.
    let layers = layers.min(1 << 12);
    let every =
        |interval: usize| (0..layers).filter(move |layer| (layer + 1).is_multiple_of(interval));
    let local_rope = match traits.local_theta {
        Some(theta) => {
            let theta = metadata.float(&key("rope.freq_base_swa"))?.unwrap_or(theta);
            Some(Rope { theta, scaling: RopeScaling::None })
        }
        None => None,
    };
    let unrotated = traits.unrotated_interval.into_iter().flat_map(every).collect();
    let unwindowed =
        AttentionPattern { window: None, windowed: BTreeSet::new(), local_rope, unrotated };
    match (traits.windows, window) {
        (Windows::AllExceptEveryNth(interval), window) => {
            let interval =
                metadata.size(&key("attention.sliding_window_pattern"))?.unwrap_or(interval).max(1);
            let global: BTreeSet<usize> = every(interval).collect();
            if window.is_none() {
                return Err(metadata.missing_key_error(&key("attention.sliding_window")));
            }
            let windowed = (0..layers).filter(|layer| !global.contains(layer)).collect();
            Ok(AttentionPattern { window, windowed, ..unwindowed })
        }
        (_, Some(window)) if window < context => Err(ModelError::unsupported(
            metadata.path(),
            format!("{} is {window}", key("attention.sliding_window")),
            format!(
                "Levade runs GGUF files with sliding windows only if their architecture is {}: use \
                 the model's Hugging Face directory",
                list_architectures(|traits| matches!(
                    traits.windows,
                    Windows::AllExceptEveryNth(_)
                ))
            ),
        )),
        _ => Ok(unwindowed),
    }
}

/// Returns the number whose square root divides Gemma 3's attention scores. Files do not contain
/// this number. In the largest model, it is `hidden / heads`; in all others, it is the width of a
/// head. Like llama.cpp, this function identifies the largest model by its 62 layers.
fn query_scalar(layers: usize, hidden: usize, heads: usize, head_dim: usize) -> f32 {
    if layers == 62 && heads > 0 { (hidden / heads) as f32 } else { head_dim as f32 }
}

/// Metadata keys of an architecture that have no effect on the computation.
const WITHOUT_EFFECT: [&str; 4] = [
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
    "vocab_size",
];

/// Metadata keys of factors, which have no effect if the factor is 1.
const FACTORS: [&str; 7] = [
    "embedding_scale",
    "logit_scale",
    "residual_scale",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
];

/// Rejects files that contain only part of a model, or something other than a model, such as an
/// adapter.
fn reject_partial_models(metadata: &Metadata) -> Result<(), ModelError> {
    let unsupported =
        |what: String, way_out: &str| Err(ModelError::unsupported(metadata.path(), what, way_out));
    if let Some(count @ 2..) = metadata.size("split.count")? {
        let way_out = "join the parts with llama.cpp's `llama-gguf-split --merge`";
        return unsupported(
            format!("the file is one of {count} parts of a split model (split.count)"),
            way_out,
        );
    }
    match metadata.text("general.type")? {
        None | Some("model") => Ok(()),
        Some(other) => unsupported(
            format!("general.type is {other:?}"),
            "give the GGUF file of a model; Levade reads adapters in PEFT layout only",
        ),
    }
}

/// Returns the ids of the tokens for end of text, end of turn and end of message, without
/// duplicates.
fn read_end_tokens(metadata: &Metadata, tokenizer: &GgufTokenizer) -> Result<Vec<u32>, ModelError> {
    let mut ends: Vec<u32> = tokenizer.eos.into_iter().collect();
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ends.extend(metadata.token(key)?.filter(|id| !ends.contains(id)));
    }
    Ok(ends)
}

fn read_scaling(
    metadata: &Metadata,
    architecture: &str,
    context: usize,
) -> Result<RopeScaling, ModelError> {
    let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
    let kind = metadata.text(&key("type"))?;
    // Files older than `rope.scaling` have `rope.scale_linear`.
    let older = metadata.float(&format!("{architecture}.rope.scale_linear"))?;
    let factor = metadata.float(&key("factor"))?.or(older);
    let kind = kind.unwrap_or(if factor.is_some() { "linear" } else { "none" });
    // Some writers store 0 for "no factor".
    let factor = factor.filter(|&factor| factor != 0.0);
    match (kind, factor) {
        ("none", _) | ("linear", None) => Ok(RopeScaling::None),
        ("linear", Some(factor)) => Ok(RopeScaling::Linear { factor }),
        ("yarn", Some(factor)) => Ok(RopeScaling::Yarn {
            factor,
            beta_fast: metadata.float(&key("yarn_beta_fast"))?.unwrap_or(32.0),
            beta_slow: metadata.float(&key("yarn_beta_slow"))?.unwrap_or(1.0),
            // The runtime multiplies the standard 0.1 ln(factor) + 1 by the stored value.
            attention_factor: metadata
                .float(&key("attn_factor"))?
                .filter(|&factor| factor != 1.0)
                .map(|own| own * (0.1 * factor.ln() + 1.0)),
            original_context: metadata.size(&key("original_context_length"))?.unwrap_or(context),
        }),
        ("yarn", None) => Err(metadata.missing_key_error(&key("factor"))),
        (other, _) => Err(ModelError::unsupported(
            metadata.path(),
            format!("{} is {other:?}", key("type")),
            "Levade runs the rotary scalings none, linear, yarn and that of Llama 3 only",
        )),
    }
}

/// Recovers the parameters of Llama 3's rotary scaling from the divisors of the frequencies. All
/// Llama 3 models have the same three constants and differ only in the factor, which is the largest
/// divisor. The other divisors are checked against the formula (Llama 3.1, `apply_scaling`).
fn recover_llama3_scaling(
    metadata: &Metadata,
    factors: &[f32],
    theta: f32,
    head_dim: usize,
) -> Result<RopeScaling, ModelError> {
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    const CONTEXT: f64 = 8192.0;
    let factor = factors.iter().copied().fold(1.0, f32::max);
    if factor == 1.0 && factors.iter().all(|&factor| factor == 1.0) {
        return Ok(RopeScaling::None);
    }
    if factors.len() == head_dim / 2
        && factor.is_finite()
        && factors.iter().enumerate().all(|(i, &found)| {
            let wavelength = TAU * f64::from(theta).powf(2.0 * i as f64 / head_dim as f64);
            // 0 for long wavelengths, 1 for short wavelengths, and a linear ramp between them.
            let kept = ((CONTEXT / wavelength - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
            let expected = 1.0 / ((1.0 - kept) / f64::from(factor) + kept);
            (f64::from(found) - expected).abs() <= 1e-3 * expected
        })
    {
        return Ok(RopeScaling::Llama3 {
            factor,
            low_freq_factor: LOW as f32,
            high_freq_factor: HIGH as f32,
            original_context: CONTEXT as usize,
        });
    }
    Err(ModelError::unsupported(
        metadata.path(),
        format!("the frequency divisors in {ROPE_FACTORS} do not follow Llama 3's formula"),
        "use the model's Hugging Face directory, whose config.json specifies how the frequencies \
         are scaled",
    ))
}

/// Reads the tokenizer from the metadata keys `tokenizer.ggml.*`.
pub(super) fn read_tokenizer(metadata: &Metadata) -> Result<GgufTokenizer, ModelError> {
    let model = metadata
        .text(&tokenizer_key("model"))?
        .ok_or_else(|| metadata.missing_key_error(&tokenizer_key("model")))?
        .to_string();
    let pre = metadata.text(&tokenizer_key("pre"))?.unwrap_or_default().to_string();
    let tokens = metadata
        .texts(&tokenizer_key("tokens"))?
        .ok_or_else(|| metadata.missing_key_error(&tokenizer_key("tokens")))?
        .to_vec();
    let types = match metadata.integers(&tokenizer_key("token_type"))? {
        Some(numbers) => {
            read_token_types(metadata, &tokenizer_key("token_type"), numbers, tokens.len())?
        }
        None => Vec::new(),
    };
    // If the file does not contain these keys, the runtime decides by the algorithm: SentencePiece
    // models prepend both the token and the space, and byte-level models neither, except that Llama
    // 3 prepends the token.
    let is_sentencepiece = model == "llama";
    let add_bos = metadata
        .bool(&tokenizer_key("add_bos_token"))?
        .unwrap_or(is_sentencepiece || LLAMA3_PRE_TOKENIZERS.contains(&pre.as_str()));
    let add_space_prefix =
        metadata.bool(&tokenizer_key("add_space_prefix"))?.unwrap_or(is_sentencepiece);
    Ok(GgufTokenizer {
        types,
        scores: metadata.floats(&tokenizer_key("scores"))?.unwrap_or_default().to_vec(),
        merges: metadata.texts(&tokenizer_key("merges"))?.unwrap_or_default().to_vec(),
        bos: token_id(metadata, &tokens, "bos_token_id")?,
        eos: token_id(metadata, &tokens, "eos_token_id")?,
        pad: token_id(metadata, &tokens, "padding_token_id")?,
        unknown: token_id(metadata, &tokens, "unknown_token_id")?,
        add_bos,
        add_space_prefix,
        model,
        pre,
        tokens,
    })
}

fn token_id(metadata: &Metadata, tokens: &[String], name: &str) -> Result<Option<u32>, ModelError> {
    let id = metadata.token(&tokenizer_key(name))?;
    match id {
        // Some writers store the largest u32 for "none".
        Some(u32::MAX) => Ok(None),
        Some(id) if id as usize >= tokens.len() => Err(ModelError::config(
            metadata.path(),
            format!(
                "metadata key {} is {id}, but there are {} tokens",
                tokenizer_key(name),
                tokens.len()
            ),
        )),
        id => Ok(id),
    }
}

fn tokenizer_key(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

fn read_token_types(
    metadata: &Metadata,
    key: &str,
    numbers: &[i64],
    tokens: usize,
) -> Result<Vec<TokenType>, ModelError> {
    if numbers.len() != tokens {
        let what = format!("metadata key {key} has {} entries for {tokens} tokens", numbers.len());
        return Err(ModelError::config(metadata.path(), what));
    }
    numbers
        .iter()
        .enumerate()
        .map(|(token, &number)| match number {
            1 => Ok(TokenType::Normal),
            2 => Ok(TokenType::Unknown),
            3 => Ok(TokenType::Control),
            4 => Ok(TokenType::UserDefined),
            5 => Ok(TokenType::Unused),
            6 => Ok(TokenType::Byte),
            other => {
                let what =
                    format!("metadata key {key} gives token {token} the unknown type {other}");
                Err(ModelError::config(metadata.path(), what))
            }
        })
        .collect()
}
