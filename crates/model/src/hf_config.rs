//! `config.json` as Hugging Face has it, in and out.
//!
//! Absent keys take the defaults of `transformers`, except that an absent token id means that there is none.
//! Every key is read, known to change no number here (`known.rs`), or refused by name: see [`crate::keys`]
//! for those that nobody has heard of.

mod defaults;
mod known;
mod pattern;
mod rope;
mod write;

use std::path::Path;

use serde_json::{Map, Value};

use self::defaults::Defaults;
use crate::keys::{Keys, token_ids};
use crate::{Family, ModelConfig, ModelError};

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
    if model_type != "gemma3" {
        let (config, notes) = parse_text(&keys)?;
        return Ok(Parsed { config, notes, is_part: false });
    }
    // Images go in beside the text of a Gemma 3; what its text model is stands in an object of its own.
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
    let family = match model_type {
        "llama" => Family::Llama,
        "mistral" => Family::Mistral,
        "qwen2" => Family::Qwen2,
        "qwen3" => Family::Qwen3,
        "gemma3_text" => Family::Gemma3,
        "smollm3" => Family::SmolLm3,
        _ => {
            let way_out = "Levade runs the model types llama (Llama 2 and 3, SmolLM2), mistral, qwen2, qwen3, \
                           gemma3_text (gemma3 without its images) and smollm3";
            return Err(keys.unsupported("model_type", way_out));
        }
    };
    let defaults = Defaults::of(family);
    refuse_the_unsupported(keys, family)?;
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
    let mut pattern = pattern::read(keys, family, layers)?;
    let mut query_scalar = None;
    let rope = match family {
        Family::Gemma3 => {
            let [global, local] = rope::rope_by_kind(keys, context)?;
            pattern.local_rope = Some(local);
            query_scalar = Some(keys.float("query_pre_attn_scalar")?.unwrap_or(256.0));
            global
        }
        _ => rope::rope(keys, family, context)?,
    };
    // Qwen2 has its biases whatever the file says.
    let attention_bias = keys.flag("attention_bias", false)? && family != Family::Qwen2;
    let eos = keys.read("eos_token_id", "a token id or a list of them", token_ids)?;
    let config = ModelConfig {
        family,
        hidden,
        layers,
        heads,
        kv_heads: kv_heads(keys, &defaults, heads)?,
        head_dim,
        intermediate: keys.needed_size("intermediate_size")?,
        vocabulary: keys.need("vocab_size", keys.size("vocab_size")?.or(defaults.vocabulary))?,
        context,
        norm_epsilon: keys.float("rms_norm_eps")?.unwrap_or(1e-6),
        rope,
        pattern,
        query_scalar,
        tied: keys.flag("tie_word_embeddings", defaults.tied)?,
        qkv_bias: family == Family::Qwen2 || attention_bias,
        output_bias: attention_bias,
        mlp_bias: keys.flag("mlp_bias", false)?,
        qk_norm: matches!(family, Family::Qwen3 | Family::Gemma3),
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
fn kv_heads(keys: &Keys, defaults: &Defaults, heads: usize) -> Result<usize, ModelError> {
    let default = defaults.kv_heads.filter(|_| !keys.has("num_key_value_heads"));
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

fn refuse_the_unsupported(keys: &Keys, family: Family) -> Result<(), ModelError> {
    refuse_other_code(keys)?;
    if family == Family::Gemma3 {
        for key in ["final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"] {
            keys.refuse(key, "Levade runs Gemma 3 as published, without this")?;
        }
    }
    for key in ["hidden_act", "hidden_activation"] {
        // Two names of one function.
        let (known, way_out): (&[&str], &str) = match family {
            Family::Gemma3 => (&["gelu_pytorch_tanh"], "Levade runs Gemma 3 with gelu_pytorch_tanh"),
            _ => (&["silu", "swish"], "Levade runs the activation silu in this family"),
        };
        if keys.text(key)?.is_some_and(|activation| !known.contains(&activation)) {
            return Err(keys.unsupported(key, way_out));
        }
    }
    if keys.float("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported("partial_rotary_factor", "Levade rotates heads whole"));
    }
    for key in ["qk_norm", "use_qk_norm"] {
        if keys
            .read(key, "true or false", Value::as_bool)?
            .is_some_and(|flag| flag != matches!(family, Family::Qwen3 | Family::Gemma3))
        {
            return Err(keys.unsupported(
                key,
                "Levade runs Qwen3 and Gemma 3 with norms on queries and keys, and other families without",
            ));
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
