//! Supervisor process for the tests of tools.

use std::process::ExitCode;

fn main() -> ExitCode {
    levade_process::supervise()
}
