//! Resource limits of a run.

use serde::{Deserialize, Serialize};

/// Resource limits of a run or of a session.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Maximum wall-clock time of a run, or of each cell of a session, in seconds.
    pub seconds: f64,
    /// Maximum memory, in MiB. The limit applies to each process and, by observation from outside,
    /// to all processes together.
    pub memory_mb: u64,
    /// Maximum number of processes and threads at the same time.
    pub processes: u32,
    /// Maximum number of open file descriptors of a process.
    pub open_files: u32,
    /// Maximum size of a file, in MiB.
    pub file_mb: u64,
    /// Maximum total size of all files, in MiB. The files are kept in memory.
    pub disk_mb: u64,
    /// Maximum number of files and directories.
    pub files: u64,
    /// Maximum number of bytes that are kept of standard output; as many are kept of standard
    /// error. Of a longer output, half of these bytes are from its start and half from its end.
    pub output_bytes: usize,
    /// Maximum total size of the files that are returned after a run, in MiB.
    pub fetch_mb: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            seconds: 10.0,
            memory_mb: 1024,
            processes: 64,
            open_files: 256,
            file_mb: 64,
            disk_mb: 128,
            files: 4096,
            output_bytes: 64 << 10,
            fetch_mb: 32,
        }
    }
}

/// Maximum value of the limit `seconds`: one day.
const MAX_SECONDS: f64 = 86400.0;

/// Minimum memory limit with which an interpreter can start, in MiB.
const MIN_MEMORY: u64 = 32;

impl Limits {
    /// Checks that each limit is within its permitted range.
    ///
    /// # Errors
    /// Returns an error with the name, value and range of the first limit that is out of range.
    pub fn check(&self) -> Result<(), String> {
        if !(self.seconds > 0.0 && self.seconds <= MAX_SECONDS) {
            return Err(format!(
                "the limit `seconds` is {}, but it must be above 0 and at most {MAX_SECONDS}",
                self.seconds
            ));
        }
        if self.memory_mb < MIN_MEMORY || self.memory_mb > 1 << 24 {
            return Err(format!(
                "the limit `memory_mb` is {}, but it must be from {MIN_MEMORY} to {}",
                self.memory_mb,
                1 << 24
            ));
        }
        for (name, value, minimum) in [
            ("processes", u64::from(self.processes), 1),
            ("open_files", u64::from(self.open_files), 16),
            ("file_mb", self.file_mb, 1),
            ("disk_mb", self.disk_mb, 1),
            ("files", self.files, 16),
            ("output_bytes", self.output_bytes as u64, 64),
            ("fetch_mb", self.fetch_mb, 0),
        ] {
            if value < minimum || value > 1 << 30 {
                return Err(format!(
                    "the limit `{name}` is {value}, but it must be from {minimum} to {}",
                    1 << 30
                ));
            }
        }
        Ok(())
    }
}
