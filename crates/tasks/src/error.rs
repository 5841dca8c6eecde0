//! Errors of a source of tasks.

use std::fmt;
use std::path::PathBuf;

/// Where in a file a row stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The line on which it begins, from 1.
    Line(usize),
    /// Number of the row, from 1, where a file has no lines.
    Row(usize),
}

impl Place {
    /// The number alone.
    pub(super) fn number(self) -> usize {
        match self {
            Place::Line(number) | Place::Row(number) => number,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(number) => write!(f, "line {number}"),
            Place::Row(number) => write!(f, "row {number}"),
        }
    }
}

/// Errors of a source of tasks.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// A file or folder cannot be read.
    #[error("cannot read the tasks of {}: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's message.
        why: std::io::Error,
    },
    /// A path leads to no file with tasks.
    #[error("{} {why}", path.display())]
    NoFile {
        /// The path.
        path: PathBuf,
        /// Why it leads nowhere, and the way out.
        why: String,
    },
    /// A file is of no form that can be read, or is damaged.
    #[error("{} {why}", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// The format that it has instead, and the way out.
        why: String,
    },
    /// The files have no rows.
    #[error("{} has no rows", path.display())]
    Empty {
        /// The first file.
        path: PathBuf,
    },
    /// A row is not JSON.
    #[error("{}, line {line}, column {column}: not valid JSON: {why}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// The parser's message.
        why: String,
    },
    /// A row is JSON, but not an object.
    #[error("{}, {place}: the row is not a JSON object", path.display())]
    NotObject {
        /// The file.
        path: PathBuf,
        /// The row.
        place: Place,
    },
    /// A row lacks a field.
    #[error("{}, {place}: the row has no field {field:?}; it has {has}. {way_out}", path.display())]
    NoField {
        /// The file.
        path: PathBuf,
        /// The row.
        place: Place,
        /// The field.
        field: String,
        /// The fields there are.
        has: String,
        /// Which field may be meant.
        way_out: String,
    },
    /// A field holds something else than it must.
    #[error("{}, {place}: field {field:?} is {found}, but it must be {expected}", path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// The row.
        place: Place,
        /// The field.
        field: String,
        /// The value, shortened.
        found: String,
        /// The values that are allowed.
        expected: String,
    },
    /// More rows are to be held out than there are to spare.
    #[error(
        "{} has {rows} different questions, so {held_out} of them cannot be held out and leave one to train \
         on: hold out \
         fewer, or all, for a source that is only evaluated on (`held_out = \"all\"`)",
        path.display()
    )]
    HeldOut {
        /// The first file.
        path: PathBuf,
        /// Different questions in it.
        rows: usize,
        /// How many are to be held out.
        held_out: usize,
    },
    /// Rows are to be trained on too often.
    #[error(
        "{} has {rows} rows to train on, and `repeat` = {repeat} would make them more than {most} tasks: lower it, \
         or `limit`",
        path.display()
    )]
    Repeat {
        /// The first file.
        path: PathBuf,
        /// Rows to train on.
        rows: usize,
        /// How often each is to come.
        repeat: usize,
        /// Most tasks of a source whose rows are repeated.
        most: usize,
    },
    /// An option of a generator is out of range.
    #[error("{name} = {value}, but it must be {range}")]
    Option {
        /// The option.
        name: &'static str,
        /// The key's value.
        value: f64,
        /// The values that it may have.
        range: &'static str,
    },
}
