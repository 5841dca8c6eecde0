//! Processes that serve a run: their ports, logs and exit.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::net::{IpAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use tokio::task::JoinHandle;

/// A process that exits when its last owner drops it.
pub struct Gone {
    /// Name in messages.
    pub name: String,
    /// Task that ends once all processes of the program have exited.
    pub ended: JoinHandle<()>,
}

/// Waits until processes that were dropped have exited, because later processes need their memory.
/// Returns the names of those that are still running after `longest`.
pub async fn all_gone(programs: Vec<Gone>, longest: Duration) -> Vec<String> {
    let until = tokio::time::Instant::now() + longest;
    let mut left = Vec::new();
    for Gone { name, ended } in programs {
        if tokio::time::timeout_at(until, ended).await.is_err() {
            left.push(name);
        }
    }
    left
}

/// Returns a port of `address` on which no process listens now.
pub fn free_port(address: impl Into<IpAddr>) -> io::Result<u16> {
    Ok(TcpListener::bind((address.into(), 0))?.local_addr()?.port())
}

/// Opens the log of a process for appending. Creates it if it does not exist.
pub fn log(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// Returns the last `bytes` bytes of a log, or an empty string if the log cannot be read.
pub fn end_of(log: &Path, bytes: u64) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
        let mut end = Vec::new();
        file.read_to_end(&mut end)?;
        Ok(end)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn all_gone_names_running_programs_after_timeout() {
        let of = |name: &str, seconds| Gone {
            name: name.into(),
            ended: tokio::spawn(tokio::time::sleep(Duration::from_secs(seconds))),
        };
        let programs = vec![of("quick", 1), of("slow", 30), of("late", 9)];
        let begun = tokio::time::Instant::now();
        assert_eq!(all_gone(programs, Duration::from_secs(20)).await, ["slow"]);
        assert_eq!(begun.elapsed().as_secs(), 20);
    }

    #[test]
    fn log_appends_and_end_is_read() {
        use std::io::Write;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        assert_eq!(end_of(&path, 4), "");
        write!(log(&path).unwrap(), "begins, ").unwrap();
        write!(log(&path).unwrap(), "ends").unwrap();
        assert_eq!(end_of(&path, 4), "ends");
        assert_eq!(end_of(&path, 100), "begins, ends");
    }
}
