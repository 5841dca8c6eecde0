//! The supervisor process alone, as tests of tools start it.

use std::process::ExitCode;

fn main() -> ExitCode {
    levade_process::supervise()
}
