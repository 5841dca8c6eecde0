//! Errors of task sources.

use std::fmt;
use std::path::PathBuf;

/// Location of a row in a data file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowLocation {
    /// Line on which the row starts, from 1.
    Line(usize),
    /// Number of the row, from 1, in a file format without lines.
    Row(usize),
}

impl RowLocation {
    /// Returns the number of the line or of the row.
    pub(super) fn number(self) -> usize {
        match self {
            RowLocation::Line(number) | RowLocation::Row(number) => number,
        }
    }
}

impl fmt::Display for RowLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RowLocation::Line(number) => write!(f, "line {number}"),
            RowLocation::Row(number) => write!(f, "row {number}"),
        }
    }
}

/// Error of reading a source of tasks.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// A file or directory cannot be read.
    #[error("cannot read the tasks of {}: {why}", path.display())]
    Read {
        /// Path of the file or directory.
        path: PathBuf,
        /// I/O error.
        why: std::io::Error,
    },
    /// No data file exists at a path, or none matches a pattern.
    #[error("{}: {why}", path.display())]
    NoFile {
        /// Path or pattern as it is in the options.
        path: PathBuf,
        /// Reason why no file was found, and what to do.
        why: String,
    },
    /// A file has an unsupported format, or is damaged.
    #[error("{}: {why}", path.display())]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with the file, and what to do.
        why: String,
    },
    /// The files of the source have no rows.
    #[error("{} has no rows", path.display())]
    Empty {
        /// Path of the first file.
        path: PathBuf,
    },
    /// A row is not JSON.
    #[error("{}, line {line}, column {column}: not valid JSON: {why}", path.display())]
    Json {
        /// Path of the file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// Message of the JSON parser.
        why: String,
    },
    /// A row is valid JSON, but not an object.
    #[error("{}, {location}: the row is not a JSON object", path.display())]
    NotObject {
        /// Path of the file.
        path: PathBuf,
        /// Location of the row.
        location: RowLocation,
    },
    /// A row lacks a required field.
    #[error("{}, {location}: the row has no field {field:?}; it has {has}. \
             {way_out}", path.display())]
    NoField {
        /// Path of the file.
        path: PathBuf,
        /// Location of the row.
        location: RowLocation,
        /// Name or path of the missing field.
        field: String,
        /// Names of the fields that the row has.
        has: String,
        /// Suggestion which field may be meant.
        way_out: String,
    },
    /// A field has an invalid value.
    #[error("{}, {location}: field {field:?} is {found}, but it must be \
             {expected}", path.display())]
    Field {
        /// Path of the file.
        path: PathBuf,
        /// Location of the row.
        location: RowLocation,
        /// Name or path of the field.
        field: String,
        /// Value of the field as JSON, truncated to 80 characters.
        found: String,
        /// Description of the allowed values.
        expected: String,
    },
    /// After the held-out questions are removed, no question is left for training.
    #[error(
        "{} has {rows} different questions, so holding out {held_out} questions leaves none to \
         train on: hold out fewer, or set `held_out = \"all\"` if the source is only for \
         evaluation",
        path.display()
    )]
    HeldOut {
        /// Path of the first file.
        path: PathBuf,
        /// Number of different questions in the files.
        rows: usize,
        /// Number of questions to hold out, as requested.
        held_out: usize,
    },
    /// The option `repeat` would result in more tasks than the maximum.
    #[error(
        "{} has {rows} rows to train on, and `repeat` = {repeat} would result in more than \
         {max_tasks} tasks: lower `repeat` or `limit`",
        path.display()
    )]
    Repeat {
        /// Path of the first file.
        path: PathBuf,
        /// Number of training rows.
        rows: usize,
        /// Number of repetitions of each row, as requested.
        repeat: usize,
        /// Maximum number of tasks of a source whose rows are repeated.
        max_tasks: usize,
    },
    /// An option of a task generator is out of range.
    #[error("{name} = {value}, but it must be {range}")]
    Option {
        /// Name of the option.
        name: &'static str,
        /// Value of the option.
        value: f64,
        /// Description of the allowed values.
        range: &'static str,
    },
}
