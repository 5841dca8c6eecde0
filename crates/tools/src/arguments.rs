//! Validation of a call's arguments against the schema of its tool.

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{JsonType, ValidationError, Validator};
use serde_json::{Map, Value};

/// Maximum number of characters in an error message, which may quote a value of any length that the
/// model has written.
const MAX_ERROR_CHARS: usize = 500;

/// Validator of a tool call's arguments by a JSON schema.
#[derive(Debug, Clone)]
pub struct ArgumentValidator {
    validator: Validator,
    names: Vec<String>,
    /// Names of optional arguments whose schema does not permit null.
    never_null: Vec<String>,
}

impl ArgumentValidator {
    /// Creates a validator for a JSON schema.
    ///
    /// # Errors
    /// Returns an error if the schema is invalid.
    pub fn new(schema: &Value) -> Result<Self, String> {
        let validator = jsonschema::validator_for(schema).map_err(|error| {
            match error.instance_path().as_str() {
                "" => error.to_string(),
                path => format!("{path}: {error}"),
            }
        })?;
        let properties = schema["properties"].as_object().into_iter().flatten();
        let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
        let mut names = Vec::new();
        let mut never_null = Vec::new();
        for (name, of) in properties {
            names.push(name.clone());
            let is_required = required.iter().any(|required| required == name);
            // This compiles a part of the schema by itself. If the part refers to another part,
            // compilation fails and nothing is known about it.
            let cannot_be_null =
                jsonschema::validator_for(of).is_ok_and(|of| !of.is_valid(&Value::Null));
            if !is_required && cannot_be_null {
                never_null.push(name.clone());
            }
        }
        Ok(ArgumentValidator { validator, names, never_null })
    }

    /// Validates the arguments of a tool call and returns them without superfluous nulls.
    ///
    /// # Errors
    /// Returns the errors of [`ArgumentValidator::check`].
    pub fn validate(&self, arguments: &Map<String, Value>) -> Result<Map<String, Value>, String> {
        let checked = self.remove_nulls(arguments);
        self.check(&checked).map(|()| checked)
    }

    /// Removes arguments that are null although they are optional and their schema does not permit
    /// null: models write null for an omitted argument.
    fn remove_nulls(&self, arguments: &Map<String, Value>) -> Map<String, Value> {
        let non_null = arguments.iter().filter(|(name, value)| {
            !(value.is_null() && self.never_null.iter().any(|known| known == *name))
        });
        non_null.map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    /// Returns the names of the tool's arguments, in the order of the schema.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Checks the arguments of a tool call by the schema.
    ///
    /// # Errors
    /// Returns a message that names the first invalid, missing or unknown argument. For a missing
    /// or unknown one, the message lists the arguments of the schema.
    pub fn check(&self, arguments: &Map<String, Value>) -> Result<(), String> {
        let arguments = Value::Object(arguments.clone());
        let errors: Vec<ValidationError<'_>> = self.validator.iter_errors(&arguments).collect();
        let Some(error) = first_error(&errors) else { return Ok(()) };
        let mut why = match describe_error(error) {
            why if error.instance_path().as_str().is_empty() => {
                let known_names = match &self.names[..] {
                    [] => "there are no arguments".to_owned(),
                    names => format!("the arguments are {}", names.join(", ")),
                };
                format!("{why}; {known_names}")
            }
            why => why,
        };
        if let Some((end, _)) = why.char_indices().nth(MAX_ERROR_CHARS) {
            why.truncate(end);
            why.push('…');
        }
        Err(why)
    }
}

/// Returns the first validation error. If it is a type error and the value also violates an enum,
/// returns the error that lists the choices instead.
fn first_error<'e, 'i>(errors: &'e [ValidationError<'i>]) -> Option<&'e ValidationError<'i>> {
    let first = errors.first()?;
    let is_type = matches!(first.kind(), ValidationErrorKind::Type { .. });
    errors
        .iter()
        .find(|error| {
            matches!(error.kind(), ValidationErrorKind::Enum { .. })
                && error.instance_path() == first.instance_path()
        })
        .filter(|_| is_type)
        .or(Some(first))
}

/// Describes a validation error with the path of the value and all permitted choices.
fn describe_error(error: &ValidationError<'_>) -> String {
    let path = error.instance_path().as_str().trim_start_matches('/').replace('/', ".");
    let why = match error.kind() {
        ValidationErrorKind::Enum { options } => {
            let options = options.as_array().map_or(&[][..], Vec::as_slice);
            let options: Vec<String> = options.iter().map(Value::to_string).collect();
            format!("{} is not one of {}", truncate_json(error.instance()), options.join(", "))
        }
        ValidationErrorKind::AnyOf { context } | ValidationErrorKind::OneOfNotValid { context } => {
            // The caller has passed a value, so the message need not mention that null is
            // permitted.
            let mut whys: Vec<String> = Vec::new();
            for error in context.iter().filter_map(|errors| first_error(errors)).filter(|error| {
                !matches!(
                    error.kind(),
                    ValidationErrorKind::Type { kind: TypeKind::Single(JsonType::Null) }
                )
            }) {
                let why = describe_error(error);
                if !whys.contains(&why) {
                    whys.push(why);
                }
            }
            if !whys.is_empty() {
                return whys.join(", or ");
            }
            error.to_string()
        }
        _ => error.to_string(),
    };
    if path.is_empty() { why } else { format!("{path}: {why}") }
}

/// Returns a JSON value as text, truncated because the model may have written a value of any
/// length.
fn truncate_json(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(MAX_ERROR_CHARS / 5) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn null_omits_optional_argument() {
        let schema = json!({
            "properties": {
                "city": { "type": "string" },
                "days": { "type": "integer", "default": 3 },
                "unit": { "enum": ["C", "F"] },
                "near": { "type": ["number", "null"] },
                "any": {},
            },
            "required": ["city"],
        });
        let arguments = ArgumentValidator::new(&schema).unwrap();
        let arguments_with_nulls = json!({ "city": null, "days": null, "unit": null, "near": null, "any": null, "x": null });
        let kept = arguments.remove_nulls(arguments_with_nulls.as_object().unwrap());
        assert_eq!(
            Value::Object(kept.clone()),
            json!({ "city": null, "near": null, "any": null, "x": null })
        );
        assert_eq!(arguments.check(&kept), Err("city: null is not of type \"string\"".into()));
    }

    #[test]
    fn argument_error_lists_all_choices_of_value() {
        let sizes: Vec<String> = (0..12).map(|size| format!("size-{size}")).collect();
        let schema = json!({ "properties": {
            "unit": { "anyOf": [{ "type": "string", "enum": ["C", "F"] }, { "type": "null" }] },
            "size": { "enum": sizes },
            "many": { "type": "array", "items": { "anyOf": [{ "type": "null" }, { "enum": ["a"] }] } },
            "either": { "oneOf": [{ "enum": ["a"] }, { "type": "integer", "maximum": 3 }] },
            "number": { "type": "integer", "enum": [1, 2] },
            "mixed": { "anyOf": [
                { "type": "string", "enum": ["C", "F"] },
                { "type": "integer", "enum": [1, 2] },
            ] },
            "tree": { "anyOf": [{ "anyOf": [{ "enum": [1] }, { "enum": [2] }] }, { "type": "null" }] },
        } });
        let arguments = ArgumentValidator::new(&schema).unwrap();
        let check = |value: Value| arguments.check(value.as_object().unwrap()).unwrap_err();
        assert_eq!(check(json!({ "unit": "K" })), "unit: \"K\" is not one of \"C\", \"F\"");
        let found = check(json!({ "size": "size-99" }));
        assert!(sizes.iter().all(|size| found.contains(size)), "{found}");
        assert_eq!(check(json!({ "many": ["a", "b"] })), "many.1: \"b\" is not one of \"a\"");
        let found = check(json!({ "either": 7 }));
        assert_eq!(
            found,
            "either: 7 is not one of \"a\", or either: 7 is greater than the maximum of 3"
        );
        assert_eq!(check(json!({ "number": "RED" })), "number: \"RED\" is not one of 1, 2");
        assert_eq!(
            check(json!({ "mixed": "K" })),
            "mixed: \"K\" is not one of \"C\", \"F\", or mixed: \"K\" is not one of 1, 2"
        );
        assert_eq!(
            check(json!({ "tree": 3 })),
            "tree: 3 is not one of 1, or tree: 3 is not one of 2"
        );
        assert!(check(json!({ "unit": "K".repeat(10_000) })).ends_with("\"C\", \"F\""));
    }

    #[test]
    fn argument_error_names_invalid_argument() {
        let schema = json!({
            "type": "object",
            "properties": {
                "city": { "type": "string" },
                "days": { "type": "integer", "maximum": 14 },
                "unit": { "enum": ["C", "F"] },
                "places": { "type": "array", "items": { "$ref": "#/$defs/Place" } },
            },
            "required": ["city"],
            "additionalProperties": false,
            "$defs": { "Place": { "type": "object", "required": ["x"] } },
        });
        let arguments = ArgumentValidator::new(&schema).unwrap();
        let check = |value: Value| arguments.check(value.as_object().unwrap());
        assert_eq!(
            check(json!({ "city": "Rome", "days": 3, "unit": "C", "places": [{ "x": 1 }] })),
            Ok(())
        );
        let long = "x".repeat(10_000);
        for (value, why) in [
            (
                json!({}),
                "\"city\" is a required property; the arguments are city, days, unit, places",
            ),
            (json!({ "city": 5 }), "city: 5 is not of type \"string\""),
            (json!({ "city": "a", "days": "3" }), "days: \"3\" is not of type \"integer\""),
            (json!({ "city": "a", "days": 15 }), "days: 15 is greater than the maximum of 14"),
            (json!({ "city": "a", "unit": "K" }), "unit: \"K\" is not one of \"C\", \"F\""),
            (json!({ "city": "a", "places": [{}] }), "places.0: \"x\" is a required property"),
            (
                json!({ "city": "a", "town": 1 }),
                "Additional properties are not allowed ('town' was unexpected)",
            ),
            (json!({ "city": "a", "days": long }), "days: \"xxx"),
        ] {
            let found = check(value).unwrap_err();
            assert!(
                found.starts_with(why) && found.chars().count() <= MAX_ERROR_CHARS + 1,
                "{found}"
            );
        }
        assert!(ArgumentValidator::new(&json!({ "type": "strin" })).unwrap_err().contains("strin"));
        assert_eq!(ArgumentValidator::new(&json!({})).unwrap().check(&Map::new()), Ok(()));
    }
}
