//! Prints the findings of a check, one line per item.

use std::fmt::Display;
use std::process::ExitCode;

use crate::failure;
use crate::screen::{self, Style};

/// Printer of the findings of a check. It counts the failed items.
#[derive(Debug, Default)]
pub struct CheckReport {
    num_failures: u32,
}

/// Width of the column that contains the names of items, in characters.
const WIDTH: usize = 9;

impl CheckReport {
    /// Prints an item with its description, or the error of the item as a failure. Returns the
    /// item, or `None` if it failed.
    pub fn report_item<T, E: Into<anyhow::Error>>(
        &mut self,
        name: &str,
        found: Result<T, E>,
        describe: impl FnOnce(&T) -> String,
    ) -> Option<T> {
        let found = self.report_failure_of(name, found)?;
        self.pass(name, &describe(&found));
        Some(found)
    }

    /// Prints the error of an item as a failure. Prints nothing if there is no error. Returns the
    /// item, or `None` if it failed.
    pub fn report_failure_of<T, E: Into<anyhow::Error>>(
        &mut self,
        name: &str,
        found: Result<T, E>,
    ) -> Option<T> {
        match found {
            Ok(found) => Some(found),
            Err(error) => {
                self.fail(name, &failure::format_error(&error.into()));
                None
            }
        }
    }

    /// Prints a checked item that has no failure.
    pub fn pass(&mut self, name: &str, text: &str) {
        line(&Style::stdout().green("✓"), name, text);
    }

    /// Prints a note, which does not count as a failure.
    pub fn note(&mut self, name: &str, text: &str) {
        line(&Style::stdout().dim("·"), name, text);
    }

    /// Prints and counts a failure.
    pub fn fail(&mut self, name: &str, text: &str) {
        self.num_failures += 1;
        line(&Style::stdout().red("✗"), name, text);
    }

    /// Returns whether at least one failure was reported.
    pub fn has_failures(&self) -> bool {
        self.num_failures > 0
    }

    /// Prints the number of failures unless it is 0. Returns the exit code: 2 if there are
    /// failures, and 0 otherwise.
    pub fn print_failure_count(self) -> ExitCode {
        match self.num_failures {
            0 => ExitCode::SUCCESS,
            failures => {
                screen::print_line(&format!("{} would fail", screen::plural(failures, "item")));
                ExitCode::from(2)
            }
        }
    }
}

/// Prints a mark, a name and a text. Further lines of the text are indented to the column of its
/// first line.
fn line(mark: &str, name: &str, text: impl Display) {
    let indent = format!("\n{:width$}", "", width = WIDTH + 3);
    let text = text.to_string().trim_end().replace('\n', &indent);
    screen::print_line(&format!("{mark} {name:WIDTH$} {text}"));
}
