//! Reads rows of a table with a header (CSV or TSV).

use std::collections::{BTreeSet, HashSet};
use std::io::Read;

use csv::{ReaderBuilder, Trim};
use serde_json::{Map, Value};

use super::fields::SkippedColumn;
use crate::RowLocation;

/// Passes the rows of a CSV or TSV table to `each` one by one. Every value is a string. Columns
/// with duplicate names are left out.
///
/// # Errors
/// Returns an error if the number of fields in a row differs from the header, a quote is not
/// closed, a `needed` column has a duplicate name, or `each` fails.
pub(super) fn read_table_rows<E>(
    text: &str,
    tabs: bool,
    needed: &dyn Fn(&str) -> bool,
    wrong: impl Fn(String) -> E,
    each: &mut dyn FnMut(RowLocation, Map<String, Value>) -> Result<(), E>,
) -> Result<Vec<SkippedColumn>, E> {
    if text.trim_matches(['\r', '\n']).is_empty() {
        return Ok(Vec::new());
    }
    // The appended row is found after the end of the text, unless the text ends within quotes.
    let input = text.as_bytes().chain(&b"\n."[..]);
    let delimiter = if tabs { b'\t' } else { detect_delimiter(text) };
    let mut builder = ReaderBuilder::new();
    builder.delimiter(delimiter).trim(Trim::Headers).flexible(true);
    if let Some(line) = (!tabs).then(|| find_text_after_quote(text, delimiter)).flatten() {
        return Err(wrong(format!(
            "the file has text after the closing quote of a field in line {line}: double each \
             quote within quotes"
        )));
    }
    let mut reader = builder.quoting(!tabs || has_quoted_fields(text)).from_reader(input);
    // The reader's line numbers are wrong for Windows line breaks and empty lines.
    let mut at = 0;
    let mut line = 1;
    let names = reader.headers().map_err(|error| wrong(table_error_text(&error)))?.clone();
    let mut seen = HashSet::new();
    let twice: BTreeSet<&str> = names.iter().filter(|name| !seen.insert(*name)).collect();
    if let Some(twice) = twice.iter().find(|name| needed(name)) {
        return Err(wrong(format!(
            "the header has two columns named {twice:?}: rename one of them"
        )));
    }
    for record in reader.records() {
        let record = record.map_err(|error| wrong(table_error_text(&error)))?;
        let start =
            record.position().map_or(at, |position| (position.byte() as usize).min(text.len()));
        let start = text.len() - text[start..].trim_start_matches(['\r', '\n']).len();
        line += count_line_breaks(&text[at..start]);
        at = start;
        if at == text.len() {
            return Ok(twice
                .iter()
                .map(|column| SkippedColumn {
                    column: (*column).to_owned(),
                    why: "occurs twice in the header".into(),
                })
                .collect());
        }
        if record.len() != names.len() {
            let len = record.len();
            let expected = names.len();
            return Err(wrong(format!(
                "line {line} has {len} fields, but the header has {expected}: put quotes \
                 around a text with commas or line breaks"
            )));
        }
        let fields = names.iter().zip(&record).filter(|(name, _)| !twice.contains(name));
        let fields = fields.map(|(name, value)| (name.to_owned(), Value::from(value)));
        each(RowLocation::Line(line), fields.collect())?;
    }
    Err(wrong(format!(
        "the file has a quote in the row of line {line} that is never closed: the file is \
         truncated, or the closing quote is missing"
    )))
}

/// Returns whether each quote at the start of a TSV field is closed at the end of the field. If
/// not, quotes are text: many TSV files do not quote fields, but contain texts that start with a
/// quote, such as `"Hi" he said`.
fn has_quoted_fields(text: &str) -> bool {
    check_quotes(text, b'\t') == QuoteState::Closed
}

/// Returns the number of the first line in which text follows the closing quote of a field, or
/// `None` if there is no such line.
fn find_text_after_quote(text: &str, delimiter: u8) -> Option<usize> {
    match check_quotes(text, delimiter) {
        QuoteState::TextBehind(at) => Some(1 + count_line_breaks(&text[..at])),
        _ => None,
    }
}

/// State of the quotes around the fields of a table.
#[derive(Debug, PartialEq, Eq)]
enum QuoteState {
    /// Every quote is closed at the end of its field.
    Closed,
    /// The last opening quote is never closed.
    Open,
    /// Text follows a closing quote. Contains the offset of the text.
    TextBehind(usize),
}

fn check_quotes(text: &str, delimiter: u8) -> QuoteState {
    let ends = |byte: u8| byte == delimiter || matches!(byte, b'\n' | b'\r');
    let bytes = text.as_bytes();
    let mut is_start = true;
    let mut is_quoted = false;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        at += 1;
        if !is_quoted {
            is_quoted = is_start && byte == b'"';
            is_start = ends(byte);
        } else if byte == b'"' {
            match bytes.get(at) {
                Some(b'"') => at += 1,
                Some(next) if !ends(*next) => return QuoteState::TextBehind(at),
                _ => is_quoted = false,
            }
        }
    }
    if is_quoted { QuoteState::Open } else { QuoteState::Closed }
}

/// Counts the line breaks in a text, in the notation of any operating system.
fn count_line_breaks(text: &str) -> usize {
    text.matches('\n').count() + text.matches('\r').count() - text.matches("\r\n").count()
}

/// Detects the delimiter from the header of a table: a comma, a tab, or a semicolon, which
/// spreadsheets use if the comma is the decimal separator.
fn detect_delimiter(text: &str) -> u8 {
    let header = text.trim_start_matches(['\r', '\n']).lines().next().unwrap_or_default();
    // Delimiters within quotes are text.
    let outside: String = header.split('"').step_by(2).collect();
    [b',', b';', b'\t']
        .into_iter()
        .find(|known| outside.contains(char::from(*known)))
        .unwrap_or(b',')
}

fn table_error_text(error: &csv::Error) -> String {
    format!("the file cannot be read as a table: {error}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(text: &str, tabs: bool) -> Result<Vec<(String, Value)>, String> {
        let mut found = Vec::new();
        read_table_rows(text, tabs, &|name| name != "note", |why| why, &mut |location, row| {
            found.push((location.to_string(), Value::Object(row)));
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn table_rows_use_header_names() {
        let rows = read("question, answer\r\n\"1, 2\nor 3?\",1.10\r\n4?,\r\n", false).unwrap();
        assert_eq!(rows, expected_rows(["line 2", "line 4"]));
        assert_eq!(
            read("question;answer\n\"1, 2\nor 3?\";1.10\n\n4?;\n", false).unwrap(),
            expected_rows(["line 2", "line 5"])
        );
        assert_eq!(
            read("question\tanswer\n\"1, 2\nor 3?\"\t1.10\n4?\t\n", true).unwrap(),
            expected_rows(["line 2", "line 4"])
        );
        let old = read("question,answer\r\"1, 2\nor 3?\",1.10\r4?,\r", false);
        assert_eq!(old.unwrap(), expected_rows(["line 2", "line 4"]));
        let error = read("question,answer\n1?,2\n\"1\" or 2?,3\n", false).unwrap_err();
        assert!(
            error.starts_with("the file has text after the closing quote of a field in line 3"),
            "{error}"
        );
        assert_eq!(read("", false).unwrap(), []);
        let error = read("question,answer\n1?,2\n1, or 2?,3\n", false).unwrap_err();
        assert!(error.starts_with("line 3 has 3 fields, but the header has 2"), "{error}");
    }

    fn expected_rows(lines: [&str; 2]) -> Vec<(String, Value)> {
        let rows = [
            json!({"question": "1, 2\nor 3?", "answer": "1.10"}),
            json!({"question": "4?", "answer": ""}),
        ];
        lines.map(str::to_owned).into_iter().zip(rows).collect::<Vec<_>>()
    }

    #[test]
    fn delimiter_is_detected_from_header() {
        let row = json!({"question, in words": "1; 2?", "answer": "1,5"});
        for text in [
            "\"question, in words\";answer\n\"1; 2?\";1,5\n",
            "\n\"question, in words\"\tanswer\n1; 2?\t1,5",
            "\"question, in words\",answer\n1; 2?,\"1,5\"\r\n\r\n",
        ] {
            let found = read(text, false).unwrap();
            assert_eq!(found.iter().map(|(_, row)| row).collect::<Vec<_>>(), [&row], "{text}");
        }
        let mut found = Vec::new();
        let skipped_columns = read_table_rows(
            "question,note,,note,\n?,1,2,3,4",
            false,
            &|_| false,
            |why| why,
            &mut |_, row| {
                found.push(Value::Object(row));
                Ok(())
            },
        );
        assert_eq!(found, [json!({"question": "?"})]);
        let columns: Vec<String> = skipped_columns
            .unwrap()
            .into_iter()
            .map(|skipped_columns| skipped_columns.column)
            .collect();
        assert_eq!(columns, ["", "note"]);
        let error = read("question,answer,answer\n?,1,2\n", false).unwrap_err();
        assert!(error.starts_with("the header has two columns named \"answer\""), "{error}");
    }

    #[test]
    fn tsv_keeps_quotes_within_fields() {
        for (text, question) in [
            ("question\tanswer\n\"Hi\" he said\t1\n", "\"Hi\" he said"),
            ("question\tanswer\n\"never closed\t1\n", "\"never closed"),
            ("question\tanswer\n\"a\tb \"\"c\"\"\"\t1\n", "a\tb \"c\""),
        ] {
            assert_eq!(read(text, true).unwrap()[0].1["question"], question);
        }
    }

    #[test]
    fn unclosed_quotes_are_rejected() {
        assert_eq!(read("question,answer\n?,\"1\"\"\"", false).unwrap()[0].1["answer"], "1\"");
        assert_eq!(read("question,answer\r\n5\" pipe,1\r\n", false).unwrap().len(), 1);
        assert_eq!(read("question,answer\n", false).unwrap(), []);
        for text in [
            "question,answer\n1?,2\n3?,\"4\n5?,6\n",
            "question,answer\n1?,2\n3?,\"4",
            "question,\"ans\n",
        ] {
            let error = read(text, false).unwrap_err();
            assert!(error.contains("that is never closed"), "{text}: {error}");
        }
    }
}
