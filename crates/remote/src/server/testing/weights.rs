//! Weight directories for fakes, as a learner publishes them.

use std::path::Path;

use levade_policy::{Content, Manifest, WeightsAt, WeightsRef};
use serde_json::{Value, json};

use super::super::PROBE;
use super::super::weight_dir::ProbeFile;
use super::{CONTEXT, VOCABULARY, distribution};

/// Writes a weight directory of a tiny model, as a learner publishes it, with a probe of the fake's
/// table.
pub fn publish(root: &Path, version: u64) -> WeightsRef {
    let dir = root.join(format!("v{version}"));
    std::fs::create_dir_all(&dir).unwrap();
    let hidden = 4;
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "hidden_act": "silu",
        "bos_token_id": 0, "eos_token_id": 1,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
        (layer_weight("input_layernorm"), vec![hidden]),
        (layer_weight("post_attention_layernorm"), vec![hidden]),
        (layer_weight("mlp.gate_proj"), vec![8, hidden]),
        (layer_weight("mlp.up_proj"), vec![8, hidden]),
        (layer_weight("mlp.down_proj"), vec![hidden, 8]),
    ];
    tensors.extend(
        ["q_proj", "k_proj", "v_proj", "o_proj"]
            .map(|name| (layer_weight(&format!("self_attn.{name}")), vec![hidden, hidden])),
    );
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors {
        let from = end;
        end += shape.iter().product::<usize>() * 4;
        header.insert(name, json!({ "dtype": "F32", "shape": shape, "data_offsets": [from, end] }));
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(std::iter::repeat_n(version as u8, end));
    std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
    let tokens = vec![3, 9, 4, 1, 5];
    let logprobs = (1..tokens.len())
        .map(|i| distribution(version, &tokens[..i], 1.0)[tokens[i] as usize] as f32);
    let probe = ProbeFile { logprobs: logprobs.collect(), tokens };
    std::fs::write(dir.join(PROBE), serde_json::to_string(&probe).unwrap()).unwrap();
    let names = ["config.json", "model.safetensors", PROBE].map(str::to_owned);
    let manifest = Manifest::from_files(&dir, Content::Full, &names).unwrap();
    WeightsRef { version, at: WeightsAt::Manifest(manifest) }
}

fn layer_weight(name: &str) -> String {
    format!("model.layers.0.{name}.weight")
}
