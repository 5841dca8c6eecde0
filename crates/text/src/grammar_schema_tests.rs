//! Tests of the conversion of schemas to the form that a grammar can enforce.

use levade_policy::{Grammar, Grammars};

use super::*;
use crate::Vocabulary;
use crate::testing::tiny_tokenizer;

/// Returns the enforceable form of a schema, and the omitted keywords as `PATH KEYWORD`.
fn enforceable(schema: &Value) -> (Value, Vec<String>) {
    let (enforceable, omitted) = enforceable_schema(schema).unwrap();
    (enforceable, omitted.iter().map(|found| format!("{} {}", found.path, found.keyword)).collect())
}

/// Returns whether a text conforms to a schema.
fn keeps(schema: &Value, text: &str) -> bool {
    let tokenizer = tiny_tokenizer().unwrap();
    let mut constraint =
        Vocabulary::new(&tokenizer).start(&Grammar::JsonSchema(schema.to_string())).unwrap();
    for id in tokenizer.encode(text) {
        if !constraint.allowed().is_ok_and(|allowed| allowed.tokens.contains(id)) {
            return false;
        }
        constraint.push(id).unwrap();
    }
    constraint.allowed().is_ok_and(|allowed| allowed.may_end)
}

fn object(properties: Value) -> Value {
    json!({ "type": "object", "properties": properties, "additionalProperties": false })
}

#[test]
fn endlessly_recursive_schema_loses_references() {
    for (definition, good, bad) in [
        (json!({ "$ref": "#/$defs/A" }), "[1]", None),
        (json!({ "anyOf": [{ "$ref": "#/$defs/B" }, { "$ref": "#/$defs/A" }] }), "1", None),
        (json!({ "allOf": [{ "$ref": "#/$defs/B" }, { "type": "integer" }] }), "1", Some("\"x\"")),
        (
            linked_node(json!({ "$ref": "#/$defs/B" })),
            "{\"v\": 1, \"next\": 2}",
            Some("{\"next\": 2}"),
        ),
    ] {
        let schema = json!({ "$ref": "#/$defs/A", "$defs": { "A": definition, "B": { "$ref": "#/$defs/A" } } });
        let (enforceable, omitted) = enforceable(&schema);
        assert!(omitted.iter().any(|found| found.ends_with("$ref")), "{omitted:?}");
        assert!(keeps(&enforceable, good), "{enforceable} {good}");
        assert!(bad.is_none_or(|bad| !keeps(&enforceable, bad)), "{enforceable} {bad:?}");
    }
    // A circular reference that can end is enforced.
    let tree = linked_node(json!({ "anyOf": [{ "$ref": "#" }, { "type": "null" }] }));
    assert_eq!(enforceable(&tree).1, [""; 0]);
}

fn linked_node(next: Value) -> Value {
    json!({ "type": "object", "properties": { "v": { "type": "integer" }, "next": next }, "required": ["v", "next"], "additionalProperties": false })
}

#[test]
fn references_are_enforced_in_every_position() {
    let number = json!({ "type": "object", "properties": { "n": { "type": "integer" } }, "required": ["n"], "additionalProperties": false });
    let of = |v: Value| {
        json!({
            "type": "object", "properties": { "v": v }, "required": ["v"], "additionalProperties": false,
            "$defs": { "Q": number, "a/b %": { "type": "boolean" }, "Anchored": { "$anchor": "here", "type": "null" },
                       "L": { "type": "array", "items": { "$ref": "#/$defs/L" }, "maxItems": 2 }, "Chain": { "$ref": "#/$defs/Q" } },
            "definitions": { "Q": { "enum": ["x", "y"] } },
        })
    };
    for (v, good, bad) in [
        (json!({ "$ref": "#/$defs/Q" }), "{\"n\": 1}", "{\"n\": \"x\"}"),
        (json!({ "$ref": "#/$defs/Q", "description": "d" }), "{\"n\": 1}", "{}"),
        (json!({ "$ref": "#/$defs/Chain" }), "{\"n\": 1}", "1"),
        (json!({ "$ref": "#/definitions/Q" }), "\"x\"", "\"z\""),
        (json!({ "$ref": "#/$defs/a~1b%20%25" }), "true", "1"),
        (json!({ "$ref": "#here" }), "null", "1"),
        (json!({ "anyOf": [{ "$ref": "#/$defs/Q" }, { "type": "null" }] }), "null", "1"),
        (
            json!({ "anyOf": [{ "$ref": "#/$defs/Q" }, { "type": "null" }] }),
            "{\"n\": 1}",
            "{\"m\": 1}",
        ),
        (json!({ "allOf": [{ "$ref": "#/definitions/Q" }], "default": "x" }), "\"y\"", "1"),
        (
            json!({ "oneOf": [{ "$ref": "#/$defs/Q" }, { "$ref": "#/definitions/Q" }] }),
            "\"y\"",
            "1",
        ),
        (
            json!({ "type": "array", "items": { "$ref": "#/$defs/Q" } }),
            "[{\"n\": 1}, {\"n\": 2}]",
            "[1]",
        ),
        (
            json!({ "type": "array", "prefixItems": [{ "$ref": "#/definitions/Q" }] }),
            "[\"x\"]",
            "[1]",
        ),
        (
            json!({ "type": "object", "additionalProperties": { "$ref": "#/definitions/Q" } }),
            "{\"a\": \"x\"}",
            "{\"a\": 1}",
        ),
        (
            json!({ "type": "object", "patternProperties": { "^p": { "$ref": "#/definitions/Q" } }, "additionalProperties": false }),
            "{\"pa\": \"x\"}",
            "{\"pa\": 1}",
        ),
        (json!({ "$ref": "#/$defs/L" }), "[[], [[]]]", "[1]"),
        (
            json!({ "anyOf": [{ "$ref": "#" }, { "type": "integer" }] }),
            "{\"v\": {\"v\": 3}}",
            "{\"w\": 3}",
        ),
        (
            json!({ "type": ["object", "null"], "properties": { "$ref": { "type": "integer" } }, "additionalProperties": false }),
            "{\"$ref\": 1}",
            "{\"$ref\": null}",
        ),
        (json!({ "const": { "$ref": "#/nowhere" } }), "{\"$ref\": \"#/nowhere\"}", "1"),
    ] {
        let (enforceable, omitted) = enforceable(&of(v.clone()));
        assert_eq!(omitted, [""; 0], "{v}");
        assert!(keeps(&enforceable, &format!("{{\"v\": {good}}}")), "{v}: {good}\n{enforceable}");
        assert!(!keeps(&enforceable, &format!("{{\"v\": {bad}}}")), "{v}: {bad}\n{enforceable}");
        // The result is the same within another schema.
        let enforceable = with_large_stack(|| {
            GrammarSchema::from_schema(Schema::from_document(&of(v.clone())), "")
                .embed_in(|schema| object(json!({ "call": schema })))
        })
        .unwrap();
        assert!(
            keeps(&enforceable, &format!("{{\"call\": {{\"v\": {good}}}}}")),
            "{v}: {good}\n{enforceable}"
        );
        assert!(
            !keeps(&enforceable, &format!("{{\"call\": {{\"v\": {bad}}}}}")),
            "{v}: {bad}\n{enforceable}"
        );
    }
    let root = json!({ "$ref": "#/$defs/Args", "$defs": { "Args": object(json!({ "a": { "type": "integer" } })) } });
    assert!(
        keeps(&enforceable(&root).0, "{\"a\": 1}") && !keeps(&enforceable(&root).0, "{\"b\": 1}")
    );
}

#[test]
fn branches_with_distinct_constants_stay_exclusive() {
    let schema = json!({
        "oneOf": [{ "$ref": "#/$defs/Cat" }, { "$ref": "#/$defs/Dog" }],
        "discriminator": { "propertyName": "kind" },
        "$defs": { "Cat": tagged_branch("cat"), "Dog": tagged_branch("dog") },
    });
    let (enforceable, omitted) = enforceable(&schema);
    assert_eq!(omitted, [""; 0]);
    assert!(
        keeps(&enforceable, "{\"kind\": \"dog\"}") && !keeps(&enforceable, "{\"kind\": \"cow\"}")
    );
}

fn tagged_branch(kind: &str) -> Value {
    json!({ "type": "object", "properties": { "kind": { "const": kind } }, "required": ["kind"], "additionalProperties": false })
}

#[test]
fn unsupported_keywords_are_omitted_and_listed() {
    let of = |v: &Value| json!({ "type": "object", "properties": { "v": v, "n": { "type": "integer" } }, "required": ["n"] });
    let text = json!({ "type": "string" });
    for (v, keyword) in [
        (json!({ "type": "string", "format": "uri-reference" }), "format"),
        (json!({ "type": "string", "format": "byte" }), "format"),
        (json!({ "type": "string", "format": "password", "maxLength": 3 }), "format"),
        (json!({ "type": "string", "format": 7 }), "format"),
        (json!({ "type": "array", "items": text, "uniqueItems": true }), "uniqueItems"),
        (json!({ "type": "string", "not": { "const": "a" } }), "not"),
        (json!({ "type": "string", "pattern": "\\bfoo\\b" }), "pattern"),
        (json!({ "type": "string", "pattern": "^(?=.*[0-9]).+$" }), "pattern"),
        (json!({ "type": "string", "pattern": "(a)\\1" }), "pattern"),
        (json!({ "type": "string", "pattern": "(" }), "pattern"),
        (json!({ "type": "object", "propertyNames": { "pattern": "^a" } }), "propertyNames"),
        (json!({ "type": "object", "additionalProperties": null }), "additionalProperties"),
        (
            json!({ "type": "object", "minProperties": 2, "properties": { "a": {}, "b": {} } }),
            "minProperties",
        ),
        (
            json!({ "type": "object", "if": { "required": ["a"] }, "then": { "required": ["b"] } }),
            "if",
        ),
        (json!({ "type": "object", "dependentRequired": { "a": ["b"] } }), "dependentRequired"),
        (
            json!({ "type": "object", "unevaluatedProperties": false, "properties": {} }),
            "unevaluatedProperties",
        ),
        (json!({ "type": "array", "contains": { "const": 1 }, "minContains": 2 }), "contains"),
        (
            json!({ "type": "object", "patternProperties": { "^a": {}, "b$": {} } }),
            "patternProperties",
        ),
        (json!({ "type": "datetime" }), "type"),
        (json!({ "type": "integer", "minimum": "3" }), "minimum"),
        (json!({ "enum": "a" }), "enum"),
        (json!({ "oneOf": [{ "type": "integer" }, { "minimum": 3 }] }), "oneOf"),
        (json!({ "$ref": "https://example.com/elsewhere.json" }), "$ref"),
        (json!({ "$ref": "#/$defs/Nowhere" }), "$ref"),
        (json!("string"), "schema"),
        (json!(null), "schema"),
    ] {
        // The parameter's keyword is omitted, and the rest of the schema is kept.
        let (enforceable, omitted) = enforceable(&of(&v));
        assert_eq!(omitted, [format!("/properties/v {keyword}")], "{v}");
        assert!(
            keeps(&enforceable, "{\"n\": 1}") && !keeps(&enforceable, "{\"n\": \"x\"}"),
            "{v}\n{enforceable}"
        );
    }
    let nested = json!({ "$defs": { "Q": { "type": "object", "properties": { "x": { "type": "string", "format": "iri" } } } },
                         "properties": { "a/b": { "type": "array", "items": { "$ref": "#/$defs/Q" } } } });
    assert_eq!(enforceable(&nested).1, ["/$defs/Q/properties/x format"]);
}

#[test]
fn schema_annotations_are_dropped_without_report() {
    let schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.com/f.json", "title": "F",
        "type": "object", "x-order": 1, "x-guidance": { "lenient": true }, "examples": [{}], "deprecated": true,
        "properties": {
            "a": { "type": "array", "uniqueItems": false, "items": { "type": "string", "format": "date" } },
            "b": { "type": "integer", "format": "int64", "nullable": true, "example": 3 },
            "c": { "type": "object", "not": false, "unevaluatedProperties": false, "additionalProperties": false },
        },
        "additionalProperties": false,
    });
    let (enforceable, omitted) = enforceable(&schema);
    assert_eq!(omitted, ["/properties/c unevaluatedProperties"]);
    assert!(enforceable.get("x-guidance").is_none());
    assert!(
        keeps(&enforceable, "{\"a\": [\"2020-01-01\"], \"b\": 7}")
            && !keeps(&enforceable, "{\"a\": [\"x\"]}")
    );
}

#[test]
fn circular_references_with_siblings_are_loosened() {
    let schema = json!({
        "type": "object", "properties": { "next": { "$ref": "#/$defs/Node", "minProperties": 1 } },
        "$defs": { "Node": { "type": "object", "properties": { "next": { "$ref": "#/$defs/Node", "required": ["v"] } } } },
    });
    let (enforceable, omitted) = enforceable(&schema);
    assert!(
        !omitted.is_empty() && keeps(&enforceable, "{\"next\": {\"next\": {}}}"),
        "{omitted:?}\n{enforceable}"
    );
    assert!(!keeps(&enforceable, "{\"next\": 1}"));
}

#[test]
fn closed_objects_allow_only_named_properties() {
    let q = json!({ "type": "object", "properties": { "n": { "type": "integer" } }, "required": ["n"] });
    let schema = json!({
        "properties": { "q": { "anyOf": [{ "$ref": "#/$defs/Q" }, { "type": "null" }] }, "list": { "items": q } },
        "$defs": { "Q": q },
    });
    let enforceable = close_objects(&schema);
    for good in ["{}", "{\"q\": null}", "{\"q\": {\"n\": 1}}", "{\"list\": [{\"n\": 1}]}"] {
        assert!(keeps(&enforceable, good), "{good}\n{enforceable}");
    }
    for bad in [
        "{\"other\": 1}",
        "{\"q\": {\"n\": 1, \"m\": 2}}",
        "{\"list\": [{\"n\": 1, \"m\": 2}]}",
        "1",
    ] {
        assert!(!keeps(&enforceable, bad), "{bad}\n{enforceable}");
    }
    // Objects stay open if they declare that, are composed, or require further properties.
    let text = json!({ "type": "string" });
    for (schema, good) in [
        (json!({ "properties": { "a": text }, "additionalProperties": true }), "{\"b\": 1}"),
        (json!({ "properties": { "a": text }, "required": ["b"] }), "{\"b\": 1}"),
        (json!({ "properties": { "a": text }, "patternProperties": { "^b": {} } }), "{\"b\": 1}"),
        (json!({ "type": "object" }), "{\"b\": 1}"),
        (
            json!({ "allOf": [{ "$ref": "#/$defs/Q" }, { "properties": { "a": text } }], "$defs": { "Q": q } }),
            "{\"n\": 1, \"a\": \"x\"}",
        ),
        (
            json!({ "properties": { "n": {} }, "anyOf": [q, { "properties": { "a": text }, "required": ["a"] }] }),
            "{\"n\": 1}",
        ),
    ] {
        let enforceable = close_objects(&schema);
        assert!(keeps(&enforceable, good), "{schema}: {good}\n{enforceable}");
    }
}

fn close_objects(schema: &Value) -> Value {
    with_large_stack(|| {
        GrammarSchema::from_schema(Schema::from_document(schema), "")
            .restrict_to_object()
            .close_objects()
            .document()
    })
    .unwrap()
}

#[test]
fn hostile_schemas_convert_in_bounded_time() {
    let references: Map<String, Value> = (0..500)
        .map(|at| {
            let next = format!("#/$defs/a{}", (at + 1) % 500);
            (format!("a{at}"), json!({ "anyOf": [{ "$ref": next }, { "$ref": "#/$defs/a7" }] }))
        })
        .collect();
    for schema in [
        json!({ "$ref": "#/$defs/a0", "$defs": references }),
        wide_object(json!({ "type": "string", "format": "byte" })),
        wide_object(
            json!({ "type": "string", "pattern": "(a{1,1000}b){1000,100000}", "format": "byte" }),
        ),
        wide_object(json!({ "type": "string", "pattern": "(.*a){30}.*", "not": {} })),
        wide_object(
            json!({ "type": "array", "items": { "enum": [1, 2] }, "maxItems": 1_000_000_000, "format": "x" }),
        ),
        wide_object(json!({ "type": "string", "minLength": 1_000_000_000, "format": "byte" })),
    ] {
        let start = std::time::Instant::now();
        enforceable(&schema);
        let text: String = schema.to_string().chars().take(100).collect();
        println!("{:?} {text}", start.elapsed());
        assert!(start.elapsed().as_secs() < 30, "{:?} {text}", start.elapsed());
    }
}

fn wide_object(schema: Value) -> Value {
    let properties: Map<String, Value> =
        (0..100).map(|at| (format!("p{at}"), schema.clone())).collect();
    json!({ "type": "object", "properties": properties })
}
