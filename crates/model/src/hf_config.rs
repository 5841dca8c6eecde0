//! `config.json` as Hugging Face has it, in and out.
//!
//! Absent keys take the defaults of `transformers`, except that an absent token id means that there is none.
//! Every key is read, known to change no number here (`known.rs`), or refused by name: see [`crate::keys`]
//! for those that nobody has heard of.

mod known;

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::keys::{Keys, token_ids};
use crate::{Family, ModelConfig, ModelError, Rope, RopeScaling};

/// The way out for a key that is not known.
const UNKNOWN: &str = "Dressage does not know this key, and cannot tell whether the model computes otherwise because of it: if it does not, remove it from config.json";

/// Reads the contents of the `config.json` at `path`. Also what to tell the user of it.
pub(crate) fn parse(path: &Path, contents: &[u8]) -> Result<(ModelConfig, Vec<String>), ModelError> {
    let object: Map<String, Value> = serde_json::from_slice(contents)
        .map_err(|error| ModelError::damaged(path, format!("it is not a JSON object: {error}")))?;
    let keys = Keys::new(path, "", &object);
    let model_type = keys.need("model_type", keys.text("model_type")?)?;
    let family = match model_type {
        "llama" => Family::Llama,
        "qwen2" => Family::Qwen2,
        "qwen3" => Family::Qwen3,
        _ => {
            let way_out = "Dressage runs the model types llama (Llama 2 and 3, SmolLM2), qwen2 and qwen3";
            return Err(keys.unsupported("model_type", way_out));
        }
    };
    refuse_the_unsupported(&keys, family)?;
    let hidden = keys.needed_size("hidden_size")?;
    let heads = keys.needed_size("num_attention_heads")?;
    let head_dim = match (keys.size("head_dim")?, family) {
        (Some(width), _) => width,
        (None, Family::Qwen3) => 128,
        (None, _) if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
        (None, _) => {
            let what = format!("hidden_size {hidden} cannot be split into num_attention_heads {heads}");
            return Err(ModelError::config(path, what));
        }
    };
    let context = keys.size("max_position_embeddings")?.unwrap_or(match family {
        Family::Llama => 2048,
        Family::Qwen2 | Family::Qwen3 => 32768,
    });
    // Qwen2 has its biases whatever the file says.
    let attention_bias = keys.flag("attention_bias", false)? && family != Family::Qwen2;
    let eos = keys.read("eos_token_id", "a token id or a list of them", token_ids)?;
    let config = ModelConfig {
        family,
        hidden,
        layers: keys.needed_size("num_hidden_layers")?,
        heads,
        kv_heads: keys.size("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        intermediate: keys.needed_size("intermediate_size")?,
        vocabulary: keys.needed_size("vocab_size")?,
        context,
        norm_epsilon: keys.float("rms_norm_eps")?.unwrap_or(1e-6),
        rope: rope(&keys, context)?,
        tied: keys.flag("tie_word_embeddings", false)?,
        qkv_bias: family == Family::Qwen2 || attention_bias,
        output_bias: attention_bias,
        mlp_bias: keys.flag("mlp_bias", false)?,
        qk_norm: family == Family::Qwen3,
        bos: keys.token("bos_token_id")?,
        eos: eos.unwrap_or_default(),
        pad: pad(&keys)?,
    };
    if keys.read("qkv_bias", "true or false", Value::as_bool)?.is_some_and(|flag| flag != config.qkv_bias) {
        return Err(keys.unsupported(
            "qkv_bias",
            "Dressage runs Qwen2 with these biases, and other families by attention_bias",
        ));
    }
    if let Some(what) = config.contradiction() {
        return Err(ModelError::config(path, what));
    }
    let mut notes = keys.settle_rest(known::is_without_effect, UNKNOWN)?;
    for key in known::DROPOUTS {
        if let Some(share) = keys.float(key)?.filter(|share| *share != 0.0) {
            notes.push(format!("{}: {key} is {share}; Dressage trains without dropout", path.display()));
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

fn refuse_the_unsupported(keys: &Keys, family: Family) -> Result<(), ModelError> {
    keys.refuse(
        "quantization_config",
        "Dressage reads F32, F16 and BF16 folders: take the version of the model that is not quantised, or a GGUF file",
    )?;
    keys.refuse(
        "auto_map",
        "Dressage does not run a model's own code: where its blocks are those of its model_type, remove the key from config.json",
    )?;
    let windows =
        "Dressage does not run sliding-window attention: choose a model that attends to its whole context";
    let used = keys.read("use_sliding_window", "true or false", Value::as_bool)?;
    if used == Some(true) {
        return Err(keys.unsupported("use_sliding_window", windows));
    }
    // Qwen's windows are off unless a file switches them on; Llama has none.
    let window = keys.size("sliding_window")?;
    if family == Family::Llama && used.is_none() && window.is_some_and(|window| window > 0) {
        return Err(keys.unsupported("sliding_window", windows));
    }
    // Where windows would begin, if there were any.
    keys.get("max_window_layers");
    let layer_types = keys.read("layer_types", "a list", Value::as_array)?;
    if layer_types.is_some_and(|types| types.iter().any(|kind| kind != "full_attention")) {
        return Err(keys.unsupported("layer_types", windows));
    }
    for key in ["hidden_act", "hidden_activation"] {
        // Two names of one function.
        if keys.text(key)?.is_some_and(|activation| !["silu", "swish"].contains(&activation)) {
            return Err(keys.unsupported(key, "Dressage runs the activation silu"));
        }
    }
    if keys.float("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported("partial_rotary_factor", "Dressage rotates heads whole"));
    }
    for key in ["qk_norm", "use_qk_norm"] {
        if keys
            .read(key, "true or false", Value::as_bool)?
            .is_some_and(|flag| flag != (family == Family::Qwen3))
        {
            return Err(keys.unsupported(
                key,
                "Dressage runs Qwen3 with norms on queries and keys, and other families without",
            ));
        }
    }
    for (key, value) in known::neutral() {
        keys.refuse_unless(
            key,
            &value,
            "Dressage does not run this change of the blocks: choose a model without it",
        )?;
    }
    Ok(())
}

/// Older files have `rope_theta` and `rope_scaling`, newer ones both in `rope_parameters`. Where a file has
/// both, transformers goes by the older one.
fn rope(keys: &Keys, context: usize) -> Result<Rope, ModelError> {
    let outer_theta = keys.float("rope_theta")?;
    let older = keys.object("rope_scaling")?.filter(|object| !object.is_empty());
    let newer = keys.object("rope_parameters")?;
    let inner =
        older.map(|object| ("rope_scaling.", object)).or(newer.map(|object| ("rope_parameters.", object)));
    let trained = keys.size("original_max_position_embeddings")?;
    let Some((outer, object)) = inner else {
        return Ok(Rope { theta: outer_theta.unwrap_or(10_000.0), scaling: RopeScaling::None });
    };
    let inner = Keys::new(keys.path, outer, object);
    let theta = inner.float("rope_theta")?.or(outer_theta).unwrap_or(10_000.0);
    let scaling = scaling(&inner, context)?;
    if let (Some(outer), Some(inner)) = (trained, scaling.original_context())
        && outer != inner
    {
        return Err(keys.unsupported(
            "original_max_position_embeddings",
            &format!("the rotary scaling says {inner}: remove the one that is wrong from config.json"),
        ));
    }
    // Said of all scalings by some writers; it counts for those above.
    inner.get("original_max_position_embeddings");
    // Of fine-tunes of a stretched model, a remark.
    inner.get("finetuned");
    inner.settle_rest(|_| false, UNKNOWN)?;
    Ok(Rope { theta, scaling })
}

fn scaling(keys: &Keys, context: usize) -> Result<RopeScaling, ModelError> {
    // `type` is the older spelling.
    let older = keys.text("type")?;
    let kind = keys.text("rope_type")?.or(older).unwrap_or("default");
    if keys.float("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported("partial_rotary_factor", "Dressage rotates heads whole"));
    }
    match kind {
        "default" => {
            // Left over from a scaling that was switched off.
            for key in ["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"] {
                keys.get(key);
            }
            Ok(RopeScaling::None)
        }
        "linear" => Ok(RopeScaling::Linear { factor: keys.needed_float("factor")? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: keys.needed_float("factor")?,
            low_freq_factor: keys.needed_float("low_freq_factor")?,
            high_freq_factor: keys.needed_float("high_freq_factor")?,
            original_context: keys.needed_size("original_max_position_embeddings")?,
        }),
        "yarn" => yarn(keys, context),
        _ => Err(keys.unsupported(
            if keys.get("rope_type").is_some() { "rope_type" } else { "type" },
            "Dressage runs the rotary scalings default, linear, llama3 and yarn; for short contexts, removing the \
             entry from config.json gives the unscaled model",
        )),
    }
}

fn yarn(keys: &Keys, context: usize) -> Result<RopeScaling, ModelError> {
    if !keys.flag("truncate", true)? {
        return Err(keys.unsupported("truncate", "Dressage runs YaRN with whole-numbered bounds only"));
    }
    let original_context = keys.size("original_max_position_embeddings")?.unwrap_or(context);
    let factor = match keys.float("factor")? {
        Some(factor) => factor,
        None if original_context > 0 && original_context < context => {
            context as f32 / original_context as f32
        }
        None => keys.need("factor", None)?,
    };
    let scales = (keys.float("mscale")?, keys.float("mscale_all_dim")?);
    let attention_factor = match keys.float("attention_factor")? {
        Some(factor) => Some(factor),
        None => match scales {
            (Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => {
                let magnitude = |scale: f32| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
                Some(magnitude(scale) / magnitude(all))
            }
            _ => None,
        },
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: keys.float("beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.float("beta_slow")?.unwrap_or(1.0),
        attention_factor,
        original_context,
    })
}

/// The shortest decimal that reads back as this f32, so that 1e-6 is not written as 9.999999974752427e-7.
fn shortest(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

impl ModelConfig {
    /// The contents of a `config.json` from which `transformers` builds this model, in f32.
    pub fn to_hf_json(&self) -> Value {
        let (model_type, architecture) = match self.family {
            Family::Llama => ("llama", "LlamaForCausalLM"),
            Family::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
            Family::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
        };
        let mut json = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "hidden_act": "silu",
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rms_norm_eps": shortest(self.norm_epsilon),
            "rope_theta": shortest(self.rope.theta),
            "rope_scaling": self.rope.scaling.to_hf_json(),
            "tie_word_embeddings": self.tied,
            "attention_dropout": 0.0,
            "use_cache": true,
            "torch_dtype": "float32",
            "bos_token_id": self.bos,
            "eos_token_id": match self.eos.as_slice() {
                [] => Value::Null,
                [one] => json!(one),
                several => json!(several),
            },
            "pad_token_id": self.pad,
        });
        match self.family {
            Family::Llama => {
                json["attention_bias"] = json!(self.qkv_bias);
                json["mlp_bias"] = json!(self.mlp_bias);
            }
            Family::Qwen2 => json["use_sliding_window"] = json!(false),
            Family::Qwen3 => {
                json["attention_bias"] = json!(self.qkv_bias);
                json["use_sliding_window"] = json!(false);
            }
        }
        json
    }
}

impl RopeScaling {
    /// The context before stretching, of the scalings that know it.
    fn original_context(&self) -> Option<usize> {
        match *self {
            Self::None | Self::Linear { .. } => None,
            Self::Llama3 { original_context, .. } | Self::Yarn { original_context, .. } => {
                Some(original_context)
            }
        }
    }

    fn to_hf_json(&self) -> Value {
        match *self {
            Self::None => Value::Null,
            Self::Linear { factor } => json!({ "rope_type": "linear", "factor": shortest(factor) }),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => json!({
                "rope_type": "llama3",
                "factor": shortest(factor),
                "low_freq_factor": shortest(low_freq_factor),
                "high_freq_factor": shortest(high_freq_factor),
                "original_max_position_embeddings": original_context,
            }),
            Self::Yarn { factor, beta_fast, beta_slow, attention_factor, original_context } => {
                let mut json = json!({
                    "rope_type": "yarn",
                    "factor": shortest(factor),
                    "beta_fast": shortest(beta_fast),
                    "beta_slow": shortest(beta_slow),
                    "original_max_position_embeddings": original_context,
                });
                if let Some(factor) = attention_factor {
                    json["attention_factor"] = shortest(factor);
                }
                json
            }
        }
    }
}

#[cfg(test)]
mod tests;
