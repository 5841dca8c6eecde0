//! `levade keep`: stands between this program and one that it starts. Nobody calls it by hand.

use std::process::ExitCode;

#[cfg(unix)]
pub fn main() -> ExitCode {
    levade_process::supervise()
}

#[cfg(not(unix))]
pub fn main() -> ExitCode {
    eprintln!("programs can be kept on Unix only");
    ExitCode::FAILURE
}
