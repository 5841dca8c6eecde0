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
use super::temporal::Shape;
use crate::RowLocation;

/// Passes the rows of a file to `each` one by one, with whether columns were left out. A column is
/// left out if it cannot be read or shares its name with another column, unless it is `needed`.
///
/// # Errors
/// Returns an error if the file is damaged or compressed with brotli, or if `each` fails.
/// `to_error` makes an error from a description of the file.
pub(super) fn rows<E>(
    bytes: Vec<u8>,
    needed: &dyn Fn(&str) -> bool,
    to_error: impl Fn(String) -> E,
    mut each: impl FnMut(RowLocation, Map<String, Value>, bool) -> Result<(), E>,
) -> Result<Vec<SkippedColumn>, E> {
    let bytes = Bytes::from(bytes);
    let damaged =
        |why: String| to_error(format!("is damaged or truncated ({why}): copy or fetch it again"));
    let columns = columns(&bytes).map_err(damaged)?;
    if columns.iter().any(|column| column.is_brotli) {
        let why =
            "is compressed with brotli, which is not supported: save it with snappy, zstd or gzip";
        return Err(to_error(why.to_owned()));
    }
    let mut names = HashSet::new();
    let mut skipped_columns = Vec::new();
    for Column { name, .. } in columns.iter().filter(|column| !names.insert(&column.name)) {
        if needed(name) {
            return Err(to_error(format!("has two columns named {name:?}: rename one of them")));
        }
        skipped_columns
            .push(SkippedColumn { column: name.clone(), why: "occurs twice".to_owned() });
    }
    let mut read = read_rows(&bytes, needed, &skipped_columns);
    if matches!(&read, Err(ReadError::Damaged(_))) {
        // The library may fail on a column that is not needed, so each of these columns is tried
        // separately.
        for Column { name, .. } in columns.into_iter().filter(|column| !needed(&column.name)) {
            let column_result =
                read_columns(&bytes, &|other: &str| other == name, needed, &mut |_| {});
            if let Err(ReadError::Damaged(why)) = column_result {
                skipped_columns
                    .push(SkippedColumn { column: name, why: format!("cannot be read ({why})") });
            }
        }
        if !skipped_columns.is_empty() {
            read = read_rows(&bytes, needed, &skipped_columns);
        }
    }
    let (rows, unshown) = read.map_err(|unread| match unread {
        ReadError::Damaged(why) => damaged(why),
        ReadError::Column { name, why } => {
            to_error(format!("cannot be used: its column {name:?} {why}"))
        }
    })?;
    skipped_columns.extend(unshown);
    for (at, mut row) in rows.into_iter().enumerate() {
        row.retain(|name, _| {
            !skipped_columns.iter().any(|skipped_columns| skipped_columns.column == *name)
        });
        row.values_mut().for_each(without_absent);
        each(RowLocation::Row(at + 1), row, !skipped_columns.is_empty())?;
    }
    Ok(skipped_columns)
}

/// A column as the footer of a file describes it.
struct Column {
    name: String,
    is_brotli: bool,
}

fn columns(bytes: &Bytes) -> Result<Vec<Column>, String> {
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
        let column = |name: &str| Column { name: name.to_owned(), is_brotli: is_brotli(name) };
        Ok(fields.iter().map(|field| column(field.name())).collect())
    });
    read.unwrap_or_else(Err)
}

type Rows = Vec<Map<String, Value>>;

/// Reason why rows cannot be read.
enum ReadError {
    /// The file is damaged, or the library cannot read it.
    Damaged(String),
    /// A needed column contains a value that JSON cannot represent.
    Column { name: String, why: String },
}

/// Returns all rows without the columns that are left out, and the columns that JSON cannot
/// represent.
fn read_rows(
    bytes: &Bytes,
    needed: &dyn Fn(&str) -> bool,
    skipped_columns: &[SkippedColumn],
) -> Result<(Rows, Vec<SkippedColumn>), ReadError> {
    let mut rows = Vec::new();
    let wanted =
        |name: &str| !skipped_columns.iter().any(|skipped_columns| skipped_columns.column == name);
    let unshown = read_columns(bytes, &wanted, needed, &mut |row| rows.push(row))?;
    Ok((rows, unshown))
}

/// Passes the rows of some columns to `each` one by one. Returns the columns that JSON cannot
/// represent and that are not needed; rows may lack them.
fn read_columns(
    bytes: &Bytes,
    wanted: &dyn Fn(&str) -> bool,
    needed: &dyn Fn(&str) -> bool,
    each: &mut dyn FnMut(Map<String, Value>),
) -> Result<Vec<SkippedColumn>, ReadError> {
    let read = catch_panic(|| {
        let wrong = |error: ParquetError| ReadError::Damaged(error.to_string());
        let reader = SerializedFileReader::new(bytes.clone()).map_err(wrong)?;
        let schema = reader.metadata().file_metadata().schema();
        let picked: Vec<Arc<Type>> = schema
            .get_fields()
            .iter()
            .filter(|field| wanted(field.name()))
            .map(Arc::clone)
            .collect();
        let shapes: Vec<(String, Shape)> =
            picked.iter().map(|field| (field.name().to_owned(), Shape::from_type(field))).collect();
        let shape = Shape::Struct(shapes);
        let picked =
            Type::group_type_builder(schema.name()).with_fields(picked).build().map_err(wrong)?;
        let mut unshown: Vec<SkippedColumn> = Vec::new();
        for row in reader.get_row_iter(Some(picked)).map_err(wrong)? {
            let mut fields = Map::new();
            for (name, field) in row.map_err(wrong)?.into_columns() {
                if unshown.iter().any(|skipped_columns| skipped_columns.column == name) {
                    continue;
                }
                // Members of a needed column can be unneeded.
                let is_needed = needed(&name);
                let as_null = is_needed && !matches!(field, Field::Bytes(_));
                match value(field, shape.member(&name), as_null) {
                    Ok(value) => {
                        fields.insert(name, value);
                    }
                    Err(UnsupportedValue(why)) if is_needed => {
                        return Err(ReadError::Column { name, why });
                    }
                    Err(UnsupportedValue(why)) => unshown.push(SkippedColumn { column: name, why }),
                }
            }
            each(fields);
        }
        Ok(unshown)
    });
    read.unwrap_or_else(|panic| Err(ReadError::Damaged(panic)))
}

/// Description of a value that JSON cannot represent.
struct UnsupportedValue(String);

fn fields(row: Row, shape: &Shape, as_null: bool) -> Result<Map<String, Value>, UnsupportedValue> {
    let fields = row.into_columns().into_iter();
    fields
        .map(|(name, field)| {
            let value = value(field, shape.member(&name), as_null)?;
            Ok((name, value))
        })
        .collect()
}

/// Removes null members from the arguments of calls, the parts of messages and the descriptions of
/// tools. In Arrow, all structs of a column have the same members, so null represents an absent
/// member.
fn without_absent(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(without_absent),
        Value::Object(fields) => {
            let is_message = ["role", "from"].iter().any(|name| fields.contains_key(*name));
            for (name, value) in fields.iter_mut() {
                match (name.as_str(), value) {
                    ("content", Value::Array(parts)) if is_message => {
                        parts.iter_mut().for_each(without_nulls)
                    }
                    ("tool_calls", Value::Array(calls)) => calls.iter_mut().for_each(|call| {
                        for path in ["/function/arguments", "/arguments"] {
                            let Some(arguments) = call.pointer_mut(path) else { continue };
                            if arguments.is_null() {
                                *arguments = Value::Object(Map::new());
                            }
                            without_nulls(arguments);
                        }
                    }),
                    ("function", value) => {
                        value.get_mut("parameters").into_iter().for_each(without_nulls);
                    }
                    (_, value) => without_absent(value),
                }
            }
        }
        _ => {}
    }
}

fn without_nulls(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(without_nulls),
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(without_nulls);
        }
        _ => {}
    }
}

/// Converts a field to JSON. Bytes that are not UTF-8 are null if `as_null` is set, and an error
/// otherwise.
fn value(field: Field, shape: &Shape, as_null: bool) -> Result<Value, UnsupportedValue> {
    if let Some(text) = shape.text(&field) {
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
        Field::Float16(value) => float(value.to_f64(), &value.to_string()),
        Field::Float(value) => float(f64::from(value), &value.to_string()),
        Field::Double(value) => float(value, &value.to_string()),
        Field::Decimal(_) => decimal(field.to_string().trim_end_matches('.')),
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
        Field::Group(row) => Value::Object(fields(row, shape, as_null)?),
        Field::ListInternal(list) => {
            let elements = list.elements().iter().cloned();
            let shape = shape.element();
            Value::Array(
                elements.map(|element| value(element, shape, as_null)).collect::<Result<_, _>>()?,
            )
        }
        Field::MapInternal(map) => {
            let name = |key: Value| match key {
                Value::String(name) => name,
                other => other.to_string(),
            };
            let entries = map.entries().iter().cloned();
            let (keys, values) = shape.entry();
            let entries = entries.map(|(key, of)| {
                Ok((name(value(key, keys, as_null)?), value(of, values, as_null)?))
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

/// Parses a decimal and keeps its digits.
fn decimal(digits: &str) -> Value {
    digits.parse().map_or_else(|_| Value::from(digits), Value::Number)
}

/// Converts a number by its shortest digits. Infinity, which JSON cannot represent, becomes a
/// string. NaN becomes null, because pandas uses it for absent values.
fn float(value: f64, digits: &str) -> Value {
    if value.is_nan() {
        return Value::Null;
    }
    let number = digits.parse().ok().and_then(Number::from_f64);
    number.map_or_else(|| Value::from(value.to_string()), Value::Number)
}

#[cfg(test)]
mod tests {
    use parquet::data_type::{
        ByteArray, ByteArrayType, DoubleType, FloatType, Int32Type, Int64Type,
    };
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use serde_json::json;

    use super::*;

    /// Columns with values of every kind.
    const KINDS: &str = "message rows {
        optional binary text (UTF8);
        required int64 whole;
        required float single;
        required double double;
        required int32 cents (DECIMAL(9, 2));
        required int64 when (TIMESTAMP(MICROS, true));
        required binary bytes;
        optional group answers (LIST) { repeated group list { optional binary element (UTF8); } }
    }";

    fn write_parquet(groups: u32) -> Vec<u8> {
        let schema = Arc::new(parse_message_type(KINDS).unwrap());
        let mut file = Vec::new();
        let mut writer =
            SerializedFileWriter::new(&mut file, schema, Arc::new(WriterProperties::default()))
                .unwrap();
        for _ in 0..groups {
            let mut group = writer.next_row_group().unwrap();
            macro_rules! column {
                ($kind:ty, $values:expr, $levels:expr, $repeats:expr) => {
                    let mut column = group.next_column().unwrap().unwrap();
                    column.typed::<$kind>().write_batch($values, $levels, $repeats).unwrap();
                    column.close().unwrap();
                };
            }
            column!(ByteArrayType, &[ByteArray::from("Café")], Some(&[1, 0]), None);
            column!(Int64Type, &[i64::MAX, -1], None, None);
            column!(FloatType, &[0.1, 27.0], None, None);
            column!(DoubleType, &[0.1, f64::INFINITY], None, None);
            column!(Int32Type, &[110, -5], None, None);
            column!(Int64Type, &[0, 1_700_000_000_000_000], None, None);
            column!(
                ByteArrayType,
                &[ByteArray::from("text"), ByteArray::from(vec![0xFF, 1])],
                None,
                None
            );
            let texts = ["a", "b"].map(ByteArray::from);
            column!(ByteArrayType, &texts, Some(&[3, 2, 3, 0]), Some(&[0, 1, 1, 0]));
            group.close().unwrap();
        }
        writer.close().unwrap();
        file
    }

    type Rows = Vec<(String, Value)>;

    fn read(file: Vec<u8>, needed: &[&str]) -> Result<(Rows, Vec<SkippedColumn>), String> {
        let mut found = Vec::new();
        let skipped_columns = rows(
            file,
            &|name| needed.contains(&name),
            |why| why,
            |location, row, _| {
                found.push((location.to_string(), Value::Object(row)));
                Ok(())
            },
        )?;
        Ok((found, skipped_columns))
    }

    #[test]
    fn parquet_values_round_trip() {
        let error = read(write_parquet(2), &["bytes"]).unwrap_err();
        assert!(
            error.contains("its column \"bytes\" contains bytes that are not UTF-8 text"),
            "{error}"
        );
        let (found, skipped_columns) = read(write_parquet(2), &["text"]).unwrap();
        let why = "contains bytes that are not UTF-8 text".to_owned();
        assert_eq!(skipped_columns, [SkippedColumn { column: "bytes".into(), why }]);
        assert_eq!(
            found.iter().map(|(place, _)| place.as_str()).collect::<Vec<_>>(),
            ["row 1", "row 2", "row 3", "row 4"]
        );
        let first = json!({
            "text": "Café", "whole": i64::MAX, "single": 0.1, "double": 0.1, "cents": decimal("1.10"),
            "when": "1970-01-01 00:00:00+00:00", "answers": ["a", null, "b"],
        });
        let second = json!({
            "text": null, "whole": -1, "single": 27.0, "double": "inf", "cents": -0.05,
            "when": "2023-11-14 22:13:20+00:00", "answers": null,
        });
        for pair in found.chunks(2) {
            assert_eq!((&pair[0].1, &pair[1].1), (&first, &second));
        }
        assert_eq!(found[0].1["single"].to_string(), "0.1");
    }

    #[test]
    fn nan_is_null_and_duplicate_columns_are_omitted() {
        assert_eq!(float(f64::NAN, "NaN"), Value::Null);
        let schema = "message rows { required int64 a; required int64 b; required int64 b; }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut file = Vec::new();
        let mut writer =
            SerializedFileWriter::new(&mut file, schema, Arc::new(WriterProperties::default()))
                .unwrap();
        let mut group = writer.next_row_group().unwrap();
        for value in 1..4 {
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<Int64Type>().write_batch(&[value], None, None).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
        writer.close().unwrap();
        let (found, skipped_columns) = read(file.clone(), &["a"]).unwrap();
        assert_eq!((&found[0].1, skipped_columns.len()), (&json!({"a": 1}), 1));
        assert!(read(file, &["b"]).unwrap_err().contains("two columns named \"b\""));
    }

    #[test]
    fn column_with_out_of_range_timestamps_is_omitted() {
        let schema =
            "message rows { required int64 whole; required int64 when (TIMESTAMP(MICROS, true)); }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut file = Vec::new();
        let mut writer =
            SerializedFileWriter::new(&mut file, schema, Arc::new(WriterProperties::default()))
                .unwrap();
        let mut group = writer.next_row_group().unwrap();
        // The second timestamp is later than the last year that is supported.
        for values in [[1, 2], [0, i64::MAX]] {
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<Int64Type>().write_batch(&values, None, None).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
        writer.close().unwrap();
        let (found, skipped_columns) = read(file.clone(), &["whole"]).unwrap();
        let rows: Vec<&Value> = found.iter().map(|(_, row)| row).collect();
        assert_eq!(rows, [&json!({"whole": 1}), &json!({"whole": 2})]);
        let [SkippedColumn { column, why }] = &skipped_columns[..] else {
            panic!("{skipped_columns:?}")
        };
        assert!(
            column == "when" && why.contains("which is not a valid date or time"),
            "{skipped_columns:?}"
        );
        let why = read(file, &["when"]).unwrap_err();
        assert!(
            why.starts_with("cannot be used: its column \"when\" contains 9223372036854775807"),
            "{why}"
        );
    }

    #[test]
    fn brotli_file_is_rejected() {
        // The footer of a file with one brotli column.
        let brotli = (0..).map(|at| {
            let mut file = write_parquet(1);
            file[at] = 8;
            file
        });
        let declares_codec = |file: &Vec<u8>| {
            let codecs = catch_panic(|| {
                let reader = SerializedFileReader::new(bytes::Bytes::from(file.clone())).ok()?;
                Some(
                    reader
                        .metadata()
                        .row_group(0)
                        .columns()
                        .iter()
                        .map(|chunk| chunk.compression())
                        .collect(),
                )
            });
            let codecs: Vec<_> = codecs.ok().flatten().unwrap_or_default();
            codecs.iter().any(|codec| matches!(codec, Compression::BROTLI(_)))
        };
        let file = brotli.take(write_parquet(1).len()).find(declares_codec).unwrap();
        let why = read(file, &[]).unwrap_err();
        assert!(
            why.contains("brotli") && why.contains("zstd") && !why.contains("damaged"),
            "{why}"
        );
    }

    #[test]
    fn damaged_file_returns_error() {
        let file = write_parquet(1);
        assert!(
            read(file[..file.len() - 20].to_vec(), &[]).unwrap_err().contains("Corrupt footer")
        );
        let mut rejected_files = 0;
        for at in (0..file.len()).step_by(3) {
            let mut damaged = file.clone();
            damaged[at] ^= 0x55;
            // Some damage only changes values; no damage may abort the process.
            rejected_files += usize::from(read(damaged, &[]).is_err());
        }
        assert!(rejected_files > 20, "{rejected_files}");
    }

    /// Columns of dates and times in every unit, with and without a time zone, also within a struct
    /// and a list.
    #[test]
    fn timestamps_read_equally_in_all_units() {
        let schema = "message rows {
            required int32 day (DATE);
            required int64 ns (TIMESTAMP(NANOS, false));
            required int64 ns_zone (TIMESTAMP(NANOS, true));
            required int64 us (TIMESTAMP(MICROS, false));
            required int64 ms (TIMESTAMP(MILLIS, false));
            required int64 old (TIMESTAMP_MICROS);
            required int64 time (TIME(NANOS, false));
            required int32 time_ms (TIME(MILLIS, true));
            required int96 int96;
            required group inner \
            { required int64 ns (TIMESTAMP(NANOS, false)); required int64 plain; }
            required group list (LIST) \
            { repeated group list { required int64 element (TIMESTAMP(NANOS, true)); } }
        }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut file = Vec::new();
        let mut writer =
            SerializedFileWriter::new(&mut file, schema, Arc::new(WriterProperties::default()))
                .unwrap();
        let mut group = writer.next_row_group().unwrap();
        macro_rules! column {
            ($kind:ty, $value:expr, $levels:expr) => {
                let mut column = group.next_column().unwrap().unwrap();
                column
                    .typed::<$kind>()
                    .write_batch(&[$value], $levels, $levels.map(|_| &[0i16][..]))
                    .unwrap();
                column.close().unwrap();
            };
        }
        let seconds = 1_767_323_045i64;
        let day = (seconds / 86_400) as i32;
        let none: Option<&[i16]> = None;
        column!(Int32Type, day, none);
        column!(Int64Type, seconds * 1_000_000_000, none);
        column!(Int64Type, seconds * 1_000_000_000 + 500, none);
        column!(Int64Type, seconds * 1_000_000, none);
        column!(Int64Type, seconds * 1_000, none);
        column!(Int64Type, seconds * 1_000_000, none);
        column!(Int64Type, 3_723_000_000_000, none);
        column!(Int32Type, 3_723_250, none);
        let nanos = (seconds % 86_400) * 1_000_000_000;
        let mut moment = parquet::data_type::Int96::new();
        moment.set_data(nanos as u32, (nanos >> 32) as u32, 2_440_588 + day as u32);
        column!(parquet::data_type::Int96Type, moment, none);
        column!(Int64Type, seconds * 1_000_000_000, none);
        column!(Int64Type, seconds, none);
        column!(Int64Type, seconds * 1_000_000_000, Some(&[1i16][..]));
        group.close().unwrap();
        writer.close().unwrap();
        let (found, skipped_columns) = read(file, &[]).unwrap();
        assert_eq!(skipped_columns, []);
        let moment = "2026-01-02 03:04:05";
        let want = json!({
            "day": "2026-01-02", "ns": moment, "ns_zone": format!("{moment}.0000005+00:00"), "us": moment,
            "ms": moment, "old": format!("{moment}+00:00"), "time": "01:02:03", "time_ms": "01:02:03.25",
            "int96": moment, "inner": {"ns": moment, "plain": seconds}, "list": [format!("{moment}+00:00")],
        });
        assert_eq!(found[0].1, want);
    }

    #[test]
    fn absent_members_of_calls_and_parts_are_removed() {
        let call = |arguments: Value| json!({"id": null, "function": {"name": "f", "arguments": arguments}});
        let mut chat = json!([
            {"role": "user", "content": [{"type": "text", "text": "hi", "image": null}], "tool_calls": null},
            {"role": "assistant", "content": null, "tool_calls": [
                call(json!({"a": "1", "b": null, "n": {"x": 1, "y": null}, "l": [{"z": null}, null]})),
                call(json!("{\"a\": null}")),
                call(Value::Null),
            ]},
        ]);
        let mut kept = json!({"ground_truth": null, "extra": {"a": null}, "tools": [
            {"type": "function", "function": {"name": "f", "strict": null, "parameters": {"p": null, "q": 1}}},
        ]});
        without_absent(&mut chat);
        without_absent(&mut kept);
        assert_eq!(
            chat[0],
            json!({"role": "user", "content": [{"type": "text", "text": "hi"}], "tool_calls": null})
        );
        assert_eq!(
            chat[1]["tool_calls"],
            json!([
                call(json!({"a": "1", "n": {"x": 1}, "l": [{}, null]})),
                call(json!("{\"a\": null}")),
                call(json!({})),
            ])
        );
        assert_eq!(
            kept,
            json!({"ground_truth": null, "extra": {"a": null}, "tools": [
                {"type": "function", "function": {"name": "f", "strict": null, "parameters": {"q": 1}}},
            ]})
        );
    }
}
