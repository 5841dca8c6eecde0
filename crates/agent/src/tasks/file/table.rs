//! Rows of a table with a header: CSV, or TSV.

use csv::{ErrorKind, Position, ReaderBuilder, Trim};
use serde_json::{Map, Value};

use crate::tasks::Place;

/// Gives the rows of a table one by one; every value is a text.
///
/// # Errors
/// When a row has another number of fields than the header, or when `each` fails.
pub(super) fn rows<E>(
    text: &str,
    tabs: bool,
    wrong: impl Fn(String) -> E,
    each: &mut dyn FnMut(Place, Map<String, Value>) -> Result<(), E>,
) -> Result<(), E> {
    let header = text.lines().next().unwrap_or_default();
    // Where the comma is that of decimals, spreadsheets write semicolons.
    let semicolons = header.contains(';') && !header.contains(',');
    let delimiter = if tabs {
        b'\t'
    } else if semicolons {
        b';'
    } else {
        b','
    };
    let mut reader =
        ReaderBuilder::new().delimiter(delimiter).trim(Trim::Headers).from_reader(text.as_bytes());
    // The reader's own count is off by the breaks of Windows and by empty lines.
    let (mut at, mut line) = (0, 1);
    let mut line_of = |position: Option<&Position>| {
        let start = position.map_or(at, |position| position.byte() as usize);
        let start = text.len() - text[start..].trim_start_matches(['\r', '\n']).len();
        line += text[at..start].matches('\n').count();
        at = start;
        line
    };
    let names = reader.headers().map_err(|error| wrong(unreadable(&error)))?.clone();
    for record in reader.records() {
        let record = record.map_err(|error| {
            wrong(match error.kind() {
                ErrorKind::UnequalLengths { pos, expected_len, len } => format!(
                    "has {len} fields in line {}, but its header has {expected_len}: put quotes around a text with \
                     commas or line breaks",
                    line_of(pos.as_ref()),
                ),
                _ => unreadable(&error),
            })
        })?;
        let place = Place::Line(line_of(record.position()));
        let fields = names.iter().zip(&record).map(|(name, value)| (name.to_owned(), Value::from(value)));
        each(place, fields.collect())?;
    }
    Ok(())
}

fn unreadable(error: &csv::Error) -> String {
    format!("cannot be read as a table: {error}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(text: &str, tabs: bool) -> Result<Vec<(String, Value)>, String> {
        let mut found = Vec::new();
        rows(text, tabs, |why| why, &mut |place, row| {
            found.push((place.to_string(), Value::Object(row)));
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn tables_have_a_header() {
        let want = |lines: [&str; 2]| {
            let rows = [
                json!({"question": "1, 2\nor 3?", "answer": "1.10"}),
                json!({"question": "4?", "answer": ""}),
            ];
            lines.map(str::to_owned).into_iter().zip(rows).collect::<Vec<_>>()
        };
        let rows = read("question, answer\r\n\"1, 2\nor 3?\",1.10\r\n4?,\r\n", false).unwrap();
        assert_eq!(rows, want(["line 2", "line 4"]));
        assert_eq!(
            read("question;answer\n\"1, 2\nor 3?\";1.10\n\n4?;\n", false).unwrap(),
            want(["line 2", "line 5"])
        );
        assert_eq!(
            read("question\tanswer\n\"1, 2\nor 3?\"\t1.10\n4?\t\n", true).unwrap(),
            want(["line 2", "line 4"])
        );
        assert_eq!(read("", false).unwrap(), []);
        let error = read("question,answer\n1?,2\n1, or 2?,3\n", false).unwrap_err();
        assert!(error.starts_with("has 3 fields in line 3, but its header has 2"), "{error}");
    }
}
