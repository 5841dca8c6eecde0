//! Runs an export: reads attempts group by group, and writes their rows to a target.
//!
//! Memory is bounded by the attempts of one group, the ids of all attempts, and one row group of a
//! Parquet file.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use levade_store::{Attempt, Code, Status, StoreError};
use levade_tree::{AttemptId, RunId};
use serde_json::Value;

use crate::error::ExportError;
use crate::filter::Filter;
use crate::format::{ExportedAttempt, Format, RowKey, RowOptions, Rows};
use crate::parquet_file::ParquetFile;
use crate::part::{Part, Progress, for_each_row};
use crate::sequence::SequenceReader;

/// Destination of the exported rows.
#[derive(Debug, Clone, PartialEq)]
pub enum Target {
    /// The rows go to standard output, or to another stream, as JSON lines. An interrupted export
    /// to a stream cannot be continued.
    Stream,
    /// The rows go to this file of JSON lines.
    JsonLines(PathBuf),
    /// The rows go to this Parquet file.
    Parquet(PathBuf),
    /// The rows go to this directory, with one JSON file per row. The file has the name of the
    /// row's trajectory.
    Directory(PathBuf),
}

impl Target {
    /// Returns the target that a path names:
    /// - `-`: the stream
    /// - a path that ends with `.parquet`: a Parquet file
    /// - a path that ends with `/`: a directory
    /// - any other path: a file of JSON lines
    ///
    /// # Errors
    /// Returns an error if rows of `format` cannot be written to this target.
    pub fn parse(path: &str, format: Format, options: &RowOptions) -> Result<Self, ExportError> {
        let target = match path {
            "-" => Target::Stream,
            path if path.ends_with('/') => Target::Directory(path.into()),
            path if path.ends_with(".parquet") => Target::Parquet(path.into()),
            path => Target::JsonLines(path.into()),
        };
        match target {
            Target::Parquet(_) if format.columns(options).is_none() => {
                Err(ExportError::NoColumns("this format"))
            }
            Target::Directory(path) if format != Format::Atif => Err(ExportError::Target {
                path,
                expected: "a file, because only ATIF is written to a directory",
            }),
            target => Ok(target),
        }
    }
}

/// Exporter that converts the attempts of a run into rows.
pub struct Exporter<'a> {
    run: RunId,
    filter: &'a Filter,
    format: Format,
    options: RowOptions,
    sequences: SequenceReader<'a>,
    read: &'a ReadAttempt<'a>,
    /// Keys of the rows that have been written. Only formats that keep the first of several equal
    /// rows use them.
    written: BTreeSet<RowKey>,
}

/// Function that reads an attempt of the run. Returns `None` if the attempt is not recorded.
pub type ReadAttempt<'a> = dyn Fn(&AttemptId) -> Result<Option<Attempt>, StoreError> + 'a;

impl<'a> Exporter<'a> {
    /// Creates an exporter for the attempts of a run, which `read` returns.
    pub fn new(
        run: &RunId,
        filter: &'a Filter,
        (format, options): (Format, RowOptions),
        sequences: SequenceReader<'a>,
        read: &'a ReadAttempt<'a>,
    ) -> Self {
        let run = run.clone();
        Exporter { run, filter, format, options, sequences, read, written: BTreeSet::new() }
    }

    /// Writes the rows of all groups to a stream, as JSON lines.
    ///
    /// # Errors
    /// Returns an error if an attempt cannot be read, or if the rows cannot be written.
    pub fn write_stream(
        mut self,
        groups: &[Vec<AttemptId>],
        to: &mut dyn Write,
    ) -> Result<Progress, ExportError> {
        let failed = ExportError::io_error_at(Path::new("standard output"));
        let mut progress = Progress::default();
        for group in groups {
            let Rows { rows, skipped } = self.read_rows(group)?;
            for row in &rows {
                writeln!(to, "{row}").map_err(&failed)?;
            }
            progress.groups += 1;
            progress.rows += rows.len() as u64;
            progress.skipped += skipped.len() as u64;
            progress.first_skipped = progress.first_skipped.or(skipped.into_iter().next());
        }
        to.flush().map_err(&failed)?;
        Ok(progress)
    }

    /// Writes the remaining rows to a file or a directory. Calls `report` after each group.
    ///
    /// # Errors
    /// Returns an error if an attempt cannot be read, or if the rows cannot be written. The rows
    /// that were written so far are kept in the part, which a later export with equal options
    /// continues.
    pub fn write_part(
        mut self,
        mut part: Part,
        target: &Target,
        report: &mut dyn FnMut(&Progress),
    ) -> Result<Progress, ExportError> {
        if self.format.has_distinct_rows() {
            self.written = part.collect_keys(|row| self.format.distinct_key(row))?;
        }
        while let Some(group) = part.next_group() {
            let Rows { rows, skipped } = self.read_rows(group)?;
            part.write_group(&rows, &skipped)?;
            report(part.progress());
        }
        match target {
            Target::Stream | Target::JsonLines(_) => part.finish(None),
            Target::Parquet(_) => {
                let columns = self.format.columns(&self.options);
                let columns = columns.ok_or(ExportError::NoColumns("this format"))?;
                part.finish(Some(&|rows, to| {
                    let mut file = ParquetFile::create(to, &columns)?;
                    for_each_row(rows, |row| file.write(&row))?;
                    file.finish()
                }))
            }
            Target::Directory(_) => part.finish(Some(&split_rows)),
        }
    }

    /// Converts a group of attempts into rows. An attempt that the store cannot read, or that was
    /// withdrawn since the export started, is skipped. The result names the skipped attempts.
    fn read_rows(&mut self, group: &[AttemptId]) -> Result<Rows, ExportError> {
        let mut exported = Vec::with_capacity(group.len());
        let mut skipped = Vec::new();
        for id in group {
            let attempt = match (self.read)(id) {
                Ok(attempt) => attempt,
                Err(error) if error.code() == Code::Corrupt => {
                    skipped.push(error.to_string());
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let Some(attempt) = attempt.filter(|attempt| self.filter.includes_task(attempt)) else {
                continue;
            };
            if attempt.status == Status::Withdrawn {
                skipped.push(format!("{}: it was withdrawn", attempt.slot.name()));
                continue;
            }
            let mut sequences = self.sequences.read_sequences(&attempt);
            let had_sequences = !sequences.is_empty();
            sequences.retain(|sequence| self.filter.includes_agent(&sequence.agent));
            // An attempt without any sequence belongs to no other agent.
            if !sequences.is_empty() || (!had_sequences && self.filter.agent.is_none()) {
                exported.push(ExportedAttempt { run: self.run.0.clone(), attempt, sequences });
            }
        }
        let mut rows = self.format.rows(&exported, &self.options);
        rows.skipped.splice(0..0, skipped);
        let (format, written) = (self.format, &mut self.written);
        rows.rows.retain(|row| format.distinct_key(row).is_none_or(|key| written.insert(key)));
        Ok(rows)
    }
}

/// Writes each row of the file `rows` into a separate file in the directory `to`.
fn split_rows(rows: &Path, to: &Path) -> Result<(), ExportError> {
    fs::create_dir_all(to).map_err(ExportError::io_error_at(to))?;
    for_each_row(rows, |row| {
        let name = row.get("trajectory_id").and_then(Value::as_str).unwrap_or("trajectory");
        let path = to.join(format!("{}.json", name.replace('/', "-")));
        fs::write(&path, format!("{row:#}\n")).map_err(ExportError::io_error_at(&path))
    })
}
