//! From typed configuration to TOML values: the mirror image of [`read`](super::read).

use serde::ser::{self, Serialize, Serializer};
use toml::{Table, Value};

use super::read::KIND;

/// A value that TOML cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WriteError(String);

impl ser::Error for WriteError {
    fn custom<T: std::fmt::Display>(message: T) -> Self {
        WriteError(message.to_string())
    }
}

/// The configuration as a table; what is `None` is left out.
pub(super) fn write<T: Serialize>(value: &T) -> Result<Table, WriteError> {
    match value.serialize(Writer)? {
        Some(Value::Table(table)) => Ok(table),
        _ => Err(WriteError("a configuration must be a table".into())),
    }
}

/// Gives `None` for what is absent.
struct Writer;

type Written = Result<Option<Value>, WriteError>;

fn integer(value: impl TryInto<i64> + std::fmt::Display + Copy) -> Written {
    let number = value.try_into().map_err(|_| WriteError(format!("{value} is too large for TOML")))?;
    Ok(Some(Value::Integer(number)))
}

/// The only field of a number of `serde_json`, which holds its digits.
const NUMBER: &str = "$serde_json::private::Number";

/// Converts a number of JSON, by its digits.
fn number(digits: &str) -> Written {
    let float =
        || digits.parse::<f64>().ok().filter(|float| float.is_finite() && digits.contains(['.', 'e']));
    let number = digits.parse().map(Value::Integer).ok().or_else(|| float().map(Value::Float));
    number.map(Some).ok_or_else(|| WriteError(format!("{digits} is too large for TOML")))
}

/// A variant's contents with its name under `kind`.
fn tagged(variant: &str, contents: Table) -> Value {
    let mut table = Table::new();
    table.insert(KIND.into(), Value::String(variant.into()));
    table.extend(contents);
    Value::Table(table)
}

impl Serializer for Writer {
    type Ok = Option<Value>;
    type Error = WriteError;
    type SerializeSeq = Items;
    type SerializeTuple = Items;
    type SerializeTupleStruct = Items;
    type SerializeTupleVariant = ser::Impossible<Option<Value>, WriteError>;
    type SerializeMap = Entries;
    type SerializeStruct = Entries;
    type SerializeStructVariant = Entries;

    fn serialize_bool(self, value: bool) -> Written {
        Ok(Some(Value::Boolean(value)))
    }

    fn serialize_i8(self, value: i8) -> Written {
        integer(value)
    }

    fn serialize_i16(self, value: i16) -> Written {
        integer(value)
    }

    fn serialize_i32(self, value: i32) -> Written {
        integer(value)
    }

    fn serialize_i64(self, value: i64) -> Written {
        integer(value)
    }

    fn serialize_u8(self, value: u8) -> Written {
        integer(value)
    }

    fn serialize_u16(self, value: u16) -> Written {
        integer(value)
    }

    fn serialize_u32(self, value: u32) -> Written {
        integer(value)
    }

    fn serialize_u64(self, value: u64) -> Written {
        integer(value)
    }

    fn serialize_f32(self, value: f32) -> Written {
        // Through its shortest decimal form: 0.1f32 is to be written 0.1, and reads back as the same f32.
        let text = value.to_string();
        Ok(Some(Value::Float(text.parse().map_err(|_| WriteError(format!("{text} is not a number")))?)))
    }

    fn serialize_f64(self, value: f64) -> Written {
        Ok(Some(Value::Float(value)))
    }

    fn serialize_char(self, value: char) -> Written {
        self.serialize_str(value.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, value: &str) -> Written {
        Ok(Some(Value::String(value.into())))
    }

    fn serialize_bytes(self, _value: &[u8]) -> Written {
        Err(WriteError("bytes have no form in TOML".into()))
    }

    fn serialize_none(self) -> Written {
        Ok(None)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Written {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Written {
        Ok(None)
    }

    fn serialize_unit_struct(self, _name: &'static str) -> Written {
        Ok(None)
    }

    fn serialize_unit_variant(self, _name: &'static str, _index: u32, variant: &'static str) -> Written {
        self.serialize_str(variant)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, _name: &'static str, value: &T) -> Written {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        value: &T,
    ) -> Written {
        match value.serialize(self)? {
            Some(Value::Table(contents)) => Ok(Some(tagged(variant, contents))),
            _ => Err(WriteError(format!("the contents of `{variant}` must be a table"))),
        }
    }

    fn serialize_seq(self, _len: Option<usize>) -> Result<Items, WriteError> {
        Ok(Items(Vec::new()))
    }

    fn serialize_tuple(self, _len: usize) -> Result<Items, WriteError> {
        Ok(Items(Vec::new()))
    }

    fn serialize_tuple_struct(self, _name: &'static str, _len: usize) -> Result<Items, WriteError> {
        Ok(Items(Vec::new()))
    }

    fn serialize_tuple_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<Self::SerializeTupleVariant, WriteError> {
        Err(WriteError(format!("the contents of `{variant}` must be a table")))
    }

    fn serialize_map(self, _len: Option<usize>) -> Result<Entries, WriteError> {
        Ok(Entries { table: Table::new(), key: None, variant: None })
    }

    fn serialize_struct(self, _name: &'static str, _len: usize) -> Result<Entries, WriteError> {
        self.serialize_map(None)
    }

    fn serialize_struct_variant(
        self,
        _name: &'static str,
        _index: u32,
        variant: &'static str,
        _len: usize,
    ) -> Result<Entries, WriteError> {
        Ok(Entries { table: Table::new(), key: None, variant: Some(variant) })
    }
}

struct Items(Vec<Value>);

impl Items {
    fn push<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), WriteError> {
        let item = value.serialize(Writer)?.ok_or_else(|| WriteError("a list has no empty places".into()))?;
        self.0.push(item);
        Ok(())
    }
}

impl ser::SerializeSeq for Items {
    type Ok = Option<Value>;
    type Error = WriteError;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), WriteError> {
        self.push(value)
    }

    fn end(self) -> Written {
        Ok(Some(Value::Array(self.0)))
    }
}

impl ser::SerializeTuple for Items {
    type Ok = Option<Value>;
    type Error = WriteError;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), WriteError> {
        self.push(value)
    }

    fn end(self) -> Written {
        Ok(Some(Value::Array(self.0)))
    }
}

impl ser::SerializeTupleStruct for Items {
    type Ok = Option<Value>;
    type Error = WriteError;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), WriteError> {
        self.push(value)
    }

    fn end(self) -> Written {
        Ok(Some(Value::Array(self.0)))
    }
}

struct Entries {
    table: Table,
    key: Option<String>,
    variant: Option<&'static str>,
}

impl Entries {
    fn insert<T: Serialize + ?Sized>(&mut self, key: String, value: &T) -> Result<(), WriteError> {
        if let Some(value) = value.serialize(Writer)? {
            self.table.insert(key, value);
        }
        Ok(())
    }

    fn finish(self) -> Written {
        if let (None, 1, Some(Value::String(digits))) =
            (self.variant, self.table.len(), self.table.get(NUMBER))
        {
            return number(digits);
        }
        Ok(Some(match self.variant {
            Some(variant) => tagged(variant, self.table),
            None => Value::Table(self.table),
        }))
    }
}

impl ser::SerializeMap for Entries {
    type Ok = Option<Value>;
    type Error = WriteError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), WriteError> {
        match key.serialize(Writer)? {
            Some(Value::String(key)) => {
                self.key = Some(key);
                Ok(())
            }
            _ => Err(WriteError("keys must be texts".into())),
        }
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), WriteError> {
        let key = self.key.take().ok_or_else(|| WriteError("a value without its key".into()))?;
        self.insert(key, value)
    }

    fn end(self) -> Written {
        self.finish()
    }
}

impl ser::SerializeStruct for Entries {
    type Ok = Option<Value>;
    type Error = WriteError;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        key: &'static str,
        value: &T,
    ) -> Result<(), WriteError> {
        self.insert(key.into(), value)
    }

    fn end(self) -> Written {
        self.finish()
    }
}

impl ser::SerializeStructVariant for Entries {
    type Ok = Option<Value>;
    type Error = WriteError;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        key: &'static str,
        value: &T,
    ) -> Result<(), WriteError> {
        self.insert(key.into(), value)
    }

    fn end(self) -> Written {
        self.finish()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The name of the field is private to `serde_json`: a version that has another one fails here.
    #[test]
    fn json_numbers_stay_numbers() {
        let read = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        let schema =
            read(r#"{"a": {"minimum": 1e-08, "const": 1.10, "n": [3, -5, 2.5E3, 9223372036854775807]}}"#);
        let table = write(&schema).unwrap();
        let numbers = |table: &Table| table["a"].clone();
        assert_eq!(numbers(&table).get("minimum"), Some(&Value::Float(1e-8)));
        assert_eq!(numbers(&table).get("const"), Some(&Value::Float(1.1)));
        let items = [Value::Integer(3), Value::Integer(-5), Value::Float(2500.0), Value::Integer(i64::MAX)];
        assert_eq!(numbers(&table).get("n"), Some(&Value::Array(items.to_vec())));
        let too_large = write(&json!({ "a": read("12345678901234567890123") })).unwrap_err().to_string();
        assert_eq!(too_large, "12345678901234567890123 is too large for TOML");
        assert!(write(&json!({ "a": read("1e400") })).is_err());
    }
}
