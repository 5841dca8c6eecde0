//! `config.json` as Hugging Face has it, in and out.
//!
//! Absent keys take the defaults of `transformers`, except that an absent token id means that there is none.
//! Every key is read, known to change no number here (`known.rs`), or refused by name: see [`crate::keys`]
//! for those that nobody has heard of.

mod known;
mod pattern;
mod rope;
mod write;

use std::path::Path;

use serde_json::{Map, Value};

use crate::family::{AttentionBias, Traits};
use crate::keys::{Keys, token_ids};
use crate::{Activation, ModelConfig, ModelError};

/// The way out for a key that is not known.
const UNKNOWN: &str = "Levade does not know this key, and cannot tell whether the model computes otherwise because of it: if it does not, remove it from config.json";

/// Contents of a `config.json`.
pub(crate) struct Parsed {
    pub(crate) config: ModelConfig,
    /// Notes for the user.
    pub(crate) notes: Vec<String>,
    /// Whether the text model is a part of a larger one, whose other parts are not read.
    pub(crate) is_part: bool,
}

impl ModelConfig {
    /// Reads the contents of a `config.json` of Hugging Face's, which errors call `path`. Of a model that
    /// also sees, its part for text.
    ///
    /// # Errors
    /// Names the key that is missing, cannot be read, or asks for what this build does not compute.
    pub fn from_hf_json(path: &Path, contents: &[u8]) -> Result<Self, ModelError> {
        Ok(parse(path, contents)?.config)
    }
}

/// Reads the contents of the `config.json` at `path`.
pub(crate) fn parse(path: &Path, contents: &[u8]) -> Result<Parsed, ModelError> {
    let object: Map<String, Value> = serde_json::from_slice(contents)
        .map_err(|error| ModelError::damaged(path, format!("it is not a JSON object: {error}")))?;
    let keys = Keys::new(path, "", &object);
    let model_type = keys.need("model_type", keys.text("model_type")?)?;
    if Traits::find(|traits| traits.model_type_with_images == Some(model_type)).is_none() {
        let (config, notes) = parse_text(&keys)?;
        return Ok(Parsed { config, notes, is_part: false });
    }
    // Images go in beside the text; what its text model is stands in an object of its own.
    let text = keys.need("text_config", keys.object("text_config")?)?;
    let inner = Keys::new(path, "text_config.", text);
    refuse_other_code(&keys)?;
    let (mut config, mut notes) = parse_text(&inner)?;
    if let Some(tied) = keys.read("tie_word_embeddings", "true or false", Value::as_bool)? {
        config.tied = tied;
    }
    let eos = keys.read("eos_token_id", "a token id or a list of them", token_ids)?;
    if let Some(eos) = eos {
        config.eos = eos;
    }
    config.bos = keys.token("bos_token_id")?.or(config.bos);
    config.pad = pad(&keys)?.or(config.pad);
    notes.extend(keys.settle_rest(|key| known::is_of_images(key) || known::is_without_effect(key), UNKNOWN)?);
    Ok(Parsed { config, notes, is_part: true })
}

/// Reads the configuration of a text model. Also what to tell the user of it.
fn parse_text(keys: &Keys) -> Result<(ModelConfig, Vec<String>), ModelError> {
    let path = keys.path;
    let model_type = keys.need("model_type", keys.text("model_type")?)?;
    let Some(traits) = Traits::find(|traits| traits.model_type == model_type) else {
        let known = Traits::list(|traits| match traits.model_type_with_images {
            Some(larger) => Some(format!("{} ({larger} without its images)", traits.model_type)),
            None => Some(traits.with_relatives(traits.model_type)),
        });
        return Err(keys.unsupported("model_type", &format!("Levade runs the model types {known}")));
    };
    let defaults = &traits.defaults;
    refuse_the_unsupported(keys, traits)?;
    let hidden = keys.needed_size("hidden_size")?;
    let heads = keys.size("num_attention_heads")?.or(defaults.heads);
    let heads = keys.need("num_attention_heads", heads)?;
    let head_dim = match keys.size("head_dim")?.or(defaults.head_dim) {
        Some(width) => width,
        None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let what = format!("hidden_size {hidden} cannot be split into num_attention_heads {heads}");
            return Err(ModelError::config(path, what));
        }
    };
    let context = keys.size("max_position_embeddings")?.unwrap_or(defaults.context);
    let layers = keys.needed_size("num_hidden_layers")?;
    // Layers are counted out below.
    if layers > known::MOST_LAYERS {
        let what =
            format!("the number of layers is {layers}; it must lie between 1 and {}", known::MOST_LAYERS);
        return Err(ModelError::config(path, what));
    }
    let mut pattern = pattern::read(keys, traits, layers)?;
    let rope = match traits.local_theta {
        Some(local_theta) => {
            let [global, local] = rope::rope_by_kind(keys, defaults.theta, local_theta, context)?;
            pattern.local_rope = Some(local);
            global
        }
        None => rope::rope(keys, defaults.theta, context)?,
    };
    let query_scalar = match traits.query_scalar {
        Some(default) => Some(keys.float("query_pre_attn_scalar")?.unwrap_or(default)),
        None => None,
    };
    // Qwen2 has its biases whatever the file says.
    let qkv_bias = traits.attention_bias == AttentionBias::QueryKeyValue;
    let attention_bias = keys.flag("attention_bias", false)? && !qkv_bias;
    let eos = keys.read("eos_token_id", "a token id or a list of them", token_ids)?;
    let config = ModelConfig {
        family: traits.family,
        hidden,
        layers,
        heads,
        kv_heads: kv_heads(keys, defaults.kv_heads, heads)?,
        head_dim,
        intermediate: keys.needed_size("intermediate_size")?,
        vocabulary: keys.need("vocab_size", keys.size("vocab_size")?.or(defaults.vocabulary))?,
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
        pad: pad(keys)?,
    };
    if keys.read("qkv_bias", "true or false", Value::as_bool)?.is_some_and(|flag| flag != config.qkv_bias) {
        return Err(keys.unsupported(
            "qkv_bias",
            "Levade runs Qwen2 with these biases, and other families by attention_bias",
        ));
    }
    if let Some(what) = config.contradiction() {
        return Err(ModelError::config(path, what));
    }
    let mut notes = keys.settle_rest(known::is_without_effect, UNKNOWN)?;
    for key in known::DROPOUTS {
        if let Some(share) = keys.float(key)?.filter(|share| *share != 0.0) {
            notes.push(format!("{}: {key} is {share}; Levade trains without dropout", path.display()));
        }
    }
    Ok((config, notes))
}

/// Llama 2 era files say −1 for "no padding token".
fn pad(keys: &Keys) -> Result<Option<u32>, ModelError> {
    match keys.get("pad_token_id") {
        Some(value) if value.as_i64() == Some(-1) => Ok(None),
        _ => keys.token("pad_token_id"),
    }
}

/// Key and value heads: as many as query heads where a file says `null`.
fn kv_heads(keys: &Keys, default: Option<usize>, heads: usize) -> Result<usize, ModelError> {
    let default = default.filter(|_| !keys.has("num_key_value_heads"));
    Ok(keys.size("num_key_value_heads")?.or(default).unwrap_or(heads))
}

/// Refuses weights and code that are not a plain model's.
fn refuse_other_code(keys: &Keys) -> Result<(), ModelError> {
    keys.refuse(
        "quantization_config",
        "Levade reads F32, F16 and BF16 folders: take the version of the model that is not quantised, or a GGUF file",
    )?;
    keys.refuse(
        "auto_map",
        "Levade does not run a model's own code: where its blocks are those of its model_type, remove the key from config.json",
    )
}

fn refuse_the_unsupported(keys: &Keys, traits: &Traits) -> Result<(), ModelError> {
    refuse_other_code(keys)?;
    for key in traits.refused {
        keys.refuse(key, &format!("Levade runs {} as published, without this", traits.title))?;
    }
    for key in ["hidden_act", "hidden_activation"] {
        // Two names of one function.
        let known: &[&str] = match traits.blocks.activation {
            Activation::GeluTanh => &["gelu_pytorch_tanh"],
            Activation::Silu => &["silu", "swish"],
        };
        if keys.text(key)?.is_some_and(|activation| !known.contains(&activation)) {
            let way_out = format!("Levade runs the activation {} in this family", known[0]);
            return Err(keys.unsupported(key, &way_out));
        }
    }
    if keys.float("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported("partial_rotary_factor", "Levade rotates heads whole"));
    }
    for key in ["qk_norm", "use_qk_norm"] {
        if keys.read(key, "true or false", Value::as_bool)?.is_some_and(|flag| flag != traits.qk_norm) {
            let normed = Traits::list(|traits| traits.qk_norm.then(|| traits.title.into()));
            let way_out =
                format!("Levade runs {normed} with norms on queries and keys, and other families without");
            return Err(keys.unsupported(key, &way_out));
        }
    }
    for (key, value) in known::neutral() {
        keys.refuse_unless(
            key,
            &value,
            "Levade does not run this change of the blocks: choose a model without it",
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
