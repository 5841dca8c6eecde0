//! Writes JSON rows as a Parquet file.
//!
//! Rows are split into columns by the rules of Dremel (Melnik et al., 2010), which Parquet uses:
//! each value has a *definition level* (the number of optional and repeated ancestors that are
//! present) and a *repetition level* (the innermost list that it continues; 0 starts a row). All
//! fields are optional, and lists have the three levels of the Parquet specification. Memory is
//! bounded by one row group.

use std::fmt::Write as _;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{Compression, ZstdLevel};
use parquet::column::writer::ColumnWriter;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::Value;

use crate::column::{Column, ColumnType};
use crate::error::ExportError;

/// Maximum number of rows in a row group of the Parquet file.
const GROUP_ROWS: usize = 10_000;

/// Maximum size of the values in a row group, in bytes. The last row of a row group may exceed this
/// size.
const GROUP_BYTES: usize = 64 << 20;

/// Writer of a Parquet file.
pub struct ParquetFile<'a> {
    path: &'a Path,
    columns: &'a [Column],
    writer: SerializedFileWriter<File>,
    leaves: Vec<LeafColumn>,
    rows: usize,
    bytes: usize,
}

/// Values of one leaf column in a row group.
#[derive(Debug)]
struct LeafColumn {
    values: LeafValues,
    definitions: Vec<i16>,
    repetitions: Vec<i16>,
    is_repeated: bool,
}

#[derive(Debug)]
enum LeafValues {
    Text(Vec<ByteArray>),
    Integer(Vec<i64>),
    Double(Vec<f64>),
    Float(Vec<f32>),
    Boolean(Vec<bool>),
}

impl<'a> ParquetFile<'a> {
    /// Creates a Parquet file with these columns.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn create(path: &'a Path, columns: &'a [Column]) -> Result<Self, ExportError> {
        let mut schema = "message levade {\n".to_owned();
        columns.iter().for_each(|column| declare_field(&mut schema, column.name, &column.kind));
        schema.push('}');
        let failed = |source| ExportError::Parquet { path: path.to_owned(), source };
        let schema = Arc::new(parse_message_type(&schema).map_err(failed)?);
        let zstd = Compression::ZSTD(ZstdLevel::default());
        let properties = WriterProperties::builder().set_compression(zstd).build();
        let file = File::create(path).map_err(ExportError::io_error_at(path))?;
        let writer =
            SerializedFileWriter::new(file, schema, Arc::new(properties)).map_err(failed)?;
        let mut leaves = Vec::new();
        columns.iter().for_each(|column| add_leaves(&mut leaves, &column.kind, false));
        Ok(ParquetFile { path, columns, writer, leaves, rows: 0, bytes: 0 })
    }

    /// Appends a row to the file. Fields of the row's objects that are not columns are ignored.
    ///
    /// # Errors
    /// Returns an error if a value does not have the type of its column, or if the file cannot be
    /// written.
    pub fn write(&mut self, row: &Value) -> Result<(), ExportError> {
        let mut shredder = RowShredder { leaves: &mut self.leaves, next: 0, bytes: 0 };
        for column in self.columns {
            shredder.add_value(column, &column.kind, row.get(column.name), 0, 0, 0)?;
        }
        self.bytes += shredder.bytes;
        self.rows += 1;
        if self.rows >= GROUP_ROWS || self.bytes >= GROUP_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes the last rows and the index of the file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn finish(mut self) -> Result<(), ExportError> {
        self.flush()?;
        let path = self.path;
        let failed = |source| ExportError::Parquet { path: path.to_owned(), source };
        let file = self.writer.into_inner().map_err(failed)?;
        file.sync_all().map_err(ExportError::io_error_at(path))
    }

    fn flush(&mut self) -> Result<(), ExportError> {
        if self.rows > 0 {
            let path = self.path;
            write_group(&mut self.writer, &mut self.leaves)
                .map_err(|source| ExportError::Parquet { path: path.to_owned(), source })?;
        }
        (self.rows, self.bytes) = (0, 0);
        Ok(())
    }
}

fn write_group(
    writer: &mut SerializedFileWriter<File>,
    leaves: &mut [LeafColumn],
) -> Result<(), ParquetError> {
    let mut group = writer.next_row_group()?;
    for leaf in leaves {
        let Some(mut column) = group.next_column()? else {
            return Err(ParquetError::General(
                "the schema has fewer columns than the rows; please report this defect".into(),
            ));
        };
        let definitions = Some(&leaf.definitions[..]);
        let repetitions = leaf.is_repeated.then_some(&leaf.repetitions[..]);
        match (column.untyped(), &mut leaf.values) {
            (ColumnWriter::ByteArrayColumnWriter(to), LeafValues::Text(values)) => {
                to.write_batch(values, definitions, repetitions)?;
                values.clear();
            }
            (ColumnWriter::Int64ColumnWriter(to), LeafValues::Integer(values)) => {
                to.write_batch(values, definitions, repetitions)?;
                values.clear();
            }
            (ColumnWriter::DoubleColumnWriter(to), LeafValues::Double(values)) => {
                to.write_batch(values, definitions, repetitions)?;
                values.clear();
            }
            (ColumnWriter::FloatColumnWriter(to), LeafValues::Float(values)) => {
                to.write_batch(values, definitions, repetitions)?;
                values.clear();
            }
            (ColumnWriter::BoolColumnWriter(to), LeafValues::Boolean(values)) => {
                to.write_batch(values, definitions, repetitions)?;
                values.clear();
            }
            _ => return Err(ParquetError::General(
                "the schema gives a column another type than the rows; please report this defect"
                    .into(),
            )),
        }
        leaf.definitions.clear();
        leaf.repetitions.clear();
        column.close()?;
    }
    group.close()?;
    Ok(())
}

/// Appends the declaration of a field in Parquet's schema language.
fn declare_field(schema: &mut String, name: &str, kind: &ColumnType) {
    let physical = match kind {
        ColumnType::Text => format!("optional binary {name} (UTF8);\n"),
        ColumnType::Integer => format!("optional int64 {name};\n"),
        ColumnType::Double => format!("optional double {name};\n"),
        ColumnType::Float => format!("optional float {name};\n"),
        ColumnType::Boolean => format!("optional boolean {name};\n"),
        ColumnType::List(of) => {
            let _ = writeln!(schema, "optional group {name} (LIST) {{ repeated group list {{");
            declare_field(schema, "element", of);
            "} }\n".to_owned()
        }
        ColumnType::Struct(fields) => {
            let _ = writeln!(schema, "optional group {name} {{");
            fields.iter().for_each(|field| declare_field(schema, field.name, &field.kind));
            "}\n".to_owned()
        }
    };
    schema.push_str(&physical);
}

/// Appends the leaf columns of a type, in the order of the schema.
fn add_leaves(leaves: &mut Vec<LeafColumn>, kind: &ColumnType, is_repeated: bool) {
    let values = match kind {
        ColumnType::List(of) => return add_leaves(leaves, of, true),
        ColumnType::Struct(fields) => {
            return fields.iter().for_each(|field| add_leaves(leaves, &field.kind, is_repeated));
        }
        ColumnType::Text => LeafValues::Text(Vec::new()),
        ColumnType::Integer => LeafValues::Integer(Vec::new()),
        ColumnType::Double => LeafValues::Double(Vec::new()),
        ColumnType::Float => LeafValues::Float(Vec::new()),
        ColumnType::Boolean => LeafValues::Boolean(Vec::new()),
    };
    leaves.push(LeafColumn {
        values,
        definitions: Vec::new(),
        repetitions: Vec::new(),
        is_repeated,
    });
}

/// Splitter of a row into the values of the leaf columns.
struct RowShredder<'a> {
    leaves: &'a mut [LeafColumn],
    /// Index of the leaf column that gets the next value.
    next: usize,
    bytes: usize,
}

impl RowShredder<'_> {
    /// Adds a value and its descendants to the leaf columns. `definition` and `repetition` are the
    /// Parquet levels of the value's parent, and `depth` is the number of lists around the value.
    fn add_value(
        &mut self,
        column: &Column,
        kind: &ColumnType,
        value: Option<&Value>,
        definition: i16,
        repetition: i16,
        depth: i16,
    ) -> Result<(), ExportError> {
        let value = value.filter(|value| !value.is_null());
        match kind {
            ColumnType::Struct(fields) => {
                let present = definition + i16::from(value.is_some());
                for field in fields {
                    let of = value.and_then(|value| value.get(field.name));
                    self.add_value(column, &field.kind, of, present, repetition, depth)?;
                }
                match value {
                    Some(value) if !value.is_object() => {
                        Err(type_mismatch_error(column, "an object", value))
                    }
                    _ => Ok(()),
                }
            }
            ColumnType::List(of) => {
                let items = match value {
                    None => None,
                    Some(Value::Array(items)) => Some(items),
                    Some(other) => return Err(type_mismatch_error(column, "a list", other)),
                };
                let start = self.next;
                for (i, item) in items.into_iter().flatten().enumerate() {
                    self.next = start;
                    let level = if i == 0 { repetition } else { depth + 1 };
                    self.add_value(column, of, Some(item), definition + 2, level, depth + 1)?;
                }
                if items.is_none_or(Vec::is_empty) {
                    let present = definition + i16::from(items.is_some());
                    self.add_value(column, of, None, present, repetition, depth + 1)?;
                }
                Ok(())
            }
            _ => {
                let leaf = &mut self.leaves[self.next];
                self.next += 1;
                leaf.definitions.push(definition + i16::from(value.is_some()));
                leaf.repetitions.push(repetition);
                self.bytes += 4;
                if let Some(value) = value {
                    self.bytes += push_value(leaf, column, value)?;
                }
                Ok(())
            }
        }
    }
}

/// Appends a value to a leaf column. Returns the size of the value in bytes.
fn push_value(leaf: &mut LeafColumn, column: &Column, value: &Value) -> Result<usize, ExportError> {
    match &mut leaf.values {
        LeafValues::Text(values) => {
            let text = value.as_str().ok_or_else(|| type_mismatch_error(column, "text", value))?;
            values.push(ByteArray::from(text));
            Ok(text.len())
        }
        LeafValues::Integer(values) => {
            values.push(
                value.as_i64().ok_or_else(|| type_mismatch_error(column, "an integer", value))?,
            );
            Ok(8)
        }
        LeafValues::Double(values) => {
            values.push(
                value.as_f64().ok_or_else(|| type_mismatch_error(column, "a number", value))?,
            );
            Ok(8)
        }
        LeafValues::Float(values) => {
            let number =
                value.as_f64().ok_or_else(|| type_mismatch_error(column, "a number", value))?;
            values.push(number as f32);
            Ok(4)
        }
        LeafValues::Boolean(values) => {
            values.push(
                value.as_bool().ok_or_else(|| type_mismatch_error(column, "a boolean", value))?,
            );
            Ok(1)
        }
    }
}

fn type_mismatch_error(column: &Column, expected: &'static str, found: &Value) -> ExportError {
    let found = found.to_string().chars().take(80).collect();
    ExportError::Row { column: column.name.to_owned(), expected, found }
}

#[cfg(test)]
mod tests {
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::Field;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::column::{column, list, list_of};

    fn columns() -> Vec<Column> {
        use ColumnType::{Boolean, Double, Float, Integer, Struct, Text};
        vec![
            column("text", Text),
            column("number", Double),
            column("single", Float),
            column("flag", Boolean),
            column("ids", list(Integer)),
            column("lists", list(list(Text))),
            column("record", Struct(vec![column("a", Integer), column("b", list(Integer))])),
            column("parts", list_of(vec![column("name", Text), column("of", list(Integer))])),
        ]
    }

    fn read(path: &Path) -> Vec<Value> {
        let reader = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
        let rows = reader.get_row_iter(None).unwrap();
        rows.map(|row| to_json(&Field::Group(row.unwrap()))).collect()
    }

    fn to_json(field: &Field) -> Value {
        match field {
            Field::Null => Value::Null,
            Field::Bool(flag) => json!(flag),
            Field::Long(number) => json!(number),
            Field::Float(number) => json!(f64::from(*number)),
            Field::Double(number) => json!(number),
            Field::Str(text) => json!(text),
            Field::ListInternal(items) => items.elements().iter().map(to_json).collect(),
            Field::Group(fields) => Value::Object(
                fields
                    .get_column_iter()
                    .map(|(name, field)| (name.clone(), to_json(field)))
                    .collect(),
            ),
            other => panic!("{other:?}"),
        }
    }

    fn write_and_read(rows: &[Value]) -> Vec<Value> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.parquet");
        let columns = columns();
        let mut file = ParquetFile::create(&path, &columns).unwrap();
        rows.iter().for_each(|row| file.write(row).unwrap());
        file.finish().unwrap();
        read(&path)
    }

    fn maybe(of: impl Strategy<Value = Value> + 'static) -> BoxedStrategy<Value> {
        prop_oneof![1 => Just(Value::Null), 3 => of].boxed()
    }

    fn lists(of: BoxedStrategy<Value>) -> BoxedStrategy<Value> {
        maybe(proptest::collection::vec(of, 0..4).prop_map(Value::from))
    }

    fn row() -> impl Strategy<Value = Value> {
        let text = || maybe(".{0,3}".prop_map(Value::from));
        let integer = || maybe(any::<i32>().prop_map(Value::from));
        let record = (integer(), lists(integer())).prop_map(|(a, b)| json!({ "a": a, "b": b }));
        let part =
            (text(), lists(integer())).prop_map(|(name, of)| json!({ "name": name, "of": of }));
        (
            text(),
            maybe((-8i32..8).prop_map(|n| json!(f64::from(n) / 4.0))),
            maybe(any::<bool>().prop_map(Value::from)),
            lists(integer()),
            lists(lists(text())),
            maybe(record),
            lists(maybe(part)),
        )
            .prop_map(|(text, number, flag, ids, lists, record, parts)| {
                json!({
                    "text": text, "number": number, "single": number, "flag": flag, "ids": ids,
                    "lists": lists, "record": record, "parts": parts,
                })
            })
    }

    proptest! {
        /// The reader of another implementation of the levels returns the rows that were written.
        #[test]
        fn rows_round_trip_through_reader(rows in proptest::collection::vec(row(), 0..6)) {
            let found = write_and_read(&rows);
            let number = |value: &Value| value.to_string().trim_end_matches(".0").to_owned();
            prop_assert_eq!(found.len(), rows.len());
            for (found, row) in found.iter().zip(&rows) {
                for name in ["text", "flag", "ids", "lists", "record", "parts"] {
                    prop_assert_eq!(&found[name], &row[name], "{}", name);
                }
                for name in ["number", "single"] {
                    prop_assert_eq!(number(&found[name]), number(&row[name]));
                }
            }
        }
    }

    #[test]
    fn write_rejects_value_of_other_type_by_column() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.parquet");
        let columns = columns();
        let mut file = ParquetFile::create(&path, &columns).unwrap();
        for row in [json!({ "text": 1 }), json!({ "ids": ["x"] }), json!({ "record": 3 })] {
            let error = file.write(&row).unwrap_err().to_string();
            let name = row.as_object().unwrap().keys().next().unwrap();
            assert!(error.contains(name.as_str()), "{error}");
        }
    }
}
