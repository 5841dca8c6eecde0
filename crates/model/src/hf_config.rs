//! `config.json` as Hugging Face has it, in and out.
//!
//! Absent keys take the defaults of `transformers`, except that an absent token id means that there is none. What would
//! change the computation and is not supported (sliding windows, quantisation, partial rotation, other activations, other
//! rotary scalings) is refused, never ignored.

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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &Value) -> Result<ModelConfig, ModelError> {
        parse(Path::new("config.json"), json.to_string().as_bytes())
    }

    /// The keys without a default.
    fn least(model_type: &str) -> Value {
        json!({
            "model_type": model_type,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 100,
        })
    }

    fn with(model_type: &str, key: &str, value: Value) -> Value {
        let mut json = least(model_type);
        json[key] = value;
        json
    }

    #[test]
    fn absent_keys_take_the_defaults_of_transformers() {
        let llama = read(&least("llama")).unwrap();
        assert_eq!((llama.kv_heads, llama.head_dim, llama.context), (4, 16, 2048));
        assert_eq!((llama.norm_epsilon, llama.rope.theta), (1e-6, 10_000.0));
        assert!(!llama.tied && !llama.qkv_bias && !llama.output_bias && !llama.mlp_bias && !llama.qk_norm);
        assert_eq!((llama.bos, llama.eos, llama.pad), (None, vec![], None));
        let qwen2 = read(&least("qwen2")).unwrap();
        assert!(qwen2.qkv_bias && !qwen2.output_bias && !qwen2.qk_norm);
        assert_eq!((qwen2.head_dim, qwen2.context), (16, 32768));
        let qwen3 = read(&least("qwen3")).unwrap();
        assert!(!qwen3.qkv_bias && qwen3.qk_norm);
        assert_eq!(qwen3.head_dim, 128);
    }

    #[test]
    fn biases_and_ends_are_read() {
        let llama = read(&with("llama", "attention_bias", json!(true))).unwrap();
        assert!(llama.qkv_bias && llama.output_bias);
        assert!(read(&with("llama", "mlp_bias", json!(true))).unwrap().mlp_bias);
        let qwen3 = read(&with("qwen3", "attention_bias", json!(true))).unwrap();
        assert!(qwen3.qkv_bias && qwen3.output_bias);
        assert_eq!(read(&with("llama", "eos_token_id", json!(7))).unwrap().eos, [7]);
        assert_eq!(read(&with("llama", "eos_token_id", json!([7, 8]))).unwrap().eos, [7, 8]);
        assert_eq!(read(&with("llama", "pad_token_id", json!(-1))).unwrap().pad, None);
        assert_eq!(read(&with("llama", "pad_token_id", json!(3))).unwrap().pad, Some(3));
    }

    /// The same scaling in the older and the newer spelling.
    #[test]
    fn rotary_scalings_in_both_spellings() {
        let llama3 = json!({
            "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
        let expected_llama3 = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let yarn = json!({ "factor": 4.0, "original_max_position_embeddings": 1024 });
        let expected_yarn = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            original_context: 1024,
        };
        for (kind, parameters, expected) in [
            ("default", json!({}), RopeScaling::None),
            ("linear", json!({ "factor": 2.5 }), RopeScaling::Linear { factor: 2.5 }),
            ("llama3", llama3, expected_llama3),
            ("yarn", yarn, expected_yarn),
        ] {
            for kind_key in ["type", "rope_type"] {
                let mut scaling = parameters.clone();
                scaling[kind_key] = json!(kind);
                let mut older = with("llama", "rope_scaling", scaling.clone());
                older["rope_theta"] = json!(500_000.0);
                scaling["rope_theta"] = json!(500_000.0);
                let newer = with("llama", "rope_parameters", scaling);
                for json in [older, newer] {
                    let rope = read(&json).unwrap().rope;
                    assert_eq!(rope, Rope { theta: 500_000.0, scaling: expected.clone() }, "{json}");
                }
            }
        }
        let null = read(&with("llama", "rope_scaling", Value::Null)).unwrap();
        assert_eq!(null.rope.scaling, RopeScaling::None);
    }

    #[test]
    fn yarn_fills_in_what_is_not_said() {
        let scaling =
            |json: Value| read(&with("qwen2", "rope_scaling", json)).map(|config| config.rope.scaling);
        let ratio =
            scaling(json!({ "rope_type": "yarn", "original_max_position_embeddings": 8192 })).unwrap();
        assert!(matches!(ratio, RopeScaling::Yarn { factor: 4.0, original_context: 8192, .. }), "{ratio:?}");
        let scales = json!({ "rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0 });
        let RopeScaling::Yarn { attention_factor: Some(found), original_context, .. } =
            scaling(scales).unwrap()
        else {
            panic!("no attention factor")
        };
        // (0.0707 ln 40 + 1) / (0.1 ln 40 + 1)
        assert!((found - 0.921_045).abs() < 1e-5, "{found}");
        assert_eq!(original_context, 32768);
        assert!(
            scaling(json!({ "rope_type": "yarn" })).unwrap_err().to_string().contains("rope_scaling.factor")
        );
    }

    #[test]
    fn what_would_change_the_computation_is_refused_by_name() {
        for (key, value, expected) in [
            ("model_type", json!("mistral"), "model_type is \"mistral\""),
            ("quantization_config", json!({ "bits": 4 }), "quantization_config is"),
            ("use_sliding_window", json!(true), "use_sliding_window is true"),
            ("layer_types", json!(["full_attention", "sliding_attention"]), "layer_types is"),
            ("hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
            ("partial_rotary_factor", json!(0.5), "partial_rotary_factor is 0.5"),
            ("rope_scaling", json!({ "type": "dynamic", "factor": 2 }), "rope_scaling.type is \"dynamic\""),
            (
                "rope_parameters",
                json!({ "rope_type": "longrope" }),
                "rope_parameters.rope_type is \"longrope\"",
            ),
            (
                "rope_scaling",
                json!({ "type": "yarn", "factor": 2, "truncate": false }),
                "rope_scaling.truncate",
            ),
        ] {
            let error = read(&with("qwen2", key, value)).unwrap_err();
            assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        }
        // Files say so of windows that are not used.
        let mut unused = with("qwen2", "sliding_window", json!(4096));
        unused["use_sliding_window"] = json!(false);
        read(&unused).unwrap();
    }

    #[test]
    fn impossible_and_missing_entries_are_named() {
        for (key, value, expected) in [
            ("hidden_size", Value::Null, "hidden_size is missing"),
            ("hidden_size", json!("64"), "hidden_size is \"64\"; it should be a whole number"),
            ("hidden_size", json!(-64), "hidden_size is -64"),
            ("hidden_size", json!(66), "hidden_size 66 cannot be split into num_attention_heads 4"),
            ("num_attention_heads", json!(0), "num_attention_heads 0"),
            ("num_hidden_layers", json!(1u64 << 60), "the number of layers is 1152921504606846976"),
            ("num_key_value_heads", json!(3), "4 attention heads cannot share 3"),
            ("head_dim", json!(7), "head dimension 7 is odd"),
            ("rms_norm_eps", json!(-1.0), "norm epsilon -1"),
            ("rope_theta", json!(0), "rotary base 0"),
            ("eos_token_id", json!("x"), "eos_token_id is \"x\""),
            ("rope_scaling", json!("linear"), "rope_scaling is \"linear\"; it should be an object"),
            ("rope_scaling", json!({ "type": "linear" }), "rope_scaling.factor is missing"),
            ("rope_scaling", json!({ "type": "linear", "factor": 0 }), "factor is 0"),
        ] {
            let message = read(&with("llama", key, value)).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
            assert!(message.starts_with("config.json: "), "{message}");
        }
        let error = parse(Path::new("config.json"), b"{\"model_type\": \"llama\"").unwrap_err();
        assert!(matches!(error, ModelError::Damaged { .. }), "{error}");
    }

    #[test]
    fn what_is_written_is_read_back() {
        let yarn = |attention_factor| RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 24.0,
            beta_slow: 1.5,
            attention_factor,
            original_context: 64,
        };
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 64,
        };
        let scalings =
            [RopeScaling::None, RopeScaling::Linear { factor: 1.1 }, llama3, yarn(None), yarn(Some(1.25))];
        for model_type in ["llama", "qwen2", "qwen3"] {
            for scaling in &scalings {
                let mut config = read(&least(model_type)).unwrap();
                config.rope = Rope { theta: 1e6 + 0.5, scaling: scaling.clone() };
                config.norm_epsilon = 1e-5;
                config.tied = true;
                (config.bos, config.eos, config.pad) = (Some(1), vec![2, 3], Some(4));
                if model_type != "qwen2" {
                    (config.qkv_bias, config.output_bias) = (true, true);
                }
                assert_eq!(read(&config.to_hf_json()).unwrap(), config);
            }
        }
    }
}
