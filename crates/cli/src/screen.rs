//! The terminal: colours where they can be seen, bars where they can move, and lines everywhere.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, WeakProgressBar};
pub use levade_launch::quoted;
pub use levade_run::display::{clock, count, path, plural};

/// The bar that was drawn last, which lines of a log must not run into.
static NEWEST: Mutex<Option<WeakProgressBar>> = Mutex::new(None);

/// Colours, or none where nobody would see them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Style {
    on: bool,
}

impl Style {
    /// For standard output.
    pub fn stdout() -> Self {
        Style { on: std::io::stdout().is_terminal() && wanted() }
    }

    /// For standard error.
    pub fn stderr() -> Self {
        Style { on: std::io::stderr().is_terminal() && wanted() }
    }

    /// Colours whether or not anybody sees them.
    #[cfg(test)]
    pub fn always() -> Self {
        Style { on: true }
    }

    /// Whether there are colours.
    pub fn is_on(self) -> bool {
        self.on
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// For headings.
    pub fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// For what matters less.
    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// For what is wrong.
    pub fn red(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// For what the model drew.
    pub fn green(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// For what the model drew, too, so that neighbours can be told apart.
    pub fn cyan(self, text: &str) -> String {
        self.paint("36", text)
    }
}

/// Whether the user wants colours at all (see no-color.org).
fn wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Writes to standard output. A reader that has gone away (`| head`) is no failure.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Writes a line to standard output.
pub fn say(line: &str) {
    print(&format!("{line}\n"));
}

/// Whether bars can be drawn.
pub fn has_bars() -> bool {
    std::io::stderr().is_terminal()
}

/// A bar on standard error in the given form; hidden where there is no terminal.
pub fn bar(length: u64, template: &str) -> ProgressBar {
    let target = if has_bars() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(length), target);
    // The templates are literals of this program; should one be wrong, the plain style still shows the way.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("━╸─"));
    }
    *NEWEST.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.downgrade());
    bar
}

/// Writes to the terminal while no bar is in the way.
pub fn beside_bar<T>(write: impl FnOnce() -> T) -> T {
    let newest =
        NEWEST.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(WeakProgressBar::upgrade);
    match newest {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_only_where_they_are_seen() {
        assert_eq!(Style::default().dim("x"), "x");
        assert_eq!(Style::always().dim("x"), "\x1b[2mx\x1b[0m");
    }
}
