//! Generates arguments of a tool call from a JSON schema.

use serde_json::{Map, Value, json};

/// Maximum depth of nested schemas for which values are generated. Deeper values are null.
const MAX_DEPTH: usize = 8;

/// Generates valid arguments for the schema of a tool. Only the required fields get a value. A
/// string is `text`, unless the schema constrains it.
pub fn generate_arguments(schema: &Value, text: &str) -> Map<String, Value> {
    match generate_value(schema, schema, text, 0) {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

fn generate_value(schema: &Value, root: &Value, text: &str, depth: usize) -> Value {
    if depth > MAX_DEPTH {
        return Value::Null;
    }
    let inner = |schema: &Value| generate_value(schema, root, text, depth + 1);
    if let Some(reference) = schema["$ref"].as_str() {
        let found = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        return found.map_or(Value::Null, inner);
    }
    for key in ["const", "default"] {
        if let Some(preset) = schema.get(key) {
            return preset.clone();
        }
    }
    for key in ["examples", "enum"] {
        if let Some(first) = schema[key].as_array().and_then(|all| all.first()) {
            return first.clone();
        }
    }
    for key in ["anyOf", "oneOf", "allOf"] {
        let all = schema[key].as_array().into_iter().flatten();
        // Optional arguments also allow null, which is the least useful example.
        if let Some(first) = all.into_iter().find(|one| one["type"] != "null") {
            return inner(first);
        }
    }
    let kind = match &schema["type"] {
        Value::String(kind) => kind.as_str(),
        Value::Array(kinds) => {
            kinds.iter().filter_map(Value::as_str).find(|kind| *kind != "null").unwrap_or("null")
        }
        _ if schema.get("properties").is_some() => "object",
        _ => "string",
    };
    let bound = |key: &str| schema[key].as_f64();
    match kind {
        "object" => {
            let required =
                schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            required
                .map(|name| (name.to_owned(), inner(&schema["properties"][name])))
                .collect::<Map<_, _>>()
                .into()
        }
        "array" => {
            let count = schema["minItems"].as_u64().unwrap_or(0).min(16);
            (0..count).map(|_| inner(&schema["items"])).collect()
        }
        "integer" => json!(bound("minimum").or(bound("maximum")).unwrap_or(1.0).ceil() as i64),
        "number" => json!(bound("minimum").or(bound("maximum")).unwrap_or(1.0)),
        "boolean" => json!(false),
        "null" => Value::Null,
        _ => {
            let min_length = schema["minLength"].as_u64().unwrap_or(0).min(4096) as usize;
            let max_length = schema["maxLength"].as_u64().unwrap_or(u64::MAX).min(1 << 20) as usize;
            let mut text: String = text.chars().take(max_length).collect();
            while text.chars().count() < min_length {
                text.push('x');
            }
            json!(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_satisfy_schema_constraints() {
        let schema = json!({
            "type": "object",
            "required": ["city", "days", "unit", "places", "deep", "maybe", "exact", "flag"],
            "properties": {
                "city": { "type": "string", "maxLength": 3 },
                "days": { "type": "integer", "minimum": 2.5 },
                "unit": { "enum": ["C", "F"] },
                "places": { "type": "array", "minItems": 2, "items": { "$ref": "#/$defs/Place" } },
                "deep": { "$ref": "#/$defs/Deep" },
                "maybe": { "anyOf": [{ "type": "null" }, { "type": ["null", "number"] }] },
                "exact": { "type": "string", "minLength": 6 },
                "flag": { "type": "boolean", "default": true },
                "left_out": { "type": "string" },
            },
            "$defs": {
                "Place": { "properties": { "x": { "type": "number", "maximum": 0.5 } }, "required": ["x"] },
                "Deep": { "type": "object", "required": ["deep"], "properties": { "deep": { "$ref": "#/$defs/Deep" } } },
            },
        });
        let made = Value::Object(generate_arguments(&schema, "Rome?"));
        let mut rest = made.clone();
        rest["deep"] = Value::Null;
        assert_eq!(
            rest,
            json!({
                "city": "Rom", "days": 3, "unit": "C", "places": [{ "x": 0.5 }, { "x": 0.5 }], "deep": null,
                "maybe": 1.0, "exact": "Rome?x", "flag": true,
            })
        );
        assert!(made["deep"].is_object(), "what leads to itself comes to an end");
        assert_eq!(generate_arguments(&json!({}), "x"), Map::new());
        assert_eq!(generate_arguments(&json!({ "type": "object" }), "x"), Map::new());
    }
}
