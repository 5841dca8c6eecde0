//! Findings of a check, one line an item.

use std::fmt::Display;
use std::process::ExitCode;

use crate::failure;
use crate::screen::{self, Style};

/// Findings so far, which are printed as they come.
#[derive(Debug, Default)]
pub struct Report {
    faults: u32,
}

/// Width of the names of items.
const WIDTH: usize = 9;

impl Report {
    /// An item that is there, described, or the fault in it.
    pub fn item<T, E: Into<anyhow::Error>>(
        &mut self,
        name: &str,
        found: Result<T, E>,
        describe: impl FnOnce(&T) -> String,
    ) -> Option<T> {
        let found = self.quiet(name, found)?;
        self.fine(name, &describe(&found));
        Some(found)
    }

    /// An item of which only a fault is worth a line.
    pub fn quiet<T, E: Into<anyhow::Error>>(&mut self, name: &str, found: Result<T, E>) -> Option<T> {
        match found {
            Ok(found) => Some(found),
            Err(error) => {
                self.fault(name, &failure::message(&error.into()));
                None
            }
        }
    }

    /// An item that is as it should be.
    pub fn fine(&mut self, name: &str, text: &str) {
        line(&Style::stdout().green("✓"), name, text);
    }

    /// Something to know that is no fault.
    pub fn note(&mut self, name: &str, text: &str) {
        line(&Style::stdout().dim("·"), name, text);
    }

    /// A fault.
    pub fn fault(&mut self, name: &str, text: &str) {
        self.faults += 1;
        line(&Style::stdout().red("✗"), name, text);
    }

    /// Whether there were any.
    pub fn has_faults(&self) -> bool {
        self.faults > 0
    }

    /// Says how it came out: 2 where something would fail.
    pub fn end(self) -> ExitCode {
        match self.faults {
            0 => ExitCode::SUCCESS,
            faults => {
                screen::say(&format!("{} would fail", screen::plural(faults, "item")));
                ExitCode::from(2)
            }
        }
    }
}

/// A mark, a name, and a text whose further lines stand below its first.
fn line(mark: &str, name: &str, text: impl Display) {
    let indent = format!("\n{:width$}", "", width = WIDTH + 3);
    let text = text.to_string().trim_end().replace('\n', &indent);
    screen::say(&format!("{mark} {name:WIDTH$} {text}"));
}
