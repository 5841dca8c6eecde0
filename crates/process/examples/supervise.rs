//! Runs only the supervisor process, which tests of this crate start.

use std::process::ExitCode;

fn main() -> ExitCode {
    levade_process::supervise()
}
