//! The keeper of programs alone, as tests of tools start it.

use std::process::ExitCode;

fn main() -> ExitCode {
    dressage_agent::program::keeper::keep()
}
