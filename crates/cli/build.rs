//! Passes the commit to the binary, for `levade --version`.
//!
//! `LEVADE_COMMIT` names the commit when there is no repository, as in a source package.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=LEVADE_COMMIT");
    let commit = std::env::var("LEVADE_COMMIT").ok().or_else(|| git(&["rev-parse", "--short=8", "HEAD"]));
    // Each commit, checkout and merge adds a line to the log of HEAD.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists()) {
        println!("cargo::rerun-if-changed={log}");
    } else {
        println!("cargo::rerun-if-changed=build.rs");
    }
    println!("cargo::rustc-env=LEVADE_COMMIT={}", commit.unwrap_or_default());
}

/// Returns what `git` prints, or `None` if it fails or is not installed.
fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned()).filter(|text| !text.is_empty())
}
