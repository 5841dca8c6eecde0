//! Tests of grammars over the tiny tokenizer. Completions are sampled at random from the allowed
//! tokens.

use levade_policy::uniform;
use serde_json::{Value, json};

use super::*;
use crate::testing::{END_OF_TEXT, IM_END, IM_START, tiny_tokenizer};

fn vocabulary() -> Vocabulary {
    Vocabulary::new(&tiny_tokenizer().expect("the tiny tokenizer"))
}

/// Samples a completion from the allowed tokens. Returns `None` if it does not end within 1000
/// tokens.
fn sample_completion(vocabulary: &Vocabulary, grammar: &Grammar, stream: u64) -> Option<Vec<u32>> {
    let mut constraint = vocabulary.start(grammar).expect("a good grammar");
    let mut completion_ids = Vec::new();
    while completion_ids.len() < 1000 {
        let allowed = constraint.allowed().expect("a state");
        let tokens: Vec<u32> = (0..400).filter(|token| allowed.tokens.contains(*token)).collect();
        assert!(
            tokens.iter().all(|token| *token < 259),
            "none that the tokenizer has not: {tokens:?}"
        );
        let random = |part: u64| uniform(stream, part, completion_ids.len() as u64);
        if allowed.may_end && (tokens.is_empty() || random(0) < 0.3) {
            return Some(completion_ids);
        }
        let token = tokens[(random(1) * tokens.len() as f64) as usize];
        constraint.push(token).expect("it was allowed");
        completion_ids.push(token);
    }
    None
}

fn texts(grammar: &Grammar) -> Vec<String> {
    let vocabulary = vocabulary();
    let tokenizer = tiny_tokenizer().expect("the tiny tokenizer");
    let completions: Vec<String> = (0..40)
        .filter_map(|stream| sample_completion(&vocabulary, grammar, stream))
        .map(|completion_ids| tokenizer.decode_with_special(&completion_ids))
        .collect();
    assert!(completions.len() > 20, "{} of 40 end", completions.len());
    completions
}

fn schema(schema: &Value) -> Grammar {
    Grammar::JsonSchema(schema.to_string())
}

fn error(grammar: &Grammar) -> String {
    let error = vocabulary().start(grammar).err().expect("the grammar cannot be compiled");
    assert_eq!(error.code(), "invalid");
    let text = error.to_string();
    assert!(!text.contains('\n') && text.len() < 500, "one line: {text}");
    text
}

#[test]
fn sampled_text_conforms_to_json_schema() {
    let grammar = schema(&json!({
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green", null, 7]},
            "where": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -5, "maximum": 120}, "is": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": false
            },
            "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2}
        },
        "required": ["colour", "where", "names"],
        "additionalProperties": false
    }));
    for text in texts(&grammar) {
        let value: Value = serde_json::from_str(&text).expect("JSON");
        assert!(
            [json!("red"), json!("green"), json!(null), json!(7)].contains(&value["colour"]),
            "{text}"
        );
        let x = value["where"]["x"].as_i64().expect("an integer");
        assert!((-5..=120).contains(&x), "{text}");
        let names = value["names"].as_array().expect("an array");
        assert!(names.len() <= 2, "{text}");
        assert!(names.iter().all(|n| n.as_str().is_some_and(|n| n.chars().count() <= 3)), "{text}");
    }
}

#[test]
fn json_object_grammar_yields_objects() {
    for text in texts(&Grammar::JsonObject) {
        // A number may exceed the range of serde_json's types.
        assert!(serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok(), "{text}");
        assert!(text.starts_with('{') && text.ends_with('}'), "{text}");
    }
}

#[test]
fn sampled_text_matches_regex_grammar() {
    for text in texts(&Grammar::Regex("(ab|ö){2,3}[0-9]".into())) {
        let (rest, digit) = text.split_at(text.len() - 1);
        let rest = rest.replace("ab", "ö");
        assert!(
            digit.chars().all(|c| c.is_ascii_digit()) && ["öö", "ööö"].contains(&&*rest),
            "{text}"
        );
    }
}

/// A special token is allowed only if the grammar names it at that position.
#[test]
fn lark_grammar_allows_only_named_special_tokens() {
    let lark = "start: <|im_start|> WORD (\" \" WORD)*\nWORD: /[a-c]{1,2}/";
    for text in texts(&Grammar::Lark(lark.into())) {
        let words = text.strip_prefix("<|im_start|>").expect("the special token");
        let is_word = |word: &str| {
            matches!(word.len(), 1 | 2) && word.bytes().all(|b| (b'a'..=b'c').contains(&b))
        };
        assert!(words.split(' ').all(is_word), "{text}");
    }
    let vocabulary = vocabulary();
    let mut open = vocabulary.start(&Grammar::Regex("(.|\\n)*".into())).expect("a good grammar");
    let allowed = open.allowed().expect("a state");
    assert!(allowed.may_end && allowed.tokens.contains(u32::from(b'<')));
    assert!(
        [IM_START, IM_END, END_OF_TEXT, 255, 259, 260]
            .iter()
            .all(|token| !allowed.tokens.contains(*token))
    );
}

/// A JSON schema within a grammar, as in tool calls.
#[test]
fn lark_grammar_embeds_json_schema() {
    let lark = r#"start: "<call>" arguments "</call>"
        arguments: %json {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": false}"#;
    for text in texts(&Grammar::Lark(lark.into())) {
        let inner = text.strip_prefix("<call>").and_then(|text| text.strip_suffix("</call>"));
        let value: Value = serde_json::from_str(inner.expect("between the tags")).expect("JSON");
        assert!([1, 2].map(|a| json!({"a": a})).contains(&value), "{text}");
    }
}

#[test]
fn invalid_grammar_error_names_reason() {
    for (grammar, reason) in [
        (schema(&json!({"type": "text"})), "the JSON schema cannot be compiled: "),
        (
            schema(&json!({"type": "integer", "minimum": 3, "maximum": 2})),
            "the JSON schema cannot be compiled: ",
        ),
        (schema(&json!({"$ref": "https://example.com/schema"})), "ref"),
        (
            Grammar::JsonSchema("{".into()),
            "the JSON schema cannot be compiled: the schema is not JSON: EOF",
        ),
        (Grammar::Regex("(".into()), "the regular expression cannot be compiled: "),
        (Grammar::Lark("start: other".into()), "the Lark grammar cannot be compiled: "),
        (Grammar::Lark("start: <|no_such_token|>".into()), "no_such_token"),
        (Grammar::Lark(format!("start: {}\"a\"", "~ ".repeat(200))), "negates"),
        (Grammar::Regex("a".repeat(MAX_GRAMMAR_BYTES + 1)), "bytes; the maximum is 262144"),
    ] {
        let text = error(&grammar);
        assert!(text.contains(reason), "{text}");
    }
}

/// Neither depth nor size ends the process: a hostile grammar is rejected or compiles.
#[test]
fn hostile_grammars_finish_in_bounded_time() {
    let deep_schema = (0..120)
        .fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}));
    let references: serde_json::Map<String, Value> = (0..5000)
        .map(|i| (format!("a{i}"), json!({"$ref": format!("#/$defs/a{}", i + 1)})))
        .collect();
    let alternatives: Vec<Value> = (0..50).map(|i: usize| json!({"type": "object", "properties": {format!("p{i}"): {"type": "integer"}}})).collect();
    for grammar in [
        Grammar::Lark(rule_chain("r")),
        Grammar::Lark(rule_chain("R")),
        Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(60_000), ")".repeat(60_000))),
        Grammar::Regex(format!("{}a{}", "(".repeat(60_000), ")".repeat(60_000))),
        Grammar::Regex("(a{1,1000}){1,1000}{1,1000}".into()),
        Grammar::Regex("(.*a){30}.*".into()),
        Grammar::Lark("start: a{1000000000}\na: \"x\" | a a".into()),
        Grammar::Lark("start: A{1000000000}\nA: \"x\"".into()),
        schema(&json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000})),
        schema(&json!({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 1_000_000_000})),
        schema(&json!({"type": "string", "minLength": 1_000_000_000})),
        schema(&json!({"type": "string", "pattern": "(a{1,1000}b){1000,100000}"})),
        schema(&json!({"allOf": vec![json!({"anyOf": alternatives}); 6]})),
        schema(&deep_schema),
        schema(&json!({"$ref": "#/$defs/a0", "$defs": references})),
    ] {
        let start = std::time::Instant::now();
        if let Ok(mut constraint) = vocabulary().start(&grammar) {
            let _ = constraint.allowed();
        }
        assert!(start.elapsed().as_secs() < 30, "{} took {:?}", grammar.kind(), start.elapsed());
    }
}

fn rule_chain(separator: &str) -> String {
    let rules: String =
        (0..15_000).map(|i: usize| format!("{separator}{i}:{separator}{}\n", i + 1)).collect();
    format!("start:{separator}0\n{rules}{separator}15000:\"a\"\n")
}

/// A failure during sampling is an error, and all later calls fail, too.
#[test]
fn disallowed_token_is_rejected() {
    let vocabulary = vocabulary();
    let mut constraint = vocabulary.start(&Grammar::Regex("ab".into())).expect("a good grammar");
    let error = constraint.push(u32::from(b'x')).expect_err("not allowed");
    assert!(
        error
            .to_string()
            .starts_with("the regular expression cannot constrain the completion any further: "),
        "{error}"
    );
    assert!(constraint.allowed().is_err());
    assert!(vocabulary.start(&Grammar::Regex("ab".into())).is_ok(), "others go on");
}
