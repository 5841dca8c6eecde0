use std::path::Path;

use levade_model::{EncoderConfig, Parameter, write_safetensors};
use serde_json::json;

use super::*;
use crate::ops::testing::{assert_close, noise};

const HIDDEN: usize = 24;

/// Writes a small encoder with random weights to `dir`.
fn write_encoder(dir: &Path) -> EncoderFiles {
    let config = json!({
        "model_type": "bert", "hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 3, "vocab_size": 50, "max_position_embeddings": 32, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    std::fs::write(dir.join("tokenizer.json"), "{}").unwrap();
    std::fs::write(dir.join("modules.json"), "[]").unwrap();
    std::fs::create_dir(dir.join("1_Pooling")).unwrap();
    std::fs::write(dir.join("1_Pooling/config.json"), r#"{"pooling_mode_mean_tokens": true}"#)
        .unwrap();
    let config = EncoderConfig {
        hidden: HIDDEN,
        intermediate: 40,
        layers: 2,
        heads: 3,
        vocabulary: 50,
        positions: 32,
        types: 2,
        norm_epsilon: 1e-12,
        pooling: Pooling::Mean,
        max_tokens: 32,
        query_prefix: String::new(),
        passage_prefix: String::new(),
    };
    let values: Vec<(Parameter, Vec<f32>)> = config
        .parameters()
        .into_iter()
        .enumerate()
        .map(|(seed, parameter)| {
            let values = noise(parameter.shape.iter().product(), seed as u64, 0.8);
            (parameter, values)
        })
        .collect();
    let tensors = values
        .iter()
        .map(|(parameter, data)| (parameter.name.clone(), parameter.shape.clone(), &data[..]));
    write_safetensors(&dir.join("model.safetensors"), tensors).unwrap();
    EncoderFiles::open(dir, "small").unwrap()
}

/// Reference in f64 that follows the paper.
struct Naive<'a>(&'a EncoderFiles);

impl Naive<'_> {
    fn tensor(&self, name: &str) -> Vec<f64> {
        let all = self.0.config.parameters();
        let shape = &all.iter().find(|parameter| parameter.name == name).unwrap().shape;
        self.0.tensor(name, shape).unwrap().into_iter().map(f64::from).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let w = self.tensor(&format!("{name}.weight"));
        let b = self.tensor(&format!("{name}.bias"));
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
        x.iter()
            .enumerate()
            .map(|(i, x)| (x - mean) / (variance + 1e-12).sqrt() * w[i] + b[i])
            .collect()
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let w = self.tensor(&format!("{name}.weight"));
        let b = self.tensor(&format!("{name}.bias"));
        w.chunks(x.len())
            .zip(&b)
            .map(|(row, b)| b + row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>())
            .collect()
    }

    fn vector(&self, ids: &[u32]) -> Vec<f64> {
        let [tokens, position_embeddings, types] = ["word", "position", "token_type"]
            .map(|kind| self.tensor(&format!("embeddings.{kind}_embeddings.weight")));
        let mut rows = Vec::new();
        for (position, id) in ids.iter().enumerate() {
            let sum: Vec<f64> = (0..HIDDEN)
                .map(|i| {
                    table_value(&tokens, *id as usize, i)
                        + table_value(&position_embeddings, position, i)
                        + table_value(&types, 0, i)
                })
                .collect();
            rows.push(self.norm("embeddings.LayerNorm", &sum));
        }
        for layer in 0..2 {
            let name = |part: &str| format!("encoder.layer.{layer}.{part}");
            let [q, k, v] = ["query", "key", "value"].map(|part| {
                let name = name(&format!("attention.self.{part}"));
                rows.iter().map(|row| self.linear(&name, row)).collect::<Vec<_>>()
            });
            for (row, query) in rows.iter_mut().zip(&q) {
                let attended: Vec<f64> =
                    (0..3).flat_map(|head| attend(head * 8..head * 8 + 8, query, &k, &v)).collect();
                let output = self.linear(&name("attention.output.dense"), &attended);
                let middle = self.norm(&name("attention.output.LayerNorm"), &add(row, &output));
                let up = self.linear(&name("intermediate.dense"), &middle);
                let gelu: Vec<f64> =
                    up.iter().map(|x| 0.5 * x * (1.0 + libm::erf(x / 2f64.sqrt()))).collect();
                let down = self.linear(&name("output.dense"), &gelu);
                *row = self.norm(&name("output.LayerNorm"), &add(&middle, &down));
            }
        }
        let rows = if self.0.config.pooling == Pooling::Mean { &rows[..] } else { &rows[..1] };
        let sum: Vec<f64> = (0..HIDDEN).map(|i| rows.iter().map(|row| row[i]).sum()).collect();
        let norm = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        sum.iter().map(|x| x / norm).collect()
    }
}

/// Returns the attention of one head, whose features are `part`, from a query to all positions.
fn attend(part: Range<usize>, query: &[f64], k: &[Vec<f64>], v: &[Vec<f64>]) -> Vec<f64> {
    let weights: Vec<f64> = k
        .iter()
        .map(|key| part.clone().map(|i| query[i] * key[i]).sum::<f64>() / 8f64.sqrt())
        .map(f64::exp)
        .collect();
    let total: f64 = weights.iter().sum();
    part.map(|i| weights.iter().zip(v).map(|(w, value)| w * value[i]).sum::<f64>() / total)
        .collect()
}

fn table_value(table: &[f64], row: usize, i: usize) -> f64 {
    table[row * HIDDEN + i]
}

fn add(x: &[f64], y: &[f64]) -> Vec<f64> {
    x.iter().zip(y).map(|(x, y)| x + y).collect::<Vec<_>>()
}

fn texts() -> Vec<Vec<u32>> {
    [1usize, 32, 7, 13]
        .iter()
        .enumerate()
        .map(|(seed, len)| {
            noise(*len, seed as u64 + 90, 1.0).iter().map(|x| ((x + 0.5) * 49.0) as u32).collect()
        })
        .collect()
}

#[test]
fn encode_matches_f64_reference() {
    let dir = tempfile::tempdir().unwrap();
    let mut files = write_encoder(dir.path());
    for pooling in [Pooling::Mean, Pooling::Cls] {
        files.config.pooling = pooling;
        let found = Encoder::new(&files, 2).unwrap().encode(&texts()).unwrap();
        for (ids, vector) in texts().iter().zip(&found) {
            assert_close(vector, &Naive(&files).vector(ids), 1e-5);
        }
    }
}

#[test]
fn encode_is_independent_of_batch_and_threads() {
    let dir = tempfile::tempdir().unwrap();
    let files = write_encoder(dir.path());
    let mut one = Encoder::new(&files, 1).unwrap();
    let separate: Vec<Vec<f32>> =
        texts().into_iter().map(|ids| one.encode(&[ids]).unwrap().remove(0)).collect();
    for threads in [1, 3] {
        let mut encoder = Encoder::new(&files, threads).unwrap();
        assert_eq!(encoder.encode(&texts()).unwrap(), separate);
        // More rows than go through the model together.
        let many: Vec<Vec<u32>> = texts().into_iter().cycle().take(400).collect();
        let found = encoder.encode(&many).unwrap();
        assert!(found.iter().zip(separate.iter().cycle()).all(|(a, b)| a == b));
    }
}

#[test]
fn encode_rejects_invalid_texts() {
    let dir = tempfile::tempdir().unwrap();
    let mut encoder = Encoder::new(&write_encoder(dir.path()), 1).unwrap();
    for (ids, why) in [
        (vec![], "a text has 0 tokens"),
        (vec![1; 33], "has 33 tokens, but the encoder accepts 1 to 32"),
        (vec![50], "token 50 is outside the encoder's vocabulary of 50"),
    ] {
        let error = encoder.encode(&[vec![1], ids]).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    assert_eq!(encoder.encode(&[]).unwrap(), Vec::<Vec<f32>>::new());
}

#[tokio::test]
async fn embed_prepends_prefix_of_role() {
    /// Tokenizer whose ids are the bytes of a text.
    struct Bytes;
    impl TextIds for Bytes {
        fn ids(&self, text: &str) -> Result<Vec<u32>, PolicyError> {
            Ok(text.bytes().map(|byte| u32::from(byte) % 50).take(32).collect())
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let mut files = write_encoder(dir.path());
    let plain = TextEncoder::new(&files, Arc::new(Bytes), 1).unwrap();
    (files.config.query_prefix, files.config.passage_prefix) =
        ("query: ".into(), "passage: ".into());
    let prefixed = TextEncoder::new(&files, Arc::new(Bytes), 1).unwrap();
    assert_ne!(plain.fingerprint(), prefixed.fingerprint());
    let texts = |text: &str| [text.to_owned()];
    for (role, text) in [(TextRole::Query, "query: a"), (TextRole::Passage, "passage: a")] {
        let found = prefixed.embed(&texts("a"), role).await.unwrap();
        assert_eq!(found, plain.embed(&texts(text), role).await.unwrap());
    }
    assert_eq!(plain.dimensions(), HIDDEN);
}
