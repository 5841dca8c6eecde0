//! Asks questions on a terminal, each with a default answer.

use std::io::{BufRead, IsTerminal, Write};

use clap::ValueEnum;

use crate::failure::unusable;
use crate::screen::Style;

/// Source of the values for a new recipe: a user at a terminal, or the defaults.
pub struct Prompter {
    is_interactive: bool,
}

impl Prompter {
    /// Creates a prompter that asks the user if standard input and standard error are terminals.
    /// Otherwise, the prompter uses the defaults.
    pub fn from_terminal() -> Self {
        Prompter {
            is_interactive: std::io::stdin().is_terminal() && std::io::stderr().is_terminal(),
        }
    }

    /// Returns `preset` if it is set. Otherwise asks the user the question, and returns the answer.
    /// Returns `default` if the answer is empty, or if no user can be asked.
    ///
    /// # Errors
    /// Returns an error if the terminal cannot be read or is closed before the answer.
    pub fn prompt_text(
        &self,
        preset: Option<String>,
        question: &str,
        default: &str,
    ) -> anyhow::Result<String> {
        if let Some(preset) = preset {
            return Ok(preset);
        }
        if !self.is_interactive {
            return Ok(default.to_owned());
        }
        eprint!("{question} {} ", Style::stderr().dim(&format!("[{default}]")));
        std::io::stderr().flush()?;
        let mut line = String::new();
        if std::io::stdin().lock().read_line(&mut line)? == 0 {
            return Err(unusable(
                "the terminal was closed before the last answer; nothing was written",
            ));
        }
        let line = line.trim();
        Ok(if line.is_empty() { default.to_owned() } else { line.to_owned() })
    }

    /// Returns `preset` if it is set. Otherwise asks the user the question until the answer is the
    /// name of a value, and returns this value.
    ///
    /// # Errors
    /// Returns an error if the terminal cannot be read or is closed before the answer.
    pub fn prompt_choice<T: ValueEnum + Copy>(
        &self,
        preset: Option<T>,
        question: &str,
        default: T,
    ) -> anyhow::Result<T> {
        if let Some(preset) = preset {
            return Ok(preset);
        }
        let name = |value: &T| {
            value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
        };
        let all = T::value_variants().iter().map(name).collect::<Vec<_>>().join(", ");
        loop {
            let answer = self.prompt_text(None, &format!("{question} ({all})"), &name(&default))?;
            match T::from_str(&answer, true) {
                Ok(value) => return Ok(value),
                Err(_) => eprintln!("{answer:?} is not one of {all}"),
            }
        }
    }
}
