//! `config.json` as Hugging Face has it, in and out.
//!
//! Absent keys take the defaults of `transformers`. What would change the computation and is not supported (sliding windows,
//! quantisation, partial rotation, other activations, other rotary scalings) is refused, never ignored.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::{Family, ModelConfig, ModelError, Rope, RopeScaling};

/// A JSON object of a file, with errors that name the key.
#[derive(Clone, Copy)]
struct Keys<'a> {
    path: &'a Path,
    /// What precedes the keys in messages: empty, or the outer key and a dot.
    outer: &'a str,
    object: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// `None` where the key is absent or null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        key: &str,
        wanted: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| {
            let shown: String = value.to_string().chars().take(60).collect();
            ModelError::config(self.path, format!("{}{key} is {shown}; it should be {wanted}", self.outer))
        })
    }

    fn need<T>(&self, key: &str, value: Option<T>) -> Result<T, ModelError> {
        value.ok_or_else(|| ModelError::config(self.path, format!("{}{key} is missing", self.outer)))
    }

    fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.read(key, "a whole number ≥ 0", |value| value.as_u64().and_then(|value| value.try_into().ok()))
    }

    fn needed_size(&self, key: &str) -> Result<usize, ModelError> {
        self.need(key, self.size(key)?)
    }

    fn float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        self.read(key, "a number", |value| value.as_f64().map(|value| value as f32))
    }

    fn needed_float(&self, key: &str) -> Result<f32, ModelError> {
        self.need(key, self.float(key)?)
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        Ok(self.read(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.read(key, "a text", Value::as_str)
    }

    fn token(&self, key: &str) -> Result<Option<u32>, ModelError> {
        self.read(key, "a token id", token_id)
    }

    fn object(&self, key: &'a str) -> Result<Option<&'a Map<String, Value>>, ModelError> {
        self.read(key, "an object", Value::as_object)
    }

    fn unsupported(&self, key: &str, way_out: &str) -> ModelError {
        let shown = self.object.get(key).map(|value| value.to_string().chars().take(60).collect::<String>());
        let what = format!("{}{key} is {}", self.outer, shown.unwrap_or_else(|| "absent".into()));
        ModelError::unsupported(self.path, what, way_out)
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// A token id or a list of them, as `eos_token_id` has.
pub(crate) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    match value {
        Value::Array(ids) => ids.iter().map(token_id).collect(),
        id => token_id(id).map(|id| vec![id]),
    }
}

/// Reads the contents of the `config.json` at `path`.
pub(crate) fn parse(path: &Path, contents: &[u8]) -> Result<ModelConfig, ModelError> {
    let object: Map<String, Value> = serde_json::from_slice(contents)
        .map_err(|error| ModelError::damaged(path, format!("it is not a JSON object: {error}")))?;
    let keys = Keys { path, outer: "", object: &object };
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
    refuse_the_unsupported(&keys)?;
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
    let attention_bias = family != Family::Qwen2 && keys.flag("attention_bias", false)?;
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
        mlp_bias: family == Family::Llama && keys.flag("mlp_bias", false)?,
        qk_norm: family == Family::Qwen3,
        bos: keys.token("bos_token_id")?,
        eos: eos.unwrap_or_default(),
        pad: pad(&keys)?,
    };
    match config.contradiction() {
        Some(what) => Err(ModelError::config(path, what)),
        None => Ok(config),
    }
}

/// Llama 2 era files say −1 for "no padding token".
fn pad(keys: &Keys) -> Result<Option<u32>, ModelError> {
    match keys.get("pad_token_id") {
        Some(value) if value.as_i64() == Some(-1) => Ok(None),
        _ => keys.token("pad_token_id"),
    }
}

fn refuse_the_unsupported(keys: &Keys) -> Result<(), ModelError> {
    if keys.get("quantization_config").is_some() {
        let way_out = "Dressage reads F32, F16 and BF16 folders: take the version of the model that is not quantised, or a GGUF file";
        return Err(keys.unsupported("quantization_config", way_out));
    }
    let windows =
        "Dressage does not run sliding-window attention: choose a model that attends to its whole context";
    if keys.flag("use_sliding_window", false)? {
        return Err(keys.unsupported("use_sliding_window", windows));
    }
    let layer_types = keys.get("layer_types").and_then(Value::as_array);
    if layer_types.is_some_and(|types| types.iter().any(|kind| kind != "full_attention")) {
        return Err(keys.unsupported("layer_types", windows));
    }
    if keys.text("hidden_act")?.is_some_and(|activation| activation != "silu") {
        return Err(keys.unsupported("hidden_act", "Dressage runs the activation silu"));
    }
    if keys.float("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported("partial_rotary_factor", "Dressage rotates heads whole"));
    }
    Ok(())
}

/// Older files have `rope_theta` and `rope_scaling`, newer ones both in `rope_parameters`.
fn rope(keys: &Keys, context: usize) -> Result<Rope, ModelError> {
    let outer_theta = keys.float("rope_theta")?;
    for (key, outer) in [("rope_parameters", "rope_parameters."), ("rope_scaling", "rope_scaling.")] {
        if let Some(object) = keys.object(key)? {
            let inner = Keys { path: keys.path, outer, object };
            let theta = inner.float("rope_theta")?.or(outer_theta).unwrap_or(10_000.0);
            return Ok(Rope { theta, scaling: scaling(&inner, context)? });
        }
    }
    Ok(Rope { theta: outer_theta.unwrap_or(10_000.0), scaling: RopeScaling::None })
}

fn scaling(keys: &Keys, context: usize) -> Result<RopeScaling, ModelError> {
    // `type` is the older spelling.
    let kind_key = if keys.get("rope_type").is_some() { "rope_type" } else { "type" };
    if keys.float("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported("partial_rotary_factor", "Dressage rotates heads whole"));
    }
    match keys.text(kind_key)?.unwrap_or("default") {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: keys.needed_float("factor")? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: keys.needed_float("factor")?,
            low_freq_factor: keys.needed_float("low_freq_factor")?,
            high_freq_factor: keys.needed_float("high_freq_factor")?,
            original_context: keys.needed_size("original_max_position_embeddings")?,
        }),
        "yarn" => yarn(keys, context),
        _ => Err(keys.unsupported(
            kind_key,
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
    let attention_factor = match keys.float("attention_factor")? {
        Some(factor) => Some(factor),
        None => match (keys.float("mscale")?, keys.float("mscale_all_dim")?) {
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
