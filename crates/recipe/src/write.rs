//! Serializes typed keys as TOML: the inverse of [`read`](super::read).

use serde::Serialize;
use serde_content::{Data, Number, Serializer, Value as Content};
use toml::{Table, Value};

use super::read::{KIND, OPTIONS};

/// Error for a value that cannot be represented in TOML.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WriteError(String);

pub(super) fn to_write_error(error: impl std::fmt::Display) -> WriteError {
    WriteError(error.to_string())
}

/// Serializes a configuration as a TOML table. `None` values are omitted.
pub(super) fn write<T: Serialize>(value: &T) -> Result<Table, WriteError> {
    let content = Serializer::new().serialize(value).map_err(to_write_error)?;
    match to_value(content)? {
        Some(Value::Table(table)) => Ok(table),
        _ => Err(WriteError("the value is not a table, as a TOML file must be".into())),
    }
}

/// Converts serialized content to a TOML value, or `None` if the content is absent.
fn to_value(content: Content<'_>) -> Result<Option<Value>, WriteError> {
    Ok(Some(match content {
        Content::Unit | Content::Option(None) => return Ok(None),
        Content::Option(Some(content)) => return to_value(*content),
        // By way of the shortest decimal form: 0.1f32 is written as 0.1, and reads back as the same
        // f32.
        Content::Number(Number::F32(value)) => {
            Value::Float(value.to_string().parse().map_err(to_write_error)?)
        }
        Content::Seq(items) | Content::Tuple(items) => list_to_value(items)?,
        Content::Map(entries) => {
            let entries = entries.into_iter().map(|(key, value)| match key {
                Content::String(key) => Ok((key, value)),
                _ => Err(WriteError("keys must be strings".into())),
            });
            table_to_value(entries.collect::<Result<Vec<_>, _>>()?)?
        }
        Content::Struct(found) => return data_to_value(found.data),
        Content::Enum(found) => {
            let variant = Value::String(found.variant.clone().into_owned());
            match data_to_value(found.data)? {
                None => variant,
                Some(Value::Table(contents)) => {
                    let mut table = Table::from_iter([(KIND.to_owned(), variant)]);
                    table.extend(contents);
                    Value::Table(table)
                }
                Some(_) => {
                    return Err(WriteError(format!(
                        "the contents of the variant `{}` are not a table",
                        found.variant
                    )));
                }
            }
        }
        leaf => Value::try_from(leaf).map_err(to_write_error)?,
    }))
}

fn data_to_value(data: Data<'_>) -> Result<Option<Value>, WriteError> {
    match data {
        Data::Unit => Ok(None),
        Data::NewType { value } => to_value(value),
        Data::Tuple { values } => list_to_value(values).map(Some),
        Data::Struct { fields } => table_to_value(fields).map(Some),
    }
}

fn list_to_value(items: Vec<Content<'_>>) -> Result<Value, WriteError> {
    items
        .into_iter()
        .map(|item| {
            to_value(item)?.ok_or_else(|| WriteError("a list must not contain absent items".into()))
        })
        .collect::<Result<_, _>>()
        .map(Value::Array)
}

/// Name of the only field of a `serde_json` number, which contains its digits.
const NUMBER: &str = "$serde_json::private::Number";

fn table_to_value<'a, K: AsRef<str>>(
    fields: impl IntoIterator<Item = (K, Content<'a>)>,
) -> Result<Value, WriteError> {
    let mut table = Table::new();
    for (key, content) in fields {
        match (key.as_ref(), to_value(content)?) {
            (NUMBER, Some(Value::String(digits))) => return parse_json_number(&digits),
            (OPTIONS, Some(Value::Table(options))) => table.extend(options),
            // This kind has no contents.
            (OPTIONS, Some(kind)) => drop(table.insert(KIND.into(), kind)),
            (key, Some(value)) => drop(table.insert(key.to_owned(), value)),
            (_, None) => {}
        }
    }
    Ok(Value::Table(table))
}

/// Converts a JSON number, given by its digits, to TOML.
fn parse_json_number(digits: &str) -> Result<Value, WriteError> {
    if let Ok(integer) = digits.parse() {
        return Ok(Value::Integer(integer));
    }
    match digits.parse::<f64>() {
        Ok(float) if float.is_finite() && digits.contains(['.', 'e', 'E']) => {
            Ok(Value::Float(float))
        }
        _ => Err(WriteError(format!("the number {digits} is too large for TOML"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(json: &str) -> serde_json::Value {
        serde_json::from_str(json).unwrap()
    }

    /// The field name is private to `serde_json`. This test fails if a version changes it.
    #[test]
    fn write_preserves_json_numbers() {
        let schema = read(
            r#"{"a": {"minimum": 1e-08, "const": 1.10, "n": [3, -5, 2.5E3, 9223372036854775807]}}"#,
        );
        let table = write(&schema).unwrap();
        let numbers = &table["a"];
        assert_eq!(numbers.get("minimum"), Some(&Value::Float(1e-8)));
        assert_eq!(numbers.get("const"), Some(&Value::Float(1.1)));
        let items =
            [Value::Integer(3), Value::Integer(-5), Value::Float(2500.0), Value::Integer(i64::MAX)];
        assert_eq!(numbers.get("n"), Some(&Value::Array(items.to_vec())));
        let too_large =
            write(&json!({ "a": read("12345678901234567890123") })).unwrap_err().to_string();
        assert_eq!(too_large, "the number 12345678901234567890123 is too large for TOML");
        assert!(write(&json!({ "a": read("1e400") })).is_err());
    }
}
