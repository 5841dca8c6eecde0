//! Exports the attempts of a run as rows that other programs read.
//!
//! A [`Filter`] selects attempts. A [`SequenceReader`] converts their tokens to messages. A
//! [`Format`] converts attempts to rows: the complete table, and the formats of verl, TRL and
//! Harbor. An [`Exporter`] streams the rows to a [`Target`], and continues an interrupted export.
//!
//! # Guarantees
//! - **Same input, same bytes**: rows are ordered by slot, try and sequence.
//! - **Nothing is lost silently**: a sequence that cannot be converted keeps its text in the table,
//!   with the reason. Other formats skip it, and report how many sequences they skipped and why.
//! - **No row twice**: an interrupted export continues after the last complete group.
//! - **Read only**: the run is never changed, and can be in progress.
//!
//! Out of scope: opening runs and models, which the caller does.

mod column;
mod error;
mod export;
mod filter;
mod format;
mod parquet_file;
mod part;
mod prompt_parser;
mod sequence;
#[cfg(test)]
mod tests;

pub use column::{Column, ColumnType};
pub use error::ExportError;
pub use export::{Exporter, ReadAttempt, Target};
pub use filter::{Filter, Range};
pub use format::{ExportedAttempt, Format, RowOptions, Rows};
pub use glob::Pattern;
pub use part::{Part, Progress};
pub use prompt_parser::{ParsedContext, Position, PromptParser, find_described_tools};
pub use sequence::{Completion, FindChat, Sequence, SequenceReader, Tokens};
