//! Implements `levade keep`, the supervisor process between this program and a program that it
//! starts.
//!
//! The command is hidden: this program calls it, and users do not.

use std::process::ExitCode;

#[cfg(unix)]
pub fn main() -> ExitCode {
    levade_process::supervise()
}

#[cfg(not(unix))]
pub fn main() -> ExitCode {
    eprintln!("programs can be supervised on Unix only");
    ExitCode::FAILURE
}
