//! Writes to the terminal: colors and progress bars on a terminal, and plain lines elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, WeakProgressBar};
pub use levade_launch::quoted;
pub use levade_run::display::{clock, count, path, plural};

/// The newest progress bar. Log lines must not overwrite it.
static NEWEST: Mutex<Option<WeakProgressBar>> = Mutex::new(None);

/// Colors of text, or none if the output is not a terminal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Style {
    on: bool,
}

impl Style {
    /// Creates the style of standard output.
    pub fn stdout() -> Self {
        Style { on: std::io::stdout().is_terminal() && allows_colors() }
    }

    /// Creates the style of standard error.
    pub fn stderr() -> Self {
        Style { on: std::io::stderr().is_terminal() && allows_colors() }
    }

    /// Creates a style that always uses colors, on a terminal or not.
    #[cfg(test)]
    pub fn with_colors() -> Self {
        Style { on: true }
    }

    /// Returns whether this style uses colors.
    pub fn is_on(self) -> bool {
        self.on
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Styles a heading.
    pub fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// Styles secondary text.
    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// Styles an error.
    pub fn red(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// Styles a sampled token.
    pub fn green(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// Styles a sampled token in a second color, so that adjacent tokens can be distinguished.
    pub fn cyan(self, text: &str) -> String {
        self.paint("36", text)
    }
}

/// Returns whether the environment allows colors: `NO_COLOR` is unset or empty (see no-color.org),
/// and `TERM` is not `dumb`.
fn allows_colors() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Writes to standard output and ignores failures, such as a reader that has exited (`| head`).
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Writes a line to standard output.
pub fn print_line(line: &str) {
    print(&format!("{line}\n"));
}

/// Returns whether progress bars can be drawn, that is, whether standard error is a terminal.
pub fn has_bars() -> bool {
    std::io::stderr().is_terminal()
}

/// Creates a progress bar on standard error from a template of `indicatif`. The bar is hidden if
/// standard error is not a terminal. `length` is its end, in the unit of the template.
pub fn bar(length: u64, template: &str) -> ProgressBar {
    let target =
        if has_bars() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(length), target);
    // Templates are literals of this program. If one is invalid, the default style still shows
    // progress.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("━╸─"));
    }
    *NEWEST.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.downgrade());
    bar
}

/// Calls `write`, which writes to the terminal, while the newest progress bar is suspended.
pub fn with_bar_suspended<T>(write: impl FnOnce() -> T) -> T {
    let newest = NEWEST
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .as_ref()
        .and_then(WeakProgressBar::upgrade);
    match newest {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Returns the name by which this program was called, quoted for a shell.
pub fn program() -> String {
    std::env::args_os()
        .next()
        .map_or_else(|| "levade".into(), |name| quoted(&name.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn style_paints_only_when_on() {
        assert_eq!(Style::default().dim("x"), "x");
        assert_eq!(Style::with_colors().dim("x"), "\x1b[2mx\x1b[0m");
    }
}
