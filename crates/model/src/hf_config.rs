//! Reads and writes Hugging Face's `config.json`.
//!
//! Absent keys get the defaults of `transformers`, except that an absent token id means that the
//! model has no such token. Every key is either read, known to have no effect on the computation
//! (`known.rs`), or rejected by name. See [`crate::keys`] for the treatment of unknown keys.

mod known;
mod pattern;
mod rope;
mod write;

use std::path::Path;

use serde_json::{Map, Value};

use crate::family::{AttentionBias, FamilyTraits};
use crate::keys::{Keys, token_ids};
use crate::{Activation, ModelConfig, ModelError};

/// Advice in the error for an unknown key of `config.json`.
const UNKNOWN: &str = "Levade does not know this key, which may change what the model computes: if \
    it does not, remove it from config.json";

/// Parsed contents of a model's `config.json`.
pub(crate) struct ParsedConfig {
    pub(crate) config: ModelConfig,
    /// Notes for the user about the contents of the file.
    pub(crate) notes: Vec<String>,
    /// Whether the text model is part of a larger model, whose remaining parts are not read.
    pub(crate) is_part: bool,
}

impl ModelConfig {
    /// Parses the contents of a Hugging Face `config.json`. `path` is the file's name in errors.
    /// For a model that also reads images, the result describes only the text model.
    ///
    /// # Errors
    /// Returns an error that names the key if a key is missing, cannot be parsed, or requests a
    /// computation that this build does not support.
    pub fn from_hf_json(path: &Path, contents: &[u8]) -> Result<Self, ModelError> {
        Ok(parse(path, contents)?.config)
    }
}

/// Parses the contents of the `config.json` at `path`.
pub(crate) fn parse(path: &Path, contents: &[u8]) -> Result<ParsedConfig, ModelError> {
    let object: Map<String, Value> = serde_json::from_slice(contents).map_err(|error| {
        ModelError::damaged(path, format!("the contents are not a JSON object: {error}"))
    })?;
    let keys = Keys::new(path, "", &object);
    let model_type = keys.require("model_type", keys.text("model_type")?)?;
    if FamilyTraits::find(|traits| traits.model_type_with_images == Some(model_type)).is_none() {
        let (config, notes) = parse_text(&keys)?;
        return Ok(ParsedConfig { config, notes, is_part: false });
    }
    // The model reads images in addition to text. Its text model is described in a separate object.
    let text = keys.require("text_config", keys.object("text_config")?)?;
    let inner = Keys::new(path, "text_config.", text);
    reject_custom_code(&keys)?;
    let (mut config, mut notes) = parse_text(&inner)?;
    if let Some(tied) = keys.read("tie_word_embeddings", "true or false", Value::as_bool)? {
        config.tied = tied;
    }
    let eos = keys.read("eos_token_id", "a token id or a list of them", token_ids)?;
    if let Some(eos) = eos {
        config.eos = eos;
    }
    config.bos = keys.token("bos_token_id")?.or(config.bos);
    config.pad = read_pad_token(&keys)?.or(config.pad);
    notes.extend(keys.check_unread(
        |key| known::concerns_images(key) || known::is_without_effect(key),
        UNKNOWN,
    )?);
    Ok(ParsedConfig { config, notes, is_part: true })
}

/// Parses the configuration of a text model. Returns the configuration with notes for the user.
fn parse_text(keys: &Keys) -> Result<(ModelConfig, Vec<String>), ModelError> {
    let path = keys.path;
    let model_type = keys.require("model_type", keys.text("model_type")?)?;
    let Some(traits) = FamilyTraits::find(|traits| traits.model_type == model_type) else {
        let known = FamilyTraits::list_names(|traits| match traits.model_type_with_images {
            Some(larger) => Some(format!("{} ({larger} without its images)", traits.model_type)),
            None => Some(traits.with_relatives(traits.model_type)),
        });
        return Err(keys.unsupported("model_type", &format!("Levade runs the model types {known}")));
    };
    let defaults = &traits.defaults;
    reject_unsupported(keys, traits)?;
    let hidden = keys.required_size("hidden_size")?;
    let heads = keys.size("num_attention_heads")?.or(defaults.heads);
    let heads = keys.require("num_attention_heads", heads)?;
    let head_dim = match keys.size("head_dim")?.or(defaults.head_dim) {
        Some(width) => width,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let what =
                format!("hidden_size {hidden} is not a multiple of num_attention_heads {heads}");
            return Err(ModelError::config(path, what));
        }
    };
    let context = keys.size("max_position_embeddings")?.unwrap_or(defaults.context);
    let layers = keys.required_size("num_hidden_layers")?;
    // Code below iterates over the layers, so their number must be bounded.
    if layers > known::MAX_LAYERS {
        let what = format!(
            "the number of layers is {layers}; it must be between 1 and {}",
            known::MAX_LAYERS
        );
        return Err(ModelError::config(path, what));
    }
    let mut pattern = pattern::read(keys, traits, layers)?;
    let rope = match traits.local_theta {
        Some(local_theta) => {
            let [global, local] =
                rope::read_ropes_by_kind(keys, defaults.theta, local_theta, context)?;
            pattern.local_rope = Some(local);
            global
        }
        None => rope::read_rope(keys, defaults.theta, context)?,
    };
    let query_scalar = match traits.query_scalar {
        Some(default) => Some(keys.float("query_pre_attn_scalar")?.unwrap_or(default)),
        None => None,
    };
    // Qwen2 has query, key and value biases regardless of the file.
    let qkv_bias = traits.attention_bias == AttentionBias::QueryKeyValue;
    let attention_bias = keys.flag("attention_bias", false)? && !qkv_bias;
    let eos = keys.read("eos_token_id", "a token id or a list of them", token_ids)?;
    let config = ModelConfig {
        family: traits.family,
        hidden,
        layers,
        heads,
        kv_heads: read_kv_heads(keys, defaults.kv_heads, heads)?,
        head_dim,
        intermediate: keys.required_size("intermediate_size")?,
        vocabulary: keys.require("vocab_size", keys.size("vocab_size")?.or(defaults.vocabulary))?,
        context,
        norm_epsilon: keys.float("rms_norm_eps")?.unwrap_or(1e-6),
        rope,
        pattern,
        query_scalar,
        tied: keys.flag("tie_word_embeddings", defaults.tied)?,
        qkv_bias: qkv_bias || attention_bias,
        output_bias: attention_bias,
        mlp_bias: keys.flag("mlp_bias", false)?,
        qk_norm: traits.qk_norm,
        bos: keys.token("bos_token_id")?,
        eos: eos.unwrap_or_default(),
        pad: read_pad_token(keys)?,
    };
    if keys
        .read("qkv_bias", "true or false", Value::as_bool)?
        .is_some_and(|flag| flag != config.qkv_bias)
    {
        return Err(keys.unsupported(
            "qkv_bias",
            "Levade runs Qwen2 with these biases only; in other families, attention_bias sets them",
        ));
    }
    if let Some(what) = config.contradiction() {
        return Err(ModelError::config(path, what));
    }
    let mut notes = keys.check_unread(known::is_without_effect, UNKNOWN)?;
    for key in known::DROPOUTS {
        if let Some(dropout) = keys.float(key)?.filter(|dropout| *dropout != 0.0) {
            notes.push(format!(
                "{}: {key} is {dropout}; Levade trains without dropout and ignores the value",
                path.display()
            ));
        }
    }
    Ok((config, notes))
}

/// Returns the id of the padding token. Files from the time of Llama 2 use −1 for "no padding
/// token".
fn read_pad_token(keys: &Keys) -> Result<Option<u32>, ModelError> {
    match keys.get("pad_token_id") {
        Some(value) if value.as_i64() == Some(-1) => Ok(None),
        _ => keys.token("pad_token_id"),
    }
}

/// Returns the number of key and value heads. It equals the number of query heads if the file
/// contains `null`, or if the key and `default` are absent.
fn read_kv_heads(keys: &Keys, default: Option<usize>, heads: usize) -> Result<usize, ModelError> {
    let default = default.filter(|_| !keys.has("num_key_value_heads"));
    Ok(keys.size("num_key_value_heads")?.or(default).unwrap_or(heads))
}

/// Returns an error if the weights are quantized or the model needs its own code.
fn reject_custom_code(keys: &Keys) -> Result<(), ModelError> {
    keys.reject(
        "quantization_config",
        "Levade reads directories with F32, F16 or BF16 weights: use the version of the model that \
         is not quantized, or a GGUF file",
    )?;
    keys.reject(
        "auto_map",
        "Levade does not run custom model code: if the model computes what its model_type defines, \
         remove the key from config.json",
    )
}

fn reject_unsupported(keys: &Keys, traits: &FamilyTraits) -> Result<(), ModelError> {
    reject_custom_code(keys)?;
    for key in traits.rejected_keys {
        keys.reject(
            key,
            &format!("Levade runs {} as published, without this feature", traits.title),
        )?;
    }
    for key in ["hidden_act", "hidden_activation"] {
        // `silu` and `swish` are two names of one function.
        let known: &[&str] = match traits.blocks.activation {
            Activation::GeluTanh => &["gelu_pytorch_tanh"],
            Activation::Silu => &["silu", "swish"],
        };
        if keys.text(key)?.is_some_and(|activation| !known.contains(&activation)) {
            let way_out = format!("Levade runs only the activation {} in this family", known[0]);
            return Err(keys.unsupported(key, &way_out));
        }
    }
    if keys.float("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported(
            "partial_rotary_factor",
            "Levade applies the rotary embedding to the entire head dimension",
        ));
    }
    for key in ["qk_norm", "use_qk_norm"] {
        if keys
            .read(key, "true or false", Value::as_bool)?
            .is_some_and(|flag| flag != traits.qk_norm)
        {
            let normed =
                FamilyTraits::list_names(|traits| traits.qk_norm.then(|| traits.title.into()));
            let way_out = format!(
                "Levade runs only {normed} with norms on queries and keys, and other families \
                 without them"
            );
            return Err(keys.unsupported(key, &way_out));
        }
    }
    for (key, value) in known::neutral_values() {
        keys.reject_unless(
            key,
            &value,
            "Levade does not support this variant of the transformer block: choose a model without \
             it",
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
