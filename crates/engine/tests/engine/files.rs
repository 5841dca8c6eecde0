//! Loading files: files of another model, or of an adapter with unsupported features, are rejected,
//! and a policy whose load was rejected stays unchanged.

use std::path::Path;
use std::time::Duration;

use levade_engine::testing::{Compute, random_weights, tiny_config};
use levade_engine::{Engine, EngineOptions};
use levade_model::{ModelConfig, Rope, RopeScaling, SafetensorsFile, write_safetensors};
use levade_policy::{Learner, LoraOptions, SampleRequest, Sampler, SamplingParams};
use serde_json::{Value, json};

fn start(config: &ModelConfig, seed: u64) -> Engine {
    let compute = Compute::new(1);
    let weights = random_weights(&compute, config, seed);
    let options = EngineOptions { kv_memory_mb: 1, batch_tokens: 64, ..EngineOptions::default() };
    Engine::start_with(compute, weights, &options, None).unwrap()
}

/// Returns the bits of a greedy completion's log-probabilities, which identify the weights.
async fn completion_bits(engine: &Engine) -> Vec<u32> {
    let params = SamplingParams { temperature: 0.0, max_tokens: 8, ..SamplingParams::default() };
    let request = SampleRequest {
        seed: 1,
        stream: 1,
        prompt: vec![5, 6, 7],
        params,
        ..SampleRequest::default()
    };
    let completion =
        engine.sample(request).await.unwrap().collect(Duration::from_secs(20)).await.unwrap();
    completion.logprobs.iter().map(|p| p.to_bits()).collect()
}

fn change_json(path: &Path, key: &str, value: Value) {
    let mut json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    json[key] = value;
    std::fs::write(path, json.to_string()).unwrap();
}

/// Adds a tensor to a file.
fn add_tensor(path: &Path, name: &str) {
    let file = SafetensorsFile::open(path).unwrap();
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = file
        .tensors()
        .map(|(name, shape)| {
            let mut values = vec![0.0; shape.iter().product()];
            file.read(name, &mut values).unwrap();
            (name.to_owned(), shape.to_vec(), values)
        })
        .collect();
    tensors.push((name.to_owned(), vec![2], vec![1.0, 2.0]));
    drop(file);
    let other = path.with_extension("new");
    write_safetensors(&other, tensors.iter().map(|(n, s, v)| (n.clone(), s.clone(), &v[..])))
        .unwrap();
    std::fs::rename(other, path).unwrap();
}

/// A rejected load changes nothing, and the policy can still be sampled from.
#[tokio::test]
async fn rejected_load_leaves_policy_unchanged() {
    let config = tiny_config();
    let engine = start(&config, 3);
    let before = completion_bits(&engine).await;
    let dir = tempfile::tempdir().unwrap();
    let missing = engine.load(&dir.path().join("nothing"), true).await.unwrap_err().to_string();
    assert!(missing.contains("nothing"), "{missing}");
    assert_eq!(completion_bits(&engine).await, before);

    // The same shapes, but another model.
    let other_rope = Rope { theta: 20_000.0, scaling: RopeScaling::None };
    let other = start(&ModelConfig { rope: other_rope, ..config.clone() }, 4);
    other.save(dir.path(), false).await.unwrap();
    let rejected = engine.load(dir.path(), false).await.unwrap_err().to_string();
    assert!(rejected.contains("rope is") && rejected.contains("20000"), "{rejected}");
    assert_eq!(completion_bits(&engine).await, before);

    // A complete model, but incomplete optimizer state.
    let other = start(&config, 4);
    other.save(dir.path(), false).await.unwrap();
    std::fs::write(dir.path().join("optimiser.json"), r#"{"schema": 1, "steps": 3}"#).unwrap();
    let rejected = engine.load(dir.path(), true).await.unwrap_err().to_string();
    assert!(rejected.contains("optimiser.first.safetensors"), "{rejected}");
    assert_eq!(completion_bits(&engine).await, before);

    engine.load(dir.path(), false).await.unwrap();
    engine.publish(1).await.unwrap();
    let after = completion_bits(&engine).await;
    assert!(after == completion_bits(&other).await && after != before);
}

/// Every setting in an adapter's files that would change its computation is named in the error, and
/// nothing is loaded.
#[tokio::test]
async fn load_rejects_unsupported_adapter_features() {
    let base = start(&tiny_config(), 3);
    let lora = LoraOptions { rank: 2, ..LoraOptions::default() };
    let adapter = base.lora(lora.clone(), 0, "a model").await.unwrap();
    let before = completion_bits(&adapter).await;
    let save = async || {
        let dir = tempfile::tempdir().unwrap();
        adapter.save(dir.path(), false).await.unwrap();
        dir
    };
    for (key, value) in [
        ("use_dora", json!(true)),
        ("bias", json!("all")),
        ("lora_bias", json!(true)),
        ("layer_replication", json!([[0, 2]])),
        ("modules_to_save", json!(["lm_head"])),
    ] {
        let dir = save().await;
        change_json(&dir.path().join("adapter_config.json"), key, value);
        let rejected = adapter.load(dir.path(), false).await.unwrap_err().to_string();
        for part in ["adapter_config.json", key, "merge"] {
            assert!(rejected.contains(part), "{rejected}");
        }
        assert_eq!(completion_bits(&adapter).await, before);
    }
    for (key, value) in [
        ("lora_alpha", json!(99.0)),
        ("target_modules", json!(["q_proj"])),
        ("use_rslora", json!(true)),
        ("alpha_pattern", json!({"q_proj": 4})),
        ("rank_pattern", json!({"q_proj": 1})),
    ] {
        let dir = save().await;
        change_json(&dir.path().join("adapter_config.json"), key, value);
        let rejected = adapter.load(dir.path(), false).await.unwrap_err().to_string();
        assert!(
            rejected.contains("adapter_config.json") && rejected.contains("the policy has"),
            "{key}: {rejected}"
        );
    }
    let dir = save().await;
    // Settings without effect are accepted, and so is another spelling of the target modules.
    let same = json!(r"model\.layers\.\d+\..*(q|k|v|o|gate|up|down)_proj");
    let same =
        [("alpha_pattern", json!({})), ("modules_to_save", json!(null)), ("target_modules", same)];
    for (key, value) in same {
        change_json(&dir.path().join("adapter_config.json"), key, value);
    }
    adapter.load(dir.path(), false).await.unwrap();
    adapter.publish(1).await.unwrap();
    let bias = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias";
    add_tensor(&dir.path().join("adapter_model.safetensors"), bias);
    let rejected = adapter.load(dir.path(), false).await.unwrap_err().to_string();
    for part in ["adapter_model.safetensors", bias, "merge"] {
        assert!(rejected.contains(part), "{rejected}");
    }
    assert_eq!(completion_bits(&adapter).await, before);
}
