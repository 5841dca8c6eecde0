//! Parameters of tools, in the formats that clients send.

use serde_json::{Map, Value, json};

/// Converts the parameters of a tool into a JSON schema. An object is returned unchanged, and null
/// becomes a schema without parameters. A list of `{"name", "type", "description", "required"}`,
/// which Qwen-Agent sends, is converted to a schema.
///
/// # Errors
/// Returns a message, such as "the parameters are 3, not …", if `parameters` has none of these
/// formats. The caller puts the tool's name before the message.
pub(crate) fn parameters_to_schema(parameters: &Value) -> Result<Value, String> {
    match parameters {
        Value::Null => Ok(json!({ "type": "object", "properties": {} })),
        Value::Object(_) => Ok(parameters.clone()),
        Value::Array(listed) => schema_from_list(listed),
        other => Err(format!("the parameters are {other}, not a JSON schema of an object")),
    }
}

fn schema_from_list(listed: &[Value]) -> Result<Value, String> {
    let mut properties = Map::new();
    let mut required = Vec::new();
    for (at, item) in listed.iter().enumerate() {
        let named =
            item.as_object().and_then(|fields| Some((fields.get("name")?.as_str()?, fields)));
        let Some((name, fields)) = named else {
            return Err(format!("the parameters are a list whose item {at} has no name: {item}"));
        };
        let mut schema = fields.clone();
        schema.remove("name");
        // Qwen-Agent sends a boolean here. In a JSON schema, `required` is a list of names.
        match schema.remove("required") {
            Some(Value::Bool(true)) => required.push(name),
            Some(list @ Value::Array(_)) => drop(schema.insert("required".into(), list)),
            None | Some(Value::Bool(false) | Value::Null) => {}
            Some(other) => {
                return Err(format!(
                    "the parameter {name:?} has required = {other}, not true or false"
                ));
            }
        }
        if properties.insert(name.to_owned(), Value::Object(schema)).is_some() {
            return Err(format!("the parameters have {name:?} twice"));
        }
    }
    Ok(json!({ "type": "object", "properties": properties, "required": required }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schema_converts_parameter_list() {
        let listed = json!([
            { "name": "city", "type": "string", "description": "Where.", "required": true },
            { "name": "days", "type": "integer" },
        ]);
        let want = json!({
            "type": "object",
            "properties": {
                "city": { "type": "string", "description": "Where." }, "days": { "type": "integer" },
            },
            "required": ["city"],
        });
        assert_eq!(parameters_to_schema(&listed), Ok(want));
        assert_eq!(parameters_to_schema(&json!([])).unwrap()["properties"], json!({}));
    }

    #[test]
    fn schema_rejects_ambiguous_parameters() {
        for (parameters, why) in [
            (json!(["city"]), "item 0 has no name"),
            (json!([{ "type": "string" }]), "item 0 has no name"),
            (json!([{ "name": "a" }, { "name": "a" }]), "\"a\" twice"),
            (json!([{ "name": "a", "required": "yes" }]), "required = \"yes\""),
            (json!("string"), "not a JSON schema"),
        ] {
            let error = parameters_to_schema(&parameters).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
