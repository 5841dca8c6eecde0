//! Tests that valid models of every format open with the expected values, and that written files
//! can be read.

use std::path::Path;

use levade_model::{
    Family, ModelConfig, ModelFiles, RopeScaling, SpecialTokens, TokenType, TokenizerSource,
    write_json, write_safetensors, write_tokenizer_config,
};
use serde_json::json;

use crate::support::{Meta, encode, gguf, tiny, weights, write_dir};

/// Returns the families that have a GGUF architecture.
fn with_architecture() -> impl Iterator<Item = Family> {
    Family::all().filter(|family| family.traits().gguf.is_some())
}

fn assert_holds(model: &ModelFiles, config: &ModelConfig) {
    assert_eq!(&model.config, config);
    let weights = weights(config);
    assert_eq!(model.tensor_names().len(), weights.len());
    for (name, (shape, values)) in &weights {
        let tensor = model.tensor(name).unwrap();
        assert_eq!(&tensor.shape, shape, "{name}");
        assert_eq!(&tensor.data, values, "{name}");
        let mut filled = vec![f32::NAN; values.len()];
        model.tensor_into(name, shape, &mut filled).unwrap();
        assert_eq!(&filled, values, "{name}");
    }
}

#[test]
fn hf_directories_open_with_every_family_and_dtype() {
    for family in Family::all() {
        for (dtype, shards) in [("F32", 1), ("F16", 1), ("BF16", 3), ("F64", 2)] {
            let dir = tempfile::tempdir().unwrap();
            write_dir(dir.path(), &tiny(family), dtype, shards);
            assert_holds(&ModelFiles::open(dir.path()).unwrap(), &tiny(family));
        }
    }
}

#[test]
fn gguf_files_open_with_every_family_and_version() {
    for family in with_architecture() {
        for (version, alignment) in [(3, 32), (2, 32), (3, 64)] {
            let dir = tempfile::tempdir().unwrap();
            let mut file = gguf(&tiny(family));
            (file.version, file.alignment) = (version, alignment);
            file.set("general.alignment", Meta::U32(alignment as u32));
            let model = ModelFiles::open(&file.write(dir.path())).unwrap();
            assert_holds(&model, &tiny(family));
        }
    }
}

/// Covers keys that writers add and that have no effect on the computation.
#[test]
fn gguf_metadata_without_effect_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = gguf(&tiny(Family::Llama));
    for (key, value) in [
        ("llama.vocab_size", Meta::U32(10)),
        ("llama.tensor_data_layout", Meta::Text("Meta AI original pth".into())),
        ("llama.attention.causal", Meta::Bool(true)),
        ("llama.expert_count", Meta::U32(0)),
        ("llama.logit_scale", Meta::F32(1.0)),
        ("llama.rope.scaling.type", Meta::Text("none".into())),
        ("general.type", Meta::Text("model".into())),
        ("general.finetune", Meta::Text("Instruct".into())),
        ("quantize.imatrix.entries_count", Meta::U32(5)),
        ("split.count", Meta::U32(1)),
    ] {
        file.set(key, value);
    }
    assert_holds(&ModelFiles::open(&file.write(dir.path())).unwrap(), &tiny(Family::Llama));
}

/// Llama with every optional bias and an untied head. In the GGUF file, the biases of queries and
/// keys are interleaved too.
#[test]
fn llama_opens_with_all_optional_parameters() {
    let config = ModelConfig {
        tied: false,
        qkv_bias: true,
        output_bias: true,
        mlp_bias: true,
        eos: vec![2, 7],
        ..tiny(Family::Llama)
    };
    let dir = tempfile::tempdir().unwrap();
    write_dir(dir.path(), &config, "F32", 1);
    assert_holds(&ModelFiles::open(dir.path()).unwrap(), &config);
    let mut file = gguf(&config);
    file.set("tokenizer.ggml.eot_token_id", Meta::U32(7));
    assert_holds(&ModelFiles::open(&file.write(dir.path())).unwrap(), &config);
}

#[test]
fn gguf_tensors_decode_in_half_and_quantized_formats() {
    let config = tiny(Family::Llama);
    let dir = tempfile::tempdir().unwrap();
    let mut file = gguf(&config);
    let values: Vec<f32> = file
        .tensor("blk.0.attn_q.weight")
        .bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|x| f32::from_le_bytes(*x))
        .collect();
    let quantized: Vec<u8> = values
        .chunks(32)
        .flat_map(|block| {
            // The values are multiples of 1/64 between −2 and 2, so that this scale represents them
            // exactly.
            let mut bytes = half::f16::from_f32(1.0 / 64.0).to_le_bytes().to_vec();
            bytes.extend(block.iter().map(|value| (value * 64.0) as i8 as u8));
            bytes
        })
        .collect();
    let tensor = file.tensor("blk.0.attn_q.weight");
    (tensor.kind, tensor.bytes) = (8, quantized);
    for (name, kind, dtype) in
        [("blk.1.attn_k.weight", 1, "F16"), ("token_embd.weight", 30, "BF16")]
    {
        let tensor = file.tensor(name);
        let values: Vec<f32> =
            tensor.bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
        (tensor.kind, tensor.bytes) = (kind, encode(dtype, &values));
    }
    assert_holds(&ModelFiles::open(&file.write(dir.path())).unwrap(), &config);
}

#[test]
fn gguf_tokenizer_and_chat_template_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = gguf(&tiny(Family::Qwen2));
    file.set("tokenizer.ggml.padding_token_id", Meta::U32(u32::MAX));
    file.set("tokenizer.ggml.unknown_token_id", Meta::U32(0));
    let model = ModelFiles::open(&file.write(dir.path())).unwrap();
    assert_eq!(model.chat_template.as_deref(), Some("{{ messages }}"));
    let expected = SpecialTokens {
        bos: some_text("t1"),
        eos: some_text("t2"),
        unknown: some_text("t0"),
        ..Default::default()
    };
    assert_eq!(model.special_tokens, expected);
    let Some(TokenizerSource::Gguf(tokenizer)) = &model.tokenizer else { panic!("no tokenizer") };
    assert_eq!((tokenizer.model.as_str(), tokenizer.pre.as_str()), ("gpt2", "qwen2"));
    assert_eq!(
        (tokenizer.tokens.len(), tokenizer.merges.as_slice()),
        (10, ["t 1".to_string()].as_slice())
    );
    assert_eq!(tokenizer.types[2..4], [TokenType::Control, TokenType::Normal]);
    assert_eq!((tokenizer.bos, tokenizer.eos, tokenizer.pad), (Some(1), Some(2), None));
    assert!(!tokenizer.add_bos && !tokenizer.add_space_prefix);

    file.set("tokenizer.ggml.add_bos_token", Meta::Bool(true));
    file.set("tokenizer.ggml.add_space_prefix", Meta::Bool(true));
    let model = ModelFiles::open(&file.write(dir.path())).unwrap();
    let Some(TokenizerSource::Gguf(tokenizer)) = &model.tokenizer else { panic!("no tokenizer") };
    assert!(tokenizer.add_bos && tokenizer.add_space_prefix);
}

fn some_text(text: &str) -> Option<String> {
    Some(text.to_string())
}

#[test]
fn gguf_rope_scalings_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let open = |file: &crate::support::Gguf| ModelFiles::open(&file.write(dir.path()));
    let mut file = gguf(&tiny(Family::Qwen2));
    file.set("qwen2.rope.scaling.type", Meta::Text("yarn".into()));
    file.set("qwen2.rope.scaling.factor", Meta::F32(4.0));
    file.set("qwen2.rope.scaling.original_context_length", Meta::U32(32));
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
        original_context: 32,
    };
    assert_eq!(open(&file).unwrap().config.rope.scaling, yarn);
    file.set("qwen2.rope.scaling.type", Meta::Text("linear".into()));
    assert_eq!(open(&file).unwrap().config.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    file.set("qwen2.rope.scaling.type", Meta::Text("longrope".into()));
    let message = open(&file).err().unwrap().to_string();
    assert!(message.contains("qwen2.rope.scaling.type is \"longrope\""), "{message}");
}

/// Llama 3 files contain only the divisor of each rotary frequency, not the parameters of the
/// scaling.
#[test]
fn llama3_scaling_is_recovered_from_divisors() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = tiny(Family::Llama);
    config.head_dim = 64;
    config.rope.theta = 500_000.0;
    let with = |values: &[f32]| {
        let mut file = gguf(&config);
        file.tensors.push(crate::support::GgufTensor {
            name: "rope_freqs.weight".into(),
            shape: vec![values.len()],
            kind: 0,
            bytes: encode("F32", values),
        });
        ModelFiles::open(&file.write(dir.path()))
    };
    for factor in [8.0, 32.0] {
        let expected = RopeScaling::Llama3 {
            factor: factor as f32,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        assert_eq!(with(&yarn_divisors(factor)).unwrap().config.rope.scaling, expected);
    }
    assert_eq!(with(&[1.0; 32]).unwrap().config.rope.scaling, RopeScaling::None);
    let mut bent = yarn_divisors(8.0);
    bent[3] = 2.0;
    assert!(with(&bent).err().unwrap().to_string().contains("rope_freqs.weight"));
    assert!(
        with(&yarn_divisors(8.0)[1..]).err().unwrap().to_string().contains("rope_freqs.weight")
    );
}

fn yarn_divisors(factor: f64) -> Vec<f32> {
    let divisor = |i: i32| {
        let wavelength = 2.0 * std::f64::consts::PI * 500_000f64.powf(f64::from(i) / 32.0);
        if wavelength < 8192.0 / 4.0 {
            1.0
        } else if wavelength > 8192.0 {
            factor
        } else {
            let smooth = (8192.0 / wavelength - 1.0) / 3.0;
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..32).map(|i| divisor(i) as f32).collect()
}

#[test]
fn tokenizer_template_and_special_tokens_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write_dir(dir.path(), &tiny(Family::Qwen2), "F32", 1);
    let open = || ModelFiles::open(dir.path()).unwrap();
    assert_eq!((open().tokenizer, open().chat_template), (None, None));

    std::fs::write(at("tokenizer.json"), b"{}").unwrap();
    std::fs::write(at("generation_config.json"), br#"{"eos_token_id": [5, 2]}"#).unwrap();
    let settings = json!({
        "bos_token": null,
        "eos_token": { "content": "<end>", "special": true },
        "pad_token": "<pad>",
        "cls_token": { "content": "<cls>" },
        "image_token": "<image>",
        "add_bos_token": true,
        "extra_special_tokens": { "audio_token": "<audio>" },
        "chat_template": [{ "name": "tool_use", "template": "no" }, { "name": "default", "template": "yes" }],
    });
    std::fs::write(at("tokenizer_config.json"), settings.to_string()).unwrap();
    let model = open();
    assert_eq!(model.tokenizer, Some(TokenizerSource::Json(b"{}".to_vec())));
    assert_eq!(model.config.eos, [2, 5]);
    assert_eq!(model.chat_template.as_deref(), Some("yes"));
    assert_eq!(
        (model.special_tokens.bos, model.special_tokens.eos.as_deref()),
        (None, Some("<end>"))
    );
    assert_eq!(model.special_tokens.pad.as_deref(), Some("<pad>"));
    let remaining: Vec<_> = model.special_tokens.other_tokens.into_iter().collect();
    assert_eq!(
        remaining,
        [
            named_token("audio_token", "<audio>"),
            named_token("cls_token", "<cls>"),
            named_token("image_token", "<image>")
        ]
    );

    std::fs::write(at("tokenizer_config.json"), br#"{"chat_template": "text"}"#).unwrap();
    assert_eq!(open().chat_template.as_deref(), Some("text"));
    std::fs::write(at("chat_template.jinja"), "file").unwrap();
    assert_eq!(open().chat_template.as_deref(), Some("file"));
}

fn named_token(name: &str, text: &str) -> (String, String) {
    (name.to_string(), text.to_string())
}

fn save(dir: &Path, config: &ModelConfig) {
    let weights = weights(config);
    let tensors = config.parameters().into_iter().map(|parameter| {
        let values = weights[&parameter.name].1.as_slice();
        (parameter.name, parameter.shape, values)
    });
    write_safetensors(&dir.join("model.safetensors"), tensors).unwrap();
    write_json(&dir.join("config.json"), &config.to_hf_json()).unwrap();
}

#[test]
fn model_directory_round_trips() {
    for family in with_architecture() {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &tiny(family));
        let remaining = [("image_token".to_string(), "<image>".to_string())].into();
        let special = SpecialTokens {
            eos: Some("<end>".into()),
            other_tokens: remaining,
            ..Default::default()
        };
        let path = dir.path().join("tokenizer_config.json");
        write_tokenizer_config(&path, &special, Some("{{ x }}"), 128).unwrap();
        let model = ModelFiles::open(dir.path()).unwrap();
        assert_holds(&model, &tiny(family));
        assert_eq!(
            (model.special_tokens, model.chat_template.as_deref()),
            (special, Some("{{ x }}"))
        );
    }
}

/// Readers that map the file require numbers at multiples of their size.
#[test]
fn write_safetensors_aligns_data() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    for name in ["a", "ab", "abc", "abcd", "abcde"] {
        write_safetensors(&path, [(name.to_string(), vec![1], [1.0f32].as_slice())]).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert!(header.is_multiple_of(8));
        assert_eq!(bytes[8 + header as usize..], 1.0f32.to_le_bytes());
    }
}

#[test]
fn write_safetensors_rejects_shape_mismatch() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let error = write_safetensors(&path, [("w".to_string(), vec![2, 2], [0.0f32; 3].as_slice())]);
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("tensor w of shape [2, 2] cannot be written with 3 values")
    );
    assert!(!path.exists());
}

#[cfg(target_os = "linux")]
#[test]
fn full_disk_is_reported_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    // Every write to the device /dev/full fails with "no space left". Removing `path` removes only
    // the link.
    std::os::unix::fs::symlink("/dev/full", &path).unwrap();
    let error =
        write_safetensors(&path, [("w".to_string(), vec![4], [0.0f32; 4].as_slice())]).unwrap_err();
    let message = error.to_string();
    assert!(
        message.starts_with("the disk is full") && message.contains("model.safetensors"),
        "{message}"
    );
    assert!(std::fs::symlink_metadata(&path).is_err());
    assert!(Path::new("/dev/full").exists());
}
