//! Questions on a terminal, each with an answer that counts where none is given.

use std::io::{BufRead, IsTerminal, Write};

use clap::ValueEnum;

use crate::failure::unusable;
use crate::screen::Style;

/// Whoever answers: a person at a terminal, or nobody.
pub struct Answers {
    asks: bool,
}

impl Answers {
    /// Asks where somebody can answer.
    pub fn from_terminal() -> Self {
        Answers { asks: std::io::stdin().is_terminal() && std::io::stderr().is_terminal() }
    }

    /// A text: the one that is given, or else the answer to the question.
    ///
    /// # Errors
    /// When the terminal cannot be read.
    pub fn text(&self, given: Option<String>, question: &str, default: &str) -> anyhow::Result<String> {
        if let Some(given) = given {
            return Ok(given);
        }
        if !self.asks {
            return Ok(default.to_owned());
        }
        eprint!("{question} {} ", Style::stderr().dim(&format!("[{default}]")));
        std::io::stderr().flush()?;
        let mut line = String::new();
        if std::io::stdin().lock().read_line(&mut line)? == 0 {
            return Err(unusable("the terminal was closed before all was answered; nothing was written"));
        }
        let line = line.trim();
        Ok(if line.is_empty() { default.to_owned() } else { line.to_owned() })
    }

    /// One of several, by its name; asked again until it is one.
    ///
    /// # Errors
    /// When the terminal cannot be read.
    pub fn choice<T: ValueEnum + Copy>(
        &self,
        given: Option<T>,
        question: &str,
        default: T,
    ) -> anyhow::Result<T> {
        if let Some(given) = given {
            return Ok(given);
        }
        let name = |value: &T| {
            value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
        };
        let all = T::value_variants().iter().map(name).collect::<Vec<_>>().join(", ");
        loop {
            let answer = self.text(None, &format!("{question} ({all})"), &name(&default))?;
            match T::from_str(&answer, true) {
                Ok(value) => return Ok(value),
                Err(_) => eprintln!("{answer:?} is none of {all}"),
            }
        }
    }
}
