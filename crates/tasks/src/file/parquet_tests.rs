//! Tests of `parquet`.

use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, FloatType, Int32Type, Int64Type};
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
    let skipped_columns = read_all_rows(
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
        error.contains("the column \"bytes\" contains bytes that are not UTF-8 text"),
        "{error}"
    );
    let (found, skipped_columns) = read(write_parquet(2), &["text"]).unwrap();
    let why = "contains bytes that are not UTF-8 text".to_owned();
    assert_eq!(skipped_columns, [SkippedColumn { column: "bytes".into(), why }]);
    assert_eq!(
        found.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        ["row 1", "row 2", "row 3", "row 4"]
    );
    let first = json!({
        "text": "Café", "whole": i64::MAX, "single": 0.1, "double": 0.1,
        "cents": parse_decimal("1.10"), "when": "1970-01-01 00:00:00+00:00",
        "answers": ["a", null, "b"],
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
    assert_eq!(convert_float(f64::NAN, "NaN"), Value::Null);
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
        why.starts_with(
            "the file cannot be used: the column \"when\" contains 9223372036854775807"
        ),
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
    let file = brotli
        .take(write_parquet(1).len())
        .find(|file| {
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
        })
        .unwrap();
    let why = read(file, &[]).unwrap_err();
    assert!(why.contains("brotli") && why.contains("zstd") && !why.contains("damaged"), "{why}");
}

#[test]
fn damaged_file_returns_error() {
    let file = write_parquet(1);
    assert!(read(file[..file.len() - 20].to_vec(), &[]).unwrap_err().contains("Corrupt footer"));
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
    let mut chat = json!([
        {"role": "user", "content": [{"type": "text", "text": "hi", "image": null}], "tool_calls": null},
        {"role": "assistant", "content": null, "tool_calls": [
            call_value(json!({"a": "1", "b": null, "n": {"x": 1, "y": null}, "l": [{"z": null}, null]})),
            call_value(json!("{\"a\": null}")),
            call_value(Value::Null),
        ]},
    ]);
    let mut kept = json!({"ground_truth": null, "extra": {"a": null}, "tools": [
        {"type": "function", "function": {"name": "f", "strict": null, "parameters": {"p": null, "q": 1}}},
    ]});
    remove_absent_members(&mut chat);
    remove_absent_members(&mut kept);
    assert_eq!(
        chat[0],
        json!({"role": "user", "content": [{"type": "text", "text": "hi"}], "tool_calls": null})
    );
    assert_eq!(
        chat[1]["tool_calls"],
        json!([
            call_value(json!({"a": "1", "n": {"x": 1}, "l": [{}, null]})),
            call_value(json!("{\"a\": null}")),
            call_value(json!({})),
        ])
    );
    assert_eq!(
        kept,
        json!({"ground_truth": null, "extra": {"a": null}, "tools": [
            {"type": "function", "function": {"name": "f", "strict": null, "parameters": {"q": 1}}},
        ]})
    );
}

fn call_value(arguments: Value) -> Value {
    json!({"id": null, "function": {"name": "f", "arguments": arguments}})
}
