//! Tests that modules are selected as PEFT 0.21 selects them for the same configurations.

use serde_json::json;

use super::*;
use crate::{AttentionPattern, Family, Rope, RopeScaling};

fn base() -> ModelConfig {
    ModelConfig {
        family: Family::Qwen2,
        hidden: 64,
        layers: 12,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        intermediate: 96,
        vocabulary: 100,
        context: 128,
        norm_epsilon: 1e-6,
        rope: Rope { theta: 1e4, scaling: RopeScaling::None },
        tied: true,
        qkv_bias: true,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        pattern: AttentionPattern::default(),
        query_scalar: None,
        bos: None,
        eos: vec![1],
        pad: None,
    }
}

fn open(changes: Value) -> Result<AdapterConfig, ModelError> {
    let mut config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "me/base", "r": 8, "lora_alpha": 16,
        "target_modules": ["q_proj"], "bias": "none", "lora_dropout": 0.1, "init_lora_weights": true, "revision": null,
        "megatron_core": "megatron.core", "qalora_group_size": 16, "peft_version": "0.21.2", "auto_mapping": null,
    });
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join(AdapterConfig::FILE), config.to_string()).unwrap();
    AdapterConfig::open(dir.path())
}

fn modules(changes: Value) -> Result<Vec<AdaptedModule>, ModelError> {
    open(changes)?.modules(&base())
}

/// Returns the names of the adapted modules without the common prefix `model.layers.`.
fn names(changes: Value) -> Vec<String> {
    let names = modules(changes).unwrap().into_iter().map(|module| module.name);
    names.map(|name| name.trim_start_matches("model.layers.").to_owned()).collect()
}

#[test]
fn target_modules_match_peft_in_every_syntax() {
    let linear = 7 * 12;
    for (targets, count, first) in [
        (json!(["q_proj"]), 12, "0.self_attn.q_proj"),
        (json!(["self_attn.q_proj", "down_proj"]), 24, "0.self_attn.q_proj"),
        (json!(["layers.1.self_attn.q_proj"]), 1, "1.self_attn.q_proj"),
        (json!(["model.layers.11.mlp.up_proj", "c_attn"]), 1, "11.mlp.up_proj"),
        (json!("q_proj"), 0, ""),
        (json!(r".*\.(q_proj|v_proj)"), 24, "0.self_attn.q_proj"),
        (json!(r"(?:model\.)?layers\.(?:0|1)\..*proj"), 14, "0.self_attn.q_proj"),
        (json!(r"^(?!.*mlp).*\.layers\.\d+\..*_proj$"), 48, "0.self_attn.q_proj"),
        (json!(r"model\.layers\.\d+\.(?=mlp)(?P<rest>.*)"), 36, "0.mlp.gate_proj"),
        (json!("all-linear"), linear, "0.self_attn.q_proj"),
        (json!(".*proj"), linear, "0.self_attn.q_proj"),
    ] {
        let found = modules(json!({ "target_modules": targets }));
        if count == 0 {
            let message = found.unwrap_err().to_string();
            assert!(
                message.contains("adapter_config.json: target_modules matches no module"),
                "{message}"
            );
            continue;
        }
        let found = found.unwrap();
        assert_eq!(found.len(), count, "{targets}");
        assert_eq!(found[0].name, format!("model.layers.{first}"), "{targets}");
    }
}

#[test]
fn layer_lists_and_exclusions_filter_target_modules() {
    assert_eq!(
        names(json!({ "layers_to_transform": [1, 10] })),
        ["1.self_attn.q_proj", "10.self_attn.q_proj"]
    );
    assert_eq!(
        names(json!({ "layers_to_transform": 2, "layers_pattern": "layers" })),
        ["2.self_attn.q_proj"]
    );
    assert_eq!(
        names(json!({ "layers_to_transform": [2], "layers_pattern": ["h", "layers"] })),
        ["2.self_attn.q_proj"]
    );
    assert_eq!(modules(json!({ "layers_to_transform": [] })).unwrap().len(), 12);
    // A full name is selected regardless of `layers_to_transform`.
    let mixed = json!({ "layers_to_transform": [0], "target_modules": ["model.layers.3.self_attn.q_proj"] });
    assert_eq!(names(mixed), ["3.self_attn.q_proj"]);
    let excluded = json!({ "target_modules": ["q_proj", "v_proj"], "exclude_modules": ["q_proj", "layers.0.self_attn.v_proj"] });
    assert_eq!(names(excluded).len(), 11);
    assert_eq!(
        names(json!({ "target_modules": "all-linear", "exclude_modules": r".*\.mlp\..*" })).len(),
        48
    );
}

#[test]
fn rank_and_alpha_patterns_override_defaults_per_module() {
    let changes = json!({
        "target_modules": ["q_proj", "v_proj"], "use_rslora": true,
        "rank_pattern": { "layers.0.self_attn.q_proj": 2, "^model.layers.1.self_attn.q_proj": 3, "v_.*": 4 },
        "alpha_pattern": { "v_proj": 5 },
    });
    let config = open(changes).unwrap();
    assert!(config.rank_stabilized);
    let found = config.modules(&base()).unwrap();
    let of = |name: &str| {
        found.iter().find(|module| module.name.ends_with(name)).map(|m| (m.rank, m.alpha)).unwrap()
    };
    assert_eq!(of("layers.0.self_attn.q_proj"), (2, 16.0));
    assert_eq!(of("layers.1.self_attn.q_proj"), (3, 16.0));
    assert_eq!(of("layers.10.self_attn.q_proj"), (8, 16.0));
    assert_eq!(of("layers.7.self_attn.v_proj"), (4, 5.0));
}

#[test]
fn unsupported_adapter_settings_are_rejected_by_key() {
    for (key, value) in [
        ("peft_type", json!("LOHA")),
        ("bias", json!("lora_only")),
        ("use_dora", json!(true)),
        ("use_qalora", json!(true)),
        ("lora_bias", json!(true)),
        ("fan_in_fan_out", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("trainable_token_indices", json!({ "embed_tokens": [1, 2] })),
        ("target_parameters", json!(["experts.gate"])),
        ("layer_replication", json!([[0, 4], [2, 5]])),
        ("alora_invocation_tokens", json!([1])),
        ("megatron_config", json!({ "a": 1 })),
        ("loftq_config", json!({ "loftq_bits": 4 })),
        ("init_lora_weights", json!("pissa")),
        ("init_lora_weights", json!("pissa_niter_16")),
        ("init_lora_weights", json!("olora")),
        ("use_bdlora", json!({ "nblocks": 2 })),
        ("some_new_variant", json!({ "on": true })),
        ("target_modules", json!(["q_proj", "lm_head"])),
        ("target_modules", json!(["embed_tokens"])),
        ("lora_alpha", json!(-1)),
    ] {
        let message = modules(json!({ key: value })).unwrap_err().to_string();
        assert!(message.contains("adapter_config.json: ") && message.contains(key), "{message}");
        assert!(message.contains("merge_and_unload"), "{message}");
    }
    for (key, value, expected) in [
        ("r", json!(0), "rank on model.layers.0.self_attn.q_proj is 0"),
        ("r", json!(65), "must be between 1 and 64"),
        ("r", json!("8"), "r is \"8\""),
        ("target_modules", json!("(q_proj"), "target_modules is not a regular expression"),
        ("target_modules", json!([1]), "target_modules is [1]"),
        ("target_modules", json!([]), "target_modules is missing"),
        ("rank_pattern", json!({ "q_proj": "x" }), "rank_pattern has q_proj = \"x\""),
        ("layers_to_transform", json!("x"), "layers_to_transform is \"x\""),
    ] {
        let message = modules(json!({ key: value })).unwrap_err().to_string();
        assert!(message.contains("adapter_config.json") && message.contains(expected), "{message}");
    }
}

#[test]
fn adapter_base_includes_revision_unless_path_is_local() {
    assert_eq!(open(json!({})).unwrap().base.as_deref(), Some("me/base"));
    assert_eq!(open(json!({ "revision": "v1" })).unwrap().base.as_deref(), Some("me/base@v1"));
    assert_eq!(open(json!({ "base_model_name_or_path": null })).unwrap().base, None);
    let here = tempfile::tempdir().unwrap();
    let local = json!({ "base_model_name_or_path": here.path(), "revision": "main" });
    assert_eq!(open(local).unwrap().base.as_deref(), here.path().to_str());
}
