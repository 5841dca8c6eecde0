//! SentencePiece BPE (Kudo & Richardson 2018) with byte fallback, as in Gemma.
//!
//! Distinguishes it from byte-level BPE in a `tokenizer.json`, and converts GGUF metadata to an
//! equivalent `tokenizer.json`. Spaces are written as `▁`. Vocabularies that insert a space before
//! every text (Llama 2) are rejected: a text in several parts would get a space before each part.

use std::collections::HashMap;

use levade_model::{GgufTokenizer, TokenType};
use serde_json::{Value, json};

use crate::TextError;
use crate::gguf::{added_tokens, parse_vocabulary, post_processor};

/// The character that represents a space in SentencePiece vocabularies.
const SPACE: char = '▁';

/// Returns the bytes of a SentencePiece token: one byte for `<0x0A>`, and spaces for `▁`.
pub(crate) fn token_to_bytes(token: &str) -> Vec<u8> {
    match parse_byte_token(token) {
        Some(byte) => vec![byte],
        None => token.replace(SPACE, " ").into_bytes(),
    }
}

/// Returns the byte that a token of the form `<0x0A>` stands for, or `None` for any other token.
fn parse_byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().filter(|byte| format!("{byte:02X}") == digits)
}

/// Checks that a `tokenizer.json` with byte fallback is of a supported kind.
///
/// # Errors
/// Returns an error that names the unsupported part.
pub(crate) fn check_supported(file: &Value) -> Result<(), TextError> {
    let space = SPACE.to_string();
    let normalizers = pipeline_steps(file, "normalizer", "normalizers");
    if !matches!(&normalizers[..], [one] if is_replacement(one, " ", &space)) {
        let kinds: Vec<String> = normalizers.iter().map(step_type).collect();
        return unsupported_error(format!(
            "does not only replace spaces with {SPACE} (its normalizers are {kinds:?})"
        ));
    }
    for step in pipeline_steps(file, "pre_tokenizer", "pretokenizers") {
        // No spaces are left to split at.
        if step_type(&step) != "Split" || step["pattern"]["String"] != " " {
            return unsupported_error(format!("has the pre-tokenizer {:?}", step_type(&step)));
        }
    }
    let decoders = pipeline_steps(file, "decoder", "decoders");
    let kinds: Vec<String> = decoders.iter().map(step_type).collect();
    if kinds != ["Replace", "ByteFallback", "Fuse"] || !is_replacement(&decoders[0], &space, " ") {
        return unsupported_error(format!("has the decoders {kinds:?}"));
    }
    let vocabulary = &file["model"]["vocab"];
    match (0..=255u8).find(|byte| vocabulary.get(format!("<0x{byte:02X}>")).is_none()) {
        Some(byte) => unsupported_error(format!(
            "has no token for the byte {byte}, so some texts cannot be encoded"
        )),
        None => Ok(()),
    }
}

fn pipeline_steps(file: &Value, key: &str, list: &str) -> Vec<Value> {
    match file.get(key) {
        None | Some(Value::Null) => Vec::new(),
        Some(one) => {
            one.get(list).and_then(Value::as_array).cloned().unwrap_or_else(|| vec![one.clone()])
        }
    }
}

fn unsupported_error(what: String) -> Result<(), TextError> {
    Err(TextError::Tokenizer(format!(
        "tokenizer.json {what}; only byte-level BPE and SentencePiece BPE as in Gemma are \
             supported"
    )))
}

fn step_type(step: &Value) -> String {
    step.get("type").and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn is_replacement(step: &Value, from: &str, to: &str) -> bool {
    step_type(step) == "Replace" && step["pattern"]["String"] == from && step["content"] == to
}

/// Converts a GGUF tokenizer of the model `llama` to a `tokenizer.json`.
///
/// # Errors
/// Returns an error if the tokenizer inserts a space before every text, or if the lists are
/// inconsistent.
pub(crate) fn tokenizer_json(source: &GgufTokenizer) -> Result<Value, TextError> {
    if source.add_space_prefix {
        return Err(TextError::Tokenizer(
            "the GGUF file's tokenizer prepends a space to every text \
             (tokenizer.ggml.add_space_prefix), as in Llama 2 and the first Mistral; Levade \
             supports SentencePiece vocabularies without this space only, such as that of Gemma"
                .into(),
        ));
    }
    let tokens = source.tokens.len();
    let scores = source.scores.len();
    let types = source.types.len();
    if scores != tokens || types != tokens {
        return Err(TextError::Tokenizer(format!(
            "the GGUF file has {tokens} tokens, {scores} scores and {types} token types; is it \
             damaged?"
        )));
    }
    let vocab = parse_vocabulary(source)?;
    let unknown = source.unknown.and_then(|id| source.tokens.get(id as usize));
    let space = SPACE.to_string();
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens(source)?,
        "normalizer": replace_step(" ", &space),
        "pre_tokenizer": null,
        "post_processor": post_processor(source)?,
        "decoder": {
            "type": "Sequence",
            "decoders": [replace_step(&space, " "), { "type": "ByteFallback" }, { "type": "Fuse" }],
        },
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": unknown,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": true,
            "byte_fallback": true,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": derive_merges(source),
        },
    }))
}

fn replace_step(from: &str, to: &str) -> Value {
    json!({ "type": "Replace", "pattern": { "String": from }, "content": to })
}

/// Derives merge rules from the scores of tokens. Pairs that form the token with the best score
/// come first. Pairs that form the same token are in transformers' order: the longest left part
/// first.
fn derive_merges(source: &GgufTokenizer) -> Vec<Value> {
    let plain = |id: &usize| source.types[*id] == TokenType::Normal;
    let ids: HashMap<&str, usize> =
        (0..source.tokens.len()).filter(plain).map(|id| (source.tokens[id].as_str(), id)).collect();
    let mut best: Vec<usize> = (0..source.tokens.len()).filter(plain).collect();
    best.sort_by(|a, b| source.scores[*b].total_cmp(&source.scores[*a]));
    best.into_iter()
        .flat_map(|id: usize| {
            let token = source.tokens[id].as_str();
            let ends = token
                .char_indices()
                .skip(1)
                .map(|(at, _)| at)
                .collect::<Vec<_>>()
                .into_iter()
                .rev();
            ends.map(move |at| token.split_at(at))
        })
        .filter(|(left, right)| ids.contains_key(left) && ids.contains_key(right))
        .map(|(left, right)| json!([left, right]))
        .collect()
}

#[cfg(test)]
mod tests {
    use levade_model::TokenizerSource;
    use levade_policy::TokenBytes;

    use super::*;
    use crate::Tokenizer;

    /// Returns bytes, letters, and some words with one score each. Runs of spaces are added tokens.
    fn make_source() -> GgufTokenizer {
        let mut source = GgufTokenizer {
            model: "llama".into(),
            pre: "default".into(),
            bos: Some(1),
            eos: Some(0),
            unknown: Some(2),
            add_bos: true,
            ..GgufTokenizer::default()
        };
        let mut add = |token: &str, kind, score| {
            source.tokens.push(token.into());
            source.types.push(kind);
            source.scores.push(score);
        };
        ["<eos>", "<bos>", "<unk>", "<start_of_turn>"]
            .iter()
            .for_each(|token| add(token, TokenType::Control, -1000.0));
        ["  ", "   ", "\n"].iter().for_each(|token| add(token, TokenType::UserDefined, -1000.0));
        (0..=255u8).for_each(|byte| add(&format!("<0x{byte:02X}>"), TokenType::Byte, 0.0));
        for (rank, token) in
            ["▁t", "he", "▁the", "the", "▁", "t", "h", "e", "é", "x"].iter().enumerate()
        {
            add(token, TokenType::Normal, -(rank as f32));
        }
        source
    }

    fn pieces(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
        tokenizer.encode(text).iter().map(|&id| tokenizer.token_text(id)).collect()
    }

    #[test]
    fn sentencepiece_merges_by_score_with_byte_fallback() {
        let tokenizer = Tokenizer::new(&TokenizerSource::Gguf(make_source())).unwrap();
        assert_eq!(pieces(&tokenizer, "the the"), ["the", " the"], "no space comes before a text");
        assert_eq!(
            pieces(&tokenizer, "x  the\n"),
            ["x", "  ", "the", "\n"],
            "what is matched first is apart"
        );
        let ids = tokenizer.encode("ö<bos>");
        assert_eq!(tokenizer.token_bytes(ids[0]), Some(&[0xC3][..]));
        assert_eq!(tokenizer.decode(&ids), "ö<bos>");
        assert!(!ids.contains(&1), "a special token in a text is its characters");
        assert_eq!(
            tokenizer.encode_template("<start_of_turn>the"),
            [3, tokenizer.encode("the")[0]]
        );
        assert_eq!(tokenizer.encode_document("x"), [1, tokenizer.encode("x")[0]]);
        let text = "the é thex  x   \t — 日本 🙂\n\n▁";
        assert_eq!(tokenizer.decode(&tokenizer.encode(text)), text.replace('▁', " "));
        // The exported file yields the same ids.
        let again =
            Tokenizer::new(&TokenizerSource::Json(tokenizer.to_json().unwrap().into_bytes()))
                .unwrap();
        assert_eq!(again.encode(text), tokenizer.encode(text));
        assert_eq!(again.token_bytes(ids[0]), tokenizer.token_bytes(ids[0]));
    }

    #[test]
    fn sentencepiece_rejects_unsupported_variants() {
        assert_unsupported(
            GgufTokenizer { add_space_prefix: true, ..make_source() },
            "a space to every text",
        );
        assert_unsupported(GgufTokenizer { scores: vec![0.0], ..make_source() }, "1 scores");
        let file = tokenizer_json(&make_source()).unwrap();
        let json = |change: &dyn Fn(&mut Value), expected: &str| {
            let mut file = file.clone();
            change(&mut file);
            let error =
                Tokenizer::new(&TokenizerSource::Json(file.to_string().into_bytes())).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        };
        json(&|file| file["normalizer"] = json!({ "type": "Prepend", "prepend": "▁" }), "Prepend");
        json(&|file| file["pre_tokenizer"] = json!({ "type": "Whitespace" }), "pre-tokenizer");
        let strip = json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 });
        json(
            &|file| file["decoder"]["decoders"].as_array_mut().unwrap().push(strip.clone()),
            "Strip",
        );
        json(
            &|file| {
                file["model"]["vocab"].as_object_mut().unwrap().remove("<0x41>");
            },
            "the byte 65",
        );
    }

    fn assert_unsupported(source: GgufTokenizer, expected: &str) {
        let error = Tokenizer::new(&TokenizerSource::Gguf(source)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
