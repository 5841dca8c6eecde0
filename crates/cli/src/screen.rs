//! Writes to the terminal: colors and progress bars on a terminal, and plain lines elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, WeakProgressBar};
pub use levade_launch::quoted;
pub use levade_run::display::{clock, count, path, plural};

/// Progress bar that was created last. Log lines must not overwrite it.
static NEWEST: Mutex<Option<WeakProgressBar>> = Mutex::new(None);

/// Style of printed text: with colors on a terminal, without colors elsewhere.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Style {
    on: bool,
}

impl Style {
    /// Creates the style for text on standard output.
    pub fn stdout() -> Self {
        Style { on: std::io::stdout().is_terminal() && allows_colors() }
    }

    /// Creates the style for text on standard error.
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

    /// Formats a heading in bold.
    pub fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// Formats secondary text in a dim color.
    pub fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }

    /// Formats an error in red.
    pub fn red(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// Formats a sampled token in green.
    pub fn green(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// Formats a sampled token in cyan, a second color that distinguishes adjacent tokens.
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

/// Writes a text to standard output. Failures are ignored, such as those after the reader has
/// exited (`| head`).
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Writes a line to standard output. Failures are ignored.
pub fn print_line(line: &str) {
    print(&format!("{line}\n"));
}

/// Returns whether progress bars can be drawn, that is, whether standard error is a terminal.
pub fn has_bars() -> bool {
    std::io::stderr().is_terminal()
}

/// Creates a progress bar on standard error from a template of `indicatif`. If standard error is
/// not a terminal, the bar is hidden. `length` is the value at which the bar is full, in the unit
/// of the template.
pub fn create_bar(length: u64, template: &str) -> ProgressBar {
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
pub fn program_name() -> String {
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
