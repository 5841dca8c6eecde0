//! Errors of task sources.

use std::fmt;
use std::path::PathBuf;

/// Location of a row in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowLocation {
    /// Line on which the row starts, from 1.
    Line(usize),
    /// Number of the row, from 1, in a file without lines.
    Row(usize),
}

impl RowLocation {
    /// Returns only the number.
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

/// Errors of a task source.
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
    /// A path matches no file with tasks.
    #[error("{} {why}", path.display())]
    NoFile {
        /// Path as it is in the options.
        path: PathBuf,
        /// Reason, and what to do.
        why: String,
    },
    /// A file has an unsupported format, or is damaged.
    #[error("{} {why}", path.display())]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// The format that was found instead, and what to do.
        why: String,
    },
    /// The files have no rows.
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
        /// Message of the parser.
        why: String,
    },
    /// A row is JSON, but not an object.
    #[error("{}, {location}: the row is not a JSON object", path.display())]
    NotObject {
        /// Path of the file.
        path: PathBuf,
        /// Location of the row.
        location: RowLocation,
    },
    /// A row lacks a field.
    #[error("{}, {location}: the row has no field {field:?}; it has {has}. \
             {way_out}", path.display())]
    NoField {
        /// Path of the file.
        path: PathBuf,
        /// Location of the row.
        location: RowLocation,
        /// Name or path of the missing field.
        field: String,
        /// Fields that the row has.
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
        /// Value, truncated to 80 characters.
        found: String,
        /// Description of the allowed values.
        expected: String,
    },
    /// The number of held-out questions leaves none for training.
    #[error(
        "{} has {rows} different questions, so holding out {held_out} leaves none to train on: \
         hold out fewer, or set `held_out = \"all\"` if the source is only for evaluation",
        path.display()
    )]
    HeldOut {
        /// Path of the first file.
        path: PathBuf,
        /// Number of different questions in the files.
        rows: usize,
        /// Requested number of held-out questions.
        held_out: usize,
    },
    /// `repeat` would make more tasks than the maximum.
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
        /// Requested number of repetitions per row.
        repeat: usize,
        /// Maximum number of tasks of a source whose rows are repeated.
        max_tasks: usize,
    },
    /// An option of a generator is out of range.
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
