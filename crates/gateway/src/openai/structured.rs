//! Format constraints on completions, as the fields of OpenAI and vLLM specify them.

use serde_json::{Map, Value};

use crate::gateway::Gateway;
use levade_call::ApiError;
use levade_call::Constraint;

/// Returns the format constraint that the request field `response_format` specifies.
fn parse_response_format(value: Option<&Value>) -> Result<Option<Constraint>, ApiError> {
    let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(None) };
    match value["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Constraint::JsonObject)),
        Some("json_schema") => match &value["json_schema"]["schema"] {
            schema @ (Value::Object(_) | Value::Bool(_)) => {
                Ok(Some(Constraint::JsonSchema(schema.clone())))
            }
            other => Err(ApiError::field(
                "response_format",
                format!("json_schema.schema is {other}, but must be a JSON schema"),
            )),
        },
        _ => Err(ApiError::field(
            "response_format",
            format!(
                "response_format is {value}, but its type must be text, json_object or json_schema"
            ),
        )),
    }
}

/// Earlier names of vLLM's request fields for format constraints, each with the equivalent key of
/// `structured_outputs`.
const GUIDED_FIELDS: [(&str, &str); 5] = [
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("guided_json_object", "json_object"),
];

/// Returns the format constraint that the request field `structured_outputs` or one of the earlier
/// `guided_…` fields specifies. Removes these fields from `rest`.
///
/// # Errors
/// Returns an error if a value is not a valid constraint, or if there are several constraints.
pub(crate) fn take_vllm_constraint(
    gateway: &Gateway,
    rest: &mut Map<String, Value>,
) -> Result<Option<Constraint>, ApiError> {
    let mut found = None;
    if let Some(outputs) = rest.remove("structured_outputs").filter(|outputs| !outputs.is_null()) {
        let Value::Object(outputs) = outputs else {
            let message = format!("structured_outputs is {outputs}, but must be an object");
            return Err(ApiError::field("structured_outputs", message));
        };
        for (kind, value) in &outputs {
            let field = format!("structured_outputs.{kind}");
            match kind.as_str() {
                "json" | "regex" | "choice" | "grammar" | "json_object" => {
                    found = at_most_one(found, parse_vllm_constraint(&field, kind, value)?)?;
                }
                "structural_tag" if !value.is_null() => {
                    let message =
                        format!("{field} is not supported; use json, regex, choice or grammar");
                    return Err(ApiError::field(&field, message));
                }
                // Options of the serialization and of the library, which the gateway decides.
                _ if value.is_null() => {}
                _ => gateway.count_unknown_field("structured_outputs", kind),
            }
        }
    }
    for (field, kind) in GUIDED_FIELDS {
        if let Some(value) = rest.remove(field) {
            found = at_most_one(found, parse_vllm_constraint(field, kind, &value)?)?;
        }
    }
    Ok(found)
}

/// Request fields by which some API, not necessarily the called API, constrains the format of a
/// completion.
const CONSTRAINT_FIELDS: [&str; 14] = [
    "ebnf",
    "format",
    "grammar",
    "guided_structural_tag",
    "guided_whitespace_pattern",
    "json_schema",
    "output_config",
    "output_format",
    "output_schema",
    "regex",
    "response_format",
    "response_schema",
    "structural_tag",
    "text",
];

/// Returns the format constraint of a request, and removes `response_format` and vLLM's fields from
/// the request body `rest`. `own` is the constraint in a field of the called API, if any.
///
/// # Errors
/// Returns an error if there are several constraints. Returns an error that names the field if its
/// value is not a valid constraint, or if the called API does not support the field.
pub(crate) fn take_constraint(
    gateway: &Gateway,
    own: Option<Constraint>,
    rest: &mut Map<String, Value>,
) -> Result<Option<Constraint>, ApiError> {
    let constraint = parse_response_format(rest.remove("response_format").as_ref())?;
    let constraint =
        at_most_one(at_most_one(own, constraint)?, take_vllm_constraint(gateway, rest)?)?;
    for field in CONSTRAINT_FIELDS {
        let Some(value) = rest.get(field) else { continue };
        // In these APIs, the field has members other than the format.
        let requested = match field {
            "text" | "output_config" => &value["format"],
            _ => value,
        };
        if !requested.is_null() && requested["type"] != "text" {
            let message = format!(
                "{field} is not supported here; set the output format in response_format or \
                 structured_outputs"
            );
            return Err(ApiError::field(field, message));
        }
    }
    Ok(constraint)
}

/// Returns the constraint that is present, or `None` if both are absent.
///
/// # Errors
/// Returns an error if both constraints are present.
pub(crate) fn at_most_one(
    one: Option<Constraint>,
    other: Option<Constraint>,
) -> Result<Option<Constraint>, ApiError> {
    if one.is_some() && other.is_some() {
        let message = "several fields set an output format; set only one";
        return Err(ApiError::field("structured_outputs", message));
    }
    Ok(one.or(other))
}

/// Parses a format constraint of one of vLLM's kinds: `json`, `json_object`, `regex`, `choice` or
/// `grammar`. Null and `json_object: false` yield `None`.
fn parse_vllm_constraint(
    field: &str,
    kind: &str,
    value: &Value,
) -> Result<Option<Constraint>, ApiError> {
    let wrong =
        |must: &str| ApiError::field(field, format!("{field} is {value}, but must be {must}"));
    let text = || value.as_str().map(str::to_owned).ok_or_else(|| wrong("a string"));
    if value.is_null() {
        return Ok(None);
    }
    Ok(Some(match kind {
        "json" => parse_json_schema(field, value)?,
        "regex" => Constraint::Regex(text()?),
        "grammar" => Constraint::Grammar(text()?),
        "choice" => {
            let texts: Option<Vec<&str>> = value
                .as_array()
                .map(|list| list.iter().map(Value::as_str).collect())
                .unwrap_or_default();
            let texts = texts
                .filter(|texts| !texts.is_empty())
                .ok_or_else(|| wrong("a list of strings with at least one entry"))?;
            let escaped: Vec<String> = texts.into_iter().map(regex::escape).collect();
            Constraint::Regex(format!("(?:{})", escaped.join("|")))
        }
        _ => match value.as_bool() {
            Some(true) => Constraint::JsonObject,
            Some(false) => return Ok(None),
            None => return Err(wrong("true or false")),
        },
    }))
}

/// Parses a JSON schema as a format constraint. `value` is an object, a boolean, or the JSON text
/// of a schema.
///
/// # Errors
/// Returns an error if `value` has another type or is not valid JSON.
pub(crate) fn parse_json_schema(field: &str, value: &Value) -> Result<Constraint, ApiError> {
    let schema = match value {
        Value::String(text) => serde_json::from_str(text).map_err(|error| {
            ApiError::field(field, format!("{field} is not valid JSON: {error}"))
        })?,
        other => other.clone(),
    };
    match schema {
        Value::Object(_) | Value::Bool(_) => Ok(Constraint::JsonSchema(schema)),
        other => {
            Err(ApiError::field(field, format!("{field} is {other}, but must be a JSON schema")))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::GatewayOptions;

    fn read(rest: Value) -> Result<Option<Constraint>, ApiError> {
        let gateway = Gateway::new(Vec::new(), GatewayOptions::default());
        let Value::Object(mut rest) = rest else { unreachable!("tests give objects") };
        take_vllm_constraint(&gateway, &mut rest)
    }

    #[test]
    fn structured_outputs_equal_guided_fields() {
        let schema = json!({ "type": "integer" });
        let choice = Constraint::Regex("(?:a\\.b|c)".into());
        for (kind, value, constraint) in [
            ("json", schema.clone(), Constraint::JsonSchema(schema.clone())),
            ("json", schema.to_string().into(), Constraint::JsonSchema(schema.clone())),
            ("regex", json!("a+"), Constraint::Regex("a+".into())),
            ("choice", json!(["a.b", "c"]), choice),
            ("grammar", json!("start: \"a\""), Constraint::Grammar("start: \"a\"".into())),
            ("json_object", json!(true), Constraint::JsonObject),
        ] {
            let mut outputs = Map::new();
            outputs.insert(kind.into(), value.clone());
            assert_eq!(
                read(json!({ "structured_outputs": outputs })).unwrap(),
                Some(constraint.clone()),
                "{kind}"
            );
            let mut guided = Map::new();
            guided.insert(format!("guided_{kind}"), value);
            assert_eq!(read(guided.into()).unwrap(), Some(constraint), "{kind}");
        }
        assert_eq!(
            read(json!({ "structured_outputs": null, "guided_json_object": false })).unwrap(),
            None
        );
    }

    #[test]
    fn take_constraint_rejects_format_fields_of_foreign_apis() {
        let gateway = Gateway::new(Vec::new(), GatewayOptions::default());
        let read = |rest: Value| {
            let Value::Object(mut rest) = rest else { unreachable!("tests give objects") };
            take_constraint(&gateway, None, &mut rest)
        };
        let format = json!({ "type": "json_schema", "schema": {} });
        for (field, value) in [
            ("text", json!({ "format": format })),
            ("output_config", json!({ "format": format })),
            ("output_format", format.clone()),
            ("regex", json!("a+")),
            ("json_schema", json!("{}")),
            ("ebnf", json!("root ::= \"a\"")),
            ("grammar", json!("x")),
            ("structural_tag", json!("x")),
        ] {
            let error = read(json!({ field: value })).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{error}");
        }
        for rest in [
            json!({ "text": null, "output_format": null, "regex": null }),
            json!({ "text": { "format": null, "verbosity": "low" }, "output_config": { "effort": "low" } }),
            json!({ "text": { "format": { "type": "text" } }, "response_format": { "type": "text" } }),
        ] {
            assert_eq!(read(rest).unwrap(), None);
        }
        let both = json!({ "response_format": { "type": "json_object" }, "guided_regex": "a" });
        assert_eq!(read(both).unwrap_err().param.as_deref(), Some("structured_outputs"));
    }

    #[test]
    fn take_vllm_constraint_names_invalid_field() {
        for (rest, param) in [
            (json!({ "structured_outputs": { "regex": 1 } }), "structured_outputs.regex"),
            (json!({ "structured_outputs": [] }), "structured_outputs"),
            (
                json!({ "structured_outputs": { "structural_tag": "x" } }),
                "structured_outputs.structural_tag",
            ),
            (json!({ "guided_choice": [] }), "guided_choice"),
            (json!({ "guided_choice": ["a", 1] }), "guided_choice"),
            (json!({ "guided_json": "{" }), "guided_json"),
            (json!({ "guided_json": 1 }), "guided_json"),
            (json!({ "guided_regex": "a", "guided_json": {} }), "structured_outputs"),
        ] {
            let error = read(rest.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{rest}: {error}");
        }
    }
}
