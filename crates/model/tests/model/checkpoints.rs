//! Tests of checkpoints that trainers or manual edits have changed: untied output heads, names
//! changed by a wrapper, and files that were never downloaded.

use std::path::Path;

use levade_model::{Family, ModelConfig, ModelFiles, TokenizerSource};
use serde_json::json;

use crate::support::{assert_all, encode, open_error, safetensors, tiny, weights, write_dir};

fn dir_error(change: impl FnOnce(&Path)) -> String {
    let dir = tempfile::tempdir().unwrap();
    write_dir(dir.path(), &tiny(Family::Qwen3), "F32", 1);
    change(dir.path());
    open_error(dir.path())
}

/// Creates a valid model directory whose tensors have been modified by `change`.
fn with_tensors(
    config: &ModelConfig,
    change: impl FnOnce(&mut Vec<StoredTensor>),
) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_dir(dir.path(), config, "F32", 1);
    let mut tensors: Vec<_> = weights(config)
        .into_iter()
        .map(|(name, (shape, values))| (name, "F32", shape, encode("F32", &values)))
        .collect();
    change(&mut tensors);
    std::fs::write(dir.path().join("model.safetensors"), safetensors(&tensors)).unwrap();
    dir
}

/// The name, type, shape and bytes of a tensor.
type StoredTensor = (String, &'static str, Vec<usize>, Vec<u8>);

/// Some writers store a copy of the tied head, and the rotary frequencies.
#[test]
fn redundant_tensors_are_accepted() {
    let config = tiny(Family::Llama);
    let dir = with_tensors(&config, |tensors| {
        let embedding =
            tensors.iter().find(|(name, ..)| name == "model.embed_tokens.weight").unwrap().clone();
        tensors.push(("lm_head.weight".into(), "F32", embedding.2, embedding.3));
        tensors.push((
            "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
            "F32",
            vec![4],
            vec![0; 16],
        ));
    });
    let model = ModelFiles::open(dir.path()).unwrap();
    assert!(model.config.tied && model.notes.is_empty(), "{:?}", model.notes);
    // The head equals the embedding in value, although not in bytes.
    let dir = with_tensors(&config, |tensors| {
        let values = &weights(&config)["model.embed_tokens.weight"].1;
        tensors.push(("lm_head.weight".into(), "F64", vec![10, 32], encode("F64", values)));
    });
    assert!(ModelFiles::open(dir.path()).unwrap().config.tied);
}

/// As in transformers since version 5, a stored head is used regardless of `tie_word_embeddings`.
#[test]
fn differing_head_overrides_tie_word_embeddings() {
    let config = tiny(Family::Llama);
    assert!(config.tied);
    let dir = with_tensors(&config, |tensors| {
        tensors.push(("lm_head.weight".into(), "F32", vec![10, 32], encode("F32", &[0.5; 320])));
    });
    let model = ModelFiles::open(dir.path()).unwrap();
    assert!(!model.config.tied && model.tensor_names().contains(&"lm_head.weight".to_string()));
    assert_eq!(model.tensor("lm_head.weight").unwrap().data, [0.5; 320]);
    assert!(
        model.notes[0].contains("tie_word_embeddings is true, but lm_head.weight differs"),
        "{:?}",
        model.notes
    );
    assert_eq!(model.config.to_hf_json()["tie_word_embeddings"], false);

    let dir = with_tensors(&config, |tensors| {
        tensors.iter_mut().find(|tensor| tensor.0 == "model.embed_tokens.weight").unwrap().0 =
            "lm_head.weight".into();
    });
    let model = ModelFiles::open(dir.path()).unwrap();
    assert!(model.config.tied && model.notes.is_empty());
    assert_eq!(
        model.tensor("model.embed_tokens.weight").unwrap().data,
        weights(&config)["model.embed_tokens.weight"].1
    );

    let dir = with_tensors(&config, |tensors| {
        tensors.push(("lm_head.weight".into(), "F32", vec![9, 32], vec![0; 4 * 288]));
    });
    assert_all(&open_error(dir.path()), &["lm_head.weight", "[9, 32]", "[10, 32]"]);
}

#[test]
fn wrapper_prefixes_of_tensor_names_are_identified() {
    let config = tiny(Family::Qwen2);
    let renamed = |rename: &dyn Fn(&str) -> String| {
        with_tensors(&config, |tensors| {
            tensors.iter_mut().for_each(|tensor| tensor.0 = rename(&tensor.0))
        })
    };
    // Only the decoder was saved, without the prefix `model.`. transformers loads such a
    // checkpoint.
    let bare = renamed(&|name| name.trim_start_matches("model.").to_string());
    let model = ModelFiles::open(bare.path()).unwrap();
    for (name, (_, values)) in weights(&config) {
        assert_eq!(model.tensor(&name).unwrap().data, values, "{name}");
    }
    for (prefix, expected) in [
        ("base_model.model.", "PEFT wrapper"),
        ("_orig_mod.", "torch.compile"),
        ("module.", "DistributedDataParallel"),
        ("module._orig_mod.", "\"module.\""),
        ("_fsdp_wrapped_module.", "FSDP"),
        ("pretrained_model.", "value head"),
        ("language_model.", "multimodal model"),
        ("student.", "\"student.\""),
    ] {
        let message = open_error(renamed(&|name| format!("{prefix}{name}")).path());
        assert_all(
            &message,
            &["model.safetensors", expected, prefix.split_inclusive('.').next().unwrap()],
        );
    }
    let inner = renamed(&|name| name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."));
    assert_all(&open_error(inner.path()), &["_checkpoint_wrapped_module", "FSDP"]);
    let head = with_tensors(&config, |tensors| {
        tensors.push(("v_head.summary.weight".into(), "F32", vec![1, 32], vec![0; 128]));
    });
    assert_all(&open_error(head.path()), &["\"v_head.\"", "value head"]);
}

/// Gemma 3 as published, with images, under the tensor names of transformers 4 and 5.
#[test]
fn text_model_is_read_from_image_model() {
    let config = tiny(Family::Gemma3);
    type Rename = fn(&str) -> String;
    let spellings: [Rename; 2] = [
        |name| format!("language_model.{name}"),
        |name| name.replacen("model.", "model.language_model.", 1),
    ];
    for rename in spellings {
        let dir = with_tensors(&config, |tensors| {
            tensors.iter_mut().for_each(|tensor| tensor.0 = rename(&tensor.0));
            for name in
                ["vision_tower.patch.weight", "multi_modal_projector.mm_soft_emb_norm.weight"]
            {
                tensors.push((name.into(), "F32", vec![2], vec![0; 8]));
                tensors.push((format!("model.{name}"), "F32", vec![2], vec![0; 8]));
            }
        });
        let text = config.to_hf_json();
        let larger = json!({ "model_type": "gemma3", "text_config": text, "vision_config": { "depth": 3 }, "eos_token_id": [2] });
        std::fs::write(dir.path().join("config.json"), larger.to_string()).unwrap();
        let model = ModelFiles::open(dir.path()).unwrap();
        assert_eq!(model.config, config);
        for (name, (_, values)) in weights(&config) {
            assert_eq!(model.tensor(&name).unwrap().data, values, "{name}");
        }
        // A tensor that belongs neither to the text nor to the images is still reported.
        let other = with_tensors(&config, |tensors| {
            tensors.iter_mut().for_each(|tensor| tensor.0 = rename(&tensor.0));
            tensors.push(("audio_tower.weight".into(), "F32", vec![2], vec![0; 8]));
        });
        std::fs::write(other.path().join("config.json"), larger.to_string()).unwrap();
        assert_all(&open_error(other.path()), &["audio_tower.weight"]);
    }
}

/// Every file of a model can be a Git LFS pointer or a web page if its download failed.
#[test]
fn lfs_pointers_and_web_pages_are_rejected() {
    let pointer =
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 335968\n";
    for name in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ] {
        for (contents, expected) in [
            (pointer, "is a Git LFS pointer, not the file: run `git lfs pull`"),
            ("<!DOCTYPE html>\n<html>", "is a web page"),
        ] {
            let message = dir_error(|dir| std::fs::write(dir.join(name), contents).unwrap());
            assert_all(&message, &[name, expected]);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, pointer).unwrap();
    assert_all(&open_error(&path), &["model.gguf: this is a Git LFS pointer"]);
    let path = dir.path().join("mp_rank_00_model_states.pt");
    std::fs::write(&path, b"PK").unwrap();
    assert_all(&open_error(&path), &["mp_rank_00_model_states.pt", "PyTorch"]);
}

#[test]
fn invalid_eos_token_ids_are_rejected() {
    let message = dir_error(|dir| {
        std::fs::write(dir.join("generation_config.json"), r#"{"eos_token_id": ["x"]}"#).unwrap();
    });
    assert_all(&message, &["generation_config.json", "eos_token_id is [\"x\"]"]);
}

/// transformers would add such tokens when it loads both files.
#[test]
fn tokens_added_only_in_tokenizer_config_are_rejected() {
    let more =
        decoder_error(json!({ "3": { "content": "<end>" }, "4": { "content": "<tool_call>" } }));
    assert_all(&more, &["tokenizer_config.json", "\"<tool_call>\"", "id 4", "save_pretrained"]);
    let other = decoder_error(json!({ "5": { "content": "<end>" } }));
    assert_all(&other, &["tokenizer_config.json", "\"<end>\"", "id 5", "gives it the id 3"]);
}

fn decoder_error(decoder: serde_json::Value) -> String {
    dir_error(|dir| {
        let tokenizer = json!({ "added_tokens": [{ "id": 3, "content": "<end>", "special": true }], "model": {} });
        std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let settings = json!({ "added_tokens_decoder": decoder });
        std::fs::write(dir.join("tokenizer_config.json"), settings.to_string()).unwrap();
    })
}

/// The expected flags are those that transformers 5.23 returns for these files.
#[test]
fn tokenizer_config_overrides_added_token_flags() {
    let dir = tempfile::tempdir().unwrap();
    write_dir(dir.path(), &tiny(Family::Qwen3), "BF16", 1);
    let added = [
        added_token(3, "<end>", false),
        added_token(4, "<think>", true),
        added_token(5, "<pad>", false),
        added_token(6, "<x>", false),
    ];
    let tokenizer = json!({ "added_tokens": added, "model": {} });
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let settings = json!({
        "pad_token": "<pad>",
        "added_tokens_decoder": {
            "3": { "content": "<end>", "special": true },
            "4": { "content": "<think>", "special": false, "lstrip": true },
        },
    });
    std::fs::write(dir.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    let files = ModelFiles::open(dir.path()).unwrap();
    let Some(TokenizerSource::Json(bytes)) = &files.tokenizer else {
        panic!("there is a tokenizer.json")
    };
    let read: serde_json::Value = serde_json::from_slice(bytes).unwrap();
    let seen = |flag: &str| -> Vec<bool> {
        read["added_tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|added_token| added_token[flag].as_bool().unwrap())
            .collect()
    };
    assert_eq!(seen("special"), [true, false, true, false]);
    assert_eq!(seen("lstrip"), [false, true, false, false]);
}

fn added_token(id: u32, content: &str, special: bool) -> serde_json::Value {
    json!({ "id": id, "content": content, "special": special, "lstrip": false })
}

#[test]
fn contradictory_add_prefix_space_is_rejected() {
    for class in ["GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2TokenizerFast"] {
        for (settings, own) in [(Some(true), true), (Some(false), false), (None, false)] {
            open_with(class, settings, own).unwrap();
        }
        for (settings, own) in [(Some(true), false), (Some(false), true), (None, true)] {
            assert_all(
                &open_with(class, settings, own).unwrap_err(),
                &["tokenizer_config.json", "add_prefix_space", class],
            );
        }
    }
    for (settings, own) in [(Some(true), false), (Some(false), true), (None, true)] {
        open_with("PreTrainedTokenizerFast", settings, own).unwrap();
    }
}

fn open_with(class: &str, settings: Option<bool>, own: bool) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    write_dir(dir.path(), &tiny(Family::Qwen3), "BF16", 1);
    let step = json!({ "type": "ByteLevel", "add_prefix_space": own });
    let steps = json!({ "type": "Sequence", "pretokenizers": [step] });
    let tokenizer = json!({ "added_tokens": [], "model": {}, "pre_tokenizer": steps });
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let settings = json!({ "tokenizer_class": class, "add_prefix_space": settings });
    std::fs::write(dir.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    ModelFiles::open(dir.path()).map(drop).map_err(|error| error.to_string())
}
