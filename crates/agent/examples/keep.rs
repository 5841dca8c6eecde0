//! Standalone supervisor process, which tests of tools start.

use std::process::ExitCode;

fn main() -> ExitCode {
    levade_process::supervise()
}
