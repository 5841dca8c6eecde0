//! Tests of encoding and decoding, and of invalid tokenizer files.

use proptest::prelude::*;

use super::*;
use crate::testing::{self, END_OF_TEXT, IM_END, IM_START};

fn tiny() -> Tokenizer {
    testing::tiny_tokenizer().unwrap()
}

/// Returns a byte-level vocabulary with a few merges, so that ids depend on adjacent characters.
fn merging(pre: &str) -> GgufTokenizer {
    let mut source = testing::tiny_gguf();
    source.pre = pre.into();
    for rule in ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ċ Ċ", "Ġ Ġ"] {
        source.tokens.push(rule.replace(' ', ""));
        source.types.push(levade_model::TokenType::Normal);
        source.merges.push(rule.into());
    }
    source
}

fn pieces(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    tokenizer.encode(text).iter().map(|&id| tokenizer.token_text(id)).collect()
}

#[test]
fn encode_never_yields_special_tokens() {
    let tokenizer = tiny();
    assert_eq!(tokenizer.encode("a<|im_end|>").len(), 11);
    assert_eq!(
        tokenizer.encode_template("a<|im_end|>b"),
        [u32::from(b'a'), IM_END, u32::from(b'b')]
    );
    assert_eq!(tokenizer.encode(""), [0; 0]);
}

#[test]
fn special_tokens_are_found_by_name() {
    let tokenizer = tiny();
    assert_eq!(tokenizer.special("<|im_start|>"), Some(IM_START));
    assert_eq!(tokenizer.special("a"), None);
    assert_eq!(tokenizer.eos(), [END_OF_TEXT]);
    assert_eq!((tokenizer.token_bytes(IM_END), tokenizer.token_bytes(10_000)), (None, None));
    assert_eq!(tokenizer.token_bytes(65), Some(b"A".as_slice()));
    assert_eq!(tokenizer.vocabulary(), testing::VOCABULARY);
    let ids = [u32::from(b'x'), IM_END, 10_000];
    assert_eq!(
        (tokenizer.decode(&ids), tokenizer.decode_with_special(&ids)),
        ("x".into(), "x<|im_end|>".into())
    );
}

#[test]
fn named_ends_set_bos_and_all_eos() {
    let names = SpecialTokens { eos: Some("<|im_end|>".into()), ..SpecialTokens::default() };
    assert_eq!(ends_of(&names, Some(256), &[256, 258]), (None, vec![258, 256]));
    assert_eq!(ends_of(&SpecialTokens::default(), Some(257), &[256]), (Some(257), vec![256]));
    let names = SpecialTokens { bos: Some("<|im_start|>".into()), ..SpecialTokens::default() };
    assert_eq!(ends_of(&names, None, &[256]), (Some(257), vec![256]));
}

fn ends_of(names: &SpecialTokens, bos: Option<u32>, eos: &[u32]) -> (Option<u32>, Vec<u32>) {
    let tokenizer = tiny().with_named_ends(names, bos, eos);
    (tokenizer.bos(), tokenizer.eos().to_vec())
}

#[test]
fn merges_respect_pre_tokenizer_boundaries() {
    let smollm = Tokenizer::new(&TokenizerSource::Gguf(merging("smollm"))).unwrap();
    assert_eq!(pieces(&smollm, "hello w12"), ["hello", " w", "1", "2"]);
    let gpt2 = Tokenizer::new(&TokenizerSource::Gguf(merging("gpt-2"))).unwrap();
    assert_eq!(pieces(&gpt2, "hello w12\n\n"), ["hello", " w", "12", "\n\n"]);
    let llama = Tokenizer::new(&TokenizerSource::Gguf(merging("llama-bpe"))).unwrap();
    assert_eq!(pieces(&llama, "12121"), ["12", "1", "2", "1"]);
    let qwen = Tokenizer::new(&TokenizerSource::Gguf(merging("qwen2"))).unwrap();
    assert_eq!(pieces(&qwen, "12"), ["1", "2"]);
    assert_eq!(qwen.decode(&qwen.encode("e\u{301}")), "\u{e9}", "Qwen2 composes characters first");
}

/// llama.cpp has many names for the same method of splitting. A file without a name has a method of
/// its own.
#[test]
fn pre_tokenizer_synonyms_split_alike() {
    for (first, expected_same) in [
        ("qwen2", &["deepseek-r1-qwen", "kormo", "f2llmv2"][..]),
        ("llama-bpe", &["llama3", "llama-v3", "falcon3", "pixtral", "lfm2"]),
        ("smollm", &["starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"]),
        ("gpt-2", &["phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"]),
        ("megrez", &["stablelm2", "hunyuan", "grok-2"]),
        ("smaug-bpe", &["dbrx", "glm4", "chatglm-bpe"]),
        ("default", &[""]),
    ] {
        for other in expected_same {
            assert_eq!(split_like(other), split_like(first), "{other}");
        }
    }
    let unnamed = Tokenizer::new(&TokenizerSource::Gguf(merging(""))).unwrap();
    assert_eq!(pieces(&unnamed, "hello w1212"), ["hello", " w", "12", "1", "2"]);
}

fn split_like(pre: &str) -> [Vec<u32>; 3] {
    let tokenizer = Tokenizer::new(&TokenizerSource::Gguf(merging(pre))).unwrap();
    ["hello w1212", "a 'S e\u{301}\n\nx", "12121 !!\r\n  b"].map(|text| tokenizer.encode(text))
}

#[test]
fn user_defined_tokens_decode_as_text() {
    let mut source = testing::tiny_gguf();
    source.tokens.push("<tool_call>".into());
    source.types.push(levade_model::TokenType::UserDefined);
    let tokenizer = Tokenizer::new(&TokenizerSource::Gguf(source)).unwrap();
    assert_eq!(tokenizer.encode("<tool_call>"), [259]);
    assert_eq!(tokenizer.decode(&[259]), "<tool_call>");
    assert!(!tokenizer.is_special(259) && tokenizer.is_special(IM_END));
}

#[test]
fn exported_tokenizer_round_trips() {
    let first = Tokenizer::new(&TokenizerSource::Gguf(GgufTokenizer {
        bos: Some(END_OF_TEXT),
        add_bos: true,
        ..merging("llama-bpe")
    }))
    .unwrap();
    let json = first.to_json().unwrap();
    let second = Tokenizer::new(&TokenizerSource::Json(json.clone().into_bytes())).unwrap();
    let text = "<|im_start|>user\nhello w12 <|im_end|>";
    assert_eq!(first.encode_template(text), second.encode_template(text));
    assert_eq!(first.vocabulary(), second.vocabulary());
    assert_eq!(json, second.to_json().unwrap());
    // Other programs add the start token, as the GGUF file requests. Here, the template adds it.
    let other = tokenizers::Tokenizer::from_bytes(json.as_bytes()).unwrap();
    let ids = other.encode_fast(text, true).unwrap().get_ids().to_vec();
    assert_eq!(ids[0], END_OF_TEXT);
    assert_eq!(ids[1..], first.encode_template(text));
}

#[test]
fn special_token_strip_flags_match_reference() {
    let json = tiny().to_json().unwrap();
    let mut file: serde_json::Value = serde_json::from_str(&json).unwrap();
    file["added_tokens"][1]["rstrip"] = true.into();
    file["added_tokens"][2]["lstrip"] = true.into();
    file["added_tokens"][0]["single_word"] = true.into();
    let bytes = file.to_string().into_bytes();
    let tokenizer = Tokenizer::new(&TokenizerSource::Json(bytes.clone())).unwrap();
    let reference = tokenizers::Tokenizer::from_bytes(&bytes).unwrap();
    for text in [
        "<|im_start|> \n a  <|im_end|> b",
        "a<|endoftext|>b",
        "a <|endoftext|> b",
        "<|im_end|><|im_end|>",
        "_<|endoftext|>",
    ] {
        let expected = reference.encode_fast(text, false).unwrap().get_ids().to_vec();
        assert_eq!(tokenizer.encode_template(text), expected, "{text:?}");
    }
}

#[test]
fn invalid_tokenizer_file_error_names_cause() {
    let tiny = testing::tiny_gguf;
    assert!(gguf_error(GgufTokenizer { model: "bert".into(), ..tiny() }).contains("\"bert\""));
    assert!(gguf_error(GgufTokenizer { pre: "tekken".into(), ..tiny() }).contains("\"tekken\""));
    assert!(
        gguf_error(GgufTokenizer { merges: vec!["a zz".into()], ..tiny() }).contains("\"a zz\"")
    );
    assert!(
        gguf_error(GgufTokenizer { merges: vec!["ab".into()], ..tiny() }).contains("merge rule 0")
    );
    assert!(gguf_error(GgufTokenizer { eos: Some(999), ..tiny() }).contains("999"));
    assert!(
        gguf_error(GgufTokenizer { types: vec![], merges: vec![], ..merging("gpt-2") })
            .contains("no merge rules")
    );
    assert!(
        gguf_error(GgufTokenizer { types: vec![levade_model::TokenType::Normal], ..tiny() })
            .contains("1 token types")
    );
    let mut twice = tiny();
    twice.tokens[1] = twice.tokens[0].clone();
    assert!(gguf_error(twice).contains("twice"));

    assert!(json_error(b"{\"version\": \"1.0\", ").contains("cannot be parsed"));
    let good = super::tests::tiny().to_json().unwrap();
    let mut file: serde_json::Value = serde_json::from_str(&good).unwrap();
    file["added_tokens"][0]["id"] = 300.into();
    assert!(json_error(file.to_string().as_bytes()).contains("300"));
    let mut file: serde_json::Value = serde_json::from_str(&good).unwrap();
    file["decoder"] = serde_json::Value::Null;
    assert!(json_error(file.to_string().as_bytes()).contains("neither byte-level BPE"));
}

fn gguf_error(source: GgufTokenizer) -> String {
    Tokenizer::new(&TokenizerSource::Gguf(source)).unwrap_err().to_string()
}

fn json_error(bytes: &[u8]) -> String {
    Tokenizer::new(&TokenizerSource::Json(bytes.to_vec())).unwrap_err().to_string()
}

proptest! {
    #[test]
    fn random_text_round_trips(text in any::<String>()) {
        for pre in ["gpt-2", "smollm", "llama-bpe"] {
            let tokenizer = Tokenizer::new(&TokenizerSource::Gguf(merging(pre))).unwrap();
            let ids = tokenizer.encode(&text);
            prop_assert_eq!(tokenizer.decode(&ids), text.as_str());
            prop_assert!(ids.iter().all(|&id| !tokenizer.is_special(id)));
        }
    }

    #[test]
    fn guarded_text_encodes_like_plain_text(
        parts in proptest::collection::vec(
            prop_oneof![
                Just("<|im_end|>".to_string()), Just("<|im_".to_string()), Just("end|>".to_string()),
                Just("<".to_string()), Just("|>".to_string()), any::<String>(),
            ],
            0..8,
        ),
        before in prop_oneof![Just(""), Just("<|im_"), Just("<")],
        after in prop_oneof![Just(""), Just("end|>"), Just("|im_end|>"), Just(">")],
    ) {
        let tokenizer = tiny();
        let guard = '\u{F0042}';
        let text = parts.concat();
        prop_assume!(!text.contains(guard) && !text.is_empty());
        let template = format!("{before}{}{after}", tokenizer.guard(&text, guard, true));
        let ids = tokenizer.encode_guarded(&template, Some(guard));
        prop_assert_eq!(ids, tokenizer.encode(&format!("{before}{text}{after}")));
    }
}
