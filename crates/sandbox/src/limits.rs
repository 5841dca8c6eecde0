//! Limits of a run.

use serde::{Deserialize, Serialize};

/// Most that a run may take of each thing.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Longest time of a run, or of a cell of a session, in seconds by the clock.
    pub seconds: f64,
    /// Memory, in MiB: of each process and, watched from outside, of all together.
    pub memory_mb: u64,
    /// Processes and threads at once.
    pub processes: u32,
    /// Descriptors that a process may hold.
    pub open_files: u32,
    /// Size of a file, in MiB.
    pub file_mb: u64,
    /// Size of all files, in MiB; they are in memory.
    pub disk_mb: u64,
    /// Number of files and folders.
    pub files: u64,
    /// Bytes of standard output, and as many of standard error, that are kept: the beginning and the end.
    pub output_bytes: usize,
    /// Size of all files that are handed out, in MiB.
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

/// Longest time that can be asked for, in seconds: a day.
const LONGEST: f64 = 86400.0;

/// Least memory with which an interpreter starts, in MiB.
const LEAST_MEMORY: u64 = 32;

impl Limits {
    /// Whether the limits can be held.
    ///
    /// # Errors
    /// Names the limit, its value and what it must be.
    pub fn check(&self) -> Result<(), String> {
        if !(self.seconds > 0.0 && self.seconds <= LONGEST) {
            return Err(format!("`seconds` is {}, but must be above 0 and at most {LONGEST}", self.seconds));
        }
        if self.memory_mb < LEAST_MEMORY || self.memory_mb > 1 << 24 {
            return Err(format!(
                "`memory_mb` is {}, but must be from {LEAST_MEMORY} to {}",
                self.memory_mb,
                1 << 24
            ));
        }
        for (name, value, least) in [
            ("processes", u64::from(self.processes), 1),
            ("open_files", u64::from(self.open_files), 16),
            ("file_mb", self.file_mb, 1),
            ("disk_mb", self.disk_mb, 1),
            ("files", self.files, 16),
            ("output_bytes", self.output_bytes as u64, 64),
            ("fetch_mb", self.fetch_mb, 0),
        ] {
            if value < least || value > 1 << 30 {
                return Err(format!("`{name}` is {value}, but must be from {least} to {}", 1 << 30));
            }
        }
        Ok(())
    }
}
