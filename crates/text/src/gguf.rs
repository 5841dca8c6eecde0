//! Converts the GGUF metadata of a byte-level BPE tokenizer to an equivalent `tokenizer.json`.
//!
//! GGUF files name the pre-tokenizer instead of defining it. Each supported name is therefore
//! defined here as its Hugging Face counterpart, including the normalizer; many names are synonyms.
//! Unknown names are rejected, because a wrong split changes tokens silently.

use std::collections::HashMap;

use levade_model::{GgufTokenizer, LLAMA3_PRE_TOKENIZERS, TokenType};
use serde_json::{Map, Value, json};

use crate::TextError;

/// A pre-tokenizer: the normalization and splitting of a text before merge rules apply.
struct PreTokenizer {
    normalizer: Value,
    steps: Vec<Value>,
    /// Whether a piece of text that is a complete token is used without applying merge rules.
    ignore_merges: bool,
}

/// Converts the tokenizer of a GGUF file to a `tokenizer.json`.
///
/// # Errors
/// Returns an error if the algorithm or the pre-tokenizer is unknown, or if the lists are
/// inconsistent.
pub(crate) fn tokenizer_json(source: &GgufTokenizer) -> Result<Value, TextError> {
    if source.model != "gpt2" {
        return Err(TextError::Tokenizer(format!(
            "the GGUF file's tokenizer model is {:?}, but only \"gpt2\" (byte-level BPE) and \
             \"llama\" (SentencePiece BPE) are supported; use the model's directory with a \
             tokenizer.json",
            source.model
        )));
    }
    if !source.types.is_empty() && source.types.len() != source.tokens.len() {
        return Err(TextError::Tokenizer(format!(
            "the GGUF file has {} tokens but {} token types; is it damaged?",
            source.tokens.len(),
            source.types.len()
        )));
    }
    let pre = make_pre_tokenizer(source)?;
    let vocab = parse_vocabulary(source)?;
    let added = added_tokens(source)?;
    let merges = derive_merges(source, &vocab, &added)?;
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": pre.normalizer,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": pre.steps },
        "post_processor": post_processor(source)?,
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": merges,
        },
    }))
}

fn make_pre_tokenizer(source: &GgufTokenizer) -> Result<PreTokenizer, TextError> {
    let Some(method) = SplitMethod::from_name(&source.pre) else {
        let names = SPLIT_METHODS.iter().flat_map(|(_, names)| *names).copied();
        let known: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
        return Err(TextError::Tokenizer(format!(
            "the GGUF file's pre-tokenizer is {:?}, but only {} are supported; use the model's \
             directory with a tokenizer.json",
            source.pre,
            known.join(", ")
        )));
    };
    Ok(match method {
        SplitMethod::Gpt2 => without_normalizer(vec![make_byte_level_step(source, true)], false),
        SplitMethod::Digits => without_normalizer(
            vec![
                json!({ "type": "Digits", "individual_digits": true }),
                make_byte_level_step(source, true),
            ],
            false,
        ),
        SplitMethod::Unnamed => without_normalizer(
            vec![
                make_split_step(r"[\p{P}\$\+<=>\^~\|]+"),
                make_split_step(GPT2_PATTERN),
                make_split_step(r"\p{N}+"),
                make_split_step("[0-9][0-9][0-9]"),
                make_byte_level_step(source, false),
            ],
            false,
        ),
        SplitMethod::Llama3 => without_normalizer(
            vec![split_words(r"\p{N}{1,3}"), make_byte_level_step(source, false)],
            true,
        ),
        SplitMethod::Llama3Merging => without_normalizer(
            vec![split_words(r"\p{N}{1,3}"), make_byte_level_step(source, false)],
            false,
        ),
        SplitMethod::Qwen2 => PreTokenizer {
            normalizer: json!({ "type": "NFC" }),
            ..without_normalizer(
                vec![split_words(r"\p{N}"), make_byte_level_step(source, false)],
                false,
            )
        },
        SplitMethod::Qwen2Uncomposed => without_normalizer(
            vec![split_words(r"\p{N}"), make_byte_level_step(source, false)],
            false,
        ),
    })
}

fn make_byte_level_step(source: &GgufTokenizer, use_regex: bool) -> Value {
    json!({
        "type": "ByteLevel",
        "add_prefix_space": source.add_space_prefix,
        "trim_offsets": true,
        "use_regex": use_regex,
    })
}

/// Returns the pre-tokenizer step of Llama 3 and Qwen2, which differ only in the number of digits
/// that stay together.
fn split_words(digits: &str) -> Value {
    let pattern = format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
}

fn make_split_step(pattern: &str) -> Value {
    json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false })
}

fn without_normalizer(steps: Vec<Value>, ignore_merges: bool) -> PreTokenizer {
    PreTokenizer { normalizer: Value::Null, steps, ignore_merges }
}

/// GPT-2's pattern for splitting a text into words, which `ByteLevel` has built in.
const GPT2_PATTERN: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Method by which a text is split into pieces before merge rules apply. GGUF files name a method
/// after the first model that used it, or after the model itself.
#[derive(Clone, Copy)]
enum SplitMethod {
    /// Splits a text into GPT-2's words.
    Gpt2,
    /// Splits off single digits, then splits the remaining text into GPT-2's words.
    Digits,
    /// Splits off punctuation, GPT-2's words, and groups of three digits. For files that do not
    /// name a method.
    Unnamed,
    /// Splits a text into Llama 3's words. A piece that is a token is used without merging.
    Llama3,
    /// Splits a text into Llama 3's words, whose characters are always merged by the merge rules.
    Llama3Merging,
    /// Splits off single digits, and otherwise splits into Llama 3's words, after NFC
    /// normalization.
    Qwen2,
    /// Splits a text like [`Qwen2`](Self::Qwen2), without normalization.
    Qwen2Uncomposed,
}

/// Names of each splitting method in llama.cpp (`llama-vocab.cpp`).
const SPLIT_METHODS: [(SplitMethod, &[&str]); 7] = [
    (
        SplitMethod::Gpt2,
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "exaone4",
            "trillion",
            "granite-docling",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "roberta-bpe",
        ],
    ),
    (
        SplitMethod::Digits,
        &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
    ),
    (SplitMethod::Unnamed, &["default", ""]),
    (SplitMethod::Llama3, &LLAMA3_PRE_TOKENIZERS),
    (SplitMethod::Llama3Merging, &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"]),
    (SplitMethod::Qwen2, &["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2"]),
    (SplitMethod::Qwen2Uncomposed, &["stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"]),
];

impl SplitMethod {
    fn from_name(name: &str) -> Option<Self> {
        SPLIT_METHODS.iter().find(|(_, names)| names.contains(&name)).map(|(method, _)| *method)
    }
}

pub(crate) fn parse_vocabulary(source: &GgufTokenizer) -> Result<Map<String, Value>, TextError> {
    let mut vocab = Map::new();
    for (id, token) in source.tokens.iter().enumerate() {
        if let Some(first) = vocab.insert(token.clone(), json!(id)) {
            return Err(TextError::Tokenizer(format!(
                "the GGUF file lists the token {token:?} twice, as {first} and as {id}; is it \
                 damaged?"
            )));
        }
    }
    Ok(vocab)
}

/// Returns the added tokens of a GGUF tokenizer, which are matched before the merge algorithm runs.
/// They stay in the vocabulary of the model, which determines their ids.
pub(crate) fn added_tokens(source: &GgufTokenizer) -> Result<Vec<Value>, TextError> {
    let mut kinds: HashMap<usize, bool> = HashMap::new();
    for (id, kind) in source.types.iter().enumerate() {
        match kind {
            TokenType::Normal | TokenType::Byte => {}
            TokenType::UserDefined => {
                kinds.insert(id, false);
            }
            TokenType::Control | TokenType::Unknown | TokenType::Unused => {
                kinds.insert(id, true);
            }
        }
    }
    for (name, id) in [("bos", source.bos), ("eos", source.eos)] {
        let Some(id) = id else { continue };
        token_text(source, name, id)?;
        kinds.insert(id as usize, true);
    }
    let mut ids: Vec<(usize, bool)> = kinds.into_iter().collect();
    ids.sort_unstable();
    Ok(ids
        .into_iter()
        .filter(|&(id, _)| !source.tokens[id].is_empty())
        .map(|(id, special)| {
            json!({
                "id": id,
                "content": source.tokens[id],
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": special,
            })
        })
        .collect())
}

fn token_text<'a>(source: &'a GgufTokenizer, name: &str, id: u32) -> Result<&'a str, TextError> {
    source.tokens.get(id as usize).map(String::as_str).ok_or_else(|| {
        TextError::Tokenizer(format!(
            "the GGUF file's {name} token is {id}, but there are only {} tokens; is it damaged?",
            source.tokens.len()
        ))
    })
}

fn derive_merges(
    source: &GgufTokenizer,
    vocab: &Map<String, Value>,
    added: &[Value],
) -> Result<Vec<Value>, TextError> {
    // Single bytes and added tokens need no merge rules. Any other token could not be produced
    // without them.
    if source.merges.is_empty() && vocab.len() > 256 + added.len() {
        return Err(TextError::Tokenizer(format!(
            "the GGUF file has {} tokens but no merge rules; is it damaged?",
            vocab.len()
        )));
    }
    source
        .merges
        .iter()
        .enumerate()
        .map(|(rank, rule)| {
            let parts = rule.split_once(' ').filter(|(left, right)| {
                vocab.contains_key(*left)
                    && vocab.contains_key(*right)
                    && vocab.contains_key(&format!("{left}{right}"))
            });
            match parts {
                Some((left, right)) => Ok(json!([left, right])),
                None => Err(TextError::Tokenizer(format!(
                    "merge rule {rank} of the GGUF file, {rule:?}, does not merge two tokens into \
                     a third; is the file damaged?"
                ))),
            }
        })
        .collect()
}

/// Returns a post-processor that inserts the start-of-text token before every text, for programs
/// that read the `tokenizer.json` later.
pub(crate) fn post_processor(source: &GgufTokenizer) -> Result<Value, TextError> {
    let Some(bos) = source.bos.filter(|_| source.add_bos) else { return Ok(Value::Null) };
    let text = token_text(source, "bos", bos)?;
    let token = json!({ "SpecialToken": { "id": text, "type_id": 0 } });
    let mut special = Map::new();
    special.insert(text.to_string(), json!({ "id": text, "ids": [bos], "tokens": [text] }));
    Ok(json!({
        "type": "TemplateProcessing",
        "single": [token, make_sequence_item("A", 0)],
        "pair": [token, make_sequence_item("A", 0), { "SpecialToken": { "id": text, "type_id": 1 } }, make_sequence_item("B", 1)],
        "special_tokens": special,
    }))
}

fn make_sequence_item(name: &str, type_id: u32) -> Value {
    json!({ "Sequence": { "id": name, "type_id": type_id } })
}
