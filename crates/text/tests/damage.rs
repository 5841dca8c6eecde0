//! A damaged `tokenizer.json` causes an error that names the file, and never a panic, whether the
//! library fails when it reads the file or when it uses it.

#![allow(clippy::unwrap_used, reason = "helpers of tests, too, may end them")]

use levade_model::{GgufTokenizer, TokenType, TokenizerSource};
use levade_text::{TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Returns a byte-level vocabulary with merges, special tokens and a regex split.
fn sound() -> Value {
    let (mut tokens, mut merges): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    let mut beyond = 0x100;
    for byte in 0..=255u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let c = if printable { u32::from(byte) } else { beyond };
        beyond += u32::from(!printable);
        tokens.push(char::from_u32(c).unwrap().to_string());
    }
    for rule in ["h e", "l l", "he ll", "hell o", "\u{120} w", "1 2"] {
        tokens.push(rule.replace(' ', ""));
        merges.push(rule.into());
    }
    let mut types = vec![TokenType::Normal; tokens.len()];
    for special in ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] {
        tokens.push(special.into());
        types.push(TokenType::Control);
    }
    let eos = Some(tokens.len() as u32 - 1);
    let source = GgufTokenizer {
        model: "gpt2".into(),
        pre: "qwen2".into(),
        tokens,
        types,
        merges,
        eos,
        ..Default::default()
    };
    let tokenizer = Tokenizer::new(&TokenizerSource::Gguf(source)).unwrap();
    serde_json::from_str(&tokenizer.to_json().unwrap()).unwrap()
}

/// Reads and uses a file. The tests check only that a result is returned.
fn read(bytes: &[u8]) -> Option<TextError> {
    match Tokenizer::new(&TokenizerSource::Json(bytes.to_vec())) {
        Ok(tokenizer) => {
            let ids =
                tokenizer.encode_template("<|im_start|>user\nhello wé 12 \u{1f600}<|im_end|>");
            tokenizer.decode_with_special(&ids);
            None
        }
        Err(error) => Some(error),
    }
}

#[test]
fn damaged_tokenizer_file_returns_error() {
    assert_eq!(read(sound().to_string().as_bytes()), None);
    // A comma instead of a quotation mark: the library treats this error as impossible.
    let broken = sound().to_string().replacen(
        "\"trim_offsets\":true,\"use_regex\":true},\"model\"",
        ",},\"model\"",
        1,
    );
    for (bytes, expected) in [
        (broken.into_bytes(), "tokenizer.json"),
        (b"".to_vec(), "tokenizer.json cannot be parsed"),
        (b"\xff\xfe{}".to_vec(), "tokenizer.json"),
        (b"version https://git-lfs.github.com/spec/v1".to_vec(), "tokenizer.json"),
    ] {
        let message = read(&bytes).unwrap().to_string();
        assert!(message.contains(expected), "{message}");
    }
    assert!(
        error_after_change("/model/vocab/he", json!(4_000_000_000u32))
            .contains("the id 4000000000")
    );
    assert!(
        error_after_change("/model/continuing_subword_prefix", json!("##"))
            .contains("tokenizer.json")
    );
    assert!(
        error_after_change("/pre_tokenizer/pretokenizers/0/pattern", json!({ "Regex": "(" }))
            .contains("tokenizer.json")
    );
}

fn error_after_change(path: &str, value: Value) -> String {
    let mut file = sound();
    *file.pointer_mut(path).unwrap() = value;
    read(file.to_string().as_bytes()).unwrap().to_string()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn damaged_tokenizer_bytes_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        truncation in prop::option::weighted(0.3, any::<prop::sample::Index>()),
        repeated in prop::option::weighted(0.3, (any::<prop::sample::Index>(), 1usize..64)),
    ) {
        let mut bytes = sound().to_string().into_bytes();
        for (at, value) in changes {
            // Half of the changes replace a byte with a digit, letter or punctuation mark of JSON.
            let at = at.index(bytes.len());
            bytes[at] = if value < 128 { b"\"{}[],:0123456789-ntf \\"[usize::from(value) % 23] } else { value };
        }
        if let Some((at, length)) = repeated {
            let at = at.index(bytes.len());
            let range = bytes[at..(at + length).min(bytes.len())].to_vec();
            bytes.splice(at..at, range);
        }
        if let Some(at) = truncation {
            bytes.truncate(at.index(bytes.len()));
        }
        read(&bytes);
    }

    /// Valid JSON in which one value is replaced.
    #[test]
    fn replaced_tokenizer_json_value_never_panics(
        which in any::<prop::sample::Index>(),
        value in prop::sample::select(vec![
            json!(null), json!(true), json!(-1), json!(0), json!(4_294_967_295u32), json!(1e300), json!(""), json!("é"), json!("BPE"),
            json!([]), json!({}), json!(["a", "b"]), json!({ "type": "ByteLevel" }), json!({ "type": "Sequence", "decoders": [] }),
        ]),
    ) {
        let mut file = sound();
        let mut paths = Vec::new();
        collect(&file, String::new(), &mut paths);
        *file.pointer_mut(&paths[which.index(paths.len())]).unwrap() = value;
        read(file.to_string().as_bytes());
    }
}

/// Collects the JSON pointers of a value and of its first entries, at most 16 per object and 4 per
/// array.
fn collect(value: &Value, at: String, paths: &mut Vec<String>) {
    match value {
        Value::Object(entries) => {
            for (key, value) in entries.iter().take(16) {
                collect(
                    value,
                    format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")),
                    paths,
                );
            }
        }
        Value::Array(list) => {
            list.iter()
                .take(4)
                .enumerate()
                .for_each(|(i, value)| collect(value, format!("{at}/{i}"), paths));
        }
        _ => {}
    }
    paths.push(at);
}
