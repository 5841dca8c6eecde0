//! Tests which keys of a `config.json` are read, rejected and ignored.

use serde_json::json;

use super::*;
use crate::{AttentionPattern, Family, Rope, RopeScaling};

fn read(json: &Value) -> Result<ModelConfig, ModelError> {
    read_with_notes(json).map(|(config, _)| config)
}

fn read_with_notes(json: &Value) -> Result<(ModelConfig, Vec<String>), ModelError> {
    parse(Path::new("config.json"), json.to_string().as_bytes())
        .map(|parsed| (parsed.config, parsed.notes))
}

/// Returns a configuration with only the keys that have no default, and as many key heads as query
/// heads.
fn minimal_config(model_type: &str) -> Value {
    let mut json = json!({
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
    });
    if model_type == "mistral" {
        json["num_key_value_heads"] = json!(4);
    }
    json
}

fn with_key(model_type: &str, key: &str, value: Value) -> Value {
    let mut json = minimal_config(model_type);
    json[key] = value;
    json
}

#[test]
fn absent_keys_use_transformers_defaults() {
    let llama = read(&minimal_config("llama")).unwrap();
    assert_eq!((llama.kv_heads, llama.head_dim, llama.context), (4, 16, 2048));
    assert_eq!((llama.norm_epsilon, llama.rope.theta), (1e-6, 10_000.0));
    assert!(
        !llama.tied && !llama.qkv_bias && !llama.output_bias && !llama.mlp_bias && !llama.qk_norm
    );
    assert_eq!((llama.bos, llama.eos, llama.pad), (None, vec![], None));
    let qwen2 = read(&minimal_config("qwen2")).unwrap();
    assert!(qwen2.qkv_bias && !qwen2.output_bias && !qwen2.qk_norm);
    assert_eq!((qwen2.head_dim, qwen2.context), (16, 32768));
    let qwen3 = read(&minimal_config("qwen3")).unwrap();
    assert!(!qwen3.qkv_bias && qwen3.qk_norm);
    assert_eq!(qwen3.head_dim, 128);
}

#[test]
fn biases_and_special_token_ids_are_read() {
    let llama = read(&with_key("llama", "attention_bias", json!(true))).unwrap();
    assert!(llama.qkv_bias && llama.output_bias);
    assert!(read(&with_key("llama", "mlp_bias", json!(true))).unwrap().mlp_bias);
    let qwen3 = read(&with_key("qwen3", "attention_bias", json!(true))).unwrap();
    assert!(qwen3.qkv_bias && qwen3.output_bias);
    assert_eq!(read(&with_key("llama", "eos_token_id", json!(7))).unwrap().eos, [7]);
    assert_eq!(read(&with_key("llama", "eos_token_id", json!([7, 8]))).unwrap().eos, [7, 8]);
    assert_eq!(read(&with_key("llama", "pad_token_id", json!(-1))).unwrap().pad, None);
    assert_eq!(read(&with_key("llama", "pad_token_id", json!(3))).unwrap().pad, Some(3));
}

/// Each scaling parses to the same value in the older and the newer spelling.
#[test]
fn rope_scalings_parse_in_both_spellings() {
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
            let mut older = with_key("llama", "rope_scaling", scaling.clone());
            older["rope_theta"] = json!(500_000.0);
            scaling["rope_theta"] = json!(500_000.0);
            let newer = with_key("llama", "rope_parameters", scaling);
            for json in [older, newer] {
                let rope = read(&json).unwrap().rope;
                assert_eq!(rope, Rope { theta: 500_000.0, scaling: expected.clone() }, "{json}");
            }
        }
    }
    let null = read(&with_key("llama", "rope_scaling", Value::Null)).unwrap();
    assert_eq!(null.rope.scaling, RopeScaling::None);
}

#[test]
fn yarn_derives_absent_parameters() {
    let ratio =
        qwen2_scaling(json!({ "rope_type": "yarn", "original_max_position_embeddings": 8192 }))
            .unwrap();
    assert!(
        matches!(ratio, RopeScaling::Yarn { factor: 4.0, original_context: 8192, .. }),
        "{ratio:?}"
    );
    let scales =
        json!({ "rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0 });
    let RopeScaling::Yarn { attention_factor: Some(found), original_context, .. } =
        qwen2_scaling(scales).unwrap()
    else {
        panic!("no attention factor")
    };
    // (0.0707 ln 40 + 1) / (0.1 ln 40 + 1)
    assert!((found - 0.921_045).abs() < 1e-5, "{found}");
    assert_eq!(original_context, 32768);
    assert!(
        qwen2_scaling(json!({ "rope_type": "yarn" }))
            .unwrap_err()
            .to_string()
            .contains("rope_scaling.factor")
    );
}

fn qwen2_scaling(json: Value) -> Result<RopeScaling, ModelError> {
    read(&with_key("qwen2", "rope_scaling", json)).map(|config| config.rope.scaling)
}

#[test]
fn unsupported_keys_are_rejected_by_name() {
    for (key, value, expected) in [
        ("model_type", json!("gemma2"), "model_type is \"gemma2\""),
        ("quantization_config", json!({ "bits": 4 }), "quantization_config is"),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "layer_types is"),
        ("layer_types", json!(["full_attention", "chunked_attention"]), "layer_types is"),
        ("hidden_act", json!("gelu"), "hidden_act is \"gelu\""),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor is 0.5"),
        (
            "rope_scaling",
            json!({ "type": "dynamic", "factor": 2 }),
            "rope_scaling.type is \"dynamic\"",
        ),
        (
            "rope_parameters",
            json!({ "rope_type": "longrope" }),
            "rope_parameters.rope_type is \"longrope\"",
        ),
        ("auto_map", json!({ "AutoModelForCausalLM": "modeling.Own" }), "auto_map is"),
        ("mlp_bias", json!(true), "feed-forward layers have biases"),
        ("use_qk_norm", json!(true), "use_qk_norm is true"),
        ("qkv_bias", json!(false), "qkv_bias is false"),
        ("is_causal", json!(false), "is_causal is false"),
        ("residual_multiplier", json!(0.22), "residual_multiplier is 0.22"),
        ("attention_multiplier", json!(0.0078125), "attention_multiplier is"),
        ("final_logit_softcapping", json!(30.0), "final_logit_softcapping is 30"),
        ("no_rope_layers", json!([1, 1, 0]), "no_rope_layers is [1,1,0]"),
        ("num_experts", json!(8), "num_experts is 8"),
        ("num_nextn_predict_layers", json!(1), "num_nextn_predict_layers is 1"),
        ("ffn_activation", json!("gelu"), "ffn_activation is \"gelu\""),
        ("something_new", json!({ "a": [1] }), "something_new is {\"a\":[1]}"),
        (
            "rope_parameters",
            json!({ "rope_theta": 1e4, "mrope_section": [1, 2] }),
            "rope_parameters.mrope_section is",
        ),
        (
            "rope_scaling",
            json!({ "type": "yarn", "factor": 2, "truncate": false }),
            "rope_scaling.truncate",
        ),
    ] {
        let error = read(&with_key("qwen2", key, value)).unwrap_err();
        let by_kind = matches!(error, ModelError::Unsupported { .. }) || key == "mlp_bias";
        assert!(by_kind, "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    let llama = read(&with_key("llama", "sliding_window", json!(4096))).unwrap_err().to_string();
    assert!(llama.contains("sliding_window is 4096"), "{llama}");
    // Files can contain the size of a window that is switched off.
    let mut unused = with_key("qwen2", "sliding_window", json!(4096));
    unused["use_sliding_window"] = json!(false);
    read(&unused).unwrap();
}

#[test]
fn config_errors_name_invalid_and_missing_keys() {
    for (key, value, expected) in [
        ("hidden_size", Value::Null, "hidden_size is missing"),
        ("hidden_size", json!("64"), "hidden_size is \"64\"; it must be an integer"),
        ("hidden_size", json!(-64), "hidden_size is -64"),
        ("hidden_size", json!(66), "hidden_size 66 is not a multiple of num_attention_heads 4"),
        ("num_attention_heads", json!(0), "num_attention_heads 0"),
        ("num_hidden_layers", json!(1u64 << 60), "the number of layers is 1152921504606846976"),
        ("num_key_value_heads", json!(3), "attention heads, 4, is not a multiple"),
        ("head_dim", json!(7), "head dimension 7 is odd"),
        ("rms_norm_eps", json!(-1.0), "norm epsilon is -1"),
        ("rope_theta", json!(0), "rotary base is 0"),
        ("eos_token_id", json!("x"), "eos_token_id is \"x\""),
        ("rope_scaling", json!("linear"), "rope_scaling is \"linear\"; it must be an object"),
        ("rope_scaling", json!({ "type": "linear" }), "rope_scaling.factor is missing"),
        ("rope_scaling", json!({ "type": "linear", "factor": 0 }), "factor is 0"),
    ] {
        let message = read(&with_key("llama", key, value)).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        assert!(message.starts_with("config.json: "), "{message}");
    }
    let error = parse(Path::new("config.json"), b"{\"model_type\": \"llama\"").err().unwrap();
    assert!(matches!(error, ModelError::Damaged { .. }), "{error}");
}

#[test]
fn config_round_trips_through_hf_json() {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 64,
    };
    let scalings = [
        RopeScaling::None,
        RopeScaling::Linear { factor: 1.1 },
        llama3,
        yarn_scaling(None),
        yarn_scaling(Some(1.25)),
    ];
    for traits in Family::all().map(Family::traits) {
        for scaling in &scalings {
            let mut config = read(&minimal_config(traits.model_type)).unwrap();
            config.rope = Rope { theta: 1e6 + 0.5, scaling: scaling.clone() };
            config.norm_epsilon = 1e-5;
            config.tied = true;
            (config.bos, config.eos, config.pad) = (Some(1), vec![2, 3], Some(4));
            if traits.attention_bias == AttentionBias::Configured {
                (config.qkv_bias, config.output_bias) = (true, true);
            }
            assert_eq!(read(&config.to_hf_json()).unwrap(), config);
        }
    }
}

fn yarn_scaling(attention_factor: Option<f32>) -> RopeScaling {
    RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 24.0,
        beta_slow: 1.5,
        attention_factor,
        original_context: 64,
    }
}

#[test]
fn sliding_windows_follow_family_keys() {
    let all = (0..8).collect::<Vec<_>>();
    assert_eq!(
        window_and_layers(&config_with_8_layers("mistral", json!({})).pattern),
        (Some(4096), all)
    );
    assert_eq!(
        config_with_8_layers("mistral", json!({ "sliding_window": null })).pattern,
        AttentionPattern::default()
    );
    assert_eq!(
        config_with_8_layers("qwen2", json!({ "sliding_window": 64 })).pattern,
        AttentionPattern::default()
    );
    let on = json!({ "use_sliding_window": true, "sliding_window": 64, "max_window_layers": 6 });
    assert_eq!(
        window_and_layers(&config_with_8_layers("qwen2", on.clone()).pattern),
        (Some(64), vec![6, 7])
    );
    assert_eq!(
        window_and_layers(&config_with_8_layers("qwen3", on).pattern),
        (Some(64), vec![6, 7])
    );
    let gemma = config_with_8_layers(
        "gemma3_text",
        json!({ "sliding_window": 512, "rope_scaling": { "rope_type": "linear", "factor": 8.0 } }),
    );
    assert_eq!(window_and_layers(&gemma.pattern), (Some(512), vec![0, 1, 2, 3, 4, 6, 7]));
    assert_eq!(
        (gemma.rope.theta, &gemma.rope.scaling),
        (1e6, &RopeScaling::Linear { factor: 8.0 })
    );
    assert_eq!(gemma.pattern.local_rope, Some(Rope { theta: 1e4, scaling: RopeScaling::None }));
    assert!(gemma.tied && gemma.qk_norm && gemma.query_scalar == Some(256.0));
    assert_eq!((gemma.heads, gemma.kv_heads, gemma.head_dim), (4, 4, 256));
    let third = config_with_8_layers("gemma3_text", json!({ "sliding_window_pattern": 3 }));
    assert_eq!(window_and_layers(&third.pattern).1, [0, 1, 3, 4, 6, 7]);
    let smol = config_with_8_layers("smollm3", json!({}));
    assert_eq!((smol.pattern.window, smol.pattern.unrotated), (None, [3, 7].into()));
    let own = json!({
        "no_rope_layers": [1, 0, 1, 1, 1, 1, 1, 0], "use_sliding_window": true, "sliding_window": 32,
    });
    let own = config_with_8_layers("smollm3", own).pattern;
    assert_eq!((window_and_layers(&own), own.unrotated), ((Some(32), vec![1, 7]), [1, 7].into()));
}

fn window_and_layers(pattern: &AttentionPattern) -> (Option<usize>, Vec<usize>) {
    (pattern.window, pattern.windowed.iter().copied().collect::<Vec<_>>())
}

fn config_with_8_layers(model_type: &str, keys: Value) -> ModelConfig {
    let mut json = minimal_config(model_type);
    json["num_hidden_layers"] = json!(8);
    json.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    let config = read(&json).unwrap();
    assert_eq!(read(&config.to_hf_json()).unwrap(), config, "{json}");
    config
}

/// `rope_parameters` of Gemma 3 contains an object for each layer type, as in transformers 5.
#[test]
fn gemma3_rope_is_read_per_layer_type() {
    let parameters = json!({
        "full_attention": { "rope_type": "linear", "factor": 4.0, "rope_theta": 5e5 },
        "sliding_attention": { "rope_type": "default", "rope_theta": 2e4 },
    });
    let config = read(&with_key("gemma3_text", "rope_parameters", parameters)).unwrap();
    assert_eq!(config.rope, Rope { theta: 5e5, scaling: RopeScaling::Linear { factor: 4.0 } });
    assert_eq!(config.pattern.local_rope, Some(Rope { theta: 2e4, scaling: RopeScaling::None }));
    for (key, value, expected) in [
        ("final_logit_softcapping", json!(30.0), "final_logit_softcapping is 30"),
        ("attn_logit_softcapping", json!(50.0), "attn_logit_softcapping is 50"),
        ("use_bidirectional_attention", json!(true), "use_bidirectional_attention is true"),
        ("hidden_activation", json!("gelu"), "hidden_activation is \"gelu\""),
        (
            "rope_parameters",
            json!({ "chunked": { "rope_theta": 1.0 } }),
            "rope_parameters.chunked is",
        ),
        (
            "rope_parameters",
            json!({ "sliding_attention": { "rope_type": "linear", "factor": 2.0 } }),
            "local rotary embedding is scaled",
        ),
    ] {
        let message = read(&with_key("gemma3_text", key, value)).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

/// Gemma 3 as published, with images: `text_config` contains only the keys that differ from
/// transformers' defaults.
#[test]
fn text_config_of_image_model_is_read() {
    let json = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144,
        "mm_tokens_per_image": 256, "initializer_range": 0.02, "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024,
        },
        "vision_config": { "hidden_size": 1152, "model_type": "siglip_vision_model" },
    });
    let parsed = parse(Path::new("config.json"), json.to_string().as_bytes()).unwrap();
    assert!(parsed.is_part && parsed.notes.is_empty(), "{:?}", parsed.notes);
    let config = parsed.config;
    assert_eq!(
        (config.hidden, config.layers, config.vocabulary, config.head_dim),
        (2560, 34, 262_208, 256)
    );
    assert_eq!((config.eos.as_slice(), config.tied), (&[1, 106][..], true));
    assert_eq!(config.pattern.windowed.len(), 34 - 5);
    let mut other = json.clone();
    other["audio_config"] = json!({ "hidden_size": 1 });
    assert!(read(&other).unwrap_err().to_string().contains("audio_config"));
    other = json;
    other["text_config"]["hidden_size"] = Value::Null;
    assert!(read(&other).unwrap_err().to_string().contains("text_config.hidden_size is missing"));
}

/// Keys of published files, of fine-tunes and of other programs that have no effect.
#[test]
fn config_keys_without_effect_are_ignored() {
    for (key, value) in [
        ("_name_or_path", json!("me/model")),
        ("transformers_version", json!("5.24.0")),
        ("unsloth_fixed", json!(true)),
        ("unsloth_version", json!("2026.1")),
        ("torch_dtype", json!("bfloat16")),
        ("use_cache", json!(true)),
        ("is_llama_config", json!(true)),
        ("rope_interleaved", json!(false)),
        ("transformers.js_config", json!({ "kv_cache_dtype": { "q4f16": "float16" } })),
        ("pretraining_tp", json!(2)),
        ("quantization_config", json!({})),
        ("num_experts", json!(0)),
        ("use_qk_norm", json!(false)),
        ("logits_scaling", json!(1.0)),
        ("temperature", json!(0.6)),
        ("hidden_act", json!("swish")),
    ] {
        let (config, notes) = read_with_notes(&with_key("llama", key, value)).unwrap();
        assert_eq!((config, notes), (read(&minimal_config("llama")).unwrap(), vec![]), "{key}");
    }
}

#[test]
fn unknown_config_strings_and_dropout_become_notes() {
    for (key, value, expected) in [
        ("license", json!("mit"), "license is \"mit\""),
        ("attention_dropout", json!(0.1), "attention_dropout is 0.1; Levade trains without"),
    ] {
        let (config, notes) = read_with_notes(&with_key("llama", key, value)).unwrap();
        assert_eq!(config, read(&minimal_config("llama")).unwrap());
        assert!(notes.len() == 1 && notes[0].contains(expected), "{notes:?}");
    }
}

/// As in transformers, `rope_scaling` takes precedence over `rope_parameters` unless `rope_scaling`
/// is empty.
#[test]
fn rope_scaling_takes_precedence_over_rope_parameters() {
    let mut json =
        with_key("llama", "rope_parameters", json!({ "rope_type": "default", "rope_theta": 5e5 }));
    json["rope_scaling"] = json!({ "rope_type": "linear", "factor": 2.0 });
    assert_eq!(
        read(&json).unwrap().rope,
        Rope { theta: 1e4, scaling: RopeScaling::Linear { factor: 2.0 } }
    );
    json["rope_scaling"] = json!({});
    assert_eq!(read(&json).unwrap().rope, Rope { theta: 5e5, scaling: RopeScaling::None });
    let mut json = with_key(
        "qwen2",
        "rope_scaling",
        json!({ "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192 }),
    );
    json["original_max_position_embeddings"] = json!(4096);
    let message = read(&json).unwrap_err().to_string();
    assert!(
        message.contains("original_max_position_embeddings is 4096") && message.contains("8192"),
        "{message}"
    );
}
