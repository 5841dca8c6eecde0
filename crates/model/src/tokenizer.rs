//! Tokenizer data and special tokens from model files. `levade-text` builds the working tokenizer
//! from them.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::ModelError;

/// Stored tokenizer of a model, in one of two formats.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenizerSource {
    /// Bytes of a Hugging Face `tokenizer.json`.
    Json(Vec<u8>),
    /// Tokenizer metadata of a GGUF file.
    Gguf(GgufTokenizer),
}

/// Tokenizer metadata of a GGUF file, from the keys `tokenizer.ggml.*`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GgufTokenizer {
    /// Tokenizer algorithm (key `model`): `gpt2` is byte-level BPE, `llama` is SentencePiece's BPE.
    pub model: String,
    /// Name of the pre-tokenizer (key `pre`), such as `smollm`, `qwen2` or `llama-bpe`. Empty if
    /// the file does not name a pre-tokenizer.
    pub pre: String,
    /// Text of each token, by id. For `gpt2`, the text uses the byte-level alphabet.
    pub tokens: Vec<String>,
    /// Type of each token, by id. Empty if the file has no token types.
    pub types: Vec<TokenType>,
    /// Score of each token in a SentencePiece vocabulary, by id: the pair with the best score is
    /// merged first. Empty if the file has no scores.
    pub scores: Vec<f32>,
    /// Merge rules of BPE, each of the form "left right", from the highest priority to the lowest.
    pub merges: Vec<String>,
    /// Id of the token at the start of a text; `None` if the file names no such token.
    pub bos: Option<u32>,
    /// Id of the token at the end of a text, which usually ends a turn in chat models. `None` if
    /// the file names no such token.
    pub eos: Option<u32>,
    /// Id of the padding token; `None` if the file names no such token.
    pub pad: Option<u32>,
    /// Id of the token for text that cannot be encoded; `None` if the file names no such token.
    pub unknown: Option<u32>,
    /// Whether the tokenizer prepends `bos` to every text.
    pub add_bos: bool,
    /// Whether the tokenizer prepends a space to every text.
    pub add_space_prefix: bool,
}

/// Names of Llama 3's pre-tokenizer in GGUF files. With this pre-tokenizer, every text starts with
/// the `bos` token unless the file sets `add_bos_token` to false.
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

/// Type of a token in a GGUF vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    /// A token of plain text.
    Normal,
    /// The token for text that cannot be encoded.
    Unknown,
    /// A control token, which has a meaning but no text.
    Control,
    /// A token whose text is matched before the tokenizer algorithm runs.
    UserDefined,
    /// A token that is never used.
    Unused,
    /// A token for a single byte.
    Byte,
}

/// Texts of the special tokens that chat templates refer to by name (`bos_token`, …).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpecialTokens {
    /// Text of the token at the start of a text; `None` if the model has no such token.
    pub bos: Option<String>,
    /// Text of the token at the end of a text or turn; `None` if the model has no such token.
    pub eos: Option<String>,
    /// Text of the padding token; `None` if the model has no such token.
    pub pad: Option<String>,
    /// Text of the token for text that cannot be encoded; `None` if the model has no such token.
    pub unknown: Option<String>,
    /// Texts of other special tokens by full name: `cls_token`, `sep_token`, `mask_token`, and
    /// tokens that a model defines, such as `image_token`.
    pub other_tokens: BTreeMap<String, String>,
}

/// Names of the tokens that have separate fields in [`SpecialTokens`].
const NAMED: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

impl SpecialTokens {
    /// Reads the special tokens from the contents of a `tokenizer_config.json`.
    ///
    /// A token is a string, or an object whose `content` is the text. As in transformers, every key
    /// that ends in `_token` names a token, and so does every key of `extra_special_tokens` and
    /// `model_specific_special_tokens`.
    pub(crate) fn from_hf(settings: &Map<String, Value>) -> Self {
        let text = |key: &str| settings.get(key).and_then(token_content);
        let own = ["extra_special_tokens", "model_specific_special_tokens"];
        let own = own.iter().filter_map(|key| settings.get(*key)?.as_object()).flatten();
        let other_tokens = settings.iter().filter(|(key, _)| key.ends_with("_token")).chain(own);
        let other_tokens = other_tokens.filter(|(key, _)| !NAMED.contains(&key.as_str()));
        Self {
            bos: text("bos_token"),
            eos: text("eos_token"),
            pad: text("pad_token"),
            unknown: text("unk_token"),
            other_tokens: other_tokens
                .filter_map(|(key, value)| Some((key.clone(), token_content(value)?)))
                .collect(),
        }
    }

    /// Returns the name and the text of each special token. Names are as in chat templates and
    /// `tokenizer_config.json`, such as `bos_token`.
    pub fn by_name(&self) -> impl Iterator<Item = (&str, &str)> {
        let named = NAMED.into_iter().zip([&self.bos, &self.eos, &self.pad, &self.unknown]);
        let named = named.filter_map(|(name, text)| Some((name, text.as_deref()?)));
        named.chain(self.other_tokens.iter().map(|(name, text)| (name.as_str(), text.as_str())))
    }
}

fn token_content(value: &Value) -> Option<String> {
    value.get("content").unwrap_or(value).as_str().map(str::to_string)
}

/// Added token of a `tokenizer.json`, which is matched before all other tokens.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AddedToken {
    /// Id of the token in the file.
    pub id: u32,
    /// Text that the token matches.
    pub content: String,
    /// Whether decoded text omits the token; false by default.
    #[serde(default)]
    pub special: bool,
}

/// Parses the `added_tokens` of a `tokenizer.json`. The list is empty if the file has none.
///
/// # Errors
/// Returns an error if the file is not JSON, or if a token has no id or no text.
pub fn added_tokens(tokenizer: &[u8]) -> Result<Vec<AddedToken>, serde_json::Error> {
    #[derive(Deserialize)]
    struct TokenizerFile {
        #[serde(default)]
        added_tokens: Vec<AddedToken>,
    }
    serde_json::from_slice::<TokenizerFile>(tokenizer).map(|file| file.added_tokens)
}

/// Checks that `tokenizer.json` contains every token that the settings add, with the same id. The
/// settings are the `tokenizer_config.json` at `path`. transformers adds these tokens when it loads
/// both files, so their text would get different ids there than in Levade.
///
/// # Errors
/// Returns [`ModelError::Unsupported`] with the token if `tokenizer.json` does not add the token,
/// or has it under a different id.
pub(crate) fn check_added(
    path: &Path,
    settings: &Map<String, Value>,
    tokenizer: &[u8],
) -> Result<(), ModelError> {
    let Some(decoder) = settings.get("added_tokens_decoder").and_then(Value::as_object) else {
        return Ok(());
    };
    // A `tokenizer.json` that does not parse is reported when it is used.
    let Ok(added_tokens) = added_tokens(tokenizer) else { return Ok(()) };
    for (id, token) in decoder {
        let Some(content) = token.get("content").and_then(Value::as_str) else { continue };
        let found = added_tokens.iter().find(|added| added.content == content);
        let instead = match found {
            Some(added) if added.id.to_string() == *id => continue,
            Some(added) => format!("tokenizer.json gives it the id {}", added.id),
            None => "tokenizer.json does not contain it".into(),
        };
        return Err(ModelError::unsupported(
            path,
            format!("the file adds the token {content:?} with the id {id}, but {instead}"),
            "load the tokenizer with transformers and save it again (save_pretrained), which makes \
             both files consistent",
        ));
    }
    Ok(())
}

/// Applies the settings' flags to the added tokens of `tokenizer`, as transformers does. The flags
/// in `added_tokens_decoder` replace those in `tokenizer.json`, and a named token, such as
/// `eos_token`, is special.
pub(crate) fn apply_flags(settings: &Map<String, Value>, tokenizer: &mut Vec<u8>) {
    const FLAGS: [&str; 5] = ["special", "lstrip", "rstrip", "normalized", "single_word"];
    #[derive(Deserialize)]
    struct TokenizerFile {
        added_tokens: Vec<Map<String, Value>>,
    }
    let Ok(TokenizerFile { added_tokens }) = serde_json::from_slice(tokenizer) else { return };
    let names = SpecialTokens::from_hf(settings);
    let updated: Vec<Map<String, Value>> = added_tokens
        .iter()
        .cloned()
        .map(|mut token| {
            let id = token.get("id").map(Value::to_string).unwrap_or_default();
            let given = settings
                .get("added_tokens_decoder")
                .and_then(|decoder| decoder.get(id)?.as_object());
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
    if updated == added_tokens {
        return;
    }
    if let Ok(mut file) = serde_json::from_slice::<Map<String, Value>>(tokenizer) {
        file.insert("added_tokens".into(), updated.into_iter().map(Value::Object).collect());
        *tokenizer = Value::Object(file).to_string().into_bytes();
    }
}

/// Returns an error if `add_prefix_space` in the settings contradicts `tokenizer.json`. With such
/// settings, transformers prepends a space to every text although `tokenizer.json` does not, or the
/// reverse. Tokenizer classes that build their own pre-tokenizer read `add_prefix_space` only from
/// the settings, with the default false. General classes do not read it from the settings.
///
/// # Errors
/// Returns [`ModelError::Unsupported`] with the class if the two values differ.
pub(crate) fn check_prefix_space(
    path: &Path,
    settings: &Map<String, Value>,
    tokenizer: &[u8],
) -> Result<(), ModelError> {
    #[derive(Deserialize)]
    struct TokenizerFile {
        pre_tokenizer: Value,
    }
    let class = settings.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default();
    if !["GPT2Tokenizer", "Qwen2Tokenizer"].contains(&class.trim_end_matches("Fast")) {
        return Ok(());
    }
    let Ok(TokenizerFile { pre_tokenizer }) = serde_json::from_slice(tokenizer) else {
        return Ok(());
    };
    let steps = pre_tokenizer.get("pretokenizers").and_then(Value::as_array);
    let steps = steps.map_or(std::slice::from_ref(&pre_tokenizer), Vec::as_slice);
    let own = steps
        .iter()
        .any(|value| value.get("add_prefix_space").and_then(Value::as_bool) == Some(true));
    let given = settings.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(false);
    if own == given {
        return Ok(());
    }
    Err(ModelError::unsupported(
        path,
        format!(
            "transformers reads add_prefix_space as {given} for {class}, but tokenizer.json has \
             {own}"
        ),
        "set add_prefix_space in both files to the value that the model was trained with",
    ))
}

/// Writes the `tokenizer_config.json` for a `tokenizer.json`, so that `transformers` finds the
/// special tokens and the chat template. `context` is the model's context length in tokens. The
/// file is flushed to the disk.
///
/// # Errors
/// Returns an error with the path and the cause if the file cannot be written.
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
    for (key, text) in
        special.by_name().chain(chat_template.map(|template| ("chat_template", template)))
    {
        settings.insert(key.into(), text.into());
    }
    write_json(path, &Value::Object(settings))
}

/// Writes an indented JSON file and flushes it to the disk. The write is not atomic. If it fails,
/// the incomplete file is removed.
///
/// # Errors
/// Returns an error with the path and the cause if the file cannot be written.
pub fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    let text = format!("{value:#}\n");
    crate::safetensors::write_synced(path, text.len() as u64, |out| out.write_all(text.as_bytes()))
}
