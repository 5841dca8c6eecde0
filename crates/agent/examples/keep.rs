//! The keeper of programs alone, as tests of tools start it.

use std::process::ExitCode;

fn main() -> ExitCode {
    levade_agent::program::keeper::keep()
}
