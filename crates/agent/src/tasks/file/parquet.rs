//! Rows of a Parquet file, in the shapes that Python's `datasets` gives them: structs are objects, lists are
//! lists, what is absent is null.

use std::sync::Arc;

use dressage_policy::caught;
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Number, Value};

use super::json::as_written;
use crate::tasks::Place;

/// Gives the rows of a file one by one, each with the names of all columns and the values of those alone that
/// `wanted` picks.
///
/// # Errors
/// When the file is damaged or compressed with brotli, or when `each` fails. `form` is told what the file is.
pub(super) fn rows<E>(
    bytes: Vec<u8>,
    wanted: &dyn Fn(&str) -> bool,
    form: impl Fn(String) -> E,
    mut each: impl FnMut(&[String], Place, Map<String, Value>) -> Result<(), E>,
) -> Result<(), E> {
    let damaged = |why: String| form(format!("is damaged or cut short ({why}): copy or fetch it again"));
    // The library ends in a panic over some files that break the format.
    let read = caught(|| {
        let wrong = |error: ParquetError| damaged(error.to_string());
        let reader = SerializedFileReader::new(bytes::Bytes::from(bytes)).map_err(wrong)?;
        let mut chunks = reader.metadata().row_groups().iter().flat_map(|group| group.columns());
        if chunks.any(|chunk| matches!(chunk.compression(), Compression::BROTLI(_))) {
            let why = "is compressed with brotli, which is not read here: save it with snappy, zstd or gzip";
            return Err(form(why.to_owned()));
        }
        let schema = reader.metadata().file_metadata().schema();
        let columns: Vec<String> = schema.get_fields().iter().map(|field| field.name().to_owned()).collect();
        let picked =
            schema.get_fields().iter().filter(|field| wanted(field.name())).map(Arc::clone).collect();
        let picked = Type::group_type_builder(schema.name()).with_fields(picked).build().map_err(wrong)?;
        // Rows of no column cannot be read, but there is one at least where there are rows.
        let iterator = if picked.get_fields().is_empty() { None } else { Some(picked) };
        for (at, row) in reader.get_row_iter(iterator).map_err(wrong)?.enumerate() {
            each(&columns, Place::Row(at + 1), fields(row.map_err(wrong)?))?;
        }
        Ok(())
    });
    read.unwrap_or_else(|panic| Err(damaged(panic)))
}

fn fields(row: Row) -> Map<String, Value> {
    row.into_columns().into_iter().map(|(name, field)| (name, value(field))).collect()
}

fn value(field: Field) -> Value {
    match field {
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
        // In the digits of its own precision: 0.1 of 32 bits is not 0.10000000149011612.
        Field::Float16(value) => float(value.to_f64(), &value.to_string()),
        Field::Float(value) => float(f64::from(value), &value.to_string()),
        Field::Double(value) => float(value, &value.to_string()),
        Field::Decimal(_) => as_written(field.to_string().trim_end_matches('.')),
        Field::Str(text) => Value::from(text),
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => Value::from(text),
            Err(_) => Value::from(bytes.data()),
        },
        Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => Value::from(field.to_string()),
        Field::Group(row) => Value::Object(fields(row)),
        Field::ListInternal(list) => list.elements().iter().cloned().map(value).collect(),
        Field::MapInternal(map) => {
            let entries = map.entries().iter().cloned().map(|(key, of)| (value(key), value(of)));
            let name = |key: Value| match key {
                Value::String(name) => name,
                other => other.to_string(),
            };
            Value::Object(entries.map(|(key, value)| (name(key), value)).collect())
        }
    }
}

/// A number by its shortest digits; one that JSON does not have (infinity) as a text.
fn float(value: f64, shortest: &str) -> Value {
    let number = shortest.parse().ok().and_then(Number::from_f64);
    number.map_or_else(|| Value::from(value.to_string()), Value::Number)
}

#[cfg(test)]
mod tests {
    use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, FloatType, Int32Type, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;
    use serde_json::json;

    use super::*;

    /// Values of every kind that rows have.
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

    fn written(groups: u32) -> Vec<u8> {
        let schema = Arc::new(parse_message_type(KINDS).unwrap());
        let mut file = Vec::new();
        let mut writer =
            SerializedFileWriter::new(&mut file, schema, Arc::new(WriterProperties::default())).unwrap();
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
            column!(ByteArrayType, &[ByteArray::from("text"), ByteArray::from(vec![0xFF, 1])], None, None);
            let texts = ["a", "b"].map(ByteArray::from);
            column!(ByteArrayType, &texts, Some(&[3, 2, 3, 0]), Some(&[0, 1, 1, 0]));
            group.close().unwrap();
        }
        writer.close().unwrap();
        file
    }

    type Rows = Vec<(String, Value)>;

    fn read(file: Vec<u8>, wanted: &[&str]) -> Result<Rows, String> {
        let mut found = Vec::new();
        rows(
            file,
            &|name| wanted.is_empty() || wanted.contains(&name),
            |why| why,
            |columns, place, row| {
                assert_eq!(columns.len(), 8);
                found.push((place.to_string(), Value::Object(row)));
                Ok(())
            },
        )?;
        Ok(found)
    }

    #[test]
    fn values_are_what_was_written() {
        let found = read(written(2), &[]).unwrap();
        assert_eq!(
            found.iter().map(|(place, _)| place.as_str()).collect::<Vec<_>>(),
            ["row 1", "row 2", "row 3", "row 4"]
        );
        let first = json!({
            "text": "Café", "whole": i64::MAX, "single": 0.1, "double": 0.1, "cents": "1.10",
            "when": "1970-01-01 00:00:00.000000 +00:00", "bytes": "text", "answers": ["a", null, "b"],
        });
        let second = json!({
            "text": null, "whole": -1, "single": 27.0, "double": "inf", "cents": -0.05,
            "when": "2023-11-14 22:13:20.000000 +00:00", "bytes": [255, 1], "answers": null,
        });
        for pair in found.chunks(2) {
            assert_eq!((&pair[0].1, &pair[1].1), (&first, &second));
        }
        assert_eq!(found[0].1["single"].to_string(), "0.1");
        let some = read(written(1), &["whole", "answers", "no such"]).unwrap();
        assert_eq!(some[0].1, json!({"whole": i64::MAX, "answers": ["a", null, "b"]}));
    }

    #[test]
    fn brotli_is_named() {
        // The footer of a file that says so of one column.
        let brotli = (0..).map(|at| {
            let mut file = written(1);
            file[at] = 8;
            file
        });
        let says_so = |file: &Vec<u8>| {
            let codecs = caught(|| {
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
        let file = brotli.take(written(1).len()).find(says_so).unwrap();
        let why = read(file, &[]).unwrap_err();
        assert!(why.contains("brotli") && why.contains("zstd") && !why.contains("damaged"), "{why}");
    }

    #[test]
    fn damage_is_an_error() {
        let file = written(1);
        assert!(read(file[..file.len() - 20].to_vec(), &[]).unwrap_err().contains("Corrupt footer"));
        let mut refused = 0;
        for at in (0..file.len()).step_by(3) {
            let mut damaged = file.clone();
            damaged[at] ^= 0x55;
            // Some damage is to values, and shows as other values; none ends the process.
            refused += usize::from(read(damaged, &[]).is_err());
        }
        assert!(refused > 20, "{refused}");
    }
}
