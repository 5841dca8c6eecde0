//! Reads the shape of a model from its `config.json`, and counts its parameters and operations.

use std::path::Path;

use levade_model::ModelConfig;
use levade_run::display;
use serde::Deserialize;
use serde_json::Value;

/// Dimensions of a decoder-only transformer whose feed-forward part is gated, either dense or
/// mixture-of-experts.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Shape {
    #[serde(default)]
    model_type: String,
    /// Width of the hidden states.
    #[serde(rename = "hidden_size")]
    pub hidden: u64,
    /// Number of transformer layers.
    #[serde(rename = "num_hidden_layers")]
    pub layers: u64,
    /// Number of query heads per layer.
    #[serde(rename = "num_attention_heads")]
    pub heads: u64,
    #[serde(rename = "num_key_value_heads", default)]
    kv_heads: Option<u64>,
    #[serde(default)]
    head_dim: Option<u64>,
    /// Width of the dense feed-forward part.
    #[serde(rename = "intermediate_size")]
    pub intermediate: u64,
    /// Number of tokens in the vocabulary.
    #[serde(rename = "vocab_size")]
    pub vocabulary: u64,
    /// Maximum sequence length, in tokens. 4096 if the model's configuration does not set it.
    #[serde(rename = "max_position_embeddings", default = "default_context")]
    pub context: u64,
    /// Whether the output head shares the weights of the embedding.
    #[serde(rename = "tie_word_embeddings", default)]
    pub tied: bool,
    #[serde(
        rename = "num_experts",
        alias = "num_local_experts",
        alias = "n_routed_experts",
        default
    )]
    experts: Option<u64>,
    #[serde(rename = "num_experts_per_tok", default)]
    experts_of_token: Option<u64>,
    #[serde(rename = "moe_intermediate_size", default)]
    expert_intermediate: Option<u64>,
}

/// Maximum accepted number of heads and of experts, and maximum accepted width.
const MAX_SIZE: u64 = 1 << 24;
/// Maximum accepted number of model parameters.
const MAX_PARAMETERS: u128 = 1 << 50;

fn default_context() -> u64 {
    4096
}

impl Shape {
    /// Parses a Hugging Face `config.json`. For a multimodal model, reads its `text_config`.
    ///
    /// # Errors
    /// Returns a message if the text is not JSON, a number is missing or out of range, or the model
    /// has attention or layers of an unsupported kind.
    pub fn parse(text: &str) -> Result<Self, String> {
        // In a family that the engine supports, missing keys have the defaults of that family.
        match ModelConfig::from_hf_json(Path::new("config.json"), text.as_bytes()) {
            Ok(config) => Self::new(&config).check_limits(),
            Err(_) => Self::parse_unsupported(text)?.check_limits(),
        }
    }

    /// Parses a `config.json` of a model family that the engine does not support.
    fn parse_unsupported(text: &str) -> Result<Self, String> {
        let mut config: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if let Some(Value::Object(inner)) = config.get_mut("text_config").map(Value::take) {
            let Some(outer) = config.as_object_mut() else {
                return Err("the configuration is not a JSON object".into());
            };
            outer.extend(inner);
        }
        if !config["kv_lora_rank"].is_null() {
            return Err(
                "the model has latent attention (kv_lora_rank), which `levade plan` does not \
                 support"
                    .into(),
            );
        }
        let kinds =
            config["layer_types"].as_array().into_iter().flatten().filter_map(Value::as_str);
        if let Some(odd) = kinds
            .into_iter()
            .find(|kind| !kind.ends_with("_attention") || *kind == "linear_attention")
        {
            return Err(format!(
                "the model has layers of {odd}, which `levade plan` does not support"
            ));
        }
        serde_json::from_value(config).map_err(|error| error.to_string())
    }

    /// Returns the shape unchanged if its numbers are in range.
    ///
    /// # Errors
    /// Returns a message that names the first number out of range, or that contains the number of
    /// parameters if the model has too many.
    fn check_limits(self) -> Result<Self, String> {
        for (name, value, limit) in [
            ("hidden_size", self.hidden, MAX_SIZE),
            ("num_hidden_layers", self.layers, 1 << 14),
            ("num_attention_heads", self.heads, self.hidden.min(MAX_SIZE)),
            ("num_key_value_heads", self.kv_heads.unwrap_or(1), self.heads),
            ("head_dim", self.head_dim.unwrap_or(1), MAX_SIZE),
            ("intermediate_size", self.intermediate, MAX_SIZE),
            ("vocab_size", self.vocabulary, 1 << 32),
            ("max_position_embeddings", self.context, 1 << 32),
            ("num_experts", self.experts.unwrap_or(1), MAX_SIZE),
            ("num_experts_per_tok", self.experts_of_token.unwrap_or(1), self.experts.unwrap_or(1)),
            ("moe_intermediate_size", self.expert_intermediate.unwrap_or(1), MAX_SIZE),
        ] {
            if value == 0 || value > limit {
                return Err(format!("the key `{name}` is {value}, but must be in 1..={limit}"));
            }
        }
        let one = u128::from(
            self.expert_intermediate.unwrap_or(self.intermediate).max(self.intermediate),
        );
        let block = u128::from(self.hidden)
            * (3 * u128::from(self.experts.unwrap_or(1)) * one
                + 4 * u128::from(self.query_width()));
        let all = u128::from(self.layers) * block
            + 2 * u128::from(self.vocabulary) * u128::from(self.hidden);
        if all > MAX_PARAMETERS {
            return Err(format!(
                "the sizes of the model give {all} parameters, but must give at most \
                 {MAX_PARAMETERS}"
            ));
        }
        Ok(self)
    }

    /// Creates the shape from the parsed configuration of a model on this machine, whose files can
    /// have any supported format.
    pub fn new(config: &ModelConfig) -> Self {
        Shape {
            model_type: serde_json::to_value(config.family)
                .ok()
                .and_then(|name| Some(name.as_str()?.to_owned()))
                .unwrap_or_default(),
            hidden: config.hidden as u64,
            layers: config.layers as u64,
            heads: config.heads as u64,
            kv_heads: Some(config.kv_heads as u64),
            head_dim: Some(config.head_dim as u64),
            intermediate: config.intermediate as u64,
            vocabulary: config.vocabulary as u64,
            context: config.context as u64,
            tied: config.tied,
            experts: None,
            experts_of_token: None,
            expert_intermediate: None,
        }
    }

    /// Returns the width of an attention head.
    pub fn head_dim(&self) -> u64 {
        self.head_dim.unwrap_or(self.hidden / self.heads)
    }

    /// Returns the number of key-value heads per layer. It equals [`Shape::heads`] without
    /// grouped-query attention.
    pub fn kv_heads(&self) -> u64 {
        self.kv_heads.unwrap_or(self.heads)
    }

    /// Returns the number of experts per layer, or `None` for a dense model.
    pub fn experts(&self) -> Option<u64> {
        self.experts
    }

    /// Returns the total width of all keys of a layer, which is also the width of all values.
    pub fn key_width(&self) -> u64 {
        self.kv_heads() * self.head_dim()
    }

    /// Returns the total width of all queries of a layer.
    pub fn query_width(&self) -> u64 {
        self.heads * self.head_dim()
    }

    /// Returns the feed-forward width that is active for a token, summed over the experts to which
    /// the token is routed.
    pub fn active_width(&self) -> u64 {
        match (self.experts, self.experts_of_token) {
            (Some(_), Some(active)) => {
                active * self.expert_intermediate.unwrap_or(self.intermediate)
            }
            _ => self.intermediate,
        }
    }

    fn attention_parameters(&self) -> u64 {
        self.hidden * (2 * self.query_width() + 2 * self.key_width())
    }

    /// Returns the number of parameters of one transformer layer, including all experts and both
    /// norms.
    pub fn layer_parameters(&self) -> u64 {
        let feed_forward = match self.experts {
            Some(experts) => {
                let one = self.expert_intermediate.unwrap_or(self.intermediate);
                experts * (3 * self.hidden * one + self.hidden)
            }
            None => 3 * self.hidden * self.intermediate,
        };
        self.attention_parameters() + feed_forward + 2 * self.hidden
    }

    /// Returns the number of parameters outside the transformer layers: the embedding, the final
    /// norm and, unless tied, the output head.
    pub fn parameters_outside_layers(&self) -> u64 {
        self.vocabulary * self.hidden * if self.tied { 1 } else { 2 } + self.hidden
    }

    /// Returns the total number of parameters of the model.
    pub fn parameters(&self) -> u64 {
        self.layers * self.layer_parameters() + self.parameters_outside_layers()
    }

    /// Returns the number of parameters that are active for a token, including the output head.
    pub fn active_parameters(&self) -> u64 {
        self.layers * (self.attention_parameters() + 3 * self.hidden * self.active_width())
            + self.vocabulary * self.hidden
    }

    /// Returns the size of the KV cache per token in bytes. `bytes` is the size of one number.
    pub fn kv_cache_bytes_per_token(&self, bytes: u64) -> u64 {
        (2 * self.layers * self.key_width()).saturating_mul(bytes)
    }

    /// Returns the number of floating-point operations in the forward pass of one token that
    /// attends to `seen` tokens.
    pub fn forward_flops(&self, seen: u64) -> f64 {
        2.0 * self.active_parameters() as f64
            + 4.0 * (self.layers * self.query_width()) as f64 * seen as f64
    }

    /// Describes the model on one line, for example "llama, 134.5 M parameters, 30 layers of 576,
    /// 49152 tokens".
    pub fn describe(&self) -> String {
        let parameters = self.parameters();
        let active = self.active_parameters();
        let experts = match self.experts {
            Some(_) => format!(" ({} active per token)", display::count(active)),
            None => String::new(),
        };
        format!(
            "{}, {} parameters{experts}, {} layers of {}, {} tokens",
            self.model_type,
            display::count(parameters),
            self.layers,
            self.hidden,
            self.vocabulary
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_matches_parsed_shape() {
        let config = levade_engine::testing::tiny_config();
        let read = Shape::parse(&config.to_hf_json().to_string()).unwrap();
        let model_shape = Shape::new(&config);
        assert_eq!(
            Shape { head_dim: model_shape.head_dim, kv_heads: model_shape.kv_heads, ..read },
            model_shape
        );
    }

    /// Published parameter counts: 134,515,008 of SmolLM2-135M, 7.62 B of Qwen2.5-7B, and 30.5 B of
    /// Qwen3-30B-A3B (3.3 B active per token).
    #[test]
    fn parameters_match_published_models() {
        let smol = r#"{"model_type":"llama","hidden_size":576,"num_hidden_layers":30,"num_attention_heads":9,
            "num_key_value_heads":3,"intermediate_size":1536,"vocab_size":49152,"tie_word_embeddings":true}"#;
        let smol = Shape::parse(smol).unwrap();
        assert_eq!(smol.parameters(), 134_515_008);
        assert_eq!(smol.kv_cache_bytes_per_token(2), 2 * 30 * 192 * 2);
        let qwen = r#"{"hidden_size":3584,"num_hidden_layers":28,"num_attention_heads":28,
            "num_key_value_heads":4,"intermediate_size":18944,"vocab_size":152064,"tie_word_embeddings":false}"#;
        let parameters = Shape::parse(qwen).unwrap().parameters() as f64;
        assert!((parameters / 7.6156e9 - 1.0).abs() < 1e-3, "{parameters}");
        let experts = r#"{"hidden_size":2048,"num_hidden_layers":48,"num_attention_heads":32,"head_dim":128,
            "num_key_value_heads":4,"intermediate_size":6144,"vocab_size":151936,"num_experts":128,
            "num_experts_per_tok":8,"moe_intermediate_size":768}"#;
        let experts = Shape::parse(experts).unwrap();
        let all = experts.parameters() as f64;
        let active = experts.active_parameters() as f64;
        assert!(
            (all / 30.5e9 - 1.0).abs() < 0.01 && (active / 3.3e9 - 1.0).abs() < 0.1,
            "{all} {active}"
        );
        assert!(Shape::parse("{}").unwrap_err().contains("hidden_size"));
        // The text_config of Gemma 3 4B sets only these keys. Its text model has 3.88 B parameters.
        let gemma = r#"{"model_type":"gemma3","text_config":{"model_type":"gemma3_text","hidden_size":2560,
            "intermediate_size":10240,"num_hidden_layers":34,"sliding_window":1024,
            "rope_scaling":{"factor":8.0,"rope_type":"linear"}}}"#;
        let parameters = Shape::parse(gemma).unwrap().parameters() as f64;
        assert!((parameters / 3.88e9 - 1.0).abs() < 0.01, "{parameters}");
    }

    #[test]
    fn parse_rejects_impossible_shapes_by_key() {
        let base = serde_json::json!({
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 128, "vocab_size": 7, "max_position_embeddings": 1u64 << 30,
        });
        let read = |key: &str, value: Value| {
            let mut config = base.clone();
            config[key] = value;
            Shape::parse(&config.to_string())
        };
        // Unusual but valid: a tiny vocabulary, a huge context, a single expert.
        assert_eq!(
            read("tie_word_embeddings", true.into()).unwrap().parameters_outside_layers(),
            7 * 64 + 64
        );
        assert_eq!(read("num_experts", 1.into()).unwrap().experts, Some(1));
        for (key, value) in [
            ("hidden_size", u64::MAX),
            ("num_hidden_layers", 0),
            ("num_attention_heads", 65),
            ("num_key_value_heads", 0),
            ("num_key_value_heads", 5),
            ("head_dim", 1 << 40),
            ("intermediate_size", u64::MAX / 2),
            ("vocab_size", 0),
            ("max_position_embeddings", 0),
            ("num_experts", 0),
            ("moe_intermediate_size", 1 << 60),
        ] {
            let why = read(key, value.into()).unwrap_err();
            assert!(
                why.contains(key) && why.contains("but must be in 1..="),
                "{key} {value}: {why}"
            );
        }
        let mut huge = base.clone();
        for (key, value) in [
            ("hidden_size", 1u64 << 23),
            ("num_hidden_layers", 1 << 12),
            ("intermediate_size", 1 << 23),
        ] {
            huge[key] = value.into();
        }
        assert!(
            Shape::parse(&huge.to_string())
                .unwrap_err()
                .contains("parameters, but must give at most")
        );
        let odd = read("layer_types", serde_json::json!(["full_attention", "linear_attention"]));
        assert!(odd.unwrap_err().contains("layers of linear_attention"));
        assert!(read("kv_lora_rank", 512.into()).unwrap_err().contains("latent attention"));
        let mixed = serde_json::json!({ "model_type": "seer", "text_config": base, "tie_word_embeddings": true });
        assert!(Shape::parse(&mixed.to_string()).unwrap().tied);
    }
}
