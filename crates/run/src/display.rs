//! Formats numbers, times and paths for users.

use std::path::Path;
use std::time::Duration;

/// Formats a path for the user: relative to the working directory if the path is inside of it.
pub fn path(path: &Path) -> String {
    let here = std::env::current_dir().ok();
    let inside = here.and_then(|here| path.strip_prefix(here).ok());
    inside.filter(|inside| !inside.as_os_str().is_empty()).unwrap_or(path).display().to_string()
}

/// Formats a number with its noun, such as `1 step` or `2 steps`.
pub fn plural(number: u32, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// Formats a duration as `0:42`, `12:05` or `1:02:03`.
pub fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let hours = seconds / 3600;
    let minutes = seconds / 60 % 60;
    let seconds = seconds % 60;
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}

/// Formats a large number with a suffix: `134.5 M`, `1.24 B`.
pub fn count(number: u64) -> String {
    let number = number as f64;
    match number {
        _ if number >= 1e9 => format!("{:.2} B", number / 1e9),
        _ if number >= 1e6 => format!("{:.1} M", number / 1e6),
        _ if number >= 1e4 => format!("{:.1} k", number / 1e3),
        _ => format!("{number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_counts_are_formatted() {
        let clocks = [0, 42, 725, 3723].map(|s| clock(Duration::from_secs(s)));
        assert_eq!(clocks, ["0:00", "0:42", "12:05", "1:02:03"]);
        let counts = [7, 9_999, 12_345, 134_515_008, 1_235_814_400].map(count);
        assert_eq!(counts, ["7", "9999", "12.3 k", "134.5 M", "1.24 B"]);
    }

    #[test]
    fn paths_are_relative_to_working_directory() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(path(&here.join("runs/a")), "runs/a");
        assert_eq!(path(&here), here.display().to_string());
        assert_eq!(path(Path::new("/elsewhere")), "/elsewhere");
        assert_eq!([0, 1, 2].map(|n| plural(n, "step")), ["0 steps", "1 step", "2 steps"]);
    }
}
