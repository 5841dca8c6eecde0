//! A tokenizer as model files carry it, before `levade-text` makes it work.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::ModelError;

/// Where the tokenizer of a model is.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenizerSource {
    /// The contents of a Hugging Face `tokenizer.json`.
    Json(Vec<u8>),
    /// The metadata of a GGUF file.
    Gguf(GgufTokenizer),
}

/// The `tokenizer.ggml.*` metadata of a GGUF file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GgufTokenizer {
    /// `model`: the algorithm, `gpt2` for byte-level BPE, `llama` for SentencePiece's BPE.
    pub model: String,
    /// `pre`: the name of the pre-tokenizer (`smollm`, `qwen2`, `llama-bpe`, …); empty where absent.
    pub pre: String,
    /// Every token's text, in the byte-level alphabet for `gpt2`.
    pub tokens: Vec<String>,
    /// Every token's type; empty where absent.
    pub types: Vec<TokenType>,
    /// Every token's score, of SentencePiece's vocabularies: the best pair is merged first; empty where
    /// absent.
    pub scores: Vec<f32>,
    /// Merge rules, "left right", best first.
    pub merges: Vec<String>,
    /// Beginning of text.
    pub bos: Option<u32>,
    /// End of text (for chat models, usually end of turn).
    pub eos: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Unknown.
    pub unknown: Option<u32>,
    /// Whether `bos` is put before every text.
    pub add_bos: bool,
    /// Whether a space is put before every text.
    pub add_space_prefix: bool,
}

/// The names of Llama 3's pre-tokenizer in GGUF files. Texts cut by it begin with a token unless a file says
/// otherwise.
pub const LLAMA3_PRE_TOKENIZERS: [&str; 9] = [
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
];

/// The type of a token in a GGUF vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    /// A piece of text.
    Normal,
    /// Stands for what cannot be encoded.
    Unknown,
    /// Has a meaning but no text.
    Control,
    /// Text that is matched before the algorithm runs.
    UserDefined,
    /// Never used.
    Unused,
    /// A single byte.
    Byte,
}

/// The special tokens that chat templates know by name (`bos_token`, …), as text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpecialTokens {
    /// Beginning of text.
    pub bos: Option<String>,
    /// End of text or turn.
    pub eos: Option<String>,
    /// Padding.
    pub pad: Option<String>,
    /// Unknown.
    pub unknown: Option<String>,
    /// Further tokens by their whole names: `cls_token`, `sep_token`, `mask_token` and a model's own, such as
    /// `image_token`.
    pub others: BTreeMap<String, String>,
}

/// The names of the tokens that have fields of their own.
const NAMED: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

impl SpecialTokens {
    /// Reads a `tokenizer_config.json`, where a token is a text or an object with its text as `content`. As
    /// in transformers, every key that ends in `_token` names one, and so does every key of
    /// `extra_special_tokens`.
    pub(crate) fn from_hf(settings: &Map<String, Value>) -> Self {
        let content = |value: &Value| value.get("content").unwrap_or(value).as_str().map(str::to_string);
        let text = |key: &str| settings.get(key).and_then(content);
        let own = ["extra_special_tokens", "model_specific_special_tokens"];
        let own = own.iter().filter_map(|key| settings.get(*key)?.as_object()).flatten();
        let others = settings.iter().filter(|(key, _)| key.ends_with("_token")).chain(own);
        let others = others.filter(|(key, _)| !NAMED.contains(&key.as_str()));
        Self {
            bos: text("bos_token"),
            eos: text("eos_token"),
            pad: text("pad_token"),
            unknown: text("unk_token"),
            others: others.filter_map(|(key, value)| Some((key.clone(), content(value)?))).collect(),
        }
    }

    /// Names, as templates and `tokenizer_config.json` spell them, and texts.
    pub fn by_name(&self) -> impl Iterator<Item = (&str, &str)> {
        let named = NAMED.into_iter().zip([&self.bos, &self.eos, &self.pad, &self.unknown]);
        let named = named.filter_map(|(name, text)| Some((name, text.as_deref()?)));
        named.chain(self.others.iter().map(|(name, text)| (name.as_str(), text.as_str())))
    }
}

/// A token that a `tokenizer.json` matches before all others.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AddedToken {
    /// The id that the file gives it.
    pub id: u32,
    /// The text that it is matched by.
    pub content: String,
    /// Whether it is left out of decoded text.
    #[serde(default)]
    pub special: bool,
}

/// The `added_tokens` of a `tokenizer.json`.
///
/// # Errors
/// Where the file is not JSON, or a token has no id or no text.
pub fn added_tokens(tokenizer: &[u8]) -> Result<Vec<AddedToken>, serde_json::Error> {
    #[derive(Deserialize)]
    struct File {
        #[serde(default)]
        added_tokens: Vec<AddedToken>,
    }
    serde_json::from_slice::<File>(tokenizer).map(|file| file.added_tokens)
}

/// Refuses tokens that the settings, `tokenizer_config.json` at `path`, add to those of a `tokenizer.json`:
/// transformers adds them as it loads both, so that their text becomes other ids than here.
///
/// # Errors
/// Names the token.
pub(crate) fn check_added(
    path: &Path,
    settings: &Map<String, Value>,
    tokenizer: &[u8],
) -> Result<(), ModelError> {
    let Some(decoder) = settings.get("added_tokens_decoder").and_then(Value::as_object) else {
        return Ok(());
    };
    // One that does not parse is told of when it is used.
    let Ok(added_tokens) = added_tokens(tokenizer) else { return Ok(()) };
    for (id, token) in decoder {
        let Some(content) = token.get("content").and_then(Value::as_str) else { continue };
        let found = added_tokens.iter().find(|added| added.content == content);
        let instead = match found {
            Some(added) if added.id.to_string() == *id => continue,
            Some(added) => format!("tokenizer.json has it as {}", added.id),
            None => "tokenizer.json does not add it".into(),
        };
        return Err(ModelError::unsupported(
            path,
            format!("it adds the token {content:?} with the id {id}, but {instead}"),
            "load the tokenizer with transformers and save it again (save_pretrained), which puts the two in step",
        ));
    }
    Ok(())
}

/// Puts the flags of added tokens in step with the settings, as transformers does: there, those of
/// `added_tokens_decoder` replace those of `tokenizer.json`, and a token with a name, such as `eos_token`, is
/// special.
pub(crate) fn settle_flags(settings: &Map<String, Value>, tokenizer: &mut Vec<u8>) {
    const FLAGS: [&str; 5] = ["special", "lstrip", "rstrip", "normalized", "single_word"];
    #[derive(Deserialize)]
    struct File {
        added_tokens: Vec<Map<String, Value>>,
    }
    let Ok(File { added_tokens }) = serde_json::from_slice(tokenizer) else { return };
    let names = SpecialTokens::from_hf(settings);
    let settled: Vec<Map<String, Value>> = added_tokens
        .iter()
        .cloned()
        .map(|mut token| {
            let id = token.get("id").map(Value::to_string).unwrap_or_default();
            let given = settings.get("added_tokens_decoder").and_then(|decoder| decoder.get(id)?.as_object());
            let flags = given
                .into_iter()
                .flatten()
                .filter(|(flag, value)| FLAGS.contains(&flag.as_str()) && value.is_boolean());
            token.extend(flags.map(|(flag, value)| (flag.clone(), value.clone())));
            let content = token.get("content").and_then(Value::as_str).unwrap_or_default();
            if names.by_name().any(|(_, text)| text == content) {
                token.insert("special".into(), true.into());
            }
            token
        })
        .collect();
    if settled == added_tokens {
        return;
    }
    if let Ok(mut file) = serde_json::from_slice::<Map<String, Value>>(tokenizer) {
        file.insert("added_tokens".into(), settled.into_iter().map(Value::Object).collect());
        *tokenizer = Value::Object(file).to_string().into_bytes();
    }
}

/// Refuses settings under which transformers puts a space before every text and `tokenizer.json` does not, or
/// the other way round. Classes that build their own pre-tokenizer read `add_prefix_space` from the settings
/// alone, false by default; the general ones do not read it there at all.
///
/// # Errors
/// Names the class.
pub(crate) fn check_prefix_space(
    path: &Path,
    settings: &Map<String, Value>,
    tokenizer: &[u8],
) -> Result<(), ModelError> {
    #[derive(Deserialize)]
    struct File {
        pre_tokenizer: Value,
    }
    let class = settings.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default();
    if !["GPT2Tokenizer", "Qwen2Tokenizer"].contains(&class.trim_end_matches("Fast")) {
        return Ok(());
    }
    let Ok(File { pre_tokenizer }) = serde_json::from_slice(tokenizer) else { return Ok(()) };
    let steps = pre_tokenizer.get("pretokenizers").and_then(Value::as_array);
    let steps = steps.map_or(std::slice::from_ref(&pre_tokenizer), Vec::as_slice);
    let is_set = |value: &Value| value.get("add_prefix_space").and_then(Value::as_bool) == Some(true);
    let own = steps.iter().any(is_set);
    let given = settings.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(false);
    if own == given {
        return Ok(());
    }
    Err(ModelError::unsupported(
        path,
        format!("transformers reads add_prefix_space as {given} for {class}, but tokenizer.json has {own}"),
        "set add_prefix_space in both files to the value that the model was trained with",
    ))
}

/// Writes the `tokenizer_config.json` that goes with a `tokenizer.json`, so that `transformers` finds the
/// special tokens and the chat template. The file is flushed to the disk.
///
/// # Errors
/// When it cannot be written: which file, why.
pub fn write_tokenizer_config(
    path: &Path,
    special: &SpecialTokens,
    chat_template: Option<&str>,
    context: usize,
) -> Result<(), ModelError> {
    let mut settings = Map::new();
    settings.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    settings.insert("clean_up_tokenization_spaces".into(), false.into());
    settings.insert("model_max_length".into(), context.into());
    for (key, text) in special.by_name().chain(chat_template.map(|template| ("chat_template", template))) {
        settings.insert(key.into(), text.into());
    }
    write_json(path, &Value::Object(settings))
}

/// Writes a JSON file, indented, flushed to the disk. Not atomic; a file that could not be completed is
/// removed.
///
/// # Errors
/// When it cannot be written: which file, why.
pub fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    let text = format!("{value:#}\n");
    crate::safetensors::write_whole(path, text.len() as u64, |out| out.write_all(text.as_bytes()))
}
