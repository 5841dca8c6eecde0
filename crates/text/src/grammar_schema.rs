//! Converts JSON schemas to a form that a grammar can enforce.
//!
//! The schema of a tool is embedded in a larger grammar, in which its references would point
//! elsewhere. It may also contain keywords that llguidance does not support. A [`GrammarSchema`]
//! contains every referenced schema among its own definitions, omits unsupported keywords, and
//! lists the omitted keywords with their paths.
//!
//! # Guarantees
//! - **It compiles**, both standalone and within a grammar: llguidance compiles it once, over
//!   single bytes.
//! - **It is never stricter**: a value that conforms to the schema also conforms to this form, in
//!   the order of its properties.
//! - **Nothing else is omitted**: a keyword is removed only if the schema does not compile with it.

use std::collections::{BTreeSet, HashMap};

use serde_json::{Map, Value, json};

use crate::schema::Schema;
use crate::vocabulary::{compile_error, with_large_stack};

/// Restrictive JSON Schema keywords that llguidance does not enforce, some of them silently.
const NOT_FOLLOWED: [&str; 12] = [
    "not",
    "if",
    "contains",
    "uniqueItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
];

/// JSON Schema keywords whose values are kept unchanged. A keyword comes before the keywords that
/// depend on it.
const PLAIN: [&str; 17] = [
    "type",
    "const",
    "enum",
    "required",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

/// String formats that llguidance enforces. Any other format is an annotation.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Maximum number of definitions that are copied to distinguish the branches of `oneOf`.
const MAX_COPIES: usize = 64;

/// Maximum number of trial compilations that search for the failing keywords of one schema.
const MAX_TRIALS: usize = 400;

/// A keyword of a JSON schema that a grammar cannot enforce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OmittedKeyword {
    /// Name of the tool whose parameters the schema describes. Empty for a response format.
    pub tool: String,
    /// JSON pointer, within the document, of the schema that contains the keyword.
    pub path: String,
    /// Name of the keyword, or `schema` if the value at the path is not a schema.
    pub keyword: String,
}

/// A JSON schema in a form that a grammar can enforce.
#[derive(Debug, Clone, Default)]
pub(crate) struct GrammarSchema {
    root: Value,
    definitions: Map<String, Value>,
    /// Keywords of the original schema that are omitted from this one.
    pub omitted: Vec<OmittedKeyword>,
}

impl GrammarSchema {
    /// Creates the enforceable form of a schema. `schema_pointer` is the JSON pointer of the schema
    /// in its document. Needs the stack of [`with_large_stack`].
    pub(crate) fn from_schema(schema: Schema<'_>, schema_pointer: &str) -> Self {
        let mut flattening = SchemaFlattener::default();
        let mut enforceable = GrammarSchema {
            root: flattening.flatten_schema(schema, schema_pointer),
            ..GrammarSchema::default()
        };
        while let Some((name, schema, schema_pointer)) = flattening.pending.pop() {
            let flat = flattening.flatten_schema(schema, &schema_pointer);
            enforceable.definitions.insert(name, flat);
        }
        enforceable.omitted = flattening.omitted;
        enforceable.omit_circular(&flattening.paths);
        enforceable.copy_branches();
        enforceable.omit_failing(schema_pointer, &flattening.paths);
        enforceable
    }

    /// Returns the schema as a JSON document, with its definitions.
    pub(crate) fn document(&self) -> Value {
        self.with_definitions(self.root.clone())
    }

    /// Returns a JSON document in which `embed` embeds this schema in another schema.
    pub(crate) fn embed_in(&self, embed: impl FnOnce(Value) -> Value) -> Value {
        self.with_definitions(embed(self.root.clone()))
    }

    /// Restricts the schema to objects if it does not specify a type.
    pub(crate) fn restrict_to_object(mut self) -> Self {
        let is_open = match &mut self.root {
            Value::Object(fields) if fields.contains_key("type") || fields.contains_key("$ref") => {
                false
            }
            Value::Object(fields) => fields.insert("type".into(), "object".into()).is_none(),
            _ => true,
        };
        if is_open && (!self.root.is_object() || compile_error(&self.document()).is_some()) {
            self.root = json!({ "type": "object" });
        }
        self
    }

    /// Closes the schemas of objects that list their properties and do not specify
    /// `additionalProperties`: only the listed properties are allowed. Otherwise an uncertain model
    /// would invent properties endlessly. Definitions that `allOf` composes stay open.
    pub(crate) fn close_objects(self) -> Self {
        let mut closed = self.clone();
        let mut composed = Vec::new();
        for schema in closed.definitions.values_mut().chain([&mut closed.root]) {
            visit_schemas(schema, &mut |fields| {
                let parts = fields.get("allOf").and_then(Value::as_array).into_iter().flatten();
                composed.extend(
                    parts.filter_map(|part| definition_name(part.get("$ref")?)).map(str::to_owned),
                );
            });
        }
        for (_, schema) in
            closed.definitions.iter_mut().filter(|(name, _)| !composed.contains(name))
        {
            close_schema(schema);
        }
        close_schema(&mut closed.root);
        if compile_error(&closed.document()).is_some() { self } else { closed }
    }

    fn with_definitions(&self, mut schema: Value) -> Value {
        if let (Some(fields), false) = (schema.as_object_mut(), self.definitions.is_empty()) {
            fields.insert("$defs".into(), self.definitions.clone().into());
        }
        schema
    }

    /// Removes references from definitions to which no finite value conforms. Such definitions are
    /// circular references, or objects that require an object of the same kind. They compile, but
    /// no completion could end.
    fn omit_circular(&mut self, paths: &HashMap<String, String>) {
        let mut endless: BTreeSet<String> = self.definitions.keys().cloned().collect();
        while let Some(name) =
            endless.iter().find(|name| is_finite(&self.definitions[*name], &endless)).cloned()
        {
            endless.remove(&name);
        }
        for name in &endless {
            let schema_pointer = paths.get(name).cloned().unwrap_or_default();
            let Some(schema) = self.definitions.get_mut(name) else { continue };
            visit_schemas(schema, &mut |fields| {
                if fields
                    .get("$ref")
                    .and_then(definition_name)
                    .is_some_and(|target| endless.contains(target))
                {
                    fields.remove("$ref");
                    let keyword = "$ref".to_owned();
                    self.omitted.push(OmittedKeyword {
                        tool: String::new(),
                        path: schema_pointer.clone(),
                        keyword,
                    });
                }
            });
        }
    }

    /// Replaces references among the branches of `oneOf` by copies of the definitions, because
    /// llguidance distinguishes the branches only then.
    fn copy_branches(&mut self) {
        let definitions = self.definitions.clone();
        let mut copies = 0;
        for schema in self.definitions.values_mut().chain([&mut self.root]) {
            visit_schemas(schema, &mut |fields| {
                for branch in
                    fields.get_mut("oneOf").and_then(Value::as_array_mut).into_iter().flatten()
                {
                    let target = branch.as_object().filter(|fields| fields.len() == 1);
                    let target = target.and_then(|fields| definition_name(fields.get("$ref")?));
                    if let Some(target) = target.and_then(|name| definitions.get(name))
                        && copies < MAX_COPIES
                    {
                        *branch = target.clone();
                        copies += 1;
                    }
                }
            });
        }
    }

    /// Removes the keywords that prevent the schema from compiling.
    fn omit_failing(&mut self, schema_pointer: &str, paths: &HashMap<String, String>) {
        if compile_error(&self.document()).is_none() {
            return;
        }
        let mut cleaning = SchemaCleaner { trials: 0, omitted: Vec::new() };
        let names: Vec<String> = self.definitions.keys().cloned().collect();
        for name in names {
            let schema_pointer = paths.get(&name).cloned().unwrap_or_default();
            if let Some(schema) = self.definitions.get_mut(&name) {
                cleaning.remove_failing_keywords(schema, &schema_pointer);
            }
        }
        cleaning.remove_failing_keywords(&mut self.root, schema_pointer);
        self.omitted.append(&mut cleaning.omitted);
        if compile_error(&self.document()).is_none() {
            return;
        }
        // The keywords fail only in combination: circular references with sibling keywords, or
        // sizes.
        let mut found = Vec::new();
        for schema in self.definitions.values_mut().chain([&mut self.root]) {
            visit_schemas(schema, &mut |fields| {
                if let Some(reference) = fields.get("$ref").cloned() {
                    found.extend(fields.keys().filter(|key| *key != "$ref").cloned());
                    *fields = Map::from_iter([("$ref".to_owned(), reference)]);
                }
            });
        }
        self.omitted.extend(found.iter().map(|keyword| omitted_keyword(schema_pointer, keyword)));
        if compile_error(&self.document()).is_some() {
            self.omitted.push(omitted_keyword(schema_pointer, "schema"));
            *self = GrammarSchema {
                root: true.into(),
                omitted: std::mem::take(&mut self.omitted),
                ..Self::default()
            };
        }
    }
}

fn omitted_keyword(schema_pointer: &str, keyword: &str) -> OmittedKeyword {
    OmittedKeyword { tool: String::new(), path: schema_pointer.into(), keyword: keyword.into() }
}

/// Returns the schema of a response format in the form that a grammar can enforce, and the omitted
/// keywords.
///
/// # Errors
/// Returns an error if the thread that compiles the schema cannot be started or panics.
pub fn enforceable_schema(schema: &Value) -> Result<(Value, Vec<OmittedKeyword>), String> {
    with_large_stack(|| {
        let enforceable = GrammarSchema::from_schema(Schema::from_document(schema), "");
        (enforceable.document(), enforceable.omitted)
    })
}

/// Collects a schema and all definitions that it references into one flat document.
#[derive(Default)]
struct SchemaFlattener<'a> {
    /// Names of definitions by the addresses of their schemas in memory.
    names: HashMap<*const Value, String>,
    /// JSON pointers of definitions in the original document, by name.
    paths: HashMap<String, String>,
    pending: Vec<(String, Schema<'a>, String)>,
    omitted: Vec<OmittedKeyword>,
}

impl<'a> SchemaFlattener<'a> {
    fn record_omitted(&mut self, schema_pointer: &str, keyword: &str) {
        self.omitted.push(OmittedKeyword {
            tool: String::new(),
            path: schema_pointer.into(),
            keyword: keyword.into(),
        });
    }

    fn flatten_schema(&mut self, schema: Schema<'a>, schema_pointer: &str) -> Value {
        let Value::Object(fields) = schema.value else {
            if !schema.value.is_boolean() {
                self.record_omitted(schema_pointer, "schema");
            }
            return schema.value.as_bool().unwrap_or(true).into();
        };
        let mut flat = Map::new();
        for (key, value) in fields {
            let child_pointer =
                || format!("{schema_pointer}/{}", key.replace('~', "~0").replace('/', "~1"));
            let value = match key.as_str() {
                "$ref" => {
                    match value
                        .as_str()
                        .and_then(|reference| schema.resolve(reference).zip(Some(reference)))
                    {
                        Some((target, reference)) => self.add_definition(target, reference).into(),
                        None => {
                            self.record_omitted(schema_pointer, key);
                            continue;
                        }
                    }
                }
                "properties" | "patternProperties" => match value {
                    Value::Object(all) => {
                        let each = all.iter().map(|(name, of)| {
                            let child_pointer = format!(
                                "{}/{}",
                                child_pointer(),
                                name.replace('~', "~0").replace('/', "~1")
                            );
                            (
                                name.clone(),
                                self.flatten_schema(schema.subschema(of), &child_pointer),
                            )
                        });
                        Value::Object(each.collect())
                    }
                    other => other.clone(),
                },
                "anyOf"
                | "oneOf"
                | "allOf"
                | "prefixItems"
                | "items"
                | "additionalItems"
                | "additionalProperties" => match value {
                    Value::Array(all) => {
                        let each = all.iter().enumerate();
                        each.map(|(at, of)| {
                            self.flatten_schema(
                                schema.subschema(of),
                                &format!("{}/{at}", child_pointer()),
                            )
                        })
                        .collect()
                    }
                    Value::Object(_) => {
                        self.flatten_schema(schema.subschema(value), &child_pointer())
                    }
                    other => other.clone(),
                },
                "format" if !FORMATS.iter().any(|known| *value == *known) => {
                    let types = schema.types();
                    if types.is_empty() || types.contains("string") {
                        self.record_omitted(schema_pointer, key);
                    }
                    continue;
                }
                key if PLAIN.contains(&key) => value.clone(),
                key => {
                    if NOT_FOLLOWED.contains(&key) && is_restrictive(key, value) {
                        self.record_omitted(schema_pointer, key);
                    }
                    continue;
                }
            };
            flat.insert(key.clone(), value);
        }
        flat.into()
    }

    /// Returns a reference to the definition of a schema. Adds the definition if it is missing.
    fn add_definition(&mut self, target: Schema<'a>, reference: &str) -> String {
        let count = self.names.len();
        let name = self.names.entry(target.value).or_insert_with(|| format!("s{count}")).clone();
        if self.paths.len() < self.names.len() {
            let schema_pointer =
                reference.split_once('#').map_or(reference, |(_, pointer)| pointer).to_owned();
            self.paths.insert(name.clone(), schema_pointer.clone());
            self.pending.push((name.clone(), target, schema_pointer));
        }
        format!("#/$defs/{name}")
    }
}

/// Returns whether a keyword that cannot be enforced restricts anything with this value.
fn is_restrictive(keyword: &str, value: &Value) -> bool {
    match keyword {
        "uniqueItems" | "not" => *value != false,
        "contains" | "$dynamicRef" | "$recursiveRef" => true,
        _ => *value != true && *value != json!({}),
    }
}

/// Returns the name of the definition that a reference points to.
fn definition_name(reference: &Value) -> Option<&str> {
    reference.as_str()?.strip_prefix("#/$defs/")
}

/// Returns whether a finite value can conform to a schema if no value conforms to the definitions
/// in `endless`.
fn is_finite(schema: &Value, endless: &BTreeSet<String>) -> bool {
    let Value::Object(fields) = schema else { return true };
    let all = |key: &str| {
        fields.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
    };
    let finite = |schema: &Value| is_finite(schema, endless);
    fields.get("$ref").and_then(definition_name).is_none_or(|name| !endless.contains(name))
        && all("allOf").iter().all(finite)
        && ["anyOf", "oneOf"].iter().all(|key| all(key).is_empty() || all(key).iter().any(finite))
        && all("required")
            .iter()
            .filter_map(|name| fields.get("properties")?.get(name.as_str()?))
            .all(finite)
}

/// Calls `visit` for a schema and each of its subschemas, inner schemas first.
fn visit_schemas(schema: &mut Value, visit: &mut dyn FnMut(&mut Map<String, Value>)) {
    let Value::Object(fields) = schema else { return };
    for (_, schema) in subschemas(fields) {
        visit_schemas(schema, visit);
    }
    visit(fields);
}

/// Closes the schema of an object against unlisted properties, and the schemas of its properties,
/// items and alternatives.
fn close_schema(schema: &mut Value) {
    const COMPOSED: [&str; 2] = ["allOf", "$ref"];
    const OPEN: [&str; 3] = ["additionalProperties", "patternProperties", "minProperties"];
    let Value::Object(fields) = schema else { return };
    if COMPOSED.iter().any(|key| fields.contains_key(*key)) {
        return;
    }
    let branches = ["anyOf", "oneOf"].iter().any(|key| fields.contains_key(*key));
    let named =
        fields.get("properties").and_then(Value::as_object).filter(|named| !named.is_empty());
    let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
    let names_all = named.is_some_and(|named| {
        required.filter_map(Value::as_str).all(|name| named.contains_key(name))
    });
    if names_all && branches {
        return;
    }
    if names_all && OPEN.iter().all(|key| !fields.contains_key(*key)) {
        fields.insert("additionalProperties".into(), false.into());
    }
    for (_, schema) in subschemas(fields) {
        close_schema(schema);
    }
}

/// Returns the subschemas of a schema, each with its path relative to the schema.
fn subschemas(fields: &mut Map<String, Value>) -> Vec<(String, &mut Value)> {
    let mut found: Vec<(String, &mut Value)> = Vec::new();
    for (key, value) in fields {
        match (key.as_str(), value) {
            ("properties" | "patternProperties", Value::Object(all)) => {
                found.extend(
                    all.iter_mut().map(|(name, schema)| (format!("/{key}/{name}"), schema)),
                );
            }
            ("anyOf" | "oneOf" | "allOf" | "prefixItems" | "items", Value::Array(all)) => {
                let each = all.iter_mut().enumerate();
                found.extend(each.map(|(at, schema)| (format!("/{key}/{at}"), schema)));
            }
            ("items" | "additionalItems" | "additionalProperties", schema @ Value::Object(_)) => {
                found.push((format!("/{key}"), schema));
            }
            _ => {}
        }
    }
    found
}

/// Finds and removes the keywords that prevent schemas from compiling.
struct SchemaCleaner {
    trials: usize,
    omitted: Vec<OmittedKeyword>,
}

impl SchemaCleaner {
    /// Returns whether a schema without its references does not compile. Also returns true after
    /// more than [`MAX_TRIALS`] trials.
    fn fails_to_compile(&mut self, fields: &Map<String, Value>) -> bool {
        self.trials += 1;
        self.trials > MAX_TRIALS
            || compile_error(&remove_references(&fields.clone().into())).is_some()
    }

    /// Removes keywords from a schema until the schema compiles without its definitions.
    fn remove_failing_keywords(&mut self, schema: &mut Value, schema_pointer: &str) {
        let Value::Object(fields) = schema else { return };
        for (child, schema) in subschemas(fields) {
            self.remove_failing_keywords(schema, &format!("{schema_pointer}{child}"));
        }
        if !self.fails_to_compile(fields) {
            return;
        }
        let mut keys: Vec<String> = fields.keys().cloned().collect();
        keys.sort_by_key(|key| keyword_rank(key));
        let mut kept = Map::new();
        for key in keys {
            let Some(value) = fields.get(&key) else { continue };
            kept.insert(key.clone(), value.clone());
            if !self.fails_to_compile(&kept) {
                continue;
            }
            kept.remove(&key);
            self.omitted.push(OmittedKeyword {
                tool: String::new(),
                path: schema_pointer.into(),
                keyword: key.clone(),
            });
            // Branches that may overlap are at least alternatives.
            if key == "oneOf" && !kept.contains_key("anyOf") {
                kept.insert("anyOf".into(), value.clone());
                if self.fails_to_compile(&kept) {
                    kept.remove("anyOf");
                }
            }
        }
        *fields = kept;
    }
}

fn keyword_rank(key: &str) -> usize {
    match key {
        "properties" | "items" | "prefixItems" => 1,
        "minProperties" | "maxProperties" | "oneOf" => 3,
        key if PLAIN.contains(&key) => usize::from(key != "type"),
        _ => 2,
    }
}

/// Returns a schema in which every reference is replaced by a schema that allows any value.
fn remove_references(schema: &Value) -> Value {
    match schema {
        Value::Object(fields) => {
            let kept = fields
                .iter()
                .filter(|(key, value)| *key != "$ref" || definition_name(value).is_none());
            kept.map(|(key, value)| (key.clone(), remove_references(value))).collect()
        }
        Value::Array(items) => items.iter().map(remove_references).collect(),
        other => other.clone(),
    }
}

#[cfg(test)]
#[path = "grammar_schema_tests.rs"]
mod tests;
