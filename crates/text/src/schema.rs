//! Reads the JSON schemas of tools: resolves references, and lists the allowed types and
//! properties.
//!
//! A reference is resolved within its own document: pointers, anchors, and the ids of embedded
//! resources. Nothing is fetched. Circular references are followed for at most [`MAX_STEPS`]
//! schemas.

use std::collections::BTreeSet;

use serde_json::Value;

/// Maximum number of schemas that are visited to compute one property of a JSON schema.
const MAX_STEPS: usize = 500;

/// Prefixes of nonstandard type names, each with the JSON Schema type that it stands for, as in
/// vLLM.
const ALIASES: [(&str, &str); 14] = [
    ("str", "string"),
    ("text", "string"),
    ("varchar", "string"),
    ("char", "string"),
    ("enum", "string"),
    ("int", "integer"),
    ("uint", "integer"),
    ("long", "integer"),
    ("short", "integer"),
    ("float", "number"),
    ("double", "number"),
    ("bool", "boolean"),
    ("dict", "object"),
    ("list", "array"),
];

/// A JSON schema within its document.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Schema<'a> {
    document: &'a Value,
    /// The innermost resource (a schema with an id) around the schema. Pointers and anchors are
    /// resolved in it.
    resource: &'a Value,
    /// JSON value of the schema.
    pub value: &'a Value,
}

impl<'a> Schema<'a> {
    /// Creates the schema that consists of the complete document.
    pub(crate) fn from_document(document: &'a Value) -> Self {
        Schema { document, resource: document, value: document }
    }

    /// Returns the subschema `value` of this schema, in the same document.
    pub(crate) fn subschema(self, value: &'a Value) -> Self {
        let resource = if resource_id(value).is_some() { value } else { self.resource };
        Schema { resource, value, ..self }
    }

    /// Returns the schema that a `$ref` points to, or `None` if the document does not contain it.
    pub(crate) fn resolve(self, reference: &str) -> Option<Self> {
        let (resource, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let resource = match resource {
            "" => self.resource,
            name => find_object(self.document, &|value| {
                resource_id(value).is_some_and(|id| is_named(id, name))
            })?,
        };
        let fragment = decode_percent(fragment);
        let found = match fragment.as_str() {
            "" => resource,
            pointer if pointer.starts_with('/') => resource
                .pointer(pointer)
                .or_else(|| self.document.pointer(pointer))
                .or((pointer == "/").then_some(resource))?,
            anchor => find_object(resource, &|value| is_anchored(value, anchor))?,
        };
        Some(Schema { resource, ..self }.subschema(found))
    }

    /// Returns the types that the schema allows, by their names in JSON Schema. Empty if the schema
    /// does not restrict types. `nullable` adds `null`, as in OpenAPI.
    pub(crate) fn types(self) -> BTreeSet<&'a str> {
        let mut types = self.types_within(&mut MAX_STEPS.clone()).unwrap_or_default();
        if self.value["nullable"] == true && !types.is_empty() {
            types.insert("null");
        }
        types
    }

    /// Returns the intersection of the types that each keyword allows, or `None` if no keyword
    /// restricts them.
    fn types_within(self, steps: &mut usize) -> Option<BTreeSet<&'a str>> {
        *steps = steps.checked_sub(1)?;
        let value = self.value;
        let named = match &value["type"] {
            Value::String(name) => Some(BTreeSet::from([normalize_type_name(name)])),
            Value::Array(names) => {
                Some(names.iter().filter_map(Value::as_str).map(normalize_type_name).collect())
            }
            _ => None,
        };
        let constants = value["enum"].as_array().into_iter().flatten().chain(value.get("const"));
        let constants: BTreeSet<&str> = constants.map(json_type).collect();
        let mut restrictions = vec![named, Some(constants)];
        if let Some(target) = value["$ref"].as_str().and_then(|reference| self.resolve(reference)) {
            restrictions.push(target.types_within(steps));
        }
        for key in ["anyOf", "oneOf"] {
            let branches = value[key].as_array().into_iter().flatten();
            let branches: Option<Vec<_>> =
                branches.map(|value| self.subschema(value).types_within(steps)).collect();
            restrictions.push(branches.map(|types| types.into_iter().flatten().collect()));
        }
        for value in value["allOf"].as_array().into_iter().flatten() {
            restrictions.push(self.subschema(value).types_within(steps));
        }
        let restrictions = restrictions.into_iter().flatten().filter(|types| !types.is_empty());
        restrictions.reduce(|one, other| {
            let both = intersect_types(&one, &other);
            // The schema contradicts itself: the first keyword counts.
            if both.is_empty() { one } else { both }
        })
    }

    /// Returns the properties that the schema of an object names, including the properties that
    /// references and combinators add.
    pub(crate) fn properties(self) -> Vec<(&'a str, Schema<'a>)> {
        let mut found = Vec::new();
        self.add_properties(&mut MAX_STEPS.clone(), &mut found);
        found
    }

    fn add_properties(self, steps: &mut usize, found: &mut Vec<(&'a str, Schema<'a>)>) {
        let Some(left) = steps.checked_sub(1) else { return };
        *steps = left;
        let value = self.value;
        for (name, property) in value["properties"].as_object().into_iter().flatten() {
            if found.iter().all(|(known, _)| known != name) {
                found.push((name, self.subschema(property)));
            }
        }
        if let Some(target) = value["$ref"].as_str().and_then(|reference| self.resolve(reference)) {
            target.add_properties(steps, found);
        }
        for branch in ["allOf", "anyOf", "oneOf"]
            .iter()
            .flat_map(|key| value[*key].as_array().into_iter().flatten())
        {
            self.subschema(branch).add_properties(steps, found);
        }
    }

    /// Returns the names of an object's required properties, including those that references and
    /// `allOf` add.
    pub(crate) fn required(self) -> BTreeSet<&'a str> {
        let mut found = BTreeSet::new();
        self.add_required(&mut MAX_STEPS.clone(), &mut found);
        found
    }

    fn add_required(self, steps: &mut usize, found: &mut BTreeSet<&'a str>) {
        let Some(left) = steps.checked_sub(1) else { return };
        *steps = left;
        found.extend(
            self.value["required"].as_array().into_iter().flatten().filter_map(Value::as_str),
        );
        if let Some(target) =
            self.value["$ref"].as_str().and_then(|reference| self.resolve(reference))
        {
            target.add_required(steps, found);
        }
        for part in self.value["allOf"].as_array().into_iter().flatten() {
            self.subschema(part).add_required(steps, found);
        }
    }

    /// Returns the values that the schema allows in a list (`enum` or `const`), or `None` if it has
    /// no such list.
    pub(crate) fn listed_values(self) -> Option<&'a [Value]> {
        let mut schema = self;
        for _ in 0..MAX_STEPS {
            if let Some(values) = schema.value["enum"].as_array() {
                return Some(values);
            }
            if let Some(value) = schema.value.get("const") {
                return Some(std::slice::from_ref(value));
            }
            schema = schema.resolve(schema.value["$ref"].as_str()?)?;
        }
        None
    }

    /// Returns the strings that the schema allows in a list, or `None` if it lists other values or
    /// has no list.
    pub(crate) fn listed_strings(self) -> Option<Vec<&'a str>> {
        let texts: Option<Vec<_>> = self.listed_values()?.iter().map(Value::as_str).collect();
        texts.filter(|all| !all.is_empty())
    }
}

/// Returns the JSON Schema types that two restrictions both allow. An integer is also a number.
fn intersect_types<'a>(one: &BTreeSet<&'a str>, other: &BTreeSet<&'a str>) -> BTreeSet<&'a str> {
    types_covered_by(one, other).into_iter().chain(types_covered_by(other, one)).collect()
}

fn types_covered_by<'a>(of: &BTreeSet<&'a str>, by: &BTreeSet<&'a str>) -> Vec<&'a str> {
    of.iter()
        .filter(|name| by.contains(**name) || (**name == "integer" && by.contains("number")))
        .copied()
        .collect()
}

/// Returns the JSON Schema type of a value.
pub(crate) fn json_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.as_str().contains(['.', 'e']) => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Returns the JSON Schema type for a type name in a document, which can be nonstandard, such as
/// `str`.
fn normalize_type_name(name: &str) -> &str {
    const NAMES: [&str; 7] = ["string", "integer", "number", "boolean", "array", "object", "null"];
    if NAMES.contains(&name) {
        return name;
    }
    let lower = name.to_lowercase();
    if let Some(known) = NAMES.into_iter().find(|known| *known == lower) {
        return known;
    }
    ALIASES.into_iter().find(|(alias, _)| lower.starts_with(alias)).map_or(name, |(_, known)| known)
}

/// Returns the id of a schema resource, or `None` if the value is not a resource.
fn resource_id(value: &Value) -> Option<&str> {
    let id = value.get("$id").or_else(|| value.get("id"))?.as_str()?;
    (!id.starts_with('#') && !id.is_empty()).then_some(id)
}

/// Returns whether the reference `name` names the schema resource with this id. `name` may be
/// relative to another id.
fn is_named(id: &str, name: &str) -> bool {
    let id = id.trim_end_matches('#');
    id == name
        || id
            .strip_suffix(name.trim_start_matches("./"))
            .is_some_and(|before| before.ends_with('/'))
}

fn is_anchored(value: &Value, anchor: &str) -> bool {
    let names = |key: &str| value.get(key).and_then(Value::as_str);
    ["$anchor", "$dynamicAnchor"].into_iter().any(|key| names(key) == Some(anchor))
        || ["$id", "id"]
            .into_iter()
            .any(|key| names(key).and_then(|id| id.strip_prefix('#')) == Some(anchor))
}

/// Returns the first JSON object within a value for which `condition` returns true.
fn find_object<'a>(value: &'a Value, condition: &dyn Fn(&Value) -> bool) -> Option<&'a Value> {
    match value {
        Value::Object(fields) if condition(value) => Some(value).filter(|_| !fields.is_empty()),
        Value::Object(fields) => fields.values().find_map(|value| find_object(value, condition)),
        Value::Array(items) => items.iter().find_map(|item| find_object(item, condition)),
        _ => None,
    }
}

/// Decodes percent-encoded characters such as `%20` in URI fragments.
fn decode_percent(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let hex = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.filter(|_| byte == b'%').and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(decoded) => {
                bytes.push(decoded);
                rest = &after[2..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn types(schema: Value) -> Vec<String> {
        let document = json!({
            "properties": { "v": schema, "w": { "type": "boolean" }, "a/b%": { "type": "null" } },
            "$defs": {
                "Code": { "type": "string", "enum": ["1", "2"], "$anchor": "code" },
                "Chain": { "$ref": "#/$defs/Code" },
                "Loop": { "$ref": "#/$defs/Loop" },
                "Other": { "$id": "https://example.com/other.json", "$ref": "#/$defs/Inner",
                           "$defs": { "Inner": { "type": "array" } } },
            },
            "definitions": { "Old": { "type": "integer" }, "Named": { "$id": "#old", "type": "object" } },
        });
        let root = Schema::from_document(&document);
        root.subschema(&document["properties"]["v"])
            .types()
            .into_iter()
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn schema_types_follow_references_and_combinators() {
        for (schema, want) in [
            (json!({ "$ref": "#/$defs/Code" }), vec!["string"]),
            (json!({ "$ref": "#/$defs/Chain" }), vec!["string"]),
            (json!({ "$ref": "#/$defs/Loop" }), vec![]),
            (json!({ "$ref": "#/$defs/Nowhere" }), vec![]),
            (json!({ "$ref": "#code" }), vec!["string"]),
            (json!({ "$ref": "#old" }), vec!["object"]),
            (json!({ "$ref": "#/definitions/Old" }), vec!["integer"]),
            (json!({ "$ref": "#/properties/w" }), vec!["boolean"]),
            (json!({ "$ref": "#/properties/a~1b%25" }), vec!["null"]),
            (json!({ "$ref": "https://example.com/other.json" }), vec!["array"]),
            (json!({ "$ref": "other.json#/$defs/Inner" }), vec!["array"]),
            (
                json!({ "anyOf": [{ "$ref": "#/$defs/Code" }, { "type": "null" }] }),
                vec!["null", "string"],
            ),
            (
                json!({ "oneOf": [{ "$ref": "#/definitions/Old" }, { "const": "x" }] }),
                vec!["integer", "string"],
            ),
            (json!({ "allOf": [{ "$ref": "#/$defs/Code" }], "description": "d" }), vec!["string"]),
            (
                json!({ "allOf": [{ "minLength": 2 }, { "type": ["string", "null"] }] }),
                vec!["null", "string"],
            ),
            (
                json!({ "type": ["string", "null"], "allOf": [{ "type": "string" }] }),
                vec!["string"],
            ),
            (json!({ "type": "number", "anyOf": [{ "type": "integer" }] }), vec!["integer"]),
            (json!({ "type": "string", "enum": [1, 2] }), vec!["string"]),
            (json!({ "enum": ["a", null, 2] }), vec!["integer", "null", "string"]),
            (json!({ "type": "integer", "nullable": true }), vec!["integer", "null"]),
            // A branch that allows anything removes the restriction.
            (json!({ "anyOf": [{ "type": "string" }, {}] }), vec![]),
            (json!({ "type": "Dict[str, int]" }), vec!["object"]),
            (json!({ "type": "INT32" }), vec!["integer"]),
            (json!({ "type": "datetime" }), vec!["datetime"]),
            (json!({}), vec![]),
            (json!(true), vec![]),
            (json!("x"), vec![]),
        ] {
            assert_eq!(types(schema.clone()), want, "{schema}");
        }
    }

    #[test]
    fn schema_properties_follow_references_and_combinators() {
        let document = json!({
            "$ref": "#/$defs/Args",
            "$defs": {
                "Args": { "allOf": [{ "$ref": "#/$defs/Base" }, { "properties": { "b": { "type": "string" } } }] },
                "Base": { "properties": { "a": { "$ref": "#/$defs/Num" }, "b": { "type": "null" } } },
                "Num": { "type": "integer" },
            },
        });
        let found = Schema::from_document(&document).properties();
        let found: Vec<_> = found.iter().map(|(name, of)| (*name, of.types())).collect();
        assert_eq!(found, [("a", ["integer"].into()), ("b", ["null"].into())]);
        let circle = json!({ "allOf": [{ "$ref": "#" }], "properties": { "x": {} } });
        assert_eq!(Schema::from_document(&circle).properties().len(), 1);
    }

    #[test]
    fn listed_strings_follow_references() {
        let document =
            json!({ "$defs": { "E": { "enum": ["a", "b"] }, "M": { "enum": ["a", 1] } } });
        let texts = |schema: &Value| {
            Schema { value: schema, ..Schema::from_document(&document) }
                .listed_strings()
                .map(|all| all.join(","))
        };
        assert_eq!(texts(&json!({ "$ref": "#/$defs/E" })).as_deref(), Some("a,b"));
        assert_eq!(texts(&json!({ "const": "c" })).as_deref(), Some("c"));
        for other in
            [json!({ "$ref": "#/$defs/M" }), json!({ "enum": [] }), json!({ "type": "string" })]
        {
            assert_eq!(texts(&other), None, "{other}");
        }
    }
}
