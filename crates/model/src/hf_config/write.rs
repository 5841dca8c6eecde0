//! Writes a model configuration as a `config.json`.

use serde_json::{Value, json};

use super::pattern::to_layer_types;
use crate::family::{AttentionBias, Windows};
use crate::{Activation, ModelConfig, RopeScaling};

/// Converts an f32 to the shortest decimal number that parses to it, so that 1e-6 is not written as
/// 9.999999974752427e-7. Infinity and NaN become null.
fn shortest_decimal(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

impl ModelConfig {
    /// Returns the contents of a `config.json` from which `transformers` builds this model in f32.
    pub fn to_hf_json(&self) -> Value {
        let traits = self.family.traits();
        let mut json = json!({
            "architectures": [traits.class],
            "model_type": traits.model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rms_norm_eps": shortest_decimal(self.norm_epsilon),
            "rope_theta": shortest_decimal(self.rope.theta),
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
        match self.activation() {
            Activation::Silu => json["hidden_act"] = json!("silu"),
            Activation::GeluTanh => json["hidden_activation"] = json!("gelu_pytorch_tanh"),
        }
        // Qwen2 has biases and Mistral has none, regardless of the file.
        if traits.attention_bias == AttentionBias::Configured {
            json["attention_bias"] = json!(self.qkv_bias);
        }
        if traits.mlp_bias {
            json["mlp_bias"] = json!(self.mlp_bias);
        }
        self.write_pattern(&mut json);
        json
    }

    fn write_pattern(&self, json: &mut Value) {
        let pattern = &self.pattern;
        let traits = self.family.traits();
        let slides = !pattern.windowed.is_empty();
        if traits.windows.need_switch() {
            json["use_sliding_window"] = json!(slides);
        }
        if traits.windows == Windows::Every || slides {
            json["sliding_window"] = json!(pattern.window);
        }
        if matches!(traits.windows, Windows::AllExceptEveryNth(_))
            || (slides && traits.windows != Windows::Every)
        {
            json["layer_types"] = json!(to_layer_types(pattern, self.layers));
        }
        if traits.unrotated_interval.is_some() {
            json["no_rope_layers"] = (0..self.layers)
                .map(|layer| u8::from(!pattern.unrotated.contains(&layer)))
                .collect();
        }
        if let Some(rope) = &pattern.local_rope {
            json["rope_local_base_freq"] = shortest_decimal(rope.theta);
        }
        if let Some(scalar) = self.query_scalar {
            // The class in transformers expects an integer. Write a float only if the number has a
            // fraction.
            let is_integer = scalar.fract() == 0.0;
            json["query_pre_attn_scalar"] =
                if is_integer { json!(scalar as u64) } else { shortest_decimal(scalar) };
        }
    }
}

impl RopeScaling {
    fn to_hf_json(&self) -> Value {
        match *self {
            Self::None => Value::Null,
            Self::Linear { factor } => {
                json!({ "rope_type": "linear", "factor": shortest_decimal(factor) })
            }
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => json!({
                "rope_type": "llama3",
                "factor": shortest_decimal(factor),
                "low_freq_factor": shortest_decimal(low_freq_factor),
                "high_freq_factor": shortest_decimal(high_freq_factor),
                "original_max_position_embeddings": original_context,
            }),
            Self::Yarn { factor, beta_fast, beta_slow, attention_factor, original_context } => {
                let mut json = json!({
                    "rope_type": "yarn",
                    "factor": shortest_decimal(factor),
                    "beta_fast": shortest_decimal(beta_fast),
                    "beta_slow": shortest_decimal(beta_slow),
                    "original_max_position_embeddings": original_context,
                });
                if let Some(factor) = attention_factor {
                    json["attention_factor"] = shortest_decimal(factor);
                }
                json
            }
        }
    }
}
