//! Opens and checks a model on disk, in Hugging Face or GGUF format, and reads its tensors.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::gguf::GgufFile;
use crate::keys::{Keys, token_ids};
use crate::safetensors::SafetensorsFile;
use crate::tokenizer::{apply_flags, check_added, check_prefix_space};
use crate::{
    ModelConfig, ModelError, Parameter, SpecialTokens, TokenizerSource, hf_config, names,
    placeholder,
};

/// Weight tensor, with values in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Shape of the tensor. A projection is `[outputs, inputs]`.
    pub shape: Vec<usize>,
    /// Values of the tensor, row-major. Their number is the product of `shape`.
    pub data: Vec<f32>,
}

/// Open model: configuration, tokenizer and weights. Weights stay on disk until they are read.
///
/// [`Self::open`] checks that the files contain every parameter of the configuration, with its
/// shape and in a readable type, and no other tensors.
pub struct ModelFiles {
    /// Configuration of the model.
    pub config: ModelConfig,
    /// Tokenizer of the model. `None` if the directory has no `tokenizer.json`.
    pub tokenizer: Option<TokenizerSource>,
    /// Jinja template that renders a conversation as text. `None` if the model has none.
    pub chat_template: Option<String>,
    /// Special tokens that chat templates use by name.
    pub special_tokens: SpecialTokens,
    /// Notes for the user about the contents of the files, one line each.
    pub notes: Vec<String>,
    path: PathBuf,
    weights: WeightFiles,
}

/// Weight files of a model.
enum WeightFiles {
    /// Files of a Hugging Face directory. `file_by_tensor` maps the name of a tensor to the index
    /// of its file in `files`.
    Dir {
        files: Vec<SafetensorsFile>,
        file_by_tensor: HashMap<String, usize>,
    },
    Gguf(Box<GgufFile>),
}

impl ModelFiles {
    /// Opens a Hugging Face directory (`config.json`, `model.safetensors` or its shards,
    /// `tokenizer.json`, …) or a `.gguf` file.
    ///
    /// # Errors
    /// Returns an error if a file is missing, damaged or of an unsupported kind, or if the
    /// configuration contradicts the weights. The message names the file and the tensor or key.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let model = if path.is_dir() {
            Self::open_dir(path)?
        } else if path.is_file() {
            Self::open_gguf(path)?
        } else {
            return Err(ModelError::Missing {
                path: path.to_path_buf(),
                what: "the path does not exist".into(),
                way_out: "give the directory of a Hugging Face model or a .gguf file".into(),
            });
        };
        model.check_tensors()?;
        Ok(model)
    }

    fn open_gguf(path: &Path) -> Result<Self, ModelError> {
        let ending = path.extension().unwrap_or_default();
        if PICKLES.iter().any(|known| ending == *known) {
            return Err(ModelError::unsupported(
                path,
                "the file is a PyTorch checkpoint, which can run code on loading and is therefore \
                 not supported",
                "in Python, load it and save the model with transformers, which writes a directory \
                 with safetensors",
            ));
        }
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            return Err(ModelError::Missing {
                path: path.to_path_buf(),
                what: "the file contains only weights; a model is a directory that also contains \
                     config.json"
                    .into(),
                way_out: "give the directory instead of the file".into(),
            });
        }
        let contents = GgufFile::open(path)?;
        Ok(Self {
            config: contents.config,
            tokenizer: Some(TokenizerSource::Gguf(contents.tokenizer)),
            chat_template: contents.chat_template,
            special_tokens: contents.special,
            notes: Vec::new(),
            path: path.to_path_buf(),
            weights: WeightFiles::Gguf(Box::new(contents.file)),
        })
    }

    fn open_dir(path: &Path) -> Result<Self, ModelError> {
        let config_path = path.join("config.json");
        let Some(contents) = read_if_exists(&config_path)? else {
            return Err(ModelError::Missing {
                path: path.to_path_buf(),
                what: "the directory has no config.json".into(),
                way_out: "give the directory of a Hugging Face model, or a .gguf file itself"
                    .into(),
            });
        };
        let hf_config::ParsedConfig { mut config, mut notes, is_part } =
            hf_config::parse(&config_path, &contents)?;
        let generation_path = path.join("generation_config.json");
        if let Some(generation) = read_json(&generation_path)? {
            // Chat models often define the token that ends a turn only in this file.
            let keys = Keys::new(&generation_path, "", &generation);
            let more = keys.read("eos_token_id", "a token id or a list of them", token_ids)?;
            for id in more.unwrap_or_default() {
                if !config.eos.contains(&id) {
                    config.eos.push(id);
                }
            }
        }
        let settings_path = path.join("tokenizer_config.json");
        let settings = read_json(&settings_path)?.unwrap_or_default();
        let mut tokenizer = read_if_exists(&path.join("tokenizer.json"))?;
        if let Some(tokenizer) = &mut tokenizer {
            check_added(&settings_path, &settings, tokenizer)?;
            check_prefix_space(&settings_path, &settings, tokenizer)?;
            apply_flags(&settings, tokenizer);
        }
        let template_path = path.join("chat_template.jinja");
        let chat_template = match read_if_exists(&template_path)? {
            Some(bytes) => Some(String::from_utf8(bytes).map_err(|error| {
                ModelError::damaged(&template_path, format!("the template is not UTF-8: {error}"))
            })?),
            None => settings.get("chat_template").and_then(default_template),
        };
        let mut files = open_weights(path)?;
        names::normalize_names(&mut files, is_part)?;
        if config.tied {
            notes.extend(resolve_tied_head(&mut config, &mut files)?);
        }
        let mut file_by_tensor = HashMap::new();
        for (index, file) in files.iter().enumerate() {
            for (name, _) in file.tensors() {
                if let Some(other) = file_by_tensor.insert(name.to_string(), index) {
                    let other = files[other].path().display();
                    return Err(ModelError::damaged(
                        file.path(),
                        format!("tensor {name} is also in {other}"),
                    ));
                }
            }
        }
        Ok(Self {
            config,
            tokenizer: tokenizer.map(TokenizerSource::Json),
            chat_template,
            special_tokens: SpecialTokens::from_hf(&settings),
            notes,
            path: path.to_path_buf(),
            weights: WeightFiles::Dir { files, file_by_tensor },
        })
    }

    /// Returns the directory or file from which the model was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the Hugging Face names of the parameters, in the order of
    /// [`ModelConfig::parameters`].
    pub fn tensor_names(&self) -> Vec<String> {
        self.config.parameters().into_iter().map(|parameter| parameter.name).collect()
    }

    /// Reads the parameter with the Hugging Face name `name`.
    ///
    /// # Errors
    /// Returns an error if the model has no such tensor, or if its type on disk is unsupported.
    pub fn tensor(&self, name: &str) -> Result<Tensor, ModelError> {
        let shape = self.shape(name).ok_or_else(|| self.missing_tensor_error(name, &[]))?.to_vec();
        let mut data = vec![0.0; shape.iter().product()];
        self.read(name, &mut data)?;
        Ok(Tensor { shape, data })
    }

    /// Decodes a parameter directly into `out`, row-major.
    ///
    /// # Errors
    /// Returns the errors of [`Self::tensor`], and an error if the tensor's shape is not `expected`
    /// or if the length of `out` is not the product of `expected`.
    pub fn tensor_into(
        &self,
        name: &str,
        expected: &[usize],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        self.check_shape(name, expected)?;
        let wanted = expected.iter().product::<usize>();
        if wanted != out.len() {
            let what =
                format!("tensor {name} has {wanted} values, but {} were requested", out.len());
            return Err(ModelError::config(&self.path, what));
        }
        self.read(name, out)
    }

    fn shape(&self, name: &str) -> Option<&[usize]> {
        match &self.weights {
            WeightFiles::Dir { files, file_by_tensor } => {
                files[*file_by_tensor.get(name)?].shape(name)
            }
            WeightFiles::Gguf(file) => file.shape(name),
        }
    }

    fn read(&self, name: &str, out: &mut [f32]) -> Result<(), ModelError> {
        match &self.weights {
            WeightFiles::Dir { files, file_by_tensor } => match file_by_tensor.get(name) {
                Some(&index) => files[index].read(name, out),
                None => Err(self.missing_tensor_error(name, &[])),
            },
            WeightFiles::Gguf(file) => file.read(name, out),
        }
    }

    fn missing_tensor_error(&self, name: &str, expected: &[usize]) -> ModelError {
        let way_out = if name == "lm_head.weight" {
            "if the model shares its embedding with its output head, set tie_word_embeddings to \
             true in config.json"
        } else {
            "the download may be incomplete, or the configuration belongs to another model: fetch \
             both again"
        };
        ModelError::MissingTensor {
            path: self.path.clone(),
            tensor: name.to_string(),
            expected: expected.to_vec(),
            way_out: way_out.to_string(),
        }
    }

    fn check_shape(&self, name: &str, expected: &[usize]) -> Result<(), ModelError> {
        let found = self.shape(name).ok_or_else(|| self.missing_tensor_error(name, expected))?;
        if found == expected {
            return Ok(());
        }
        let path = match &self.weights {
            WeightFiles::Dir { files, file_by_tensor } => {
                file_by_tensor.get(name).map(|&index| files[index].path())
            }
            WeightFiles::Gguf(file) => Some(file.path()),
        };
        Err(ModelError::Shape {
            path: path.unwrap_or(&self.path).to_path_buf(),
            tensor: name.to_string(),
            expected: expected.to_vec(),
            found: found.to_vec(),
        })
    }

    /// Checks that the files contain exactly the tensors that the configuration requires.
    fn check_tensors(&self) -> Result<(), ModelError> {
        let parameters = self.config.parameters();
        for Parameter { name, shape } in &parameters {
            self.check_shape(name, shape)?;
            if let WeightFiles::Dir { files, file_by_tensor } = &self.weights {
                file_by_tensor
                    .get(name)
                    .map_or(Ok(()), |&index| files[index].check_shaped(name, shape))?;
            }
        }
        let unexpected = match &self.weights {
            WeightFiles::Gguf(file) => file.unexpected_tensors(),
            WeightFiles::Dir { files, .. } => {
                let known: BTreeSet<&str> =
                    parameters.iter().map(|parameter| parameter.name.as_str()).collect();
                let tensors = files.iter().flat_map(SafetensorsFile::tensors);
                tensors
                    .filter(|(name, _)| !known.contains(name) && !self.is_redundant(name))
                    .map(|(name, shape)| (name.to_string(), shape.to_vec()))
                    .collect()
            }
        };
        match unexpected.into_iter().min() {
            Some((tensor, found)) => {
                Err(ModelError::UnexpectedTensor { path: self.path.clone(), tensor, found })
            }
            None => Ok(()),
        }
    }

    /// Returns whether the tensor `name` can be ignored, because it is derived from other tensors
    /// although some programs save it: a tied output head, or rotary frequencies.
    fn is_redundant(&self, name: &str) -> bool {
        name.ends_with("rotary_emb.inv_freq") || (self.config.tied && name == "lm_head.weight")
    }
}

/// Resolves `tie_word_embeddings = true` against the tensors in the files.
///
/// The key can be wrong, because models that were trained with a separate head often keep it. As in
/// transformers 5, an output head that differs from the embedding is kept, and `config.tied`
/// becomes `false`. If only the head exists, it becomes the embedding. Returns a note for the user
/// if the key was wrong.
fn resolve_tied_head(
    config: &mut ModelConfig,
    files: &mut [SafetensorsFile],
) -> Result<Option<String>, ModelError> {
    const EMBEDDING: &str = "model.embed_tokens.weight";
    const HEAD: &str = "lm_head.weight";
    let shape = [config.vocabulary, config.hidden];
    let find = |name: &str| files.iter().position(|file| file.shape(name).is_some());
    let (embedding, head) = match (find(EMBEDDING), find(HEAD)) {
        (_, None) => return Ok(None),
        (None, Some(head)) => {
            files[head].rename(|name| (name == HEAD).then(|| EMBEDDING.to_owned()));
            return Ok(None);
        }
        (Some(embedding), Some(head)) => (&files[embedding], &files[head]),
    };
    // A wrong shape is reported later, by the check of all parameters.
    if [(embedding, EMBEDDING), (head, HEAD)]
        .iter()
        .all(|(file, name)| file.shape(name) == Some(&shape))
    {
        if embedding.bytes(EMBEDDING)? == head.bytes(HEAD)? {
            return Ok(None);
        }
        if read_embedding(config, embedding, EMBEDDING)? == read_embedding(config, head, HEAD)? {
            return Ok(None);
        }
    }
    config.tied = false;
    Ok(Some(format!(
        "{}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}: the model runs with \
         its own output head",
        head.path().display()
    )))
}

fn read_embedding(
    config: &ModelConfig,
    file: &SafetensorsFile,
    name: &str,
) -> Result<Vec<f32>, ModelError> {
    let mut values = vec![0.0; config.vocabulary * config.hidden];
    file.read(name, &mut values).map(|()| values)
}

/// Reads a file completely. Returns `None` if the file does not exist.
///
/// # Errors
/// Returns an error if the file cannot be read, or is a placeholder such as a Git LFS pointer.
pub(crate) fn read_if_exists(path: &Path) -> Result<Option<Vec<u8>>, ModelError> {
    match std::fs::read(path) {
        Ok(bytes) => placeholder::reject_placeholder(path, &bytes).map(|()| Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ModelError::io_error("read", path)(error)),
    }
}

/// Reads a JSON object from a file. Returns `None` if the file does not exist.
///
/// # Errors
/// Returns the errors of [`read_if_exists`], and an error if the contents are not a JSON object.
pub(crate) fn read_json(path: &Path) -> Result<Option<Map<String, Value>>, ModelError> {
    let Some(bytes) = read_if_exists(path)? else { return Ok(None) };
    match serde_json::from_slice(&bytes) {
        Ok(object) => Ok(Some(object)),
        Err(error) => {
            Err(ModelError::damaged(path, format!("the contents are not a JSON object: {error}")))
        }
    }
}

/// Returns the default chat template from the value of `chat_template`: a string, or a list of
/// named templates.
fn default_template(value: &Value) -> Option<String> {
    let template = match value {
        Value::Array(named) => named
            .iter()
            .find(|entry| entry.get("name").is_some_and(|name| name == "default"))?
            .get("template")?,
        one => one,
    };
    template.as_str().map(str::to_string)
}

/// Extensions of files with pickled weights: PyTorch's own extensions, and the shards of DeepSpeed
/// and FSDP.
const PICKLES: [&str; 6] = ["bin", "pt", "pth", "ckpt", "pkl", "distcp"];

/// Returns the first name in `dir` of a file or directory with pickled weights, in alphabetical
/// order.
fn find_pickled(dir: &Path) -> Option<String> {
    let names = std::fs::read_dir(dir)
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok());
    // Trainers save their own state alongside the weights.
    let state = ["optimizer", "random_states", "rng_state", "scheduler", "training_args"];
    let is_pickle = |name: &str| {
        let ending = Path::new(name).extension().unwrap_or_default();
        let ends = PICKLES.iter().any(|known| ending == *known);
        let is_state = state.iter().any(|prefix| name.starts_with(prefix));
        (ends && !is_state) || name.starts_with("global_step") || name.starts_with("pytorch_model")
    };
    names.filter(|name| is_pickle(name)).min()
}

/// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
fn open_weights(dir: &Path) -> Result<Vec<SafetensorsFile>, ModelError> {
    let single = dir.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![SafetensorsFile::open(&single)?]);
    }
    let index_path = dir.join("model.safetensors.index.json");
    let Some(index) = read_json(&index_path)? else {
        let way_out = match find_pickled(dir) {
            Some(name) => format!(
                "the directory has {name}, which can run code on loading and is therefore not \
                 supported: in Python, load it and save the model with transformers, which writes \
                 safetensors"
            ),
            None => "fetch the weights, or give a .gguf file itself".into(),
        };
        return Err(ModelError::Missing {
            path: dir.to_path_buf(),
            what: "the directory has neither model.safetensors nor model.safetensors.index.json"
                .into(),
            way_out,
        });
    };
    let Some(weight_map) = index.get("weight_map").and_then(Value::as_object) else {
        return Err(ModelError::config(&index_path, "weight_map is missing or not an object"));
    };
    let mut names = BTreeSet::new();
    for (tensor, file) in weight_map {
        // The index must contain plain file names, which cannot refer outside its directory.
        match file
            .as_str()
            .filter(|name| Path::new(name).file_name().is_some_and(|plain| plain == *name))
        {
            Some(name) => names.insert(name),
            None => {
                let what =
                    format!("weight_map puts tensor {tensor} in {file}, which is not a file name");
                return Err(ModelError::config(&index_path, what));
            }
        };
    }
    let mut files = Vec::with_capacity(names.len());
    for name in names {
        let shard = dir.join(name);
        if !shard.is_file() {
            return Err(ModelError::Missing {
                path: shard,
                what: format!("the shard is missing, although {} lists it", index_path.display()),
                way_out: "fetch the model again; a part of its weights was not downloaded".into(),
            });
        }
        files.push(SafetensorsFile::open(&shard)?);
    }
    Ok(files)
}
