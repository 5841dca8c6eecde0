//! Reads rows of a Parquet file in the layout of Python's `datasets`: structs are objects, lists
//! are lists, absent values are null.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use levade_policy::catch_panic;
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Number, Value};

use super::fields::SkippedColumn;
use super::temporal::ColumnShape;
use crate::RowLocation;

/// Passes the rows of a Parquet file to `each` one by one. The last argument of `each` states
/// whether columns were left out. A column is left out if it cannot be read or shares its name with
/// another column, unless it is `needed`.
///
/// # Errors
/// Returns an error if the file is damaged or compressed with brotli, or if `each` fails.
/// `to_error` makes an error from a description of the file.
pub(super) fn read_all_rows<E>(
    bytes: Vec<u8>,
    needed: &dyn Fn(&str) -> bool,
    to_error: impl Fn(String) -> E,
    mut each: impl FnMut(RowLocation, Map<String, Value>, bool) -> Result<(), E>,
) -> Result<Vec<SkippedColumn>, E> {
    let bytes = Bytes::from(bytes);
    let damaged = |why: String| {
        to_error(format!("the file is damaged or truncated ({why}): copy or fetch it again"))
    };
    let columns = list_columns(&bytes).map_err(damaged)?;
    if columns.iter().any(|column| column.is_brotli) {
        let why = "the file is compressed with brotli, which is not supported: save it with \
                  snappy, zstd or gzip";
        return Err(to_error(why.to_owned()));
    }
    let mut names = HashSet::new();
    let mut skipped_columns = Vec::new();
    for ParquetColumn { name, .. } in columns.iter().filter(|column| !names.insert(&column.name)) {
        if needed(name) {
            return Err(to_error(format!(
                "the file has two columns named {name:?}: rename one of them"
            )));
        }
        skipped_columns
            .push(SkippedColumn { column: name.clone(), why: "occurs twice".to_owned() });
    }
    let mut read = read_rows(&bytes, needed, &skipped_columns);
    if matches!(&read, Err(ParquetReadError::Damaged(_))) {
        // The library may fail on a column that is not needed, so each of these columns is tried
        // separately.
        for ParquetColumn { name, .. } in columns.into_iter().filter(|column| !needed(&column.name))
        {
            let column_result =
                read_columns(&bytes, &|other: &str| other == name, needed, &mut |_| {});
            if let Err(ParquetReadError::Damaged(why)) = column_result {
                skipped_columns
                    .push(SkippedColumn { column: name, why: format!("cannot be read ({why})") });
            }
        }
        if !skipped_columns.is_empty() {
            read = read_rows(&bytes, needed, &skipped_columns);
        }
    }
    let (rows, unshown) = read.map_err(|unread| match unread {
        ParquetReadError::Damaged(why) => damaged(why),
        ParquetReadError::Column { name, why } => {
            to_error(format!("the file cannot be used: the column {name:?} {why}"))
        }
    })?;
    skipped_columns.extend(unshown);
    for (at, mut row) in rows.into_iter().enumerate() {
        row.retain(|name, _| {
            !skipped_columns.iter().any(|skipped_columns| skipped_columns.column == *name)
        });
        row.values_mut().for_each(remove_absent_members);
        each(RowLocation::Row(at + 1), row, !skipped_columns.is_empty())?;
    }
    Ok(skipped_columns)
}

/// A column of a Parquet file, as the footer of the file describes it.
struct ParquetColumn {
    name: String,
    is_brotli: bool,
}

fn list_columns(bytes: &Bytes) -> Result<Vec<ParquetColumn>, String> {
    // The library panics on some malformed files.
    let read = catch_panic(|| {
        let reader = SerializedFileReader::new(bytes.clone()).map_err(|error| error.to_string())?;
        let file = reader.metadata();
        let is_brotli = |name: &str| {
            let chunks = file.row_groups().iter().flat_map(|group| group.columns());
            let mut chunks = chunks
                .filter(|chunk| chunk.column_path().parts().first().is_some_and(|p| p == name));
            chunks.any(|chunk| matches!(chunk.compression(), Compression::BROTLI(_)))
        };
        let fields = file.file_metadata().schema().get_fields();
        let column =
            |name: &str| ParquetColumn { name: name.to_owned(), is_brotli: is_brotli(name) };
        Ok(fields.iter().map(|field| column(field.name())).collect())
    });
    read.unwrap_or_else(Err)
}

type Rows = Vec<Map<String, Value>>;

/// Reason why the rows of a Parquet file cannot be read.
enum ParquetReadError {
    /// The file is damaged, or the Parquet library cannot read it. Contains the library's message.
    Damaged(String),
    /// A needed column contains a value that JSON cannot represent.
    Column { name: String, why: String },
}

/// Returns all rows without the columns in `skipped_columns`, and the columns with values that JSON
/// cannot represent.
fn read_rows(
    bytes: &Bytes,
    needed: &dyn Fn(&str) -> bool,
    skipped_columns: &[SkippedColumn],
) -> Result<(Rows, Vec<SkippedColumn>), ParquetReadError> {
    let mut rows = Vec::new();
    let unshown = read_columns(
        bytes,
        &|name| !skipped_columns.iter().any(|skipped_columns| skipped_columns.column == name),
        needed,
        &mut |row| rows.push(row),
    )?;
    Ok((rows, unshown))
}

/// Passes the rows of the `wanted` columns to `each` one by one. Returns the columns with values
/// that JSON cannot represent and that are not `needed`; rows may lack these columns.
fn read_columns(
    bytes: &Bytes,
    wanted: &dyn Fn(&str) -> bool,
    needed: &dyn Fn(&str) -> bool,
    each: &mut dyn FnMut(Map<String, Value>),
) -> Result<Vec<SkippedColumn>, ParquetReadError> {
    let read = catch_panic(|| {
        let reader = SerializedFileReader::new(bytes.clone()).map_err(damaged_error)?;
        let schema = reader.metadata().file_metadata().schema();
        let picked: Vec<Arc<Type>> = schema
            .get_fields()
            .iter()
            .filter(|field| wanted(field.name()))
            .map(Arc::clone)
            .collect();
        let shapes: Vec<(String, ColumnShape)> = picked
            .iter()
            .map(|field| (field.name().to_owned(), ColumnShape::from_type(field)))
            .collect();
        let shape = ColumnShape::Struct(shapes);
        let picked = Type::group_type_builder(schema.name())
            .with_fields(picked)
            .build()
            .map_err(damaged_error)?;
        let mut unshown: Vec<SkippedColumn> = Vec::new();
        for row in reader.get_row_iter(Some(picked)).map_err(damaged_error)? {
            let mut fields = Map::new();
            for (name, field) in row.map_err(damaged_error)?.into_columns() {
                if unshown.iter().any(|skipped_columns| skipped_columns.column == name) {
                    continue;
                }
                // Members of a needed column can be unneeded.
                let is_needed = needed(&name);
                let as_null = is_needed && !matches!(field, Field::Bytes(_));
                match convert_value(field, shape.member_shape(&name), as_null) {
                    Ok(value) => {
                        fields.insert(name, value);
                    }
                    Err(UnsupportedValue(why)) if is_needed => {
                        return Err(ParquetReadError::Column { name, why });
                    }
                    Err(UnsupportedValue(why)) => unshown.push(SkippedColumn { column: name, why }),
                }
            }
            each(fields);
        }
        Ok(unshown)
    });
    read.unwrap_or_else(|panic| Err(ParquetReadError::Damaged(panic)))
}

fn damaged_error(error: ParquetError) -> ParquetReadError {
    ParquetReadError::Damaged(error.to_string())
}

/// Error for a value that JSON cannot represent: its description.
struct UnsupportedValue(String);

fn convert_fields(
    row: Row,
    shape: &ColumnShape,
    as_null: bool,
) -> Result<Map<String, Value>, UnsupportedValue> {
    let fields = row.into_columns().into_iter();
    fields
        .map(|(name, field)| {
            let value = convert_value(field, shape.member_shape(&name), as_null)?;
            Ok((name, value))
        })
        .collect()
}

/// Removes null members from the arguments of tool calls, the parts of messages and the
/// descriptions of tools. All structs of an Arrow column have the same members, so null stands for
/// an absent member.
fn remove_absent_members(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(remove_absent_members),
        Value::Object(fields) => {
            let is_message = ["role", "from"].iter().any(|name| fields.contains_key(*name));
            for (name, value) in fields.iter_mut() {
                match (name.as_str(), value) {
                    ("content", Value::Array(parts)) if is_message => {
                        parts.iter_mut().for_each(remove_nulls)
                    }
                    ("tool_calls", Value::Array(calls)) => calls.iter_mut().for_each(|call| {
                        for path in ["/function/arguments", "/arguments"] {
                            let Some(arguments) = call.pointer_mut(path) else { continue };
                            if arguments.is_null() {
                                *arguments = Value::Object(Map::new());
                            }
                            remove_nulls(arguments);
                        }
                    }),
                    ("function", value) => {
                        value.get_mut("parameters").into_iter().for_each(remove_nulls);
                    }
                    (_, value) => remove_absent_members(value),
                }
            }
        }
        _ => {}
    }
}

fn remove_nulls(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(remove_nulls);
        }
        _ => {}
    }
}

/// Converts a Parquet value to JSON. Bytes that are not UTF-8 become null if `as_null` is set, and
/// an error otherwise.
fn convert_value(
    field: Field,
    shape: &ColumnShape,
    as_null: bool,
) -> Result<Value, UnsupportedValue> {
    if let Some(text) = shape.to_text(&field) {
        return text.map(Value::from).map_err(UnsupportedValue);
    }
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(value) => Value::from(value),
        Field::Byte(value) => Value::from(value),
        Field::Short(value) => Value::from(value),
        Field::Int(value) => Value::from(value),
        Field::Long(value) => Value::from(value),
        Field::UByte(value) => Value::from(value),
        Field::UShort(value) => Value::from(value),
        Field::UInt(value) => Value::from(value),
        Field::ULong(value) => Value::from(value),
        // The digits are those of the value's own precision: a 32-bit 0.1 is not
        // 0.10000000149011612.
        Field::Float16(value) => convert_float(value.to_f64(), &value.to_string()),
        Field::Float(value) => convert_float(f64::from(value), &value.to_string()),
        Field::Double(value) => convert_float(value, &value.to_string()),
        Field::Decimal(_) => parse_decimal(field.to_string().trim_end_matches('.')),
        Field::Str(text) => Value::from(text),
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => Value::from(text),
            Err(_) if as_null => Value::Null,
            Err(_) => {
                return Err(UnsupportedValue("contains bytes that are not UTF-8 text".to_owned()));
            }
        },
        Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => Value::from(field.to_string()),
        Field::Group(row) => Value::Object(convert_fields(row, shape, as_null)?),
        Field::ListInternal(list) => {
            let elements = list.elements().iter().cloned();
            let shape = shape.element_shape();
            Value::Array(
                elements
                    .map(|element| convert_value(element, shape, as_null))
                    .collect::<Result<_, _>>()?,
            )
        }
        Field::MapInternal(map) => {
            let entries = map.entries().iter().cloned();
            let (keys, values) = shape.entry_shapes();
            let entries = entries.map(|(key, of)| {
                Ok((
                    to_key_name(convert_value(key, keys, as_null)?),
                    convert_value(of, values, as_null)?,
                ))
            });
            let mut named = Map::new();
            for entry in entries {
                let (name, value) = entry?;
                if named.contains_key(&name) {
                    return Err(UnsupportedValue(format!("contains a map with two keys {name:?}")));
                }
                named.insert(name, value);
            }
            Value::Object(named)
        }
    })
}

fn to_key_name(key: Value) -> String {
    match key {
        Value::String(name) => name,
        other => other.to_string(),
    }
}

/// Parses a decimal number and preserves its digits.
fn parse_decimal(digits: &str) -> Value {
    digits.parse().map_or_else(|_| Value::from(digits), Value::Number)
}

/// Converts a floating-point number to JSON by its shortest digits. Infinity, which JSON cannot
/// represent, becomes a string. NaN becomes null, because pandas writes NaN for absent values.
fn convert_float(value: f64, digits: &str) -> Value {
    if value.is_nan() {
        return Value::Null;
    }
    let number = digits.parse().ok().and_then(Number::from_f64);
    number.map_or_else(|| Value::from(value.to_string()), Value::Number)
}

#[cfg(test)]
#[path = "parquet_tests.rs"]
mod tests;
