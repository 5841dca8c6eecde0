//! Reads models from GGUF files: the container, the quantized number formats, and the model
//! configuration.
//!
//! Opening a file checks its complete layout: afterwards, the bytes of every tensor lie at the
//! offsets in the tensor directory. Tensors are read as f32, under Hugging Face names and in
//! Hugging Face row order. If the converter interleaved the rows of a head for the rotary
//! embedding, reading restores their order.

mod config;
mod names;
mod quant;
mod read;

use std::path::{Path, PathBuf};

use memmap2::Mmap;

use self::read::{GgufHeader, TensorEntry};
use crate::{GgufTokenizer, ModelConfig, ModelError, SpecialTokens};

/// Open GGUF file whose layout has been checked.
pub(crate) struct GgufFile {
    path: PathBuf,
    bytes: Mmap,
    directory: GgufHeader,
    config: ModelConfig,
}

/// Open GGUF file with the model configuration, tokenizer and chat template from its metadata.
pub(crate) struct GgufContents {
    pub(crate) file: GgufFile,
    pub(crate) config: ModelConfig,
    pub(crate) tokenizer: GgufTokenizer,
    pub(crate) chat_template: Option<String>,
    pub(crate) special: SpecialTokens,
}

impl GgufFile {
    pub(crate) fn open(path: &Path) -> Result<GgufContents, ModelError> {
        let bytes = crate::safetensors::map_file(path)?;
        let directory = GgufHeader::read(path, &bytes)?;
        let tokenizer = config::read_tokenizer(&directory.metadata)?;
        let rope_factors = directory.tensors.get(config::ROPE_FACTORS).map(|entry| {
            let mut factors = vec![0.0; entry.shape.iter().product()];
            entry.encoding.decode(&bytes[entry.start..entry.start + entry.bytes], &mut factors);
            factors
        });
        let config = config::read_model_config(&directory, &tokenizer, rope_factors.as_deref())?;
        let chat_template = directory.metadata.text("tokenizer.chat_template")?.map(str::to_string);
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.tokens.get(id as usize).cloned());
        let special = SpecialTokens {
            bos: text(tokenizer.bos),
            eos: text(tokenizer.eos),
            pad: text(tokenizer.pad),
            unknown: text(tokenizer.unknown),
            ..SpecialTokens::default()
        };
        let file = Self { path: path.to_path_buf(), bytes, directory, config: config.clone() };
        Ok(GgufContents { file, config, tokenizer, chat_template, special })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the shape of the parameter with the Hugging Face name `name`, or `None` if the file
    /// does not contain the parameter.
    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.find(name).map(|(entry, ..)| entry.shape.as_slice())
    }

    /// Returns the shapes of tensors that are not parameters of the model, with the names that the
    /// tensors have in the file.
    pub(crate) fn unexpected_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let parameters = self.config.parameters();
        let known: std::collections::HashSet<String> = parameters
            .iter()
            .filter_map(|parameter| names::locate_parameter(&self.config, &parameter.name))
            .map(|location| location.name)
            .collect();
        let tensors = self.directory.tensors.iter();
        tensors
            .filter(|(name, _)| !known.contains(*name) && *name != config::ROPE_FACTORS)
            .map(|(name, entry)| (name.clone(), entry.shape.clone()))
            .collect()
    }

    fn find(&self, name: &str) -> Option<(&TensorEntry, Option<usize>, f32)> {
        let location = names::locate_parameter(&self.config, name)?;
        self.directory
            .tensors
            .get(&location.name)
            .map(|entry| (entry, location.interleaved_heads, location.offset))
    }

    /// Decodes a tensor into `out`, row-major, with rows in Hugging Face order. The length of `out`
    /// must be the product of the tensor's shape.
    pub(crate) fn read(&self, name: &str, out: &mut [f32]) -> Result<(), ModelError> {
        let Some((entry, interleaved_heads, offset)) = self.find(name) else {
            return Err(ModelError::damaged(&self.path, format!("the file has no tensor {name}")));
        };
        let data = &self.bytes[entry.start..entry.start + entry.bytes];
        let rows = entry.shape.first().copied().unwrap_or(1);
        let head_dim = interleaved_heads.map_or(0, |heads| rows / heads);
        if head_dim < 2 {
            entry.encoding.decode(data, out);
        } else if let [_] = entry.shape[..] {
            // The tensor is a bias: if it is stored in blocks, a block spans several rows.
            let mut interleaved = vec![0.0; out.len()];
            entry.encoding.decode(data, &mut interleaved);
            for (row, value) in out.iter_mut().enumerate() {
                *value = interleaved[names::interleaved_row(row, head_dim)];
            }
        } else {
            let columns = out.len() / rows;
            let row_bytes = data.len() / rows;
            for (row, values) in out.chunks_exact_mut(columns).enumerate() {
                let from = names::interleaved_row(row, head_dim) * row_bytes;
                entry.encoding.decode(&data[from..from + row_bytes], values);
            }
        }
        if offset != 0.0 {
            out.iter_mut().for_each(|value| *value -= offset);
        }
        Ok(())
    }
}
