//! Reads corpora: JSONL files with one passage per line.
//!
//! A row has an `id` (`_id` in BEIR's files), and either `text` with an optional `title`, or
//! `contents` as in Search-R1's files. Blank lines are skipped. The first invalid row results in an
//! error that names its line.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_128;

use crate::{Passage, SearchError};

/// Maximum length of a line in a corpus file, in bytes. Longer lines are rejected, because they
/// would fill the memory.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// An iterator over the passages of a corpus file.
pub struct Corpus {
    path: PathBuf,
    file: BufReader<File>,
    /// Number of the line that was read last, from 1. 0 before the first line.
    line: u64,
    /// Number of bytes that have been read.
    read: u64,
    /// Size of the corpus file, in bytes.
    bytes: u64,
    buffer: Vec<u8>,
    /// Hashes of the passage ids that have been read. With 128 bits, collisions are negligible.
    ids: HashSet<u128>,
}

/// Fields of a corpus row. Other fields are ignored.
#[derive(Deserialize)]
struct CorpusRow {
    #[serde(default)]
    id: Value,
    #[serde(default, rename = "_id")]
    other_id: Value,
    #[serde(default)]
    title: Value,
    #[serde(default)]
    text: Value,
    #[serde(default)]
    contents: Value,
}

impl Corpus {
    /// Opens the corpus file at `path`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be opened.
    pub fn open(path: &Path) -> Result<Self, SearchError> {
        let file = File::open(path).map_err(SearchError::io_error("open", path))?;
        let facts = file.metadata().map_err(SearchError::io_error("read", path))?;
        Ok(Corpus {
            path: path.to_owned(),
            file: BufReader::with_capacity(1 << 20, file),
            line: 0,
            read: 0,
            bytes: facts.len(),
            buffer: Vec::new(),
            ids: HashSet::new(),
        })
    }

    /// Returns the path of the corpus file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of bytes that have been read, and the size of the file in bytes.
    pub fn progress(&self) -> (u64, u64) {
        (self.read, self.bytes)
    }

    fn next_row(&mut self) -> Result<Option<Passage>, SearchError> {
        loop {
            self.buffer.clear();
            let mut line = self.file.by_ref().take(MAX_LINE_BYTES);
            let read = line
                .read_until(b'\n', &mut self.buffer)
                .map_err(SearchError::io_error("read", &self.path))?;
            if read == 0 {
                return Ok(None);
            }
            self.line += 1;
            self.read += read as u64;
            if read as u64 == MAX_LINE_BYTES && !self.buffer.ends_with(b"\n") {
                return Err(self.row_error(format!(
                    "the row is longer than {MAX_LINE_BYTES} bytes; split it into passages"
                )));
            }
            let mut bytes = self.buffer.as_slice();
            if self.line == 1 {
                bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
            }
            if bytes.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let passage = parse_row(bytes).map_err(|why| self.row_error(why))?;
            if !self.ids.insert(xxh3_128(passage.id.as_bytes())) {
                let why = format!(
                    "the id {:?} already occurs in an earlier row, but ids must be unique",
                    passage.id
                );
                return Err(self.row_error(why));
            }
            return Ok(Some(passage));
        }
    }

    fn row_error(&self, why: String) -> SearchError {
        SearchError::Row { path: self.path.clone(), line: self.line, why }
    }
}

impl Iterator for Corpus {
    type Item = Result<Passage, SearchError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_row().transpose()
    }
}

/// Parses a row of a corpus file.
///
/// # Errors
/// Returns a message that describes why the row is invalid.
fn parse_row(line: &[u8]) -> Result<Passage, String> {
    let line = std::str::from_utf8(line).map_err(|error| match find_decompressor(line) {
        Some(unpack) => format!("it is compressed; unpack the file first ({unpack})"),
        None => {
            format!(
                "it is not UTF-8 from byte {} on; convert the file (iconv -t utf-8)",
                error.valid_up_to()
            )
        }
    })?;
    if !line.trim_start().starts_with('{') {
        return Err(format!(
            "the row is not a JSON object, but starts with {:?}",
            line_start(line)
        ));
    }
    let row: CorpusRow = serde_json::from_str(line).map_err(|error| {
        format!(
            "the row is not a JSON object with an id and a text: {}",
            strip_line_number(&error.to_string())
        )
    })?;
    let id = match Some(row.id).filter(|id| !id.is_null()).unwrap_or(row.other_id) {
        Value::String(id) if !id.is_empty() => id,
        Value::Number(id) if id.is_i64() || id.is_u64() => id.to_string(),
        Value::Null => return Err("the field `id` is missing; give every row a unique id".into()),
        other => {
            return Err(format!(
                "the field `id` is {}, but it must be a string or a whole number",
                value_excerpt(&other)
            ));
        }
    };
    let title = to_text("title", row.title)?.unwrap_or_default();
    let contents = to_text("contents", row.contents)?;
    let passage = match (to_text("text", row.text)?, contents) {
        (Some(text), _) => Passage { id, title, text },
        (None, Some(contents)) => {
            let read = Passage::from_contents(id, contents);
            // The title may be in `contents`, in `title`, or in both.
            if title.is_empty() || read.title == title {
                read
            } else {
                Passage { text: read.contents(), title, ..read }
            }
        }
        (None, None) => return Err("the row has neither `text` nor `contents`".into()),
    };
    if passage.text.trim().is_empty() {
        return Err("the text of the row is empty; leave the row out".into());
    }
    Ok(passage)
}

fn to_text(key: &str, value: Value) -> Result<Option<String>, String> {
    match value {
        Value::String(text) => Ok(Some(text)),
        Value::Null => Ok(None),
        other => {
            Err(format!("the field `{key}` is {}, but it must be a string", value_excerpt(&other)))
        }
    }
}

/// Returns the name of a program that decompresses a file which starts with `start`, or `None` if
/// the file is not compressed.
fn find_decompressor(start: &[u8]) -> Option<&'static str> {
    let kinds: [(&[u8], &str); 4] = [
        (b"\x1f\x8b", "gunzip"),
        (b"\x28\xb5\x2f\xfd", "unzstd"),
        (b"BZh", "bunzip2"),
        (b"\xfd7zXZ", "unxz"),
    ];
    kinds.into_iter().find_map(|(magic, unpack)| start.starts_with(magic).then_some(unpack))
}

/// Removes the line number from the position in a JSON error, because each row is one line. The
/// byte position remains.
fn strip_line_number(error: &str) -> String {
    error.replace(" at line 1 column ", " at byte ")
}

/// Returns the first 60 characters of a row, for an error message.
fn line_start(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.trim_end().to_owned(),
    }
}

/// Returns the start of a JSON value as text, for an error message.
fn value_excerpt(value: &Value) -> String {
    line_start(&value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(contents: &[u8]) -> Result<Vec<Passage>, SearchError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.jsonl");
        std::fs::write(&path, contents).unwrap();
        let mut corpus = Corpus::open(&path).unwrap();
        let all = corpus.by_ref().collect::<Result<Vec<_>, _>>();
        if all.is_ok() {
            assert_eq!(corpus.progress(), (contents.len() as u64, contents.len() as u64));
        }
        all
    }

    #[test]
    fn corpus_reads_rows_of_all_formats() {
        let rows = "\u{feff}{\"id\": \"a\", \"title\": \"T\", \"text\": \"x\"}\r\n\n\
            {\"_id\": \"b\", \"text\": \"y\", \"metadata\": {}}\n  \n\
            {\"id\": 7, \"contents\": \"\\\"T\\\"\\nz\"}\n\
            {\"id\": \"c\", \"title\": null, \"contents\": \"w\"}\n\
            {\"id\": \"d\", \"_id\": {\"$oid\": \"5f\"}, \"title\": \"T\", \"contents\": \"\\\"T\\\"\\nz\"}\n\
            {\"id\": \"e\", \"title\": \"U\", \"contents\": \"\\\"T\\\"\\nz\"}";
        let wanted = [
            passage_of("a", "T", "x"),
            passage_of("b", "", "y"),
            passage_of("7", "T", "z"),
            passage_of("c", "", "w"),
            passage_of("d", "T", "z"),
            passage_of("e", "U", "\"T\"\nz"),
        ];
        assert_eq!(read(rows.as_bytes()).unwrap(), wanted);
    }

    fn passage_of(id: &str, title: &str, text: &str) -> Passage {
        Passage { id: id.into(), title: title.into(), text: text.into() }
    }

    #[test]
    fn invalid_rows_are_reported_with_line() {
        let good = "{\"id\": \"a\", \"text\": \"x\"}\n\n";
        for (row, why) in [
            (&b"{\"id\": \"b\"}"[..], "the row has neither `text` nor `contents`"),
            (b"{\"id\": \"b\", \"text\": \" \"}", "the text of the row is empty"),
            (b"{\"id\": \"b\", \"contents\": \"\\\"T\\\"\\n \"}", "the text of the row is empty"),
            (b"{\"id\": \"b\", \"text\": 5}", "`text` is 5, but it must be a string"),
            (b"{\"text\": \"x\"}", "`id` is missing"),
            (b"{\"id\": [1], \"text\": \"x\"}", "`id` is [1], but it must be"),
            (b"{\"id\": \"a\", \"text\": \"z\"}", "the id \"a\" already occurs in an earlier row"),
            (b"plain", "the row is not a JSON object"),
            (b"[1, 2]", "the row is not a JSON object"),
            (b"{\"id\": \"b\", \"text\": \"x\"", "the row is not a JSON object"),
            (b"{\"id\": \"b\", \"text\": \"\xff\"}", "it is not UTF-8 from byte 21 on"),
            (b"\x1f\x8b\x08\x00", "it is compressed; unpack the file first (gunzip)"),
        ] {
            let error = read(&[good.as_bytes(), row].concat()).unwrap_err();
            let SearchError::Row { line, why: found, .. } = &error else { panic!("{error}") };
            assert_eq!(*line, 3, "{error}");
            assert!(found.contains(why), "{error}");
        }
    }
}
