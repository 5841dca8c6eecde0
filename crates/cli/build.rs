//! Passes the text of `levade --version` to the binary: the release, the commit and the platform.
//!
//! `LEVADE_COMMIT` names the commit if there is no repository, as in a source package.

use std::env::var;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=LEVADE_COMMIT");
    // Each commit, checkout and merge adds a line to the log of HEAD. If the file were missing,
    // Cargo would run this script on every build.
    if let Some(log) =
        run_git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists())
    {
        println!("cargo::rerun-if-changed={log}");
    }
    let commit = var("LEVADE_COMMIT").ok().or_else(|| run_git(&["rev-parse", "--short=8", "HEAD"]));
    let commit = commit.map_or("unknown commit".to_owned(), |commit| format!("commit {commit}"));
    let cargo = |name: &str| var(name).unwrap_or_default();
    println!(
        "cargo::rustc-env=LEVADE_VERSION={} ({commit}, {} {})",
        cargo("CARGO_PKG_VERSION"),
        cargo("CARGO_CFG_TARGET_OS"),
        cargo("CARGO_CFG_TARGET_ARCH")
    );
}

/// Returns the output of `git` with these arguments, or `None` if `git` fails or is not installed.
fn run_git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .args(arguments)
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned()).filter(|text| !text.is_empty())
}
