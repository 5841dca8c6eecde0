//! The supervisor process alone, as tests of this crate start it.

use std::process::ExitCode;

fn main() -> ExitCode {
    levade_process::supervise()
}
