//! Tests that a panic of the Parquet library becomes an error without printing the panic message.

use std::cell::Cell;
use std::fs::File;
use std::sync::Arc;

use levade_tasks::FileOptions;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

thread_local! {
    static PRINTED: Cell<u32> = const { Cell::new(0) };
}

#[test]
fn out_of_range_timestamp_is_error_without_output() {
    // Replaces the hook that prints.
    std::panic::set_hook(Box::new(|_| PRINTED.set(PRINTED.get() + 1)));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    let schema = "message rows \
                  { required binary question (UTF8); required int64 answer (TIMESTAMP(MICROS, true)); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(
        File::create(&path).unwrap(),
        schema,
        Arc::new(WriterProperties::default()),
    )
    .unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&[ByteArray::from("When?")], None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    // The library itself panics when it prints this timestamp.
    column.typed::<Int64Type>().write_batch(&[i64::MAX], None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();

    let error = FileOptions::new(path).load(1).unwrap_err().to_string();
    assert!(
        error.contains("contains 9223372036854775807, which is not a valid date or time"),
        "{error}"
    );
    assert_eq!(PRINTED.get(), 0);
}
