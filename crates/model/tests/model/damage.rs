//! Tests that damaged, truncated and mismatched files yield an error that names the defect, and
//! never a panic or a large allocation.

use std::path::Path;

use levade_model::{AdapterConfig, Family, ModelConfig, ModelFiles, SafetensorsFile};
use proptest::prelude::*;
use serde_json::json;

use crate::support::{
    Gguf, GgufTensor, Meta, assert_all, encode, gguf, open_error, safetensors, tiny, weights,
    write_dir,
};

fn gguf_error(change: impl FnOnce(&mut Gguf)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let mut file = gguf(&tiny(Family::Llama));
    change(&mut file);
    open_error(&file.write(dir.path()))
}

/// Applies a change to the bytes of a valid GGUF file, and returns the error of opening it.
fn gguf_bytes_error(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut bytes = gguf(&tiny(Family::Llama)).bytes();
    change(&mut bytes);
    std::fs::write(&path, bytes).unwrap();
    let message = open_error(&path);
    assert_all(&message, &["model.gguf"]);
    message
}

/// Returns the offset of the end of the first occurrence of `text`.
fn offset_after(bytes: &[u8], text: &str) -> usize {
    bytes.windows(text.len()).position(|window| window == text.as_bytes()).unwrap() + text.len()
}

fn patch(bytes: &mut [u8], at: usize, with: &[u8]) {
    bytes[at..at + with.len()].copy_from_slice(with);
}

#[test]
fn gguf_header_errors_name_the_defect() {
    assert_all(&gguf_bytes_error(|bytes| bytes.clear()), &["the file is empty"]);
    assert_all(&gguf_error(|file| file.magic = *b"PK\x03\x04"), &["instead of \"GGUF\""]);
    assert_all(&gguf_error(|file| file.version = 1), &["version is 1", "2 and 3"]);
    assert_all(&gguf_error(|file| file.version = 3u32.swap_bytes()), &["big-endian"]);
    let huge = u64::MAX.to_le_bytes();
    assert_all(
        &gguf_bytes_error(|bytes| patch(bytes, 8, &huge)),
        &["18446744073709551615 tensors"],
    );
    assert_all(&gguf_bytes_error(|bytes| patch(bytes, 16, &huge)), &["metadata entries"]);
    // So many tensors do not fit in memory, although the multiplication does not overflow.
    let many = (1u64 << 40).to_le_bytes();
    assert_all(&gguf_bytes_error(|bytes| patch(bytes, 8, &many)), &["1099511627776 tensors"]);
}

#[test]
fn gguf_metadata_errors_name_the_key() {
    let huge = u64::MAX.to_le_bytes();
    assert_all(
        &gguf_bytes_error(|bytes| {
            let at = offset_after(bytes, "tokenizer.chat_template") + 4;
            patch(bytes, at, &huge);
        }),
        &["tokenizer.chat_template", "18446744073709551615 bytes"],
    );
    assert_all(
        &gguf_bytes_error(|bytes| {
            let at = offset_after(bytes, "tokenizer.ggml.tokens") + 8;
            patch(bytes, at, &huge);
        }),
        &["tokenizer.ggml.tokens", "18446744073709551615 elements"],
    );
    assert_all(
        &gguf_bytes_error(|bytes| {
            let at = offset_after(bytes, "tokenizer.ggml.tokens") + 4;
            patch(bytes, at, &9u32.to_le_bytes());
        }),
        &["tokenizer.ggml.tokens", "of the unknown type 9"],
    );
    assert_all(
        &gguf_bytes_error(|bytes| {
            let at = offset_after(bytes, "llama.block_count");
            patch(bytes, at, &77u32.to_le_bytes());
        }),
        &["llama.block_count", "type 77"],
    );
    assert_all(
        &gguf_bytes_error(|bytes| {
            let at = offset_after(bytes, "tokenizer.chat_template") + 12;
            patch(bytes, at, &[0xff]);
        }),
        &["tokenizer.chat_template", "UTF-8"],
    );
    assert_all(
        &gguf_error(|file| file.metadata.push(("llama.block_count".into(), Meta::U32(2)))),
        &["llama.block_count appears twice"],
    );

    for (key, value, expected) in [
        ("general.alignment", Meta::U32(0), "general.alignment is 0"),
        ("general.alignment", Meta::U32(48), "general.alignment is 48"),
        ("general.alignment", Meta::U32(1 << 31), "general.alignment is 2147483648"),
        ("general.architecture", Meta::Text("mamba".into()), "\"mamba\""),
        ("llama.block_count", Meta::Text("2".into()), "llama.block_count is the string \"2\""),
        ("llama.block_count", Meta::I32(-2), "llama.block_count is the integer -2"),
        ("llama.block_count", Meta::U64(1 << 60), "number of layers is 1152921504606846976"),
        ("llama.embedding_length", Meta::U64(u64::MAX), "hidden size is 18446744073709551615"),
        ("llama.attention.head_count", Meta::U32(0), "number of attention heads is 0"),
        ("llama.attention.head_count_kv", Meta::U32(0), "key and value heads is 0"),
        ("llama.attention.head_count_kv", Meta::I32s(vec![2, 2]), "a list of 2"),
        ("llama.attention.value_length", Meta::U32(4), "llama.attention.value_length is 4"),
        ("llama.rope.dimension_count", Meta::U32(4), "llama.rope.dimension_count is 4"),
        ("llama.attention.sliding_window", Meta::U32(4), "sliding_window is 4"),
        ("llama.expert_count", Meta::U32(8), "llama.expert_count is 8"),
        ("llama.attention.causal", Meta::Bool(false), "llama.attention.causal is false"),
        ("llama.logit_scale", Meta::F32(0.5), "llama.logit_scale is the number 0.5"),
        ("llama.attention.scale", Meta::F32(0.1), "llama.attention.scale is the number 0.1"),
        ("llama.nextn_predict_layers", Meta::U32(1), "llama.nextn_predict_layers is the integer 1"),
        (
            "llama.rope.dimension_sections",
            Meta::I32s(vec![4, 4]),
            "llama.rope.dimension_sections is a list of 2",
        ),
        ("llama.rope.scaling.attn_factor", Meta::F32(1.5), "llama.rope.scaling.attn_factor is"),
        (
            "llama.hidden_activation",
            Meta::Text("gelu".into()),
            "llama.hidden_activation is the string",
        ),
        ("split.count", Meta::U32(3), "one of 3 parts of a split model (split.count)"),
        ("general.type", Meta::Text("adapter".into()), "general.type is \"adapter\""),
        ("llama.rope.freq_base", Meta::F32(f32::NAN), "rotary base is NaN"),
        ("llama.attention.layer_norm_rms_epsilon", Meta::F32(f32::INFINITY), "norm epsilon is inf"),
        (
            "tokenizer.ggml.tokens",
            Meta::Texts(vec!["t".into(); 11]),
            "token_type has 10 entries for 11 tokens",
        ),
        ("tokenizer.ggml.token_type", Meta::I32s(vec![9; 10]), "the unknown type 9"),
        (
            "tokenizer.ggml.eos_token_id",
            Meta::U32(10),
            "eos_token_id is 10, but there are 10 tokens",
        ),
    ] {
        assert_all(&gguf_error(|file| file.set(key, value)), &[expected, "model.gguf"]);
    }
    for key in [
        "general.architecture",
        "llama.block_count",
        "llama.embedding_length",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
    ] {
        assert_all(&gguf_error(|file| file.unset(key)), &[key, "is missing"]);
    }
    assert_all(
        &gguf_error(|file| {
            file.unset("tokenizer.ggml.token_type");
            file.set("tokenizer.ggml.tokens", Meta::Texts(vec!["t".into(); 11]));
        }),
        &["11 tokens", "10 rows"],
    );
}

#[test]
fn gguf_directory_errors_name_the_tensor() {
    let name = "blk.0.ffn_up.weight";
    // After the name follow the number of dimensions, two dimensions, the type and the offset.
    let set = |field: usize, value: &[u8]| {
        let value = value.to_vec();
        gguf_bytes_error(|bytes| {
            let at = offset_after(bytes, name) + field;
            patch(bytes, at, &value);
        })
    };
    assert_all(&set(0, &0u32.to_le_bytes()), &[name, "0 dimensions"]);
    assert_all(&set(0, &u32::MAX.to_le_bytes()), &[name, "4294967295 dimensions"]);
    assert_all(&set(4, &(1u64 << 62).to_le_bytes()), &[name, "exceeds the address space"]);
    assert_all(&set(4, &(1u64 << 40).to_le_bytes()), &[name, "the file has"]);
    assert_all(&set(20, &10u32.to_le_bytes()), &[name, "Q2_K", "Q4_1"]);
    assert_all(&set(20, &1000u32.to_le_bytes()), &[name, "type 1000"]);
    assert_all(&set(20, &12u32.to_le_bytes()), &[name, "rows of 32 values", "blocks of 256"]);
    assert_all(&set(24, &33u64.to_le_bytes()), &[name, "offset 33", "alignment 32"]);
    assert_all(&set(24, &(1u64 << 40).to_le_bytes()), &[name, "the file has"]);
    assert_all(&set(24, &(u64::MAX - 31).to_le_bytes()), &[name, "exceeds the address space"]);
    assert_all(&set(24, &0u64.to_le_bytes()), &[name, "overlap"]);
    assert_all(
        &gguf_error(|file| {
            let again = file.tensors[0].clone();
            file.tensors.push(again);
        }),
        &["appears twice"],
    );
    assert_all(
        &gguf_bytes_error(|bytes| bytes.truncate(bytes.len() - 1)),
        &["tensor", "the file has"],
    );
}

#[test]
fn gguf_tensors_must_match_metadata() {
    let missing =
        gguf_error(|file| file.tensors.retain(|tensor| tensor.name != "blk.1.attn_k.weight"));
    assert_all(&missing, &["model.layers.1.self_attn.k_proj.weight", "[16, 32]"]);
    let wrong = gguf_error(|file| file.set("llama.feed_forward_length", Meta::U32(96)));
    assert_all(&wrong, &["model.layers.0.mlp.gate_proj.weight", "[64, 32]", "[96, 32]"]);
    let more_layers = gguf_error(|file| file.set("llama.block_count", Meta::U32(3)));
    assert_all(&more_layers, &["model.layers.2.input_layernorm.weight"]);
    let fewer_layers = gguf_error(|file| file.set("llama.block_count", Meta::U32(1)));
    assert_all(&fewer_layers, &["blk.1.attn_k.weight", "does not describe"]);
    let stray = GgufTensor { name: "stray".into(), shape: vec![2], kind: 0, bytes: vec![0; 8] };
    assert_all(
        &gguf_error(|file| file.tensors.push(stray)),
        &["stray", "[2]", "does not describe"],
    );
}

fn dir_error(change: impl FnOnce(&Path)) -> String {
    let dir = tempfile::tempdir().unwrap();
    write_dir(dir.path(), &tiny(Family::Qwen3), "F32", 1);
    change(dir.path());
    open_error(dir.path())
}

fn header_error(header: &str, data: usize) -> String {
    dir_error(|dir| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        std::fs::write(dir.join("model.safetensors"), bytes).unwrap();
    })
}

#[test]
fn safetensors_header_errors_name_the_tensor() {
    assert_all(&error_with_contents(vec![]), &["model.safetensors", "the file is empty"]);
    assert_all(&error_with_contents(vec![1, 2, 3]), &["model.safetensors", "3 bytes"]);
    assert_all(
        &error_with_contents(vec![0xff; 100]),
        &["18446744073709551615 bytes", "but the file has 100"],
    );
    for (header, data, expected) in [
        ("{\"w\": ".to_string(), 0, "not a JSON object"),
        ("[]".to_string(), 0, "not a JSON object"),
        (json!({ "w": { "dtype": "F32" } }).to_string(), 0, "tensor \"w\": missing field"),
        (header_entry("w", "F32", json!([-1]), [0, 4]), 4, "tensor \"w\""),
        (
            header_entry("w", "F32", json!([2]), [0, 4]),
            4,
            "tensor w has 4 bytes, which does not match its shape [2] and type F32",
        ),
        (
            header_entry("w", "F16", json!([2]), [0, 8]),
            8,
            "tensor w has 8 bytes, which does not match its shape [2] and type F16",
        ),
        (header_entry("w", "F32", json!([1u64 << 63, 4]), [0, 4]), 4, "tensor w has 4 bytes"),
        (
            header_entry("w", "F32", json!([1]), [0, 4]),
            2,
            "tensor w ends at byte 4 of the data, which has 2",
        ),
        (
            header_entry("w", "F32", json!([1]), [0, 4]),
            6,
            "the tensors occupy 4 bytes, but the file has 6",
        ),
        (
            header_entry("w", "F32", json!([1]), [4, 8]),
            8,
            "tensor w occupies bytes 4 to 8 of the data; it must start at byte 0",
        ),
        (header_entry("w", "F32", json!([1]), [4, 0]), 8, "tensor w occupies bytes 4 to 0"),
        (
            header_entry("w", "F32", json!([1]), [0, u64::MAX]),
            8,
            "tensor w ends at byte 18446744073709551615",
        ),
        (
            json!({
                "a": { "dtype": "F32", "shape": [2], "data_offsets": [0, 8] },
                "b": { "dtype": "F32", "shape": [2], "data_offsets": [4, 12] },
            })
            .to_string(),
            12,
            "tensor b occupies bytes 4 to 12 of the data; it must start at byte 8",
        ),
    ] {
        assert_all(&header_error(&header, data), &["model.safetensors", expected]);
    }
}

fn error_with_contents(bytes: Vec<u8>) -> String {
    dir_error(move |dir| std::fs::write(dir.join("model.safetensors"), bytes).unwrap())
}

fn header_entry(name: &str, dtype: &str, shape: serde_json::Value, offsets: [u64; 2]) -> String {
    json!({ name: { "dtype": dtype, "shape": shape, "data_offsets": offsets } }).to_string()
}

#[test]
fn tensor_errors_name_dtype_and_shape() {
    let dir = tempfile::tempdir().unwrap();
    let config = tiny(Family::Llama);
    write_dir(dir.path(), &config, "F32", 1);
    let tensors: Vec<_> = weights(&config)
        .into_iter()
        .map(|(name, (shape, values))| match name.as_str() {
            "model.norm.weight" => (name, "F8_E4M3", shape, vec![0; values.len()]),
            _ => (name, "F32", shape, encode("F32", &values)),
        })
        .collect();
    std::fs::write(dir.path().join("model.safetensors"), safetensors(&tensors)).unwrap();
    assert_all(&open_error(dir.path()), &["model.norm.weight", "F8_E4M3", "not quantized"]);
    write_dir(dir.path(), &config, "F32", 1);
    let model = ModelFiles::open(dir.path()).unwrap();
    let message = model.tensor("nothing").unwrap_err().to_string();
    assert_all(&message, &["has no tensor nothing"]);
    let message =
        model.tensor_into("model.embed_tokens.weight", &[32, 10], &mut [0.0; 320]).unwrap_err();
    assert_all(&message.to_string(), &["model.embed_tokens.weight", "[10, 32]", "[32, 10]"]);
    let message =
        model.tensor_into("model.embed_tokens.weight", &[10, 32], &mut [0.0; 3]).unwrap_err();
    assert_all(&message.to_string(), &["320 values, but 3 were requested"]);
}

#[test]
fn directory_errors_name_file_or_tensor() {
    assert_all(
        &open_error(Path::new("no/such/model")),
        &["no/such/model: the path does not exist"],
    );
    assert_all(&error_without("config.json"), &["has no config.json"]);
    assert_all(&error_without("model.safetensors"), &["has neither model.safetensors nor"]);
    let pickled = dir_error(|dir| {
        std::fs::rename(dir.join("model.safetensors"), dir.join("pytorch_model.bin")).unwrap();
    });
    assert_all(&pickled, &["pytorch_model.bin"]);
    let config_only = dir_error(|dir| {
        assert_all(&open_error(&dir.join("model.safetensors")), &["give the directory"]);
        std::fs::write(dir.join("tokenizer_config.json"), "[]").unwrap();
    });
    assert_all(&config_only, &["tokenizer_config.json", "not a JSON object"]);

    assert_all(
        &config_error(|config_error| config_error.intermediate = 96),
        &["model.safetensors: tensor model.layers.0.mlp.gate_proj.weight", "[64, 32]", "[96, 32]"],
    );
    assert_all(
        &config_error(|config_error| config_error.layers = 3),
        &["no tensor model.layers.2.input_layernorm.weight"],
    );
    assert_all(
        &config_error(|config_error| config_error.layers = 1),
        &["model.layers.1.input_layernorm.weight", "not describe"],
    );
    assert_all(
        &config_error(|config_error| {
            (config_error.qkv_bias, config_error.output_bias) = (true, true)
        }),
        &["model.layers.0.self_attn.q_proj.bias", "[32]"],
    );
    let untied = dir_error(|dir| {
        let mut config = tiny(Family::Llama);
        write_dir(dir, &config, "F32", 1);
        config.tied = false;
        std::fs::write(dir.join("config.json"), config.to_hf_json().to_string()).unwrap();
    });
    assert_all(&untied, &["lm_head.weight", "[10, 32]", "tie_word_embeddings"]);
}

fn error_without(name: &'static str) -> String {
    dir_error(move |dir| std::fs::remove_file(dir.join(name)).unwrap())
}

fn config_error(change: fn(&mut ModelConfig)) -> String {
    dir_error(move |dir| {
        let mut config = tiny(Family::Qwen3);
        change(&mut config);
        std::fs::write(dir.join("config.json"), config.to_hf_json().to_string()).unwrap();
    })
}

#[test]
fn shard_errors_name_file_or_index() {
    let second = "model-00002-of-00002.safetensors";
    let index = "model.safetensors.index.json";
    let missing = shard_error(&|dir| std::fs::remove_file(dir.join(second)).unwrap());
    assert_all(&missing, &[second, "is missing", index]);
    let twice = shard_error(&|dir| {
        std::fs::copy(dir.join("model-00001-of-00002.safetensors"), dir.join(second)).unwrap();
    });
    assert_all(&twice, &[second, "is also in"]);
    let no_map = shard_error(&|dir| std::fs::write(dir.join(index), "{}").unwrap());
    assert_all(&no_map, &[index, "weight_map"]);
    for elsewhere in ["../secret.safetensors", "/etc/passwd", "..", ""] {
        let map = json!({ "weight_map": { "w": elsewhere } }).to_string();
        let outside = shard_error(&|dir| std::fs::write(dir.join(index), &map).unwrap());
        assert_all(&outside, &[index, "not a file name"]);
    }
}

fn shard_error(change: &dyn Fn(&Path)) -> String {
    let dir = tempfile::tempdir().unwrap();
    write_dir(dir.path(), &tiny(Family::Llama), "F32", 2);
    change(dir.path());
    open_error(dir.path())
}

/// Opens a model and reads all of its tensors. Errors are ignored, because the test checks only for
/// panics.
fn read_all(path: &Path) {
    if let Ok(model) = ModelFiles::open(path) {
        for name in model.tensor_names() {
            let _ = model.tensor(&name);
        }
    }
}

fn corrupt(bytes: &mut Vec<u8>, changes: &[(usize, u8)], keep: Option<usize>) {
    for (at, value) in changes {
        let length = bytes.len();
        bytes[at % length] = *value;
    }
    if let Some(keep) = keep {
        bytes.truncate(keep % bytes.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn corrupt_gguf_file_never_panics(
        changes in prop::collection::vec((0usize..2400, any::<u8>()), 0..4),
        keep in prop::option::weighted(0.3, any::<usize>()),
        family in prop::sample::select(vec![Family::Llama, Family::Qwen2, Family::Qwen3]),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut bytes = gguf(&tiny(family)).bytes();
        corrupt(&mut bytes, &changes, keep);
        std::fs::write(&path, bytes).unwrap();
        read_all(&path);
    }

    #[test]
    fn corrupt_directory_never_panics(
        changes in prop::collection::vec((0usize..3200, any::<u8>()), 0..4),
        keep in prop::option::weighted(0.3, any::<usize>()),
        which in prop::sample::select(vec![
            "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        ]),
    ) {
        let folder = tempfile::tempdir().unwrap();
        write_dir(folder.path(), &tiny(Family::Qwen3), "BF16", 1);
        let added = json!({ "added_tokens": [{ "id": 3, "content": "<end>" }] }).to_string();
        let decoder = json!({ "added_tokens_decoder": { "3": { "content": "<end>" } }, "eos_token": "<end>" }).to_string();
        for (name, text) in
            [("tokenizer.json", &added), ("tokenizer_config.json", &decoder), ("generation_config.json", &r#"{"eos_token_id": [2, 5]}"#.into())]
        {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let path = folder.path().join(which);
        let mut bytes = std::fs::read(&path).unwrap();
        corrupt(&mut bytes, &changes, keep);
        std::fs::write(&path, bytes).unwrap();
        read_all(folder.path());
    }

    #[test]
    fn corrupt_adapter_never_panics(
        changes in prop::collection::vec((0usize..600, any::<u8>()), 0..4),
        keep in prop::option::weighted(0.3, any::<usize>()),
        which in prop::sample::select(vec![AdapterConfig::FILE, "adapter_model.safetensors"]),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({
            "peft_type": "LORA", "base_model_name_or_path": "me/base", "r": 2, "lora_alpha": 4, "bias": "none",
            "target_modules": r".*\.(q|v)_proj", "rank_pattern": { "q_proj": 1 }, "layers_to_transform": [0], "use_rslora": true,
        });
        std::fs::write(folder.path().join(AdapterConfig::FILE), config.to_string()).unwrap();
        let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
        let weights = safetensors(&[(name.into(), "F32", vec![1, 32], encode("F32", &[0.5; 32]))]);
        std::fs::write(folder.path().join("adapter_model.safetensors"), weights).unwrap();
        let path = folder.path().join(which);
        let mut bytes = std::fs::read(&path).unwrap();
        corrupt(&mut bytes, &changes, keep);
        std::fs::write(&path, bytes).unwrap();
        let _ = AdapterConfig::open(folder.path()).and_then(|config| config.modules(&tiny(Family::Qwen2)));
        let _ = SafetensorsFile::open(&folder.path().join("adapter_model.safetensors"))
            .and_then(|file| file.read(name, &mut [0.0; 32]));
    }

    #[test]
    fn arbitrary_bytes_after_gguf_header_never_panic(tail in prop::collection::vec(any::<u8>(), 0..200)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut bytes = b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0".to_vec();
        bytes.extend(tail);
        std::fs::write(&path, bytes).unwrap();
        read_all(&path);
    }
}
