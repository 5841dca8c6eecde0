//! Descriptions of tools that an agent reads in place of those of the toolboxes.

use std::collections::BTreeMap;

use levade_text::ToolSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::ToolError;

/// Texts that replace descriptions, by the name with which the model calls the tool.
pub type ToolDescriptions = BTreeMap<String, ToolTexts>;

/// Texts that replace the descriptions of a tool and its parameters.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ToolTexts {
    /// Description of the tool. `None` keeps the description of the toolbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Descriptions of parameters, by parameter name. Other parameters keep the toolbox's
    /// descriptions.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<String, String>,
}

/// Returns the name and the schema of each of a tool's parameters.
fn parameter_schemas(spec: &ToolSpec) -> impl Iterator<Item = (&String, &Value)> {
    spec.parameters["properties"].as_object().into_iter().flatten()
}

/// Returns the description of a tool's parameter, which is empty if the toolbox gives none. Returns
/// `None` if the tool has no parameter of this name.
pub fn parameter_description<'a>(spec: &'a ToolSpec, name: &str) -> Option<&'a str> {
    let (_, schema) = parameter_schemas(spec).find(|(parameter, _)| *parameter == name)?;
    Some(schema["description"].as_str().unwrap_or_default())
}

/// Returns the names of tools, separated by commas.
pub fn tool_names(specs: &[ToolSpec]) -> String {
    specs.iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// Returns the names of a tool's parameters, separated by commas.
pub fn parameter_names(spec: &ToolSpec) -> String {
    parameter_schemas(spec).map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ")
}

/// Returns the tool `spec` with its descriptions replaced by the texts in `descriptions`.
pub(super) fn replace_texts(descriptions: &ToolDescriptions, mut spec: ToolSpec) -> ToolSpec {
    let Some(texts) = descriptions.get(&spec.name) else { return spec };
    if let Some(description) = &texts.description {
        spec.description.clone_from(description);
    }
    for (name, text) in &texts.parameters {
        let schema = spec.parameters.get_mut("properties").and_then(|all| all.get_mut(name));
        let Some(schema) = schema else { continue };
        if *schema == Value::Bool(true) {
            // The schema of any value, in its long form.
            *schema = json!({});
        }
        if let Value::Object(schema) = schema {
            schema.insert("description".to_owned(), text.as_str().into());
        }
    }
    spec
}

/// Checks that every tool and parameter in `descriptions` exists among `specs`.
///
/// # Errors
/// Returns [`ToolError::UnknownDescription`] with the first tool or parameter that does not exist.
pub(super) fn check_names(
    descriptions: &ToolDescriptions,
    specs: &[ToolSpec],
) -> Result<(), ToolError> {
    for (name, texts) in descriptions {
        let Some(spec) = specs.iter().find(|spec| spec.name == *name) else {
            let described = format!("the tool {name:?}");
            return Err(ToolError::UnknownDescription { described, known: tool_names(specs) });
        };
        let mut described = texts.parameters.keys();
        if let Some(parameter) =
            described.find(|parameter| parameter_description(spec, parameter).is_none())
        {
            let described = format!("the parameter {parameter:?} of the tool {name:?}");
            return Err(ToolError::UnknownDescription { described, known: parameter_names(spec) });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Calculator;

    fn descriptions(text: &str) -> ToolDescriptions {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn replace_texts_changes_only_given_descriptions() {
        let spec = Calculator::spec();
        let of_tool = descriptions(r#"{"calculator": {"description": "Computes."}}"#);
        let described = replace_texts(&of_tool, spec.clone());
        assert_eq!(described.description, "Computes.");
        assert_eq!(described.parameters, spec.parameters);
        let of_parameter =
            descriptions(r#"{"calculator": {"parameters": {"expression": "Like 1 + 2."}}}"#);
        let described = replace_texts(&of_parameter, spec.clone());
        assert_eq!(described.description, spec.description);
        assert_eq!(parameter_description(&described, "expression"), Some("Like 1 + 2."));
        assert_eq!(parameter_description(&described, "other"), None);
        let mut of_any = spec.clone();
        of_any.parameters["properties"]["expression"] = true.into();
        let described = replace_texts(&of_parameter, of_any);
        assert_eq!(parameter_description(&described, "expression"), Some("Like 1 + 2."));
        let of_other = descriptions(r#"{"search": {"description": "Searches."}}"#);
        assert_eq!(replace_texts(&of_other, spec.clone()), spec);
    }

    #[test]
    fn check_names_reports_unknown_tools_and_parameters() {
        let specs = [Calculator::spec()];
        for (text, described, known) in [
            (r#"{"calc": {}}"#, "the tool \"calc\"", "calculator"),
            (
                r#"{"calculator": {"parameters": {"x": "y"}}}"#,
                "the parameter \"x\" of the tool \"calculator\"",
                "expression",
            ),
        ] {
            let error = check_names(&descriptions(text), &specs).unwrap_err().to_string();
            assert!(error.contains(described) && error.ends_with(known), "{error}");
        }
        check_names(&descriptions(r#"{"calculator": {"parameters": {"expression": ""}}}"#), &specs)
            .unwrap();
    }
}
